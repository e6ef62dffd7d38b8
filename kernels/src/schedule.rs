//! What a channel does for one operation, step by step: the one description that the device programs execute and that
//! [`Work::steps`] counts for the proxy.
//!
//! A step moves at most one slot in and at most one slot out. Rings need slots of one size on all their connections,
//! since how an operation is cut into steps must come out the same on every rank.
//!
//! # Every rank sees its previous rank's tag
//!
//! Slots carry the tag of their operation, so ranks that call different operations find out where these meet, provided
//! that on every channel each rank posts a slot to its next one, and that they cannot all wait before they do.
//! - A rank whose program begins by waiting for its previous rank (all but the root in Broadcast, all but the one behind
//!   the root in Reduce) first posts an *empty* slot. The one behind whom no data comes takes it at its end, so that
//!   nobody waits for it earlier than he must.
//! - AllGather, ReduceScatter and a one-shot AllReduce begin with a slot of data on every hop; so does an AllReduce where
//!   each rank owns a part. A small AllReduce has fewer parts; but there is always rank 0's, and with it the rank behind
//!   rank 0 begins.
//! - Functions that are made of sends and receives (AlltoAll, Gather, Scatter) have a ring program of one empty slot.
//!
//! So whatever the ranks call, the rank behind rank 0 posts a slot without waiting for anybody. Its next rank takes it or
//! differs; if it takes it, it does the same and posts a slot in turn; and so on round the ring: either a rank differs
//! from the one before it and sees that, or all are the same. (A program that waits for room looks at what has arrived,
//! too.)
//!
//! # One-shot AllReduce
//!
//! Where latency is what counts ([`Algorithm::OneShot`]), each rank's elements go all the way round the ring, `ranks - 1` hops
//! one after another instead of the `2 * ranks - 2` of reduce-scatter and all-gather, and all ranks begin at once. Each rank
//! keeps what comes by and reduces it at the end in the order of ranks, which is the same on all of them, so that all have
//! the same bits.

use std::ops::Range;

use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use crate::{
    launch::{Connections, Scalar, Work},
    reduce::Reduction,
};

/// One step of a channel program. It takes a slot from `prev` (`recv`), combines it with this rank's data (`source`),
/// and hands the result to the receive buffer (`store`) and to a slot of `next` (`send`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Elements moved; a step of 0 elements that is no [`Step::mark`] is skipped by both its ends.
    pub elems: usize,
    /// Its slot is empty and carries the tag alone.
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
    /// Its slot holds the elements of this rank as they are. They are kept until the step with a `store`, which reduces
    /// all ranks' in the order of ranks.
    pub keep: Option<u32>,
}

impl Step {
    /// A step with an empty slot; one that is skipped if it neither posts nor takes it.
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
    /// Elements of all ranks' chunks of one round together.
    round_elems: usize,
    marks: Marks,
    /// Rounds that cover the part; 0 if the part is empty.
    pub rounds: usize,
    /// Steps of each round, skipped ones included.
    pub per_round: usize,
}

/// Empty slots of a program, in the order in which it comes to them. What one rank posts its next one takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Marks {
    /// Posts one before the rounds.
    post: bool,
    /// Takes one before the rounds: data follows it.
    take_first: bool,
    /// Takes one after the rounds: no data follows it.
    take_last: bool,
}

impl Marks {
    /// `order` begins with this rank, as in [`Connections::Ring`].
    fn new(function: Function, order: &[u32], root: u32) -> Self {
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

/// Where a program is. Begins at [`Position::default`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Position {
    /// 0 for the empty slots before the rounds, then the rounds from 1 on, then the empty slot after them.
    stage: usize,
    index: usize,
}

impl Position {
    /// Passes the step that [`Schedule::seek`] gave.
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
        slot_elems: usize,
        align: usize,
    },
}

/// Elements of one local copy step: large enough to be cheap, small enough to let other channels run.
const LOCAL_BYTES: usize = 1 << 20;

/// Chunks of an AllReduce round start at multiples of this many bytes, so that reductions run on whole vectors.
const CHUNK_ALIGN_BYTES: usize = 64;

