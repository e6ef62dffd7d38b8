//! Fencing and rebuilding a path.

use std::sync::Arc;

use ringsight_failover::{ADDRESS_BYTES, Address};

use super::{Path, Queues, connect_all, prepare, queues};
use crate::{
    completion::{BATCH, Completion},
    device::Mtu,
    endpoint::work::WorkRequest,
    error::{PortError, Result},
    port::Port,
    queue::Qp,
    wire::QpOffer,
};

/// The drain of a fenced path.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drain {
    /// Markers posted; `None` until the worker has posted them.
    markers: Option<usize>,
    /// Markers that have completed.
    pub(super) completed: usize,
}

impl Drain {
    /// The drain of queue pairs without requests: it is over.
    pub(super) const EMPTY: Self = Self {
        markers: Some(0),
        completed: 0,
    };
}

/// The result of a fence.
#[derive(Clone, Copy, Debug)]
pub(in crate::endpoint) struct Fenced {
    /// Whether the device accepted it: nothing is written any more.
    pub(in crate::endpoint) sure: bool,
    markers: usize,
}

/// The result of a rebuild.
pub(in crate::endpoint) struct Rebuilt {
    port: Port,
    /// New queue pairs and completion queue, if the old ones are replaced.
    queues: Option<Queues>,
    psns: Vec<u32>,
    generation: u32,
}

impl Path {
    /// Gives the queue pairs up: nothing is posted any more. The returned job moves them to the error state, which may take long: posted
    /// requests are flushed, and nothing of the peer is accepted. Pass its result to [`Path::finish_fence`], then poll until
    /// [`Path::is_drained`].
    pub(in crate::endpoint) fn fence(&mut self) -> impl FnOnce() -> Fenced + Send + 'static {
        self.draining = Some(Drain::default());
        let qps = Arc::clone(&self.qps);
        move || {
            let mut fenced = Fenced {
                sure: true,
                markers: 0,
            };
            for (number, qp) in qps.iter().enumerate() {
                // In the error state the device accepts nothing and flushes requests in order. The receive marker is posted before, because
                // soft-RoCE looks at receive requests only when it has other work; the send marker after, so that it is not sent.
                let id = WorkRequest::Marker { qp: number }.id();
                fenced.markers += usize::from(qp.post_receives(id, 1).is_ok());
                fenced.sure &= qp.fail().is_ok();
                fenced.markers += usize::from(qp.send(id, &[0]).is_ok());
            }
            fenced
        }
    }

    /// Takes the result of the job of [`Path::fence`].
    pub(in crate::endpoint) fn finish_fence(&mut self, fenced: Fenced) {
        if let Some(drain) = &mut self.draining {
            drain.markers = Some(fenced.markers);
        }
    }

    /// Whether all requests that were posted before [`Path::fence`] have completed.
    pub(in crate::endpoint) fn is_drained(&self) -> bool {
        self.draining
            .is_some_and(|drain| drain.markers.is_some_and(|markers| drain.completed >= markers))
    }

    /// Whether the path has been fenced and not rebuilt.
    pub(in crate::endpoint) fn is_fenced(&self) -> bool {
        self.draining.is_some()
    }

    /// Returns a job that rebuilds the queue pairs, which may take long, on the port in its state at that time. Pass its result to
    /// [`Path::finish_rebuild`].
    ///
    /// The queue pairs restart from RESET with other packet numbers, so that no earlier packet is taken for a new one. They are reused
    /// because soft-RoCE destroys a queue pair only when its last packet has left the interface, which takes seconds when that is down.
    /// After a failure of the completion queue, which no call repairs, new ones are made.
    pub(in crate::endpoint) fn rebuild(
        &self,
        port: impl FnOnce() -> std::result::Result<Port, PortError> + Send + 'static,
        generation: u32,
    ) -> impl FnOnce() -> std::result::Result<Rebuilt, PortError> + Send + 'static {
        let (index, qps, control) = (self.index, Arc::clone(&self.qps), Arc::clone(&self.control));
        let has_failed_cq = self.has_failed_cq;
        let first = self.psns[0].wrapping_mul(0x9e37_79b1).wrapping_add(generation);
        move || {
            let port = port()?;
            let reset = || -> Result<()> {
                qps.iter().try_for_each(Qp::reset)?;
                qps.iter()
                    .enumerate()
                    .try_for_each(|(number, qp)| prepare(index, (number, qp), &port, &control))
            };
            let made = match has_failed_cq {
                true => queues(index, &port, &control).map(Some),
                false => reset().map(|()| None),
            };
            Ok(Rebuilt {
                queues: made?,
                port,
                psns: packet_numbers(first, qps.len()),
                generation,
            })
        }
    }

    /// Takes the result of the job of [`Path::rebuild`]. Returns the queues that were replaced; to drop them may take long.
    pub(in crate::endpoint) fn finish_rebuild(&mut self, rebuilt: Rebuilt) -> Result<Option<Queues>> {
        let before = match rebuilt.queues {
            Some((cq, qps)) => {
                self.has_failed_cq = false;
                let before = std::mem::replace(&mut self.qps, qps);
                Some((std::mem::replace(&mut self.cq, cq), before))
            }
            None => {
                // All of these completions are old: the rebuilt queue pairs are not connected yet.
                let mut room = [Completion::EMPTY; BATCH];
                while !self.cq.poll(&mut room)?.is_empty() {}
                None
            }
        };
        (self.port, self.psns, self.generation) = (rebuilt.port, rebuilt.psns, rebuilt.generation);
        (self.draining, self.messages, self.probes) = (None, 0, 0);
        Ok(before)
    }

    /// The address of the queue pairs: GID 16 bytes | LID u16 | MTU u8 | queue pairs u8 | first packet number of the first one 3 bytes, from which
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

    /// Returns a job that connects the queue pairs to an address of the peer; `None` if the address is invalid.
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
        let (qps, port, retry) = (
            Arc::clone(&self.qps),
            self.port.number(),
            self.port.config().retry,
        );
        Some(move || connect_all(port, &qps, &own, &routes, retry))
    }
}

/// Distance of the first packet numbers of a path's queue pairs.
const PSN_STRIDE: u32 = 0x10_0001;

/// First packet numbers of `count` queue pairs.
fn packet_numbers(first: u32, count: usize) -> Vec<u32> {
    (0..count as u32)
        .map(|qp| first.wrapping_add(qp * PSN_STRIDE) & 0xff_ffff)
        .collect()
}
