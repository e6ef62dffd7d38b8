//! Launch parameters as the kernel reads them: the twin of `cuda/launch.cuh`. All are little-endian and hold no padding that
//! is not named.

use std::mem::offset_of;

use super::peers::{IS_SHOWN, MAX_PEERS, NUMBER_AT, OPEN};

/// How contributions are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Combination {
    /// They are not.
    Copy = 0,
    /// Sum.
    Sum = 1,
    /// Product.
    Prod = 2,
    /// Maximum.
    Max = 3,
    /// Minimum.
    Min = 4,
    /// Each is multiplied with the argument and added.
    MulSum = 5,
    /// Integers are added, the last sum is divided by the argument.
    SumDiv = 6,
}

/// What [`Work::connections`] says.
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

/// Stands for no index.
pub const NONE: u32 = u32::MAX;

/// One channel's part of one operation: [`crate::Work`], with addresses as the device knows them.
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
    /// Its end.
    pub part_end: u64,
    /// The consumer's half of the FIFO that slots come from ([`crate::fifo::Halves`]), 0 if there is none.
    pub prev: u64,
    /// The producer's.
    pub prev_producer: u64,
    /// The consumer's half of the FIFO that slots go to, 0 if there is none.
    pub next: u64,
    /// The producer's.
    pub next_producer: u64,
    /// Argument of the combination, or the address of the element that it is made from.
    pub scalar: u64,
    /// Where the ranks in ring order (`u32` each) stand in the program.
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
    /// Index of its operation among the channel's; [`NONE`] for work that is not reported.
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
    /// [`PREV_PLACED`], [`NEXT_PLACED`].
    pub placed: u8,
    /// 0.
    pub reserved: [u8; 6],
}

/// The FIFO that slots come from says where they are ([`crate::Fifo::place`]).
pub const PREV_PLACED: u8 = 1;
/// The FIFO that slots go to says it.
pub const NEXT_PLACED: u8 = 2;

const _: () = assert!(size_of::<Work>() == 120);
const _: () = assert!(offset_of!(Work, scalar) == 72);
const _: () = assert!(offset_of!(Work, order_at) == 80);
const _: () = assert!(offset_of!(Work, connections) == 108);
const _: () = assert!(offset_of!(Work, scalar_kind) == 112);
const _: () = assert!(offset_of!(Work, placed) == 113);

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

/// An operation that a channel has works of.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Op {
    /// Its number.
    pub number: u32,
    /// How many.
    pub works: u32,
}

const _: () = assert!(size_of::<Op>() == 8);

/// What one block does.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Channel {
    /// Channel number.
    pub channel: u32,
    /// Its first lane: that of the collectives, if it has any.
    pub first_lane: u32,
    /// Its first lane of messages; these take turns.
    pub first_message_lane: u32,
    /// Behind its last lane.
    pub end_lane: u32,
    /// Its first operation.
    pub first_op: u32,
    /// Behind its last operation.
    pub end_op: u32,
}

const _: () = assert!(size_of::<Channel>() == 24);

/// What the blocks of a launch share, in device memory. Zeroed before its first use; what is left by a launch is what
/// the next one needs.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct LaunchState {
    /// Of the present run: blocks that are done and those of them that gave up, 10 bits each, and above these where its end is to be told, if
    /// that is known.
    pub done: u64,
    /// Runs that are over, of all launches that used it.
    pub runs: u32,
    /// A block has met a slot with another tag.
    pub differs: u32,
}

const _: () = assert!(size_of::<LaunchState>() == 16);

/// What host and kernel say to each other, in host memory that the device reaches. Both sides use atomic accesses.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct LaunchControl {
    /// Host: not 0 releases every wait of the launch.
    pub abort: std::sync::atomic::AtomicU32,
    /// Kernel: the last run gave up. Written before `runs`.
    pub aborted: std::sync::atomic::AtomicU32,
    /// Kernel: [`LaunchState::runs`]. Of a run that gave up all that it has reported is visible with it.
    pub runs: std::sync::atomic::AtomicU32,
    /// Kernel: another number than before, from time to time while something moves.
    pub moved: std::sync::atomic::AtomicU32,
    /// Kernel: what a thread waits for that has done so for long, as the word of [`ringsight_records::Waits`]; another one each time that it
    /// looks.
    pub waits: std::sync::atomic::AtomicU64,
    /// 0.
    pub reserved: [u32; 10],
}

const _: () = assert!(offset_of!(LaunchControl, moved) == 12);
const _: () = assert!(offset_of!(LaunchControl, waits) == 16);
const _: () = assert!(size_of::<LaunchControl>() == 64);

