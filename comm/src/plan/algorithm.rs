//! Which algorithm serves an operation: a table of data. Every rank reads the same table with the same values, so that
//! all come to the same choice.

use ringsight_kernels::cuda::peers::one_shot_bytes;
use ringsight_records::{Algorithm, Function, Protocol, ReduceOp};

/// What the choice depends on; all of it is the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Function.
    pub function: Function,
    /// Reduction.
    pub reduce_op: ReduceOp,
    /// [`super::Request::bytes`], or those of one message where the operation is made of several.
    pub bytes: u64,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Bytes of a FIFO slot.
    pub slot_bytes: usize,
    /// Whether all ranks' devices have programs of [`Algorithm::OneShot`].
    pub one_shot: bool,
    /// Whether all ranks' kernels reach each other's memory.
    pub peers: bool,
}

/// One row: the first whose conditions hold, and whose algorithm is possible, is taken.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// For which functions.
    pub functions: &'static [Function],
    /// For at most so many [`Asked::bytes`].
    pub max_bytes: u64,
    /// For at most so many of them on all ranks together.
    pub max_bytes_of_all: u64,
    /// What they get.
    pub choice: Choice,
}

/// How an operation is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Arrangement of the ranks.
    pub algorithm: Algorithm,
    /// How data and flags travel.
    pub protocol: Protocol,
    /// One more channel for each so many bytes.
    pub bytes_per_channel: u64,
}

const COLLECTIVES: &[Function] = &[
    Function::AllReduce,
    Function::AllGather,
    Function::ReduceScatter,
    Function::Broadcast,
    Function::Reduce,
];

/// Both ends of a message must come to the same choice, whichever functions they called: these share their rows.
const EXCHANGES: &[Function] = &[
    Function::Send,
    Function::Recv,
    Function::AlltoAll,
    Function::Gather,
    Function::Scatter,
];

/// The table. A channel is one thread's work on the host device and one block's on a GPU: a second one pays off when
/// both have several FIFO slots to move.
pub const TABLE: &[Row] = &[
    // One kernel, and no rank waits for anything but the data.
    Row {
        functions: &[Function::AllReduce],
        max_bytes: u64::MAX,
        max_bytes_of_all: 512 << 10,
        choice: Choice {
            algorithm: Algorithm::OneShot,
            protocol: Protocol::Ll,
            bytes_per_channel: u64::MAX,
        },
    },
    // Half the hops. Each rank sends, receives and reduces what all have: up to here that takes less than the hops do.
    Row {
        functions: &[Function::AllReduce],
        max_bytes: u64::MAX,
        max_bytes_of_all: 16 << 10,
        choice: Choice {
            algorithm: Algorithm::OneShot,
            protocol: Protocol::Simple,
            bytes_per_channel: 256 << 10,
        },
    },
    Row {
        functions: COLLECTIVES,
        max_bytes: u64::MAX,
        max_bytes_of_all: u64::MAX,
        choice: Choice {
            algorithm: Algorithm::Ring,
            protocol: Protocol::Simple,
            bytes_per_channel: 256 << 10,
        },
    },
    Row {
        functions: EXCHANGES,
        max_bytes: u64::MAX,
        max_bytes_of_all: u64::MAX,
        choice: Choice {
            algorithm: Algorithm::Direct,
            protocol: Protocol::Simple,
            bytes_per_channel: 256 << 10,
        },
    },
];

/// The choice for an operation; `None` if no row serves it.
#[must_use]
pub fn choose(asked: &Asked) -> Option<Choice> {
    TABLE
        .iter()
        .find(|row| row.serves(asked) && row.choice.is_possible(asked))
        .map(|row| row.choice)
}

impl Row {
    fn serves(&self, asked: &Asked) -> bool {
        self.functions.contains(&asked.function)
            && asked.bytes <= self.max_bytes
            && asked.bytes.saturating_mul(asked.ranks.into()) <= self.max_bytes_of_all
    }
}

