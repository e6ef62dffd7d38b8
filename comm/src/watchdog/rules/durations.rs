//! How long operations usually take, and the threshold that follows from it.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use crate::{progress::DURATIONS_KEPT as KEPT, watchdog::settings::AdaptiveThreshold};

/// The fewest operations of a kind that make a usual duration. Of more operations the latest [`KEPT`] count.
const ENOUGH: usize = 8;
/// Kinds that are remembered at a time. A program whose sizes never repeat has no usual durations.
const KINDS: usize = 1024;

/// Operations of a kind take equally long: the function ([`ringsight_records::Function`]) and its bytes.
pub(crate) type OperationKind = (u8, u64);

/// One completed operation: its kind, and when the device started and ended it (`CLOCK_MONOTONIC` nanoseconds).
pub(crate) type CompletedOperation = (OperationKind, u64, u64);

/// The durations of the operations that completed last, by kind.
#[derive(Debug, Default)]
pub(crate) struct DurationHistory {
    kinds: HashMap<OperationKind, VecDeque<u64>>,
    /// The latest end among the operations that were added, `CLOCK_MONOTONIC` nanoseconds.
    until_ns: u64,
}

impl DurationHistory {
    /// Adds those of the operations that ended since the last call.
    pub(crate) fn add_completed(&mut self, operations: impl Iterator<Item = CompletedOperation>) {
        let known_until_ns = self.until_ns;
        for (kind, start_ns, end_ns) in operations {
            if start_ns == 0 || end_ns < start_ns || end_ns <= known_until_ns {
                continue;
            }
            self.until_ns = self.until_ns.max(end_ns);
            self.add(kind, end_ns - start_ns);
        }
    }

    /// Adds the duration of one operation.
    pub(crate) fn add(&mut self, kind: OperationKind, ns: u64) {
        if self.kinds.len() >= KINDS && !self.kinds.contains_key(&kind) {
            self.kinds.clear();
        }
        let durations = self.kinds.entry(kind).or_default();
        if durations.len() == KEPT {
            durations.pop_front();
        }
        durations.push_back(ns);
    }

    /// How long an operation of a kind may be in progress: `adaptive.factor` times the median of its kind, at least
    /// `adaptive.floor` and at most `fixed`. A kind with too few operations has `fixed`.
    pub(super) fn threshold(
        &self,
        kind: OperationKind,
        adaptive: &AdaptiveThreshold,
        fixed: Duration,
    ) -> Duration {
        let Some(durations) = self
            .kinds
            .get(&kind)
            .filter(|durations| durations.len() >= ENOUGH)
        else {
            return fixed;
        };
        let mut durations: Vec<u64> = durations.iter().copied().collect();
        let middle = durations.len() / 2;
        let (_, median, _) = durations.select_nth_unstable(middle);
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
    const ADAPTIVE: AdaptiveThreshold = AdaptiveThreshold {
        factor: 20,
        floor: Duration::from_millis(100),
    };
    const SMALL: OperationKind = (Function::AllReduce as u8, 8);

    /// Adds `count` operations that run one after another, each for `took_ms`.
    fn add(history: &mut DurationHistory, kind: OperationKind, count: u64, took_ms: u64) {
        let start = history.until_ns + 1;
        let took = took_ms * MS;
        let operations = (0..count).map(|n| (kind, start + n * took, start + (n + 1) * took));
        history.add_completed(operations);
    }

    fn threshold_ms(history: &DurationHistory, kind: OperationKind) -> u128 {
        history.threshold(kind, &ADAPTIVE, FIXED).as_millis()
    }

    #[test]
    fn a_usually_fast_operation_has_a_threshold_between_floor_and_fixed() {
        let mut history = DurationHistory::default();
        assert_eq!(threshold_ms(&history, SMALL), 2000, "no operation has completed");
        add(&mut history, SMALL, ENOUGH as u64 - 1, 10);
        assert_eq!(threshold_ms(&history, SMALL), 2000, "too few have");
        add(&mut history, SMALL, 1, 10);
        assert_eq!(threshold_ms(&history, SMALL), 200);
        // One operation that waited for a late rank does not move the median.
        add(&mut history, SMALL, 1, 60_000);
        assert_eq!(threshold_ms(&history, SMALL), 200);
        // Another size and another function are other kinds.
        assert_eq!(threshold_ms(&history, (Function::AllReduce as u8, 16)), 2000);
        assert_eq!(threshold_ms(&history, (Function::Broadcast as u8, 8)), 2000);
        add(&mut history, SMALL, KEPT as u64, 1);
        assert_eq!(threshold_ms(&history, SMALL), 100, "the floor");
        add(&mut history, SMALL, KEPT as u64, 500);
        assert_eq!(
            threshold_ms(&history, SMALL),
            2000,
            "never more than the fixed one"
        );
    }

    #[test]
    fn an_operation_counts_once_and_one_without_times_never() {
        let mut history = DurationHistory::default();
        let same = [(SMALL, 5 * MS, 6 * MS)];
        for _ in 0..ENOUGH {
            history.add_completed(same.into_iter());
        }
        history.add_completed([(SMALL, 0, 7 * MS), (SMALL, 9 * MS, 8 * MS)].into_iter());
        assert_eq!(history.kinds[&SMALL].len(), 1);
        for bytes in 0..2 * KINDS as u64 {
            add(&mut history, (Function::Send as u8, bytes), 1, 1);
        }
        assert!(history.kinds.len() <= KINDS);
    }
}
