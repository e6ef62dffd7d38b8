//! Failovers of the library's connections: one span from the path that broke to the first path again, linked to the operations that
//! waited for it. Where the first path is away for long, the span is sent before, and the way back is its child. The connections that leave
//! one port are one trace ([`incident`]).

mod incident;
mod moments;
mod place;
mod spans;

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
    ops::RangeInclusive,
    sync::Arc,
};

use ringsight_exporters::model::{Attribute, Metric, MetricData, Resource, SpanId, TraceId, Value};
use ringsight_records::{Flags, PathCause, PathChange, Record, State};

use self::{
    incident::{Incident, Left},
    moments::{Moment, Moments},
    place::Place,
    spans::{failover_log, failover_span},
};
use super::{Network, Output, ports::Ports};
use crate::{
    correlate::communicators::{Communicators, Owner, Watched},
    limits::Limit,
};

/// Operations kept of one.
const DELAYED: usize = 64;
/// After its recovery a failover waits this long for the first path to come back, then it is sent without.
const FAILBACK_NS: u64 = 30_000_000_000;
/// A failover of which nothing more has been heard for so long before its recovery is not going on: its end was lost.
const SILENT_NS: u64 = 300_000_000_000;
/// A port that flaps may have a connection under way always: what has gone on for so long is told as far as it is known, and what comes
/// then is another failure.
const OLD_NS: u64 = 3_600_000_000_000;

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
    /// Before all of a process, or of a rank's communicator in it, and the last of them.
    fn all_of(pid: u32, rank: Option<(u64, u32)>) -> RangeInclusive<Self> {
        let first = Self {
            pid,
            comm: rank.map_or(0, |(comm, _)| comm),
            rank: rank.map_or(0, |(_, rank)| rank),
            peer: i32::MIN,
            channel: 0,
            send: false,
            p2p: false,
        };
        let last = Self {
            pid,
            comm: rank.map_or(u64::MAX, |(comm, _)| comm),
            rank: rank.map_or(u32::MAX, |(_, rank)| rank),
            peer: i32::MAX,
            channel: u8::MAX,
            send: true,
            p2p: true,
        };
        first..=last
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
    place: Place,
    /// What it is a part of the failure of.
    left: Left,
    /// All before this time was sent: it is the way back alone.
    back_ns: Option<u64>,
    last_ns: u64,
    /// When steps got over again.
    recovered_ns: Option<u64>,
    cause: Option<PathCause>,
    switches: u32,
    replayed: u64,
    moments: Moments<()>,
    /// What was heard of it last.
    last: Option<State>,
    /// When the first step got over again.
    over_ns: Option<u64>,
    delayed: Vec<Delayed>,
}

/// Where one stands that was sent before its way back.
#[derive(Clone, Debug)]
struct Sent {
    begun_ns: u64,
    place: Place,
    left: Left,
}

/// Failovers under way, and what is counted of all.
#[derive(Debug, Default)]
pub(super) struct Failovers {
    under_way: BTreeMap<Connection, Failover>,
    /// Failures that connections under way are parts of.
    incidents: BTreeMap<Left, Incident>,
    /// Those that were sent before the way back.
    sent: BTreeMap<Connection, Sent>,
    /// Switches and bytes sent again, by process and cause.
    counts: BTreeMap<(u32, &'static str), (u64, u64)>,
}

fn cause_name(cause: Option<PathCause>) -> &'static str {
    cause.map_or("unknown", PathCause::name)
}

