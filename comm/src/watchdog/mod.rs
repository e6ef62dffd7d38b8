//! The watchdog: which rank do the others wait for, and why?
//!
//! An operation that hangs says nothing. The watchdog finds the operations that have been in progress for too long, asks
//! their other ranks where they are, and reports one verdict with a culprit. `docs/src/watchdog.md` has what it promises to
//! users.
//!
//! Of operations that completed it finds out who arrived last ([`arrivals`]).
//!
//! # Verdicts
//! The first one that fits is reported: later ones are its consequences.
//!
//! | cause | found when | culprit | class |
//! |---|---|---|---|
//! | `RANK_DEAD` | a rank's process is gone | that rank | hang |
//! | `DEVICE_FAULT` | a rank's device failed | that rank | hang |
//! | `PEER_ABORTED` | a rank ended the communicator before it completed the operation | that rank | hang |
//! | `RANK_STOPPED` | a signal stopped a rank's process | that rank | hang |
//! | `NO_ANSWER` | a rank does not answer, and nobody knows why | that rank | hang |
//! | `METADATA_MISMATCH` | the [checks](crate::checks) found that the ranks do not call alike; or two ranks [wait for each other](rules::deadlock) | the ranks that are wrong; the other rank | hang |
//! | `RANK_STOPPED` | a debugger holds a rank's process | that rank | late |
//! | `NOT_LAUNCHED` | a rank has not called the operation | one that no other operation keeps | late |
//! | `QUEUED_BEHIND_COMPUTE` | a rank called it, and its stream has not come to it | the same | late |
//! | `STUCK_NIC` | all ranks have come, and a connection waits for the network | the rank that knows what failed | late |
//! | `PEER_ABORTED` | all others have come and stand still, and a rank left in good order | that rank | hang |
//! | `STUCK_KERNEL` | all ranks have come and stand still | the rank that others wait for and that waits for none | hang |
//! | none | all ranks have come, and something moves | – | – |
//!
//! *Late* becomes a *hang* after the arrival time-out.
//!
//! # States of an operation on this rank
//! | state | who moves an operation there |
//! |---|---|
//! | in flight | the launching thread ([`Watch::enter`]) |
//! | in progress | the device, which starts its first channel; [`in_flight`] sees it |
//! | overdue | the watchdog's thread, at its threshold ([`rules::Rules::schedule`]) |
//! | asked, judged | the watchdog's thread ([`rules::Rules::decide`]), by what the service threads heard |
//! | reported | the watchdog's thread; at once for what needs no question ([`Watch::rank_died`], [`Watch::calls_differ`]) |
//! | completed | the device |
//!
//! # Threads
//! | thread | enters by | may block on |
//! |---|---|---|
//! | `rs-watchdog`, one per process | [`thread`] | the log, and a fresh query of events for 0.1 s |
//! | `rs-events`, one per process | [`events`] | the device |
//! | the bootstrap's service thread | [`Watch::on_control_message`], [`Watch::rank_died`] | a fresh query of events for 0.1 s |
//! | the checks' thread | [`Watch::calls_differ`] | the same |
//! | launching threads | [`Watch::enter`], [`Watch::withdraw`], [`Watch::stop_tracking`] | nothing |
//! | a thread that ends or fails the communicator | [`Watch::give_up`], [`Watch::end`] | a fresh query of events for 0.1 s |
//!
//! # Invariants
//! - Only `rs-events` calls the device, so a stuck device silences no verdict.
//! - The rules ([`rules`]) read no clock, take no lock and call nothing: the threads read, and carry out what they decide.
//! - Locks are taken in the order `rules`, `in_flight`, the checks' calls. `inquiries` and the arrivals are locked alone.
//! - Everything that follows from a verdict happens before its report is logged, because the log may block.

mod answering;
mod arrivals;
mod dump;
mod events;
mod in_flight;
mod message;
mod reading;
mod report;
mod round;
mod rules;
mod sampling;
mod settings;
mod thread;

