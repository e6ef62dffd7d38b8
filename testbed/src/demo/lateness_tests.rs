//! Verdicts follow from possible starts, and a busy machine is told from a wrong verdict.

use super::*;
use crate::demo::{
    sample::{MS, configuration, follow, hold_up, judged, leave, run, sleep_again},
    truth::Configuration,
};

#[test]
fn a_delay_that_drowned_is_told_with_its_reason() {
    let report = |change: fn(&mut Vec<Truth>, &mut Summary)| {
        let (mut truths, mut summary) = run();
        change(&mut truths, &mut summary);
        let configuration = sleep_again(&mut truths, &mut summary);
        leave(&mut truths);
        judged(&truths, &summary, &configuration)
    };
    // The others came shortly before it did.
    let near = report(|truths, summary| {
        for truth in truths.iter_mut() {
            truth.collectives[1].arrived_ns = 1_145 * MS;
        }
        truths[1].collectives[1].arrived_ns += 5 * MS;
        follow(truths, summary, 1);
        summary.operations[1].culprit = None;
    });
    assert_eq!(near.problems, Vec::<String>::new());
    let [drowned] = &near.drowned[..] else {
        panic!("{:?}", near.drowned)
    };
    assert_eq!(
        (drowned.collective, drowned.step, drowned.rank, drowned.slept_ms),
        (1, 2, 1, 40)
    );
    assert!((drowned.lag_ms - 5.0).abs() < 1e-9, "{drowned:?}");
    assert_eq!(drowned.why, "half of the others arrived within 5.0 ms of it");
    // Another came later, and is the one to name.
    let overtaken = report(|truths, summary| {
        truths[3].collectives[1].arrived_ns = truths[1].collectives[1].arrived_ns + 30 * MS;
        follow(truths, summary, 1);
        summary.operations[1].culprit = late_rank(truths, 1);
    });
    assert_eq!(overtaken.problems, Vec::<String>::new());
    assert_eq!(overtaken.drowned[0].why, "rank 3 arrived 30.0 ms after it");
    assert!(overtaken.drowned[0].lag_ms > 10.0, "{:?}", overtaken.drowned);
}

/// A run in which no delay is intended and rank 1 gets to the second collective `lag_ms` after the others, which leave a millisecond
/// later; its part begins `held_up_ns` after its note.
fn quiet(lag_ms: u64, held_up_ns: u64) -> Report {
    let (mut truths, mut summary) = run();
    for truth in &mut truths {
        truth.collectives[1].slept_ms = 0;
        truth.collectives[1].arrived_ns = 1_200 * MS;
    }
    truths[1].collectives[1].arrived_ns += lag_ms * MS;
    leave(&mut truths);
    follow(&truths, &mut summary, 1);
    hold_up(&truths, &mut summary, 1, 1, held_up_ns);
    let configuration = Configuration {
        delays: vec![],
        wire: None,
        ..configuration()
    };
    judged(&truths, &summary, &configuration)
}

#[test]
fn where_nobody_is_to_be_late_only_who_really_was_may_be_named() {
    let told = |report: Report| (report.problems, report.really_late, report.culprits_named);
    assert_eq!(told(quiet(0, 0)), (vec![], 0, 0));
    assert_eq!(told(quiet(9, 0)), (vec![], 0, 0));
    assert_eq!(told(quiet(20, 0)), (vec![], 1, 1));
    // Not for what it noted, but for what came on top of that, while the others were there: for a millisecond.
    assert_eq!(told(quiet(9, MS)), (vec![], 0, 1));
    let (problems, ..) = told(quiet(9, MS + 200_000));
    assert!(
        problems
            .iter()
            .any(|line| line.contains("rank 1 is shown to begin after another left (0.200 ms)")),
        "{problems:?}"
    );
}

#[test]
fn a_rank_may_be_held_up_after_its_note_for_as_long_as_the_others_do_not_leave() {
    // Rank 3 is named at the first collective, at which all noted the same time, and rank 1 at the second, for which it slept.
    let found = |held_up_ms: [u64; 2], left_ms: u64| {
        let (mut truths, mut summary) = run();
        for truth in &mut truths {
            truth.collectives[0].arrived_ns = 1_000 * MS;
            truth.collectives[0].left_ns = (1_000 + left_ms) * MS;
            truth.collectives[1].left_ns = 1_155 * MS;
        }
        // It noted its own end later still: that says nothing.
        truths[3].collectives[0].left_ns += 50 * MS;
        leave(&mut truths);
        follow(&truths, &mut summary, 0);
        hold_up(&truths, &mut summary, 0, 3, held_up_ms[0] * MS);
        hold_up(&truths, &mut summary, 1, 1, held_up_ms[1] * MS);
        let report = judged(&truths, &summary, &configuration());
        let held_up = report
            .held_up
            .iter()
            .map(|h| (h.collective, h.named.unwrap().rank));
        (held_up.collect::<Vec<_>>(), report.problems)
    };
    assert_eq!(found([14, 0], 15), (vec![(0, 3)], vec![]));
    let (_, problems) = found([14, 0], 13);
    assert!(
        matches!(&problems[..], [one] if one.contains("rank 3 is shown to begin after another left (1.000 ms)")),
        "{problems:?}"
    );
    // More than one of so few is too many, and the lag that was slept may have grown likewise.
    let (held_up, problems) = found([14, 10], 15);
    assert_eq!(held_up, [(0, 3), (1, 1)]);
    assert!(
        matches!(&problems[..], [one] if one.contains("too busy")),
        "{problems:?}"
    );
    // For no longer than the others were there.
    let (_, problems) = found([14, 30], 15);
    assert!(
        problems
            .iter()
            .any(|line| line.contains("rank 1 is shown to begin after another left (15.015 ms)")),
        "{problems:?}"
    );
}

