//! Ranks whose process ended while others need them.
//!
//! The library gives no verdict on a rank that dies between two operations: whoever calls the next one gets an error at once. The collector
//! sees the process end, and the others' operations that fail or never end. It reports that as the verdict that the library would give.
//!
//! # Invariants
//! - Of each communicator the first death counts: ranks that end because of it are no cause.
//! - A rank that destroyed its communicator before it ended is not dead. Nor is one that nobody waits for: a job may end without ceremony.
//! - Each death is reported on one operation, the first that was seen to fail or to wait for [`PATIENCE_NS`]. If there is none, it is
//!   reported on [`NO_OPERATION`], provided that the process is known to have failed and no other one failed alike in this time: whoever
//!   ends a job ends all of its processes alike.

use rustc_hash::FxHashMap;

use ringsight_records::Cause;

use crate::{
    correlate::{RankOperation, Verdict, communicators::Communicators},
    identity::{InstanceKey, TraceKind},
};

/// How long an operation may go on after a death before it counts as waiting: the dead rank may have done its part.
const PATIENCE_NS: u64 = 500_000_000;
/// How long a failed operation is remembered for a death that is seen after it.
const MEMORY_NS: u64 = 2_000_000_000;
/// How often operations in flight are looked at while a death has nobody who waits.
const INTERVAL_NS: u64 = 200_000_000;
/// Communicators of which one process's death is kept.
const DEATHS: usize = 256;
/// Communicators of which one process's failed operation is kept.
const FAILURES: usize = 64;

/// Sequence of the operation that a rank died in which died between two operations.
pub(crate) const NO_OPERATION: u64 = u64::MAX;

/// The first death in a communicator.
#[derive(Clone, Copy, Debug)]
struct Death {
    pid: u32,
    rank: u32,
    at_ns: u64,
    /// How its process failed, if it is known to have.
    status: Option<i32>,
    /// Another process failed alike at the time.
    is_common: bool,
    /// The operation that it was reported on.
    reported: Option<InstanceKey>,
}

/// What the library would say of it to a rank that has waited since `begun_ns`.
fn verdict(death: &Death, begun_ns: u64) -> Verdict {
    Verdict {
        time_ns: death.at_ns.max(begun_ns),
        begun_ns,
        cause: Cause::RankDead,
        culprit: death.rank,
        hang: true,
        nic: None,
        instead: None,
    }
}

/// Deaths, by communicator.
#[derive(Debug, Default)]
pub(crate) struct Deaths {
    first: FxHashMap<u64, Death>,
    /// The last operation that failed without a known death, and when.
    failed: FxHashMap<u64, (Box<RankOperation>, u64)>,
    /// How many of them each process brought, as it was when old ones were last forgotten, and since.
    brought: FxHashMap<u32, usize>,
    forgot_ns: u64,
    looked_ns: u64,
}

impl Deaths {
    /// A process has ended with this rank of a communicator. Returns the report if an operation of it has just failed.
    pub(crate) fn died(
        &mut self,
        comm: u64,
        (pid, rank): (u32, u32),
        status: Option<i32>,
        now_ns: u64,
    ) -> Option<Box<RankOperation>> {
        if let Some(first) = self.first.get_mut(&comm) {
            let is_alike = first.pid != pid && status.is_some() && first.status == status;
            first.is_common |= is_alike && now_ns.saturating_sub(first.at_ns) < PATIENCE_NS;
            return None;
        }
        if self.first.values().filter(|death| death.pid == pid).count() >= DEATHS {
            return None;
        }
        let death = Death {
            pid,
            rank,
            at_ns: now_ns,
            status,
            is_common: false,
            reported: None,
        };
        self.first.insert(comm, death);
        let (failed, at_ns) = self.failed.remove(&comm)?;
        if now_ns.saturating_sub(at_ns) > MEMORY_NS {
            return None;
        }
        self.report(&failed)
    }

