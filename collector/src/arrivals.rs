//! Which rank the others waited for, also where this collector does not see that rank.
//!
//! | known of an operation | named |
//! |---|---|
//! | the arrivals of all its ranks, because this collector watches them all | the last one ([`lag::culprit`]) |
//! | a watched rank's library found out who arrived last ([`ringsight_records::Arrival`]) | that rank, whether or not it is watched here |
//! | neither | the last watched rank, if no rank that is not watched can have arrived later by the threshold; otherwise nobody, and [`Unnamed`] says so |
//!
//! No clock of another host is involved. The library's finding rests on ages: another rank says how long ago it arrived, and the
//! round trip of the question bounds how old that word is. So clocks that are set apart by any time change nothing.

use std::cmp::Reverse;

use ringsight_exporters::model::{Culprit, PeerWait, Unnamed};
use ringsight_records::{Arrival, Function};

use crate::{
    correlate::{RankOperation, instance::Instance},
    lag,
};

/// How it is known who is late.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The arrivals that are seen here.
    #[default]
    Arrivals,
    /// The library's finding.
    Library(Arrival),
    /// The verdict of a watchdog.
    Watchdog,
}

impl Source {
    /// As the attribute `ccl.straggler.source` has it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Arrivals => "arrivals",
            Self::Library(_) => "library",
            Self::Watchdog => "watchdog",
        }
    }

    /// How far the lag can be off, nanoseconds, if that is known.
    #[must_use]
    pub fn uncertainty_ns(&self) -> Option<u64> {
        match self {
            Self::Library(arrival) => Some(arrival.uncertainty_ns),
            Self::Arrivals | Self::Watchdog => None,
        }
    }
}

/// Who is named, and how it is known.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finding {
    /// The rank that the others waited for, if it was late by the threshold.
    pub culprit: Option<Culprit>,
    /// What this rests on.
    pub source: Source,
    /// A rank may have been late, and nobody can say which.
    pub unnamed: Option<Unnamed>,
}

/// Who is late in an operation with this function. `seen` are the arrivals of its watched ranks, by one clock.
#[must_use]
pub fn find(
    instance: &Instance,
    function: Option<Function>,
    seen: &[(u32, u64)],
    threshold_ns: u64,
) -> Finding {
    let here = lag::culprit(function, seen, threshold_ns);
    let sees_all = seen.len() >= instance.key.ranks as usize;
    if sees_all || !function.is_some_and(Function::synchronises) {
        return Finding {
            culprit: here,
            ..Finding::default()
        };
    }
    if let Some(arrival) = reported(&instance.parts) {
        let is_certain = arrival.lag_ns >= threshold_ns.max(arrival.uncertainty_ns);
        return Finding {
            culprit: is_certain.then_some(Culprit {
                rank: arrival.rank,
                lag_ns: arrival.lag_ns,
            }),
            source: Source::Library(arrival),
            unnamed: None,
        };
    }
    let culprit = here.filter(|culprit| {
        let arrived = seen.iter().find(|(rank, _)| *rank == culprit.rank);
        let ends = instance.parts.iter().map(|part| part.device.1);
        // A rank that is not seen arrived before the first one was done.
        let room_ns = ends.filter(|end| *end != 0).min().zip(arrived);
        room_ns.is_some_and(|(end, (_, arrived))| end.saturating_sub(*arrived) < threshold_ns)
    });
    let took_long = |part: &RankOperation| part.device.1.saturating_sub(part.device.0) >= threshold_ns;
    let may_be_late = culprit.is_none()
        && instance
            .parts
            .iter()
            .any(|part| part.device.0 != 0 && took_long(part));
    Finding {
        culprit,
        source: Source::Arrivals,
        unnamed: may_be_late.then(|| Unnamed {
            wait: longest_wait(&instance.parts).filter(|wait| wait.wait_ns >= threshold_ns),
        }),
    }
}

/// The longest wait of a watched rank for a rank that is not watched, from the steps of the proxies.
fn longest_wait(parts: &[Box<RankOperation>]) -> Option<PeerWait> {
    let waits = parts.iter().flat_map(|part| {
        part.proxies.iter().map(|proxy| PeerWait {
            rank: part.rank,
            peer: proxy.peer,
            wait_ns: proxy.peer_wait_ns(),
        })
    });
    let is_watched = |rank| parts.iter().any(|part| part.rank == rank);
    let of_unwatched = waits.filter(|wait| !is_watched(wait.peer));
    of_unwatched.max_by_key(|wait| (wait.wait_ns, Reverse((wait.rank, wait.peer))))
}

/// The most certain finding of an operation's parts. If they asked only some of the ranks, the one that is surely the largest.
#[must_use]
pub fn reported(parts: &[Box<RankOperation>]) -> Option<Arrival> {
    let known = || parts.iter().filter_map(|part| part.arrived_last());
    let of_all = known().filter(|arrival| arrival.unknown_ranks == 0);
    let surely = |arrival: &&Arrival| arrival.lag_ns.saturating_sub(arrival.uncertainty_ns);
    of_all
        .min_by_key(|arrival| arrival.uncertainty_ns)
        .or_else(|| known().max_by_key(surely))
        .copied()
}

#[cfg(test)]
mod tests {
    use ringsight_records::{Kind, Record, State};

    use super::*;
    use crate::{
        correlate::ArrivalReport,
        identity::{InstanceKey, TraceKind},
        limits::Limits,
    };

    const MS: u64 = 1_000_000;
    const THRESHOLD_NS: u64 = 15 * MS;

    fn key() -> InstanceKey {
        InstanceKey {
            comm: 1,
            seq: 2,
            ranks: 4,
            replay: 0,
            kind: TraceKind::Collective,
            pair: None,
        }
    }

