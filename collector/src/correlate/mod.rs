//! Samples to operations: what belongs together on one rank ([`Correlator`]), then across ranks
//! ([`instance::Instances`]).
//!
//! The carriers keep no order among each other: a completion may be read before the launch. An operation is final when its
//! completion is in, everything that its description announces has been seen, and the process's watermark has passed all
//! of it. What does not become whole is given up after a linger, and says that it is incomplete.

pub mod communicators;
pub mod group;
pub mod host_group;
pub mod instance;
pub mod operation;
pub mod proxy;
mod target;

use ringsight_probes::sample::{Carrier, HostCall, Sample};
use ringsight_records::{Kind, VERSION};
use rustc_hash::FxHashMap;

pub use group::Group;
pub use host_group::HostGroup;
use host_group::HostGroups;
pub use operation::{ArrivalReport, KernelChannel, RankOperation, Verdict, Whereabouts};
pub use target::Given;
use target::Target;

use crate::limits::{LeftOut, Limits, Shared};

/// Something that is over, or that is to be told before it is.
#[derive(Clone, Debug)]
pub enum Finished {
    /// An operation of one rank.
    Operation(Box<RankOperation>),
    /// An operation that was still running when its process ended (`true`), or was let go of and may go on.
    Unfinished(Box<RankOperation>, bool),
    /// An operation as it is when the watchdog has given a verdict on it, its last one. It goes on.
    Judged(Box<RankOperation>),
    /// A group that the caller opened.
    Group(Box<Group>),
    /// A host-timed call, and when the group that it was made in began.
    Call(Box<HostCall>, Option<u64>),
    /// A group of host-timed calls.
    HostGroup(Box<HostGroup>),
}

/// Events by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Records that came in.
    pub received: [u64; Kind::LIMIT],
    /// Records that the carriers lost.
    pub lost: [u64; Kind::LIMIT],
    /// Events lost whose kind is not known, descriptions among them.
    pub lost_other: u64,
    /// Events of the time between an earlier reader's end and this one's beginning that never came.
    pub missed: [u64; Kind::LIMIT],
    /// Starts and ends of operations that devices overwrote before the library had read them: those operations have no device
    /// times.
    pub overwritten: u64,
    /// Records that came through a probe function: hits of a uprobe.
    pub probe_hits: u64,
    /// Records of a kind or version that this collector does not know.
    pub unknown: u64,
}

impl Counts {
    /// Everything that was lost.
    #[must_use]
    pub fn lost_total(&self) -> u64 {
        let kinds = self.lost.iter();
        kinds.fold(self.lost_other, |sum, count| sum.saturating_add(*count))
    }

    /// Everything that was missed before.
    #[must_use]
    pub fn missed_total(&self) -> u64 {
        self.missed
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Everything that came in.
    #[must_use]
    pub fn received_total(&self) -> u64 {
        self.received.iter().sum()
    }
}

/// Puts operations of each watched process together.
pub struct Correlator {
    /// As they are where there is one process.
    whole: Limits,
    /// With each process's part of what is for all.
    limits: Limits,
    targets: Vec<Option<Target>>,
    by_pid: FxHashMap<u32, usize>,
    /// Where the last sample's process is: samples come in runs of one process.
    recent: (u32, usize),
    counts: Counts,
    given: Given,
    left_out: LeftOut,
    host_groups: HostGroups,
}

impl std::fmt::Debug for Correlator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Correlator")
            .field("counts", &self.counts)
            .field("given", &self.given)
            .finish_non_exhaustive()
    }
}

