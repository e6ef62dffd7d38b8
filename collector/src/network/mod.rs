//! The network to spans and metrics. From the kernel's RDMA stack: the life of each queue pair of a watched process, times in which a
//! port was down, and what failed. From the library: failovers of its connections.

mod failover;
mod metrics;
mod ports;
mod spans;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use ringsight_exporters::model::{LogRecord, Resource, Span};
use ringsight_probes::network::{NetworkEvent, NetworkSample, VerbsEvent};
use ringsight_records::{PathChange, Record};
use rustc_hash::FxHashMap;

use crate::{
    clock::Clock,
    correlate::communicators::Communicators,
    identity::Scope,
    limits::{InSecond, LeftOut, Limit, Limits},
    spans::SpanCounts,
};

/// Moments kept of one queue pair; what comes then is counted, and left out.
const MOMENTS: usize = 128;
/// Different things that are counted: events by device and port, refused commands by what they say.
const COUNTED: usize = 4_096;

/// Something that happened to a queue pair.
#[derive(Clone, Debug)]
struct Moment {
    time_ns: u64,
    duration_ns: u64,
    result: i32,
    event: NetworkEvent,
}

/// A queue pair of a watched process.
#[derive(Clone, Debug)]
struct QueuePair {
    pid: u32,
    device: Arc<str>,
    number: u32,
    /// `enum ib_qp_type`; unknown of one that was there before.
    kind: Option<u32>,
    begun_ns: u64,
    port: Option<u32>,
    peer: Option<u32>,
    /// What it carries, once it has carried something.
    carries: Option<Carries>,
    moments: VecDeque<Moment>,
    left_out: u64,
    /// What last failed.
    failed: Option<&'static str>,
}

/// Whose steps a queue pair carries.
#[derive(Clone, Copy, Debug)]
struct Carries {
    comm: u64,
    rank: u32,
    peer: i32,
    channel: u8,
}

/// What a refused command said: opcode, status, syndrome.
type Refusal = (u32, u32, u32);

/// Whose telemetry something is, and where it goes.
pub(crate) struct Output<'a> {
    pub(crate) scope: &'a Scope,
    pub(crate) communicators: &'a Communicators,
    pub(crate) clock: &'a Clock,
    pub(crate) counts: &'a mut SpanCounts,
    pub(crate) limits: &'a Limits,
    pub(crate) now_ns: u64,
    pub(crate) spans: &'a mut Vec<Span>,
    pub(crate) logs: &'a mut Vec<LogRecord>,
}

/// How much is known of one process.
#[derive(Debug, Default)]
struct Held {
    queue_pairs: usize,
    registrations: usize,
    failovers: usize,
    logs: InSecond,
}

/// What is known of the kernel's RDMA stack.
#[derive(Debug)]
pub(crate) struct Network {
    /// The collector's own: of what is of no process.
    resource: Arc<Resource>,
    names: FxHashMap<String, Arc<str>>,
    queue_pairs: FxHashMap<(Arc<str>, u32), QueuePair>,
    /// Bytes by process, device and local key.
    registered: FxHashMap<(u32, Arc<str>, u32), u64>,
    ports: ports::Ports,
    events: BTreeMap<(Arc<str>, &'static str, Option<u32>), u64>,
    refused: BTreeMap<Refusal, u64>,
    lost: u64,
    failovers: failover::Failovers,
    held: FxHashMap<u32, Held>,
    left_out: LeftOut,
}

impl Network {
    pub(crate) fn new(resource: Arc<Resource>) -> Self {
        Self {
            resource,
            names: FxHashMap::default(),
            queue_pairs: FxHashMap::default(),
            registered: FxHashMap::default(),
            ports: ports::Ports::default(),
            events: BTreeMap::new(),
            refused: BTreeMap::new(),
            lost: 0,
            failovers: failover::Failovers::default(),
            held: FxHashMap::default(),
            left_out: LeftOut::default(),
        }
    }

    /// What was left out so far.
    pub(crate) fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// Counts one more of what a process may have `most` of, if there is room.
    fn has_room(&mut self, pid: u32, limit: Limit, of: fn(&mut Held) -> &mut usize, most: usize) -> bool {
        let held = of(self.held.entry(pid).or_default());
        let has = *held < most;
        *held += usize::from(has);
        if !has {
            self.left_out.count(limit);
        }
        has
    }

    /// Counts one fewer.
    fn gone(&mut self, pid: u32, of: fn(&mut Held) -> &mut usize) {
        if let Some(held) = self.held.get_mut(&pid) {
            *of(held) = of(held).saturating_sub(1);
        }
    }

    /// Events were lost.
    pub(crate) fn lose(&mut self, count: u64) {
        self.lost = self.lost.saturating_add(count);
    }

