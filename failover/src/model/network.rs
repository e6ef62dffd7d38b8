//! Queue pairs and ports, and what is on its way between them.

use crate::{Address, Link, Work};

/// What is wrong with a driver or its NIC, for the mutants that are no rule of the machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flaw {
    /// Nothing.
    None,
    /// Credits are added by the NIC instead of written.
    FetchAdd,
    /// A queue pair's GID is the one that was read at the beginning.
    StaleGid,
    /// A drain at the receiver ends before what had arrived is told, as where the completion queue failed.
    CutDrain,
    /// A step's notice goes before its bytes.
    NoticeFirst,
    /// The receiver's communicator ends without a word.
    NoLastWord,
}

/// One port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Port {
    pub(super) up: bool,
    /// What its end was told last.
    pub(super) told: bool,
    /// Changes whenever it comes up.
    pub(super) gid: u8,
}

/// A queue pair's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum QpState {
    Init,
    ReadyToSend,
    Error,
}

/// A work request. A step is two: its bytes, then the notice that tells of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Request {
    pub(super) work: Work,
    /// Credits: what is written.
    pub(super) value: u64,
    /// A step's bytes: they end without a word, with their notice.
    pub(super) is_data: bool,
}

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Qp {
    pub(super) generation: u32,
    pub(super) state: QpState,
    /// Its end waits for all of it to be accounted for.
    pub(super) draining: bool,
    /// Its address, as the peer was told.
    pub(super) own: Address,
    pub(super) remote: Address,
    /// Posted and not completed, in order.
    pub(super) queue: Vec<Request>,
    /// The first so many have reached the peer; their acknowledgements are on the way or lost.
    pub(super) delivered: usize,
    /// The first so many have left the NIC: they can arrive even when the path is dead.
    pub(super) launched: usize,
    /// Left the NIC before the queue pair was given up: late, but not lost.
    pub(super) late: Vec<Request>,
    /// Immediates that arrived and were not told yet.
    pub(super) arrived: Vec<u64>,
}

impl Qp {
    pub(super) fn new(generation: u32, own: Address) -> Self {
        Self {
            generation,
            state: QpState::Init,
            draining: false,
            own,
            remote: Address::default(),
            queue: Vec::new(),
            delivered: 0,
            launched: 0,
            late: Vec::new(),
            arrived: Vec::new(),
        }
    }

    pub(super) fn link(&self, path: u8) -> Link {
        Link {
            path,
            generation: self.generation,
        }
    }

    /// How many requests the first acknowledgement that is told of ends; `None` if what is delivered ends without a word.
    pub(super) fn acknowledged(&self) -> Option<usize> {
        let told = |request: &Request| !request.is_data;
        self.queue[..self.delivered]
            .iter()
            .position(told)
            .map(|last| last + 1)
    }

    /// Moves it to the error state: nothing is sent or accepted any more, but what has left is on its way.
    pub(super) fn fail(&mut self) {
        if self.state != QpState::Error {
            self.state = QpState::Error;
            let launched = self.launched.max(self.delivered);
            self.late = self.queue[self.delivered..launched].to_vec();
            self.late.retain(|request| request.work != Work::Probe);
        }
    }

    /// The same by an end that takes notice of nothing any more.
    pub(super) fn forget(&mut self) {
        self.fail();
        (self.queue, self.arrived, self.draining) = (Vec::new(), Vec::new(), false);
    }
}

/// The address of the queue pair that is made now: whose it is, and the port's GID.
pub(super) fn address(end: usize, path: usize, generation: u32, gid: u8) -> Address {
    let mut address = Address::default();
    address.0[..8].copy_from_slice(&[end as u8, path as u8, 0, gid, 0, 0, 0, 0]);
    address.0[4..8].copy_from_slice(&generation.to_le_bytes());
    address
}

/// The GID in an address.
pub(super) fn gid_of(address: &Address) -> u8 {
    address.0[3]
}
