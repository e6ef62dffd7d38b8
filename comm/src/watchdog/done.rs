//! What a rank was done with when it gave up its operations: of these it is to be said that it has left, of the others that nobody need
//! wait for them any more.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use super::{
    Watch,
    message::Message,
    position::{Position, Run},
};
use crate::{checks::Identity, communicator::lock};

/// Sequences that are told: more ranks a rank hardly talks to. Of others nothing counts as done.
const MOST: usize = 16 << 10;

/// The last run of each sequence of operations (the collectives, the messages from one rank to another, the same of each graph) that a
/// rank was done with, and with it with all before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    pub(super) runs: Vec<Run>,
}

impl Done {
    /// Of calls that were made, what of them is not done, and how often captured operations have been replayed.
    fn of(
        called: impl Iterator<Item = Identity>,
        undone: &[Identity],
        replayed: impl Iterator<Item = Run>,
    ) -> Self {
        let mut begins: HashMap<Identity, u64> = HashMap::new();
        for identity in undone {
            let begin = begins.entry(identity.sequence()).or_insert(u64::MAX);
            *begin = identity.seq().min(*begin);
        }
        // A sequence goes on where it is not done.
        let is_done = |identity: &Identity| {
            let begin = begins.get(&identity.sequence());
            begin.is_none_or(|begin| identity.seq() < *begin)
        };
        let eager = called.filter(is_done).map(|identity| Run { identity, replay: 0 });
        let mut lasts: HashMap<Identity, Run> = HashMap::new();
        for run in eager.chain(replayed) {
            match lasts.entry(run.identity.sequence()) {
                Entry::Vacant(entry) => {
                    entry.insert(run);
                }
                Entry::Occupied(mut entry) if order(*entry.get()) < order(run) => {
                    entry.insert(run);
                }
                Entry::Occupied(_) => {}
            }
        }
        Self {
            runs: lasts.into_values().take(MOST).collect(),
        }
    }

    /// Whether it was done with a run.
    pub(super) fn has(&self, run: Run) -> bool {
        let sequence = run.identity.sequence();
        let whole = Identity::whole_graph(run.identity.graph());
        self.runs.iter().any(|last| {
            let is_same = last.identity.sequence() == sequence && order(*last) >= order(run);
            is_same || run.replay > 0 && last.identity == whole && last.replay >= run.replay
        })
    }
}

/// Operations of a graph run in the order of its nodes, and replays one after another.
fn order(run: Run) -> (u32, u64) {
    (run.replay, run.identity.seq())
}

impl Watch {
    /// The communicator ends, or its operations are given up: whoever asks is told so, and if they did not end by
    /// themselves (`given_up`) also who does not.
    pub(crate) fn end(&self, given_up: bool) {
        if given_up {
            self.give_up();
        }
        // Release: pairs with `position_so_far`; who sees that it has ended sees how.
        let is_first = !self.ended.swap(true, Ordering::Release);
        if let Some(done) = self.done.get().filter(|_| is_first) {
            (self.post)(None, &Message::Ended { done: done.clone() }.encode());
        }
    }

    /// The operations are about to be given up, on whatever account: what is done by then is kept, since what ends afterwards does
    /// because of that. Waits for a fresh query of events for a moment.
    pub(crate) fn give_up(&self) {
        // Acquire: pairs with `end`. What has ended in good order has done what it called.
        if self.ended.load(Ordering::Acquire) || self.done.get().is_some() {
            return;
        }
        self.refresh(Duration::ZERO);
        let flights = lock(&self.flights);
        let replayed = flights.replays().collect::<Vec<_>>();
        let undone = flights.undone();
        // What is launched meanwhile is not done either.
        let called = self.checks.called();
        drop(flights);
        let done = Done::of(called.into_iter(), &undone, replayed.into_iter());
        // The first one counts: it is of before anything was given up.
        let _ = self.done.set(done);
    }

    /// Where this rank is with a run.
    pub(super) fn position(&self, run: Run, now: u64) -> Position {
        // First: where kernels have been given up that is known by then.
        let position = self.position_so_far(run, now);
        match self.done.get() {
            None => position,
            Some(done) if done.has(run) => Position::Done,
            Some(_) if self.fault().is_some() => Position::Faulted,
            Some(_) => Position::Ended,
        }
    }

    /// Gives up when the communicator fails.
    pub(super) fn give_up_on_failure(self: &Arc<Self>) {
        let watch = Arc::downgrade(self);
        self.life.before_failure(Box::new(move || {
            if let Some(watch) = watch.upgrade() {
                watch.give_up();
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collective(seq: u64) -> Identity {
        Identity::Collective { seq }
    }

    fn message(seq: u64) -> Identity {
        Identity::Message { from: 1, to: 0, seq }
    }

    fn node(graph: u64, node: u64, replay: u32) -> Run {
        Run {
            identity: collective(graph << 32 | node),
            replay,
        }
    }

    #[test]
    fn what_is_done_is_all_up_to_what_is_not() {
        let called = [
            collective(4),
            collective(5),
            collective(6),
            message(2),
            message(3),
        ];
        let undone = [collective(6), message(2)];
        let replayed = [node(1, 0, 7), node(1, 1, 6), node(2, 0, 3), node(2, 1, 3)];
        let done = Done::of(called.into_iter(), &undone, replayed.into_iter());
        let has = |identity| done.has(Run { identity, replay: 0 });
        assert!(
            has(collective(0)) && has(collective(5)),
            "what nobody remembers, too"
        );
        assert!(!has(collective(6)) && !has(collective(7)));
        assert!(
            !has(message(2)) && !has(message(3)),
            "one behind what is not done"
        );
        let other = Identity::Message {
            from: 0,
            to: 1,
            seq: 0,
        };
        assert!(!has(other), "it was never called");
        assert!(done.has(node(1, 0, 7)) && !done.has(node(1, 1, 7)) && done.has(node(1, 1, 6)));
        assert!(done.has(node(2, 1, 3)) && !done.has(node(2, 0, 4)));
        assert!(!done.has(node(3, 0, 1)));
    }

    #[test]
    fn of_a_graph_that_is_gone_all_is_done_that_was_replayed() {
        let gone = Run {
            identity: Identity::whole_graph(4),
            replay: 9,
        };
        let done = Done::of([].into_iter(), &[], [gone].into_iter());
        let of_message = |replay| Run {
            identity: message(4 << 32 | 2),
            replay,
        };
        assert!(done.has(of_message(9)) && done.has(node(4, 1, 8)));
        assert!(!done.has(of_message(10)) && !done.has(node(5, 1, 1)));
    }
}
