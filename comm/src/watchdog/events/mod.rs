//! The watchdog's second source of progress: CUDA events around each kernel, for devices whose kernels tell nothing.
//!
//! An eager plan has two events of a pool. A captured plan has two events of its own, recorded as external ones, which can be
//! queried while the graph is replayed. It also has two counters, which each replay counts up ([`tracked_plan`] says why).
//! The event that joins captured streams is a regular one and no part of this.
//!
//! # Threads
//! Launching threads record events ([`PlanTracker::begin`], [`PlanTracker::end`]). The [poller](poller) queries them. The
//! driver's thread that destroys a graph must not call the device: it only adds to a list, and wakes nobody.
//!
//! # Who destroys the events of a captured plan
//! | what happens | who destroys them |
//! |---|---|
//! | the graph is destroyed | the poller, which finds the graph in the list in its next round |
//! | the communicator ends | the ending thread, or the poller if it queries them just then |
//!
//! A graph that outlives its communicator keeps the counters, because its replays write them.

mod poller;
#[cfg(test)]
mod tests;
mod tracked_plan;

use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

use self::poller::{EventPoller, POLLER, Polled};
pub(super) use self::poller::{PATIENCE, RECENT};
pub(crate) use self::tracked_plan::TrackedPlan;

use ringsight_comm_base::{
    fork::{self, PerProcess},
    sync::lock,
};

use super::Settings;
use crate::{
    device::{Capture, Device, Event, Progress, Stream},
    error::Result,
    progress::Seen,
};

/// Every so many launches the poller is woken: completed plans are kept until it has looked.
const BACKLOG: usize = 1024;

/// Tracks the plans of a communicator on this rank by events.
pub(crate) struct PlanTracker {
    device: Arc<dyn Device>,
    /// The device's number.
    number: i32,
    interval: Duration,
    poller: &'static EventPoller,
    destroyed: &'static DestroyedGraphs,
    /// As the poller knows it.
    own: Weak<PlanTracker>,
    /// See [`fork::generation`].
    fork: u32,
    plans: Mutex<TrackedPlans>,
}

#[derive(Default)]
struct TrackedPlans {
    /// Plans whose ends the last round did not see, in the order of their launch.
    eager: VecDeque<Arc<TrackedPlan>>,
    graphs: Vec<Arc<GraphPlans>>,
    pool: Vec<[Event; 2]>,
    /// The poller queries them: nobody else may destroy or reuse an event that is not in the pool.
    is_queried: bool,
    is_closed: bool,
}

/// The plans of a communicator in one graph. The graph keeps them, for the counters.
struct GraphPlans {
    graph: u32,
    owner: Weak<PlanTracker>,
    plans: Mutex<Vec<Arc<TrackedPlan>>>,
}

/// The plans of destroyed graphs, of all communicators of the process.
type DestroyedGraphs = Mutex<Vec<Arc<GraphPlans>>>;

static DESTROYED: PerProcess<DestroyedGraphs> = PerProcess::new();

/// Events that are not used any more. To destroy one may take as long as the kernels that run.
struct UnusedEvents {
    device: Arc<dyn Device>,
    events: Vec<Event>,
}

impl Drop for UnusedEvents {
    fn drop(&mut self) {
        for event in self.events.drain(..) {
            // Nothing is left to be done about one that cannot be destroyed.
            let _ = self.device.event_destroy(event);
        }
    }
}

impl PlanTracker {
    /// Of a communicator with these settings, on device number `number`.
    pub(crate) fn new(device: Arc<dyn Device>, number: i32, settings: &Settings) -> Arc<Self> {
        Self::polled_by(POLLER.get(), DESTROYED.get(), device, number, settings)
    }

    fn polled_by(
        poller: &'static EventPoller,
        destroyed: &'static DestroyedGraphs,
        device: Arc<dyn Device>,
        number: i32,
        settings: &Settings,
    ) -> Arc<Self> {
        let tracker = Arc::new_cyclic(|own: &Weak<Self>| Self {
            device,
            number,
            interval: settings.query_interval(),
            poller,
            destroyed,
            own: own.clone(),
            fork: fork::generation(),
            plans: Mutex::default(),
        });
        poller.enter(tracker.own.clone());
        tracker
    }

