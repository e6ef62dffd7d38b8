//! The watchdog's rules: from what was read at a time to what is asked, judged and reported.
//!
//! Everything here is data in, data out. The time is an argument (`CLOCK_MONOTONIC` nanoseconds), so tests run the rules by
//! a virtual clock. The [watchdog's thread](super::thread) reads the data and carries out what the rules decide.
//!
//! | module | decides |
//! |---|---|
//! | [`durations`] | how long an operation may be in progress before its ranks are asked |
//! | [`movement`] | for how long an operation has not moved, and which time does not count |
//! | [`investigation`] | whom to ask and when, and whether a verdict is reported, doubted or redundant |
//! | [`deadlock`] | whether two ranks wait for each other in different operations |
//! | [`verdict`] | cause, culprit, late or hang, and what follows for the communicator |
//! | [`arrivals`] | which rank arrived last at a completed operation |
//! | [`completed`] | what a rank that gave up its operations had completed |
//!
//! A round of the watchdog is two calls: [`Rules::schedule`] picks the operations that are past their thresholds, and
//! [`Rules::decide`] moves their investigations on.

pub(super) mod arrivals;
pub(super) mod completed;
pub(super) mod deadlock;
pub(super) mod durations;
pub(super) mod evidence;
mod investigation;
mod movement;
pub(super) mod verdict;

#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, time::Duration};

pub(super) use self::movement::{LastMove, LostTime};
use self::{
    completed::CompletedRuns,
    deadlock::LaunchOrder,
    durations::{DurationHistory, OperationKind},
    evidence::{OperationRun, Position, RankAnswer, RankState},
    investigation::{Conclusion, Investigations, Judged, NextStep},
    verdict::{Verdict, judge},
};
use super::settings::{ProgressSource, SHORTEST_INTERVAL, Settings};
use crate::{
    op::{Call, Identity},
    proxy::stalls::Stall,
};

/// The most operations of a communicator that are investigated at once: those whose thresholds end first.
const AT_ONCE: usize = 256;

/// The longest rest while an operation is past half its threshold: when it last moved is known as well as it is looked.
const CLOSE_LOOK: Duration = Duration::from_millis(100);

/// An operation in progress on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OperationTimer {
    pub(super) run: OperationRun,
    /// When it began.
    pub(super) start_ns: u64,
    /// Its kind, if thresholds adapt and the kind is known.
    pub(super) kind: Option<OperationKind>,
}

/// When which operations are examined.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    /// Indices of the operations that are past their thresholds; the one that was due first comes first.
    pub(super) overdue: Vec<usize>,
    /// How long the watchdog may rest because of the others.
    pub(super) rest: Duration,
}

/// What was read of an operation that is in progress on this rank.
#[derive(Clone, Debug)]
pub(super) struct OperationReading {
    pub(super) run: OperationRun,
    /// When it began.
    pub(super) start_ns: u64,
    /// The ranks that take part, this one among them.
    pub(super) participants: Vec<u32>,
    /// The call that it came from, if the checks remember it.
    pub(super) call: Option<Call>,
    /// Where it is, as its source of progress says.
    pub(super) position: Position,
    /// Its connection that waits for the network.
    pub(super) stall: Option<Stall>,
    /// It is a kernel of `ncclSimulateKernelTimeout`, which waits for nobody.
    pub(super) is_simulated: bool,
    /// Its bytes.
    pub(super) bytes: u64,
    /// The other runs in progress in the same launch.
    pub(super) beside: Vec<OperationRun>,
}

/// What was read on this rank for one round.
pub(super) struct Reading<'a> {
    /// The overdue operations, in the order of [`Schedule::overdue`].
    pub(super) operations: &'a [OperationReading],
    pub(super) order: &'a dyn LaunchOrder,
    /// CUDA events have told nothing for long: this rank does not know where its own operations are.
    pub(super) is_blind: bool,
    /// It is known why no operation ends: this rank gave up its operations, or the ranks do not call alike.
    pub(super) is_given_up: bool,
}

/// What is to be done for an operation.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// Send a question to the ranks of a run.
    Ask { run: OperationRun, query: u32 },
    /// Send the question again to silent ranks, and find out about their processes.
    CheckHealth {
        run: OperationRun,
        query: u32,
        ranks: Vec<u32>,
    },
    /// Count the run as completed here, where that cannot be seen: all other ranks have completed it.
    AssumeCompleted { run: OperationRun },
    /// Report a verdict with its evidence, if the run is still in progress.
    Report {
        run: OperationRun,
        verdict: Verdict,
        states: BTreeMap<u32, RankState>,
    },
}

