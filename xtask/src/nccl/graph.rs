//! Graphs of the host device.

use std::{ffi::c_void, ptr};

use anyhow::Result;

use super::{Communicator, Stream};

/// An instance of a captured graph; give it back by [`Communicator::forget`].
#[derive(Debug)]
pub struct Graph(*mut c_void);

impl Communicator<'_> {
    /// What `calls` puts on the stream, as a graph.
    ///
    /// # Errors
    /// The library's, or those of `calls`.
    pub fn capture(&self, calls: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let (f, nccl) = (&self.nccl.functions, self.nccl);
        // SAFETY: a live stream.
        let result = unsafe { (f.ringsightStreamBeginCapture)(self.stream) };
        nccl.check("ringsightStreamBeginCapture", result, self.comm)?;
        let called = calls();
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: as above; a valid place.
        let result = unsafe { (f.ringsightStreamEndCapture)(self.stream, &raw mut graph) };
        called?;
        nccl.check("ringsightStreamEndCapture", result, self.comm)?;
        // SAFETY: the graph that was captured; a valid place.
        let result = unsafe { (f.ringsightGraphInstantiate)(&raw mut exec, graph) };
        nccl.check("ringsightGraphInstantiate", result, self.comm)?;
        // SAFETY: used no more; its instance lives on.
        let result = unsafe { (f.ringsightGraphDestroy)(graph) };
        nccl.check("ringsightGraphDestroy", result, self.comm)?;
        Ok(Graph(exec))
    }

    /// Replays a graph on the stream.
    ///
    /// # Errors
    /// The library's.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        // SAFETY: a live instance and stream.
        let result = unsafe { (self.nccl.functions.ringsightGraphLaunch)(graph.0, self.stream) };
        self.nccl.check("ringsightGraphLaunch", result, self.comm)
    }

    /// Gives a graph back.
    ///
    /// # Errors
    /// The library's.
    #[expect(clippy::needless_pass_by_value, reason = "it is used no more")]
    pub fn forget(&self, graph: Graph) -> Result<()> {
        // SAFETY: a live instance, used no more.
        let result = unsafe { (self.nccl.functions.ringsightGraphExecDestroy)(graph.0) };
        self.nccl.check("ringsightGraphExecDestroy", result, self.comm)
    }

    /// Runs `calls` with the communicator on another stream.
    ///
    /// # Errors
    /// The library's, or those of `calls`.
    pub fn beside<T>(&self, calls: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let beside = Self {
            nccl: self.nccl,
            comm: self.comm,
            stream: self.nccl.stream()?,
        };
        let result = calls(&beside);
        self.nccl.end(beside.stream)?;
        result
    }
}

impl super::Nccl {
    /// Ends a stream.
    pub(super) fn end(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live stream, used no more.
        let result = unsafe { (self.functions.ringsightStreamDestroy)(stream) };
        self.check("ringsightStreamDestroy", result, ptr::null_mut())
    }
}
