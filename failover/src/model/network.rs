//! Queue pairs, ports, and the packets between them.

use crate::{
    links::{Link, Work},
    message::Address,
};

/// A defect of a driver or its NIC. Mutants of the state machines are [`Rules`](crate::Rules) instead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flaw {
    /// No defect.
    None,
    /// Credits are added by the NIC instead of written.
    FetchAdd,
    /// A queue pair keeps the GID that was read at the beginning.
    StaleGid,
    /// A drain at the receiver ends before everything that arrived is delivered, as after a failure of the completion queue.
    CutDrain,
    /// A step's notice is posted before its bytes.
    NoticeFirst,
    /// The receiver's communicator ends without [`Message::Left`](crate::Message::Left).
    NoGoodbye,
}

/// One port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Port {
    pub(super) up: bool,
    /// The state that its end knows.
    pub(super) known_up: bool,
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

/// A work request. A step is two of them: its bytes, then its notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Request {
    pub(super) work: Work,
    /// Credits: the value that is written.
    pub(super) value: u64,
    /// The bytes of a step. They have no completion of their own: that of the notice covers both.
    pub(super) is_data: bool,
}

/// A queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Qp {
    pub(super) generation: u32,
    pub(super) state: QpState,
    /// Its end waits until every work request is accounted for.
    pub(super) draining: bool,
    /// Its address, as the peer knows it.
    pub(super) own: Address,
    pub(super) remote: Address,
    /// Work requests that are posted and not completed, in order.
    pub(super) queue: Vec<Request>,
    /// How many of them, from the first, have reached the peer. Their acknowledgements are on the way or lost.
    pub(super) delivered: usize,
    /// How many of them, from the first, have left the NIC. They can arrive even when the path is dead.
    pub(super) launched: usize,
    /// Work requests that left the NIC before the queue pair was given up: late, but not lost.
    pub(super) late: Vec<Request>,
    /// Immediates that arrived and have not been delivered.
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

    /// How many requests the first visible acknowledgement completes; `None` if no delivered request has a completion of its own.
    pub(super) fn acknowledged(&self) -> Option<usize> {
        let has_completion = |request: &Request| !request.is_data;
        self.queue[..self.delivered]
            .iter()
            .position(has_completion)
            .map(|last| last + 1)
    }

    /// Moves it to the error state. It sends and accepts nothing more, but packets that have left are still on their way.
    pub(super) fn fail(&mut self) {
        if self.state != QpState::Error {
            self.state = QpState::Error;
            let launched = self.launched.max(self.delivered);
            self.late = self.queue[self.delivered..launched].to_vec();
            self.late.retain(|request| request.work != Work::Probe);
        }
    }

    /// As [`Qp::fail`], for an end that processes nothing any more.
    pub(super) fn abandon(&mut self) {
        self.fail();
        (self.queue, self.arrived, self.draining) = (Vec::new(), Vec::new(), false);
    }
}

/// The address of a new queue pair: its end and path, and the port's GID.
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
