//! What a rank of a soak does.

use std::{
    ffi::c_void,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

use super::steps::{Group, Late, RANKS, Slot, Step, World};
use crate::{
    faults::{
        call::{Call, Launched},
        cases::{Mode, Operation, THRESHOLD},
        journal::{Journal, Moment, What},
        stages::{Stage, Stages},
    },
    nccl::{Buffer, Communicator, Nccl, Reduce, UniqueId},
    random::Random,
    ranks::say,
};

/// Elements of what is not long.
const ELEMENTS: usize = 4000;
/// Elements of the long all-reduce: the fewest, which it begins with, and the most.
const LONG: (usize, usize) = (4 << 20, 32 << 20);
/// How long it is to take.
const TAKES: Duration = THRESHOLD.saturating_mul(2);

/// What the stream of a late rank computes.
struct Compute {
    truth: &'static Journal,
    rank: u32,
    operation: u32,
    time: Duration,
}

unsafe extern "C" fn compute(argument: *mut c_void) {
    // SAFETY: a box of `Member::launch`, which puts it on a stream once.
    let compute = unsafe { Box::from_raw(argument.cast::<Compute>()) };
    thread::sleep(compute.time);
    let arrived = What::Soaked {
        operation: compute.operation,
        moment: Moment::Arrived,
    };
    // What cannot be noted is missed by the judge.
    let _ = compute.truth.note(compute.rank, arrived);
}

/// An operation on a communicator, called or captured.
struct Lane<'a> {
    communicator: &'a Communicator<'a>,
    call: Call,
    launched: Launched,
}

impl<'a> Lane<'a> {
    fn new(communicator: &'a Communicator<'a>, mode: Mode, call: Call) -> Result<Self> {
        let launched = Launched::prepare(mode, communicator, || call.call(communicator))?;
        Ok(Self {
            communicator,
            call,
            launched,
        })
    }

    fn launch(&self) -> Result<()> {
        self.launched
            .launch(self.communicator, || self.call.call(self.communicator))
    }

    fn finish(&mut self) -> Result<()> {
        self.communicator.synchronise()?;
        if !self.call.is_right(1) {
            bail!("the result is wrong");
        }
        self.call.fill();
        Ok(())
    }
}

/// The operations of a rank on all its communicators.
struct Lanes<'a> {
    parts: Vec<(Slot, [Lane<'a>; 2])>,
    world: Vec<(World, Lane<'a>)>,
}

impl<'a> Lanes<'a> {
    fn new(
        rank: u32,
        world: &'a Communicator<'a>,
        beside: &'a Communicator<'a>,
        parts: &'a [(Group, Communicator<'a>)],
    ) -> Result<Self> {
        let of_part = |(group, on): &'a (Group, Communicator<'a>)| {
            let members = group.members();
            let own = members.iter().position(|member| *member == rank).unwrap_or(0);
            let ranks = (own as u32, members.len() as u32);
            let lane = |mode, operation| Lane::new(on, mode, Call::new(on, operation, ELEMENTS, ranks)?);
            let lanes = [
                lane(Mode::Eager, Operation::AllReduce)?,
                lane(Mode::Graph, Operation::AllGather)?,
            ];
            Ok((group.slot(), lanes))
        };
        let all = (rank, RANKS);
        let lane = |on: &'a Communicator<'a>, mode, operation, elements| {
            Lane::new(on, mode, Call::new(on, operation, elements, all)?)
        };
        let around = Lane::new(world, Mode::Eager, Call::exchange(world, ELEMENTS, all)?)?;
        let (eager, graph) = (Mode::Eager, Mode::Graph);
        let (reduce, scatter) = (Operation::AllReduce, Operation::ReduceScatter);
        Ok(Self {
            parts: parts.iter().map(of_part).collect::<Result<_>>()?,
            world: vec![
                (World::Eager, lane(world, eager, reduce, ELEMENTS)?),
                (World::Graph, lane(world, graph, scatter, ELEMENTS)?),
                (World::Beside, lane(beside, graph, reduce, ELEMENTS)?),
                (World::Exchange, around),
                (World::All, lane(world, eager, Operation::AllToAll, ELEMENTS)?),
                (World::Long, lane(world, eager, reduce, LONG.0)?),
            ],
        })
    }

    fn of(&mut self, step: &Step, slot: Slot) -> Option<&mut Lane<'a>> {
        match slot {
            Slot::Trio | Slot::Pair => {
                let graph = usize::from(step.parts? == Mode::Graph);
                let part = self.parts.iter_mut().find(|(part, _)| *part == slot);
                part.map(|(_, lanes)| &mut lanes[graph])
            }
            Slot::World => {
                let lane = self.world.iter_mut().find(|(world, _)| *world == step.world);
                lane.map(|(_, lane)| lane)
            }
            Slot::Agree => None,
        }
    }

    fn forget(self) -> Result<()> {
        let parts = self.parts.into_iter().flat_map(|(_, lanes)| lanes);
        let mut lanes = parts.chain(self.world.into_iter().map(|(_, lane)| lane));
        lanes.try_for_each(|lane| lane.launched.forget(lane.communicator))
    }
}

/// A rank, and what it knows of the job.
pub(in crate::faults) struct Member<'a> {
    pub(in crate::faults) rank: u32,
    pub(in crate::faults) stages: &'a Stages,
    pub(in crate::faults) seed: u64,
    /// Streams may refer to it until the process ends.
    pub(in crate::faults) truth: &'static Journal,
    /// Streams are those of the host device, and there are long operations.
    pub(in crate::faults) on_host: bool,
}

