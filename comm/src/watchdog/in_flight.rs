//! Which operations of a communicator are in flight on this rank, and where they are.
//!
//! A plan enters when it is launched. An eager plan is dropped when it is finished; a captured plan is dropped with its
//! graph. The launching threads enter and withdraw plans; the watchdog's thread and the service threads read.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::{
    events::TrackedPlan,
    rules::{
        LastMove, LostTime,
        evidence::{OperationRun, Position},
    },
};
use crate::{
    op::{Identity, OpInfo},
    progress::{PlanObserver, Seen, Stage},
    proxy::moves::Moves,
};

/// Destroyed graphs whose last replays are remembered: a rank that is behind may still ask for them.
const DESTROYED_GRAPHS: usize = 256;

/// A plan that was launched.
struct InFlightPlan {
    observer: Arc<PlanObserver>,
    /// Knows how far the plan is, where CUDA events tell it. Otherwise the observer does.
    tracked: Option<Arc<TrackedPlan>>,
    /// The graph's number if the plan is captured, else 0.
    graph: u32,
    launched_ns: u64,
    /// Operations that count as completed though this rank cannot see it: all other ranks have completed them.
    assumed_completed: Vec<Identity>,
    last_move: LastMove,
}

/// An operation that has begun and is not completed.
#[derive(Clone, Copy, Debug)]
pub(super) struct RunningOperation {
    pub(super) info: OpInfo,
    pub(super) run: OperationRun,
    /// When it began, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) start_ns: u64,
    /// When its plan was launched, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) launched_ns: u64,
}

impl InFlightPlan {
    /// A count that changes whenever the plan's kernel moves data, or the network does for the communicator. The network
    /// counts, because on a busy machine several threads must run before the kernel sees what came.
    fn moves(&self, network: &Moves) -> u64 {
        self.observer.moves().wrapping_add(network.count())
    }

    fn is_finished(&self) -> bool {
        match &self.tracked {
            None => self.observer.stage() == Stage::Finished,
            Some(tracked) => self.graph == 0 && matches!(tracked.progress(), Seen::Completed { .. }),
        }
    }

    /// Its operations and where they are. Events tell of the plan as a whole: they do not tell the end of an operation that
    /// goes on in a later plan.
    fn operations(&self) -> impl Iterator<Item = (&OpInfo, Seen)> {
        let by_kernel = self.tracked.is_none().then(|| self.observer.operations());
        let by_events = self.tracked.as_ref().map(|tracked| {
            let progress = tracked.progress();
            let is_completed = matches!(progress, Seen::Completed { .. });
            self.observer
                .contents()
                .filter(move |(_, ends_here)| *ends_here || !is_completed)
                .map(move |(info, _)| (info, progress))
        });
        by_kernel
            .into_iter()
            .flatten()
            .chain(by_events.into_iter().flatten())
    }

    fn has(&self, identity: Identity) -> bool {
        self.operations().any(|(info, _)| Identity::of(info) == identity)
    }

    /// A run of one of its operations that began at `start_ns`.
    fn running(&self, info: &OpInfo, replay: u32, start_ns: u64) -> RunningOperation {
        RunningOperation {
            info: *info,
            run: OperationRun {
                identity: Identity::of(info),
                replay,
            },
            start_ns,
            launched_ns: self.launched_ns,
        }
    }

    fn in_progress(&self) -> impl Iterator<Item = RunningOperation> {
        self.operations().filter_map(|(info, progress)| match progress {
            Seen::InProgress { replay, start_ns } => Some(self.running(info, replay, start_ns)),
            Seen::NotReached | Seen::Launched { .. } | Seen::Completed { .. } => None,
        })
    }

    fn is_assumed_completed(&self, info: &OpInfo) -> bool {
        self.assumed_completed.contains(&Identity::of(info))
    }
}

/// The plans of a communicator that are in flight, oldest first.
#[derive(Default)]
pub(super) struct InFlightOperations {
    /// Counts what the network moves for the communicator.
    network: Arc<Moves>,
    eager: VecDeque<InFlightPlan>,
    captured: Vec<InFlightPlan>,
    /// Numbers of destroyed graphs, as all ranks count them, and the last replay of each; the latest graphs.
    destroyed: VecDeque<(u32, u32)>,
    /// Since [`InFlightOperations::take_may_have_completed`] an eager plan was in flight.
    may_have_completed: bool,
    lost_time: LostTime,
    /// When the last plan was launched, or the communicator was made.
    pub(super) last_launch_ns: u64,
}

impl InFlightOperations {
    /// None, of a communicator that was made at `now` and whose network moves `network` counts.
    pub(super) fn new(network: Arc<Moves>, now: u64) -> Self {
        Self {
            network,
            last_launch_ns: now,
            ..Self::default()
        }
    }

