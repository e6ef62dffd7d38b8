//! Layout of peer memory: device memory of each rank that the kernels of all ranks of its communicator reach. The twin of
//! `cuda/peer_memory.cuh`.
//!
//! Every rank has a block of the same size, zeroed when it is made. Its areas, in order:
//!
//! | offset | area | used by |
//! |---|---|---|
//! | 0 | [`PeerHeader`] | all peer kernels |
//! | [`LINES_OFFSET`] | [`Line`]s: 8 bytes of data, each half beside the epoch of its operation; by epoch parity, then by writing rank | one-shot operations |
//! | [`STEPS_OFFSET`] | steps that each lane has done, a `u64` each | collectives |
//! | [`CHUNKS_OFFSET`] | two slots for chunks per writing rank and lane | collectives |
//! | [`messages_offset`] | lane state, then two slots per writing rank and lane | messages |
//! | [`imports_offset`] | [`Imports`] | zero-copy |
//! | [`push_counters_offset`] | [`PushCounters`], then [`PUSH_SLOTS`] slots per writing rank and block, which hold data only | pushed reductions |
//!
//! The operations of a communicator over this memory have epochs 1, 2, … on all ranks, and the steps of each lane are numbered. The kernels
//! count both themselves, so replays count too.

use std::mem::offset_of;

/// The most ranks.
pub const MAX_PEERS: usize = 8;
/// The most channels whose rings are known.
pub const MAX_RINGS: usize = 64;
/// Offset of the lines.
pub const LINES_OFFSET: usize = 8192;
/// The most blocks of a launch that may be zero-copy.
pub const MAX_ZERO_COPY_BLOCKS: usize = 128;
/// Number of lines.
pub const LINES: usize = 1 << 17;
/// The most lanes of a connection.
pub const LANES: usize = 512;
/// Offset of the lanes' step counts.
pub const STEPS_OFFSET: usize = LINES_OFFSET + LINES * size_of::<Line>();
/// Offset of the slots for chunks.
pub const CHUNKS_OFFSET: usize = STEPS_OFFSET + LANES * size_of::<u64>();
/// The most rows of a slot. A row takes 512 bytes, of which [`ROW_BYTES`] are data.
pub const CHUNK_ROWS: usize = 16;
/// Bytes of data in a row: 120 in each of four lines of 128 bytes.
pub const ROW_BYTES: usize = 480;

const _: () = assert!(messages_offset(2) - CHUNKS_OFFSET == 8 << 20);
const _: () = assert!(messages_offset(4) - CHUNKS_OFFSET == 3 * (4 << 20));
const _: () = assert!(messages_offset(8) - CHUNKS_OFFSET == 7 * (2 << 20));
const _: () = assert!(CHUNKS_OFFSET == 2_109_440 && CHUNKS_OFFSET.is_multiple_of(4096));

/// Lanes of each connection among `ranks` ranks. LL128 launches use at most 448 among two ranks, 384 among up to four, and 255 among more.
#[must_use]
pub const fn lanes(ranks: usize) -> usize {
    if ranks <= 4 { LANES } else { LANES / 2 }
}

/// Rows of a slot. A connection has 8 MiB of slots among two ranks, 4 MiB among three and four, and 2 MiB among more: with more ranks, many
/// lanes of short slots are faster than few lanes of long slots.
#[must_use]
pub const fn chunk_rows(ranks: usize) -> usize {
    if ranks <= 2 { CHUNK_ROWS } else { CHUNK_ROWS / 2 }
}

/// Lanes of a connection for messages in one direction.
pub const MESSAGE_LANES: usize = 256;
/// Bytes of lane state, by rank and lane: three `u32` counts of chunks (sent, released, received) and the word pair that says where the
/// next chunk goes.
const MESSAGE_STATES: usize = MAX_PEERS * MESSAGE_LANES * (3 * size_of::<u32>() + size_of::<[u64; 2]>());

const _: () = assert!(MESSAGE_STATES == 57_344);
const _: () = assert!(MAX_PEERS * MESSAGE_LANES * 3 * size_of::<u32>() == 24_576);

