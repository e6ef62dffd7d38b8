//! Failovers of the library's connections through the whole collector.

mod common;

use ringsight_collector::{
    identity::{Direction, InstanceKey, Role, Scope, SpanKey, TraceKind},
    summary,
    synthetic::{EPOCH_NS, FIRST_PID},
};
use ringsight_exporters::model::{Batch, MetricData, Severity, Value};
use ringsight_probes::{
    network::{NetworkEvent, NetworkSample},
    sample::{Carrier, Sample},
};
use ringsight_records::{Flags, Kind, PathCause, Record, State};

use common::{
    attribute, check_trees,
    failover::{CHANNEL, PEER, change, connection_and_port, moment, spans, watching},
    named,
};

fn rank_span(comm: u64, seq: u64, ranks: u32) -> ([u8; 16], [u8; 8]) {
    let key = InstanceKey {
        comm,
        seq,
        ranks,
        replay: 0,
        kind: TraceKind::Collective,
        pair: None,
    };
    let trace_id = key.trace_id(&Scope::default());
    let span_id = SpanKey::rank(Role::Rank, 0, Direction::None).span_id(&trace_id);
    (trace_id, span_id)
}

#[test]
fn a_failover_is_one_span_linked_to_what_it_delayed() {
    let (mut collector, comm, ranks) = watching();
    // The kernel's probes know the queue pairs, hence the devices.
    let created = [(0x11, "mlx5_0"), (0x22, "mlx5_1")].map(|(qpn, device)| {
        Sample::Network(Box::new(NetworkSample {
            pid: Some(FIRST_PID),
            time_ns: EPOCH_NS,
            duration_ns: 1,
            result: 0,
            device: device.to_owned(),
            event: NetworkEvent::QpCreated { qpn, kind: 2 },
        }))
    });
    assert!(spans(&mut collector, created.into()).is_empty());
    let begun = vec![
        moment(
            comm,
            7,
            10,
            State::START,
            change(Some(PathCause::Completion), 0, 0, 0x11),
            0,
        ),
        moment(
            comm,
            7,
            25,
            State::PATH_SWITCHED,
            change(Some(PathCause::Completion), 0, 1, 0x22),
            65_536,
        ),
        moment(comm, 8, 40, State::PATH_RECOVERED, change(None, 1, 1, 0x22), 0),
        // By then nothing waits any more.
        moment(comm, 20, 900, State::PATH_RESTORED, change(None, 0, 0, 0x11), 0),
        moment(
            comm,
            21,
            950,
            State::PATH_SWITCHED,
            change(Some(PathCause::Failback), 1, 0, 0x11),
            0,
        ),
    ];
    let mut begun = begun;
    collector.ingest(&mut begun);
    let batch = collector.take_batch();
    assert!(batch.spans.is_empty(), "it is under way");
    // The way back is no warning.
    let [log] = &batch.logs[..] else {
        panic!("{:?}", batch.logs)
    };
    let spans = spans(
        &mut collector,
        vec![moment(comm, 21, 960, State::STOP, change(None, 0, 0, 0x11), 0)],
    );
    check_trees(&spans);
    let (span, port) = connection_and_port(&spans);
    assert_eq!(span.end_unix_ns - span.start_unix_ns, 950_000);
    assert_eq!(
        (port.start_unix_ns, port.end_unix_ns),
        (span.start_unix_ns, span.end_unix_ns)
    );
    assert_eq!((&span.error, &port.error), (&None, &None));
    assert_eq!(log.span, Some((span.trace_id, span.span_id)));
    assert_eq!(log.resource, span.resource);
    assert_eq!(
        (log.severity, log.event_name, &*log.body),
        (
            Severity::Warn,
            "ccl.failover.path_switched",
            "rank 0's connection to rank 1, channel 3, goes on over path 1 instead of 0: completion_error"
        )
    );
    assert_eq!(log.unix_ns, span.events[1].unix_ns);
    for attribute in &span.events[1].attributes {
        assert!(log.attributes.contains(attribute), "{attribute:?}");
    }
    for (name, value) in [
        ("ccl.failover.cause", Value::Static("completion_error")),
        ("ccl.failover.switches", Value::Int(2)),
        ("ccl.failover.replayed.size", Value::Int(65_536)),
        ("ccl.failover.recovery.duration", Value::Double(30e-6)),
        ("ccl.failover.failed_back", Value::Bool(true)),
        ("ccl.channel.id", Value::Int(CHANNEL.into())),
        ("ccl.peer.rank", Value::Int(PEER.into())),
    ] {
        assert_eq!(attribute(span, name), Some(&value), "{name}");
        // The failure has one connection.
        if name.starts_with("ccl.failover") {
            assert_eq!(attribute(port, name), Some(&value), "{name}");
        }
    }
    assert_eq!(attribute(port, "ccl.failover.connections"), Some(&Value::Int(1)));
    assert_eq!(
        attribute(port, "rdma.device.name"),
        Some(&Value::Text("mlx5_0".into()))
    );
    assert_eq!(port.links, span.links);
    for (own, of_port) in span.events.iter().zip(&port.events) {
        assert_eq!((own.name, own.unix_ns), (of_port.name, of_port.unix_ns));
        assert!(
            own.attributes
                .iter()
                .all(|attribute| of_port.attributes.contains(attribute))
        );
    }
    assert_eq!(span.events.len(), port.events.len());
    let names: Vec<_> = span.events.iter().map(|event| event.name).collect();
    let expected = [
        "path_broken",
        "path_switched",
        "path_recovered",
        "path_restored",
        "path_switched",
        "failed_back",
    ];
    assert_eq!(names, expected);
    let of = |event: usize, name: &str| {
        let mut found = span.events[event]
            .attributes
            .iter()
            .filter(|(key, _)| *key == name);
        found.next().map(|(_, value)| value.clone())
    };
    assert_eq!(of(0, "rdma.device.name"), Some(Value::Text("mlx5_0".into())));
    assert_eq!(of(0, "rdma.wc.status"), Some(Value::Int(12)));
    assert_eq!(of(1, "rdma.device.name"), Some(Value::Text("mlx5_1".into())));
    assert_eq!(of(1, "rdma.qp.number"), Some(Value::Int(0x22)));
    let links: Vec<_> = span
        .links
        .iter()
        .map(|link| (link.trace_id, link.span_id))
        .collect();
    assert_eq!(links, [rank_span(comm, 7, ranks), rank_span(comm, 8, ranks)]);

    collector.add_metrics(EPOCH_NS + 1_000_000, 0.0, Vec::new());
    let metrics = collector.take_batch().metrics;
    let value = |name, cause| {
        let cause = ("ccl.failover.cause", Value::Static(cause));
        let mut found = metrics
            .iter()
            .filter(|metric| metric.name == name && metric.attributes == [cause.clone()]);
        found.next().map(|metric| metric.data.clone())
    };
    assert_eq!(
        value("ccl.failover.switches", "failback"),
        Some(MetricData::Counter(1))
    );
    let replayed = value("ccl.failover.replayed", "completion_error");
    assert_eq!(replayed, Some(MetricData::Counter(65_536)));
}

