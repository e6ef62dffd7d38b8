//! Launch parameters: what the planner hands to a device.
//!
//! A [`Launch`] holds [`Work`] by channel; a work says over which [`Connections`] its bytes go. Everything here is plain data that
//! the host's planner makes and a device reads. The device reports back through an [`Observer`].

use std::{
    any::Any,
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use ringsight_records::{Algorithm, DataType, Function, ReduceOp, Waits};

use crate::fifo::Fifo;

/// Why a [`Work`] cannot run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkError(pub String);

impl fmt::Display for WorkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WorkError {}

/// One kernel launch: the work of every channel of one plan.
pub struct Launch {
    /// Channels with work, in channel order. They run side by side.
    pub channels: Vec<ChannelWork>,
    /// Checked in every wait. Once it is set, the kernel returns without finishing.
    pub abort: Arc<AbortWord>,
    /// Receives the device's reports.
    pub observer: Arc<dyn Observer>,
    /// Peer memory of the communicator, if it has some. A channel program that waits long looks there whether the previous rank has
    /// begun an operation of the peer kernels instead.
    pub peers: Option<Arc<PeerMemory>>,
}

/// Work of one channel. Collectives run one after another in this order. The sends and receives of one launch run side by side after
/// them, since the order in which peers serve them is not known.
pub struct ChannelWork {
    /// Channel number.
    pub channel: u8,
    /// Its work.
    pub work: Vec<Work>,
}

/// One channel's part of one operation.
pub struct Work {
    /// Operation number, as the observer reports it.
    pub op: u32,
    /// Hash of the caller's request: never 0, and equal on all ranks that make the same call. It travels with every slot. A rank that
    /// takes a slot with another tag calls [`Observer::mismatch`].
    pub tag: u32,
    /// The function.
    pub function: Function,
    /// The algorithm, equal on all ranks. Rings run [`Algorithm::Ring`] or [`Algorithm::OneShot`]. Peer memory runs
    /// [`Algorithm::OneShot`], [`Algorithm::TwoShot`] or [`Algorithm::Direct`]. Messages run [`Algorithm::Direct`]. Ignored for
    /// [`Connections::Local`].
    pub algorithm: Algorithm,
    /// Element type.
    pub data_type: DataType,
    /// Reduction; [`ReduceOp::None`] for functions that do not reduce.
    pub reduce_op: ReduceOp,
    /// The factor of [`ReduceOp::PreMulSum`] on this rank.
    pub scalar: Scalar,
    /// Address of the send buffer; 0 if the function has none on this rank.
    pub send: usize,
    /// Address of the receive buffer; 0 if the function has none on this rank.
    pub recv: usize,
    /// Elements of the operation as the caller gave them: per rank for AllGather, ReduceScatter, AlltoAll, Gather, Scatter.
    pub count: usize,
    /// This channel's part of the elements that channels divide among themselves
    /// ([`divisible`](crate::schedule::divisible)). The parts of all channels cover them without overlap.
    pub part: Range<usize>,
    /// This rank.
    pub rank: u32,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Root of a rooted function, peer of a message over peer memory, else 0.
    pub root: u32,
    /// What its bytes go over.
    pub connections: Connections,
    /// Whether peer kernels move it between callers' buffers without copies in between.
    pub zero_copy: ZeroCopy,
    /// With zero-copy: whether contributions are pushed to the rank that reduces them, rather than loaded by it. Equal on all ranks.
    pub pushes: bool,
}

/// Whether a peer-memory operation may be zero-copy: each rank reads and writes the other ranks' buffers.
///
/// All ranks agree on whether it is [`ZeroCopy::Off`]. Otherwise each rank says whether its own buffers can be reached, and the kernels
/// take the zero-copy path only if all can. Nobody but the sender of a message uses the send buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ZeroCopy {
    /// Bytes go through peer memory.
    #[default]
    Off,
    /// The operation qualifies, but some rank's kernels cannot reach this rank's buffers.
    Unreachable,
    /// Kernels of all ranks of this process reach this rank's buffers. Kernels of another process reach them once that process has
    /// imported the handles that this rank has exported.
    Reachable {
        /// The allocation of the send buffer.
        send: ExportedBuffer,
        /// The allocation of the receive buffer.
        recv: ExportedBuffer,
    },
}

