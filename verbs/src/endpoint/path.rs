//! One way between the ends: a port of either with queue pairs, and the keys of the memory at both.

mod rebuild;

use std::sync::Arc;

use rebuild::Drain;
pub(super) use rebuild::{Fenced, Rebuilt};
use ringsight_failover::{Link, MESSAGE_BYTES};

use super::{
    Control, Failure, SLOTS,
    control::{HEAD, NOTICE_BYTES, inbox_at},
    work::Work,
};
use crate::{
    completion::Cq,
    device::Queue,
    error::Result,
    hub::{Failures, Hub},
    memory::{Access, Memory, Mr},
    port::Port,
    queue::{Patience, Qp, Route, Size},
    wire::{PathOffer, QpOffer},
};

/// Work requests of a queue pair: a step is two, one position is at most once under way on a path, credits are one at a time, a probe,
/// what marks the end of a drain, and messages.
const SENDS: u32 = 2 * SLOTS as u32 + 3 + MESSAGES as u32;
/// Messages that are under way at most; more are not sent, as if they were lost.
pub(super) const MESSAGES: usize = 8;
/// Receive requests that a queue pair always has: for every position that may be granted, and as many that come twice.
pub(super) const RECEIVES: u32 = 2 * SLOTS as u32;
/// Bytes that go with a work request at most.
const INLINE: usize = if MESSAGE_BYTES > HEAD + NOTICE_BYTES {
    MESSAGE_BYTES
} else {
    HEAD + NOTICE_BYTES
};

/// What a path needs to know of the peer's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Where its slots are.
    pub slots: u64,
    /// Where its control page is.
    pub control: u64,
    /// Its side of the path.
    pub path: PathOffer,
}

/// Work requests of a path, receive requests aside, and completions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests of steps: a write of bytes and one that tells of them, or one for both.
    pub steps: u64,
    /// Credits: one at most for each step, one for several where the peer is faster.
    pub credits: u64,
    /// Probes and messages.
    pub others: u64,
    /// Completions taken, of any request.
    pub completions: u64,
}

/// Queue pairs, and the completion queue that is theirs.
pub(super) type Queues = (Arc<Cq>, Arc<Vec<Qp>>);

/// A way between the ends.
pub struct Path {
    pub(super) index: usize,
    port: Port,
    pub(super) cq: Arc<Cq>,
    /// The completion queue is of no use any more.
    is_spoiled: bool,
    /// How often they have been made.
    generation: u32,
    /// Shared with a thread that connects them.
    pub(super) qps: Arc<Vec<Qp>>,
    psns: Vec<u32>,
    /// `None`: the queue pairs are in use.
    pub(super) draining: Option<Drain>,
    /// Messages under way.
    pub(super) messages: usize,
    /// Probes under way: one for each queue pair.
    pub(super) probes: usize,
    pub(super) counts: Counts,
    /// This end's slots: what a sender sends from and a receiver is written to.
    pub(super) slots: Arc<Mr>,
    pub(super) control: Arc<Mr>,
    offers_slots: bool,
    /// The traffic class that its owner wishes for.
    class: Option<u8>,
    /// It is given up as soon as there is an end ([`Path::presume_failed`]).
    pub(super) presumed_failed: bool,
    pub(super) peer: Option<Peer>,
    /// How often its device had told that queues with its queues' names cannot go on, when that was looked at last.
    pub(super) failures: Failures,
}

impl Path {
    /// The `index`-th path of a connection whose slots are in `memory`; `is_receiver`: the peer writes them. `hub` is the one of its end: what
    /// its device tells of its queues from here on is known to that. `draw` gives random numbers for the packets' first ones.
    ///
    /// # Errors
    /// As the device says.
    pub fn new(
        index: usize,
        port: Port,
        (memory, is_receiver): (&Memory, bool),
        control: &Control,
        hub: &Hub,
        mut draw: impl FnMut() -> u32,
    ) -> Result<Self> {
        // Before there are queues: what is told of them is read, not taken for what others had.
        hub.watch(port.context(), port.number());
        let access = if is_receiver {
            port.slots_access()
        } else {
            Access::Local
        };
        let slots = port.pd().register(memory, access)?;
        // In order: a credit is read without the completion that tells of it.
        let control = port.pd().register(control.memory(), Access::RemoteWrite)?;
        let (cq, qps) = queues(index, &port, &control)?;
        let psns = qps.iter().map(|_| draw() & 0xff_ffff).collect();
        let mut path = Self {
            index,
            port,
            cq,
            is_spoiled: false,
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
            failures: Failures::default(),
        };
        // Those of queues that had the same numbers: a queue is destroyed when all that was told of it has been taken.
        path.failures = path.told_failures(hub);
        Ok(path)
    }

    /// Makes it the `index`-th path of its connection, before it is connected: what the peer sends goes to other places then.
    ///
    /// # Errors
    /// As the device says.
    pub fn renumber(&mut self, index: usize) -> Result<()> {
        self.index = index;
        self.qps.iter().try_for_each(Qp::reset)?;
        let mut qps = self.qps.iter().enumerate();
        qps.try_for_each(|qp| prepare(index, qp, &self.port, &self.control))
    }

