//! What [the table](super::table) by which algorithms are chosen consists of. Every rank reads the same table with the same values, so that
//! all come to the same choice. Why a row does not serve an operation is data, too ([`Reason`]): `ringsight explain` tells it.

use std::fmt;

use ringsight_kernels::cuda::{
    collective::{has_sum_kernel, has_two_shot},
    peer_memory::one_shot_bytes,
    tiles::max_bytes,
};
use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::limits::Limits;
use crate::op::{DataPath, is_made_of_messages};

/// What the choice depends on; all of it is the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Function.
    pub function: Function,
    /// Reduction.
    pub reduce_op: ReduceOp,
    /// Of elements.
    pub data_type: DataType,
    /// [`super::Request::bytes`], or those of one message where the operation is made of several.
    pub bytes: u64,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Bytes of a FIFO slot.
    pub slot_bytes: usize,
    /// Whether all ranks' devices have programs of [`Algorithm::OneShot`].
    pub one_shot: bool,
    /// Whether all ranks' kernels reach each other's memory.
    pub peers: bool,
    /// What copy engines have to do it.
    pub engines: Engines,
    /// What the ranks' environments leave.
    pub limits: Limits,
}

impl Asked {
    /// Bytes of the larger of a rank's buffers, which is what nccl-tests calls the operation's.
    fn bytes_of_larger(&self) -> u64 {
        let is_of_messages = is_made_of_messages(self.function) && !self.function.is_p2p();
        let messages = if is_of_messages { self.ranks } else { 1 };
        self.bytes.saturating_mul(messages.into())
    }
}

/// Whether copy engines can bring an operation's data where it is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engines {
    /// The receive buffer, of a reduce_scatter the send buffer, is in no window that all ranks have registered as symmetric.
    NoWindow,
    /// Not all ranks reach those of all others in that window.
    NotReached,
    /// It is to be reduced, and begins elsewhere than kernels do or has parts that do, or there is no memory for contributions.
    Unfit,
    /// They can.
    Reach,
    /// Who asks does not know.
    Unknown,
}

/// A row of [the table](super::table::TABLE): the first whose conditions hold, and whose algorithm is possible, is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// For which functions.
    pub functions: &'static [Function],
    /// For at most so many [`Asked::bytes`] of all ranks together.
    pub max_bytes_of_all: u64,
    /// For at most so many ranks.
    pub max_ranks: u32,
    /// Arrangement of the ranks.
    pub algorithm: Algorithm,
    /// How data moves.
    pub path: DataPath,
}

