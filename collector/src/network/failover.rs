//! Failovers of the library's connections: one span from the path that broke to the first path again, linked to the operations that
//! waited for it. Where the first path is away for long, the span is sent before, and the way back is its child.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

use ringsight_exporters::model::{
    Attribute, LogRecord, Metric, MetricData, Resource, Severity, Span, SpanEvent, SpanId, SpanLink, TraceId,
    Value,
};
use ringsight_records::{Flags, PathCause, PathChange, Record, State};

use super::{Network, Output};
use crate::{
    correlate::communicators::{Communicators, Watched},
    identity::{Direction, InstanceKey, Role, Scope, SpanKey, TraceKind},
};

/// Failovers that are under way at once; connections are few.
const UNDER_WAY: usize = 16_384;
/// Moments, and operations, kept of one.
const KEPT: usize = 64;
/// After its recovery a failover waits this long for the first path to come back, then it is sent without.
const FAILBACK_NS: u64 = 30_000_000_000;
/// A failover of which nothing more has been heard for so long before its recovery is not going on: its end was lost.
const SILENT_NS: u64 = 300_000_000_000;

/// One end of a connection, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Connection {
    pid: u32,
    comm: u64,
    rank: u32,
    peer: i32,
    channel: u8,
    send: bool,
    p2p: bool,
}

impl Connection {
    /// Of a span of the failover that began at this time.
    fn ids(&self, watched: &Watched, begun_ns: u64, role: Role, scope: &Scope) -> (TraceId, SpanId) {
        let key = InstanceKey {
            comm: watched.identity,
            seq: begun_ns,
            ranks: 0,
            replay: u32::from(self.p2p) << 16 | u32::from(self.channel) << 1 | u32::from(self.send),
            kind: TraceKind::Network,
            pair: Some((self.rank, self.peer.cast_unsigned())),
        };
        let trace_id = key.trace_id(scope);
        (trace_id, SpanKey::of(role).span_id(&trace_id))
    }

    /// Its rank's.
    fn resource(&self, watched: &Watched, communicators: &Communicators) -> Arc<Resource> {
        let member = communicators
            .get(self.comm)
            .and_then(|communicator| communicator.member(self.pid, self.rank));
        Arc::clone(member.map_or(&watched.resource, |member| &member.resource))
    }

    /// Which one it is.
    fn attributes(&self, communicators: &Communicators) -> Vec<Attribute> {
        let mut attributes = vec![
            ("ccl.rank", Value::Int(i64::from(self.rank))),
            ("ccl.peer.rank", Value::Int(i64::from(self.peer))),
            ("ccl.channel.id", Value::Int(i64::from(self.channel))),
        ];
        let id = communicators.get(self.comm).map(|communicator| &communicator.id);
        attributes.extend(id.map(|id| ("ccl.communicator.id", Value::Text(Arc::clone(id)))));
        attributes
    }
}

/// An operation that the connection was at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Delayed {
    seq: u64,
    replay: u32,
    p2p: bool,
}

/// A failover that is under way.
#[derive(Clone, Debug)]
pub(super) struct Failover {
    begun_ns: u64,
    /// All before this time was sent: it is the way back alone.
    back_ns: Option<u64>,
    last_ns: u64,
    /// When steps got over again.
    recovered_ns: Option<u64>,
    cause: Option<PathCause>,
    switches: u32,
    replayed: u64,
    moments: Vec<(u64, State, PathChange, u64)>,
    delayed: Vec<Delayed>,
}

/// Failovers under way, and what is counted of all.
#[derive(Debug, Default)]
pub(super) struct Failovers {
    under_way: BTreeMap<Connection, Failover>,
    /// When those began that were sent before the way back.
    sent: BTreeMap<Connection, u64>,
    /// Switches and bytes sent again, by process and cause.
    counts: BTreeMap<(u32, &'static str), (u64, u64)>,
}

fn cause_name(cause: Option<PathCause>) -> &'static str {
    cause.map_or("unknown", PathCause::name)
}

