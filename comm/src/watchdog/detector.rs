//! The thread that looks, one in a process: it begins with the first communicator and ends with the last.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{HeldUp, Run, Watch, settings::SHORTEST};
use crate::{
    communicator::lock,
    log, observe,
    threads::{self, PerProcess},
};

/// The watches of this process, and the thread.
#[derive(Default)]
struct Detector {
    state: Mutex<State>,
    /// Told when the state changes.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    watches: Vec<Weak<Watch>>,
    thread: Option<JoinHandle<()>>,
}

static CURRENT: PerProcess<Detector> = PerProcess::new();

fn current() -> &'static Detector {
    CURRENT.get()
}

/// A watch that the thread looks at until this is dropped.
pub(crate) struct Detected {
    watch: Arc<Watch>,
    /// See [`observe::fork_generation`].
    fork: u32,
}

impl Detected {
    /// Enters a watch. Without a thread, which is warned of, nothing is watched.
    pub(crate) fn new(watch: Arc<Watch>) -> Self {
        let detector = current();
        let mut state = lock(&detector.state);
        state.watches.push(Arc::downgrade(&watch));
        if state.thread.is_none() {
            let started = thread::Builder::new()
                .name("rs-watchdog".into())
                .stack_size(256 << 10)
                .spawn(|| detector.run());
            match started {
                Ok(thread) => state.thread = Some(thread),
                Err(error) => {
                    tracing::warn!(target: log::INIT, "no thread for the watchdog: {error}");
                }
            }
        } else {
            detector.changed.notify_all();
        }
        Self {
            watch,
            fork: observe::fork_generation(),
        }
    }
}

impl std::ops::Deref for Detected {
    type Target = Arc<Watch>;

    fn deref(&self) -> &Arc<Watch> {
        &self.watch
    }
}

impl Drop for Detected {
    fn drop(&mut self) {
        if self.fork != observe::fork_generation() {
            return; // the parent's
        }
        let detector = current();
        let mut state = lock(&detector.state);
        state
            .watches
            .retain(|watch| !std::ptr::eq(watch.as_ptr(), Arc::as_ptr(&self.watch)));
        if !state.watches.is_empty() {
            return;
        }
        let thread = state.thread.take();
        drop(state);
        detector.changed.notify_all();
        // The last owner of a communicator may be the thread itself.
        if let Some(thread) = thread.filter(|thread| !threads::is_current(thread)) {
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

impl Detector {
    /// Looks until there is nothing left to look at.
    fn run(&self) {
        let me = thread::current().id();
        let mut state = lock(&self.state);
        loop {
            // Another thread may have been started since this one was told to end.
            let mine = state
                .thread
                .as_ref()
                .is_some_and(|thread| thread.thread().id() == me);
            if !mine {
                return;
            }
            let watches: Vec<Arc<Watch>> = state.watches.iter().filter_map(Weak::upgrade).collect();
            // Not under the lock: services ask for what is in progress, and communicators come and go.
            drop(state);
            let rest = watches.iter().map(|watch| watch.look()).min();
            drop(watches);
            state = lock(&self.state);
            let mine = state
                .thread
                .as_ref()
                .is_some_and(|thread| thread.thread().id() == me);
            if mine {
                let rest = rest.unwrap_or(Duration::from_secs(1)).max(SHORTEST);
                state = self
                    .changed
                    .wait_timeout(state, rest)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
    }
}

/// The watches of a device, in the order in which their communicators were made.
pub(super) fn on_device(device: i32) -> Vec<Arc<Watch>> {
    lock(&current().state)
        .watches
        .iter()
        .filter_map(Weak::upgrade)
        .filter(|watch| watch.device == device)
        .collect()
}

/// The operation that has kept a device for longest, on any communicator of this process, other than `but`.
pub(super) fn oldest_in_progress(device: i32, but: (u64, Run)) -> Option<HeldUp> {
    let now = observe::now_ns();
    on_device(device)
        .iter()
        .filter_map(|watch| {
            let op = watch.oldest((watch.comm == but.0).then_some(but.1))?;
            Some(HeldUp {
                comm: watch.comm,
                run: op.run,
                since_ns: now.saturating_sub(op.start_ns),
            })
        })
        .max_by_key(|held| held.since_ns)
}
