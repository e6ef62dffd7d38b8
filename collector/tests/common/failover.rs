//! Connections that fail over, as samples.

use std::sync::Arc;

use ringsight_collector::{
    Collector,
    synthetic::{EPOCH_NS, FIRST_PID, Job},
};
use ringsight_exporters::model::{Span, SpanId, TraceId, Value};
use ringsight_probes::{
    network::{NetworkEvent, NetworkSample, VerbsEvent},
    sample::{Carrier, Sample},
};
use ringsight_records::{Flags, Kind, PathCause, PathChange, Record, State};

use super::{attribute, collector, named};

/// As the times of [`moment`] are given.
pub const SECOND: u64 = 1_000_000;
pub const PORT: Option<PathCause> = Some(PathCause::Port);
pub const BACK: Option<PathCause> = Some(PathCause::Failback);
pub const PEER: i32 = 1;
pub const CHANNEL: u8 = 3;

pub fn watching() -> (Collector, u64, u32) {
    let job = Job::default();
    let communicator = job.communicator(0);
    let (comm, ranks) = (communicator.id, communicator.ranks);
    let mut collector = collector();
    collector.ingest(&mut vec![
        Sample::Process(Arc::new(job.process(0))),
        Sample::Communicator {
            pid: FIRST_PID,
            communicator: Box::new(communicator),
        },
    ]);
    (collector, comm, ranks)
}

pub fn change(cause: Option<PathCause>, from: u8, to: u8, number: u32) -> PathChange {
    PathChange {
        cause,
        status: if cause == Some(PathCause::Completion) {
            12
        } else {
            0
        },
        from,
        to,
        port: Some(to),
        number,
    }
}

/// A record of the connection while it is at operation `seq`, or at none for 0.
pub fn moment(
    comm: u64,
    seq: u64,
    microseconds: u64,
    state: State,
    change: PathChange,
    bytes: u64,
) -> Sample {
    let record = Record {
        comm,
        op: u32::from(seq != 0),
        seq,
        rank: 0,
        peer: PEER,
        channel: CHANNEL,
        bytes,
        value: change.to_value(),
        ..Record::new(Kind::Failover, state, EPOCH_NS + microseconds * 1000)
    };
    Sample::Record {
        pid: FIRST_PID,
        tid: 1,
        carrier: Carrier::Probe,
        record: record.with_flags(Flags::SEND),
    }
}

pub fn spans(collector: &mut Collector, mut samples: Vec<Sample>) -> Vec<Span> {
    collector.ingest(&mut samples);
    collector.take_batch().spans
}

/// The span of one connection, and that of the port's failure.
pub fn connection_and_port(spans: &[Span]) -> (&Span, &Span) {
    let [connection, port] = spans else {
        panic!("{spans:?}")
    };
    assert_eq!((connection.name, port.name), ("failover", "port failover"));
    assert_eq!(connection.trace_id, port.trace_id);
    assert_eq!(
        (connection.parent_span_id, port.parent_span_id),
        (Some(port.span_id), None)
    );
    (connection, port)
}

/// Two ranks' processes on a host; `ports` are what they say of them.
pub fn two_processes(ports: &[(u8, &str)]) -> (Collector, Job, u64) {
    let job = Job::default();
    let comm = job.communicator(0).id;
    let mut collector = collector();
    let mut samples: Vec<Sample> = Vec::new();
    for rank in 0..2 {
        samples.push(Sample::Process(Arc::new(job.process(rank))));
        samples.push(Sample::Communicator {
            pid: job.pid(rank),
            communicator: Box::new(job.communicator(rank)),
        });
        for (place, (index, device)) in ports.iter().enumerate() {
            let before = ports[..place].iter().filter(|(_, other)| other == device);
            samples.push(Sample::Port {
                pid: job.pid(rank),
                index: *index,
                device: (*device).to_owned(),
                number: 1 + before.count() as u8,
                gid: None,
            });
        }
    }
    collector.ingest(&mut samples);
    (collector, job, comm)
}

/// The same of another rank's process, and of another channel.
pub fn of(job: &Job, rank: u32, channel: u8, mut samples: Vec<Sample>) -> Vec<Sample> {
    for sample in &mut samples {
        if let Sample::Record { pid, record, .. } = sample {
            *pid = job.pid(rank);
            *record = Record {
                rank,
                channel,
                ..*record
            };
        }
    }
    samples
}

/// What the kernel says of a port of `mlx5_0`.
pub fn kernel(microseconds: u64, port: u32, event: VerbsEvent) -> Sample {
    let event = NetworkEvent::Device {
        event,
        port: Some(port),
    };
    Sample::Network(Box::new(NetworkSample {
        pid: None,
        time_ns: EPOCH_NS + microseconds * 1000,
        duration_ns: 0,
        result: 0,
        device: "mlx5_0".to_owned(),
        event,
    }))
}

pub fn later(seconds: u64) -> Sample {
    Sample::Watermark {
        pid: FIRST_PID,
        time_ns: EPOCH_NS + seconds * 1_000_000_000,
    }
}

pub fn broken(comm: u64, at: u64) -> Sample {
    moment(comm, 7, at, State::START, change(PORT, 0, 0, 0x11), 0)
}

/// From the break to the backup.
pub fn left(comm: u64, at: u64) -> Vec<Sample> {
    vec![
        broken(comm, at),
        moment(
            comm,
            7,
            at + 5,
            State::PATH_SWITCHED,
            change(PORT, 0, 1, 0x22),
            100,
        ),
        moment(
            comm,
            7,
            at + 9,
            State::PATH_RECOVERED,
            change(None, 1, 1, 0x22),
            0,
        ),
    ]
}

pub fn back(comm: u64, at: u64) -> Vec<Sample> {
    vec![
        moment(comm, 9, at, State::PATH_SWITCHED, change(BACK, 1, 0, 0x11), 0),
        moment(comm, 9, at + 5, State::STOP, change(None, 0, 0, 0x11), 0),
    ]
}

pub fn one<'a>(spans: &'a [Span], name: &'a str) -> &'a Span {
    let found: Vec<_> = named(spans, name).collect();
    let [span] = found[..] else {
        panic!("{name}: {spans:?}")
    };
    span
}

pub fn links(span: &Span, kind: &'static str) -> Vec<(TraceId, SpanId)> {
    span.links
        .iter()
        .filter(|link| link.attributes == [("ccl.link.type", Value::Static(kind))])
        .map(|link| (link.trace_id, link.span_id))
        .collect()
}

pub fn events(span: &Span) -> Vec<&'static str> {
    span.events.iter().map(|event| event.name).collect()
}

pub fn check(span: &Span, expected: &[(&str, Value)]) {
    for (name, value) in expected {
        assert_eq!(attribute(span, name), Some(value), "{name}");
    }
}
