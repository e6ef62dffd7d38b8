//! Kernel arguments and the memory that kernels share with the host: the twin of `cuda/layout.cuh`. Everything is little-endian, and
//! padding is named.

use std::mem::offset_of;

use super::peer_memory::{ADDRESS_EXPORTED, ADDRESS_VALID, EXPORT_SHIFT, MAX_PEERS};
use crate::launch::ExportedBuffer;

/// How contributions are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Combination {
    /// They are not combined.
    Copy = 0,
    /// Sum.
    Sum = 1,
    /// Product.
    Prod = 2,
    /// Maximum.
    Max = 3,
    /// Minimum.
    Min = 4,
    /// Each contribution is multiplied by the argument and added.
    MulSum = 5,
    /// Integers are added; the last sum is divided by the argument.
    SumDiv = 6,
}

/// Which FIFOs a work has ([`Work::connections`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ConnectionKind {
    /// No FIFO.
    Local = 0,
    /// `prev` and `next`.
    Ring = 1,
    /// `next` only.
    Send = 2,
    /// `prev` only.
    Recv = 3,
}

/// Stands for "no index".
pub const NONE: u32 = u32::MAX;

/// One channel's part of one operation: [`crate::Work`] with device addresses.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Work {
    /// Send buffer, 0 if there is none.
    pub send: u64,
    /// Receive buffer, 0 if there is none.
    pub recv: u64,
    /// Elements of the operation.
    pub count: u64,
    /// First element of this part.
    pub part_start: u64,
    /// First element behind this part.
    pub part_end: u64,
    /// The consumer half of the FIFO that slots come from ([`crate::fifo::Halves`]); 0 if there is none.
    pub prev: u64,
    /// Its producer half.
    pub prev_producer: u64,
    /// The consumer half of the FIFO that slots go to; 0 if there is none.
    pub next: u64,
    /// Its producer half.
    pub next_producer: u64,
    /// Argument of the combination, or the address of the element from which the kernel makes it.
    pub scalar: u64,
    /// Offset of the ranks in ring order (`u32` each) in the program.
    pub order_at: u32,
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Operation number.
    pub op: u32,
    /// Its tag.
    pub tag: u32,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Root.
    pub root: u32,
    /// Index of its operation in the channel's table; [`NONE`] for work that is not reported.
    pub state: u32,
    /// A [`ConnectionKind`].
    pub connections: u8,
    /// Code of the function.
    pub function: u8,
    /// Code of the data type.
    pub data_type: u8,
    /// A [`Combination`].
    pub combine: u8,
    /// 0: `scalar` is the argument; 1: it is an address.
    pub scalar_kind: u8,
    /// [`PREV_INDIRECT`], [`NEXT_INDIRECT`].
    pub indirect: u8,
    /// 0.
    pub reserved: [u8; 6],
}

/// Bit: the slots of `prev` are where its header says ([`crate::Fifo::set_slots_address`]).
pub const PREV_INDIRECT: u8 = 1;
/// Bit: the slots of `next` are where its header says.
pub const NEXT_INDIRECT: u8 = 2;

const _: () = assert!(size_of::<Work>() == 120);
const _: () = assert!(offset_of!(Work, scalar) == 72);
const _: () = assert!(offset_of!(Work, order_at) == 80);
const _: () = assert!(offset_of!(Work, connections) == 108);
const _: () = assert!(offset_of!(Work, scalar_kind) == 112);
const _: () = assert!(offset_of!(Work, indirect) == 113);

/// Works that run one after another.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Lane {
    /// Index of the first.
    pub first_work: u32,
    /// Index behind the last.
    pub end_work: u32,
}

const _: () = assert!(size_of::<Lane>() == 8);

/// An operation with works on a channel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Op {
    /// Operation number.
    pub number: u32,
    /// Its works on the channel.
    pub works: u32,
}

const _: () = assert!(size_of::<Op>() == 8);

/// What one block does.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Channel {
    /// Channel number.
    pub channel: u32,
    /// Index of its first lane: that of the collectives, if it has any.
    pub first_lane: u32,
    /// Index of its first message lane. Message lanes take turns.
    pub first_message_lane: u32,
    /// Index behind its last lane.
    pub end_lane: u32,
    /// Index of its first operation.
    pub first_op: u32,
    /// Index behind its last operation.
    pub end_op: u32,
}

const _: () = assert!(size_of::<Channel>() == 24);

