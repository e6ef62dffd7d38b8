//! The empty slots of channel programs: why there are some stands with [their programs](super).

use ringsight_records::Function;

/// Empty slots of a program, in the order in which it comes to them. What one rank posts its next one takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// Posts one before the rounds.
    pub(super) post: bool,
    /// Takes one before the rounds: data follows it.
    pub(super) take_first: bool,
    /// Takes one after the rounds: no data follows it.
    pub(super) take_last: bool,
}

impl Marks {
    /// `order` begins with this rank, as in [`Connections::Ring`](crate::Connections::Ring).
    pub(super) fn new(function: Function, order: &[u32], root: u32) -> Self {
        let ranks = order.len();
        // Whether the program of the rank `back` hops before this one begins by waiting for its previous rank.
        let waits = |back: usize| {
            let at = |hops: usize| order[(2 * ranks - hops) % ranks];
            match function {
                Function::Broadcast => at(back) != root,
                Function::Reduce => at(back + 1) != root,
                Function::AlltoAll | Function::Gather | Function::Scatter => true,
                _ => false,
            }
        };
        let data_arrives = match function {
            Function::Broadcast => order[0] != root,
            Function::Reduce => order[ranks - 1] != root,
            _ => false,
        };
        Self {
            post: waits(0),
            take_first: waits(1) && data_arrives,
            take_last: waits(1) && !data_arrives,
        }
    }
}
