//! Reductions whose bytes copy engines move: what copies where, and what the kernels of `cuda/pieces.cuh` are given.
//!
//! Each rank has a part of the result, in pieces. Contributions to a piece are copied into memory beside it (*pushed*), a kernel reduces them, and the
//! result is copied into the others' receive buffers (*gathered*). Copies go one after another in a stream of their own, kernels in another, and while a piece is
//! reduced the copies of another one fill the link:
//!
//! | copies | push 0 | push 1 | gather 0 | push 2 | gather 1 | push 3 | … | gather n − 2 | gather n − 1 |
//! |---|---|---|---|---|---|---|---|---|---|
//! | kernels | | reduce 0 | reduce 1 | | reduce 2 | | … | | |

use std::ffi::CStr;

use super::{
    exchange::parts,
    gates::{Copies, Copy},
    layout::{Exchange, PeerCall},
    peer_launch::{PeerArguments, PeerLaunch, kernel_of_sum},
    peers::{MAX_PEERS, STRAIGHT_BLOCKS},
};
use crate::launch::{Window, Work};

/// Names of the kernels, by their numbers: `RINGSIGHT_PIECES` in `cuda/pieces.cuh`.
pub const KERNELS: [&CStr; 9] = [
    c"ringsight_piece_sum_f32_2",
    c"ringsight_piece_sum_f32_4",
    c"ringsight_piece_sum_f32_8",
    c"ringsight_piece_sum_f16_2",
    c"ringsight_piece_sum_f16_4",
    c"ringsight_piece_sum_f16_8",
    c"ringsight_piece_sum_bf16_2",
    c"ringsight_piece_sum_bf16_4",
    c"ringsight_piece_sum_bf16_8",
];

/// Threads of a block, all of which reduce.
pub const PIECE_THREADS: u32 = 512;

/// The most blocks of a kernel, which is done long before the copies beside it are: 32 have 512 KiB and more of loads under way. A block takes a
/// multiprocessor of its own, also while it waits: kernels of all ranks of a GPU have room side by side.
const BLOCKS: u32 = 32;

/// Of what begins a piece.
const LINE: u64 = 256;

/// Bytes of a piece if so many are wanted.
#[must_use]
pub const fn piece_bytes(wanted: u64) -> u64 {
    let lines = wanted / LINE;
    if lines == 0 { LINE } else { lines * LINE }
}

/// What is queued in the row of copies, at most. Of some more than a thousand entries that wait in a stream the driver takes no more, and lets the call
/// wait: also for a rank that the same thread has not called for yet.
const MOST_ENTRIES: u64 = 500;

/// The most pieces of a part: two copies to each other rank are queued for each, and a wait and a record.
const fn most_pieces(ranks: usize) -> u64 {
    MOST_ENTRIES / (2 * ranks as u64)
}

// Each has a word of its own, behind that of the gates.
const _: () = assert!(most_pieces(2) < STRAIGHT_BLOCKS as u64);

/// Bytes of scratch of a rank: two pieces of each other one's contributions.
#[must_use]
pub const fn scratch_bytes(ranks: usize, piece_bytes: u64) -> u64 {
    (2 * (ranks as u64 - 1)).saturating_mul(piece_bytes)
}

/// The most bytes of a buffer that is reduced so among so many ranks.
#[must_use]
pub const fn most_bytes(ranks: usize, piece_bytes: u64) -> u64 {
    (most_pieces(ranks) * ranks as u64).saturating_mul(piece_bytes)
}

/// A reduction by copy engines.
#[derive(Clone, Debug)]
pub struct Pieces {
    /// Of all parts: what goes where.
    parts: Exchange,
    /// By rank: where its scratch is for this rank.
    scratch: [u64; MAX_PEERS],
    /// Of what there is room for there.
    slot_bytes: u64,
    /// By rank: where its receive buffer begins for this rank.
    places: [u64; MAX_PEERS],
    /// Where this rank's own does.
    recv: u64,
    /// Bytes of each piece but the last.
    bytes: u64,
    /// Their number.
    count: u64,
    /// Of the kernel: among [`KERNELS`], and in a launch among [`PeerLaunch::kernels`].
    pub(super) kernel: usize,
    /// Of the kernel.
    blocks: u32,
}