/// State that the blocks of a launch share, in device memory. It is zeroed once; each launch leaves it ready for the next.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct LaunchState {
    /// State of the current run: blocks that are done and blocks that gave up, 10 bits each. Above them is the ring slot of the end event, if a
    /// kernel has taken it early.
    pub done: u64,
    /// Finished runs of all launches that have used this state.
    pub runs: u32,
    /// A block has found a slot with another tag.
    pub differs: u32,
}

const _: () = assert!(size_of::<LaunchState>() == 16);

/// Words between the host and one launch, in host memory that the device reaches. Both sides use atomic accesses.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct LaunchControl {
    /// Host writes: not 0 releases every wait of the launch.
    pub abort: std::sync::atomic::AtomicU32,
    /// Kernel writes: the last run was given up. Written before `runs`.
    pub aborted: std::sync::atomic::AtomicU32,
    /// Kernel writes: [`LaunchState::runs`]. For a run that was given up, everything that it reported is visible with this word.
    pub runs: std::sync::atomic::AtomicU32,
    /// Kernel writes: a different number from time to time while something moves.
    pub moved: std::sync::atomic::AtomicU32,
    /// Kernel writes: what a thread has waited for so long, encoded as [`ringsight_records::Waits`]. Its count differs at each look.
    pub waits: std::sync::atomic::AtomicU64,
    /// 0.
    pub reserved: [u32; 10],
}

const _: () = assert!(offset_of!(LaunchControl, moved) == 12);
const _: () = assert!(offset_of!(LaunchControl, waits) == 16);
const _: () = assert!(size_of::<LaunchControl>() == 64);

/// Where a kernel reports to.
///
/// The fields that differ between two launches of one operation on the same buffers lie in one aligned group of 16 bytes (`slot` to `op`).
/// When the driver relaunches a kernel with new arguments, it rewrites the range from the first changed 16 bytes to the last. One group takes
/// half as long as the whole argument (docs/decisions/0006-eager-launch-by-graph.md).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Head {
    /// Device address of an array of [`LaunchState`].
    pub states: u64,
    /// Device address of an array of [`LaunchControl`].
    pub controls: u64,
    /// Device address of the [`Ring`](super::Ring)'s [`RING_ENTRIES`].
    pub ring: u64,
    /// Device address of the ring's ticket, a `u64`.
    pub ring_ticket: u64,
    /// Index of this launch in both arrays.
    pub slot: u32,
    /// Launch number, as its events carry it. With [`CAPTURED`] its runs are replays, numbered from 1. Without, it runs once, and its events
    /// say replay 0.
    pub launch: u32,
    /// [`LaunchState::runs`] before the first run of a captured launch; else 0.
    pub runs_before: u32,
    /// Operation number, for kernels that do one operation.
    pub op: u32,
}

/// Bit in the numbers of captured launches.
pub const CAPTURED: u32 = 1 << 31;
/// Entries of a GPU's ring, a power of two. The host may lag by the events of 16 thousand operations of one channel.
pub const RING_ENTRIES: usize = 1 << 15;

const _: () = assert!(offset_of!(Head, slot) == 32);
const _: () = assert!(size_of::<Head>() == 48);

/// Bytes of a program that fit into the arguments.
pub const INLINE_BYTES: usize = 3984;

/// The argument of the channel-program kernels.
#[derive(Clone)]
#[repr(C)]
pub struct Arguments {
    /// Where it reports to.
    pub head: Head,
    /// Device address of the program; 0: it is in `inline_program`.
    pub program: u64,
    /// Address of this rank's peer memory ([`super::peer_memory`]); 0 if there is none.
    pub peers: u64,
    /// Offset of the [`Channel`] table in the program.
    pub channels_at: u32,
    /// Offset of the [`Work`] table.
    pub works_at: u32,
    /// Offset of the [`Lane`] table.
    pub lanes_at: u32,
    /// Offset of the [`Op`] table.
    pub ops_at: u32,
    /// The largest number of lanes of a channel.
    pub lanes: u32,
    /// Bytes of the program, a multiple of 8, that each block copies into its shared memory; 0: blocks read it in place.
    pub staged: u32,
    /// The program, if it fits.
    pub inline_program: [u8; INLINE_BYTES],
}

const _: () = assert!(offset_of!(Arguments, program) == 48);
const _: () = assert!(offset_of!(Arguments, channels_at) == 64);
const _: () = assert!(offset_of!(Arguments, inline_program) == 88);
const _: () = assert!(size_of::<Arguments>() == 4072);
// The most that any driver passes to a kernel.
const _: () = assert!(size_of::<Arguments>() <= 4096);

