//! What a group that has ended does: communicators are made, operations planned and launched, or only estimated.

use std::{
    collections::HashSet,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use ringsight_records::{Flags, Kind, Record, State};
use smallvec::{SmallVec, smallvec};

use super::{Group, Tasks, announce, jobs::Made, wants_calls};
use crate::{
    communicator::{Background, Communicator, Lifecycle},
    device::{Device, End, Stream},
    error::{Error, Result, ResultCode},
    launch::Launching,
    observe,
    op::{OpInfo, Task},
    plan::{self, Exchange, Plans},
};

/// Launches a kernel that never ends as an operation of this rank ([`plan::stuck`]), on a stream of its own.
///
/// # Errors
/// The communicator cannot be used, or the system.
pub(crate) fn launch_stuck(comm: &Arc<Communicator>) -> Result<()> {
    comm.check_usable()?;
    comm.on_device(|device| {
        let stream = device.stream_create()?;
        let launched = launch_stuck_on(comm, device, stream);
        // It ends with its work, or has none.
        let destroyed = device.stream_destroy(stream);
        launched?;
        Ok(destroyed?)
    })
}

fn launch_stuck_on(comm: &Arc<Communicator>, device: &dyn Device, stream: Stream) -> Result<()> {
    let streams = [stream];
    let mut launching = Launching {
        comm,
        streams: &streams,
        capture: None,
        at_once: false,
        plans: plan::stuck(comm, stream, observe::next_group())?,
        next: 0,
        end: End::Marked,
    };
    let mut planner = comm.planner();
    planner.plans.drain();
    launching.prepare(device, &mut planner)?;
    launching.launch(device, &mut planner, &mut SmallVec::new())?;
    launching.finish(device, &mut planner)
}

impl Group {
    /// Does what was collected; lists the operations that were launched, also where others could not be. With
    /// non-blocking communicators a thread does it, and their state tells of its end.
    pub(super) fn complete(&mut self, launched: &mut SmallVec<[OpInfo; 1]>) -> Result<()> {
        if let Some(error) = self.error.take() {
            mem::take(&mut self.jobs).withdraw();
            self.forget(&[]);
            return Err(error);
        }
        if self.blocking != Some(false) {
            let made = mem::take(&mut self.jobs).run();
            if made.is_err() {
                self.forget(&[]);
            }
            return made.and_then(|()| self.run(launched));
        }
        let mut lives: Vec<Arc<Lifecycle>> = self.jobs.lives().cloned().collect();
        lives.extend(self.tasks.iter().map(|tasks| tasks.comm.life().clone()));
        lives.sort_by_key(Arc::as_ptr);
        lives.dedup_by(|one, other| Arc::ptr_eq(one, other));
        let mut words = self.jobs.words();
        words.extend(self.tasks.iter().map(|tasks| tasks.comm.abort.clone()));
        let work = Background::new(words);
        for life in &lives {
            life.begin(&work);
        }
        let (ready, made) = mem::take(&mut self.jobs).split();
        let mut group = mem::take(self);
        let waiting = lives.clone();
        let started = work.start(move || {
            let mut launched = SmallVec::new();
            let result = catch_unwind(AssertUnwindSafe(|| {
                ready.run().and_then(|()| group.run(&mut launched))
            }))
            .unwrap_or_else(|_| Err(Error::internal("a group's thread panicked")));
            announce(&launched, observe::now_ns());
            for life in &waiting {
                life.finish(&result);
            }
        });
        if let Err(error) = started {
            let result = Err(error.clone());
            lives.iter().for_each(|life| life.finish(&result));
            made.into_iter().for_each(Made::withdraw);
            return Err(error);
        }
        Err(Error::in_progress())
    }

    /// Launches the operations and lists them, also where others could not be launched: those have not happened.
    fn run(&mut self, launched: &mut SmallVec<[OpInfo; 1]>) -> Result<()> {
        if self.tasks.is_empty() {
            return Ok(());
        }
        self.emit(State::START);
        // In an order that all ranks come to, whichever communicator each of them used first: on a stream that several
        // communicators share, ranks must not wait for each other crosswise.
        self.tasks.sort_by_key(|tasks| tasks.comm.id);
        let result = self.launch(launched);
        self.emit(State::STOP);
        if result.is_err() {
            self.forget(launched);
        }
        result
    }

    /// Says that it begins to be launched, or that it is.
    fn emit(&self, state: State) {
        if observe::wants(Kind::Group) && (!self.lone || wants_calls()) {
            let record = Record {
                op: self.number,
                pid: observe::pid(),
                ..Record::new(Kind::Group, state, observe::now_ns())
            };
            observe::emit(&record.with_flags(Flags::GRAPH.when(self.captured)));
        }
    }

    /// Makes the communicators, and says how long the operations would take.
    pub(super) fn simulate<T>(
        mut self,
        check: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Duration, Result<()>)> {
        let operations = Self {
            tasks: mem::take(&mut self.tasks),
            ..Self::default()
        };
        let checked = match self.error.take() {
            Some(error) => Err(error),
            None => check(),
        };
        self.error = checked.as_ref().err().cloned();
        let made = if self.error.is_some() || !self.jobs.is_empty() {
            self.complete(&mut SmallVec::new())
        } else {
            Ok(())
        };
        // Communicators work side by side.
        let times: Result<Vec<Duration>> = operations.tasks.iter().map(Tasks::estimate).collect();
        operations.forget(&[]);
        match made {
            Err(error) if error.code != ResultCode::InProgress => Err(error),
            made => Ok((checked?, times?.into_iter().max().unwrap_or_default(), made)),
        }
    }

    /// Gives back the sequence numbers of all operations but those in `launched`: what was not launched has not
    /// happened, and when it is called again, it must be the same operation as on the other ranks.
    fn forget(&self, launched: &[OpInfo]) {
        let launched: HashSet<u32> = launched.iter().map(|info| info.op).collect();
        for tasks in &self.tasks {
            let all = tasks.collectives.iter().chain(tasks.exchange().tasks());
            let mut forgotten: Vec<&Task> = all.filter(|task| !launched.contains(&task.info.op)).collect();
            tasks.comm.planner().sequences.give_back(&mut forgotten);
        }
    }

    fn launch(&mut self, launched: &mut SmallVec<[OpInfo; 1]>) -> Result<()> {
        let all: usize = self.tasks.iter().map(Tasks::len).sum();
        let at_once = self.lone && self.blocking != Some(false);
        let number = self.number;
        let begin = |tasks| Launching::of(tasks, number, at_once);
        let mut launchings: SmallVec<[Launching<'_>; 1]> = match &mut *self.tasks {
            // Made where it stays: it has a thousand bytes.
            [tasks] => smallvec![begin(tasks)],
            all => all.iter_mut().map(begin).collect(),
        };
        for launching in &mut launchings {
            let comm = launching.comm;
            launching.plans.build().map_err(|error| comm.reason(error))?;
        }
        Self::launch_all(&mut launchings, launched).map_err(|error| {
            launchings.iter().for_each(Launching::abandon);
            match launched.len() {
                0 => error,
                some => error.within(&format!(
                    "{some} of the group's {all} operations were launched, then"
                )),
            }
        })
    }

    fn launch_all(launchings: &mut [Launching<'_>], launched: &mut SmallVec<[OpInfo; 1]>) -> Result<()> {
        // The same in one go: what follows, where there is nobody to take turns with.
        if let [launching] = launchings {
            let comm = launching.comm;
            return comm.on_device(|device| {
                let mut planner = comm.planner();
                launching.prepare(device, &mut planner)?;
                let all = launching.launch_all(device, &mut planner, launched);
                launching.finish_after(all, device, &mut planner)
            });
        }
        type Step<'a> = &'a mut dyn FnMut(&mut Launching<'_>, &dyn Device) -> Result<()>;
        let each = |launchings: &mut [Launching<'_>], step: Step<'_>| {
            launchings
                .iter_mut()
                .try_for_each(|launching| launching.comm.on_device(|device| step(launching, device)))
        };
        each(launchings, &mut |launching, device| {
            launching.prepare(device, &mut launching.comm.planner())
        })?;
        // All plans of a communicator before those of the next one, since ranks may have cut their messages differently,
        // and a plan then waits for a later one of its peer. But several ranks of one communicator in this process go
        // round by round: none runs ahead of the others.
        let mut by_turns = |launchings: &mut [Launching<'_>]| {
            for ranks in launchings.chunk_by_mut(|one, next| one.comm.id == next.comm.id) {
                let mut more = true;
                while mem::take(&mut more) {
                    each(ranks, &mut |launching, device| {
                        let mut planner = launching.comm.planner();
                        more |= launching.launch(device, &mut planner, launched)?;
                        Ok(())
                    })?;
                }
            }
            Ok(())
        };
        let mut result = by_turns(launchings);
        for launching in launchings {
            let comm = launching.comm;
            result = comm.on_device(|device| launching.finish_after(result, device, &mut comm.planner()));
        }
        result
    }
}

impl<'a> Launching<'a> {
    /// What is asked of one communicator, not planned yet.
    fn of(tasks: &'a mut Tasks, group: u32, at_once: bool) -> Self {
        let spare = tasks.spare.take();
        let tasks = &*tasks;
        let persistent = tasks.capture.is_some();
        Self {
            comm: &tasks.comm,
            streams: &tasks.streams,
            capture: tasks.capture,
            at_once,
            plans: Plans::new(
                &tasks.comm,
                (&tasks.collectives, tasks.exchange()),
                persistent,
                Some(group),
                spare,
            ),
            next: 0,
            end: End::Marked,
        }
    }
}

impl Tasks {
    /// What goes by messages.
    fn exchange(&self) -> &Exchange {
        self.exchange.as_deref().unwrap_or(Exchange::none())
    }

    /// Operations.
    fn len(&self) -> usize {
        self.collectives.len() + self.exchange().tasks().len()
    }

    /// How long they would take.
    fn estimate(&self) -> Result<Duration> {
        plan::estimate(
            &self.comm,
            &self.collectives,
            self.exchange(),
            self.capture.is_some(),
        )
    }
}
