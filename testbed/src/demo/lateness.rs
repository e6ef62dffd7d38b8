//! Comparison of the collector's verdicts on late ranks with the ranks' own clocks.
//!
//! A rank notes when its stream reaches a collective and when its stream has passed it. The rank's part begins between these notes: not at
//! once where the machine runs something else first, and before any other rank leaves, for none can leave without it. So three rules hold:
//! - Every start that the collector shows lies between the notes.
//! - Every verdict follows from the starts.
//! - Few verdicts would differ by the notes alone, and none where a rank slept and came last.

use std::cmp::Reverse;

use super::{
    report::{Drowned, Expectation, HeldUp, Problems, Report},
    summary::{Culprit, Operation, Summary},
    truth::Truth,
};

/// How far apart may be what is one time: the collector takes those of the library's clock to Unix time by samples of both.
const CLOCKS_NS: u64 = 100_000;

/// How far a lag may be from what the notes say without being told: 10 % or 3 ms, whichever is more.
fn tolerance_ns(lag_ns: u64) -> u64 {
    (lag_ns / 10).max(3_000_000)
}

/// Whether arrivals at an operation are compared. A broadcast's receivers wait for the root alone: being late at one holds
/// nobody up.
fn compared(name: &str) -> bool {
    name != "broadcast"
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Who arrived when at a collective: (nanoseconds, rank).
struct Arrivals(Vec<(u64, u32)>);

impl Arrivals {
    /// What the ranks noted themselves; `None` if one of them noted nothing.
    fn noted(truths: &[Truth], index: usize) -> Option<Self> {
        let note = |truth: &Truth| Some((truth.collectives.get(index)?.arrived_ns, truth.rank));
        truths.iter().map(note).collect::<Option<_>>().map(Self)
    }

    /// When their parts began, as the collector shows it.
    fn shown(operation: &Operation) -> Self {
        let parts = operation.by_rank.iter();
        Self(parts.map(|part| (part.device_start_ns, part.rank)).collect())
    }

    /// The last rank, of several the lowest, and its lag: arrival minus the others' median, nanoseconds.
    fn last(&self) -> Option<Culprit> {
        let (at, rank) = *self.0.iter().max_by_key(|(at, rank)| (*at, Reverse(*rank)))?;
        let lag_ns = at - self.median_but(rank)?;
        Some(Culprit { rank, lag_ns })
    }

    fn of(&self, rank: u32) -> Option<u64> {
        Some(self.0.iter().find(|arrival| arrival.1 == rank)?.0)
    }

    /// Whether `verdict` is right by these, of which each may be off by so much.
    fn allow(&self, verdict: Option<Culprit>, margin_ns: u64, threshold_ns: u64) -> bool {
        let Some(last) = self.last() else {
            return verdict.is_none();
        };
        let Some(named) = verdict else {
            return last.lag_ns < threshold_ns + margin_ns;
        };
        let lag = self.lag_of(named.rank);
        named.lag_ns >= threshold_ns
            && self
                .after(named.rank, last.rank)
                .is_some_and(|after| after + margin_ns.cast_signed() >= 0)
            && lag.is_some_and(|lag| lag.abs_diff(named.lag_ns.cast_signed()) <= margin_ns)
    }

    /// By how much a rank arrived after another one, nanoseconds.
    fn after(&self, rank: u32, other: u32) -> Option<i64> {
        Some(self.of(rank)?.cast_signed() - self.of(other)?.cast_signed())
    }

    /// A rank's lag, nanoseconds; negative if it was early.
    fn lag_of(&self, rank: u32) -> Option<i64> {
        Some(self.of(rank)?.cast_signed() - self.median_but(rank)?.cast_signed())
    }

    fn median_but(&self, rank: u32) -> Option<u64> {
        let others = self.0.iter().filter(|arrival| arrival.1 != rank);
        median(others.map(|arrival| arrival.0).collect())
    }
}

/// The middle of `values`, of the two in the middle the mean.
fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        return Some(values[middle]);
    }
    let (below, above) = (*values.get(middle.checked_sub(1)?)?, values[middle]);
    Some(below + (above - below) / 2)
}

