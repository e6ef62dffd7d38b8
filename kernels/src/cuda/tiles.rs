//! Reductions by copy engines, cut into tiles: what is copied where, and the arguments of the kernels of `cuda/tiles.cuh`.
//!
//! Each rank owns a part of the result and goes through it tile by tile. Copy engines *push* the contributions to a tile into scratch memory
//! of its owner, a kernel *reduces* them, and in an AllReduce copy engines *gather* the result into the other ranks' receive buffers.
//! Copies run in a stream of their own and kernels in the caller's stream, so that the copies of one tile fill the link while another tile
//! is reduced. A *barrier* is a kernel of one block that waits for all ranks:
//!
//! | copies | push 0 | push 1 | gather 0 | barrier, push 2 | gather 1 | barrier, push 3 | … | gather n − 2 | gather n − 1 |
//! |---|---|---|---|---|---|---|---|---|---|
//! | kernels | | barrier, reduce 0 | barrier, reduce 1 | | barrier, reduce 2 | | … | | |
//!
//! Invariants:
//! - A rank runs its barriers one after another, in the same order as all other ranks. Otherwise two ranks could wait for each other.
//! - Contributions to tile `n` and to tile `n + 2` use one slot. The barrier before push `n + 2` waits until all ranks have reduced tile `n`.
//!
//! No copy runs beside the last tile of a ReduceScatter, so that tile has a quarter of the others' length.

use std::ffi::CStr;

use ringsight_records::Function;

use super::{
    collective::parts,
    copy_engine::{self, Copies, Transfer},
    layout::{Collective, PeerCall},
    peer_launch::{PeerArguments, PeerLaunch, sum_kernel},
    peer_memory::{MAX_PEERS, MAX_ZERO_COPY_BLOCKS},
};
use crate::launch::{Window, Work};

/// Names of the kernels by number: `RINGSIGHT_TILES` in `cuda/tiles.cuh`.
pub const KERNELS: [&CStr; 9] = [
    c"ringsight_tile_sum_f32_2",
    c"ringsight_tile_sum_f32_4",
    c"ringsight_tile_sum_f32_8",
    c"ringsight_tile_sum_f16_2",
    c"ringsight_tile_sum_f16_4",
    c"ringsight_tile_sum_f16_8",
    c"ringsight_tile_sum_bf16_2",
    c"ringsight_tile_sum_bf16_4",
    c"ringsight_tile_sum_bf16_8",
];

/// Threads of a block. All of them reduce.
pub const TILE_THREADS: u32 = 512;

/// The most blocks of a reducing kernel, each of which takes a multiprocessor. The kernel is done long before the copies beside it are, and
/// its blocks wait for nobody.
const BLOCKS: u32 = 64;

/// Alignment of a tile, in bytes.
const ALIGNMENT: u64 = 256;

/// The most scratch memory of a rank.
const MAX_SCRATCH: u64 = 768 << 20;

/// Bytes of a tile among `ranks` ranks if the caller wants `wanted` bytes.
#[must_use]
pub const fn tile_bytes(ranks: usize, wanted: u64) -> u64 {
    let slots = scratch_bytes(ranks, 1);
    let room = MAX_SCRATCH / if slots == 0 { 1 } else { slots };
    let units = if wanted < room { wanted } else { room } / ALIGNMENT;
    if units == 0 { ALIGNMENT } else { units * ALIGNMENT }
}

/// The most entries that an operation queues in the copy stream. With somewhat more than a thousand entries waiting in a stream, the driver
/// blocks the call, and so the calling thread, which may have another rank of the same job to call for.
const MAX_ENTRIES: u64 = 500;
/// Barriers of a tile ([`Tiles::arrival`], [`Tiles::room`]). Each has a word of its own.
const BARRIERS: u64 = 2;
/// Words for barriers, behind the word of the exit kernel.
const MAX_BARRIERS: u64 = MAX_ZERO_COPY_BLOCKS as u64 - 1;

/// The most tiles of a part. A tile queues two copies to each other rank, a barrier, a wait, a record, and perhaps a copy of this rank's own.
const fn max_tiles(ranks: usize) -> u64 {
    let by_entries = MAX_ENTRIES / (2 * ranks as u64 + 2);
    let by_barriers = MAX_BARRIERS / BARRIERS;
    if by_entries < by_barriers {
        by_entries
    } else {
        by_barriers
    }
}

