//! Who was late: pure functions over arrival times.
//!
//! Arrival is the moment when a rank's part of a collective began on its device. In a collective where no rank can finish
//! before all have started ([`Function::synchronises`]) the others wait for the last one, so a late arrival is what
//! made the operation long.

use ringsight_exporters::model::Culprit;
use ringsight_records::Function;

/// Default threshold: well above scheduling noise on a busy host, well below what a training step can hide.
pub const DEFAULT_THRESHOLD_NS: u64 = 15_000_000;

/// Whom the ranks of an operation waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitedFor {
    /// The rank.
    pub culprit: u32,
    /// How long the longest of the others waited, nanoseconds.
    pub waited_ns: u64,
    /// Until when, monotonic nanoseconds.
    pub until_ns: u64,
}

/// The median of `values`: of an even number of them the lower middle plus half the distance to the upper one.
/// `None` if there are none. Sorts `values`.
#[must_use]
pub fn median(values: &mut [u64]) -> Option<u64> {
    values.sort_unstable();
    let upper = *values.get(values.len() / 2)?;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    let lower = values[values.len() / 2 - 1];
    Some(lower + (upper - lower) / 2)
}

/// The arrivals of an operation's ranks, in order: of any of them the lag is known without looking at all others again.
#[derive(Clone, Debug, Default)]
pub struct Arrivals(Vec<u64>);

impl Arrivals {
    /// Takes the place of those before.
    pub fn set(&mut self, arrivals: impl Iterator<Item = u64>) {
        self.0.clear();
        self.0.extend(arrivals);
        self.0.sort_unstable();
    }

    /// The first of them, the last, and how long after the second last that came; `None` if there are fewer than two.
    #[must_use]
    pub fn ends(&self) -> Option<(u64, u64, u64)> {
        let [.., second, last] = self.0[..] else {
            return None;
        };
        Some((*self.0.first()?, last, last - second))
    }

    /// Lag of one of them: its arrival minus the median of the others; negative if it was early. 0 for a lone rank.
    #[must_use]
    pub fn lag_of(&self, arrival: u64) -> i64 {
        let Ok(own) = self.0.binary_search(&arrival) else {
            return 0;
        };
        let others = self.0.len() - 1;
        let other = |at: usize| {
            self.0
                .get(at + usize::from(at >= own))
                .copied()
                .unwrap_or(arrival)
        };
        let upper = other(others / 2);
        let median = if others % 2 == 1 {
            upper
        } else {
            let lower = other((others / 2).saturating_sub(1));
            lower + (upper - lower) / 2
        };
        if others == 0 {
            return 0;
        }
        arrival.wrapping_sub(median).cast_signed()
    }
}

/// The rank that everybody waited for: the last to arrive, if its lag reaches `threshold_ns` and the function makes the
/// others wait. `arrivals` are (rank, arrival in nanoseconds on one clock).
#[must_use]
pub fn culprit(function: Option<Function>, arrivals: &[(u32, u64)], threshold_ns: u64) -> Option<Culprit> {
    if arrivals.len() < 2 || !function.is_some_and(Function::synchronises) {
        return None;
    }
    // Of ranks that arrived at the same moment the lowest is named, whatever the order in which they were seen.
    let last = (0..arrivals.len()).max_by_key(|&i| (arrivals[i].1, std::cmp::Reverse(arrivals[i].0)))?;
    let mut others: Vec<u64> = arrivals
        .iter()
        .enumerate()
        .filter(|(i, _)| *i != last)
        .map(|(_, (_, arrival))| *arrival)
        .collect();
    let lag_ns = arrivals[last].1.saturating_sub(median(&mut others)?);
    (lag_ns >= threshold_ns).then_some(Culprit {
        rank: arrivals[last].0,
        lag_ns,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn names_the_late_rank_with_its_distance_from_the_others_median() {
        let arrivals = [(0, 100 * MS), (1, 101 * MS), (2, 160 * MS), (3, 103 * MS)];
        let culprit = culprit(Some(Function::AllReduce), &arrivals, 15 * MS).unwrap();
        assert_eq!((culprit.rank, culprit.lag_ns), (2, 59 * MS));
    }

    #[test]
    fn names_nobody_below_the_threshold_or_where_nobody_waits() {
        let arrivals = [(0, 0), (1, 14 * MS)];
        assert_eq!(culprit(Some(Function::AllReduce), &arrivals, 15 * MS), None);
        assert!(culprit(Some(Function::AllReduce), &arrivals, 14 * MS).is_some());
        let late = [(0, 0), (1, 500 * MS)];
        for function in [
            Function::Broadcast,
            Function::Send,
            Function::Recv,
            Function::Reduce,
        ] {
            assert_eq!(culprit(Some(function), &late, 15 * MS), None, "{function}");
        }
        assert_eq!(culprit(None, &late, 15 * MS), None);
        assert_eq!(culprit(Some(Function::AllReduce), &late[..1], 0), None);
    }

    #[test]
    fn two_late_ranks_of_four_the_later_is_named_against_the_middle() {
        let arrivals = [(0, 0), (1, 50 * MS), (2, 0), (3, 80 * MS)];
        let culprit = culprit(Some(Function::ReduceScatter), &arrivals, 15 * MS).unwrap();
        assert_eq!((culprit.rank, culprit.lag_ns), (3, 80 * MS));
    }

    proptest! {
        #[test]
        fn a_lag_is_against_the_median_of_the_others(arrivals in prop::collection::vec(0u64..20, 1..12)) {
            let mut all = Arrivals::default();
            all.set(arrivals.iter().copied());
            for (at, arrival) in arrivals.iter().enumerate() {
                let mut others = arrivals.clone();
                others.remove(at);
                let lag = median(&mut others).map_or(0, |others| arrival.wrapping_sub(others).cast_signed());
                prop_assert_eq!(all.lag_of(*arrival), lag);
            }
        }

        #[test]
        fn order_does_not_matter(mut arrivals in prop::collection::vec(0u64..1000, 2..12)) {
            let of = |a: &[u64]| {
                let mut ranked: Vec<_> = (0u32..).zip(a.iter().copied()).collect();
                let one = culprit(Some(Function::AllReduce), &ranked, 1);
                ranked.reverse();
                prop_assert_eq!(&one, &culprit(Some(Function::AllReduce), &ranked, 1));
                Ok(one)
            };
            let named = of(&arrivals)?;
            // The named rank's lag is what `lag_of` says.
            if let Some(culprit) = named {
                let mut all = Arrivals::default();
                all.set(arrivals.iter().copied());
                let lag = all.lag_of(arrivals[culprit.rank as usize]);
                prop_assert_eq!(lag, culprit.lag_ns.cast_signed());
            }
            // Equal arrivals name nobody.
            arrivals.fill(7);
            prop_assert_eq!(of(&arrivals)?, None);
        }
    }
}