/// Why a row does not serve an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
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
    NoPeers,
    /// No kernel reduces so straight between callers' buffers.
    NoStraightKernel,
    /// Some rank's policy lets kernels do what is shorter than so many bytes of the larger of a rank's buffers, and that is faster.
    ShortForEngines(u64),
    /// Copy engines are to move what is reduced from so many bytes of a buffer on.
    ShortForReducingEngines(u64),
    /// [`Engines::NoWindow`].
    NoWindow,
    /// [`Engines::NotReached`].
    NotReached,
    /// [`Engines::Unfit`].
    Unfit,
    /// [`Engines::Unknown`].
    UnknownWindow,
    /// Copy engines move so many bytes of what is reduced.
    Pieces(u64),
    /// The memory among peers holds so many bytes.
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
            Self::NoPeers => f.write_str("not all ranks' kernels reach each other's memory"),
            Self::NoStraightKernel => f.write_str(
                "no kernel reduces so straight: sums and averages of float32, float16 and bfloat16 among 2, 4 and 8 ranks",
            ),
            Self::ShortForEngines(u64::MAX) => f.write_str("RINGSIGHT_ENGINE_BYTES or NCCL_P2P_DIRECT_DISABLE leaves it out"),
            Self::ShortForEngines(least) => write!(
                f,
                "it is for at least {least} bytes of the larger of a rank's buffers, unless all ranks' CTAPolicy is zero"
            ),
            Self::ShortForReducingEngines(u64::MAX) => {
                f.write_str("RINGSIGHT_ENGINE_REDUCE_BYTES or NCCL_P2P_DIRECT_DISABLE leaves it out, or it is a reduce_scatter among two ranks")
            }
            Self::ShortForReducingEngines(least) => {
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
            Self::Pieces(most) => write!(f, "it is for at most {most} bytes, by RINGSIGHT_ENGINE_PIECE_BYTES"),
            Self::PeerMemory(most) => write!(f, "the memory among peers holds {most} bytes"),
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
    pub(super) fn refuses(&self, asked: &Asked) -> Option<Reason> {
        if !self.functions.contains(&asked.function) {
            return Some(Reason::Function);
        }
        let limits = &asked.limits;
        if !limits.allowed.has(asked.function, self.algorithm, self.path) {
            return Some(Reason::LeftOut);
        }
        // Of a message those of both of its.
        let ranks = if asked.function.is_p2p() { 2 } else { asked.ranks };
        let of_all = asked.bytes.saturating_mul(ranks.into());
        let straight_bytes = limits.straight_bytes_of(asked.function, asked.ranks);
        if self.path.is_zero_copy() && asked.bytes_of_larger() < straight_bytes {
            return Some(Reason::Short(straight_bytes));
        }
        if self.path == DataPath::Push && of_all < limits.push_bytes {
            return Some(Reason::ShortOfAll(limits.push_bytes));
        }
        if of_all > self.max_bytes_of_all {
            return Some(Reason::BytesOfAll(self.max_bytes_of_all));
        }
        if asked.ranks > self.max_ranks {
            return Some(Reason::Ranks(self.max_ranks));
        }
        if self.path.is_copy_engine() {
            let least = limits.engine_bytes_of(asked.function, asked.ranks);
            let lacks = match asked.engines {
                _ if asked.bytes_of_larger() < least => Some(if asked.function.reduces() {
                    Reason::ShortForReducingEngines(least)
                } else {
                    Reason::ShortForEngines(least)
                }),
                Engines::NoWindow => Some(Reason::NoWindow),
                Engines::NotReached => Some(Reason::NotReached),
                Engines::Unknown => Some(Reason::UnknownWindow),
                Engines::Unfit => Some(Reason::Unfit),
                Engines::Reach => None,
            };
            if lacks.is_some() {
                return lacks;
            }
        }
        self.is_impossible(asked)
    }

    /// Why there is no program, wherever the table puts its limits.
    fn is_impossible(&self, asked: &Asked) -> Option<Reason> {
        if self.algorithm != Algorithm::OneShot && !self.path.is_peer_access() {
            return None;
        }
        if asked.ranks < 2 {
            return Some(Reason::OneRank);
        }
        if asked.reduce_op == ReduceOp::PreMulSum {
            return Some(Reason::OwnFactors);
        }
        if self.algorithm == Algorithm::TwoShot && !has_two_shot(asked.function, asked.ranks as usize) {
            return Some(Reason::NobodyElse);
        }
        let (absent, most, reason): (_, _, fn(u64) -> Reason) = if self.path.is_peer_access() {
            let (most, reason): (_, fn(u64) -> Reason) = match self.algorithm {
                Algorithm::OneShot => (one_shot_bytes(asked.ranks as usize) as u64, Reason::PeerMemory),
                _ if self.path.is_copy_engine() && asked.function.reduces() => (
                    max_bytes(asked.ranks as usize, asked.limits.piece_bytes),
                    Reason::Pieces,
                ),
                _ => (u64::MAX, Reason::PeerMemory),
            };
            ((!asked.peers).then_some(Reason::NoPeers), most, reason)
        } else {
            let absent = (!asked.one_shot).then_some(Reason::NoProgram);
            (absent, asked.slot_bytes as u64, Reason::Slot)
        };
        let absent = absent.or_else(|| {
            let reduces = has_sum_kernel(asked.reduce_op, asked.data_type, asked.ranks);
            let is_for_sums =
                asked.function.reduces() && (self.path.is_zero_copy() || self.path.is_copy_engine());
            (is_for_sums && !reduces).then_some(Reason::NoStraightKernel)
        });
        absent.or((asked.bytes > most).then(|| reason(most)))
    }
}