/// A caller's allocation that a rank has exported to other processes. The default value stands for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportedBuffer {
    /// Its start address on this rank.
    pub start: u64,
    /// Its generation, from 1 on, since numbers are reused; 0: nothing was exported.
    pub generation: u32,
    /// Its number, below [`MAX_EXPORTS`](crate::cuda::peer_memory::MAX_EXPORTS).
    pub number: u32,
}

impl Work {
    /// Whether it is one end of a message over peer memory.
    #[must_use]
    pub fn is_peer_message(&self) -> bool {
        self.function.is_p2p() && matches!(self.connections, Connections::Peers(_))
    }

    /// Whether it moves no data and only passes its tag round a ring, for an operation that is made of sends and receives
    /// (see [`crate::schedule`]). The observer does not hear of such work: the operation's own work may be on other channels, or in a
    /// later launch.
    #[must_use]
    pub fn is_tag_only(&self) -> bool {
        matches!(self.connections, Connections::Ring { .. })
            && matches!(
                self.function,
                Function::AlltoAll | Function::Gather | Function::Scatter
            )
            && self.part.is_empty()
    }
}

/// The factor of [`ReduceOp::PreMulSum`]: one element of the operation's type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scalar {
    /// No factor: all other reductions.
    #[default]
    None,
    /// The element itself, in the low bytes.
    Immediate(u64),
    /// The address of the element. The device reads it when the work begins to run, at each replay anew.
    Device(usize),
}

impl Scalar {
    /// The address that the device reads; 0 if there is none.
    #[must_use]
    pub const fn address(self) -> usize {
        match self {
            Self::Device(address) => address,
            Self::None | Self::Immediate(_) => 0,
        }
    }
}

/// What one channel's work goes over.
pub enum Connections {
    /// Nothing: one rank, or a send to itself paired with its receive (`send` and `recv` both set).
    Local,
    /// A ring of FIFOs. All FIFOs of a ring have slots of one size, on every rank.
    Ring {
        /// Ranks in ring order, beginning with this one: data goes from `order[0]` to `order[1]` over `next`.
        order: Arc<[u32]>,
        /// From the previous rank.
        prev: Arc<Fifo>,
        /// To the next rank.
        next: Arc<Fifo>,
    },
    /// A FIFO to one peer.
    Send(Arc<Fifo>),
    /// A FIFO from one peer.
    Recv(Arc<Fifo>),
    /// Peer memory: this rank's kernels write into the memory of every other rank. A collective is then the only work of its launch.
    /// Messages share a launch with messages only.
    Peers(Arc<PeerMemory>),
    /// Copy engines (CE), which write into the other ranks' part of a registered window, between an entry and an exit kernel that
    /// synchronise the ranks through peer memory. Such a collective is the only work of its launch.
    CopyEngine {
        /// The window. It holds the receive buffers, or the send buffers of a ReduceScatter.
        window: Arc<Window>,
        /// Byte offset of that buffer in the window, equal on all ranks.
        offset: u64,
    },
}

impl Connections {
    /// The peer memory that it uses, if any.
    #[must_use]
    pub fn peers(&self) -> Option<&Arc<PeerMemory>> {
        match self {
            Self::Peers(peers) => Some(peers),
            Self::CopyEngine { window, .. } => Some(&window.peers),
            Self::Local | Self::Ring { .. } | Self::Send(_) | Self::Recv(_) => None,
        }
    }
}

