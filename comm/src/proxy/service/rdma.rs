//! RDMA beside the connections between proxies: what is offered, accepted and confirmed over their sockets.

use std::{io::Write, net::TcpStream, sync::Arc};

use ringsight_verbs::{
    choice,
    wire::{OFFER_BYTES, Offer},
};

use super::Service;
use crate::{
    log,
    proxy::message::Endpoint,
    transport::{
        direct::Slots,
        socket::{Hello, MOST_REASON, VERDICT_BYTES, Verdict},
        verbs::{self, Connected, Prepared},
    },
};

/// Why sockets will not do.
pub(super) const ONLY_RDMA: &str = "NCCL_NET=IB (or config.netName) allows nothing else";

/// How many bytes of the answer to a hello are still missing.
pub(super) fn answer_missing(answer: &[u8]) -> Result<usize, String> {
    let Some(verdict) = answer.first_chunk::<VERDICT_BYTES>() else {
        return Ok(VERDICT_BYTES - answer.len());
    };
    let more = match Verdict::parse(verdict).ok_or("it answers rubbish")? {
        Verdict::Rdma => OFFER_BYTES,
        Verdict::Sockets(bytes) => bytes as usize,
        Verdict::Welcome | Verdict::OtherSlots(_) | Verdict::Taken | Verdict::Impossible => 0,
    };
    Ok(VERDICT_BYTES + more - answer.len())
}

/// The verdict for sockets, with the reason behind it.
fn sockets(why: &str) -> Vec<u8> {
    let why = &why[..why.floor_char_boundary(MOST_REASON as usize)];
    let mut bytes = Verdict::Sockets(why.len() as u32).encode().to_vec();
    bytes.extend_from_slice(why.as_bytes());
    bytes
}

impl Service {
    /// Whether it is known what connections go over.
    pub(super) fn knows_ports(&self) -> bool {
        self.config.rdma.is_none() || self.ports.get().is_some()
    }

    /// The port that a channel's connections use.
    pub(super) fn port(&self, channel: u8) -> Option<usize> {
        let ports = &self.ports.get()?.by_channel;
        (!ports.is_empty()).then(|| ports[usize::from(channel) % ports.len()])
    }

    /// Slots in the memory of the GPU for connection `id`, where that may go over RDMA and there are any.
    pub(super) fn direct_slots(&self, id: u32, endpoint: &Endpoint) -> Option<Arc<Slots>> {
        let pool = self.ports.get()?.direct.as_ref()?;
        pool.take(id, self.port(endpoint.channel)?, endpoint.is_send)
    }

    /// Whether connections must not go over sockets.
    pub(super) fn is_rdma_required(&self) -> bool {
        self.config.rdma.as_ref().is_some_and(|rdma| rdma.required)
    }

    /// Makes this end of connection `id`, which is set up, as far as it can be made alone: a receiver's for the port of the sender that has
    /// the number `theirs`. `None`: it goes over a socket.
    ///
    /// # Errors
    /// When it may not.
    pub(super) fn prepare(&self, id: u32, theirs: Option<u8>) -> Result<Option<Prepared>, String> {
        let connection = self.connections.get(&id);
        let (Some(rdma), Some((connection, fifo))) = (
            &self.config.rdma,
            connection.and_then(|connection| Some((connection, connection.fifo.as_ref()?))),
        ) else {
            return Ok(None);
        };
        let endpoint = connection.endpoint;
        let prepared = match (self.port(endpoint.channel), self.ports.get()) {
            (None, _) | (_, None) => Err("no RDMA port is up".to_owned()),
            (Some(own), Some(ports)) => {
                let port = theirs.map_or(own, |theirs| {
                    let (all, cross) = (rdma.net.ports(), rdma.net.config().cross);
                    choice::facing(&all, (&ports.by_channel, own), theirs.into(), cross)
                });
                let memory = (fifo, connection.direct.as_ref());
                verbs::prepare(rdma, port, memory, !endpoint.is_send)
            }
        };
        prepared.map(Some).or_else(|why| {
            self.over_sockets(endpoint.peer, endpoint.channel, &why)?;
            Ok(None)
        })
    }

    /// Says that a connection goes over a socket though there is RDMA.
    ///
    /// # Errors
    /// When it may not.
    pub(super) fn over_sockets(&self, peer: u32, channel: u8, why: &str) -> Result<(), String> {
        if self.is_rdma_required() {
            return Err(format!("no RDMA: {why}; {ONLY_RDMA}"));
        }
        let rank = self.config.rank;
        tracing::warn!(
            target: log::NET,
            "NET/IB : rank {rank} and rank {peer} use a socket on channel {channel}, not RDMA: {why}"
        );
        Ok(())
    }

    /// The answer to a hello whose receiver is connection `id`, and our end if it goes over RDMA.
    pub(super) fn answer_offer(
        &self,
        id: u32,
        hello: &Hello,
        offer: &[u8],
    ) -> Result<(Vec<u8>, Option<Connected>), Verdict> {
        if !hello.rdma {
            if self.config.rdma.is_some() {
                self.over_sockets(hello.from, hello.channel, "it offers none")
                    .map_err(|why| {
                        tracing::warn!(target: log::NET, "NET/IB : rank {} is refused: {why}", hello.from);
                        Verdict::Impossible
                    })?;
            }
            return Ok((Verdict::Welcome.encode().to_vec(), None));
        }
        let connected = Offer::parse(offer)
            .map_err(|error| error.to_string())
            .and_then(|theirs| {
                let prepared = self
                    .prepare(id, Some(theirs.number))?
                    .ok_or("the receiver has no RDMA")?;
                prepared.accept(&theirs)
            });
        match connected {
            Ok((connected, mine)) => {
                let mut bytes = Verdict::Rdma.encode().to_vec();
                bytes.extend(mine.encode());
                Ok((bytes, Some(connected)))
            }
            Err(why) => {
                let rank = self.config.rank;
                tracing::warn!(
                    target: log::NET,
                    "NET/IB : rank {rank} accepts no RDMA from rank {} on channel {}: {why}", hello.from, hello.channel
                );
                Ok((sockets(&why), None))
            }
        }
    }

    /// Connects our end to the offer that the receiver has answered with, and tells it.
    pub(super) fn confirm(
        &self,
        (peer, channel): (u32, u8),
        mut stream: &TcpStream,
        prepared: Prepared,
        offer: &[u8],
    ) -> Result<Option<Connected>, String> {
        let gone = |error| format!("{error}: its process is gone or cannot be reached");
        let theirs = Offer::parse(offer).map_err(|error| error.to_string());
        match theirs.and_then(|theirs| prepared.connect(&theirs)) {
            Ok(connected) => {
                stream.write_all(&Verdict::Rdma.encode()).map_err(gone)?;
                Ok(Some(connected))
            }
            Err(why) => {
                self.over_sockets(peer, channel, &why)?;
                stream.write_all(&sockets(&why)).map_err(gone)?;
                Ok(None)
            }
        }
    }
}
