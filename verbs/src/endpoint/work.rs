//! What requests are called, and what comes of them.

use ringsight_failover::MESSAGE_BYTES;

/// A request, as its number says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// What tells of a step, or a part of one: the last request of it on its queue pair.
    Step {
        /// Of the path.
        qp: usize,
        /// Low 48 bits: no connection lives to see more.
        position: u64,
    },
    /// A step's bytes.
    Data {
        /// Of the path.
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
        /// Of the path.
        qp: usize,
        /// Which one, of the first queue pair's: where in the inbox a message would go.
        index: usize,
    },
    /// A write of nothing.
    Probe {
        /// Of the path.
        qp: usize,
    },
    /// A message of the ends' agreement.
    Message,
    /// The last request of a queue pair in the error state, of either kind: all before it have ended.
    Marker {
        /// Of the path.
        qp: usize,
    },
}

const LOW: u64 = (1 << 48) - 1;

impl Work {
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

    /// What a completion's number means; `None` for none of ours.
    #[must_use]
    pub fn of(id: u64) -> Option<Self> {
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

/// What ended, of one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The peer's device has a step, or a part of it, in memory.
    Sent {
        /// Low 48 bits of the position.
        position: u64,
    },
    /// The peer has a credit.
    Credited {
        /// Low 48 bits of it.
        granted: u64,
    },
    /// A write with this immediate arrived.
    Arrived {
        /// The queue pair that it came over.
        qp: usize,
        /// What it said.
        immediate: u32,
    },
    /// The peer's device has answered a probe on every queue pair.
    Probed,
    /// A message arrived.
    Message([u8; MESSAGE_BYTES]),
    /// A request ended with an error: `enum ibv_wc_status`.
    Failed {
        /// Which one; `None`: its number is none of ours.
        work: Option<Work>,
        /// The status.
        code: u32,
        /// The queue pair's number.
        qp: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_known_by_their_numbers() {
        let all = [
            Work::Step {
                qp: 15,
                position: LOW,
            },
            Work::Data {
                qp: 0,
                position: 1 << 40,
            },
            Work::Credit { granted: 77 },
            Work::Receive { qp: 3, index: 15 },
            Work::Probe { qp: 15 },
            Work::Message,
            Work::Marker { qp: 15 },
        ];
        for work in all {
            assert_eq!(Work::of(work.id()), Some(work));
        }
        for id in [0, u64::MAX, 8 << 56] {
            assert_eq!(Work::of(id), None);
        }
    }
}
