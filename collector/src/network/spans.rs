//! Spans of the kernel's RDMA stack.

use std::sync::Arc;

use ringsight_exporters::model::{Attribute, Resource, Span, SpanEvent, SpanId, TraceId, Value};
use ringsight_probes::network::{NetworkEvent, NetworkSample};

use super::{Output, QueuePair};
use crate::{
    identity::{InstanceKey, Role, SpanKey, TraceKind, process_identity},
    spans::link,
};

/// Identity of a trace on the network: of a queue pair of a process by when it was first seen, or of something of a device.
fn trace(output: &Output<'_>, process: u64, time_ns: u64, number: u32) -> TraceId {
    InstanceKey {
        comm: process,
        seq: time_ns,
        ranks: 0,
        replay: number,
        kind: TraceKind::Network,
        pair: None,
    }
    .trace_id(output.scope)
}

/// What stands for the process in an id where there is none: the device.
pub(super) fn device_identity(device: &str) -> u64 {
    process_identity(device, 0, 0)
}

fn text(value: &Arc<str>) -> Value {
    Value::Text(Arc::clone(value))
}

fn number(value: u32) -> Value {
    Value::Int(i64::from(value))
}

fn hexadecimal(value: u32) -> Value {
    Value::Text(format!("{value:#x}").into())
}

fn duration(ns: u64) -> Value {
    Value::Double(ns as f64 / 1e9)
}

/// `enum ib_qp_type`.
fn kind_name(kind: u32) -> &'static str {
    match kind {
        0 => "SMI",
        1 => "GSI",
        2 => "RC",
        3 => "UC",
        4 => "UD",
        8 => "RAW_PACKET",
        9 => "XRC_INI",
        10 => "XRC_TGT",
        0xff => "DRIVER",
        _ => "other",
    }
}

/// What an event says besides its name.
fn attributes(event: &NetworkEvent, result: i32, duration_ns: u64) -> Vec<Attribute> {
    let mut attributes = Vec::new();
    match *event {
        NetworkEvent::QpModified {
            state, port, peer, ..
        } => {
            attributes.extend(state.map(|state| ("rdma.qp.state", Value::Static(state.name()))));
            attributes.extend(port.map(|port| ("rdma.port.number", number(port))));
            attributes.extend(peer.map(|peer| ("rdma.qp.peer_number", number(peer))));
        }
        NetworkEvent::Device { port, .. } => {
            attributes.extend(port.map(|port| ("rdma.port.number", number(port))));
        }
        NetworkEvent::MrRegistered { length, .. } => {
            let length = i64::try_from(length).unwrap_or(i64::MAX);
            attributes.push(("rdma.memory.size", Value::Int(length)));
        }
        NetworkEvent::Mlx5Qp { kind, .. } => attributes.push(("rdma.mlx5.event", hexadecimal(kind))),
        NetworkEvent::Mlx5CqError { cqn, syndrome } => {
            attributes.push(("rdma.cq.number", number(cqn)));
            attributes.push(("rdma.mlx5.syndrome", hexadecimal(syndrome)));
        }
        NetworkEvent::Mlx5Health { syndrome, fatal } => {
            attributes.push(("rdma.mlx5.syndrome", hexadecimal(syndrome)));
            attributes.push(("rdma.mlx5.fatal_sensor", number(fatal)));
        }
        NetworkEvent::Mlx5CommandRefused {
            opcode,
            modifier,
            status,
            syndrome,
            error,
        } => {
            attributes.push(("rdma.mlx5.opcode", hexadecimal(opcode)));
            attributes.push(("rdma.mlx5.modifier", hexadecimal(modifier)));
            attributes.push(("rdma.mlx5.status", hexadecimal(status)));
            attributes.push(("rdma.mlx5.syndrome", hexadecimal(syndrome)));
            attributes.push(("error.errno", Value::Int(i64::from(error.unsigned_abs()))));
        }
        _ => {}
    }
    if result < 0 {
        attributes.push(("error.errno", Value::Int(i64::from(result.unsigned_abs()))));
    }
    if duration_ns > 0 {
        attributes.push(("rdma.call.duration", duration(duration_ns)));
    }
    attributes
}

