//! The two ends of a connection, which moves numbered steps from the slots of a [`Sender`] into those of a [`Receiver`].
//!
//! A step is known by its *position*: how many came before it since the connection began. Its bytes go by RDMA WRITE from the slot
//! `position` modulo [`SLOTS`] straight into the peer's slot of that number, then a *notice* of what it is goes by WRITE with immediate
//! into the peer's [`Control`]; little bytes go with the notice. The immediate is the position's low 32 bits, so that a step that comes
//! twice is known. The receiver grants positions, and tells the sender how many it has granted since the connection began: a number
//! that only grows, never something to be added, so that it may come twice, late or not at all if a later one does.
//!
//! A connection has one or two [`Path`]s, each a pair of ports with queue pairs of its own; one is active. When it fails, the ends
//! agree to go on over the other ([`ringsight_failover`]), if they are made so ([`Failover`]). A step goes over one
//! queue pair of the path, one after the other; or in parts over all of them, each with an immediate.

mod condition;
mod control;
mod driver;
mod end;
mod path;
mod receiver;
mod requests;
mod sender;
mod work;
mod worker;

pub use condition::{Condition, PathCondition};
pub use control::{CONTROL_BYTES, Control, NOTICE_BYTES, fuzz};
pub use driver::{Failover, Noted};
pub use end::{Agreement, End, Role};
pub use path::{Counts, Path, Peer};
pub use receiver::{Arrived, Receiver, Receiving};
pub use ringsight_failover::MESSAGE_BYTES;
pub use sender::{Posted, Sender, Sending};
pub use work::{Ended, Work};

use std::fmt;

/// Slots of either end, and steps that may be granted and not have arrived.
pub const SLOTS: usize = 8;

/// Why a connection cannot go on over a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which of its paths.
    pub path: usize,
    /// `enum ibv_wc_status` of the completion that told of it; `None`: a call failed, or the peer broke the protocol.
    pub status: Option<u32>,
    /// In words.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}

/// Memory of the slots: where a position's bytes are from its beginning. The same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Offset of the first slot.
    pub offset: usize,
    /// Bytes of each.
    pub bytes: usize,
}

impl Slots {
    /// Where the slot of a position begins.
    #[must_use]
    pub fn at(&self, position: u64) -> usize {
        self.offset + position as usize % SLOTS * self.bytes
    }
}
