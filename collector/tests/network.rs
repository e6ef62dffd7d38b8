//! Events of the kernel's RDMA stack through the whole collector: what comes out as spans and metrics.

mod common;

use std::sync::Arc;

use ringsight_collector::{
    Collector,
    synthetic::{EPOCH_NS, FIRST_PID, Job, Operation},
};
use ringsight_exporters::model::{Batch, MetricData, Span, Value};
use ringsight_probes::{
    network::{NetworkEvent, NetworkSample, QpState, VerbsEvent},
    sample::{self, Sample},
};
use ringsight_records::{Carrier, Flags, Kind, Numbering, Record, State};

use common::{attribute, check_trees, collector, named};

const DEVICE: &str = "mlx5_0";
const QPN: u32 = 0x127;

fn watching() -> Collector {
    let mut collector = collector();
    collector.ingest(&mut vec![Sample::Process(Arc::new(Job::default().process(0)))]);
    collector
}

fn at(microseconds: u64, event: NetworkEvent) -> NetworkSample {
    NetworkSample {
        pid: Some(FIRST_PID),
        time_ns: EPOCH_NS + microseconds * 1000,
        duration_ns: 0,
        result: 0,
        device: DEVICE.to_owned(),
        event,
    }
}

fn of_device(microseconds: u64, event: NetworkEvent) -> NetworkSample {
    NetworkSample {
        pid: None,
        ..at(microseconds, event)
    }
}

fn modified(microseconds: u64, state: u32, port: Option<u32>, peer: Option<u32>) -> NetworkSample {
    let state = Some(QpState(state));
    let event = NetworkEvent::QpModified {
        qpn: QPN,
        state,
        port,
        peer,
    };
    NetworkSample {
        duration_ns: 400,
        ..at(microseconds, event)
    }
}

fn ingest(collector: &mut Collector, events: impl IntoIterator<Item = NetworkSample>) -> Batch {
    let mut samples = events
        .into_iter()
        .map(|event| Sample::Network(Box::new(event)))
        .collect();
    collector.ingest(&mut samples);
    collector.take_batch()
}

fn life() -> Vec<NetworkSample> {
    vec![
        at(0, NetworkEvent::QpCreated { qpn: QPN, kind: 2 }),
        modified(1, 1, Some(1), None),
        modified(2, 2, None, Some(0x99)),
        modified(3, 3, None, None),
    ]
}

fn destroyed(microseconds: u64) -> NetworkSample {
    at(microseconds, NetworkEvent::QpDestroyed { qpn: QPN })
}

fn metric(collector: &mut Collector, name: &str, wanted: &[(&str, Value)]) -> Option<MetricData> {
    collector.add_metrics(EPOCH_NS + 1_000_000, 0.0, Vec::new());
    let metrics = collector.take_batch().metrics;
    let mut found = metrics.into_iter().filter(|metric| {
        metric.name == name
            && wanted.iter().all(|(name, value)| {
                metric
                    .attributes
                    .iter()
                    .any(|(key, has)| key == name && has == value)
            })
    });
    found.next().map(|metric| metric.data)
}

#[test]
fn a_queue_pair_is_one_span_with_its_transitions() {
    let mut collector = watching();
    assert!(ingest(&mut collector, life()).spans.is_empty(), "it lives");
    let known = [("rdma.device.name", Value::Text(DEVICE.into()))];
    assert_eq!(
        metric(&mut collector, "rdma.queue_pairs", &known),
        Some(MetricData::UpDown(1))
    );
    let spans = ingest(&mut collector, [destroyed(9)]).spans;
    check_trees(&spans);
    let [span] = &spans[..] else { panic!("{spans:?}") };
    assert_eq!(span.name, "rdma queue pair");
    assert_eq!(span.end_unix_ns - span.start_unix_ns, 9_000);
    assert_eq!(attribute(span, "rdma.qp.number"), Some(&Value::Int(QPN.into())));
    assert_eq!(attribute(span, "rdma.qp.type"), Some(&Value::Static("RC")));
    assert_eq!(attribute(span, "rdma.port.number"), Some(&Value::Int(1)));
    assert_eq!(attribute(span, "rdma.qp.peer_number"), Some(&Value::Int(0x99)));
    assert_eq!(span.error, None);
    let states: Vec<_> = span
        .events
        .iter()
        .map(|event| event.attributes[0].clone())
        .collect();
    let expected = ["INIT", "RTR", "RTS"].map(|state| ("rdma.qp.state", Value::Static(state)));
    assert_eq!(states, expected);
    let process = span
        .resource
        .attributes
        .iter()
        .find(|(name, _)| *name == "process.pid");
    assert_eq!(
        process.unwrap().1,
        Value::Int(FIRST_PID.into()),
        "the owner's resource"
    );
}

