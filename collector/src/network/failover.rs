//! Failovers of the library's connections: one span from the path that broke to the first path again, linked to the operations that
//! waited for it. Where the first path is away for long, the span is sent before, and the way back is its child. The connections that leave
//! one port are one trace ([`incident`]).

mod incident;
mod moments;
mod place;
mod spans;

use std::{
    collections::{BTreeMap, BTreeSet, btree_map::Entry},
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
use crate::correlate::communicators::{Communicators, Watched};

/// Failovers that are under way at once; connections are few.
const UNDER_WAY: usize = 16_384;
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
        let failovers = &mut self.failovers;
        let mut is_known = failovers.under_way.contains_key(&connection);
        // A path that was not in use is good again: nothing was delayed.
        if record.state == State::PATH_RESTORED && !is_known {
            return None;
        }
        // What breaks on the way back, after the rest was sent, is another failover.
        if record.state == State::START
            && let Entry::Occupied(entry) = failovers.under_way.entry(connection)
            && entry.get().back_ns.is_some()
        {
            let back = entry.remove();
            failovers.send(&connection, &back, output);
            is_known = false;
        }
        if failovers.under_way.len() >= UNDER_WAY && !is_known {
            return None;
        }
        let sent = failovers.sent.remove(&connection).filter(|_| {
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
        failover_log(&connection, place, &moment, output);
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
                if let Some(failover) = failovers.under_way.remove(&connection) {
                    failovers.send(&connection, &failover, output);
                }
            }
            _ => {}
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
        let sent = self.send_failovers(output, |_, failover| {
            if failover.back_ns.is_none() && old.contains(&failover.place.trace_id) {
                return true;
            }
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

    /// Sends some, and says which.
    fn send_failovers(
        &mut self,
        output: &mut Output<'_>,
        which: impl Fn(&Connection, &Failover) -> bool,
    ) -> Vec<(Connection, Sent)> {
        let mut sent = Vec::new();
        let under_way = std::mem::take(&mut self.failovers.under_way);
        for (connection, failover) in under_way {
            if which(&connection, &failover) {
                self.failovers.send(&connection, &failover, output);
                let Failover {
                    begun_ns,
                    place,
                    left,
                    ..
                } = failover;
                sent.push((
                    connection,
                    Sent {
                        begun_ns,
                        place,
                        left,
                    },
                ));
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
        let port = |number| Left::Device(Arc::clone(device), number);
        let all = port(None)..=port(Some(u32::MAX));
        self.incidents.range_mut(all).map(|(_, incident)| incident)
    }
}

impl Failover {
    /// From the break to the first step that got over again.
    fn recovery_ns(&self) -> Option<u64> {
        Some(self.over_ns?.saturating_sub(self.begun_ns))
    }
}
