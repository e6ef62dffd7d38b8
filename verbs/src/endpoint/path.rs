//! One way between the ends: a port of either with queue pairs, and the keys of the memory at both.

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use super::{
    Control, Failure, SLOTS,
    control::{self, HEAD, NOTICE_BYTES, credit_at},
};
use crate::{
    device::{Access, Memory, Mr},
    error::Result,
    port::Port,
    queue::{BATCH, Completion, Cq, Qp, Route, Size, Source, Status, Write},
    wire::{PathOffer, QpOffer},
};

/// Work requests of a queue pair: a step is two, one position is at most once under way on a path, and credits are one at a time.
const SENDS: u32 = 2 * SLOTS as u32 + 4;
/// Receive requests that a queue pair always has: for every position that may be granted, and as many that come twice.
const RECEIVES: u32 = 2 * SLOTS as u32;

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
    },
}

const LOW: u64 = (1 << 48) - 1;

impl Work {
    pub(super) fn id(self) -> u64 {
        let (kind, qp, number) = match self {
            Self::Step { qp, position } => (1, qp, position),
            Self::Data { qp, position } => (2, qp, position),
            Self::Credit { granted } => (3, 0, granted),
            Self::Receive { qp } => (4, qp, 0),
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
            4 => Self::Receive { qp },
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
    qps: Vec<Qp>,
    psns: Vec<u32>,
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
        let cq = Cq::new(port.context(), count as u32 * (SENDS + RECEIVES))?;
        let size = Size {
            sends: SENDS,
            receives: RECEIVES,
            inline_bytes: (HEAD + NOTICE_BYTES) as u32,
        };
        let mut qps = Vec::with_capacity(count);
        for number in 0..count {
            let qp = Qp::new(port.pd(), &cq, size)?;
            qp.init(port.number(), port.config().pkey_index)?;
            qp.post_receives(Work::Receive { qp: number }.id(), RECEIVES)?;
            qps.push(qp);
        }
        let psns = (0..count).map(|_| draw() & 0xff_ffff).collect();
        Ok(Self {
            index,
            port,
            cq,
            qps,
            psns,
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
        let config = own.config();
        for ((qp, psn), offer) in self.qps.iter().zip(&self.psns).zip(&other.qps) {
            let route = Route {
                qp: offer.number,
                psn: offer.psn,
                mtu: own.mtu().min(other.mtu),
                lid: other.lid,
                gid: match (own.is_ethernet(), own.gid()) {
                    (true, Some((_, index))) => Some((other.gid, index)),
                    _ => None,
                },
                service_level: config.service_level,
                traffic_class: config.traffic_class,
            };
            qp.receive_from(own.number(), &route)
                .and_then(|()| qp.send_from(*psn, config.patience))
                .map_err(|error| format!("{} to the peer's {}: {error}", own.device(), other.device))?;
        }
        self.peer = Some(peer);
        Ok(())
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
    /// The first request that ended with an error: nothing of this path can be relied on any more.
    pub fn poll(
        &self,
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
                // The status before anything else: the rest means nothing without.
                if let Status::Failed { code, .. } = completion.status {
                    let what = match Work::of(completion.id) {
                        Some(work) => format!("{work:?}"),
                        None => "a request".to_owned(),
                    };
                    let text = completion.status.text(self.port.context());
                    let text = format!("{what} on queue pair {} ended with {text}", completion.qp);
                    return Err(self.failure(Some(code), &text));
                }
                match Work::of(completion.id) {
                    Some(Work::Step { position, .. }) => sink(Ended::Sent { position })?,
                    Some(Work::Credit { .. }) => sink(Ended::Credited)?,
                    Some(Work::Receive { qp }) => {
                        self.qps[qp]
                            .post_receives(completion.id, 1)
                            .map_err(|error| self.failure(None, &error.to_string()))?;
                        if let Some(immediate) = completion.immediate {
                            sink(Ended::Arrived { qp, immediate })?;
                        }
                    }
                    // Told only with an error.
                    Some(Work::Data { .. }) | None => {}
                }
            }
            if ended.len() < BATCH {
                return Ok(any);
            }
        }
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
            Work::Receive { qp: 3 },
        ];
        for work in all {
            assert_eq!(Work::of(work.id()), Some(work));
        }
        for id in [0, u64::MAX, 5 << 56] {
            assert_eq!(Work::of(id), None);
        }
    }
}