impl Pieces {
    pub(super) fn new(work: &Work, call: PeerCall, window: &Window, offset: u64) -> Option<Self> {
        let scratch = window.scratch.as_ref()?;
        let (places, most_blocks) = (&window.places, window.peers.most_blocks);
        let kernel = kernel_of_sum(work.reduce_op, work.data_type, work.ranks)?;
        let parts = parts(work, call);
        // Two, so that one is on its way while the other is reduced.
        let slot_bytes = scratch.piece_bytes;
        let count = parts.piece.div_ceil(slot_bytes).max(2);
        let of_all = |each: &[u64], more: u64| {
            let mut all = [0; MAX_PEERS];
            for (one, base) in all.iter_mut().zip(each) {
                *one = base + more;
            }
            all
        };
        Some(Self {
            scratch: of_all(&scratch.bases, 0),
            slot_bytes,
            places: of_all(places, offset),
            recv: work.recv as u64,
            bytes: parts.piece.div_ceil(count).next_multiple_of(LINE),
            count,
            kernel,
            blocks: (most_blocks / 2).clamp(1, BLOCKS),
            parts,
        })
    }

    /// How many there are: the same on all ranks.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count as usize
    }

    fn ranks(&self) -> usize {
        self.parts.call.ranks as usize
    }

    fn me(&self) -> usize {
        self.parts.call.rank as usize
    }

    /// Where a piece begins in a part of `all` bytes, and its length, which may be 0.
    fn piece(&self, number: usize, all: u64) -> (u64, u64) {
        let start = (self.bytes * number as u64).min(all);
        (start, self.bytes.min(all - start))
    }

    /// Where what `source` has for a piece of `rank`'s part comes, of `rank`'s scratch.
    fn slot(&self, rank: usize, source: usize, number: usize) -> u64 {
        let other = if source < rank { source } else { source - 1 };
        let slot = 2 * other + number % 2;
        self.scratch[rank] + self.slot_bytes * slot as u64
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let (me, ranks) = (self.me(), self.ranks());
        (1..ranks).map(move |hop| (me + hop) % ranks)
    }

    /// The kernel goes through buffers by 16 bytes. Receive buffers begin at such an address: that is the same on all ranks. Of the send buffer no other rank
    /// knows.
    fn is_own_beside(&self) -> bool {
        self.parts.result_bytes > 0 && !self.parts.own.is_multiple_of(16)
    }

    /// The copies of what this rank has for the others' pieces of this number; and if its own contribution cannot be reduced where it is, of that to where its result
    /// is to be.
    #[must_use]
    pub fn pushes(&self, number: usize) -> Copies {
        let mut copies = Copies::default();
        for rank in self.others() {
            let (start, bytes) = self.piece(number, self.parts.sends[rank]);
            copies.push(Copy {
                to: self.slot(rank, self.me(), number),
                from: self.parts.from[rank] + start,
                bytes,
            });
        }
        if self.is_own_beside() {
            let (start, bytes) = self.piece(number, self.parts.result_bytes);
            copies.push(Copy {
                to: self.parts.result + start,
                from: self.parts.own + start,
                bytes,
            });
        }
        copies
    }

    /// The copies of this rank's piece of the result to all others.
    #[must_use]
    pub fn gathers(&self, number: usize) -> Copies {
        let mut copies = Copies::default();
        let (start, bytes) = self.piece(number, self.parts.result_bytes);
        let from = self.parts.result + start;
        for rank in self.others() {
            copies.push(Copy {
                to: self.places[rank] + (from - self.recv),
                from,
                bytes,
            });
        }
        copies
    }

    /// The launch of the kernel that reduces a piece, but for where it reports to.
    #[must_use]
    pub fn launch(&self, number: usize) -> PeerLaunch {
        let (start, bytes) = self.piece(number, self.parts.result_bytes);
        let mut arguments = Exchange {
            from: [0; MAX_PEERS],
            own: if self.is_own_beside() {
                self.parts.result
            } else {
                self.parts.own
            } + start,
            result: self.parts.result + start,
            result_bytes: bytes,
            chunk: number as u32,
            passes: 0,
            ..self.parts
        };
        for rank in self.others() {
            arguments.from[rank] = self.slot(self.me(), rank, number);
        }
        PeerLaunch {
            arguments: PeerArguments::Exchange(arguments),
            kernel: self.kernel,
            blocks: self.blocks,
            threads: PIECE_THREADS,
            between: None,
        }
    }
}

#[cfg(test)]
mod tests;
