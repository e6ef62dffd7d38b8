//! What the library's watchdog says, through the whole collector.

mod common;

use ringsight_collector::synthetic::{FIRST_PID, Job, Operation};
use ringsight_exporters::model::{LogRecord, MetricData, Severity, Span, Value};
use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::{Cause, Kind, Record, State, pages::put_text, verdicts::GivenVerdict};

use common::{attribute, check_trees, collect, collector, named};

/// Where in `samples` the end of rank `rank`'s operation is.
fn end_of(samples: &[Sample], rank: u32) -> usize {
    let is_it = |sample: &Sample| {
        matches!(sample, Sample::Record { pid, record, .. }
            if *pid == FIRST_PID + rank && record.kind() == Some(Kind::OpCompleted))
    };
    samples.iter().position(is_it).unwrap()
}

/// Has rank `rank` say before its operation's end, `before_ns` earlier, that it waits for `culprit`.
fn judge(samples: &mut Vec<Sample>, rank: u32, before_ns: u64, cause: Cause, hang: bool, culprit: u32) {
    let at = end_of(samples, rank);
    let Sample::Record {
        record: completed, ..
    } = samples[at]
    else {
        unreachable!("a record")
    };
    let verdict = Record {
        value: u64::from(cause.code()) << 32 | u64::from(culprit),
        kind: Kind::Verdict as u8,
        state: if hang { State::STOP } else { State::START },
        time_ns: completed.time_ns - before_ns,
        ..completed
    };
    let sample = Sample::Record {
        pid: FIRST_PID + rank,
        tid: 1,
        carrier: Carrier::Probe,
        record: verdict,
    };
    samples.insert(at, sample);
}

fn of_log<'a>(log: &'a LogRecord, name: &str) -> Option<&'a Value> {
    let mut found = log.attributes.iter().filter(|(key, _)| *key == name);
    found.next().map(|(_, value)| value)
}

/// What the pages keep of the verdict of rank `rank` whose record is at `at`: that rank 3 has a NIC that carries nothing, by a verdict
/// of `time_ns`.
fn keep(samples: &mut Vec<Sample>, at: usize, time_ns: u64) {
    let Sample::Record { pid, record, .. } = samples[at] else {
        unreachable!("a record")
    };
    // SAFETY: plain data; zero is valid for every field.
    let nothing: GivenVerdict = unsafe { std::mem::zeroed() };
    let mut given = GivenVerdict {
        time_ns,
        op: record.op,
        culprit: 3,
        queue_pair: 418,
        port: 1,
        ..nothing
    };
    put_text(&mut given.device, "mlx5_3");
    let given = Box::new(given);
    samples.insert(at, Sample::Verdict { pid, given });
}

/// Where in `samples` the verdict of rank 1 is, and when it was given.
fn verdict_of(samples: &[Sample]) -> (usize, u64) {
    let time = |sample: &Sample| match sample {
        Sample::Record { record, .. } if record.kind() == Some(Kind::Verdict) => Some(record.time_ns),
        _ => None,
    };
    let mut found = samples.iter().map(time).enumerate();
    found.find_map(|(at, time)| Some((at, time?))).unwrap()
}

#[test]
fn the_network_interface_that_carries_nothing_is_named_in_log_and_span() {
    const NAMED: [(&str, Value); 3] = [
        ("rdma.device.name", Value::Static("mlx5_3")),
        ("rdma.port.number", Value::Int(1)),
        ("rdma.qp.number", Value::Int(418)),
    ];
    // What the pages keep of a verdict of another time says nothing of this one.
    for (earlier, named_then) in [(0, true), (1, false)] {
        let mut samples = Job::default().samples(0..4, &[Operation::all_reduce(1)]);
        judge(&mut samples, 1, 100, Cause::StuckNic, false, 3);
        let (at, time_ns) = verdict_of(&samples);
        keep(&mut samples, at, time_ns - earlier);
        let batch = collect(samples);
        let [log] = &batch.logs[..] else {
            panic!("{:?}", batch.logs)
        };
        let span = named(&batch.spans, "all_reduce rank").find(|span| !span.events.is_empty());
        let event = &span.unwrap().events[0];
        for (name, value) in NAMED {
            let value = Some(value).filter(|_| named_then);
            let of_event = event.attributes.iter().find(|(key, _)| *key == name);
            assert_eq!(
                of_event.map(|(_, value)| text_of(value)),
                value.as_ref().map(text_of),
                "{name}"
            );
            assert_eq!(
                of_log(log, name).map(text_of),
                value.as_ref().map(text_of),
                "{name}"
            );
        }
        assert_eq!(
            log.body
                .contains(" (over mlx5_3:1, queue pair 418); rank 1 is in all_reduce"),
            named_then,
            "{}",
            log.body
        );
    }
}

