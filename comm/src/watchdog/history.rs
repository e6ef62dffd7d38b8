//! How long operations of a communicator usually take.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::settings::Adaptive;
use crate::progress::DURATIONS_KEPT as KEPT;

/// The fewest operations of a kind of which something can be told; of more the latest [`KEPT`] count.
const ENOUGH: usize = 8;
/// Kinds that are known at the same time: a program whose sizes never repeat has nothing that is usual.
const KINDS: usize = 1024;

/// What is done ([`ringsight_records::Function`]), and its bytes.
pub(super) type OperationKind = (u8, u64);

/// Times of the operations that were done last.
#[derive(Debug, Default)]
pub(super) struct History {
    kinds: HashMap<OperationKind, VecDeque<u64>>,
    /// Until when operations that ended are known, `CLOCK_MONOTONIC` nanoseconds.
    until_ns: u64,
}

impl History {
    /// Learns of operations that have been on the device: their kinds, and when they started and ended. Those that are known
    /// may be among them.
    pub(super) fn learn(&mut self, operations: impl Iterator<Item = (OperationKind, u64, u64)>) {
        let known = self.until_ns;
        for (kind, start_ns, end_ns) in operations {
            if start_ns == 0 || end_ns < start_ns || end_ns <= known {
                continue;
            }
            self.until_ns = self.until_ns.max(end_ns);
            self.add(kind, end_ns - start_ns);
        }
    }

    /// Learns of an operation that took so long, and is not known.
    pub(super) fn add(&mut self, kind: OperationKind, ns: u64) {
        if self.kinds.len() >= KINDS && !self.kinds.contains_key(&kind) {
            self.kinds.clear();
        }
        let times = self.kinds.entry(kind).or_default();
        if times.len() == KEPT {
            times.pop_front();
        }
        times.push_back(ns);
    }

    /// How long an operation may be in progress: so many times as long as the median of its like, but not shorter than the floor
    /// and never longer than `fixed`, which counts where little is known.
    pub(super) fn threshold(&self, kind: OperationKind, adaptive: &Adaptive, fixed: Duration) -> Duration {
        let Some(times) = self.kinds.get(&kind).filter(|times| times.len() >= ENOUGH) else {
            return fixed;
        };
        let mut times: Vec<u64> = times.iter().copied().collect();
        let middle = times.len() / 2;
        let (_, median, _) = times.select_nth_unstable(middle);
        let usual = median.saturating_mul(adaptive.factor.into());
        Duration::from_nanos(usual).max(adaptive.floor).min(fixed)
    }
}

#[cfg(test)]
mod tests {
    use ringsight_records::Function;

    use super::*;

    const MS: u64 = 1_000_000;
    const FIXED: Duration = Duration::from_secs(2);
    const ADAPTIVE: Adaptive = Adaptive {
        factor: 20,
        floor: Duration::from_millis(100),
    };
    const SMALL: OperationKind = (Function::AllReduce as u8, 8);

    /// So many operations one after another, each of which takes so long.
    fn learn(history: &mut History, kind: OperationKind, count: u64, took_ms: u64) {
        let start = history.until_ns + 1;
        let took = took_ms * MS;
        let operations = (0..count).map(|n| (kind, start + n * took, start + (n + 1) * took));
        history.learn(operations);
    }

    fn threshold_ms(history: &History, kind: OperationKind) -> u128 {
        history.threshold(kind, &ADAPTIVE, FIXED).as_millis()
    }

    #[test]
    fn what_is_usually_fast_is_asked_about_early_between_floor_and_fixed() {
        let mut history = History::default();
        assert_eq!(threshold_ms(&history, SMALL), 2000, "nothing is known");
        learn(&mut history, SMALL, ENOUGH as u64 - 1, 10);
        assert_eq!(threshold_ms(&history, SMALL), 2000, "too little is");
        learn(&mut history, SMALL, 1, 10);
        assert_eq!(threshold_ms(&history, SMALL), 200);
        // One that waited for a rank is not usual.
        learn(&mut history, SMALL, 1, 60_000);
        assert_eq!(threshold_ms(&history, SMALL), 200);
        // Another size, another function.
        assert_eq!(threshold_ms(&history, (Function::AllReduce as u8, 16)), 2000);
        assert_eq!(threshold_ms(&history, (Function::Broadcast as u8, 8)), 2000);
        learn(&mut history, SMALL, KEPT as u64, 1);
        assert_eq!(threshold_ms(&history, SMALL), 100, "the floor");
        learn(&mut history, SMALL, KEPT as u64, 500);
        assert_eq!(
            threshold_ms(&history, SMALL),
            2000,
            "never later than the fixed one"
        );
    }

    #[test]
    fn an_operation_counts_once_and_rubbish_never() {
        let mut history = History::default();
        let same = [(SMALL, 5 * MS, 6 * MS)];
        for _ in 0..ENOUGH {
            history.learn(same.into_iter());
        }
        history.learn([(SMALL, 0, 7 * MS), (SMALL, 9 * MS, 8 * MS)].into_iter());
        assert_eq!(history.kinds[&SMALL].len(), 1);
        for bytes in 0..2 * KINDS as u64 {
            learn(&mut history, (Function::Send as u8, bytes), 1, 1);
        }
        assert!(history.kinds.len() <= KINDS);
    }
}
