//! Operations that the device requests. The progress thread looks for requests, because no event reports what a device writes.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use crate::op::ProxyOp;

/// Pause between two looks for requests, by the time since the last request: another one is likely soon after it. The longest pause is for
/// jobs that stand still.
const PAUSES: [(Duration, Duration); 2] = [
    (Duration::from_millis(20), Duration::from_micros(50)),
    (Duration::from_secs(1), Duration::from_millis(1)),
];
const MAX_PAUSE: Duration = Duration::from_millis(5);

/// A source of operations that the device requests.
pub(crate) trait Requests: Send + Sync {
    /// Passes the operations that have been requested since the last call to `post`, in order. [`Requests::settle`] follows.
    ///
    /// # Errors
    /// Requests were lost: the communicator of this id cannot go on, for this reason.
    fn take(&self, post: &mut dyn FnMut(ProxyOp)) -> Result<(), (u64, String)>;

    /// The operations that were taken are in the queue: nothing posted from now on comes before them.
    fn settle(&self);

    /// Whether there may be requests.
    fn is_expected(&self) -> bool;

    /// Whether there are any now.
    fn is_asked(&self) -> bool;
}

/// All sources of the progress thread.
#[derive(Default)]
pub(super) struct Sources {
    all: Vec<Weak<dyn Requests>>,
    /// Time of the last request.
    last: Option<Instant>,
}

impl Sources {
    pub(super) fn add(&mut self, source: Weak<dyn Requests>) {
        self.all.retain(|source| source.strong_count() > 0);
        self.all.push(source);
    }

    fn present(&self) -> impl Iterator<Item = Arc<dyn Requests>> {
        self.all.iter().filter_map(Weak::upgrade)
    }

    /// [`Requests::take`] of all sources. Returns their errors.
    pub(super) fn take(&mut self, mut post: impl FnMut(ProxyOp)) -> Vec<(u64, String)> {
        let mut any = false;
        let mut post = |op| {
            any = true;
            post(op);
        };
        let failed = self
            .present()
            .filter(|source| source.is_expected())
            .filter_map(|source| source.take(&mut post).err())
            .collect();
        if any {
            self.last = Some(Instant::now());
        }
        failed
    }

    pub(super) fn settle(&self) {
        self.present().for_each(|source| source.settle());
    }

    /// Whether there are requests now.
    pub(super) fn has_requests(&self) -> bool {
        self.present().any(|source| source.is_asked())
    }

    /// How long the thread need not look for requests. `None`: no source expects any.
    pub(super) fn max_wait(&self) -> Option<Duration> {
        if !self.present().any(|source| source.is_expected()) {
            return None;
        }
        let since = self.last.map_or(Duration::MAX, |last| last.elapsed());
        let pause = PAUSES.iter().find(|(until, _)| since < *until);
        Some(pause.map_or(MAX_PAUSE, |(_, pause)| *pause))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A source without requests.
    struct Quiet(AtomicBool);

    impl Requests for Quiet {
        fn take(&self, _: &mut dyn FnMut(ProxyOp)) -> Result<(), (u64, String)> {
            Err((7, "lost".into()))
        }

        fn is_expected(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }

        fn settle(&self) {}

        fn is_asked(&self) -> bool {
            false
        }
    }

    #[test]
    fn sources_that_expect_nothing_or_are_gone_are_skipped() {
        let mut sources = Sources::default();
        assert_eq!(sources.max_wait(), None);
        let quiet = Arc::new(Quiet(AtomicBool::new(false)));
        let weak = Arc::downgrade(&quiet);
        sources.add(weak);
        assert_eq!(sources.max_wait(), None);
        assert_eq!(sources.take(|_| ()), []);
        quiet.0.store(true, Ordering::Relaxed);
        assert_eq!(sources.max_wait(), Some(MAX_PAUSE));
        assert_eq!(sources.take(|_| ()), [(7, "lost".into())]);
        drop(quiet);
        assert_eq!(sources.max_wait(), None);
    }
}
