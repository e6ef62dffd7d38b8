//! Losses, late attaches, ends in mid-operation, rubbish: what the collector makes of an imperfect view.

mod common;

use proptest::prelude::*;
use ringsight_collector::{
    Options,
    identity::Role,
    limits::{Limit, Limits, Shared},
    synthetic::{EPOCH_NS, FIRST_PID, Job, Operation},
};
use ringsight_exporters::model::{Span, Value};
use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::{Kind, Record, State};

use common::{attribute, check_trees, collect, collector, collector_with, named, sorted};

/// A limit for one process, of which there is one.
fn few(process: usize) -> Shared {
    Shared {
        process,
        all: process,
    }
}

#[test]
fn what_was_lost_is_admitted() {
    let job = Job::default();
    let operations: Vec<_> = (1..=8).map(Operation::all_reduce).collect();
    let lose = |samples: Vec<Sample>, kind: Kind, state: State| -> Vec<Sample> {
        let is_it = |sample: &Sample| {
            matches!(sample, Sample::Record { pid, record, .. }
                if *pid == FIRST_PID + 1 && record.op == 3 && record.kind() == Some(kind) && record.state == state)
        };
        let before = samples.len();
        let kept: Vec<_> = samples.into_iter().filter(|sample| !is_it(sample)).collect();
        assert!(kept.len() < before, "there is no {kind}");
        kept
    };
    let cases = [
        (Kind::KernelCh, State::STOP),
        (Kind::KernelCh, State::START),
        (Kind::ProxyOp, State::STOP),
        (Kind::ProxyStep, State::STOP),
        (Kind::ProxyCompleted, State::STOP),
        (Kind::OpCompleted, State::STOP),
    ];
    for (kind, state) in cases {
        let mut collector = collector();
        let mut samples = lose(job.samples(0..4, &operations), kind, state);
        let lost = Sample::Lost {
            pid: Some(FIRST_PID + 1),
            carrier: Carrier::Ring,
            kind: Some(kind),
            count: 1,
        };
        // The loss is learned of while the operation is in flight.
        let at = samples
            .iter()
            .position(|s| matches!(s, Sample::Record { pid, record, .. } if *pid == FIRST_PID + 1 && record.op == 4))
            .unwrap();
        samples.insert(at, lost);
        collector.ingest(&mut samples);
        // The linger passes.
        for step in 1..=4 {
            let time_ns = EPOCH_NS + step * 2_000_000_000;
            samples.extend((0..4).map(|rank| Sample::Watermark {
                pid: FIRST_PID + rank,
                time_ns,
            }));
            collector.ingest(&mut samples);
        }
        let batch = collector.take_batch();
        check_trees(&batch.spans);
        let third = batch
            .operations
            .iter()
            .find(|operation| operation.sequence == 2)
            .unwrap();
        assert!(!third.complete, "{kind}");
        let fourth = batch
            .operations
            .iter()
            .find(|operation| operation.sequence == 6)
            .unwrap();
        assert!(fourth.complete, "{kind}: what came later lost nothing");
        assert_eq!(batch.operations.len(), 8, "{kind}");
        assert_eq!(collector.readings().counts.lost_total(), 1);
        assert_eq!(collector.readings().in_flight, 0, "{kind}");
    }
}

#[test]
fn a_rank_that_never_comes_is_waited_for_and_no_longer() {
    let job = Job::default();
    let mut collector = collector();
    // Rank 3's communicator is known, its operation is not.
    let mut samples = job.samples(0..3, &[Operation::all_reduce(1)]);
    samples.extend(job.streams(3, &[]).head);
    let watermarks = |time_ns| {
        (0..4).map(move |rank| Sample::Watermark {
            pid: FIRST_PID + rank,
            time_ns,
        })
    };
    let end = EPOCH_NS + 10_000_000;
    samples.extend(watermarks(end));
    collector.ingest(&mut samples);
    assert_eq!(collector.take_batch().spans.len(), 0);
    samples.extend(watermarks(end + 1_900_000_000));
    collector.ingest(&mut samples);
    assert_eq!((collector.take_batch().spans.len(), collector.waiting()), (0, 1));
    samples.extend(watermarks(end + 2_100_000_000));
    collector.ingest(&mut samples);
    let first = collector.take_batch();
    check_trees(&first.spans);
    assert!(!first.operations[0].complete);
    assert_eq!(first.operations[0].by_rank.len(), 3);
    // It comes after all: its spans join the trace, and no second root does.
    let late = job.streams(3, &[Operation::all_reduce(1)]);
    samples.extend(late.ring.into_iter().chain(late.probe));
    samples.extend(watermarks(end + 5_000_000_000));
    collector.ingest(&mut samples);
    let second = collector.take_batch();
    assert_eq!(named(&second.spans, "all_reduce").count(), 0);
    assert_eq!(named(&second.spans, "all_reduce rank").count(), 1);
    assert_eq!(second.operations.len(), 0);
    let both: Vec<_> = first.spans.into_iter().chain(second.spans).collect();
    check_trees(&both);
}

