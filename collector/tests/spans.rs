//! Synthetic jobs through the whole collector: what comes out as spans and operations.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use ringsight_collector::{
    identity::{Direction, Role, SpanKey},
    synthetic::{EPOCH_NS, FIRST_PID, Job, Operation},
};
use ringsight_exporters::model::Value;
use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::{Kind, Record, State};

use common::{attribute, check_trees, collect, collector, named};

#[test]
fn a_collective_is_one_trace_across_its_ranks() {
    let job = Job::default();
    let operations: Vec<_> = (1..=5).map(Operation::all_reduce).collect();
    let batch = collect(job.samples(0..4, &operations));
    check_trees(&batch.spans);
    let count = |name| named(&batch.spans, name).count();
    assert_eq!(count("all_reduce"), 5);
    for name in ["all_reduce rank", "enqueue", "launch"] {
        assert_eq!(count(name), 20, "{name}");
    }
    assert_eq!(count("kernel channel"), 5 * 4 * 2);
    // A ring over two nodes of two ranks: ranks 1 and 3 send to the other node, 0 and 2 receive from it.
    assert_eq!((count("proxy send"), count("proxy recv")), (5 * 2 * 2, 5 * 2 * 2));
    let root = named(&batch.spans, "all_reduce").next().unwrap();
    assert_eq!(attribute(root, "ccl.complete"), Some(&Value::Bool(true)));
    assert_eq!(attribute(root, "ccl.ranks.observed"), Some(&Value::Int(4)));
    assert_eq!(
        attribute(root, "ccl.communicator.id"),
        Some(&Value::Text("1122334455667788".into()))
    );
    assert_eq!(attribute(root, "ccl.straggler.rank"), None);
    // 1 MiB in 100 us, 2 * 3/4 of it over the bus.
    let expected = f64::from(1 << 20) * 1.5 / 100e-6;
    assert_eq!(
        attribute(root, "ccl.operation.bus_bandwidth"),
        Some(&Value::Double(expected))
    );
    for span in &batch.spans {
        for name in [
            "host.id",
            "host.name",
            "service.name",
            "service.instance.id",
            "process.pid",
        ] {
            assert!(
                span.resource.attributes.iter().any(|(key, _)| *key == name),
                "{} lacks {name}",
                span.name
            );
        }
    }
    assert_eq!(batch.operations.len(), 5);
    assert!(
        batch
            .operations
            .iter()
            .all(|operation| operation.complete && operation.by_rank.len() == 4)
    );
    assert_eq!(batch.operations[0].data_type, "float32");
}

#[test]
fn a_proxy_span_sums_up_its_steps() {
    let job = Job::default();
    let batch = collect(job.samples(0..4, &[Operation::all_reduce(1)]));
    let proxy = named(&batch.spans, "proxy send").next().unwrap();
    assert_eq!(attribute(proxy, "ccl.proxy.steps.done"), Some(&Value::Int(4)));
    let names: Vec<_> = proxy.events.iter().map(|event| event.name).collect();
    assert_eq!(names, ["in_progress", "send_gpu_wait", "send_wait"]);
    // The other three quarters of each step are before the first state and in these two.
    let each = (100_000 - 1000) / 4;
    let wait = &proxy.events[1].attributes;
    assert_eq!(wait[2], ("ccl.proxy.state.count", Value::Int(4)));
    let Value::Double(total) = wait[0].1 else {
        panic!("{wait:?}")
    };
    assert!((total - 4.0 * f64::from(each / 4) / 1e9).abs() < 20e-9, "{total}");
}

#[test]
fn ids_are_those_of_the_formula() {
    let job = Job::default();
    let batch = collect(job.samples(
        0..4,
        &[Operation {
            seq: 7,
            ..Operation::all_reduce(1)
        }],
    ));
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    // The same as in `identity`'s known answers, computed by another implementation.
    assert_eq!(
        hex(&batch.operations[0].trace_id),
        "423d318e59f6aa3f8b4be32496f257e5"
    );
    let root = named(&batch.spans, "all_reduce").next().unwrap();
    assert_eq!(hex(&root.span_id), "811d52628d64b13c");
    assert!(named(&batch.spans, "all_reduce rank").any(|span| hex(&span.span_id) == "10cb2843777d3875"));
}

