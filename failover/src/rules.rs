//! Decisions that exactly-once delivery hangs on, each a function, so that the model can show what happens without one.

use std::{fmt::Debug, hash::Hash};

use crate::Status;

/// What the machines ask at the points that matter. There is one right answer each: [`Sound`]'s.
pub trait Rules: Clone + PartialEq + Debug + Hash {
    /// Whether a completion says that the peer's NIC has the bytes.
    #[must_use]
    fn succeeded(status: Status) -> bool {
        status == Status::Success
    }

    /// Whether the receiver waits for its fence before it says what it has committed. Without, a late write may land in a slot
    /// that is in use again.
    #[must_use]
    fn fences() -> bool {
        true
    }

    /// Whether the receiver waits until the sender has stopped before it leaves a path that works, which it does not fence.
    #[must_use]
    fn waits_for_stop() -> bool {
        true
    }

    /// Where a replay starts: what was posted may be lost, what was acknowledged may be less than what is there.
    #[must_use]
    fn replay_from(committed: u64, posted: u64) -> u64 {
        let _ = posted;
        committed
    }
}

/// The rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sound;

impl Rules for Sound {}
