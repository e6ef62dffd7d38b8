//! Giving back what finished plans hold. The device's threads and graph destructors only put a note into a queue (many
//! producers, one consumer); the thread that makes API calls on the communicator empties it at its next group end.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, mpsc::Receiver},
    time::{Duration, Instant},
};

use ringsight_kernels::Launch;

use super::observer::{PlanObserver, Stage};
use crate::{communicator::lock, observe};

/// A note in the queue.
#[derive(Clone, Copy, Debug)]
pub enum Reclaim {
    /// A plan that ran once is finished.
    Plan(u32),
    /// A graph is gone with all its instances.
    Graph(u32),
}

/// A plan that the device may still run.
struct InFlight {
    /// Kept for the communicator's life with the plan; the device holds its own reference.
    launch: Arc<Launch>,
    observer: Arc<PlanObserver>,
}

impl InFlight {
    /// Work elements.
    fn works(&self) -> usize {
        works(&self.launch)
    }
}

/// Work elements of a launch, all channels together.
pub(super) fn works(launch: &Launch) -> usize {
    launch.channels.iter().map(|channel| channel.work.len()).sum()
}

/// Plans that were launched and not reclaimed.
pub(crate) struct Plans {
    queue: Receiver<Reclaim>,
    eager: HashMap<u32, InFlight>,
    /// Work elements of all of `eager`.
    works: usize,
    /// By graph number.
    captured: HashMap<u32, Captured>,
}

/// What a graph holds of a communicator.
#[derive(Default)]
struct Captured {
    plans: Vec<InFlight>,
    /// Operation numbers, to be given back when the graph is gone; shared with the graph's destructor.
    ops: Arc<Mutex<Vec<u32>>>,
    /// The destructor is in place.
    retained: bool,
}

impl Plans {
    pub(crate) fn new(queue: Receiver<Reclaim>) -> Self {
        Self {
            queue,
            eager: HashMap::new(),
            works: 0,
            captured: HashMap::new(),
        }
    }

    /// Enters a plan; `graph` is 0 for one that runs once.
    pub(crate) fn enter(
        &mut self,
        number: u32,
        graph: u32,
        launch: Arc<Launch>,
        observer: Arc<PlanObserver>,
    ) {
        let plan = InFlight { launch, observer };
        if graph == 0 {
            self.works += plan.works();
            self.eager.insert(number, plan);
        } else {
            self.captured.entry(graph).or_default().plans.push(plan);
        }
    }

    /// Forgets a plan that runs once: it is finished, or its launch failed.
    pub(crate) fn withdraw(&mut self, number: u32) {
        if let Some(plan) = self.eager.remove(&number) {
            self.works -= plan.works();
        }
    }

    /// Whether graphs hold plans of this communicator.
    pub(crate) fn has_graphs(&self) -> bool {
        self.captured.values().any(|captured| captured.retained)
    }

    /// Whether the graph, or the capture that it may come of, has plans of this communicator.
    pub(crate) fn holds(&self, graph: u32) -> bool {
        self.captured.contains_key(&graph)
    }

    /// Notes an operation that a graph will hold.
    pub(crate) fn note_captured_op(&mut self, graph: u32, op: u32) {
        lock(&self.captured.entry(graph).or_default().ops).push(op);
    }

    /// The operation numbers that a graph holds, for its destructor; `None` if it has one already.
    pub(crate) fn retain(&mut self, graph: u32) -> Option<Arc<Mutex<Vec<u32>>>> {
        let captured = self.captured.entry(graph).or_default();
        (!std::mem::replace(&mut captured.retained, true)).then(|| captured.ops.clone())
    }

    fn reclaim(&mut self, note: Reclaim) {
        match note {
            Reclaim::Plan(number) => self.withdraw(number),
            Reclaim::Graph(graph) => drop(self.captured.remove(&graph)),
        }
    }

    /// Plans that are held: those that run once, and those of graphs.
    pub(crate) fn held(&self) -> (usize, usize) {
        let captured = self.captured.values().map(|captured| captured.plans.len()).sum();
        (self.eager.len(), captured)
    }

    /// Takes back everything that is finished, without waiting.
    pub(crate) fn drain(&mut self) {
        while let Ok(note) = self.queue.try_recv() {
            self.reclaim(note);
        }
    }

    /// Waits until a FIFO of `depth` work elements has room for `works` more, or `give_up` says so (asked ten times a second);
    /// whether there is room.
    pub(crate) fn wait_for_room(&mut self, works: usize, depth: usize, give_up: impl Fn() -> bool) -> bool {
        self.drain();
        while self.works > 0 && self.works + works > depth {
            if give_up() {
                return false;
            }
            if let Ok(note) = self.queue.recv_timeout(Duration::from_millis(100)) {
                self.reclaim(note);
            }
        }
        true
    }

    /// Waits until every plan that runs once is finished, or `give_up` says so (asked ten times a second).
    pub(crate) fn wait(&mut self, mut give_up: impl FnMut(&Self) -> bool) {
        self.drain();
        while !self.eager.is_empty() && !give_up(self) {
            if let Ok(note) = self.queue.recv_timeout(Duration::from_millis(100)) {
                self.reclaim(note);
            }
        }
    }

    /// After the abort word was set: waits until no plan is on the device any more, at most `limit`. Plans that have not
    /// begun may stay in their streams: they give up as soon as they begin.
    pub(crate) fn wait_aborted(&mut self, limit: Duration) {
        let end = Instant::now() + limit;
        self.drain();
        while self.running() && Instant::now() < end {
            if let Ok(note) = self.queue.recv_timeout(Duration::from_millis(1)) {
                self.reclaim(note);
            }
        }
    }

    fn running(&self) -> bool {
        let captured = self.captured.values().flat_map(|captured| &captured.plans);
        self.eager
            .values()
            .chain(captured)
            .any(|plan| plan.observer.stage() == Stage::Running)
    }
}

impl Drop for Plans {
    fn drop(&mut self) {
        self.drain();
        // Operations of captures that failed before anything was launched: no destructor gives their numbers back.
        for captured in self.captured.values().filter(|captured| !captured.retained) {
            lock(&captured.ops)
                .drain(..)
                .for_each(observe::release_captured_op);
        }
    }
}
