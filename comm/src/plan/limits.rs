//! Limits that the ranks' environments set on the table of algorithms ([`super::environment`] reads them). The ranks of a communicator exchange theirs and use the strictest
//! ([`Limits::and`]), so all of them choose alike.

use ringsight_records::{Algorithm, Function};

use super::allowed::Allowed;
use crate::op::DataPath;

/// The most that [`Limits::zero_copy_bytes_of`] is by default, bytes.
pub(crate) const ZERO_COPY_BYTES: u64 = 8 << 20;

/// Default of [`Limits::push_bytes`]. Shorter operations lose by pushing: it costs a fence a chunk, and there is nothing to reduce at first.
pub(crate) const PUSH_BYTES: u64 = 64 << 20;

/// Default of [`Limits::copy_engine_bytes`]. Copies reach 388 GB/s where stores among four GPUs reach 354, but take some 20 µs more to begin and end
/// (`docs/decisions/0005-copy-engines.md`).
pub(crate) const COPY_ENGINE_BYTES: u64 = 512 << 20;

/// Default of [`Limits::tile_bytes`]. A copy takes 5 µs to begin and a barrier 10, while one of this size takes 346
/// (`docs/decisions/0005-copy-engines.md`).
pub(crate) const TILE_BYTES: u64 = 128 << 20;

/// The limits of one rank, or those that all ranks of a communicator have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Bytes of the larger of a rank's buffers from which on operations may be zero-copy (`RINGSIGHT_STRAIGHT_BYTES`); `None`: what was measured to be
    /// fastest for each function.
    pub(crate) zero_copy_bytes: Option<u64>,
    /// Bytes of all ranks together from which on contributions to zero-copy reductions are pushed to the rank that reduces them, instead of being
    /// loaded by it (`RINGSIGHT_PUSH_BYTES`).
    pub(crate) push_bytes: u64,
    /// Bytes of the larger of a rank's buffers from which on copy engines do all that they can (`RINGSIGHT_ENGINE_BYTES`); 0: at any size, as of
    /// [`Limits::with_zero_cta`]; `u64::MAX`: never.
    pub(crate) copy_engine_bytes: u64,
    /// The same for all_reduce and reduce_scatter, whose kernels then only reduce (`RINGSIGHT_ENGINE_REDUCE_BYTES`); `None`: what was measured to be
    /// fastest for each function; `u64::MAX`: never.
    pub(crate) copy_engine_reduce_bytes: Option<u64>,
    /// Most bytes that one copy of a reduction moves (`RINGSIGHT_ENGINE_PIECE_BYTES`), if there is room for two of each other rank's
    /// ([`ringsight_kernels::cuda::tiles::tile_bytes`]).
    pub(crate) tile_bytes: u64,
    /// Algorithms and protocols that the environment does not leave out.
    pub(crate) allowed: Allowed,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            zero_copy_bytes: None,
            push_bytes: PUSH_BYTES,
            copy_engine_bytes: COPY_ENGINE_BYTES,
            copy_engine_reduce_bytes: None,
            tile_bytes: TILE_BYTES,
            allowed: Allowed::default(),
        }
    }
}

impl Limits {
    /// Bytes of [`Limits::to_bytes`].
    pub(crate) const BYTES: usize = 40 + Allowed::BYTES;

    /// The same for a rank whose `CTAPolicy` is zero: copy engines do all that they can at any size, unless they may do nothing.
    #[must_use]
    pub(crate) fn with_zero_cta(self) -> Self {
        let never = self.copy_engine_bytes == u64::MAX;
        Self {
            copy_engine_bytes: if never { u64::MAX } else { 0 },
            ..self
        }
    }