    /// Parts of an all_reduce of four ranks: rank, arrival, end, and what the library says.
    fn find_in(parts: &[(u32, u64, u64, ArrivalReport)]) -> (Option<u32>, bool) {
        let seen: Vec<(u32, u64)> = parts
            .iter()
            .map(|(rank, arrived, ..)| (*rank, *arrived))
            .collect();
        let parts = parts.iter().map(|(rank, arrived, end, arrival)| {
            let mut part = RankOperation::default();
            (part.rank, part.ranks) = (*rank, 4);
            (part.device, part.arrival) = ((*arrived, *end), *arrival);
            part
        });
        let instance = Instance::of(key(), parts.collect());
        let finding = find(&instance, Some(Function::AllReduce), &seen, THRESHOLD_NS);
        (
            finding.culprit.map(|culprit| culprit.rank),
            finding.source.name() == "library",
        )
    }

    fn says(rank: u32, lag_ns: u64, uncertainty_ns: u64) -> ArrivalReport {
        ArrivalReport::Known(Arrival {
            rank,
            lag_ns,
            wait_ns: lag_ns,
            uncertainty_ns,
            unknown_ranks: 0,
        })
    }

    #[test]
    fn the_library_names_a_rank_that_is_not_watched() {
        let parts = [
            (0, MS, 32 * MS, says(2, 30 * MS, MS)),
            (1, 2 * MS, 32 * MS, says(2, 29 * MS, MS)),
        ];
        assert_eq!(find_in(&parts), (Some(2), true));
    }

    #[test]
    fn a_rank_that_the_communicator_does_not_have_is_not_named() {
        let parts = [(0, MS, 32 * MS, says(4, 30 * MS, MS))];
        assert_eq!(find_in(&parts), (None, false));
    }

    #[test]
    fn where_all_are_seen_the_library_is_not_needed() {
        let none = ArrivalReport::None;
        let seen = |last| {
            [
                (0, MS, none),
                (1, MS, none),
                (2, last, says(3, 40 * MS, MS)),
                (3, MS, none),
            ]
        };
        let parts = |last| seen(last).map(|(rank, arrived, report)| (rank, arrived, 60 * MS, report));
        assert_eq!(find_in(&parts(30 * MS)), (Some(2), false));
        assert_eq!(find_in(&parts(2 * MS)), (None, false));
    }

    #[test]
    fn a_lag_below_the_threshold_or_its_uncertainty_names_nobody() {
        let find = |lag_ns, uncertainty_ns| find_in(&[(0, MS, 32 * MS, says(2, lag_ns, uncertainty_ns))]);
        assert_eq!(find(14 * MS, MS), (None, true));
        assert_eq!(find(20 * MS, 21 * MS), (None, true));
        assert_eq!(find(20 * MS, 19 * MS), (Some(2), true));
    }

    #[test]
    fn without_a_word_of_the_library_nobody_is_named_who_may_have_waited_himself() {
        let parts = |end| {
            let none = ArrivalReport::Unknown;
            [(0, MS, end, none), (1, 20 * MS, end, none)]
        };
        assert_eq!(
            find_in(&parts(21 * MS)),
            (Some(1), false),
            "nobody came after rank 1"
        );
        assert_eq!(
            find_in(&parts(40 * MS)),
            (None, false),
            "rank 2 or 3 may have come at 39 ms"
        );
    }

    /// A part whose proxy operation waited for data of a peer until then.
    fn waiting(rank: u32, peer: u32, until_ns: u64) -> RankOperation {
        let mut part = RankOperation::default();
        (part.rank, part.ranks, part.device) = (rank, 4, (MS, until_ns + MS));
        let step = |state, time_ns| Record {
            peer: peer.cast_signed(),
            ..Record::new(Kind::ProxyStep, state, time_ns)
        };
        let states = [
            (State::START, MS),
            (State::STEP_RECV_WAIT, MS),
            (State::STOP, until_ns),
        ];
        for (state, time_ns) in states {
            assert_eq!(
                part.record(Kind::ProxyStep, &step(state, time_ns), true, &Limits::default()),
                None
            );
        }
        part
    }

    fn unnamed(parts: Vec<RankOperation>) -> Option<Unnamed> {
        let seen: Vec<_> = parts.iter().map(|part| (part.rank, part.device.0)).collect();
        let instance = Instance::of(key(), parts);
        let finding = find(&instance, Some(Function::AllReduce), &seen, THRESHOLD_NS);
        assert_eq!(finding.culprit, None);
        finding.unnamed
    }

    #[test]
    fn where_nobody_is_named_the_longest_wait_for_a_rank_that_is_not_watched_is() {
        let parts = vec![waiting(0, 3, 21 * MS), waiting(1, 0, 31 * MS)];
        let wait = PeerWait {
            rank: 0,
            peer: 3,
            wait_ns: 20 * MS,
        };
        assert_eq!(
            unnamed(parts),
            Some(Unnamed { wait: Some(wait) }),
            "rank 0 is watched"
        );
    }

    #[test]
    fn a_wait_below_the_threshold_is_none_and_without_any_nothing_is_said() {
        let mut long = waiting(0, 3, 10 * MS);
        long.device.1 = 30 * MS;
        assert_eq!(unnamed(vec![long]), Some(Unnamed { wait: None }));
        assert_eq!(unnamed(vec![waiting(0, 3, 10 * MS)]), None, "nobody was late");
        let all = (0..4).map(|rank| waiting(rank, 9, 30 * MS)).collect();
        assert_eq!(unnamed(all), None, "all are watched");
    }
}
