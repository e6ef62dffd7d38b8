//! Checks between ranks: what an operation's tag is made of.

use ringsight_records::{DataType, Function, ReduceOp};

use crate::bootstrap::fnv1a;

/// What a rank called, as far as the ranks must agree on it.
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
}

impl Call {
    /// The tag that every slot of the operation carries: never 0, the same for calls that fit together.
    ///
    /// All ranks of a collective must give the same count, type, reduction and root; the scalar of a `PreMulSum` may
    /// differ between ranks. Of a send and its receive the bytes must be the same, whatever their types.
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
        let mut bytes = [0; 15];
        bytes[..3].copy_from_slice(&words);
        bytes[3..7].copy_from_slice(&root.to_le_bytes());
        bytes[7..].copy_from_slice(&count.to_le_bytes());
        let hash = fnv1a(&bytes);
        // Folded, so that all 64 bits have a say.
        ((hash >> 32) as u32 ^ hash as u32).max(1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    const REDUCE: Call = Call {
        function: Function::Reduce,
        count: 10,
        data_type: DataType::Float32,
        reduce_op: ReduceOp::Sum,
        peer: Some(0),
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
                            };
                            let other = seen.insert(call.tag(), call);
                            assert!(other.is_none() && call.tag() != 0, "{call:?} {other:?}");
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
