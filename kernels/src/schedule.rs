//! The steps of a channel program: what one channel does for one operation.
//!
//! This is the one description of a program. The device programs execute it ([`crate::host`], `cuda/schedule.cuh`), and [`Work::steps`]
//! counts its slots for the proxy. A step moves at most one slot in and at most one slot out.
//!
//! Invariants:
//! - All FIFOs of a ring have slots of one size. Otherwise ranks would cut an operation into different steps.
//! - Both ends of a FIFO count the same steps.
//! - On every channel, each rank of a ring posts at least one slot, so that its next rank sees its tag (below).
//!
//! # Tags: how ranks that call different operations find out
//!
//! Every slot carries the tag of its operation ([`Work::tag`]). A rank reports a mismatch when it takes a slot with another tag. For
//! that, ranks must not all wait before any of them has posted a slot:
//! - A rank that begins by waiting for its previous rank first posts an *empty* slot. These are all ranks but the root in Broadcast,
//!   and all but the rank behind the root in Reduce. If data follows the empty slot, its next rank takes the slot first, otherwise last,
//!   so that no rank waits for it earlier than it must.
//! - AllGather, ReduceScatter and a one-shot AllReduce begin with a slot of data on every hop. So does an AllReduce in which each rank
//!   owns elements of the channel's part. In a small AllReduce fewer ranks own some, but rank 0 always does, so the rank behind rank 0
//!   begins with a slot of data.
//! - Functions made of sends and receives (AlltoAll, Gather, Scatter) have a ring program of one empty slot.
//!
//! Therefore the rank behind rank 0 posts a slot without waiting, whatever the ranks have called. Its next rank either sees another tag
//! or does the same in turn, and so on round the ring. A program that waits for room also looks at the tag of what has arrived.
//!
//! # Ownership in an AllReduce
//!
//! Each rank owns `owned` elements, as in ReduceScatter and AllGather, and a channel does the same range of every rank's elements
//! ([`Work::part`]). The position of an element alone decides at which rank its reduction begins. So the result has the same bits for
//! any number of channels and any slot size, as long as all channels have one ring order.
//!
//! # One-shot AllReduce
//!
//! [`Algorithm::OneShot`] is for latency. Each rank's elements go all the way round the ring: `ranks - 1` hops in a row instead of the
//! `2 * ranks - 2` of reduce-scatter and all-gather, and all ranks begin at once. Each rank keeps what passes and reduces it at the end in
//! the order of ranks, so all ranks get the same bits.

#[cfg(test)]
mod tests;

use std::ops::Range;

use ringsight_records::{Algorithm, DataType, Function};

use crate::launch::{Connections, Work};

/// One step of a channel program. It takes a slot from `prev` (`recv`), combines it with this rank's data (`source`),
/// and writes the result to the receive buffer (`store`) and to a slot of `next` (`send`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Elements moved. Both ends skip a step of 0 elements unless it is a [`Step::mark`].
    pub elems: usize,
    /// Its slot is empty and carries only the tag.
    pub mark: bool,
    /// Consumes one slot from `prev`.
    pub recv: bool,
    /// Posts one slot to `next`.
    pub send: bool,
    /// Where this rank's contribution starts in the send buffer, in elements. With `recv` it is reduced with the slot.
    pub source: Option<usize>,
    /// Where the result goes in the receive buffer, in elements.
    pub store: Option<usize>,
    /// The result has every rank's contribution: an average divides now.
    pub complete: bool,
    /// One-shot only: the rank whose elements the slot holds. The program keeps them until the step with a `store`, which reduces
    /// all ranks' elements in the order of ranks.
    pub keep: Option<u32>,
}

impl Step {
    /// A step with an empty slot; skipped if it neither posts nor takes one.
    fn marked(send: bool, recv: bool) -> Self {
        Self {
            elems: 0,
            mark: send || recv,
            recv,
            send,
            source: None,
            store: None,
            complete: false,
            keep: None,
        }
    }
}

/// The steps of one [`Work`]: `rounds` rounds of `per_round` steps.
#[derive(Clone, Debug)]
pub struct Schedule {
    kind: Kind,
    part: Range<usize>,
    /// Elements of the part that one round does. Where each rank owns elements: of each rank's.
    round_elems: usize,
    marks: Marks,
    /// Rounds that cover the part; 0 if the part is empty.
    pub rounds: usize,
    /// Steps of each round, skipped ones included.
    pub per_round: usize,
}

/// The empty slots of a program, in order (see "Tags" above). What one rank posts, its next rank takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Marks {
    /// Posts one before the rounds.
    post: bool,
    /// Takes one before the rounds; data follows it.
    take_first: bool,
    /// Takes one after the rounds; no data follows it.
    take_last: bool,
}