    /// With a traffic class for its packets, where the environment names none.
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

    /// Whether it is connected, and may be used.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.peer.is_some() && self.draining.is_none()
    }

    /// What it was used for since it was made.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Its queue pairs.
    #[must_use]
    pub fn qps(&self) -> &[Qp] {
        &self.qps
    }

    /// How often its device has told that queues with its queues' names cannot go on.
    pub(super) fn told_failures(&self, hub: &Hub) -> Failures {
        let pairs = self.qps.iter().map(|qp| Queue::Pair(qp.number()));
        let others = [self.cq.name(), Queue::All];
        hub.failures(self.port.device(), pairs.chain(others))
    }

    /// Its completion queue is of no use any more: the path is made anew with another one.
    pub(super) fn spoil(&mut self) {
        self.is_spoiled = true;
    }

    /// Which of its queue pairs leads a step: the one that its notice goes over.
    #[must_use]
    pub fn lead(&self, position: u64) -> usize {
        (position % self.qps.len() as u64) as usize
    }

    /// What the peer has to know of it.
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

    /// Takes down what the peer's end is: its queue pairs are connected to it when both ports are up.
    ///
    /// # Errors
    /// When the two do not fit.
    pub fn know(&mut self, peer: Peer) -> std::result::Result<(), String> {
        let (own, other) = (&self.port, &peer.path);
        let layer = |ethernet| if ethernet { "RoCE" } else { "InfiniBand" };
        if own.is_ethernet() != other.ethernet {
            return Err(format!(
                "{} is {}, the peer's {} is {}",
                own.device(),
                layer(own.is_ethernet()),
                other.device,
                layer(other.ethernet)
            ));
        }
        if self.qps.len() != other.qps.len() {
            return Err(format!(
                "{} queue pairs here, {} at the peer: NCCL_IB_QPS_PER_CONNECTION differs between ranks",
                self.qps.len(),
                other.qps.len()
            ));
        }
        self.peer = Some(peer);
        self.draining = Some(Drain::NOTHING);
        Ok(())
    }

    /// Connects its queue pairs to the peer's. May take a second. What cannot be connected now is known, as by [`Path::know`].
    ///
    /// # Errors
    /// When the two do not fit, or the peer cannot be reached.
    pub fn connect(&mut self, peer: Peer) -> std::result::Result<(), String> {
        let routes = self.routes(&peer.path, &peer.path.qps);
        let device = peer.path.device.clone();
        self.know(peer)?;
        let own = &self.port;
        if !own.is_active() {
            return Err(format!("port {}:{} is down", own.device(), own.number()));
        }
        connect_all(
            own.number(),
            &self.qps,
            &self.psns,
            &routes,
            own.config().patience,
        )
        .map_err(|error| format!("{} to the peer's {device}: {error}", own.device()))?;
        self.draining = None;
        Ok(())
    }

    /// Takes a path that could not be connected for one that failed right after it was: the peer may use its end already, and the ends
    /// agree to leave it.
    pub fn presume_failed(&mut self) {
        self.draining = None;
        self.presumed_failed = true;
    }

    /// The ways of its queue pairs to the peer's `qps`.
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

    pub(super) fn failure(&self, status: Option<u32>, text: &str) -> Failure {
        let peer = self.peer.as_ref().map_or("?", |peer| peer.path.device.as_str());
        let (device, port) = (self.port.device(), self.port.number());
        Failure {
            path: self.index,
            status,
            text: format!("{device}:{port} to the peer's {peer}: {text}"),
        }
    }

    /// What its queue pairs are in.
    #[must_use]
    pub fn link(&self) -> Link {
        Link {
            path: self.index as u8,
            generation: self.generation,
        }
    }
}

/// Queue pairs for a path, in INIT and with their receive requests, and their completion queue.
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

/// Brings a queue pair from RESET to INIT, with its receive requests.
fn prepare(path: usize, (number, qp): (usize, &Qp), port: &Port, control: &Mr) -> Result<()> {
    qp.init(port.number(), port.config().pkey_index)?;
    (0..RECEIVES as usize).try_for_each(|index| post_receive(path, qp, (number, index), control))
}

/// A receive request of a path; messages go over the first queue pair.
pub(super) fn post_receive(
    path: usize,
    qp: &Qp,
    (number, index): (usize, usize),
    control: &Mr,
) -> Result<()> {
    let id = Work::Receive { qp: number, index }.id();
    if number > 0 {
        return qp.post_receives(id, 1);
    }
    let at = inbox_at(path, index);
    qp.post_receive_into(id, control, at..at + MESSAGE_BYTES)
}

/// Brings queue pairs to RTS.
fn connect_all(port: u8, qps: &[Qp], psns: &[u32], routes: &[Route], patience: Patience) -> Result<()> {
    for ((qp, psn), route) in qps.iter().zip(psns).zip(routes) {
        qp.receive_from(port, route)?;
        qp.send_from(*psn, patience)?;
    }
    Ok(())
}
