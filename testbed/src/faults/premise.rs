//! Whether a round happened as it was drawn.
//!
//! A busy machine may keep a process from running, or make a rank late that was not to be late. Such a round says nothing about the
//! watchdog: it is left out and run again. What the ranks wrote and how this program ran decide that ([`broken`]); what the watchdog said
//! never does. Two kinds of verdicts are false in any round ([`false_in_any_round`]): the hang of a rank that does not hang, and
//! `NOT_LAUNCHED` for an operation that the rank has launched.

use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{
    cases::{Fault, Mode, PROMISED, Round, STALLED, Source, THRESHOLD},
    journal::What,
    observed::{Observed, Verdict},
};

/// Why a round is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reason {
    /// A process that was to run was not run.
    Stalled,
    /// A rank came later than it was told to, by as much as the watchdog speaks of.
    Late,
}

display_by_name!(Reason);

/// Why a round is to be left out, if it is.
pub(super) fn broken(round: &Round, observed: &Observed) -> Option<Reason> {
    if observed.stalled >= STALLED || (0..round.ranks).any(|rank| is_stalled(round, observed, rank)) {
        return Some(Reason::Stalled);
    }
    // Ranks that are apart by so much may be spoken of.
    let is_long = |(since, until): &(u64, u64)| {
        Duration::from_nanos(until.saturating_sub(*since)) >= THRESHOLD * 9 / 10
    };
    apart(round, observed).iter().any(is_long).then_some(Reason::Late)
}

/// Whether the process of a rank was not run for too long, once the round had begun: before that, ranks that find each other keep a small
/// machine busy.
fn is_stalled(round: &Round, observed: &Observed, rank: u32) -> bool {
    // Who is stopped does not run either.
    if matches!(round.fault, Fault::Stopped | Fault::Traced) && rank == round.victim {
        return false;
    }
    let begins = |what: &What| matches!(what, What::Before { .. } | What::Called);
    let begin = observed.truth.iter().find(|event| begins(&event.what));
    let lasts = begin.map_or(0, |event| event.ns)..observed.ended_ns;
    let meanwhile = observed
        .truth
        .iter()
        .filter(|event| event.rank == rank && lasts.contains(&event.ns));
    let stalls = meanwhile.filter_map(|event| match event.what {
        What::Stalled { ms } => Some((event.ns, ms)),
        _ => None,
    });
    are_long(&stalls.collect::<Vec<_>>())
}

/// Whether stalls of a process, (end in nanoseconds, milliseconds) in the order of time, are [`STALLED`] or more within [`PROMISED`]: where
/// the machine runs something else for 30 ms again and again, a verdict is as late as where it does so once for long.
fn are_long(stalls: &[(u64, u64)]) -> bool {
    (0..stalls.len()).any(|first| {
        let from = stalls[first].0;
        let near = |stall: &&(u64, u64)| Duration::from_nanos(stall.0 - from) < PROMISED;
        let together: u64 = stalls[first..].iter().take_while(near).map(|stall| stall.1).sum();
        Duration::from_millis(together) >= STALLED
    })
}

/// Spans of time, nanoseconds, in which a rank waited for another one that was not to be late.
fn apart(round: &Round, observed: &Observed) -> Vec<(u64, u64)> {
    let others = || (0..round.ranks).filter(|rank| *rank != round.victim);
    let called = |rank| observed.at(rank, &What::Called);
    let launched = |rank| observed.at(rank, &What::Launched).or_else(|| called(rank));
    let times = |number, launched| {
        let what = What::Before { number, launched };
        let events = observed.truth.iter().filter(move |event| event.what == what);
        events.map(|event| event.ns)
    };
    let before = (0..).map_while(|number| Some((number, times(number, false).min()?)));
    let mut apart: Vec<(u64, u64)> = before
        .filter_map(|(number, first)| Some((first, times(number, true).max()?)))
        .collect();
    let first = others().filter_map(called).min();
    apart.extend(first.zip(others().filter_map(launched).max()));
    // Until it calls something else than the others, or what they do, it is late, and they say so.
    if matches!(round.fault, Fault::SlowBelow | Fault::Crossed) {
        apart.extend(first.zip(launched(round.victim)));
    }
    let last = round.comes_last();
    apart.extend(last.and_then(|last| called(round.victim).zip(called(last))));
    apart
}

