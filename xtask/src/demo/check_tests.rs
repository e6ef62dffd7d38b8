//! The check has to find each kind of difference, and nothing where there is none.

use super::*;
use crate::demo::{
    lateness::late_rank,
    summary::{Culprit, Events, RankPart},
    truth::{Collective, Delay},
};

const MS: u64 = 1_000_000;

fn configuration() -> Configuration {
    Configuration {
        ranks: 4,
        nodes: 2,
        steps: 3,
        batch: 32,
        seed: 0,
        pace_ms: 0,
        delays: vec![Delay {
            step: 2,
            rank: 1,
            ms: 40,
        }],
        wire: None,
    }
}

/// Three collectives of four ranks; rank 1 is 40 ms late at the second.
fn run() -> (Vec<Truth>, Summary) {
    let truths: Vec<Truth> = (0..4)
        .map(|rank| {
            let collectives = (0..3)
                .map(|index| {
                    let slept_ms = if index == 1 && rank == 1 { 40 } else { 0 };
                    let called_ns =
                        1_000 * MS + index * 100 * MS + u64::from(rank) * 10_000 + u64::from(slept_ms) * MS;
                    Collective {
                        name: "all_reduce".to_owned(),
                        step: index as u32 + 1,
                        bytes: 64,
                        called_ns,
                        returned_ns: called_ns + 20_000,
                        arrived_ns: called_ns + 5_000,
                        left_ns: 0,
                        slept_ms,
                    }
                })
                .collect();
            Truth {
                rank,
                pid: 100 + rank,
                collectives,
                events: BTreeMap::from([("op_launched".to_owned(), 4), ("comm_init".to_owned(), 1)]),
                events_at_gate: BTreeMap::from([("op_launched".to_owned(), 1), ("comm_init".to_owned(), 1)]),
                loss: vec![1.0, 0.9, 0.8],
                weights: "aa".to_owned(),
                ..Truth::default()
            }
        })
        .collect();
    let operations = (0..3usize)
        .map(|index| Operation {
            name: "all_reduce".to_owned(),
            sequence: 7 + index as u64,
            bytes: 64,
            complete: true,
            trace_id: index.to_string(),
            ranks: 4,
            culprit: (index == 1).then_some(Culprit {
                rank: 1,
                lag_ns: 40 * MS + 300_000,
            }),
            by_rank: truths
                .iter()
                .map(|truth| RankPart {
                    rank: truth.rank,
                    pid: truth.pid,
                    api_start_ns: truth.collectives[index].called_ns + 1_000,
                    device_start_ns: truth.collectives[index].arrived_ns,
                    device_end_ns: truth.collectives[index].arrived_ns + MS,
                })
                .collect(),
            ..Operation::default()
        })
        .collect();
    let summary = Summary {
        records: BTreeMap::from([(
            "op_launched".to_owned(),
            Events {
                received: 12,
                emitted: 12,
                lost: 0,
                missed: 0,
            },
        )]),
        spans: [
            ("root", 3),
            ("rank", 12),
            ("enqueue", 12),
            ("launch", 12),
            ("kernel_channel", 24),
            ("proxy", 8),
            ("group", 0),
        ]
        .map(|(kind, count)| (kind.to_owned(), count))
        .into(),
        operations,
        probe_hits: 1,
        ..Summary::default()
    };
    (truths, summary)
}

/// All leave each collective, if no other time is given, a millisecond after the last one's arrival.
fn leave(truths: &mut [Truth]) {
    for index in 0..3 {
        let arrivals = truths.iter().map(|truth| truth.collectives[index].arrived_ns);
        let last = arrivals.max().unwrap();
        for truth in truths.iter_mut() {
            let left_ns = &mut truth.collectives[index].left_ns;
            if *left_ns == 0 {
                *left_ns = last + MS;
            }
        }
    }
}

/// What the check says of a run, with a threshold of 10 ms.
fn judged(truths: &[Truth], summary: &Summary, configuration: &Configuration) -> Report {
    let expectation = Expectation {
        configuration,
        threshold_ns: 10 * MS,
        outputs: &[],
        otlp: false,
    };
    check(truths, summary, &expectation)
}

fn problems(change: impl FnOnce(&mut Vec<Truth>, &mut Summary)) -> Vec<String> {
    let (mut truths, mut summary) = run();
    change(&mut truths, &mut summary);
    leave(&mut truths);
    let configuration = configuration();
    let report = judged(&truths, &summary, &configuration);
    assert_eq!(report.ok, report.problems.is_empty());
    report.problems
}

#[test]
fn a_faithful_summary_has_no_problem() {
    assert_eq!(problems(|_, _| ()), Vec::<String>::new());
    let (mut truths, summary) = run();
    leave(&mut truths);
    let configuration = configuration();
    let report = judged(&truths, &summary, &configuration);
    assert_eq!(
        (
            report.culprits_expected,
            report.culprits_named,
            report.collectives
        ),
        (1, 1, 3)
    );
    assert_eq!((report.drowned, report.really_late), (vec![], 0));
    assert!((report.probe_hits_per_op - 1.0 / 12.0).abs() < 1e-9);
    assert!(report.worst_lag_error_ms > 0.0 && report.worst_lag_error_ms < 1.0);
}

