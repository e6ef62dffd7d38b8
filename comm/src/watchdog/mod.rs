//! The watchdog: which rank do the others wait for, and why? `docs/src/watchdog.md` says what it promises.
//!
//! [`Watch`] knows a communicator's operations that are on their way on this rank. [`detector`]'s thread looks at all of
//! them; where one has been in progress for too long it asks the other ranks, whose service threads answer from memory,
//! and [`verdict::judge`] decides. How far operations are their kernels tell, or [`events`]. But for the thread that queries
//! these, nothing here calls the device.

mod ask;
mod crossing;
mod detector;
mod done;
mod dump;
mod events;
mod flights;
mod history;
mod inquiry;
mod learning;
mod message;
mod position;
mod report;
mod settings;
mod unwatched;
mod verdict;

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

pub(crate) use detector::Detected;
use done::Done;
use dump::Dumps;
pub(crate) use events::{Events, Track};
use flights::{Flights, InProgress};
use history::History;
use inquiry::Inquiry;
use message::{Health, Message};
use position::{Answer, HeldUp, Position, Run};
pub(crate) use report::Report;
use ringsight_records::Cause;
pub(crate) use settings::{Action, Settings, Source};
pub(crate) use unwatched::Unwatched;

use crate::{
    checks::{Checks, Identity, Post},
    communicator::{Lifecycle, lock},
    device,
    error::Error,
    observe, op,
    progress::PlanObserver,
    proxy::{
        moves::Moves,
        stalls::{Stall, Stalls},
    },
    topology::{ProcessDevice, Topology},
};

/// Of so many operations of a communicator that are in progress it is looked after at once: those that began first.
const AT_ONCE: usize = 256;

/// How often it is looked at least at an operation that has been in progress for half its threshold.
const CLOSELY: Duration = Duration::from_millis(100);

/// Feeds bytes to the parser of messages, for [`crate::fuzzing`].
pub(crate) fn fuzz(data: &[u8]) {
    message::fuzz(data);
}

/// What is watched of one communicator on this rank.
pub(crate) struct Watch {
    comm: u64,
    name: String,
    rank: u32,
    ranks: u32,
    device: i32,
    /// Another rank of the communicator is a thread of this process with the same device.
    shares_device: bool,
    /// What tells how far operations are, if it is not their kernels.
    events: Option<Arc<Events>>,
    settings: Settings,
    dumps: Dumps,
    topology: Arc<Topology>,
    checks: Arc<Checks>,
    life: Arc<Lifecycle>,
    post: Post,
    /// Connections of this rank that wait for the network.
    stalls: Arc<Stalls>,
    flights: Mutex<Flights>,
    history: Mutex<History>,
    inquiry: Mutex<Inquiry>,
    ended: AtomicBool,
    /// What was done when its operations were given up, if they were: nothing of what they became afterwards counts.
    done: OnceLock<Done>,
    /// The others have been told that a debugger has taken this process.
    traced: AtomicBool,
}

/// A communicator as the watchdog needs to know it.
pub(crate) struct Subject {
    pub(crate) comm: u64,
    pub(crate) name: String,
    pub(crate) device: i32,
    pub(crate) events: Option<Arc<Events>>,
    pub(crate) topology: Arc<Topology>,
    pub(crate) checks: Arc<Checks>,
    pub(crate) life: Arc<Lifecycle>,
    pub(crate) post: Post,
    pub(crate) stalls: Arc<Stalls>,
    /// Of the communicator over its connections.
    pub(crate) moves: Arc<Moves>,
}

impl Watch {
    pub(crate) fn new(subject: Subject, settings: Settings) -> Arc<Self> {
        let Subject {
            comm,
            name,
            device,
            events,
            topology,
            checks,
            life,
            post,
            stalls,
            moves,
        } = subject;
        let places = places(&topology);
        let own = places[topology.rank() as usize];
        let inquiry = Mutex::new(Inquiry::of(settings.threshold));
        let watch = Arc::new(Self {
            comm,
            name,
            rank: topology.rank(),
            ranks: topology.ranks(),
            device,
            shares_device: places.iter().filter(|place| **place == own).count() > 1,
            events,
            settings,
            dumps: Dumps::read(),
            topology,
            checks,
            life,
            post,
            stalls,
            flights: Mutex::new(Flights::since(moves, observe::now_ns())),
            history: Mutex::default(),
            inquiry,
            ended: AtomicBool::new(false),
            done: OnceLock::new(),
            traced: AtomicBool::new(false),
        });
        watch.give_up_on_failure();
        watch
    }

    /// What is to be told before each kernel and behind it, if anything is.
    pub(crate) fn events(&self) -> Option<&Arc<Events>> {
        self.events.as_ref()
    }

    /// A plan is about to be launched; `graph` is 0 for one that runs once.
    pub(crate) fn enter(&self, observer: Arc<PlanObserver>, track: Option<Arc<Track>>, graph: u32, now: u64) {
        lock(&self.flights).enter(observer, track, graph, now);
    }