    /// Bytes of the larger of a rank's buffers from which on copy engines may do an operation among `ranks` ranks, or move what it reduces; `u64::MAX`:
    /// never. Among two ranks, an all_reduce gains from half the size on, and a reduce_scatter gains nothing (`docs/decisions/0005-copy-engines.md`).
    #[must_use]
    pub(crate) fn copy_engine_bytes_of(&self, function: Function, ranks: u32) -> u64 {
        let reduced = |best| self.copy_engine_reduce_bytes.unwrap_or(best);
        let (algorithm, bytes) = match function {
            Function::AllReduce if ranks > 2 => (Algorithm::TwoShot, reduced(COPY_ENGINE_BYTES)),
            Function::AllReduce => (Algorithm::TwoShot, reduced(COPY_ENGINE_BYTES / 2)),
            Function::ReduceScatter if ranks > 2 => (Algorithm::Direct, reduced(COPY_ENGINE_BYTES)),
            Function::AllGather | Function::AlltoAll => (Algorithm::Direct, self.copy_engine_bytes),
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
    pub(crate) fn least_copy_engine_bytes(&self, ranks: u32) -> u64 {
        let all = Function::ALL
            .iter()
            .map(|function| self.copy_engine_bytes_of(*function, ranks));
        all.min().unwrap_or(u64::MAX)
    }

    /// Whether copy engines may do anything.
    #[must_use]
    pub(crate) fn use_copy_engines(&self, ranks: u32) -> bool {
        self.least_copy_engine_bytes(ranks) < u64::MAX
    }

    /// Whether no operation may be zero-copy.
    #[must_use]
    pub(crate) fn never_zero_copy(&self) -> bool {
        self.zero_copy_bytes == Some(u64::MAX)
    }

    /// [`Limits::zero_copy_bytes`] of a function among `ranks` ranks. A zero-copy kernel crosses NVLink once more when it begins, and again, with a
    /// fence, when it ends: 3 µs in all. Among more than two ranks, LL128 reductions have few registers left for data on its way. The crossovers
    /// were measured: `docs/decisions/0003-zero-copy.md`.
    #[must_use]
    pub(crate) fn zero_copy_bytes_of(&self, function: Function, ranks: u32) -> u64 {
        let reduces = function.reduces();
        self.zero_copy_bytes.unwrap_or(match (ranks > 2, reduces) {
            (false, true) => 5 << 20,
            // LL128 is as fast up to this size.
            (false, false) if matches!(function, Function::Gather | Function::Scatter) => ZERO_COPY_BYTES,
            (false, false) => 4 << 20,
            (true, false) if function == Function::Broadcast => ZERO_COPY_BYTES,
            (true, true) if function == Function::Reduce => 3 << 20,
            (true, true) => 5 << 19,
            (true, false) if function.is_p2p() => 9 << 18,
            (true, false) => 9 << 19,
        })
    }

    /// The limits of both: what one rank rules out, no rank does.
    #[must_use]
    pub(crate) fn and(&self, other: &Self) -> Self {
        // `most`: the largest of the measured values.
        let both = |one: Option<u64>, other: Option<u64>, most| match (one, other) {
            (None, None) => None,
            (one, other) => Some(one.unwrap_or(most).max(other.unwrap_or(most))),
        };
        Self {
            zero_copy_bytes: both(self.zero_copy_bytes, other.zero_copy_bytes, ZERO_COPY_BYTES),
            push_bytes: self.push_bytes.max(other.push_bytes),
            copy_engine_bytes: self.copy_engine_bytes.max(other.copy_engine_bytes),
            copy_engine_reduce_bytes: both(
                self.copy_engine_reduce_bytes,
                other.copy_engine_reduce_bytes,
                COPY_ENGINE_BYTES,
            ),
            tile_bytes: self.tile_bytes.max(other.tile_bytes),
            allowed: self.allowed.and(&other.allowed),
        }
    }

    /// As sent to the other ranks.
    #[must_use]
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        // 0 stands for `None`; from 0 bytes on is the same as from 1 byte on.
        let encoded = |bytes: Option<u64>| bytes.map_or(0, |bytes| bytes.max(1)).to_le_bytes();
        bytes[..8].copy_from_slice(&encoded(self.zero_copy_bytes));
        bytes[8..16].copy_from_slice(&self.push_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.copy_engine_bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&encoded(self.copy_engine_reduce_bytes));
        bytes[32..40].copy_from_slice(&self.tile_bytes.to_le_bytes());
        bytes[40..].copy_from_slice(&self.allowed.to_bytes());
        bytes
    }

    /// What [`Limits::to_bytes`] gave; `None` for anything of another length.
    #[must_use]
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (straight, rest) = bytes.split_first_chunk()?;
        let (push, rest) = rest.split_first_chunk()?;
        let (engine, rest) = rest.split_first_chunk()?;
        let (engine_reduce, rest) = rest.split_first_chunk()?;
        let (piece, allowed) = rest.split_first_chunk()?;
        let heard = |bytes: &[u8; 8]| Some(u64::from_le_bytes(*bytes)).filter(|bytes| *bytes > 0);
        Some(Self {
            zero_copy_bytes: heard(straight),
            push_bytes: u64::from_le_bytes(*push),
            copy_engine_bytes: u64::from_le_bytes(*engine),
            copy_engine_reduce_bytes: heard(engine_reduce),
            tile_bytes: u64::from_le_bytes(*piece),
            allowed: Allowed::from_bytes(allowed.try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(zero_copy_bytes: Option<u64>) -> Limits {
        Limits {
            zero_copy_bytes,
            ..Limits::default()
        }
    }

    #[test]
    fn what_one_rank_is_told_holds_for_all() {
        let both = |one, other| from(one).and(&from(other)).zero_copy_bytes;
        assert_eq!(both(None, None), None);
        assert_eq!(both(Some(1), Some(7)), Some(7));
        assert_eq!(both(Some(1), None), Some(ZERO_COPY_BYTES));
        assert_eq!(both(None, Some(u64::MAX)), Some(u64::MAX));
    }

    #[test]
    fn copy_engines_do_what_is_short_only_if_no_rank_wants_kernels() {
        let all = Limits::default();
        assert_eq!(all.with_zero_cta().and(&all).copy_engine_bytes, COPY_ENGINE_BYTES);
        assert_eq!(all.with_zero_cta().and(&all.with_zero_cta()).copy_engine_bytes, 0);
        // What is reduced needs kernels in any case.
        let reduced = [Function::AllReduce, Function::ReduceScatter];
        let of = |limits: Limits, ranks| reduced.map(|function| limits.copy_engine_bytes_of(function, ranks));
        assert_eq!(of(all.with_zero_cta(), 4), [COPY_ENGINE_BYTES; 2]);
        assert_eq!(of(all, 2), [COPY_ENGINE_BYTES / 2, u64::MAX]);
        let never = Limits {
            copy_engine_bytes: u64::MAX,
            copy_engine_reduce_bytes: Some(u64::MAX),
            ..all
        };
        assert!(all.use_copy_engines(2) && !never.and(&all.with_zero_cta()).use_copy_engines(2));
        assert!(!never.with_zero_cta().use_copy_engines(2));
        let reduces = Limits {
            copy_engine_reduce_bytes: Some(7),
            ..never
        };
        assert!(reduces.use_copy_engines(2) && !reduces.and(&never).use_copy_engines(2));
        assert_eq!((of(reduces, 4), of(reduces, 2)), ([7; 2], [7, u64::MAX]));
        assert_eq!(of(reduces.and(&all), 4), [COPY_ENGINE_BYTES; 2]);
        assert_eq!(reduces.least_copy_engine_bytes(4), 7);
        assert_eq!(reduces.copy_engine_bytes_of(Function::AllGather, 2), u64::MAX);
    }

    #[test]
    fn ranks_tell_each_other_of_their_limits() {
        for told in [None, Some(1), Some(ZERO_COPY_BYTES), Some(u64::MAX)] {
            let limits = Limits {
                copy_engine_reduce_bytes: told,
                tile_bytes: 1 << 21,
                ..from(told).with_zero_cta()
            };
            assert_eq!(Limits::from_bytes(&limits.to_bytes()), Some(limits));
        }
        assert_eq!(Limits::from_bytes(&from(Some(0)).to_bytes()), Some(from(Some(1))));
        assert_eq!(Limits::from_bytes(&[0; 3]), None);
    }
}
