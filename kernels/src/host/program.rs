//! One running work of the host device, step by step.

use ringsight_records::{Phase, ReduceOp, Waits};

use crate::{
    launch::{Connections, Scalar, Work},
    reduce::Reduction,
    schedule::{Position, Schedule, Step},
};

/// The reduction of a work, if it has one.
fn reduction_of(work: &Work) -> Option<Reduction> {
    // The average of one rank's elements is the elements: not even a NaN changes its bits.
    Reduction::new(work.reduce_op, work.data_type)
        .filter(|_| work.ranks > 1 || work.reduce_op != ReduceOp::Avg)
}

/// The argument of the reduction functions. A scalar in device memory is read here.
fn argument_of(work: &Work) -> u64 {
    let scalar = match work.scalar {
        Scalar::None => 0,
        Scalar::Immediate(bits) => bits,
        Scalar::Device(address) => {
            let mut bits = [0; 8];
            let element = &mut bits[..work.data_type.size()];
            // SAFETY: by the launch's contract there is an element of the type. Copied as bytes, since it may be unaligned.
            unsafe {
                std::ptr::copy_nonoverlapping(address as *const u8, element.as_mut_ptr(), element.len());
            };
            u64::from_le_bytes(bits)
        }
    };
    Reduction::argument(work.reduce_op, work.data_type, work.ranks, scalar)
}

pub(super) enum Advance {
    /// No data or no room yet.
    Waiting,
    Moved,
    Done,
    /// A slot with this tag of another operation has arrived.
    Mismatch(u32),
}

/// One running work.
pub(super) struct Program {
    /// Index of the work in the channel.
    pub(super) work: usize,
    /// Index of its operation in the channel; `None` for work that is not reported.
    pub(super) op: Option<usize>,
    schedule: Schedule,
    /// All steps, if there are few: finding them takes as long as running so short an operation.
    few: Vec<Step>,
    reduction: Option<Reduction>,
    argument: u64,
    /// Elements that [`Step::keep`] keeps, by rank. This rank's elements stay in its buffer; their place here holds partial results.
    kept: Vec<u8>,
    position: Position,
    /// Finished steps.
    made: usize,
    /// The step at `position`; `None` at the end.
    step: Option<Step>,
}

/// The largest number of steps in [`Program::few`].
const FEW_STEPS: usize = 16;

impl Program {
    pub(super) fn new(index: usize, work: &Work, op: Option<usize>) -> Self {
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

    /// Prepares the next run.
    pub(super) fn reset(&mut self, work: &Work) {
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

    /// Makes the next step if its slots are there. `work` is the work that the program was made of.
    pub(super) fn advance(&mut self, work: &Work) -> Advance {
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

    /// What it waits for, if it could not make its next step.
    pub(super) fn waits(&self, work: &Work, channel: u8) -> Option<Waits> {
        let step = self.step?;
        let (phase, peer) = match &work.connections {
            Connections::Ring { order, prev, .. } if step.recv && prev.posted().is_none() => {
                (Phase::Data, order.last())
            }
            Connections::Ring { order, .. } => (Phase::Room, order.get(1)),
            // The caller of a message knows its peer.
            Connections::Send(_) => (Phase::Room, None),
            Connections::Recv(_) => (Phase::Data, None),
            Connections::Local | Connections::Peers(_) | Connections::CopyEngine { .. } => return None,
        };
        Some(Waits {
            op: work.op as u16,
            channel,
            phase,
            peer: peer.and_then(|peer| u16::try_from(*peer).ok()),
            step: (self.made + 1) as u16,
        })
    }

    /// Executes a step.
    fn execute(&mut self, work: &Work, step: Step) -> Advance {
        let (prev, next) = match &work.connections {
            Connections::Local | Connections::Peers(_) | Connections::CopyEngine { .. } => (None, None),
            Connections::Ring { prev, next, .. } => (Some(prev), step.send.then_some(next)),
            Connections::Send(next) => (None, step.send.then_some(next)),
            Connections::Recv(prev) => (Some(prev), None),
        };
        // Also checked by a step that takes no slot: the rank that it waits for may run another operation. The oldest slot belongs to this
        // work, since the last step of every program takes one.
        let arrived = prev.and_then(|fifo| Some((fifo, fifo.posted()?.0)));
        if let Some((fifo, position)) = arrived {
            let theirs = fifo.tag_at(position);
            if theirs != work.tag {
                return Advance::Mismatch(theirs);
            }
        } else if step.recv {
            return Advance::Waiting;
        }
        // The peer chose the posted size; this step takes at most one slot anyway.
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

        // SAFETY: a slot holds `elems` elements (the schedule never asks for more) and is ours until posted or released. By the launch's contract
        // the user's buffers hold what the operation says.
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

    /// Reduces what arrived with this rank's elements, or copies whichever is there.
    ///
    /// # Safety
    /// All pointers are valid for the step's elements; `bytes` is their size.
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
                        // Overlapping buffers are the caller's mistake, but must not be undefined behaviour.
                        store.copy_from(from, bytes);
                    }
                }
                (None, None, _) => {}
            }
        }
    }

    /// Keeps the elements of one rank. With the last rank's elements, reduces all ranks' elements in the order of ranks into the result.
    ///
    /// # Safety
    /// All pointers are valid for `elems` elements, and `kept` has room for as many of each rank.
    unsafe fn keep(
        &mut self,
        work: &Work,
        elems: usize,
        (arrived, from): (u32, *const u8),
        last: Option<(*const u8, *mut u8)>,
    ) {
        let bytes = elems * work.data_type.size();
        let kept = self.kept.as_mut_ptr();
        // SAFETY: within `kept`, by the caller's contract.
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
        // SAFETY: the caller's. The place for partial results holds no rank's elements. If this rank's own elements lie where the result goes, they
        // have the same address and are read before the last call writes.
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
