//! Rounds in which something else happened than was meant to, since the machine was busy. Which these are follows from what the
//! ranks wrote and from how this program ran, never from what the watchdog said; and what no machine excuses counts in these,
//! too.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    cases::{Fault, Mode, Round, STALLED, Source, THRESHOLD},
    job::{Observed, Said},
    score::first_rank,
    stalls::are_long,
    truth::{Event, What},
};

/// Why a round is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Reason {
    /// A process that was to run was not run.
    Stalled,
    /// A rank came later than it was told to, by as much as the watchdog speaks of.
    Late,
    /// The rank that calls something else was not the last: who is wrong can be said only once most have called. Or the one that a kernel
    /// is stopped in front of had come before that.
    Order,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stalled => "stalled",
            Self::Late => "late",
            Self::Order => "order",
        })
    }
}

/// Ranks that are apart by so much may be spoken of.
fn is_long(since: u64, until: u64) -> bool {
    Duration::from_nanos(until.saturating_sub(since)) >= THRESHOLD * 9 / 10
}

/// Why a round is to be left out, if it is.
pub(super) fn reason(round: &Round, observed: &Observed) -> Option<Reason> {
    // Who is stopped does not run either.
    let is_stopped = |rank| matches!(round.fault, Fault::Stopped | Fault::Traced) && rank == round.victim;
    // Before that ranks find each other, and keep a small machine busy.
    let is_before = |what: &What| matches!(what, What::Before { .. } | What::Called);
    let begin = observed.truth.iter().find(|event| is_before(&event.what));
    let lasts = begin.map_or(0, |event| event.ns)..observed.ended_ns;
    let stalls = |rank: u32| {
        let of_rank = observed.truth.iter().filter(|event| event.rank == rank);
        let meanwhile = of_rank.filter(|event| lasts.contains(&event.ns));
        let stall = |event: &Event| match event.what {
            What::Stalled { ms } => Some((event.ns, ms)),
            _ => None,
        };
        meanwhile.filter_map(stall).collect::<Vec<_>>()
    };
    let stalled = |rank| !is_stopped(rank) && are_long(&stalls(rank));
    if (0..round.ranks).any(stalled) || observed.stalled >= STALLED {
        return Some(Reason::Stalled);
    }
    let others = || (0..round.ranks).filter(|rank| *rank != round.victim);
    let called = |rank| observed.at(rank, &What::Called);
    let launched = |rank| observed.at(rank, &What::Launched).or_else(|| called(rank));
    let mut apart = Vec::new();
    for number in 0.. {
        let times = |launched| {
            let what = What::Before { number, launched };
            observed
                .truth
                .iter()
                .filter(move |event| event.what == what)
                .map(|event| event.ns)
        };
        let Some(first) = times(false).min() else { break };
        apart.extend(times(true).max().map(|last| (first, last)));
    }
    let first = others().filter_map(called).min();
    apart.extend(first.zip(others().filter_map(launched).max()));
    // Until it calls something else than the others, or what they do, it is late, and they say so.
    if matches!(round.fault, Fault::SlowBelow | Fault::Crossed) {
        apart.extend(first.zip(launched(round.victim)));
    }
    let last = round.comes_last();
    apart.extend(last.and_then(|last| called(round.victim).zip(called(last))));
    if apart.iter().any(|(since, until)| is_long(*since, *until)) {
        return Some(Reason::Late);
    }
    if let Some(last) = round.comes_last()
        && called(last) <= observed.at(round.victim, &What::Fault)
    {
        return Some(Reason::Order);
    }
    let is_last = || others().all(|rank| launched(rank) <= called(round.victim));
    (matches!(round.fault, Fault::Count | Fault::Order) && !is_last()).then_some(Reason::Order)
}

/// Verdicts that are wrong however busy the machine is: that something hangs which does not, and that a rank has not called
/// what it has.
pub(super) fn wrong<'a>(round: &Round, observed: &'a Observed) -> Vec<&'a Said> {
    let is_wrong = |said: &&Said| {
        if said.verdict.contains(" (hang): ") {
            !is_meant(round, observed, said)
        } else {
            said.verdict.starts_with("NOT_LAUNCHED ") && has_launched(round, observed, said) == Some(true)
        }
    };
    observed.said.iter().filter(is_wrong).collect()
}

