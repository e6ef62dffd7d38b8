//! Which operations of a communicator are on their way on this rank.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::{
    events::Track,
    position::{Position, Run},
};
use crate::{
    checks::Identity,
    op::OpInfo,
    progress::{PlanObserver, Seen, Stage},
    proxy::moves::Moves,
};

/// A plan that was launched.
pub(super) struct Flight {
    observer: Arc<PlanObserver>,
    /// What tells how far it is, unless that is the observer.
    track: Option<Arc<Track>>,
    /// Graph number if captured, else 0.
    graph: u32,
    launched_ns: u64,
    /// Operations that are taken to be done where that cannot be known, since they are on all other ranks.
    passed: Vec<Identity>,
    /// When it was seen to have moved last, and [`Flight::moves`] then.
    moved: (u64, u64),
}

impl Flight {
    /// A number that changes whenever its kernel moves something, or the network does of its communicator's operations: on a busy
    /// machine several threads have to run before a kernel sees of that.
    fn moves(&self, network: &Moves) -> u64 {
        self.observer.moves().wrapping_add(network.count())
    }

    fn is_finished(&self) -> bool {
        match &self.track {
            None => self.observer.stage() == Stage::Finished,
            Some(track) => self.graph == 0 && matches!(track.seen(), Seen::Completed { .. }),
        }
    }

    /// Its operations, and where they are. Events are of the plan as a whole: of an operation that goes on in a later plan they
    /// do not tell the end.
    fn operations(&self) -> impl Iterator<Item = (&OpInfo, Seen)> {
        let told = self.track.is_none().then(|| self.observer.operations());
        let tracked = self.track.as_ref().map(|track| {
            let seen = track.seen();
            let is_over = matches!(seen, Seen::Completed { .. });
            let contents = self.observer.contents();
            contents
                .filter(move |(_, ends)| *ends || !is_over)
                .map(move |(info, _)| (info, seen))
        });
        told.into_iter().flatten().chain(tracked.into_iter().flatten())
    }

    /// One of its operations, in a replay that began then.
    fn run(&self, info: &OpInfo, replay: u32, start_ns: u64) -> InProgress {
        InProgress {
            info: *info,
            run: Run {
                identity: Identity::of(info),
                replay,
            },
            start_ns,
            launched_ns: self.launched_ns,
        }
    }

    fn in_progress(&self) -> impl Iterator<Item = InProgress> {
        self.operations().filter_map(|(info, seen)| match seen {
            Seen::InProgress { replay, start_ns } => Some(self.run(info, replay, start_ns)),
            Seen::NotReached | Seen::Launched { .. } | Seen::Completed { .. } => None,
        })
    }
}

/// An operation that has begun and is not done.
#[derive(Clone, Copy, Debug)]
pub(super) struct InProgress {
    pub(super) info: OpInfo,
    pub(super) run: Run,
    pub(super) start_ns: u64,
    pub(super) launched_ns: u64,
}

/// Graphs that are remembered when they are gone: a rank that is behind may still ask for their last replays.
const RETIRED: usize = 256;

/// Plans of a communicator that are on their way, oldest first; those of graphs as long as the graphs live.
#[derive(Default)]
pub(super) struct Flights {
    network: Arc<Moves>,
    eager: VecDeque<Flight>,
    captured: Vec<Flight>,
    /// Graphs that are gone, as the ranks number them, and the last replay of each; the latest ones.
    retired: VecDeque<(u32, u32)>,
    /// Something eager has been launched, or was on its way, since [`Flights::take_news`].
    has_news: bool,
    /// When it was looked last, 0 if never, and for how long kernels had been kept from running until then.
    looked_ns: u64,
    kept: Duration,
    /// When the last one was launched, or the communicator was made.
    pub(super) last_launch_ns: u64,
}

impl Flights {
    /// None, of a communicator that was made at this time, and whose operations the network moves so.
    pub(super) fn since(network: Arc<Moves>, now: u64) -> Self {
        Self {
            network,
            last_launch_ns: now,
            ..Self::default()
        }
    }

