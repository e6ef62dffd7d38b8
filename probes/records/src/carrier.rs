//! What carries steps between nodes, as [`crate::Kind::NetPlugin`] records say it.

/// What carries a step between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carrier {
    /// RDMA: the port, by its number among those that the process may use (0 to 254). A socket: `None`.
    pub port: Option<u8>,
    /// RDMA: number of the queue pair that the last work request of the step was posted to. A socket: its descriptor. 24 bits.
    pub number: u32,
    /// The step, as in [`crate::Kind::ProxyStep`].
    pub step: u32,
}

impl Carrier {
    /// For `value`: `port + 1 << 56 | number << 32 | step`.
    #[must_use]
    pub const fn to_value(self) -> u64 {
        let port = match self.port {
            None => 0,
            Some(port) => port as u64 + 1,
        };
        port << 56 | (self.number as u64 & 0xff_ffff) << 32 | self.step as u64
    }

    /// Of a `value`.
    #[must_use]
    pub const fn from_value(value: u64) -> Self {
        Self {
            port: match value >> 56 {
                0 => None,
                port => Some((port - 1) as u8),
            },
            number: (value >> 32) as u32 & 0xff_ffff,
            step: value as u32,
        }
    }
}

/// How a connection over RDMA numbers its work requests from an operation's first step on: `value` of a [`crate::Kind::NetPlugin`] record with
/// [`crate::State::NET_PLUGIN_UPDATE`], of which each operation has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbering {
    /// Steps that the connection had carried before: 48 bits.
    pub first: u64,
    /// Queue pairs that take turns.
    pub queue_pairs: u8,
}

impl Numbering {
    const LOW: u64 = (1 << 48) - 1;

    /// For `value`: `queue pairs << 48 | first`.
    #[must_use]
    pub const fn to_value(self) -> u64 {
        (self.queue_pairs as u64) << 48 | self.first & Self::LOW
    }

    /// Of a `value`; `None` where it names no queue pair.
    #[must_use]
    pub const fn from_value(value: u64) -> Option<Self> {
        match (value >> 48) as u8 {
            0 => None,
            queue_pairs => Some(Self {
                first: value & Self::LOW,
                queue_pairs,
            }),
        }
    }

    /// `wr_id` of the work request that tells the peer of one of the operation's steps: `1 << 56 | queue pair << 48 | position`, the same
    /// over each path of the connection (`ringsight_verbs::endpoint::Work` has those of a step's other requests, too).
    #[must_use]
    pub const fn wr_id(self, step: u32) -> u64 {
        let position = self.first + step as u64;
        1 << 56 | (position % self.queue_pairs as u64) << 48 | position & Self::LOW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_numbering_survives_its_value() {
        let numbering = Numbering {
            first: (1 << 48) - 1,
            queue_pairs: 16,
        };
        assert_eq!(Numbering::from_value(numbering.to_value()), Some(numbering));
        assert_eq!(Numbering::from_value(7), None, "no queue pair");
    }
}
