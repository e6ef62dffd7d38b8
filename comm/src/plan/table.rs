//! The table by which an operation's algorithm is chosen.

use ringsight_records::{Algorithm, Function};

use super::algorithm::{Asked, Reason, Row};
use crate::{error::Error, op::DataPath};

use Function::{
    AllGather, AllReduce, AlltoAll, Broadcast, Gather, Recv, Reduce, ReduceScatter, Scatter, Send,
};

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
    Row::of(&[AllReduce], Algorithm::OneShot, DataPath::Ll).up_to_of_all(512 << 10),
    // No kernel moves anything over NVLink.
    Row::of(&[AllReduce], Algorithm::TwoShot, DataPath::CopyEngine),
    // One kernel, and each byte goes over NVLink once to who reduces it and once from there, by stores alone: where loads and stores share the
    // link, they are the better way. (A reduce_scatter and a reduce, which only load, are faster without.)
    Row::of(&[AllReduce], Algorithm::TwoShot, DataPath::Push),
    // One kernel, and each byte goes over NVLink once, to where it is to be or to who reduces it, and once from there.
    Row::of(&[AllReduce], Algorithm::TwoShot, DataPath::ZeroCopy),
    // The same, but for the root, which has no part to pass on or to reduce: its links carry everything once as it is.
    Row::of(ROOTED, Algorithm::TwoShot, DataPath::ZeroCopy),
    // No kernel while data moves, or of what is reduced one that only does that.
    Row::of(
        &[AllGather, AlltoAll, ReduceScatter],
        Algorithm::Direct,
        DataPath::CopyEngine,
    ),
    Row::of(EACH_WITH_ALL, Algorithm::Direct, DataPath::ZeroCopy),
    Row::of(ROOTED, Algorithm::Direct, DataPath::ZeroCopy).up_to_ranks(2),
    Row::of(&[Send, Recv], Algorithm::Direct, DataPath::ZeroCopy),
    Row::of(&[AllReduce], Algorithm::TwoShot, DataPath::Ll128),
    // One kernel, and each byte goes to who needs it.
    Row::of(EACH_WITH_ALL, Algorithm::Direct, DataPath::Ll128),
    // All messages of a group side by side in one kernel.
    Row::of(&[Send, Recv], Algorithm::Direct, DataPath::Ll128),
    // The same as for an all_gather where one rank sends or gets everything: among two there is no other way, among more that rank's links carry
    // less if the others pass on parts, once it is the bytes that take the time.
    Row::of(ROOTED, Algorithm::Direct, DataPath::Ll128).up_to_ranks(2),
    Row::of(ROOTED, Algorithm::Direct, DataPath::Ll128).up_to_of_all(1 << 20),
    Row::of(ROOTED, Algorithm::TwoShot, DataPath::Ll128),
    // If that is left out: better than a ring.
    Row::of(ROOTED, Algorithm::Direct, DataPath::Ll128).up_to_of_all(16 << 20),
    // Half the hops. Each rank sends, receives and reduces what all have: up to here that takes less than the hops do.
    Row::of(&[AllReduce], Algorithm::OneShot, DataPath::Fifo).up_to_of_all(16 << 10),
    Row::of(
        &[AllReduce, AllGather, ReduceScatter, Broadcast, Reduce],
        Algorithm::Ring,
        DataPath::Fifo,
    ),
    // Both ends of a message must come to the same choice, whichever functions they called: these share their row.
    Row::of(
        &[Send, Recv, AlltoAll, Gather, Scatter],
        Algorithm::Direct,
        DataPath::Fifo,
    ),
];

/// Each rank has something for, or of, each other.
const EACH_WITH_ALL: &[Function] = &[AllGather, ReduceScatter, AlltoAll, Gather, Scatter];
/// One rank has, or gets, everything.
const ROOTED: &[Function] = &[Broadcast, Reduce];

/// The row by which an operation is done; `None` if no row serves it.
#[must_use]
pub fn choose(asked: &Asked) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.refuses(asked).is_none())
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