    /// A plan is about to be launched.
    pub(super) fn enter(
        &mut self,
        observer: Arc<PlanObserver>,
        tracked: Option<Arc<TrackedPlan>>,
        graph: u32,
        now: u64,
    ) {
        let mut plan = InFlightPlan {
            observer,
            tracked,
            graph,
            launched_ns: now,
            assumed_completed: Vec::new(),
            last_move: LastMove::default(),
        };
        plan.last_move = LastMove::at_launch(now, plan.moves(&self.network));
        self.last_launch_ns = now;
        if graph == 0 {
            // Plans finish in order: the queue is never longer than what is in flight.
            while self.eager.front().is_some_and(InFlightPlan::is_finished) {
                self.eager.pop_front();
            }
            self.eager.push_back(plan);
            self.may_have_completed = true;
        } else {
            self.captured.push(plan);
        }
    }

    /// The plan could not be launched after all. It is the last one of its number: numbers come again while the graph of an
    /// older plan lives on.
    pub(super) fn withdraw(&mut self, number: u32) {
        let is_it = |plan: &InFlightPlan| plan.observer.number() == number;
        if let Some(at) = self.eager.iter().rposition(is_it) {
            self.eager.remove(at);
        } else if let Some(at) = self.captured.iter().rposition(is_it) {
            self.captured.remove(at);
        }
    }

    /// Events do not tell how far an eager plan is: its kernel does.
    pub(super) fn stop_tracking(&mut self, number: u32) {
        for plan in &mut self.eager {
            if plan.observer.number() == number {
                plan.tracked = None;
            }
        }
    }

    /// A graph is destroyed.
    pub(super) fn forget_graph(&mut self, graph: u32) {
        // All operations of a graph have been replayed equally often.
        let last = self
            .captured
            .iter()
            .filter(|plan| plan.graph == graph)
            .flat_map(InFlightPlan::operations)
            .find_map(|(info, progress)| match progress {
                Seen::Completed { replay } => Some((Identity::of(info).graph(), replay)),
                Seen::NotReached | Seen::Launched { .. } | Seen::InProgress { .. } => None,
            });
        self.destroyed.extend(last);
        if self.destroyed.len() > DESTROYED_GRAPHS {
            self.destroyed.pop_front();
        }
        self.captured.retain(|plan| plan.graph != graph);
    }

    /// Notes which plans have moved since the last look, and drops finished ones. The watchdog looks every `rest`, and
    /// kernels have been kept from running for `kept` in all. Returns how many nanoseconds were lost ([`LostTime`]).
    pub(super) fn look(&mut self, now: u64, rest: Duration, kept: Duration) -> u64 {
        let lost_ns = self.lost_time.look(now, rest, kept);
        self.eager.retain(|plan| !plan.is_finished());
        for plan in self.eager.iter_mut().chain(&mut self.captured) {
            let moves = plan.moves(&self.network);
            plan.last_move.look(now, moves, lost_ns);
        }
        lost_ns
    }

    fn all(&self) -> impl Iterator<Item = &InFlightPlan> {
        self.eager.iter().chain(&self.captured)
    }

    /// Whether eager operations may have completed since the last call.
    pub(super) fn take_may_have_completed(&mut self) -> bool {
        let goes_on = self.eager.iter().any(|plan| !plan.is_finished());
        std::mem::replace(&mut self.may_have_completed, goes_on)
    }

    /// By operation, how long the replays took that completed since the last call. For one caller.
    pub(super) fn take_replay_durations(&self) -> Vec<(u32, Vec<u64>)> {
        self.captured
            .iter()
            .flat_map(|plan| plan.observer.replayed())
            .collect()
    }

    /// The eager operations that are not known to be completed.
    pub(super) fn incomplete(&self) -> Vec<Identity> {
        self.eager
            .iter()
            .flat_map(InFlightPlan::operations)
            .filter(|(_, progress)| !matches!(progress, Seen::Completed { .. }))
            .map(|(info, _)| Identity::of(info))
            .collect()
    }

    /// The last completed replay of each captured operation. A destroyed graph has one entry for all its operations.
    pub(super) fn completed_replays(&self) -> impl Iterator<Item = OperationRun> {
        let captured = self.captured.iter().flat_map(InFlightPlan::operations);
        let captured = captured.map(|(info, progress)| OperationRun {
            identity: Identity::of(info),
            replay: match progress {
                Seen::Completed { replay } => replay,
                Seen::InProgress { replay, .. } | Seen::Launched { replay, .. } => replay.saturating_sub(1),
                Seen::NotReached => 0,
            },
        });
        let destroyed = self.destroyed.iter().map(|(graph, replay)| OperationRun {
            identity: Identity::whole_graph(*graph),
            replay: *replay,
        });
        captured.chain(destroyed).filter(|run| run.replay > 0)
    }

