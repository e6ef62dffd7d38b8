//! Launches of the kernels among peers: one collective each, or any number of messages.

use std::ffi::CStr;

use ringsight_records::{Algorithm, DataType, ReduceOp};

use super::{
    exchange,
    gates::{self, Between},
    layout::{Combination, Exchange, Gate, Head, Messages, OneShot, PeerCall},
    messages, one_shot,
    peers::{IS_LONG, MAX_PEERS},
    pieces,
    program::{address_error, argument, combination},
};
use crate::{
    launch::{Connections, Launch, Scalar, Work},
    schedule::WorkError,
};

/// Threads of a block that move no data: `SERVICE` in `cuda/meeting.cuh`.
pub(super) const SERVICE: u32 = 32;

/// The most blocks of a launch. Kernels of several communicators may run at a time, and each needs room for all of its blocks at
/// once on every rank, since they wait for those of the other ranks: if two kernels had room for a part of theirs each, one on one
/// GPU and the other on another, both would wait for ever. On GPUs with 128 multiprocessors or more, of which each has room for two
/// blocks, this leaves room for four, as NCCL's 32 channels do. Of blocks of half the threads there may be twice as many.
pub(super) const MOST_BLOCKS: u32 = 64;

/// A launch of one of the kernels.
#[derive(Clone, Debug)]
pub struct PeerLaunch {
    /// Its argument, but for its [`Head`].
    pub arguments: PeerArguments,
    /// The kernel's number in [`PeerLaunch::kernels`].
    pub kernel: usize,
    /// Blocks.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
    /// What is done behind it, before the next kernel by number, which is given the same.
    pub between: Option<Between>,
}

/// The one argument of a kernel.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "on the stack of the call that launches it: a collective's shall not allocate"
)]
pub enum PeerArguments {
    /// Of those of [`one_shot`].
    OneShot(OneShot),
    /// Of those of [`exchange`].
    Exchange(Exchange),
    /// Of those of [`messages`]. The others, which are moved with their launch, are not to take the 4 KiB of these.
    Messages(Box<Messages>),
    /// Of those of [`gates`].
    Gate(Gate),
}

impl PeerArguments {
    /// It reports there, of its operation, whatever `head` says of that.
    pub fn report_to(&mut self, head: Head) {
        let own = self.head_mut();
        *own = Head { op: own.op, ..head };
    }

    fn head_mut(&mut self) -> &mut Head {
        match self {
            Self::OneShot(arguments) => &mut arguments.call.head,
            Self::Exchange(arguments) => &mut arguments.call.head,
            Self::Messages(arguments) => &mut arguments.head,
            Self::Gate(arguments) => &mut arguments.call.head,
        }
    }

    /// It as the kernel takes it.
    pub fn as_mut_ptr(&mut self) -> *mut std::ffi::c_void {
        match self {
            Self::OneShot(arguments) => std::ptr::from_mut(arguments).cast(),
            Self::Exchange(arguments) => std::ptr::from_mut(arguments).cast(),
            Self::Messages(arguments) => std::ptr::from_mut(&mut **arguments).cast(),
            Self::Gate(arguments) => std::ptr::from_mut(arguments).cast(),
        }
    }

    /// Whether its kernel may be brought while the one before it in its stream ends (`await_kernels_before` in platform.cuh): what is short
    /// gains by it. What goes straight between buffers loses: 512 MiB took 8 % longer, presumably since its blocks are not spread evenly over the
    /// multiprocessors then. Kernels before and behind copies do not wait.
    #[must_use]
    pub fn may_overlap(&self) -> bool {
        match self {
            Self::OneShot(_) => true,
            Self::Exchange(arguments) => arguments.straight == 0,
            Self::Messages(arguments) => {
                let messages = &arguments.message[..arguments.messages as usize];
                messages.iter().all(|message| message.place & IS_LONG == 0)
            }
            Self::Gate(_) => false,
        }
    }

    /// Tells the kernel behind copies that these could not be made.
    pub fn give_up(&mut self) {
        if let Self::Gate(arguments) = self {
            arguments.gives_up = 1;
        }
    }
}