/// Verdicts that are false however busy the machine is.
pub(super) fn false_in_any_round<'a>(round: &Round, observed: &'a Observed) -> Vec<&'a Verdict> {
    let is_false = |verdict: &&Verdict| {
        if verdict.text.contains(" (hang): ") {
            !is_meant(round, observed, verdict)
        } else {
            verdict.text.starts_with("NOT_LAUNCHED ") && had_launched(round, observed, verdict) == Some(true)
        }
    };
    observed.verdicts.iter().filter(is_false).collect()
}

/// Whether a hang is what the fault is to bring about.
fn is_meant(round: &Round, observed: &Observed, verdict: &Verdict) -> bool {
    let is = |cause: &str| verdict.text.starts_with(&format!("{cause} (hang): "));
    // Calls differ, whoever is found to be wrong.
    if matches!(round.fault, Fault::Count | Fault::Order | Fault::Crossed) && is("METADATA_MISMATCH") {
        return true;
    }
    if round.ends_in_aborts() && verdict.ns > observed.ended_ns && is("PEER_ABORTED") {
        return true;
    }
    let expected = round.expectation().promises;
    let mut hangs = expected.iter().filter(|promise| promise.class == "hang");
    verdict.first_rank() == Some(round.victim) && hangs.any(|promise| is(promise.cause))
}

/// Whether the rank that is said not to have launched an operation had, when the one that says so could first ask; `None` where
/// that is not written down.
fn had_launched(round: &Round, observed: &Observed, verdict: &Verdict) -> Option<bool> {
    // Kernels tell of a replay only when it runs.
    if (round.mode, round.source) == (Mode::Graph, Source::Pages) {
        return None;
    }
    let before = match round.fault {
        Fault::TwoGraphs | Fault::Crossed => return None,
        Fault::Count | Fault::Order => 2 * round.before,
        _ => round.before,
    };
    let number = verdict.operation_number().filter(|number| *number <= before)?;
    let at = |rank, launched| {
        let what = match launched {
            _ if number < before => What::Before { number, launched },
            false => What::Called,
            true => What::Launched,
        };
        let mut events = observed.truth.iter();
        events
            .find(|event| event.rank == rank && event.what == what)
            .map(|event| event.ns)
    };
    let asked = at(verdict.rank, false)? + THRESHOLD.as_nanos() as u64;
    Some(at(verdict.first_rank()?, true)? <= asked)
}

#[cfg(test)]
mod tests {
    use super::{
        super::observed::sample::{event, observed, verdict},
        *,
    };

    /// Three ranks: when each called the operation before the fault and had called it, and the same of the operation itself.
    fn times(before: [[u64; 2]; 3], then: [[u64; 2]; 3]) -> Observed {
        let of_rank = |rank: usize| {
            let before_it = |launched| What::Before { number: 0, launched };
            [
                event(rank as u32, before[rank][0], before_it(false)),
                event(rank as u32, before[rank][1], before_it(true)),
                event(rank as u32, then[rank][0], What::Called),
                event(rank as u32, then[rank][1], What::Launched),
            ]
        };
        observed(Vec::new(), (0..3).flat_map(of_rank).collect(), 9000)
    }

    const PROMPT: [[u64; 2]; 3] = [[10, 11], [12, 13], [14, 15]];