/// What went wrong, for people.
fn message(event: &NetworkEvent, result: i32) -> Arc<str> {
    match *event {
        NetworkEvent::Mlx5CommandRefused {
            opcode,
            status,
            syndrome,
            ..
        } => format!("the firmware refused command {opcode:#x}: status {status:#x}, syndrome {syndrome:#x}")
            .into(),
        _ if result < 0 => format!("{}: error {}", event.name(), -result).into(),
        _ => event.name().into(),
    }
}

fn own(known: &QueuePair) -> Vec<Attribute> {
    let mut attributes = vec![
        ("rdma.device.name", text(&known.device)),
        ("rdma.qp.number", number(known.number)),
    ];
    attributes.extend(
        known
            .kind
            .map(|kind| ("rdma.qp.type", Value::Static(kind_name(kind)))),
    );
    attributes.extend(known.port.map(|port| ("rdma.port.number", number(port))));
    attributes.extend(known.peer.map(|peer| ("rdma.qp.peer_number", number(peer))));
    if let Some(carries) = &known.carries {
        let comm = format!("{:016x}", carries.comm);
        attributes.push(("ccl.communicator.id", Value::Text(comm.into())));
        attributes.push(("ccl.rank", number(carries.rank)));
        attributes.push(("ccl.peer.rank", Value::Int(i64::from(carries.peer))));
        attributes.push(("ccl.channel.id", Value::Int(i64::from(carries.channel))));
    }
    attributes
}

/// The life of a queue pair.
pub(super) fn queue_pair(known: &QueuePair, end_ns: u64, output: &mut Output<'_>) {
    let Some(watched) = output.communicators.process(known.pid) else {
        return;
    };
    let trace_id = trace(output, watched.identity, known.begun_ns, known.number);
    let mut attributes_of = own(known);
    if known.left_out > 0 {
        let left_out = i64::try_from(known.left_out).unwrap_or(i64::MAX);
        attributes_of.push(("rdma.qp.events_left_out", Value::Int(left_out)));
    }
    let last = known
        .moments
        .back()
        .map_or(0, |moment| moment.time_ns + moment.duration_ns);
    output.counts.count(Role::QueuePair);
    output.spans.push(Span {
        resource: Arc::clone(&watched.resource),
        trace_id,
        span_id: SpanKey::of(Role::QueuePair).span_id(&trace_id),
        parent_span_id: None,
        name: "rdma queue pair",
        start_unix_ns: output.clock.unix_ns(known.begun_ns),
        end_unix_ns: output.clock.unix_ns(end_ns.max(last)),
        attributes: attributes_of,
        events: known
            .moments
            .iter()
            .map(|moment| SpanEvent {
                unix_ns: output.clock.unix_ns(moment.time_ns),
                name: moment.event.name(),
                attributes: attributes(&moment.event, moment.result, moment.duration_ns),
            })
            .collect(),
        links: Vec::new(),
        error: known.failed.map(Into::into),
    });
}

/// Something of a queue pair failed: a part of its trace, sent at once, as the queue pair may live for days.
pub(super) fn failure(sample: &NetworkSample, known: &QueuePair, output: &mut Output<'_>) {
    let Some(watched) = output.communicators.process(known.pid) else {
        return;
    };
    let trace_id = trace(output, watched.identity, known.begun_ns, known.number);
    let mut attributes_of = own(known);
    attributes_of.push(("rdma.event.name", Value::Static(sample.event.name())));
    for attribute in attributes(&sample.event, sample.result, sample.duration_ns) {
        if !attributes_of.iter().any(|(name, _)| *name == attribute.0) {
            attributes_of.push(attribute);
        }
    }
    let key = SpanKey {
        // Several may come of one queue pair.
        index: known.moments.len() as u32 + known.left_out as u32,
        ..SpanKey::of(Role::NetworkError)
    };
    let parent = SpanKey::of(Role::QueuePair).span_id(&trace_id);
    error(
        sample,
        Arc::clone(&watched.resource),
        (trace_id, key, Some(parent)),
        attributes_of,
        output,
    );
}