/// Offset of the message area: lane state, then two slots by rank and lane.
#[must_use]
pub const fn messages_offset(ranks: usize) -> usize {
    CHUNKS_OFFSET + (ranks - 1) * lanes(ranks) * 2 * chunk_rows(ranks) * 512
}

/// Bytes at [`messages_offset`] that [`are_messages_received`] reads.
pub const MESSAGE_COUNTS: usize = 2 * MAX_PEERS * MESSAGE_LANES * size_of::<u32>();

/// Whether the ranks in the bit mask `of` have received all chunks that this rank has sent them. From then on they no longer write into
/// this rank's lane state. `counts` are the [`MESSAGE_COUNTS`] bytes at [`messages_offset`]: chunks sent, then chunks received.
#[must_use]
pub fn are_messages_received(counts: &[u8], of: u8) -> bool {
    let (sent, received) = counts.split_at(counts.len() / 2);
    let bytes = sent.len() / MAX_PEERS;
    let mut ranks = sent
        .chunks_exact(bytes)
        .zip(received.chunks_exact(bytes))
        .enumerate();
    ranks.all(|(rank, (sent, received))| of >> rank & 1 == 0 || sent == received)
}

/// Offset of [`Imports`].
#[must_use]
pub const fn imports_offset(ranks: usize) -> usize {
    messages_offset(ranks) + MESSAGE_STATES + (ranks - 1) * MESSAGE_LANES * 2 * CHUNK_ROWS * 512
}

/// Chunks that a block pushes before it reduces the first.
pub const PUSH_AHEAD: usize = 1;
/// Slots for the chunks that a block of another rank pushes. `cuda/push.cuh` explains the number.
pub const PUSH_SLOTS: usize = 2 * PUSH_AHEAD + 2;

/// How many chunks the blocks of all ranks have pushed.
#[derive(Debug)]
#[repr(C)]
pub struct PushCounters {
    /// By block: chunks that this rank has pushed in all finished operations.
    pub chunks: [u64; MAX_ZERO_COPY_BLOCKS],
    /// By rank and block: chunks that the same block of that rank has pushed, updated chunk by chunk.
    pub from: [[u64; MAX_ZERO_COPY_BLOCKS]; MAX_PEERS],
}

const _: () = assert!(size_of::<PushCounters>() == 9216);

/// Offset of [`PushCounters`]. The slots follow: by writing rank, by block, [`PUSH_SLOTS`] each, of at most [`max_push_chunk`] bytes.
#[must_use]
pub const fn push_counters_offset(ranks: usize) -> usize {
    imports_offset(ranks) + size_of::<Imports>()
}

/// The most bytes of a pushed chunk. More ranks have shorter chunks. 0: no kernel pushes among `ranks` ranks.
#[must_use]
pub const fn max_push_chunk(ranks: usize) -> usize {
    match ranks {
        2 | 4 | 8 => (48 << 10) / ranks,
        _ => 0,
    }
}

/// Bytes of one rank's peer memory among `ranks` ranks.
#[must_use]
pub const fn bytes(ranks: usize) -> usize {
    push_counters_offset(ranks)
        + size_of::<PushCounters>()
        + (ranks - 1) * MAX_ZERO_COPY_BLOCKS * PUSH_SLOTS * max_push_chunk(ranks)
}

/// The most allocations that a rank exports to other processes at a time.
pub const MAX_EXPORTS: usize = 256;

/// Bit of a [buffer address word](super::layout::buffer_address): it holds an address.
pub const ADDRESS_VALID: u64 = 1 << 63;
/// Bit of a buffer address word: it is an offset in the export whose number begins at bit [`EXPORT_SHIFT`].
pub const ADDRESS_EXPORTED: u64 = 1 << 62;
/// Bit of a message's buffer address word: the message is zero-copy if the word holds an address.
pub const MAY_ZERO_COPY: u64 = 1 << 61;
/// The lowest bit of the export's number.
pub const EXPORT_SHIFT: u32 = 48;

/// An allocation of another rank, as this rank has imported it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Import {
    /// Its address for this rank's kernels.
    pub address: u64,
    /// The export's generation.
    pub generation: u32,
    /// 0.
    pub reserved: u32,
}

