//! The check finds each kind of difference, and nothing where there is none.

use super::*;
use crate::demo::{
    lateness::late_rank,
    sample::{MS, configuration, follow, hold_up, judged, leave, run},
    summary::{Culprit, Events},
};

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
    let (mut truths, mut summary) = run();
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
    assert!(report.worst_lag_error_ms.abs() < 1e-9);
    // Of what lies between a note and the part, the report has the most.
    hold_up(&truths, &mut summary, 1, 1, 300_000);
    let report = judged(&truths, &summary, &configuration);
    assert!(report.ok && (report.worst_lag_error_ms - 0.3).abs() < 1e-9);
}

#[test]
fn each_difference_is_found() {
    type Change = fn(&mut Vec<Truth>, &mut Summary);
    let cases: [(&str, Change); 27] = [
        ("1 group spans for 0 groups", |_, s| {
            s.spans.insert("group".to_owned(), 1);
        }),
        ("was to sleep 40 ms", |t, _| {
            t[1].collectives[1].called_ns = t[1].collectives[0].returned_ns + 39 * MS;
        }),
        ("rank 2: a collective's arrival was not noted", |t, _| {
            t[2].collectives[1].arrived_ns = t[2].collectives[1].queued_ns - 1;
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
        ("names nobody, rank 1 (40.0 ms) was late", |_, s| {
            s.operations[1].culprit = None;
        }),
        ("names rank 3 (40.0 ms), rank 1 (40.0 ms) was late", |_, s| {
            s.operations[1].culprit = Some(Culprit {
                rank: 3,
                lag_ns: 40 * MS,
            });
        }),
        ("names rank 1 (40.2 ms), rank 1 (40.0 ms) was late", |_, s| {
            s.operations[1].culprit = Some(Culprit {
                rank: 1,
                lag_ns: 40 * MS + 200_000,
            });
        }),
        ("names rank 3 (12.0 ms), nobody was late", |_, s| {
            s.operations[0].culprit = Some(Culprit {
                rank: 3,
                lag_ns: 12 * MS,
            });
        }),
        ("names rank 3 (9.0 ms), nobody was late", |t, s| {
            // Late indeed, and by less than the threshold.
            t[3].collectives[0].arrived_ns += 9 * MS;
            follow(t, s, 0);
            s.operations[0].culprit = late_rank(t, 0);
        }),
        (
            "rank 2 is shown to begin before it got there (0.200 ms)",
            |_, s| {
                s.operations[1].by_rank[2].device_start_ns -= 200_000;
            },
        ),
        (
            "rank 2 is shown to begin after another left (0.200 ms)",
            |t, s| {
                s.operations[0].by_rank[2].device_start_ns += MS;
                t[3].collectives[0].left_ns = s.operations[0].by_rank[2].device_start_ns - 200_000;
            },
        ),
        ("rank 2 is shown to end after it left (0.200 ms)", |t, s| {
            t[2].collectives[0].left_ns = s.operations[0].by_rank[2].device_end_ns - 200_000;
        }),
        ("names rank 1 (40.0 ms), nobody was late", |t, s| {
            // Nobody waits for a broadcast's receivers.
            for truth in t.iter_mut() {
                truth.collectives[1].name = "broadcast".to_owned();
            }
            s.operations[1].name = "broadcast".to_owned();
        }),
        (
            "slept for 40 ms before collective 1, was 40.0 ms late and is not named, but nobody",
            |t, s| {
                // The others are shown to have begun when it came, as if they had been held up until then.
                for rank in [0, 2, 3] {
                    s.operations[1].by_rank[rank].device_start_ns = t[1].collectives[1].arrived_ns;
                }
                s.operations[1].culprit = None;
            },
        ),
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
        follow(truths, summary, 1);
        summary.operations[1].culprit = None;
    });
    assert!(found.iter().any(|line| line.contains("too busy")), "{found:?}");
}
