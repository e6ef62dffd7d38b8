//! Where a rank is with an operation.

use ringsight_records::Waits;

use crate::{checks::Identity, proxy::stalls::Stall};

/// One run of an operation: the same on all ranks that take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Run {
    pub(crate) identity: Identity,
    /// 0 for an eager operation, n for the n-th replay of a captured one.
    pub(crate) replay: u32,
}

/// Where a rank is with a run. Times are nanoseconds ago, since the ranks' clocks need not agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    /// It has not been called, or replayed, on this communicator, which launched something last so long ago.
    NotLaunched {
        /// Since its last launch, or since the communicator was made.
        idle_ns: u64,
    },
    /// It has been launched and has not begun.
    Queued {
        /// Since its launch.
        since_ns: u64,
    },
    /// It has begun.
    Running {
        /// Since its first channel started.
        since_ns: u64,
        /// Since it moved data last.
        still_ns: u64,
        /// What its kernel waits for, if it has said so just now.
        waits: Option<Waits>,
    },
    /// It is done.
    Done,
    /// The communicator is being ended there: aborted, revoked or destroyed.
    Ended,
    /// Its device has failed: nothing that was launched on it ends any more.
    Faulted,
    /// Its watchdog is off: it is known only whether the operation has been called there, and of graphs not even that.
    Unwatched {
        /// It has been, or may have been.
        called: bool,
    },
}

impl Position {
    /// The same, but what was launched is taken to have begun just now.
    pub(crate) fn presumed(self) -> Self {
        match self {
            Self::Queued { since_ns } => Self::Running {
                since_ns,
                still_ns: 0,
                waits: None,
            },
            position => position,
        }
    }
}

/// What a rank says when it is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) position: Position,
    /// The operation that it has been in for longest, on any communicator, if it is another one.
    pub(crate) held_up: Option<HeldUp>,
    /// Where it waits for the network in the operation, if it has for long; it may be done with it on its device.
    pub(crate) stall: Option<Stall>,
    /// It knows by events, which have not been queried as lately as they were to be: it may have come further meanwhile.
    pub(crate) is_old: bool,
}

impl From<Position> for Answer {
    fn from(position: Position) -> Self {
        Self {
            position,
            held_up: None,
            stall: None,
            is_old: false,
        }
    }
}

/// An operation that keeps a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeldUp {
    pub(crate) comm: u64,
    pub(crate) run: Run,
    /// Since it began.
    pub(crate) since_ns: u64,
    /// Where the rank comes to what was asked about only after it, and waits in it for the rank that asked: for how long it has not moved.
    pub(crate) bars_ns: Option<u64>,
}
