//! One operation across the ranks that this collector watches.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use super::{Limits, RankOperation};
use crate::identity::InstanceKey;

/// Instances that were handed out before all their parts had come and are remembered for the parts that come later.
const REMEMBERED: usize = 65_536;

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
}

impl Instance {
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
    /// Instances handed out before all watched ranks' parts had come.
    pub timed_out: u64,
    /// Of those, the ones handed out because too many waited.
    pub evicted: u64,
    /// Parts that came twice.
    pub duplicates: u64,
    /// Operations that belong to no instance because their communicator, its size or their peer was never known.
    pub unidentified: u64,
}

/// Instances that wait for parts.
#[derive(Debug, Default)]
pub struct Instances {
    waiting: FxHashMap<InstanceKey, Instance>,
    /// In the order of their first part; may name instances that are gone.
    queue: VecDeque<(u64, InstanceKey)>,
    whole: Vec<InstanceKey>,
    remembered: FxHashSet<InstanceKey>,
    remembered_order: VecDeque<InstanceKey>,
    #[expect(
        clippy::vec_box,
        reason = "boxes move between tables without a copy of what is in them"
    )]
    spare: Vec<Vec<Box<RankOperation>>>,
    given_up: GivenUp,
}

impl Instances {
    /// Adds one rank's part. `expected` is how many parts watched ranks deliver, `now_ns` the latest watermark. What has
    /// to go early for lack of room is appended to `out`. A part that is of no use is handed back.
    pub fn add(
        &mut self,
        part: Box<RankOperation>,
        expected: usize,
        now_ns: u64,
        limits: &Limits,
        out: &mut Vec<Instance>,
    ) -> Option<Box<RankOperation>> {
        let Some(key) = part.instance() else {
            self.given_up.unidentified += 1;
            return Some(part);
        };
        if self.waiting.len() >= limits.instances && !self.waiting.contains_key(&key) {
            self.evict(out);
        }
        let instance = self.waiting.entry(key).or_insert_with(|| {
            self.queue.push_back((now_ns, key));
            Instance {
                key,
                parts: self.spare.pop().unwrap_or_default(),
                whole: false,
                late: self.remembered.contains(&key),
                since_ns: now_ns,
            }
        });
        let order = |part: &RankOperation| (part.rank, part.direction());
        match instance
            .parts
            .binary_search_by_key(&order(&part), |known| order(known))
        {
            Ok(_) => {
                self.given_up.duplicates += 1;
                return Some(part);
            }
            Err(at) => instance.parts.insert(at, part),
        }
        // Who comes after the instance was handed out has nobody to wait for.
        if !instance.whole && (instance.late || instance.parts.len() >= expected) {
            instance.whole = true;
            self.whole.push(key);
        }
        None
    }

    /// Hands out what is whole and wholly before `least_ns` (every watched process's watermark has passed it, so that no
    /// communicator of another process can turn up that takes part too), and what has waited too long at `now_ns`.
    /// `expected` is as in [`Instances::add`], as known by now.
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
            if instance.parts.iter().any(|part| part.device.1 > least_ns) {
                return true;
            }
            if !instance.late && instance.parts.len() < expected(key) {
                // A rank turned up since; its part makes the instance whole again.
                instance.whole = false;
                return false;
            }
            out.extend(self.waiting.remove(key));
            false
        });
        self.whole = whole;
        while let Some((since_ns, key)) = self.queue.front() {
            match self.waiting.get(key) {
                Some(instance) if instance.since_ns == *since_ns => {
                    if now_ns < since_ns.saturating_add(limits.instance_linger_ns) {
                        break;
                    }
                    self.given_up.timed_out += u64::from(!instance.whole);
                    let key = *key;
                    self.give_up(key, out);
                }
                _ => {}
            }
            self.queue.pop_front();
        }
    }

    fn evict(&mut self, out: &mut Vec<Instance>) {
        while let Some((since_ns, key)) = self.queue.pop_front() {
            if self
                .waiting
                .get(&key)
                .is_some_and(|instance| instance.since_ns == since_ns)
            {
                self.given_up.timed_out += 1;
                self.given_up.evicted += 1;
                self.give_up(key, out);
                return;
            }
        }
    }

    fn give_up(&mut self, key: InstanceKey, out: &mut Vec<Instance>) {
        let Some(instance) = self.waiting.remove(&key) else {
            return;
        };
        if !instance.whole && self.remembered.insert(key) {
            self.remembered_order.push_back(key);
            if self.remembered_order.len() > REMEMBERED
                && let Some(oldest) = self.remembered_order.pop_front()
            {
                self.remembered.remove(&oldest);
            }
        }
        out.push(instance);
    }

    /// Hands out everything.
    pub fn finish(&mut self, out: &mut Vec<Instance>) {
        for (_, key) in std::mem::take(&mut self.queue) {
            if let Some(instance) = self.waiting.get(&key) {
                self.given_up.timed_out += u64::from(!instance.whole);
                self.give_up(key, out);
            }
        }
        self.whole.clear();
    }

    /// Takes back the vector of an instance that has been dealt with.
    pub fn recycle(&mut self, parts: Vec<Box<RankOperation>>) {
        if self.spare.len() < 1024 && parts.is_empty() {
            self.spare.push(parts);
        }
    }

    /// How many wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// What was given up so far.
    #[must_use]
    pub fn given_up(&self) -> &GivenUp {
        &self.given_up
    }
}
