//! The rows of the table, and when a row serves an operation ([`Row::refuses`]).
//!
//! Every rank reads the same table with the same values, so all ranks come to the same row. Why a row does not serve an operation is data
//! too ([`Reason`]): `ringsight explain` prints it.

use std::fmt;

use ringsight_kernels::cuda::{
    collective::{has_sum_kernel, has_two_shot},
    peer_memory::one_shot_bytes,
    tiles::max_bytes,
};
use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use crate::{
    op::{DataPath, is_made_of_messages},
    plan::limits::Limits,
};

/// What the choice for an operation depends on. All of it is the same on every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    /// Function.
    pub(crate) function: Function,
    /// Reduction.
    pub(crate) reduce_op: ReduceOp,
    /// Element type.
    pub(crate) data_type: DataType,
    /// [`crate::op::Request::bytes`], or those of one message where the operation is made of several.
    pub(crate) bytes: u64,
    /// Ranks of the communicator.
    pub(crate) ranks: u32,
    /// Bytes of a FIFO slot.
    pub(crate) slot_bytes: usize,
    /// Whether all ranks' devices have programs of [`Algorithm::OneShot`].
    pub(crate) one_shot: bool,
    /// Whether all ranks' kernels reach each other's memory.
    pub(crate) peer_access: bool,
    /// Whether copy engines can do it.
    pub(crate) window: WindowSupport,
    /// Limits that the ranks' environments set.
    pub(crate) limits: Limits,
}

impl Query {
    /// Bytes of the larger of a rank's buffers, which is what nccl-tests calls the operation's.
    fn larger_buffer_bytes(&self) -> u64 {
        let is_of_messages = is_made_of_messages(self.function) && !self.function.is_p2p();
        let messages = if is_of_messages { self.ranks } else { 1 };
        self.bytes.saturating_mul(messages.into())
    }
}

/// Whether copy engines can do an operation in the symmetric window that its buffer is in: the receive buffer, of a reduce_scatter the send
/// buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WindowSupport {
    /// The buffer is in no window that all ranks have registered as symmetric.
    NoWindow,
    /// Not all ranks reach the window's parts of all others.
    NotReached,
    /// The operation reduces, and its buffer or a rank's part of it is not aligned to 16 bytes, or there is no memory for contributions.
    Unfit,
    /// They can.
    Reach,
    /// The caller of `ringsightExplain` does not know.
    Unknown,
}

/// A row of [the table](super::TABLE). The first row whose conditions hold, and whose algorithm is possible, is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// For which functions.
    pub(crate) functions: &'static [Function],
    /// For at most so many [`Query::bytes`], all ranks together.
    pub(crate) max_bytes_of_all: u64,
    /// For at most so many ranks.
    pub(crate) max_ranks: u32,
    /// Arrangement of the ranks.
    pub(crate) algorithm: Algorithm,
    /// How data moves.
    pub(crate) path: DataPath,
}