#[test]
fn two_collectors_make_one_trace_with_one_root() {
    let job = Job::default();
    let mut operations: Vec<_> = (1..=20).map(Operation::all_reduce).collect();
    operations.extend((21..=24).map(|n| Operation::message(n, 3, 1)));
    let one = collect(job.samples(0..2, &operations));
    let other = collect(job.samples(2..4, &operations));
    assert_eq!(
        named(&other.spans, "all_reduce").count(),
        0,
        "rank 0 is not watched there"
    );
    assert_eq!(
        named(&one.spans, "send_recv").count(),
        0,
        "the sender is not watched there"
    );
    let both: Vec<_> = one.spans.into_iter().chain(other.spans).collect();
    // In this job all ranks begin within the root's time, which only knows one collector's ranks, or stretch beyond it;
    // containment across collectors is not promised, all else is.
    let mut ids = BTreeSet::new();
    let mut roots = BTreeMap::new();
    for span in &both {
        assert!(ids.insert((span.trace_id, span.span_id)), "twice: {}", span.name);
        *roots.entry(span.trace_id).or_insert(0) += u32::from(span.parent_span_id.is_none());
    }
    assert_eq!(roots.len(), 24);
    assert!(roots.values().all(|count| *count == 1));
    for span in &both {
        assert!(
            span.parent_span_id
                .is_none_or(|parent| ids.contains(&(span.trace_id, parent))),
            "orphan {}",
            span.name
        );
    }
    let whole = collect(job.samples(0..4, &operations));
    let whole: BTreeSet<_> = whole
        .spans
        .iter()
        .map(|span| (span.trace_id, span.span_id))
        .collect();
    assert_eq!(ids, whole, "two collectors see what one would");
}

#[test]
fn a_collector_that_begins_again_makes_no_second_root() {
    // The first one is let go of when some ranks have ended the second operation and others have not.
    let job = Job::default();
    let operations: Vec<_> = (1..=3).map(Operation::all_reduce).collect();
    for seen_by_first in [vec![0, 2], vec![1, 2, 3], vec![]] {
        let (mut first, mut second) = (collector(), collector());
        let (mut to_first, mut to_second) = (Vec::new(), Vec::new());
        for rank in 0..4 {
            let streams = job.streams(rank, &operations);
            to_first.extend(streams.head.clone());
            to_second.extend(streams.head);
            let last = if seen_by_first.contains(&rank) { 2 } else { 1 };
            for sample in streams.ring.into_iter().chain(streams.probe) {
                let time_ns = match &sample {
                    Sample::Record { record, .. } => record.time_ns,
                    Sample::Description { description, .. } => description.api_start_ns,
                    _ => 0,
                };
                let is_first = time_ns < EPOCH_NS + (last + 1) * 1_000_000;
                if is_first { &mut to_first } else { &mut to_second }.push(sample);
            }
        }
        let watermarks = |time_ns| {
            (0..4).map(move |rank| Sample::Watermark {
                pid: FIRST_PID + rank,
                time_ns,
            })
        };
        to_first.extend(watermarks(EPOCH_NS + 3_000_000));
        first.ingest(&mut to_first);
        first.finish(EPOCH_NS + 3_000_000);
        to_second.extend(watermarks(EPOCH_NS + 4_000_000));
        to_second.extend(watermarks(EPOCH_NS + 8_000_000_000));
        second.ingest(&mut to_second);
        second.finish(EPOCH_NS + 8_000_000_000);
        let spans: Vec<_> = first
            .take_batch()
            .spans
            .into_iter()
            .chain(second.take_batch().spans)
            .collect();
        assert_eq!(named(&spans, "all_reduce").count(), 3, "{seen_by_first:?}");
        assert_eq!(named(&spans, "all_reduce rank").count(), 12, "{seen_by_first:?}");
        let ids: BTreeSet<_> = spans.iter().map(|span| (span.trace_id, span.span_id)).collect();
        assert_eq!(ids.len(), spans.len(), "{seen_by_first:?}");
    }
}

#[test]
fn a_late_rank_is_named_with_its_lag() {
    let job = Job::default();
    let ms = 1_000_000;
    let operations = [
        Operation::all_reduce(1).with_late(2, 40 * ms),
        Operation {
            at_ns: 60 * ms,
            ..Operation::all_reduce(2)
        },
    ];
    let batch = collect(job.samples(0..4, &operations));
    check_trees(&batch.spans);
    let late = batch
        .operations
        .iter()
        .find(|operation| operation.sequence == 0)
        .unwrap();
    let culprit = late.culprit.as_ref().unwrap();
    assert_eq!((culprit.rank, culprit.lag_ns), (2, 40 * ms));
    assert_eq!(
        batch
            .operations
            .iter()
            .filter(|operation| operation.culprit.is_some())
            .count(),
        1
    );
    let root = named(&batch.spans, "all_reduce")
        .find(|span| span.trace_id == late.trace_id)
        .unwrap();
    assert_eq!(attribute(root, "ccl.straggler.rank"), Some(&Value::Int(2)));
    assert_eq!(attribute(root, "ccl.straggler.lag"), Some(&Value::Double(0.04)));
    // The others waited: their bandwidth counts from the last arrival.
    assert_eq!(
        attribute(root, "ccl.operation.bus_bandwidth"),
        Some(&Value::Double(f64::from(1 << 20) * 1.5 / 100e-6))
    );
    let of_rank = named(&batch.spans, "all_reduce rank")
        .find(|span| span.trace_id == late.trace_id && attribute(span, "ccl.rank") == Some(&Value::Int(2)))
        .unwrap();
    assert_eq!(
        attribute(of_rank, "ccl.straggler.lag"),
        Some(&Value::Double(0.04))
    );
}

