//! Giving back what finished plans hold. The device's threads and graph destructors only put a note into a queue (many
//! producers, one consumer); the thread that makes API calls on the communicator empties it at its next group end.

use std::{
    collections::HashMap,
    sync::{Arc, mpsc::Receiver},
    time::{Duration, Instant},
};

use ringsight_kernels::Launch;

use super::observer::{PlanObserver, Stage};

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
    _launch: Arc<Launch>,
    observer: Arc<PlanObserver>,
}

/// Plans that were launched and not reclaimed.
pub(crate) struct Plans {
    queue: Receiver<Reclaim>,
    eager: HashMap<u32, InFlight>,
    /// By graph number.
    captured: HashMap<u32, Vec<InFlight>>,
}

impl Plans {
    pub(crate) fn new(queue: Receiver<Reclaim>) -> Self {
        Self {
            queue,
            eager: HashMap::new(),
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
        let plan = InFlight {
            _launch: launch,
            observer,
        };
        if graph == 0 {
            self.eager.insert(number, plan);
        } else {
            self.captured.entry(graph).or_default().push(plan);
        }
    }

    /// Forgets a plan whose launch failed.
    pub(crate) fn withdraw(&mut self, number: u32) {
        self.eager.remove(&number);
    }

    /// Graphs that hold plans of this communicator.
    pub(crate) fn graphs(&self) -> usize {
        self.captured.len()
    }

    /// Whether the graph holds plans of this communicator already.
    pub(crate) fn knows(&self, graph: u32) -> bool {
        self.captured.contains_key(&graph)
    }

    fn reclaim(&mut self, note: Reclaim) {
        match note {
            Reclaim::Plan(number) => drop(self.eager.remove(&number)),
            Reclaim::Graph(graph) => drop(self.captured.remove(&graph)),
        }
    }

    /// Takes back everything that is finished, without waiting.
    pub(crate) fn drain(&mut self) {
        while let Ok(note) = self.queue.try_recv() {
            self.reclaim(note);
        }
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
        self.eager
            .values()
            .chain(self.captured.values().flatten())
            .any(|plan| plan.observer.stage() == Stage::Running)
    }
}