#[test]
fn a_connection_without_a_path_left_is_an_error() {
    let (mut collector, comm, _) = watching();
    let mut samples = vec![
        moment(
            comm,
            7,
            10,
            State::START,
            change(Some(PathCause::Port), 0, 0, 0x11),
            0,
        ),
        moment(
            comm,
            7,
            90,
            State::ABORTED,
            change(Some(PathCause::Timeout), 1, 1, 0x22),
            0,
        ),
    ];
    collector.ingest(&mut samples);
    let Batch { spans, logs, .. } = collector.take_batch();
    let [log] = &logs[..] else { panic!("{logs:?}") };
    assert_eq!(
        (log.severity, log.event_name),
        (Severity::Error, "ccl.failover.gave_up")
    );
    let (_, port) = connection_and_port(&spans);
    assert_eq!(
        port.error.as_deref(),
        Some("1 of 1 connections have no path left")
    );
    assert_eq!(attribute(port, "ccl.failover.gave_up"), Some(&Value::Int(1)));
    assert_eq!(log.span, Some((spans[0].trace_id, spans[0].span_id)));
    assert_eq!(spans[0].error.as_deref(), Some("the connection has no path left"));
    assert_eq!(attribute(&spans[0], "ccl.failover.recovery.duration"), None);
    assert_eq!(
        attribute(&spans[0], "ccl.failover.failed_back"),
        Some(&Value::Bool(false))
    );
}