#[test]
fn each_difference_is_found() {
    type Change = fn(&mut Vec<Truth>, &mut Summary);
    let cases: [(&str, Change); 20] = [
        ("1 group spans for 0 groups", |_, s| {
            s.spans.insert("group".to_owned(), 1);
        }),
        ("was to sleep 40 ms", |t, _| {
            t[1].collectives[1].called_ns = t[1].collectives[0].returned_ns + 39 * MS;
        }),
        ("called nothing in step 2", |t, _| {
            t[1].collectives[1].step = 9;
        }),
        ("2 collectives, each rank called 3", |_, s| {
            s.operations.truncate(2);
        }),
        ("followed by", |_, s| s.operations[2].sequence += 1),
        ("shows 3 of 4 ranks", |_, s| s.operations[0].by_rank.truncate(3)),
        ("is in process", |_, s| s.operations[0].by_rank[2].pid = 9),
        ("ends before it starts", |_, s| {
            s.operations[0].by_rank[2].device_end_ns = 1;
        }),
        ("outside of when it was made", |_, s| {
            s.operations[0].by_rank[0].api_start_ns -= 2 * MS;
        }),
        ("is not named", |_, s| s.operations[1].culprit = None),
        ("names rank 3, rank 1 was late", |_, s| {
            s.operations[1].culprit = Some(Culprit {
                rank: 3,
                lag_ns: 40 * MS,
            });
        }),
        ("are reported", |_, s| {
            s.operations[1].culprit = Some(Culprit {
                rank: 1,
                lag_ns: 50 * MS,
            });
        }),
        ("nobody was late", |_, s| {
            s.operations[0].culprit = Some(Culprit {
                rank: 3,
                lag_ns: 12 * MS,
            });
        }),
        ("library counted 12 events, the collector received 11", |_, s| {
            s.records.insert(
                "op_launched".to_owned(),
                Events {
                    received: 11,
                    emitted: 12,
                    lost: 0,
                    missed: 0,
                },
            );
        }),
        ("1 events were lost", |_, s| s.lost = 1),
        ("saw other losses", |t, _| t[2].loss[1] = 0.5),
        ("other weights", |t, _| t[3].weights = "bb".to_owned()),
        ("11 launch spans", |_, s| {
            s.spans.insert("launch".to_owned(), 11);
        }),
        ("probe hits", |_, s| s.probe_hits = 2),
        ("has 1 messages, 0 were sent", |_, s| {
            let message = Operation {
                name: "send_recv".to_owned(),
                trace_id: "m".to_owned(),
                ..Operation::default()
            };
            s.operations.push(message);
        }),
    ];
    for (words, change) in cases {
        let found = problems(change);
        assert!(
            found.iter().any(|line| line.contains(words)),
            "{words}: {found:?}"
        );
    }
}

#[test]
fn a_busy_machine_is_not_taken_for_a_good_run() {
    // Everybody is as late as the rank that was to be: no verdict is expected, and the run is refused as evidence.
    let found = problems(|truths, summary| {
        for truth in truths.iter_mut() {
            let collective = &mut truth.collectives[1];
            collective.arrived_ns = 1_145 * MS;
        }
        summary.operations[1].culprit = None;
    });
    assert!(found.iter().any(|line| line.contains("too busy")), "{found:?}");
}

