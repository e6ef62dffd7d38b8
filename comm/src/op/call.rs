//! A call, as far as its ranks must agree on it: its tag, its name in messages, its bytes between ranks.

use std::fmt;

use ringsight_comm_base::hash::fnv1a;
use ringsight_records::{DataType, Function, ReduceOp};

/// A function's name in NCCL's ABI, without the prefix.
#[must_use]
pub fn api_name(function: Function) -> &'static str {
    match function {
        Function::AllReduce => "AllReduce",
        Function::AllGather => "AllGather",
        Function::ReduceScatter => "ReduceScatter",
        Function::Broadcast => "Broadcast",
        Function::Reduce => "Reduce",
        Function::AlltoAll => "AlltoAll",
        Function::Gather => "Gather",
        Function::Scatter => "Scatter",
        Function::Send => "Send",
        Function::Recv => "Recv",
    }
}

/// Whether a function is made of messages between pairs of ranks: each is sent and received as `ncclSend` and `ncclRecv` would.
pub(crate) fn is_made_of_messages(function: Function) -> bool {
    matches!(
        function,
        Function::Send | Function::Recv | Function::AlltoAll | Function::Gather | Function::Scatter
    )
}

/// A call, as far as its ranks must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Which function.
    pub function: Function,
    /// Elements, as the caller gave them.
    pub count: usize,
    /// Their type.
    pub data_type: DataType,
    /// Reduction, [`ReduceOp::None`] where there is none.
    pub reduce_op: ReduceOp,
    /// Root of a rooted collective, peer of a send or receive.
    pub peer: Option<u32>,
    /// Where in a window its buffer is, if copy engines use that.
    pub place: Option<WindowPlace>,
}

/// A place in a window, which is the same on all ranks of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPlace {
    /// Number of the window, as all ranks count them.
    pub window: u32,
    /// Where in it, in bytes.
    pub offset: u64,
}

impl Call {
    /// The tag that every slot of the operation carries: never 0, the same for calls that fit together.
    ///
    /// All ranks of a collective must give the same count, type, reduction and root, and the same place where there is one; the scalar
    /// of a `PreMulSum` may differ between ranks. Of a send and its receive the bytes must be the same, whatever their types.
    #[must_use]
    pub fn tag(&self) -> u32 {
        let count = self.count as u64;
        let (words, count) = if self.function.is_p2p() {
            ([u8::MAX, 0, 0], count * self.data_type.size() as u64)
        } else {
            let codes = [self.function.code(), self.data_type.code(), self.reduce_op.code()];
            (codes, count)
        };
        let root = self
            .peer
            .filter(|_| !self.function.is_p2p())
            .map_or(0, |root| root + 1);
        let mut bytes = [0; 27];
        bytes[..3].copy_from_slice(&words);
        bytes[3..7].copy_from_slice(&root.to_le_bytes());
        bytes[7..15].copy_from_slice(&count.to_le_bytes());
        let length = self.place.map_or(15, |place| {
            bytes[15..19].copy_from_slice(&place.window.to_le_bytes());
            bytes[19..].copy_from_slice(&place.offset.to_le_bytes());
            bytes.len()
        });
        let hash = fnv1a(&bytes[..length]);
        // Folded, so that all 64 bits have a say.
        ((hash >> 32) as u32 ^ hash as u32).max(1)
    }

    pub(crate) const BYTES: usize = 32;

    /// Function u8 | type u8 | reduction u8 | has a peer (1), a place (2) u8 | peer u32 | count u64 | window u32 | 0 u32 | offset u64.
    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = self.function.code();
        bytes[1] = self.data_type.code();
        bytes[2] = self.reduce_op.code();
        bytes[3] = u8::from(self.peer.is_some()) | u8::from(self.place.is_some()) << 1;
        bytes[4..8].copy_from_slice(&self.peer.unwrap_or(0).to_le_bytes());
        bytes[8..16].copy_from_slice(&(self.count as u64).to_le_bytes());
        if let Some(place) = self.place {
            bytes[16..20].copy_from_slice(&place.window.to_le_bytes());
            bytes[24..].copy_from_slice(&place.offset.to_le_bytes());
        }
        bytes
    }

    /// `None` for anything that [`Call::encode`] does not write.
    pub(crate) fn parse(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let number = |at: usize| bytes[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let long = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let (peer, window, offset) = (number(4)?, number(16)?, long(24)?);
        let place = WindowPlace { window, offset };
        let call = Self {
            function: Function::from_code(bytes[0])?,
            count: usize::try_from(long(8)?).ok()?,
            data_type: DataType::from_code(bytes[1])?,
            reduce_op: ReduceOp::from_code(bytes[2])?,
            peer: (bytes[3] & 1 != 0).then_some(peer),
            place: (bytes[3] & 2 != 0).then_some(place),
        };
        (call.encode() == *bytes).then_some(call)
    }
}

