//! Connections between ranks: how the bytes of a FIFO reach the peer.
//!
//! | peer | way | the bytes move |
//! |---|---|---|
//! | in the node, GPUs with peer access | [`P2P`] | by the kernels, in the memory of the GPUs ([`arena`]) |
//! | in the node | [`SHM`] | by the kernels, in host memory that both ends map (`fifo_memory`) |
//! | on another node, RDMA at both ends | [`NET_VERBS`] | by RDMA devices (`verbs`) |
//! | on another node | [`NET_SOCKET`] | by the proxies, over TCP (`socket`) |
//!
//! A connection to another node has one end in each of two proxies. Such an end implements `connection::Connection`, and the progress
//! thread of its proxy drives it. [`crate::proxy`] makes the connections; this layer knows nothing of proxies.
//!
//! # Modules, from the bottom
//! | module | owns |
//! |---|---|
//! | [`arena`] | FIFOs in the memory of GPUs with peer access |
//! | `error`, `stall`, `stream`, `connection`, `events` | the interface of a connection, its TCP stream, its records |
//! | [`rdma`] | RDMA of the process |
//! | [`gpu_direct`] | slots in the memory of a GPU, for RDMA |
//! | `fifo_memory` | FIFOs in shared host memory |
//! | `wire` | messages between two proxies |
//! | `socket`, `verbs` | the kinds of connections |
//! | `network` | making a connection of the agreed kind |

pub mod arena;
pub(crate) mod connection;
mod error;
pub(crate) mod events;
pub(crate) mod fifo_memory;
pub mod gpu_direct;
pub(crate) mod network;
pub mod rdma;
mod socket;
pub(crate) mod stall;
mod stream;
pub(crate) mod verbs;
pub(crate) mod wire;

use std::sync::Arc;

use ringsight_kernels::Fifo;

use crate::op::ConnectionId;

/// Name of the transport between GPUs of a node with peer access.
pub const P2P: &str = "p2p";
/// Name of the transport within a node through host memory.
pub const SHM: &str = "shm";
/// Name of the transport between nodes over sockets.
pub const NET_SOCKET: &str = "net/socket";
/// Name of the transport between nodes over RDMA.
pub const NET_VERBS: &str = "net/verbs";

/// The sending end of a connection.
#[derive(Clone)]
pub struct SendConnection {
    /// The FIFO that the kernel fills.
    pub fifo: Arc<Fifo>,
    /// The proxy's connection, if the proxy has work to do.
    pub proxy: Option<ConnectionId>,
    /// [`P2P`], [`SHM`], [`NET_SOCKET`] or [`NET_VERBS`].
    pub transport: &'static str,
}

/// The receiving end of a connection.
#[derive(Clone)]
pub struct RecvConnection {
    /// The FIFO that the kernel drains.
    pub fifo: Arc<Fifo>,
    /// The proxy's connection, if the proxy has work to do.
    pub proxy: Option<ConnectionId>,
    /// [`P2P`], [`SHM`], [`NET_SOCKET`] or [`NET_VERBS`].
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
