//! The device code of the host device: one thread runs all channels of a launch, as a GPU's blocks would.
//!
//! A channel's programs are resumable: a step that finds no data or no room gives way to the other channels, so no
//! channel ever blocks another, and the sends and receives of a launch make progress in whatever order their peers
//! serve them.

use std::{
    collections::HashMap,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ringsight_records::ReduceOp;

use crate::{
    Fifo,
    launch::{ChannelWork, Connections, Launch, Scalar, Work},
    reduce::Reduction,
    schedule::{Position, Schedule, Step},
};

/// Runs a launch to its end, or until its abort word is set. `replay` is 0 for an eager launch, n for the n-th replay
/// of the graph that holds it.
///
/// Every work of the launch must pass [`Work::check`], and its buffers and scalars must stay valid until the launch is
/// finished.
pub fn run(launch: &Launch, replay: u32) {
    let mut channels: Vec<Channel<'_>> = launch.channels.iter().map(Channel::new).collect();
    let mut wait = Backoff::default();
    let mut aborted = false;
    let mut differs = false;
    loop {
        if launch.abort.is_set() {
            aborted = true;
            break;
        }
        let mut moved = false;
        channels.retain_mut(|channel| {
            if !differs {
                match channel.advance(launch, replay) {
                    Ok(now) => moved |= now,
                    Err(Differs) => differs = true,
                }
            }
            !channel.is_done()
        });
        if channels.is_empty() {
            break;
        }
        // Once ranks differ, whatever moved on would be wrong: all that is left is to wait for the abort word.
        if moved && !differs {
            wait.reset();
        } else {
            wait.pause();
        }
    }
    for channel in &mut channels {
        channel.give_up(launch, replay);
    }
    launch.observer.launch_finished(replay, aborted);
}

/// One channel while it runs: first its collectives, one after another, then its sends and receives.
struct Channel<'a> {
    number: u8,
    ops: Vec<Op>,
    lanes: Vec<Lane<'a>>,
    /// Lanes of the point-to-point phase, which follows the collectives.
    later: Vec<Lane<'a>>,
}

/// An operation's works on one channel, for the observer.
struct Op {
    number: u32,
    remaining: usize,
    started: bool,
}

/// Programs that run in order because they share a FIFO. Different lanes run side by side.
struct Lane<'a> {
    fifo: Option<*const Fifo>,
    /// Reversed: the current program is last.
    programs: Vec<Program<'a>>,
}

impl<'a> Channel<'a> {
    fn new(channel: &'a ChannelWork) -> Self {
        let mut ops: Vec<Op> = Vec::new();
        // A few are found faster by looking at each; a captured plan may have thousands.
        let mut index: Option<HashMap<u32, usize>> = (channel.work.len() > 32).then(HashMap::new);
        let mut collectives = Lane {
            fifo: None,
            programs: Vec::new(),
        };
        let mut later: Vec<Lane<'a>> = Vec::new();
        for work in &channel.work {
            let op = (!work.only_shows_tag()).then(|| {
                let next = ops.len();
                let op = match &mut index {
                    Some(index) => *index.entry(work.op).or_insert(next),
                    None => ops.iter().position(|op| op.number == work.op).unwrap_or(next),
                };
                if op == next {
                    ops.push(Op {
                        number: work.op,
                        remaining: 0,
                        started: false,
                    });
                }
                ops[op].remaining += 1;
                op
            });
            let program = Program::new(work, op);
            if !work.function.is_p2p() {
                collectives.programs.push(program);
                continue;
            }
            let fifo = match &work.connections {
                Connections::Send(fifo) | Connections::Recv(fifo) => Some(Arc::as_ptr(fifo)),
                Connections::Local | Connections::Ring { .. } => None,
            };
            match later.iter_mut().find(|lane| lane.fifo == fifo) {
                Some(lane) => lane.programs.push(program),
                None => later.push(Lane {
                    fifo,
                    programs: vec![program],
                }),
            }
        }
        let mut lanes = vec![collectives];
        for lane in lanes.iter_mut().chain(&mut later) {
            lane.programs.reverse();
        }
        lanes.retain(|lane| !lane.programs.is_empty());
        Self {
            number: channel.channel,
            ops,
            lanes,
            later,
        }
    }

    fn is_done(&self) -> bool {
        self.lanes.is_empty() && self.later.is_empty()
    }

