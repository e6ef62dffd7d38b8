//! The drain thread of a GPU. It passes kernels' events on to observers, and abort words to kernels.
//!
//! States of the thread: busy (looks every 20 µs) → quiet (every 1 ms: only graphs hold launches, and none has run for a while) → asleep (no
//! launches; a submitting thread wakes it).
//!
//! Invariants:
//! - It only reads and writes memory: a driver call could block behind the very kernel that waits for this thread.
//! - It takes the submitted launches before it reads their events.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, PoisonError, atomic::Ordering},
    thread,
    time::Duration,
};

use ringsight_kernels::{
    Launch,
    cuda::{Ring, ring::Entry},
};
use ringsight_records::Waits;

use super::{
    clock::Clock,
    driver::PinnedSlice,
    event_tracker::EventTracker,
    launch_queue::{LaunchQueue, Slot, Submitted},
    reclaim,
};
use crate::observe;

/// Time between two looks at the ring while something runs. Events carry the GPU's time, so this is not their resolution.
const BUSY: Duration = Duration::from_micros(20);
/// The same while graphs hold launches but none has run for a while.
const QUIET: Duration = Duration::from_millis(1);
/// Looks without a launch before the thread sleeps. Waking it costs the launching thread more than everything else.
const LINGER: u32 = 50;
/// Looks without an event before it is quiet.
const PATIENCE: u32 = 500;
/// The most eager launches whose late events are waited for. Each keeps its slot meanwhile, and getting more slots takes driver calls that may wait
/// for kernels. Captured launches keep their slots anyway.
const MAX_WAITING: usize = 128;

/// A launch that the GPU may run.
struct InFlight {
    launch: Arc<Launch>,
    slot: Slot,
    on_end: Option<Box<dyn FnOnce() + Send>>,
    /// The abort word was passed on to the kernel.
    aborted: bool,
    /// The last words of the kernel: progress, and what it waits for.
    moved: u32,
    waits: u64,
    tracker: EventTracker,
}

impl InFlight {
    fn new(submitted: Submitted) -> Self {
        let Submitted {
            launch,
            slot,
            captured,
            on_end,
            ..
        } = submitted;
        // Relaxed: earlier launches with this slot write nothing any more.
        let moved = slot.control().moved.load(Ordering::Relaxed);
        Self {
            tracker: EventTracker::new(&launch, captured),
            launch,
            slot,
            on_end,
            aborted: false,
            moved,
            waits: 0,
        }
    }

    /// Ends a launch that nothing runs any more. Returns its slot.
    fn end(mut self) -> Slot {
        if let Some(on_end) = self.on_end.take() {
            on_end();
        }
        self.slot.renew();
        // Before the launch, which the tracker may be the last to hold.
        drop(self.tracker);
        // Its communicator nearly always holds it, too, and reuses it. Otherwise it is dropped on a thread where that may take time.
        if let Some(launch) = Arc::into_inner(self.launch) {
            reclaim::drop_later(launch);
        }
        self.slot
    }

    /// Passes the abort word on, and takes in progress, waits and finished runs.
    fn look(&mut self) {
        let control = self.slot.control();
        if !self.aborted && self.launch.abort.is_set() {
            self.aborted = true;
            // Release: like the word that it repeats.
            control.abort.store(1, Ordering::Release);
        }
        // Relaxed: each word is complete in itself, and what it says of a finished run is dropped with the run.
        let (moved, waits) = (
            control.moved.load(Ordering::Relaxed),
            control.waits.load(Ordering::Relaxed),
        );
        if moved != self.moved {
            self.moved = moved;
            self.launch.observer.moved();
        }
        if waits != self.waits {
            self.waits = waits;
            if let Some(waits) = Waits::of(waits) {
                self.launch.observer.waits(waits);
            }
        }
        let runs = self.runs();
        let last_gave_up = control.aborted.load(Ordering::Relaxed) != 0;
        self.tracker.set_finished(runs, last_gave_up);
    }

    /// Finished runs.
    fn runs(&self) -> u32 {
        // Acquire: pairs with the kernel's fence of a run that was given up, whose events and mark are then visible. Other runs have no fence: their
        // events are waited for.
        let runs = self.slot.control().runs.load(Ordering::Acquire);
        runs.wrapping_sub(self.slot.runs_before)
    }
}

/// The thread's state.
pub(super) struct Drain {
    device: i32,
    clock: Clock,
    /// Overwritten events that were counted already.
    overwritten: u64,
    entries: Arc<PinnedSlice<Entry>>,
    queue: Arc<LaunchQueue>,
    /// By number: in order of launch, as long as numbers do not wrap around.
    in_flight: BTreeMap<u32, InFlight>,
    /// Buffers for what is swapped with the queue. Empty between passes.
    submitted: Vec<Submitted>,
    retired: Vec<u32>,
    free: Vec<Slot>,
    /// Replays that run, as far as they are counted in [`QueueState::running`](super::launch_queue::QueueState).
    replaying: usize,
}