impl Choice {
    /// Whether kernels do it in memory that all ranks reach.
    #[must_use]
    pub fn is_among_peers(&self) -> bool {
        self.algorithm == Algorithm::OneShot && self.protocol == Protocol::Ll
    }

    /// Whether there is a program, wherever the table puts its limits.
    fn is_possible(&self, asked: &Asked) -> bool {
        if self.algorithm != Algorithm::OneShot {
            return true;
        }
        // One rank has nobody to send to.
        if asked.ranks < 2
            // Each rank's factor is known to that rank alone.
            || asked.reduce_op == ReduceOp::PreMulSum
        {
            return false;
        }
        if self.is_among_peers() {
            asked.peers && asked.bytes <= one_shot_bytes(asked.ranks as usize) as u64
        } else {
            asked.one_shot && asked.bytes <= asked.slot_bytes as u64
        }
    }

    /// Channels for `bytes` bytes when the communicator has `available`.
    #[must_use]
    pub fn channels(&self, bytes: u64, available: usize) -> usize {
        usize::try_from(bytes.div_ceil(self.bytes_per_channel))
            .unwrap_or(usize::MAX)
            .clamp(1, available)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(function: Function, bytes: u64) -> Asked {
        Asked {
            function,
            reduce_op: ReduceOp::Sum,
            bytes,
            ranks: 4,
            slot_bytes: 8 << 10,
            one_shot: true,
            peers: false,
        }
    }

    #[test]
    fn peers_do_a_short_all_reduce_in_one_kernel() {
        let among_peers = |ranks: u32, bytes| {
            let asked = Asked {
                ranks,
                peers: true,
                ..asked(Function::AllReduce, bytes)
            };
            choose(&asked).unwrap().is_among_peers()
        };
        for ranks in 2..=8 {
            let most = (512 << 10) / u64::from(ranks);
            assert!(among_peers(ranks, 1) && !among_peers(ranks, most + 1), "{ranks}");
            // As far as lines are whole.
            assert!(among_peers(ranks, most - 8 * u64::from(ranks)), "{ranks}");
        }
        assert!(!among_peers(1, 8));
        let others = [asked(Function::AllGather, 8), asked(Function::AllReduce, 8)];
        assert!(
            others
                .iter()
                .all(|asked| !choose(asked).unwrap().is_among_peers())
        );
    }

    #[test]
    fn small_messages_take_one_channel_and_large_ones_all() {
        let choice = choose(&asked(Function::AllReduce, 8)).unwrap();
        assert_eq!(choice.channels(8, 4), 1);
        assert_eq!(choice.channels(0, 4), 1);
        assert_eq!(choice.channels(choice.bytes_per_channel + 1, 4), 2);
        assert_eq!(choice.channels(u64::MAX, 4), 4);
    }

    #[test]
    fn every_function_served_is_served_at_every_size() {
        for function in Function::ALL {
            for bytes in [0, u64::MAX] {
                assert!(choose(&asked(*function, bytes)).is_some(), "{function}");
            }
        }
    }

    #[test]
    fn a_short_all_reduce_is_done_in_one_shot_where_that_is_possible() {
        let chosen = |asked: Asked| choose(&asked).unwrap().algorithm;
        let short = asked(Function::AllReduce, 4 << 10);
        assert_eq!(chosen(short), Algorithm::OneShot);
        let longer = asked(Function::AllReduce, (4 << 10) + 1);
        let others = [
            longer,
            asked(Function::Reduce, 8),
            Asked { ranks: 1, ..short },
            Asked { ranks: 5, ..short },
            Asked {
                slot_bytes: 2 << 10,
                ..short
            },
            Asked {
                one_shot: false,
                ..short
            },
            Asked {
                reduce_op: ReduceOp::PreMulSum,
                ..short
            },
        ];
        for other in others {
            assert_eq!(chosen(other), Algorithm::Ring, "{other:?}");
        }
    }
}
