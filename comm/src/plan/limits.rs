//! What the ranks' environments leave to [the table](super::table): all of them come to the same limits, so that all make the same choice.

use ringsight_records::{Algorithm, Function};

use super::allowed::Allowed;
use crate::{env, error::Result, op::DataPath};

/// The most that [`Limits::straight_bytes_of`] is by default.
pub const STRAIGHT_BYTES: u64 = 8 << 20;

/// [`Limits::push_bytes`] by default: there is a fence for each chunk, and nothing to reduce at first.
pub const PUSH_BYTES: u64 = 64 << 20;

/// [`Limits::engine_bytes`] by default: copies reach 388 GB/s where stores among four reach 354, but begin and end some 20 µs later
/// (`docs/decisions/0005-copy-engines.md`).
pub const ENGINE_BYTES: u64 = 512 << 20;

/// [`Limits::piece_bytes`] by default: a copy takes 5 µs to begin, a meeting 10 (`docs/decisions/0005-copy-engines.md`), and 346 go by for so much.
pub const PIECE_BYTES: u64 = 128 << 20;

/// Of one rank, or what all ranks have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the larger of a rank's buffers from which on operations may go straight between callers' buffers (`RINGSIGHT_STRAIGHT_BYTES`); `None`:
    /// as is best for each.
    pub straight_bytes: Option<u64>,
    /// Bytes of all ranks together from which on the contributions of reductions that go so are pushed to who reduces them, and not read
    /// where they are (`RINGSIGHT_PUSH_BYTES`).
    pub push_bytes: u64,
    /// Bytes of the larger of a rank's buffers from which on copy engines do what they can (`RINGSIGHT_ENGINE_BYTES`); 0: whatever they can, as
    /// [`Limits::without_kernels`].
    pub engine_bytes: u64,
    /// The same from which on they move what all_reduces and reduce_scatters move, and kernels only reduce (`RINGSIGHT_ENGINE_REDUCE_BYTES`); `None`: as
    /// is best for each, `u64::MAX`: never.
    pub engine_reduce_bytes: Option<u64>,
    /// The most bytes that one of these copies moves (`RINGSIGHT_ENGINE_PIECE_BYTES`), if there is room for two of each other rank's
    /// ([`ringsight_kernels::cuda::tiles::tile_bytes`]).
    pub piece_bytes: u64,
    /// Algorithms and protocols that are not left out.
    pub allowed: Allowed,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            straight_bytes: None,
            push_bytes: PUSH_BYTES,
            engine_bytes: ENGINE_BYTES,
            engine_reduce_bytes: None,
            piece_bytes: PIECE_BYTES,
            allowed: Allowed::default(),
        }
    }
}

impl Limits {
    /// Bytes of [`Limits::to_bytes`].
    pub const BYTES: usize = 40 + Allowed::BYTES;

    /// As the environment says to a rank whose `CTAPolicy` is zero, or is not.
    ///
    /// # Errors
    /// A variable with an impossible value.
    pub fn from_environment(zero_cta: bool) -> Result<Self> {
        let is_straight = !env::switch("NCCL_P2P_DIRECT_DISABLE", false);
        let straight_bytes = env::number("RINGSIGHT_STRAIGHT_BYTES")?;
        // Copy engines, too, write into callers' buffers.
        let engine_bytes = |name| -> Result<Option<u64>> {
            let bytes: Option<u64> = env::number(name)?;
            Ok(bytes.or((!is_straight).then_some(u64::MAX)))
        };
        let limits = Self {
            straight_bytes: if is_straight {
                straight_bytes
            } else {
                Some(u64::MAX)
            },
            push_bytes: env::number("RINGSIGHT_PUSH_BYTES")?.unwrap_or(PUSH_BYTES),
            engine_bytes: engine_bytes("RINGSIGHT_ENGINE_BYTES")?.unwrap_or(ENGINE_BYTES),
            engine_reduce_bytes: engine_bytes("RINGSIGHT_ENGINE_REDUCE_BYTES")?,
            piece_bytes: env::number("RINGSIGHT_ENGINE_PIECE_BYTES")?.unwrap_or(PIECE_BYTES),
            allowed: Allowed::from_environment()?,
        };
        Ok(if zero_cta {
            limits.without_kernels()
        } else {
            limits
        })
    }

