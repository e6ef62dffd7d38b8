//! The two ends of a connection, which moves numbered steps from the slots of a [`Sender`] into the slots of a [`Receiver`].
//!
//! A step is identified by its *position*: the number of steps before it since the connection began.
//!
//! - **Data.** The sender writes the bytes of a step by RDMA WRITE from its slot `position` modulo [`SLOTS`] into the peer's slot of the
//!   same number. Then it writes a *notice*, which describes the step, by WRITE with immediate into the peer's [`Control`] page. A short
//!   step travels inside its notice. The immediate is the position's low 32 bits, so the receiver recognises a step that arrives twice.
//! - **Credits.** The receiver grants positions: it writes the number of steps granted since the connection began into the sender's
//!   control page. The number only grows and is never added up, so a credit may arrive twice, late, or not at all if a later one does.
//! - **Paths.** A connection has one or two [`Path`]s, each a pair of ports with its own queue pairs. One path is active. If it fails, the
//!   ends agree to continue over the other one ([`ringsight_failover`]), unless failover is off ([`Failover`]). Successive steps use the
//!   queue pairs of the path in turn; or each step is split over all of them, with an immediate per part.
//!
//! # Modules, from the bottom
//! | module | owns |
//! |---|---|
//! | `work` | the numbers of work requests, and what happens on a path |
//! | `control` | the layout of the control page |
//! | `path` | a port's queue pairs: connecting, posting, polling, fencing, rebuilding |
//! | `worker` | a thread per path for calls that may block |
//! | `driver` | the paths of an end: events in, actions out |
//! | `end` | what sender and receiver share: driver and state machine |
//! | `sender`, `receiver` | the two ends |
//!
//! # Threads
//! One thread polls an end; the end takes no lock for that. A path's worker thread (`ringsight-qp`) makes the calls that may block:
//! fencing, rebuilding and connecting queue pairs. It returns its result through a channel and wakes the polling thread.

mod control;
mod driver;
mod end;
mod path;
mod receiver;
mod sender;
mod work;
mod worker;

pub use crate::error::Failure;
pub use control::{CONTROL_BYTES, Control, NOTICE_BYTES, fuzz};
pub use driver::{Failover, TimedReport};
pub use end::{End, EndSnapshot, PathSnapshot, Role};
pub use path::{Counts, Path, Peer};
pub use receiver::{Arrived, Receiver, Receiving};
pub use ringsight_failover::MESSAGE_BYTES;
pub use sender::{Posted, Sender, Sending};
pub use work::{PathEvent, WorkRequest};

/// Slots of either end. At most so many steps are granted and have not arrived.
pub const SLOTS: usize = 8;

/// Layout of the slots within their memory; the same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Offset of the first slot.
    pub offset: usize,
    /// Bytes of each slot.
    pub bytes: usize,
}

impl Slots {
    /// Offset of the slot of a position.
    #[must_use]
    pub fn at(&self, position: u64) -> usize {
        self.offset + position as usize % SLOTS * self.bytes
    }
}
