//! FIFOs in GPU memory, for ranks of one node whose GPUs have peer access to each other.
//!
//! Each rank has one segment, which it allocates with its communicator. A later allocation might wait for running kernels, and these may wait
//! for the very connection that needs the memory. Each rank computes the address of every FIFO from the two ranks and the channel, so no rank
//! has to ask another one.
//!
//! A segment holds first the producer halves of the FIFOs that the rank sends over, then the consumer halves of those that it receives over
//! ([`ringsight_kernels::fifo::Halves`]). Each direction has one FIFO per channel for the rings, then one per peer of the node and part of a
//! message.

use std::sync::Arc;

use ringsight_kernels::{
    Fifo,
    fifo::{Halves, PRODUCER_BYTES},
};

/// The most memory of a rank for messages. A message with more parts than fit shares FIFOs between parts.
const MESSAGE_BYTES: usize = 96 << 20;
/// The largest segment. If `NCCL_BUFFSIZE` needs a larger one, FIFOs stay in host memory.
const MOST_BYTES: usize = 2 << 30;
/// Alignment of every FIFO.
const PAGE: usize = 4096;

/// The layout of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    channels: usize,
    /// Other ranks of the node.
    peers: usize,
    /// FIFOs per peer for messages: one for each part of a message.
    parts: usize,
    slot_bytes: usize,
}

impl Layout {
    /// The layout for `ranks` ranks of a node; `None` if there is one rank, or the segment would be too large.
    #[must_use]
    pub fn new(channels: usize, ranks: usize, slot_bytes: usize) -> Option<Self> {
        let peers = ranks.checked_sub(1).filter(|peers| *peers > 0)?;
        let fits = MESSAGE_BYTES / fifo_bytes(slot_bytes) / peers;
        let layout = Self {
            channels,
            peers,
            parts: fits.clamp(1, channels),
            slot_bytes,
        };
        (layout.bytes() <= MOST_BYTES).then_some(layout)
    }

    /// Bytes of a segment.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.consumer(self.fifos())
    }

    /// FIFOs of a rank in each direction.
    #[must_use]
    pub fn fifos(&self) -> usize {
        self.channels + self.peers * self.parts
    }

    /// Parts of a message that there is room for.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Offset of a FIFO's producer half.
    fn producer(index: usize) -> usize {
        index * PRODUCER_BYTES
    }

    /// Offset of a FIFO's consumer half.
    fn consumer(&self, index: usize) -> usize {
        (self.fifos() * PRODUCER_BYTES).next_multiple_of(PAGE) + index * fifo_bytes(self.slot_bytes)
    }

    /// Index of the FIFO with a peer, which is counted among the other ranks of the node. `None` if this use of it has no FIFO here.
    fn index(&self, peer: usize, of: Use) -> Option<usize> {
        match of {
            Use::Ring(channel) => (channel < self.channels).then_some(channel),
            Use::Message(part) => (part < self.parts).then(|| self.channels + peer * self.parts + part),
        }
    }
}

fn fifo_bytes(slot_bytes: usize) -> usize {
    Fifo::memory_bytes(slot_bytes).next_multiple_of(PAGE)
}

/// What a FIFO is for.
#[derive(Clone, Copy)]
enum Use {
    /// The ring of a channel.
    Ring(usize),
    /// A part of each message.
    Message(usize),
}

/// The segments of a node's ranks, as one rank reaches them.
pub struct Arena {
    layout: Layout,
    /// Ranks of the communicator.
    ranks: u32,
    /// This rank.
    rank: u32,
    /// Ranks of the node, in order.
    members: Vec<u32>,
    /// By member: the address of its segment for this rank's kernels; `None` unless both ranks reach each other's segment.
    bases: Vec<Option<u64>>,
    /// Keeps the segments mapped.
    memory: Arc<dyn Send + Sync>,
}

impl Arena {
    /// The arena of `rank`, which is one of `members`, of a communicator of `ranks` ranks.
    #[must_use]
    pub fn new(
        layout: Layout,
        (rank, ranks): (u32, u32),
        members: Vec<u32>,
        bases: Vec<Option<u64>>,
        memory: Arc<dyn Send + Sync>,
    ) -> Self {
        Self {
            layout,
            ranks,
            rank,
            members,
            bases,
            memory,
        }
    }

