//! Operations with their memory, called or captured.

use anyhow::Result;

use super::cases::{Mode, Operation};
use crate::nccl::{Buffer, Communicator, Graph, Reduce};

/// An operation with its memory.
pub(super) struct Call {
    operation: Operation,
    /// Instead of the operation a broadcast from this rank.
    root: Option<u32>,
    ranks: u32,
    rank: u32,
    send: Buffer,
    receive: Buffer,
}

impl Call {
    /// For one of `ranks` ranks.
    ///
    /// # Errors
    /// The device's, where there is no memory.
    pub(super) fn new(
        communicator: &Communicator<'_>,
        operation: Operation,
        elements: usize,
        (rank, ranks): (u32, u32),
    ) -> Result<Self> {
        let all = elements * ranks as usize;
        let (sent, received) = match operation {
            Operation::AllReduce => (0, elements),
            Operation::AllGather => (elements, all),
            Operation::ReduceScatter => (all, elements),
        };
        let mut call = Self {
            operation,
            root: None,
            ranks,
            rank,
            send: communicator.buffer(sent)?,
            receive: communicator.buffer(received)?,
        };
        call.fill();
        Ok(call)
    }

    /// A broadcast in place: its root is done before the others are.
    ///
    /// # Errors
    /// As [`Call::new`].
    pub(super) fn broadcast(
        communicator: &Communicator<'_>,
        elements: usize,
        ranks: (u32, u32),
        root: u32,
    ) -> Result<Self> {
        let call = Self::new(communicator, Operation::AllReduce, elements, ranks)?;
        Ok(Self {
            root: Some(root),
            ..call
        })
    }

    /// Puts the input there; nothing may be in flight.
    pub(super) fn fill(&mut self) {
        let own = (self.rank + 1) as f32;
        self.send.get().fill(own);
        let output = if self.operation == Operation::AllReduce {
            own
        } else {
            0.0
        };
        self.receive.get().fill(output);
    }

    pub(super) fn call(&self, communicator: &Communicator<'_>) -> Result<()> {
        if let Some(root) = self.root {
            return communicator.broadcast(&self.receive, root);
        }
        match self.operation {
            Operation::AllReduce => communicator.all_reduce(&self.receive, Reduce::Sum),
            Operation::AllGather => communicator.all_gather(&self.send, &self.receive),
            Operation::ReduceScatter => communicator.reduce_scatter(&self.send, &self.receive),
        }
    }

    /// Whether the output is right after so many calls; nothing may be in flight.
    pub(super) fn is_right(&mut self, times: u32) -> bool {
        let ranks = self.ranks;
        let sum = (ranks * (ranks + 1) / 2) as f32;
        let block = self.send.len().max(1);
        let (operation, root) = (self.operation, self.root);
        let expected = |index: usize| match operation {
            _ if root.is_some() => (root.unwrap_or(0) + 1) as f32,
            // In place: each call adds up what the last one left.
            Operation::AllReduce => sum * (ranks as f32).powi(times as i32 - 1),
            Operation::AllGather => (index / block + 1) as f32,
            Operation::ReduceScatter => sum,
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