    #[test]
    fn a_round_is_left_out_for_what_is_true_of_it() {
        let of =
            |fault, observed: &Observed| broken(&Round::sample(fault, Mode::Eager, Source::Pages), observed);
        let then = [[1000, 1001], [1500, 1501], [1010, 1011]];
        let good = times(PROMPT, then);
        assert_eq!(of(Fault::SlowAbove, &good), None);
        assert_eq!(
            of(Fault::SlowBelow, &good),
            Some(Reason::Late),
            "it was to be late by less"
        );
        let stands = [[1000, 1001], [1200, 1290], [1010, 1011]];
        assert_eq!(of(Fault::SlowBelow, &times(PROMPT, stands)), Some(Reason::Late));
        assert_eq!(of(Fault::SlowAbove, &times(PROMPT, stands)), None);
        assert_eq!(
            of(Fault::Count, &good),
            None,
            "the victim may be late, and is last"
        );
        assert_eq!(
            of(Fault::SlowAbove, &times([[10, 11], [12, 290], [14, 15]], then)),
            Some(Reason::Late)
        );
        let second = [[1000, 1001], [1500, 1501], [1010, 1280]];
        assert_eq!(of(Fault::SlowAbove, &times(PROMPT, second)), Some(Reason::Late));
        let mut stalled = times(PROMPT, then);
        stalled.truth.push(event(1, 500, What::Stalled { ms: 200 }));
        assert_eq!(of(Fault::SlowAbove, &stalled), Some(Reason::Stalled));
        assert_eq!(of(Fault::Stopped, &stalled), None);
        stalled.truth.last_mut().unwrap().ns = 5;
        assert_eq!(of(Fault::SlowAbove, &stalled), None, "nothing had begun");
        // Whatever was said is no reason.
        let mut talked = times(PROMPT, then);
        talked
            .verdicts
            .push(verdict(0, 3, 500, "", "NOT_LAUNCHED (late): rank 1 has not"));
        assert_eq!(of(Fault::SlowAbove, &talked), None);
    }

    #[test]
    fn a_hang_that_is_none_is_false_in_any_round_and_so_is_what_was_called() {
        let count = |fault, mode, source, observed: &Observed| {
            false_in_any_round(&Round::sample(fault, mode, source), observed).len()
        };
        let eager = |fault, observed: &Observed| count(fault, Mode::Eager, Source::Pages, observed);
        // Rank 1 comes 400 ms late to the first operation, and 200 ms to the second.
        let mut slow = times(
            [[10, 11], [410, 411], [14, 15]],
            [[1000, 1001], [1200, 1201], [1010, 1011]],
        );
        let of = |number: u32| format!("AllReduce(count 1), ring, collective {number}");
        let late = "NOT_LAUNCHED (late): rank 1 has not launched it";
        let mut says = |ms, operation: &str, text| {
            slow.verdicts = vec![verdict(0, 3, ms, operation, text)];
            slow.clone()
        };
        assert_eq!(eager(Fault::SlowAbove, &says(350, &of(0), late)), 0);
        assert_eq!(eager(Fault::SlowAbove, &says(1350, &of(1), late)), 1);
        let replay = says(1350, &format!("{} of graph 1, replay 2", of(0)), late);
        assert_eq!(count(Fault::SlowAbove, Mode::Graph, Source::Events, &replay), 1);
        let unknown = count(Fault::SlowAbove, Mode::Graph, Source::Pages, &replay);
        assert_eq!(unknown, 0);
        let hang = says(350, &of(0), "NO_ANSWER (hang): rank 1 does not answer");
        assert_eq!(eager(Fault::SlowAbove, &hang), 1);
        let meant = says(350, &of(0), "NOT_LAUNCHED (hang): rank 1 has not");
        assert_eq!(eager(Fault::Withheld, &meant), 0);
        let other = says(350, &of(0), "NOT_LAUNCHED (hang): rank 2 has not");
        assert_eq!(eager(Fault::Withheld, &other), 1);
        for (ms, text, fault) in [
            (
                9001,
                "PEER_ABORTED (hang): rank 2 has given it up",
                Fault::Withheld,
            ),
            (350, "METADATA_MISMATCH (hang): rank 2 has called", Fault::Count),
        ] {
            let said = says(ms, &of(0), text);
            assert_eq!((eager(fault, &said), eager(Fault::SlowAbove, &said)), (0, 1));
        }
    }

    #[test]
    fn many_short_ones_are_a_long_one() {
        let are_long = |stalls: &[(u64, u64)]| {
            let at = |(ms, stall): &(u64, u64)| (ms * 1_000_000, *stall);
            are_long(&stalls.iter().map(at).collect::<Vec<_>>())
        };
        assert!(!are_long(&[]) && !are_long(&[(0, 149)]) && are_long(&[(0, 150)]));
        let short = [(0, 30), (250, 30), (500, 30), (750, 30)];
        assert!(!are_long(&short));
        assert!(are_long(&[&short[..], &[(999, 30)]].concat()));
        assert!(
            !are_long(&[&short[..], &[(1000, 30), (1200, 29)]].concat()),
            "not within a second"
        );
        assert!(are_long(&[&short[..], &[(1000, 30), (1200, 30)]].concat()));
    }
}
