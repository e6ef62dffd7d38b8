//! The decisions that exactly-once delivery depends on. Each is a function, so that the model can show what happens without it.

use std::{fmt::Debug, hash::Hash};

use crate::links::Status;

/// The decisions of both state machines. The right answers are [`Sound`]'s; the model replaces one at a time.
pub trait Rules: Clone + PartialEq + Debug + Hash {
    /// Whether a completion with this status proves that the peer's NIC has the bytes.
    #[must_use]
    fn succeeded(status: Status) -> bool {
        status == Status::Success
    }

    /// Whether the receiver waits for its fence before it reports its committed position. Without the fence a late write may land in a
    /// slot that is in use again.
    #[must_use]
    fn fences() -> bool {
        true
    }

    /// Whether the receiver waits until the sender has stopped before it leaves a path that works. It does not fence such a path.
    #[must_use]
    fn waits_for_stop() -> bool {
        true
    }

    /// The position at which a replay starts. Posted steps may be lost, and fewer steps may be acknowledged than have arrived.
    #[must_use]
    fn replay_from(committed: u64, posted: u64) -> u64 {
        let _ = posted;
        committed
    }
}

/// The right answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sound;

impl Rules for Sound {}
