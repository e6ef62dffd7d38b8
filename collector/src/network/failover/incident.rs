//! The failure of a port, as the processes of a host see it that use it: the root of the failovers of all connections that leave it.

use std::{collections::BTreeMap, sync::Arc};

use ringsight_exporters::model::{Attribute, Resource, Span, SpanEvent, SpanId, SpanLink, TraceId, Value};
use ringsight_records::{PathCause, PathChange, State};

use super::{
    Connection, Failover, cause_name,
    moments::{Moment, Moments},
    place::{Place, root},
    spans::{delayed_link, moment_attributes, moment_name},
};
use crate::{
    correlate::communicators::{Communicators, Owner},
    identity::{InstanceKey, Role, TraceKind},
    network::{
        Output,
        ports::{NOTICED_NS, Outage, Ports},
        spans::{device_identity, port_down_ids},
    },
    spans::link,
};

/// Connections counted of one.
const CONNECTIONS: usize = 16_384;
/// Operations kept that one delayed: the connections have their own.
const DELAYED: usize = 128;
/// Times kept in which its port was down: the first ones, and the last.
const OUTAGES: usize = 16;

/// What connections left.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Left {
    /// A network device's port, of all processes of one owner, by its number if that is known. Processes say the device themselves:
    /// one owner's do not enter another's failure.
    Device(Arc<str>, Option<u32>, Option<Owner>),
    /// A process's port by its number, of which it has not said what it is.
    Port(u32, Option<u8>),
}

impl Left {
    /// What a change of a path of a process is about, which nothing is known of before. `number` is that of the path's port, if it is known.
    pub(super) fn of(
        pid: u32,
        state: State,
        change: &PathChange,
        number: Option<u32>,
        communicators: &Communicators,
    ) -> Self {
        // It tells of the path that is used instead, not of the one that was left.
        let is_elsewhere = match state {
            State::PATH_SWITCHED => change.cause != Some(PathCause::Failback),
            State::PATH_RECOVERED => true,
            _ => false,
        };
        if is_elsewhere {
            return Self::Port(pid, None);
        }
        communicators
            .network_device(pid, change.port, change.number)
            .map_or(Self::Port(pid, change.port), |device| {
                let owner = communicators.process(pid).map(|watched| watched.owner);
                Self::Device(Arc::clone(device), number, owner)
            })
    }
}

/// A failure that is under way.
#[derive(Clone, Debug)]
pub(super) struct Incident {
    trace_id: TraceId,
    /// That of the process that noticed first, in whose service it is looked for.
    resource: Option<Arc<Resource>>,
    /// When what came first of it happened.
    begun_ns: u64,
    /// When it began: another process may have noticed earlier, and is heard later.
    first_ns: u64,
    last_ns: u64,
    cause: Option<PathCause>,
    /// Failovers that are or were parts of it, and those that are under way. Of a port that flaps a connection may have several.
    joined: u32,
    under_way: u32,
    /// The connections, with what was heard of each last when it was no longer under way.
    connections: BTreeMap<Connection, Option<State>>,
    switches: u32,
    replayed: u64,
    /// The longest of those that have recovered.
    recovery_ns: Option<u64>,
    moments: Moments<Connection>,
    delayed: Vec<SpanLink>,
    /// The port's number, if the kernel has told.
    port: Option<u32>,
    /// When it was down, by the kernel.
    outages: Vec<Outage>,
}

impl Incident {
    /// The first connection leaves a port, whose number may be known.
    pub(super) fn begin(
        left: &Left,
        port: Option<u32>,
        pid: u32,
        begun_ns: u64,
        ports: &mut Ports,
        output: &Output<'_>,
    ) -> Self {
        let watched = output.communicators.process(pid);
        let (comm, number) = match left {
            Left::Device(device, number, _) => (device_identity(device), number.unwrap_or(0)),
            Left::Port(_, port) => (
                watched.map_or(0, |watched| watched.identity),
                port.map_or(0, |port| u32::from(port) + 1),
            ),
        };
        let key = InstanceKey {
            comm,
            seq: begun_ns,
            ranks: 0,
            // Apart from those of ports and queue pairs, whose numbers have 24 bits.
            replay: 1 << 31 | number,
            kind: TraceKind::Network,
            pair: None,
        };
        let mut incident = Self {
            trace_id: key.trace_id(output.scope),
            resource: watched.map(|watched| Arc::clone(&watched.resource)),
            begun_ns,
            first_ns: begun_ns,
            last_ns: begun_ns,
            cause: None,
            joined: 0,
            under_way: 0,
            connections: BTreeMap::new(),
            switches: 0,
            replayed: 0,
            recovery_ns: None,
            moments: Moments::default(),
            delayed: Vec::new(),
            port,
            outages: Vec::new(),
        };
        if let Left::Device(device, ..) = left {
            let mut outages = ports.about(device, begun_ns);
            // Which port of the device, where nothing else tells: the one that went down last.
            let last = outages.iter().max_by_key(|outage| outage.since_ns);
            incident.port = port.or(last.map(|outage| outage.port));
            outages.retain(|outage| incident.port == Some(outage.port));
            outages.sort_by_key(|outage| outage.since_ns);
            if let Some(port) = incident.port {
                ports.failed_with(device, port, incident.ids());
            }
            incident.outages = outages;
        }
        incident
    }

    pub(super) fn trace_id(&self) -> TraceId {
        self.trace_id
    }

    /// Identity of its span.
    pub(super) fn ids(&self) -> (TraceId, SpanId) {
        (self.trace_id, root(&self.trace_id))
    }