    /// Of a rank whose `CTAPolicy` is zero: no kernel does what copy engines can, however short it is; if these may do anything.
    #[must_use]
    pub fn without_kernels(self) -> Self {
        let never = self.engine_bytes == u64::MAX;
        Self {
            engine_bytes: if never { u64::MAX } else { 0 },
            ..self
        }
    }

    /// Bytes of the larger of a rank's buffers from which on copy engines may do an operation among so many ranks, or move what it reduces; `u64::MAX`:
    /// never. Of what is reduced among two, an all_reduce gains from less, and a reduce_scatter nothing (`docs/decisions/0005-copy-engines.md`).
    #[must_use]
    pub fn engine_bytes_of(&self, function: Function, ranks: u32) -> u64 {
        let reduced = |best| self.engine_reduce_bytes.unwrap_or(best);
        let (algorithm, bytes) = match function {
            Function::AllReduce if ranks > 2 => (Algorithm::TwoShot, reduced(ENGINE_BYTES)),
            Function::AllReduce => (Algorithm::TwoShot, reduced(ENGINE_BYTES / 2)),
            Function::ReduceScatter if ranks > 2 => (Algorithm::Direct, reduced(ENGINE_BYTES)),
            Function::AllGather | Function::AlltoAll => (Algorithm::Direct, self.engine_bytes),
            _ => return u64::MAX,
        };
        if self.allowed.has(function, algorithm, DataPath::CopyEngine) {
            bytes
        } else {
            u64::MAX
        }
    }

    /// The fewest of any function.
    #[must_use]
    pub fn least_engine_bytes(&self, ranks: u32) -> u64 {
        let all = Function::ALL
            .iter()
            .map(|function| self.engine_bytes_of(*function, ranks));
        all.min().unwrap_or(u64::MAX)
    }

    /// Whether copy engines may do anything.
    #[must_use]
    pub fn have_engines(&self, ranks: u32) -> bool {
        self.least_engine_bytes(ranks) < u64::MAX
    }

    /// Whether nothing goes straight.
    #[must_use]
    pub fn never_straight(&self) -> bool {
        self.straight_bytes == Some(u64::MAX)
    }

    /// [`Limits::straight_bytes`] of a function among so many ranks. What goes straight begins with one more way over NVLink, and ends with a fence and
    /// another, 3 µs in all. Among more than two, reductions in lines have few registers for what is on its way. Where each is better was measured:
    /// `docs/decisions/0003-zero-copy.md`.
    #[must_use]
    pub fn straight_bytes_of(&self, function: Function, ranks: u32) -> u64 {
        let reduces = function.reduces();
        self.straight_bytes.unwrap_or(match (ranks > 2, reduces) {
            (false, true) => 5 << 20,
            // As fast in lines as far as this.
            (false, false) if matches!(function, Function::Gather | Function::Scatter) => STRAIGHT_BYTES,
            (false, false) => 4 << 20,
            (true, false) if function == Function::Broadcast => STRAIGHT_BYTES,
            (true, true) if function == Function::Reduce => 3 << 20,
            (true, true) => 5 << 19,
            (true, false) if function.is_p2p() => 9 << 18,
            (true, false) => 9 << 19,
        })
    }