/// What every peer kernel knows of its operation.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct PeerCall {
    /// Where it reports to.
    pub head: Head,
    /// By rank: address of its peer memory for this rank's kernels.
    pub bases: [u64; MAX_PEERS],
    /// Argument of the combination.
    pub argument: u64,
    /// The operation's tag.
    pub tag: u32,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Code of the data type ([`ringsight_records::DataType`]).
    pub data_type: u8,
    /// A [`Combination`].
    pub combine: u8,
    /// Channel number.
    pub channel: u8,
    /// 0.
    pub reserved: u8,
}

const _: () = assert!(offset_of!(PeerCall, bases) == 48);
const _: () = assert!(offset_of!(PeerCall, tag) == 120);
const _: () = assert!(offset_of!(PeerCall, data_type) == 132);
const _: () = assert!(size_of::<PeerCall>() == 136);

/// The argument of the kernels of [`super::one_shot`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OneShot {
    /// The operation.
    pub call: PeerCall,
    /// Send buffer.
    pub send: u64,
    /// Receive buffer.
    pub recv: u64,
    /// Elements.
    pub elems: u64,
    /// Lines per rank and epoch parity.
    pub lines: u32,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(offset_of!(OneShot, send) == 136);
const _: () = assert!(size_of::<OneShot>() == 168);

/// The argument of the kernels of [`super::collective`]: what this rank sends to each other rank and receives from it. Lengths are in
/// bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Collective {
    /// The operation.
    pub call: PeerCall,
    /// By rank: address of the bytes for that rank.
    pub from: [u64; MAX_PEERS],
    /// By rank: their length.
    pub sends: [u64; MAX_PEERS],
    /// By rank: destination of the bytes from that rank.
    pub to: [u64; MAX_PEERS],
    /// By rank: their length.
    pub takes: [u64; MAX_PEERS],
    /// Address of this rank's own contribution.
    pub own: u64,
    /// Destination of the result: the reduction, or a copy of this rank's own contribution.
    pub result: u64,
    /// Length of the result; 0 if this rank has none.
    pub result_bytes: u64,
    /// The longest part that any rank sends another: all ranks take as many steps as this part needs.
    pub longest_part: u64,
    /// Bytes of a step: whole rows of [`super::peer_memory::ROW_BYTES`], at most [`super::peer_memory::chunk_rows`].
    pub chunk: u32,
    /// 1: what arrives is reduced into `result`; 0: it is stored at `to`.
    pub reduces: u8,
    /// 1: `result` is forwarded to all other ranks, and their results are stored at `to`.
    pub forwards: u8,
    /// 1: it is zero-copy if all ranks' buffers can be reached. Equal on all ranks.
    pub zero_copy: u8,
    /// 1: the kernels of all ranks reach this rank's buffers, those of other processes once these have imported the exports.
    pub reachable: u8,
    /// By rank: the [`buffer_address`] of `to`, if `reachable`.
    pub address_to: [u64; MAX_PEERS],
    /// By rank: the [`buffer_address`] of `from`.
    pub address_from: [u64; MAX_PEERS],
    /// [`ExportedBuffer::generation`] of the receive buffer's allocation.
    pub recv_generation: u32,
    /// [`ExportedBuffer::generation`] of the send buffer's allocation.
    pub send_generation: u32,
    /// Offset of [`super::peer_memory::Imports`] in each rank's peer memory.
    pub imports_offset: u64,
    /// Offset of [`super::peer_memory::PushCounters`] in each rank's peer memory.
    pub push_counters_offset: u64,
    /// Bytes of a chunk that a block writes before it signals the block of the same number on the other rank, equal on all ranks. Zero-copy uses
    /// it when contributions are pushed (at most [`super::peer_memory::max_push_chunk`]) or a broadcast is relayed. 0: no signals.
    pub push_chunk: u32,
    /// The root, if all ranks but the root have a part. Results of a Reduce are forwarded to the root alone; the parts of a Broadcast come from
    /// it. Else [`NO_ROOT`].
    pub root: u32,
}

/// [`Collective::root`] of an operation without such a root: `NONE` in `cuda/layout.cuh`.
pub const NO_ROOT: u32 = u32::MAX;