    /// The plan of this number could not be launched.
    pub(crate) fn withdraw(&self, plan: u32) {
        lock(&self.flights).withdraw(plan);
    }

    /// The end of the plan of this number could not be recorded: how far it is only its kernel tells.
    pub(crate) fn lose_track(&self, plan: u32) {
        lock(&self.flights).lose_track(plan);
    }

    /// A graph is gone.
    pub(crate) fn forget(&self, graph: u32) {
        lock(&self.flights).forget(graph);
    }

    /// The communicator's events are destroyed: nothing is found out any more.
    pub(crate) fn close(&self) {
        if let Some(events) = &self.events {
            events.close();
        }
    }

    /// Lets what is known be fresh, at most so old, as far as that can be had at once; whether it is.
    fn refresh(&self, old: Duration) -> bool {
        self.events.as_ref().is_none_or(|events| events.refresh(old))
    }

    /// The process of a rank is gone: operations in progress will not end. What is then to be said, which may wait for
    /// whoever reads it.
    pub(crate) fn lost(&self, rank: u32) -> Option<Report> {
        self.refresh(Duration::ZERO);
        self.judge_alone(Cause::RankDead, rank)
    }

    /// The ranks do not call alike, as `text` says, and these are wrong: operations in progress will not end. What is then to
    /// be said.
    pub(crate) fn differ(&self, text: &str, odd: &[u32]) -> Option<Report> {
        self.refresh(Duration::ZERO);
        self.judge_calls(text, odd)
    }

    /// A control message has come; called on the bootstrap's service thread.
    pub(crate) fn control(&self, from: u32, bytes: &[u8]) {
        // Others use control messages, too.
        let Some(message) = Message::parse(bytes) else {
            return;
        };
        if from >= self.ranks {
            return;
        }
        let mut report = None;
        let answer = match message {
            Message::Where { query, run } => {
                report = self.fail_with_device();
                let is_old = !self.refresh(events::RECENT);
                let now = observe::now_ns();
                // What keeps it for good says more than what has kept it for longest.
                let held_up = self
                    .barring(run, from, now)
                    .or_else(|| detector::oldest_in_progress(self, run));
                let answer = Answer {
                    position: self.position(run, now),
                    held_up,
                    stall: self.stall(run, now),
                    is_old,
                };
                Message::Here { query, answer }
            }
            Message::Look { query, rank } if rank < self.ranks => Message::Looked {
                query,
                rank,
                health: Health::of(&self.topology, rank),
            },
            Message::Look { .. } => return,
            Message::Ended { done } => return lock(&self.inquiry).ended(from, done),
            Message::Dump => return self.dump(),
            Message::Traced { is } => return lock(&self.inquiry).traced(from, is),
            Message::Here { query, answer } => {
                let heard = verdict::Heard::Answer(answer);
                return lock(&self.inquiry).heard(query, from, heard, observe::now_ns());
            }
            Message::Looked { query, rank, health } => {
                return lock(&self.inquiry).heard(query, rank, health.into(), observe::now_ns());
            }
        };
        (self.post)(Some(from), &answer.encode());
        if let Some(report) = report {
            report.say();
        }
    }

    /// Where this rank waits for the network in a run.
    fn stall(&self, run: Run, now: u64) -> Option<Stall> {
        self.stalls.of(self.comm, run.identity, run.replay, now)
    }

    /// The same, whatever became of the communicator since.
    fn position_so_far(&self, run: Run, now: u64) -> Position {
        let flights = lock(&self.flights);
        // Acquire: pairs with `end`.
        if self.ended.load(Ordering::Acquire) {
            // In good order it has done what it called, also where that is not known of each operation.
            let is_done = match run.replay {
                0 => self.checks.has_called(run.identity),
                _ => flights.position(run, now) == Some(Position::Done),
            };
            return if is_done { Position::Done } else { Position::Ended };
        }
        let idle_ns = now.saturating_sub(flights.last_launch_ns);
        let mut position = flights.position(run, now);
        if let Some(Position::Running {
            since_ns, still_ns, ..
        }) = &mut position
            && (self.events.is_some() || matches!(run.identity, Identity::Message { .. }))
        {
            let (bytes, beside) = flights.plan_of(run);
            drop(flights);
            *still_ns = (*still_ns).min(self.stuck_for(run, *since_ns, bytes, &beside));
        }
        if position != Some(Position::Done) && self.fault().is_some() {
            return Position::Faulted;
        }
        position.unwrap_or_else(|| {
            // What was called and is not on its way any more is done. A captured operation is on its way as long as its
            // graph lives.
            if run.replay == 0 && self.checks.has_called(run.identity) {
                Position::Done
            } else {
                Position::NotLaunched { idle_ns }
            }
        })
    }

