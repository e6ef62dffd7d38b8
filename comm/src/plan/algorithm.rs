//! Which algorithm serves an operation: a table of data. Every rank reads the same table with the same values, so that
//! all come to the same choice.

use ringsight_records::{Algorithm, Function, Protocol};

/// One row: the first whose conditions hold is taken.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// For which functions.
    pub functions: &'static [Function],
    /// For messages of at most so many bytes: [`super::Request::bytes`], or those of one message where the operation is
    /// made of several.
    pub max_bytes: u64,
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
    Row {
        functions: COLLECTIVES,
        max_bytes: u64::MAX,
        choice: Choice {
            algorithm: Algorithm::Ring,
            protocol: Protocol::Simple,
            bytes_per_channel: 256 << 10,
        },
    },
    Row {
        functions: EXCHANGES,
        max_bytes: u64::MAX,
        choice: Choice {
            algorithm: Algorithm::Direct,
            protocol: Protocol::Simple,
            bytes_per_channel: 256 << 10,
        },
    },
];

/// The choice for `function` with `bytes` bytes; `None` if no row serves it.
#[must_use]
pub fn choose(function: Function, bytes: u64) -> Option<Choice> {
    TABLE
        .iter()
        .find(|row| row.functions.contains(&function) && bytes <= row.max_bytes)
        .map(|row| row.choice)
}

impl Choice {
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

    #[test]
    fn small_messages_take_one_channel_and_large_ones_all() {
        let choice = choose(Function::AllReduce, 8).unwrap();
        assert_eq!(choice.channels(8, 4), 1);
        assert_eq!(choice.channels(0, 4), 1);
        assert_eq!(choice.channels(choice.bytes_per_channel + 1, 4), 2);
        assert_eq!(choice.channels(u64::MAX, 4), 4);
    }

    #[test]
    fn every_function_served_is_served_at_every_size() {
        for function in Function::ALL {
            assert!(
                choose(*function, 0).is_some() && choose(*function, u64::MAX).is_some(),
                "{function}"
            );
        }
    }
}
