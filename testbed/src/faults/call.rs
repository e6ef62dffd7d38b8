//! Operations with their memory, called or captured and replayed.

use anyhow::Result;

use super::cases::{Mode, Operation};
use crate::nccl::{Buffer, Communicator, Graph, Reduce};

/// What is called.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Collective(Operation),
    /// In place, from this rank.
    Broadcast(u32),
    /// Each rank sends to the next and receives from the one before.
    Exchange,
}

/// An operation with its memory.
pub(super) struct Call {
    kind: Kind,
    ranks: u32,
    rank: u32,
    send: Buffer,
    receive: Buffer,
}

impl Call {
    /// For one of `ranks` ranks.
    pub(super) fn new(
        communicator: &Communicator<'_>,
        operation: Operation,
        elements: usize,
        ranks: (u32, u32),
    ) -> Result<Self> {
        let all = elements * ranks.1 as usize;
        let sizes = match operation {
            Operation::AllReduce => (0, elements),
            Operation::AllGather => (elements, all),
            Operation::ReduceScatter => (all, elements),
            Operation::AllToAll => (all, all),
        };
        Self::of(communicator, Kind::Collective(operation), sizes, ranks)
    }

    fn of(
        communicator: &Communicator<'_>,
        kind: Kind,
        (sent, received): (usize, usize),
        (rank, ranks): (u32, u32),
    ) -> Result<Self> {
        let mut call = Self {
            kind,
            ranks,
            rank,
            send: communicator.buffer(sent)?,
            receive: communicator.buffer(received)?,
        };
        call.fill();
        Ok(call)
    }

    /// A broadcast in place: its root is done before the others are.
    pub(super) fn broadcast(
        communicator: &Communicator<'_>,
        elements: usize,
        ranks: (u32, u32),
        root: u32,
    ) -> Result<Self> {
        Self::of(communicator, Kind::Broadcast(root), (0, elements), ranks)
    }

    /// Messages around the ring of all ranks.
    pub(super) fn exchange(
        communicator: &Communicator<'_>,
        elements: usize,
        ranks: (u32, u32),
    ) -> Result<Self> {
        Self::of(communicator, Kind::Exchange, (elements, elements), ranks)
    }

    /// Puts the input there; nothing may be in flight.
    pub(super) fn fill(&mut self) {
        let own = (self.rank + 1) as f32;
        self.send.get().fill(own);
        let output = match self.kind {
            Kind::Collective(Operation::AllReduce) | Kind::Broadcast(_) => own,
            _ => 0.0,
        };
        self.receive.get().fill(output);
    }

    pub(super) fn call(&self, communicator: &Communicator<'_>) -> Result<()> {
        match self.kind {
            Kind::Collective(Operation::AllReduce) => communicator.all_reduce(&self.receive, Reduce::Sum),
            Kind::Collective(Operation::AllGather) => communicator.all_gather(&self.send, &self.receive),
            Kind::Collective(Operation::ReduceScatter) => {
                communicator.reduce_scatter(&self.send, &self.receive)
            }
            Kind::Collective(Operation::AllToAll) => communicator.group(|| {
                let block = self.send.len() / self.ranks as usize;
                (0..self.ranks).try_for_each(|peer| {
                    let part = peer as usize * block..(peer as usize + 1) * block;
                    communicator.send(&self.send, part.clone(), peer)?;
                    communicator.receive(&self.receive, part, peer)
                })
            }),
            Kind::Broadcast(root) => communicator.broadcast(&self.receive, root),
            Kind::Exchange => {
                let next = (self.rank + 1) % self.ranks;
                communicator.exchange(&self.send, next, &self.receive, self.before())
            }
        }
    }

    /// The rank that messages come from.
    fn before(&self) -> u32 {
        (self.rank + self.ranks - 1) % self.ranks
    }

    /// Whether the output is right after so many calls; nothing may be in flight.
    pub(super) fn is_right(&mut self, times: u32) -> bool {
        let ranks = self.ranks;
        let sum = (ranks * (ranks + 1) / 2) as f32;
        let block = (self.receive.len() / ranks as usize).max(1);
        let (kind, before) = (self.kind, self.before());
        let expected = |index: usize| match kind {
            // In place: each call adds up what the last one left.
            Kind::Collective(Operation::AllReduce) => sum * (ranks as f32).powi(times as i32 - 1),
            Kind::Collective(Operation::AllGather | Operation::AllToAll) => (index / block + 1) as f32,
            Kind::Collective(Operation::ReduceScatter) => sum,
            Kind::Broadcast(root) => (root + 1) as f32,
            Kind::Exchange => (before + 1) as f32,
        };
        let output = self.receive.get();
        output
            .iter()
            .enumerate()
            .all(|(index, value)| *value == expected(index))
    }
}

/// Operations as they are launched: called, or captured once and replayed.
pub(super) struct Launched {
    graph: Option<Graph>,
}

impl Launched {
    pub(super) fn prepare(
        mode: Mode,
        communicator: &Communicator<'_>,
        calls: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let graph = match mode {
            Mode::Eager => None,
            Mode::Graph => Some(communicator.capture(calls)?),
        };
        Ok(Self { graph })
    }

    pub(super) fn launch(
        &self,
        communicator: &Communicator<'_>,
        calls: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        match &self.graph {
            Some(graph) => communicator.replay(graph),
            None => calls(),
        }
    }

    pub(super) fn forget(self, communicator: &Communicator<'_>) -> Result<()> {
        self.graph.map_or(Ok(()), |graph| communicator.forget(graph))
    }
}
