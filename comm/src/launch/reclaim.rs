//! Giving back what finished plans hold. The device's threads and graph destructors only put a note into a queue; the
//! thread that makes API calls on the communicator empties it at its next group end, and makes its next plan of one that
//! is over.

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    mem,
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ringsight_kernels::{ChannelWork, Connections, Launch, Observer};
use ringsight_records::prefetch::ask_for_bytes;

use super::observer::{Contents, OpState, PlanObserver, Stage};
use crate::{
    communicator::{Communicator, lock},
    error::{Error, Result},
    observe,
    op::{Method, OpInfo, Request},
    plan::again,
};

/// A note in the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reclaim {
    /// A plan that ran once is finished.
    Plan(u32),
    /// A graph is gone with all its instances.
    Graph(u32),
}

/// The queue of notes: from any thread to the one that makes calls.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    queue: Mutex<Queue>,
    /// There are some.
    any: AtomicBool,
    came: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    notes: Vec<Reclaim>,
    /// Threads that wait for one. A notification is a system call whether anybody waits or not.
    waiting: u32,
}

impl Notes {
    pub(crate) fn put(&self, note: Reclaim) {
        let mut queue = lock(&self.queue);
        queue.notes.push(note);
        // Relaxed: who looks without the lock and sees it takes the lock; who does not looks again at its next call.
        self.any.store(true, Ordering::Relaxed);
        let waiting = queue.waiting > 0;
        drop(queue);
        if waiting {
            self.came.notify_all();
        }
    }

    /// Swaps all notes for an empty list, whose memory is used for the next ones.
    fn swap(&self, empty: &mut Vec<Reclaim>) {
        // Relaxed: see `put`.
        if self.any.load(Ordering::Relaxed) {
            let mut queue = lock(&self.queue);
            mem::swap(&mut queue.notes, empty);
            self.any.store(false, Ordering::Relaxed);
        }
    }

    /// Waits until there is one, at most so long.
    fn wait(&self, limit: Duration) {
        let mut queue = lock(&self.queue);
        queue.waiting += 1;
        let (mut queue, _) = self
            .came
            .wait_timeout_while(queue, limit, |queue| queue.notes.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        queue.waiting -= 1;
    }
}

/// A plan that is to be launched, or that the device may still run.
pub(crate) struct InFlight {
    number: u32,
    /// Kept for the communicator's life with the plan; the device holds its own reference. Its observer is a [`PlanObserver`].
    pub(super) launch: Arc<Launch>,
    /// How data travels, where it may be the plan of another call of the same ([`crate::plan::again`]).
    serves_again: Option<Method>,
}

/// A plan that is ready to be launched.
pub(crate) struct Ready {
    pub(super) flight: InFlight,
    /// The launch's. Whoever launches it hands it on: to count another owner of what the device's threads have touched costs more than to move it.
    pub(super) observer: Arc<PlanObserver>,
}

impl Ready {
    /// By a launch whose observer is made for this plan.
    fn of(launch: Arc<Launch>, number: u32, serves_again: Option<Method>) -> Result<Self> {
        let observer: Arc<dyn Any + Send + Sync> = launch.observer.clone();
        let observer = observer
            .downcast()
            .map_err(|_| Error::internal("a plan is observed by what is made for it"))?;
        let flight = InFlight {
            number,
            launch,
            serves_again,
        };
        Ok(Self { flight, observer })
    }

    /// Work elements, all channels together.
    pub(super) fn works(&self) -> usize {
        self.flight.works()
    }
}

impl InFlight {
    fn works(&self) -> usize {
        let channels = self.launch.channels.iter();
        channels.map(|channel| channel.work.len()).sum()
    }

    fn stage(&self) -> Option<Stage> {
        let observer: &dyn Any = &*self.launch.observer;
        observer.downcast_ref().map(PlanObserver::stage)
    }

    fn has_window(&self) -> bool {
        let mut works = self.launch.channels.iter().flat_map(|channel| &channel.work);
        works.any(|work| matches!(work.connections, Connections::CopyEngine { .. }))
    }
}

/// The most plans that are kept for later ones, and the most work elements that each has.
const SPARES: usize = 256;
const SPARE_WORKS: usize = 16;

/// A plan that is over and nobody looks at any more: memory for the next one. To have it from here and not from the allocator
/// takes a tenth of the time, and leaves nothing to be freed by threads that have not allocated it.
pub(crate) struct Spare {
    launch: Arc<Launch>,
    /// Those of the plan, for their memory.
    pub(crate) works: Vec<ChannelWork>,
    /// See [`InFlight`].
    serves_again: Option<Method>,
}

impl Spare {
    /// How it does what a call asks for, if it is the plan of such a call.
    pub(crate) fn serves(&self, request: &Request) -> Option<Method> {
        let method = self.serves_again?;
        let [ChannelWork { work, .. }] = &*self.works else {
            return None;
        };
        let [work] = &**work else { return None };
        again::is_of(work, request).then_some(method)
    }