/// Bytes of scratch of a rank: two tiles of each other rank's contributions.
#[must_use]
pub const fn scratch_bytes(ranks: usize, tile_bytes: u64) -> u64 {
    (2 * (ranks as u64 - 1)).saturating_mul(tile_bytes)
}

/// The most bytes of all ranks' parts together that one operation reduces this way, if the caller wants tiles of `wanted` bytes.
#[must_use]
pub const fn max_bytes(ranks: usize, wanted: u64) -> u64 {
    // The last tile of a ReduceScatter is shorter than the others.
    let tiles = max_tiles(ranks).saturating_sub(1);
    (tiles * ranks as u64).saturating_mul(tile_bytes(ranks, wanted))
}

/// A reduction by copy engines.
#[derive(Clone, Debug)]
pub struct Tiles {
    /// Buffers and lengths of whole parts.
    parts: Collective,
    /// By rank: address of its scratch memory.
    scratch: [u64; MAX_PEERS],
    /// Bytes of a slot in scratch memory.
    slot_bytes: u64,
    /// By rank: address of its receive buffer.
    receive_buffers: [u64; MAX_PEERS],
    /// This rank's receive buffer at its own address.
    recv: u64,
    /// Bytes of every tile but the last.
    bytes: u64,
    /// Number of tiles.
    count: u64,
    /// All ranks get all of the result.
    gathers: bool,
    /// Blocks of the reducing kernel.
    blocks: u32,
    /// Number of the reducing kernel: first among [`KERNELS`], in a finished launch among [`super::PeerOperation::kernels`].
    pub(super) kernel: usize,
    /// Number of the barrier kernel: first among [`copy_engine::KERNELS`], in a finished launch among [`super::PeerOperation::kernels`].
    pub(super) barrier_kernel: usize,
}