    /// Lets every lane make one step; says whether one did. The observer has been told of what differs.
    fn advance(&mut self, launch: &Launch, replay: u32) -> Result<bool, Differs> {
        if self.lanes.is_empty() {
            self.lanes = std::mem::take(&mut self.later);
        }
        let Self {
            number, ops, lanes, ..
        } = self;
        let mut moved = Ok(false);
        lanes.retain_mut(|lane| {
            if moved.is_err() {
                return true;
            }
            let Some(program) = lane.programs.last_mut() else {
                return false;
            };
            let mut op = program.op.map(|op| &mut ops[op]);
            if let Some(op) = op.as_mut().filter(|op| !op.started) {
                op.started = true;
                launch.observer.channel_started(op.number, replay, *number);
            }
            match program.advance() {
                Advance::Waiting => {}
                Advance::Moved => moved = Ok(true),
                Advance::Differs(theirs) => {
                    launch.observer.mismatch(program.work.op, replay, *number, theirs);
                    moved = Err(Differs);
                }
                Advance::Done => {
                    moved = Ok(true);
                    if let Some(op) = op {
                        op.remaining -= 1;
                        if op.remaining == 0 {
                            launch.observer.channel_stopped(op.number, replay, *number, false);
                        }
                    }
                    lane.programs.pop();
                }
            }
            !lane.programs.is_empty()
        });
        moved
    }

    /// Reports what was begun and will not be finished.
    fn give_up(&mut self, launch: &Launch, replay: u32) {
        for op in self.ops.iter().filter(|op| op.started && op.remaining > 0) {
            launch
                .observer
                .channel_stopped(op.number, replay, self.number, true);
        }
    }
}

/// Another rank does something else than this one.
struct Differs;

/// A work's reduction and the argument of its kernels: this is where a scalar in device memory is read.
fn reduction_of(work: &Work) -> Option<(Reduction, u64)> {
    // The average of one rank's elements is what they are: not even a NaN changes its bits.
    let reduction = Reduction::new(work.reduce_op, work.data_type)
        .filter(|_| work.ranks > 1 || work.reduce_op != ReduceOp::Avg)?;
    let scalar = match work.scalar {
        Scalar::None => 0,
        Scalar::Immediate(bits) => bits,
        Scalar::Device(address) => {
            let mut bits = [0; 8];
            let element = &mut bits[..work.data_type.size()];
            // SAFETY: the launch's contract: an element of the type is there. Copied as bytes: aligned or not.
            unsafe {
                std::ptr::copy_nonoverlapping(address as *const u8, element.as_mut_ptr(), element.len());
            };
            u64::from_le_bytes(bits)
        }
    };
    let argument = Reduction::argument(work.reduce_op, work.data_type, work.ranks, scalar);
    Some((reduction, argument))
}

enum Advance {
    /// No data or no room yet.
    Waiting,
    Moved,
    Done,
    /// A slot of an operation with this tag has arrived.
    Differs(u32),
}

/// One work while it runs.
struct Program<'a> {
    work: &'a Work,
    /// Index of its operation in the channel; none for work that the observer is not told of.
    op: Option<usize>,
    schedule: Schedule,
    reduction: Option<(Reduction, u64)>,
    position: Position,
    /// The step at `position`; none at the end.
    step: Option<Step>,
}

impl<'a> Program<'a> {
    fn new(work: &'a Work, op: Option<usize>) -> Self {
        let schedule = Schedule::new(work);
        let mut position = Position::default();
        Self {
            work,
            op,
            step: schedule.seek(&mut position),
            schedule,
            reduction: reduction_of(work),
            position,
        }
    }

    /// Makes the next step, if its slots are there.
    fn advance(&mut self) -> Advance {
        let Some(step) = self.step else {
            return Advance::Done;
        };
        match self.execute(step) {
            Advance::Moved => {}
            other => return other,
        }
        self.position.pass();
        self.step = self.schedule.seek(&mut self.position);
        if self.step.is_some() {
            Advance::Moved
        } else {
            Advance::Done
        }
    }

