//! Events of plans on the host device, whose streams are held by gates, and the thread that queries them.

use std::{
    sync::{
        Condvar,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    time::Instant,
};

use super::*;
use crate::{
    device::{DeviceError, GraphExec, host::HostDevice},
    watchdog::settings::{Action, Source as Told},
};

const SETTINGS: Settings = Settings {
    threshold: Duration::from_secs(2),
    arrival: Duration::from_secs(600),
    stuck: Duration::from_secs(60),
    interval: Duration::from_secs(1),
    action: Action::Report,
    source: Told::Events,
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

struct Test {
    device: Arc<dyn Device>,
    patrol: &'static Patrol,
    events: Arc<Events>,
    stream: Stream,
}

impl Test {
    fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(HostDevice::new().unwrap());
        // Its own: tests run side by side.
        let patrol: &'static Patrol = Box::leak(Box::default());
        Self {
            events: Events::under(patrol, Box::leak(Box::default()), device.clone(), 0, &SETTINGS),
            stream: device.stream_create().unwrap(),
            device,
            patrol,
        }
    }

    /// A plan whose kernel waits at the gate.
    fn plan(&self, gate: &Arc<Gate>, capture: Option<Capture>) -> Arc<Track> {
        let track = self.events.begin(&*self.device, self.stream, capture).unwrap();
        self.hold(gate);
        self.events.end(&*self.device, self.stream, &track).unwrap();
        track
    }

    fn hold(&self, gate: &Arc<Gate>) {
        let gate = gate.clone();
        self.device
            .launch_host(self.stream, Arc::new(move |_| gate.pass()))
            .unwrap();
    }

    /// A graph of so many plans.
    fn graph(&self, gate: &Arc<Gate>, plans: usize) -> (GraphExec, Vec<Arc<Track>>) {
        self.device.capture_begin(self.stream).unwrap();
        let capture = self.device.capture_of(self.stream).unwrap();
        let tracks = (0..plans).map(|_| self.plan(gate, capture)).collect();
        let graph = self.device.capture_end(self.stream).unwrap();
        let exec = self.device.graph_instantiate(graph).unwrap();
        self.device.graph_destroy(graph).unwrap();
        (exec, tracks)
    }

    fn launch(&self, exec: GraphExec) {
        self.device.graph_launch(exec, self.stream).unwrap();
    }

    /// Queries until it is so.
    #[track_caller]
    fn until(&self, what: &str, is: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !is() {
            assert!(Instant::now() < end, "{what}");
            self.patrol.refresh(Duration::ZERO);
        }
    }

    fn is_gone(&self, event: Event) -> bool {
        matches!(self.device.event_query(event), Err(DeviceError::InvalidHandle(_)))
    }
}

#[test]
fn eager_plans_are_queued_run_and_are_done_and_their_events_are_used_again() {
    let test = Test::new();
    let (before, gate) = (Arc::<Gate>::default(), Arc::<Gate>::default());
    test.hold(&before);
    let tracks: Vec<_> = (0..3).map(|_| test.plan(&gate, None)).collect();
    test.until("somebody has looked", || test.patrol.refresh(Duration::ZERO));
    assert_eq!(tracks[0].seen(), Seen::NotReached);
    before.open();
    test.until("the first runs", || {
        matches!(tracks[0].seen(), Seen::InProgress { replay: 0, .. })
    });
    let first = tracks[0].seen();
    gate.open();
    test.until("the second runs", || {
        matches!(tracks[1].seen(), Seen::InProgress { .. })
    });
    assert_eq!(tracks[0].seen(), Seen::Completed { replay: 0 });
    let (
        Seen::InProgress {
            start_ns: earlier, ..
        },
        Seen::InProgress { start_ns: later, .. },
    ) = (first, tracks[1].seen())
    else {
        panic!("{first:?}")
    };
    assert!(earlier < later);
    assert_eq!(tracks[2].seen(), Seen::NotReached);
    gate.open();
    gate.open();
    test.until("all are done", || {
        tracks
            .iter()
            .all(|track| track.seen() == Seen::Completed { replay: 0 })
    });
    test.until("their events are back", || {
        lock(&test.events.state).pool.len() == 3
    });
    let again = test.plan(&gate, None);
    assert!(tracks.iter().any(|track| track.events == again.events));
    gate.open();
    // What the events had recorded before says nothing of the plan that has them now.
    test.until("it is done", || again.seen() == Seen::Completed { replay: 0 });
    test.events.close();
    assert!(
        tracks
            .iter()
            .all(|track| track.events.iter().all(|event| test.is_gone(*event)))
    );
}

#[test]
fn a_replay_that_hangs_is_seen_with_the_next_one_queued() {
    let test = Test::new();
    let gate = Arc::<Gate>::default();
    let (exec, tracks) = test.graph(&gate, 2);
    let seen = || (tracks[0].seen(), tracks[1].seen());
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
    test.until("replay 2 runs", || hangs(tracks[0].seen()));
    let since = tracks[0].seen();
    test.until("its second plan is launched", || {
        matches!(tracks[1].seen(), Seen::Launched { replay: 2, .. })
    });
    assert_eq!(tracks[0].seen(), since, "latched");
    // Once it goes on, the second plan is the one that hangs.
    gate.open();
    test.until("the second plan runs", || hangs(tracks[1].seen()));
    test.until("the first is launched again", || {
        matches!(
            tracks[0].seen(),
            Seen::Launched { replay: 3, .. } | Seen::Completed { replay: 2 }
        )
    });
    (0..3).for_each(|_| gate.open());
    test.device.stream_synchronize(test.stream).unwrap();
    test.until("all is over", || is_over(3)(&seen().0) && is_over(3)(&seen().1));
}

#[test]
fn a_graph_that_is_launched_behind_other_work_is_not_reached() {
    let test = Test::new();
    let (before, gate) = (Arc::<Gate>::default(), Arc::<Gate>::default());
    let (exec, tracks) = test.graph(&gate, 1);
    test.hold(&before);
    test.launch(exec);
    let is = |is: fn(Seen) -> bool| move |track: &Arc<Track>| is(track.seen());
    test.until("it is launched", || {
        is(|seen| matches!(seen, Seen::Launched { replay: 1, .. }))(&tracks[0])
    });
    before.open();
    test.until("it runs", || {
        is(|seen| matches!(seen, Seen::InProgress { replay: 1, .. }))(&tracks[0])
    });
    gate.open();
    test.until("it is over", || {
        is(|seen| seen == Seen::Completed { replay: 1 })(&tracks[0])
    });
}

#[test]
fn events_of_a_graph_go_with_it_or_with_the_communicator() {
    let test = Test::new();
    let gate = Arc::<Gate>::default();
    let [(first, of_first), (second, of_second)] = [test.graph(&gate, 2), test.graph(&gate, 2)];
    let all_gone = |tracks: &[Arc<Track>]| {
        let mut events = tracks.iter().flat_map(|track| track.events);
        events.all(|event| test.is_gone(event))
    };
    // With the graph, but not while it runs.
    test.launch(first);
    test.until("it runs", || {
        matches!(of_first[0].seen(), Seen::InProgress { .. })
    });
    test.device.graph_exec_destroy(first).unwrap();
    assert!(!all_gone(&of_first));
    gate.open();
    gate.open();
    test.until("the first graph's are destroyed", || all_gone(&of_first));
    assert!(!all_gone(&of_second));
    // With the communicator: the graph can still be replayed, and counts.
    test.events.close();
    assert!(all_gone(&of_second));
    gate.open();
    gate.open();
    test.launch(second);
    test.device.stream_synchronize(test.stream).unwrap();
    assert_eq!(of_second[1].seen(), Seen::Completed { replay: 1 });
    let kept = Arc::downgrade(&of_second[1]);
    drop(of_second);
    assert!(kept.upgrade().is_some(), "the graph writes its counters");
    test.device.graph_exec_destroy(second).unwrap();
    // Nobody looks any more: whoever does next for another communicator finds it.
    let other = Events::under(test.patrol, test.events.gone, test.device.clone(), 0, &SETTINGS);
    test.until("its counters are free", || kept.upgrade().is_none());
    other.close();
}

#[test]
fn events_of_a_plan_whose_end_cannot_be_recorded_are_gone() {
    let test = Test::new();
    let track = test.events.begin(&*test.device, test.stream, None).unwrap();
    let gone = test.device.stream_create().unwrap();
    test.device.stream_destroy(gone).unwrap();
    assert!(test.events.end(&*test.device, gone, &track).is_err());
    for event in track.events {
        test.until("the events to be destroyed", || test.is_gone(event));
    }
    assert!(lock(&test.events.state).eager.is_empty());
}

#[test]
fn a_capture_that_fails_leaves_no_event() {
    let test = Test::new();
    let gate = Arc::<Gate>::default();
    test.device.capture_begin(test.stream).unwrap();
    let capture = test.device.capture_of(test.stream).unwrap();
    let track = test.plan(&gate, capture);
    // A query on a thread that captures invalidates what it captures; the thread that queries does not.
    test.patrol.refresh(Duration::ZERO);
    test.device.event_query(track.events[0]).unwrap_err();
    test.device.capture_end(test.stream).unwrap_err();
    test.until("they are destroyed", || {
        track.events.iter().all(|event| test.is_gone(*event))
    });
}

/// A query that does not come back until it is told to.
struct Stuck {
    entered: Mutex<mpsc::Sender<()>>,
    gate: Gate,
}

impl Source for Stuck {
    fn query(&self) {
        lock(&self.entered).send(()).unwrap();
        self.gate.pass();
    }

    fn interval(&self) -> Duration {
        Duration::from_secs(3600)
    }
}

/// Counts how often it is queried.
#[derive(Default)]
struct Counted(AtomicU32);

impl Source for Counted {
    fn query(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn interval(&self) -> Duration {
        Duration::from_secs(3600)
    }
}

#[test]
fn questions_that_come_together_are_answered_from_one_round() {
    let patrol: &'static Patrol = Box::leak(Box::default());
    let source = Arc::<Counted>::default();
    let own: Weak<dyn Source> = Arc::<Counted>::downgrade(&source);
    patrol.enter(own.clone());
    while !patrol.refresh(Duration::ZERO) {}
    let rounds = || source.0.load(Ordering::Relaxed);
    let before = rounds();
    for _ in 0..1000 {
        assert!(patrol.refresh(Duration::from_secs(600)));
    }
    assert_eq!(rounds(), before);
    while !patrol.refresh(Duration::ZERO) {}
    assert!(rounds() > before);
    patrol.leave(&own);
}

/// Takes its time for each query, but less than anybody waits.
struct Slow;

impl Source for Slow {
    fn query(&self) {
        std::thread::sleep(PATIENCE * 9 / 10);
    }

    fn interval(&self) -> Duration {
        Duration::ZERO
    }
}

#[test]
fn who_answers_many_does_not_wait_for_each() {
    let patrol: &'static Patrol = Box::leak(Box::default());
    let source = Arc::new(Slow);
    let own: Weak<dyn Source> = Arc::<Slow>::downgrade(&source);
    patrol.enter(own.clone());
    // Between a round that is begun and the one to come lies more than is waited.
    let begin = Instant::now();
    for _ in 0..20 {
        patrol.refresh(Duration::ZERO);
    }
    // Waited for each, that were 20.
    assert!(begin.elapsed() < 15 * PATIENCE, "{:?}", begin.elapsed());
    patrol.leave(&own);
}

#[test]
fn nobody_waits_long_for_a_query_that_does_not_come_back() {
    let patrol: &'static Patrol = Box::leak(Box::default());
    let (entered, enters) = mpsc::channel();
    let source = Arc::new(Stuck {
        entered: Mutex::new(entered),
        gate: Gate::default(),
    });
    let own: Weak<dyn Source> = Arc::<Stuck>::downgrade(&source);
    patrol.enter(own.clone());
    enters.recv().unwrap();
    source.gate.open();
    // A round that has come back is fresh, and one is begun for whoever asks.
    let asked = std::thread::spawn(|| patrol.refresh(Duration::ZERO));
    enters.recv().unwrap();
    source.gate.open();
    if !asked.join().unwrap() {
        // The machine was busy, and for a while nobody waits.
        std::thread::sleep(patrol::AFTER_VAIN);
    }
    // From here on it is stuck.
    patrol.nudge();
    enters.recv().unwrap();
    assert!(!patrol.refresh(Duration::ZERO), "it was not fresh");
    let so_far = patrol.round_so_far().unwrap();
    assert!(so_far >= PATIENCE, "{so_far:?}");
    // The next one does not wait at all, and neither does the end.
    assert!(!patrol.refresh(Duration::ZERO));
    patrol.leave(&own);
    assert_eq!(patrol.round_so_far(), None);
    source.gate.open();
}
