//! Paths, their queue pairs, and what can be said of them.

use std::fmt;

/// Most paths of a connection.
pub const MAX_PATHS: usize = 4;

/// One end's queue pair on a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    /// Which path: 0 is the primary one.
    pub path: u8,
    /// How often the path has been built; the first one is 1. The same at both ends.
    pub generation: u32,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "path {} (generation {})", self.path, self.generation)
    }
}

/// Some of a connection's paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PathSet(u8);

impl PathSet {
    /// None.
    pub const EMPTY: Self = Self(0);

    /// The first `count` paths.
    ///
    /// # Panics
    /// If there are not so many.
    #[must_use]
    pub fn first_of(count: usize) -> Self {
        assert!(count <= MAX_PATHS, "a connection has at most {MAX_PATHS} paths");
        Self(((1_u16 << count) - 1) as u8)
    }

    /// These and `path`.
    #[must_use]
    pub fn with(self, path: u8) -> Self {
        Self(self.0 | 1 << path)
    }

    /// These without `path`.
    #[must_use]
    pub fn without(self, path: u8) -> Self {
        Self(self.0 & !(1 << path))
    }

    /// Whether `path` is one of them.
    #[must_use]
    pub fn has(self, path: u8) -> bool {
        self.0 & 1 << path != 0
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Them, in order.
    pub fn iter(self) -> impl Iterator<Item = u8> {
        (0..MAX_PATHS as u8).filter(move |path| self.has(*path))
    }

    /// The one that comes first in order.
    #[must_use]
    pub fn first(self) -> Option<u8> {
        self.iter().next()
    }
}

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The one that posts steps.
    Sender,
    /// The one whose FIFO they go to.
    Receiver,
}

/// A work request, as its own number says (not the completion's opcode, which an error completion does not have).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// The WRITE with immediate of this position, and so, as a queue pair works in order, all before it.
    Step(u64),
    /// [`crate::Action::Credit`], and the steps that it said: the sender has all credits before it, too.
    Credit(u64),
    /// [`crate::Action::Probe`].
    Probe,
    /// [`crate::Action::Tell`] over a path.
    Message,
}

/// How a work request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// The peer's NIC has it.
    Success,
    /// Not tried, or cut short, because the queue pair was in the error state.
    Flushed,
    /// The peer did not answer in all tries.
    RetryExceeded,
    /// The peer had no receive posted in all tries.
    NotReady,
    /// The queue pair could not do it. Soft-RoCE's answer when its own interface is down; hardware's to a malformed request.
    LocalOperation,
    /// Any other error: `ibv_wc_status`.
    Other(u32),
}

impl Status {
    /// Of `ibv_wc_status`.
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

    /// Whether another NIC may mend it. Access, protection and length errors are defects of a program: on the next path the same would
    /// happen, with less to see.
    #[must_use]
    pub fn is_survivable(self) -> bool {
        match self {
            Self::Success => false,
            Self::Flushed | Self::RetryExceeded | Self::NotReady | Self::LocalOperation => true,
            // The peer's NIC could not do it (REM_OP_ERR: its queue pair or completion queue failed), this one broke down (FATAL_ERR),
            // gave no answer (RESP_TIMEOUT_ERR), or says nothing that has a name (GENERAL_ERR).
            Self::Other(status) => matches!(status, 11 | 19 | 20 | 21),
        }
    }
}

/// What said that a path failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// This end's port, or its device, is down.
    Port,
    /// A completion.
    Completion(Status),
    /// Work requests neither ended nor failed in [`crate::Settings::timeout`].
    Timeout,
    /// What other connections found.
    Shared,
    /// The peer.
    Peer,
    /// A queue pair could not be made or connected, did not take a work request, or cannot go on, as its device says.
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

/// What an end's queue pair on a path is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkState {
    /// Connected, and believed to work.
    Ready,
    /// Given up; what it still has is on its way out.
    Fencing,
    /// Given up, and nothing of it is left.
    Fenced,
    /// The next one is being made.
    Building,
    /// Made, and offered to the peer (receiver).
    Offered,
    /// Being connected.
    Connecting,
    /// Connected; it is being probed (receiver).
    Probation,
}

impl LinkState {
    /// Whether the queue pair exists and is not on its way out.
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
    /// What that is in.
    pub state: LinkState,
    /// Whether this end's port is up.
    pub port_up: bool,
    /// Whether it is the active one.
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
