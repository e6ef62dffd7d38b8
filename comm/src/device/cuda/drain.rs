//! Tells observers what kernels have written, and kernels that their launch is aborted.
//!
//! One thread a GPU. It reads memory only: a call of the driver could block behind the very kernel that waits for it.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, PoisonError, atomic::Ordering},
    thread,
    time::{Duration, Instant},
};

use ringsight_kernels::{
    Launch, When,
    cuda::{Event, EventKind, Ring, TELLS, ring::Entry},
};

use ringsight_records::Waits;

use super::{
    clock::Clock,
    gpu::{Memory, Slot},
    launches::Launches,
    release,
};
use crate::{communicator::lock, few::Few, observe};

/// How often the ring is looked at while something runs. Times come from the GPU: this is not their resolution.
const BUSY: Duration = Duration::from_micros(20);
/// And while graphs hold launches but none has run for a while.
const QUIET: Duration = Duration::from_millis(1);
/// Looks at nothing before it sleeps: to be woken costs the thread that launches more than all else.
const LINGER: u32 = 50;
/// Looks without an event before it is quiet.
const PATIENCE: u32 = 500;
/// How long events of a run that is over are waited for. They come a moment later than what says that it is over, or are behind another kernel's: one that is
/// short has its end's entry with its start's, and gives it back after some 8 ms if it takes longer (`Report::must_give_up`). What has not come then has been
/// written over.
const LATE: Duration = Duration::from_millis(25);

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
    captured: bool,
    on_end: Option<Box<dyn FnOnce() + Send>>,
    /// The kernel was told of the abort.
    aborted: bool,
    /// The run that its events are about: the replay, or 0.
    replay: u32,
    /// Runs that the observer was told the end of.
    finished: u32,
    /// The present run was given up, as one of its events says.
    gave_up: bool,
    /// Since when the present run is known to be over, while its events are waited for.
    over: Option<Instant>,
    /// What the kernel has told last of what it moves, and of what it waits for.
    moved: u32,
    waits: u64,
    /// The channels of its operations, and what was told of them in this run.
    told: Few<Told>,
}

