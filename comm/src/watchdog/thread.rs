//! The watchdog's thread (`rs-watchdog`), one in a process. It starts with the first watched communicator and ends with the
//! last one.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

use ringsight_comm_base::{
    fork::{self, PerProcess},
    log, process,
    sync::lock,
    threads::{self, Tended},
};

use super::{
    Watch,
    rules::evidence::{BlockingOperation, OperationRun},
    sampling::DurationSampler,
    settings::SHORTEST_INTERVAL,
};
use crate::observe;

/// The watches of this process, and the thread.
#[derive(Default)]
struct WatchdogThread {
    watches: Mutex<Tended<Watch>>,
    /// Notified when the list of watches changes.
    changed: Condvar,
}

static THREAD: PerProcess<WatchdogThread> = PerProcess::new();

/// A watch that the thread looks after until this is dropped.
pub(crate) struct RegisteredWatch {
    watch: Arc<Watch>,
    /// See [`fork::generation`].
    fork: u32,
}

impl RegisteredWatch {
    /// Adds a watch to the thread's list. If no thread can be started, a warning is logged and nothing is watched.
    pub(crate) fn new(watch: Arc<Watch>) -> Self {
        let thread = THREAD.get();
        let entered = lock(&thread.watches).enter(Arc::downgrade(&watch), "rs-watchdog", || thread.run());
        if let Err(error) = entered {
            tracing::warn!(target: log::INIT, "no thread for the watchdog: {error}");
        }
        thread.changed.notify_all();
        Self {
            watch,
            fork: fork::generation(),
        }
    }
}

impl std::ops::Deref for RegisteredWatch {
    type Target = Arc<Watch>;

    fn deref(&self) -> &Arc<Watch> {
        &self.watch
    }
}

impl Drop for RegisteredWatch {
    fn drop(&mut self) {
        if self.fork != fork::generation() {
            return; // the parent's
        }
        let thread = THREAD.get();
        let last = lock(&thread.watches).leave(Arc::as_ptr(&self.watch));
        if let Some(handle) = last {
            thread.changed.notify_all();
            threads::join(handle);
        }
    }
}

impl WatchdogThread {
    /// Goes round all watches until there are none.
    fn run(&self) {
        let mut sampler = DurationSampler::default();
        let mut watches = lock(&self.watches);
        while watches.is_tended_by_this_thread() {
            let present = watches.members();
            // Not under the lock: services ask for operations in progress, and communicators come and go.
            drop(watches);
            let is_debugged = process::is_traced();
            // First: thresholds follow from the durations.
            sampler.sample(&present, observe::now_ns());
            let rest = present.iter().map(|watch| watch.round(is_debugged)).min();
            drop(present);
            watches = lock(&self.watches);
            if watches.is_tended_by_this_thread() {
                let rest = rest.unwrap_or(Duration::from_secs(1)).max(SHORTEST_INTERVAL);
                watches = self
                    .changed
                    .wait_timeout(watches, rest)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
            }
        }
    }
}

/// The watches of the rank that `watch` is of, in the order in which their communicators were made. Ranks that are threads
/// of one process and share a device cannot be told apart across communicators: there it is `watch` alone.
pub(super) fn watches_of_rank(watch: &Watch) -> Vec<Arc<Watch>> {
    let mut watches = lock(&THREAD.get().watches).members();
    watches.retain(|other| other.device == watch.device);
    if watches.iter().any(|other| other.shares_device) {
        watches.retain(|other| std::ptr::eq(&raw const **other, watch));
    }
    watches
}

/// The operation that this rank has been in for longest, on any of its communicators, other than `except` of `watch`.
pub(super) fn longest_in_progress(watch: &Watch, except: OperationRun) -> Option<BlockingOperation> {
    let now = observe::now_ns();
    watches_of_rank(watch)
        .iter()
        .filter_map(|other| {
            let op = other.first_in_progress((other.comm == watch.comm).then_some(except))?;
            Some(BlockingOperation {
                comm: other.comm,
                run: op.run,
                since_ns: now.saturating_sub(op.start_ns),
                awaits_asker_ns: None,
            })
        })
        .max_by_key(|blocking| blocking.since_ns)
}