/// Callers' memory that all ranks have registered together (`ncclCommWindowRegister`).
pub struct Window {
    /// The peer memory through which the entry and exit kernels synchronise.
    pub peers: Arc<PeerMemory>,
    /// By rank: address of its part on this rank's device.
    pub addresses: Vec<u64>,
    /// Memory for contributions to reductions; `None` if copy engines do no reductions in this window.
    pub scratch: Option<Arc<Scratch>>,
    /// The device's streams and events for copies beside the caller's stream. The device that made it knows its type.
    pub copy_engine: Arc<dyn Any + Send + Sync>,
    /// Keeps the parts of other processes mapped.
    pub memory: Vec<Arc<dyn Any + Send + Sync>>,
}

/// Memory of all ranks of a communicator into which copy engines write contributions to reductions. Operations of one communicator run
/// one after another, so they share it.
pub struct Scratch {
    /// Bytes of a tile ([`crate::cuda::tiles::tile_bytes`]). There is room for two tiles of each other rank.
    pub tile_bytes: u64,
    /// By rank: its address on this rank's device.
    pub bases: Vec<u64>,
    /// Keeps the memory allocated or mapped.
    pub memory: Box<dyn Any + Send + Sync>,
}

/// Peer memory: a block of device memory on each rank that the kernels of all ranks write into. [`crate::cuda::peer_memory`] defines its
/// layout. It is zeroed before the first use.
pub struct PeerMemory {
    /// This rank.
    pub rank: u32,
    /// By rank: its address for this rank's kernels.
    pub bases: Vec<u64>,
    /// The most blocks that one kernel may have. All devices run as many side by side, together with kernels of their other ranks.
    pub max_blocks: u32,
    /// Bit mask: ranks of other processes.
    pub foreign: u8,
    /// Keeps the memory allocated or mapped.
    pub memory: Box<dyn Any + Send + Sync>,
}

impl PeerMemory {
    /// Whether a rank belongs to another process.
    #[must_use]
    pub fn is_foreign(&self, rank: u32) -> bool {
        self.foreign >> rank & 1 == 1
    }
}

/// A word that releases every wait on the device once it is not zero. Any thread sets it; it is never cleared.
#[derive(Debug, Default)]
pub struct AbortWord(AtomicU32);

impl AbortWord {
    /// Releases the waits.
    pub fn set(&self) {
        // Release: a thread that sees the word also sees what the aborting thread wrote before (error code, reason).
        self.0.store(1, Ordering::Release);
    }

    /// Whether it is set.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}

/// When the device did what it reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Now: the caller is the thread that does it.
    Now,
    /// Before this: the device's event was lost.
    Past {
        /// `CLOCK_MONOTONIC` nanoseconds; it had happened by then.
        host_ns: u64,
    },
    /// At this reading of the device's timer.
    At {
        /// The device's timer, nanoseconds.
        timer_ns: u64,
        /// Estimate of `CLOCK_MONOTONIC` at that moment, nanoseconds; never later than now.
        host_ns: u64,
    },
}

/// Receives a launch's reports while it runs. A GPU's kernel writes them into a ring, and the host's drain thread passes them on.
/// Called on the device's threads: methods must be quick and must not call the device.
pub trait Observer: Any + Send + Sync {
    /// A channel's first work for `op` began. `replay` is 0 for an eager launch.
    fn channel_started(&self, op: u32, replay: u32, channel: u8, when: When);
    /// A channel's part of `op` is done; `aborted`: it was given up.
    fn channel_stopped(&self, op: u32, replay: u32, channel: u8, aborted: bool, when: When);
    /// Something moved. Called at least once in every interval in which something did.
    fn moved(&self) {}
    /// What the thread that reported last waits for. Called again and again during a long wait.
    fn waits(&self, _waits: Waits) {}
    /// The work of `op` on this channel found a slot with the tag `theirs`: the rank at the other end runs another operation. The
    /// kernel moves nothing any more and waits for the abort word, so that the aborting thread can store the reason first. Called at
    /// most once a launch.
    fn mismatch(&self, op: u32, replay: u32, channel: u8, theirs: u32);
    /// All work of the launch is done or given up.
    fn launch_finished(&self, replay: u32, aborted: bool);
}
