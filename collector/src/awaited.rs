//! What ranks are in that others wait for, so that the spans of those who wait lead there.
//!
//! The library's record of a verdict names the rank. What that rank is in instead is seen here if its process is watched, too.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::{
    correlate::{Correlator, RankOperation, Whereabouts, communicators::Communicators},
    identity::InstanceKey,
};

/// Operations of a process that are remembered as ones on which it gave a verdict.
const REMEMBERED: usize = 1024;

/// A rank, whatever communicator: its process and device.
type Who = (u32, i32);

/// What is known of ranks that others may wait for.
#[derive(Debug, Default)]
pub(crate) struct Awaited {
    /// What each rank was in last, and until when.
    last: FxHashMap<Who, (u64, Whereabouts)>,
    /// Operations on which a verdict was given, by the process that gave it.
    judged: FxHashMap<u32, Judged>,
}

#[derive(Debug, Default)]
struct Judged {
    known: FxHashSet<InstanceKey>,
    order: VecDeque<InstanceKey>,
}

impl Judged {
    fn insert(&mut self, key: InstanceKey) {
        if self.known.insert(key) {
            self.order.push_back(key);
            if self.order.len() > REMEMBERED
                && let Some(oldest) = self.order.pop_front()
            {
                self.known.remove(&oldest);
            }
        }
    }
}

/// A part of an operation of a communicator that is known.
fn whereabouts(part: &RankOperation, communicators: &Communicators, over: bool) -> Option<Whereabouts> {
    let ranks = match part.ranks {
        0 => communicators.get(part.comm)?.ranks,
        ranks => ranks,
    };
    Some(Whereabouts {
        key: part.instance_of(ranks)?,
        rank: part.rank,
        direction: part.direction(),
        over,
    })
}

fn who(part: &RankOperation, communicators: &Communicators) -> Option<Who> {
    let member = communicators.get(part.comm)?.member(part.pid, part.rank)?;
    Some((part.pid, member.device))
}

impl Awaited {
    /// A rank's part is over, or will be told as it is.
    pub(crate) fn over(&mut self, part: &RankOperation, communicators: &Communicators) {
        let until = part.cut_ns.max(part.latest_ns());
        if let Some(who) = who(part, communicators)
            && self.last.get(&who).is_none_or(|(last, _)| *last <= until)
            && let Some(place) = whereabouts(part, communicators, part.cut_ns == 0)
        {
            self.last.insert(who, (until, place));
        }
    }

    /// Nothing refers to a process any more.
    pub(crate) fn exited(&mut self, pid: u32) {
        self.last.retain(|(of, _), _| *of != pid);
        self.judged.remove(&pid);
    }

    /// Whether an unfinished part is told in the trace of its operation: it has `ended` with its process, or it hangs, or others
    /// wait for its rank. Anything else may go on, and whoever sees it end tells it.
    pub(crate) fn is_told(&self, part: &RankOperation, ended: bool) -> bool {
        let hangs = |key| self.judged.values().any(|judged| judged.known.contains(&key));
        part.instance()
            .is_some_and(|key| ended || part.awaited_in.is_some() || hangs(key))
    }

    /// The watchdog has given a verdict on an operation: finds out what the culprit is in instead.
    pub(crate) fn judged(
        &mut self,
        part: &RankOperation,
        correlator: &mut Correlator,
        communicators: &Communicators,
    ) -> Option<Whereabouts> {
        let here = whereabouts(part, communicators, false)?;
        let verdict = part.verdicts.last()?;
        self.judged.entry(part.pid).or_default().insert(here.key);
        let culprit = communicators
            .get(part.comm)
            .and_then(|known| known.of_rank(verdict.culprit))
            .map(|member| (member.pid, member.device));
        let culprit = culprit.filter(|culprit| Some(*culprit) != who(part, communicators))?;
        let running: Vec<_> = correlator
            .running(culprit.0)
            .filter(|running| who(running, communicators) == Some(culprit))
            .filter_map(|running| Some((running, whereabouts(running, communicators, false)?)))
            .collect();
        if running.iter().any(|(_, place)| place.key == here.key) {
            return None;
        }
        let begun = |running: &RankOperation| running.begun_ns().unwrap_or(running.first_ns);
        let oldest = running.iter().min_by_key(|(running, _)| begun(running));
        let oldest = oldest.map(|(running, place)| (running.op, running.replay, *place));
        let last = || self.last.get(&culprit).map(|(_, place)| *place);
        let instead = oldest.map(|(_, _, place)| place).or_else(last);
        let instead = instead.filter(|place| place.key != here.key);
        if let Some((op, replay, _)) = oldest
            && let Some(held_up) = correlator.known_mut(culprit.0, op, replay)
        {
            held_up.awaited_in.get_or_insert(here);
        }
        if let Some(waits) = correlator.known_mut(part.pid, part.op, part.replay)
            && let Some(verdict) = waits.verdicts.last_mut()
        {
            verdict.instead = instead;
        }
        instead
    }
}
