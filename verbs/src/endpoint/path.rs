//! One way between the ends: a port of either with queue pairs, and the keys of the memory at both.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use ringsight_failover::{ADDRESS_BYTES, Address, Link, MESSAGE_BYTES};

use super::{
    Control, Failure, SLOTS,
    control::{self, HEAD, NOTICE_BYTES, credit_at, inbox_at},
};
use crate::{
    device::{Access, Memory, Mr, Mtu},
    error::Result,
    port::Port,
    queue::{BATCH, Completion, Cq, Patience, Qp, Route, Size, Source, Status, Write},
    wire::{PathOffer, QpOffer},
};

/// Work requests of a queue pair: a step is two, one position is at most once under way on a path, credits are one at a time, a probe,
/// what marks the end of a drain, and messages.
const SENDS: u32 = 2 * SLOTS as u32 + 3 + MESSAGES as u32;
/// Messages that are under way at most; more are not sent, as if they were lost.
const MESSAGES: usize = 8;
/// Receive requests that a queue pair always has: for every position that may be granted, and as many that come twice.
pub(super) const RECEIVES: u32 = 2 * SLOTS as u32;
/// Bytes that go with a work request at most.
const INLINE: usize = if MESSAGE_BYTES > HEAD + NOTICE_BYTES {
    MESSAGE_BYTES
} else {
    HEAD + NOTICE_BYTES
};

/// A request, as its number says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// What tells of a step, or a part of one: the last request of it on its queue pair.
    Step {
        /// Of the path.
        qp: usize,
        /// Low 48 bits: no connection lives to see more.
        position: u64,
    },
    /// A step's bytes.
    Data {
        /// Of the path.
        qp: usize,
        /// Low 48 bits.
        position: u64,
    },
    /// A credit.
    Credit {
        /// Low 48 bits.
        granted: u64,
    },
    /// A receive request.
    Receive {
        /// Of the path.
        qp: usize,
        /// Which one, of the first queue pair's: where in the inbox a message would go.
        index: usize,
    },
    /// A write of nothing.
    Probe,
    /// A message of the ends' agreement.
    Message,
    /// The last request of a queue pair in the error state, of either kind: all before it have ended.
    Marker {
        /// Of the path.
        qp: usize,
    },
}

const LOW: u64 = (1 << 48) - 1;

impl Work {
    pub(super) fn id(self) -> u64 {
        let (kind, qp, number) = match self {
            Self::Step { qp, position } => (1, qp, position),
            Self::Data { qp, position } => (2, qp, position),
            Self::Credit { granted } => (3, 0, granted),
            Self::Receive { qp, index } => (4, qp, index as u64),
            Self::Probe => (5, 0, 0),
            Self::Message => (6, 0, 0),
            Self::Marker { qp } => (7, qp, 0),
        };
        kind << 56 | (qp as u64) << 48 | number & LOW
    }

    /// What a completion's number means; `None` for none of ours.
    #[must_use]
    pub fn of(id: u64) -> Option<Self> {
        let (qp, position) = ((id >> 48 & 0xff) as usize, id & LOW);
        Some(match id >> 56 {
            1 => Self::Step { qp, position },
            2 => Self::Data { qp, position },
            3 => Self::Credit { granted: position },
            4 => Self::Receive {
                qp,
                index: position as usize,
            },
            5 => Self::Probe,
            6 => Self::Message,
            7 => Self::Marker { qp },
            _ => return None,
        })
    }
}

/// What ended, of one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The peer's device has a step, or a part of it, in memory.
    Sent {
        /// Low 48 bits of the position.
        position: u64,
    },
    /// The peer has a credit.
    Credited,
    /// A write with this immediate arrived.
    Arrived {
        /// The queue pair that it came over.
        qp: usize,
        /// What it said.
        immediate: u32,
    },
    /// The peer's device has answered a probe.
    Probed,
    /// A message arrived.
    Message([u8; MESSAGE_BYTES]),
    /// A request ended with an error: `enum ibv_wc_status`.
    Failed {
        /// Which one; `None`: its number is none of ours.
        work: Option<Work>,
        /// The status.
        code: u32,
        /// The queue pair's number.
        qp: u32,
    },
}

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

