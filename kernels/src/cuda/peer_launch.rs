//! Launches of peer kernels: one collective each, or any number of messages.
//!
//! Each of [`one_shot`], [`collective`], [`messages`], [`copy_engine`] and [`tiles`] has a table of kernels. A kernel's number counts through
//! all tables in that order ([`PeerLaunch::kernels`]).

use std::ffi::CStr;

use ringsight_records::{Algorithm, DataType, ReduceOp};

use super::{
    collective,
    copy_engine::{self, CopyPhase},
    layout::{Collective, Combination, CopyEngineCall, Head, Messages, OneShot, PeerCall},
    messages, one_shot,
    peer_memory::{MAX_PEERS, MAY_ZERO_COPY},
    program::{argument, check_alignment, combination},
    tiles,
};
use crate::launch::{Connections, Launch, Scalar, Work, WorkError};

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
    /// The kernel's number in [`PeerLaunch::kernels`].
    pub kernel: usize,
    /// Number of blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Copy engines only: what runs behind this entry kernel, before the exit kernel. The exit kernel has the next number and the same argument.
    pub copy_phase: Option<CopyPhase>,
}

/// The argument of a peer kernel.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack of the launching call; a collective must not allocate"
)]
pub enum PeerArguments {
    /// For [`one_shot`].
    OneShot(OneShot),
    /// For [`collective`] and [`tiles`].
    Collective(Collective),
    /// For [`messages`]. Boxed: the other variants are moved with their launch and must not take 4 KiB.
    Messages(Box<Messages>),
    /// For [`copy_engine`].
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
    pub fn as_mut_ptr(&mut self) -> *mut std::ffi::c_void {
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
    /// Names of all peer kernels, by number.
    pub fn kernels() -> impl Iterator<Item = &'static CStr> {
        one_shot::KERNELS
            .into_iter()
            .chain(collective::KERNELS)
            .chain(messages::KERNELS)
            .chain(copy_engine::KERNELS)
            .chain(tiles::KERNELS)
    }

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

    /// The peer kernel for `launch`; `None` if `launch` runs channel programs.
    ///
    /// # Errors
    /// Peer work that shares its launch with other work, or a buffer that is not aligned to its element type.
    pub fn new(launch: &Launch) -> Result<Option<Self>, WorkError> {
        let peer_work = launch.channels.iter().find_map(|channel| {
            let mut works = channel.work.iter();
            works.find_map(|work| Some((channel.channel, work, work.connections.peers()?)))
        });
        let Some((channel, work, peers)) = peer_work else {
            return Ok(None);
        };
        let all = || launch.channels.iter().flat_map(|channel| &channel.work);
        if work.function.is_p2p() && launch.channels.len() == 1 && all().all(Work::is_peer_message) {
            let mut launch = messages::launch(&launch.channels[0].work, channel, peers)?;
            launch.kernel += one_shot::KERNELS.len() + collective::KERNELS.len();
            return Ok(Some(launch));
        }
        if all().count() != 1 {
            return Err(WorkError(format!(
                "op {} ({}): peer work shares its launch",
                work.op, work.function
            )));
        }
        check_alignment(work)?;
        let mut bases = [0; MAX_PEERS];
        bases[..peers.bases.len()].copy_from_slice(&peers.bases);
        let call = PeerCall {
            head: Head {
                op: work.op,
                ..Head::default()
            },
            bases,
            argument: match work.scalar {
                Scalar::Immediate(bits) => argument(work, bits),
                // Sum kernels multiply by a factor.
                _ if combination(work) == Combination::Sum => u64::from(1_f32.to_bits()),
                _ => argument(work, 0),
            },
            tag: work.tag,
            rank: work.rank,
            ranks: work.ranks,
            data_type: work.data_type.code(),
            combine: combination(work) as u8,
            channel,
            reserved: 0,
        };
        if let Connections::CopyEngine { window, offset } = &work.connections {
            let mut launch = copy_engine::launch(work, call, window, *offset).ok_or_else(|| {
                WorkError(format!(
                    "op {} ({}): copy engines cannot do it",
                    work.op, work.function
                ))
            })?;
            launch.kernel += one_shot::KERNELS.len() + collective::KERNELS.len() + messages::KERNELS.len();
            if let Some(CopyPhase::Tiles(tiles)) = &mut launch.copy_phase {
                tiles.kernel += launch.kernel + copy_engine::KERNELS.len();
                tiles.barrier_kernel += launch.kernel;
            }
            return Ok(Some(launch));
        }
        Ok(Some(match work.algorithm {
            Algorithm::OneShot => one_shot::launch(work, call, peers.max_blocks),
            _ => {
                let mut launch = collective::launch(work, call, peers);
                launch.kernel += one_shot::KERNELS.len();
                launch
            }
        }))
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
