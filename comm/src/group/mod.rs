//! Group semantics: what is called between `ncclGroupStart` and `ncclGroupEnd` is done together at the end.
//!
//! A lone call is a group of its own, of depth 1. Groups belong to the calling thread.

mod jobs;

use std::{
    cell::RefCell,
    collections::HashSet,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use ringsight_records::{Flags, Function, Kind, Record, State, description::Time, pages::CAPTURED};

use crate::{
    communicator::{Background, Communicator, Lifecycle},
    device::{Capture, Device, Stream, device},
    error::{Error, Result, ResultCode},
    launch::Launching,
    observe,
    plan::{self, Exchange, OpInfo, Request, Task},
};

pub use jobs::{Job, Made, submit};

/// What one group asks of one communicator.
struct Tasks {
    comm: Arc<Communicator>,
    collectives: Vec<Task>,
    exchange: Exchange,
    streams: Vec<Stream>,
    /// Of its first operation; all others must be in the same.
    capture: Option<Capture>,
}

/// The calling thread's group.
#[derive(Default)]
struct Group {
    /// 0 outside of groups.
    depth: u32,
    number: u32,
    error: Option<Error>,
    tasks: Vec<Tasks>,
    jobs: jobs::Jobs,
    /// Whether its communicators are blocking; `None` until the first one comes.
    blocking: Option<bool>,
    captured: bool,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Depth of groups that the caller opened on this thread.
#[must_use]
pub fn depth() -> u32 {
    GROUP.with_borrow(|group| group.depth)
}

fn emit_api(number: u32, depth: u32, state: State, time_ns: u64, captured: bool) {
    if observe::wants(Kind::GroupApi) {
        let record = Record {
            op: number,
            value: u64::from(depth),
            pid: observe::pid(),
            ..Record::new(Kind::GroupApi, state, time_ns)
        };
        observe::emit(&record.with_flags(Flags::GRAPH.when(captured)));
    }
}

/// Depth that an explicit group's own records carry: the implicit one plus the caller's outermost.
const EXPLICIT: u32 = 2;

/// Opens a group, or one more level of it.
///
/// # Errors
/// More levels than can be counted.
pub fn start() -> Result<()> {
    let start = observe::now_ns();
    GROUP.with_borrow_mut(|group| {
        if group.depth == u32::MAX - 1 {
            return Err(Error::usage("ncclGroupStart: too many levels"));
        }
        group.depth += 1;
        if group.depth == 1 {
            group.number = observe::next_group();
            emit_api(group.number, EXPLICIT, State::START, start, false);
            emit_api(
                group.number,
                EXPLICIT,
                State::GROUP_START_API_STOP,
                observe::now_ns(),
                false,
            );
        }
        Ok(())
    })
}

/// Closes a level; the outermost one does what the group collected.
///
/// # Errors
/// No open group; the first error of the group's calls (then nothing is launched); what planning or launching failed with.
pub fn end() -> Result<()> {
    close(Group::complete).map(drop)
}

/// Closes a level; the outermost one makes the group's communicators, and forgets its operations instead of launching
/// them. Returns what `check`, called before anything is made, returned, and how long the operations would take
/// ([`plan::estimate`]); `None` for an inner level. With non-blocking communicators the result of making them may be
/// still to come: the third value is `ncclInProgress` then.
///
/// # Errors
/// As [`end`], and what `check` fails with; the operations are forgotten all the same.
pub fn simulate_end<T>(check: impl FnOnce() -> Result<T>) -> Result<Option<(T, Duration, Result<()>)>> {
    close(|group, _| group.simulate(check))
}

/// Closes a level and hands the outermost one's group to `complete`.
fn close<T>(complete: impl FnOnce(Group, &mut Vec<OpInfo>) -> Result<T>) -> Result<Option<T>> {
    let start = observe::now_ns();
    let group = GROUP.with_borrow_mut(|group| {
        if group.depth == 0 {
            return Err(Error::usage("ncclGroupEnd without ncclGroupStart on this thread"));
        }
        group.depth -= 1;
        Ok((group.depth == 0).then(|| mem::take(group)))
    })?;
    let Some(group) = group else { return Ok(None) };
    let (number, captured) = (group.number, group.captured);
    emit_api(number, EXPLICIT, State::GROUP_END_API_START, start, captured);
    let mut launched = Vec::new();
    let result = complete(group, &mut launched);
    emit_api(number, EXPLICIT, State::STOP, observe::now_ns(), captured);
    announce(&launched);
    result.map(Some)
}

/// Makes it known that operations have been handed to the device: last of all, so that their descriptions are complete.
fn announce(launched: &[OpInfo]) {
    for info in launched {
        observe::emit(&info.record(Kind::OpLaunched, State::START, observe::now_ns(), 0));
    }
}

/// Notes an error of a call inside a group, which then fails as a whole.
pub fn note_error(error: &Error) {
    if error.code == ResultCode::InProgress {
        return;
    }
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 {
            group.error.get_or_insert_with(|| error.clone());
        }
    });
}