/// Where a kernel reports to.
///
/// What differs from one launch to the next of the same operation on the same buffers is in one 16 bytes, at a multiple of 16: the driver, which launches a
/// kernel with new arguments, writes from the first such piece that has changed to the last one, and takes half as long for one as for all
/// (docs/decisions/0006-eager-launch-by-graph.md).
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
    /// Which of the arrays' elements are its own.
    pub slot: u32,
    /// What its events say of where they come from. With [`CAPTURED`] its runs are replays, numbered from 1; without, it runs once, and its events say 0.
    pub launch: u32,
    /// [`LaunchState::runs`] before the first run of this launch, if that is captured; else 0.
    pub runs_before: u32,
    /// Number of the operation, for kernels that do one.
    pub op: u32,
}

/// In the numbers of captured launches.
pub const CAPTURED: u32 = 1 << 31;
/// Entries of a GPU's ring, a power of two: the host may be late by the events of 16 thousand operations of one channel.
pub const RING_ENTRIES: usize = 1 << 15;

const _: () = assert!(offset_of!(Head, slot) == 32);
const _: () = assert!(size_of::<Head>() == 48);

/// Bytes of a program that travel with the arguments.
pub const INLINE_BYTES: usize = 3984;

/// The one argument of the kernel of channel programs.
#[derive(Clone)]
#[repr(C)]
pub struct Arguments {
    /// Where it reports to.
    pub head: Head,
    /// Device address of the program; 0: it is in `inline_program`.
    pub program: u64,
    /// This rank's memory that its peers reach ([`super::peers`]), 0 if there is none.
    pub peers: u64,
    /// Where the [`Channel`]s stand in the program.
    pub channels_at: u32,
    /// Where the [`Work`]s stand.
    pub works_at: u32,
    /// Where the [`Lane`]s stand.
    pub lanes_at: u32,
    /// Where the [`Op`]s stand.
    pub ops_at: u32,
    /// The most lanes that a channel has.
    pub lanes: u32,
    /// Bytes of the program, a multiple of 8, if each block takes it into its shared memory; 0: it is read where it is.
    pub staged: u32,
    /// The program, if it fits.
    pub inline_program: [u8; INLINE_BYTES],
}

const _: () = assert!(offset_of!(Arguments, program) == 48);
const _: () = assert!(offset_of!(Arguments, channels_at) == 64);
const _: () = assert!(offset_of!(Arguments, inline_program) == 88);
const _: () = assert!(size_of::<Arguments>() == 4072);
// What a kernel of any driver can take.
const _: () = assert!(size_of::<Arguments>() <= 4096);

/// What every kernel among peers is told of its operation.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct PeerCall {
    /// Where it reports to.
    pub head: Head,
    /// By rank: where its memory is for this rank's kernels.
    pub bases: [u64; MAX_PEERS],
    /// Argument of the combination.
    pub argument: u64,
    /// The operation's tag.
    pub tag: u32,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub ranks: u32,
    /// Code of the data type.
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

/// The one argument of the kernels of [`super::one_shot`].
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
    /// Lines of each rank and parity.
    pub lines: u32,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(offset_of!(OneShot, send) == 136);
const _: () = assert!(size_of::<OneShot>() == 168);

/// The one argument of the kernels of [`super::exchange`]: what this rank sends to each of the others and takes from them.
/// All lengths are in bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Exchange {
    /// The operation.
    pub call: PeerCall,
    /// By rank: where what goes to it begins.
    pub from: [u64; MAX_PEERS],
    /// By rank: how much that is.
    pub sends: [u64; MAX_PEERS],
    /// By rank: where what comes from it goes.
    pub to: [u64; MAX_PEERS],
    /// By rank: how much that is.
    pub takes: [u64; MAX_PEERS],
    /// Where this rank's own contribution begins.
    pub own: u64,
    /// Where it goes, reduced with those of the others or as it is.
    pub result: u64,
    /// How much that is; 0 if this rank has no result.
    pub result_bytes: u64,
    /// The most that any rank sends another at a time: all ranks take as many steps as that takes.
    pub piece: u64,
    /// Bytes of a step: whole rows of [`super::peers::ROW_BYTES`], at most [`super::peers::chunk_rows`].
    pub chunk: u32,
    /// 1: what comes is reduced, and the result goes to `result`; 0: it goes to `to`.
    pub reduces: u8,
    /// 1: what is in `result` is passed on to all others, and theirs go to `to`.
    pub passes: u8,
    /// 1: it goes straight between callers' buffers if all ranks can, the same on all of them.
    pub straight: u8,
    /// 1: this rank's buffers are open to the kernels of all others, once those of other processes have mapped what has been shown.
    pub open: u8,
    /// By rank: the [place](Shown::place) of `to`, if they are open.
    pub place_to: [u64; MAX_PEERS],
    /// By rank: the place of `from`.
    pub place_from: [u64; MAX_PEERS],
    /// [`Shown::generation`] of what the receive buffer is in.
    pub received: u32,
    /// That of what the send buffer is in.
    pub sent: u32,
    /// Where the [`super::peers::Mappings`] are in each rank's memory.
    pub mappings_at: u64,
    /// Where [`super::peers::Pushed`] is in each rank's memory.
    pub pushed_at: u64,
    /// Bytes of a chunk of each part that a block writes before it tells the block of the same number, the same on all ranks, if it goes straight:
    /// where contributions are pushed to who reduces them, at most [`super::peers::push_chunk`], or a broadcast is passed on; 0: nothing is told.
    pub push: u32,
    /// Where all ranks but the root have a part: the root, to which alone reduced parts are passed on, or from which parts come that are; else
    /// [`NO_ROOT`].
    pub root: u32,
}