/// One channel of one operation.
struct Told {
    op: u32,
    channel: u8,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Nothing,
    Started,
    Stopped,
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
        let mut told: Few<Told> = Few::None;
        for channel in &launch.channels {
            for work in channel.work.iter().filter(|work| !work.only_shows_tag()) {
                if !told
                    .iter()
                    .any(|told| (told.op, told.channel) == (work.op, channel.channel))
                {
                    told.push(Told {
                        op: work.op,
                        channel: channel.channel,
                        stage: Stage::Nothing,
                    });
                }
            }
        }
        // Relaxed: of launches before, in whose memory this one's is, nothing is written any more.
        let moved = slot.control().moved.load(Ordering::Relaxed);
        Self {
            launch,
            slot,
            captured,
            on_end,
            aborted: false,
            replay: captured.into(),
            finished: 0,
            gave_up: false,
            over: None,
            moved,
            waits: 0,
            told,
        }
    }

    /// Nothing runs it any more; gives its slot for another launch.
    fn end(mut self) -> Slot {
        if let Some(on_end) = self.on_end.take() {
            on_end();
        }
        self.slot.renew();
        // Nearly always its communicator has it too, and makes another launch of it. Else what it holds is dropped where that
        // may take time.
        if let Some(launch) = Arc::into_inner(self.launch) {
            release::later(launch);
        }
        self.slot
    }

    fn tell(&mut self, event: &Event, clock: &Clock) {
        // The event of a later replay: the one before is over, though its end has not been looked at.
        while self.captured && event.replay > self.replay {
            self.finish(self.aborted && !self.is_told());
        }
        let observer = &self.launch.observer;
        if event.kind == EventKind::Mismatch {
            return observer.mismatch(event.op, event.replay, event.channel, event.value as u32);
        }
        let Some(told) = self
            .told
            .iter_mut()
            .find(|told| (told.op, told.channel) == (event.op, event.channel))
        else {
            return;
        };
        if event.replay != self.replay || told.stage == Stage::Stopped {
            return;
        }
        let (op, replay, channel) = (event.op, event.replay, event.channel);
        let host_ns = clock.host_ns(event.value);
        let when = When::At {
            timer_ns: event.value,
            host_ns,
        };
        if event.kind == EventKind::Started {
            if told.stage == Stage::Nothing {
                observer.channel_started(op, replay, channel, when);
            }
            told.stage = Stage::Started;
            return;
        }
        if told.stage == Stage::Nothing {
            observer.channel_started(op, replay, channel, When::Past { host_ns });
        }
        told.stage = Stage::Stopped;
        let aborted = event.kind == EventKind::Aborted;
        self.gave_up |= aborted;
        observer.channel_stopped(op, replay, channel, aborted, when);
    }

    /// Finishes what is over of so many `runs`; whether there was any. `aborted`: the last one gave up, and perhaps some before it: an abort word stays set.
    fn catch_up(&mut self, runs: u32, aborted: bool) -> bool {
        let before = self.finished;
        loop {
            let behind = runs.wrapping_sub(self.finished);
            if behind == 0 || behind > u32::MAX / 2 {
                break;
            }
            let aborted = aborted && (behind == 1 || !self.is_told());
            if !aborted && self.awaits_events() {
                break;
            }
            self.finish(aborted);
        }
        self.finished != before
    }

    /// Whether all of the present run has been told.
    fn is_told(&self) -> bool {
        self.told.iter().all(|told| told.stage == Stage::Stopped)
    }

    /// Whether events of the present run, which is over, may still come.
    fn awaits_events(&mut self) -> bool {
        TELLS && !self.is_told() && self.over.get_or_insert_with(Instant::now).elapsed() < LATE
    }

    /// The present run is over. What was done and not told was lost, and is made up for.
    fn finish(&mut self, aborted: bool) {
        let aborted = aborted || self.gave_up;
        (self.over, self.gave_up) = (None, false);
        let observer = &self.launch.observer;
        let lost = When::Past {
            host_ns: observe::now_ns(),
        };
        for told in self.told.iter_mut() {
            if !aborted && told.stage == Stage::Nothing {
                observer.channel_started(told.op, self.replay, told.channel, lost);
            }
            if !aborted && told.stage != Stage::Stopped {
                observer.channel_stopped(told.op, self.replay, told.channel, false, lost);
            }
            told.stage = Stage::Nothing;
        }
        observer.launch_finished(self.replay, aborted);
        self.finished = self.finished.wrapping_add(1);
        self.replay += u32::from(self.captured);
    }

    /// A replay of it has begun and is not over.
    fn is_replaying(&self) -> bool {
        self.captured && self.told.iter().any(|told| told.stage != Stage::Nothing)
    }

    /// Passes the abort word on; returns the runs that are over and whether the last one gave up.
    fn look(&mut self) -> (u32, bool) {
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
        // Acquire: pairs with the kernel's fence of a run that gave up, whose events and mark are visible. Of another run there is none: what of its
        // events has not been seen when it is over, `finish` makes up for.
        let runs = control
            .runs
            .load(Ordering::Acquire)
            .wrapping_sub(self.slot.runs_before);
        (runs, control.aborted.load(Ordering::Relaxed) != 0)
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
    looks: Vec<(u32, u32, bool)>,
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
            looks: Vec::new(),
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
            let eager = self.in_flight.values().any(|launch| !launch.captured);
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
        self.looks.clear();
        for (number, launch) in &mut self.in_flight {
            let (runs, aborted) = launch.look();
            self.looks.push((*number, runs, aborted));
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
                launch.tell(&event, &self.clock);
            }
        }
        self.tell_overwritten(ring.lost());
        for (number, runs, aborted) in self.looks.drain(..) {
            let Some(launch) = self.in_flight.get_mut(&number) else {
                continue;
            };
            moved |= launch.catch_up(runs, aborted);
            if !launch.captured && launch.finished > 0 {
                self.forgotten.push(number);
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
            if in_flight.get(number).is_some_and(|launch| launch.over.is_some()) {
                return true;
            }
            if let Some(launch) = in_flight.remove(number) {
                over += usize::from(!launch.captured);
                free.push(launch.end());
            }
            false
        });
        let replaying = self
            .in_flight
            .values()
            .filter(|launch| launch.is_replaying())
            .count();
        if self.free.is_empty() && replaying == self.replaying {
            return;
        }
        let mut exchange = lock(&self.launches.exchange);
        exchange.free.append(&mut self.free);
        exchange.running = exchange.running + replaying - self.replaying - over;
        self.replaying = replaying;
    }
}