#[test]
fn an_operation_seen_from_its_middle_has_its_call_from_the_description() {
    let job = Job::default();
    let mut samples: Vec<Sample> = Vec::new();
    for rank in 0..4 {
        let streams = job.streams(rank, &[Operation::all_reduce(1), Operation::all_reduce(2)]);
        let attached = EPOCH_NS + 1_000_000 + 30_000;
        let after = |sample: &Sample| match sample {
            Sample::Record { record, .. } => record.time_ns >= attached,
            Sample::Description { description, .. } => description.device_end_ns >= attached,
            _ => true,
        };
        samples.extend(streams.head);
        samples.extend(streams.ring.into_iter().chain(streams.probe).filter(after));
    }
    let watermark = |time_ns| {
        (0..4).map(move |rank| Sample::Watermark {
            pid: FIRST_PID + rank,
            time_ns,
        })
    };
    samples.extend(watermark(EPOCH_NS + 1_000_000_000));
    let mut collector = collector();
    collector.ingest(&mut samples);
    samples.extend(watermark(EPOCH_NS + 4_000_000_000));
    collector.ingest(&mut samples);
    let batch = collector.take_batch();
    check_trees(&batch.spans);
    assert_eq!(batch.operations.len(), 2);
    let first = batch
        .operations
        .iter()
        .find(|operation| operation.sequence == 0)
        .unwrap();
    assert!(!first.complete, "its kernel's start was not seen");
    assert!(
        batch
            .operations
            .iter()
            .any(|operation| operation.sequence == 1 && operation.complete)
    );
    let of_first = |name| {
        named(&batch.spans, name)
            .filter(|span| span.trace_id == first.trace_id)
            .count()
    };
    assert_eq!(
        (
            of_first("enqueue"),
            of_first("launch"),
            of_first("kernel channel")
        ),
        (4, 4, 8)
    );
}

#[test]
fn a_group_and_its_operations_link_to_each_other() {
    let job = Job::default();
    let operations = [
        Operation::all_reduce(1).in_group(1),
        Operation::message(2, 0, 1).in_group(1),
    ];
    let batch = collect(job.samples(0..4, &operations));
    check_trees(&batch.spans);
    let groups: Vec<_> = named(&batch.spans, "group").collect();
    assert_eq!(groups.len(), 4, "one for each process");
    let of_first = groups
        .iter()
        .find(|group| {
            group
                .resource
                .attributes
                .contains(&("process.pid", Value::Int(i64::from(FIRST_PID))))
        })
        .unwrap();
    assert_eq!(attribute(of_first, "ccl.group.operations"), Some(&Value::Int(2)));
    // A process with one rank is one instance, in its groups too.
    for group in &groups {
        let of_process = |span: &&Span| {
            let pid = |span: &Span| {
                let mut attributes = span.resource.attributes.iter();
                attributes.find(|(name, _)| *name == "process.pid").cloned()
            };
            span.name == "all_reduce rank" && pid(span) == pid(group)
        };
        let rank = batch.spans.iter().find(of_process).expect("each takes part");
        assert_eq!(group.resource.attributes, rank.resource.attributes);
    }
    assert_eq!(of_first.links.len(), 2);
    for link in &of_first.links {
        let member = batch
            .spans
            .iter()
            .find(|span| (span.trace_id, span.span_id) == (link.trace_id, link.span_id))
            .unwrap();
        assert!(["all_reduce rank", "send rank"].contains(&member.name));
        assert!(
            member
                .links
                .iter()
                .any(|back| (back.trace_id, back.span_id) == (of_first.trace_id, of_first.span_id))
        );
    }
    let alone = collect(job.samples(0..4, &[Operation::all_reduce(1)]));
    assert_eq!(named(&alone.spans, "group").count(), 0, "nobody opened that one");
}