/// A value in words, whoever owns them.
fn text_of(value: &Value) -> String {
    match value {
        Value::Static(text) => (*text).to_owned(),
        Value::Text(text) => text.to_string(),
        other => format!("{other:?}"),
    }
}

/// An all-reduce of 4 ranks of which rank 1 says first that rank 3 is late, then that it is stopped.
fn hung() -> Vec<Sample> {
    let mut samples = Job::default().samples(0..4, &[Operation::all_reduce(1)]);
    judge(&mut samples, 1, 101, Cause::NotLaunched, false, 3);
    judge(&mut samples, 1, 100, Cause::RankStopped, true, 3);
    samples
}

#[test]
fn a_hang_is_an_event_and_an_error_of_the_rank_that_reports_it() {
    let samples = hung();
    let mut counted = collector();
    counted.ingest(&mut samples.clone());
    counted.add_metrics(10_000_000_000, 1.5, Vec::new());
    let mut verdicts: Vec<_> = counted
        .take_batch()
        .metrics
        .into_iter()
        .filter(|metric| metric.name == "ccl.watchdog.verdicts")
        .map(|metric| {
            (
                metric.attributes[0].1.clone(),
                metric.attributes[1].1.clone(),
                metric.data,
            )
        })
        .collect();
    verdicts.sort_by_key(|(cause, ..)| format!("{cause:?}"));
    let verdict = |cause, hang| (Value::Static(cause), Value::Bool(hang), MetricData::Counter(1));
    assert_eq!(
        verdicts,
        [verdict("NOT_LAUNCHED", false), verdict("RANK_STOPPED", true)]
    );

    let batch = collect(samples);
    check_trees(&batch.spans);
    let ranks: Vec<&Span> = named(&batch.spans, "all_reduce rank").collect();
    assert_eq!(ranks.len(), 4);
    let culprit = ranks
        .iter()
        .find(|span| attribute(span, "ccl.rank") == Some(&Value::Int(3)))
        .unwrap();
    for span in &ranks {
        let reports = attribute(span, "ccl.rank") == Some(&Value::Int(1));
        let awaited: Vec<_> = span.links.iter().map(|link| link.span_id).collect();
        assert_eq!(awaited, &[culprit.span_id][..usize::from(reports)]);
    }
    for span in ranks {
        let reports = attribute(span, "ccl.rank") == Some(&Value::Int(1));
        let expected = reports.then_some("RANK_STOPPED: rank 3");
        assert_eq!(span.error.as_deref(), expected);
        let said: Vec<_> = span
            .events
            .iter()
            .map(|event| {
                (
                    event.name,
                    event.attributes[0].1.clone(),
                    event.attributes[2].1.clone(),
                )
            })
            .collect();
        let event = |cause, hang| ("ccl.watchdog.verdict", Value::Static(cause), Value::Bool(hang));
        let expected = [event("NOT_LAUNCHED", false), event("RANK_STOPPED", true)];
        assert_eq!(said, &expected[..if reports { 2 } else { 0 }]);
    }
}

