//! Captured graphs of operations.

use anyhow::Result;

use super::{Communicator, device::GraphInstance};

/// An instance of a captured graph; give it back by [`Communicator::forget`].
#[derive(Debug)]
pub(crate) struct Graph(GraphInstance);

impl Communicator<'_> {
    /// What `calls` puts on the stream, as a graph.
    pub(crate) fn capture(&self, calls: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let device = &self.nccl.device;
        device.begin_capture(self.stream)?;
        let called = calls();
        // Ended in any case: a stream that is left capturing is of no use.
        let instance = device.end_capture(self.stream);
        called?;
        Ok(Graph(instance?))
    }

    /// Replays a graph on the stream.
    pub(crate) fn replay(&self, graph: &Graph) -> Result<()> {
        self.nccl.device.replay(graph.0, self.stream)
    }

    /// Gives a graph back.
    #[expect(clippy::needless_pass_by_value, reason = "it is used no more")]
    pub(crate) fn forget(&self, graph: Graph) -> Result<()> {
        self.nccl.device.forget(graph.0)
    }

    /// Runs `calls` with the communicator on another stream.
    pub(crate) fn beside<T>(&self, calls: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let beside = Self {
            nccl: self.nccl,
            comm: self.comm,
            stream: self.nccl.device.stream()?,
        };
        let result = calls(&beside);
        self.nccl.device.end(beside.stream)?;
        result
    }
}