#[test]
fn operations_in_flight_at_the_end_are_reported_as_unfinished() {
    let job = Job::default();
    let mut samples: Vec<Sample> = Vec::new();
    for rank in 0..4 {
        let streams = job.streams(rank, &[Operation::all_reduce(1)]).concat();
        let ended = |s: &Sample| matches!(s, Sample::Record { record, .. } if record.kind() == Some(Kind::OpCompleted));
        samples.extend(streams.into_iter().filter(|sample| !ended(sample)));
    }
    let mut collector = collector();
    collector.ingest(&mut samples);
    assert_eq!(collector.readings().in_flight, 4);
    collector.finish(EPOCH_NS + 1_000_000_000);
    let batch = collector.take_batch();
    check_trees(&batch.spans);
    assert_eq!(
        (collector.unfinished(), batch.spans.len(), batch.operations.len()),
        (4, 4, 0)
    );
    for span in &batch.spans {
        assert_eq!(span.name, "ccl.operation.unfinished");
        assert!(span.error.is_some());
        assert_eq!(
            span.links[0].attributes,
            [("ccl.link.type", Value::Static("operation"))]
        );
    }
}

#[test]
fn what_the_ring_tells_of_operations_before_the_attach_is_not_in_flight() {
    let job = Job::default();
    let watermark = |ns| Sample::Watermark {
        pid: FIRST_PID,
        time_ns: EPOCH_NS + ns,
    };
    let mut collector = collector();
    // Of the first two the ring alone tells; nothing of the third is over.
    let mut samples = job.streams(0, &[1, 2].map(Operation::all_reduce)).head;
    samples.extend(job.streams(0, &[1, 2].map(Operation::all_reduce)).ring);
    let third = job.streams(0, &[Operation::all_reduce(3)]);
    let ended =
        |s: &Sample| matches!(s, Sample::Record { record, .. } if record.kind() == Some(Kind::OpCompleted));
    samples.extend(third.ring);
    samples.extend(third.probe.into_iter().filter(|sample| !ended(sample)));
    samples.push(watermark(5_000_000));
    // A fourth began after the attach, and its launch was lost.
    samples.extend(job.streams(0, &[Operation::all_reduce(8)]).ring);
    samples.push(watermark(900_000_000));
    collector.ingest(&mut samples);
    assert_eq!(collector.readings().in_flight, 2, "the third and the fourth");

    // The second was running all the while: its end is seen, and it is an operation like any other.
    let second = job.streams(0, &[Operation::all_reduce(2)]).probe;
    let at = second.iter().position(ended).unwrap();
    // Its description comes right before.
    samples.extend_from_slice(&second[at - 1..=at]);
    samples.push(watermark(2_000_000_000));
    collector.ingest(&mut samples);
    collector.finish(EPOCH_NS + 3_000_000_000);
    let batch = collector.take_batch();
    let sequences: Vec<_> = batch
        .operations
        .iter()
        .map(|operation| operation.sequence)
        .collect();
    assert_eq!(sequences, [1], "the second");
    assert_eq!(collector.unfinished(), 2);
    assert_eq!(named(&batch.spans, "ccl.operation.unfinished").count(), 2);
    let readings = collector.readings();
    assert_eq!((readings.in_flight, readings.given.begun_before_attach), (0, 1));
    assert!(
        readings
            .given_up_by_reason()
            .contains(&("begun_before_attach", 1))
    );
}

#[test]
fn a_process_that_ends_flushes_what_it_had() {
    let job = Job::default();
    let mut samples = job.samples(0..4, &[Operation::all_reduce(1)]);
    samples.retain(|sample| !matches!(sample, Sample::Watermark { .. }));
    samples.extend((0..4).map(|rank| Sample::Exited {
        pid: FIRST_PID + rank,
        ended: true,
    }));
    let batch = collect(samples);
    check_trees(&batch.spans);
    assert_eq!(batch.operations.len(), 1);
    assert!(batch.operations[0].complete);
}

#[test]
fn memory_is_bounded_whatever_never_ends() {
    let limits = Limits {
        operations: few(64),
        instances: few(32),
        ..Limits::default()
    };
    let mut collector = collector_with(Options {
        limits,
        ..Options::default()
    });
    let job = Job {
        ranks: 2,
        nodes: 1,
        ..Job::default()
    };
    let mut samples = job.streams(0, &[]).head;
    samples.extend(job.streams(1, &[]).head);
    collector.ingest(&mut samples);
    // Rank 0 completes operations that rank 1 never takes part in, and begins others that it never completes.
    for n in 1..=1000u32 {
        let streams = job.streams(0, &[Operation::all_reduce(2 * n)]);
        samples.extend(streams.ring.into_iter().chain(streams.probe));
        let begun = job.streams(0, &[Operation::all_reduce(2 * n + 1)]);
        samples.extend(begun.ring);
        samples.push(Sample::Watermark {
            pid: FIRST_PID,
            time_ns: EPOCH_NS + u64::from(n) * 2_000_000 + 1_000_000,
        });
        collector.ingest(&mut samples);
        assert!(collector.readings().in_flight <= 64 && collector.waiting() <= 32);
    }
    let readings = collector.readings();
    for limit in [Limit::Operations, Limit::Instances] {
        assert!(readings.left_out.of(limit) >= 900, "{:?}", readings.left_out);
    }
}