fn is_meant(round: &Round, observed: &Observed, said: &Said) -> bool {
    let is = |cause: &str| said.verdict.starts_with(&format!("{cause} (hang): "));
    // Calls differ, whoever is found to be wrong.
    if matches!(round.fault, Fault::Count | Fault::Order | Fault::Crossed) && is("METADATA_MISMATCH") {
        return true;
    }
    if round.ends_in_aborts() && said.ns > observed.ended_ns && is("PEER_ABORTED") {
        return true;
    }
    let expected = round.expectation().verdicts;
    let mut hangs = expected.iter().filter(|verdict| verdict.class == "hang");
    first_rank(&said.verdict) == Some(round.victim) && hangs.any(|verdict| is(verdict.cause))
}

/// Whether the rank that is said not to have launched an operation had, when the one that says so could first ask; `None` where
/// that is not written down.
fn has_launched(round: &Round, observed: &Observed, said: &Said) -> Option<bool> {
    // Kernels tell of a replay only when it runs.
    if (round.mode, round.source) == (Mode::Graph, Source::Pages) {
        return None;
    }
    let number = number(&said.operation)?;
    let before = match round.fault {
        Fault::TwoGraphs | Fault::Crossed => return None,
        Fault::Count | Fault::Order => 2 * round.before,
        _ => round.before,
    };
    let at = |rank, launched| match (number.cmp(&before), launched) {
        (std::cmp::Ordering::Less, _) => {
            let what = What::Before { number, launched };
            let mut events = observed.truth.iter();
            events
                .find(|event| event.rank == rank && event.what == what)
                .map(|event| event.ns)
        }
        (std::cmp::Ordering::Equal, false) => observed.at(rank, &What::Called),
        (std::cmp::Ordering::Equal, true) => observed.at(rank, &What::Launched),
        (std::cmp::Ordering::Greater, _) => None,
    };
    let asked = at(said.rank, false)? + THRESHOLD.as_nanos() as u64;
    Some(at(first_rank(&said.verdict)?, true)? <= asked)
}