#[test]
fn one_that_does_not_fail_back_is_sent_after_a_while_and_at_the_end() {
    let (mut collector, comm, _) = watching();
    let begun = |microseconds| {
        vec![
            moment(
                comm,
                7,
                microseconds,
                State::START,
                change(Some(PathCause::Port), 0, 0, 0x11),
                0,
            ),
            moment(
                comm,
                7,
                microseconds + 5,
                State::PATH_SWITCHED,
                change(Some(PathCause::Port), 0, 1, 0x22),
                1,
            ),
            moment(
                comm,
                7,
                microseconds + 9,
                State::PATH_RECOVERED,
                change(None, 1, 1, 0x22),
                0,
            ),
        ]
    };
    assert!(spans(&mut collector, begun(10)).is_empty());
    let later = |seconds: u64| Sample::Watermark {
        pid: FIRST_PID,
        time_ns: EPOCH_NS + seconds * 1_000_000_000,
    };
    assert!(spans(&mut collector, vec![later(29)]).is_empty());
    let sent = spans(&mut collector, vec![later(31)]);
    assert_eq!(
        attribute(&sent[0], "ccl.failover.failed_back"),
        Some(&Value::Bool(false))
    );
    assert_eq!(
        attribute(&sent[0], "ccl.failover.recovery.duration"),
        Some(&Value::Double(9e-6))
    );
    assert!(spans(&mut collector, begun(32_000_000)).is_empty());
    collector.finish(EPOCH_NS + 33_000_000_000);
    let rest = collector.take_batch().spans;
    assert_eq!(named(&rest, "failover").count(), 1);
}

/// A job computes when its port goes down: nothing was delayed by that.
#[test]
fn what_was_over_before_the_path_broke_is_not_linked() {
    let (mut collector, comm, ranks) = watching();
    let port = Some(PathCause::Port);
    let sent = spans(
        &mut collector,
        vec![
            moment(comm, 0, 10, State::START, change(port, 0, 0, 0x11), 0),
            moment(comm, 0, 25, State::PATH_SWITCHED, change(port, 0, 1, 0x22), 0),
            moment(comm, 8, 40, State::PATH_RECOVERED, change(None, 1, 1, 0x22), 0),
            moment(comm, 0, 950, State::STOP, change(None, 0, 0, 0x11), 0),
        ],
    );
    let links: Vec<_> = sent[0]
        .links
        .iter()
        .map(|link| (link.trace_id, link.span_id))
        .collect();
    assert_eq!(links, [rank_span(comm, 8, ranks)]);
}

/// The very one that is looked for: the job gave up, and began anew, while a connection was between its paths.
#[test]
fn a_failover_that_its_communicator_did_not_see_the_end_of_is_sent() {
    let port = Some(PathCause::Port);
    let begun = |comm| vec![moment(comm, 7, 10, State::START, change(port, 0, 0, 0x11), 0)];
    let ended = |comm, rank| {
        let record = Record {
            comm,
            rank,
            ..Record::new(Kind::CommDestroy, State::ABORTED, EPOCH_NS + 500_000)
        };
        let (pid, tid, carrier) = (FIRST_PID, 1, Carrier::Probe);
        vec![Sample::Record {
            pid,
            tid,
            carrier,
            record,
        }]
    };
    let (mut collector, comm, _) = watching();
    assert!(spans(&mut collector, begun(comm)).is_empty());
    assert_eq!(
        named(&spans(&mut collector, ended(comm, 3)), "failover").count(),
        0
    );
    let sent = spans(&mut collector, ended(comm, 0));
    assert_eq!(named(&sent, "failover").count(), 1);
    // Nor is one kept for ever whose end was lost.
    let (mut collector, comm, _) = watching();
    assert!(spans(&mut collector, begun(comm)).is_empty());
    let later = |seconds: u64| Sample::Watermark {
        pid: FIRST_PID,
        time_ns: EPOCH_NS + seconds * 1_000_000_000,
    };
    assert!(spans(&mut collector, vec![later(299)]).is_empty());
    let sent = spans(&mut collector, vec![later(301)]);
    assert_eq!(named(&sent, "failover").count(), 1);
}