#[test]
fn a_failure_is_told_at_once_in_the_queue_pairs_trace() {
    let mut collector = watching();
    ingest(&mut collector, life());
    let event = VerbsEvent(1);
    // What the device says and what the verbs make of it: one failure. It comes in nobody's context.
    let device_says = of_device(5, NetworkEvent::Mlx5Qp { kind: 5, qpn: QPN });
    let mut spans = ingest(
        &mut collector,
        [device_says, of_device(6, NetworkEvent::Qp { event, qpn: QPN })],
    )
    .spans;
    let [failure] = &spans[..] else {
        panic!("{spans:?}")
    };
    assert_eq!(
        (failure.name, failure.error.as_deref()),
        ("rdma error", Some("qp_fatal"))
    );
    assert_eq!(
        attribute(failure, "rdma.qp.number"),
        Some(&Value::Int(QPN.into()))
    );
    let refused = NetworkSample {
        result: -22,
        ..modified(7, 1, None, None)
    };
    spans.extend(ingest(&mut collector, [refused]).spans);
    assert_eq!(attribute(&spans[1], "error.errno"), Some(&Value::Int(22)));
    spans.extend(ingest(&mut collector, [destroyed(9)]).spans);
    check_trees(&spans);
    let whole = named(&spans, "rdma queue pair").next().unwrap();
    assert_eq!(whole.error.as_deref(), Some("qp_modified"));
    assert_eq!(whole.events.len(), 3 + 3);
}

#[test]
fn a_port_is_down_from_event_to_event() {
    let mut collector = watching();
    let port = |event| NetworkEvent::Device { event, port: Some(1) };
    let down = [("rdma.port.number", Value::Int(1))];
    assert!(
        ingest(&mut collector, [of_device(1, port(VerbsEvent::PORT_ERR))])
            .spans
            .is_empty()
    );
    assert_eq!(
        metric(&mut collector, "rdma.ports.down", &down),
        Some(MetricData::UpDown(1))
    );
    // Twice, as soft-RoCE says it, is once.
    let spans = ingest(
        &mut collector,
        [
            of_device(2, port(VerbsEvent::PORT_ERR)),
            of_device(31, port(VerbsEvent::PORT_ACTIVE)),
            of_device(32, port(VerbsEvent::PORT_ACTIVE)),
        ],
    )
    .spans;
    let [span] = &spans[..] else { panic!("{spans:?}") };
    assert_eq!(
        (span.name, span.end_unix_ns - span.start_unix_ns),
        ("rdma port down", 30_000)
    );
    assert_eq!(attribute(span, "rdma.port.recovered"), Some(&Value::Bool(true)));
    assert_eq!(
        metric(&mut collector, "rdma.ports.down", &down),
        Some(MetricData::UpDown(0))
    );
    let event = [("rdma.event.name", Value::Static("port_err"))];
    assert_eq!(
        metric(&mut collector, "rdma.events", &event),
        Some(MetricData::Counter(2))
    );
    // One that stays down is told of at the end.
    ingest(&mut collector, [of_device(40, port(VerbsEvent::PORT_ERR))]);
    collector.finish(EPOCH_NS + 50_000);
    let spans = collector.take_batch().spans;
    assert_eq!(
        attribute(&spans[0], "rdma.port.recovered"),
        Some(&Value::Bool(false))
    );
    check_trees(&spans);
}

#[test]
fn a_refused_command_has_its_syndrome() {
    let mut collector = watching();
    let event = NetworkEvent::Mlx5CommandRefused {
        opcode: 0x503,
        modifier: 0,
        status: 3,
        syndrome: 0x12_34ab,
        error: -22,
    };
    let refused = NetworkSample {
        device: String::new(),
        ..at(1, event)
    };
    let spans = ingest(&mut collector, [refused]).spans;
    check_trees(&spans);
    assert_eq!(
        attribute(&spans[0], "rdma.mlx5.syndrome"),
        Some(&Value::Text("0x1234ab".into()))
    );
    assert_eq!(
        attribute(&spans[0], "rdma.device.name"),
        None,
        "it is not told whose it was"
    );
    let syndrome = [("rdma.mlx5.syndrome", Value::Text("0x1234ab".into()))];
    let counted = metric(&mut collector, "rdma.mlx5.commands.refused", &syndrome);
    assert_eq!(counted, Some(MetricData::Counter(1)));
}

/// As the operations' requests are numbered: the connections carried steps before.
const NUMBERING: Numbering = Numbering {
    first: 1000,
    queue_pairs: 2,
};

