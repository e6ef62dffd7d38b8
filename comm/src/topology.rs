//! Which rank runs where, and the rings that follow from it.

use std::{collections::HashMap, sync::Arc};

use ringsight_comm_base::{
    log::GRAPH,
    process::{self, Stat},
    sys,
};

use crate::bootstrap::{Bootstrap, Error, Result, fnv1a, wire::printable};

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
    /// When that process started, clock ticks since boot; 0 where there is no `/proc`.
    pub process_start_time: u64,
    /// Device number in the process.
    pub device: i32,
    /// Where its proxy answers ([`crate::proxy::Proxy::address`]).
    pub proxy_address: String,
    /// Library version as `ncclGetVersion` gives it.
    pub library_version: u32,
    /// PCI address of its GPU, as `0000:01:00.0`; empty without one.
    pub bus: String,
}

/// Where a rank runs: its host, its process, when that began, and its device.
pub(crate) type ProcessDevice = (u64, u32, u64, i32);

/// Rank u32 | pid u32 | device u32 | library version u32 | host hash u64 | start time u64 | three strings (u16 length each).
const FIXED_BYTES: usize = 32;

impl RankInfo {
    /// What this process knows of itself, for `rank` on `device` with a proxy at `proxy_address`.
    ///
    /// `NCCL_HOSTID` replaces the identity of the host, as in NCCL. Without it, ranks are of one host if host name, boot
    /// and network namespace agree: containers with network namespaces of their own cannot reach each other's abstract
    /// unix sockets, so to each other they are other nodes.
    #[must_use]
    pub fn local(rank: u32, device: i32, proxy_address: String, library_version: u32) -> Self {
        let (host, identity) = match ringsight_comm_base::env::text("NCCL_HOSTID") {
            Some(id) => (id.clone(), id),
            None => {
                let host = process::host_name();
                let namespace = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
                let boot = sys::read_text("/proc/sys/kernel/random/boot_id").unwrap_or_default();
                let identity = format!("{host} {} {}", boot.trim(), namespace.display());
                (host, identity)
            }
        };
        Self {
            rank,
            host,
            host_hash: fnv1a(identity.as_bytes()),
            pid: std::process::id(),
            process_start_time: Stat::own().map_or(0, |stat| stat.start_time),
            device,
            proxy_address,
            library_version,
            bus: String::new(),
        }
    }

    /// The same with a GPU at this PCI address.
    #[must_use]
    pub fn at(mut self, bus: Option<String>) -> Self {
        self.bus = bus.unwrap_or_default();
        self
    }

    /// The same for ranks of one process that use one device.
    pub(crate) fn place(&self) -> ProcessDevice {
        (self.host_hash, self.pid, self.process_start_time, self.device)
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [
            self.rank,
            self.pid,
            self.device.cast_unsigned(),
            self.library_version,
        ] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.host_hash.to_le_bytes());
        bytes.extend(self.process_start_time.to_le_bytes());
        for text in [&self.host, &self.proxy_address, &self.bus] {
            // Neither comes near the limit: an environment variable and an address of our own making.
            let length = text.floor_char_boundary(usize::from(u16::MAX));
            bytes.extend((length as u16).to_le_bytes());
            bytes.extend(&text.as_bytes()[..length]);
        }
        bytes
    }

    /// Feeds bytes to the parser, for [`crate::fuzzing`].
    pub(crate) fn fuzz(bytes: &[u8]) {
        if let Some(info) = Self::decode(bytes) {
            assert_eq!(Self::decode(&info.encode()), Some(info));
        }
    }

    /// `None` for what [`RankInfo::encode`] did not write.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (fixed, mut rest) = bytes.split_at_checked(FIXED_BYTES)?;
        let word = |at: usize| fixed[at..at + 4].try_into().map(u32::from_le_bytes).ok();
        let long = |at: usize| fixed[at..at + 8].try_into().map(u64::from_le_bytes).ok();
        let mut text = || {
            let (length, after) = rest.split_first_chunk::<2>()?;
            let (text, after) = after.split_at_checked(u16::from_le_bytes(*length).into())?;
            rest = after;
            String::from_utf8(text.to_vec()).ok()
        };
        let (host, proxy_address, bus) = (printable(text()?.as_bytes()), text()?, text()?);
        rest.is_empty().then_some(Self {
            rank: word(0)?,
            pid: word(4)?,
            device: word(8)?.cast_signed(),
            library_version: word(12)?,
            host_hash: long(16)?,
            process_start_time: long(24)?,
            host,
            proxy_address,
            bus,
        })
    }
}

