//! Work requests by their numbers, and the events that polling a path yields.

use ringsight_failover::MESSAGE_BYTES;

/// A work or receive request, encoded in its 64-bit number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkRequest {
    /// The notice of a step, or the last request of one of its parts.
    Step {
        /// Index of the queue pair in the path.
        qp: usize,
        /// Low 48 bits: no connection lasts for more steps.
        position: u64,
    },
    /// The bytes of a step.
    Data {
        /// Index of the queue pair in the path.
        qp: usize,
        /// Low 48 bits.
        position: u64,
    },
    /// A credit.
    Credit {
        /// Low 48 bits.
        granted: u64,
    },
    /// A receive request.
    Receive {
        /// Index of the queue pair in the path.
        qp: usize,
        /// Index of the request. For the first queue pair it is also the index of the message's place in the inbox.
        index: usize,
    },
    /// A write of no bytes.
    Probe {
        /// Index of the queue pair in the path.
        qp: usize,
    },
    /// A message of the failover protocol.
    Message,
    /// The last work or receive request of a queue pair in the error state: all requests before it have completed.
    Marker {
        /// Index of the queue pair in the path.
        qp: usize,
    },
}

const LOW: u64 = (1 << 48) - 1;

impl WorkRequest {
    pub(super) fn id(self) -> u64 {
        let (kind, qp, number) = match self {
            Self::Step { qp, position } => (1, qp, position),
            Self::Data { qp, position } => (2, qp, position),
            Self::Credit { granted } => (3, 0, granted),
            Self::Receive { qp, index } => (4, qp, index as u64),
            Self::Probe { qp } => (5, qp, 0),
            Self::Message => (6, 0, 0),
            Self::Marker { qp } => (7, qp, 0),
        };
        kind << 56 | (qp as u64) << 48 | number & LOW
    }

    /// Decodes a completion's number; `None` for a number that this module did not make.
    #[must_use]
    pub fn from_id(id: u64) -> Option<Self> {
        let (qp, position) = ((id >> 48 & 0xff) as usize, id & LOW);
        Some(match id >> 56 {
            1 => Self::Step { qp, position },
            2 => Self::Data { qp, position },
            3 => Self::Credit { granted: position },
            4 => Self::Receive {
                qp,
                index: position as usize,
            },
            5 => Self::Probe { qp },
            6 => Self::Message,
            7 => Self::Marker { qp },
            _ => return None,
        })
    }
}

/// An event on one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathEvent {
    /// The peer's device has acknowledged a step, or a part of it.
    Sent {
        /// Low 48 bits of the position.
        position: u64,
    },
    /// The peer's device has acknowledged a credit.
    Credited {
        /// Low 48 bits of it.
        granted: u64,
    },
    /// A write with this immediate arrived.
    Arrived {
        /// Index of the queue pair that it arrived on.
        qp: usize,
        /// Its value.
        immediate: u32,
    },
    /// The probe of every queue pair has completed.
    Probed,
    /// A message arrived.
    Message([u8; MESSAGE_BYTES]),
    /// A request completed with an error.
    Failed {
        /// The request; `None` if its number is unknown.
        work: Option<WorkRequest>,
        /// `enum ibv_wc_status`.
        code: u32,
        /// Number of the queue pair.
        qp: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_encode_their_requests() {
        let all = [
            WorkRequest::Step {
                qp: 15,
                position: LOW,
            },
            WorkRequest::Data {
                qp: 0,
                position: 1 << 40,
            },
            WorkRequest::Credit { granted: 77 },
            WorkRequest::Receive { qp: 3, index: 15 },
            WorkRequest::Probe { qp: 15 },
            WorkRequest::Message,
            WorkRequest::Marker { qp: 15 },
        ];
        for work in all {
            assert_eq!(WorkRequest::from_id(work.id()), Some(work));
        }
        for id in [0, u64::MAX, 8 << 56] {
            assert_eq!(WorkRequest::from_id(id), None);
        }
    }
}
