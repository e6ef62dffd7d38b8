//! What is known of one rank and one run of an operation.
//!
//! A [`RankAnswer`] is a rank's own word. A [`RankState`] is that word, or what others found out about a silent rank.
//! Times are nanoseconds before the moment of reading, because the clocks of two hosts need not agree.

use std::time::Duration;

use ringsight_records::Waits;

use crate::{op::Identity, proxy::stalls::Stall};

/// One run of an operation. The value is the same on every rank that takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct OperationRun {
    pub(crate) identity: Identity,
    /// 0 for an eager operation, n for the n-th replay of a captured one.
    pub(crate) replay: u32,
}

/// Where a rank is with a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    /// The rank has neither called nor replayed the operation.
    NotLaunched {
        /// Since the rank launched anything on this communicator, or since it made the communicator.
        idle_ns: u64,
    },
    /// The rank launched the operation, and the device has not begun it.
    Queued {
        /// Since the launch.
        since_ns: u64,
    },
    /// The device runs the operation.
    Running {
        /// Since its first channel started.
        since_ns: u64,
        /// Since it last moved data.
        still_ns: u64,
        /// What its kernel waits for, if the kernel said so just now.
        waits: Option<Waits>,
    },
    /// The rank completed the operation.
    Completed,
    /// The rank aborted, revoked or destroyed the communicator before it completed the operation.
    CommunicatorEnded,
    /// The rank's device failed: nothing that was launched on it ends.
    DeviceFailed,
    /// The rank's watchdog is off. The rank knows only which eager operations it has called.
    WatchdogOff {
        /// It has called the operation; of a captured one, it may have.
        called: bool,
    },
}

impl Position {
    /// The same, but a queued operation counts as begun just now: for a rank that cannot see whether it began.
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

/// What a rank answers when another rank asks where it is with a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RankAnswer {
    pub(crate) position: Position,
    /// The other operation that the rank has been in for longest, on any communicator.
    pub(crate) blocked_by: Option<BlockingOperation>,
    /// The connection of the run that waits for the network. The rank's device may have completed the operation.
    pub(crate) stall: Option<Stall>,
    /// The rank knows its position by CUDA events, and the last query of them is overdue: it may have come further.
    pub(crate) is_stale: bool,
}

impl From<Position> for RankAnswer {
    fn from(position: Position) -> Self {
        Self {
            position,
            blocked_by: None,
            stall: None,
            is_stale: false,
        }
    }
}

/// An operation that keeps a rank from another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockingOperation {
    pub(crate) comm: u64,
    pub(crate) run: OperationRun,
    /// Since it began.
    pub(crate) since_ns: u64,
    /// Set if the rank waits in it for the rank that asked, and begins the operation in question only after it:
    /// for how long it has not moved.
    pub(crate) awaits_asker_ns: Option<u64>,
}

/// What a node can tell of the process of one of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessHealth {
    /// Nothing: the process is of another node or of another pid namespace.
    Unknown,
    /// It runs or sleeps.
    Alive,
    /// A signal stopped it.
    Stopped,
    /// It is gone.
    Gone,
    /// A debugger holds it.
    Traced,
}

/// What is known of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankState {
    /// The rank answered.
    Answered(RankAnswer),
    /// The rank is in an operation that waits for the rank that asks, which in turn waits for it: see the
    /// [deadlock check](super::deadlock).
    Deadlocked(BlockingOperation),
    /// Its process died.
    Dead,
    /// The rank ended the communicator and had completed this operation, or ended it in good order and so completed all
    /// that it had called. Its process may be gone.
    Left,
    /// A signal stopped its process.
    Stopped,
    /// A debugger holds its process.
    Traced,
    /// The rank does not answer, and nobody knows why.
    Silent,
    /// The rank does not answer, and its process lives.
    SilentAlive,
}

impl From<ProcessHealth> for RankState {
    fn from(health: ProcessHealth) -> Self {
        match health {
            // The news of a death reaches every rank at once: this process had said goodbye.
            ProcessHealth::Gone => Self::Left,
            ProcessHealth::Stopped => Self::Stopped,
            ProcessHealth::Traced => Self::Traced,
            ProcessHealth::Alive => Self::SilentAlive,
            ProcessHealth::Unknown => Self::Silent,
        }
    }
}

impl RankState {
    /// Whether the state may be a moment of a busy machine, so that a verdict by it must last.
    pub(super) fn may_change(&self) -> bool {
        match self {
            // Data that the rank sent before it left may still be on its way.
            Self::Left => true,
            // The operation that the rank is in may end by itself.
            Self::Deadlocked(_) => true,
            // The rank may have come meanwhile.
            Self::Answered(answer) => answer.is_stale,
            _ => false,
        }
    }

    /// Counts a queued operation as begun if the rank cannot see whether it began.
    pub(super) fn presume(&mut self) {
        if let Self::Answered(answer) = self
            && answer.is_stale
        {
            answer.position = answer.position.presumed();
        }
    }

    /// For how long nothing has moved there, if the rank is in the operation.
    pub(super) fn still(&self) -> Option<Duration> {
        match self {
            Self::Answered(RankAnswer {
                position: Position::Running { still_ns, .. },
                ..
            }) => Some(Duration::from_nanos(*still_ns)),
            _ => None,
        }
    }

    /// Where the rank waits for the network in the operation.
    pub(crate) fn stall(&self) -> Option<&Stall> {
        match self {
            Self::Answered(answer) => answer.stall.as_ref(),
            _ => None,
        }
    }

    /// Whether the rank is in the operation or completed it.
    pub(super) fn has_come(&self) -> bool {
        self.is_over() || self.still().is_some()
    }

    /// Whether something may move there that nobody can see.
    pub(super) fn may_move_unseen(&self) -> bool {
        matches!(
            self,
            Self::Answered(RankAnswer {
                position: Position::WatchdogOff { called: true },
                ..
            })
        )
    }

    /// Whether the rank completed the operation, its network work included.
    pub(super) fn is_over(&self) -> bool {
        matches!(
            self,
            Self::Left
                | Self::Answered(RankAnswer {
                    position: Position::Completed,
                    stall: None,
                    ..
                })
        )
    }
}