    /// Executes a step.
    fn execute(&self, step: Step) -> Advance {
        let (prev, next) = match &self.work.connections {
            Connections::Local => (None, None),
            Connections::Ring { prev, next, .. } => (Some(prev), step.send.then_some(next)),
            Connections::Send(next) => (None, step.send.then_some(next)),
            Connections::Recv(prev) => (Some(prev), None),
        };
        // Looked at before every step, also one that takes nothing: a rank that waits for room may wait for one that
        // waits for something else. The oldest slot is of this work, since the last step of every program takes one.
        let arrived = prev.and_then(|fifo| Some((fifo, fifo.posted()?.0)));
        if let Some((fifo, position)) = arrived {
            let theirs = fifo.tag_at(position);
            if theirs != self.work.tag {
                return Advance::Differs(theirs);
            }
        } else if step.recv {
            return Advance::Waiting;
        }
        // The posted size is the peer's word; what this step takes is at most a slot in any case.
        let input = arrived.filter(|_| step.recv);
        let output = match next.map(|fifo| (fifo, fifo.free())) {
            None => None,
            Some((_, None)) => return Advance::Waiting,
            Some((fifo, Some(position))) => Some((fifo, position)),
        };

        let size = self.work.data_type.size();
        let bytes = step.elems * size;
        let address = |buffer: usize, at: Option<usize>| {
            at.filter(|_| buffer != 0)
                .map(|at| (buffer + at * size) as *mut u8)
        };
        let source = address(self.work.send, step.source).map(<*mut u8>::cast_const);
        let store = address(self.work.recv, step.store);
        let arrived = input.map(|(fifo, position)| fifo.slot(position, bytes).cast_const());
        let leaving = output.map(|(fifo, position)| fifo.slot(position, bytes));

        // SAFETY: a slot holds `elems` elements (the schedule never asks for more) and is ours until posted or
        // released; the user's buffers hold what the operation says, the launch's contract.
        unsafe {
            match (arrived, source, self.reduction) {
                (Some(slot), Some(own), Some((reduction, argument))) => {
                    let kernel = if step.complete {
                        reduction.complete
                    } else {
                        reduction.partial
                    };
                    if let Some(to) = store.or(leaving) {
                        kernel(to, slot, own, step.elems, argument);
                        if let (Some(result), Some(leaving)) = (store, leaving) {
                            leaving.copy_from_nonoverlapping(result, bytes);
                        }
                    }
                }
                (
                    None,
                    Some(own),
                    Some((
                        Reduction {
                            first: Some(first), ..
                        },
                        argument,
                    )),
                ) => {
                    if let Some(to) = store.or(leaving) {
                        first(to, own, step.elems, argument);
                    }
                }
                (Some(from), ..) | (None, Some(from), _) => {
                    if let Some(leaving) = leaving {
                        leaving.copy_from_nonoverlapping(from, bytes);
                    }
                    if let Some(store) = store.filter(|store| store.cast_const() != from) {
                        // Overlapping buffers are the caller's mistake, but not a reason for undefined behaviour.
                        store.copy_from(from, bytes);
                    }
                }
                (None, None, _) => {}
            }
        }
        if let Some((fifo, position)) = output {
            fifo.post(position, bytes, self.work.tag);
        }
        if let Some((fifo, position)) = input {
            fifo.release(position);
        }
        Advance::Moved
    }
}

/// How a kernel waits for its peers: a few spins for a peer on another core, then yields for a peer that shares this
/// core, then sleeps that grow with the wait, so that a rank that waits 80 ms for a late one costs next to nothing.
#[derive(Default)]
struct Backoff {
    pauses: u32,
    /// When spinning ended.
    since: Option<Instant>,
}

impl Backoff {
    const SPINS: u32 = 32;
    /// Longer than a ring step of a crowd of ranks takes: once one rank of a ring sleeps, its peers wait longer, sleep
    /// too, and all go on at the pace of timers (8 ranks on 2 cores: 5 to 10 times slower with 100 µs here).
    const YIELD_FOR: Duration = Duration::from_micros(500);
    /// A sleep is this part of the wait so far: what oversleeping adds to a wait stays near 3 %.
    const SLEEP_PART: u32 = 32;
    const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
    const LONGEST_SLEEP: Duration = Duration::from_micros(500);

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn pause(&mut self) {
        if self.pauses < Self::SPINS {
            self.pauses += 1;
            std::hint::spin_loop();
            return;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < Self::YIELD_FOR {
            thread::yield_now();
        } else {
            thread::sleep((waited / Self::SLEEP_PART).clamp(Self::SHORTEST_SLEEP, Self::LONGEST_SLEEP));
        }
    }
}