/// A way between the ends.
pub struct Path {
    index: usize,
    port: Port,
    cq: Arc<Cq>,
    /// How often they have been made.
    generation: u32,
    /// Shared with a thread that connects them.
    qps: Arc<Vec<Qp>>,
    psns: Vec<u32>,
    /// Markers of a drain that have not ended; `None`: the queue pairs are in use.
    draining: Option<usize>,
    /// Messages under way.
    messages: usize,
    /// This end's slots: what a sender sends from and a receiver is written to.
    slots: Arc<Mr>,
    control: Arc<Mr>,
    offers_slots: bool,
    peer: Option<Peer>,
}

impl Path {
    /// The `index`-th path of a connection whose slots are in `memory`; `is_receiver`: the peer writes them. `draw` gives random numbers
    /// for the packets' first ones.
    ///
    /// # Errors
    /// As the device says.
    pub fn new(
        index: usize,
        port: Port,
        (memory, is_receiver): (&Memory, bool),
        control: &Control,
        mut draw: impl FnMut() -> u32,
    ) -> Result<Self> {
        let access = if is_receiver {
            port.slots_access()
        } else {
            Access::Local
        };
        let slots = port.pd().register(memory, access)?;
        // In order: a credit is read without the completion that tells of it.
        let control = port.pd().register(control.memory(), Access::RemoteWrite)?;
        let count = port.config().qps;
        let cq = Cq::new(port.context(), count as u32 * (SENDS + RECEIVES + 1))?;
        let qps = queue_pairs(index, &port, &cq, &control)?;
        let psns = (0..count).map(|_| draw() & 0xff_ffff).collect();
        Ok(Self {
            index,
            port,
            cq,
            generation: 1,
            qps: Arc::new(qps),
            psns,
            draining: None,
            messages: 0,
            slots,
            control,
            offers_slots: is_receiver,
            peer: None,
        })
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

    /// Its queue pairs.
    #[must_use]
    pub fn qps(&self) -> &[Qp] {
        &self.qps
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

    /// Connects its queue pairs to the peer's. May take a second.
    ///
    /// # Errors
    /// When the two do not fit, or the peer cannot be reached.
    pub fn connect(&mut self, peer: Peer) -> std::result::Result<(), String> {
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
        let routes = self.routes(other, &other.qps);
        let device = other.device.clone();
        // Known from here on: what cannot be connected now is when it can.
        self.peer = Some(peer);
        self.draining = Some(0);
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

    /// The ways of its queue pairs to the peer's `qps`.
    fn routes(&self, peer: &PathOffer, qps: &[QpOffer]) -> Vec<Route> {
        let (own, config) = (&self.port, self.port.config());
        let route = |offer: &QpOffer| Route {
            qp: offer.number,
            psn: offer.psn,
            mtu: own.mtu().min(peer.mtu),
            lid: peer.lid,
            gid: match (own.is_ethernet(), own.gid()) {
                (true, Some((_, index))) => Some((peer.gid, index)),
                _ => None,
            },
            service_level: config.service_level,
            traffic_class: config.traffic_class,
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

    /// Gives its queue pairs up: what was posted ends, with an error if it has not been done, and nothing of the peer's is taken
    /// any more. Poll until [`Path::is_drained`]. Whether the device is sure to write nothing more.
    pub(super) fn fence(&mut self) -> bool {
        let mut sure = true;
        let mut markers = 0;
        for (number, qp) in self.qps.iter().enumerate() {
            // In the error state the device takes nothing, and ends what is there in order. A receive request is posted before, for
            // soft-RoCE looks at those only when it has something else to do; a send after, lest it goes out.
            let id = Work::Marker { qp: number }.id();
            markers += usize::from(qp.post_receives(id, 1).is_ok());
            sure &= qp.fail().is_ok();
            markers += usize::from(qp.send(id, &[0]).is_ok());
        }
        self.draining = Some(markers);
        sure
    }

    /// Whether all that was posted before [`Path::fence`] has ended.
    pub(super) fn is_drained(&self) -> bool {
        self.draining == Some(0)
    }

    /// Whether it has been fenced and not been rebuilt.
    pub(super) fn is_fenced(&self) -> bool {
        self.draining.is_some()
    }

    /// Makes its queue pairs anew, on its port as that is now: from RESET, with other packet numbers, so that nothing of theirs before
    /// is taken for theirs now. They are not destroyed and others made, for soft-RoCE destroys one only when the last of its packets
    /// is off the interface, which takes seconds when that is down.
    pub(super) fn rebuild(&mut self, port: Port, generation: u32) -> Result<()> {
        for qp in self.qps.iter() {
            qp.reset()?;
        }
        let mut room = [Completion::EMPTY; BATCH];
        while !self.cq.poll(&mut room)?.is_empty() {}
        for (number, qp) in self.qps.iter().enumerate() {
            prepare(self.index, (number, qp), &port, &self.control)?;
        }
        let first = self.psns[0].wrapping_mul(0x9e37_79b1).wrapping_add(generation);
        self.psns = packet_numbers(first, self.qps.len());
        (self.port, self.generation) = (port, generation);
        (self.draining, self.messages) = (None, 0);
        Ok(())
    }

    /// Where it is reached: GID 16 bytes | LID u16 | MTU u8 | queue pairs u8 | first packet number of the first one 3 bytes, from which
    /// the others' follow | zero u8 | 16 times number 3 bytes | zeros.
    pub(super) fn address(&self) -> Address {
        let offer = self.offer();
        let mut bytes = [0; ADDRESS_BYTES];
        bytes[..16].copy_from_slice(&offer.gid);
        bytes[16..18].copy_from_slice(&offer.lid.to_le_bytes());
        bytes[18..20].copy_from_slice(&[offer.mtu.code(), offer.qps.len() as u8]);
        bytes[20..23].copy_from_slice(&offer.qps[0].psn.to_le_bytes()[..3]);
        for (qp, bytes) in offer.qps.iter().zip(bytes[24..].chunks_exact_mut(3)) {
            bytes.copy_from_slice(&qp.number.to_le_bytes()[..3]);
        }
        Address(bytes)
    }

    /// What is to be connected to an address of the peer; `None` if the address makes no sense.
    pub(super) fn connecting(
        &mut self,
        address: &Address,
    ) -> Option<impl FnOnce() -> Result<()> + Send + 'static> {
        let bytes = &address.0;
        let three = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], 0]);
        let mtu = Mtu::from_code(bytes[18].into())?;
        let count = usize::from(bytes[19]);
        let mut peer = self.peer.clone()?;
        if count != self.qps.len() || bytes[72..] != [0; ADDRESS_BYTES - 72] {
            return None;
        }
        peer.path.gid.copy_from_slice(&bytes[..16]);
        (peer.path.lid, peer.path.mtu) = (u16::from_le_bytes([bytes[16], bytes[17]]), mtu);
        peer.path.qps = packet_numbers(three(20), count)
            .into_iter()
            .enumerate()
            .map(|(qp, psn)| QpOffer {
                number: three(24 + qp * 3),
                psn,
            })
            .collect();
        let routes = self.routes(&peer.path, &peer.path.qps);
        let own = self.psns.clone();
        self.peer = Some(peer);
        let (qps, port, patience) = (
            Arc::clone(&self.qps),
            self.port.number(),
            self.port.config().patience,
        );
        Some(move || connect_all(port, &qps, &own, &routes, patience))
    }

    /// Sends a message, if not too many are under way.
    pub(super) fn post_message(&mut self, message: &[u8; MESSAGE_BYTES]) -> std::result::Result<(), Failure> {
        if self.messages < MESSAGES {
            self.qps[0]
                .send(Work::Message.id(), message)
                .map_err(|error| self.failure(None, &error.to_string()))?;
            self.messages += 1;
        }
        Ok(())
    }

    /// Posts a write of nothing: it ends well only if the path works.
    pub(super) fn post_probe(&self) -> std::result::Result<(), Failure> {
        let peer = self.connected()?;
        let probe = Write {
            id: Work::Probe.id(),
            source: Source::Inline(&[]),
            address: peer.control,
            key: peer.path.control_key,
            immediate: None,
            signaled: true,
        };
        self.post(0, &[probe])
    }

    /// The peer; a path that is used is connected.
    fn connected(&self) -> std::result::Result<&Peer, Failure> {
        self.peer
            .as_ref()
            .ok_or_else(|| self.failure(None, "it is not connected"))
    }

    fn post(&self, qp: usize, writes: &[Write<'_>]) -> std::result::Result<(), Failure> {
        self.qps[qp]
            .post(writes)
            .map_err(|error| self.failure(None, &error.to_string()))
    }

    /// Posts a step, or its part for one queue pair: `data` of the slots (the same place at the peer), then what tells of it.
    pub(super) fn post_step(
        &self,
        qp: usize,
        position: u64,
        notice: &[u8],
        data: std::ops::Range<usize>,
    ) -> std::result::Result<(), Failure> {
        let peer = self.connected()?;
        let tell = Write {
            id: Work::Step { qp, position }.id(),
            source: Source::Inline(notice),
            address: peer.control + control::notice_at(position) as u64,
            key: peer.path.control_key,
            immediate: Some(position as u32),
            signaled: true,
        };
        if data.is_empty() {
            return self.post(qp, &[tell]);
        }
        let bytes = Write {
            id: Work::Data { qp, position }.id(),
            address: peer.slots + data.start as u64,
            source: Source::Registered(&self.slots, data),
            key: peer.path.slots_key,
            immediate: None,
            // The completion of what follows on the same queue pair is that of both.
            signaled: false,
        };
        self.post(qp, &[bytes, tell])
    }

    /// Posts a credit: into this path's own word at the peer.
    pub(super) fn post_credit(&self, granted: u64) -> std::result::Result<(), Failure> {
        let peer = self.connected()?;
        let word = granted.to_le_bytes();
        let credit = Write {
            id: Work::Credit { granted }.id(),
            source: Source::Inline(&word),
            address: peer.control + credit_at(self.index) as u64,
            key: peer.path.control_key,
            // Wakes a sender that sleeps; what it says is in the word.
            immediate: Some(granted as u32),
            signaled: true,
        };
        self.post(0, &[credit])
    }

    /// Takes what has ended, and gives each end to `sink`; whether there was any. Receive requests are posted again.
    ///
    /// # Errors
    /// When the queue itself fails, or the sink does.
    pub(super) fn poll(
        &mut self,
        control: &Control,
        mut sink: impl FnMut(Ended) -> std::result::Result<(), Failure>,
    ) -> std::result::Result<bool, Failure> {
        let mut room = [Completion::EMPTY; BATCH];
        let mut any = false;
        loop {
            let ended = self
                .cq
                .poll(&mut room)
                .map_err(|error| self.failure(None, &error.to_string()))?;
            for completion in ended {
                any = true;
                // Of queue pairs that are gone nothing is told.
                if !self.qps.iter().any(|qp| qp.number() == completion.qp) {
                    continue;
                }
                let work = Work::of(completion.id);
                if work == Some(Work::Message) {
                    self.messages = self.messages.saturating_sub(1);
                }
                if let (Some(Work::Marker { .. }), Some(left)) = (work, &mut self.draining) {
                    *left = left.saturating_sub(1);
                    continue;
                }
                // The status before anything else: the rest means nothing without.
                if let Status::Failed { code, .. } = completion.status {
                    let qp = completion.qp;
                    sink(Ended::Failed { work, code, qp })?;
                    continue;
                }
                match work {
                    Some(Work::Step { position, .. }) => sink(Ended::Sent { position })?,
                    Some(Work::Credit { .. }) => sink(Ended::Credited)?,
                    Some(Work::Probe) => sink(Ended::Probed)?,
                    Some(Work::Receive { qp, index }) => {
                        let message = completion
                            .received
                            .filter(|bytes| *bytes == MESSAGE_BYTES)
                            .map(|_| control.message(self.index, index));
                        // A queue pair that is being drained takes no more.
                        if self.draining.is_none() {
                            self.receive(qp, index)?;
                        }
                        if let Some(message) = message {
                            sink(Ended::Message(message))?;
                        }
                        if let Some(immediate) = completion.immediate {
                            sink(Ended::Arrived { qp, immediate })?;
                        }
                    }
                    // Told only with an error.
                    Some(Work::Data { .. } | Work::Message | Work::Marker { .. }) | None => {}
                }
            }
            if ended.len() < BATCH {
                return Ok(any);
            }
        }
    }

    /// Posts a receive request.
    fn receive(&self, qp: usize, index: usize) -> std::result::Result<(), Failure> {
        let posted = post_receive(self.index, &self.qps[qp], (qp, index), &self.control);
        posted.map_err(|error| self.failure(None, &error.to_string()))
    }

    /// In libibverbs' words, for messages.
    pub(super) fn status_text(&self, work: Option<Work>, code: u32, qp: u32) -> String {
        let what = work.map_or_else(|| "a request".to_owned(), |work| format!("{work:?}"));
        let text = Status::Failed { code, vendor: 0 }.text(self.port.context());
        format!("{what} on queue pair {qp} ended with {text}")
    }

    /// Has [`Path::fd`] become readable at the next end of anything. Poll once more before waiting for it.
    ///
    /// # Errors
    /// As the device says.
    pub fn arm(&self) -> std::result::Result<(), Failure> {
        self.cq.take_events();
        self.cq
            .arm()
            .map_err(|error| self.failure(None, &error.to_string()))
    }

    /// What to wait for once armed.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.cq.as_raw_fd()
    }
}

/// First packet numbers of a path's queue pairs are so far apart.
const PSN_APART: u32 = 0x10_0001;

/// First packet numbers of `count` queue pairs.
fn packet_numbers(first: u32, count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|qp| first.wrapping_add(qp * PSN_APART) & 0xff_ffff)
        .collect()
}