#[test]
fn a_verdict_is_a_log_record_of_its_span_before_the_operation_ends() {
    let mut samples = hung();
    let rest = samples.split_off(end_of(&samples, 1));
    let mut collector = collector();
    collector.ingest(&mut samples);
    collector.add_metrics(10_000_000_000, 1.5, Vec::new());
    let batch = collector.take_batch();
    assert_eq!(named(&batch.spans, "all_reduce rank").count(), 0, "it goes on");
    let counted = batch.metrics.iter();
    assert_eq!(
        counted
            .filter(|metric| metric.name == "ccl.watchdog.verdicts")
            .count(),
        2
    );
    let [late, hang] = &batch.logs[..] else {
        panic!("{:?}", batch.logs)
    };
    let head = |log: &LogRecord| log.body.lines().next().map(str::to_owned);
    assert_eq!(
        [late, hang].map(|log| (log.severity, head(log).unwrap())),
        [
            (
                Severity::Warn,
                "NOT_LAUNCHED (late): rank 3 has not launched it; rank 1 is in all_reduce 0 of communicator \
                 1122334455667788 (world) for 0.0 s"
                    .to_owned()
            ),
            (
                Severity::Error,
                "RANK_STOPPED (hang): the process of rank 3 is stopped; rank 1 is in all_reduce 0 of communicator \
                 1122334455667788 (world) for 0.0 s"
                    .to_owned()
            ),
        ]
    );

    // What the library's own report has of the operation, for machines and for people.
    for (name, value) in [
        ("ccl.operation.number", Value::Int(1)),
        ("ccl.device.number", Value::Int(0)),
        ("ccl.data_type", Value::Static("float32")),
        ("ccl.reduction", Value::Static("sum")),
        ("ccl.algorithm", Value::Static("ring")),
        ("ccl.protocol", Value::Static("simple")),
        ("ccl.kernel.warps", Value::Int(1)),
    ] {
        assert_eq!(of_log(hang, name), Some(&value), "{name}");
    }
    for name in ["ccl.watchdog.called.age", "ccl.watchdog.launched.age"] {
        let waited = |log| match of_log(log, name) {
            Some(Value::Double(seconds)) => *seconds,
            other => panic!("{name}: {other:?}"),
        };
        assert!(waited(hang) > waited(late), "{name}");
    }
    for line in [
        "Comm: 0x1122334455667788 (world), Rank: 1/4",
        "Timeout: 0 ms",
        "Channel Mask: 0x",
        "Warps per Block: 1",
        "CUDA Device: 0",
        "Stream: 0x",
        "Operation: 1",
        "Launched: ",
    ] {
        assert!(
            hang.body.lines().any(|text| text.starts_with(line)),
            "{line}: {}",
            hang.body
        );
    }
    assert!(
        hang.body.contains(", float32, sum), ring, simple, "),
        "{}",
        hang.body
    );

    // The hang has a span at once, below the one that comes when the operation is over.
    let [shown] = &batch.spans[..] else {
        panic!("{:?}", batch.spans)
    };
    assert_eq!(
        (shown.name, shown.error.as_deref()),
        ("hang", Some("RANK_STOPPED: rank 3"))
    );
    assert_eq!(Some((shown.trace_id, shown.parent_span_id.unwrap())), hang.span);
    assert_eq!(
        (&shown.resource, &shown.attributes),
        (&hang.resource, &hang.attributes)
    );
    assert!(shown.start_unix_ns < shown.end_unix_ns && shown.end_unix_ns == hang.unix_ns);

    samples.extend(rest);
    collector.ingest(&mut samples);
    let ended = collector.take_batch();
    assert_eq!(ended.logs, [], "each is told once");
    check_trees(&[&batch.spans[..], &ended.spans].concat());
    assert_eq!(named(&ended.spans, "hang").count(), 0);
    let awaited = named(&ended.spans, "all_reduce rank")
        .find(|span| attribute(span, "ccl.rank") == Some(&Value::Int(3)))
        .unwrap();
    let links: Vec<_> = shown
        .links
        .iter()
        .map(|link| (link.trace_id, link.span_id))
        .collect();
    assert_eq!(links, [(awaited.trace_id, awaited.span_id)]);
    let span = named(&ended.spans, "all_reduce rank")
        .find(|span| span.error.is_some())
        .unwrap();
    for (log, event) in batch.logs.iter().zip(&span.events) {
        assert_eq!(log.span, Some((span.trace_id, span.span_id)));
        assert_eq!(log.resource, span.resource);
        assert_eq!((log.event_name, log.unix_ns), (event.name, event.unix_ns));
        assert_eq!(log.attributes[..3], event.attributes);
        assert!(log.observed_unix_ns >= log.unix_ns);
        for name in [
            "ccl.operation.name",
            "ccl.operation.sequence",
            "ccl.rank",
            "ccl.message.size",
        ] {
            assert_eq!(of_log(log, name), attribute(span, name), "{name}");
        }
    }
    assert!(matches!(
        of_log(hang, "ccl.watchdog.wait.duration"),
        Some(Value::Double(seconds)) if *seconds > 0.0
    ));
}

#[test]
fn the_log_record_of_any_operation_is_of_the_span_that_the_operation_gets() {
    for operation in [
        Operation::all_reduce(2),
        Operation::message(2, 0, 1),
        Operation::message(2, 1, 0),
        Operation::replayed(2, 5, 3),
    ] {
        let mut samples = Job::default().samples(0..4, &[operation]);
        judge(&mut samples, 1, 100, Cause::StuckKernel, true, 0);
        let batch = collect(samples);
        let [log] = &batch.logs[..] else {
            panic!("{:?}", batch.logs)
        };
        let mut failed = batch
            .spans
            .iter()
            .filter(|span| span.error.is_some() && span.name != "hang");
        let span = failed.next().unwrap();
        assert_eq!(log.span, Some((span.trace_id, span.span_id)));
        for name in ["ccl.peer.rank", "ccl.graph.replay"] {
            assert_eq!(of_log(log, name), attribute(span, name), "{name}");
        }
    }
}

#[test]
fn the_log_record_of_an_operation_that_never_ends_is_of_its_span() {
    let mut samples = hung();
    samples.truncate(end_of(&samples, 1));
    let mut collector = collector();
    collector.ingest(&mut samples);
    collector.finish(0);
    let batch = collector.take_batch();
    assert_eq!(batch.logs.len(), 2);
    let span = named(&batch.spans, "all_reduce rank")
        .find(|span| !span.events.is_empty())
        .unwrap();
    assert_eq!(span.error.as_deref(), Some("RANK_STOPPED: rank 3"));
    for log in &batch.logs {
        assert_eq!(log.span, Some((span.trace_id, span.span_id)));
    }
}