    /// A rank's part has failed. Returns the report if that is for a death.
    pub(crate) fn failed(&mut self, part: &RankOperation, now_ns: u64) -> Option<Box<RankOperation>> {
        if self.first.contains_key(&part.comm) {
            return self.report(part);
        }
        if now_ns.saturating_sub(self.forgot_ns) >= INTERVAL_NS {
            self.forgot_ns = now_ns;
            self.brought.clear();
            self.failed.retain(|_, (failed, at_ns)| {
                let is_kept = now_ns.saturating_sub(*at_ns) <= MEMORY_NS;
                *self.brought.entry(failed.pid).or_default() += usize::from(is_kept);
                is_kept
            });
        }
        let brought = self.brought.entry(part.pid).or_default();
        if *brought < FAILURES {
            self.failed.entry(part.comm).or_insert_with(|| {
                *brought += 1;
                (part.judged(), now_ns)
            });
        }
        None
    }

    /// Communicators with a death for which operations in flight should be looked at now.
    pub(crate) fn due(&mut self, now_ns: u64) -> Vec<u64> {
        if self.first.is_empty() || now_ns.saturating_sub(self.looked_ns) < INTERVAL_NS {
            return Vec::new();
        }
        self.looked_ns = now_ns;
        let is_due =
            |death: &Death| death.reported.is_none() && now_ns >= death.at_ns.saturating_add(PATIENCE_NS);
        let due = self.first.iter().filter(|(_, death)| is_due(death));
        due.map(|(comm, _)| *comm).collect()
    }

    /// The report of a part that fails, or waits, because of a death.
    pub(crate) fn report(&mut self, part: &RankOperation) -> Option<Box<RankOperation>> {
        let death = self.first.get_mut(&part.comm)?;
        let key = part.instance()?;
        let takes_part = key.pair.is_none_or(|(from, to)| [from, to].contains(&death.rank));
        if part.pid == death.pid || !takes_part || *death.reported.get_or_insert(key) != key {
            return None;
        }
        let mut judged = part.judged();
        judged.verdicts = vec![verdict(death, part.begun_ns().unwrap_or(death.at_ns))];
        Some(judged)
    }

    /// Failed processes for which no operation shows, by communicator, as parts of [`NO_OPERATION`]. Those of the last moment may have
    /// something to show yet, unless nothing more `is_last`.
    pub(crate) fn failures(&mut self, now_ns: u64, is_last: bool) -> Vec<(u64, RankOperation)> {
        let mut failures = Vec::new();
        for (comm, death) in &mut self.first {
            let is_due = is_last || now_ns >= death.at_ns.saturating_add(2 * PATIENCE_NS);
            if !is_due || death.reported.is_some() || death.is_common || death.status.is_none() {
                continue;
            }
            let mut part = RankOperation::default();
            part.reset(death.pid, 0, 0);
            (part.comm, part.rank, part.seq) = (*comm, death.rank, NO_OPERATION);
            part.verdicts = vec![verdict(death, death.at_ns)];
            death.reported = Some(InstanceKey {
                comm: *comm,
                seq: NO_OPERATION,
                ranks: 0,
                replay: 0,
                kind: TraceKind::Collective,
                pair: None,
            });
            failures.push((*comm, part));
        }
        failures
    }

    /// Forgets what no watched process is in any more.
    pub(crate) fn settle(&mut self, communicators: &Communicators) {
        self.first.retain(|comm, _| communicators.get(*comm).is_some());
        self.failed.retain(|comm, _| communicators.get(*comm).is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(pid: u32, comm: u64) -> RankOperation {
        let mut part = RankOperation::default();
        part.reset(pid, 0, 0);
        part.comm = comm;
        part
    }

    #[test]
    fn a_process_leaves_the_others_their_room() {
        let mut deaths = Deaths::default();
        for comm in 0..5000 {
            deaths.failed(&part(1, comm), 1);
            deaths.died(10_000 + comm, (1, 0), Some(9), 1);
        }
        assert_eq!((deaths.failed.len(), deaths.first.len()), (FAILURES, DEATHS));
        deaths.failed(&part(2, 7777), 1);
        deaths.died(8888, (2, 0), Some(9), 1);
        assert!(deaths.failed.contains_key(&7777) && deaths.first.contains_key(&8888));
        // What was forgotten makes room.
        let later = 1 + MEMORY_NS + INTERVAL_NS;
        deaths.failed(&part(1, 9999), later);
        assert!(deaths.failed.contains_key(&9999) && deaths.failed.len() == 1);
    }
}
