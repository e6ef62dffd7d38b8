//! Plans that were submitted to the device, and giving back what they hold.
//!
//! A plan that runs once is submitted when it is launched and retired when it is finished. A captured plan lives as long as its graph. The device's
//! threads and the destructors of graphs only put what is over into the [`RetireQueue`]. The thread that makes calls on the communicator
//! empties the queue at its next group end, and makes its next plan of a retired one ([`super::pool`]).

use std::{
    collections::{HashMap, VecDeque},
    mem,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use ringsight_comm_base::sync::lock;

use super::{
    pool::{Pool, PooledPlan},
    ready::SubmittedPlan,
};
use crate::{
    observe,
    progress::{RetireQueue, Retired, Stage},
};

/// Plans of one communicator that were submitted and are not retired, and the pool of those that are.
pub(crate) struct SubmittedPlans {
    retired: Arc<RetireQueue>,
    /// Empty, but for its memory.
    read: Vec<Retired>,
    /// In the order of their launch, which is nearly always that of their end.
    eager: VecDeque<SubmittedPlan>,
    pool: Pool,
    /// Work elements of all of `eager`.
    works: usize,
    /// By graph number.
    captured: HashMap<u32, Captured>,
}

/// What a graph holds of a communicator.
#[derive(Default)]
struct Captured {
    plans: Vec<SubmittedPlan>,
    /// Operation numbers, to be given back when the graph is gone; shared with the graph's destructor.
    ops: Arc<Mutex<Vec<u32>>>,
    /// The destructor is in place.
    retained: bool,
}

impl SubmittedPlans {
    pub(crate) fn new(retired: Arc<RetireQueue>) -> Self {
        Self {
            retired,
            read: Vec::new(),
            eager: VecDeque::new(),
            pool: Pool::default(),
            works: 0,
            captured: HashMap::new(),
        }
    }

    /// Enters a plan that is about to be launched; `graph` is 0 for one that runs once.
    pub(super) fn submit(&mut self, graph: u32, plan: SubmittedPlan) -> &SubmittedPlan {
        if graph == 0 {
            self.works += plan.works();
            self.eager.push_back_mut(plan)
        } else {
            self.captured.entry(graph).or_default().plans.push_mut(plan)
        }
    }

    /// Takes off a plan that runs once: it is finished, or its launch failed.
    pub(super) fn retire(&mut self, number: u32) {
        let place = self.eager.iter().position(|plan| plan.number == number);
        if let Some(plan) = place.and_then(|place| self.eager.remove(place)) {
            self.works -= plan.works();
            self.pool.put(plan);
        }
    }

    /// Retires everything that is finished, without waiting; gives a pooled plan, if there is one that nobody looks at any more.
    pub(crate) fn take_pooled(&mut self) -> Option<PooledPlan> {
        self.drain();
        self.pool.take()
    }

    /// Prefetches what [`Self::take_pooled`] will give next.
    pub(super) fn prefetch_pooled(&self) {
        self.pool.prefetch();
    }

    /// No plan follows.
    pub(crate) fn clear_pool(&mut self) {
        self.pool = Pool::default();
    }

    /// Whether graphs hold plans of this communicator.
    pub(super) fn has_graphs(&self) -> bool {
        self.captured.values().any(|captured| captured.retained)
    }

    /// Whether the graph, or the capture that it may come of, has plans of this communicator.
    pub(super) fn holds(&self, graph: u32) -> bool {
        self.captured.contains_key(&graph)
    }

    /// Notes an operation that a graph will hold.
    pub(crate) fn note_captured_op(&mut self, graph: u32, op: u32) {
        lock(&self.captured.entry(graph).or_default().ops).push(op);
    }

    /// The operation numbers that a graph holds, for its destructor; `None` if it has one already.
    pub(super) fn retain(&mut self, graph: u32) -> Option<Arc<Mutex<Vec<u32>>>> {
        let captured = self.captured.entry(graph).or_default();
        (!mem::replace(&mut captured.retained, true)).then(|| captured.ops.clone())
    }

    /// Plans that are held: those that run once, and those of graphs.
    pub(crate) fn held(&self) -> (usize, usize) {
        let captured = self.captured.values().map(|captured| captured.plans.len()).sum();
        (self.eager.len(), captured)
    }

    /// Retires everything that is finished, without waiting.
    pub(crate) fn drain(&mut self) {
        let mut read = mem::take(&mut self.read);
        self.retired.swap(&mut read);
        for retired in read.drain(..) {
            match retired {
                Retired::Plan(number) => self.retire(number),
                Retired::Graph(graph) => drop(self.captured.remove(&graph)),
            }
        }
        self.read = read;
    }

    /// The same, and waits until there is something, at most so long.
    fn drain_within(&mut self, limit: Duration) {
        self.retired.wait(limit);
        self.drain();
    }

    /// Waits until a FIFO of `depth` work elements has room for `works` more, or `give_up` says so (asked ten times a second);
    /// whether there is room.
    pub(super) fn wait_for_room(&mut self, works: usize, depth: usize, give_up: impl Fn() -> bool) -> bool {
        self.drain();
        while self.works > 0 && self.works + works > depth {
            if give_up() {
                return false;
            }
            self.drain_within(Duration::from_millis(100));
        }
        true
    }

    /// Waits until every plan that runs once is finished, or `give_up` says so (asked ten times a second).
    pub(crate) fn wait(&mut self, mut give_up: impl FnMut(&Self) -> bool) {
        self.drain();
        while !self.eager.is_empty() && !give_up(self) {
            self.drain_within(Duration::from_millis(100));
        }
    }

    /// After the abort word was set: waits until no plan is on the device any more, at most `limit`, and not where `is_lost` says that
    /// none ever ends. Plans that have not begun may stay in their streams: they give up as soon as they begin.
    pub(crate) fn wait_aborted(&mut self, limit: Duration, is_lost: impl Fn() -> bool) {
        let end = Instant::now() + limit;
        self.drain();
        while self.running() && Instant::now() < end && !is_lost() {
            self.drain_within(Duration::from_millis(1));
        }
    }

    fn running(&self) -> bool {
        let captured = self.captured.values().flat_map(|captured| &captured.plans);
        self.eager
            .iter()
            .chain(captured)
            .any(|plan| plan.stage() == Some(Stage::Running))
    }
}

impl Drop for SubmittedPlans {
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