/// A job's samples, in which each step is carried by a queue pair of port 1, or received from a socket.
fn carried(job: &Job, operations: &[Operation]) -> Vec<Sample> {
    let mut samples = Vec::new();
    for sample in job.samples(0..4, operations) {
        let Sample::Record { pid, record, .. } = &sample else {
            samples.push(sample);
            continue;
        };
        let is_step = record.kind == Kind::ProxyStep as u8;
        if is_step && matches!(record.state, State::START | State::STOP) {
            let sends = record.flags().contains(Flags::SEND);
            let carrier = Carrier {
                port: sends.then_some(1),
                number: QPN,
                step: record.value as u32,
            };
            // Every second step goes over the backup.
            let is_backup = sends && record.value % 2 == 1;
            let carried = Record {
                kind: Kind::NetPlugin as u8,
                value: carrier.to_value(),
                ..*record
            };
            let carries = Sample::Record {
                pid: *pid,
                tid: 0,
                carrier: sample::Carrier::Ring,
                record: carried.with_flags(Flags::BACKUP.when(is_backup)),
            };
            // Handed over after the step began, there before it ended.
            if record.state == State::START {
                if sends && record.value == 0 {
                    let numbered = Record {
                        kind: Kind::NetPlugin as u8,
                        state: State::NET_PLUGIN_UPDATE,
                        value: NUMBERING.to_value(),
                        ..*record
                    };
                    samples.push(Sample::Record {
                        pid: *pid,
                        tid: 0,
                        carrier: sample::Carrier::Ring,
                        record: numbered,
                    });
                }
                samples.extend([sample, carries]);
            } else {
                samples.extend([carries, sample]);
            }
        } else {
            samples.push(sample);
        }
    }
    samples
}

/// A collector that knows of rank 1's process, and from the kernel's probes of a queue pair of it.
fn watching_an_owner(job: &Job) -> Collector {
    let mut collector = watching();
    let owner = job.pid(1);
    collector.ingest(&mut vec![Sample::Process(Arc::new(job.process(1)))]);
    let created = NetworkSample {
        pid: Some(owner),
        ..at(0, NetworkEvent::QpCreated { qpn: QPN, kind: 2 })
    };
    ingest(&mut collector, [created]);
    collector
}

#[test]
fn what_carries_a_step_is_a_span_below_its_proxy() {
    let (job, operations) = (Job::default(), [Operation::all_reduce(1)]);
    let mut collector = watching_an_owner(&job);
    let plain = common::collect(job.samples(0..4, &operations)).spans;
    let mut samples = carried(&job, &operations);
    collector.ingest(&mut samples);
    let mut batch = collector.take_batch();
    check_trees(&batch.spans);
    let steps = |spans: &[Span], name: &str| -> i64 {
        let done = named(spans, name).map(|span| match attribute(span, "ccl.proxy.steps.done") {
            Some(Value::Int(done)) => *done,
            other => panic!("{other:?}"),
        });
        done.sum()
    };
    let counts = |name| named(&batch.spans, name).count() as i64;
    assert!(counts("rdma write") > 0);
    assert_eq!(counts("rdma write"), steps(&plain, "proxy send"));
    assert_eq!(counts("socket recv"), steps(&plain, "proxy recv"));
    let complete = |spans: &[Span]| {
        named(spans, "all_reduce").all(|span| attribute(span, "ccl.complete") == Some(&Value::Bool(true)))
    };
    assert!(complete(&plain) && complete(&batch.spans));
    for span in named(&batch.spans, "rdma write") {
        let parent = batch
            .spans
            .iter()
            .find(|other| Some(other.span_id) == span.parent_span_id)
            .unwrap();
        assert_eq!(parent.name, "proxy send");
        assert_eq!(attribute(span, "rdma.qp.number"), Some(&Value::Int(QPN.into())));
        assert_eq!(attribute(span, "ccl.network.port"), Some(&Value::Int(1)));
        let odd = matches!(attribute(span, "ccl.proxy.step"), Some(Value::Int(step)) if step % 2 == 1);
        let path = if odd { "backup" } else { "primary" };
        assert_eq!(attribute(span, "ccl.network.path"), Some(&Value::Static(path)));
        // Known of the process whose queue pair it is; another one's number says nothing.
        let device =
            (attribute(span, "ccl.rank") == Some(&Value::Int(1))).then(|| Value::Text(DEVICE.into()));
        assert_eq!(attribute(span, "rdma.device.name").cloned(), device);
    }
    // The queue pair's own span says whose steps it carried.
    collector.finish(EPOCH_NS + 10_000_000);
    batch = collector.take_batch();
    let whole = named(&batch.spans, "rdma queue pair").next().unwrap();
    assert_eq!(attribute(whole, "ccl.rank"), Some(&Value::Int(1)));
    assert!(attribute(whole, "ccl.communicator.id").is_some());
    for path in ["primary", "backup"] {
        let sent = metric(
            &mut collector,
            "ccl.network.io",
            &[
                ("ccl.network.transport", Value::Static("rdma")),
                ("ccl.network.port", Value::Int(1)),
                ("ccl.network.path", Value::Static(path)),
                ("network.io.direction", Value::Static("transmit")),
            ],
        );
        assert!(
            matches!(sent, Some(MetricData::Counter(bytes)) if bytes > 0),
            "{path}: {sent:?}"
        );
    }
}

