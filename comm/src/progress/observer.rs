//! The observer of a plan: what its device reports, turned into records and into what the watchdog reads.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
};

use ringsight_kernels::{Observer, When};
use ringsight_records::{ArrivalNotice, Flags, Kind, Record, State, Waits, description::Time};
use smallvec::{SmallVec, smallvec};

use super::{
    arrivals::ArrivalLog,
    durations::Durations,
    op_progress::{OpProgress, Seen},
    retire::{RetireQueue, Retired},
};
use crate::{checks::Checks, observe, op::OpInfo};

/// No time.
const NEVER: u64 = u64::MAX;

/// A time by two clocks.
#[derive(Clone, Copy)]
struct Moment {
    host_ns: u64,
    /// The device's timer; 0 if it is not known.
    timer_ns: u64,
}

impl Moment {
    fn new(when: When, now: u64) -> Self {
        let (host_ns, timer_ns) = match when {
            When::Now => (now, now),
            When::Past { host_ns } => (host_ns, 0),
            When::At { timer_ns, host_ns } => (host_ns, timer_ns),
        };
        Self { host_ns, timer_ns }
    }
}

/// One operation of a plan while its kernel runs. Replays of a plan run one after another, so one state serves all.
pub(crate) struct OpState {
    info: OpInfo,
    /// The receive that a send to oneself is done with.
    twin: Option<OpInfo>,
    channels: u32,
    proxy_ops: u32,
    /// Channels that have not stopped.
    remaining: AtomicU32,
    progress: OpProgress,
    /// When the first channel started, as the device says; [`NEVER`] if none has.
    first_ns: AtomicU64,
    /// When the last one stopped, 0 if none has.
    last_ns: AtomicU64,
    aborted: AtomicBool,
    /// Where several plans hold works of the operation: by channel, in how many.
    split: Option<Box<[Split]>>,
    /// How long its replays took, if it is captured: its description has the latest one only.
    times: Option<Box<Durations>>,
}

/// A channel of an operation whose works are spread over several plans, which run one after another.
#[derive(Debug, Default)]
struct Split {
    plans: u32,
    /// Plans that have not done theirs.
    left: AtomicU32,
}

impl OpState {
    pub(crate) fn new(info: OpInfo, twin: Option<OpInfo>, channels: u32, proxy_ops: u32) -> Self {
        Self {
            info,
            twin,
            channels,
            proxy_ops,
            remaining: AtomicU32::new(channels),
            progress: OpProgress::default(),
            first_ns: AtomicU64::new(NEVER),
            last_ns: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            split: None,
            times: info.flags.contains(Flags::GRAPH).then(Box::default),
        }
    }

    /// The same for an operation that several plans share; `masks` are the channels that it takes in each.
    pub(crate) fn split(self, masks: &[u64]) -> Self {
        let plans = |channel: usize| masks.iter().filter(|mask| **mask >> channel & 1 == 1).count() as u32;
        let split = (0..u64::BITS as usize)
            .map(|channel| Split {
                plans: plans(channel),
                left: AtomicU32::new(plans(channel)),
            })
            .collect();
        Self {
            split: Some(split),
            ..self
        }
    }

    /// Whether the start of a channel's works in a plan is the start of the channel.
    fn is_first(&self, channel: u8) -> bool {
        // Relaxed: plans of a communicator run one after another, with the device's ordering between them.
        self.split.as_ref().is_none_or(|split| {
            let channel = &split[usize::from(channel)];
            channel.left.load(Ordering::Relaxed) == channel.plans
        })
    }

    /// Whether the end of a channel's works in a plan is the end of the channel.
    fn is_last(&self, channel: u8, aborted: bool) -> bool {
        self.split.as_ref().is_none_or(|split| {
            let channel = &split[usize::from(channel)];
            // Relaxed: as above. After an abort no later plan begins.
            let last = channel.left.fetch_sub(1, Ordering::Relaxed) == 1;
            if last {
                channel.left.store(channel.plans, Ordering::Relaxed);
            }
            last || aborted
        })
    }

