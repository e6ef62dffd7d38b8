//! Group semantics: what is called between `ncclGroupStart` and `ncclGroupEnd` is done together at the end.
//!
//! A lone call is a group of its own, of depth 1. Groups belong to the calling thread.

mod jobs;
mod run;

use std::{
    cell::RefCell,
    mem::{self, ManuallyDrop},
    sync::Arc,
    time::Duration,
};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    fork, log,
};
use ringsight_records::{Flags, Function, Kind, Record, ReduceOp, State, description::Time, pages::CAPTURED};
use smallvec::SmallVec;

use crate::{
    communicator::{Communicator, Lifecycle},
    device::{Capture, Stream},
    launch::PooledPlan,
    observe,
    op::{OpInfo, Request, Task, api_name},
    plan::{self, GroupMessages},
};

pub(crate) use jobs::{Job, Made, submit};
pub(crate) use run::launch_stuck;

/// What one group asks of one communicator.
struct Tasks {
    comm: Arc<Communicator>,
    collectives: SmallVec<[Task; 1]>,
    /// In a box: most groups have none.
    messages: Option<Box<GroupMessages>>,
    streams: SmallVec<[Stream; 1]>,
    /// Of its first operation; all others must be in the same.
    capture: Option<Capture>,
    /// For its first plan, if there was one when operations were called.
    pooled: Option<PooledPlan>,
}

/// The calling thread's group.
struct Group {
    /// 0 outside of groups.
    depth: u32,
    /// Of one call outside of groups.
    lone: bool,
    /// When it was opened; see [`fork::generation`].
    fork: u32,
    number: u32,
    error: Option<Error>,
    tasks: SmallVec<[Tasks; 1]>,
    jobs: jobs::Jobs,
    /// Whether its communicators are blocking; `None` until the first one comes.
    blocking: Option<bool>,
    captured: bool,
}

thread_local! {
    /// Without a destructor: such a variable is there as long as its thread, also for calls that destructors of others
    /// make, and of static objects.
    static GROUP: ManuallyDrop<RefCell<Group>> = const { ManuallyDrop::new(RefCell::new(Group::NONE)) };
    static AT_THE_END: AtTheEnd = const { AtTheEnd };
}

/// Lets go of a group that its thread never closes.
struct AtTheEnd;

impl Drop for AtTheEnd {
    fn drop(&mut self) {
        abandon(mine(mem::take));
    }
}

/// Calls `body` with the calling thread's group, which `body` must not ask for again.
fn mine<T>(body: impl FnOnce(&mut Group) -> T) -> T {
    GROUP.with(|group| body(&mut group.borrow_mut()))
}

/// Drops a group, but not one that a forked child has of its parent: what that holds is the parent's.
fn abandon(group: Group) {
    if group.depth > 0 && group.fork != fork::generation() {
        mem::forget(group);
    }
}

/// Depth of groups that the caller opened on this thread.
#[must_use]
pub(crate) fn depth() -> u32 {
    mine(|group| group.depth)
}

fn emit_api(number: u32, depth: u32, state: State, time_ns: u64, captured: bool) {
    if observe::wants(Kind::GroupApi) && (depth >= EXPLICIT || wants_calls()) {
        let record = Record {
            op: number,
            value: u64::from(depth),
            pid: observe::pid(),
            ..Record::new(Kind::GroupApi, state, time_ns)
        };
        observe::emit(&record.with_flags(Flags::GRAPH.when(captured)));
    }
}

/// Whether calls are to be told of, and with them the groups around lone ones ([`Kind::DESCRIBED`]).
fn wants_calls() -> bool {
    observe::wants(Kind::CollApi) || observe::wants(Kind::P2pApi)
}

/// Depth that an explicit group's own records carry: the implicit one plus the caller's outermost.
const EXPLICIT: u32 = 2;

