//! The device code of the host device: one thread runs all channels of a launch, as a GPU's blocks would.
//!
//! A channel's programs are resumable: a step that finds no data or no room gives way to the other channels, so no
//! channel ever blocks another, and the sends and receives of a launch make progress in whatever order their peers
//! serve them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use ringsight_records::{Algorithm, ReduceOp};

use crate::{
    Fifo,
    launch::{ChannelWork, Connections, Launch, Scalar, Work},
    reduce::Reduction,
    schedule::{Position, Schedule, Step},
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
            wait.reset();
        } else {
            wait.pause();
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
                Connections::Local | Connections::Ring { .. } => None,
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
                launch.observer.channel_started(op.number, replay, *number);
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
                            launch.observer.channel_stopped(op.number, replay, *number, false);
                        }
                    }
                    lane.at += 1;
                    *left -= 1;
                }
            }
        }
        Ok(moved)
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

/// The reduction of a work that has one.
fn reduction_of(work: &Work) -> Option<Reduction> {
    // The average of one rank's elements is what they are: not even a NaN changes its bits.
    Reduction::new(work.reduce_op, work.data_type)
        .filter(|_| work.ranks > 1 || work.reduce_op != ReduceOp::Avg)
}

/// The argument of a reduction's kernels: this is where a scalar in device memory is read.
fn argument_of(work: &Work) -> u64 {
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
    Reduction::argument(work.reduce_op, work.data_type, work.ranks, scalar)
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
struct Program {
    /// Its index in the channel.
    work: usize,
    /// Index of its operation in the channel; none for work that the observer is not told of.
    op: Option<usize>,
    schedule: Schedule,
    /// All steps, where they are few: those of an operation that takes no longer than finding them.
    few: Vec<Step>,
    reduction: Option<Reduction>,
    argument: u64,
    /// What [`Step::keep`] keeps, by rank. This rank's elements are in its buffer, and their place here is for partial
    /// results.
    kept: Vec<u8>,
    position: Position,
    /// Steps made.
    made: usize,
    /// The step at `position`; none at the end.
    step: Option<Step>,
}

/// How many steps are few.
const FEW_STEPS: usize = 16;

impl Program {
    fn new(index: usize, work: &Work, op: Option<usize>) -> Self {
        let schedule = Schedule::new(work);
        Self {
            work: index,
            op,
            step: None,
            made: 0,
            few: few_steps(&schedule),
            kept: vec![0; schedule.kept() * work.data_type.size() * work.ranks as usize],
            schedule,
            reduction: reduction_of(work),
            argument: 0,
            position: Position::default(),
        }
    }

    /// Before each run.
    fn reset(&mut self, work: &Work) {
        if self.reduction.is_some() {
            self.argument = argument_of(work);
        }
        self.position = Position::default();
        self.made = 0;
        self.seek();
    }

    /// Finds the next step.
    fn seek(&mut self) {
        self.step = if self.few.is_empty() {
            self.schedule.seek(&mut self.position)
        } else {
            self.few.get(self.made).copied()
        };
    }

    /// Makes the next step, if its slots are there. `work` is what it was made of.
    fn advance(&mut self, work: &Work) -> Advance {
        let Some(step) = self.step else {
            return Advance::Done;
        };
        match self.execute(work, step) {
            Advance::Moved => {}
            other => return other,
        }
        self.position.pass();
        self.made += 1;
        self.seek();
        if self.step.is_some() {
            Advance::Moved
        } else {
            Advance::Done
        }
    }

    /// Executes a step.
    fn execute(&mut self, work: &Work, step: Step) -> Advance {
        let (prev, next) = match &work.connections {
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
            if theirs != work.tag {
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

        let size = work.data_type.size();
        let bytes = step.elems * size;
        let address = |buffer: usize, at: Option<usize>| {
            at.filter(|_| buffer != 0)
                .map(|at| (buffer + at * size) as *mut u8)
        };
        let source = address(work.send, step.source).map(<*mut u8>::cast_const);
        let store = address(work.recv, step.store);
        let arrived = input.map(|(fifo, position)| fifo.slot(position, bytes).cast_const());
        let leaving = output.map(|(fifo, position)| fifo.slot(position, bytes));

        // SAFETY: a slot holds `elems` elements (the schedule never asks for more) and is ours until posted or
        // released; the user's buffers hold what the operation says, the launch's contract.
        unsafe {
            if let Some(rank) = step.keep {
                if let (Some(from), Some(leaving)) = (arrived.or(source), leaving) {
                    leaving.copy_from_nonoverlapping(from, bytes);
                }
                if let Some(from) = arrived {
                    self.keep(work, step.elems, (rank, from), source.zip(store));
                }
            } else {
                self.combine(step, arrived, source, (store, leaving), bytes);
            }
        }
        if let Some((fifo, position)) = output {
            fifo.post(position, bytes, work.tag);
        }
        if let Some((fifo, position)) = input {
            fifo.release(position);
        }
        Advance::Moved
    }

    /// What most steps do with their data: reduces what arrived with this rank's, or copies whichever is there.
    ///
    /// # Safety
    /// All of them are memory of the step's elements; `bytes` is their size.
    unsafe fn combine(
        &self,
        step: Step,
        arrived: Option<*const u8>,
        source: Option<*const u8>,
        (store, leaving): (Option<*mut u8>, Option<*mut u8>),
        bytes: usize,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match (arrived, source, self.reduction) {
                (Some(slot), Some(own), Some(reduction)) => {
                    let kernel = if step.complete {
                        reduction.complete
                    } else {
                        reduction.partial
                    };
                    if let Some(to) = store.or(leaving) {
                        kernel(to, slot, own, step.elems, self.argument);
                        if let (Some(result), Some(leaving)) = (store, leaving) {
                            leaving.copy_from_nonoverlapping(result, bytes);
                        }
                    }
                }
                (
                    None,
                    Some(own),
                    Some(Reduction {
                        first: Some(first), ..
                    }),
                ) => {
                    if let Some(to) = store.or(leaving) {
                        first(to, own, step.elems, self.argument);
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
    }

    /// Keeps the elements of one rank, or, with the last ones, reduces all ranks' in the order of ranks: from this rank's
    /// own into the result.
    ///
    /// # Safety
    /// All of them are memory of `elems` elements; where to keep so many of each rank is in `kept`.
    unsafe fn keep(
        &mut self,
        work: &Work,
        elems: usize,
        (arrived, from): (u32, *const u8),
        last: Option<(*const u8, *mut u8)>,
    ) {
        let bytes = elems * work.data_type.size();
        let kept = self.kept.as_mut_ptr();
        // SAFETY: within `kept`, the caller's word.
        let place = |rank: u32| unsafe { kept.add(rank as usize * bytes) };
        let (Some((own, to)), Some(reduction)) = (last, self.reduction) else {
            // SAFETY: the caller's; a slot is not in `kept`.
            return unsafe { place(arrived).copy_from_nonoverlapping(from, bytes) };
        };
        let elements = |rank: u32| match rank {
            _ if rank == work.rank => own,
            _ if rank == arrived => from,
            _ => place(rank).cast_const(),
        };
        let partial = place(work.rank);
        let mut sum = elements(0);
        // SAFETY: the caller's. The place for partial results is nobody's elements; where this rank's own are those of
        // the result, they are the same address and read before the last call writes.
        unsafe {
            if let Some(first) = reduction.first {
                first(partial, sum, elems, self.argument);
                sum = partial;
            }
            for rank in 1..work.ranks {
                let (kernel, out) = if rank + 1 == work.ranks {
                    (reduction.complete, to)
                } else {
                    (reduction.partial, partial)
                };
                kernel(out, sum, elements(rank), elems, self.argument);
                sum = out;
            }
        }
    }
}

/// All steps of a schedule if they are few, else none.
fn few_steps(schedule: &Schedule) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut position = Position::default();
    while let Some(step) = schedule.seek(&mut position) {
        if steps.len() == FEW_STEPS {
            return Vec::new();
        }
        steps.push(step);
        position.pass();
    }
    steps
}

/// How a kernel waits for its peers: some spins for a peer on another core, then yields for a peer that shares this
/// core, then sleeps that grow with the wait, so that a rank that waits 80 ms for a late one costs next to nothing.
#[derive(Default)]
struct Backoff {
    pauses: u32,
    /// When spinning ended.
    since: Option<Instant>,
}

impl Backoff {
    /// Some microseconds: a peer that does the same as this rank is no later than that, and a yield takes one, also where
    /// there is nobody to yield to.
    const SPINS: u32 = 100;
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