    pub(super) fn enter(
        &mut self,
        observer: Arc<PlanObserver>,
        track: Option<Arc<Track>>,
        graph: u32,
        now: u64,
    ) {
        let mut flight = Flight {
            observer,
            track,
            graph,
            launched_ns: now,
            passed: Vec::new(),
            moved: (now, 0),
        };
        flight.moved.1 = flight.moves(&self.network);
        self.last_launch_ns = now;
        if graph == 0 {
            // Plans finish in order: what is left behind here is at most what is on its way.
            while self.eager.front().is_some_and(Flight::is_finished) {
                self.eager.pop_front();
            }
            self.eager.push_back(flight);
            self.has_news = true;
        } else {
            self.captured.push(flight);
        }
    }

    /// A plan could not be launched after all: the last of its number, which a graph may have had that is replayed for as long as it takes for
    /// numbers to come again.
    pub(super) fn withdraw(&mut self, plan: u32) {
        let is_it = |flight: &Flight| flight.observer.number() == plan;
        if let Some(at) = self.eager.iter().rposition(is_it) {
            self.eager.remove(at);
        } else if let Some(at) = self.captured.iter().rposition(is_it) {
            self.captured.remove(at);
        }
    }

    /// What was to tell how far an eager plan is does not.
    pub(super) fn lose_track(&mut self, plan: u32) {
        for flight in &mut self.eager {
            if flight.observer.number() == plan {
                flight.track = None;
            }
        }
    }

    /// A graph is gone.
    pub(super) fn forget(&mut self, graph: u32) {
        // All its operations have been replayed as often.
        let last = self
            .captured
            .iter()
            .filter(|flight| flight.graph == graph)
            .flat_map(Flight::operations)
            .find_map(|(info, seen)| match seen {
                Seen::Completed { replay } => Some((Identity::of(info).graph(), replay)),
                Seen::NotReached | Seen::Launched { .. } | Seen::InProgress { .. } => None,
            });
        self.retired.extend(last);
        if self.retired.len() > RETIRED {
            self.retired.pop_front();
        }
        self.captured.retain(|flight| flight.graph != graph);
    }

    /// Notes which plans have moved since the last time, and forgets finished ones. It is looked every `rest`: where that was later, or
    /// kernels have been `kept` from running meanwhile, the machine did something else, and what did not move need not be stuck.
    /// For how long that was.
    pub(super) fn look(&mut self, now: u64, rest: Duration, kept: Duration) -> u64 {
        let regular = 2 * rest.as_nanos() as u64;
        let since = if self.looked_ns == 0 { now } else { self.looked_ns };
        let late = now.saturating_sub(since).saturating_sub(regular);
        // Waits are known of when they are over, and those of several threads may overlap: no more is lost than went by.
        let kept_back = kept.saturating_sub(self.kept).as_nanos() as u64;
        let lost = late.max(kept_back).min(now.saturating_sub(since));
        (self.looked_ns, self.kept) = (now, self.kept.max(kept));
        self.eager.retain(|flight| !flight.is_finished());
        for flight in self.eager.iter_mut().chain(&mut self.captured) {
            let moves = flight.moves(&self.network);
            if moves == flight.moved.1 {
                flight.moved.0 = now.min(flight.moved.0 + lost);
            } else {
                flight.moved = (now, moves);
            }
        }
        lost
    }

    fn all(&self) -> impl Iterator<Item = &Flight> {
        self.eager.iter().chain(&self.captured)
    }

    /// Whether eager operations may have ended since this was asked last, that is, whether there is something to learn.
    pub(super) fn take_news(&mut self) -> bool {
        let goes_on = self.eager.iter().any(|flight| !flight.is_finished());
        std::mem::replace(&mut self.has_news, goes_on)
    }

    /// How long replays took that have not been asked about, by operation. For one caller.
    pub(super) fn replayed(&self) -> Vec<(u32, Vec<u64>)> {
        let plans = self.captured.iter();
        plans.flat_map(|flight| flight.observer.replayed()).collect()
    }