/// Every start is possible, every verdict right, none is missing, and there was something to judge.
pub(super) fn check_verdicts(
    truths: &[Truth],
    summary: &Summary,
    expectation: &Expectation<'_>,
    report: &mut Report,
    problems: &mut Problems,
) {
    let Some(first) = truths.first() else { return };
    let mut found = summary.collectives();
    found.truncate(first.collectives.len());
    for (index, operation) in found.iter().enumerate() {
        check_starts(index, operation, truths, problems);
        check_culprit(index, operation, truths, expectation, report, problems);
    }
    // Some may be held up on a machine that does other things; where more are, the notes say nothing about verdicts.
    problems.expect(report.held_up.len() <= (found.len() / 50).max(1), || {
        format!(
            "ranks were held up between their notes and their parts in {} collectives: the machine is too busy to judge by",
            report.held_up.len()
        )
    });
    if let Some(named) = summary
        .operations
        .iter()
        .find(|op| op.name == "send_recv" && op.culprit.is_some())
    {
        problems.add(format!("a rank is named as late at message {}", named.sequence));
    }
    report.really_late = (0..first.collectives.len())
        .filter(|index| compared(&first.collectives[*index].name))
        .filter_map(|index| Some((index, late_rank(truths, index)?)))
        .filter(|(index, late)| {
            let slept = truths
                .iter()
                .any(|truth| truth.rank == late.rank && truth.collectives[*index].slept_ms > 0);
            !slept && late.lag_ns >= expectation.threshold_ns
        })
        .count();
    check_delays(truths, &found, expectation, report, problems);
}

/// The last rank to arrive at a collective and its lag, by the ranks' own clocks.
pub(super) fn late_rank(truths: &[Truth], index: usize) -> Option<Culprit> {
    Arrivals::noted(truths, index)?.last()
}

/// Each rank's part began and ended between its own two notes, and no other rank was past a collective that waits for all by then.
fn check_starts(index: usize, found: &Operation, truths: &[Truth], problems: &mut Problems) {
    let left = |truth: &Truth| truth.collectives.get(index).map(|noted| noted.left_ns);
    for truth in truths {
        let rank = truth.rank;
        let part = found.by_rank.iter().find(|part| part.rank == rank);
        let (Some(part), Some(noted)) = (part, truth.collectives.get(index)) else {
            continue;
        };
        let mut in_order = |earlier: u64, later: u64, what: &str| {
            problems.expect(earlier <= later + CLOCKS_NS, || {
                let apart = ms(earlier - later);
                format!(
                    "collective {index} ({} {}): rank {rank} is shown to {what} ({apart:.3} ms)",
                    found.name, found.sequence
                )
            });
        };
        let start = part.device_start_ns;
        in_order(noted.arrived_ns, start, "begin before it got there");
        in_order(part.device_end_ns, noted.left_ns, "end after it left");
        let others = truths.iter().filter(|other| other.rank != rank);
        if let Some(first_left) = others.filter_map(left).min()
            && compared(&found.name)
        {
            in_order(start, first_left, "begin after another left");
        }
    }
}

/// Who is named was last by the starts; where the notes alone would have another verdict, that is told.
fn check_culprit(
    index: usize,
    found: &Operation,
    truths: &[Truth],
    expectation: &Expectation<'_>,
    report: &mut Report,
    problems: &mut Problems,
) {
    let threshold_ns = expectation.threshold_ns;
    let beyond = |late: &Culprit| late.lag_ns >= threshold_ns;
    let compared = compared(&found.name);
    report.culprits_named += usize::from(found.culprit.is_some());
    let shown = Arrivals::shown(found);
    let is_right = match compared {
        true => shown.allow(found.culprit, CLOCKS_NS, threshold_ns),
        false => found.culprit.is_none(),
    };
    problems.expect(is_right, || {
        format!(
            "collective {index} ({} {}) names {}, {} was late",
            found.name,
            found.sequence,
            told(found.culprit),
            told(shown.last().filter(|late| compared && beyond(late)))
        )
    });
    let noted = Arrivals::noted(truths, index).filter(|_| compared);
    let Some((noted, last)) = noted.and_then(|noted| noted.last().map(|last| (noted, last))) else {
        return;
    };
    report.culprits_expected += usize::from(beyond(&last));
    if noted.allow(found.culprit, tolerance_ns(last.lag_ns), threshold_ns) {
        if let Some(named) = found.culprit
            && let Some(lag) = noted.lag_of(named.rank)
        {
            let error = ms(lag.abs_diff(named.lag_ns.cast_signed()));
            report.worst_lag_error_ms = report.worst_lag_error_ms.max(error);
        }
    } else if is_right {
        report.held_up.push(HeldUp {
            collective: index,
            named: found.culprit,
            noted: last,
        });
    }
}

