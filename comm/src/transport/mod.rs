//! Connections between ranks: shared memory within a node, sockets between nodes.

use std::sync::Arc;

use ringsight_kernels::{AbortWord, Fifo};

use crate::{
    proxy::{self, ConnectionId, Proxy},
    topology::Topology,
};

/// Name of the transport within a node.
pub const SHM: &str = "shm";
/// Name of the transport between nodes.
pub const NET_SOCKET: &str = "net/socket";

/// The sending end of a connection.
#[derive(Clone)]
pub struct SendConnection {
    /// What the kernel fills.
    pub fifo: Arc<Fifo>,
    /// The proxy's connection, where the proxy has work to do.
    pub proxy: Option<ConnectionId>,
    /// [`SHM`] or [`NET_SOCKET`].
    pub transport: &'static str,
}

/// The receiving end of a connection.
#[derive(Clone)]
pub struct RecvConnection {
    /// What the kernel drains.
    pub fifo: Arc<Fifo>,
    /// The proxy's connection, where the proxy has work to do.
    pub proxy: Option<ConnectionId>,
    /// [`SHM`] or [`NET_SOCKET`].
    pub transport: &'static str,
}

/// A rank's two connections in one channel's ring.
#[derive(Clone)]
pub struct RingConnections {
    /// From the previous rank.
    pub prev: RecvConnection,
    /// To the next rank.
    pub next: SendConnection,
}

/// Makes the connections of one rank.
///
/// The receiver's proxy makes a connection when it is first asked for, whoever asks first: no call here waits for the
/// peer's own call, so any number of pairs can connect in any order without a deadlock.
pub struct Connector {}

impl Connector {
    /// A connector for the ranks of `topology`, through this rank's proxy.
    #[must_use]
    pub fn new(_topology: Arc<Topology>, _proxy: Arc<Proxy>, _abort: Arc<AbortWord>) -> Self {
        Self {}
    }

    /// The connections of this rank in the ring of `channel` ([`Topology::ring`]). There must be at least two ranks.
    ///
    /// # Errors
    /// When a peer's proxy is gone or refuses, or on abort.
    pub fn connect_ring(&self, _channel: u8) -> proxy::Result<RingConnections> {
        Err(proxy::Error::Refused(String::new()))
    }

    /// The point-to-point connection to `peer` on `channel`; the same one each time.
    ///
    /// # Errors
    /// When the peer's proxy is gone or refuses, or on abort.
    pub fn connect_send(&self, _peer: u32, _channel: u8) -> proxy::Result<SendConnection> {
        Err(proxy::Error::Refused(String::new()))
    }

    /// The point-to-point connection from `peer` on `channel`; the same one each time.
    ///
    /// # Errors
    /// When this rank's proxy cannot make it, or on abort.
    pub fn connect_recv(&self, _peer: u32, _channel: u8) -> proxy::Result<RecvConnection> {
        Err(proxy::Error::Refused(String::new()))
    }
}
