//! What a rank reads of its own operations: from memory only, so nothing here blocks behind the device.

use std::{sync::atomic::Ordering, time::Duration};

use ringsight_comm_base::{error::Error, sync::lock};

use super::{
    Watch, events,
    in_flight::RunningOperation,
    rules::{
        OperationReading,
        completed::CompletedRuns,
        deadlock::LaunchOrder,
        evidence::{OperationRun, Position, RankAnswer},
    },
    thread::longest_in_progress,
};
use crate::{
    device, observe,
    op::{self, Identity},
};

impl Watch {
    /// The operations in progress on this rank, as far as is known.
    pub(super) fn in_progress(&self, now: u64) -> Vec<RunningOperation> {
        let in_flight = lock(&self.in_flight);
        match self.blind_since(now) {
            None => in_flight.in_progress().collect(),
            Some(since_ns) => in_flight.presumed_in_progress(since_ns),
        }
    }

    /// The operation that began first, as far as is known.
    pub(super) fn first_presumed(&self, now: u64) -> Option<RunningOperation> {
        self.in_progress(now).into_iter().min_by_key(|op| op.start_ns)
    }

    /// The operation that was seen to begin first, other than `except`.
    pub(super) fn first_in_progress(&self, except: Option<OperationRun>) -> Option<RunningOperation> {
        lock(&self.in_flight)
            .in_progress()
            .filter(|op| Some(op.run) != except)
            .min_by_key(|op| op.start_ns)
    }

    /// Since when events have told nothing, if a query has not come back for long: the device may be stuck.
    pub(super) fn blind_since(&self, now: u64) -> Option<u64> {
        let so_far = self.tracker.as_ref()?.query_so_far()?;
        (so_far >= events::PATIENCE).then(|| now.saturating_sub(so_far.as_nanos() as u64))
    }

    /// Waits a moment until what events tell is at most `old`. Returns whether it is.
    pub(super) fn refresh(&self, old: Duration) -> bool {
        self.tracker.as_ref().is_none_or(|tracker| tracker.refresh(old))
    }

    /// Reads an operation that is in progress.
    pub(super) fn read(&self, op: &RunningOperation, now: u64) -> OperationReading {
        self.read_run(op.run, op.start_ns, Some(op.info.op), now)
    }

    /// Reads a run that began at `start_ns`, if it has begun.
    fn read_run(&self, run: OperationRun, start_ns: u64, op: Option<u32>, now: u64) -> OperationReading {
        let position = self.position(run, now);
        let (bytes, beside) = lock(&self.in_flight).launch_of(run);
        OperationReading {
            run,
            start_ns,
            participants: self.participants(run.identity),
            call: op.and_then(|op| self.checks.call_of(op)),
            position,
            stall: self.stalls.of(self.comm, run.identity, run.replay, now),
            is_simulated: matches!(run.identity, Identity::Message { seq, .. } if op::is_simulated(seq)),
            bytes,
            beside,
        }
    }

    /// What this rank answers when rank `asker` asks where it is with a run.
    pub(super) fn answer(&self, run: OperationRun, asker: u32) -> RankAnswer {
        let is_stale = !self.refresh(events::RECENT);
        let now = observe::now_ns();
        let own = self.read_run(run, now, None, now);
        let running: Vec<RunningOperation> = lock(&self.in_flight).in_progress().collect();
        let running: Vec<OperationReading> = running.iter().map(|op| self.read(op, now)).collect();
        let rules = lock(&self.rules);
        let position = rules.trusted_position(&own);
        // An operation that keeps this rank for good says more than the one that has kept it for longest.
        let forever = rules.blocking_operation(&running, run, asker, self, now);
        drop(rules);
        RankAnswer {
            position,
            blocked_by: forever.or_else(|| longest_in_progress(self, run)),
            stall: own.stall,
            is_stale,
        }
    }

    /// Where this rank is with a run.
    fn position(&self, run: OperationRun, now: u64) -> Position {
        // First: what kernels did because they were given up is not read after it is known that they were.
        let position = self.position_so_far(run, now);
        let completed = self.completed_when_given_up.get();
        match completed.map(|completed| completed.contains(run)) {
            None => position,
            Some(true) => Position::Completed,
            Some(false) if self.fault().is_some() => Position::DeviceFailed,
            Some(false) => Position::CommunicatorEnded,
        }
    }

    /// The same, whether or not the operations have been given up since.
    fn position_so_far(&self, run: OperationRun, now: u64) -> Position {
        let in_flight = lock(&self.in_flight);
        let (position, last_launch_ns) = (in_flight.position(run, now), in_flight.last_launch_ns);
        drop(in_flight);
        // Acquire: pairs with `end`.
        if self.has_ended.load(Ordering::Acquire) {
            // A communicator that ended in good order completed all that was called, also where that is not known of each
            // operation.
            let is_completed = match run.replay {
                0 => self.checks.has_called(run.identity),
                _ => position == Some(Position::Completed),
            };
            return if is_completed {
                Position::Completed
            } else {
                Position::CommunicatorEnded
            };
        }
        if position != Some(Position::Completed) && self.fault().is_some() {
            return Position::DeviceFailed;
        }
        position.unwrap_or_else(|| {
            // An operation that was called and is not in flight any more is completed. A captured operation is in flight for
            // as long as its graph lives.
            if run.replay == 0 && self.checks.has_called(run.identity) {
                Position::Completed
            } else {
                Position::NotLaunched {
                    idle_ns: now.saturating_sub(last_launch_ns),
                }
            }
        })
    }

    /// What broke this rank's device, if it is known to be broken; a look at memory.
    pub(super) fn fault(&self) -> Option<Error> {
        let fault = device::opened()?.fault(self.device)?;
        Some(Error::from(fault))
    }

    /// The ranks that take part in an operation.
    pub(super) fn participants(&self, identity: Identity) -> Vec<u32> {
        match identity {
            Identity::Collective { .. } => (0..self.ranks).collect(),
            Identity::Message { from, to, .. } if from == to => vec![from],
            Identity::Message { from, to, .. } => vec![from.min(to), from.max(to)],
        }
    }

    /// What this rank has completed by now.
    pub(super) fn completed(&self) -> CompletedRuns {
        let in_flight = lock(&self.in_flight);
        let replays: Vec<OperationRun> = in_flight.completed_replays().collect();
        let incomplete = in_flight.incomplete();
        // Under the lock: an operation that is launched meanwhile is not completed either.
        let called = self.checks.called();
        drop(in_flight);
        CompletedRuns::new(called.into_iter(), &incomplete, replays.into_iter())
    }
}

impl LaunchOrder for Watch {
    fn begins_after(&self, later: Identity, earlier: Identity) -> bool {
        let in_flight = lock(&self.in_flight).begins_after(later, earlier);
        // An operation that is not in flight is completed, or has not been called: then it will come later.
        in_flight.unwrap_or_else(|| !self.checks.has_called(later))
    }
}