#[test]
fn a_receiver_is_linked_to_its_sender() {
    let job = Job::default();
    let batch = collect(job.samples(0..4, &[Operation::message(1, 3, 1), Operation::message(2, 1, 1)]));
    check_trees(&batch.spans);
    assert_eq!(named(&batch.spans, "send_recv").count(), 2);
    for recv in named(&batch.spans, "recv rank") {
        let link = &recv.links[0];
        assert_eq!(link.attributes, [("ccl.link.type", Value::Static("send"))]);
        let send = batch
            .spans
            .iter()
            .find(|span| (span.trace_id, span.span_id) == (link.trace_id, link.span_id));
        assert_eq!(send.unwrap().name, "send rank");
        assert_eq!(send.unwrap().trace_id, recv.trace_id);
        // Whichever end is read first, each has its own function.
        for (end, function) in [(recv, "recv"), (send.unwrap(), "send")] {
            let name = attribute(end, "ccl.operation.name");
            assert_eq!(name, Some(&Value::Static(function)));
        }
    }
    // The receiver's collector alone computes the same link.
    let alone = collect(job.samples(1..2, &[Operation::message(1, 3, 1)]));
    let recv = named(&alone.spans, "recv rank").next().unwrap();
    let send = SpanKey::rank(Role::Rank, 3, Direction::Send).span_id(&recv.trace_id);
    assert_eq!(recv.links[0].span_id, send);
}

#[test]
fn replays_of_a_graph_are_told_apart_and_have_no_call() {
    let job = Job::default();
    let operations: Vec<_> = (1..=6)
        .map(|n| Operation::replayed(n, (n - 1) % 2, (n - 1) / 2 + 1))
        .collect();
    let mut samples = job.samples(0..4, &operations);
    // The call at capture, long before; it must not become an operation that never ends.
    let capture = Record {
        op: operations[0].op,
        ..Record::new(Kind::CollApi, State::START, EPOCH_NS / 2)
    };
    samples.insert(
        2,
        Sample::Record {
            pid: FIRST_PID,
            tid: 0,
            carrier: Carrier::Ring,
            record: capture,
        },
    );
    let mut collector = collector();
    collector.ingest(&mut samples);
    let batch = collector.take_batch();
    check_trees(&batch.spans);
    assert_eq!(named(&batch.spans, "all_reduce").count(), 6);
    assert_eq!(named(&batch.spans, "enqueue").count(), 0);
    assert!(batch.operations.iter().all(|operation| operation.complete));
    let replays: BTreeSet<_> = batch
        .operations
        .iter()
        .map(|o| (o.sequence & 1, o.replay))
        .collect();
    assert_eq!(replays.len(), 6);
    // Once the graph is long gone, a replay of it has no description and says so.
    let gone = Record {
        op: 1,
        ..Record::new(Kind::Graph, State::STOP, EPOCH_NS)
    };
    let mut samples: Vec<_> = vec![Sample::Record {
        pid: FIRST_PID,
        tid: 0,
        carrier: Carrier::Probe,
        record: gone,
    }];
    samples.push(Sample::Watermark {
        pid: FIRST_PID,
        time_ns: EPOCH_NS + 2_000_000_000,
    });
    let late = job.streams(0, &[Operation::replayed(10, 0, 9)]);
    samples.extend(
        late.ring
            .into_iter()
            .chain(late.probe)
            .filter(|s| !matches!(s, Sample::Description { .. })),
    );
    samples.push(Sample::Watermark {
        pid: FIRST_PID,
        time_ns: EPOCH_NS + 10_000_000_000,
    });
    collector.ingest(&mut samples);
    collector.finish(EPOCH_NS + 10_000_000_000);
    assert!(
        collector
            .take_batch()
            .operations
            .iter()
            .all(|operation| !operation.complete)
    );
}

#[test]
fn a_graph_destroyed_before_its_last_replay_is_settled() {
    let job = Job {
        ranks: 1,
        nodes: 1,
        ..Job::default()
    };
    let operation = Operation::replayed(1, 0, 1);
    let end = operation.end_ns();
    let streams = job.streams(0, &[operation]);
    let gone = Record {
        op: 1,
        ..Record::new(Kind::Graph, State::STOP, end + 1_000)
    };
    let mut samples = [streams.head, streams.probe].concat();
    samples.push(Sample::Record {
        pid: FIRST_PID,
        tid: 0,
        carrier: Carrier::Probe,
        record: gone,
    });
    samples.push(Sample::Watermark {
        pid: FIRST_PID,
        time_ns: end - 1,
    });
    let mut collector = collector();
    collector.ingest(&mut samples);
    samples.extend(streams.ring);
    samples.push(Sample::Watermark {
        pid: FIRST_PID,
        time_ns: end + 1_000_000,
    });
    collector.ingest(&mut samples);
    let batch = collector.take_batch();
    check_trees(&batch.spans);
    assert!(batch.operations[0].complete);
    assert_eq!(batch.operations[0].name, "all_reduce");
}