/// Why a row does not serve an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// It is for other functions.
    Function,
    /// `RINGSIGHT_ALGO` or `RINGSIGHT_PROTO` leaves it out.
    LeftOut,
    /// It is for at least so many bytes of the larger of a rank's buffers.
    Short(u64),
    /// It is for at least so many bytes of all ranks together.
    ShortOfAll(u64),
    /// It is for at most so many bytes of all ranks together.
    BytesOfAll(u64),
    /// No rank but the root has others to pass anything on to.
    NobodyElse,
    /// It is for at most so many ranks.
    Ranks(u32),
    /// One rank has nobody to send to.
    OneRank,
    /// Each rank's factor (`ncclRedOpCreatePreMulSum`) is known to that rank alone.
    OwnFactors,
    /// Some rank's device has no program of it.
    NoProgram,
    /// Not all ranks' kernels reach each other's memory.
    NoPeerAccess,
    /// No zero-copy kernel does this reduction.
    NoZeroCopyKernel,
    /// It is for at least so many bytes of the larger of a rank's buffers, unless all ranks want no kernel on the SMs: kernels are faster below.
    ShortForCopyEngines(u64),
    /// It is for at least so many bytes of the larger of a rank's buffers, where copy engines move what is reduced.
    ShortForReducingCopyEngines(u64),
    /// [`WindowSupport::NoWindow`].
    NoWindow,
    /// [`WindowSupport::NotReached`].
    NotReached,
    /// [`WindowSupport::Unfit`].
    Unfit,
    /// [`WindowSupport::Unknown`].
    UnknownWindow,
    /// Copy engines move at most so many bytes of a reduction.
    Tiles(u64),
    /// Peer memory holds so many bytes.
    PeerMemory(u64),
    /// A slot of a FIFO holds so many bytes.
    Slot(u64),
    /// A row before it serves the operation.
    Earlier,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function => f.write_str("it is for other operations"),
            Self::LeftOut => f.write_str("RINGSIGHT_ALGO or RINGSIGHT_PROTO leaves it out"),
            Self::Short(least) => write!(
                f,
                "it is for at least {least} bytes of the larger of a rank's buffers"
            ),
            Self::ShortOfAll(least) => write!(f, "it is for at least {least} bytes of all ranks together"),
            Self::BytesOfAll(most) => write!(f, "it is for at most {most} bytes of all ranks together"),
            Self::NobodyElse => f.write_str("no rank but the root has others to pass anything on to"),
            Self::Ranks(most) => write!(f, "it is for at most {most} ranks"),
            Self::OneRank => f.write_str("one rank has nobody to send to"),
            Self::OwnFactors => {
                f.write_str("each rank's factor (ncclRedOpCreatePreMulSum) is known to that rank alone")
            }
            Self::NoProgram => f.write_str("some rank's device has no program of it"),
            Self::NoPeerAccess => f.write_str("not all ranks' kernels reach each other's memory"),
            Self::NoZeroCopyKernel => f.write_str(
                "no zero-copy kernel does this reduction: they do sums and averages of float32, float16 and bfloat16 among 2, 4 and 8 ranks",
            ),
            Self::ShortForCopyEngines(u64::MAX) => f.write_str("RINGSIGHT_ENGINE_BYTES or NCCL_P2P_DIRECT_DISABLE leaves it out"),
            Self::ShortForCopyEngines(least) => write!(
                f,
                "it is for at least {least} bytes of the larger of a rank's buffers, unless all ranks' CTAPolicy is zero"
            ),
            Self::ShortForReducingCopyEngines(u64::MAX) => {
                f.write_str("RINGSIGHT_ENGINE_REDUCE_BYTES or NCCL_P2P_DIRECT_DISABLE leaves it out, or it is a reduce_scatter among two ranks")
            }
            Self::ShortForReducingCopyEngines(least) => {
                write!(f, "it is for at least {least} bytes of the larger of a rank's buffers")
            }
            Self::NoWindow => f.write_str(
                "the receive buffer (of a reduce_scatter the send buffer) is in no window that all ranks registered with NCCL_WIN_COLL_SYMMETRIC",
            ),
            Self::NotReached => f.write_str("not all ranks reach the window that the buffer is in"),
            Self::UnknownWindow => f.write_str(
                "it is for buffers in symmetric windows of all ranks, of which NCCL_DEBUG_SUBSYS=INIT tells whether copy engines serve them",
            ),
            Self::Unfit => f.write_str(
                "the buffer in the window, or a part of it, begins at no multiple of 16 bytes, or some rank has no memory for contributions",
            ),
            Self::Tiles(most) => write!(f, "it is for at most {most} bytes, by RINGSIGHT_ENGINE_PIECE_BYTES"),
            Self::PeerMemory(most) => write!(f, "peer memory holds {most} bytes"),
            Self::Slot(most) => write!(f, "a slot of a FIFO holds {most} bytes"),
            Self::Earlier => f.write_str("a row before it serves the operation"),
        }
    }
}

impl Row {
    /// One that serves these functions, however many bytes and ranks there are.
    pub(super) const fn of(functions: &'static [Function], algorithm: Algorithm, path: DataPath) -> Self {
        Self {
            functions,
            max_bytes_of_all: u64::MAX,
            max_ranks: u32::MAX,
            algorithm,
            path,
        }
    }

