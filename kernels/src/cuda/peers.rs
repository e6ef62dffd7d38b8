//! Memory of a rank that the kernels of all ranks of its communicator reach: the twin of `cuda/peers.cuh`.
//!
//! Every rank has as much, zeroed when it is made. It begins with an [`Area`]. From [`LINES_OFFSET`] on there are lines of 16
//! bytes for operations in one shot: 8 of data, and beside each half of them the epoch of the operation that they are of. They
//! are cut by the parity of the epoch, then by the rank that writes them. From [`CHUNKS_OFFSET`] on there are slots for chunks of
//! longer operations: by the rank that writes them, by lane, and two of each. From [`messages_offset`] on there is the same for messages.
//! From [`pushed_offset`] on there are slots for contributions that are pushed to who reduces them, which hold data and nothing else.
//!
//! A communicator's operations over this memory have epochs 1, 2, … on all ranks, and each lane's steps are numbered,
//! both by the kernels themselves, so that replays count too.

use std::mem::offset_of;

/// The most ranks.
pub const MAX_PEERS: usize = 8;
/// The most channels whose rings are known.
pub const MAX_RINGS: usize = 64;
/// Where the lines begin.
pub const LINES_OFFSET: usize = 8192;
/// The most blocks of a launch that may go straight between callers' buffers.
pub const STRAIGHT_BLOCKS: usize = 128;
/// Lines.
pub const LINES: usize = 1 << 17;
/// The most lanes of a connection.
pub const LANES: usize = 512;
/// Where the steps that each lane has done stand, a `u64` each.
pub const STEPS_OFFSET: usize = LINES_OFFSET + LINES * size_of::<Line>();
/// Where the slots for chunks begin.
pub const CHUNKS_OFFSET: usize = STEPS_OFFSET + LANES * size_of::<u64>();
/// The most rows of a slot: 512 bytes each, of which [`ROW_BYTES`] are data.
pub const CHUNK_ROWS: usize = 16;
/// Bytes of data in a row: 120 in each of four lines of 128.
pub const ROW_BYTES: usize = 480;

const _: () = assert!(messages_offset(2) - CHUNKS_OFFSET == 8 << 20);
const _: () = assert!(messages_offset(4) - CHUNKS_OFFSET == 3 * (4 << 20));
const _: () = assert!(messages_offset(8) - CHUNKS_OFFSET == 7 * (2 << 20));
const _: () = assert!(CHUNKS_OFFSET == 2_109_440 && CHUNKS_OFFSET.is_multiple_of(4096));

/// Lanes of each connection that there is room for among so many ranks: launches in lines have 448 at most among two, and 384 and 255 among more.
#[must_use]
pub const fn lanes(ranks: usize) -> usize {
    if ranks <= 4 { LANES } else { LANES / 2 }
}

/// Rows of a slot of each lane. A connection has 8 MiB of slots among two ranks, 4 among three and four, and 2 among more: there many lanes of short
/// slots are better than few of long ones.
#[must_use]
pub const fn chunk_rows(ranks: usize) -> usize {
    if ranks <= 2 { CHUNK_ROWS } else { CHUNK_ROWS / 2 }
}

/// Lanes of a connection for messages in one direction.
pub const MESSAGE_LANES: usize = 256;
/// Bytes of what is kept of each of them, by rank: the numbers of chunks that were sent, released and taken, a `u32` each, and where the next
/// one goes.
const MESSAGE_STATES: usize = MAX_PEERS * MESSAGE_LANES * (3 * size_of::<u32>() + size_of::<[u64; 2]>());

const _: () = assert!(MESSAGE_STATES == 57_344);
const _: () = assert!(MAX_PEERS * MESSAGE_LANES * 3 * size_of::<u32>() == 24_576);

/// Where the part for messages begins among so many ranks: what is kept of lanes, then two slots by rank and lane.
#[must_use]
pub const fn messages_offset(ranks: usize) -> usize {
    CHUNKS_OFFSET + (ranks - 1) * lanes(ranks) * 2 * chunk_rows(ranks) * 512
}

/// Bytes at [`messages_offset`] that [`are_messages_taken`] asks for.
pub const MESSAGE_COUNTS: usize = 2 * MAX_PEERS * MESSAGE_LANES * size_of::<u32>();

/// Whether the ranks of `of`, by bit, have taken all chunks that were sent to them: after that they write nothing more to what the sender keeps of
/// its lanes. `counts` are the [`MESSAGE_COUNTS`] bytes at [`messages_offset`]: what was sent, and what was taken of it.
#[must_use]
pub fn are_messages_taken(counts: &[u8], of: u8) -> bool {
    let (sent, taken) = counts.split_at(counts.len() / 2);
    let bytes = sent.len() / MAX_PEERS;
    let mut ranks = sent
        .chunks_exact(bytes)
        .zip(taken.chunks_exact(bytes))
        .enumerate();
    ranks.all(|(rank, (sent, taken))| of >> rank & 1 == 0 || sent == taken)
}

/// Where the [`Mappings`] are among so many ranks.
#[must_use]
pub const fn mappings_offset(ranks: usize) -> usize {
    messages_offset(ranks) + MESSAGE_STATES + (ranks - 1) * MESSAGE_LANES * 2 * CHUNK_ROWS * 512
}

/// Chunks that a block pushes before it reduces the first.
pub const PUSH_AHEAD: usize = 1;
/// Slots for what a block of another rank pushes: `cuda/push.cuh` says why so many.
pub const PUSH_SLOTS: usize = 2 * PUSH_AHEAD + 2;

