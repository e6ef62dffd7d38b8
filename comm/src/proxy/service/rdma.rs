//! Offering, accepting and confirming RDMA over the streams between proxies.

use std::{io::Write, net::TcpStream, sync::Arc};

use ringsight_comm_base::log;

use ringsight_verbs::{
    choice,
    wire::{OFFER_BYTES, Offer},
};

use super::Service;
use crate::{
    op::Endpoint,
    transport::{
        gpu_direct::Slots,
        verbs::{self, ConnectedEnd, PreparedEnd},
        wire::{HELLO_REPLY_BYTES, Hello, HelloReply, MAX_REASON},
    },
};

/// Why a connection must not use a socket.
pub(super) const ONLY_RDMA: &str = "NCCL_NET=IB (or config.netName) allows nothing else";

/// How many bytes of the answer to a hello are missing.
pub(super) fn answer_missing(answer: &[u8]) -> Result<usize, String> {
    let Some(reply) = answer.first_chunk::<HELLO_REPLY_BYTES>() else {
        return Ok(HELLO_REPLY_BYTES - answer.len());
    };
    let more = match HelloReply::parse(reply).ok_or("it answers rubbish")? {
        HelloReply::Rdma => OFFER_BYTES,
        HelloReply::Sockets(bytes) => bytes as usize,
        HelloReply::Welcome
        | HelloReply::OtherSlots(_)
        | HelloReply::Taken
        | HelloReply::Starved
        | HelloReply::Impossible => 0,
    };
    Ok(HELLO_REPLY_BYTES + more - answer.len())
}

/// The reply that chooses the socket, followed by the reason.
fn sockets(why: &str) -> Vec<u8> {
    let why = &why[..why.floor_char_boundary(MAX_REASON as usize)];
    let mut bytes = HelloReply::Sockets(why.len() as u32).encode().to_vec();
    bytes.extend_from_slice(why.as_bytes());
    bytes
}

impl Service {
    /// Whether the ports of network connections are known.
    pub(super) fn knows_ports(&self) -> bool {
        self.config.rdma.is_none() || self.ports.get().is_some()
    }

    /// Index of the port for the connections of a channel.
    pub(super) fn port(&self, channel: u8) -> Option<usize> {
        let ports = &self.ports.get()?.by_channel;
        (!ports.is_empty()).then(|| ports[usize::from(channel) % ports.len()])
    }

    /// Takes slots in the memory of the GPU for connection `id`, if it may use RDMA and there are any left.
    pub(super) fn direct_slots(&self, id: u32, endpoint: &Endpoint) -> Option<Arc<Slots>> {
        let pool = self.ports.get()?.direct.as_ref()?;
        pool.take(id, self.port(endpoint.channel)?, endpoint.is_send)
    }

    /// Whether connections must use RDMA.
    pub(super) fn is_rdma_required(&self) -> bool {
        self.config.rdma.as_ref().is_some_and(|rdma| rdma.required)
    }

    /// Makes this end of connection `id`, which is set up, over RDMA. `theirs`: for a receiver, the index of the sender's port. `None`: the
    /// connection uses a socket.
    ///
    /// # Errors
    /// RDMA cannot be used, and is required.
    pub(super) fn prepare(&self, id: u32, theirs: Option<u8>) -> Result<Option<PreparedEnd>, String> {
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
                verbs::prepare(rdma, port, memory, !endpoint.is_send).map_err(|error| error.to_string())
            }
        };
        prepared.map(Some).or_else(|why| {
            self.fall_back(endpoint.peer, endpoint.channel, &why)?;
            Ok(None)
        })
    }

    /// Logs that a connection uses a socket although the process has RDMA.
    ///
    /// # Errors
    /// RDMA is required.
    pub(super) fn fall_back(&self, peer: u32, channel: u8, why: &str) -> Result<(), String> {
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

    /// The answer to a hello whose receiver is connection `id`, and this end if it uses RDMA.
    pub(super) fn answer_offer(
        &self,
        id: u32,
        hello: &Hello,
        offer: &[u8],
    ) -> Result<(Vec<u8>, Option<ConnectedEnd>), HelloReply> {
        if !hello.rdma {
            if self.config.rdma.is_some() {
                self.fall_back(hello.from, hello.channel, "it offers none")
                    .map_err(|why| {
                        tracing::warn!(target: log::NET, "NET/IB : rank {} is refused: {why}", hello.from);
                        HelloReply::Impossible
                    })?;
            }
            return Ok((HelloReply::Welcome.encode().to_vec(), None));
        }
        match self.accept(id, offer) {
            Ok((connected, mine)) => {
                let mut bytes = HelloReply::Rdma.encode().to_vec();
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

    /// Makes the receiver's end for a sender's offer. Returns it with its own offer.
    fn accept(&self, id: u32, offer: &[u8]) -> Result<(ConnectedEnd, Offer), String> {
        let theirs = Offer::parse(offer).map_err(|error| error.to_string())?;
        let prepared = self
            .prepare(id, Some(theirs.number))?
            .ok_or("the receiver has no RDMA")?;
        prepared.accept(&theirs).map_err(|error| error.to_string())
    }

    /// Connects the sender's end to the receiver's offer, and tells the receiver whether that succeeded.
    pub(super) fn confirm(
        &self,
        (peer, channel): (u32, u8),
        mut stream: &TcpStream,
        prepared: PreparedEnd,
        offer: &[u8],
    ) -> Result<Option<ConnectedEnd>, String> {
        let gone = |error| format!("{error}: its process is gone or cannot be reached");
        let theirs = Offer::parse(offer).map_err(|error| error.to_string());
        let connected =
            theirs.and_then(|theirs| prepared.connect(&theirs).map_err(|error| error.to_string()));
        match connected {
            Ok(connected) => {
                stream.write_all(&HelloReply::Rdma.encode()).map_err(gone)?;
                Ok(Some(connected))
            }
            Err(why) => {
                self.fall_back(peer, channel, &why)?;
                stream.write_all(&sockets(&why)).map_err(gone)?;
                Ok(None)
            }
        }
    }
}
