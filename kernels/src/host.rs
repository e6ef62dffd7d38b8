//! The device code of the host device: one thread runs all channels of a launch, as a GPU's blocks would.
//!
//! A channel's programs are resumable. A step that finds no data or no room yields to the other channels, so no channel blocks another, and
//! the sends and receives of a launch progress in whatever order their peers serve them.
//!
//! States of a program: waiting ↔ moving → done; or mismatch, when a slot carries another operation's tag. After a mismatch nothing in the
//! launch moves; its thread waits for the abort word.

mod program;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use ringsight_records::{Algorithm, Waits};

use self::program::{Advance, Program};
use crate::{
    Fifo,
    launch::{ChannelWork, Connections, Launch, When, Work},
};

/// A launch prepared for running, once or at each replay: its works' steps are laid out once.
///
/// Every work of the launch must pass [`Work::check`], and its buffers and scalars must stay valid until the launch is
/// finished.
pub struct Kernel {
    launch: Arc<Launch>,
    /// Locked by each run. Runs of one launch follow one another.
    channels: Mutex<Vec<Channel>>,
}

impl Kernel {
    /// Prepares the launch.
    #[must_use]
    pub fn new(launch: Arc<Launch>) -> Self {
        let channels = Mutex::new(channels(&launch));
        Self { launch, channels }
    }

    /// Runs it to its end, or until its abort word is set. `replay` is 0 for an eager launch, n for the n-th replay of its graph.
    pub fn run(&self, replay: u32) {
        // A run that panicked has left channels that the next run resets.
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        run_channels(&self.launch, &mut channels, replay);
    }
}

/// Whether the host device has programs of an algorithm ([`Work::algorithm`]).
#[must_use]
pub fn runs(algorithm: Algorithm) -> bool {
    matches!(
        algorithm,
        Algorithm::Ring | Algorithm::Direct | Algorithm::OneShot
    )
}

/// Runs a launch once, as [`Kernel::run`] does.
pub fn run(launch: &Launch, replay: u32) {
    run_channels(launch, &mut channels(launch), replay);
}

fn channels(launch: &Launch) -> Vec<Channel> {
    launch.channels.iter().map(Channel::new).collect()
}

fn run_channels(launch: &Launch, channels: &mut [Channel], replay: u32) {
    for (channel, work) in channels.iter_mut().zip(&launch.channels) {
        channel.reset(&work.work);
    }
    let mut wait = Backoff::default();
    let mut aborted = false;
    let mut mismatch = false;
    loop {
        if launch.abort.is_set() {
            aborted = true;
            break;
        }
        let (mut moved, mut running) = (false, false);
        for (channel, work) in channels.iter_mut().zip(&launch.channels) {
            if !mismatch && !channel.is_done() {
                match channel.advance(&work.work, launch, replay) {
                    Ok(now) => moved |= now,
                    Err(Mismatch) => mismatch = true,
                }
            }
            running |= !channel.is_done();
        }
        if !running {
            break;
        }
        // After a mismatch, moving on would corrupt data. Only the abort word ends the run.
        if moved && !mismatch {
            launch.observer.moved();
            wait.reset();
        } else if wait.pause() && !mismatch {
            let mut all = channels.iter().zip(&launch.channels);
            if let Some(waits) = all.find_map(|(channel, work)| channel.waits(&work.work)) {
                launch.observer.waits(waits);
            }
        }
    }
    for channel in channels {
        channel.give_up(launch, replay);
    }
    launch.observer.launch_finished(replay, aborted);
}

/// One channel. Its collectives run one after another, then its messages.
struct Channel {
    number: u8,
    ops: Vec<Op>,
    collectives: Lane,
    messages: Vec<Lane>,
    /// Programs that are not done.
    left: usize,
}

/// An operation's works on one channel, as reported to the observer.
struct Op {
    number: u32,
    works: usize,
    remaining: usize,
    started: bool,
}

/// Programs that run in order since they share a FIFO. Lanes run side by side.
#[derive(Default)]
struct Lane {
    fifo: Option<*const Fifo>,
    programs: Vec<Program>,
    /// Index of the running program.
    at: usize,
}

// SAFETY: the pointers only distinguish FIFOs and are never dereferenced.
unsafe impl Send for Lane {}

impl Channel {
    fn new(channel: &ChannelWork) -> Self {
        let mut ops: Vec<Op> = Vec::new();
        // A scan finds a few ops faster; a captured plan may have thousands.
        let mut numbers: Option<HashMap<u32, usize>> = (channel.work.len() > 32).then(HashMap::new);
        let mut collectives = Lane::default();
        let mut messages: Vec<Lane> = Vec::new();
        for (index, work) in channel.work.iter().enumerate() {
            let op = (!work.is_tag_only()).then(|| {
                let next = ops.len();
                let op = match &mut numbers {
                    Some(numbers) => *numbers.entry(work.op).or_insert(next),
                    None => ops.iter().position(|op| op.number == work.op).unwrap_or(next),
                };
                if op == next {
                    ops.push(Op {
                        number: work.op,
                        works: 0,
                        remaining: 0,
                        started: false,
                    });
                }
                ops[op].works += 1;
                op
            });
            let program = Program::new(index, work, op);
            if !work.function.is_p2p() {
                collectives.programs.push(program);
                continue;
            }
            let fifo = match &work.connections {
                Connections::Send(fifo) | Connections::Recv(fifo) => Some(Arc::as_ptr(fifo)),
                Connections::Local
                | Connections::Ring { .. }
                | Connections::Peers(_)
                | Connections::CopyEngine { .. } => None,
            };
            match messages.iter_mut().find(|lane| lane.fifo == fifo) {
                Some(lane) => lane.programs.push(program),
                None => messages.push(Lane {
                    fifo,
                    programs: vec![program],
                    at: 0,
                }),
            }
        }
        Self {
            number: channel.channel,
            ops,
            collectives,
            messages,
            left: 0,
        }
    }