impl Marks {
    /// `order` begins with this rank, as in [`Connections::Ring`](crate::Connections::Ring).
    fn new(function: Function, order: &[u32], root: u32) -> Self {
        let ranks = order.len();
        // Whether the rank `back` hops before this one begins by waiting for its previous rank.
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

/// How far a program has come. It begins at [`Position::default`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Position {
    /// 0: the empty slots before the rounds; from 1 on: the rounds; then the empty slot after them.
    stage: usize,
    index: usize,
}

impl Position {
    /// Moves past the step that [`Schedule::seek`] returned.
    pub fn pass(&mut self) {
        self.index += 1;
    }
}

#[derive(Clone, Debug)]
enum Kind {
    /// Copies between local buffers, without slots.
    Local,
    Send,
    Recv,
    /// A one-shot AllReduce.
    OneShot {
        order: std::sync::Arc<[u32]>,
    },
    Ring {
        function: Function,
        order: std::sync::Arc<[u32]>,
        root: u32,
        count: usize,
        /// The elements of `count` that one rank owns.
        each: usize,
    },
}

/// Bytes of one local copy step: large enough to be cheap, small enough to let other channels run.
const LOCAL_BYTES: usize = 1 << 20;

/// A rank's own elements in an AllReduce start at a multiple of this many bytes, so that reductions run on whole vectors.
const OWNED_ALIGN_BYTES: usize = 64;

/// Elements that each rank owns in an AllReduce of `count` elements round a ring. Rank r owns those from `r * owned` on, as far as
/// `count` goes.
fn owned(data_type: DataType, count: usize, ranks: u32) -> usize {
    count
        .div_ceil(ranks.max(1) as usize)
        .next_multiple_of(OWNED_ALIGN_BYTES / data_type.size())
}

/// Elements that the channels of an operation divide among themselves ([`Work::part`]): all of `count`, or, in an AllReduce round a ring,
/// the most that one rank owns.
#[must_use]
pub fn divisible(
    function: Function,
    algorithm: Algorithm,
    data_type: DataType,
    count: usize,
    ranks: u32,
) -> usize {
    if function == Function::AllReduce && algorithm == Algorithm::Ring {
        owned(data_type, count, ranks).min(count)
    } else {
        count
    }
}

impl Work {
    /// FIFO slots that this channel's part of the operation posts and consumes: what the proxy operations of the channel move. Both ends
    /// of a connection come to the same number.
    #[must_use]
    pub fn steps(&self) -> Steps {
        Schedule::new(self).steps()
    }
}

impl Schedule {
    /// The schedule of `work`.
    #[must_use]
    pub fn new(work: &Work) -> Self {
        let size = work.data_type.size();
        let part = work.part.clone();
        let marks = match &work.connections {
            Connections::Ring { order, .. } => Marks::new(work.function, order, work.root),
            Connections::Local
            | Connections::Send(_)
            | Connections::Recv(_)
            | Connections::Peers(_)
            | Connections::CopyEngine { .. } => Marks::default(),
        };
        let (kind, round_elems, per_round) = match &work.connections {
            Connections::Local => (Kind::Local, LOCAL_BYTES / size, 1),
            // Peer kernels and copy engines move no slots.
            Connections::Peers(_) | Connections::CopyEngine { .. } => (Kind::Local, part.len(), 0),
            Connections::Send(fifo) => (Kind::Send, fifo.slot_bytes() / size, 1),
            Connections::Recv(fifo) => (Kind::Recv, fifo.slot_bytes() / size, 1),
            Connections::Ring { order, next, .. } if work.algorithm == Algorithm::OneShot => {
                let kind = Kind::OneShot { order: order.clone() };
                (kind, next.slot_bytes() / size, order.len())
            }
            Connections::Ring { order, next, .. } => {
                let per_round = match work.function {
                    Function::AllReduce => 2 * order.len() - 1,
                    Function::AllGather | Function::ReduceScatter => order.len(),
                    Function::Broadcast | Function::Reduce => 1,
                    // `Work::check` admits no other function that moves data round a ring.
                    _ => 0,
                };
                let each = match work.function {
                    Function::AllReduce => owned(work.data_type, work.count, work.ranks),
                    _ => work.count,
                };
                let kind = Kind::Ring {
                    function: work.function,
                    order: order.clone(),
                    root: work.root,
                    count: work.count,
                    each,
                };
                (kind, next.slot_bytes() / size, per_round)
            }
        };
        // A slot smaller than an element (refused by `Work::check`) must not divide by zero here.
        let round_elems = round_elems.max(1);
        Self {
            kind,
            rounds: part.len().div_ceil(round_elems),
            part,
            round_elems,
            marks,
            per_round,
        }
    }

    /// Elements to keep of each rank ([`Step::keep`]).
    #[must_use]
    pub fn kept(&self) -> usize {
        match self.kind {
            Kind::OneShot { .. } => self.part.len(),
            _ => 0,
        }
    }