    /// What both leave: what is not to be on one rank is not on any.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        // `most`: what is best for any is no more.
        let both = |one: Option<u64>, other: Option<u64>, most| match (one, other) {
            (None, None) => None,
            (one, other) => Some(one.unwrap_or(most).max(other.unwrap_or(most))),
        };
        Self {
            straight_bytes: both(self.straight_bytes, other.straight_bytes, STRAIGHT_BYTES),
            push_bytes: self.push_bytes.max(other.push_bytes),
            engine_bytes: self.engine_bytes.max(other.engine_bytes),
            engine_reduce_bytes: both(self.engine_reduce_bytes, other.engine_reduce_bytes, ENGINE_BYTES),
            piece_bytes: self.piece_bytes.max(other.piece_bytes),
            allowed: self.allowed.and(&other.allowed),
        }
    }

    /// As a rank tells the others.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        // From nothing on is from one byte on.
        let told = |bytes: Option<u64>| bytes.map_or(0, |bytes| bytes.max(1)).to_le_bytes();
        bytes[..8].copy_from_slice(&told(self.straight_bytes));
        bytes[8..16].copy_from_slice(&self.push_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.engine_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&told(self.engine_reduce_bytes));
        bytes[32..40].copy_from_slice(&self.piece_bytes.to_le_bytes());
        bytes[40..].copy_from_slice(&self.allowed.to_bytes());
        bytes
    }

    /// What [`Limits::to_bytes`] gave; `None` for anything of another length.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (straight, rest) = bytes.split_first_chunk()?;
        let (push, rest) = rest.split_first_chunk()?;
        let (engine, rest) = rest.split_first_chunk()?;
        let (engine_reduce, rest) = rest.split_first_chunk()?;
        let (piece, allowed) = rest.split_first_chunk()?;
        let heard = |bytes: &[u8; 8]| Some(u64::from_le_bytes(*bytes)).filter(|bytes| *bytes > 0);
        Some(Self {
            straight_bytes: heard(straight),
            push_bytes: u64::from_le_bytes(*push),
            engine_bytes: u64::from_le_bytes(*engine),
            engine_reduce_bytes: heard(engine_reduce),
            piece_bytes: u64::from_le_bytes(*piece),
            allowed: Allowed::from_bytes(allowed.try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(straight_bytes: Option<u64>) -> Limits {
        Limits {
            straight_bytes,
            ..Limits::default()
        }
    }

    #[test]
    fn what_one_rank_is_told_holds_for_all() {
        let both = |one, other| from(one).and(&from(other)).straight_bytes;
        assert_eq!(both(None, None), None);
        assert_eq!(both(Some(1), Some(7)), Some(7));
        assert_eq!(both(Some(1), None), Some(STRAIGHT_BYTES));
        assert_eq!(both(None, Some(u64::MAX)), Some(u64::MAX));
    }

    #[test]
    fn copy_engines_do_what_is_short_only_if_no_rank_wants_kernels() {
        let all = Limits::default();
        assert_eq!(all.without_kernels().and(&all).engine_bytes, ENGINE_BYTES);
        assert_eq!(all.without_kernels().and(&all.without_kernels()).engine_bytes, 0);
        // What is reduced needs kernels in any case.
        let reduced = [Function::AllReduce, Function::ReduceScatter];
        let of = |limits: Limits, ranks| reduced.map(|function| limits.engine_bytes_of(function, ranks));
        assert_eq!(of(all.without_kernels(), 4), [ENGINE_BYTES; 2]);
        assert_eq!(of(all, 2), [ENGINE_BYTES / 2, u64::MAX]);
        let never = Limits {
            engine_bytes: u64::MAX,
            engine_reduce_bytes: Some(u64::MAX),
            ..all
        };
        assert!(all.have_engines(2) && !never.and(&all.without_kernels()).have_engines(2));
        assert!(!never.without_kernels().have_engines(2));
        let reduces = Limits {
            engine_reduce_bytes: Some(7),
            ..never
        };
        assert!(reduces.have_engines(2) && !reduces.and(&never).have_engines(2));
        assert_eq!((of(reduces, 4), of(reduces, 2)), ([7; 2], [7, u64::MAX]));
        assert_eq!(of(reduces.and(&all), 4), [ENGINE_BYTES; 2]);
        assert_eq!(reduces.least_engine_bytes(4), 7);
        assert_eq!(reduces.engine_bytes_of(Function::AllGather, 2), u64::MAX);
    }

    #[test]
    fn ranks_tell_each_other_of_their_limits() {
        for told in [None, Some(1), Some(STRAIGHT_BYTES), Some(u64::MAX)] {
            let limits = Limits {
                engine_reduce_bytes: told,
                piece_bytes: 1 << 21,
                ..from(told).without_kernels()
            };
            assert_eq!(Limits::from_bytes(&limits.to_bytes()), Some(limits));
        }
        assert_eq!(Limits::from_bytes(&from(Some(0)).to_bytes()), Some(from(Some(1))));
        assert_eq!(Limits::from_bytes(&[0; 3]), None);
    }
}