/// Something failed that is of no known queue pair.
pub(super) fn incident(
    sample: &NetworkSample,
    device: &Arc<str>,
    collector: &Arc<Resource>,
    output: &mut Output<'_>,
) {
    let watched = sample.pid.and_then(|pid| output.communicators.process(pid));
    let identity = watched.map_or_else(|| device_identity(device), |watched| watched.identity);
    let resource = watched.map_or(collector, |watched| &watched.resource);
    let trace_id = trace(output, identity, sample.time_ns, 0);
    let mut attributes_of = Vec::new();
    if !device.is_empty() {
        attributes_of.push(("rdma.device.name", text(device)));
    }
    attributes_of.push(("rdma.event.name", Value::Static(sample.event.name())));
    attributes_of.extend(attributes(&sample.event, sample.result, sample.duration_ns));
    let key = SpanKey::of(Role::NetworkError);
    error(
        sample,
        Arc::clone(resource),
        (trace_id, key, None),
        attributes_of,
        output,
    );
}

/// Sends the span of an error: its trace, its key in it, and the span that it belongs to.
fn error(
    sample: &NetworkSample,
    resource: Arc<Resource>,
    (trace_id, key, parent_span_id): (TraceId, SpanKey, Option<SpanId>),
    attributes: Vec<Attribute>,
    output: &mut Output<'_>,
) {
    output.counts.count(Role::NetworkError);
    output.spans.push(Span {
        resource,
        trace_id,
        span_id: key.span_id(&trace_id),
        parent_span_id,
        name: "rdma error",
        start_unix_ns: output.clock.unix_ns(sample.time_ns),
        end_unix_ns: output.clock.unix_ns(sample.time_ns + sample.duration_ns),
        attributes,
        events: Vec::new(),
        links: Vec::new(),
        error: Some(message(&sample.event, sample.result)),
    });
}

/// Identity of the span of a port that went down at a time.
pub(super) fn port_down_ids(
    output: &Output<'_>,
    device: &Arc<str>,
    port: u32,
    since_ns: u64,
) -> (TraceId, SpanId) {
    let trace_id = trace(output, device_identity(device), since_ns, port);
    (trace_id, SpanKey::of(Role::PortDown).span_id(&trace_id))
}

/// A port was down from a time to another, or still is; connections may have failed with it.
pub(super) fn port_down(
    collector: &Arc<Resource>,
    device: &Arc<str>,
    port: u32,
    (since_ns, end_ns): (u64, Option<u64>),
    failover: Option<(TraceId, SpanId)>,
    output: &mut Output<'_>,
) {
    let (trace_id, span_id) = port_down_ids(output, device, port, since_ns);
    output.counts.count(Role::PortDown);
    output.spans.push(Span {
        resource: Arc::clone(collector),
        trace_id,
        span_id,
        parent_span_id: None,
        name: "rdma port down",
        start_unix_ns: output.clock.unix_ns(since_ns),
        end_unix_ns: output.clock.unix_ns(end_ns.unwrap_or(since_ns).max(since_ns)),
        attributes: vec![
            ("rdma.device.name", text(device)),
            ("rdma.port.number", number(port)),
            ("rdma.port.recovered", Value::Bool(end_ns.is_some())),
        ],
        events: Vec::new(),
        links: failover
            .map(|(trace_id, span_id)| link(trace_id, span_id, "failover"))
            .into_iter()
            .collect(),
        error: Some(format!("port {port} of {device} was down").into()),
    });
}
