//! Launch parameters: what a plan hands to the device.

use std::{
    any::Any,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use ringsight_records::{Algorithm, DataType, Function, ReduceOp, Waits};

use crate::{cuda::layout::Shown, fifo::Fifo};

/// One kernel launch: the work of every channel of one plan.
pub struct Launch {
    /// Channels with work, in channel order. They run side by side.
    pub channels: Vec<ChannelWork>,
    /// Checked in every wait; once set, the kernel returns without finishing.
    pub abort: Arc<AbortWord>,
    /// Told when channels and operations start and stop on the device.
    pub observer: Arc<dyn Observer>,
    /// Memory of the communicator's ranks, if it has that: channel programs that wait long see there that a rank does an
    /// operation among peers instead.
    pub peers: Option<Arc<Peers>>,
}

/// Work of one channel. Collectives run one after another in this order; sends and receives of one launch run side by
/// side after them, since the order in which peers serve them is not known.
pub struct ChannelWork {
    /// Channel number.
    pub channel: u8,
    /// Its work.
    pub work: Vec<Work>,
}

/// One channel's part of one operation.
pub struct Work {
    /// Operation number: what the observer is told.
    pub op: u32,
    /// Hash of what the caller asked for, never 0, the same on all ranks that call alike. It travels with every slot, and
    /// whoever takes a slot with another tag calls [`Observer::mismatch`].
    pub tag: u32,
    /// What to do.
    pub function: Function,
    /// How its ranks are arranged, the same on all of them: [`Algorithm::Ring`] or [`Algorithm::OneShot`] round a ring,
    /// [`Algorithm::OneShot`], [`Algorithm::TwoShot`] or [`Algorithm::Direct`] among peers, [`Algorithm::Direct`] between two. Without connections it says nothing.
    pub algorithm: Algorithm,
    /// Element type.
    pub data_type: DataType,
    /// Reduction, [`ReduceOp::None`] where there is none.
    pub reduce_op: ReduceOp,
    /// What [`ReduceOp::PreMulSum`] multiplies this rank's elements with.
    pub scalar: Scalar,
    /// Address of the send buffer (0 where the function has none on this rank).
    pub send: usize,
    /// Address of the receive buffer (0 where the function has none on this rank).
    pub recv: usize,
    /// Elements of the operation as the caller gave them: per rank for AllGather, ReduceScatter, AlltoAll, Gather, Scatter.
    pub count: usize,
    /// This channel's part of the elements that channels divide among themselves, which are all of `count`, or in an AllReduce round a ring
    /// those of each rank ([`divisible`](crate::schedule::divisible)). The parts of all channels cover them without overlap.
    pub part: Range<usize>,
    /// This rank.
    pub rank: u32,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Root of a rooted function, peer of a message among peers, else 0.
    pub root: u32,
    /// What it talks over.
    pub connections: Connections,
    /// Whether it goes straight between callers' buffers.
    pub straight: Straight,
    /// Where it does, whether contributions are pushed to who reduces them: the same on all ranks.
    pub pushes: bool,
}

/// Whether a collective or a message among peers goes straight between callers' buffers. That it may, all its ranks say alike; each says for
/// itself whether the others reach its buffers, and only where all do it is done so. Of a message nobody but its sender uses the send buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Straight {
    /// No: through memory of its own.
    #[default]
    No,
    /// If it could, but this rank's buffers are closed to the kernels of some other rank.
    Closed,
    /// If it can: this rank's buffers are open to the kernels of all ranks of this process, and of the others as far as those have mapped
    /// what was shown to them.
    Open {
        /// What the send buffer is in.
        sent: Shown,
        /// What the receive buffer is in.
        received: Shown,
    },
}

impl Work {
    /// Whether it is one end of a message between ranks that reach each other's memory.
    #[must_use]
    pub fn is_message_among_peers(&self) -> bool {
        self.function.is_p2p() && matches!(self.connections, Connections::Peers(_))
    }
}

/// The factor of [`ReduceOp::PreMulSum`]: an element of the operation's type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scalar {
    /// None: all other reductions.
    #[default]
    None,
    /// The element itself, in the low bytes.
    Immediate(u64),
    /// The address of the element, which is read when the work begins to run, at each replay anew.
    Device(usize),
}

impl Scalar {
    /// Where it is read on the device; 0 if it is not.
    #[must_use]
    pub const fn address(self) -> usize {
        match self {
            Self::Device(address) => address,
            Self::None | Self::Immediate(_) => 0,
        }
    }
}