/// What is told of the one collective at which the notes say something else.
fn held_up_once(truths: &[Truth], summary: &Summary) -> HeldUp {
    let report = judged(truths, summary, &configuration());
    assert_eq!(report.problems, Vec::<String>::new());
    let [held_up] = &report.held_up[..] else {
        panic!("{:?}", report.held_up)
    };
    held_up.clone()
}

/// Rank 0 was 30 ms late by the notes, and rank 2, which was not as late, began after it: the check once took offence at who is named.
#[test]
fn of_two_late_ranks_the_one_held_up_is_named() {
    let (mut truths, mut summary) = run();
    truths[0].collectives[0].arrived_ns += 30 * MS;
    truths[2].collectives[0].arrived_ns += 25 * MS;
    leave(&mut truths);
    follow(&truths, &mut summary, 0);
    hold_up(&truths, &mut summary, 0, 2, 5 * MS + 500_000);
    let held_up = held_up_once(&truths, &summary);
    let named = held_up.named.unwrap();
    assert_eq!((named.rank, named.lag_ns, held_up.noted.rank), (2, 30_490_000, 0));
}

/// Where a rank slept and came last, another one may be named only if it came last with it.
#[test]
fn a_rank_that_slept_is_named_unless_another_came_with_it() {
    let found = |noted_ms: u64| {
        let (mut truths, mut summary) = run();
        truths[2].collectives[1].arrived_ns += noted_ms * MS;
        let configuration = sleep_again(&mut truths, &mut summary);
        leave(&mut truths);
        follow(&truths, &mut summary, 1);
        hold_up(&truths, &mut summary, 1, 2, (40 - noted_ms) * MS + 500_000);
        assert_eq!(summary.operations[1].culprit.unwrap().rank, 2);
        let report = judged(&truths, &summary, &configuration);
        let drowned: Vec<_> = report.drowned.into_iter().map(|delay| delay.why).collect();
        (drowned, report.problems)
    };
    let (drowned, problems) = found(39);
    assert_eq!(drowned, ["rank 2 arrived -1.0 ms after it"]);
    assert_eq!(problems, Vec::<String>::new());
    let (drowned, problems) = found(30);
    assert_eq!(drowned, Vec::<String>::new());
    assert!(
        matches!(&problems[..], [one] if one.contains("not named, but rank 2 (40.5 ms)")),
        "{problems:?}"
    );
}

/// Others held up between their notes and their parts leave less of a late rank's lag, or nothing: nobody need be named then.
#[test]
fn a_rank_is_less_late_where_others_are_held_up() {
    let (mut truths, mut summary) = run();
    truths[2].collectives[0].arrived_ns += 18 * MS;
    truths[1].collectives[0].arrived_ns += 16 * MS;
    leave(&mut truths);
    follow(&truths, &mut summary, 0);
    hold_up(&truths, &mut summary, 0, 3, 15 * MS);
    assert_eq!(summary.operations[0].culprit, None);
    let held_up = held_up_once(&truths, &summary);
    assert_eq!((held_up.named, held_up.noted.rank), (None, 2));
}

#[test]
fn the_late_rank_is_the_last_against_the_others_median() {
    let (mut truths, _) = run();
    for (truth, arrived) in truths.iter_mut().zip([10, 30, 14, 12]) {
        truth.collectives[0].arrived_ns = arrived * MS;
    }
    let late = |truths: &[Truth]| late_rank(truths, 0).map(|late| (late.rank, late.lag_ns));
    assert_eq!(late(&truths), Some((1, 18 * MS)));
    assert_eq!(late(&truths[..2]), Some((1, 20 * MS)));
    assert_eq!(late(&truths[..3]), Some((1, 18 * MS)));
    assert!(late_rank(&truths, 99).is_none());
    // Of two the lower.
    truths[2].collectives[0].arrived_ns = 30 * MS;
    assert_eq!(late(&truths), Some((1, 18 * MS)));
}