impl Network {
    /// Takes in a record of a connection's paths.
    pub(crate) fn path_changed(&mut self, pid: u32, record: &Record, output: &mut Output<'_>) {
        let change = PathChange::from_value(record.value);
        let connection = Connection {
            pid,
            comm: record.comm,
            rank: record.rank,
            peer: record.peer,
            channel: record.channel,
            send: record.flags().contains(Flags::SEND),
            p2p: record.flags().contains(Flags::P2P),
        };
        let failovers = &mut self.failovers;
        let mut is_known = failovers.under_way.contains_key(&connection);
        // A path that was not in use is good again: nothing was delayed.
        if record.state == State::PATH_RESTORED && !is_known {
            return;
        }
        // What breaks on the way back, after the rest was sent, is another failover.
        if record.state == State::START
            && let Entry::Occupied(entry) = failovers.under_way.entry(connection)
            && entry.get().back_ns.is_some()
        {
            failover_span(&connection, &entry.remove(), output);
            is_known = false;
        }
        if failovers.under_way.len() >= UNDER_WAY && !is_known {
            return;
        }
        let sent = failovers.sent.remove(&connection).filter(|_| {
            let is_back = change.cause == Some(PathCause::Failback);
            record.state == State::PATH_SWITCHED && is_back
        });
        let failover = failovers.under_way.entry(connection).or_insert_with(|| Failover {
            begun_ns: sent.unwrap_or(record.time_ns),
            back_ns: sent.map(|_| record.time_ns),
            last_ns: record.time_ns,
            recovered_ns: None,
            cause: change.cause,
            switches: 0,
            replayed: 0,
            moments: Vec::new(),
            delayed: Vec::new(),
        });
        failover.last_ns = failover.last_ns.max(record.time_ns);
        if failover.moments.len() < KEPT {
            failover
                .moments
                .push((record.time_ns, record.state, change, record.bytes));
        }
        let operation = Delayed {
            seq: record.seq,
            replay: record.replay,
            p2p: record.flags().contains(Flags::P2P),
        };
        // What runs while a repaired path is only proven is not delayed by it, and between operations nothing is.
        if record.op != 0
            && failover.recovered_ns.is_none()
            && failover.back_ns.is_none()
            && failover.delayed.len() < KEPT
            && !failover.delayed.contains(&operation)
        {
            failover.delayed.push(operation);
        }
        failover_log(&connection, failover.begun_ns, record, &change, output);
        match record.state {
            // It broke once more.
            State::START => failover.recovered_ns = None,
            State::PATH_SWITCHED => {
                failover.switches += 1;
                failover.replayed = failover.replayed.saturating_add(record.bytes);
                let count = failovers
                    .counts
                    .entry((pid, cause_name(change.cause)))
                    .or_default();
                count.0 += 1;
                count.1 = count.1.saturating_add(record.bytes);
            }
            State::PATH_RECOVERED => failover.recovered_ns = Some(record.time_ns),
            State::STOP | State::ABORTED => {
                if let Some(failover) = self.failovers.under_way.remove(&connection) {
                    failover_span(&connection, &failover, output);
                }
            }
            _ => {}
        }
    }

    /// Sends what will not get its first path back soon.
    pub(crate) fn settle_failovers(&mut self, now_ns: u64, output: &mut Output<'_>) {
        if self.failovers.under_way.is_empty() {
            return;
        }
        let sent = self.send_failovers(output, |_, failover| {
            let (since_ns, most_ns) = match failover.recovered_ns {
                Some(recovered_ns) => (recovered_ns, FAILBACK_NS),
                None => (failover.last_ns, SILENT_NS),
            };
            now_ns.saturating_sub(since_ns) > most_ns
        });
        let room = UNDER_WAY.saturating_sub(self.failovers.sent.len());
        self.failovers.sent.extend(sent.into_iter().take(room));
    }

    /// Sends those of a rank's communicator, which has ended: nothing more will be heard of them.
    pub(crate) fn end_failovers_of(&mut self, (pid, comm, rank): (u32, u64, u32), output: &mut Output<'_>) {
        let is_of =
            |connection: &Connection| (connection.pid, connection.comm, connection.rank) == (pid, comm, rank);
        if !self.failovers.under_way.is_empty() {
            self.send_failovers(output, |connection, _| is_of(connection));
        }
        self.failovers.sent.retain(|connection, _| !is_of(connection));
    }

    /// Sends those of a process, or all.
    pub(super) fn end_failovers(&mut self, pid: Option<u32>, output: &mut Output<'_>) {
        self.send_failovers(output, |connection, _| {
            pid.is_none_or(|pid| pid == connection.pid)
        });
        self.failovers
            .sent
            .retain(|connection, _| pid.is_some_and(|pid| pid != connection.pid));
        if let Some(pid) = pid {
            self.failovers.counts.retain(|(of, _), _| *of != pid);
        }
    }

    /// Sends some; when they had begun.
    fn send_failovers(
        &mut self,
        output: &mut Output<'_>,
        which: impl Fn(&Connection, &Failover) -> bool,
    ) -> Vec<(Connection, u64)> {
        let mut sent = Vec::new();
        let under_way = std::mem::take(&mut self.failovers.under_way);
        for (connection, failover) in under_way {
            if which(&connection, &failover) {
                failover_span(&connection, &failover, output);
                sent.push((connection, failover.begun_ns));
            } else {
                self.failovers.under_way.insert(connection, failover);
            }
        }
        sent
    }