/// Every rank's place.
#[derive(Clone, Debug)]
pub struct Topology {
    rank: u32,
    /// By rank.
    infos: Vec<RankInfo>,
    /// Node of each rank.
    node_of: Vec<u32>,
    /// Ranks of each node, in rank order.
    nodes: Vec<Vec<u32>>,
}

impl Topology {
    /// Exchanges what the ranks know of themselves. Every rank calls it.
    ///
    /// # Errors
    /// As [`Bootstrap::all_gather`]; [`Error::Protocol`] when a rank says something unreadable, or is of another library
    /// version.
    pub fn exchange(bootstrap: &Bootstrap, mine: RankInfo) -> Result<Self> {
        let mut infos = Vec::new();
        for (rank, bytes) in (0u32..).zip(bootstrap.all_gather(&mine.encode())?) {
            let info = RankInfo::decode(&bytes)
                .filter(|info| info.rank == rank)
                .ok_or_else(|| {
                    Error::Protocol(format!("rank {rank} describes itself in unreadable bytes"))
                })?;
            if info.library_version != mine.library_version {
                return Err(Error::Protocol(format!(
                    "rank {rank} on {} uses library version {}, this rank {}",
                    info.host, info.library_version, mine.library_version
                )));
            }
            infos.push(info);
        }
        let rank = bootstrap.rank();
        infos[rank as usize] = mine;
        Ok(Self::new(rank, infos))
    }

    fn new(rank: u32, infos: Vec<RankInfo>) -> Self {
        let mut numbers = HashMap::new();
        let mut nodes: Vec<Vec<u32>> = Vec::new();
        let mut node_of = Vec::new();
        for (rank, info) in (0u32..).zip(&infos) {
            let node = *numbers.entry(info.host_hash).or_insert(nodes.len());
            if node == nodes.len() {
                nodes.push(Vec::new());
            }
            nodes[node].push(rank);
            node_of.push(node as u32);
        }
        Self {
            rank,
            infos,
            node_of,
            nodes,
        }
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.infos.len() as u32
    }