use std::{
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ringsight_comm_base::{error::Error, sync::lock};

pub(crate) use self::{
    answering::PassiveResponder,
    events::{PlanTracker, TrackedPlan},
    report::Report,
    settings::{ProgressSource, Settings},
    thread::RegisteredWatch,
};
use self::{
    answering::health_of,
    dump::DumpFiles,
    in_flight::InFlightOperations,
    message::WatchdogMessage,
    rules::{Rules, arrivals::ArrivalInquiries, completed::CompletedRuns},
};
use crate::{
    checks::{Checks, Post},
    observe,
    progress::{ArrivalLog, PlanObserver},
    proxy::{moves::Moves, stalls::Stalls},
    topology::{ProcessDevice, Topology},
};

/// Feeds bytes to the parser of messages, for [`crate::fuzzing`].
pub(crate) fn fuzz(data: &[u8]) {
    message::fuzz(data);
}

/// What the watchdog does to the communicator that it watches.
pub(crate) trait FailureControl: Send + Sync {
    /// Sets the asynchronous error; no wait is released.
    fn set_error(&self, error: Error);
    /// Sets the asynchronous error and releases every wait.
    fn fail(&self, error: Error);
}

/// A communicator as the watchdog needs to know it.
pub(crate) struct WatchedCommunicator {
    /// Its id.
    pub(crate) comm: u64,
    /// Empty if the user gave none.
    pub(crate) name: String,
    /// This rank's device.
    pub(crate) device: i32,
    /// Tells how far plans are; `None` if their kernels do.
    pub(crate) tracker: Option<Arc<PlanTracker>>,
    pub(crate) topology: Arc<Topology>,
    pub(crate) checks: Arc<Checks>,
    pub(crate) failure: Arc<dyn FailureControl>,
    /// Sends control messages.
    pub(crate) post: Post,
    /// The connections of this rank that wait for the network.
    pub(crate) stalls: Arc<Stalls>,
    /// Counts what the network moves for the communicator.
    pub(crate) moves: Arc<Moves>,
    /// Of a communicator over several nodes.
    pub(crate) arrivals: Option<Arc<ArrivalLog>>,
}

/// The watchdog of one communicator on this rank.
pub(crate) struct Watch {
    comm: u64,
    name: String,
    rank: u32,
    ranks: u32,
    device: i32,
    /// Another rank of the communicator is a thread of this process with the same device.
    shares_device: bool,
    tracker: Option<Arc<PlanTracker>>,
    settings: Settings,
    dump_files: DumpFiles,
    topology: Arc<Topology>,
    checks: Arc<Checks>,
    failure: Arc<dyn FailureControl>,
    post: Post,
    stalls: Arc<Stalls>,
    in_flight: Mutex<InFlightOperations>,
    rules: Mutex<Rules>,
    arrivals: Option<Arc<ArrivalLog>>,
    inquiries: Mutex<ArrivalInquiries>,
    /// Whom this rank asks when they arrived.
    asked_ranks: Vec<u32>,
    /// The communicator ends on this rank.
    has_ended: AtomicBool,
    /// Set when this rank gives up its operations. What they become afterwards does not count.
    completed_when_given_up: OnceLock<CompletedRuns>,
    /// The other ranks were told that a debugger is attached to this process.
    is_debugged: AtomicBool,
}

impl Watch {
    pub(crate) fn new(communicator: WatchedCommunicator, settings: Settings) -> Arc<Self> {
        let WatchedCommunicator {
            comm,
            name,
            device,
            tracker,
            topology,
            checks,
            failure,
            post,
            stalls,
            moves,
            arrivals,
        } = communicator;
        let places = places(&topology);
        let rank = topology.rank();
        let own = places[rank as usize];
        Arc::new(Self {
            comm,
            name,
            rank,
            ranks: topology.ranks(),
            device,
            shares_device: places.iter().filter(|place| **place == own).count() > 1,
            tracker,
            settings,
            dump_files: DumpFiles::from_env(),
            asked_ranks: arrivals
                .as_ref()
                .map_or_else(Vec::new, |_| arrivals::asked_ranks(&topology)),
            topology,
            checks,
            failure,
            post,
            stalls,
            in_flight: Mutex::new(InFlightOperations::new(moves, observe::now_ns())),
            rules: Mutex::new(Rules::new(comm, rank, settings)),
            arrivals,
            inquiries: Mutex::default(),
            has_ended: AtomicBool::new(false),
            completed_when_given_up: OnceLock::new(),
            is_debugged: AtomicBool::new(false),
        })
    }

    /// Records events before and behind each kernel, if plans are tracked by events.
    pub(crate) fn tracker(&self) -> Option<&Arc<PlanTracker>> {
        self.tracker.as_ref()
    }

    /// A plan is about to be launched; `graph` is 0 for one that runs once.
    pub(crate) fn enter(
        &self,
        observer: Arc<PlanObserver>,
        tracked: Option<Arc<TrackedPlan>>,
        graph: u32,
        now: u64,
    ) {
        lock(&self.in_flight).enter(observer, tracked, graph, now);
    }

    /// The plan of this number could not be launched.
    pub(crate) fn withdraw(&self, plan: u32) {
        lock(&self.in_flight).withdraw(plan);
    }

    /// The end of the plan of this number could not be recorded: only its kernel tells how far it is.
    pub(crate) fn stop_tracking(&self, plan: u32) {
        lock(&self.in_flight).stop_tracking(plan);
    }

    /// A graph is destroyed.
    pub(crate) fn forget_graph(&self, graph: u32) {
        lock(&self.in_flight).forget_graph(graph);
    }

    /// The communicator's events are destroyed: nothing is found out any more.
    pub(crate) fn close(&self) {
        if let Some(tracker) = &self.tracker {
            tracker.close();
        }
    }

    /// The communicator ends on this rank. If its operations did not end by themselves (`given_up`), all ranks are told, and
    /// nobody need ask this one.
    pub(crate) fn end(&self, given_up: bool) {
        if given_up {
            self.give_up();
        }
        // Release: pairs with `position_so_far`; a reader that sees the end sees how.
        let is_first = !self.has_ended.swap(true, Ordering::Release);
        self.end_inquiries();
        if let Some(completed) = self.completed_when_given_up.get().filter(|_| is_first) {
            let completed = completed.clone();
            (self.post)(None, &WatchdogMessage::GaveUp { completed }.encode());
        }
    }

    /// The operations are about to be given up. Keeps what is completed by now, because what ends afterwards ends because
    /// of that. Waits a moment for a fresh query of events.
    pub(crate) fn give_up(&self) {
        // Acquire: pairs with `end`. A communicator that ended in good order completed all that it had called.
        if self.has_ended.load(Ordering::Acquire) || self.completed_when_given_up.get().is_some() {
            return;
        }
        self.refresh(Duration::ZERO);
        // The first one counts: it is of before anything was given up.
        let _ = self.completed_when_given_up.set(self.completed());
    }

    /// Where each rank runs.
    fn places(&self) -> Vec<ProcessDevice> {
        places(&self.topology)
    }
}

/// Where each rank runs.
fn places(topology: &Topology) -> Vec<ProcessDevice> {
    (0..topology.ranks())
        .map(|rank| topology.info(rank).place())
        .collect()
}