/// Queue pairs for a path, in INIT and with their receive requests.
fn queue_pairs(path: usize, port: &Port, cq: &Arc<Cq>, control: &Arc<Mr>) -> Result<Vec<Qp>> {
    let count = port.config().qps;
    let size = Size {
        sends: SENDS,
        receives: RECEIVES + 1,
        inline_bytes: INLINE as u32,
    };
    let mut qps = Vec::with_capacity(count);
    for number in 0..count {
        let qp = Qp::new(port.pd(), cq, size)?;
        prepare(path, (number, &qp), port, control)?;
        qps.push(qp);
    }
    Ok(qps)
}

/// Brings a queue pair from RESET to INIT, with its receive requests.
fn prepare(path: usize, (number, qp): (usize, &Qp), port: &Port, control: &Mr) -> Result<()> {
    qp.init(port.number(), port.config().pkey_index)?;
    (0..RECEIVES as usize).try_for_each(|index| post_receive(path, qp, (number, index), control))
}

/// A receive request of a path; messages go over the first queue pair.
fn post_receive(path: usize, qp: &Qp, (number, index): (usize, usize), control: &Mr) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_known_by_their_numbers() {
        let all = [
            Work::Step {
                qp: 15,
                position: LOW,
            },
            Work::Data {
                qp: 0,
                position: 1 << 40,
            },
            Work::Credit { granted: 77 },
            Work::Receive { qp: 3, index: 15 },
            Work::Probe,
            Work::Message,
            Work::Marker { qp: 15 },
        ];
        for work in all {
            assert_eq!(Work::of(work.id()), Some(work));
        }
        for id in [0, u64::MAX, 8 << 56] {
            assert_eq!(Work::of(id), None);
        }
    }
}