    /// Only up to so many bytes of all ranks together.
    pub(super) const fn up_to_of_all(self, max_bytes_of_all: u64) -> Self {
        Self {
            max_bytes_of_all,
            ..self
        }
    }

    /// Only up to so many ranks.
    pub(super) const fn up_to_ranks(self, max_ranks: u32) -> Self {
        Self { max_ranks, ..self }
    }

    /// Why it does not serve an operation; `None` if it does.
    pub(super) fn refuses(&self, query: &Query) -> Option<Reason> {
        if !self.functions.contains(&query.function) {
            return Some(Reason::Function);
        }
        let limits = &query.limits;
        if !limits.allowed.has(query.function, self.algorithm, self.path) {
            return Some(Reason::LeftOut);
        }
        // Of a message those of both of its.
        let ranks = if query.function.is_p2p() { 2 } else { query.ranks };
        let of_all = query.bytes.saturating_mul(ranks.into());
        let zero_copy_bytes = limits.zero_copy_bytes_of(query.function, query.ranks);
        if self.path.is_zero_copy() && query.larger_buffer_bytes() < zero_copy_bytes {
            return Some(Reason::Short(zero_copy_bytes));
        }
        if self.path == DataPath::Push && of_all < limits.push_bytes {
            return Some(Reason::ShortOfAll(limits.push_bytes));
        }
        if of_all > self.max_bytes_of_all {
            return Some(Reason::BytesOfAll(self.max_bytes_of_all));
        }
        if query.ranks > self.max_ranks {
            return Some(Reason::Ranks(self.max_ranks));
        }
        if self.path.is_copy_engine() {
            let least = limits.copy_engine_bytes_of(query.function, query.ranks);
            let lacks = match query.window {
                _ if query.larger_buffer_bytes() < least => Some(if query.function.reduces() {
                    Reason::ShortForReducingCopyEngines(least)
                } else {
                    Reason::ShortForCopyEngines(least)
                }),
                WindowSupport::NoWindow => Some(Reason::NoWindow),
                WindowSupport::NotReached => Some(Reason::NotReached),
                WindowSupport::Unknown => Some(Reason::UnknownWindow),
                WindowSupport::Unfit => Some(Reason::Unfit),
                WindowSupport::Reach => None,
            };
            if lacks.is_some() {
                return lacks;
            }
        }
        self.is_impossible(query)
    }

    /// Why there is no program, wherever the table puts its limits.
    fn is_impossible(&self, query: &Query) -> Option<Reason> {
        if self.algorithm != Algorithm::OneShot && !self.path.is_peer_access() {
            return None;
        }
        if query.ranks < 2 {
            return Some(Reason::OneRank);
        }
        if query.reduce_op == ReduceOp::PreMulSum {
            return Some(Reason::OwnFactors);
        }
        if self.algorithm == Algorithm::TwoShot && !has_two_shot(query.function, query.ranks as usize) {
            return Some(Reason::NobodyElse);
        }
        let (absent, most, reason): (_, _, fn(u64) -> Reason) = if self.path.is_peer_access() {
            let (most, reason): (_, fn(u64) -> Reason) = match self.algorithm {
                Algorithm::OneShot => (one_shot_bytes(query.ranks as usize) as u64, Reason::PeerMemory),
                _ if self.path.is_copy_engine() && query.function.reduces() => (
                    max_bytes(query.ranks as usize, query.limits.tile_bytes),
                    Reason::Tiles,
                ),
                _ => (u64::MAX, Reason::PeerMemory),
            };
            ((!query.peer_access).then_some(Reason::NoPeerAccess), most, reason)
        } else {
            let absent = (!query.one_shot).then_some(Reason::NoProgram);
            (absent, query.slot_bytes as u64, Reason::Slot)
        };
        let absent = absent.or_else(|| {
            let reduces = has_sum_kernel(query.reduce_op, query.data_type, query.ranks);
            let is_for_sums =
                query.function.reduces() && (self.path.is_zero_copy() || self.path.is_copy_engine());
            (is_for_sums && !reduces).then_some(Reason::NoZeroCopyKernel)
        });
        absent.or((query.bytes > most).then(|| reason(most)))
    }
}