    /// What was launched to run once, and is not known to be done.
    pub(super) fn undone(&self) -> Vec<Identity> {
        let operations = self.eager.iter().flat_map(Flight::operations);
        operations
            .filter(|(_, seen)| !matches!(seen, Seen::Completed { .. }))
            .map(|(info, _)| Identity::of(info))
            .collect()
    }

    /// The last replay that each captured operation is done with, those of graphs that are gone for all that these had.
    pub(super) fn replays(&self) -> impl Iterator<Item = Run> {
        let captured = self.captured.iter().flat_map(Flight::operations);
        let captured = captured.map(|(info, seen)| Run {
            identity: Identity::of(info),
            replay: match seen {
                Seen::Completed { replay } => replay,
                Seen::InProgress { replay, .. } | Seen::Launched { replay, .. } => replay.saturating_sub(1),
                Seen::NotReached => 0,
            },
        });
        let retired = self.retired.iter().map(|(graph, replay)| Run {
            identity: Identity::whole_graph(*graph),
            replay: *replay,
        });
        captured.chain(retired).filter(|run| run.replay > 0)
    }

    /// What is in progress.
    pub(super) fn in_progress(&self) -> impl Iterator<Item = InProgress> {
        self.all().flat_map(Flight::in_progress)
    }

    /// What is in progress as far as can be known when nothing has been told since `since_ns`: also what comes first of the eager ones that
    /// were not seen to begin. They run one after another, so that it has begun, unless something else keeps its stream.
    pub(super) fn presumed(&self, since_ns: u64) -> Vec<InProgress> {
        let is_passed = |flight: &Flight, info: &OpInfo| flight.passed.contains(&Identity::of(info));
        let known = self.all().flat_map(|flight| {
            let in_progress = flight.in_progress();
            in_progress.filter(move |op| !is_passed(flight, &op.info))
        });
        let mut first = self.eager.iter().map(|flight| {
            let left = flight.operations().filter(|(info, _)| !is_passed(flight, info));
            let left = left.filter(|(_, seen)| !matches!(seen, Seen::Completed { .. }));
            (flight, left.collect::<Vec<_>>())
        });
        let first = first.find(|(_, left)| !left.is_empty()).into_iter();
        let unseen = first.flat_map(|(flight, left)| {
            let unseen = left
                .into_iter()
                .filter(|(_, seen)| matches!(seen, Seen::NotReached));
            unseen.map(|(info, _)| flight.run(info, 0, flight.launched_ns.max(since_ns)))
        });
        known.chain(unseen).collect()
    }

    /// A run is taken to be done where that cannot be known.
    pub(super) fn pass(&mut self, run: Run) {
        let holds = |flight: &&mut Flight| {
            let mut operations = flight.operations();
            operations.any(|(info, _)| Identity::of(info) == run.identity)
        };
        if let Some(flight) = self.eager.iter_mut().find(holds) {
            flight.passed.push(run.identity);
        }
    }

    /// The first of those that have been launched and have not begun, as far as that is known; as if it began now.
    pub(super) fn queued(&self, now: u64) -> Option<InProgress> {
        self.all().find_map(|flight| {
            flight.operations().find_map(|(info, seen)| {
                let replay = match seen {
                    Seen::Launched { replay, .. } => replay,
                    Seen::NotReached if flight.graph == 0 => 0,
                    Seen::NotReached | Seen::InProgress { .. } | Seen::Completed { .. } => return None,
                };
                Some(flight.run(info, replay, now))
            })
        })
    }

    /// Whether an eager operation begins only when another one, which is on its way, is over: it is of a later plan. `None` if it is not
    /// on its way.
    pub(super) fn is_behind(&self, operation: Identity, other: Identity) -> Option<bool> {
        let holds = |identity: Identity| {
            move |flight: &Flight| {
                let mut operations = flight.operations();
                operations.any(|(info, _)| Identity::of(info) == identity)
            }
        };
        // Several plans may have works of one.
        let first = self.eager.iter().position(holds(operation))?;
        let last = self.eager.iter().rposition(holds(other));
        Some(last.is_some_and(|last| first > last))
    }