    fn infos(&self) -> impl Iterator<Item = &OpInfo> {
        std::iter::once(&self.info).chain(&self.twin)
    }

    fn channel_record(&self, state: State, moment: Moment, replay: u32, channel: u8) {
        if observe::wants(Kind::KernelCh) {
            for info in self.infos() {
                let record = info.record(Kind::KernelCh, state, moment.host_ns, replay);
                observe::emit(&Record {
                    channel,
                    value: moment.timer_ns,
                    ..record
                });
            }
        }
    }

    /// Completes it as aborted if it has not been completed.
    fn abandon(&self, now: u64) {
        // What is left of it in this plan keeps the others from completing it.
        if !self.progress.is_completed(None) {
            self.aborted.store(true, Ordering::Relaxed);
            self.complete(now, 0, None);
        }
    }

    /// A channel was at work at that time.
    fn note(&self, host_ns: u64) {
        // Relaxed: who completes it has been told of every channel's end, after this.
        self.first_ns.fetch_min(host_ns, Ordering::Relaxed);
        self.last_ns.fetch_max(host_ns, Ordering::Relaxed);
    }

    fn complete(&self, now: u64, replay: u32, arrivals: Option<&ArrivalLog>) {
        // Made ready for the next replay before anybody learns that this one is done.
        // Relaxed: the device runs replays one after another, with its own ordering between them.
        self.remaining.store(self.channels, Ordering::Relaxed);
        let aborted = self.aborted.swap(false, Ordering::Relaxed);
        let (first, last) = (
            self.first_ns.swap(NEVER, Ordering::Relaxed),
            self.last_ns.swap(0, Ordering::Relaxed),
        );
        // What was given up ended when that was noticed.
        let end = if aborted || last == 0 { now } else { last };
        let start = match self.progress.end(replay) {
            0 => 0,
            _ => first.min(end),
        };
        if let Some(times) = self.times.as_ref().filter(|_| !aborted && start != 0) {
            times.add(end - start);
        }
        let state = if aborted { State::ABORTED } else { State::STOP };
        let arrivals = arrivals.filter(|_| !aborted && start != 0);
        for info in self.infos() {
            observe::set_times(info.op, [(Time::DeviceStart, start), (Time::DeviceEnd, end)]);
            let notice = arrivals.map_or(ArrivalNotice::Never, |arrivals| {
                arrivals.complete(info, replay, (start, end))
            });
            let record = info.record(Kind::OpCompleted, state, end, replay);
            observe::emit(&Record {
                value: start,
                channel: notice as u8,
                ..record
            });
        }
    }
}

/// Where a plan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stage {
    /// Not begun.
    Waiting = 0,
    /// On the device.
    Running = 1,
    /// Finished (for captured plans: between replays).
    Finished = 2,
}

/// An operation that several plans have works of.
pub(crate) struct Shared {
    pub(crate) state: Arc<OpState>,
    /// This is the first of them, the last.
    pub(crate) begins: bool,
    pub(crate) ends: bool,
}

/// The observer of one plan.
pub(crate) struct PlanObserver {
    number: u32,
    /// By operation number.
    states: SmallVec<[OpState; 1]>,
    /// Operations that other plans have works of too, by operation number; each is counted for the plan that it begins in.
    shared: Vec<Shared>,
    persistent: bool,
    stage: AtomicU8,
    /// How often something moved.
    moves: AtomicU64,
    /// The word of what its kernel waits for, and when it said so; 0 if it has not.
    waits: AtomicU64,
    waits_ns: AtomicU64,
    retired: Arc<RetireQueue>,
    checks: Arc<Checks>,
    /// Of a communicator over several nodes.
    arrivals: Option<Arc<ArrivalLog>>,
}

/// What a plan has for its observer.
pub(crate) struct Contents {
    pub(crate) number: u32,
    pub(crate) states: SmallVec<[OpState; 1]>,
    pub(crate) shared: Vec<Shared>,
    pub(crate) persistent: bool,
}

