//! Tracked plans on the host device, whose streams are held by gates, and the thread that queries them. These tests wait for
//! conditions; how long a thread waits for the poller is tested by a virtual clock in [`poller`].

use std::{
    sync::{Condvar, mpsc},
    time::Instant,
};

use super::*;
use crate::{
    device::{DeviceError, GraphExec, Runtime, host::HostDevice},
    watchdog::settings::{Action, ProgressSource},
};

const SETTINGS: Settings = Settings {
    threshold: Duration::from_secs(2),
    arrival: Duration::from_secs(600),
    stuck: Duration::from_secs(60),
    interval: Duration::from_secs(1),
    action: Action::Report,
    source: ProgressSource::Events,
    adaptive: None,
};

/// Host functions wait at it until it has been opened as often as they have come.
#[derive(Default)]
struct Gate(Mutex<u32>, Condvar);

impl Gate {
    fn open(&self) {
        *lock(&self.0) += 1;
        self.1.notify_all();
    }

    fn pass(&self) {
        let mut open = self.1.wait_while(lock(&self.0), |open| *open == 0).unwrap();
        *open -= 1;
    }
}

struct TestStream {
    device: Arc<dyn Runtime>,
    poller: &'static EventPoller,
    tracker: Arc<PlanTracker>,
    stream: Stream,
}

impl TestStream {
    fn new() -> Self {
        let device: Arc<dyn Runtime> = Arc::new(HostDevice::new().unwrap());
        // Its own: tests run side by side.
        let poller: &'static EventPoller = Box::leak(Box::default());
        Self {
            tracker: PlanTracker::polled_by(poller, Box::leak(Box::default()), device.clone(), 0, &SETTINGS),
            stream: device.stream_create().unwrap(),
            device,
            poller,
        }
    }

    /// A plan whose kernel waits at the gate.
    fn plan(&self, gate: &Arc<Gate>, capture: Option<Capture>) -> Arc<TrackedPlan> {
        let plan = self.tracker.begin(&*self.device, self.stream, capture).unwrap();
        self.hold(gate);
        self.tracker.end(&*self.device, self.stream, &plan).unwrap();
        plan
    }

    fn hold(&self, gate: &Arc<Gate>) {
        let gate = gate.clone();
        self.device
            .launch_host(self.stream, Arc::new(move |_| gate.pass()))
            .unwrap();
    }

    /// A graph of so many plans.
    fn graph(&self, gate: &Arc<Gate>, plans: usize) -> (GraphExec, Vec<Arc<TrackedPlan>>) {
        self.device.capture_begin(self.stream).unwrap();
        let capture = self.device.capture_of(self.stream).unwrap();
        let plans = (0..plans).map(|_| self.plan(gate, capture)).collect();
        let graph = self.device.capture_end(self.stream).unwrap();
        let exec = self.device.graph_instantiate(graph).unwrap();
        self.device.graph_destroy(graph).unwrap();
        (exec, plans)
    }

    fn launch(&self, exec: GraphExec) {
        self.device.graph_launch(exec, self.stream).unwrap();
    }

    /// Queries until the condition holds.
    #[track_caller]
    fn eventually(&self, what: &str, condition: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < end, "never: {what}");
            self.poller.refresh(Duration::ZERO);
        }
    }

    fn is_gone(&self, event: Event) -> bool {
        matches!(self.device.event_query(event), Err(DeviceError::InvalidHandle(_)))
    }
}