    /// The operations in progress.
    pub(super) fn in_progress(&self) -> impl Iterator<Item = RunningOperation> {
        self.all().flat_map(InFlightPlan::in_progress)
    }

    /// The operations in progress, as far as can be known while events have told nothing since `blind_since_ns`. The first
    /// eager plan that is not completed counts as begun, because plans run one after another; another kernel may keep its
    /// stream, though.
    pub(super) fn presumed_in_progress(&self, blind_since_ns: u64) -> Vec<RunningOperation> {
        let known = self.all().flat_map(|plan| {
            plan.in_progress()
                .filter(move |op| !plan.is_assumed_completed(&op.info))
        });
        let mut incomplete = self.eager.iter().map(|plan| {
            let left = plan
                .operations()
                .filter(|(info, _)| !plan.is_assumed_completed(info))
                .filter(|(_, progress)| !matches!(progress, Seen::Completed { .. }));
            (plan, left.collect::<Vec<_>>())
        });
        let first = incomplete.find(|(_, left)| !left.is_empty());
        let unseen = first.into_iter().flat_map(|(plan, left)| {
            left.into_iter()
                .filter(|(_, progress)| matches!(progress, Seen::NotReached))
                .map(|(info, _)| plan.running(info, 0, plan.launched_ns.max(blind_since_ns)))
        });
        known.chain(unseen).collect()
    }

    /// A run counts as completed, where this rank cannot see it.
    pub(super) fn assume_completed(&mut self, run: OperationRun) {
        if let Some(plan) = self.eager.iter_mut().find(|plan| plan.has(run.identity)) {
            plan.assumed_completed.push(run.identity);
        }
    }

    /// The first operation that is launched and has not begun, as far as is known. It counts as begun at `now`.
    pub(super) fn first_queued(&self, now: u64) -> Option<RunningOperation> {
        self.all().find_map(|plan| {
            plan.operations().find_map(|(info, progress)| {
                let replay = match progress {
                    Seen::Launched { replay, .. } => replay,
                    Seen::NotReached if plan.graph == 0 => 0,
                    Seen::NotReached | Seen::InProgress { .. } | Seen::Completed { .. } => return None,
                };
                Some(plan.running(info, replay, now))
            })
        })
    }

    /// The first operation of the graph that was captured last, as if its next replay began at `now`. Programs launch graphs
    /// without the library, which learns of a replay when its kernel runs.
    pub(super) fn next_replay(&self, now: u64) -> Option<RunningOperation> {
        self.captured.iter().rev().find_map(|plan| {
            let (info, progress) = plan.operations().next()?;
            let replay = match progress {
                Seen::NotReached => 1,
                Seen::Completed { replay } => replay.wrapping_add(1),
                Seen::Launched { replay, .. } | Seen::InProgress { replay, .. } => replay,
            };
            Some(plan.running(info, replay, now))
        })
    }

    /// Whether the eager operation `later` is of a later plan than `earlier`, so that it begins only after it. `None` if
    /// `later` is not in flight.
    pub(super) fn begins_after(&self, later: Identity, earlier: Identity) -> Option<bool> {
        // Several plans may have works of one operation.
        let first = self.eager.iter().position(|plan| plan.has(later))?;
        let last = self.eager.iter().rposition(|plan| plan.has(earlier));
        Some(last.is_some_and(|last| first > last))
    }

    /// The bytes of a run that is in flight, and the other runs in progress in its plan.
    pub(super) fn launch_of(&self, run: OperationRun) -> (u64, Vec<OperationRun>) {
        let in_plan = |plan: &InFlightPlan| {
            let (info, _) = plan
                .operations()
                .find(|(info, _)| Identity::of(info) == run.identity)?;
            let beside = plan.in_progress().map(|op| op.run).filter(|other| *other != run);
            Some((info.bytes, beside.collect()))
        };
        self.all().find_map(in_plan).unwrap_or_default()
    }