    /// The one copy of a device's name.
    pub(crate) fn name(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.names.get(name) {
            return Arc::clone(known);
        }
        if self.names.len() >= COUNTED {
            self.names.clear();
        }
        let kept: Arc<str> = name.into();
        self.names.insert(name.to_owned(), Arc::clone(&kept));
        kept
    }

    /// Takes in an event.
    pub(crate) fn take(&mut self, sample: &NetworkSample, output: &mut Output<'_>) {
        let device = self.name(&sample.device);
        self.count(sample, &device);
        match sample.event {
            NetworkEvent::QpCreated { qpn, kind } if sample.result == 0 => {
                self.begin(sample, &device, qpn, Some(kind), output);
            }
            NetworkEvent::QpModified { qpn, port, peer, .. } => {
                // One that was there before begins now.
                if !self.queue_pairs.contains_key(&(Arc::clone(&device), qpn)) {
                    self.begin(sample, &device, qpn, None, output);
                }
                if let Some(known) = self.queue_pairs.get_mut(&(Arc::clone(&device), qpn)) {
                    known.port = port.or(known.port);
                    known.peer = peer.or(known.peer);
                }
                self.moment(sample, &device, qpn, output);
            }
            NetworkEvent::QpDestroyed { qpn } => {
                if let Some(known) = self.queue_pairs.remove(&(device, qpn)) {
                    self.gone(known.pid, |held| &mut held.queue_pairs);
                    spans::queue_pair(&known, sample.time_ns, output);
                }
            }
            NetworkEvent::Qp { qpn, .. }
            | NetworkEvent::SoftQpError { qpn }
            | NetworkEvent::Mlx5Qp { qpn, .. } => {
                self.moment(sample, &device, qpn, output);
            }
            NetworkEvent::MrRegistered { lkey, length, .. } if sample.result == 0 => {
                let Some(pid) = sample.pid else { return };
                let key = (pid, device, lkey);
                let most = output.limits.registrations.process;
                if self.registered.contains_key(&key)
                    || self.has_room(pid, Limit::Registrations, |held| &mut held.registrations, most)
                {
                    self.registered.insert(key, length);
                }
            }
            NetworkEvent::MrDeregistered { lkey, .. } => {
                if let Some(pid) = sample.pid
                    && self.registered.remove(&(pid, device, lkey)).is_some()
                {
                    self.gone(pid, |held| &mut held.registrations);
                }
            }
            NetworkEvent::Device { event, port } => self.device_event(sample, &device, event, port, output),
            NetworkEvent::Cq { .. }
            | NetworkEvent::Mlx5CqError { .. }
            | NetworkEvent::Mlx5Health { .. }
            | NetworkEvent::Mlx5CommandRefused { .. } => self.incident(sample, &device, output),
            // Calls that failed belong to no object.
            NetworkEvent::QpCreated { .. } | NetworkEvent::MrRegistered { .. } => {
                self.incident(sample, &device, output);
            }
            // The verbs' own event says it again.
            NetworkEvent::Mlx5Port { .. } | NetworkEvent::Mlx5Other { .. } | NetworkEvent::Mlx5Recovery => {}
        }
    }

    /// A record tells of a queue pair (process, the process's number of its port, number): from now on it is known whose it is.
    pub(crate) fn carries(
        &mut self,
        (pid, port, number): (u32, Option<u8>, u32),
        record: &Record,
        communicators: &Communicators,
    ) {
        let Some(device) = communicators.network_device(pid, port, number) else {
            return;
        };
        if let Some(known) = self.queue_pairs.get_mut(&(Arc::clone(device), number))
            && known.carries.is_none()
        {
            known.carries = Some(Carries {
                comm: record.comm,
                rank: record.rank,
                peer: record.peer,
                channel: record.channel,
            });
        }
    }

    /// Number of the port of its device that a process's queue pair goes over, if it has said or was seen to set it up.
    fn port_of(&self, pid: u32, change: &PathChange, communicators: &Communicators) -> Option<u32> {
        if let Some(said) = communicators.said_port(pid, change.port) {
            return Some(said.number);
        }
        let device = communicators.network_device(pid, change.port, change.number)?;
        let known = self.queue_pairs.get(&(Arc::clone(device), change.number))?;
        known.port.filter(|_| known.pid == pid)
    }

    fn count(&mut self, sample: &NetworkSample, device: &Arc<str>) {
        if let NetworkEvent::Mlx5CommandRefused {
            opcode,
            status,
            syndrome,
            ..
        } = sample.event
        {
            let refusal = (opcode, status, syndrome);
            if self.refused.len() < COUNTED || self.refused.contains_key(&refusal) {
                *self.refused.entry(refusal).or_default() += 1;
            }
        }
        let port = match sample.event {
            NetworkEvent::Device { port, .. } => port,
            NetworkEvent::Mlx5Port { port, .. } => Some(port),
            _ => None,
        };
        let key = (Arc::clone(device), sample.event.name(), port);
        if self.events.len() < COUNTED || self.events.contains_key(&key) {
            *self.events.entry(key).or_default() += 1;
        }
    }

