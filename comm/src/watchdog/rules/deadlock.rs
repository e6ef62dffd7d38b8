//! The deadlock check: two ranks that wait for each other in different operations of one communicator.
//!
//! A rank runs the operations of a communicator one after another, in the order of its calls. Rank A waits for rank B in one
//! operation. Rank B waits for rank A in another one, which comes first on B. Then neither ever comes to the other's.

use std::time::Duration;

use ringsight_records::Function;

use super::{
    OperationReading, ProgressSource, Rules,
    evidence::{BlockingOperation, OperationRun, Position, RankAnswer, RankState},
    investigation::MUST_LAST,
};
use crate::op::{Call, Identity};

/// For how much longer than [`MUST_LAST`] nobody is called late while two ranks seem to wait for each other: that an
/// operation does not move is known by a look every 0.1 s.
const LOOK_TIME: Duration = Duration::from_millis(200);

/// The order in which a rank begins its operations on a communicator.
pub(crate) trait LaunchOrder {
    /// Whether `later` begins only after `earlier`, which is in progress, is completed.
    fn begins_after(&self, later: Identity, earlier: Identity) -> bool;
}

impl BlockingOperation {
    /// Whether the rank has been in it without moving for as long as a deadlock must last.
    pub(super) fn has_stood_still(&self) -> bool {
        self.awaits_asker_ns
            .is_some_and(|ns| Duration::from_nanos(ns) >= MUST_LAST)
    }
}

impl Rules {
    /// The operation that rank `peer` is in and that never ends, because it waits for this rank, which waits for `peer` in
    /// `op`. `doubted_for` says for how long it has seemed to be so.
    pub(super) fn deadlock(
        &self,
        op: &OperationReading,
        (peer, state): (u32, &RankState),
        doubted_for: Duration,
        order: &dyn LaunchOrder,
    ) -> Option<BlockingOperation> {
        let RankState::Answered(RankAnswer {
            position: Position::NotLaunched { .. } | Position::Queued { .. },
            blocked_by: Some(blocking),
            is_stale: false,
            ..
        }) = state
        else {
            return None;
        };
        let theirs_ns = blocking.awaits_asker_ns.filter(|_| blocking.comm == self.comm)?;
        let own_ns = self.blocks(op, blocking.run, peer, order)?;
        let deadlock = BlockingOperation {
            awaits_asker_ns: Some(theirs_ns.min(own_ns)),
            ..*blocking
        };
        // An operation that keeps moving ends without this rank, as far as anybody knows.
        (deadlock.has_stood_still() || doubted_for <= MUST_LAST + LOOK_TIME).then_some(deadlock)
    }

    /// The operation that keeps this rank from `run` while it waits for rank `peer`, which asks about `run`. Of several
    /// operations in progress the one that began first.
    pub(crate) fn blocking_operation(
        &self,
        in_progress: &[OperationReading],
        run: OperationRun,
        peer: u32,
        order: &dyn LaunchOrder,
        now: u64,
    ) -> Option<BlockingOperation> {
        in_progress
            .iter()
            .filter_map(|op| {
                Some(BlockingOperation {
                    comm: self.comm,
                    run: op.run,
                    since_ns: now.saturating_sub(op.start_ns),
                    awaits_asker_ns: Some(self.blocks(op, run, peer, order)?),
                })
            })
            .max_by_key(|blocking| blocking.since_ns)
    }

    /// If `op` waits here for rank `peer`, and `behind` begins only after it: for how long it has not moved, nanoseconds.
    /// CUDA events do not tell what moves, so with them it is for how long it has been in progress.
    fn blocks(
        &self,
        op: &OperationReading,
        behind: OperationRun,
        peer: u32,
        order: &dyn LaunchOrder,
    ) -> Option<u64> {
        // The program orders what graphs run.
        let is_ordered = op.run.replay == 0 && behind.replay == 0;
        // While the network is away nobody waits for a rank.
        if !is_ordered || op.stall.is_some() || !awaits(op.run.identity, op.call, self.rank, peer) {
            return None;
        }
        if !order.begins_after(behind.identity, op.run.identity) {
            return None;
        }
        match self.trusted_position(op) {
            Position::Running { since_ns, .. } if self.settings.source == ProgressSource::Events => {
                Some(since_ns)
            }
            Position::Running { still_ns, .. } => Some(still_ns),
            _ => None,
        }
    }
}

/// Whether an operation cannot end on rank `own` before rank `peer` comes to it. Data that rank `own` sends may fit into
/// what can be on its way; if it does not move for long, it does not.
fn awaits(identity: Identity, call: Option<Call>, own: u32, peer: u32) -> bool {
    if let Identity::Message { from, to, .. } = identity {
        return from != to && [from, to].contains(&peer);
    }
    let Some(call) = call else { return false };
    match call.function {
        Function::AllReduce | Function::AllGather | Function::ReduceScatter | Function::AlltoAll => true,
        // All data comes from the root, through whichever ranks.
        Function::Broadcast | Function::Scatter => call.peer == Some(peer),
        // All data goes to the root.
        Function::Reduce | Function::Gather => call.peer == Some(own),
        Function::Send | Function::Recv => false,
    }
}
