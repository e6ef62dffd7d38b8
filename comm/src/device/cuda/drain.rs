//! Tells observers what kernels have written, and kernels that their launch is aborted.
//!
//! One thread a GPU. It reads memory only: a call of the driver could block behind the very kernel that waits for it.

use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

use ringsight_kernels::{
    Launch,
    cuda::{Event, EventKind, Ring, ring::Entry},
};

use super::{
    gpu::{Launches, Memory, Slot, Table},
    release,
};
use crate::communicator::lock;

/// How often the ring is looked at while something runs. Times come from the GPU: this is not their resolution.
const BUSY: Duration = Duration::from_micros(20);
/// And while graphs hold launches but none has run for a while.
const QUIET: Duration = Duration::from_millis(1);
/// Looks at nothing before it sleeps: to be woken costs the thread that launches more than all else.
const LINGER: u32 = 50;
/// Looks without an event before it is quiet.
const PATIENCE: u32 = 500;

/// A launch that the GPU may run.
pub(super) struct InFlight {
    launch: Arc<Launch>,
    slot: Slot,
    captured: bool,
    /// Called when nothing runs it any more.
    on_end: Option<Box<dyn FnOnce() + Send>>,
    /// The kernel was told of the abort.
    aborted: bool,
    /// The run that its events are about: the replay, or 0.
    replay: u32,
    /// Runs that the observer was told the end of.
    finished: u32,
    /// The channels of its operations, and what was told of them in this run.
    told: Vec<Told>,
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
    pub(super) fn new(
        launch: Arc<Launch>,
        slot: Slot,
        captured: bool,
        on_end: Option<Box<dyn FnOnce() + Send>>,
    ) -> Self {
        let mut told: Vec<Told> = Vec::new();
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
        Self {
            launch,
            slot,
            captured,
            on_end,
            aborted: false,
            replay: captured.into(),
            finished: 0,
            told,
        }
    }

    /// What it held: the slot for the next launch, the rest to be dropped where that may take time.
    pub(super) fn end(mut self) -> (Slot, Arc<Launch>) {
        if let Some(on_end) = self.on_end.take() {
            on_end();
        }
        self.slot.renew();
        (self.slot, self.launch)
    }

    fn tell(&mut self, event: &Event) {
        // The event of a later replay: the one before is over, though its end has not been looked at.
        while self.captured && event.replay > self.replay {
            self.finish(false);
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
        if told.stage == Stage::Nothing {
            observer.channel_started(event.op, event.replay, event.channel);
        }
        told.stage = Stage::Started;
        if event.kind != EventKind::Started {
            told.stage = Stage::Stopped;
            observer.channel_stopped(
                event.op,
                event.replay,
                event.channel,
                event.kind == EventKind::Aborted,
            );
        }
    }

    /// The present run is over. What was done and not told was lost, and is made up for.
    fn finish(&mut self, aborted: bool) {
        let observer = &self.launch.observer;
        for told in &mut self.told {
            if !aborted && told.stage == Stage::Nothing {
                observer.channel_started(told.op, self.replay, told.channel);
            }
            if !aborted && told.stage != Stage::Stopped {
                observer.channel_stopped(told.op, self.replay, told.channel, false);
            }
            told.stage = Stage::Nothing;
        }
        observer.launch_finished(self.replay, aborted);
        self.finished = self.finished.wrapping_add(1);
        self.replay += u32::from(self.captured);
    }

    /// Passes the abort word on; returns the runs that are over and whether the last one gave up.
    fn look(&mut self) -> (u32, bool) {
        let control = self.slot.control();
        if !self.aborted && self.launch.abort.is_set() {
            self.aborted = true;
            // Release: as the word that it repeats.
            control.abort.store(1, Ordering::Release);
        }
        // Acquire: pairs with the kernel's release; its events and its mark are visible.
        let runs = control
            .runs
            .load(Ordering::Acquire)
            .wrapping_sub(self.slot.runs_before);
        (runs, control.aborted.load(Ordering::Relaxed) != 0)
    }
}

/// The thread's state.
pub(super) struct Drain {
    entries: Arc<Memory<Entry>>,
    launches: Arc<Launches>,
}

impl Drain {
    pub(super) fn new(entries: Arc<Memory<Entry>>, launches: Arc<Launches>) -> Self {
        Self { entries, launches }
    }

    /// Runs for the life of the process.
    pub(super) fn run(self) {
        let Self { entries, launches } = self;
        let mut ring = Ring::new(&entries);
        let (mut quiet, mut idle) = (0, 0);
        loop {
            let mut table = lock(&launches.table);
            idle = if table.in_flight.is_empty() { idle + 1 } else { 0 };
            if idle > LINGER {
                table.asleep = true;
                while table.in_flight.is_empty() {
                    table = launches
                        .wake
                        .wait(table)
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                }
                table.asleep = false;
                (quiet, idle) = (0, 0);
            }
            let moved = pass(&mut table, &mut ring);
            let eager = table.in_flight.values().any(|launch| !launch.captured);
            drop(table);
            quiet = if moved || eager { 0 } else { quiet + 1 };
            thread::sleep(if quiet < PATIENCE { BUSY } else { QUIET });
        }
    }
}

/// Looks at everything once; says whether anything was new.
fn pass(table: &mut Table, ring: &mut Ring<'_>) -> bool {
    // Before the ring: the events of runs that are over by now are in it.
    let looks: Vec<(u32, u32, bool)> = table
        .in_flight
        .iter_mut()
        .map(|(number, launch)| {
            let (runs, aborted) = launch.look();
            (*number, runs, aborted)
        })
        .collect();
    let mut moved = false;
    while let Some(event) = ring.next_event() {
        moved = true;
        if let Some(launch) = table.in_flight.get_mut(&event.launch) {
            launch.tell(&event);
        }
    }
    for (number, runs, aborted) in looks {
        let Some(launch) = table.in_flight.get_mut(&number) else {
            continue;
        };
        while launch.finished != runs && runs.wrapping_sub(launch.finished) < u32::MAX / 2 {
            moved = true;
            // An abort word stays set: it is the last run that it ended, and all after it.
            let last = runs.wrapping_sub(launch.finished) == 1;
            launch.finish(aborted && last);
        }
        if !launch.captured
            && launch.finished > 0
            && let Some(launch) = table.in_flight.remove(&number)
        {
            let (slot, rest) = launch.end();
            table.free.push(slot);
            release::later(rest);
        }
    }
    moved
}
