//! A path: a pair of ports, one at each end, with the queue pairs of this end and the keys of both ends' memory.
//!
//! | state | meaning | left by |
//! |---|---|---|
//! | known | the peer's end is known ([`Path::set_peer`]); the queue pairs are in INIT | [`Path::connect`], [`Path::connecting`] |
//! | connected | the queue pairs are in RTS | [`Path::fence`] |
//! | draining | the queue pairs are in the error state; posted requests are being flushed | the last marker ([`Path::is_drained`]) |
//! | drained | no request is outstanding | [`Path::rebuild`] |

mod rebuild;
mod requests;

use std::sync::Arc;

use rebuild::Drain;
pub(super) use rebuild::{Fenced, Rebuilt};
use ringsight_failover::{Link, MESSAGE_BYTES};

use super::{
    Control, SLOTS,
    control::{HEAD, NOTICE_BYTES, RECEIVES, inbox_at},
    work::WorkRequest,
};
use crate::{
    completion::Cq,
    device::Queue,
    error::{ConnectError, Failure, Result},
    memory::{Access, Memory, Mr},
    port::Port,
    port_health::{PortHealth, QueueFailures},
    queue::{Qp, RetryPolicy, Route, Size},
    wire::{PathOffer, QpOffer},
};

/// Work requests of a queue pair: two per slot for steps, a credit, a probe, the marker of a drain, and messages.
const SENDS: u32 = 2 * SLOTS as u32 + 3 + MESSAGES as u32;
/// Messages that are outstanding at most. A further message counts as lost.
const MESSAGES: usize = 8;
/// Bytes of an inline work request at most.
const INLINE: usize = if MESSAGE_BYTES > HEAD + NOTICE_BYTES {
    MESSAGE_BYTES
} else {
    HEAD + NOTICE_BYTES
};

/// The peer's end of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Address of its slots.
    pub slots: u64,
    /// Address of its control page.
    pub control: u64,
    /// Its side of the path.
    pub path: PathOffer,
}

/// Work requests of a path, without receive requests, and completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests of steps: a write of the bytes and a notice, or one notice with both.
    pub steps: u64,
    /// Credits: at most one per step; one covers several steps if the receiver is ahead.
    pub credits: u64,
    /// Probes and messages.
    pub others: u64,
    /// Completions, of any request.
    pub completions: u64,
}

/// Queue pairs, with their completion queue.
pub(super) type Queues = (Arc<Cq>, Arc<Vec<Qp>>);

/// A path between the ends.
pub struct Path {
    index: usize,
    port: Port,
    cq: Arc<Cq>,
    /// The completion queue has failed: the next rebuild makes another one.
    has_failed_cq: bool,
    /// How often the queue pairs have been built.
    generation: u32,
    /// Shared with the worker that changes their state.
    qps: Arc<Vec<Qp>>,
    psns: Vec<u32>,
    /// `None` while the queue pairs are in use.
    draining: Option<Drain>,
    /// Messages outstanding.
    messages: usize,
    /// Probes outstanding: one per queue pair.
    probes: usize,
    counts: Counts,
    /// This end's slots: the sender sends from them, the receiver's are written by the peer.
    slots: Arc<Mr>,
    control: Arc<Mr>,
    offers_slots: bool,
    /// Traffic class that the connection's owner asks for.
    class: Option<u8>,
    /// The path counts as failed as soon as an end has it ([`Path::presume_failed`]).
    pub(super) presumed_failed: bool,
    peer: Option<Peer>,
    /// Failure reports of its device about its queues, as of the last look.
    pub(super) failures: QueueFailures,
}