#[test]
fn a_delay_that_drowned_is_told_with_its_reason() {
    let report = |change: fn(&mut Vec<Truth>, &mut Summary)| {
        let (mut truths, mut summary) = run();
        change(&mut truths, &mut summary);
        let mut configuration = configuration();
        // Another delay, of the same rank one step later, that is seen.
        configuration.delays.push(Delay {
            step: 3,
            rank: 1,
            ms: 50,
        });
        let later = &mut truths[1].collectives[2];
        later.slept_ms = 50;
        later.arrived_ns += 50 * MS;
        leave(&mut truths);
        summary.operations[2].culprit = Some(Culprit {
            rank: 1,
            lag_ns: 50 * MS,
        });
        judged(&truths, &summary, &configuration)
    };
    // The others came when it did.
    let near = report(|truths, summary| {
        for truth in truths.iter_mut() {
            truth.collectives[1].arrived_ns = 1_145 * MS;
        }
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
    assert!(drowned.lag_ms.abs() < 1e-9, "{drowned:?}");
    // Another came later, and is the one to name.
    let overtaken = report(|truths, summary| {
        truths[3].collectives[1].arrived_ns += 70 * MS;
        let lag_ns = late_rank(truths, 1).unwrap().1;
        summary.operations[1].culprit = Some(Culprit { rank: 3, lag_ns });
    });
    assert_eq!(overtaken.problems, Vec::<String>::new());
    assert!(
        overtaken.drowned[0].why.contains("rank 3 arrived"),
        "{:?}",
        overtaken.drowned
    );
    assert!(overtaken.drowned[0].lag_ms > 10.0, "{:?}", overtaken.drowned);
}

/// A run in which no delay is intended, and rank 1 arrives at the second collective `lag_ms` after the others.
fn quiet(lag_ms: u64, named: bool) -> Report {
    quiet_with(lag_ms, named.then_some(lag_ms * MS + 100_000))
}

/// The same, and what it is named with, if it is.
fn quiet_with(lag_ms: u64, named_ns: Option<u64>) -> Report {
    let (mut truths, mut summary) = run();
    for truth in &mut truths {
        truth.collectives[1].slept_ms = 0;
        truth.collectives[1].arrived_ns = 1_200 * MS;
    }
    truths[1].collectives[1].arrived_ns += lag_ms * MS;
    leave(&mut truths);
    summary.operations[1].culprit = named_ns.map(|lag_ns| Culprit { rank: 1, lag_ns });
    let configuration = Configuration {
        delays: vec![],
        wire: None,
        ..configuration()
    };
    judged(&truths, &summary, &configuration)
}

#[test]
fn where_nobody_is_to_be_late_only_who_really_was_may_be_named() {
    let report = quiet(0, false);
    assert_eq!((report.problems, report.really_late), (vec![], 0));
    // Within the margin of the threshold, which excuses a name in a run with delays.
    let report = quiet(9, true);
    assert!(
        report
            .problems
            .iter()
            .any(|line| line.contains("nobody was late")),
        "{:?}",
        report.problems
    );
    assert_eq!(report.really_late, 0);
    // Not for what it noted, but for what came on top of that, while the others were there: for a millisecond.
    let report = quiet_with(9, Some(10 * MS));
    assert_eq!((report.problems.len(), report.held_up.len()), (0, 1));
    let report = quiet_with(9, Some(10 * MS + 1));
    assert_eq!((report.problems.is_empty(), report.held_up.len()), (false, 0));
    let report = quiet(20, true);
    assert_eq!((report.problems, report.really_late), (vec![], 1));
}

#[test]
fn a_rank_may_be_held_up_after_its_note_for_as_long_as_the_others_do_not_leave() {
    // Rank 3 is named at the first collective, at which all noted the same time, and rank 1 at the second, for which it slept.
    let found = |lags_ms: [u64; 2], left_ms: u64| {
        let (mut truths, mut summary) = run();
        for truth in &mut truths {
            truth.collectives[0].arrived_ns = 1_000 * MS;
            truth.collectives[0].left_ns = (1_000 + left_ms) * MS;
        }
        // It noted its own end later still: that says nothing.
        truths[3].collectives[0].left_ns += 50 * MS;
        leave(&mut truths);
        summary.operations[0].culprit = Some(Culprit {
            rank: 3,
            lag_ns: lags_ms[0] * MS,
        });
        truths[0].collectives[1].left_ns = 1_155 * MS;
        truths[2].collectives[1].left_ns = 1_155 * MS;
        truths[3].collectives[1].left_ns = 1_155 * MS;
        summary.operations[1].culprit = Some(Culprit {
            rank: 1,
            lag_ns: lags_ms[1] * MS,
        });
        let configuration = configuration();
        let report = judged(&truths, &summary, &configuration);
        let held_up: Vec<_> = report.held_up.iter().map(|h| (h.collective, h.rank)).collect();
        (held_up, report.problems)
    };
    let (held_up, problems) = found([14, 40], 15);
    assert_eq!((held_up, problems), (vec![(0, 3)], vec![]));
    let (held_up, problems) = found([14, 40], 13);
    assert!(
        held_up.is_empty() && problems[0].contains("nobody was late"),
        "{problems:?}"
    );
    // More than one of so few is too many, and the lag that was slept may have grown likewise.
    let (held_up, problems) = found([14, 50], 15);
    assert_eq!(held_up, [(0, 3), (1, 1)]);
    assert!(
        matches!(&problems[..], [one] if one.contains("too busy")),
        "{problems:?}"
    );
    let (held_up, problems) = found([14, 70], 15);
    assert_eq!(held_up, [(0, 3)]);
    assert!(problems[0].contains("70.0 are reported"), "{problems:?}");
}

#[test]
fn the_late_rank_is_the_last_against_the_others_median() {
    let (mut truths, _) = run();
    for (truth, arrived) in truths.iter_mut().zip([10, 30, 14, 12]) {
        truth.collectives[0].arrived_ns = arrived * MS;
    }
    assert_eq!(late_rank(&truths, 0), Some((1, 18 * MS)));
    assert_eq!(late_rank(&truths[..2], 0), Some((1, 20 * MS)));
    assert_eq!(late_rank(&truths[..3], 0), Some((1, 18 * MS)));
    assert_eq!(late_rank(&truths, 99), None);
}
