//! Operations that the device asks for: what is asked is read by the progress thread, since no event tells of what a device
//! writes.

use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use super::ProxyOp;

/// How long it is not looked for requests, by how long ago the last one was: soon after one the next is likely. What a request
/// may wait for is small beside that; the longest pause is for jobs that stand still.
const PAUSES: [(Duration, Duration); 2] = [
    (Duration::from_millis(20), Duration::from_micros(50)),
    (Duration::from_secs(1), Duration::from_millis(1)),
];
const LONGEST: Duration = Duration::from_millis(5);

/// Who is asked by the device.
pub(crate) trait Requests: Send + Sync {
    /// Gives the operations that have been asked for since, in their order; [`Requests::settle`] follows.
    ///
    /// # Errors
    /// Requests were lost: the communicator of this id cannot go on, for this reason.
    fn take(&self, post: &mut dyn FnMut(ProxyOp)) -> Result<(), (u64, String)>;

    /// What was taken is in its place: nothing posted from now on comes before it.
    fn settle(&self);

    /// Whether there may be requests.
    fn is_expected(&self) -> bool;

    /// Whether there are any now.
    fn is_asked(&self) -> bool;
}

/// All that the progress thread looks at.
#[derive(Default)]
pub(super) struct Sources {
    all: Vec<Weak<dyn Requests>>,
    /// When there was a request.
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

    /// As [`Requests::take`], of all; what could not be given.
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

    pub(super) fn is_asked(&self) -> bool {
        self.present().any(|source| source.is_asked())
    }

    /// For how long it need not be looked; `None`: until somebody says so.
    pub(super) fn rest(&self) -> Option<Duration> {
        if !self.present().any(|source| source.is_expected()) {
            return None;
        }
        let since = self.last.map_or(Duration::MAX, |last| last.elapsed());
        let pause = PAUSES.iter().find(|(until, _)| since < *until);
        Some(pause.map_or(LONGEST, |(_, pause)| *pause))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// Has nothing to give.
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
    fn nobody_is_looked_at_who_expects_nothing_or_is_gone() {
        let mut sources = Sources::default();
        assert_eq!(sources.rest(), None);
        let quiet = Arc::new(Quiet(AtomicBool::new(false)));
        let weak = Arc::downgrade(&quiet);
        sources.add(weak);
        assert_eq!(sources.rest(), None);
        assert_eq!(sources.take(|_| ()), []);
        quiet.0.store(true, Ordering::Relaxed);
        assert_eq!(sources.rest(), Some(LONGEST));
        assert_eq!(sources.take(|_| ()), [(7, "lost".into())]);
        drop(quiet);
        assert_eq!(sources.rest(), None);
    }
}