    /// It as the plan of this number and operation; `None` if somebody else has it, which nobody has.
    pub(crate) fn again(mut self, number: u32, info: OpInfo) -> Result<Option<Ready>> {
        let Some(launch) = Arc::get_mut(&mut self.launch) else {
            return Ok(None);
        };
        let Some(observer) = own(&mut launch.observer) else {
            return Ok(None);
        };
        observer.renew_for(number, OpState::new(info, None, 1, 0));
        launch.channels = self.works;
        for work in launch.channels.iter_mut().flat_map(|channel| &mut channel.work) {
            work.op = info.op;
        }
        Ready::of(self.launch, number, self.serves_again).map(Some)
    }
}

/// A plan, ready to be launched.
pub(crate) fn assemble(
    comm: &Communicator,
    spare: Option<Spare>,
    channels: Vec<ChannelWork>,
    contents: &mut Contents,
    serves_again: Option<Method>,
) -> Result<Ready> {
    let number = contents.number;
    if let Some(Spare { mut launch, .. }) = spare
        && let Some(renewed) = Arc::get_mut(&mut launch)
        && let Some(observer) = own(&mut renewed.observer)
    {
        observer.renew(contents);
        renewed.channels = channels;
        return Ready::of(launch, number, serves_again);
    }
    let observer = PlanObserver::new(contents, comm.notes.clone(), comm.checks.clone());
    let launch = Launch {
        channels,
        abort: comm.abort.clone(),
        observer: Arc::new(observer),
        peers: comm.peers.clone(),
    };
    Ready::of(Arc::new(launch), number, serves_again)
}

/// The observer of a launch that nobody else has.
fn own(observer: &mut Arc<dyn Observer>) -> Option<&mut PlanObserver> {
    let observer: &mut dyn Any = Arc::get_mut(observer)?;
    observer.downcast_mut()
}

/// Asks for a shared value and what counts its owners, which is before it.
fn ask_for_shared<T: ?Sized>(value: &Arc<T>) {
    const COUNTS: usize = 2 * size_of::<usize>();
    let first = Arc::as_ptr(value).cast::<u8>().wrapping_sub(COUNTS);
    ask_for_bytes(first, COUNTS + size_of_val(&**value));
}

/// Plans that were launched and not reclaimed.
pub(crate) struct Plans {
    notes: Arc<Notes>,
    /// Empty, but for its memory.
    read: Vec<Reclaim>,
    /// In the order of their launch, which is nearly always that of their end.
    eager: VecDeque<InFlight>,
    /// Some that are over, oldest first.
    spares: VecDeque<InFlight>,
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
    pub(crate) fn new(notes: Arc<Notes>) -> Self {
        Self {
            notes,
            read: Vec::new(),
            eager: VecDeque::new(),
            spares: VecDeque::new(),
            works: 0,
            captured: HashMap::new(),
        }
    }

    /// Enters a plan; `graph` is 0 for one that runs once.
    pub(super) fn enter(&mut self, graph: u32, plan: InFlight) -> &InFlight {
        if graph == 0 {
            self.works += plan.works();
            self.eager.push_back_mut(plan)
        } else {
            self.captured.entry(graph).or_default().plans.push_mut(plan)
        }
    }

    /// Forgets a plan that runs once: it is finished, or its launch failed.
    pub(crate) fn withdraw(&mut self, number: u32) {
        let place = self.eager.iter().position(|plan| plan.number == number);
        if let Some(plan) = place.and_then(|place| self.eager.remove(place)) {
            let works = plan.works();
            self.works -= works;
            // What it holds is in its works, which a spare plan keeps: no window is held longer than it is used.
            if self.spares.len() < SPARES && works <= SPARE_WORKS && !plan.has_window() {
                self.spares.push_back(plan);
            }
        }
    }

    /// Takes back everything that is finished, without waiting; gives memory for a plan, if there is some that nobody looks at
    /// any more.
    pub(crate) fn spare(&mut self) -> Option<Spare> {
        self.drain();
        // The oldest: the device and the watchdog let go of the latest a little after they have said that it is over.
        let oldest = self.spares.front_mut()?;
        if Arc::strong_count(&oldest.launch.observer) > 1 {
            return None;
        }
        let works = mem::take(&mut Arc::get_mut(&mut oldest.launch)?.channels);
        let InFlight {
            launch, serves_again, ..
        } = self.spares.pop_front()?;
        Some(Spare {
            launch,
            works,
            serves_again,
        })
    }

    /// Asks for what [`Self::spare`] will give next: the thread that has seen it end has it.
    pub(super) fn ask_for_next(&self) {
        if let Some(InFlight { launch, .. }) = self.spares.front() {
            ask_for_shared(launch);
            ask_for_shared(&launch.observer);
        }
    }

    /// No plan follows.
    pub(crate) fn drop_spares(&mut self) {
        self.spares.clear();
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
        (!mem::replace(&mut captured.retained, true)).then(|| captured.ops.clone())
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
        let mut notes = mem::take(&mut self.read);
        self.notes.swap(&mut notes);
        for note in notes.drain(..) {
            self.reclaim(note);
        }
        self.read = notes;
    }

    /// The same, and waits until there is something, at most so long.
    fn drain_within(&mut self, limit: Duration) {
        self.notes.wait(limit);
        self.drain();
    }

    /// Waits until a FIFO of `depth` work elements has room for `works` more, or `give_up` says so (asked ten times a second);
    /// whether there is room.
    pub(crate) fn wait_for_room(&mut self, works: usize, depth: usize, give_up: impl Fn() -> bool) -> bool {
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
