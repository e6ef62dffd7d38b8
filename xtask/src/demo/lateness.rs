//! Who was late: the collector's verdicts against the ranks' own clocks.

use super::{
    check::{Expectation, Problems, Report, collectives_in},
    summary::{Operation, Summary},
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
    let middle = arrivals.len() / 2;
    let median = if arrivals.len() % 2 == 1 {
        arrivals[middle].0
    } else {
        let (below, above) = (arrivals.get(middle.checked_sub(1)?)?.0, arrivals[middle].0);
        below + (above - below) / 2
    };
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
    // A delay may drown in what else the machine does; most must not, or the run says nothing about verdicts.
    let planned = expectation.configuration.delays.len();
    let seen = truths
        .iter()
        .flat_map(|truth| truth.collectives.iter().enumerate().map(move |c| (truth.rank, c)))
        .filter(|(rank, (index, collective))| {
            collective.slept_ms > 0
                && late_rank(truths, *index)
                    .is_some_and(|(late, lag)| late == *rank && lag >= expectation.threshold_ns)
        })
        .count();
    report.drowned = planned.saturating_sub(seen);
    problems.expect(2 * seen >= planned, || {
        format!(
            "only {seen} of {planned} intended delays made a rank late: the machine is too busy to judge by"
        )
    });
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
        // What lies within the margin of the threshold may be named or not; it counts as it was decided.
        report.culprits_expected += usize::from(compared && lag + margin >= expectation.threshold_ns);
        let error = culprit.lag_ns.abs_diff(lag);
        report.worst_lag_error_ms = report.worst_lag_error_ms.max(ms(error));
        // Where nobody was to be late, not even the margin excuses a name.
        let least = if expectation.configuration.delays.is_empty() {
            lag
        } else {
            lag + margin
        };
        problems.expect(compared && least >= expectation.threshold_ns, || {
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