impl Tiles {
    pub(super) fn new(work: &Work, call: PeerCall, window: &Window, offset: u64) -> Option<Self> {
        let scratch = window.scratch.as_ref()?;
        let kernel = sum_kernel(work.reduce_op, work.data_type, work.ranks)?;
        let parts = parts(work, call);
        let gathers = work.function == Function::AllReduce;
        // Quarters of a tile by which the last tile is shorter.
        let missing = if gathers { 0 } else { 3 };
        let slot_bytes = scratch.tile_bytes;
        let count = (parts.longest_part.div_ceil(slot_bytes / 4) + missing).div_ceil(4);
        // At least two: one is pushed while the other is reduced.
        let count = count.max(2);
        let quarter = parts.longest_part.div_ceil(4 * count - missing);
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
            receive_buffers: of_all(&window.addresses, offset),
            recv: work.recv as u64,
            bytes: quarter.next_multiple_of(ALIGNMENT / 4) * 4,
            count,
            gathers,
            blocks: window.peers.max_blocks.clamp(1, BLOCKS),
            kernel,
            barrier_kernel: copy_engine::BARRIER,
            parts,
        })
    }

    /// Number of tiles, equal on all ranks.
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

    /// Offset and length of a tile in a part of `all` bytes. The length may be 0.
    fn tile(&self, number: usize, all: u64) -> (u64, u64) {
        let start = (self.bytes * number as u64).min(all);
        (start, self.bytes.min(all - start))
    }

    /// Address in `rank`'s scratch memory of what `source` contributes to a tile of `rank`'s part.
    fn slot(&self, rank: usize, source: usize, number: usize) -> u64 {
        let other = if source < rank { source } else { source - 1 };
        let slot = 2 * other + number % 2;
        self.scratch[rank] + self.slot_bytes * slot as u64
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let (me, ranks) = (self.me(), self.ranks());
        (1..ranks).map(move |hop| (me + hop) % ranks)
    }

    // The kernel reads and writes 16 bytes at a time. The buffer in the window is aligned on all ranks: the receive buffer of an AllReduce,
    // the send buffer of a ReduceScatter. The caller's other buffer may be unaligned, which only this rank knows.

    /// AllReduce from an unaligned send buffer: this rank's contribution is copied to the result's place and reduced there.
    fn copies_own(&self) -> bool {
        self.gathers && self.parts.result_bytes > 0 && !self.parts.own.is_multiple_of(16)
    }

    /// ReduceScatter to an unaligned receive buffer: the kernel writes the result over another rank's contribution, from where it is copied.
    fn copies_result(&self) -> bool {
        !self.gathers && self.parts.result_bytes > 0 && !self.parts.result.is_multiple_of(16)
    }

    /// The copies of this rank's contributions to the other ranks' tiles of this number, and, if needed, of its own contribution to the
    /// result's place.
    #[must_use]
    pub fn pushes(&self, number: usize) -> Copies {
        let mut copies = Copies::default();
        for rank in self.others() {
            let (start, bytes) = self.tile(number, self.parts.sends[rank]);
            copies.push(Transfer {
                to: self.slot(rank, self.me(), number),
                from: self.parts.from[rank] + start,
                bytes,
            });
        }
        if self.copies_own() {
            let (start, bytes) = self.tile(number, self.parts.result_bytes);
            copies.push(Transfer {
                to: self.parts.result + start,
                from: self.parts.own + start,
                bytes,
            });
        }
        copies
    }

    /// The copies of this rank's tile of the result to all other ranks; none in a ReduceScatter.
    #[must_use]
    pub fn gathers(&self, number: usize) -> Copies {
        let mut copies = Copies::default();
        let (start, bytes) = self.tile(number, self.parts.result_bytes);
        let from = self.parts.result + start;
        for rank in self.others().filter(|_| self.gathers) {
            copies.push(Transfer {
                to: self.receive_buffers[rank] + (from - self.recv),
                from,
                bytes,
            });
        }
        copies
    }

    /// The copy of a tile of the result into an unaligned receive buffer, behind the reducing kernel.
    #[must_use]
    pub fn result_copy(&self, number: usize) -> Option<Transfer> {
        let (start, bytes) = self.tile(number, self.parts.result_bytes);
        self.copies_result().then(|| Transfer {
            to: self.parts.result + start,
            from: self.result(number),
            bytes,
        })
    }

    /// Where the kernel writes a tile of the result.
    fn result(&self, number: usize) -> u64 {
        if self.copies_result() {
            // Any rank's slot would do.
            let next = (self.me() + 1) % self.ranks();
            self.slot(self.me(), next, number)
        } else {
            self.parts.result + self.tile(number, self.parts.result_bytes).0
        }
    }

    /// The launch of the barrier between this rank's pushes of a tile and the tile's reduction. It returns when the other ranks' pushes have
    /// arrived. As with [`Tiles::reduce`], the caller sets where it reports to.
    #[must_use]
    pub fn arrival(&self, number: usize) -> PeerLaunch {
        self.barrier(BARRIERS * number as u64)
    }

    /// The launch of the barrier before this rank's pushes of a tile, behind the reduction of the tile two before. It returns when the other
    /// ranks have room for the pushes.
    #[must_use]
    pub fn room(&self, number: usize) -> PeerLaunch {
        self.barrier(BARRIERS * number as u64 + 1)
    }

    fn barrier(&self, number: u64) -> PeerLaunch {
        copy_engine::kernel_launch(self.parts.call, self.barrier_kernel, 1 + number as u32)
    }

    /// The launch of the kernel that reduces a tile. The caller sets where it reports to.
    #[must_use]
    pub fn reduce(&self, number: usize) -> PeerLaunch {
        let (start, bytes) = self.tile(number, self.parts.result_bytes);
        let mut arguments = Collective {
            from: [0; MAX_PEERS],
            own: if self.copies_own() {
                self.parts.result
            } else {
                self.parts.own
            } + start,
            result: self.result(number),
            result_bytes: bytes,
            forwards: 0,
            ..self.parts
        };
        for rank in self.others() {
            arguments.from[rank] = self.slot(self.me(), rank, number);
        }
        PeerLaunch {
            arguments: PeerArguments::Collective(arguments),
            kernel: self.kernel,
            blocks: self.blocks,
            threads: TILE_THREADS,
        }
    }
}

#[cfg(test)]
mod tests;
