//! What is known of one watched process: its operations in flight, in any order of their records.

use std::{collections::VecDeque, sync::Arc};

use ringsight_probes::sample::Process;
use ringsight_records::{Description, Kind, Record, State, pages::CAPTURED, verdicts::GivenVerdict};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Finished, Limits, group::Groups, operation::RankOperation};

/// Operations whose records may still trickle in after they were settled.
const SETTLED: usize = 8192;
/// Plans whose launch times are remembered; a power of two.
const PLANS: usize = 1024;
/// Boxes kept for later operations.
const SPARE: usize = 1024;

/// Key of an operation in its process.
fn key(op: u32, replay: u32) -> u64 {
    u64::from(replay) << 32 | u64::from(op)
}

/// Launch of one plan, in a table where plan n is at n modulo its size.
#[derive(Clone, Copy, Default)]
struct PlanLaunch {
    plan: u64,
    start_ns: u64,
    stop_ns: u64,
}

/// Counted reasons for which something known of a process was given up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// Records of operations that had been settled without them.
    pub late_records: u64,
    /// Operations given up because too many were in flight.
    pub evicted_operations: u64,
    /// Groups given up because too many were open.
    pub evicted_groups: u64,
    /// Operations begun before the process was watched, whose end was never seen: they may have ended before it, too.
    pub begun_before_attach: u64,
}

/// One watched process.
pub(super) struct Target {
    pub(super) process: Arc<Process>,
    pub(super) watermark_ns: u64,
    /// The first watermark: the process has been watched since before.
    watched_ns: Option<u64>,
    pub(super) given: Given,
    operations: FxHashMap<u64, Box<RankOperation>>,
    /// Keys in the order in which operations were first seen; may hold keys that are gone.
    order: VecDeque<u64>,
    /// Completed, waiting for the rest of their records.
    pending: Vec<u64>,
    captured: FxHashMap<u32, Box<Description>>,
    /// Graphs that were destroyed, and when: their last replays may not be settled yet.
    destroyed: Vec<(u64, u32)>,
    groups: Groups,
    plans: Box<[PlanLaunch]>,
    settled: FxHashSet<u64>,
    settled_order: VecDeque<u64>,
    #[expect(
        clippy::vec_box,
        reason = "the boxes are what is kept: they move between tables without a copy"
    )]
    spare: Vec<Box<RankOperation>>,
    /// A completion may have been lost: look for operations that ended without one.
    completions_lost: bool,
    /// What is known of the verdict whose record comes next.
    pub(super) given_verdict: Option<Box<GivenVerdict>>,
}

impl Target {
    pub(super) fn new(process: Arc<Process>) -> Self {
        Self {
            process,
            watermark_ns: 0,
            watched_ns: None,
            given: Given::default(),
            operations: FxHashMap::default(),
            order: VecDeque::new(),
            pending: Vec::new(),
            captured: FxHashMap::default(),
            destroyed: Vec::new(),
            groups: Groups::default(),
            plans: vec![PlanLaunch::default(); PLANS].into_boxed_slice(),
            settled: FxHashSet::default(),
            settled_order: VecDeque::new(),
            spare: Vec::new(),
            completions_lost: false,
            given_verdict: None,
        }
    }

    /// Operations that are known to be running.
    pub(super) fn in_flight(&self) -> usize {
        let operations = self.operations.values();
        operations
            .filter(|operation| !self.is_left_over(operation))
            .count()
    }

    /// Those that have not ended.
    pub(super) fn running(&self) -> impl Iterator<Item = &RankOperation> {
        self.operations
            .values()
            .map(|operation| &**operation)
            .filter(|operation| !operation.completed && !self.is_left_over(operation))
    }

    /// One that has not been handed out.
    pub(super) fn known_mut(&mut self, op: u32, replay: u32) -> Option<&mut RankOperation> {
        self.operations
            .get_mut(&key(op, replay))
            .map(|operation| &mut **operation)
    }

    /// Whether neither launch nor completion of an operation is known, and it began before the process was watched. The
    /// ring may hold records of operations that are long over: those that a previous reader left, and those of proxies
    /// that lag behind the device. Of an operation that is still running the end will come, and tell what it is.
    fn is_left_over(&self, operation: &RankOperation) -> bool {
        !operation.announced() && self.watched_ns.is_some_and(|since| operation.first_ns < since)
    }

    /// The operation of a key, made if it is new; `None` if it has been settled.
    fn operation(
        &mut self,
        op: u32,
        replay: u32,
        limits: &Limits,
        finished: &mut Vec<Finished>,
    ) -> Option<&mut RankOperation> {
        let key = key(op, replay);
        if !self.operations.contains_key(&key) {
            if self.settled.contains(&key) {
                return None;
            }
            if self.operations.len() >= limits.in_flight {
                self.evict_oldest(finished);
            }
            let mut new = self.spare.pop().unwrap_or_default();
            new.reset(self.process.pid, op, replay);
            self.operations.insert(key, new);
            self.order.push_back(key);
            if self.order.len() > 2 * limits.in_flight {
                self.order.retain(|key| self.operations.contains_key(key));
            }
        }
        self.operations.get_mut(&key).map(|operation| &mut **operation)
    }