impl Schedule {
    /// The schedule of `work`.
    #[must_use]
    pub fn new(work: &Work) -> Self {
        let size = work.data_type.size();
        let part = work.part.clone();
        let marks = match &work.connections {
            Connections::Ring { order, .. } => Marks::new(work.function, order, work.root),
            Connections::Local | Connections::Send(_) | Connections::Recv(_) => Marks::default(),
        };
        let (kind, round_elems, per_round) = match &work.connections {
            Connections::Local => (Kind::Local, LOCAL_BYTES / size, 1),
            Connections::Send(fifo) => (Kind::Send, fifo.slot_bytes() / size, 1),
            Connections::Recv(fifo) => (Kind::Recv, fifo.slot_bytes() / size, 1),
            Connections::Ring { order, next, .. } if work.algorithm == Algorithm::OneShot => {
                let kind = Kind::OneShot { order: order.clone() };
                (kind, next.slot_bytes() / size, order.len())
            }
            Connections::Ring { order, next, .. } => {
                let ranks = order.len();
                let slot_elems = next.slot_bytes() / size;
                let (round_elems, per_round) = match work.function {
                    Function::AllReduce => (slot_elems * ranks, 2 * ranks - 1),
                    Function::AllGather | Function::ReduceScatter => (slot_elems, ranks),
                    Function::Broadcast | Function::Reduce => (slot_elems, 1),
                    // No data goes round the ring, `Work::check` sees to it.
                    _ => (slot_elems, 0),
                };
                let kind = Kind::Ring {
                    function: work.function,
                    order: order.clone(),
                    root: work.root,
                    count: work.count,
                    slot_elems,
                    align: CHUNK_ALIGN_BYTES / size,
                };
                (kind, round_elems, per_round)
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
                slot_elems,
                align,
            } => {
                let ranks = order.len();
                let owner = |hop: usize| order[hop % ranks] as usize;
                match function {
                    Function::AllReduce => {
                        // Reduce-scatter: the chunk of the rank behind us leaves first and each chunk travels on to
                        // its owner, who completes it (index ranks - 1). All-gather: complete chunks go round.
                        let chunk = len
                            .div_ceil(ranks)
                            .next_multiple_of((*align).max(1))
                            .min(*slot_elems);
                        let start = (owner(2 * ranks - 1 - index) * chunk).min(len);
                        let elems = chunk.min(len - start);
                        let at = Some(base + start);
                        let reducing = index < ranks;
                        Step {
                            elems,
                            mark: false,
                            recv: index > 0,
                            send: index < 2 * ranks - 2,
                            source: if reducing { at } else { None },
                            store: if index >= ranks - 1 { at } else { None },
                            complete: index == ranks - 1,
                            keep: None,
                        }
                    }
                    Function::AllGather => {
                        let at = owner(ranks - index) * count + base;
                        Step {
                            recv: index > 0,
                            send: index < ranks - 1,
                            source: (index == 0).then_some(base),
                            store: Some(at),
                            ..here
                        }
                    }
                    Function::ReduceScatter => {
                        let last = index == ranks - 1;
                        Step {
                            recv: index > 0,
                            send: !last,
                            source: Some(owner(ranks - 1 - index) * count + base),
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

    /// Slots posted and consumed in one round.
    fn count(&self, round: usize) -> Steps {
        let mut total = Steps::default();
        for step in (0..self.per_round)
            .map(|index| self.step(round, index))
            .filter(|step| step.elems > 0)
        {
            total.send += u32::from(step.send);
            total.recv += u32::from(step.recv);
        }
        total
    }

    /// Slots posted and consumed in all rounds.
    #[must_use]
    pub fn steps(&self) -> Steps {
        let marks = Steps {
            send: u32::from(self.marks.post),
            recv: u32::from(self.marks.take_first) + u32::from(self.marks.take_last),
        };
        let Some(last) = self.rounds.checked_sub(1) else {
            return marks;
        };
        // Every round but the last is full, so they are alike.
        let (first, end) = (self.count(0), self.count(last));
        let full = u32::try_from(last).unwrap_or(u32::MAX);
        let total = |marks: u32, first: u32, end: u32| {
            first
                .saturating_mul(full)
                .saturating_add(end)
                .saturating_add(marks)
        };
        Steps {
            send: total(marks.send, first.send, end.send),
            recv: total(marks.recv, first.recv, end.recv),
        }
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

/// Why a [`Work`] cannot run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkError(pub String);

impl std::fmt::Display for WorkError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WorkError {}

impl Work {
    /// The exact number of FIFO slots that this channel's part of the operation posts and consumes: what the proxy
    /// operations of the channel move. Both ends of a connection come to the same number.
    #[must_use]
    pub fn steps(&self) -> Steps {
        Schedule::new(self).steps()
    }

    /// Whether it moves nothing and only shows its tag round a ring, for an operation that is made of sends and receives
    /// ([module documentation](self)). The observer is not told when such work starts and stops: the operation's own work
    /// may be on other channels, or in a later launch.
    #[must_use]
    pub fn only_shows_tag(&self) -> bool {
        matches!(self.connections, Connections::Ring { .. })
            && matches!(
                self.function,
                Function::AlltoAll | Function::Gather | Function::Scatter
            )
            && self.part.is_empty()
    }

    /// Whether a device program exists for this work and its parts fit together.
    ///
    /// # Errors
    /// Says what does not fit.
    pub fn check(&self) -> Result<(), WorkError> {
        let fail = |why: String| Err(WorkError(format!("op {} ({}): {why}", self.op, self.function)));
        if self.part.start > self.part.end || self.part.end > self.count {
            return fail(format!(
                "part {:?} is not within its {} elements",
                self.part, self.count
            ));
        }
        let reduces = matches!(
            self.function,
            Function::AllReduce | Function::ReduceScatter | Function::Reduce
        );
        if reduces && Reduction::new(self.reduce_op, self.data_type).is_none() {
            return fail(format!("no {} reduction for {}", self.reduce_op, self.data_type));
        }
        let has_scalar = !matches!(self.scalar, Scalar::None | Scalar::Device(0));
        if has_scalar != (self.reduce_op == ReduceOp::PreMulSum) {
            return fail(format!("scalar {:?} for {}", self.scalar, self.reduce_op));
        }
        match &self.connections {
            Connections::Local => {}
            Connections::Send(fifo) | Connections::Recv(fifo) => {
                if fifo.slot_bytes() < DataType::Float64.size() {
                    return fail(format!(
                        "slots of {} bytes cannot hold an element",
                        fifo.slot_bytes()
                    ));
                }
                let expected = if matches!(self.connections, Connections::Send(_)) {
                    Function::Send
                } else {
                    Function::Recv
                };
                if self.function != expected {
                    return fail(format!("needs a ring, was given a connection for {expected}"));
                }
                if self.algorithm != Algorithm::Direct {
                    return fail(format!("no {} program between two ranks", self.algorithm));
                }
            }
            Connections::Ring { order, prev, next } => {
                use Function::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
                let moves_data = matches!(
                    self.function,
                    AllReduce | AllGather | ReduceScatter | Broadcast | Reduce
                );
                if !moves_data && !self.only_shows_tag() {
                    return fail("no ring program; it is made of sends and receives".into());
                }
                if prev.slot_bytes() != next.slot_bytes() {
                    return fail(format!(
                        "slots of a ring differ: {} bytes from prev, {} to next",
                        prev.slot_bytes(),
                        next.slot_bytes()
                    ));
                }
                if next.slot_bytes() < DataType::Float64.size() {
                    return fail(format!(
                        "slots of {} bytes cannot hold an element",
                        next.slot_bytes()
                    ));
                }
                match self.algorithm {
                    Algorithm::Ring => {}
                    Algorithm::OneShot => self.check_one_shot(next.slot_bytes())?,
                    other => return fail(format!("no {other} program round a ring")),
                }
                if order.len() < 2 || order.len() != self.ranks as usize || order[0] != self.rank {
                    return fail(format!(
                        "ring order {order:?} must hold all {} ranks (2 or more), rank {} first",
                        self.ranks, self.rank
                    ));
                }
                let mut seen = order.to_vec();
                seen.sort_unstable();
                if !seen.iter().copied().eq(0..self.ranks) || self.root >= self.ranks {
                    return fail(format!(
                        "ring order {order:?} or root {} is no set of ranks",
                        self.root
                    ));
                }
            }
        }
        Ok(())
    }

    /// A one-shot program needs all elements of each rank as they are, in one slot.
    fn check_one_shot(&self, slot_bytes: usize) -> Result<(), WorkError> {
        let fail = |why: String| Err(WorkError(format!("op {} ({}): {why}", self.op, self.function)));
        if self.function != Function::AllReduce {
            return fail("no one_shot program; it reduces on all ranks".into());
        }
        if self.reduce_op == ReduceOp::PreMulSum {
            return fail(
                "no one_shot program for premulsum: each rank's factor is known to that rank alone".into(),
            );
        }
        let bytes = self.part.len().saturating_mul(self.data_type.size());
        if bytes > slot_bytes {
            return fail(format!(
                "{bytes} bytes for a one_shot program of slots of {slot_bytes}"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::{Fifo, fifo::tests::heap};

    const RINGS: [Function; 8] = [
        Function::AllReduce,
        Function::AllGather,
        Function::ReduceScatter,
        Function::Broadcast,
        Function::Reduce,
        Function::AlltoAll,
        Function::Gather,
        Function::Scatter,
    ];

    fn work(function: Function, data_type: DataType, members: &[u32], at: usize, slot: &Arc<Fifo>) -> Work {
        let ranks = members.len();
        Work {
            op: 0,
            tag: 1,
            function,
            algorithm: Algorithm::Ring,
            data_type,
            reduce_op: ReduceOp::Sum,
            scalar: Scalar::None,
            send: 0,
            recv: 0,
            count: 0,
            part: 0..0,
            rank: members[at],
            ranks: ranks as u32,
            root: 0,
            connections: Connections::Ring {
                order: (0..ranks).map(|hop| members[(at + hop) % ranks]).collect(),
                prev: slot.clone(),
                next: slot.clone(),
            },
        }
    }

    /// The ring, or one shot where that is wanted and possible.
    fn algorithm(function: Function, bytes: usize, slot_bytes: usize, one_shot: bool) -> Algorithm {
        if one_shot && function == Function::AllReduce && bytes <= slot_bytes {
            Algorithm::OneShot
        } else {
            Algorithm::Ring
        }
    }

    fn all(schedule: &Schedule) -> Vec<Step> {
        let mut position = Position::default();
        std::iter::from_fn(|| {
            let step = schedule.seek(&mut position);
            position.pass();
            step
        })
        .collect()
    }

    proptest! {
        #[test]
        fn both_ends_agree_and_the_result_is_covered_once(
            function in proptest::sample::select(&RINGS[..]),
            data_type in proptest::sample::select(DataType::ALL),
            members in (2_u32..9).prop_flat_map(|ranks| Just((0..ranks).collect::<Vec<_>>()).prop_shuffle()),
            slot_bytes in 8_usize..600,
            before in 0_usize..50,
            len in prop_oneof![0_usize..60, 0_usize..3000],
            one_shot in any::<bool>(),
            after in 0_usize..50,
            root in any::<prop::sample::Index>(),
        ) {
            let fifo = heap(slot_bytes);
            let ranks = members.len();
            let of_messages = !RINGS[..5].contains(&function);
            let len = if of_messages { 0 } else { len };
            let works: Vec<Work> = (0..ranks)
                .map(|at| Work {
                    count: before + len + after,
                    part: before..before + len,
                    root: root.index(ranks) as u32,
                    algorithm: algorithm(function, len * data_type.size(), slot_bytes, one_shot),
                    ..work(function, data_type, &members, at, &fifo)
                })
                .collect();
            let programs: Vec<Vec<Step>> = works.iter().map(|work| all(&Schedule::new(work))).collect();
            for (at, (work, steps)) in works.iter().zip(&programs).enumerate() {
                work.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
                let moved = |steps: &[Step], which: fn(&Step) -> bool| {
                    steps.iter().filter(|step| which(step)).map(|step| step.elems).collect::<Vec<_>>()
                };
                let (sent, got) = (moved(steps, |step| step.send), moved(steps, |step| step.recv));
                prop_assert_eq!(work.steps(), Steps { send: sent.len() as u32, recv: got.len() as u32 });
                prop_assert_eq!(&sent, &moved(&programs[(at + 1) % ranks], |step| step.recv));
                prop_assert!(sent.iter().all(|elems| elems * data_type.size() <= slot_bytes));
                if len > 0 || of_messages {
                    // Every hop shows its tag, and a slot at the head of the ring is never one of a later operation
                    // while there is anything left to do.
                    prop_assert!(!sent.is_empty() && !got.is_empty());
                    prop_assert!(steps.last().is_some_and(|step| step.recv));
                }

                // Every element of this channel's result is stored exactly once; nothing else is.
                let outputs = if function == Function::AllGather { ranks } else { 1 };
                let mut stored = vec![0_u32; outputs * work.count];
                for step in steps {
                    for at in step.store.map_or(0..0, |at| at..at + step.elems) {
                        stored[at] += 1;
                    }
                }
                let has_result = function != Function::Reduce || work.rank == work.root;
                for (at, times) in stored.into_iter().enumerate() {
                    prop_assert_eq!(times, u32::from(has_result && work.part.contains(&(at % work.count))));
                }
            }
        }
    }

    /// What one rank calls: function, data type, root, elements, whether in one shot where that is possible.
    type Called = (Function, DataType, u32, usize, bool);

    /// Lets every rank run the program of what it calls, over FIFOs that hold tags only. Returns whether a rank saw a tag
    /// that was not its own; panics if all wait.
    fn somebody_sees_it(calls: &[Called], members: &[u32], slot_bytes: usize, finished: &mut usize) -> bool {
        let (slot, ranks) = (heap(slot_bytes), members.len());
        let tag = |at: usize| calls.iter().position(|call| *call == calls[at]).unwrap();
        let mut programs: Vec<(Schedule, Position)> = (0..ranks)
            .map(|at| {
                let (function, data_type, root, count, one_shot) = calls[at];
                let part = if RINGS[..5].contains(&function) {
                    0..count
                } else {
                    0..0
                };
                let work = Work {
                    count,
                    part,
                    root,
                    algorithm: algorithm(function, count * data_type.size(), slot_bytes, one_shot),
                    ..work(function, data_type, members, at, &slot)
                };
                work.check().unwrap();
                (Schedule::new(&work), Position::default())
            })
            .collect();
        // What is on its way to each rank.
        let mut arriving = vec![std::collections::VecDeque::new(); ranks];
        loop {
            let (mut moved, mut running) = (false, 0);
            for (at, (schedule, position)) in programs.iter_mut().enumerate() {
                let Some(step) = schedule.seek(position) else {
                    continue;
                };
                running += 1;
                let next = (at + 1) % ranks;
                match arriving[at].front() {
                    Some(theirs) if *theirs != tag(at) => return true,
                    None if step.recv => continue,
                    _ => {}
                }
                if step.send && arriving[next].len() == crate::fifo::SLOTS {
                    continue;
                }
                if step.recv {
                    arriving[at].pop_front();
                }
                if step.send {
                    arriving[next].push_back(tag(at));
                }
                position.pass();
                moved = true;
            }
            *finished = ranks - running;
            if running == 0 {
                return false;
            }
            assert!(moved, "all wait: {calls:?} in ring order {members:?}");
        }
    }

    proptest! {
        #[test]
        fn ranks_that_call_different_operations_meet(
            // Few values, so that many ranks call the same.
            pool in prop::collection::vec(
                (proptest::sample::select(&RINGS[..]), proptest::sample::select(DataType::ALL), 0_u32..9,
                    prop_oneof![1_usize..60, 1_usize..2000], any::<bool>()), 1..4),
            choices in prop::collection::vec(any::<prop::sample::Index>(), 9),
            members in (2_u32..9).prop_flat_map(|ranks| Just((0..ranks).collect::<Vec<_>>()).prop_shuffle()),
            slot_bytes in 8_usize..600,
        ) {
            let ranks = members.len();
            let calls: Vec<Called> = (0..ranks).map(|at| {
                let (function, data_type, root, count, one_shot) = pool[choices[at].index(pool.len())];
                (function, data_type, root % ranks as u32, count, one_shot)
            }).collect();
            let differ = calls.iter().any(|call| *call != calls[0]);
            let mut finished = 0;
            prop_assert_eq!(somebody_sees_it(&calls, &members, slot_bytes, &mut finished), differ);
            prop_assert!(differ || finished == ranks);
        }
    }

    #[test]
    fn steps_of_a_large_operation_are_counted_without_walking_it() {
        let fifo = heap(64);
        let large = Work {
            count: usize::MAX / 64,
            part: 0..1 << 30,
            ..work(Function::AllReduce, DataType::Uint8, &[0, 1], 0, &fifo)
        };
        // 128 bytes a round, 2 slots each way.
        assert_eq!(
            large.steps(),
            Steps {
                send: 1 << 24,
                recv: 1 << 24
            }
        );
    }
}
