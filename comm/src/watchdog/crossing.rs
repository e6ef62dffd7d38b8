//! Ranks that wait for each other in operations of one communicator. These run one after another, in the order in which they are called,
//! so that neither will ever come to the other's: whether both have called both of them or not.

use std::time::Duration;

use ringsight_records::Function;

use super::{
    Watch,
    flights::InProgress,
    inquiry::LASTS,
    position::{Answer, HeldUp, Position, Run},
    verdict::Heard,
};
use crate::{checks::Identity, communicator::lock};

/// For how much longer than it must last nobody is said to be late, while two ranks seem to wait for each other: that something does not
/// move is known by a look each 0.1 s.
const SEEN: Duration = Duration::from_millis(200);

impl Watch {
    /// The operation of this communicator because of which rank `rank` will never come to `op`, in which this one waits for it. It must
    /// last: `doubted` says for how long it has seemed to be so.
    pub(super) fn crossing(
        &self,
        op: &InProgress,
        (rank, heard): (u32, &Heard),
        doubted: Duration,
        now: u64,
    ) -> Option<HeldUp> {
        let Heard::Answer(Answer {
            position: Position::NotLaunched { .. } | Position::Queued { .. },
            held_up: Some(held),
            is_old: false,
            ..
        }) = heard
        else {
            return None;
        };
        let theirs = held.bars_ns.filter(|_| held.comm == self.comm)?;
        let own = self.bars(op, held.run, rank, now)?;
        let crossed = HeldUp {
            bars_ns: Some(theirs.min(own)),
            ..*held
        };
        // What moves all the time is on its way, and goes on without this rank as far as anybody knows.
        (crossed.has_stood() || doubted <= LASTS + SEEN).then_some(crossed)
    }

    /// The operation of this communicator that keeps this rank from `run`, and in which it waits for rank `peer`; of several the one that
    /// began first.
    pub(super) fn barring(&self, run: Run, peer: u32, now: u64) -> Option<HeldUp> {
        let ops: Vec<InProgress> = lock(&self.flights).in_progress().collect();
        ops.iter()
            .filter_map(|op| {
                Some(HeldUp {
                    comm: self.comm,
                    run: op.run,
                    since_ns: now.saturating_sub(op.start_ns),
                    bars_ns: Some(self.bars(op, run, peer, now)?),
                })
            })
            .max_by_key(|held| held.since_ns)
    }

    /// Whether `op` is in progress here, `behind` comes only after it, and it waits for rank `peer`: for how long it has not moved then,
    /// nanoseconds; by events for how long it has been in progress, since more they do not tell.
    fn bars(&self, op: &InProgress, behind: Run, peer: u32, now: u64) -> Option<u64> {
        // What graphs run is ordered by whoever launches them.
        let is_ordered = op.run.replay == 0 && behind.replay == 0;
        // While the network is away nobody waits for a rank.
        if !is_ordered || !self.needs(op, peer) || self.stall(op.run, now).is_some() {
            return None;
        }
        let is_behind = lock(&self.flights).is_behind(behind.identity, op.run.identity);
        // What is not on its way is done, or has not been called: then it will be behind.
        if !is_behind.unwrap_or_else(|| !self.checks.has_called(behind.identity)) {
            return None;
        }
        match self.position(op.run, now) {
            Position::Running { since_ns, .. } if self.events.is_some() => Some(since_ns),
            Position::Running { still_ns, .. } => Some(still_ns),
            _ => None,
        }
    }

    /// Whether an operation cannot end here unless rank `peer` comes to it. What is sent to it can, as far as that may be on its way: if
    /// it has not moved for long, it cannot.
    fn needs(&self, op: &InProgress, peer: u32) -> bool {
        if let Identity::Message { from, to, .. } = op.run.identity {
            return from != to && [from, to].contains(&peer);
        }
        let Some(call) = self.checks.call_of(op.info.op) else {
            return false;
        };
        match call.function {
            Function::AllReduce | Function::AllGather | Function::ReduceScatter | Function::AlltoAll => true,
            // What comes from the root, by whichever ranks; what goes there.
            Function::Broadcast | Function::Scatter => call.peer == Some(peer),
            Function::Reduce | Function::Gather => call.peer == Some(self.rank),
            Function::Send | Function::Recv => false,
        }
    }
}

impl HeldUp {
    /// Whether it has kept the rank without moving for as long as that must last.
    pub(super) fn has_stood(&self) -> bool {
        self.bars_ns.is_some_and(|ns| Duration::from_nanos(ns) >= LASTS)
    }
}