/// Enqueues one operation: launched at once outside of a group, at its end inside. `start_ns` is when the call began.
///
/// # Errors
/// A stream that is none, or in another capture than the rest of the group; what planning or launching failed with.
pub fn enqueue(comm: &Arc<Communicator>, request: Request, start_ns: u64) -> Result<()> {
    // Nothing to move, nobody to wait for: as in NCCL, empty operations are dropped.
    if request.count == 0 {
        comm.check_usable()?;
        return device_of(comm, |device| Ok(device.capture_of(request.stream).map(drop)?));
    }
    let depth = depth();
    if depth > 0 {
        return GROUP.with_borrow_mut(|group| {
            let info = group.push(comm, request, start_ns)?;
            let end = observe::now_ns();
            if let Some(task) = group.last_task(comm, &info) {
                task.api_end_ns = end;
            }
            info.emit(info.api_kind(), State::STOP, end);
            Ok(())
        });
    }
    let mut group = Group {
        number: observe::next_group(),
        ..Group::default()
    };
    let info = group.push(comm, request, start_ns)?;
    emit_api(group.number, 1, State::START, start_ns, false);
    let (number, captured) = (group.number, group.captured);
    if group.blocking == Some(false)
        && let Some(task) = group.last_task(comm, &info)
    {
        // The thread that launches it writes its description.
        task.api_end_ns = observe::now_ns();
    }
    let mut launched = Vec::new();
    let result = group.complete(&mut launched);
    let end = observe::now_ns();
    observe::set_time(info.op, Time::ApiEnd, end);
    info.emit(info.api_kind(), State::STOP, end);
    emit_api(number, 1, State::STOP, end, captured);
    announce(&launched);
    result
}

/// Calls `what` with the communicator's device number current, as kernels and default streams depend on it.
fn device_of<T>(comm: &Communicator, what: impl FnOnce(&dyn Device) -> Result<T>) -> Result<T> {
    let device = &**device()?;
    let before = device.mark()?;
    device.set_current(comm.device)?;
    let result = what(device);
    device.restore(before)?;
    result
}

/// Launches a kernel that never ends as an operation of this rank ([`plan::stuck`]), on a stream of its own.
///
/// # Errors
/// The communicator cannot be used, or the system.
pub(crate) fn launch_stuck(comm: &Arc<Communicator>) -> Result<()> {
    comm.check_usable()?;
    device_of(comm, |device| {
        let stream = device.stream_create()?;
        let streams = [stream];
        let mut launching = Launching {
            comm: comm.clone(),
            streams: &streams,
            capture: None,
            plans: vec![plan::stuck(comm, stream, observe::next_group())?],
            next: 0,
        };
        let mut planner = comm.planner();
        planner.plans.drain();
        launching.prepare(device, &mut planner)?;
        launching.launch(device, &mut planner, &mut Vec::new())?;
        launching.finish(device, &mut planner)?;
        // It ends with its work.
        Ok(device.stream_destroy(stream)?)
    })
}