#[test]
fn what_a_process_says_of_its_ports_goes_before_numbers_of_queue_pairs() {
    let (job, operations) = (Job::default(), [Operation::all_reduce(1)]);
    // The kernel's probes saw one queue pair of the number; that of the other device was there before.
    let mut collector = watching_an_owner(&job);
    let owner = job.pid(1);
    let said = [(0, DEVICE), (1, "other0")].map(|(index, device)| Sample::Port {
        pid: owner,
        index,
        device: device.to_owned(),
        number: 1,
        gid: Some([0, 0, 0, 0, 0, 0xffff, 0x0a00, 0x0001 + u16::from(index)].into()),
    });
    collector.ingest(&mut said.to_vec());
    collector.ingest(&mut carried(&job, &operations));
    let spans = collector.take_batch().spans;
    let own = |span: &&Span| attribute(span, "ccl.rank") == Some(&Value::Int(1));
    let own: Vec<&Span> = named(&spans, "rdma write").filter(own).collect();
    let device = |span: &&Span| attribute(span, "rdma.device.name").cloned();
    assert!(!own.is_empty());
    assert!(
        own.iter()
            .map(device)
            .all(|device| device == Some(Value::Text("other0".into())))
    );
    for span in &own {
        let of = |name| attribute(span, name).cloned();
        assert_eq!(of("rdma.port.gid"), Some(Value::Text("::ffff:10.0.0.2".into())));
        assert_eq!(of("rdma.port.number"), Some(Value::Int(1)));
        let Some(Value::Int(step)) = of("ccl.proxy.step") else {
            panic!("a step has a number")
        };
        let position = 1000 + step;
        let id = 1 << 56 | (position % 2) << 48 | position;
        assert_eq!(of("rdma.wr.id"), Some(Value::Int(id)));
        assert!(of("rdma.wr.opcode").is_some());
    }
    let sent = metric(
        &mut collector,
        "ccl.network.io",
        &[
            ("rdma.device.name", Value::Text("other0".into())),
            ("network.io.direction", Value::Static("transmit")),
        ],
    );
    assert!(
        matches!(sent, Some(MetricData::Counter(bytes)) if bytes > 0),
        "{sent:?}"
    );
    // Nothing went over the queue pair that the kernel's probes saw.
    collector.finish(EPOCH_NS + 10_000_000);
    let spans = collector.take_batch().spans;
    assert!(named(&spans, "rdma queue pair").all(|span| attribute(span, "ccl.rank").is_none()));
}

#[test]
fn what_a_process_leaves_behind_ends_with_it() {
    let mut collector = watching();
    let (lkey, rkey, length) = (7, 8, 1 << 33);
    ingest(&mut collector, life());
    ingest(
        &mut collector,
        [at(4, NetworkEvent::MrRegistered { lkey, rkey, length })],
    );
    let known = [("rdma.device.name", Value::Text(DEVICE.into()))];
    let registered = metric(&mut collector, "rdma.memory.registered", &known);
    assert_eq!(registered, Some(MetricData::UpDown(1 << 33)));
    collector.ingest(&mut vec![
        Sample::Watermark {
            pid: FIRST_PID,
            time_ns: EPOCH_NS + 20_000,
        },
        Sample::NetworkLost { count: 3 },
        Sample::Exited {
            pid: FIRST_PID,
            ended: true,
        },
    ]);
    let spans = collector.take_batch().spans;
    let span = named(&spans, "rdma queue pair").next().unwrap();
    assert_eq!(span.end_unix_ns - span.start_unix_ns, 20_000);
    assert_eq!(metric(&mut collector, "rdma.memory.registered", &known), None);
    assert_eq!(
        metric(&mut collector, "rdma.events.lost", &[]),
        Some(MetricData::Counter(3))
    );
}
