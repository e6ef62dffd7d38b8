//! How the ranks of a new communicator find each other: a unique id, a rendezvous, and messages between ranks.
//!
//! One process makes a [`UniqueId`] and with it a root, a thread that listens on TCP. Each rank tells the root where it
//! listens; when all have come the root gives every rank the whole table and ends. From then on ranks talk directly:
//! a connection is opened at the first message, used in one direction, and watched, so that the death of a rank is an
//! error that names it. Collective calls ([`Bootstrap::all_gather`]) are built from these messages.

mod id;

use std::{sync::Arc, time::Duration};

use ringsight_kernels::AbortWord;

pub use id::UniqueId;

/// What can go wrong between ranks before there are connections.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The 128 bytes are not a unique id of this library.
    #[error("{0}")]
    InvalidId(String),
    /// An argument or environment variable that cannot be used.
    #[error("{0}")]
    InvalidArgument(String),
    /// A call of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        source: Arc<std::io::Error>,
    },
    /// The ranks did not all come, or did not answer, in time.
    #[error("{0}")]
    TimedOut(String),
    /// A rank's process ended or closed its connection.
    #[error("{text}")]
    PeerLost {
        /// The rank that is gone.
        rank: u32,
        /// What was seen, and by whom.
        text: String,
    },
    /// The root or a peer said something that this version does not understand, or refused us.
    #[error("{0}")]
    Protocol(String),
    /// The abort word was set.
    #[error("aborted while {0}")]
    Aborted(String),
}

/// Result of bootstrap calls.
pub type Result<T> = std::result::Result<T, Error>;

/// How long ranks wait for each other: `RINGSIGHT_BOOTSTRAP_TIMEOUT_MS`, 120 s by default.
#[must_use]
pub fn default_timeout() -> Duration {
    std::env::var("RINGSIGHT_BOOTSTRAP_TIMEOUT_MS")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .map_or(Duration::from_secs(120), Duration::from_millis)
}

/// Makes a unique id and starts its root.
///
/// # Errors
/// When `NCCL_SOCKET_IFNAME` matches no interface or no listener can be opened.
pub fn create_root() -> Result<UniqueId> {
    Err(Error::InvalidArgument(String::new()))
}

/// One rank's end of the bootstrap network of a communicator.
pub struct Bootstrap {}

impl Bootstrap {
    /// Takes part in the rendezvous of `id` as `rank` of `ranks`; returns when all ranks have come.
    ///
    /// # Errors
    /// [`Error::TimedOut`] naming the missing ranks, [`Error::PeerLost`], [`Error::Protocol`] when the root refuses
    /// (rank taken, another number of ranks), [`Error::Aborted`] within 100 ms of `abort`.
    pub fn init(
        _id: &UniqueId,
        _rank: u32,
        _ranks: u32,
        _abort: Arc<AbortWord>,
        _timeout: Duration,
    ) -> Result<Self> {
        Err(Error::InvalidArgument(String::new()))
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        0
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        0
    }

    /// Secret that the ranks share: what a connection between them has to present.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        0
    }

    /// Address by which other ranks reach this one.
    #[must_use]
    pub fn local_ip(&self) -> std::net::IpAddr {
        std::net::Ipv4Addr::LOCALHOST.into()
    }

    /// Gives every rank everyone's bytes, in rank order. Lengths may differ.
    ///
    /// # Errors
    /// As [`Bootstrap::recv`].
    pub fn all_gather(&self, _mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(Vec::new())
    }

    /// Sends a message; returns when the system has taken it. Messages of one (peer, tag) arrive in order.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::TimedOut`], [`Error::Aborted`].
    pub fn send(&self, _peer: u32, _tag: u32, _data: &[u8]) -> Result<()> {
        Ok(())
    }

    /// Waits for the next message of (peer, tag).
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::TimedOut`], [`Error::Aborted`].
    pub fn recv(&self, _peer: u32, _tag: u32) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`Bootstrap::recv`].
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }
}
