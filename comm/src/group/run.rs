//! What a group that has ended does: communicators are made, operations planned and launched, or only estimated.

use std::{
    collections::HashSet,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use ringsight_comm_base::error::{Error, Result, ResultCode};
use ringsight_records::{Flags, Kind, Record, State};
use smallvec::{SmallVec, smallvec};

use super::{Group, Tasks, announce, jobs::Made, wants_calls};
use crate::{
    communicator::{Background, Communicator, Lifecycle},
    device::{Device, Stream},
    launch::{self, GroupLaunch, PooledPlan},
    observe,
    op::{OpInfo, Task},
    plan::GroupMessages,
};

/// Launches a kernel that never ends as an operation of this rank ([`GroupLaunch::stuck`]), on a stream of its own.
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
    let mut launch = GroupLaunch::stuck(&comm.launch, &streams, observe::next_group())?;
    let queue = &mut comm.planner().queue;
    queue.submitted.drain();
    launch.prepare(device, queue, || comm.check_usable())?;
    let launched = launch.launch_all(device, queue, &mut SmallVec::new());
    launch.finish_after(launched, device, queue)
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
        words.extend(self.tasks.iter().map(|tasks| tasks.comm.launch.abort.clone()));
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
            let all = tasks.collectives.iter().chain(tasks.messages().tasks());
            let mut forgotten: Vec<&Task> = all.filter(|task| !launched.contains(&task.info.op)).collect();
            tasks.comm.planner().sequences.give_back(&mut forgotten);
        }
    }

    fn launch(&mut self, launched: &mut SmallVec<[OpInfo; 1]>) -> Result<()> {
        let all: usize = self.tasks.iter().map(Tasks::len).sum();
        let at_once = self.lone && self.blocking != Some(false);
        let number = self.number;
        let begin = |tasks| Member::new(tasks, at_once);
        let mut members: SmallVec<[Member<'_>; 1]> = match &mut *self.tasks {
            // Made where it stays: it has several hundred bytes.
            [tasks] => smallvec![begin(tasks)],
            all => all.iter_mut().map(begin).collect(),
        };
        for member in &mut members {
            member.plan(number)?;
        }
        Self::launch_all(&mut members, launched).map_err(|error| {
            members.iter().for_each(|member| member.launch.abandon());
            match launched.len() {
                0 => error,
                some => error.within(&format!(
                    "{some} of the group's {all} operations were launched, then"
                )),
            }
        })
    }

    fn launch_all(members: &mut [Member<'_>], launched: &mut SmallVec<[OpInfo; 1]>) -> Result<()> {
        // The same in one go: what follows, where there is nobody to take turns with.
        if let [Member { comm, launch, .. }] = members {
            return comm.on_device(|device| {
                let queue = &mut comm.planner().queue;
                launch.prepare(device, queue, || comm.check_usable())?;
                let all = launch.launch_all(device, queue, launched);
                launch.finish_after(all, device, queue)
            });
        }
        type Step<'a> = &'a mut dyn FnMut(&mut Member<'_>, &dyn Device) -> Result<()>;
        let each = |members: &mut [Member<'_>], step: Step<'_>| {
            members
                .iter_mut()
                .try_for_each(|member| member.comm.on_device(|device| step(member, device)))
        };
        each(members, &mut |Member { comm, launch, .. }, device| {
            launch.prepare(device, &mut comm.planner().queue, || comm.check_usable())
        })?;
        // All plans of a communicator before those of the next one, since ranks may have cut their messages differently,
        // and a plan then waits for a later one of its peer. But several ranks of one communicator in this process go
        // round by round: none runs ahead of the others.
        let mut by_turns = |members: &mut [Member<'_>]| {
            for ranks in members.chunk_by_mut(|one, next| one.comm.id == next.comm.id) {
                let mut more = true;
                while mem::take(&mut more) {
                    each(ranks, &mut |Member { comm, launch, .. }, device| {
                        more |= launch.launch_next(device, &mut comm.planner().queue, launched)?;
                        Ok(())
                    })?;
                }
            }
            Ok(())
        };
        let mut result = by_turns(members);
        for Member { comm, launch, .. } in members {
            result = comm.on_device(|device| launch.finish_after(result, device, &mut comm.planner().queue));
        }
        result
    }
}

/// One communicator of a group that is launched.
struct Member<'a> {
    comm: &'a Arc<Communicator>,
    collectives: &'a [Task],
    messages: &'a GroupMessages,
    pooled: Option<PooledPlan>,
    launch: GroupLaunch<'a>,
}

impl<'a> Member<'a> {
    /// What is asked of one communicator, not planned yet.
    fn new(tasks: &'a mut Tasks, at_once: bool) -> Self {
        let pooled = tasks.pooled.take();
        let tasks = &*tasks;
        Self {
            comm: &tasks.comm,
            collectives: &tasks.collectives,
            messages: tasks.messages(),
            pooled,
            launch: GroupLaunch::new(&tasks.comm.launch, &tasks.streams, tasks.capture, at_once),
        }
    }

    /// Plans it as part of a group.
    fn plan(&mut self, group: u32) -> Result<()> {
        self.launch
            .plan((self.collectives, self.messages), group, self.pooled.take())
            .map_err(|error| self.comm.reason(error))
    }
}

impl Tasks {
    /// Its messages, and what is made of messages.
    fn messages(&self) -> &GroupMessages {
        self.messages.as_deref().unwrap_or(GroupMessages::none())
    }

    /// Operations.
    fn len(&self) -> usize {
        self.collectives.len() + self.messages().tasks().len()
    }

    /// How long they would take.
    fn estimate(&self) -> Result<Duration> {
        launch::estimate(
            &self.comm.launch,
            &self.collectives,
            self.messages(),
            self.capture.is_some(),
        )
    }
}
