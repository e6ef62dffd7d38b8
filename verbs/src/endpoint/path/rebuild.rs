//! How a path is given up, and made anew.

use std::sync::Arc;

use ringsight_failover::{ADDRESS_BYTES, Address};

use super::{Path, Queues, connect_all, prepare, queues};
use crate::{
    completion::{BATCH, Completion},
    device::Mtu,
    endpoint::work::Work,
    error::Result,
    port::Port,
    queue::Qp,
    wire::QpOffer,
};

/// A drain.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::endpoint) struct Drain {
    /// Markers posted, when they are.
    markers: Option<usize>,
    /// Markers that have ended.
    pub(in crate::endpoint) ended: usize,
}

impl Drain {
    /// Of queue pairs to which nothing was posted.
    pub(super) const NOTHING: Self = Self {
        markers: Some(0),
        ended: 0,
    };
}

/// What became of a fence.
#[derive(Clone, Copy, Debug)]
pub(in crate::endpoint) struct Fenced {
    /// Whether the device is sure to write nothing more.
    pub(in crate::endpoint) sure: bool,
    markers: usize,
}

/// What a path has been made anew with.
pub(in crate::endpoint) struct Rebuilt {
    port: Port,
    /// In place of those that there were.
    queues: Option<Queues>,
    psns: Vec<u32>,
    generation: u32,
}

impl Path {
    /// Gives its queue pairs up: from here on nothing is posted. What is returned stops them, by calls that may take long: what was
    /// posted ends, with an error if it has not been done, and nothing of the peer's is taken any more. When it has, tell
    /// [`Path::fenced`] and poll until [`Path::is_drained`].
    pub(in crate::endpoint) fn fence(&mut self) -> impl FnOnce() -> Fenced + Send + 'static {
        self.draining = Some(Drain::default());
        let qps = Arc::clone(&self.qps);
        move || {
            let mut fenced = Fenced {
                sure: true,
                markers: 0,
            };
            for (number, qp) in qps.iter().enumerate() {
                // In the error state the device takes nothing, and ends what is there in order. A receive request is posted before, for
                // soft-RoCE looks at those only when it has something else to do; a send after, lest it goes out.
                let id = Work::Marker { qp: number }.id();
                fenced.markers += usize::from(qp.post_receives(id, 1).is_ok());
                fenced.sure &= qp.fail().is_ok();
                fenced.markers += usize::from(qp.send(id, &[0]).is_ok());
            }
            fenced
        }
    }

    /// Its queue pairs have been stopped.
    pub(in crate::endpoint) fn fenced(&mut self, fenced: Fenced) {
        if let Some(drain) = &mut self.draining {
            drain.markers = Some(fenced.markers);
        }
    }

    /// Whether all that was posted before [`Path::fence`] has ended.
    pub(in crate::endpoint) fn is_drained(&self) -> bool {
        self.draining
            .is_some_and(|drain| drain.markers.is_some_and(|markers| drain.ended >= markers))
    }

    /// Whether it has been fenced and not been rebuilt.
    pub(in crate::endpoint) fn is_fenced(&self) -> bool {
        self.draining.is_some()
    }

    /// What makes its queue pairs anew, by calls that may take long, on its port as that is then: from RESET, with other packet numbers,
    /// so that nothing of theirs before is taken for theirs now. They are not destroyed and others made, for soft-RoCE destroys one
    /// only when the last of its packets is off the interface, which takes seconds when that is down; but where the completion queue
    /// failed, which no call mends, there is no other way. For [`Path::rebuilt`].
    pub(in crate::endpoint) fn rebuild(
        &self,
        port: impl FnOnce() -> std::result::Result<Port, String> + Send + 'static,
        generation: u32,
    ) -> impl FnOnce() -> std::result::Result<Rebuilt, String> + Send + 'static {
        let (index, qps, control) = (self.index, Arc::clone(&self.qps), Arc::clone(&self.control));
        let is_spoiled = self.is_spoiled;
        let first = self.psns[0].wrapping_mul(0x9e37_79b1).wrapping_add(generation);
        move || {
            let port = port()?;
            let reset = || -> Result<()> {
                qps.iter().try_for_each(Qp::reset)?;
                qps.iter()
                    .enumerate()
                    .try_for_each(|(number, qp)| prepare(index, (number, qp), &port, &control))
            };
            let made = match is_spoiled {
                true => queues(index, &port, &control).map(Some),
                false => reset().map(|()| None),
            };
            Ok(Rebuilt {
                queues: made.map_err(|error| error.to_string())?,
                port,
                psns: packet_numbers(first, qps.len()),
                generation,
            })
        }
    }

    /// Its queue pairs are there anew. What is returned they are in place of: to destroy it may take long.
    pub(in crate::endpoint) fn rebuilt(&mut self, rebuilt: Rebuilt) -> Result<Option<Queues>> {
        let before = match rebuilt.queues {
            Some((cq, qps)) => {
                self.is_spoiled = false;
                let before = std::mem::replace(&mut self.qps, qps);
                Some((std::mem::replace(&mut self.cq, cq), before))
            }
            None => {
                // Nothing has come of the new ones, which are not connected.
                let mut room = [Completion::EMPTY; BATCH];
                while !self.cq.poll(&mut room)?.is_empty() {}
                None
            }
        };
        (self.port, self.psns, self.generation) = (rebuilt.port, rebuilt.psns, rebuilt.generation);
        (self.draining, self.messages, self.probes) = (None, 0, 0);
        Ok(before)
    }

    /// Where it is reached: GID 16 bytes | LID u16 | MTU u8 | queue pairs u8 | first packet number of the first one 3 bytes, from which
    /// the others' follow | zero u8 | 16 times number 3 bytes | zeros.
    pub(in crate::endpoint) fn address(&self) -> Address {
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
    pub(in crate::endpoint) fn connecting(
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
}

/// First packet numbers of a path's queue pairs are so far apart.
const PSN_APART: u32 = 0x10_0001;

/// First packet numbers of `count` queue pairs.
fn packet_numbers(first: u32, count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|qp| first.wrapping_add(qp * PSN_APART) & 0xff_ffff)
        .collect()
}