impl Correlator {
    /// A correlator that watches nothing yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            whole: limits,
            limits,
            targets: Vec::new(),
            by_pid: FxHashMap::default(),
            recent: (0, usize::MAX),
            counts: Counts::default(),
            given: Given::default(),
            left_out: LeftOut::default(),
            host_groups: HostGroups::default(),
        }
    }

    fn target(&mut self, pid: u32) -> Option<&mut Target> {
        self.target_and_limits(pid).map(|(target, _)| target)
    }

    /// A process, and what holds for it.
    fn target_and_limits(&mut self, pid: u32) -> Option<(&mut Target, &Limits)> {
        if self.recent.0 != pid || self.recent.1 == usize::MAX {
            self.recent = (pid, *self.by_pid.get(&pid)?);
        }
        let target = self.targets.get_mut(self.recent.1)?.as_mut()?;
        Some((target, &self.limits))
    }

    /// What holds for each of the processes that are watched now.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes in a sample; what is over because of it is appended to `finished`. Communicators are the caller's matter.
    pub fn ingest(&mut self, sample: Sample, finished: &mut Vec<Finished>) {
        match sample {
            Sample::Record {
                pid, record, carrier, ..
            } => {
                self.counts.probe_hits += u64::from(carrier == Carrier::Probe);
                let kind = match record.kind() {
                    Some(kind) if record.version() == VERSION => kind,
                    _ => {
                        self.counts.unknown += 1;
                        return;
                    }
                };
                self.counts.received[kind as usize] += 1;
                if let Some((target, limits)) = self.target_and_limits(pid) {
                    target.record(kind, &record, limits, finished);
                }
            }
            Sample::Description { pid, description } => {
                if let Some((target, limits)) = self.target_and_limits(pid) {
                    target.describe(description, limits, finished);
                }
            }
            Sample::Watermark { pid, time_ns } => {
                if let Some((target, limits)) = self.target_and_limits(pid) {
                    target.watermark(time_ns, limits, finished);
                }
            }
            Sample::Lost { pid, kind, count, .. } => {
                match kind {
                    Some(kind) => {
                        let lost = &mut self.counts.lost[kind as usize];
                        *lost = lost.saturating_add(count);
                    }
                    None => self.counts.lost_other = self.counts.lost_other.saturating_add(count),
                }
                match pid {
                    Some(pid) => {
                        // Of calls no kind is told.
                        if kind.is_none() {
                            self.host_groups.give_up(pid);
                        }
                        if let Some(target) = self.target(pid) {
                            target.lost(kind);
                        }
                    }
                    None => self
                        .targets
                        .iter_mut()
                        .flatten()
                        .for_each(|target| target.lost(kind)),
                }
            }
            Sample::Missed { pid, kind, count } => {
                let missed = &mut self.counts.missed[kind as usize];
                *missed = missed.saturating_add(count);
                if let Some(target) = self.target(pid) {
                    target.missed(kind);
                }
            }
            Sample::Process(process) => {
                self.exited(process.pid, true, finished);
                self.by_pid.insert(process.pid, self.targets.len());
                self.targets.push(Some(Target::new(process)));
                self.deal();
            }
            Sample::Exited { pid, ended } => self.exited(pid, ended, finished),
            // Of no operation.
            Sample::Network(_) | Sample::NetworkLost { .. } => {}
            Sample::Call(call) => {
                let (group, ended) = self
                    .host_groups
                    .call(&call, self.limits.groups, &mut self.left_out);
                finished.push(Finished::Call(call, group));
                finished.extend(ended.map(Finished::HostGroup));
            }
            Sample::Device { pid, overwritten, .. } => {
                self.counts.overwritten = self.counts.overwritten.saturating_add(overwritten);
                // Records of theirs come all the same, without the device's times.
                debug_assert!(
                    self.by_pid.contains_key(&pid),
                    "a sample of a process comes after it"
                );
            }
            Sample::Verdict { pid, given } => {
                if let Some(target) = self.target(pid) {
                    target.given_verdict = Some(given);
                }
            }
            Sample::Communicator { .. } | Sample::Port { .. } | Sample::Failed { .. } => {}
        }
    }

    fn exited(&mut self, pid: u32, ended: bool, finished: &mut Vec<Finished>) {
        let Some(at) = self.by_pid.remove(&pid) else {
            return;
        };
        self.recent = (0, usize::MAX);
        self.host_groups.give_up(pid);
        if let Some(mut target) = self.targets[at].take() {
            target.flush(ended, &self.limits, finished);
            self.given.add(&target.given);
            self.left_out.add_all(&target.left_out);
        }
        // Places at the end are used again; a collector that outlives many processes keeps a short list.
        while self.targets.last().is_some_and(Option::is_none) {
            self.targets.pop();
        }
        self.deal();
    }

    /// Gives each process its part of what is for all.
    fn deal(&mut self) {
        let processes = self.by_pid.len();
        let part = |whole: Shared| Shared {
            process: whole.of_one(processes),
            ..whole
        };
        self.limits = Limits {
            operations: part(self.whole.operations),
            operation_parts: part(self.whole.operation_parts),
            instances: part(self.whole.instances),
            findings: part(self.whole.findings),
            metric_rows: part(self.whole.metric_rows),
            queue_pairs: part(self.whole.queue_pairs),
            registrations: part(self.whole.registrations),
            failovers: part(self.whole.failovers),
            ..self.whole
        };
    }

    /// Operations of a process that have not ended.
    pub fn running(&self, pid: u32) -> impl Iterator<Item = &RankOperation> {
        let target = self.by_pid.get(&pid).and_then(|at| self.targets[*at].as_ref());
        target.into_iter().flat_map(Target::running)
    }

    /// An operation that has not been handed out.
    pub fn known_mut(&mut self, pid: u32, op: u32, replay: u32) -> Option<&mut RankOperation> {
        self.target(pid)?.known_mut(op, replay)
    }

    /// Flushes one process that is still watched. `false` once there is none.
    pub fn finish_one(&mut self, finished: &mut Vec<Finished>) -> bool {
        let Some(pid) = self
            .targets
            .iter()
            .rev()
            .flatten()
            .map(|target| target.process.pid)
            .next()
        else {
            return false;
        };
        self.exited(pid, false, finished);
        true
    }

    /// Takes back the box of an operation that has been dealt with.
    pub fn recycle(&mut self, operation: Box<RankOperation>) {
        if let Some(target) = self.target(operation.pid) {
            target.recycle(operation);
        }
    }

    /// The earliest and the latest watermark of the instrumented processes; `None` if there are none.
    #[must_use]
    pub fn watermarks(&self) -> Option<(u64, u64)> {
        let mut all = self
            .targets
            .iter()
            .flatten()
            .filter(|target| target.process.instrumented)
            .map(|target| target.watermark_ns);
        let first = all.next()?;
        Some(all.fold((first, first), |(least, most), next| {
            (least.min(next), most.max(next))
        }))
    }

    /// Operations that have not been handed out.
    #[must_use]
    pub fn held(&self) -> usize {
        self.targets.iter().flatten().map(Target::held).sum()
    }

    /// Operations in flight on all ranks.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.targets.iter().flatten().map(Target::in_flight).sum()
    }

    /// Events by kind so far.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// What was given up so far.
    #[must_use]
    pub fn given(&self) -> Given {
        let mut all = self.given;
        for target in self.targets.iter().flatten() {
            all.add(&target.given);
        }
        all
    }

    /// What was left out so far at the limits of operations.
    #[must_use]
    pub fn left_out(&self) -> LeftOut {
        let mut all = self.left_out;
        for target in self.targets.iter().flatten() {
            all.add_all(&target.left_out);
        }
        all
    }
}