/// Which exports the ranks of other processes have imported.
#[derive(Debug)]
#[repr(C)]
pub struct Imports {
    /// By exporting rank and export number: what this rank has imported.
    pub of: [[Import; MAX_EXPORTS]; MAX_PEERS],
    /// By rank and number of this rank's export: the generation that that rank has imported; 0 for none.
    pub by: [[u32; MAX_EXPORTS]; MAX_PEERS],
}

const _: () = assert!(size_of::<Import>() == 16);
const _: () = assert!(offset_of!(Imports, by) == 32_768);
const _: () = assert!(size_of::<Imports>() == 40_960);

/// Offset in the importing rank's peer memory of the [`Import`] of `rank`'s export `number`.
#[must_use]
pub const fn imported_offset(ranks: usize, rank: u32, number: u32) -> usize {
    imports_offset(ranks) + (rank as usize * MAX_EXPORTS + number as usize) * size_of::<Import>()
}

/// Offset in the exporting rank's peer memory of the generation of export `number` that `rank` has imported.
#[must_use]
pub const fn imported_by_offset(ranks: usize, rank: u32, number: u32) -> usize {
    imports_offset(ranks)
        + offset_of!(Imports, by)
        + (rank as usize * MAX_EXPORTS + number as usize) * size_of::<u32>()
}

/// 8 bytes of data with a flag beside each half (NCCL's LL line).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(16))]
pub struct Line {
    /// Low half of the data.
    pub low: u32,
    /// Its flag.
    pub low_flag: u32,
    /// High half of the data.
    pub high: u32,
    /// Its flag.
    pub high_flag: u32,
}

const _: () = assert!(size_of::<Line>() == 16 && align_of::<Line>() == 16);

/// The connection from the previous rank in a ring.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct PreviousRing {
    /// Its FIFO as this rank's kernels reach it.
    pub fifo: u64,
    /// The previous rank.
    pub prev: u32,
    /// 0.
    pub reserved: u32,
}

/// Where a zero-copy operation finds another rank's buffers.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct BufferAddress {
    /// Where this rank's bytes for that rank go.
    pub to: Line,
    /// Where that rank's bytes for this rank begin.
    pub from: Line,
}

/// The beginning of peer memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PeerHeader {
    /// Epoch of the last finished operation.
    pub epoch: u32,
    /// 0.
    pub reserved: [u32; 63],
    /// By channel; zeros behind the last one. A peer kernel that waits long for the others to begin looks here whether the previous
    /// rank has begun an operation over a ring instead.
    pub rings: [PreviousRing; MAX_RINGS],
    /// By epoch parity and rank: the tag of the operation that that rank has begun.
    pub tags: [[Line; MAX_PEERS]; 2],
    /// By epoch parity and rank.
    pub addresses: [[BufferAddress; MAX_PEERS]; 2],
    /// By rank and block: the epoch of the last operation in which that block was done with this rank's buffers.
    pub done: [[u32; MAX_ZERO_COPY_BLOCKS]; MAX_PEERS],
}

const _: () = assert!(offset_of!(PeerHeader, rings) == 256);
const _: () = assert!(offset_of!(PeerHeader, tags) == 1280);
const _: () = assert!(offset_of!(PeerHeader, addresses) == 1536);
const _: () = assert!(offset_of!(PeerHeader, done) == 2048);
const _: () = assert!(size_of::<PeerHeader>() == 6144);
const _: () = assert!(size_of::<PeerHeader>() <= LINES_OFFSET);

impl Default for PeerHeader {
    fn default() -> Self {
        Self {
            epoch: 0,
            reserved: [0; 63],
            rings: [PreviousRing::default(); MAX_RINGS],
            tags: Default::default(),
            addresses: Default::default(),
            done: [[0; MAX_ZERO_COPY_BLOCKS]; MAX_PEERS],
        }
    }
}

impl PeerHeader {
    /// Its bytes as they lie in memory.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: integers without padding: see the offsets above.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

/// Lines of each rank for one epoch parity.
#[must_use]
pub const fn lines(ranks: usize) -> usize {
    LINES / 2 / ranks
}

/// The most bytes of a one-shot operation.
#[must_use]
pub const fn one_shot_bytes(ranks: usize) -> usize {
    lines(ranks) * 8
}