impl Group {
    fn push(&mut self, comm: &Arc<Communicator>, request: Request, start_ns: u64) -> Result<OpInfo> {
        comm.check_usable()?;
        self.admit(comm.life())?;
        let capture = device_of(comm, |device| Ok(device.capture_of(request.stream)?))?;
        let index = self
            .tasks
            .iter()
            .position(|tasks| Arc::ptr_eq(&tasks.comm, comm))
            .unwrap_or_else(|| {
                self.tasks.push(Tasks {
                    comm: comm.clone(),
                    collectives: Vec::new(),
                    exchange: Exchange::default(),
                    streams: Vec::new(),
                    capture,
                });
                self.tasks.len() - 1
            });
        let tasks = &mut self.tasks[index];
        if tasks.capture != capture {
            return Err(Error::usage(
                "stream: all operations of a group on one communicator must be in the same capture, or in none",
            ));
        }
        if !tasks.streams.contains(&request.stream) {
            tasks.streams.push(request.stream);
        }
        self.captured |= capture.is_some();
        let graph = capture.map_or(0, |capture| capture.id);
        let peer = request.peer.unwrap_or(0);
        let (op, (seq, node)) = {
            let mut planner = comm.planner();
            let op = if graph == 0 {
                observe::next_op()
            } else {
                observe::next_captured_op()
            };
            if op & CAPTURED != 0 {
                planner.plans.note_captured_op(graph, op);
            }
            (op, planner.sequences.next(request.function, peer, graph))
        };
        let p2p = request.function.is_p2p();
        let info = OpInfo {
            op,
            comm: comm.id,
            seq,
            bytes: request.bytes(comm.ranks),
            rank: comm.rank,
            peer: request.peer.map_or(-1, |peer| peer as i32),
            flags: Flags::GRAPH
                .when(graph != 0)
                .with(Flags::P2P.when(p2p))
                .with(Flags::SEND.when(request.function == Function::Send))
                .with(Flags::REGISTERED.when(comm.registrations().cover(request.buffers(comm.ranks)))),
        };
        info.emit(info.api_kind(), State::START, start_ns);
        crate::log::operation(&request, &info, comm.ranks);
        let task = Task {
            request,
            info,
            node,
            graph,
            api_start_ns: start_ns,
            api_end_ns: 0,
            group_depth: self.depth + 1,
            tid: thread_id(),
        };
        if Exchange::serves(task.request.function) {
            tasks.exchange.push(task, comm.rank, comm.ranks);
        } else {
            tasks.collectives.push(task);
        }
        Ok(info)
    }

    /// The task just pushed.
    fn last_task(&mut self, comm: &Arc<Communicator>, info: &OpInfo) -> Option<&mut Task> {
        let tasks = self
            .tasks
            .iter_mut()
            .find(|tasks| Arc::ptr_eq(&tasks.comm, comm))?;
        [tasks.exchange.last(), tasks.collectives.last_mut()]
            .into_iter()
            .flatten()
            .find(|task| task.info.op == info.op)
    }

    /// Takes part in the group.
    fn admit(&mut self, life: &Lifecycle) -> Result<()> {
        if *self.blocking.get_or_insert(life.blocking()) != life.blocking() {
            return Err(Error::argument(
                "comm: blocking and non-blocking communicators cannot be in one group: end the group between them",
            ));
        }
        Ok(())
    }

