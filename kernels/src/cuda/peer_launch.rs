//! One launch of a peer kernel: kernel number, argument, blocks and threads.
//!
//! Each of [`super::one_shot`], [`super::collective`], [`super::messages`], [`super::copy_engine`] and [`super::tiles`] makes launches from a table
//! of kernels of its own. [`super::peer_operation`] numbers the kernels through all tables and chooses the module.

use std::ffi::c_void;

use ringsight_records::{DataType, ReduceOp};

use super::{
    layout::{Collective, CopyEngineCall, Head, Messages, OneShot},
    peer_memory::MAY_ZERO_COPY,
};

/// Threads of a block that move no data: `SERVICE_THREADS` in `cuda/barrier.cuh`.
pub(super) const SERVICE_THREADS: u32 = 32;

/// The most blocks of a launch; twice as many if they have half the threads.
///
/// All blocks of a kernel must run at once on every rank, since they wait for those of the other ranks. If two communicators' kernels each got
/// room for only some of their blocks, one on one GPU and the other on another, both would wait for ever. A GPU with 128 multiprocessors holds
/// two blocks on each, so this limit leaves room for four kernels, as NCCL's 32 channels do.
pub(super) const MAX_BLOCKS: u32 = 64;

/// A launch of a peer kernel.
#[derive(Clone, Debug)]
pub struct PeerLaunch {
    /// The kernel's argument. The caller sets its [`Head`] with [`PeerArguments::report_to`].
    pub arguments: PeerArguments,
    /// The kernel's number: within its module's table, and in a finished operation among
    /// [`PeerOperation::kernels`](super::PeerOperation::kernels).
    pub kernel: usize,
    /// Number of blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
}

/// The argument of a peer kernel.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack of the launching call; a collective must not allocate"
)]
pub enum PeerArguments {
    /// For [`super::one_shot`].
    OneShot(OneShot),
    /// For [`super::collective`] and [`super::tiles`].
    Collective(Collective),
    /// For [`super::messages`]. Boxed: the other variants are moved with their launch and must not take 4 KiB.
    Messages(Box<Messages>),
    /// For [`super::copy_engine`].
    CopyEngine(CopyEngineCall),
}

impl PeerArguments {
    /// Sets where the kernel reports to. The operation number stays.
    pub fn report_to(&mut self, head: Head) {
        let own = self.head_mut();
        *own = Head { op: own.op, ..head };
    }

    fn head_mut(&mut self) -> &mut Head {
        match self {
            Self::OneShot(arguments) => &mut arguments.call.head,
            Self::Collective(arguments) => &mut arguments.call.head,
            Self::Messages(arguments) => &mut arguments.head,
            Self::CopyEngine(arguments) => &mut arguments.call.head,
        }
    }

    /// The argument as the driver takes it.
    pub fn as_mut_ptr(&mut self) -> *mut c_void {
        match self {
            Self::OneShot(arguments) => std::ptr::from_mut(arguments).cast(),
            Self::Collective(arguments) => std::ptr::from_mut(arguments).cast(),
            Self::Messages(arguments) => std::ptr::from_mut(&mut **arguments).cast(),
            Self::CopyEngine(arguments) => std::ptr::from_mut(arguments).cast(),
        }
    }

    /// Whether programmatic dependent launch may be used: the GPU then places the kernel while the one before it in its stream ends, and the
    /// kernel waits for that end itself (`await_kernels_before` in platform.cuh).
    ///
    /// Short operations gain by it. Zero-copy operations lose: 512 MiB took 8 % longer, presumably because its blocks are then spread unevenly
    /// over the multiprocessors. Copy-engine kernels do not wait by themselves.
    #[must_use]
    pub fn may_overlap(&self) -> bool {
        match self {
            Self::OneShot(_) => true,
            Self::Collective(arguments) => arguments.zero_copy == 0,
            Self::Messages(arguments) => {
                let messages = &arguments.message[..arguments.messages as usize];
                messages
                    .iter()
                    .all(|message| message.peer_address & MAY_ZERO_COPY == 0)
            }
            Self::CopyEngine(_) => false,
        }
    }

    /// Tells the exit kernel that the host could not queue the copies.
    pub fn set_copies_failed(&mut self) {
        if let Self::CopyEngine(arguments) = self {
            arguments.copies_failed = 1;
        }
    }
}

impl PeerLaunch {
    /// Whether launching it by an executable graph is faster, where the host has one for its kernel.
    ///
    /// A graph takes the host half as long if the argument is small. But the GPU places the kernel only when the one before it has ended. A
    /// kernel that would otherwise overlap (`overlaps`, [`PeerArguments::may_overlap`]) therefore gains only if the host's part takes longer than
    /// the GPU's (docs/decisions/0006-eager-launch-by-graph.md).
    #[must_use]
    pub fn gains_by_graph(&self, overlaps: bool) -> bool {
        /// Bytes of all ranks' parts together. Between two ranks they take at most 4 µs.
        const SHORT: u64 = 64 << 10;
        let bytes = match &self.arguments {
            PeerArguments::OneShot(arguments) => arguments.bytes(),
            PeerArguments::Collective(arguments) => arguments.longest_part * u64::from(arguments.call.ranks),
            // The argument of messages has 4 KiB. Entry and exit kernels share theirs.
            PeerArguments::Messages(_) | PeerArguments::CopyEngine(_) => return false,
        };
        !overlaps || bytes <= SHORT
    }
}

/// The number, among the kernels that sum or average, of the one for this element type and number of ranks: float32, float16 and bfloat16, each
/// among 2, 4 and 8 ranks. `None` if there is none.
pub(super) fn sum_kernel(reduce_op: ReduceOp, data_type: DataType, ranks: u32) -> Option<usize> {
    if !matches!(reduce_op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum) {
        return None;
    }
    let types = [DataType::Float32, DataType::Float16, DataType::Bfloat16];
    let element = types.iter().position(|own| *own == data_type)?;
    let ranks = [2, 4, 8].iter().position(|own| *own == ranks)?;
    Some(3 * element + ranks)
}
