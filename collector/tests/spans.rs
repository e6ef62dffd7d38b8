//! Synthetic jobs through the whole collector: what comes out as spans and operations.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use ringsight_collector::{
    Collector, Options,
    clock::Clock,
    correlate::Limits,
    identity::{Direction, Role, SpanKey},
    synthetic::{EPOCH_NS, FIRST_PID, Job, Operation},
};
use ringsight_exporters::model::{Batch, Span, SpanId, TraceId, Value};
use ringsight_probes::sample::{Call, Carrier, HostCall, Sample};
use ringsight_records::{Function, Kind, Record, State};

fn collector() -> Collector {
    collector_with(Options::default())
}

fn collector_with(options: Options) -> Collector {
    Collector::new(options, Clock::fixed(1_700_000_000_000_000_000), 0)
}

fn collect(samples: Vec<Sample>) -> Batch {
    let mut collector = collector();
    let mut samples = samples;
    collector.ingest(&mut samples);
    collector.take_batch()
}

fn attribute<'a>(span: &'a Span, name: &str) -> Option<&'a Value> {
    span.attributes
        .iter()
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value)
}

fn named<'a>(spans: &'a [Span], name: &'a str) -> impl Iterator<Item = &'a Span> {
    spans.iter().filter(move |span| span.name == name)
}

/// Every trace has one root; every parent is there and encloses its children; no span id stands twice in a trace.
fn check_trees(spans: &[Span]) {
    let mut by_id: BTreeMap<(TraceId, SpanId), &Span> = BTreeMap::new();
    let mut roots: BTreeMap<TraceId, u32> = BTreeMap::new();
    for span in spans {
        assert!(span.start_unix_ns <= span.end_unix_ns, "{span:?}");
        assert!(
            by_id.insert((span.trace_id, span.span_id), span).is_none(),
            "twice: {span:?}"
        );
        *roots.entry(span.trace_id).or_default() += u32::from(span.parent_span_id.is_none());
    }
    assert!(
        roots.values().all(|count| *count == 1),
        "roots by trace: {roots:?}"
    );
    for span in spans {
        let Some(parent) = span.parent_span_id else {
            continue;
        };
        let Some(parent) = by_id.get(&(span.trace_id, parent)) else {
            panic!("orphan: {span:?}")
        };
        assert!(
            parent.start_unix_ns <= span.start_unix_ns && span.end_unix_ns <= parent.end_unix_ns,
            "{} [{}, {}] is not inside {} [{}, {}]",
            span.name,
            span.start_unix_ns,
            span.end_unix_ns,
            parent.name,
            parent.start_unix_ns,
            parent.end_unix_ns
        );
    }
}

/// Spans in an order that does not depend on when they were made.
fn sorted(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_by_key(|span| (span.trace_id, span.span_id));
    spans
}

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
    // Once the graph is gone, a replay of it has no description and says so.
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
fn a_process_that_ends_flushes_what_it_had() {
    let job = Job::default();
    let mut samples = job.samples(0..4, &[Operation::all_reduce(1)]);
    samples.retain(|sample| !matches!(sample, Sample::Watermark { .. }));
    samples.extend((0..4).map(|rank| Sample::Exited {
        pid: FIRST_PID + rank,
    }));
    let batch = collect(samples);
    check_trees(&batch.spans);
    assert_eq!(batch.operations.len(), 1);
    assert!(batch.operations[0].complete);
}

#[test]
fn a_call_of_a_stock_library_is_a_host_timed_span() {
    let job = Job::default();
    let call = |function, start_ns, result| {
        Sample::Call(Box::new(HostCall {
            pid: FIRST_PID,
            tid: 77,
            call: Call::Operation {
                function,
                send: 1,
                recv: 2,
                count: 1024,
                data_type: Some(ringsight_records::DataType::Float16),
                reduce_op: None,
                peer: -1,
                comm: 0xabc,
                stream: 0,
            },
            start_ns,
            end_ns: Some(start_ns + 500),
            result: Some(result),
        }))
    };
    let mut samples = job.streams(0, &[]).head;
    samples.push(call(Function::AllReduce, 5000, 0));
    samples.push(call(Function::AllGather, 6000, 3));
    let batch = collect(samples);
    check_trees(&batch.spans);
    assert_eq!(batch.spans.len(), 2);
    let first = named(&batch.spans, "all_reduce").next().unwrap();
    assert_eq!(
        attribute(first, "ccl.timing.source"),
        Some(&Value::Static("host"))
    );
    assert_eq!(attribute(first, "ccl.message.size"), Some(&Value::Int(2048)));
    assert_eq!(first.end_unix_ns - first.start_unix_ns, 500);
    assert!(named(&batch.spans, "all_gather").next().unwrap().error.is_some());
}

#[test]
fn memory_is_bounded_whatever_never_ends() {
    let limits = Limits {
        in_flight: 64,
        instances: 32,
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
    assert!(readings.given.evicted_operations >= 900, "{:?}", readings.given);
    assert!(readings.given_up.evicted >= 900, "{:?}", readings.given_up);
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
        let limits = Limits { in_flight: 16, ..Limits::default() };
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