    /// Makes room: hands out the oldest operation if it is over, or else gives it up. In a burst of replays many may be over
    /// before the process's watermark says so.
    fn evict_oldest(&mut self, finished: &mut Vec<Finished>) {
        while let Some(key) = self.order.pop_front() {
            if self.operations.contains_key(&key) {
                if let Some(mut operation) = self.remove(key) {
                    self.supplement(&mut operation);
                    if operation.completed {
                        operation.complete = operation.is_whole() && !operation.tainted;
                        finished.push(Finished::Operation(operation));
                        return;
                    }
                    if self.is_left_over(&operation) {
                        self.given.begun_before_attach += 1;
                    } else {
                        self.given.evicted_operations += 1;
                    }
                    self.recycle(operation);
                }
                return;
            }
        }
    }

    fn remove(&mut self, key: u64) -> Option<Box<RankOperation>> {
        let operation = self.operations.remove(&key)?;
        if self.settled.insert(key) {
            self.settled_order.push_back(key);
            if self.settled_order.len() > SETTLED
                && let Some(oldest) = self.settled_order.pop_front()
            {
                self.settled.remove(&oldest);
            }
        }
        Some(operation)
    }

    /// Takes back the box of an operation that has been dealt with.
    pub(super) fn recycle(&mut self, operation: Box<RankOperation>) {
        if self.spare.len() < SPARE {
            self.spare.push(operation);
        }
    }

    pub(super) fn record(
        &mut self,
        kind: Kind,
        record: &Record,
        limits: &Limits,
        finished: &mut Vec<Finished>,
    ) {
        match kind {
            Kind::Group | Kind::GroupApi => self.groups.record(self.process.pid, kind, record),
            Kind::KernelLaunch => {
                let plan = key(record.op, record.replay);
                let slot = &mut self.plans[record.op as usize % PLANS];
                if slot.plan != plan {
                    *slot = PlanLaunch {
                        plan,
                        ..PlanLaunch::default()
                    };
                }
                if record.state == State::START {
                    slot.start_ns = record.time_ns;
                } else {
                    slot.stop_ns = record.time_ns;
                }
            }
            Kind::Graph => {
                if record.state != State::START {
                    self.destroyed.push((record.time_ns, record.op));
                }
            }
            // Communicators and failovers are taken elsewhere. `ProxyCtrl` is of no operation: sessions do not ask for it.
            Kind::CommInit | Kind::CommDestroy | Kind::ProxyCtrl | Kind::Failover => {}
            Kind::Coll
            | Kind::P2p
            | Kind::CollApi
            | Kind::P2pApi
            | Kind::KernelCh
            | Kind::OpLaunched
            | Kind::OpCompleted
            | Kind::ProxyCompleted
            | Kind::ProxyOp
            | Kind::ProxyStep
            | Kind::NetPlugin
            | Kind::Verdict => {
                if record.op & CAPTURED != 0 && record.replay == 0 {
                    // The call at capture: nothing runs then.
                    return;
                }
                let given = match kind {
                    Kind::Verdict => self.given_verdict.take(),
                    _ => None,
                };
                let Some(operation) = self.operation(record.op, record.replay, limits, finished) else {
                    return;
                };
                let (was_completed, verdicts) = (operation.completed, operation.verdicts.len());
                operation.record(kind, record);
                if let (Some(given), Some(verdict)) = (given, operation.verdicts.get_mut(verdicts))
                    && (given.op, given.time_ns) == (record.op, verdict.time_ns)
                {
                    verdict.nic = given.nic();
                }
                let judged = (operation.verdicts.len() > verdicts).then(|| Box::new(operation.clone()));
                if operation.completed && !was_completed {
                    self.pending.push(key(record.op, record.replay));
                }
                if let Some(mut judged) = judged {
                    self.supplement(&mut judged);
                    finished.push(Finished::Judged(judged));
                }
            }
        }
    }

    pub(super) fn describe(
        &mut self,
        description: Box<Description>,
        limits: &Limits,
        finished: &mut Vec<Finished>,
    ) {
        if description.op & CAPTURED != 0 {
            if self.captured.len() < limits.in_flight || self.captured.contains_key(&description.op) {
                self.captured.insert(description.op, description);
            }
            return;
        }
        let pid = self.process.pid;
        let Some(operation) = self.operation(description.op, 0, limits, finished) else {
            return;
        };
        let first = operation.description.is_none().then_some(*description);
        operation.describe(description);
        if let Some(first) = first {
            self.groups.describe(pid, &first);
        }
    }

    /// Something of `kind` was lost in this process: what is in flight may lack it.
    pub(super) fn lost(&mut self, kind: Option<Kind>) {
        // A description that could not be read shows by its absence. What is of no operation touches none.
        let touches = match kind {
            None
            | Some(Kind::ProxyCtrl | Kind::NetPlugin | Kind::CommInit | Kind::CommDestroy | Kind::Failover) => {
                false
            }
            Some(Kind::Group | Kind::GroupApi | Kind::Graph | Kind::Coll | Kind::P2p) => false,
            Some(_) => true,
        };
        if touches {
            for operation in self.operations.values_mut() {
                operation.tainted = true;
            }
        }
        self.completions_lost |= kind == Some(Kind::OpCompleted);
    }

