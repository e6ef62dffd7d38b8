//! A rank whose process ends while others need it is found dead, though no watchdog says so.

mod common;

use ringsight_collector::{
    Collector,
    synthetic::{EPOCH_NS, FIRST_PID, Job, Operation},
};
use ringsight_exporters::model::Finding;
use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::{Kind, Record, State};

use common::collector;

const WORLD: Job = Job {
    comm: 0x1122_3344_5566_7788,
    ranks: 4,
    nodes: 1,
    channels: 1,
    steps: 2,
};
const MS: u64 = 1_000_000;

fn is_end(sample: &Sample) -> bool {
    matches!(sample, Sample::Record { record, .. } if record.kind() == Some(Kind::OpCompleted))
}

/// The first operation of all ranks, which ends, and of ranks 0 to 2 the second.
fn streams(second_ends: Option<State>) -> Vec<Sample> {
    let operations = [1, 2].map(Operation::all_reduce);
    let mut all = Vec::new();
    for rank in 0..4 {
        let count = if rank == 3 { 1 } else { 2 };
        let mut samples = WORLD.streams(rank, &operations[..count]).concat();
        let last = samples.iter().rposition(is_end).unwrap();
        match (second_ends, &mut samples[last]) {
            _ if rank == 3 => {}
            (Some(state), Sample::Record { record, .. }) => record.state = state,
            _ => drop(samples.remove(last)),
        }
        all.extend(samples);
    }
    all
}

fn exited(rank: u32) -> Sample {
    Sample::Exited {
        pid: FIRST_PID + rank,
        ended: true,
    }
}

fn watermarks(ranks: std::ops::Range<u32>, ms: u64) -> Vec<Sample> {
    ranks
        .map(|rank| Sample::Watermark {
            pid: FIRST_PID + rank,
            time_ns: EPOCH_NS + ms * MS,
        })
        .collect()
}

fn take(collector: &mut Collector, samples: impl IntoIterator<Item = Sample>) {
    collector.ingest(&mut samples.into_iter().collect());
}

fn check(findings: &[Finding]) {
    let [finding] = findings else {
        panic!("{findings:?}")
    };
    assert_eq!(
        (finding.cause, finding.culprit, finding.hang),
        ("RANK_DEAD", 3, true)
    );
    assert_eq!(
        finding.culprit_place.as_ref().map(|place| place.pid),
        Some(FIRST_PID + 3)
    );
    assert!(!finding.ended && !finding.waiting.is_empty(), "{finding:?}");
    assert!(finding.text.contains("is dead"), "{}", finding.text);
}

#[test]
fn a_rank_is_dead_if_others_wait_for_it() {
    let mut collector = collector();
    take(&mut collector, streams(None));
    take(&mut collector, watermarks(0..4, 100));
    take(&mut collector, [exited(3)]);
    take(&mut collector, watermarks(0..3, 400));
    assert!(collector.findings().is_empty(), "it may have done its part");
    take(&mut collector, watermarks(0..3, 1400));
    check(&collector.findings());
    // Its place is known for as long as the finding is.
    take(&mut collector, watermarks(0..3, 20_000));
    check(&collector.findings());
    // Those who end because of it are not dead of themselves.
    take(&mut collector, (0..3).map(exited));
    take(&mut collector, watermarks(0..0, 30_000));
    check(&collector.findings());
}

fn failed(rank: u32, status: i32) -> Vec<Sample> {
    let failed = Sample::Failed {
        pid: FIRST_PID + rank,
        status,
    };
    vec![failed, exited(rank)]
}

#[test]
fn a_rank_that_fails_between_two_operations_is_dead_and_one_of_a_job_that_somebody_ended_is_not() {
    // By SIGKILL; the others end with an error of their own. Or all by SIGTERM.
    for statuses in [[256, 256, 256, 9], [15, 15, 15, 15]] {
        let is_failure = statuses[3] == 9;
        for is_watched_on in [false, true] {
            let mut collector = collector();
            take(&mut collector, streams(Some(State::STOP)));
            take(&mut collector, watermarks(0..4, 100));
            take(&mut collector, failed(3, statuses[3]));
            take(&mut collector, watermarks(0..3, 200));
            for rank in 0..3 {
                take(&mut collector, failed(rank, statuses[rank as usize]));
            }
            if is_watched_on {
                take(&mut collector, watermarks(0..3, 2000));
            } else {
                collector.finish(EPOCH_NS + 300 * MS);
            }
            let findings = collector.findings();
            assert_eq!(findings.len(), usize::from(is_failure), "{findings:?}");
            for finding in &findings {
                assert_eq!(
                    (finding.cause, finding.culprit, finding.sequence),
                    ("RANK_DEAD", 3, 0)
                );
                assert!(
                    finding
                        .text
                        .ends_with("is dead: its process failed between two operations"),
                    "{}",
                    finding.text
                );
                assert_eq!(finding.unix_ns, 1_700_000_000_000_000_000 + EPOCH_NS + 100 * MS);
            }
        }
    }
}

#[test]
fn a_rank_is_dead_if_operations_fail_a_moment_before_or_after() {
    for failed_first in [false, true] {
        let mut collector = collector();
        let (failing, dying) = (streams(Some(State::ABORTED)), vec![exited(3)]);
        let (processes, records): (Vec<_>, Vec<_>) = failing
            .into_iter()
            .partition(|sample| !matches!(sample, Sample::Record { .. }));
        take(&mut collector, processes);
        let steps = if failed_first {
            [records, dying]
        } else {
            [dying, records]
        };
        for step in steps {
            take(&mut collector, step);
            take(&mut collector, watermarks(0..3, 100));
        }
        take(&mut collector, watermarks(0..3, 900));
        check(&collector.findings());
    }
}

#[test]
fn ranks_that_end_while_nobody_waits_are_not_dead() {
    // All are done; three end, the last one writes a checkpoint.
    let mut collector = collector();
    take(&mut collector, streams(Some(State::STOP)));
    take(&mut collector, (1..4).map(exited));
    take(&mut collector, watermarks(0..1, 60_000));
    assert!(collector.findings().is_empty(), "{:?}", collector.findings());
}

#[test]
fn a_rank_that_destroyed_its_communicator_is_not_dead() {
    let mut collector = collector();
    take(&mut collector, streams(None));
    let destroyed = Sample::Record {
        pid: FIRST_PID + 3,
        tid: 1,
        carrier: Carrier::Ring,
        record: Record {
            comm: WORLD.comm,
            rank: 3,
            ..Record::new(Kind::CommDestroy, State::STOP, EPOCH_NS + 100 * MS)
        },
    };
    take(&mut collector, [destroyed, exited(3)]);
    take(&mut collector, watermarks(0..3, 5_000));
    assert!(collector.findings().is_empty(), "{:?}", collector.findings());
}