    /// Tracks a plan whose kernel is about to be put into the stream.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn begin(
        &self,
        device: &dyn Device,
        stream: Stream,
        capture: Option<Capture>,
    ) -> Result<Arc<TrackedPlan>> {
        let plan = match capture {
            None => {
                let pooled = lock(&self.plans).pool.pop();
                Arc::new(match pooled {
                    Some(events) => TrackedPlan::eager(events),
                    None => TrackedPlan::eager(tracked_plan::create_events(device)?),
                })
            }
            Some(capture) => {
                let graph = self.graph_plans(device, capture)?;
                let plan = Arc::new(TrackedPlan::captured(device)?);
                // At once: whatever comes, the events are destroyed with the graph.
                lock(&graph.plans).push(plan.clone());
                plan
            }
        };
        if let Err(error) = plan.record_start(device, stream) {
            self.withdraw(&plan);
            return Err(error);
        }
        Ok(plan)
    }

    /// Records the end of a plan behind its kernel.
    ///
    /// # Errors
    /// The device's. The plan is not tracked then.
    pub(crate) fn end(&self, device: &dyn Device, stream: Stream, plan: &Arc<TrackedPlan>) -> Result<()> {
        let recorded = plan.record_end(device, stream);
        if plan.is_captured() {
            return recorded;
        }
        if let Err(error) = recorded {
            self.destroy(plan.events.to_vec());
            return Err(error);
        }
        let mut plans = lock(&self.plans);
        plans.eager.push_back(plan.clone());
        let backlog = plans.eager.len();
        drop(plans);
        if backlog.is_multiple_of(BACKLOG) {
            self.poller.nudge();
        }
        Ok(())
    }

    /// The kernel of a plan that has begun could not be launched.
    pub(crate) fn withdraw(&self, plan: &TrackedPlan) {
        if !plan.is_captured() {
            lock(&self.plans).pool.push(plan.events);
        }
    }

    /// The plans of a capture, which the first plan ties to the graph's life.
    fn graph_plans(&self, device: &dyn Device, capture: Capture) -> Result<Arc<GraphPlans>> {
        let known = |plans: &TrackedPlans| {
            let mut graphs = plans.graphs.iter().rev();
            graphs.find(|graph| graph.graph == capture.id).cloned()
        };
        if let Some(graph) = known(&lock(&self.plans)) {
            return Ok(graph);
        }
        let graph = Arc::new(GraphPlans {
            graph: capture.id,
            owner: self.own.clone(),
            plans: Mutex::default(),
        });
        let (destroyed, kept) = (self.destroyed, graph.clone());
        device.capture_retain(capture, Box::new(move || lock(destroyed).push(kept)))?;
        lock(&self.plans).graphs.push(graph.clone());
        Ok(graph)
    }

    /// Waits a moment until what is known is at most `old`. Returns whether it is.
    pub(super) fn refresh(&self, old: Duration) -> bool {
        self.poller.refresh(old)
    }

    /// For how long the present query has not come back.
    pub(super) fn query_so_far(&self) -> Option<Duration> {
        self.poller.round_so_far()
    }

    /// The communicator ends: all its events are destroyed.
    pub(crate) fn close(&self) {
        // A forked child has no device, and these events are its parent's.
        if self.fork != fork::generation() {
            return;
        }
        let mut plans = lock(&self.plans);
        if mem::replace(&mut plans.is_closed, true) {
            return;
        }
        // The poller destroys what it queries just now.
        let events = if plans.is_queried {
            Vec::new()
        } else {
            plans.take_events()
        };
        drop(plans);
        self.destroy(events);
        let own: Weak<dyn Polled> = self.own.clone();
        self.poller.leave(&own);
    }

    fn destroy(&self, events: Vec<Event>) {
        if !events.is_empty() {
            self.device.drop_deferred(Box::new(UnusedEvents {
                device: self.device.clone(),
                events,
            }));
        }
    }

    /// A graph is destroyed.
    fn forget(&self, destroyed: &Arc<GraphPlans>) {
        let mut plans = lock(&self.plans);
        if plans.is_closed {
            // The thread that closed it, or that still queries it, destroys its events.
            return;
        }
        let place = plans
            .graphs
            .iter()
            .position(|graph| Arc::ptr_eq(graph, destroyed));
        let events = place.map_or_else(Vec::new, |place| plans.graphs.swap_remove(place).events());
        drop(plans);
        self.destroy(events);
    }

    /// Queries eager plans, oldest first, because they run one after another. Returns how many are completed.
    fn query_eager(&self, plans: &[Arc<TrackedPlan>]) -> usize {
        let is_completed =
            |plan: &Arc<TrackedPlan>| matches!(self.device.event_query(plan.events[1]), Ok(Progress::Done));
        let completed = match plans.last() {
            None => 0,
            Some(last) if is_completed(last) => plans.len(),
            Some(_) => plans.partition_point(is_completed),
        };
        for plan in &plans[..completed] {
            plan.found(Progress::Done, Progress::Done);
        }
        if let Some(next) = plans.get(completed)
            && let Ok(start) = self.device.event_query(next.events[0])
        {
            next.found(start, Progress::Pending);
        }
        completed
    }

    /// Queries the plans of a graph, which run one after another; of an idle graph only the last plan.
    fn query_graph(&self, plans: &[Arc<TrackedPlan>]) {
        let is_idle = plans.last().is_some_and(|last| {
            let is_launched = last.query(&*self.device);
            !is_launched && !matches!(last.progress(), Seen::InProgress { .. })
        });
        // Each launch resets the events of all plans: no earlier plan is in flight without the last one.
        if is_idle {
            return;
        }
        let mut plans = plans.iter();
        if plans.by_ref().any(|plan| plan.query(&*self.device)) {
            plans.for_each(|plan| plan.is_behind());
        }
    }
}

