//! Sequence numbers: what makes an operation the same one on every rank that takes part in it.

use std::collections::HashMap;

use ringsight_records::Function;

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
