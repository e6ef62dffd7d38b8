//! Reductions whose bytes copy engines move: what copies where, and what the kernels of `cuda/pieces.cuh` are given.
//!
//! Each rank has a part of the result, in pieces. Contributions to a piece are copied into memory beside it (*pushed*), a kernel reduces them, and of an all_reduce
//! the result is copied into the others' receive buffers (*gathered*). Copies go one after another in a stream of their own, kernels in another, and while a
//! piece is reduced the copies of another one fill the link. *Meet* is a kernel of one block that waits for all ranks:
//!
//! | copies | push 0 | push 1 | gather 0 | meet, push 2 | gather 1 | meet, push 3 | … | gather n − 2 | gather n − 1 |
//! |---|---|---|---|---|---|---|---|---|---|
//! | kernels | | meet, reduce 0 | meet, reduce 1 | | meet, reduce 2 | | … | | |
//!
//! All meetings of a rank come one after another, in the same order on all ranks: who does one before another finds no rank that does them the other way round.
//!
//! Nothing is copied while the last piece of a reduce_scatter is reduced: it has a quarter of the others' length.

use std::ffi::CStr;

use ringsight_records::Function;

use super::{
    exchange::parts,
    gates::{self, Copies, Copy},
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

/// The most blocks of a kernel, each of which takes a multiprocessor: it is done long before the copies beside it are. They wait for nobody.
const BLOCKS: u32 = 64;

/// Of what begins a piece.
const LINE: u64 = 256;

/// The most memory that a rank has for contributions.
const MOST_SCRATCH: u64 = 768 << 20;

/// Bytes of a piece among so many ranks if so many are wanted.
#[must_use]
pub const fn piece_bytes(ranks: usize, wanted: u64) -> u64 {
    let slots = scratch_bytes(ranks, 1);
    let room = MOST_SCRATCH / if slots == 0 { 1 } else { slots };
    let lines = if wanted < room { wanted } else { room } / LINE;
    if lines == 0 { LINE } else { lines * LINE }
}

/// What is queued in the row of copies, at most. Of some more than a thousand entries that wait in a stream the driver takes no more, and lets the call
/// wait: also for a rank that the same thread has not called for yet.
const MOST_ENTRIES: u64 = 500;
/// Meetings of a piece, each by a word of its own: [`Pieces::arrival`], [`Pieces::room`].
const MEETINGS: u64 = 2;
/// Words of all of them, behind that of the end.
const MOST_MEETINGS: u64 = STRAIGHT_BLOCKS as u64 - 1;

/// The most pieces of a part: two copies to each other rank are queued for each, a meeting, a wait and a record; perhaps one of this rank's own.
const fn most_pieces(ranks: usize) -> u64 {
    let by_entries = MOST_ENTRIES / (2 * ranks as u64 + 2);
    let by_meetings = MOST_MEETINGS / MEETINGS;
    if by_entries < by_meetings {
        by_entries
    } else {
        by_meetings
    }
}

/// Bytes of scratch of a rank: two pieces of each other one's contributions.
#[must_use]
pub const fn scratch_bytes(ranks: usize, piece_bytes: u64) -> u64 {
    (2 * (ranks as u64 - 1)).saturating_mul(piece_bytes)
}

/// The most bytes of all ranks' parts together that are reduced so, if so many are wanted of a piece.
#[must_use]
pub const fn most_bytes(ranks: usize, wanted: u64) -> u64 {
    // The last piece of a reduce_scatter is a shorter one.
    let pieces = most_pieces(ranks).saturating_sub(1);
    (pieces * ranks as u64).saturating_mul(piece_bytes(ranks, wanted))
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
    /// Whether all ranks get all of the result.
    gathers: bool,
    /// Of the kernel that reduces.
    blocks: u32,
    /// Of the kernel that reduces: among [`KERNELS`], and in a launch among [`PeerLaunch::kernels`].
    pub(super) kernel: usize,
    /// The same of those that meet, among [`gates::KERNELS`].
    pub(super) gate: usize,
}

impl Pieces {
    pub(super) fn new(work: &Work, call: PeerCall, window: &Window, offset: u64) -> Option<Self> {
        let scratch = window.scratch.as_ref()?;
        let kernel = kernel_of_sum(work.reduce_op, work.data_type, work.ranks)?;
        let parts = parts(work, call);
        let gathers = work.function == Function::AllReduce;
        // Fourths of a piece that the last one lacks.
        let lacks = if gathers { 0 } else { 3 };
        let slot_bytes = scratch.piece_bytes;
        let count = (parts.piece.div_ceil(slot_bytes / 4) + lacks).div_ceil(4);
        // Two, so that one is on its way while the other is reduced.
        let count = count.max(2);
        let fourth = parts.piece.div_ceil(4 * count - lacks);
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
            places: of_all(&window.places, offset),
            recv: work.recv as u64,
            bytes: fourth.next_multiple_of(LINE / 4) * 4,
            count,
            gathers,
            blocks: window.peers.most_blocks.clamp(1, BLOCKS),
            kernel,
            gate: 2,
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

    /// The kernel goes through buffers by 16 bytes. What is in the window begins at such an address, on all ranks: of an all_reduce the receive buffer, of a
    /// reduce_scatter the send buffer. Of the other one no other rank knows. Whether a contribution is copied to where the result is to be, and reduced there:
    fn is_own_beside(&self) -> bool {
        self.gathers && self.parts.result_bytes > 0 && !self.parts.own.is_multiple_of(16)
    }

    /// Or whether a result is where another rank's contribution was, and is copied from there.
    fn is_result_beside(&self) -> bool {
        !self.gathers && self.parts.result_bytes > 0 && !self.parts.result.is_multiple_of(16)
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

    /// The copies of this rank's piece of the result to all others, if they get it.
    #[must_use]
    pub fn gathers(&self, number: usize) -> Copies {
        let mut copies = Copies::default();
        let (start, bytes) = self.piece(number, self.parts.result_bytes);
        let from = self.parts.result + start;
        for rank in self.others().filter(|_| self.gathers) {
            copies.push(Copy {
                to: self.places[rank] + (from - self.recv),
                from,
                bytes,
            });
        }
        copies
    }

    /// The copy of a piece of the result to where it is to be, behind the kernel.
    #[must_use]
    pub fn settles(&self, number: usize) -> Option<Copy> {
        let (start, bytes) = self.piece(number, self.parts.result_bytes);
        self.is_result_beside().then(|| Copy {
            to: self.parts.result + start,
            from: self.result(number),
            bytes,
        })
    }

    /// Where the kernel writes a piece of the result.
    fn result(&self, number: usize) -> u64 {
        if self.is_result_beside() {
            // Of any rank.
            let next = (self.me() + 1) % self.ranks();
            self.slot(self.me(), next, number)
        } else {
            self.parts.result + self.piece(number, self.parts.result_bytes).0
        }
    }

    /// The launch of the kernel behind this rank's pushes of a piece and before it is reduced: ends when the others' have come. Like [`Pieces::launch`] but for
    /// where it reports to.
    #[must_use]
    pub fn arrival(&self, number: usize) -> PeerLaunch {
        self.meeting(MEETINGS * number as u64)
    }

    /// The same before this rank's pushes of a piece, and behind the kernel of the one two before it: ends when the others have room for these.
    #[must_use]
    pub fn room(&self, number: usize) -> PeerLaunch {
        self.meeting(MEETINGS * number as u64 + 1)
    }

    fn meeting(&self, number: u64) -> PeerLaunch {
        gates::gate(self.parts.call, self.gate, 1 + number as u32)
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
            result: self.result(number),
            result_bytes: bytes,
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