/// What a round decided.
#[derive(Debug, PartialEq)]
pub(super) struct Decision {
    /// In the order in which they are to be carried out.
    pub(super) steps: Vec<Step>,
    /// How long the watchdog may rest because of the overdue operations.
    pub(super) rest: Duration,
}

/// The rules of one communicator on one rank, and what they remember.
pub(super) struct Rules {
    comm: u64,
    rank: u32,
    settings: Settings,
    investigations: Investigations,
    durations: DurationHistory,
}

impl Rules {
    /// Of a communicator and this rank in it.
    pub(super) fn new(comm: u64, rank: u32, settings: Settings) -> Self {
        Self {
            comm,
            rank,
            settings,
            investigations: Investigations::new(settings.threshold),
            durations: DurationHistory::default(),
        }
    }

    /// How long operations have taken.
    pub(super) fn durations(&mut self) -> &mut DurationHistory {
        &mut self.durations
    }

    /// How long an operation of a kind may be in progress before its ranks are asked.
    pub(super) fn threshold(&self, kind: Option<OperationKind>) -> Duration {
        let fixed = self.settings.threshold;
        match (&self.settings.adaptive, kind) {
            (Some(adaptive), Some(kind)) => self.durations.threshold(kind, adaptive, fixed),
            _ => fixed,
        }
    }

    /// Picks the operations that are past their thresholds. `in_progress` is every operation in progress on this rank:
    /// investigations of others are closed.
    pub(super) fn schedule(&mut self, now: u64, in_progress: &[OperationTimer]) -> Schedule {
        self.investigations
            .retain(|run| in_progress.iter().any(|op| op.run == run));
        let mut by_deadline: Vec<(usize, Duration)> = in_progress
            .iter()
            .map(|op| self.threshold(op.kind))
            .enumerate()
            .collect();
        by_deadline.sort_by_key(|(index, threshold)| {
            u128::from(in_progress[*index].start_ns) + threshold.as_nanos()
        });
        let mut schedule = Schedule {
            overdue: Vec::new(),
            rest: self.settings.rest(),
        };
        for (index, threshold) in by_deadline.into_iter().take(AT_ONCE) {
            let age = Duration::from_nanos(now.saturating_sub(in_progress[index].start_ns));
            let left = threshold.saturating_sub(age);
            if left.is_zero() {
                schedule.overdue.push(index);
            }
            schedule.rest = schedule.rest.min(if left.is_zero() {
                // Its investigation may ask for less.
                CLOSE_LOOK
            } else if left <= threshold / 2 {
                left.min(CLOSE_LOOK)
            } else {
                left
            });
        }
        schedule
    }

    /// Moves the investigations of overdue operations on.
    pub(super) fn decide(&mut self, now: u64, reading: &Reading<'_>) -> Decision {
        let mut decision = Decision {
            steps: Vec::new(),
            rest: self.settings.rest(),
        };
        for op in reading.operations {
            let rest = self.examine(now, op, reading, &mut decision.steps);
            decision.rest = decision.rest.min(rest);
        }
        decision
    }

    /// Moves the investigation of one operation on, and adds what is to be done. Returns how long it rests.
    fn examine(
        &mut self,
        now: u64,
        op: &OperationReading,
        reading: &Reading<'_>,
        steps: &mut Vec<Step>,
    ) -> Duration {
        if self.investigations.is_final() || reading.is_given_up {
            return self.settings.rest();
        }
        let run = op.run;
        let own = RankAnswer {
            is_stale: reading.is_blind,
            stall: op.stall,
            // This rank waits in the operation, as far as it knows.
            ..self.trusted_position(op).presumed().into()
        };
        let step = self
            .investigations
            .next_step(run, &op.participants, (self.rank, own), now);
        let mut states = match step {
            NextStep::Rest(left) => return left,
            NextStep::Wait => return SHORTEST_INTERVAL,
            NextStep::Ask { query } => {
                steps.push(Step::Ask { run, query });
                return SHORTEST_INTERVAL;
            }
            NextStep::CheckHealth { query, ranks } => {
                steps.push(Step::CheckHealth { run, query, ranks });
                return SHORTEST_INTERVAL;
            }
            NextStep::Judge(states) => states,
        };
        let doubted_for = self.investigations.doubted_for(run, now);
        for (rank, state) in &mut states {
            if reading.is_blind {
                // A rank that does not know where it is may be the one that the others wait for.
                state.presume();
            } else if *rank != self.rank
                && let Some(blocking) = self.deadlock(op, (*rank, state), doubted_for, reading.order)
            {
                *state = RankState::Deadlocked(blocking);
            }
        }
        let age = Duration::from_nanos(now.saturating_sub(op.start_ns));
        let mut verdict = judge(&states, age, &self.settings);
        let mut others = states.iter().filter(|(rank, _)| **rank != self.rank);
        if reading.is_blind && states.len() > 1 && others.all(|(_, state)| state.is_over()) {
            // This rank has completed it too, as far as can be known, and waits in the next operation. A kernel of this rank
            // alone is not of this kind: no other rank knows of it.
            steps.push(Step::AssumeCompleted { run });
            verdict = None;
        }
        let rest = self.rest_after(verdict.as_ref(), &states, age);
        let judged = Judged {
            run,
            began_ns: op.start_ns,
            verdict,
            states: &states,
            asker: self.rank,
            rest,
        };
        match self.investigations.conclude(judged, now) {
            Conclusion::Doubt => SHORTEST_INTERVAL,
            Conclusion::Nothing => rest,
            Conclusion::Report(verdict) => {
                steps.push(Step::Report { run, verdict, states });
                rest
            }
        }
    }