    /// For how long an operation does not move that has been in progress for so long, as far as what tells of it can say. Events tell of starts and
    /// ends only, and of its plan as a whole; kernels of messages tell of the ends of all of a launch at once: it may be done while others wait.
    fn stuck_for(&self, run: Run, since_ns: u64, bytes: u64, beside: &[Run]) -> u64 {
        // It waits for nobody and ends when it is told to.
        if let Identity::Message { seq, .. } = run.identity
            && op::is_simulated(seq)
        {
            return since_ns;
        }
        if !lock(&self.inquiry).have_come(beside) {
            return 0;
        }
        if self.events.is_none() {
            return since_ns;
        }
        // It would have been done long ago at a gigabyte a second.
        let stuck_ns = u64::try_from(self.settings.stuck.as_nanos()).unwrap_or(u64::MAX);
        since_ns.saturating_sub(stuck_ns.saturating_add(bytes))
    }

    /// What has broken this rank's device, if it is known that something has: a look at memory.
    fn fault(&self) -> Option<Error> {
        let fault = device::opened()?.fault(self.device)?;
        Some(Error::from(fault))
    }

    /// If the device has failed operations in progress will not end: the error is set, whatever the action. What is then to
    /// be said.
    fn fail_with_device(&self) -> Option<Report> {
        let fault = self.fault()?;
        // The error first: who reads the report finds it.
        self.life.fail(fault);
        self.judge_alone(Cause::DeviceFault, self.rank)
    }

    /// Where each rank runs.
    fn places(&self) -> Vec<ProcessDevice> {
        places(&self.topology)
    }

    /// The ranks that take part in an operation.
    fn participants(&self, identity: Identity) -> Vec<u32> {
        match identity {
            Identity::Collective { .. } => (0..self.ranks).collect(),
            Identity::Message { from, to, .. } if from == to => vec![from],
            Identity::Message { from, to, .. } => vec![from.min(to), from.max(to)],
        }
    }

    /// What is in progress on this rank, the one that began first; `but` is not counted.
    fn oldest(&self, but: Option<Run>) -> Option<InProgress> {
        lock(&self.flights)
            .in_progress()
            .filter(|op| Some(op.run) != but)
            .min_by_key(|op| op.start_ns)
    }

    /// Looks at what is in progress, asks and reports; says when to look again. `traced`: a debugger has taken this process.
    fn look(&self, traced: bool) -> Duration {
        let now = observe::now_ns();
        let mut flights = lock(&self.flights);
        // Where nothing is in progress nothing is lost either.
        let waits = flights.in_progress().next().is_some();
        let device = device::opened().filter(|_| waits);
        let kept = device.map_or(Duration::ZERO, |device| device.kept_from_running());
        let lost = flights.look(now, self.settings.rest(), kept);
        drop(flights);
        lock(&self.inquiry).lose(now, lost);
        if self.ended.load(Ordering::Relaxed) {
            return self.settings.rest();
        }
        // Relaxed: only the thread that looks uses it.
        if self.traced.swap(traced, Ordering::Relaxed) != traced {
            // Before it is held, since then it says nothing, and of a rank that is alone on its node nobody else can.
            (self.post)(None, &Message::Traced { is: traced }.encode());
        }
        self.learn_replays();
        let mut ops: Vec<(InProgress, Duration)> = self
            .waiting(now)
            .into_iter()
            .map(|op| (op, self.threshold(&op)))
            .collect();
        lock(&self.inquiry).keep(|run| ops.iter().any(|(op, _)| op.run == run));
        if !ops.is_empty()
            && let Some(report) = self.fail_with_device()
        {
            report.say();
        }
        // Who comes to its threshold first is asked about first.
        ops.sort_by_key(|(op, threshold)| u128::from(op.start_ns) + threshold.as_nanos());
        let mut rest = self.settings.rest();
        for (op, threshold) in ops.iter().take(AT_ONCE) {
            let age = Duration::from_nanos(now.saturating_sub(op.start_ns));
            let left = threshold.saturating_sub(age);
            let wait = if left.is_zero() {
                self.inquire(op, age, now)
            } else {
                left
            };
            // When it moved last is known as well as it is looked.
            let often = if left <= *threshold / 2 { CLOSELY } else { wait };
            rest = rest.min(wait).min(often);
        }
        rest
    }

    /// What is in progress on this rank, as far as is known.
    fn waiting(&self, now: u64) -> Vec<InProgress> {
        let flights = lock(&self.flights);
        match self.dark(now) {
            None => flights.in_progress().collect(),
            Some(since_ns) => flights.presumed(since_ns),
        }
    }

    /// Since when events have told nothing, if a query has not come back for long: the device may be stuck with what it is in.
    fn dark(&self, now: u64) -> Option<u64> {
        let so_far = self.events.as_ref()?.query_so_far()?;
        (so_far >= events::PATIENCE).then(|| now.saturating_sub(so_far.as_nanos() as u64))
    }
}

/// Of each rank.
fn places(topology: &Topology) -> Vec<ProcessDevice> {
    (0..topology.ranks())
        .map(|rank| topology.info(rank).place())
        .collect()
}