    /// Does what was collected; lists the operations that were launched, also where others could not be. With
    /// non-blocking communicators a thread does it, and their state tells of its end.
    fn complete(mut self, launched: &mut Vec<OpInfo>) -> Result<()> {
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
        let waiting = lives.clone();
        let started = work.start(move || {
            let mut launched = Vec::new();
            let result = catch_unwind(AssertUnwindSafe(|| {
                ready.run().and_then(|()| self.run(&mut launched))
            }))
            .unwrap_or_else(|_| Err(Error::internal("a group's thread panicked")));
            announce(&launched);
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
    fn run(mut self, launched: &mut Vec<OpInfo>) -> Result<()> {
        if self.tasks.is_empty() {
            return Ok(());
        }
        let record = Record {
            op: self.number,
            pid: observe::pid(),
            ..Record::new(Kind::Group, State::START, observe::now_ns())
        }
        .with_flags(Flags::GRAPH.when(self.captured));
        if observe::wants(Kind::Group) {
            observe::emit(&record);
        }
        // In an order that all ranks come to, whichever communicator each of them used first: on a stream that several
        // communicators share, ranks must not wait for each other crosswise.
        self.tasks.sort_by_key(|tasks| tasks.comm.id);
        let result = self.launch(launched);
        if observe::wants(Kind::Group) {
            observe::emit(&Record {
                state: State::STOP,
                time_ns: observe::now_ns(),
                ..record
            });
        }
        if result.is_err() {
            self.forget(launched);
        }
        result
    }

    /// Makes the communicators, and says how long the operations would take.
    fn simulate<T>(mut self, check: impl FnOnce() -> Result<T>) -> Result<(T, Duration, Result<()>)> {
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
            self.complete(&mut Vec::new())
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
            let all = tasks.collectives.iter().chain(tasks.exchange.tasks());
            let mut forgotten: Vec<&Task> = all.filter(|task| !launched.contains(&task.info.op)).collect();
            tasks.comm.planner().sequences.give_back(&mut forgotten);
        }
    }

    fn launch(&self, launched: &mut Vec<OpInfo>) -> Result<()> {
        let mut launchings = Vec::with_capacity(self.tasks.len());
        for tasks in &self.tasks {
            let comm = tasks.comm.clone();
            comm.planner().plans.drain();
            let plans = plan::build(
                &comm,
                &tasks.collectives,
                &tasks.exchange,
                tasks.capture.is_some(),
                self.number,
            )
            .map_err(|error| comm.reason(error))?;
            launchings.push(Launching {
                comm,
                streams: &tasks.streams,
                capture: tasks.capture,
                plans,
                next: 0,
            });
        }
        Self::launch_all(&mut launchings, launched).map_err(|error| {
            launchings.iter().for_each(Launching::abandon);
            let all: usize = self.tasks.iter().map(Tasks::len).sum();
            match launched.len() {
                0 => error,
                some => error.within(&format!(
                    "{some} of the group's {all} operations were launched, then"
                )),
            }
        })
    }

    fn launch_all(launchings: &mut [Launching<'_>], launched: &mut Vec<OpInfo>) -> Result<()> {
        type Step<'a> = &'a mut dyn FnMut(&mut Launching<'_>, &dyn Device) -> Result<()>;
        let each = |launchings: &mut [Launching<'_>], step: Step<'_>| {
            launchings.iter_mut().try_for_each(|launching| {
                let comm = launching.comm.clone();
                device_of(&comm, |device| step(launching, device))
            })
        };
        each(launchings, &mut |launching, device| {
            launching.prepare(device, &mut launching.comm.planner())
        })?;
        // All plans of a communicator before those of the next one, since ranks may have cut their messages differently,
        // and a plan then waits for a later one of its peer. But several ranks of one communicator in this process go
        // round by round: none runs ahead of the others.
        for ranks in launchings.chunk_by_mut(|one, next| one.comm.id == next.comm.id) {
            let mut more = true;
            while mem::take(&mut more) {
                each(ranks, &mut |launching, device| {
                    let comm = launching.comm.clone();
                    more |= launching.launch(device, &mut comm.planner(), launched)?;
                    Ok(())
                })?;
            }
        }
        each(launchings, &mut |launching, device| {
            launching.finish(device, &mut launching.comm.planner())
        })
    }
}

impl Tasks {
    /// Operations.
    fn len(&self) -> usize {
        self.collectives.len() + self.exchange.tasks().len()
    }

    /// How long they would take.
    fn estimate(&self) -> Result<Duration> {
        plan::estimate(
            &self.comm,
            &self.collectives,
            &self.exchange,
            self.capture.is_some(),
        )
    }
}

/// The calling thread's id, asked once a thread.
fn thread_id() -> u32 {
    thread_local! {
        // SAFETY: gettid cannot fail.
        static ID: u32 = unsafe { libc::gettid() } as u32;
    }
    ID.with(|id| *id)
}