    /// Where this rank is with a run that is in flight; `None` if it is not in flight.
    pub(super) fn position(&self, run: OperationRun, now: u64) -> Option<Position> {
        let ago = |ns: u64| now.saturating_sub(ns);
        let in_flight = self.all().find_map(|plan| {
            let (info, progress) = plan
                .operations()
                .find(|(info, _)| Identity::of(info) == run.identity)?;
            Some(match progress {
                Seen::InProgress { replay, start_ns } if replay == run.replay => Position::Running {
                    since_ns: ago(start_ns),
                    still_ns: plan.last_move.still_ns(now, plan.moves(&self.network), start_ns),
                    waits: plan.observer.waits(info, now),
                },
                Seen::Launched { replay, launched_ns } if replay == run.replay => Position::Queued {
                    since_ns: ago(launched_ns),
                },
                Seen::InProgress { replay, .. }
                | Seen::Launched { replay, .. }
                | Seen::Completed { replay }
                    if replay >= run.replay =>
                {
                    Position::Completed
                }
                Seen::NotReached if plan.graph == 0 => Position::Queued {
                    since_ns: ago(plan.launched_ns),
                },
                // The library does not learn that a program launches a graph, so the replay counts as not launched.
                _ => Position::NotLaunched {
                    idle_ns: ago(self.last_launch_ns),
                },
            })
        });
        in_flight.or_else(|| {
            let graph = run.identity.graph();
            let (_, last) = self.destroyed.iter().rfind(|(number, _)| *number == graph)?;
            (run.replay > 0 && *last >= run.replay).then_some(Position::Completed)
        })
    }
}

#[cfg(test)]
mod tests {
    use ringsight_kernels::{Observer as _, When};
    use ringsight_records::Flags;
    use smallvec::SmallVec;

    use super::*;
    use crate::{
        checks::Checks,
        progress::{Contents, OpState},
    };

    /// What rank 0 sends to rank 1 as message `seq`.
    fn message(seq: u64) -> OpInfo {
        OpInfo {
            op: 10 + seq as u32,
            comm: 1,
            seq,
            bytes: 100 + seq,
            rank: 0,
            peer: 1,
            flags: Flags(Flags::P2P.0 | Flags::SEND.0),
        }
    }

    fn run(seq: u64) -> OperationRun {
        OperationRun {
            identity: Identity::of(&message(seq)),
            replay: 0,
        }
    }

    /// The plan of this number with these messages, of one channel each.
    fn plan(number: u32, messages: &[u64]) -> Arc<PlanObserver> {
        let states = messages.iter().map(|seq| OpState::new(message(*seq), None, 1, 0));
        let mut contents = Contents {
            number,
            states: SmallVec::from_iter(states),
            shared: Vec::new(),
            persistent: false,
        };
        let checks = Checks::new(0, 2, Box::new(|_, _| true), Box::new(|_| {}));
        Arc::new(PlanObserver::new(&mut contents, Arc::default(), checks, None))
    }

    #[test]
    fn completions_are_looked_for_only_after_a_launch() {
        let mut in_flight = InFlightOperations::default();
        assert!(!in_flight.take_may_have_completed());
        let observer = plan(1, &[]);
        in_flight.enter(observer.clone(), None, 0, 1);
        assert!(
            in_flight.take_may_have_completed() && in_flight.take_may_have_completed(),
            "it is in flight"
        );
        observer.launch_finished(0, false);
        assert!(in_flight.take_may_have_completed(), "it has finished since");
        assert!(!in_flight.take_may_have_completed() && !in_flight.take_may_have_completed());
    }

    #[test]
    fn a_run_is_read_with_what_else_its_launch_has_in_progress() {
        let mut in_flight = InFlightOperations::new(Arc::default(), 50);
        let (first, second) = (plan(1, &[0, 1, 2]), plan(2, &[3]));
        let now = crate::observe::now_ns();
        in_flight.enter(first.clone(), None, 0, now);
        in_flight.enter(second, None, 0, now + 5);
        for op in [10, 11, 12] {
            first.channel_started(op, 0, 0, When::Now);
        }
        first.channel_stopped(12, 0, 0, false, When::Now);
        assert_eq!(in_flight.launch_of(run(0)), (100, vec![run(1)]));
        assert_eq!(in_flight.launch_of(run(1)), (101, vec![run(0)]));
        assert_eq!(in_flight.launch_of(run(9)), (0, vec![]), "not in flight");
        let later = crate::observe::now_ns() + 1000;
        let position = |seq| in_flight.position(run(seq), later);
        assert!(matches!(position(0), Some(Position::Running { waits: None, .. })));
        assert_eq!(position(2), Some(Position::Completed));
        assert_eq!(
            position(3),
            Some(Position::Queued {
                since_ns: later - now - 5
            })
        );
        assert_eq!(position(9), None);
        let order = |later, earlier| in_flight.begins_after(run(later).identity, run(earlier).identity);
        assert_eq!(order(3, 0), Some(true));
        assert_eq!(order(1, 0), Some(false), "they run beside each other");
        assert_eq!(order(9, 0), None);
        assert_eq!(in_flight.incomplete(), [0, 1, 3].map(|seq| run(seq).identity));
        // Without news of events the first incomplete plan counts as begun.
        let presumed: Vec<_> = in_flight
            .presumed_in_progress(now)
            .iter()
            .map(|op| op.run)
            .collect();
        assert_eq!(presumed, [run(0), run(1)]);
    }
}
