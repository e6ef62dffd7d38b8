//! Sequence numbers: what makes an operation the same one on every rank that takes part in it.

use std::{cmp::Reverse, collections::HashMap};

use ringsight_records::Function;

use crate::op::Task;

/// A sequence of operations that some ranks do together: eager ones are counted from 0, captured ones are numbered
/// `graph << 32 | node`, where `graph` counts the captures in which the sequence took part, from 1.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sequence {
    eager: u64,
    graphs: u32,
    /// Graph number of the capture seen last.
    capture: u32,
    node: u32,
}

impl Sequence {
    /// The next number; `graph` is the number of the capture, 0 for none.
    pub(crate) fn next(&mut self, graph: u32) -> u64 {
        if graph == 0 {
            let seq = self.eager;
            self.eager += 1;
            return seq;
        }
        if graph != self.capture {
            self.capture = graph;
            self.graphs += 1;
            self.node = 0;
        }
        let seq = u64::from(self.graphs) << 32 | u64::from(self.node);
        self.node += 1;
        seq
    }
}

impl Sequence {
    /// Takes back the number given out last: `seq` if that is still the last one.
    fn give_back(&mut self, graph: u32, seq: u64) {
        if graph == 0 {
            if self.eager == seq + 1 {
                self.eager = seq;
            }
        } else if self.capture == graph
            && self.node > 0
            && seq == u64::from(self.graphs) << 32 | u64::from(self.node - 1)
        {
            self.node -= 1;
            if self.node == 0 {
                self.graphs -= 1;
                self.capture = 0;
            }
        }
    }
}

/// The sequences of one rank of a communicator.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    collectives: Sequence,
    to: HashMap<u32, Sequence>,
    from: HashMap<u32, Sequence>,
    /// All of them, for the node number in a graph.
    nodes: Sequence,
}

impl Sequences {
    /// (sequence, node in the graph) of the next `function` with `peer` (0 for collectives).
    pub(crate) fn next(&mut self, function: Function, peer: u32, graph: u32) -> (u64, u32) {
        let seq = match function {
            // Each end counts for the pair: the receiver's n-th receive takes the sender's n-th send.
            Function::Send => self.to.entry(peer).or_default().next(graph),
            Function::Recv => self.from.entry(peer).or_default().next(graph),
            _ => self.collectives.next(graph),
        };
        let node = if graph == 0 {
            0
        } else {
            self.nodes.next(graph) as u32
        };
        (seq, node)
    }

    /// Takes back the numbers of tasks, as far as they were given out last.
    pub(crate) fn give_back(&mut self, tasks: &mut [&Task]) {
        tasks.sort_unstable_by_key(|task| Reverse(task.info.seq));
        for task in &*tasks {
            let peer = task.request.peer.unwrap_or(0);
            let sequence = match task.request.function {
                Function::Send => self.to.get_mut(&peer),
                Function::Recv => self.from.get_mut(&peer),
                _ => Some(&mut self.collectives),
            };
            if let Some(sequence) = sequence {
                sequence.give_back(task.graph, task.info.seq);
            }
        }
        tasks.sort_unstable_by_key(|task| Reverse(task.node));
        for task in tasks.iter().filter(|task| task.graph != 0) {
            let seq = u64::from(self.nodes.graphs) << 32 | u64::from(task.node);
            self.nodes.give_back(task.graph, seq);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eager_and_captured_numbers_do_not_disturb_each_other() {
        let mut sequence = Sequence::default();
        assert_eq!([sequence.next(0), sequence.next(0)], [0, 1]);
        assert_eq!([sequence.next(7), sequence.next(7)], [1 << 32, 1 << 32 | 1]);
        assert_eq!(sequence.next(0), 2);
        assert_eq!(sequence.next(9), 2 << 32);
    }

    #[test]
    fn numbers_that_were_given_out_last_can_be_given_back() {
        let mut sequence = Sequence::default();
        for graph in [0, 7] {
            let given = [sequence.next(graph), sequence.next(graph), sequence.next(graph)];
            sequence.give_back(graph, given[0]);
            assert_eq!(sequence.next(graph), given[2] + 1, "only the last one");
            for seq in [given[2] + 1, given[2], given[1], given[0]] {
                sequence.give_back(graph, seq);
            }
            assert_eq!(sequence.next(graph), given[0]);
            sequence.give_back(graph, given[0]);
        }
        assert_eq!(sequence.next(8), 1 << 32, "capture 7 had nothing");
    }

    #[test]
    fn both_ends_of_a_pair_count_alike() {
        let (mut sender, mut receiver) = (Sequences::default(), Sequences::default());
        sender.next(Function::AllReduce, 0, 3);
        assert_eq!(sender.next(Function::Send, 1, 3), (1 << 32, 1));
        assert_eq!(sender.next(Function::Send, 2, 3), (1 << 32, 2));
        assert_eq!(receiver.next(Function::Recv, 0, 8), (1 << 32, 0));
        assert_eq!(
            sender.next(Function::Send, 1, 0).0,
            receiver.next(Function::Recv, 0, 0).0
        );
    }
}