impl Path {
    /// Path `index` of a connection whose slots are in `memory`; `is_receiver`: the peer writes them. `port_health` reads the events of the
    /// device from now on. `draw` gives random numbers, for the first packet numbers.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn new(
        index: usize,
        port: Port,
        (memory, is_receiver): (&Memory, bool),
        control: &Control,
        port_health: &PortHealth,
        mut draw: impl FnMut() -> u32,
    ) -> Result<Self> {
        // Before the queues exist, so that their events are not mistaken for those of earlier queues.
        port_health.watch(port.context(), port.number());
        let access = if is_receiver {
            port.slots_access()
        } else {
            Access::Local
        };
        let slots = port.pd().register(memory, access)?;
        // Without relaxed ordering: a credit is read without waiting for its completion.
        let control = port.pd().register(control.memory(), Access::RemoteWrite)?;
        let (cq, qps) = queues(index, &port, &control)?;
        let psns = qps.iter().map(|_| draw() & 0xff_ffff).collect();
        let mut path = Self {
            index,
            port,
            cq,
            has_failed_cq: false,
            generation: 1,
            qps,
            psns,
            draining: None,
            messages: 0,
            probes: 0,
            counts: Counts::default(),
            slots,
            control,
            offers_slots: is_receiver,
            class: None,
            presumed_failed: false,
            peer: None,
            failures: QueueFailures::default(),
        };
        // Earlier reports concern queues that had the same numbers: a queue is destroyed only after all of its events have been read.
        path.failures = path.queue_failures(port_health);
        Ok(path)
    }

    /// Makes it path `index` of its connection, before it is connected. The receive requests are posted again, for the inbox of that index.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn renumber(&mut self, index: usize) -> Result<()> {
        self.index = index;
        self.qps.iter().try_for_each(Qp::reset)?;
        let mut qps = self.qps.iter().enumerate();
        qps.try_for_each(|qp| prepare(index, qp, &self.port, &self.control))
    }

    /// Sets the traffic class of its packets, for a process whose environment names none.
    #[must_use]
    pub fn with_class(mut self, class: Option<u8>) -> Self {
        self.class = class;
        self
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// The peer's side; `None` before [`Path::connect`].
    #[must_use]
    pub fn peer(&self) -> Option<&Peer> {
        self.peer.as_ref()
    }

    /// Whether the path is connected and not given up.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.peer.is_some() && self.draining.is_none()
    }

    /// Requests and completions since the path was made.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Its queue pairs.
    #[must_use]
    pub fn qps(&self) -> &[Qp] {
        &self.qps
    }

    /// Failure reports of its device about queues with the names of its queues.
    pub(super) fn queue_failures(&self, port_health: &PortHealth) -> QueueFailures {
        let pairs = self.qps.iter().map(|qp| Queue::Pair(qp.number()));
        let others = [self.cq.name(), Queue::All];
        port_health.queue_failures(self.port.device(), pairs.chain(others))
    }

    /// Has the next rebuild make another completion queue, because this one has failed.
    pub(super) fn replace_cq_at_rebuild(&mut self) {
        self.has_failed_cq = true;
    }

    /// Index of the queue pair that carries the notice of a step.
    #[must_use]
    pub fn lead(&self, position: u64) -> usize {
        (position % self.qps.len() as u64) as usize
    }

    /// This end of the path, as the peer needs it.
    #[must_use]
    pub fn offer(&self) -> PathOffer {
        PathOffer {
            device: self.port.device().to_owned(),
            port: self.port.number(),
            ethernet: self.port.is_ethernet(),
            up: self.port.is_active(),
            mtu: self.port.mtu(),
            lid: self.port.lid(),
            gid: self.port.gid().map_or([0; 16], |(gid, _)| gid),
            slots_key: if self.offers_slots {
                self.slots.remote_key()
            } else {
                0
            },
            control_key: self.control.remote_key(),
            qps: self
                .qps
                .iter()
                .zip(&self.psns)
                .map(|(qp, psn)| QpOffer {
                    number: qp.number(),
                    psn: *psn,
                })
                .collect(),
        }
    }

    /// Sets the peer's end. The queue pairs are connected to it later, when both ports are up.
    ///
    /// # Errors
    /// The two ends do not match.
    pub fn set_peer(&mut self, peer: Peer) -> std::result::Result<(), ConnectError> {
        let (own, other) = (&self.port, &peer.path);
        if own.is_ethernet() != other.ethernet {
            return Err(ConnectError::LinkLayers {
                device: own.device().to_owned(),
                peer: other.device.clone(),
                ethernet: own.is_ethernet(),
            });
        }
        if self.qps.len() != other.qps.len() {
            return Err(ConnectError::QueuePairs {
                own: self.qps.len(),
                peer: other.qps.len(),
            });
        }
        self.peer = Some(peer);
        self.draining = Some(Drain::EMPTY);
        Ok(())
    }

    /// Connects the queue pairs to the peer's, which may take a second. If that fails the peer's end is set, as by [`Path::set_peer`].
    ///
    /// # Errors
    /// The two ends do not match, this port is down, or the peer cannot be reached.
    pub fn connect(&mut self, peer: Peer) -> std::result::Result<(), ConnectError> {
        let routes = self.routes(&peer.path, &peer.path.qps);
        let peer_device = peer.path.device.clone();
        self.set_peer(peer)?;
        let own = &self.port;
        if !own.is_active() {
            return Err(ConnectError::PortDown {
                port: format!("{}:{}", own.device(), own.number()),
            });
        }
        connect_all(own.number(), &self.qps, &self.psns, &routes, own.config().retry).map_err(|source| {
            ConnectError::Device {
                device: own.device().to_owned(),
                peer: peer_device,
                source,
            }
        })?;
        self.draining = None;
        Ok(())
    }

    /// Treats a path that could not be connected as one that failed right after it was connected. The peer may use its end already, so the
    /// ends must agree to leave it.
    pub fn presume_failed(&mut self) {
        self.draining = None;
        self.presumed_failed = true;
    }

    /// The routes from its queue pairs to the peer's `qps`.
    fn routes(&self, peer: &PathOffer, qps: &[QpOffer]) -> Vec<Route> {
        let own = &self.port;
        let (service_level, traffic_class) = own.config().classes(self.class);
        let route = |offer: &QpOffer| Route {
            qp: offer.number,
            psn: offer.psn,
            mtu: own.mtu().min(peer.mtu),
            lid: peer.lid,
            gid: match (own.is_ethernet(), own.gid()) {
                (true, Some((_, index))) => Some((peer.gid, index)),
                _ => None,
            },
            service_level,
            traffic_class,
        };
        qps.iter().map(route).collect()
    }

    /// A failure of this path.
    pub(super) fn failure(&self, status: Option<u32>, text: &str) -> Failure {
        let peer = self.peer.as_ref().map_or("?", |peer| peer.path.device.as_str());
        let (device, port) = (self.port.device(), self.port.number());
        Failure {
            path: self.index,
            status,
            text: format!("{device}:{port} to the peer's {peer}: {text}"),
        }
    }

    /// Its present queue pairs.
    #[must_use]
    pub fn link(&self) -> Link {
        Link {
            path: self.index as u8,
            generation: self.generation,
        }
    }
}

