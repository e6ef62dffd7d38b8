//! The device code of the host device: one thread runs all channels of a launch, as a GPU's blocks would.
//!
//! A channel's programs are resumable: a step that finds no data or no room gives way to the other channels, so no
//! channel ever blocks another, and the sends and receives of a launch make progress in whatever order their peers
//! serve them.

mod backoff;
mod program;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use ringsight_records::{Algorithm, Waits};

use self::{
    backoff::Backoff,
    program::{Advance, Program},
};
use crate::{
    Fifo,
    launch::{ChannelWork, Connections, Launch, When, Work},
};

/// A launch that is ready to run, as often as it is replayed: what its works have to do step by step is laid out once.
///
/// Every work of the launch must pass [`Work::check`], and its buffers and scalars must stay valid until the launch is
/// finished.
pub struct Kernel {
    launch: Arc<Launch>,
    /// Locked by each run: the runs of one launch are one after another.
    channels: Mutex<Vec<Channel>>,
}

impl Kernel {
    /// Lays the launch out.
    #[must_use]
    pub fn new(launch: Arc<Launch>) -> Self {
        let channels = Mutex::new(channels(&launch));
        Self { launch, channels }
    }

    /// Runs it to its end, or until its abort word is set. `replay` is 0 for an eager launch, n for the n-th replay of the
    /// graph that holds it.
    pub fn run(&self, replay: u32) {
        // A run that panicked has left a state that the next one begins anew.
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        run_channels(&self.launch, &mut channels, replay);
    }
}

/// Whether this device has programs of an algorithm ([`Work::algorithm`]).
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
    let mut differs = false;
    loop {
        if launch.abort.is_set() {
            aborted = true;
            break;
        }
        let (mut moved, mut running) = (false, false);
        for (channel, work) in channels.iter_mut().zip(&launch.channels) {
            if !differs && !channel.is_done() {
                match channel.advance(&work.work, launch, replay) {
                    Ok(now) => moved |= now,
                    Err(Differs) => differs = true,
                }
            }
            running |= !channel.is_done();
        }
        if !running {
            break;
        }
        // Once ranks differ, whatever moved on would be wrong: all that is left is to wait for the abort word.
        if moved && !differs {
            launch.observer.moved();
            wait.reset();
        } else if wait.pause() && !differs {
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

/// One channel: first its collectives, one after another, then its sends and receives.
struct Channel {
    number: u8,
    ops: Vec<Op>,
    collectives: Lane,
    messages: Vec<Lane>,
    /// Programs that have not come to their end.
    left: usize,
}

/// An operation's works on one channel, for the observer.
struct Op {
    number: u32,
    works: usize,
    remaining: usize,
    started: bool,
}

/// Programs that run in order because they share a FIFO. Different lanes run side by side.
#[derive(Default)]
struct Lane {
    fifo: Option<*const Fifo>,
    programs: Vec<Program>,
    /// The one that runs.
    at: usize,
}

// SAFETY: the pointers tell FIFOs apart and are never followed.
unsafe impl Send for Lane {}

impl Channel {
    fn new(channel: &ChannelWork) -> Self {
        let mut ops: Vec<Op> = Vec::new();
        // A few are found faster by looking at each; a captured plan may have thousands.
        let mut numbers: Option<HashMap<u32, usize>> = (channel.work.len() > 32).then(HashMap::new);
        let mut collectives = Lane::default();
        let mut messages: Vec<Lane> = Vec::new();
        for (index, work) in channel.work.iter().enumerate() {
            let op = (!work.only_shows_tag()).then(|| {
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
                | Connections::Engines { .. } => None,
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

    /// Before each run. `work` is what the channel was made of.
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

    /// Lets every lane make one step; says whether one did. The observer has been told of what differs.
    fn advance(&mut self, work: &[Work], launch: &Launch, replay: u32) -> Result<bool, Differs> {
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
                Advance::Differs(theirs) => {
                    let op = work[program.work].op;
                    launch.observer.mismatch(op, replay, *number, theirs);
                    return Err(Differs);
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

    /// What the first of its lanes that could not make a step waits for.
    fn waits(&self, work: &[Work]) -> Option<Waits> {
        let lanes = std::iter::once(&self.collectives).chain(&self.messages);
        let mut programs = lanes.filter_map(|lane| lane.programs.get(lane.at));
        programs.find_map(|program| program.waits(&work[program.work], self.number))
    }

    /// Reports what was begun and will not be finished.
    fn give_up(&mut self, launch: &Launch, replay: u32) {
        for op in self.ops.iter().filter(|op| op.started && op.remaining > 0) {
            launch
                .observer
                .channel_stopped(op.number, replay, self.number, true, When::Now);
        }
    }
}

/// Another rank does something else than this one.
struct Differs;