    /// Prepares the next run. `work` is the work that the channel was made of.
    fn reset(&mut self, work: &[Work]) {
        for op in &mut self.ops {
            op.remaining = op.works;
            op.started = false;
        }
        self.left = 0;
        for lane in std::iter::once(&mut self.collectives).chain(&mut self.messages) {
            lane.at = 0;
            self.left += lane.programs.len();
            for program in &mut lane.programs {
                program.reset(&work[program.work]);
            }
        }
    }

    fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Lets every lane make one step; returns whether one did. On a mismatch the observer has been called.
    fn advance(&mut self, work: &[Work], launch: &Launch, replay: u32) -> Result<bool, Mismatch> {
        let Self {
            number, ops, left, ..
        } = self;
        let lanes = if self.collectives.at < self.collectives.programs.len() {
            std::slice::from_mut(&mut self.collectives)
        } else {
            &mut self.messages
        };
        let mut moved = false;
        for lane in lanes {
            let Some(program) = lane.programs.get_mut(lane.at) else {
                continue;
            };
            let mut op = program.op.map(|op| &mut ops[op]);
            if let Some(op) = op.as_mut().filter(|op| !op.started) {
                op.started = true;
                launch
                    .observer
                    .channel_started(op.number, replay, *number, When::Now);
            }
            match program.advance(&work[program.work]) {
                Advance::Waiting => {}
                Advance::Moved => moved = true,
                Advance::Mismatch(theirs) => {
                    let op = work[program.work].op;
                    launch.observer.mismatch(op, replay, *number, theirs);
                    return Err(Mismatch);
                }
                Advance::Done => {
                    moved = true;
                    if let Some(op) = op {
                        op.remaining -= 1;
                        if op.remaining == 0 {
                            launch
                                .observer
                                .channel_stopped(op.number, replay, *number, false, When::Now);
                        }
                    }
                    lane.at += 1;
                    *left -= 1;
                }
            }
        }
        Ok(moved)
    }

    /// What the first lane that could not make a step waits for.
    fn waits(&self, work: &[Work]) -> Option<Waits> {
        let lanes = std::iter::once(&self.collectives).chain(&self.messages);
        let mut programs = lanes.filter_map(|lane| lane.programs.get(lane.at));
        programs.find_map(|program| program.waits(&work[program.work], self.number))
    }

    /// Reports operations that have begun and will not finish.
    fn give_up(&mut self, launch: &Launch, replay: u32) {
        for op in self.ops.iter().filter(|op| op.started && op.remaining > 0) {
            launch
                .observer
                .channel_stopped(op.number, replay, self.number, true, When::Now);
        }
    }
}

/// A slot carries the tag of another operation.
struct Mismatch;

/// How a kernel waits for its peers. It spins for a peer on another core, then yields to a peer on this core, then sleeps for a time that
/// grows with the wait. So a rank that waits 80 ms for a late one takes little CPU time.
#[derive(Default)]
struct Backoff {
    pauses: u32,
    /// When spinning ended.
    since: Option<Instant>,
}

impl Backoff {
    /// Some microseconds: a peer in step with this rank is no later than that, and a yield takes a microsecond even with nobody to yield to.
    const SPINS: u32 = 100;
    /// Longer than a ring step of many ranks takes. Once one rank of a ring sleeps, its peers wait longer, sleep too, and all proceed at the
    /// pace of timers (8 ranks on 2 cores: 5 to 10 times slower with 100 µs here).
    const YIELD_FOR: Duration = Duration::from_micros(500);
    /// A sleep lasts this fraction of the wait so far, so oversleeping adds about 3 % to a wait.
    const SLEEP_PART: u32 = 32;
    const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
    const LONGEST_SLEEP: Duration = Duration::from_micros(500);

    fn reset(&mut self) {
        *self = Self::default();
    }

    /// Waits for a moment. Returns whether the wait is long by now.
    fn pause(&mut self) -> bool {
        if self.pauses < Self::SPINS {
            self.pauses += 1;
            std::hint::spin_loop();
            return false;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < Self::YIELD_FOR {
            thread::yield_now();
            return false;
        }
        thread::sleep((waited / Self::SLEEP_PART).clamp(Self::SHORTEST_SLEEP, Self::LONGEST_SLEEP));
        true
    }
}
