//! A made-up run for tests of the check: the ranks' truth, and the summary that a right collector would write.

use std::collections::BTreeMap;

use super::{
    check::{Expectation, Report, check},
    lateness::late_rank,
    summary::{Culprit, Events, Operation, RankPart, Summary},
    truth::{Collective, Configuration, Delay, Truth},
};

pub(super) const MS: u64 = 1_000_000;

pub(super) fn configuration() -> Configuration {
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
pub(super) fn run() -> (Vec<Truth>, Summary) {
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
                        queued_ns: called_ns - 50_000,
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
                lag_ns: 40 * MS - 10_000,
            }),
            by_rank: truths
                .iter()
                .map(|truth| RankPart {
                    rank: truth.rank,
                    pid: truth.pid,
                    api_start_ns: truth.collectives[index].called_ns + 1_000,
                    device_start_ns: truth.collectives[index].arrived_ns,
                    device_end_ns: truth.collectives[index].arrived_ns + MS,
                    ..RankPart::default()
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
pub(super) fn leave(truths: &mut [Truth]) {
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

/// The parts of collective `index` begin when the ranks noted it, and last for a millisecond.
pub(super) fn follow(truths: &[Truth], summary: &mut Summary, index: usize) {
    for (part, truth) in summary.operations[index].by_rank.iter_mut().zip(truths) {
        part.device_start_ns = truth.collectives[index].arrived_ns;
        part.device_end_ns = part.device_start_ns + MS;
    }
}

/// The part of `rank` in collective `index` begins `held_up_ns` after its note, and whoever is then to be named is.
pub(super) fn hold_up(truths: &[Truth], summary: &mut Summary, index: usize, rank: usize, held_up_ns: u64) {
    let operation = &mut summary.operations[index];
    let part = &mut operation.by_rank[rank];
    part.device_start_ns = truths[rank].collectives[index].arrived_ns + held_up_ns;
    part.device_end_ns = part.device_start_ns;
    let (mut started, _) = run();
    for (truth, part) in started.iter_mut().zip(&operation.by_rank) {
        truth.collectives[index].arrived_ns = part.device_start_ns;
    }
    operation.culprit = late_rank(&started, index).filter(|late| late.lag_ns >= 10 * MS);
}

/// Rank 1 is late once more, at the third collective, by 50 ms, and is named; both delays were intended.
pub(super) fn sleep_again(truths: &mut [Truth], summary: &mut Summary) -> Configuration {
    let mut configuration = configuration();
    configuration.delays.push(Delay {
        step: 3,
        rank: 1,
        ms: 50,
    });
    let later = &mut truths[1].collectives[2];
    later.slept_ms = 50;
    later.arrived_ns += 50 * MS;
    follow(truths, summary, 2);
    summary.operations[2].culprit = late_rank(truths, 2);
    configuration
}

/// What the check says of a run, with a threshold of 10 ms.
pub(super) fn judged(truths: &[Truth], summary: &Summary, configuration: &Configuration) -> Report {
    let expectation = Expectation {
        configuration,
        threshold_ns: 10 * MS,
        outputs: &[],
        otlp: false,
    };
    check(truths, summary, &expectation)
}