    fn begin(
        &mut self,
        sample: &NetworkSample,
        device: &Arc<str>,
        number: u32,
        kind: Option<u32>,
        output: &mut Output<'_>,
    ) {
        let Some(pid) = sample.pid else { return };
        // A number that is used again, whose end was not seen.
        if let Some(old) = self.queue_pairs.remove(&(Arc::clone(device), number)) {
            self.gone(old.pid, |held| &mut held.queue_pairs);
            spans::queue_pair(&old, sample.time_ns, output);
        }
        let most = output.limits.queue_pairs.process;
        if !self.has_room(pid, Limit::QueuePairs, |held| &mut held.queue_pairs, most) {
            return;
        }
        let fresh = QueuePair {
            pid,
            device: Arc::clone(device),
            number,
            kind,
            begun_ns: sample.time_ns,
            port: None,
            peer: None,
            carries: None,
            moments: VecDeque::new(),
            left_out: 0,
            failed: None,
        };
        self.queue_pairs.insert((Arc::clone(device), number), fresh);
    }

    /// Something happened to a queue pair; what failed is told at once, its whole life at its end.
    fn moment(&mut self, sample: &NetworkSample, device: &Arc<str>, number: u32, output: &mut Output<'_>) {
        let failed = is_failure(sample);
        let Some(known) = self.queue_pairs.get_mut(&(Arc::clone(device), number)) else {
            // Of a process that is not watched.
            return;
        };
        if known.moments.len() < MOMENTS {
            known.moments.push_back(Moment {
                time_ns: sample.time_ns,
                duration_ns: sample.duration_ns,
                result: sample.result,
                event: sample.event,
            });
        } else {
            known.left_out += 1;
        }
        if failed {
            known.failed = Some(sample.event.name());
            spans::failure(sample, known, output);
        }
    }

    fn device_event(
        &mut self,
        sample: &NetworkSample,
        device: &Arc<str>,
        event: VerbsEvent,
        port: Option<u32>,
        output: &mut Output<'_>,
    ) {
        match (event, port) {
            (VerbsEvent::PORT_ERR, Some(port)) => {
                let since_ns = sample.time_ns;
                if self.ports.down(device, port, since_ns) {
                    self.failovers.port_down(device, port, since_ns, &mut self.ports);
                }
            }
            (VerbsEvent::PORT_ACTIVE, Some(port)) => {
                let up_ns = sample.time_ns;
                self.failovers.port_up(device, port, up_ns);
                if let Some((since_ns, failover)) = self.ports.up(device, port, up_ns) {
                    let times = (since_ns, Some(up_ns));
                    spans::port_down(&self.resource, device, port, times, failover, output);
                }
            }
            (event, _) if event.is_error() => self.incident(sample, device, output),
            _ => {}
        }
    }

    fn incident(&self, sample: &NetworkSample, device: &Arc<str>, output: &mut Output<'_>) {
        spans::incident(sample, device, &self.resource, output);
    }

    /// A process is gone, and with it its queue pairs and registrations.
    pub(crate) fn exited(&mut self, pid: u32, now_ns: u64, output: &mut Output<'_>) {
        // While its queue pairs are known, which tell the devices.
        self.end_failovers(Some(pid), output);
        self.registered.retain(|(of, _, _), _| *of != pid);
        let over = self.queue_pairs.extract_if(|_, known| known.pid == pid);
        for (_, known) in over {
            spans::queue_pair(&known, now_ns.max(known.begun_ns), output);
        }
        self.held.remove(&pid);
    }

    /// Lets go of everything: ports that are still down are reported as such.
    pub(crate) fn finish(&mut self, now_ns: u64, output: &mut Output<'_>) {
        self.end_failovers(None, output);
        for (_, known) in self.queue_pairs.drain() {
            spans::queue_pair(&known, now_ns.max(known.begun_ns), output);
        }
        for (device, port, since_ns, failover) in self.ports.drain() {
            spans::port_down(&self.resource, &device, port, (since_ns, None), failover, output);
        }
        self.registered.clear();
        self.held.clear();
    }
}

/// Whether something went wrong, as far as the event itself tells.
fn is_failure(sample: &NetworkSample) -> bool {
    sample.result < 0
        || match sample.event {
            NetworkEvent::Qp { event, .. }
            | NetworkEvent::Cq { event }
            | NetworkEvent::Device { event, .. } => event.is_error(),
            NetworkEvent::SoftQpError { .. }
            | NetworkEvent::Mlx5CqError { .. }
            | NetworkEvent::Mlx5Health { .. }
            | NetworkEvent::Mlx5CommandRefused { .. } => true,
            _ => false,
        }
}
