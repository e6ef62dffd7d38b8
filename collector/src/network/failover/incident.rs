//! The failure of a port, as the processes of a host see it that use it: the root of the failovers of all connections that leave it.

use std::{collections::BTreeMap, sync::Arc};

use ringsight_exporters::model::{Attribute, Resource, Span, SpanEvent, SpanId, SpanLink, TraceId, Value};
use ringsight_records::{PathCause, PathChange, State};

use super::{
    Connection, Failover, cause_name,
    spans::{delayed_link, moment_attributes, moment_name},
};
use crate::{
    correlate::communicators::Communicators,
    identity::{InstanceKey, Role, SpanKey, TraceKind},
    network::{
        Down, Output,
        spans::{device_identity, port_down_ids},
    },
};

/// Moments kept of one, and operations that it delayed: the connections have their own.
const KEPT: usize = 128;

/// What connections left.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Left {
    /// A network device: of all processes of the host.
    Device(Arc<str>),
    /// A process's port by its number, of which it has not said what it is.
    Port(u32, Option<u8>),
}

impl Left {
    /// What a change of a path of a process is about.
    pub(super) fn of(pid: u32, change: &PathChange, communicators: &Communicators) -> Self {
        communicators
            .network_device(pid, change.port, change.number)
            .map_or(Self::Port(pid, change.port), |device| {
                Self::Device(Arc::clone(device))
            })
    }
}

/// Where a connection's failover stands in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) trace_id: TraceId,
    /// Counts the connections.
    index: u32,
}

impl Place {
    /// The port's span.
    pub(super) fn root(&self) -> SpanId {
        SpanKey::of(Role::PortFailover).span_id(&self.trace_id)
    }

    /// One of the connection's.
    pub(super) fn span_id(&self, role: Role) -> SpanId {
        let key = SpanKey {
            index: self.index,
            ..SpanKey::of(role)
        };
        key.span_id(&self.trace_id)
    }
}

/// A change of a path: when, what, which paths, bytes sent again.
type Moment = (u64, State, PathChange, u64);

/// A failure that is under way.
#[derive(Clone, Debug)]
pub(super) struct Incident {
    trace_id: TraceId,
    /// That of the process that noticed first, in whose service it is looked for.
    resource: Option<Arc<Resource>>,
    begun_ns: u64,
    last_ns: u64,
    cause: Option<PathCause>,
    /// Failovers that are or were parts of it, and those that are under way.
    joined: u32,
    under_way: u32,
    switches: u32,
    replayed: u64,
    /// The longest of those that have recovered.
    recovery_ns: Option<u64>,
    gave_up: u32,
    /// How many are not back.
    away: u32,
    moments: Vec<(Moment, Connection)>,
    delayed: Vec<SpanLink>,
    /// The kernel's port: its number, and when it went down.
    down: Option<(u32, u64)>,
    up_ns: Option<u64>,
}

impl Incident {
    /// The first connection leaves a port; `down` are those that the kernel has said to be down.
    pub(super) fn begin(
        left: &Left,
        pid: u32,
        begun_ns: u64,
        down: &BTreeMap<(Arc<str>, u32), Down>,
        output: &Output<'_>,
    ) -> Self {
        let process = |pid| {
            output
                .communicators
                .process(pid)
                .map_or(0, |watched| watched.identity)
        };
        let (comm, port, down) = match left {
            Left::Device(device) => {
                let mut of_device = down.iter().filter(|((name, _), _)| name == device);
                let down = of_device.next().map(|((_, port), down)| (*port, down.since_ns));
                (device_identity(device), 0, down)
            }
            Left::Port(pid, port) => (process(*pid), port.map_or(0, |port| u32::from(port) + 1), None),
        };
        let key = InstanceKey {
            comm,
            seq: begun_ns,
            ranks: 0,
            // Apart from those of ports and queue pairs, whose numbers have 24 bits.
            replay: 1 << 31 | port,
            kind: TraceKind::Network,
            pair: None,
        };
        Self {
            trace_id: key.trace_id(output.scope),
            resource: output
                .communicators
                .process(pid)
                .map(|watched| Arc::clone(&watched.resource)),
            begun_ns,
            last_ns: begun_ns,
            cause: None,
            joined: 0,
            under_way: 0,
            switches: 0,
            replayed: 0,
            recovery_ns: None,
            gave_up: 0,
            away: 0,
            moments: Vec::new(),
            delayed: Vec::new(),
            down,
            up_ns: None,
        }
    }

    /// One more connection leaves.
    pub(super) fn join(&mut self) -> Place {
        let index = self.joined;
        self.joined += 1;
        self.under_way += 1;
        Place {
            trace_id: self.trace_id,
            index,
        }
    }

    /// Something happened to one of the connections.
    pub(super) fn note(&mut self, moment: Moment, connection: Connection) {
        self.cause = self.cause.or(moment.2.cause);
        if self.moments.len() < KEPT {
            self.moments.push((moment, connection));
        }
    }

