//! One operation across the ranks that this collector watches.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{RankOperation, communicators::Owner};
use crate::{
    identity::InstanceKey,
    limits::{LeftOut, Limit, Limits},
};

/// Vectors kept for later instances, and the room that one may have.
const SPARE: (usize, usize) = (1024, 64);

/// The parts of one instance.
#[derive(Clone, Debug)]
pub struct Instance {
    /// Which.
    pub key: InstanceKey,
    /// Parts, by rank, a send before a recv.
    pub parts: Vec<Box<RankOperation>>,
    /// All parts that watched ranks were to deliver are here.
    pub whole: bool,
    /// The instance was handed out before, without these parts.
    pub late: bool,
    since_ns: u64,
    /// When the last part that is here ended.
    end_ns: u64,
    /// Process of the first part, which the instance counts for.
    begun_by: u32,
    owner: Owner,
}

impl Instance {
    /// Whose processes the parts are of.
    #[must_use]
    pub fn owner(&self) -> Owner {
        self.owner
    }

    /// One with all parts.
    #[cfg(test)]
    pub(crate) fn of(key: InstanceKey, parts: Vec<RankOperation>) -> Self {
        Self {
            key,
            parts: parts.into_iter().map(Box::new).collect(),
            whole: true,
            late: false,
            since_ns: 0,
            end_ns: 0,
            begun_by: 0,
            owner: Owner::LAST,
        }
    }

    /// The part that stands for the whole: rank 0's, or a message's sender's.
    #[must_use]
    pub fn root_part(&self) -> Option<&RankOperation> {
        let (rank, direction) = self.key.root();
        self.parts
            .iter()
            .find(|part| part.rank == rank && part.direction() == direction)
            .map(|part| &**part)
    }
}

/// What was given up, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GivenUp {
    /// Instances handed out because some watched ranks' parts had not come for too long.
    pub timed_out: u64,
    /// Parts that came twice.
    pub duplicates: u64,
    /// Operations that belong to no instance because their communicator, its size or their peer was never known.
    pub unidentified: u64,
    /// Parts of a communicator that is another owner's.
    pub foreign: u64,
}

/// What one process has begun.
#[derive(Debug, Default)]
struct OfProcess {
    waiting: usize,
    /// In the order of their first part; may name instances that are gone.
    queue: VecDeque<(u64, InstanceKey)>,
    /// Those that were handed out before all their parts had come, remembered for the parts that come later.
    remembered: VecDeque<InstanceKey>,
}

/// Instances that wait for parts.
#[derive(Debug, Default)]
pub struct Instances {
    waiting: FxHashMap<InstanceKey, Instance>,
    by_process: FxHashMap<u32, OfProcess>,
    whole: Vec<InstanceKey>,
    remembered: FxHashSet<InstanceKey>,
    #[expect(
        clippy::vec_box,
        reason = "boxes move between tables without a copy of what is in them"
    )]
    spare: Vec<Vec<Box<RankOperation>>>,
    given_up: GivenUp,
    left_out: LeftOut,
    /// Parts of no use.
    #[expect(clippy::vec_box, reason = "as above")]
    refused: Vec<Box<RankOperation>>,
}

/// What is known around a part that is added.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// Owner of the part's process.
    pub owner: Owner,
    /// Whether the part's communicator is known as that owner's.
    pub is_known: bool,
    /// How many parts watched ranks deliver.
    pub expected: usize,
    /// The latest watermark.
    pub now_ns: u64,
    /// Instances that the part's process may have begun at once.
    pub most: usize,
}

impl Instances {
    /// Adds one rank's part. What has to go early for lack of room is appended to `out`. A part that is of no use comes with
    /// the next [`Instances::refused`].
    pub fn add(&mut self, part: Box<RankOperation>, context: &Context, out: &mut Vec<Instance>) {
        let Some(key) = part.instance() else {
            self.given_up.unidentified += 1;
            self.refused.push(part);
            return;
        };
        if let Some(known) = self
            .waiting
            .get(&key)
            .filter(|known| known.owner != context.owner)
        {
            // Both say that it is theirs. Whose communicator is known has it.
            self.given_up.foreign += 1;
            if !context.is_known {
                self.refused.push(part);
                return;
            }
            let begun_by = known.begun_by;
            if let Some(known) = self.take(&key, begun_by) {
                self.refused.extend(known.parts);
            }
        }
        let pid = part.pid;
        if !self.waiting.contains_key(&key) {
            self.begin(key, pid, context, out);
        }
        let Some(instance) = self.waiting.get_mut(&key) else {
            return;
        };
        let order = |part: &RankOperation| (part.rank, part.direction());
        match instance
            .parts
            .binary_search_by_key(&order(&part), |known| order(known))
        {
            Ok(_) => {
                self.given_up.duplicates += 1;
                self.refused.push(part);
                return;
            }
            Err(at) => {
                instance.end_ns = instance.end_ns.max(part.device.1);
                instance.parts.insert(at, part);
            }
        }
        // Who comes after the instance was handed out has nobody to wait for.
        if !instance.whole && (instance.late || instance.parts.len() >= context.expected) {
            instance.whole = true;
            self.whole.push(key);
        }
    }

