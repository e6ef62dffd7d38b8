//! What a rank had completed when it gave up its operations.
//!
//! The rank has left the runs that it completed. For every other run it is the rank that gave up.

use std::collections::{HashMap, hash_map::Entry};

use super::evidence::OperationRun;
use crate::op::Identity;

/// The most sequences that a rank names. A rank with more peers leaves the rest out, and these count as not completed.
const MAX_SEQUENCES: usize = 16 << 10;

/// By sequence of operations, the last run that a rank completed; it completed every earlier run of the sequence, too.
///
/// The collectives of a communicator are a sequence, and so are the messages from one rank to another. The operations of
/// each graph have sequences of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CompletedRuns {
    pub(crate) lasts: Vec<OperationRun>,
}

impl CompletedRuns {
    /// From the eager operations that were called, those of them that are not completed, and the last completed replay of
    /// each captured operation.
    pub(crate) fn new(
        called: impl Iterator<Item = Identity>,
        incomplete: &[Identity],
        replayed: impl Iterator<Item = OperationRun>,
    ) -> Self {
        let mut first_incomplete: HashMap<Identity, u64> = HashMap::new();
        for identity in incomplete {
            let first = first_incomplete.entry(identity.sequence()).or_insert(u64::MAX);
            *first = identity.seq().min(*first);
        }
        let is_completed = |identity: &Identity| {
            let first = first_incomplete.get(&identity.sequence());
            first.is_none_or(|first| identity.seq() < *first)
        };
        let eager = called
            .filter(is_completed)
            .map(|identity| OperationRun { identity, replay: 0 });
        let mut lasts: HashMap<Identity, OperationRun> = HashMap::new();
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
            lasts: lasts.into_values().take(MAX_SEQUENCES).collect(),
        }
    }

    /// Whether the rank completed a run.
    pub(crate) fn contains(&self, run: OperationRun) -> bool {
        let sequence = run.identity.sequence();
        let whole_graph = Identity::whole_graph(run.identity.graph());
        self.lasts.iter().any(|last| {
            let is_same = last.identity.sequence() == sequence && order(*last) >= order(run);
            is_same || run.replay > 0 && last.identity == whole_graph && last.replay >= run.replay
        })
    }
}

/// The operations of a graph run in the order of its nodes, and its replays run one after another.
fn order(run: OperationRun) -> (u32, u64) {
    (run.replay, run.identity.seq())
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

    fn node(graph: u64, node: u64, replay: u32) -> OperationRun {
        OperationRun {
            identity: collective(graph << 32 | node),
            replay,
        }
    }

    #[test]
    fn a_sequence_is_completed_up_to_its_first_incomplete_operation() {
        let called = [
            collective(4),
            collective(5),
            collective(6),
            message(2),
            message(3),
        ];
        let incomplete = [collective(6), message(2)];
        let replayed = [node(1, 0, 7), node(1, 1, 6), node(2, 0, 3), node(2, 1, 3)];
        let completed = CompletedRuns::new(called.into_iter(), &incomplete, replayed.into_iter());
        let has = |identity| completed.contains(OperationRun { identity, replay: 0 });
        assert!(
            has(collective(0)) && has(collective(5)),
            "also calls that nobody remembers"
        );
        assert!(!has(collective(6)) && !has(collective(7)));
        assert!(
            !has(message(2)) && !has(message(3)),
            "message 3 comes after an incomplete one"
        );
        let other = Identity::Message {
            from: 0,
            to: 1,
            seq: 0,
        };
        assert!(!has(other), "it was never called");
        assert!(completed.contains(node(1, 0, 7)) && !completed.contains(node(1, 1, 7)));
        assert!(completed.contains(node(1, 1, 6)));
        assert!(completed.contains(node(2, 1, 3)) && !completed.contains(node(2, 0, 4)));
        assert!(!completed.contains(node(3, 0, 1)));
    }

    #[test]
    fn every_operation_of_a_destroyed_graph_is_completed_up_to_its_last_replay() {
        let destroyed = OperationRun {
            identity: Identity::whole_graph(4),
            replay: 9,
        };
        let completed = CompletedRuns::new([].into_iter(), &[], [destroyed].into_iter());
        let of_message = |replay| OperationRun {
            identity: message(4 << 32 | 2),
            replay,
        };
        assert!(completed.contains(of_message(9)) && completed.contains(node(4, 1, 8)));
        assert!(!completed.contains(of_message(10)) && !completed.contains(node(5, 1, 1)));
    }
}