impl PlanObserver {
    pub(crate) fn new(
        contents: &mut Contents,
        retired: Arc<RetireQueue>,
        checks: Arc<Checks>,
        arrivals: Option<Arc<ArrivalLog>>,
    ) -> Self {
        let mut this = Self {
            number: 0,
            states: SmallVec::new(),
            shared: Vec::new(),
            persistent: false,
            stage: AtomicU8::new(0),
            moves: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            waits_ns: AtomicU64::new(0),
            retired,
            checks,
            arrivals,
        };
        this.renew(contents);
        this
    }

    /// That of another plan of the communicator, which has what is taken out of `contents`.
    pub(crate) fn renew(&mut self, contents: &mut Contents) {
        contents.states.sort_by_key(|state| state.info.op);
        contents.shared.sort_by_key(|shared| shared.state.info.op);
        self.number = contents.number;
        self.states = mem::take(&mut contents.states);
        self.shared = mem::take(&mut contents.shared);
        self.persistent = contents.persistent;
        self.begin_anew();
    }

    /// That of another plan which runs once, of one operation.
    pub(crate) fn renew_for(&mut self, number: u32, state: OpState) {
        self.number = number;
        self.states = smallvec![state];
        self.shared.clear();
        self.persistent = false;
        self.begin_anew();
    }

    fn begin_anew(&mut self) {
        *self.stage.get_mut() = Stage::Waiting as u8;
        *self.moves.get_mut() = 0;
        *self.waits_ns.get_mut() = 0;
    }

    /// Ends operations that began in an earlier plan and were to go on in this one, which is not launched.
    pub(crate) fn abandon(&self, now: u64) {
        for shared in self.shared.iter().filter(|shared| !shared.begins) {
            shared.state.abandon(now);
        }
    }

    /// That of its plan.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    pub(crate) fn stage(&self) -> Stage {
        // Acquire: pairs with `launch_finished`; who sees it finished may free what it used.
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Waiting,
            1 => Stage::Running,
            _ => Stage::Finished,
        }
    }

    /// The operations that begin in this plan and have network work, and how many proxy operations each takes.
    pub(crate) fn proxied(&self) -> impl Iterator<Item = (OpInfo, u32)> {
        let shared = self.shared.iter().filter(|shared| shared.begins);
        self.states
            .iter()
            .chain(shared.map(|shared| &*shared.state))
            .map(|state| (state.info, state.proxy_ops))
            .filter(|(_, proxy_ops)| *proxy_ops > 0)
    }

    /// Its operations, and where they are; those that began in an earlier plan, too.
    pub(crate) fn operations(&self) -> impl Iterator<Item = (&OpInfo, Seen)> {
        let shared = self.shared.iter().map(|shared| &*shared.state);
        self.states
            .iter()
            .chain(shared)
            .flat_map(|state| state.infos().map(|info| (info, state.progress.seen())))
    }

    /// The operations that have works in this plan, and whether it is the last one that has some of them.
    pub(crate) fn contents(&self) -> impl Iterator<Item = (&OpInfo, bool)> {
        let states = self.states.iter().map(|state| (state, true));
        let shared = self.shared.iter().map(|shared| (&*shared.state, shared.ends));
        states
            .chain(shared)
            .flat_map(|(state, ends)| state.infos().map(move |info| (info, ends)))
    }

    /// Its captured operations, and how long their latest replays took that this has not told yet. For one caller.
    pub(crate) fn replayed(&self) -> impl Iterator<Item = (u32, Vec<u64>)> {
        // A message to oneself takes as long as its receive.
        self.states
            .iter()
            .filter_map(|state| Some((state.info.op, state.times.as_ref()?.take())))
    }

    /// A number that changes whenever the kernel moves something.
    pub(crate) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    /// What its kernel waits for in an operation, if it has said so just now.
    pub(crate) fn waits(&self, info: &OpInfo, now: u64) -> Option<Waits> {
        // Relaxed: what is said is whole by itself, and as old as another one that was said at about that time.
        let said_ns = self.waits_ns.load(Ordering::Relaxed);
        Waits::said(self.waits.load(Ordering::Relaxed), said_ns, info.op, now)
    }

    fn state(&self, op: u32) -> Option<&OpState> {
        self.states
            .binary_search_by_key(&op, |state| state.info.op)
            .map(|index| &self.states[index])
            .or_else(|_| {
                self.shared
                    .binary_search_by_key(&op, |shared| shared.state.info.op)
                    .map(|index| &*self.shared[index].state)
            })
            .ok()
    }
}

