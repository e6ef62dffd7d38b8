//! How long the replays of a captured operation took.

use std::sync::atomic::{AtomicU64, Ordering};

/// Replays that are kept: as many as count for what is usual.
pub(crate) const DURATIONS_KEPT: usize = 32;

/// The latest times; written by whoever completes a replay, one after another, and taken by one reader.
#[derive(Debug, Default)]
pub(super) struct Durations {
    latest: [AtomicU64; DURATIONS_KEPT],
    /// How many have been added, ever.
    added: AtomicU64,
    /// How many of these the reader has had.
    taken: AtomicU64,
}

impl Durations {
    pub(super) fn add(&self, ns: u64) {
        // Relaxed: one writer at a time, with the device's ordering between them.
        let added = self.added.load(Ordering::Relaxed);
        self.latest[added as usize % DURATIONS_KEPT].store(ns, Ordering::Relaxed);
        // Release: pairs with `take`, which finds as many as are counted.
        self.added.store(added + 1, Ordering::Release);
    }

    /// Those that were added since the last time, oldest first, as far as they are kept. One that is replaced meanwhile comes as the one that
    /// replaces it, which comes again the next time: it is a time of the same operation.
    pub(super) fn take(&self) -> Vec<u64> {
        let added = self.added.load(Ordering::Acquire);
        let taken = self.taken.swap(added, Ordering::Relaxed);
        (taken.max(added.saturating_sub(DURATIONS_KEPT as u64))..added)
            .map(|number| self.latest[number as usize % DURATIONS_KEPT].load(Ordering::Relaxed))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_taken_once_and_the_latest_are_kept() {
        let durations = Durations::default();
        assert!(durations.take().is_empty());
        (1..=3).for_each(|ns| durations.add(ns));
        assert_eq!(durations.take(), [1, 2, 3]);
        assert!(durations.take().is_empty());
        (4..=100).for_each(|ns| durations.add(ns));
        assert_eq!(durations.take(), Vec::from_iter(69..=100));
        assert!(durations.take().is_empty());
    }
}
