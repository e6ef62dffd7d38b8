//! Tells observers what kernels have written, and kernels that their launch is aborted.
//!
//! One thread a GPU. It reads memory only: a call of the driver could block behind the very kernel that waits for it.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, PoisonError, atomic::Ordering},
    thread,
    time::Duration,
};

use ringsight_comm_base::sync::lock;
use ringsight_kernels::{
    Launch,
    cuda::{Ring, ring::Entry},
};

use ringsight_records::Waits;

use super::{
    clock::Clock,
    gpu::{Memory, Slot},
    launches::Launches,
    release,
    telling::Telling,
};
use crate::observe;

/// How often the ring is looked at while something runs. Times come from the GPU: this is not their resolution.
const BUSY: Duration = Duration::from_micros(20);
/// And while graphs hold launches but none has run for a while.
const QUIET: Duration = Duration::from_millis(1);
/// Looks at nothing before it sleeps: to be woken costs the thread that launches more than all else.
const LINGER: u32 = 50;
/// Looks without an event before it is quiet.
const PATIENCE: u32 = 500;
/// Eager launches up to which events of theirs that have not come are waited for: each keeps its slot meanwhile, and to get others takes calls of the driver that
/// may wait for kernels (`CHUNK` in gpu.rs is how many there are at first). Captured ones keep theirs in any case.
const MOST_WAITING: usize = 128;

/// A launch that is about to begin.
pub(super) struct Entered {
    pub(super) number: u32,
    pub(super) launch: Arc<Launch>,
    pub(super) slot: Slot,
    pub(super) captured: bool,
    /// Called when nothing runs it any more.
    pub(super) on_end: Option<Box<dyn FnOnce() + Send>>,
}

/// A launch that the GPU may run.
struct InFlight {
    launch: Arc<Launch>,
    slot: Slot,
    on_end: Option<Box<dyn FnOnce() + Send>>,
    /// The kernel was told of the abort.
    aborted: bool,
    /// What the kernel has told last of what it moves, and of what it waits for.
    moved: u32,
    waits: u64,
    telling: Telling,
}

impl InFlight {
    fn new(entered: Entered) -> Self {
        let Entered {
            launch,
            slot,
            captured,
            on_end,
            ..
        } = entered;
        // Relaxed: of launches before, in whose memory this one's is, nothing is written any more.
        let moved = slot.control().moved.load(Ordering::Relaxed);
        Self {
            telling: Telling::new(&launch, captured),
            launch,
            slot,
            on_end,
            aborted: false,
            moved,
            waits: 0,
        }
    }

    /// Nothing runs it any more; gives its slot for another launch.
    fn end(mut self) -> Slot {
        if let Some(on_end) = self.on_end.take() {
            on_end();
        }
        self.slot.renew();
        // Before what it may be the last to hold.
        drop(self.telling);
        // Nearly always its communicator has it too, and makes another launch of it. Else what it holds is dropped where that
        // may take time.
        if let Some(launch) = Arc::into_inner(self.launch) {
            release::later(launch);
        }
        self.slot
    }

    /// Passes the abort word on, and tells how many runs are over and whether the last one gave up.
    fn look(&mut self) {
        let control = self.slot.control();
        if !self.aborted && self.launch.abort.is_set() {
            self.aborted = true;
            // Release: as the word that it repeats.
            control.abort.store(1, Ordering::Release);
        }
        // Relaxed: words that say all themselves; what is told of a run that is over is forgotten with its end.
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
        self.telling.are_over(runs, last_gave_up);
    }

    /// Runs that are over.
    fn runs(&self) -> u32 {
        // Acquire: pairs with the kernel's fence of a run that gave up, whose events and mark are in memory. Of another run there is none: what of its
        // events has not been seen when it is over is waited for.
        let runs = self.slot.control().runs.load(Ordering::Acquire);
        runs.wrapping_sub(self.slot.runs_before)
    }
}