    /// What a rank said.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn info(&self, rank: u32) -> &RankInfo {
        &self.infos[rank as usize]
    }

    /// Number of nodes.
    #[must_use]
    pub fn nodes(&self) -> u32 {
        self.nodes.len() as u32
    }

    /// The node of a rank; nodes are numbered by their first rank.
    ///
    /// # Panics
    /// When there is no such rank.
    #[must_use]
    pub fn node_of(&self, rank: u32) -> u32 {
        self.node_of[rank as usize]
    }

    /// This rank's number among the ranks of its node.
    #[must_use]
    pub fn local_rank(&self) -> u32 {
        self.local_ranks().partition_point(|rank| *rank < self.rank) as u32
    }

    /// The ranks of this rank's node, in rank order.
    #[must_use]
    pub fn local_ranks(&self) -> &[u32] {
        &self.nodes[self.node_of(self.rank) as usize]
    }

    /// Ranks in the order of a channel's ring, beginning with this one: data goes from `[0]` to `[1]`.
    ///
    /// All ranks have the same ring. The ranks of a node are neighbours, so each node has one way in, to its first rank, and one
    /// way out, from its last one. Of several nodes with several ranks odd channels run the other way round, so that the ports of
    /// both these ranks carry data in both directions. Others would gain nothing by that, and with one order what a ring
    /// reduces does not depend on the channel.
    #[must_use]
    pub fn ring(&self, channel: u8) -> Arc<[u32]> {
        let mut order = self.nodes.concat();
        let ways = if (2..order.len()).contains(&self.nodes.len()) {
            2
        } else {
            1
        };
        if channel % ways == 1 {
            order.reverse();
        }
        let start = order.iter().position(|rank| *rank == self.rank).unwrap_or(0);
        order.rotate_left(start);
        order.into()
    }

    /// Logs the rings of a communicator: rank 0 the whole of each, every rank its own neighbours.
    pub(crate) fn log_rings(&self, channels: u32) {
        if !tracing::enabled!(target: GRAPH, tracing::Level::INFO) {
            return;
        }
        for channel in 0..channels {
            let ring = self.ring(channel as u8);
            if self.rank == 0 {
                let order: Vec<_> = ring.iter().map(u32::to_string).collect();
                tracing::info!(target: GRAPH, "Channel {channel:02}/{channels:02} : {}", order.join(" "));
            }
            if let [own, next, ..] = *ring
                && let Some(prev) = ring.last()
            {
                tracing::info!(target: GRAPH, "Ring {channel:02} : {prev} -> {own} -> {next}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn info(rank: u32, host: u64) -> RankInfo {
        RankInfo {
            rank,
            host_hash: host,
            host: format!("h{host}"),
            ..RankInfo::local(rank, 0, "a".into(), 1)
        }
    }

    fn topology(rank: u32, hosts: &[u64]) -> Topology {
        Topology::new(
            rank,
            (0..).zip(hosts).map(|(rank, host)| info(rank, *host)).collect(),
        )
    }

    #[test]
    fn nodes_are_numbered_by_their_first_rank() {
        let topology = topology(3, &[70, 5, 70, 5, 1]);
        assert_eq!(
            (0..5).map(|rank| topology.node_of(rank)).collect::<Vec<_>>(),
            [0, 1, 0, 1, 2]
        );
        assert_eq!(
            (topology.nodes(), topology.local_rank(), topology.local_ranks()),
            (3, 1, &[1, 3][..])
        );
        assert_eq!(*topology.ring(0), [3, 4, 0, 2, 1]);
        assert_eq!(*topology.ring(1), [3, 1, 2, 0, 4]);
    }

    #[test]
    fn rings_of_one_node_or_of_one_rank_a_node_have_one_order() {
        for hosts in [[7, 7, 7], [7, 5, 1]] {
            let topology = topology(1, &hosts);
            assert_eq!(*topology.ring(0), [1, 2, 0]);
            assert_eq!(*topology.ring(1), [1, 2, 0]);
        }
    }

    #[test]
    fn a_hosts_name_controls_no_terminal() {
        let mut said = info(1, 7);
        said.host = "\u{1b}[2J\n".into();
        let heard = RankInfo::decode(&said.encode()).unwrap();
        assert_eq!(heard.host, "\\u{1b}[2J\\n");
        assert_eq!(RankInfo::decode(&heard.encode()), Some(heard));
    }

    #[test]
    fn this_process_has_a_start_time() {
        let mine = RankInfo::local(0, 0, String::new(), 1);
        assert!(mine.process_start_time > 0);
        assert_eq!(mine, RankInfo::local(0, 0, String::new(), 1));
    }

    proptest! {
        #[test]
        fn every_rank_sees_the_same_ring(hosts in proptest::collection::vec(0u64..4, 1..12), channel: u8) {
            let ranks = hosts.len() as u32;
            let first = topology(0, &hosts).ring(channel);
            let mut crossings = 0;
            for rank in 0..ranks {
                let topology = topology(rank, &hosts);
                let mut ring = topology.ring(channel).to_vec();
                prop_assert_eq!(ring[0], rank);
                let next = ring[1 % ring.len()];
                crossings += u32::from(topology.node_of(rank) != topology.node_of(next));
                let zero = ring.iter().position(|r| *r == 0).unwrap();
                ring.rotate_left(zero);
                prop_assert_eq!(&ring[..], &first[..]);
            }
            let nodes = topology(0, &hosts).nodes();
            prop_assert_eq!(crossings, if nodes == 1 { 0 } else { nodes });
        }

        #[test]
        fn an_info_survives_and_rubbish_is_refused(rank: u32, device: i32, host in "\\PC{0,40}", bytes in proptest::collection::vec(any::<u8>(), 0..80), cut: prop::sample::Index) {
            let info = RankInfo { host, ..RankInfo::local(rank, device, "proxy".into(), 7) };
            let encoded = info.encode();
            prop_assert_eq!(RankInfo::decode(&encoded), Some(info));
            prop_assert_eq!(RankInfo::decode(&encoded[..cut.index(encoded.len())]), None);
            let _ = RankInfo::decode(&bytes);
        }
    }
}