    /// How long an investigation rests after a verdict: until more may be found, at most.
    fn rest_after(
        &self,
        verdict: Option<&Verdict>,
        states: &BTreeMap<u32, RankState>,
        age: Duration,
    ) -> Duration {
        let due = match verdict {
            // Until late becomes a hang.
            Some(verdict) if !verdict.is_hang => self.settings.arrival.saturating_sub(verdict.lateness(age)),
            Some(_) => Duration::MAX,
            // Until the rank that moved last has stood still for the threshold, or the network has been away for it.
            None => {
                let still = states.values().filter_map(RankState::still).min();
                let stalled = states
                    .values()
                    .filter_map(RankState::stall)
                    .map(|stall| Duration::from_nanos(stall.for_ns))
                    .max();
                let lasting = still.into_iter().chain(stalled);
                lasting
                    .map(|lasting| self.settings.threshold.saturating_sub(lasting))
                    .min()
                    .unwrap_or(Duration::MAX)
            }
        };
        due.min(self.settings.rest()).max(SHORTEST_INTERVAL)
    }

    /// The position of an operation, where "has not moved" is only as long as its source of progress can know.
    ///
    /// CUDA events tell starts and ends of a launch as a whole. Kernels of messages tell all ends of a launch at once: a
    /// message may be completed while others of its launch wait.
    pub(super) fn trusted_position(&self, op: &OperationReading) -> Position {
        let Position::Running {
            since_ns,
            still_ns,
            waits,
        } = op.position
        else {
            return op.position;
        };
        let by_events = self.settings.source == ProgressSource::Events;
        let is_message = matches!(op.run.identity, Identity::Message { .. });
        let known_ns = match (by_events, is_message) {
            (false, false) => still_ns,
            _ if op.is_simulated => still_ns.min(since_ns),
            // A rank may be late with another operation of the launch.
            _ if !self.investigations.all_had_come(&op.beside) => 0,
            (false, true) => still_ns.min(since_ns),
            // At one gigabyte a second it would have been completed long ago.
            (true, _) => {
                let stuck_ns = u64::try_from(self.settings.stuck.as_nanos()).unwrap_or(u64::MAX);
                still_ns.min(since_ns.saturating_sub(stuck_ns.saturating_add(op.bytes)))
            }
        };
        Position::Running {
            since_ns,
            still_ns: known_ns,
            waits,
        }
    }

    /// Something became known of a rank, in answer to question `query`.
    pub(super) fn hear(&mut self, query: u32, rank: u32, state: RankState, now: u64) {
        self.investigations.hear(query, rank, state, now);
    }

    /// A rank gave up its operations; these it had completed.
    pub(super) fn rank_gave_up(&mut self, rank: u32, completed: CompletedRuns) {
        self.investigations.rank_gave_up(rank, completed);
    }

    /// A debugger attached to a rank's process, or detached from it.
    pub(super) fn debugger(&mut self, rank: u32, is_attached: bool) {
        self.investigations.debugger(rank, is_attached);
    }

    /// Nothing could move for `lost_ns` nanoseconds before `now`.
    pub(super) fn lose_time(&mut self, now: u64, lost_ns: u64) {
        self.investigations.lose_time(now, lost_ns);
    }

    /// Notes a verdict that is known without a question, of a run in progress. Returns whether it is to be reported.
    pub(super) fn note(&mut self, run: OperationRun, verdict: &Verdict, now: u64) -> bool {
        self.investigations.note(run, verdict, now)
    }

    /// A rank's process died.
    pub(super) fn rank_died(&mut self, rank: u32) {
        self.investigations.rank_died(rank);
    }
}