/// How far the blocks of all ranks have come with what they push.
#[derive(Debug)]
#[repr(C)]
pub struct Pushed {
    /// By block: chunks that it has pushed in all operations so far.
    pub chunks: [u64; STRAIGHT_BLOCKS],
    /// By rank and block: the same of that rank's block, chunk by chunk.
    pub from: [[u64; STRAIGHT_BLOCKS]; MAX_PEERS],
}

const _: () = assert!(size_of::<Pushed>() == 9216);

/// Where [`Pushed`] is among so many ranks; behind it are the slots: by rank that writes them, by block, and [`PUSH_SLOTS`] of each, of
/// [`push_chunk`] bytes or fewer.
#[must_use]
pub const fn pushed_offset(ranks: usize) -> usize {
    mappings_offset(ranks) + size_of::<Mappings>()
}

/// The most bytes of a chunk that is pushed: less for each connection where there are more of them; 0 for a number of ranks that no
/// kernel pushes for.
#[must_use]
pub const fn push_chunk(ranks: usize) -> usize {
    match ranks {
        2 | 4 | 8 => (48 << 10) / ranks,
        _ => 0,
    }
}

/// Bytes of one rank's memory among so many.
#[must_use]
pub const fn bytes(ranks: usize) -> usize {
    pushed_offset(ranks)
        + size_of::<Pushed>()
        + (ranks - 1) * STRAIGHT_BLOCKS * PUSH_SLOTS * push_chunk(ranks)
}

/// The most allocations that a rank shows to those of other processes.
pub const SHOWN: usize = 256;

/// In a word of a [place](super::layout::Shown::place): there is one.
pub const OPEN: u64 = 1 << 63;
/// In a word of a place: it is an offset in what has been shown under the number from bit [`NUMBER_AT`] on.
pub const IS_SHOWN: u64 = 1 << 62;
/// In a word of a place: it is of a message that goes straight if there is one.
pub const IS_LONG: u64 = 1 << 61;
/// Where the number begins.
pub const NUMBER_AT: u32 = 48;

/// An allocation that another rank has shown, as this one has mapped it.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Mapping {
    /// Where this rank's kernels find it.
    pub address: u64,
    /// Its generation.
    pub generation: u32,
    /// 0.
    pub reserved: u32,
}

/// What ranks of other processes have mapped.
#[derive(Debug)]
#[repr(C)]
pub struct Mappings {
    /// By rank that has shown it, and number.
    pub of: [[Mapping; SHOWN]; MAX_PEERS],
    /// By rank, and number of what this one has shown: the generation that that rank has mapped; 0 for none.
    pub by: [[u32; SHOWN]; MAX_PEERS],
}

const _: () = assert!(size_of::<Mapping>() == 16);
const _: () = assert!(offset_of!(Mappings, by) == 32_768);
const _: () = assert!(size_of::<Mappings>() == 40_960);

/// Where, in a rank's memory among so many, what `rank` has shown under a number is entered as mapped by it.
#[must_use]
pub const fn mapping_offset(ranks: usize, rank: u32, number: u32) -> usize {
    mappings_offset(ranks) + (rank as usize * SHOWN + number as usize) * size_of::<Mapping>()
}

/// Where, in a rank's memory among so many, stands which generation of what it has shown under a number `rank` has mapped.
#[must_use]
pub const fn mapped_offset(ranks: usize, rank: u32, number: u32) -> usize {
    mappings_offset(ranks)
        + offset_of!(Mappings, by)
        + (rank as usize * SHOWN + number as usize) * size_of::<u32>()
}

/// Data with flags.
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
pub struct RingBefore {
    /// Its FIFO as this rank's kernels reach it.
    pub fifo: u64,
    /// The rank.
    pub prev: u32,
    /// 0.
    pub reserved: u32,
}

/// Where an operation that goes straight between callers' buffers finds those of another rank.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Place {
    /// Where what this rank has for that one goes.
    pub to: Line,
    /// Where what that one has for this rank begins.
    pub from: Line,
}

/// What the memory begins with.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Area {
    /// Epoch of the operation that was done last.
    pub epoch: u32,
    /// 0.
    pub reserved: [u32; 63],
    /// By channel; zeros behind the last one. Kernels that wait long for an operation to begin look whether the rank before
    /// has begun another one there.
    pub rings: [RingBefore; MAX_RINGS],
    /// By parity and rank: the tag of the operation that this rank has begun.
    pub tags: [[Line; MAX_PEERS]; 2],
    /// By the same.
    pub places: [[Place; MAX_PEERS]; 2],
    /// By rank and block: the epoch of the last operation in which it was done with this rank's buffers.
    pub left: [[u32; STRAIGHT_BLOCKS]; MAX_PEERS],
}

const _: () = assert!(offset_of!(Area, rings) == 256);
const _: () = assert!(offset_of!(Area, tags) == 1280);
const _: () = assert!(offset_of!(Area, places) == 1536);
const _: () = assert!(offset_of!(Area, left) == 2048);
const _: () = assert!(size_of::<Area>() == 6144);
const _: () = assert!(size_of::<Area>() <= LINES_OFFSET);

impl Default for Area {
    fn default() -> Self {
        Self {
            epoch: 0,
            reserved: [0; 63],
            rings: [RingBefore::default(); MAX_RINGS],
            tags: Default::default(),
            places: Default::default(),
            left: [[0; STRAIGHT_BLOCKS]; MAX_PEERS],
        }
    }
}

impl Area {
    /// It as it lies in memory.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: integers without padding: see the offsets above.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

/// Lines that each of `ranks` ranks has for one parity.
#[must_use]
pub const fn lines(ranks: usize) -> usize {
    LINES / 2 / ranks
}

/// The most bytes of an operation that is done in one shot.
#[must_use]
pub const fn one_shot_bytes(ranks: usize) -> usize {
    lines(ranks) * 8
}
