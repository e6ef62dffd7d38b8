//! The table by which an operation's algorithm is chosen.

use ringsight_records::{Algorithm, Function, Protocol};

use super::algorithm::{Choice, Row};

use Function::{
    AllGather, AllReduce, AlltoAll, Broadcast, Gather, Recv, Reduce, ReduceScatter, Scatter, Send,
};

/// One kernel in the memory that all ranks reach.
const fn among_peers(algorithm: Algorithm, protocol: Protocol) -> Choice {
    Choice {
        algorithm,
        protocol,
        bytes_per_channel: u64::MAX,
        among_peers: true,
    }
}

/// The same in lines of 128 bytes, through memory of the library's own.
const fn in_lines(algorithm: Algorithm) -> Choice {
    among_peers(algorithm, Protocol::Ll128)
}

/// The same straight between callers' buffers, where all ranks find that the others reach theirs; else in lines.
const fn straight(algorithm: Algorithm) -> Choice {
    among_peers(algorithm, Protocol::Simple)
}

/// Through FIFOs between neighbours.
const fn through_fifos(algorithm: Algorithm) -> Choice {
    Choice {
        algorithm,
        protocol: Protocol::Simple,
        bytes_per_channel: 256 << 10,
        among_peers: false,
    }
}

/// The table: the first row that serves an operation is taken. A channel is one thread's work on the host device and one block's on a
/// GPU: a second one pays off when both have several FIFO slots to move.
pub const TABLE: &[Row] = &[
    // One kernel, and no rank waits for anything but the data.
    Row::of(&[AllReduce], among_peers(Algorithm::OneShot, Protocol::Ll)).up_to_of_all(512 << 10),
    // One kernel, and each byte goes over NVLink once, to where it is to be or to who reduces it, and once from there.
    Row::of(&[AllReduce], straight(Algorithm::TwoShot)),
    Row::of(EACH_WITH_ALL, straight(Algorithm::Direct)),
    Row::of(ROOTED, straight(Algorithm::Direct)).up_to_ranks(2),
    Row::of(&[AllReduce], in_lines(Algorithm::TwoShot)),
    // One kernel, and each byte goes to who needs it.
    Row::of(EACH_WITH_ALL, in_lines(Algorithm::Direct)),
    // All messages of a group side by side in one kernel.
    Row::of(&[Send, Recv], in_lines(Algorithm::Direct)),
    // The same as for an all_gather where one rank sends or gets everything: among two there is no other way, among more a ring needs less of that
    // rank's links, once it is the bytes that take the time.
    Row::of(ROOTED, in_lines(Algorithm::Direct)).up_to_ranks(2),
    Row::of(ROOTED, in_lines(Algorithm::Direct)).up_to_of_all(1 << 20),
    // Half the hops. Each rank sends, receives and reduces what all have: up to here that takes less than the hops do.
    Row::of(&[AllReduce], through_fifos(Algorithm::OneShot)).up_to_of_all(16 << 10),
    Row::of(
        &[AllReduce, AllGather, ReduceScatter, Broadcast, Reduce],
        through_fifos(Algorithm::Ring),
    ),
    // Both ends of a message must come to the same choice, whichever functions they called: these share their row.
    Row::of(
        &[Send, Recv, AlltoAll, Gather, Scatter],
        through_fifos(Algorithm::Direct),
    ),
];

/// Each rank has something for, or of, each other.
const EACH_WITH_ALL: &[Function] = &[AllGather, ReduceScatter, AlltoAll, Gather, Scatter];
/// One rank has, or gets, everything.
const ROOTED: &[Function] = &[Broadcast, Reduce];
