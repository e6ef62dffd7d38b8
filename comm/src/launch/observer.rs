//! What the device tells while it runs a plan, turned into records.

use std::sync::{
    atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering},
    mpsc::Sender,
};

use ringsight_kernels::Observer;
use ringsight_records::{Kind, Record, State, description::Time};

use super::reclaim::Reclaim;
use crate::{observe, plan::OpInfo};

/// One operation of a plan while its kernel runs. Replays of a plan run one after another, so one state serves all.
pub struct OpState {
    info: OpInfo,
    /// The receive that a send to oneself is done with.
    twin: Option<OpInfo>,
    channels: u32,
    proxy_ops: u32,
    /// Channels that have not stopped.
    remaining: AtomicU32,
    /// When the first channel started, 0 if none has.
    start_ns: AtomicU64,
    aborted: AtomicBool,
    /// The replay that was completed last, plus one.
    completed: AtomicU32,
}

impl OpState {
    pub(crate) fn new(info: OpInfo, twin: Option<OpInfo>, channels: u32, proxy_ops: u32) -> Self {
        Self {
            info,
            twin,
            channels,
            proxy_ops,
            remaining: AtomicU32::new(channels),
            start_ns: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            completed: AtomicU32::new(0),
        }
    }

    fn infos(&self) -> impl Iterator<Item = &OpInfo> {
        std::iter::once(&self.info).chain(&self.twin)
    }

    /// The operation and how many proxy operations it takes.
    pub(crate) fn proxied(&self) -> (OpInfo, u32) {
        (self.info, self.proxy_ops)
    }

    fn channel_record(&self, state: State, now: u64, replay: u32, channel: u8) {
        if observe::wants(Kind::KernelCh) {
            for info in self.infos() {
                let record = info.record(Kind::KernelCh, state, now, replay);
                observe::emit(&Record {
                    channel,
                    value: now,
                    ..record
                });
            }
        }
    }

    fn complete(&self, now: u64, replay: u32) {
        // Made ready for the next replay before anybody learns that this one is done.
        // Relaxed: the device runs replays one after another, with its own ordering between them.
        self.remaining.store(self.channels, Ordering::Relaxed);
        let start = self.start_ns.swap(0, Ordering::Relaxed);
        let aborted = self.aborted.swap(false, Ordering::Relaxed);
        self.completed.store(replay.wrapping_add(1), Ordering::Relaxed);
        let state = if aborted { State::ABORTED } else { State::STOP };
        for info in self.infos() {
            observe::set_time(info.op, Time::DeviceEnd, now);
            let record = info.record(Kind::OpCompleted, state, now, replay);
            observe::emit(&Record {
                value: start,
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

/// The observer of one plan.
pub struct PlanObserver {
    number: u32,
    /// By operation number.
    states: Vec<OpState>,
    persistent: bool,
    stage: AtomicU8,
    reclaim: Sender<Reclaim>,
}

impl PlanObserver {
    pub(crate) fn new(
        number: u32,
        mut states: Vec<OpState>,
        persistent: bool,
        reclaim: Sender<Reclaim>,
    ) -> Self {
        states.sort_by_key(|state| state.info.op);
        Self {
            number,
            states,
            persistent,
            stage: AtomicU8::new(Stage::Waiting as u8),
            reclaim,
        }
    }

    pub(crate) fn stage(&self) -> Stage {
        // Acquire: pairs with `launch_finished`; who sees it finished may free what it used.
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Waiting,
            1 => Stage::Running,
            _ => Stage::Finished,
        }
    }

    pub(crate) fn states(&self) -> &[OpState] {
        &self.states
    }

    fn state(&self, op: u32) -> Option<&OpState> {
        self.states
            .binary_search_by_key(&op, |state| state.info.op)
            .ok()
            .map(|index| &self.states[index])
    }
}

impl Observer for PlanObserver {
    fn channel_started(&self, op: u32, replay: u32, channel: u8) {
        let Some(state) = self.state(op) else { return };
        let now = observe::now_ns();
        self.stage.store(Stage::Running as u8, Ordering::Relaxed);
        // Relaxed: the first channel's time is kept; nothing else hangs on it.
        if state
            .start_ns
            .compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
        {
            for info in state.infos() {
                observe::set_time(info.op, Time::DeviceStart, now);
            }
        }
        state.channel_record(State::START, now, replay, channel);
    }

    fn channel_stopped(&self, op: u32, replay: u32, channel: u8, aborted: bool) {
        let Some(state) = self.state(op) else { return };
        let now = observe::now_ns();
        state.channel_record(State::STOP, now, replay, channel);
        if aborted {
            state.aborted.store(true, Ordering::Relaxed);
        }
        // AcqRel: channels may be threads of their own; the last one sees the others' start time and abort mark.
        if state.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            state.complete(now, replay);
        }
    }

    fn mismatch(&self, _op: u32, _replay: u32, _channel: u8, _theirs: u32) {}

    fn launch_finished(&self, replay: u32, aborted: bool) {
        if aborted {
            // What was begun on some channels only, or not at all, is over too.
            let now = observe::now_ns();
            for state in &self.states {
                if state.completed.load(Ordering::Relaxed) != replay.wrapping_add(1) {
                    state.aborted.store(true, Ordering::Relaxed);
                    state.complete(now, replay);
                }
            }
        }
        // Release: pairs with `stage`.
        self.stage.store(Stage::Finished as u8, Ordering::Release);
        if !self.persistent {
            // A communicator that is gone has no queue any more, and nothing to reclaim into.
            let _ = self.reclaim.send(Reclaim::Plan(self.number));
        }
    }
}