impl Network {
    /// Takes in a record of a connection's paths; gives the span of the port's failure if the operation is delayed by it.
    pub(crate) fn path_changed(
        &mut self,
        pid: u32,
        record: &Record,
        output: &mut Output<'_>,
    ) -> Option<(TraceId, SpanId)> {
        let change = PathChange::from_value(record.value);
        let moment = Moment {
            ns: record.time_ns,
            state: record.state,
            change,
            bytes: record.bytes,
        };
        let connection = Connection {
            pid,
            comm: record.comm,
            rank: record.rank,
            peer: record.peer,
            channel: record.channel,
            send: record.flags().contains(Flags::SEND),
            p2p: record.flags().contains(Flags::P2P),
        };
        let port = self.port_of(pid, &change, output.communicators);
        let mut is_known = self.failovers.under_way.contains_key(&connection);
        // A path that was not in use is good again: nothing was delayed.
        if record.state == State::PATH_RESTORED && !is_known {
            return None;
        }
        // What breaks on the way back, after the rest was sent, is another failover.
        if record.state == State::START
            && let Entry::Occupied(entry) = self.failovers.under_way.entry(connection)
            && entry.get().back_ns.is_some()
        {
            let back = entry.remove();
            self.failovers.send(&connection, &back, output);
            self.gone(pid, |held| &mut held.failovers);
            is_known = false;
        }
        let most = output.limits.failovers.process;
        if !is_known && !self.has_room(pid, Limit::Failovers, |held| &mut held.failovers, most) {
            return None;
        }
        let is_told = moment.is_told_at_once() && self.has_room_to_tell(pid, output);
        let failovers = &mut self.failovers;
        let sent = failovers.sent.remove(&connection);
        let was_sent = sent.is_some();
        let sent = sent.filter(|_| {
            let is_back = change.cause == Some(PathCause::Failback);
            record.state == State::PATH_SWITCHED && is_back
        });
        let (incidents, ports) = (&mut failovers.incidents, &mut self.ports);
        let failover = failovers.under_way.entry(connection).or_insert_with(|| {
            let back_ns = sent.as_ref().map(|_| record.time_ns);
            let Sent {
                begun_ns,
                place,
                left,
            } = sent.unwrap_or_else(|| {
                let left = Left::of(pid, record.state, &change, port, output.communicators);
                let begin = || Incident::begin(&left, port, pid, record.time_ns, ports, output);
                Sent {
                    begun_ns: record.time_ns,
                    place: incidents.entry(left.clone()).or_insert_with(begin).join(port),
                    left,
                }
            });
            Failover {
                begun_ns,
                place,
                left,
                back_ns,
                last_ns: record.time_ns,
                recovered_ns: None,
                cause: change.cause,
                switches: 0,
                replayed: 0,
                moments: Moments::default(),
                last: None,
                over_ns: None,
                delayed: Vec::new(),
            }
        });
        failover.last_ns = failover.last_ns.max(record.time_ns);
        failover.last = Some(record.state);
        failover.moments.push(moment, ());
        if matches!(record.state, State::PATH_RECOVERED | State::STOP) {
            failover.over_ns.get_or_insert(record.time_ns);
        }
        let operation = Delayed {
            seq: record.seq,
            replay: record.replay,
            p2p: record.flags().contains(Flags::P2P),
        };
        // What runs while a repaired path is only proven is not delayed by it, and between operations nothing is.
        let delays = record.op != 0 && failover.recovered_ns.is_none() && failover.back_ns.is_none();
        if delays && failover.delayed.len() < DELAYED && !failover.delayed.contains(&operation) {
            failover.delayed.push(operation);
        }
        let place = failover.place;
        if let Some(incident) = incidents.get_mut(&failover.left)
            && incident.trace_id() == place.trace_id
        {
            incident.note(moment, connection);
        }
        if is_told {
            failover_log(&connection, place, &moment, output);
        }
        match record.state {
            // It broke once more.
            State::START => failover.recovered_ns = None,
            State::PATH_SWITCHED => {
                failover.switches = failover.switches.saturating_add(1);
                failover.replayed = failover.replayed.saturating_add(record.bytes);
                let count = failovers
                    .counts
                    .entry((pid, cause_name(change.cause)))
                    .or_default();
                count.0 = count.0.saturating_add(1);
                count.1 = count.1.saturating_add(record.bytes);
            }
            State::PATH_RECOVERED => failover.recovered_ns = Some(record.time_ns),
            State::STOP | State::ABORTED => {
                if let Some(failover) = failovers.under_way.remove(&connection) {
                    failovers.send(&connection, &failover, output);
                    self.gone(pid, |held| &mut held.failovers);
                }
            }
            _ => {}
        }
        if was_sent {
            self.gone(pid, |held| &mut held.failovers);
        }
        delays.then(|| (place.trace_id, place.root()))
    }

    /// Sends what will not get its first path back soon.
    pub(crate) fn settle_failovers(&mut self, now_ns: u64, output: &mut Output<'_>) {
        if self.failovers.under_way.is_empty() {
            return;
        }
        let old: BTreeSet<TraceId> = self
            .failovers
            .incidents
            .values()
            .filter(|incident| incident.age_ns(now_ns) > OLD_NS)
            .map(Incident::trace_id)
            .collect();
        let is_due = |failover: &Failover| {
            if failover.back_ns.is_none() && old.contains(&failover.place.trace_id) {
                return true;
            }
            let (since_ns, most_ns) = match failover.recovered_ns {
                Some(recovered_ns) => (recovered_ns, FAILBACK_NS),
                None => (failover.last_ns, SILENT_NS),
            };
            now_ns.saturating_sub(since_ns) > most_ns
        };
        let under_way = self.failovers.under_way.iter();
        let due = under_way.filter(|(_, failover)| is_due(failover));
        let due: Vec<Connection> = due.map(|(connection, _)| *connection).collect();
        for connection in due {
            if let Some(Failover {
                begun_ns,
                place,
                left,
                ..
            }) = self.send_failover(&connection, output)
            {
                let sent = Sent {
                    begun_ns,
                    place,
                    left,
                };
                // What is sent stays known as long as its process has room for it.
                let most = output.limits.failovers.process;
                if self.failovers.sent.contains_key(&connection)
                    || self.has_room(connection.pid, Limit::Failovers, |held| &mut held.failovers, most)
                {
                    self.failovers.sent.insert(connection, sent);
                }
            }
        }
    }

