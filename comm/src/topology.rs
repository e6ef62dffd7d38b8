//! Which rank runs where, and the rings that follow from it.

use std::sync::Arc;

use crate::bootstrap::{Bootstrap, Error, Result};

/// What every rank tells the others about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// Rank in the communicator.
    pub rank: u32,
    /// `NCCL_HOSTID` if set, else the host name.
    pub host: String,
    /// Equal for ranks that can share memory and unix sockets; see [`RankInfo::local`].
    pub host_hash: u64,
    /// Process, in its own pid namespace.
    pub pid: u32,
    /// When that process started, clock ticks since boot (`/proc/self/stat` field 22).
    pub process_start_time: u64,
    /// Device number in the process.
    pub device: i32,
    /// Where its proxy answers ([`crate::proxy::Proxy::address`]).
    pub proxy_address: String,
    /// Library version as `ncclGetVersion` gives it.
    pub library_version: u32,
}

impl RankInfo {
    /// This process's part of the truth, for `rank` on `device` with a proxy at `proxy_address`.
    #[must_use]
    pub fn local(_rank: u32, _device: i32, _proxy_address: String, _library_version: u32) -> Self {
        unimplemented!()
    }
}

/// Every rank's place.
pub struct Topology {}

impl Topology {
    /// Exchanges what the ranks know of themselves. Every rank calls it.
    ///
    /// # Errors
    /// As [`Bootstrap::all_gather`]; [`Error::Protocol`] when a rank says something unreadable or contradictory.
    pub fn exchange(_bootstrap: &Bootstrap, _mine: RankInfo) -> Result<Self> {
        Err(Error::Protocol(String::new()))
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        unimplemented!()
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        unimplemented!()
    }

    /// What a rank said.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn info(&self, _rank: u32) -> &RankInfo {
        unimplemented!()
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> u32 {
        unimplemented!()
    }

    /// The node of a rank; nodes are numbered by their first rank.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn node_of(&self, _rank: u32) -> u32 {
        unimplemented!()
    }

    /// This rank's number among the ranks of its node.
    #[must_use]
    pub fn local_rank(&self) -> u32 {
        unimplemented!()
    }

    /// The ranks of this rank's node, in rank order.
    #[must_use]
    pub fn local_ranks(&self) -> &[u32] {
        unimplemented!()
    }

    /// Ranks in the order of a channel's ring, beginning with this one: data goes from `[0]` to `[1]`.
    #[must_use]
    pub fn ring(&self, _channel: u8) -> Arc<[u32]> {
        unimplemented!()
    }
}
