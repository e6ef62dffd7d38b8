//! The table by which an operation's algorithm is chosen.

use ringsight_records::{Algorithm, Function, Protocol};

use super::algorithm::{Asked, Choice, Reason, Row};
use crate::error::Error;

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

/// A reduction straight between callers' buffers, but for contributions, which go through memory of who reduces them.
const fn pushed(algorithm: Algorithm) -> Choice {
    among_peers(algorithm, Protocol::Push)
}

/// By copy engines, into receive buffers in a window whose places all hosts know, between two kernels of one block: where that is about as fast or faster, or where all
/// ranks want no kernel to take what computes, however long it takes ([`Limits::engine_bytes`](super::limits::Limits::engine_bytes)). What is reduced comes to where
/// [`REDUCED_BY_ENGINES`] has it.
pub(super) const BY_ENGINES: Choice = among_peers(Algorithm::Direct, Protocol::Ce);

/// By copy engines as well, which bring contributions to who reduces them and results into the window: a kernel only reduces what is in the memory of its own GPU
/// ([`Limits::engine_reduce_bytes`](super::limits::Limits::engine_reduce_bytes)).
pub(super) const REDUCED_BY_ENGINES: Choice = among_peers(Algorithm::TwoShot, Protocol::Ce);

/// Through FIFOs between neighbours.
const fn through_fifos(algorithm: Algorithm) -> Choice {
    Choice {
        algorithm,
        protocol: Protocol::Simple,
        bytes_per_channel: 256 << 10,
        among_peers: false,
    }
}

/// The table: the first row that serves an operation is taken.
///
/// All ranks must come to the same row. So whether a buffer is registered counts where all ranks know it, in windows, and else is
/// found out by the kernels: straight ones that do not reach a rank's buffer go in lines. Whether a call is captured changes what the host has to do, the
/// same in all ways: of 475 sizes that were measured both captured and eager (`measurements/tuning.jsonl`) the best way of captured ones
/// is within a tenth of the best of eager ones but for 8, messages and reduces whose host takes twice as long as their kernels.
///
/// A channel is one thread's work on the host device and one block's on a
/// GPU: a second one pays off when both have several FIFO slots to move.
pub const TABLE: &[Row] = &[
    // One kernel, and no rank waits for anything but the data.
    Row::of(&[AllReduce], among_peers(Algorithm::OneShot, Protocol::Ll)).up_to_of_all(512 << 10),
    // No kernel moves anything over NVLink.
    Row::of(&[AllReduce], REDUCED_BY_ENGINES),
    // One kernel, and each byte goes over NVLink once to who reduces it and once from there, by stores alone: where loads and stores share the
    // link, they are the better way. (A reduce_scatter and a reduce, which only load, are faster without.)
    Row::of(&[AllReduce], pushed(Algorithm::TwoShot)),
    // One kernel, and each byte goes over NVLink once, to where it is to be or to who reduces it, and once from there.
    Row::of(&[AllReduce], straight(Algorithm::TwoShot)),
    // The same, but for the root, which has no part to pass on or to reduce: its links carry everything once as it is.
    Row::of(ROOTED, straight(Algorithm::TwoShot)),
    // No kernel while data moves, or of what is reduced one that only does that.
    Row::of(&[AllGather, AlltoAll, ReduceScatter], BY_ENGINES),
    Row::of(EACH_WITH_ALL, straight(Algorithm::Direct)),
    Row::of(ROOTED, straight(Algorithm::Direct)).up_to_ranks(2),
    Row::of(&[Send, Recv], straight(Algorithm::Direct)),
    Row::of(&[AllReduce], in_lines(Algorithm::TwoShot)),
    // One kernel, and each byte goes to who needs it.
    Row::of(EACH_WITH_ALL, in_lines(Algorithm::Direct)),
    // All messages of a group side by side in one kernel.
    Row::of(&[Send, Recv], in_lines(Algorithm::Direct)),
    // The same as for an all_gather where one rank sends or gets everything: among two there is no other way, among more that rank's links carry
    // less if the others pass on parts, once it is the bytes that take the time.
    Row::of(ROOTED, in_lines(Algorithm::Direct)).up_to_ranks(2),
    Row::of(ROOTED, in_lines(Algorithm::Direct)).up_to_of_all(1 << 20),
    Row::of(ROOTED, in_lines(Algorithm::TwoShot)),
    // If that is left out: better than a ring.
    Row::of(ROOTED, in_lines(Algorithm::Direct)).up_to_of_all(16 << 20),
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

/// The choice for an operation; `None` if no row serves it.
#[must_use]
pub fn choose(asked: &Asked) -> Option<Choice> {
    TABLE
        .iter()
        .find(|row| row.refuses(asked).is_none())
        .map(|row| row.choice)
}

/// Why [`choose`] gives none: the table ends with rows that serve every function of any size.
pub(super) fn none_left(asked: &Asked) -> Error {
    Error::argument(format!(
        "RINGSIGHT_ALGO and RINGSIGHT_PROTO leave no way to do {} of {} bytes among {} ranks",
        asked.function, asked.bytes, asked.ranks
    ))
}

/// Every row of the table in its order, with the reason why it is not taken; the one without a reason is what [`choose`]
/// gives.
pub fn explain(asked: &Asked) -> impl Iterator<Item = (&'static Row, Option<Reason>)> {
    let mut found = false;
    TABLE.iter().map(move |row| {
        let reason = row.refuses(asked).or(found.then_some(Reason::Earlier));
        found |= reason.is_none();
        (row, reason)
    })
}

#[cfg(test)]
mod tests;
