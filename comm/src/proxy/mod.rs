//! The proxy: a service thread that sets connections up, and a progress thread that moves network steps.
//!
//! The service answers requests by id over a unix socket (Init, SharedInit, Setup, Connect, GetFd, Stop, Destroy), from
//! its own rank and from other ranks of the node; [`client::ProxyClient`] is the other side. Network connections are
//! served by the progress thread, which starts with the first of them: operations are saved, started, and then moved
//! step by step between a [`ringsight_kernels::Fifo`] and a socket.

use std::{net::IpAddr, sync::Arc};

use ringsight_kernels::AbortWord;

/// What can go wrong with a proxy.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A call of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        source: Arc<std::io::Error>,
    },
    /// The proxy refused a request, or a peer's proxy could not be reached; the text says why.
    #[error("{0}")]
    Refused(String),
    /// Bytes that are no message.
    #[error("{0}")]
    Protocol(String),
    /// A peer's process is gone.
    #[error("{0}")]
    PeerLost(String),
    /// No answer in time.
    #[error("{0}")]
    TimedOut(String),
    /// The abort word was set.
    #[error("aborted while {0}")]
    Aborted(String),
}

/// Result of proxy calls.
pub type Result<T> = std::result::Result<T, Error>;

/// A connection of one proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u32);

/// Called when a proxy operation has finished: (operation number, replay).
pub type OnCompleted = Arc<dyn Fn(u32, u32) + Send + Sync>;
/// Called with a text that names peer, channel and step when a network connection fails.
pub type OnError = Arc<dyn Fn(String) + Send + Sync>;

/// What a proxy is made of.
#[derive(Clone)]
pub struct ProxyConfig {
    /// The rank that it serves.
    pub rank: u32,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Secret that whoever asks must present ([`crate::bootstrap::Bootstrap::cookie`]).
    pub cookie: u64,
    /// Address to listen on for other nodes ([`crate::bootstrap::Bootstrap::local_ip`]).
    pub listen: IpAddr,
    /// Bytes of a slot of every connection; the same on all ranks.
    pub slot_bytes: usize,
    /// Releases every wait.
    pub abort: Arc<AbortWord>,
    /// Told of finished operations, on the progress thread. Not called for operations that are given up.
    pub on_completed: OnCompleted,
    /// Told of the first failure of each connection, on the progress thread.
    pub on_error: OnError,
}

/// Network work of one operation: one channel, one peer, one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyOp {
    /// The network connection that it runs over.
    pub connection: ConnectionId,
    /// Operation number in this process.
    pub op: u32,
    /// 0 for an eager operation, n for the n-th replay.
    pub replay: u32,
    /// Communicator id.
    pub comm: u64,
    /// Sequence as in [`ringsight_records::Record::seq`].
    pub seq: u64,
    /// This rank.
    pub rank: u32,
    /// The rank at the other end.
    pub peer: u32,
    /// Channel.
    pub channel: u8,
    /// This rank sends.
    pub is_send: bool,
    /// The operation is a send or recv.
    pub p2p: bool,
    /// The operation was captured into a graph.
    pub graph: bool,
    /// Slots that the kernel posts (sender) or consumes (receiver) for it.
    pub steps: u32,
    /// Bytes of a full step.
    pub chunk_bytes: u32,
    /// Process that made the operation.
    pub pid: u32,
}

/// The proxy of one rank of one communicator. Dropping it gives up what is left and joins its threads.
pub struct Proxy {}

impl Proxy {
    /// Opens the sockets and starts the service thread.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn new(_config: ProxyConfig) -> Result<Self> {
        Err(Error::Refused(String::new()))
    }

    /// Where it answers: what [`crate::topology::RankInfo::proxy_address`] carries.
    #[must_use]
    pub fn address(&self) -> String {
        unimplemented!()
    }

    /// Queues an operation until the next [`Proxy::start`].
    pub fn save_op(&self, _op: ProxyOp) {
        unimplemented!()
    }

    /// Posts the saved operations to the progress thread, in the order saved.
    pub fn start(&self) {
        unimplemented!()
    }

    /// Waits until every posted operation has finished, or was given up after a failure or abort.
    pub fn stop(&self) {
        unimplemented!()
    }
}