impl Polled for PlanTracker {
    fn query(&self) {
        // First: the events of destroyed graphs must not be queried.
        let destroyed = mem::take(&mut *lock(self.destroyed));
        for graph in destroyed {
            if let Some(owner) = graph.owner.upgrade() {
                owner.forget(&graph);
            }
        }
        let mut plans = lock(&self.plans);
        if plans.is_closed {
            return;
        }
        let eager: Vec<Arc<TrackedPlan>> = plans.eager.iter().cloned().collect();
        let graphs = plans.graphs.clone();
        if eager.is_empty() && graphs.is_empty() {
            return;
        }
        plans.is_queried = true;
        drop(plans);
        let mut completed = 0;
        if self.device.set_current(self.number).is_ok() && self.device.allow_queries_during_captures().is_ok()
        {
            completed = self.query_eager(&eager);
            for graph in &graphs {
                let plans = lock(&graph.plans).clone();
                self.query_graph(&plans);
            }
        }
        let mut plans = lock(&self.plans);
        plans.is_queried = false;
        let TrackedPlans { eager, pool, .. } = &mut *plans;
        pool.extend(eager.drain(..completed).map(|plan| plan.events));
        let events = if plans.is_closed {
            plans.take_events()
        } else {
            Vec::new()
        };
        drop(plans);
        self.destroy(events);
    }

    fn interval(&self) -> Duration {
        self.interval
    }
}

impl TrackedPlans {
    /// Takes the events of all plans and of the pool.
    fn take_events(&mut self) -> Vec<Event> {
        let mut events: Vec<Event> = self.pool.drain(..).flatten().collect();
        events.extend(self.eager.drain(..).flat_map(|plan| plan.events));
        events.extend(self.graphs.drain(..).flat_map(|graph| graph.events()));
        events
    }
}

impl GraphPlans {
    fn events(&self) -> Vec<Event> {
        let plans = lock(&self.plans);
        plans.iter().flat_map(|plan| plan.events).collect()
    }
}

impl Drop for PlanTracker {
    fn drop(&mut self) {
        self.close();
    }
}