impl Drain {
    pub(super) fn new(
        device: i32,
        entries: Arc<PinnedSlice<Entry>>,
        queue: Arc<LaunchQueue>,
        clock: Clock,
    ) -> Self {
        Self {
            device,
            clock,
            overwritten: 0,
            entries,
            queue,
            in_flight: BTreeMap::new(),
            submitted: Vec::new(),
            retired: Vec::new(),
            free: Vec::new(),
            replaying: 0,
        }
    }

    /// Runs for the life of the process.
    pub(super) fn run(mut self) {
        let entries = self.entries.clone();
        let mut ring = Ring::new(&entries);
        let (mut quiet, mut idle) = (0, 0);
        loop {
            idle = if self.in_flight.is_empty() { idle + 1 } else { 0 };
            if idle > LINGER {
                self.sleep();
                (quiet, idle) = (0, 0);
            }
            let moved = self.pass(&mut ring);
            let eager = self
                .in_flight
                .values()
                .any(|launch| !launch.tracker.is_captured());
            quiet = if moved || eager { 0 } else { quiet + 1 };
            thread::sleep(if quiet < PATIENCE { BUSY } else { QUIET });
        }
    }

    /// Waits until there is a launch.
    fn sleep(&self) {
        let mut queue = self.queue.lock();
        queue.asleep = true;
        while queue.submitted.is_empty() {
            queue = self
                .queue
                .wake
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
        queue.asleep = false;
    }

    /// Takes the submitted launches.
    fn take(&mut self) {
        mem::swap(&mut self.queue.lock().submitted, &mut self.submitted);
        for submitted in self.submitted.drain(..) {
            self.in_flight.insert(submitted.number, InFlight::new(submitted));
        }
    }

    /// Counts overwritten events in the process's pages.
    fn count_overwritten(&mut self, overwritten: u64) {
        let more = overwritten - self.overwritten;
        if more == 0 {
            return;
        }
        self.overwritten = overwritten;
        let pages = observe::pages();
        if let Some(slot) = pages.and_then(|pages| pages.header().device(self.device)) {
            slot.overwritten.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// Looks at everything once. Returns whether anything was new.
    fn pass(&mut self, ring: &mut Ring<'_>) -> bool {
        // First: everything that these launches have run is over.
        self.retired.append(&mut self.queue.lock().retired);
        self.take();
        // Before the ring: the events of finished runs are in it by then, or will be in a moment.
        for launch in self.in_flight.values_mut() {
            launch.look();
        }
        let mut moved = false;
        while let Some(event) = ring.next_event() {
            if !moved {
                self.clock.look();
                moved = true;
            }
            if !self.in_flight.contains_key(&event.launch) {
                // It was submitted after the others were taken, and before it began.
                self.take();
            }
            if let Some(launch) = self.in_flight.get_mut(&event.launch) {
                launch
                    .tracker
                    .report(&event, |timer_ns| self.clock.host_ns(timer_ns));
            }
        }
        self.count_overwritten(ring.lost());
        let eager = |launch: &&InFlight| !launch.tracker.is_captured();
        let is_full = self.in_flight.values().filter(eager).count() > MAX_WAITING;
        for (number, launch) in &mut self.in_flight {
            let waits = launch.tracker.is_captured() || !is_full;
            moved |= launch.tracker.catch_up(waits);
            if launch.tracker.is_over() {
                self.retired.push(*number);
            }
        }
        moved |= !self.retired.is_empty();
        if moved {
            self.end();
        }
        moved
    }

    /// Ends retired launches, and updates the count of running ones.
    fn end(&mut self) {
        let mut over = 0;
        let (in_flight, free) = (&mut self.in_flight, &mut self.free);
        self.retired.retain(|number| {
            if in_flight
                .get(number)
                .is_some_and(|launch| launch.tracker.is_behind(launch.runs()))
            {
                return true;
            }
            if let Some(launch) = in_flight.remove(number) {
                over += usize::from(!launch.tracker.is_captured());
                free.push(launch.end());
            }
            false
        });
        let replaying = self
            .in_flight
            .values()
            .filter(|launch| launch.tracker.is_replaying())
            .count();
        if self.free.is_empty() && replaying == self.replaying {
            return;
        }
        let mut queue = self.queue.lock();
        for slot in self.free.drain(..) {
            slot.give_back(&mut queue.free);
        }
        queue.running = queue.running + replaying - self.replaying - over;
        self.replaying = replaying;
    }
}