/// The argument of the kernels of [`super::copy_engine`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyEngineCall {
    /// The operation.
    pub call: PeerCall,
    /// For the exit kernel: 1 if the host could not queue the copies.
    pub copies_failed: u32,
    /// For a barrier kernel: its number within the operation, from 1 on.
    pub barrier: u32,
}

const _: () = assert!(offset_of!(CopyEngineCall, copies_failed) == 136);
const _: () = assert!(size_of::<CopyEngineCall>() == 144);

/// The word that tells another rank's kernels where a buffer is, for [`Collective::address_to`] and [`Message::peer_address`].
///
/// A rank of this process (`is_foreign` false) gets the address itself. A rank of another process gets the export's number and the offset
/// of `address` in it. `address` lies in `export`, or is 0 for no bytes.
#[must_use]
pub fn buffer_address(export: ExportedBuffer, address: u64, is_foreign: bool) -> u64 {
    if !is_foreign || export.generation == 0 {
        return ADDRESS_VALID | address;
    }
    let offset = if address == 0 { 0 } else { address - export.start };
    ADDRESS_VALID | ADDRESS_EXPORTED | u64::from(export.number) << EXPORT_SHIFT | offset
}

const _: () = assert!(offset_of!(Collective, from) == 136);
const _: () = assert!(offset_of!(Collective, own) == 392);
const _: () = assert!(offset_of!(Collective, chunk) == 424);
const _: () = assert!(offset_of!(Collective, address_to) == 432);
const _: () = assert!(offset_of!(Collective, imports_offset) == 568);
const _: () = assert!(offset_of!(Collective, push_counters_offset) == 576);
const _: () = assert!(size_of::<Collective>() == 592);

/// A message of [`Messages`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Message {
    /// Address of this rank's buffer.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// [`super::peer_memory::MAY_ZERO_COPY`] if the sender may write into the receiver's buffer. For a receive whose buffer the sender
    /// reaches, also its [`buffer_address`].
    pub peer_address: u64,
    /// [`ExportedBuffer::generation`] of the buffer's allocation.
    pub generation: u32,
    /// Operation number.
    pub op: u32,
    /// The operation's tag.
    pub tag: u32,
    /// Number of lanes.
    pub lanes: u16,
    /// Rows of a chunk, at most [`super::peer_memory::CHUNK_ROWS`].
    pub rows: u8,
    /// Bytes of an element.
    pub element_bytes: u8,
}

const _: () = assert!(size_of::<Message>() == 40);

/// The messages of a launch with one peer in one direction.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Role {
    /// The peer's rank.
    pub peer: u32,
    /// 1: to the peer; 0: from the peer.
    pub sends: u32,
    /// Index of the first message.
    pub first: u32,
    /// Index behind the last.
    pub end: u32,
}

const _: () = assert!(size_of::<Role>() == 16);

/// The most roles of a launch.
pub const MAX_ROLES: usize = 2 * (MAX_PEERS - 1);
/// The most messages of a launch.
pub const MAX_MESSAGES: usize = 93;

/// The argument of the kernels of [`super::messages`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Messages {
    /// Where it reports to.
    pub head: Head,
    /// By rank: address of its peer memory for this rank's kernels.
    pub bases: [u64; MAX_PEERS],
    /// Offset of the message area in each peer memory ([`super::peer_memory::messages_offset`]).
    pub area_offset: u64,
    /// Offset of [`super::peer_memory::Imports`] in each peer memory.
    pub imports_offset: u64,
    /// This rank.
    pub rank: u32,
    /// Number of roles.
    pub roles: u32,
    /// Number of messages.
    pub messages: u32,
    /// Channel number.
    pub channel: u8,
    /// 0.
    pub reserved: [u8; 3],
    /// The roles. Each has the same number of blocks.
    pub role: [Role; MAX_ROLES],
    /// The messages, ordered by role.
    pub message: [Message; MAX_MESSAGES],
}

const _: () = assert!(offset_of!(Messages, area_offset) == 112);
const _: () = assert!(offset_of!(Messages, role) == 144);
const _: () = assert!(offset_of!(Messages, message) == 368);
const _: () = assert!(size_of::<Messages>() == 4088);
// The most that any driver passes to a kernel.
const _: () = assert!(size_of::<Messages>() <= 4096);

/// Shared memory that a block needs for each lane, beside a staged program.
pub const LANE_STATE_BYTES: usize = 280;
/// Shared memory that a block needs for each operation.
pub const OP_STATE_BYTES: usize = 8;