    /// One is not under way any more; whether that was the last one.
    pub(super) fn leave(
        &mut self,
        connection: &Connection,
        failover: &Failover,
        output: &Output<'_>,
    ) -> bool {
        self.under_way = self.under_way.saturating_sub(1);
        self.last_ns = self.last_ns.max(failover.last_ns);
        self.switches = self.switches.saturating_add(failover.switches);
        self.replayed = self.replayed.saturating_add(failover.replayed);
        self.recovery_ns = self.recovery_ns.max(failover.recovery_ns());
        self.gave_up += u32::from(failover.last() == Some(State::ABORTED));
        self.away += u32::from(failover.last() != Some(State::STOP));
        let ranks = output
            .communicators
            .get(connection.comm)
            .map_or(0, |known| known.ranks);
        if ranks != 0 {
            for operation in &failover.delayed {
                let link = delayed_link(connection, operation, ranks, output);
                let is_known =
                    |known: &SpanLink| (known.trace_id, known.span_id) == (link.trace_id, link.span_id);
                if self.delayed.len() < KEPT && !self.delayed.iter().any(is_known) {
                    self.delayed.push(link);
                }
            }
        }
        self.under_way == 0
    }

    /// The kernel says that a port of the device is down.
    pub(super) fn port_down(&mut self, port: u32, since_ns: u64) {
        self.down.get_or_insert((port, since_ns));
    }

    /// The kernel says that it is up.
    pub(super) fn port_up(&mut self, at_ns: u64) {
        self.up_ns = self.down.map(|_| at_ns);
    }

    /// The span over all of it.
    pub(super) fn send(self, left: &Left, output: &mut Output<'_>) {
        // Nothing is told of a process that is not watched.
        let Some(resource) = self.resource else {
            return;
        };
        let count = |count: u32| Value::Int(i64::from(count));
        let mut attributes = vec![
            ("ccl.failover.cause", Value::Static(cause_name(self.cause))),
            ("ccl.failover.connections", count(self.joined)),
            ("ccl.failover.gave_up", count(self.gave_up)),
            ("ccl.failover.failed_back", Value::Bool(self.away == 0)),
            ("ccl.failover.switches", count(self.switches)),
            (
                "ccl.failover.replayed.size",
                Value::Int(i64::try_from(self.replayed).unwrap_or(i64::MAX)),
            ),
        ];
        attributes.extend(
            self.recovery_ns
                .map(|ns| ("ccl.failover.recovery.duration", Value::Double(ns as f64 / 1e9))),
        );
        let mut links = self.delayed;
        let mut events = Vec::new();
        match left {
            Left::Device(device) => attributes.push(("rdma.device.name", Value::Text(Arc::clone(device)))),
            Left::Port(_, port) => {
                attributes.extend(port.map(|port| ("ccl.network.port", Value::Int(i64::from(port)))));
            }
        }
        if let (Left::Device(device), Some((port, since_ns))) = (left, self.down) {
            let port_number: Attribute = ("rdma.port.number", Value::Int(i64::from(port)));
            attributes.push(port_number.clone());
            let (trace_id, span_id) = port_down_ids(output, device, port, since_ns);
            links.push(SpanLink {
                trace_id,
                span_id,
                attributes: vec![("ccl.link.type", Value::Static("port_down"))],
            });
            let moments = [("port_down", Some(since_ns)), ("port_up", self.up_ns)];
            events.extend(
                moments
                    .into_iter()
                    .filter_map(|(name, ns)| Some((ns?, name, vec![port_number.clone()]))),
            );
        }
        for ((ns, state, change, bytes), connection) in &self.moments {
            let mut told = connection.attributes(output.communicators);
            told.extend(moment_attributes(
                output.communicators,
                connection.pid,
                *state,
                change,
                *bytes,
            ));
            events.push((*ns, moment_name(*state), told));
        }
        events.sort_by_key(|(ns, ..)| *ns);
        let begun_ns = self
            .down
            .map_or(self.begun_ns, |(_, since_ns)| since_ns.min(self.begun_ns));
        let error = (self.gave_up > 0).then(|| {
            let (gave_up, joined) = (self.gave_up, self.joined);
            format!("{gave_up} of {joined} connections have no path left").into()
        });
        output.counts.count(Role::PortFailover);
        output.spans.push(Span {
            resource,
            trace_id: self.trace_id,
            span_id: SpanKey::of(Role::PortFailover).span_id(&self.trace_id),
            parent_span_id: None,
            name: "port failover",
            start_unix_ns: output.clock.unix_ns(begun_ns),
            end_unix_ns: output.clock.unix_ns(self.last_ns),
            attributes,
            events: events
                .into_iter()
                .map(|(ns, name, attributes)| SpanEvent {
                    unix_ns: output.clock.unix_ns(ns),
                    name,
                    attributes,
                })
                .collect(),
            links,
            error,
        });
    }
}
