//! Names and states of paths, queue pairs and work requests.

use std::fmt;

/// Maximum number of paths of a connection.
pub const MAX_PATHS: usize = 4;

/// One end's queue pair on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// The path; 0 is the primary one.
    pub path: u8,
    /// How often the path has been built, from 1. Both ends count alike.
    pub generation: u32,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "path {} (generation {})", self.path, self.generation)
    }
}

/// A set of a connection's paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PathSet(u8);

impl PathSet {
    /// The empty set.
    pub const EMPTY: Self = Self(0);

    /// The first `count` paths.
    ///
    /// # Panics
    /// If `count` exceeds [`MAX_PATHS`].
    #[must_use]
    pub fn first_of(count: usize) -> Self {
        assert!(count <= MAX_PATHS, "a connection has at most {MAX_PATHS} paths");
        Self(((1_u16 << count) - 1) as u8)
    }

    /// The set with `path`.
    #[must_use]
    pub fn with(self, path: u8) -> Self {
        Self(self.0 | 1 << path)
    }

    /// The set without `path`.
    #[must_use]
    pub fn without(self, path: u8) -> Self {
        Self(self.0 & !(1 << path))
    }

    /// Whether the set contains `path`.
    #[must_use]
    pub fn has(self, path: u8) -> bool {
        self.0 & 1 << path != 0
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Its paths, in order.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        (0..MAX_PATHS as u8).filter(move |path| self.has(*path))
    }

    /// Its first path.
    #[must_use]
    pub fn first(self) -> Option<u8> {
        self.iter().next()
    }
}

/// A work request, identified by its own number. The completion's opcode would not do: an error completion has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// The WRITE with immediate of this position. A queue pair works in order, so it stands for all positions before it.
    Step(u64),
    /// [`Action::Credit`](crate::Action::Credit) with this number of steps. It stands for all credits before it.
    Credit(u64),
    /// [`Action::Probe`](crate::Action::Probe).
    Probe,
    /// [`Action::Send`](crate::Action::Send) over a path.
    Message,
}

/// Status of a completed work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The peer's NIC has acknowledged it.
    Success,
    /// Flushed: the queue pair was in the error state.
    Flushed,
    /// The peer did not answer within the retry limit.
    RetryExceeded,
    /// The peer had no receive request posted within the retry limit.
    NotReady,
    /// Local queue pair operation error. Soft-RoCE reports it when its own interface is down, hardware for a malformed request.
    LocalOperation,
    /// Any other error: `ibv_wc_status`.
    Other(u32),
}

impl Status {
    /// The status for a value of `enum ibv_wc_status`.
    #[must_use]
    pub fn from_verbs(status: u32) -> Self {
        match status {
            0 => Self::Success,
            2 => Self::LocalOperation,
            5 => Self::Flushed,
            12 => Self::RetryExceeded,
            13 => Self::NotReady,
            other => Self::Other(other),
        }
    }

    /// Whether another NIC may cure it. Access, protection and length errors are defects of a program: they would repeat on the next
    /// path, with less to see.
    #[must_use]
    pub fn is_survivable(self) -> bool {
        match self {
            Self::Success => false,
            Self::Flushed | Self::RetryExceeded | Self::NotReady | Self::LocalOperation => true,
            // The peer's queue pair or completion queue failed (REM_OP_ERR); this NIC broke down (FATAL_ERR), did not answer
            // (RESP_TIMEOUT_ERR), or reports an error without a name (GENERAL_ERR).
            Self::Other(status) => matches!(status, 11 | 19 | 20 | 21),
        }
    }
}

/// How an end learned that a path failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// This end's port or device is down.
    Port,
    /// A completion with this status.
    Completion(Status),
    /// Work requests neither completed nor failed within [`Settings::timeout`](crate::Settings::timeout).
    Timeout,
    /// Other connections of the process found it.
    Shared,
    /// The peer reported it.
    Peer,
    /// A queue pair could not be made or connected, refused a work request, or cannot go on according to its device.
    Build,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Port => f.write_str("port down"),
            Self::Completion(Status::RetryExceeded) => f.write_str("transport retries exceeded"),
            Self::Completion(Status::Flushed) => f.write_str("work request flushed"),
            Self::Completion(Status::NotReady) => f.write_str("receiver-not-ready retries exceeded"),
            Self::Completion(Status::LocalOperation) => f.write_str("local queue pair operation error"),
            Self::Completion(Status::Success) => f.write_str("success"),
            Self::Completion(Status::Other(status)) => write!(f, "work completion status {status}"),
            Self::Timeout => f.write_str("no completion in time"),
            Self::Shared => f.write_str("found by another connection"),
            Self::Peer => f.write_str("found by the peer"),
            Self::Build => f.write_str("queue pair not usable"),
        }
    }
}

/// State of an end's queue pair on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkState {
    /// Connected and believed to work.
    Ready,
    /// Given up; its work requests are being flushed.
    Fencing,
    /// Given up; every work request is accounted for.
    Fenced,
    /// The next generation is being made.
    Building,
    /// Made and offered to the peer (receiver only).
    Offered,
    /// Being connected.
    Connecting,
    /// Connected and being probed (receiver only).
    Probation,
}

impl LinkState {
    /// Whether the queue pair has not been given up.
    #[must_use]
    pub fn is_live(self) -> bool {
        !matches!(self, Self::Fencing | Self::Fenced)
    }
}

/// One path as its end sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PathView {
    /// Its newest queue pair.
    pub link: Link,
    /// Its state.
    pub state: LinkState,
    /// Whether this end's port is up.
    pub port_up: bool,
    /// Whether it is the active path.
    pub active: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_nic_does_is_survived_and_what_a_program_does_is_not() {
        // `enum ibv_wc_status`.
        const OF_NICS: [u32; 8] = [2, 5, 11, 12, 13, 19, 20, 21];
        for status in 0..=23 {
            let is_survived = Status::from_verbs(status).is_survivable();
            assert_eq!(is_survived, OF_NICS.contains(&status), "status {status}");
        }
    }
}