/// Opens a group, or one more level of it.
///
/// # Errors
/// More levels than can be counted.
pub(crate) fn start() -> Result<()> {
    let start = observe::now_ns();
    mine(|group| {
        if group.depth == u32::MAX - 1 {
            return Err(Error::usage("ncclGroupStart: too many levels"));
        }
        group.depth += 1;
        if group.depth == 1 {
            group.fork = fork::generation();
            // Where variables are being destroyed already, a group that is never closed is never dropped.
            let _ = AT_THE_END.try_with(|_| ());
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
pub(crate) fn end() -> Result<()> {
    close(|mut group, launched| group.complete(launched)).map(drop)
}

/// Closes a level; the outermost one makes the group's communicators, and forgets its operations instead of launching
/// them. Returns what `check`, called before anything is made, returned, and how long the operations would take
/// ([`crate::launch::estimate`]); `None` for an inner level. With non-blocking communicators the result of making them may be
/// still to come: the third value is `ncclInProgress` then.
///
/// # Errors
/// As [`end`], and what `check` fails with; the operations are forgotten all the same.
pub(crate) fn simulate_end<T>(
    check: impl FnOnce() -> Result<T>,
) -> Result<Option<(T, Duration, Result<()>)>> {
    close(|group, _| group.simulate(check))
}

/// Closes a level and hands the outermost one's group to `complete`.
fn close<T>(complete: impl FnOnce(Group, &mut SmallVec<[OpInfo; 1]>) -> Result<T>) -> Result<Option<T>> {
    let start = observe::now_ns();
    let group = mine(|group| {
        if group.depth == 0 {
            return Err(Error::usage("ncclGroupEnd without ncclGroupStart on this thread"));
        }
        if group.fork != fork::generation() {
            abandon(mem::take(group));
            return Err(Error::usage(
                "this group was opened by the parent of this forked process: open one after the fork",
            ));
        }
        group.depth -= 1;
        Ok((group.depth == 0).then(|| mem::take(group)))
    })?;
    let Some(group) = group else { return Ok(None) };
    let (number, captured) = (group.number, group.captured);
    emit_api(number, EXPLICIT, State::GROUP_END_API_START, start, captured);
    let mut launched = SmallVec::new();
    let result = complete(group, &mut launched);
    let end = observe::now_ns();
    emit_api(number, EXPLICIT, State::STOP, end, captured);
    announce(&launched, end);
    result.map(Some)
}

/// Makes it known that operations have been handed to the device: last of all, so that their descriptions are complete.
fn announce(launched: &[OpInfo], now: u64) {
    for info in launched {
        observe::emit(&info.record(Kind::OpLaunched, State::START, now, 0));
    }
}

/// Notes an error of a call inside a group, which then fails as a whole.
pub(crate) fn note_error(error: &Error) {
    if error.code == ResultCode::InProgress {
        return;
    }
    mine(|group| {
        if group.depth > 0 {
            group.error.get_or_insert_with(|| error.clone());
        }
    });
}

/// Enqueues one operation: launched at once outside of a group, at its end inside. `start_ns` is when the call began.
///
/// # Errors
/// A stream that is none, or in another capture than the rest of the group; what planning or launching failed with.
pub(crate) fn enqueue(comm: Arc<Communicator>, request: Request, start_ns: u64) -> Result<()> {
    // Nothing to move, nobody to wait for: as in NCCL, empty operations are dropped.
    if request.count == 0 {
        comm.check_usable()?;
        return comm.on_device(|device| Ok(device.capture_of(request.stream).map(drop)?));
    }
    let depth = depth();
    if depth > 0 {
        return mine(|group| {
            let info = group.push(comm, request, start_ns)?;
            let end = observe::now_ns();
            if let Some(task) = group.last_task(&info) {
                task.api_end_ns = end;
            }
            info.emit(info.api_kind(), State::STOP, end);
            Ok(())
        });
    }
    let mut group = Group::new(true, observe::next_group());
    let info = group.push(comm, request, start_ns)?;
    emit_api(group.number, 1, State::START, start_ns, false);
    let (number, captured) = (group.number, group.captured);
    if group.blocking == Some(false)
        && let Some(task) = group.last_task(&info)
    {
        // The thread that launches it writes its description.
        task.api_end_ns = observe::now_ns();
    }
    let mut launched = SmallVec::new();
    let result = group.complete(&mut launched);
    let end = observe::now_ns();
    observe::set_times(info.op, [(Time::ApiEnd, end)]);
    info.emit(info.api_kind(), State::STOP, end);
    emit_api(number, 1, State::STOP, end, captured);
    announce(&launched, end);
    result
}

impl Default for Group {
    fn default() -> Self {
        Self::NONE
    }
}

impl Group {
    /// None is open.
    const NONE: Self = Self::new(false, 0);

    const fn new(lone: bool, number: u32) -> Self {
        Self {
            depth: 0,
            lone,
            fork: 0,
            number,
            error: None,
            tasks: SmallVec::new_const(),
            jobs: jobs::Jobs::NONE,
            blocking: None,
            captured: false,
        }
    }

    fn push(&mut self, comm: Arc<Communicator>, mut request: Request, start_ns: u64) -> Result<OpInfo> {
        comm.check_usable()?;
        self.admit(comm.life())?;
        let capture = comm.on_device(|device| {
            let capture = device.capture_of(request.stream)?;
            comm.buffers.check_stream(device, comm.device, request.stream)?;
            comm.buffers
                .check(device, comm.device, &request, capture.is_some())?;
            Ok(capture)
        })?;
        // What is captured runs later than what is not, which other ranks of this group may wait for.
        let otherwise = |tasks: &Tasks| tasks.capture.is_some() != capture.is_some();
        if self.tasks.iter().any(otherwise) {
            return Err(Error::usage(
                "stream: all operations of a group must be captured, those on one communicator in the same capture, or none",
            ));
        }
        let index = self
            .tasks
            .iter()
            .position(|tasks| Arc::ptr_eq(&tasks.comm, &comm))
            .unwrap_or_else(|| {
                self.tasks.push(Tasks {
                    comm,
                    collectives: SmallVec::new(),
                    messages: None,
                    streams: SmallVec::new(),
                    capture,
                    pooled: None,
                });
                self.tasks.len() - 1
            });
        let tasks = &mut self.tasks[index];
        let comm = &*tasks.comm;
        if tasks.capture != capture {
            return Err(Error::usage(
                "stream: all operations of a group on one communicator must be in the same capture",
            ));
        }
        if !tasks.streams.contains(&request.stream) {
            tasks.streams.push(request.stream);
        }
        self.captured |= capture.is_some();
        let graph = capture.map_or(0, |capture| capture.id);
        let peer = request.peer.unwrap_or(0);
        let window = comm.window_of(&request);
        let (op, (seq, node), method) = {
            let mut planner = comm.planner();
            if tasks.pooled.is_none() {
                tasks.pooled = planner.queue.submitted.take_pooled();
            }
            let pooled = tasks.pooled.as_mut().filter(|_| window.is_none());
            let served = pooled.as_ref().and_then(|pooled| pooled.method_for(&request));
            let method = match served {
                Some(method) => method,
                None => comm.launch.capabilities.choose(&request, window.as_ref())?,
            };
            request.window = window.filter(|_| method.path.is_copy_engine());
            let op = if graph == 0 {
                observe::next_op()
            } else {
                observe::next_captured_op()
            };
            if op & CAPTURED != 0 {
                planner.queue.submitted.note_captured_op(graph, op);
            }
            if let (Some(_), Some(pooled)) = (served, pooled) {
                pooled.reserve(op);
            }
            (op, planner.sequences.next(request.function, peer, graph), method)
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
        log_call(&request, &info, comm.ranks);
        let by_messages = plan::drains_with_messages(request.function, &method);
        let task = Task {
            request,
            info,
            method,
            node,
            graph,
            api_start_ns: start_ns,
            api_end_ns: 0,
            group_depth: self.depth + 1,
            tid: thread_id(),
        };
        if by_messages {
            let messages = tasks.messages.get_or_insert_default();
            messages.push(task, comm.rank, comm.ranks);
        } else {
            tasks.collectives.push(task);
        }
        Ok(info)
    }

    /// The task just pushed.
    fn last_task(&mut self, info: &OpInfo) -> Option<&mut Task> {
        self.tasks
            .iter_mut()
            .flat_map(|tasks| {
                let message = tasks.messages.as_mut().and_then(|messages| messages.last());
                message.into_iter().chain(tasks.collectives.last_mut())
            })
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
}

/// Logs a call.
fn log_call(request: &Request, info: &OpInfo, ranks: u32) {
    tracing::info!(
        target: log::COLL,
        "{}: opCount {:x} sendbuff {:#x} recvbuff {:#x} count {} datatype {} op {} {} {} comm {:#x} [nranks={ranks}] stream {:#x}",
        api_name(request.function),
        info.seq,
        request.send,
        request.recv,
        request.count,
        request.data_type.code(),
        match request.reduce_op {
            ReduceOp::None => 0,
            op => op.code(),
        },
        if request.function.is_p2p() { "peer" } else { "root" },
        request.peer.unwrap_or(0),
        info.comm,
        request.stream.0,
    );
}

/// The calling thread's id, asked once a thread.
fn thread_id() -> u32 {
    thread_local! {
        // SAFETY: gettid cannot fail.
        static ID: u32 = unsafe { libc::gettid() } as u32;
    }
    ID.with(|id| *id)
}