impl Observer for PlanObserver {
    fn channel_started(&self, op: u32, replay: u32, channel: u8, when: When) {
        let Some(state) = self.state(op) else { return };
        let now = observe::now_ns();
        let moment = Moment::new(when, now);
        state.note(moment.host_ns);
        self.stage.store(Stage::Running as u8, Ordering::Relaxed);
        if state.progress.begin(replay, now) {
            for info in state.infos() {
                observe::set_times(info.op, [(Time::DeviceStart, moment.host_ns)]);
                if let Some(arrivals) = &self.arrivals {
                    // Another channel may have started before this one.
                    let first_ns = state.first_ns.load(Ordering::Relaxed);
                    arrivals.arrive(info, replay, first_ns);
                }
            }
        }
        if state.is_first(channel) {
            state.channel_record(State::START, moment, replay, channel);
        }
    }

    fn channel_stopped(&self, op: u32, replay: u32, channel: u8, aborted: bool, when: When) {
        let Some(state) = self.state(op) else { return };
        if !state.is_last(channel, aborted) {
            return;
        }
        let now = observe::now_ns();
        let moment = Moment::new(when, now);
        state.note(moment.host_ns);
        state.channel_record(State::STOP, moment, replay, channel);
        if aborted {
            state.aborted.store(true, Ordering::Relaxed);
        }
        // AcqRel: channels may be threads of their own; the last one sees the others' start time and abort mark.
        if state.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            state.complete(now, replay, self.arrivals.as_deref());
        }
    }

    fn moved(&self) {
        // Relaxed, and no read-modify-write: only the thread that runs the kernel writes it, and who reads it compares
        // it with what it was long before.
        self.moves.store(
            self.moves.load(Ordering::Relaxed).wrapping_add(1),
            Ordering::Relaxed,
        );
    }

    fn waits(&self, waits: Waits) {
        let now = observe::now_ns();
        let mut infos = self.contents().map(|(info, _)| info);
        let Some(info) = infos.find(|info| info.op as u16 == waits.op) else {
            return;
        };
        let waits = Waits {
            // Of a message whoever called it knows that.
            peer: waits.peer.or(u16::try_from(info.peer).ok()),
            ..waits
        };
        // Relaxed: see `PlanObserver::waits`.
        self.waits.store(waits.word(), Ordering::Relaxed);
        self.waits_ns.store(now, Ordering::Relaxed);
        observe::set_waits(info.op, waits, now);
    }

    fn mismatch(&self, op: u32, _replay: u32, _channel: u8, theirs: u32) {
        self.checks.mismatch(op, theirs);
    }

    fn launch_finished(&self, replay: u32, aborted: bool) {
        if aborted {
            // What was begun on some channels only, or not at all, is over too.
            let now = observe::now_ns();
            let shared = self.shared.iter().map(|shared| &*shared.state);
            for state in self.states.iter().chain(shared) {
                if !state.progress.is_completed(Some(replay)) {
                    state.aborted.store(true, Ordering::Relaxed);
                    state.complete(now, replay, None);
                }
            }
        }
        self.waits_ns.store(0, Ordering::Relaxed);
        // Release: pairs with `stage`.
        self.stage.store(Stage::Finished as u8, Ordering::Release);
        if !self.persistent {
            self.retired.put(Retired::Plan(self.number));
        }
    }
}