impl PeerLaunch {
    /// Names of all kernels, by number.
    pub fn kernels() -> impl Iterator<Item = &'static CStr> {
        one_shot::KERNELS
            .into_iter()
            .chain(exchange::KERNELS)
            .chain(messages::KERNELS)
            .chain(gates::KERNELS)
            .chain(pieces::KERNELS)
    }

    /// Whether it is better to launch it by an executable graph, where the host has one for its kernel: that takes the host half as long if the
    /// argument is small. But the GPU brings the kernel only when the one before it has ended; so of those that come earlier otherwise (`overlaps`,
    /// [`PeerArguments::may_overlap`]) only such gain of which the host's part takes longer than the GPU's (docs/decisions/0006-eager-launch-by-graph.md).
    #[must_use]
    pub fn gains_by_graph(&self, overlaps: bool) -> bool {
        /// Of all ranks' parts together: between two, 4 µs at most.
        const SHORT: u64 = 64 << 10;
        let bytes = match &self.arguments {
            PeerArguments::OneShot(arguments) => arguments.bytes(),
            PeerArguments::Exchange(arguments) => arguments.piece * u64::from(arguments.call.ranks),
            // Their argument has 4 KiB; that of a gate is given to two kernels.
            PeerArguments::Messages(_) | PeerArguments::Gate(_) => return false,
        };
        !overlaps || bytes <= SHORT
    }

    /// The kernel for `launch`; `None` if that is to run channel programs.
    ///
    /// # Errors
    /// Work among peers that is not alone, or whose buffer does not stand at a multiple of its elements' size.
    pub fn new(launch: &Launch) -> Result<Option<Self>, WorkError> {
        let among_peers = launch.channels.iter().find_map(|channel| {
            let mut works = channel.work.iter();
            works.find_map(|work| Some((channel.channel, work, work.connections.peers()?)))
        });
        let Some((channel, work, peers)) = among_peers else {
            return Ok(None);
        };
        let all = || launch.channels.iter().flat_map(|channel| &channel.work);
        if work.function.is_p2p() && launch.channels.len() == 1 && all().all(Work::is_message_among_peers) {
            let mut launch = messages::launch(&launch.channels[0].work, channel, peers)?;
            launch.kernel += one_shot::KERNELS.len() + exchange::KERNELS.len();
            return Ok(Some(launch));
        }
        if all().count() != 1 {
            return Err(WorkError(format!(
                "op {} ({}): work among peers shares its launch",
                work.op, work.function
            )));
        }
        address_error(work)?;
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
                // The kernels that sum have a factor.
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
        if let Connections::Engines { window, offset } = &work.connections {
            let mut launch = gates::launch(work, call, window, *offset).ok_or_else(|| {
                WorkError(format!(
                    "op {} ({}): copy engines cannot do it",
                    work.op, work.function
                ))
            })?;
            launch.kernel += one_shot::KERNELS.len() + exchange::KERNELS.len() + messages::KERNELS.len();
            if let Some(Between::Pieces(pieces)) = &mut launch.between {
                pieces.kernel += launch.kernel + gates::KERNELS.len();
                pieces.gate += launch.kernel;
            }
            return Ok(Some(launch));
        }
        Ok(Some(match work.algorithm {
            Algorithm::OneShot => one_shot::launch(work, call, peers.most_blocks),
            _ => {
                let mut launch = exchange::launch(work, call, peers);
                launch.kernel += one_shot::KERNELS.len();
                launch
            }
        }))
    }
}

/// Which of the kernels it is that sum elements of one type among one number of ranks, or take the average of them: float32, float16 and bfloat16, each
/// among 2, 4 and 8.
pub(super) fn kernel_of_sum(reduce_op: ReduceOp, data_type: DataType, ranks: u32) -> Option<usize> {
    if !matches!(reduce_op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PreMulSum) {
        return None;
    }
    let types = [DataType::Float32, DataType::Float16, DataType::Bfloat16];
    let element = types.iter().position(|own| *own == data_type)?;
    let ranks = [2, 4, 8].iter().position(|own| *own == ranks)?;
    Some(3 * element + ranks)
}