/// Makes the queue pairs of a path, in INIT and with their receive requests, and their completion queue.
fn queues(path: usize, port: &Port, control: &Mr) -> Result<Queues> {
    let count = port.config().qps;
    let cq = Cq::new(port.context(), count as u32 * (SENDS + RECEIVES + 1))?;
    let size = Size {
        sends: SENDS,
        receives: RECEIVES + 1,
        inline_bytes: INLINE as u32,
    };
    let mut qps = Vec::with_capacity(count);
    for number in 0..count {
        let qp = Qp::new(port.pd(), &cq, size)?;
        prepare(path, (number, &qp), port, control)?;
        qps.push(qp);
    }
    Ok((cq, Arc::new(qps)))
}

/// Brings a queue pair from RESET to INIT, and posts its receive requests.
fn prepare(path: usize, (number, qp): (usize, &Qp), port: &Port, control: &Mr) -> Result<()> {
    qp.init(port.number(), port.config().pkey_index)?;
    (0..RECEIVES as usize).try_for_each(|index| post_receive(path, qp, (number, index), control))
}

/// Posts a receive request. Messages arrive on the first queue pair.
fn post_receive(path: usize, qp: &Qp, (number, index): (usize, usize), control: &Mr) -> Result<()> {
    let id = WorkRequest::Receive { qp: number, index }.id();
    if number > 0 {
        return qp.post_receives(id, 1);
    }
    let at = inbox_at(path, index);
    qp.post_receive_into(id, control, at..at + MESSAGE_BYTES)
}

/// Brings queue pairs to RTS.
fn connect_all(port: u8, qps: &[Qp], psns: &[u32], routes: &[Route], retry: RetryPolicy) -> Result<()> {
    for ((qp, psn), route) in qps.iter().zip(psns).zip(routes) {
        qp.receive_from(port, route)?;
        qp.send_from(*psn, retry)?;
    }
    Ok(())
}
