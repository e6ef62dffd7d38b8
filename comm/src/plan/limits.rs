//! What the ranks' environments leave to [the table](super::table): all of them come to the same limits, so that all make the same choice.

use super::allowed::Allowed;
use crate::{env, error::Result};

/// [`Limits::straight_bytes`] by default: what goes straight begins with one more way over NVLink, and ends with a fence and another.
pub const STRAIGHT_BYTES: u64 = 5 << 20;

/// [`Limits::push_bytes`] by default: there is a fence for each chunk, and nothing to reduce at first.
pub const PUSH_BYTES: u64 = 64 << 20;

/// Of one rank, or what all ranks have agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of the larger of a rank's buffers from which on operations may go straight between callers' buffers (`RINGSIGHT_STRAIGHT_BYTES`).
    pub straight_bytes: u64,
    /// Bytes of all ranks together from which on the contributions of reductions that go so are pushed to who reduces them, and not read
    /// where they are (`RINGSIGHT_PUSH_BYTES`).
    pub push_bytes: u64,
    /// Algorithms and protocols that are not left out.
    pub allowed: Allowed,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            straight_bytes: STRAIGHT_BYTES,
            push_bytes: PUSH_BYTES,
            allowed: Allowed::default(),
        }
    }
}

impl Limits {
    /// Bytes of [`Limits::to_bytes`].
    pub const BYTES: usize = 16 + Allowed::BYTES;

    /// As the environment says.
    ///
    /// # Errors
    /// A variable with an impossible value.
    pub fn from_environment() -> Result<Self> {
        let is_straight = !env::switch("NCCL_P2P_DIRECT_DISABLE", false);
        let straight_bytes = env::number("RINGSIGHT_STRAIGHT_BYTES")?.unwrap_or(STRAIGHT_BYTES);
        Ok(Self {
            straight_bytes: if is_straight { straight_bytes } else { u64::MAX },
            push_bytes: env::number("RINGSIGHT_PUSH_BYTES")?.unwrap_or(PUSH_BYTES),
            allowed: Allowed::from_environment()?,
        })
    }

    /// What both leave: what is not to be on one rank is not on any.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            straight_bytes: self.straight_bytes.max(other.straight_bytes),
            push_bytes: self.push_bytes.max(other.push_bytes),
            allowed: self.allowed.and(&other.allowed),
        }
    }

    /// As a rank tells the others.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.straight_bytes.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.push_bytes.to_le_bytes());
        bytes[16..].copy_from_slice(&self.allowed.to_bytes());
        bytes
    }

    /// What [`Limits::to_bytes`] gave; `None` for anything of another length.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (straight, rest) = bytes.split_first_chunk()?;
        let (push, allowed) = rest.split_first_chunk()?;
        Some(Self {
            straight_bytes: u64::from_le_bytes(*straight),
            push_bytes: u64::from_le_bytes(*push),
            allowed: Allowed::from_bytes(allowed.try_into().ok()?),
        })
    }
}