impl Member<'_> {
    /// Makes the communicators and goes from step to step until told to end.
    pub(in crate::faults) fn run(&self, nccl: &Nccl, id: UniqueId) -> Result<()> {
        nccl.set_device(self.rank)?;
        let world = nccl.communicator(RANKS, id, self.rank)?;
        let mut parts = Vec::new();
        for group in [Group::Trio, Group::Pair] {
            let part = world.split(group.members(), self.rank)?;
            parts.extend(part.map(|part| (group, part)));
        }
        world.beside(|beside| {
            let mut lanes = Lanes::new(self.rank, &world, beside, &parts)?;
            let all: Vec<_> = parts
                .iter()
                .map(|(_, part)| part)
                .chain([&world, beside])
                .collect();
            self.stages.have_graphs(&all)?;
            self.steps(&world, &mut lanes)?;
            lanes.forget()
        })?;
        let all = parts.into_iter().map(|(_, part)| part).chain([world]);
        all.into_iter().try_for_each(|communicator| {
            let (code, text) = communicator.state()?;
            if code != 0 {
                bail!("a communicator's state is {code}: {text}");
            }
            communicator.destroy()
        })?;
        self.truth.note(self.rank, What::Done)
    }

    fn note(&self, operation: u32, moment: Moment) -> Result<()> {
        self.truth.note(self.rank, What::Soaked { operation, moment })
    }

    fn steps(&self, world: &Communicator<'_>, lanes: &mut Lanes<'_>) -> Result<()> {
        let mut random = Random::new(self.seed);
        let mut agreement = Agreement {
            word: world.buffer(2)?,
            elements: LONG.0,
        };
        if self.rank == 0 {
            say("fault")?;
        }
        for number in 0.. {
            let step = Step::draw(&mut random, self.on_host);
            let took = self.step(number, &step, lanes)?;
            let took = (step.world == World::Long && step.is_prompt()).then_some(took);
            let before = agreement.elements;
            if self.agree(number, world, &mut agreement, took)? {
                break;
            }
            if agreement.elements != before
                && let Some((_, lane)) = lanes.world.iter_mut().find(|(world, _)| *world == World::Long)
            {
                let ranks = (self.rank, RANKS);
                lane.call = Call::new(world, Operation::AllReduce, agreement.elements, ranks)?;
            }
        }
        Ok(())
    }

    /// Does a step; how long the operation of all ranks has taken.
    fn step(&self, number: u32, step: &Step, lanes: &mut Lanes<'_>) -> Result<Duration> {
        let parts = [Slot::Trio, Slot::Pair];
        for slot in parts {
            self.launch(number, step, slot, lanes)?;
        }
        if step.waits {
            self.finish(number, step, lanes, &parts)?;
        }
        let called = Instant::now();
        self.launch(number, step, Slot::World, lanes)?;
        if !step.waits {
            self.finish(number, step, lanes, &parts)?;
        }
        self.finish(number, step, lanes, &[Slot::World])?;
        Ok(called.elapsed())
    }

    fn launch(&self, number: u32, step: &Step, slot: Slot, lanes: &mut Lanes<'_>) -> Result<()> {
        let Some(lane) = lanes.of(step, slot) else {
            return Ok(());
        };
        let late = step.late(self.rank, slot);
        self.enqueue(slot.number(number), late, lane.communicator, || lane.launch())
    }

    /// Launches an operation, late or not, and notes it.
    fn enqueue(
        &self,
        operation: u32,
        late: Late,
        on: &Communicator<'_>,
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if !late.computes {
            thread::sleep(late.time);
        }
        self.note(operation, Moment::Called)?;
        // Also where it computes nothing the stream may be late, of a busy machine. GPUs are not, and would call one function after
        // another, of all streams.
        if late.computes || self.on_host {
            let computing = Box::new(Compute {
                truth: self.truth,
                rank: self.rank,
                operation,
                time: if late.computes { late.time } else { Duration::ZERO },
            });
            // SAFETY: the function takes the box, and nobody else has it.
            unsafe { on.host_function(compute, Box::into_raw(computing).cast()) }?;
        } else {
            self.note(operation, Moment::Arrived)?;
        }
        launch()?;
        self.note(operation, Moment::Launched)
    }

    fn finish(&self, number: u32, step: &Step, lanes: &mut Lanes<'_>, slots: &[Slot]) -> Result<()> {
        for slot in slots {
            let Some(lane) = lanes.of(step, *slot) else {
                continue;
            };
            lane.finish()?;
            self.note(slot.number(number), Moment::Finished)?;
        }
        Ok(())
    }

    /// Whether rank 0 has been told to end, and how long the long operation is to be; all ranks hear the same. `took`: it has
    /// just been done, and nobody was late for it.
    fn agree(
        &self,
        number: u32,
        world: &Communicator<'_>,
        agreement: &mut Agreement,
        took: Option<Duration>,
    ) -> Result<bool> {
        let is_first = self.rank == 0;
        let over = is_first && self.stages.now() >= Stage::End;
        let took = took.filter(|_| is_first).unwrap_or_default();
        agreement
            .word
            .get()
            .copy_from_slice(&[f32::from(over), took.as_secs_f32()]);
        let operation = Slot::Agree.number(number);
        self.enqueue(operation, Late::default(), world, || {
            world.all_reduce(&agreement.word, Reduce::Sum)
        })?;
        world.synchronise()?;
        self.note(operation, Moment::Finished)?;
        let (over, took) = (agreement.word.get()[0] > 0.0, agreement.word.get()[1]);
        if took > 0.0 {
            let factor = (TAKES.as_secs_f32() / took).clamp(0.5, 4.0);
            let elements = (agreement.elements as f32 * factor) as usize;
            agreement.elements = elements.clamp(LONG.0, LONG.1);
        }
        Ok(over)
    }
}

/// What ranks agree on between steps.
struct Agreement {
    word: Buffer,
    /// Elements of the long operation.
    elements: usize,
}
