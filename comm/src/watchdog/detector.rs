//! The thread that looks, one in a process: it begins with the first communicator and ends with the last.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use super::{HeldUp, Run, Watch, learning::Learning, settings::SHORTEST};
use ringsight_comm_base::fork::PerProcess;

use crate::{
    communicator::lock,
    log, observe, process,
    threads::{self, Tended},
};

/// The watches of this process, and the thread.
#[derive(Default)]
struct Detector {
    watches: Mutex<Tended<Watch>>,
    /// Told when these change.
    changed: Condvar,
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
        let entered = lock(&detector.watches).enter(Arc::downgrade(&watch), "rs-watchdog", || detector.run());
        if let Err(error) = entered {
            tracing::warn!(target: log::INIT, "no thread for the watchdog: {error}");
        }
        detector.changed.notify_all();
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
        let thread = lock(&detector.watches).leave(Arc::as_ptr(&self.watch));
        if let Some(thread) = thread {
            detector.changed.notify_all();
            threads::join(thread);
        }
    }
}

impl Detector {
    /// Looks until there is nothing left to look at.
    fn run(&self) {
        let mut learning = Learning::default();
        let mut watches = lock(&self.watches);
        while watches.is_tended_by_this_thread() {
            let present = watches.members();
            // Not under the lock: services ask for what is in progress, and communicators come and go.
            drop(watches);
            let traced = process::is_traced();
            // Before they look, by what they know.
            learning.go_on(&present);
            let rest = present.iter().map(|watch| watch.look(traced)).min();
            drop(present);
            watches = lock(&self.watches);
            if watches.is_tended_by_this_thread() {
                let rest = rest.unwrap_or(Duration::from_secs(1)).max(SHORTEST);
                watches = self
                    .changed
                    .wait_timeout(watches, rest)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
    }
}

/// The watches of the rank that this one is of, in the order in which their communicators were made. Ranks that are threads of this
/// process and share a device cannot be told apart from one communicator to another: there it is this one alone.
pub(super) fn of_rank(watch: &Watch) -> Vec<Arc<Watch>> {
    let mut watches = lock(&current().watches).members();
    watches.retain(|other| other.device == watch.device);
    if watches.iter().any(|other| other.shares_device) {
        watches.retain(|other| std::ptr::eq(&raw const **other, watch));
    }
    watches
}

/// The operation that has kept a rank for longest, on any of its communicators, other than `but` of this one.
pub(super) fn oldest_in_progress(watch: &Watch, but: Run) -> Option<HeldUp> {
    let now = observe::now_ns();
    of_rank(watch)
        .iter()
        .filter_map(|other| {
            let op = other.oldest((other.comm == watch.comm).then_some(but))?;
            Some(HeldUp {
                comm: other.comm,
                run: op.run,
                since_ns: now.saturating_sub(op.start_ns),
                bars_ns: None,
            })
        })
        .max_by_key(|held| held.since_ns)
}