/// [`Exchange::root`] of what has none: `NONE` in `cuda/launch.cuh`.
pub const NO_ROOT: u32 = u32::MAX;

/// The one argument of the kernels of [`super::gates`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Gate {
    /// The operation.
    pub call: PeerCall,
    /// To the kernel behind all copies: 1 if they could not be queued.
    pub gives_up: u32,
    /// To one between copies: which, from 1 on.
    pub meeting: u32,
}

const _: () = assert!(offset_of!(Gate, gives_up) == 136);
const _: () = assert!(size_of::<Gate>() == 144);

/// A caller's allocation, as a rank has shown it to other processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Where it begins for this rank.
    pub start: u64,
    /// Its generation, from 1 on; 0: nothing was shown.
    pub generation: u32,
    /// Its number, below [`super::peers::SHOWN`].
    pub number: u32,
}

impl Shown {
    /// The word by which a rank, `is_foreign` if it is of another process, is told of `address`, which lies in it, or 0 where there is nothing.
    #[must_use]
    pub fn place(&self, address: u64, is_foreign: bool) -> u64 {
        if !is_foreign || self.generation == 0 {
            return OPEN | address;
        }
        let offset = if address == 0 { 0 } else { address - self.start };
        OPEN | IS_SHOWN | u64::from(self.number) << NUMBER_AT | offset
    }
}

const _: () = assert!(offset_of!(Exchange, from) == 136);
const _: () = assert!(offset_of!(Exchange, own) == 392);
const _: () = assert!(offset_of!(Exchange, chunk) == 424);
const _: () = assert!(offset_of!(Exchange, place_to) == 432);
const _: () = assert!(offset_of!(Exchange, mappings_at) == 568);
const _: () = assert!(offset_of!(Exchange, pushed_at) == 576);
const _: () = assert!(size_of::<Exchange>() == 592);

/// A message of [`Messages`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Message {
    /// Where it comes from or goes.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// [`super::peers::IS_LONG`] if it may go straight into the receiver's buffer; of a receive whose buffer is open to the sender also its
    /// [place](Shown::place).
    pub place: u64,
    /// [`Shown::generation`] of what the buffer is in.
    pub generation: u32,
    /// Operation number.
    pub op: u32,
    /// Its tag.
    pub tag: u32,
    /// Lanes that it goes over.
    pub lanes: u16,
    /// Rows of a chunk, at most [`super::peers::CHUNK_ROWS`].
    pub rows: u8,
    /// Bytes of an element.
    pub element_bytes: u8,
}

const _: () = assert!(size_of::<Message>() == 40);

/// The messages of a launch to or from one peer.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Role {
    /// Its rank.
    pub peer: u32,
    /// 1: to it, 0: from it.
    pub sends: u32,
    /// The first message.
    pub first: u32,
    /// Behind the last.
    pub end: u32,
}

const _: () = assert!(size_of::<Role>() == 16);

/// The most roles of a launch.
pub const MOST_ROLES: usize = 2 * (MAX_PEERS - 1);
/// The most messages of a launch.
pub const MOST_MESSAGES: usize = 93;

/// The one argument of the kernels of [`super::messages`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Messages {
    /// Where it reports to.
    pub head: Head,
    /// By rank: where its memory is for this rank's kernels.
    pub bases: [u64; MAX_PEERS],
    /// Where the part for messages begins in each ([`super::peers::messages_offset`]).
    pub at: u64,
    /// Where the [`super::peers::Mappings`] are.
    pub mappings_at: u64,
    /// This rank.
    pub rank: u32,
    /// Roles.
    pub roles: u32,
    /// Messages.
    pub messages: u32,
    /// Channel number.
    pub channel: u8,
    /// 0.
    pub reserved: [u8; 3],
    /// The roles: as many blocks each.
    pub role: [Role; MOST_ROLES],
    /// The messages, by role.
    pub message: [Message; MOST_MESSAGES],
}

const _: () = assert!(offset_of!(Messages, at) == 112);
const _: () = assert!(offset_of!(Messages, role) == 144);
const _: () = assert!(offset_of!(Messages, message) == 368);
const _: () = assert!(size_of::<Messages>() == 4088);
// What a kernel of any driver can take.
const _: () = assert!(size_of::<Messages>() <= 4096);

/// Shared memory that a block needs for each lane, beside the program if it takes that.
pub const LANE_STATE_BYTES: usize = 280;
/// Shared memory that a block needs for each operation.
pub const OP_STATE_BYTES: usize = 8;