/// As in `AllReduce(count 1024, float32, sum)`.
impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = api_name(self.function);
        write!(f, "{name}(count {}, {}", self.count, self.data_type)?;
        if self.reduce_op != ReduceOp::None {
            write!(f, ", {}", self.reduce_op)?;
        }
        if let Some(WindowPlace { window, offset }) = self.place {
            // The send buffer of a reduce_scatter, else the receive buffer.
            let way = if self.function == Function::ReduceScatter {
                "from"
            } else {
                "to"
            };
            write!(f, ", {way} byte {offset} of window {window}")?;
        }
        match (self.function, self.peer) {
            (Function::Send, Some(peer)) => write!(f, ") to rank {peer}"),
            (Function::Recv, Some(peer)) => write!(f, ") from rank {peer}"),
            (_, Some(root)) => write!(f, ", root {root})"),
            (_, None) => f.write_str(")"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn calls_are_named_as_the_caller_wrote_them() {
        assert_eq!(REDUCE.to_string(), "Reduce(count 10, float32, sum, root 0)");
        let send = Call {
            function: Function::Send,
            reduce_op: ReduceOp::None,
            ..REDUCE
        };
        assert_eq!(send.to_string(), "Send(count 10, float32) to rank 0");
        let gather = Call {
            function: Function::AllGather,
            reduce_op: ReduceOp::None,
            peer: None,
            place: Some(WindowPlace {
                window: 2,
                offset: 4096,
            }),
            ..REDUCE
        };
        assert_eq!(
            gather.to_string(),
            "AllGather(count 10, float32, to byte 4096 of window 2)"
        );
        let scatter = Call {
            function: Function::ReduceScatter,
            ..gather
        };
        assert_eq!(
            scatter.to_string(),
            "ReduceScatter(count 10, float32, from byte 4096 of window 2)"
        );
    }

    const REDUCE: Call = Call {
        function: Function::Reduce,
        count: 10,
        data_type: DataType::Float32,
        reduce_op: ReduceOp::Sum,
        peer: Some(0),
        place: None,
    };

    #[test]
    fn whatever_must_be_the_same_makes_another_tag() {
        let mut seen: HashMap<u32, Call> = HashMap::new();
        for function in Function::ALL {
            for count in [1, 10, 1 << 40] {
                for data_type in DataType::ALL {
                    for reduce_op in ReduceOp::ALL {
                        for peer in [None, Some(0), Some(1)] {
                            if function.is_p2p() {
                                continue;
                            }
                            let call = Call {
                                function: *function,
                                count,
                                data_type: *data_type,
                                reduce_op: *reduce_op,
                                peer,
                                place: None,
                            };
                            let place = |window, offset| Some(WindowPlace { window, offset });
                            for place in [None, place(0, 0), place(0, 4096), place(1, 0)] {
                                let call = Call { place, ..call };
                                let other = seen.insert(call.tag(), call);
                                assert!(other.is_none() && call.tag() != 0, "{call:?} {other:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_send_fits_a_receive_of_as_many_bytes() {
        let send = Call {
            function: Function::Send,
            reduce_op: ReduceOp::None,
            ..REDUCE
        };
        let recv = Call {
            function: Function::Recv,
            peer: Some(3),
            ..send
        };
        assert_eq!(send.tag(), recv.tag());
        assert_eq!(
            send.tag(),
            Call {
                count: 40,
                data_type: DataType::Int8,
                ..recv
            }
            .tag()
        );
        assert_ne!(send.tag(), Call { count: 11, ..recv }.tag());
    }
}