/// Many operations may be over before a watermark says that all of their records have come.
#[test]
fn a_burst_of_operations_that_are_over_is_sent() {
    let mut collector = collector_with(Options {
        limits: Limits {
            operations: few(64),
            ..Limits::default()
        },
        ..Options::default()
    });
    let job = Job {
        ranks: 1,
        nodes: 1,
        ..Job::default()
    };
    let mut samples = job.streams(0, &[]).head;
    for n in 1..=1000u32 {
        let streams = job.streams(0, &[Operation::all_reduce(n)]);
        samples.extend(streams.probe.into_iter().chain(streams.ring));
    }
    collector.ingest(&mut samples);
    let readings = collector.readings();
    assert_eq!(
        readings.left_out.of(Limit::Operations),
        0,
        "{:?}",
        readings.left_out
    );
    assert_eq!(readings.in_flight, 64);
    samples.push(Sample::Watermark {
        pid: FIRST_PID,
        time_ns: u64::MAX / 2,
    });
    collector.ingest(&mut samples);
    let readings = collector.readings();
    assert_eq!((readings.in_flight, readings.left_out.iter().count()), (0, 0));
    assert_eq!(readings.spans.of(Role::Rank), 1000, "{:?}", readings.spans);
}

#[test]
fn records_of_another_version_or_of_nobody_are_counted_and_ignored() {
    let mut collector = collector();
    let record = Record {
        version_flags: 0xf0,
        op: 1,
        ..Record::new(Kind::OpCompleted, State::STOP, 5)
    };
    let unknown = Record {
        kind: 31,
        ..Record::new(Kind::Coll, State::START, 5)
    };
    let nobodys = Record {
        op: 1,
        comm: 4,
        ..Record::new(Kind::Coll, State::START, 5)
    };
    let mut samples: Vec<_> = [record, unknown, nobodys]
        .map(|record| Sample::Record {
            pid: 1,
            tid: 0,
            carrier: Carrier::Probe,
            record,
        })
        .into();
    collector.ingest(&mut samples);
    assert_eq!(collector.readings().counts.unknown, 2);
    assert_eq!(collector.readings().in_flight, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// The carriers of a process, and the processes, come in any order: the spans are the same.
    #[test]
    fn any_interleaving_gives_the_same_spans(choices in prop::collection::vec(0usize..8, 0..2000)) {
        let job = Job::default();
        let operations = [
            Operation::all_reduce(1).in_group(1),
            Operation::message(2, 3, 1).in_group(1),
            Operation::all_reduce(3).with_late(1, 20_000_000),
            Operation::replayed(4, 0, 1),
            Operation::replayed(5, 0, 2),
        ];
        let expected = sorted(collect(job.samples(0..4, &operations)).spans);
        let mut queues = Vec::new();
        let mut samples = Vec::new();
        for rank in 0..4 {
            let streams = job.streams(rank, &operations);
            samples.extend(streams.head);
            queues.push(streams.probe.into_iter());
            queues.push(streams.ring.into_iter());
        }
        for choice in choices {
            samples.extend(queues[choice].next());
        }
        for queue in queues {
            samples.extend(queue);
        }
        let end = EPOCH_NS + 1_000_000_000;
        samples.extend((0..4).map(|rank| Sample::Watermark { pid: FIRST_PID + rank, time_ns: end }));
        let batch = collect(samples);
        check_trees(&batch.spans);
        prop_assert_eq!(sorted(batch.spans), expected);
    }

    /// Whatever a target writes, the collector neither panics nor keeps more than it may.
    #[test]
    fn rubbish_is_survived(words in prop::collection::vec(any::<[u64; 8]>(), 0..300), watermark: u64) {
        let limits = Limits { operations: few(16), ..Limits::default() };
        let mut collector = collector_with(Options { limits, ..Options::default() });
        let mut samples = Job::default().streams(0, &[]).head;
        for words in words {
            let mut bytes = [0; 64];
            for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
                chunk.copy_from_slice(&word.to_le_bytes());
            }
            let mut record = Record::from_bytes(&bytes);
            record.version_flags = record.version_flags & 0x0f | ringsight_records::VERSION << 4;
            record.kind %= 23;
            record.op %= 8;
            samples.push(Sample::Record { pid: FIRST_PID, tid: 0, carrier: Carrier::Ring, record });
        }
        samples.push(Sample::Watermark { pid: FIRST_PID, time_ns: watermark });
        collector.ingest(&mut samples);
        prop_assert!(collector.readings().in_flight <= 16);
        collector.finish(watermark);
    }
}