fn told(late: Option<Culprit>) -> String {
    late.map_or("nobody".to_owned(), |late| {
        format!("rank {} ({:.1} ms)", late.rank, ms(late.lag_ns))
    })
}

/// Every intended delay was slept, and its rank is named, or is seen by the notes to have been kept from being late by what else the
/// machine did.
fn check_delays(
    truths: &[Truth],
    found: &[&Operation],
    expectation: &Expectation<'_>,
    report: &mut Report,
    problems: &mut Problems,
) {
    let delays = &expectation.configuration.delays;
    for delay in delays {
        let Some(truth) = truths.iter().find(|truth| truth.rank == delay.rank) else {
            continue;
        };
        // The first collective of the step.
        let slept = truth.collectives.iter().position(|c| c.step == delay.step);
        let Some((index, collective)) = slept.and_then(|i| Some((i, truth.collectives.get(i)?))) else {
            problems.add(format!(
                "rank {} called nothing in step {}, where it was to be late",
                delay.rank, delay.step
            ));
            continue;
        };
        let before = index
            .checked_sub(1)
            .map_or(0, |i| truth.collectives[i].returned_ns);
        let apart_ms = collective.called_ns.saturating_sub(before) / 1_000_000;
        problems.expect(
            collective.slept_ms == delay.ms && apart_ms >= u64::from(delay.ms),
            || {
                format!(
                    "rank {} was to sleep {} ms before collective {index} and called it {apart_ms} ms after the one before",
                    delay.rank, delay.ms
                )
            },
        );
        let Some(named) = found.get(index).map(|operation| operation.culprit) else {
            continue;
        };
        if named.is_some_and(|named| named.rank == delay.rank) {
            continue;
        }
        let Some(noted) = Arrivals::noted(truths, index) else {
            continue;
        };
        let lag_ms = noted.lag_of(delay.rank).unwrap_or(0) as f64 / 1e6;
        match why_not_late(&noted, named, delay.rank, expectation.threshold_ns) {
            Some(why) => report.drowned.push(Drowned {
                collective: index,
                step: delay.step,
                rank: delay.rank,
                slept_ms: delay.ms,
                lag_ms,
                why,
            }),
            None => problems.add(format!(
                "rank {} slept for {} ms before collective {index}, was {lag_ms:.1} ms late and is not named, but {}",
                delay.rank,
                delay.ms,
                told(named)
            )),
        }
    }
    // Some may drown on a machine that does other things; where more do, the run says nothing about verdicts.
    let may = (delays.len() / 4).max(1).min(delays.len().saturating_sub(1));
    problems.expect(report.drowned.len() <= may, || {
        format!(
            "{} of {} intended delays made no rank late: the machine is too busy to judge by ({})",
            report.drowned.len(),
            delays.len(),
            report.drowned[0].why
        )
    });
}

/// What kept `rank`, which slept and is not named, from being the late one; `None` if it was.
fn why_not_late(noted: &Arrivals, named: Option<Culprit>, rank: u32, threshold_ns: u64) -> Option<String> {
    let last = noted.last()?;
    let margin = tolerance_ns(last.lag_ns);
    let other = named.unwrap_or(last).rank;
    if other != rank {
        let after = noted.after(other, rank)?;
        return (after + margin.cast_signed() >= 0)
            .then(|| format!("rank {other} arrived {:.1} ms after it", after as f64 / 1e6));
    }
    (last.lag_ns < threshold_ns + margin).then(|| {
        format!(
            "half of the others arrived within {:.1} ms of it",
            ms(last.lag_ns)
        )
    })
}

#[cfg(test)]
#[path = "lateness_tests.rs"]
mod tests;
