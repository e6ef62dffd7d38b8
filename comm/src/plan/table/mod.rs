//! The table by which an operation's algorithm and data path are chosen. Algorithms are data: [`choose`] and [`explain`] read the same rows.

#[cfg(test)]
mod measured;
mod row;
#[cfg(test)]
mod tests;

use ringsight_records::{Algorithm, Function};

pub(crate) use row::{Query, Reason, Row, WindowSupport};

use crate::op::DataPath;
use ringsight_comm_base::error::Error;

use Function::{
    AllGather, AllReduce, AlltoAll, Broadcast, Gather, Recv, Reduce, ReduceScatter, Scatter, Send,
};

/// The table: the first row that serves an operation is taken.
///
/// All ranks must come to the same row. So a registered buffer counts only where all ranks know of it: in windows. Elsewhere the kernels find out
/// whether they reach each other's buffers, and a zero-copy kernel that does not reach one falls back to LL128.
///
/// Whether a call is captured does not count. Of 475 sizes that were measured both captured and eager (`measurements/tuning.jsonl`), the
/// fastest row of the captured calls is within 10 % of the fastest row of the eager ones, except for 8 sizes: messages and reduces whose host
/// work takes twice as long as their kernels.
///
/// A channel is one thread's work on the host device and one block's on a GPU. A second channel pays off when both have several FIFO slots to
/// move.
pub(crate) const TABLE: &[Row] = &[
    // Lowest latency: one kernel, and no rank waits for anything but the data.
    Row::of(&[AllReduce], Algorithm::OneShot, DataPath::Ll).up_to_of_all(512 << 10),
    // Copy engines bring contributions to the rank that reduces them, and results into the window. The kernel only reduces what is in the memory of
    // its own GPU, and moves nothing over NVLink (`Limits::copy_engine_reduce_bytes`).
    Row::of(&[AllReduce], Algorithm::TwoShot, DataPath::CopyEngine),
    // Each byte crosses NVLink twice, by stores alone: once to the rank that reduces it, once from there. Where loads and stores share the link,
    // stores are faster. A reduce_scatter and a reduce only load, and are faster without this row.
    Row::of(&[AllReduce], Algorithm::TwoShot, DataPath::Push),
    // Each byte crosses NVLink twice: once to the rank that reduces it, once from there.
    Row::of(&[AllReduce], Algorithm::TwoShot, DataPath::ZeroCopy),
    // The same for the ranks but the root. The root has no part to pass on or to reduce: its links carry everything once.
    Row::of(ROOTED, Algorithm::TwoShot, DataPath::ZeroCopy),
    // Copies run between an entry and an exit kernel; of a reduce_scatter the kernel in between only reduces. From the size on at which that is
    // about as fast as kernels, or at any size if all ranks want no kernel on the SMs (`Limits::copy_engine_bytes`).
    Row::of(
        &[AllGather, AlltoAll, ReduceScatter],
        Algorithm::Direct,
        DataPath::CopyEngine,
    ),
    Row::of(EACH_WITH_ALL, Algorithm::Direct, DataPath::ZeroCopy),
    Row::of(ROOTED, Algorithm::Direct, DataPath::ZeroCopy).up_to_ranks(2),
    Row::of(&[Send, Recv], Algorithm::Direct, DataPath::ZeroCopy),
    Row::of(&[AllReduce], Algorithm::TwoShot, DataPath::Ll128),
    // Each byte goes straight to the rank that needs it.
    Row::of(EACH_WITH_ALL, Algorithm::Direct, DataPath::Ll128),
    // All messages of a group side by side in one kernel.
    Row::of(&[Send, Recv], Algorithm::Direct, DataPath::Ll128),
    // One rank sends or gets everything. Among two ranks there is no other way. Among more, that rank's links carry less if the others pass on
    // parts, which pays off once bytes and not latency take the time.
    Row::of(ROOTED, Algorithm::Direct, DataPath::Ll128).up_to_ranks(2),
    Row::of(ROOTED, Algorithm::Direct, DataPath::Ll128).up_to_of_all(1 << 20),
    Row::of(ROOTED, Algorithm::TwoShot, DataPath::Ll128),
    // If TwoShot is left out by the environment, this is faster than a ring.
    Row::of(ROOTED, Algorithm::Direct, DataPath::Ll128).up_to_of_all(16 << 20),
    // Half the hops of a ring, but each rank sends, receives and reduces what all ranks have. Up to this size the hops saved take longer.
    Row::of(&[AllReduce], Algorithm::OneShot, DataPath::Fifo).up_to_of_all(16 << 10),
    Row::of(
        &[AllReduce, AllGather, ReduceScatter, Broadcast, Reduce],
        Algorithm::Ring,
        DataPath::Fifo,
    ),
    // Both ends of a message must come to the same row, whichever functions they called: so these functions share one.
    Row::of(
        &[Send, Recv, AlltoAll, Gather, Scatter],
        Algorithm::Direct,
        DataPath::Fifo,
    ),
];

/// Each rank has data for, or from, each other rank.
const EACH_WITH_ALL: &[Function] = &[AllGather, ReduceScatter, AlltoAll, Gather, Scatter];
/// One rank has, or gets, everything.
const ROOTED: &[Function] = &[Broadcast, Reduce];

/// The row by which an operation is done; `None` if no row serves it.
#[must_use]
pub(crate) fn choose(query: &Query) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.refuses(query).is_none())
}

/// Why [`choose`] gives none: the table ends with rows that serve every function of any size.
pub(super) fn none_left(query: &Query) -> Error {
    Error::argument(format!(
        "RINGSIGHT_ALGO and RINGSIGHT_PROTO leave no way to do {} of {} bytes among {} ranks",
        query.function, query.bytes, query.ranks
    ))
}

/// Every row of the table in its order, with the reason why it is not taken; the one without a reason is what [`choose`]
/// gives.
pub(crate) fn explain(query: &Query) -> impl Iterator<Item = (&'static Row, Option<Reason>)> {
    let mut found = false;
    TABLE.iter().map(move |row| {
        let reason = row.refuses(query).or(found.then_some(Reason::Earlier));
        found |= reason.is_none();
        (row, reason)
    })
}
