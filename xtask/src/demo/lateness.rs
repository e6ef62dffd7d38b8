//! Who was late: the collector's verdicts against the ranks' own clocks.

use super::{
    check::{Drowned, Expectation, HeldUp, Problems, Report, collectives_in},
    summary::{Culprit, Operation, Summary},
    truth::Truth,
};

/// How far a lag may be from the truth: 10 % or 3 ms, whichever is more.
fn tolerance_ns(lag_ns: u64) -> u64 {
    (lag_ns / 10).max(3_000_000)
}

/// Whether arrivals at an operation are compared. A broadcast's receivers wait for the root alone: being late at one holds
/// nobody up.
fn compared(name: &str) -> bool {
    name != "broadcast"
}

/// The last rank to arrive at a collective and its lag, by the ranks' own clocks: arrival minus the others' median.
pub(super) fn late_rank(truths: &[Truth], index: usize) -> Option<(u32, u64)> {
    let arrivals: Option<Vec<_>> = truths
        .iter()
        .map(|truth| Some((truth.collectives.get(index)?.arrived_ns, truth.rank)))
        .collect();
    let mut arrivals = arrivals?;
    arrivals.sort_unstable();
    let (last, rank) = arrivals.pop()?;
    let median = median(arrivals.into_iter().map(|(at, _)| at).collect())?;
    Some((rank, last - median))
}

/// Every verdict is right, none is missing, and there was something to judge.
pub(super) fn check_verdicts(
    truths: &[Truth],
    summary: &Summary,
    expectation: &Expectation<'_>,
    report: &mut Report,
    problems: &mut Problems,
) {
    let Some(first) = truths.first() else { return };
    let found = collectives_in(summary);
    for (index, operation) in found.iter().enumerate().take(first.collectives.len()) {
        check_culprit(index, operation, truths, expectation, report, problems);
    }
    // Some may be held up on a machine that does other things; where more are, the ranks' notes say nothing about verdicts.
    problems.expect(report.held_up.len() <= (found.len() / 50).max(1), || {
        format!(
            "{} ranks were held up between their notes and their part in a collective: the machine is too busy to judge by",
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
        .filter(|(index, (rank, lag))| {
            let slept = truths
                .iter()
                .any(|truth| truth.rank == *rank && truth.collectives[*index].slept_ms > 0);
            !slept && *lag >= expectation.threshold_ns
        })
        .count();
    check_delays(truths, expectation, report, problems);
}

/// Every intended delay was slept, and made its rank late, or what else the machine did is seen to have kept it from that.
fn check_delays(
    truths: &[Truth],
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
        if let Some(why) = why_not_late(truths, index, delay.rank, expectation.threshold_ns) {
            report.drowned.push(Drowned {
                collective: index,
                step: delay.step,
                rank: delay.rank,
                slept_ms: delay.ms,
                lag_ms: lag_of(truths, index, delay.rank).unwrap_or(0) as f64 / 1e6,
                why,
            });
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

/// What kept `rank`, which slept, from being the late one; `None` if it was.
fn why_not_late(truths: &[Truth], index: usize, rank: u32, threshold_ns: u64) -> Option<String> {
    let (late, lag) = late_rank(truths, index)?;
    if late != rank {
        let (own, last) = (arrival(truths, index, rank)?, arrival(truths, index, late)?);
        return Some(format!(
            "rank {late} arrived {:.1} ms later still",
            last.saturating_sub(own) as f64 / 1e6
        ));
    }
    (lag < threshold_ns).then(|| {
        format!(
            "half of the others arrived within {:.1} ms of it",
            lag as f64 / 1e6
        )
    })
}

fn arrival(truths: &[Truth], index: usize, rank: u32) -> Option<u64> {
    let truth = truths.iter().find(|truth| truth.rank == rank)?;
    Some(truth.collectives.get(index)?.arrived_ns)
}

/// A rank's arrival minus the median of the others', nanoseconds.
fn lag_of(truths: &[Truth], index: usize, rank: u32) -> Option<i64> {
    let own = arrival(truths, index, rank)?;
    let others: Option<Vec<u64>> = truths
        .iter()
        .filter(|truth| truth.rank != rank)
        .map(|truth| Some(truth.collectives.get(index)?.arrived_ns))
        .collect();
    Some(own.cast_signed() - median(others?)?.cast_signed())
}

/// Whether who is named may have been as late as that though it noted its arrival earlier: the machine may run something else between
/// the note and the rank's part in the collective. No other rank leaves before that part has begun, so it began before the first left.
fn held_up(truths: &[Truth], index: usize, named: &Culprit) -> Option<HeldUp> {
    let noted = lag_of(truths, index, named.rank)?;
    let others = truths.iter().filter(|truth| truth.rank != named.rank);
    let left: Option<Vec<u64>> = others
        .map(|truth| Some(truth.collectives.get(index)?.left_ns))
        .collect();
    let after_note =
        left?.into_iter().min()?.cast_signed() - arrival(truths, index, named.rank)?.cast_signed();
    let most = noted + after_note;
    (named.lag_ns.cast_signed() <= most).then(|| HeldUp {
        collective: index,
        rank: named.rank,
        lag_ms: named.lag_ns as f64 / 1e6,
        noted_ms: noted as f64 / 1e6,
        most_ms: most as f64 / 1e6,
    })
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

fn check_culprit(
    index: usize,
    found: &Operation,
    truths: &[Truth],
    expectation: &Expectation<'_>,
    report: &mut Report,
    problems: &mut Problems,
) {
    let Some((late, lag)) = late_rank(truths, index) else {
        return;
    };
    let compared = compared(&found.name);
    let margin = tolerance_ns(lag);
    let what = || format!("collective {index} ({} {})", found.name, found.sequence);
    let ms = |ns: u64| ns as f64 / 1e6;
    let must = compared && lag >= expectation.threshold_ns + margin;
    if let Some(culprit) = &found.culprit {
        report.culprits_named += 1;
        // Where nobody was to be late, not even the margin excuses a name.
        let least = if expectation.configuration.delays.is_empty() {
            lag
        } else {
            lag + margin
        };
        let is_late = compared && least >= expectation.threshold_ns;
        // More than it noted, or enough to be named though it noted less.
        let is_more = match is_late {
            true => culprit.rank == late && culprit.lag_ns > lag + margin,
            false => compared && culprit.lag_ns >= expectation.threshold_ns,
        };
        if let Some(held_up) = is_more.then(|| held_up(truths, index, culprit)).flatten() {
            report.culprits_expected += 1;
            report.held_up.push(held_up);
            return;
        }
        // What lies within the margin of the threshold may be named or not; it counts as it was decided.
        report.culprits_expected += usize::from(compared && lag + margin >= expectation.threshold_ns);
        let error = culprit.lag_ns.abs_diff(lag);
        report.worst_lag_error_ms = report.worst_lag_error_ms.max(ms(error));
        problems.expect(is_late, || {
            format!(
                "{} names rank {}, but nobody was late (rank {late} by {:.1} ms)",
                what(),
                culprit.rank,
                ms(lag)
            )
        });
        problems.expect(culprit.rank == late, || {
            format!("{} names rank {}, rank {late} was late", what(), culprit.rank)
        });
        problems.expect(error <= margin, || {
            format!(
                "{}: rank {late} was {:.1} ms late, {:.1} are reported",
                what(),
                ms(lag),
                ms(culprit.lag_ns)
            )
        });
    } else if must {
        report.culprits_expected += 1;
        problems.add(format!(
            "{}: rank {late} was {:.1} ms late and is not named",
            what(),
            ms(lag)
        ));
    }
}