/// The number of an operation among those of its rank, from its name in a report.
fn number(operation: &str) -> Option<u32> {
    let digits = |mark: &str| {
        let (_, rest) = operation.rsplit_once(mark)?;
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse::<u32>().ok()
    };
    if operation.contains(" of graph ") {
        digits(", replay ").and_then(|replay| replay.checked_sub(1))
    } else {
        digits(", collective ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        faults::{
            cases::{Case, Ranks},
            truth::Event,
        },
        nccl::DeviceKind,
    };

    const MS: u64 = 1_000_000;

    fn round(fault: Fault, mode: Mode, source: Source) -> Round {
        let case = Case {
            fault,
            ranks: Ranks::Process,
            mode,
            source,
        };
        Round {
            ranks: 3,
            victim: 1,
            before: 1,
            ..Round::draw(&case, DeviceKind::Host, 1, 0)
        }
    }

    /// Three ranks: when each called the operation before the fault and had called it, and the same of the operation itself.
    fn observed(before: [[u64; 2]; 3], then: [[u64; 2]; 3]) -> Observed {
        let event = |rank: usize, ms: u64, what| Event {
            rank: rank as u32,
            ns: ms * MS,
            what,
        };
        let mut truth = Vec::new();
        for rank in 0..3 {
            let of = |launched| What::Before { number: 0, launched };
            truth.push(event(rank, before[rank][0], of(false)));
            truth.push(event(rank, before[rank][1], of(true)));
            truth.push(event(rank, then[rank][0], What::Called));
            truth.push(event(rank, then[rank][1], What::Launched));
        }
        Observed {
            said: Vec::new(),
            truth,
            ended_ns: 9000 * MS,
            text: String::new(),
            stalled: Duration::ZERO,
            broken: None,
        }
    }

    const PROMPT: [[u64; 2]; 3] = [[10, 11], [12, 13], [14, 15]];

    fn said(rank: u32, ms: u64, operation: &str, verdict: &str) -> Said {
        Said {
            rank,
            ranks: 3,
            ns: ms * MS,
            operation: operation.to_owned(),
            verdict: verdict.to_owned(),
        }
    }

    #[test]
    fn a_round_is_left_out_for_what_is_true_of_it() {
        let of = |fault, observed: &Observed| reason(&round(fault, Mode::Eager, Source::Pages), observed);
        let then = [[1000, 1001], [1500, 1501], [1010, 1011]];
        let good = observed(PROMPT, then);
        assert_eq!(of(Fault::SlowAbove, &good), None);
        assert_eq!(
            of(Fault::SlowBelow, &good),
            Some(Reason::Late),
            "it was to be late by less"
        );
        let stands = [[1000, 1001], [1200, 1290], [1010, 1011]];
        assert_eq!(
            of(Fault::SlowBelow, &observed(PROMPT, stands)),
            Some(Reason::Late)
        );
        assert_eq!(of(Fault::SlowAbove, &observed(PROMPT, stands)), None);
        assert_eq!(
            of(Fault::Count, &good),
            None,
            "the victim may be late, and is last"
        );
        assert_eq!(
            of(Fault::SlowAbove, &observed([[10, 11], [12, 290], [14, 15]], then)),
            Some(Reason::Late)
        );
        let second = [[1000, 1001], [1500, 1501], [1010, 1280]];
        assert_eq!(
            of(Fault::SlowAbove, &observed(PROMPT, second)),
            Some(Reason::Late)
        );
        let early = [[1000, 1001], [1005, 1006], [1010, 1011]];
        assert_eq!(of(Fault::Order, &observed(PROMPT, early)), Some(Reason::Order));
        assert_eq!(of(Fault::Aborted, &observed(PROMPT, early)), None);
        let mut stalled = observed(PROMPT, then);
        stalled.truth.push(Event {
            rank: 1,
            ns: 500 * MS,
            what: What::Stalled { ms: 200 },
        });
        assert_eq!(of(Fault::SlowAbove, &stalled), Some(Reason::Stalled));
        assert_eq!(of(Fault::Stopped, &stalled), None);
        stalled.truth.last_mut().unwrap().ns = 5;
        assert_eq!(of(Fault::SlowAbove, &stalled), None, "nothing had begun");
        // Whatever was said is no reason.
        let mut talked = observed(PROMPT, then);
        talked
            .said
            .push(said(0, 500, "", "NOT_LAUNCHED (late): rank 1 has not"));
        assert_eq!(of(Fault::SlowAbove, &talked), None);
    }

    #[test]
    fn nothing_excuses_a_hang_that_is_none_or_what_was_called() {
        let count =
            |fault, mode, source, observed: &Observed| wrong(&round(fault, mode, source), observed).len();
        let eager = |fault, observed: &Observed| count(fault, Mode::Eager, Source::Pages, observed);
        // Rank 1 comes 400 ms late to the first operation, and 200 ms to the second.
        let mut slow = observed(
            [[10, 11], [410, 411], [14, 15]],
            [[1000, 1001], [1200, 1201], [1010, 1011]],
        );
        let first = "AllReduce(count 1), ring, collective 0";
        let late = "NOT_LAUNCHED (late): rank 1 has not launched it";
        slow.said = vec![said(0, 350, first, late)];
        assert_eq!(eager(Fault::SlowAbove, &slow), 0);
        slow.said = vec![said(0, 1350, "AllReduce(count 1), ring, collective 1", late)];
        assert_eq!(eager(Fault::SlowAbove, &slow), 1);
        slow.said[0].operation = "AllReduce(count 1), ring, collective 0 of graph 1, replay 2".to_owned();
        assert_eq!(count(Fault::SlowAbove, Mode::Graph, Source::Events, &slow), 1);
        assert_eq!(
            count(Fault::SlowAbove, Mode::Graph, Source::Pages, &slow),
            0,
            "unknown"
        );
        slow.said = vec![said(0, 350, first, "NO_ANSWER (hang): rank 1 does not answer")];
        assert_eq!(eager(Fault::SlowAbove, &slow), 1);
        slow.said = vec![said(0, 350, first, "NOT_LAUNCHED (hang): rank 1 has not")];
        assert_eq!(eager(Fault::Withheld, &slow), 0);
        slow.said = vec![said(0, 350, first, "NOT_LAUNCHED (hang): rank 2 has not")];
        assert_eq!(eager(Fault::Withheld, &slow), 1);
        slow.said = vec![said(
            0,
            9001,
            first,
            "PEER_ABORTED (hang): rank 2 has given it up",
        )];
        assert_eq!(
            (eager(Fault::Withheld, &slow), eager(Fault::SlowAbove, &slow)),
            (0, 1)
        );
        slow.said = vec![said(0, 350, first, "METADATA_MISMATCH (hang): rank 2 has called")];
        assert_eq!(
            (eager(Fault::Count, &slow), eager(Fault::SlowAbove, &slow)),
            (0, 1)
        );
    }
}