#[test]
fn eager_plans_are_queued_run_and_are_done_and_their_events_are_used_again() {
    let test = TestStream::new();
    let (before, gate) = (Arc::<Gate>::default(), Arc::<Gate>::default());
    test.hold(&before);
    let plans: Vec<_> = (0..3).map(|_| test.plan(&gate, None)).collect();
    test.eventually("somebody has looked", || test.poller.refresh(Duration::ZERO));
    assert_eq!(plans[0].progress(), Seen::NotReached);
    before.open();
    test.eventually("the first runs", || {
        matches!(plans[0].progress(), Seen::InProgress { replay: 0, .. })
    });
    let first = plans[0].progress();
    gate.open();
    test.eventually("the second runs", || {
        matches!(plans[1].progress(), Seen::InProgress { .. })
    });
    assert_eq!(plans[0].progress(), Seen::Completed { replay: 0 });
    let (
        Seen::InProgress {
            start_ns: earlier, ..
        },
        Seen::InProgress { start_ns: later, .. },
    ) = (first, plans[1].progress())
    else {
        panic!("{first:?}")
    };
    assert!(earlier < later);
    assert_eq!(plans[2].progress(), Seen::NotReached);
    gate.open();
    gate.open();
    test.eventually("all are done", || {
        plans
            .iter()
            .all(|plan| plan.progress() == Seen::Completed { replay: 0 })
    });
    test.eventually("their events are back", || {
        lock(&test.tracker.plans).pool.len() == 3
    });
    let again = test.plan(&gate, None);
    assert!(plans.iter().any(|plan| plan.events == again.events));
    gate.open();
    // What the events had recorded before says nothing of the plan that has them now.
    test.eventually("it is done", || again.progress() == Seen::Completed { replay: 0 });
    test.tracker.close();
    assert!(
        plans
            .iter()
            .all(|plan| plan.events.iter().all(|event| test.is_gone(*event)))
    );
}

#[test]
fn a_replay_that_hangs_is_seen_with_the_next_one_queued() {
    let test = TestStream::new();
    let gate = Arc::<Gate>::default();
    let (exec, plans) = test.graph(&gate, 2);
    let seen = || (plans[0].progress(), plans[1].progress());
    let is_over = |replay| move |seen: &Seen| *seen == Seen::Completed { replay };
    assert_eq!(seen(), (Seen::NotReached, Seen::NotReached));
    // The first one goes through.
    gate.open();
    gate.open();
    test.launch(exec);
    test.device.stream_synchronize(test.stream).unwrap();
    // Counters need no query.
    assert!(is_over(1)(&seen().0) && is_over(1)(&seen().1));
    // The second hangs, and nobody looks until the third is launched, too: the events of the second are reset.
    test.launch(exec);
    test.launch(exec);
    let hangs = |seen: Seen| matches!(seen, Seen::InProgress { replay: 2, .. });
    test.eventually("replay 2 runs", || hangs(plans[0].progress()));
    let since = plans[0].progress();
    test.eventually("its second plan is launched", || {
        matches!(plans[1].progress(), Seen::Launched { replay: 2, .. })
    });
    assert_eq!(plans[0].progress(), since, "latched");
    // Once it goes on, the second plan is the one that hangs.
    gate.open();
    test.eventually("the second plan runs", || hangs(plans[1].progress()));
    test.eventually("the first is launched again", || {
        matches!(
            plans[0].progress(),
            Seen::Launched { replay: 3, .. } | Seen::Completed { replay: 2 }
        )
    });
    (0..3).for_each(|_| gate.open());
    test.device.stream_synchronize(test.stream).unwrap();
    test.eventually("all is over", || is_over(3)(&seen().0) && is_over(3)(&seen().1));
}

#[test]
fn a_graph_that_is_launched_behind_other_work_is_not_reached() {
    let test = TestStream::new();
    let (before, gate) = (Arc::<Gate>::default(), Arc::<Gate>::default());
    let (exec, plans) = test.graph(&gate, 1);
    test.hold(&before);
    test.launch(exec);
    let is = |is: fn(Seen) -> bool| move |plan: &Arc<TrackedPlan>| is(plan.progress());
    test.eventually("it is launched", || {
        is(|seen| matches!(seen, Seen::Launched { replay: 1, .. }))(&plans[0])
    });
    before.open();
    test.eventually("it runs", || {
        is(|seen| matches!(seen, Seen::InProgress { replay: 1, .. }))(&plans[0])
    });
    gate.open();
    test.eventually("it is over", || {
        is(|seen| seen == Seen::Completed { replay: 1 })(&plans[0])
    });
}