/// The thread's state.
pub(super) struct Drain {
    device: i32,
    clock: Clock,
    /// Events written over before they were read, as told.
    overwritten: u64,
    entries: Arc<Memory<Entry>>,
    launches: Arc<Launches>,
    /// By number, which is the order of launches of a kind as long as numbers do not begin anew.
    in_flight: BTreeMap<u32, InFlight>,
    /// What is handed over next, and what was: empty, but for their memory.
    entered: Vec<Entered>,
    forgotten: Vec<u32>,
    free: Vec<Slot>,
    /// Replays under way, as [`Exchange::running`] counts them.
    replaying: usize,
}

impl Drain {
    pub(super) fn new(
        device: i32,
        entries: Arc<Memory<Entry>>,
        launches: Arc<Launches>,
        clock: Clock,
    ) -> Self {
        Self {
            device,
            clock,
            overwritten: 0,
            entries,
            launches,
            in_flight: BTreeMap::new(),
            entered: Vec::new(),
            forgotten: Vec::new(),
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
                .any(|launch| !launch.telling.is_captured());
            quiet = if moved || eager { 0 } else { quiet + 1 };
            thread::sleep(if quiet < PATIENCE { BUSY } else { QUIET });
        }
    }

    /// Waits until there is a launch.
    fn sleep(&self) {
        let mut exchange = lock(&self.launches.exchange);
        exchange.asleep = true;
        while exchange.entered.is_empty() {
            exchange = self
                .launches
                .wake
                .wait(exchange)
                .unwrap_or_else(PoisonError::into_inner);
        }
        exchange.asleep = false;
    }

    /// Takes what was entered.
    fn take(&mut self) {
        mem::swap(&mut lock(&self.launches.exchange).entered, &mut self.entered);
        for entered in self.entered.drain(..) {
            self.in_flight.insert(entered.number, InFlight::new(entered));
        }
    }

    /// Tells observers how many events were written over.
    fn tell_overwritten(&mut self, overwritten: u64) {
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

    /// Looks at everything once; says whether anything was new.
    fn pass(&mut self, ring: &mut Ring<'_>) -> bool {
        // First: all that these have run is over.
        self.forgotten
            .append(&mut lock(&self.launches.exchange).forgotten);
        self.take();
        // Before the ring: the events of runs that are over by now are in it, or will be in a moment.
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
                // Entered after the others were taken: that comes before it begins.
                self.take();
            }
            if let Some(launch) = self.in_flight.get_mut(&event.launch) {
                launch
                    .telling
                    .tell(&event, |timer_ns| self.clock.host_ns(timer_ns));
            }
        }
        self.tell_overwritten(ring.lost());
        let eager = |launch: &&InFlight| !launch.telling.is_captured();
        let is_full = self.in_flight.values().filter(eager).count() > MOST_WAITING;
        for (number, launch) in &mut self.in_flight {
            let waits = launch.telling.is_captured() || !is_full;
            moved |= launch.telling.catch_up(waits);
            if launch.telling.is_over() {
                self.forgotten.push(*number);
            }
        }
        moved |= !self.forgotten.is_empty();
        if moved {
            self.end();
        }
        moved
    }

    /// Lets go of what will not run any more, and tells what does.
    fn end(&mut self) {
        let mut over = 0;
        let (in_flight, free) = (&mut self.in_flight, &mut self.free);
        self.forgotten.retain(|number| {
            if in_flight
                .get(number)
                .is_some_and(|launch| launch.telling.is_behind(launch.runs()))
            {
                return true;
            }
            if let Some(launch) = in_flight.remove(number) {
                over += usize::from(!launch.telling.is_captured());
                free.push(launch.end());
            }
            false
        });
        let replaying = self
            .in_flight
            .values()
            .filter(|launch| launch.telling.is_replaying())
            .count();
        if self.free.is_empty() && replaying == self.replaying {
            return;
        }
        let mut exchange = lock(&self.launches.exchange);
        for slot in self.free.drain(..) {
            slot.give_back(&mut exchange.free);
        }
        exchange.running = exchange.running + replaying - self.replaying - over;
        self.replaying = replaying;
    }
}