    /// Something of `kind` was missed before this process was watched: operations from that time may lack it.
    pub(super) fn missed(&mut self, kind: Kind) {
        let since = self.watched_ns.unwrap_or(u64::MAX);
        for operation in self.operations.values_mut() {
            operation.tainted |= operation.first_ns < since;
        }
        self.completions_lost |= kind == Kind::OpCompleted;
    }

    /// Gives an operation what stands outside of its own records: a replay's description, the launch of its plan, the
    /// size of its communicator.
    fn supplement(&self, operation: &mut RankOperation) {
        if operation.captured()
            && operation.description.is_none()
            && let Some(description) = self.captured.get(&operation.op)
        {
            operation.describe(description.clone());
        }
        if let Some(description) = &operation.description
            && operation.launch_times().1 == 0
        {
            let plan = key(description.plan, operation.replay);
            let slot = &self.plans[description.plan as usize % PLANS];
            if slot.plan == plan {
                operation.launch = (slot.start_ns, slot.stop_ns);
            }
        }
    }

    /// All that happened before `time_ns` has been taken in: hands out what is over.
    pub(super) fn watermark(&mut self, time_ns: u64, limits: &Limits, finished: &mut Vec<Finished>) {
        self.watched_ns.get_or_insert(time_ns);
        self.settle(time_ns, limits, finished);
    }

    /// Hands out what is over by `watermark_ns`.
    fn settle(&mut self, watermark_ns: u64, limits: &Limits, finished: &mut Vec<Finished>) {
        self.watermark_ns = self.watermark_ns.max(watermark_ns);
        let now = self.watermark_ns;
        if self.completions_lost {
            self.complete_from_channels(now, limits);
        }
        let mut pending = std::mem::take(&mut self.pending);
        pending.retain(|key| {
            // One that was handed out early, and may have come to be known anew by a record that was late.
            if !self
                .operations
                .get(key)
                .is_some_and(|operation| operation.completed)
            {
                return false;
            }
            let Some(mut operation) = self.operations.remove(key) else {
                return false;
            };
            self.supplement(&mut operation);
            let whole = operation.is_whole() && now >= operation.latest_ns();
            let over = whole || now >= operation.latest_ns().saturating_add(limits.linger_ns);
            // Back in, so that `remove` below does all that belongs to a removal.
            self.operations.insert(*key, operation);
            if over && let Some(mut operation) = self.remove(*key) {
                operation.complete = whole && !operation.tainted;
                finished.push(Finished::Operation(operation));
            }
            !over
        });
        self.pending = pending;
        self.groups.settle(now, limits.linger_ns, &mut |group| {
            finished.push(Finished::Group(Box::new(group)));
        });
        self.given.evicted_groups = self.groups.evicted;
        let captured = &mut self.captured;
        self.destroyed.retain(|(destroyed_ns, graph)| {
            let past = now >= destroyed_ns.saturating_add(limits.linger_ns);
            if past {
                captured.retain(|_, description| description.graph != *graph);
            }
            !past
        });
    }

    /// Completes operations whose completion was lost and whose every channel is known to have finished.
    fn complete_from_channels(&mut self, now: u64, limits: &Limits) {
        let mut waiting = false;
        for (key, operation) in &mut self.operations {
            if operation.completed || !operation.tainted {
                continue;
            }
            let channels = operation
                .description
                .as_ref()
                .map_or(0, |d| usize::from(d.channels));
            let start = operation
                .channels
                .iter()
                .map(|channel| channel.start_ns)
                .min()
                .unwrap_or(0);
            let stop = operation
                .channels
                .iter()
                .map(|channel| channel.stop_ns)
                .max()
                .unwrap_or(0);
            let all = channels != 0
                && operation.channels.len() == channels
                && operation.channels.iter().all(|channel| channel.stop_ns != 0);
            if all && now >= operation.latest_ns().saturating_add(limits.linger_ns) {
                operation.completed = true;
                operation.device = (if start == 0 { stop } else { start }, stop);
                self.pending.push(*key);
            } else {
                waiting = true;
            }
        }
        self.completions_lost = waiting;
    }

    /// Hands out everything: what has completed as an operation, the rest as unfinished. `ended` is whether that will stay so.
    pub(super) fn flush(&mut self, ended: bool, limits: &Limits, finished: &mut Vec<Finished>) {
        self.settle(u64::MAX, limits, finished);
        for key in std::mem::take(&mut self.order) {
            if let Some(mut operation) = self.operations.remove(&key) {
                if self.is_left_over(&operation) {
                    self.given.begun_before_attach += 1;
                    continue;
                }
                self.supplement(&mut operation);
                finished.push(Finished::Unfinished(operation, ended));
            }
        }
    }
}