    /// Channels whose rings are here.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.layout.channels
    }

    /// Parts of a message that there is room for.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.layout.parts()
    }

    /// The FIFO between this rank and `peer` on a channel, with this rank's addresses. `None` if it is in host memory: both ranks come to the
    /// same answer.
    #[must_use]
    pub fn fifo(&self, peer: u32, channel: u8, p2p: bool, is_send: bool) -> Option<Arc<Fifo>> {
        let channels = self.layout.channels;
        let (source, destination) = if is_send {
            (self.rank, peer)
        } else {
            (peer, self.rank)
        };
        let channel = usize::from(channel);
        let of = if p2p {
            // The part of a message that `p2p_channel` gives this channel.
            let delta = (destination + self.ranks - source) % self.ranks;
            Use::Message((channel + channels - delta as usize % channels) % channels)
        } else {
            Use::Ring(channel)
        };
        let place = |rank: u32| self.members.iter().position(|member| *member == rank);
        let (mine, theirs) = (place(self.rank)?, place(peer)?);
        let (own, other) = (self.bases[mine]?, self.bases[theirs]?);
        // A rank does not count itself among its peers.
        let as_mine = self.layout.index(theirs - usize::from(theirs > mine), of)?;
        let as_theirs = self.layout.index(mine - usize::from(mine > theirs), of)?;
        let (consumer, producer) = if is_send {
            (
                other + self.layout.consumer(as_theirs) as u64,
                own + Layout::producer(as_mine) as u64,
            )
        } else {
            (
                own + self.layout.consumer(as_mine) as u64,
                other + Layout::producer(as_theirs) as u64,
            )
        };
        let halves = Halves { consumer, producer };
        Some(Arc::new(Fifo::on_device(
            halves,
            self.layout.slot_bytes,
            self.memory.clone(),
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::plan::channels::p2p_channel;

    const BASE: u64 = 1 << 40;

    /// Rank r's segment begins at `r * BASE` for everybody.
    fn arena(layout: Layout, rank: u32, ranks: u32, members: &[u32]) -> Arena {
        let bases = members.iter().map(|rank| Some(u64::from(*rank) * BASE)).collect();
        Arena::new(layout, (rank, ranks), members.to_vec(), bases, Arc::new(()))
    }

    #[test]
    fn both_ends_find_one_fifo_and_no_two_share_memory() {
        for (ranks, members, channels, slot_bytes) in [
            (2, vec![0, 1], 32, 128 << 10),
            (5, vec![0, 2, 3, 4], 7, 320),
            (8, (0..8).collect(), 32, 128 << 10),
            (6, vec![1, 4], 3, 1 << 20),
        ] {
            let layout = Layout::new(channels, members.len(), slot_bytes).unwrap();
            let mut taken: HashMap<(u64, u64), (u32, u32, u8, bool)> = HashMap::new();
            let mut ends = Vec::new();
            for from in &members {
                for to in members.iter().filter(|to| *to != from) {
                    let sender = arena(layout, *from, ranks, &members);
                    let receiver = arena(layout, *to, ranks, &members);
                    for channel in 0..channels as u8 {
                        let halves = |arena: &Arena, peer, p2p, is_send| {
                            arena.fifo(peer, channel, p2p, is_send).map(|fifo| fifo.halves())
                        };
                        let message = halves(&sender, *to, true, true);
                        assert_eq!(message, halves(&receiver, *from, true, false));
                        // A ring has one edge out of a rank: here to the next member.
                        let at = members.iter().position(|member| member == from).unwrap();
                        let next = members[(at + 1) % members.len()] == *to;
                        let ring = next.then(|| halves(&sender, *to, false, true).unwrap());
                        assert!(ring.is_none_or(|ring| halves(&receiver, *from, false, false) == Some(ring)));
                        for (p2p, fifo) in [(true, message), (false, ring)] {
                            let Some(fifo) = fifo else { continue };
                            assert_eq!(fifo.consumer / BASE, u64::from(*to), "with the consumer");
                            assert_eq!(fifo.producer / BASE, u64::from(*from), "with the producer");
                            let key = (fifo.consumer, fifo.producer);
                            assert_eq!(taken.insert(key, (*from, *to, channel, p2p)), None);
                            ends.push((
                                fifo.consumer,
                                fifo.consumer + Fifo::memory_bytes(slot_bytes) as u64,
                            ));
                            ends.push((fifo.producer, fifo.producer + PRODUCER_BYTES as u64));
                        }
                    }
                    // All parts of a message are here.
                    for part in 0..layout.parts {
                        let channel = p2p_channel(*from, *to, ranks, part, channels);
                        assert!(sender.fifo(*to, channel, true, true).is_some());
                    }
                }
            }
            ends.sort_unstable();
            assert!(ends.windows(2).all(|two| two[0].1 <= two[1].0), "{ranks} ranks");
            assert!(
                ends.iter()
                    .all(|end| end.0 % 256 == 0 && end.1 % BASE <= layout.bytes() as u64)
            );
        }
    }

    #[test]
    fn memory_is_bounded() {
        let slots = 128 << 10;
        assert_eq!(Layout::new(32, 2, slots).unwrap().parts, 32);
        let eight = Layout::new(32, 8, slots).unwrap();
        assert!((10..32).contains(&eight.parts), "{eight:?}");
        assert!(eight.bytes() < 140 << 20, "{}", eight.bytes());
        assert_eq!(Layout::new(32, 200, slots).unwrap().parts, 1);
        assert_eq!(Layout::new(32, 2, 64 << 20), None);
        assert_eq!(Layout::new(32, 1, slots), None);
    }

    #[test]
    fn who_is_not_reached_has_no_fifo() {
        let layout = Layout::new(2, 3, 4096).unwrap();
        let arena = Arena::new(
            layout,
            (0, 4),
            vec![0, 1, 3],
            vec![Some(0), None, Some(BASE)],
            Arc::new(()),
        );
        assert!(arena.fifo(1, 0, false, true).is_none());
        assert!(arena.fifo(3, 0, false, true).is_some());
        assert!(arena.fifo(2, 0, false, true).is_none(), "of another node");
        assert!(arena.fifo(3, 2, false, true).is_none(), "no such channel");
    }
}