/// The connections of one channel's work.
pub enum Connections {
    /// Neither peer nor ring: one rank, or a send to oneself paired with its receive (`send` and `recv` both set).
    Local,
    /// A ring. All connections of a ring have slots of one size, on every rank.
    Ring {
        /// Ranks in ring order, beginning with this one: data goes from `order[0]` to `order[1]` over `next`.
        order: Arc<[u32]>,
        /// From the previous rank.
        prev: Arc<Fifo>,
        /// To the next rank.
        next: Arc<Fifo>,
    },
    /// Towards one peer.
    Send(Arc<Fifo>),
    /// From one peer.
    Recv(Arc<Fifo>),
    /// All ranks, each of whose memory this rank's device reaches. A collective is then the only work of its launch; messages share
    /// theirs with nothing but messages.
    Peers(Arc<Peers>),
    /// The same, whose receive buffers, of a reduce_scatter send buffers, begin at one place of a window: copy engines of each rank's device write what it
    /// has into those of the others, or into the memory of who reduces it, between two kernels that meet in the memory of [`Connections::Peers`]. A collective is then the only work of its launch.
    Engines {
        /// The window.
        window: Arc<Window>,
        /// Where in it that buffer begins, in bytes, the same on all ranks.
        offset: u64,
    },
}

impl Connections {
    /// The memory of all ranks, if it goes by that.
    #[must_use]
    pub fn peers(&self) -> Option<&Arc<Peers>> {
        match self {
            Self::Peers(peers) => Some(peers),
            Self::Engines { window, .. } => Some(&window.peers),
            Self::Local | Self::Ring { .. } | Self::Send(_) | Self::Recv(_) => None,
        }
    }
}

/// Memory of callers that all ranks have registered together.
pub struct Window {
    /// The memory in which kernels meet.
    pub peers: Arc<Peers>,
    /// By rank: where its part begins for the device of this rank.
    pub places: Vec<u64>,
    /// For reductions; `None` if there are none by copy engines.
    pub scratch: Option<Arc<Scratch>>,
    /// What the device queues copies with beside the caller's stream.
    pub engines: Arc<dyn Any + Send + Sync>,
    /// Keeps the parts of ranks of other processes reachable.
    pub memory: Vec<Arc<dyn Any + Send + Sync>>,
}

/// Memory of all ranks where contributions to reductions come by copy engines: of a communicator, whose operations run one after another.
pub struct Scratch {
    /// Of a piece: as [`crate::cuda::pieces::piece_bytes`] makes it. There is room for two of each other rank's.
    pub piece_bytes: u64,
    /// By rank: where it is for the device of this rank.
    pub bases: Vec<u64>,
    /// Keeps it there.
    pub memory: Box<dyn Any + Send + Sync>,
}

/// Memory of all ranks, for kernels that write into that of the others: laid out as [`crate::cuda::peers`] says, zeroed
/// before the first use.
pub struct Peers {
    /// This rank.
    pub rank: u32,
    /// By rank: where it is for the kernels of this rank.
    pub bases: Vec<u64>,
    /// Blocks of a kernel that run side by side on the device of any rank, together with those of its other ranks.
    pub most_blocks: u32,
    /// By bit: ranks of other processes.
    pub foreign: u8,
    /// Keeps it there.
    pub memory: Box<dyn Any + Send + Sync>,
}

impl Peers {
    /// Whether a rank is of another process.
    #[must_use]
    pub fn is_foreign(&self, rank: u32) -> bool {
        self.foreign >> rank & 1 == 1
    }
}

/// A word that releases every wait on the device once it is not zero.
#[derive(Debug, Default)]
pub struct AbortWord(AtomicU32);

impl AbortWord {
    /// Releases the waits.
    pub fn set(&self) {
        // Release: what the aborting thread wrote before (error code, reason) is visible to who sees the word.
        self.0.store(1, Ordering::Release);
    }

    /// Whether it is set.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}

/// When a device did what it tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Just now: who tells it is who does it.
    Now,
    /// What the device said of it was lost.
    Past {
        /// `CLOCK_MONOTONIC` when it had happened, at the latest.
        host_ns: u64,
    },
    /// When its timer came to this.
    At {
        /// The device's timer, nanoseconds.
        timer_ns: u64,
        /// `CLOCK_MONOTONIC` then, as far as that is known; never later than now.
        host_ns: u64,
    },
}

/// What the device reports while it runs; on a GPU the kernel writes the same into a ring that the host drains.
/// Called on the device's threads: must be quick and must not call the device.
pub trait Observer: Any + Send + Sync {
    /// The first work of a channel for `op` began; `replay` is 0 for an eager launch.
    fn channel_started(&self, op: u32, replay: u32, channel: u8, when: When);
    /// That channel's part of `op` was done (`aborted`: given up).
    fn channel_stopped(&self, op: u32, replay: u32, channel: u8, aborted: bool, when: When);
    /// Something moved: called at least once in every stretch of time in which it did.
    fn moved(&self) {}
    /// What it waits for, of all that does the last to say so: called again and again in a long wait.
    fn waits(&self, _waits: Waits) {}
    /// The work of `op` on this channel found a slot whose tag is `theirs`: the rank at the other end does something
    /// else. The kernel moves nothing any more and waits for the abort word, so that whoever waits for it finds the
    /// reason in place. Told at most once a launch.
    fn mismatch(&self, op: u32, replay: u32, channel: u8, theirs: u32);
    /// All work of the launch is done or given up.
    fn launch_finished(&self, replay: u32, aborted: bool);
}