    /// The step at `position`, or the first one after it that is not to be skipped; `None` at the end of the program.
    #[must_use]
    pub fn seek(&self, position: &mut Position) -> Option<Step> {
        loop {
            let Position { stage, index } = *position;
            let steps = match stage {
                0 => 2,
                _ if stage <= self.rounds => self.per_round,
                _ if stage == self.rounds + 1 => 1,
                _ => return None,
            };
            if index >= steps {
                *position = Position {
                    stage: stage + 1,
                    index: 0,
                };
                continue;
            }
            let step = match (stage, index) {
                (0, 0) => Step::marked(self.marks.post, false),
                (0, _) => Step::marked(false, self.marks.take_first),
                _ if stage <= self.rounds => self.step(stage - 1, index),
                _ => Step::marked(false, self.marks.take_last),
            };
            if step.elems > 0 || step.mark {
                return Some(step);
            }
            position.index += 1;
        }
    }

    /// Step `index` of round `round`; the rounds are what moves data.
    #[must_use]
    pub fn step(&self, round: usize, index: usize) -> Step {
        let base = self.part.start + round * self.round_elems;
        let len = (self.part.end - base).min(self.round_elems);
        let here = Step {
            elems: len,
            mark: false,
            recv: false,
            send: false,
            source: None,
            store: None,
            complete: false,
            keep: None,
        };
        match &self.kind {
            Kind::Local => Step {
                source: Some(base),
                store: Some(base),
                complete: true,
                ..here
            },
            Kind::Send => Step {
                send: true,
                source: Some(base),
                ..here
            },
            Kind::Recv => Step {
                recv: true,
                store: Some(base),
                ..here
            },
            Kind::OneShot { order } => {
                let ranks = order.len();
                let last = index == ranks - 1;
                Step {
                    recv: index > 0,
                    send: !last,
                    source: (index == 0 || last).then_some(base),
                    store: last.then_some(base),
                    complete: last,
                    keep: Some(order[(ranks - index) % ranks]),
                    ..here
                }
            }
            Kind::Ring {
                function,
                order,
                root,
                count,
                each,
            } => {
                let ranks = order.len();
                let place = |hop: usize| order[hop % ranks] as usize * each + base;
                match function {
                    Function::AllReduce => {
                        // Reduce-scatter: the chunk of the rank behind us leaves first and each chunk travels on to
                        // its owner, who completes it (index ranks - 1). All-gather: complete chunks go round.
                        let at = place(2 * ranks - 1 - index);
                        Step {
                            elems: len.min(count.saturating_sub(at)),
                            recv: index > 0,
                            send: index < 2 * ranks - 2,
                            source: (index < ranks).then_some(at),
                            store: (index >= ranks - 1).then_some(at),
                            complete: index == ranks - 1,
                            ..here
                        }
                    }
                    Function::AllGather => Step {
                        recv: index > 0,
                        send: index < ranks - 1,
                        source: (index == 0).then_some(base),
                        store: Some(place(ranks - index)),
                        ..here
                    },
                    Function::ReduceScatter => {
                        let last = index == ranks - 1;
                        Step {
                            recv: index > 0,
                            send: !last,
                            source: Some(place(ranks - 1 - index)),
                            store: last.then_some(base),
                            complete: last,
                            ..here
                        }
                    }
                    Function::Broadcast => {
                        let first = order[0] == *root;
                        Step {
                            recv: !first,
                            send: order[1 % ranks] != *root,
                            source: first.then_some(base),
                            store: Some(base),
                            ..here
                        }
                    }
                    Function::Reduce => {
                        let last = order[0] == *root;
                        Step {
                            recv: order[ranks - 1] != *root,
                            send: !last,
                            source: Some(base),
                            store: last.then_some(base),
                            complete: last,
                            ..here
                        }
                    }
                    _ => Step { elems: 0, ..here },
                }
            }
        }
    }

    /// Rounds, from the first on, in which a step has elements; `first`: as it is in the first one.
    fn rounds_of(&self, first: &Step) -> usize {
        let there = match (&self.kind, first.source.or(first.store)) {
            // Of ranks at the end of the buffer there may be less.
            (
                Kind::Ring {
                    function: Function::AllReduce,
                    count,
                    ..
                },
                Some(at),
            ) => count.saturating_sub(at),
            _ => usize::MAX,
        };
        self.part.len().min(there).div_ceil(self.round_elems)
    }

    /// Slots posted and consumed in all rounds.
    #[must_use]
    pub fn steps(&self) -> Steps {
        let mut total = Steps {
            send: u32::from(self.marks.post),
            recv: u32::from(self.marks.take_first) + u32::from(self.marks.take_last),
        };
        for index in 0..self.per_round {
            let step = self.step(0, index);
            let rounds = u32::try_from(self.rounds_of(&step)).unwrap_or(u32::MAX);
            let add = |total: &mut u32, moves: bool| {
                *total = total.saturating_add(if moves { rounds } else { 0 });
            };
            add(&mut total.send, step.send);
            add(&mut total.recv, step.recv);
        }
        total
    }
}

/// FIFO slots that a channel's part of an operation moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Steps {
    /// Slots posted to `next` (or the peer of a send).
    pub send: u32,
    /// Slots consumed from `prev` (or the peer of a receive).
    pub recv: u32,
}