/// A port that is down for minutes: the failover was sent by then, and its end is a part of the same trace, not another failover.
#[test]
fn a_way_back_after_the_failover_was_sent_belongs_to_it() {
    let (mut collector, comm, _) = watching();
    let second = 1_000_000;
    let later = |seconds: u64| Sample::Watermark {
        pid: FIRST_PID,
        time_ns: EPOCH_NS + seconds * 1_000_000_000,
    };
    let port = Some(PathCause::Port);
    let left = |begun: u64| {
        [
            moment(comm, 7, begun, State::START, change(port, 0, 0, 0x11), 0),
            moment(
                comm,
                7,
                begun + 5,
                State::PATH_SWITCHED,
                change(port, 0, 1, 0x22),
                1,
            ),
            moment(
                comm,
                7,
                begun + 9,
                State::PATH_RECOVERED,
                change(None, 1, 1, 0x22),
                0,
            ),
        ]
    };
    let back = |begun: u64| {
        let cause = Some(PathCause::Failback);
        [
            moment(comm, 90, begun, State::PATH_RESTORED, change(None, 0, 0, 0x11), 0),
            moment(
                comm,
                90,
                begun + 3,
                State::PATH_SWITCHED,
                change(cause, 1, 0, 0x11),
                0,
            ),
            moment(comm, 90, begun + 7, State::STOP, change(None, 0, 0, 0x11), 0),
        ]
    };
    let mut samples = Vec::from(left(10));
    samples.push(later(40));
    let sent = spans(&mut collector, samples);
    let (failover, _) = connection_and_port(&sent);
    assert_eq!(
        attribute(failover, "ccl.failover.failed_back"),
        Some(&Value::Bool(false))
    );
    samples = Vec::from(back(100 * second));
    let sent = spans(&mut collector, samples);
    let [failback] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!(
        (failback.name, failback.trace_id, failback.parent_span_id),
        ("failback", failover.trace_id, Some(failover.span_id))
    );
    assert_ne!(failback.span_id, failover.span_id);
    assert_eq!(failback.start_unix_ns, failover.start_unix_ns + 99_999_993_000);
    assert_eq!(failback.end_unix_ns - failback.start_unix_ns, 4000);
    assert!(failback.links.is_empty(), "nothing was delayed");
    assert_eq!(
        attribute(failback, "ccl.failover.failed_back"),
        Some(&Value::Bool(true))
    );
    assert_eq!(attribute(failback, "ccl.failover.recovery.duration"), None);
    let names: Vec<_> = failback.events.iter().map(|event| event.name).collect();
    assert_eq!(names, ["path_switched", "failed_back"]);
    let counted = summary::spans(&collector.readings().spans);
    assert_eq!(
        (counted["failover"], counted["failback"], counted["port_failover"]),
        (1, 1, 1)
    );

    // What fails next is another failover, also where it fails while the connection is on its way back.
    let mut samples = Vec::from(left(200 * second));
    samples.push(later(240));
    let mut sent = spans(&mut collector, samples);
    samples = back(300 * second).into_iter().take(2).collect();
    samples.extend(left(301 * second));
    sent.extend(spans(&mut collector, samples));
    let names: Vec<_> = sent.iter().map(|span| span.name).collect();
    assert_eq!(names, ["failover", "port failover", "failback"]);
    sent.remove(1);
    assert_eq!(sent[0].trace_id, sent[1].trace_id);
    assert_ne!(sent[0].trace_id, failover.trace_id);
    assert_eq!(
        attribute(&sent[1], "ccl.failover.failed_back"),
        Some(&Value::Bool(false))
    );
    let last = spans(&mut collector, back(302 * second).into());
    let (last, _) = connection_and_port(&last);
    assert_ne!(last.trace_id, sent[0].trace_id);
}

#[test]
fn a_backup_that_is_good_again_was_nobodys_failover() {
    let (mut collector, comm, _) = watching();
    let restored = moment(comm, 7, 10, State::PATH_RESTORED, change(None, 1, 1, 0x22), 0);
    assert!(spans(&mut collector, vec![restored]).is_empty());
    collector.finish(EPOCH_NS + 10_000_000);
    assert_eq!(named(&collector.take_batch().spans, "failover").count(), 0);
}

#[test]
fn connections_of_messages_and_of_collectives_fail_over_apart() {
    let (mut collector, comm, _) = watching();
    let broken = || {
        moment(
            comm,
            1,
            10,
            State::START,
            change(Some(PathCause::Port), 0, 0, 0x11),
            0,
        )
    };
    let mut message = broken();
    if let Sample::Record { record, .. } = &mut message {
        *record = record.with_flags(Flags::P2P);
    }
    assert!(spans(&mut collector, vec![broken(), message]).is_empty());
    collector.finish(EPOCH_NS + 10_000_000);
    let batch = collector.take_batch();
    let ids: Vec<_> = named(&batch.spans, "failover")
        .map(|span| (span.trace_id, span.span_id))
        .collect();
    assert_eq!(ids.len(), 2);
    assert_eq!(ids[0].0, ids[1].0);
    assert_ne!(ids[0].1, ids[1].1);
}