#[test]
fn events_of_a_graph_go_with_it_or_with_the_communicator() {
    let test = TestStream::new();
    let gate = Arc::<Gate>::default();
    let [(first, of_first), (second, of_second)] = [test.graph(&gate, 2), test.graph(&gate, 2)];
    let all_gone = |plans: &[Arc<TrackedPlan>]| {
        let mut events = plans.iter().flat_map(|plan| plan.events);
        events.all(|event| test.is_gone(event))
    };
    // With the graph, but not while it runs.
    test.launch(first);
    test.eventually("it runs", || {
        matches!(of_first[0].progress(), Seen::InProgress { .. })
    });
    test.device.graph_exec_destroy(first).unwrap();
    assert!(!all_gone(&of_first));
    gate.open();
    gate.open();
    test.eventually("the first graph's are destroyed", || all_gone(&of_first));
    assert!(!all_gone(&of_second));
    // With the communicator: the graph can still be replayed, and counts.
    test.tracker.close();
    assert!(all_gone(&of_second));
    gate.open();
    gate.open();
    test.launch(second);
    test.device.stream_synchronize(test.stream).unwrap();
    assert_eq!(of_second[1].progress(), Seen::Completed { replay: 1 });
    let kept = Arc::downgrade(&of_second[1]);
    drop(of_second);
    assert!(kept.upgrade().is_some(), "the graph writes its counters");
    test.device.graph_exec_destroy(second).unwrap();
    // The poller has ended. Its next round, for another communicator, finds the destroyed graph.
    let other = PlanTracker::polled_by(
        test.poller,
        test.tracker.destroyed,
        test.device.clone(),
        0,
        &SETTINGS,
    );
    test.eventually("its counters are free", || kept.upgrade().is_none());
    other.close();
}

#[test]
fn events_of_a_plan_whose_end_cannot_be_recorded_are_gone() {
    let test = TestStream::new();
    let plan = test.tracker.begin(&*test.device, test.stream, None).unwrap();
    let gone = test.device.stream_create().unwrap();
    test.device.stream_destroy(gone).unwrap();
    assert!(test.tracker.end(&*test.device, gone, &plan).is_err());
    for event in plan.events {
        test.eventually("the events to be destroyed", || test.is_gone(event));
    }
    assert!(lock(&test.tracker.plans).eager.is_empty());
}

#[test]
fn a_capture_that_fails_leaves_no_event() {
    let test = TestStream::new();
    let gate = Arc::<Gate>::default();
    test.device.capture_begin(test.stream).unwrap();
    let capture = test.device.capture_of(test.stream).unwrap();
    let plan = test.plan(&gate, capture);
    // A query on a thread that captures invalidates what it captures; the thread that queries does not.
    test.poller.refresh(Duration::ZERO);
    test.device.event_query(plan.events[0]).unwrap_err();
    test.device.capture_end(test.stream).unwrap_err();
    test.eventually("they are destroyed", || {
        plan.events.iter().all(|event| test.is_gone(*event))
    });
}

/// A query that does not come back until it is told to.
struct StuckQuery {
    entered: Mutex<mpsc::Sender<()>>,
    gate: Gate,
}

impl Polled for StuckQuery {
    fn query(&self) {
        lock(&self.entered).send(()).unwrap();
        self.gate.pass();
    }

    fn interval(&self) -> Duration {
        Duration::from_secs(3600)
    }
}

#[test]
fn neither_a_refresh_nor_the_end_waits_for_a_query_that_does_not_come_back() {
    let poller: &'static EventPoller = Box::leak(Box::default());
    let (entered, enters) = mpsc::channel();
    let stuck = Arc::new(StuckQuery {
        entered: Mutex::new(entered),
        gate: Gate::default(),
    });
    let own: Weak<dyn Polled> = Arc::<StuckQuery>::downgrade(&stuck);
    poller.enter(own.clone());
    enters.recv().unwrap();
    stuck.gate.open();
    // The first round came back; the next one does not.
    poller.nudge();
    enters.recv().unwrap();
    assert!(!poller.refresh(Duration::ZERO), "nothing is fresh");
    assert!(poller.round_so_far().is_some());
    poller.leave(&own);
    assert_eq!(poller.round_so_far(), None);
    stuck.gate.open();
}