    /// Metrics of failovers.
    pub(super) fn read_failovers(
        &self,
        (start_unix_ns, unix_ns): (u64, u64),
        communicators: &Communicators,
        metrics: &mut Vec<Metric>,
    ) {
        for ((pid, cause), (switches, bytes)) in &self.failovers.counts {
            let Some(watched) = communicators.process(*pid) else {
                continue;
            };
            for (name, description, unit, count) in [
                (
                    "ccl.failover.switches",
                    "Changes of a connection's path",
                    "{switch}",
                    switches,
                ),
                (
                    "ccl.failover.replayed",
                    "Bytes sent again over another path",
                    "By",
                    bytes,
                ),
            ] {
                metrics.push(Metric {
                    resource: Arc::clone(&watched.resource),
                    name,
                    description,
                    unit,
                    attributes: vec![("ccl.failover.cause", Value::Static(cause))],
                    start_unix_ns,
                    unix_ns,
                    data: MetricData::Counter(*count),
                });
            }
        }
    }
}

impl Failover {
    /// From the break to the first step that got over again.
    fn recovery_ns(&self) -> Option<u64> {
        let got_over = |state: &State| matches!(*state, State::PATH_RECOVERED | State::STOP);
        let (ns, ..) = self.moments.iter().find(|(_, state, ..)| got_over(state))?;
        Some(ns.saturating_sub(self.begun_ns))
    }
}

fn moment_name(state: State) -> &'static str {
    match state {
        State::START => "path_broken",
        State::STOP => "failed_back",
        State::ABORTED => "gave_up",
        state => state.name().unwrap_or("unknown"),
    }
}

/// To the rank's part of an operation that waited.
fn delayed_link(connection: &Connection, operation: &Delayed, ranks: u32, output: &Output<'_>) -> SpanLink {
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
    SpanLink {
        trace_id,
        span_id: SpanKey::rank(Role::Rank, connection.rank, direction).span_id(&trace_id),
        attributes: vec![("ccl.link.type", Value::Static("delayed"))],
    }
}

/// What a change says.
fn moment_attributes(
    communicators: &Communicators,
    pid: u32,
    state: State,
    change: &PathChange,
    bytes: u64,
) -> Vec<Attribute> {
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
        let device = communicators.network_device(pid, change.port, change.number);
        attributes.extend(device.map(|name| ("rdma.device.name", Value::Text(Arc::clone(name)))));
    }
    attributes.extend(
        change
            .port
            .map(|port| ("ccl.network.port", Value::Int(i64::from(port)))),
    );
    if state == State::PATH_SWITCHED {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        attributes.push(("ccl.failover.replayed.size", Value::Int(bytes)));
    }
    attributes
}

/// A change of the path that somebody should know of when it happens: the span comes when the failover is over.
fn failover_log(
    connection: &Connection,
    begun_ns: u64,
    record: &Record,
    change: &PathChange,
    output: &mut Output<'_>,
) {
    let (severity, event_name, what) = match record.state {
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
    attributes.extend(moment_attributes(
        communicators,
        connection.pid,
        record.state,
        change,
        record.bytes,
    ));
    let (rank, peer, channel) = (connection.rank, connection.peer, connection.channel);
    let towards = if connection.send { "to" } else { "from" };
    let cause = cause_name(change.cause);
    output.logs.push(LogRecord {
        resource: connection.resource(watched, communicators),
        unix_ns: output.clock.unix_ns(record.time_ns),
        observed_unix_ns: output.clock.observed_unix_ns(record.time_ns),
        severity,
        event_name,
        body: format!("rank {rank}'s connection {towards} rank {peer}, channel {channel}, {what}: {cause}")
            .into(),
        attributes,
        span: Some(connection.ids(watched, begun_ns, Role::Failover, output.scope)),
    });
}

fn failover_span(connection: &Connection, failover: &Failover, output: &mut Output<'_>) {
    let Some(watched) = output.communicators.process(connection.pid) else {
        return;
    };
    let communicator = output.communicators.get(connection.comm);
    let ids = |role| connection.ids(watched, failover.begun_ns, role, output.scope);
    let whole = ids(Role::Failover);
    let (role, name, parent) = match failover.back_ns {
        None => (Role::Failover, "failover", None),
        Some(_) => (Role::Failback, "failback", Some(whole.1)),
    };
    let (trace_id, span_id) = ids(role);
    let last = failover.moments.last().map(|(_, state, _, _)| *state);
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
        .iter()
        .map(|(ns, state, change, bytes)| SpanEvent {
            unix_ns: output.clock.unix_ns(*ns),
            name: moment_name(*state),
            attributes: moment_attributes(output.communicators, connection.pid, *state, change, *bytes),
        })
        .collect();
    output.counts.count(role);
    output.spans.push(Span {
        resource: connection.resource(watched, output.communicators),
        trace_id,
        span_id,
        parent_span_id: parent,
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
