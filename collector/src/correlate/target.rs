//! What is known of one watched process: its operations in flight, in any order of their records.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
};

use ringsight_probes::sample::Process;
use ringsight_records::{Description, Kind, Record, State, pages::CAPTURED, verdicts::GivenVerdict};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Finished, group::Groups, operation::RankOperation};
use crate::limits::{InSecond, LeftOut, Limit, Limits};

/// Operations whose records may still trickle in after they were settled.
const SETTLED: usize = 8192;
/// Plans whose launch times are remembered; a power of two.
const PLANS: usize = 1024;
/// Boxes kept for later operations.
const SPARE: usize = 256;
/// Completed operations that are looked at for one watermark: those that wait for lost records do not make each watermark slower.
const SETTLED_AT_ONCE: usize = 4096;
/// How often operations whose completion was lost are looked for.
const LOST_COMPLETIONS_NS: u64 = 20_000_000;

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
    /// Operations begun before the process was watched, whose end was never seen: they may have ended before it, too.
    pub begun_before_attach: u64,
}

impl Given {
    pub(super) fn add(&mut self, other: &Self) {
        self.late_records += other.late_records;
        self.begun_before_attach += other.begun_before_attach;
    }
}

/// One watched process.
pub(super) struct Target {
    pub(super) process: Arc<Process>,
    pub(super) watermark_ns: u64,
    /// The first watermark: the process has been watched since before.
    watched_ns: Option<u64>,
    pub(super) given: Given,
    pub(super) left_out: LeftOut,
    operations: FxHashMap<u64, Box<RankOperation>>,
    /// Keys in the order in which operations were first seen; may hold keys that are gone.
    order: VecDeque<u64>,
    /// Completed, waiting for the rest of their records; may hold keys that are gone.
    pending: VecDeque<u64>,
    /// Over, but for what the library may say of who arrived last: by when that is due. Only operations that are there.
    held: BTreeSet<(u64, u64)>,
    captured: FxHashMap<u32, Box<Description>>,
    /// Graphs that were destroyed, and when: their last replays may not be settled yet.
    destroyed: FxHashMap<u32, u64>,
    groups: Groups,
    plans: Box<[PlanLaunch]>,
    settled: FxHashSet<u64>,
    settled_order: VecDeque<u64>,
    #[expect(
        clippy::vec_box,
        reason = "the boxes are what is kept: they move between tables without a copy"
    )]
    spare: Vec<Box<RankOperation>>,
    /// What the operations hold that have not been dealt with, whoever has them: [`Limit::OperationParts`].
    parts: usize,
    /// Losses that touch operations, counted: what began before one may lack what was lost.
    losses: u64,
    /// A completion may have been lost: look for operations that ended without one.
    completions_lost: bool,
    /// When these were last looked for.
    completions_ns: u64,
    verdicts: InSecond,
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
            left_out: LeftOut::default(),
            operations: FxHashMap::default(),
            order: VecDeque::new(),
            pending: VecDeque::new(),
            held: BTreeSet::new(),
            captured: FxHashMap::default(),
            destroyed: FxHashMap::default(),
            groups: Groups::default(),
            plans: vec![PlanLaunch::default(); PLANS].into_boxed_slice(),
            settled: FxHashSet::default(),
            settled_order: VecDeque::new(),
            spare: Vec::new(),
            parts: 0,
            losses: 0,
            completions_lost: false,
            completions_ns: 0,
            verdicts: InSecond::default(),
            given_verdict: None,
        }
    }

    /// Operations that are known to be running.
    pub(super) fn in_flight(&self) -> usize {
        let operations = self.operations.values();
        let known = operations.filter(|operation| !self.is_left_over(operation));
        known.count().saturating_sub(self.held.len())
    }

    /// Operations that have not been handed out.
    pub(super) fn held(&self) -> usize {
        self.operations.len()
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
            if self.operations.len() >= limits.operations.process {
                self.evict_oldest(finished);
            }
            let mut new = self.spare.pop().unwrap_or_default();
            new.reset(self.process.pid, op, replay);
            new.losses_before = self.losses;
            self.operations.insert(key, new);
            self.order.push_back(key);
            if self.order.len() > 2 * limits.operations.process {
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
                        operation.complete = operation.is_whole() && !self.is_tainted(&operation);
                        finished.push(Finished::Operation(operation));
                        return;
                    }
                    if self.is_left_over(&operation) {
                        self.given.begun_before_attach += 1;
                    } else {
                        self.left_out.count(Limit::Operations);
                    }
                    self.recycle(operation);
                }
                return;
            }
        }
    }

    /// Keeps an operation that is over until the library says who arrived last in it, or `due_ns`.
    fn hold(&mut self, key: u64, mut operation: Box<RankOperation>, due_ns: u64) {
        self.held.remove(&(operation.held_until_ns, key));
        operation.held_until_ns = due_ns;
        self.held.insert((due_ns, key));
        self.operations.insert(key, operation);
        debug_assert!(
            self.held.len() <= self.operations.len(),
            "the limit of operations bounds those that are held"
        );
    }

    fn remove(&mut self, key: u64) -> Option<Box<RankOperation>> {
        let operation = self.operations.remove(&key)?;
        self.held.remove(&(operation.held_until_ns, key));
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
    pub(super) fn recycle(&mut self, mut operation: Box<RankOperation>) {
        self.parts = self.parts.saturating_sub(operation.parts);
        if self.spare.len() < SPARE {
            operation.shed();
            self.spare.push(operation);
        }
    }

    /// Whether something that may be an operation's was lost.
    fn is_tainted(&self, operation: &RankOperation) -> bool {
        operation.tainted || operation.losses_before != self.losses
    }

    pub(super) fn record(
        &mut self,
        kind: Kind,
        record: &Record,
        limits: &Limits,
        finished: &mut Vec<Finished>,
    ) {
        match kind {
            Kind::Group | Kind::GroupApi => {
                let left_out = &mut self.left_out;
                self.groups
                    .record(self.process.pid, kind, record, limits, left_out);
            }
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
                    if self.destroyed.len() < limits.graphs || self.destroyed.contains_key(&record.op) {
                        self.destroyed.insert(record.op, record.time_ns);
                    } else {
                        self.left_out.count(Limit::Graphs);
                    }
                }
            }
            Kind::Arrival => {
                let key = key(record.op, record.replay);
                // One that is too late for its operation is of no use.
                if let Some(operation) = self.operations.get_mut(&key) {
                    operation.report_arrival(record);
                    let held_until_ns = std::mem::take(&mut operation.held_until_ns);
                    if self.held.remove(&(held_until_ns, key)) {
                        self.pending.push_back(key);
                    }
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
                self.operation_record(kind, record, limits, finished);
            }
        }
    }

    fn operation_record(
        &mut self,
        kind: Kind,
        record: &Record,
        limits: &Limits,
        finished: &mut Vec<Finished>,
    ) {
        let mut given = None;
        if kind == Kind::Verdict {
            given = self.given_verdict.take();
            // What to say of one takes as long as a thousand other records.
            if !self.verdicts.has_room(self.watermark_ns, limits.verdicts) {
                self.left_out.count(Limit::Verdicts);
                return;
            }
        }
        let has_room = self.parts < limits.operation_parts.process;
        let Some(operation) = self.operation(record.op, record.replay, limits, finished) else {
            return;
        };
        let (was_completed, parts) = (operation.completed, operation.parts);
        let verdicts = operation.verdicts.len();
        let left_out = operation.record(kind, record, has_room, limits);
        if let (Some(given), Some(verdict)) = (given, operation.verdicts.get_mut(verdicts))
            && (given.op, given.time_ns) == (record.op, verdict.time_ns)
        {
            verdict.nic = given.nic();
            verdict.begun_ns = given.begun_ns;
        }
        let judged = (operation.verdicts.len() > verdicts).then(|| operation.judged());
        let (is_completed, held) = (operation.completed && !was_completed, operation.parts);
        if held != parts {
            self.parts = (self.parts + held).saturating_sub(parts);
        }
        if let Some(limit) = left_out {
            self.left_out.count(limit);
        }
        if is_completed {
            self.pending.push_back(key(record.op, record.replay));
            // Keys of operations that were handed out early do not add up until the next watermark.
            if self.pending.len() > 2 * limits.operations.process {
                self.pending.retain(|key| {
                    self.operations
                        .get(key)
                        .is_some_and(|operation| operation.completed)
                });
            }
        }
        if let Some(mut judged) = judged {
            self.supplement(&mut judged);
            finished.push(Finished::Judged(judged));
        }
    }

    pub(super) fn describe(
        &mut self,
        description: Box<Description>,
        limits: &Limits,
        finished: &mut Vec<Finished>,
    ) {
        if description.op & CAPTURED != 0 {
            if self.captured.len() < limits.captured_operations || self.captured.contains_key(&description.op)
            {
                self.captured.insert(description.op, description);
            } else {
                self.left_out.count(Limit::CapturedOperations);
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
            self.groups.describe(pid, &first, limits, &mut self.left_out);
        }
    }

    /// Something of `kind` was lost in this process: what is in flight may lack it.
    pub(super) fn lost(&mut self, kind: Option<Kind>) {
        // A description that could not be read shows by its absence. What is of no operation touches none.
        let touches = match kind {
            None
            | Some(
                Kind::ProxyCtrl
                | Kind::NetPlugin
                | Kind::CommInit
                | Kind::CommDestroy
                | Kind::Failover
                | Kind::Arrival,
            ) => false,
            Some(Kind::Group | Kind::GroupApi | Kind::Graph | Kind::Coll | Kind::P2p) => false,
            Some(_) => true,
        };
        self.losses += u64::from(touches);
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
        self.settle(time_ns, SETTLED_AT_ONCE, limits, finished);
    }

    /// Hands out what is over by `watermark_ns`, of `most` completed operations.
    fn settle(&mut self, watermark_ns: u64, most: usize, limits: &Limits, finished: &mut Vec<Finished>) {
        self.watermark_ns = self.watermark_ns.max(watermark_ns);
        let now = self.watermark_ns;
        if self.completions_lost && now.saturating_sub(self.completions_ns) >= LOST_COMPLETIONS_NS {
            self.completions_ns = now;
            self.complete_from_channels(now, limits);
        }
        while let Some((_, key)) = self.held.first().copied().filter(|(due_ns, _)| *due_ns <= now) {
            self.held.pop_first();
            self.pending.push_back(key);
        }
        for _ in 0..self.pending.len().min(most) {
            let Some(key) = self.pending.pop_front() else {
                break;
            };
            // One that was handed out early, and may have come to be known anew by a record that was late.
            if !self
                .operations
                .get(&key)
                .is_some_and(|operation| operation.completed)
            {
                continue;
            }
            let Some(mut operation) = self.operations.remove(&key) else {
                continue;
            };
            self.supplement(&mut operation);
            let whole = operation.is_whole() && now >= operation.latest_ns();
            let over = whole || now >= operation.latest_ns().saturating_add(limits.linger_ns);
            let due_ns = operation.arrival_due_ns();
            if over && now < due_ns {
                self.hold(key, operation, due_ns);
                continue;
            }
            // Back in, so that `remove` below does all that belongs to a removal.
            self.operations.insert(key, operation);
            if !over {
                self.pending.push_back(key);
            } else if let Some(mut operation) = self.remove(key) {
                operation.complete = whole && !self.is_tainted(&operation);
                finished.push(Finished::Operation(operation));
            }
        }
        self.groups.settle(now, limits.linger_ns, &mut |group| {
            finished.push(Finished::Group(Box::new(group)));
        });
        let is_past = |destroyed_ns: &u64| now >= destroyed_ns.saturating_add(limits.linger_ns);
        if self.destroyed.values().any(is_past) {
            // One pass, however many were destroyed.
            let destroyed = &self.destroyed;
            self.captured
                .retain(|_, description| !destroyed.get(&description.graph).is_some_and(is_past));
            self.destroyed.retain(|_, destroyed_ns| !is_past(destroyed_ns));
        }
    }

    /// Completes operations whose completion was lost and whose every channel is known to have finished.
    fn complete_from_channels(&mut self, now: u64, limits: &Limits) {
        let mut waiting = false;
        let losses = self.losses;
        for (key, operation) in &mut self.operations {
            if operation.completed || !(operation.tainted || operation.losses_before != losses) {
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
                self.pending.push_back(*key);
            } else {
                waiting = true;
            }
        }
        self.completions_lost = waiting;
    }

    /// Hands out everything: what has completed as an operation, the rest as unfinished. `ended` is whether that will stay so.
    pub(super) fn flush(&mut self, ended: bool, limits: &Limits, finished: &mut Vec<Finished>) {
        self.settle(u64::MAX, usize::MAX, limits, finished);
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