    /// For how long it has been going on.
    pub(super) fn age_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.begun_ns)
    }

    /// One more connection leaves; the kernel may have said of which port its queue pair is.
    pub(super) fn join(&mut self, port: Option<u32>) -> Place {
        self.port = self.port.or(port);
        let index = self.joined;
        self.joined = self.joined.wrapping_add(1);
        self.under_way = self.under_way.saturating_add(1);
        Place {
            trace_id: self.trace_id,
            index,
        }
    }

    /// Something happened to one of the connections.
    pub(super) fn note(&mut self, moment: Moment, connection: Connection) {
        self.cause = self.cause.or(moment.change.cause);
        self.first_ns = self.first_ns.min(moment.ns);
        self.moments.push(moment, connection);
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
        if self.connections.len() < CONNECTIONS || self.connections.contains_key(connection) {
            self.connections.insert(*connection, failover.last);
        }
        let ranks = output
            .communicators
            .get(connection.comm)
            .map_or(0, |known| known.ranks);
        if ranks != 0 {
            for operation in &failover.delayed {
                let link = delayed_link(connection, operation, ranks, output);
                let is_known =
                    |known: &SpanLink| (known.trace_id, known.span_id) == (link.trace_id, link.span_id);
                if self.delayed.len() < DELAYED && !self.delayed.iter().any(is_known) {
                    self.delayed.push(link);
                }
            }
        }
        self.under_way == 0
    }

    /// One that was not under way any more, since its first path had been away for long, is on its way back, or was.
    pub(super) fn return_of(&mut self, connection: &Connection, back: &Failover) {
        self.last_ns = self.last_ns.max(back.last_ns);
        self.switches = self.switches.saturating_add(back.switches);
        if let Some(last) = self.connections.get_mut(connection) {
            *last = back.last;
        }
    }

    /// The kernel says that a port of the device is down; whether that is this one.
    pub(super) fn port_down(&mut self, port: u32, since_ns: u64) -> bool {
        let is_this = *self.port.get_or_insert(port) == port;
        if is_this {
            if self.outages.len() >= OUTAGES {
                self.outages.pop();
            }
            self.outages.push(Outage {
                port,
                since_ns,
                until_ns: None,
            });
        }
        is_this
    }

    /// The kernel says that it is up.
    pub(super) fn port_up(&mut self, port: u32, until_ns: u64) {
        if let Some(last) = self.outages.last_mut()
            && last.port == port
        {
            last.until_ns.get_or_insert(until_ns);
        }
    }

    /// The span over all of it.
    pub(super) fn send(self, left: &Left, output: &mut Output<'_>) {
        let (trace_id, span_id) = self.ids();
        // Nothing is told of a process that is not watched.
        let Some(resource) = self.resource else {
            return;
        };
        let heard_last = |state| {
            let last = self.connections.values();
            last.filter(|last| **last == Some(state)).count()
        };
        let all = self.connections.len();
        let (gave_up, back) = (heard_last(State::ABORTED), heard_last(State::STOP));
        let count = |count: usize| Value::Int(i64::try_from(count).unwrap_or(i64::MAX));
        let mut attributes = vec![
            ("ccl.failover.cause", Value::Static(cause_name(self.cause))),
            ("ccl.failover.connections", count(all)),
            ("ccl.failover.gave_up", count(gave_up)),
            ("ccl.failover.failed_back", Value::Bool(back == all)),
            ("ccl.failover.switches", Value::Int(i64::from(self.switches))),
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
            Left::Device(device, ..) => {
                attributes.push(("rdma.device.name", Value::Text(Arc::clone(device))));
                let number = self.port.map(|port| Value::Int(i64::from(port)));
                attributes.extend(number.map(|number| ("rdma.port.number", number)));
            }
            Left::Port(_, port) => {
                attributes.extend(port.map(|port| ("ccl.network.port", Value::Int(i64::from(port)))));
            }
        }
        // From the port's going down, if that was shortly before the first path broke. One that had long been down broke nothing then.
        let down_ns = self.outages.first().map(|outage| outage.since_ns);
        let begun_ns = down_ns
            .filter(|since_ns| since_ns.saturating_add(NOTICED_NS) >= self.first_ns)
            .map_or(self.first_ns, |since_ns| since_ns.min(self.first_ns));
        let mut end_ns = self.last_ns;
        if let Left::Device(device, ..) = left {
            for outage in &self.outages {
                let (trace_id, span_id) = port_down_ids(output, device, outage.port, outage.since_ns);
                links.push(link(trace_id, span_id, "port_down"));
                let port: Attribute = ("rdma.port.number", Value::Int(i64::from(outage.port)));
                let moments = [(Some(outage.since_ns), "port_down"), (outage.until_ns, "port_up")];
                for (ns, name) in moments {
                    if let Some(ns) = ns.filter(|ns| *ns >= begun_ns) {
                        end_ns = end_ns.max(ns);
                        events.push((ns, name, vec![port.clone()]));
                    }
                }
            }
        }
        for (moment, connection, left_out) in self.moments.in_order() {
            let mut told = connection.attributes(output.communicators);
            told.extend(moment_attributes(
                output.communicators,
                connection.pid,
                moment,
                left_out,
            ));
            events.push((moment.ns, moment_name(moment.state), told));
        }
        events.sort_by_key(|(ns, ..)| *ns);
        let error = (gave_up > 0).then(|| format!("{gave_up} of {all} connections have no path left").into());
        output.counts.count(Role::PortFailover);
        output.spans.push(Span {
            resource,
            trace_id,
            span_id,
            parent_span_id: None,
            name: "port failover",
            start_unix_ns: output.clock.unix_ns(begun_ns),
            end_unix_ns: output.clock.unix_ns(end_ns),
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