    fn begin(&mut self, key: InstanceKey, pid: u32, context: &Context, out: &mut Vec<Instance>) {
        let own = self.by_process.entry(pid).or_default();
        if own.waiting >= context.most {
            self.evict(pid, out);
        }
        let (now_ns, waiting) = (context.now_ns, &self.waiting);
        let own = self.by_process.entry(pid).or_default();
        if own.queue.len() > 2 * context.most {
            own.queue.retain(|(_, key)| waiting.contains_key(key));
        }
        own.waiting += 1;
        own.queue.push_back((now_ns, key));
        let instance = Instance {
            key,
            parts: self.spare.pop().unwrap_or_default(),
            whole: false,
            late: self.remembered.contains(&key),
            since_ns: now_ns,
            end_ns: 0,
            begun_by: pid,
            owner: context.owner,
        };
        self.waiting.insert(key, instance);
    }

    /// Parts that were of no use.
    pub fn refused(&mut self) -> impl Iterator<Item = Box<RankOperation>> {
        self.refused.drain(..)
    }

    fn take(&mut self, key: &InstanceKey, begun_by: u32) -> Option<Instance> {
        let instance = self.waiting.remove(key)?;
        if let Some(own) = self.by_process.get_mut(&begun_by) {
            own.waiting = own.waiting.saturating_sub(1);
        }
        Some(instance)
    }

    /// Hands out what is whole and wholly before `least_ns` (every watched process's watermark has passed it, so that no
    /// communicator of another process can turn up that takes part too), and what has waited too long at `now_ns`.
    /// `expected` is how many parts watched ranks deliver, as known by now.
    pub fn settle(
        &mut self,
        least_ns: u64,
        now_ns: u64,
        limits: &Limits,
        expected: impl Fn(&InstanceKey) -> usize,
        out: &mut Vec<Instance>,
    ) {
        let mut whole = std::mem::take(&mut self.whole);
        whole.retain(|key| {
            let Some(instance) = self.waiting.get_mut(key) else {
                return false;
            };
            if instance.end_ns > least_ns {
                return true;
            }
            if !instance.late && instance.parts.len() < expected(key) {
                // A rank turned up since; its part makes the instance whole again.
                instance.whole = false;
                return false;
            }
            let begun_by = instance.begun_by;
            out.extend(self.take(key, begun_by));
            false
        });
        self.whole = whole;
        let mut processes = std::mem::take(&mut self.by_process);
        for (pid, own) in &mut processes {
            while let Some((since_ns, key)) = own.queue.front().copied() {
                if self.is_waiting(&key, *pid, since_ns) {
                    if now_ns < since_ns.saturating_add(limits.instance_linger_ns) {
                        break;
                    }
                    self.given_up.timed_out += u64::from(self.lacks_parts(&key));
                    self.give_up(key, own, limits.instances.process, out);
                }
                own.queue.pop_front();
            }
        }
        self.by_process = processes;
    }

    /// Whether an instance is the one that a process began then.
    fn is_waiting(&self, key: &InstanceKey, begun_by: u32, since_ns: u64) -> bool {
        let instance = self.waiting.get(key);
        instance.is_some_and(|instance| (instance.begun_by, instance.since_ns) == (begun_by, since_ns))
    }

    fn lacks_parts(&self, key: &InstanceKey) -> bool {
        self.waiting.get(key).is_some_and(|instance| !instance.whole)
    }

    /// Hands out the oldest instance that a process has begun.
    fn evict(&mut self, pid: u32, out: &mut Vec<Instance>) {
        let Some(mut own) = self.by_process.remove(&pid) else {
            return;
        };
        let most = own.waiting;
        while let Some((since_ns, key)) = own.queue.pop_front() {
            if self.is_waiting(&key, pid, since_ns) {
                self.left_out.count(Limit::Instances);
                self.give_up(key, &mut own, most, out);
                break;
            }
        }
        self.by_process.insert(pid, own);
    }

    /// Hands out an instance of `own`, which remembers `most` that lacked parts.
    fn give_up(&mut self, key: InstanceKey, own: &mut OfProcess, most: usize, out: &mut Vec<Instance>) {
        let Some(instance) = self.waiting.remove(&key) else {
            return;
        };
        own.waiting = own.waiting.saturating_sub(1);
        if !instance.whole && self.remembered.insert(key) {
            own.remembered.push_back(key);
            if own.remembered.len() > most
                && let Some(oldest) = own.remembered.pop_front()
            {
                self.remembered.remove(&oldest);
            }
        }
        out.push(instance);
    }

    /// Hands out everything. What lacks parts then had no time to get them: those are counted as unfinished.
    pub fn finish(&mut self, out: &mut Vec<Instance>) {
        let mut processes = std::mem::take(&mut self.by_process);
        for (pid, own) in &mut processes {
            let most = own.waiting;
            for (since_ns, key) in std::mem::take(&mut own.queue) {
                if self.is_waiting(&key, *pid, since_ns) {
                    self.give_up(key, own, most, out);
                }
            }
        }
        self.by_process = processes;
        self.whole.clear();
    }

    /// Nothing refers to a process any more.
    pub fn exited(&mut self, pid: u32) {
        if let Some(own) = self.by_process.get(&pid)
            && own.waiting == 0
        {
            for key in &own.remembered {
                self.remembered.remove(key);
            }
            self.by_process.remove(&pid);
        }
    }

    /// Takes back the vector of an instance that has been dealt with.
    pub fn recycle(&mut self, parts: Vec<Box<RankOperation>>) {
        if self.spare.len() < SPARE.0 && parts.is_empty() && parts.capacity() <= SPARE.1 {
            self.spare.push(parts);
        }
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What was left out so far.
    #[must_use]
    pub fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// What was given up so far.
    #[must_use]
    pub fn given_up(&self) -> &GivenUp {
        &self.given_up
    }
}
