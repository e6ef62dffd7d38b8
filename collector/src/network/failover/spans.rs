//! Failovers as spans and log records.

use ringsight_exporters::model::{Attribute, LogRecord, Severity, Span, SpanEvent, SpanLink, Value};
use ringsight_records::{PathCause, State};

use super::{Connection, Delayed, Failover, cause_name, moments::Moment, place::Place};
use crate::{
    correlate::communicators::Communicators,
    identity::{Direction, InstanceKey, Role, SpanKey, TraceKind},
    network::Output,
    spans::{link, port_attributes},
};

pub(super) fn moment_name(state: State) -> &'static str {
    match state {
        State::START => "path_broken",
        State::STOP => "failed_back",
        State::ABORTED => "gave_up",
        state => state.name().unwrap_or("unknown"),
    }
}

/// To the rank's part of an operation that waited.
pub(super) fn delayed_link(
    connection: &Connection,
    operation: &Delayed,
    ranks: u32,
    output: &Output<'_>,
) -> SpanLink {
    let peer = connection.peer.cast_unsigned();
    let (kind, pair, direction) = match (operation.p2p, connection.send) {
        (false, _) => (TraceKind::Collective, None, Direction::None),
        (true, true) => (
            TraceKind::PointToPoint,
            Some((connection.rank, peer)),
            Direction::Send,
        ),
        (true, false) => (
            TraceKind::PointToPoint,
            Some((peer, connection.rank)),
            Direction::Recv,
        ),
    };
    let trace_id = InstanceKey {
        comm: connection.comm,
        seq: operation.seq,
        ranks,
        replay: operation.replay,
        kind,
        pair,
    }
    .trace_id(output.scope);
    let span_id = SpanKey::rank(Role::Rank, connection.rank, direction).span_id(&trace_id);
    link(trace_id, span_id, "delayed")
}

/// What a change says, and how many of its kind before it are not told.
pub(super) fn moment_attributes(
    communicators: &Communicators,
    pid: u32,
    moment: &Moment,
    left_out: u64,
) -> Vec<Attribute> {
    let Moment { change, .. } = moment;
    let number = |number| Value::Int(i64::try_from(number).unwrap_or(i64::MAX));
    let mut attributes: Vec<Attribute> = Vec::new();
    attributes.extend(
        change
            .cause
            .map(|cause| ("ccl.failover.cause", Value::Static(cause.name()))),
    );
    if change.status != 0 {
        attributes.push(("rdma.wc.status", Value::Int(i64::from(change.status))));
    }
    attributes.push(("ccl.failover.path", Value::Int(i64::from(change.to))));
    if change.from != change.to {
        attributes.push(("ccl.failover.path.from", Value::Int(i64::from(change.from))));
    }
    if change.number != 0 {
        attributes.push(("rdma.qp.number", Value::Int(i64::from(change.number))));
        attributes.extend(port_attributes(communicators, pid, change.port, change.number));
    }
    attributes.extend(
        change
            .port
            .map(|port| ("ccl.network.port", Value::Int(i64::from(port)))),
    );
    if moment.state == State::PATH_SWITCHED {
        attributes.push(("ccl.failover.replayed.size", number(moment.bytes)));
    }
    if left_out > 0 {
        attributes.push(("ccl.failover.events_left_out", number(left_out)));
    }
    attributes
}

/// A change of the path that somebody should know of when it happens: the span comes when the failover is over.
pub(super) fn failover_log(connection: &Connection, place: Place, moment: &Moment, output: &mut Output<'_>) {
    let Moment { ns, change, .. } = moment;
    let (severity, event_name, what) = match moment.state {
        // Back to a path that comes before it is how it ends.
        State::PATH_SWITCHED if change.cause != Some(PathCause::Failback) => (
            Severity::Warn,
            "ccl.failover.path_switched",
            format!("goes on over path {} instead of {}", change.to, change.from),
        ),
        State::ABORTED => (
            Severity::Error,
            "ccl.failover.gave_up",
            "has no path left".to_owned(),
        ),
        _ => return,
    };
    let communicators = output.communicators;
    let Some(watched) = communicators.process(connection.pid) else {
        return;
    };
    let mut attributes = connection.attributes(communicators);
    attributes.extend(moment_attributes(communicators, connection.pid, moment, 0));
    let (rank, peer, channel) = (connection.rank, connection.peer, connection.channel);
    let towards = if connection.send { "to" } else { "from" };
    let cause = cause_name(change.cause);
    output.logs.push(LogRecord {
        resource: connection.resource(watched, communicators),
        unix_ns: output.clock.unix_ns(*ns),
        observed_unix_ns: output.clock.observed_unix_ns(*ns),
        severity,
        event_name,
        body: format!("rank {rank}'s connection {towards} rank {peer}, channel {channel}, {what}: {cause}")
            .into(),
        attributes,
        span: Some((place.trace_id, place.span_id(Role::Failover))),
    });
}

/// One end of a connection: a part of the failure of the port that it left.
pub(super) fn failover_span(connection: &Connection, failover: &Failover, output: &mut Output<'_>) {
    let Some(watched) = output.communicators.process(connection.pid) else {
        return;
    };
    let communicator = output.communicators.get(connection.comm);
    let place = failover.place;
    let (role, name, parent) = match failover.back_ns {
        None => (Role::Failover, "failover", place.root()),
        Some(_) => (Role::Failback, "failback", place.span_id(Role::Failover)),
    };
    let last = failover.last;
    let mut attributes = connection.attributes(output.communicators);
    attributes.extend([
        ("ccl.failover.cause", Value::Static(cause_name(failover.cause))),
        ("ccl.failover.failed_back", Value::Bool(last == Some(State::STOP))),
    ]);
    if failover.back_ns.is_none() {
        let replayed = i64::try_from(failover.replayed).unwrap_or(i64::MAX);
        attributes.extend([
            ("ccl.failover.switches", Value::Int(i64::from(failover.switches))),
            ("ccl.failover.replayed.size", Value::Int(replayed)),
        ]);
        attributes.extend(failover.recovery_ns().map(|ns| {
            let seconds = Value::Double(ns as f64 / 1e9);
            ("ccl.failover.recovery.duration", seconds)
        }));
    }
    let ranks = communicator.map_or(0, |communicator| communicator.ranks);
    let links = failover
        .delayed
        .iter()
        .filter(|_| connection.comm != 0 && ranks != 0)
        .map(|operation| delayed_link(connection, operation, ranks, output));
    let links = links.collect();
    let events = failover
        .moments
        .in_order()
        .map(|(moment, (), left_out)| SpanEvent {
            unix_ns: output.clock.unix_ns(moment.ns),
            name: moment_name(moment.state),
            attributes: moment_attributes(output.communicators, connection.pid, moment, left_out),
        })
        .collect();
    output.counts.count(role);
    output.spans.push(Span {
        resource: connection.resource(watched, output.communicators),
        trace_id: place.trace_id,
        span_id: place.span_id(role),
        parent_span_id: Some(parent),
        name,
        start_unix_ns: output
            .clock
            .unix_ns(failover.back_ns.unwrap_or(failover.begun_ns)),
        end_unix_ns: output.clock.unix_ns(failover.last_ns),
        attributes,
        events,
        links,
        error: (last == Some(State::ABORTED)).then(|| "the connection has no path left".into()),
    });
}