    /// Bytes of a run, if it is on its way, and what else is in progress in its plan.
    pub(super) fn plan_of(&self, run: Run) -> (u64, Vec<Run>) {
        let in_plan = |flight: &Flight| {
            let mut operations = flight.operations();
            let (info, _) = operations.find(|(info, _)| Identity::of(info) == run.identity)?;
            let beside = flight
                .in_progress()
                .map(|op| op.run)
                .filter(|other| *other != run);
            Some((info.bytes, beside.collect()))
        };
        self.all().find_map(in_plan).unwrap_or_default()
    }

    /// Where this rank is with a run, if it is on its way.
    pub(super) fn position(&self, run: Run, now: u64) -> Option<Position> {
        let ago = |ns: u64| now.saturating_sub(ns);
        let not_launched = Position::NotLaunched {
            idle_ns: ago(self.last_launch_ns),
        };
        let known = self.all().find_map(|flight| {
            let (info, seen) = flight
                .operations()
                .find(|(info, _)| Identity::of(info) == run.identity)?;
            Some(match seen {
                Seen::InProgress { replay, start_ns } if replay == run.replay => {
                    let moved_ns = flight.moved.0.max(start_ns);
                    Position::Running {
                        since_ns: ago(start_ns),
                        // It moved after we looked last.
                        still_ns: if flight.moves(&self.network) == flight.moved.1 {
                            ago(moved_ns)
                        } else {
                            0
                        },
                        waits: flight.observer.waits(info, now),
                    }
                }
                Seen::Launched { replay, launched_ns } if replay == run.replay => Position::Queued {
                    since_ns: ago(launched_ns),
                },
                Seen::InProgress { replay, .. }
                | Seen::Launched { replay, .. }
                | Seen::Completed { replay }
                    if replay >= run.replay =>
                {
                    Position::Done
                }
                Seen::NotReached if flight.graph == 0 => Position::Queued {
                    since_ns: ago(flight.launched_ns),
                },
                // Whether the replay has been launched nobody here knows: graphs are launched without us.
                _ => not_launched,
            })
        });
        known.or_else(|| {
            let graph = run.identity.graph();
            let retired = self.retired.iter().rfind(|(number, _)| *number == graph);
            let done = |(_, last): &(u32, u32)| (*last >= run.replay).then_some(Position::Done);
            retired.filter(|_| run.replay > 0).and_then(done)
        })
    }
}

#[cfg(test)]
mod tests {
    use ringsight_kernels::Observer as _;
    use smallvec::SmallVec;

    use super::*;
    use crate::{checks::Checks, progress::Contents};

    #[test]
    fn there_is_something_to_learn_only_after_something_was_launched() {
        let mut flights = Flights::default();
        assert!(!flights.take_news());
        let mut contents = Contents {
            number: 1,
            states: SmallVec::new(),
            shared: Vec::new(),
            persistent: false,
        };
        let checks = Checks::new(0, 1, Box::new(|_, _| true), Box::new(|_| {}));
        let observer = Arc::new(PlanObserver::new(&mut contents, Arc::default(), checks));
        flights.enter(observer.clone(), None, 0, 1);
        assert!(flights.take_news() && flights.take_news(), "it goes on");
        observer.launch_finished(0, false);
        assert!(flights.take_news(), "it has ended since");
        assert!(!flights.take_news() && !flights.take_news());
    }

    #[test]
    fn time_in_which_nothing_could_move_is_lost() {
        let (mut flights, ms) = (Flights::since(Arc::default(), 0), Duration::from_millis);
        let rest = ms(50);
        let mut look = |at: u64, kept| flights.look(at * 1_000_000, rest, ms(kept)) / 1_000_000;
        assert_eq!(
            look(1000, 70),
            0,
            "the first time there is nothing that it could be taken from"
        );
        assert_eq!(look(1050, 70), 0);
        assert_eq!(look(1100, 110), 40, "kernels did not run");
        assert_eq!(look(1500, 110), 300, "the watchdog did not");
        assert_eq!(look(1900, 460), 350, "neither did, and once is enough");
        assert_eq!(look(1950, 460), 0);
        assert_eq!(look(2000, 760), 50, "no more than went by");
    }
}