    /// Sends those of a rank's communicator, which has ended: nothing more will be heard of them.
    pub(crate) fn end_failovers_of(&mut self, (pid, comm, rank): (u32, u64, u32), output: &mut Output<'_>) {
        self.end_failovers_in(&Connection::all_of(pid, Some((comm, rank))), output);
    }

    /// Sends those of a process, or all.
    pub(super) fn end_failovers(&mut self, pid: Option<u32>, output: &mut Output<'_>) {
        let first = *Connection::all_of(pid.unwrap_or(0), None).start();
        let last = *Connection::all_of(pid.unwrap_or(u32::MAX), None).end();
        self.end_failovers_in(&(first..=last), output);
        if let Some(pid) = pid {
            self.failovers.counts.retain(|(of, _), _| *of != pid);
        }
    }

    /// Sends those of some connections, of which nothing more will be heard.
    fn end_failovers_in(&mut self, which: &RangeInclusive<Connection>, output: &mut Output<'_>) {
        let keys = |(connection, _): (&Connection, _)| *connection;
        let under_way: Vec<Connection> = self.failovers.under_way.range(which.clone()).map(keys).collect();
        for connection in under_way {
            let _ = self.send_failover(&connection, output);
        }
        let keys = |(connection, _): (&Connection, _)| *connection;
        let sent: Vec<Connection> = self.failovers.sent.range(which.clone()).map(keys).collect();
        for connection in sent {
            self.failovers.sent.remove(&connection);
            self.gone(connection.pid, |held| &mut held.failovers);
        }
    }

    /// Sends one, which is no longer under way.
    fn send_failover(&mut self, connection: &Connection, output: &mut Output<'_>) -> Option<Failover> {
        let failover = self.failovers.under_way.remove(connection)?;
        self.failovers.send(connection, &failover, output);
        self.gone(connection.pid, |held| &mut held.failovers);
        Some(failover)
    }

    /// Whether one more log record of a process goes out now.
    fn has_room_to_tell(&mut self, pid: u32, output: &Output<'_>) -> bool {
        let logs = &mut self.held.entry(pid).or_default().logs;
        let has = logs.has_room(output.now_ns, output.limits.log_records);
        if !has {
            self.left_out.count(Limit::LogRecords);
        }
        has
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

impl Failovers {
    /// Sends one that is no longer under way, and the failure that it is a part of, if it was the last one.
    fn send(&mut self, connection: &Connection, failover: &Failover, output: &mut Output<'_>) {
        failover_span(connection, failover, output);
        let Entry::Occupied(mut entry) = self.incidents.entry(failover.left.clone()) else {
            return;
        };
        // Another failure of the port since.
        if entry.get().trace_id() != failover.place.trace_id {
            return;
        }
        if failover.back_ns.is_some() {
            entry.get_mut().return_of(connection, failover);
        } else if entry.get_mut().leave(connection, failover, output) {
            let (left, incident) = entry.remove_entry();
            incident.send(&left, output);
        }
    }

    /// A port of a device is down.
    pub(super) fn port_down(&mut self, device: &Arc<str>, port: u32, since_ns: u64, ports: &mut Ports) {
        for incident in self.of_device(device) {
            if incident.port_down(port, since_ns) {
                ports.failed_with(device, port, incident.ids());
            }
        }
    }

    /// It is up again.
    pub(super) fn port_up(&mut self, device: &Arc<str>, port: u32, at_ns: u64) {
        for incident in self.of_device(device) {
            incident.port_up(port, at_ns);
        }
    }

    fn of_device(&mut self, device: &Arc<str>) -> impl Iterator<Item = &mut Incident> {
        let port = |number, owner| Left::Device(Arc::clone(device), number, owner);
        let all = port(None, None)..=port(Some(u32::MAX), Some(Owner::LAST));
        self.incidents.range_mut(all).map(|(_, incident)| incident)
    }
}

impl Failover {
    /// From the break to the first step that got over again.
    fn recovery_ns(&self) -> Option<u64> {
        Some(self.over_ns?.saturating_sub(self.begun_ns))
    }
}
