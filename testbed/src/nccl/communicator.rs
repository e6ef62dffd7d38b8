//! A communicator: operations, graphs of them, and what is called where something goes wrong.

use std::{
    ffi::{c_int, c_void},
    ops::Range,
    ptr,
};

use anyhow::Result;

use super::{
    Buffer, Comm, Functions, Nccl, Reduce,
    device::{GraphInstance, HostFunction, Stream},
    last_error,
};

/// `ncclInProgress`.
const IN_PROGRESS: c_int = 7;
/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
/// `ncclFloat32`.
const FLOAT32: c_int = 7;

/// A communicator and the stream that its operations run on.
pub(crate) struct Communicator<'a> {
    nccl: &'a Nccl,
    functions: &'a Functions,
    comm: Comm,
    stream: Stream,
}

/// An instance of a captured graph; give it back by [`Communicator::forget`].
#[derive(Debug)]
pub(crate) struct Graph(GraphInstance);

impl<'a> Communicator<'a> {
    /// One with a stream of its own.
    pub(super) fn new(nccl: &'a Nccl, comm: Comm) -> Result<Self> {
        Ok(Self {
            nccl,
            functions: &nccl.functions,
            comm,
            stream: nccl.device.stream()?,
        })
    }

    fn check(&self, name: &str, result: c_int) -> Result<()> {
        self.nccl.check_with(name, result, self.comm)
    }

    /// `elements` zeros that its operations can work on.
    pub(crate) fn buffer(&self, elements: usize) -> Result<Buffer> {
        Buffer::new(&self.nccl.device, elements)
    }

    /// `ncclCommSplit` with the parent's configuration, and a stream of its own: those of `members`, in their order, get a
    /// communicator, the others none. All ranks call it.
    pub(crate) fn split(&self, members: &[u32], rank: u32) -> Result<Option<Self>> {
        let key = members.iter().position(|member| *member == rank);
        let (color, key) = key.map_or((NO_COLOR, 0), |key| (0, key as c_int));
        let mut comm = ptr::null_mut();
        // SAFETY: a live communicator and a valid place; no configuration is the parent's.
        unsafe { call!(self.ncclCommSplit(self.comm, color, key, &raw mut comm, ptr::null_mut())) }?;
        if comm.is_null() {
            return Ok(None);
        }
        Self::new(self.nccl, comm).map(Some)
    }

    /// `ncclAllReduce` in place.
    pub(crate) fn all_reduce(&self, buffer: &Buffer, reduce: Reduce) -> Result<()> {
        let (data, count, reduce) = (buffer.pointer(), buffer.len(), reduce as c_int);
        // SAFETY: the buffer has `count` elements and outlives the operation (the worker synchronises before it ends).
        unsafe { call!(self.ncclAllReduce(data, data, count, FLOAT32, reduce, self.comm, self.stream)) }
    }

    /// `ncclBroadcast` in place from rank `root`.
    pub(crate) fn broadcast(&self, buffer: &Buffer, root: u32) -> Result<()> {
        let (data, count, root) = (buffer.pointer(), buffer.len(), root as c_int);
        // SAFETY: as in `all_reduce`.
        unsafe { call!(self.ncclBroadcast(data, data, count, FLOAT32, root, self.comm, self.stream)) }
    }

    /// `ncclReduceScatter` with sum: `send` holds the ranks' parts one after the other.
    pub(crate) fn reduce_scatter(&self, send: &Buffer, receive: &Buffer) -> Result<()> {
        let (from, to, count) = (send.pointer(), receive.pointer(), receive.len());
        let sum = Reduce::Sum as c_int;
        // SAFETY: as in `all_reduce`; `send` has ranks * count elements.
        unsafe { call!(self.ncclReduceScatter(from, to, count, FLOAT32, sum, self.comm, self.stream)) }
    }

    /// `ncclAllGather`: `receive` gets the ranks' parts one after the other.
    pub(crate) fn all_gather(&self, send: &Buffer, receive: &Buffer) -> Result<()> {
        let (from, to, count) = (send.pointer(), receive.pointer(), send.len());
        // SAFETY: as in `all_reduce`; `receive` has ranks * count elements.
        unsafe { call!(self.ncclAllGather(from, to, count, FLOAT32, self.comm, self.stream)) }
    }

    /// Calls in one group.
    pub(crate) fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: no arguments.
        unsafe { call!(self.ncclGroupStart()) }?;
        let called = calls();
        // SAFETY: no arguments.
        let ended = unsafe { call!(self.ncclGroupEnd()) };
        called.and(ended)
    }

    /// `ncclSend` to rank `to` and `ncclRecv` from rank `from` in one group.
    pub(crate) fn exchange(&self, send: &Buffer, to: u32, receive: &Buffer, from: u32) -> Result<()> {
        self.group(|| {
            self.send(send, 0..send.len(), to)?;
            self.receive(receive, 0..receive.len(), from)
        })
    }

    /// `ncclRecv` of some elements of a buffer from rank `from`.
    ///
    /// # Panics
    /// Where the buffer has no such elements.
    pub(crate) fn receive(&self, receive: &Buffer, part: Range<usize>, from: u32) -> Result<()> {
        let (data, from) = (receive.part(&part), from as c_int);
        // SAFETY: as in `all_reduce`.
        unsafe { call!(self.ncclRecv(data, part.len(), FLOAT32, from, self.comm, self.stream)) }
    }

    /// `ncclSend` of some elements of a buffer to rank `to`.
    ///
    /// # Panics
    /// Where the buffer has no such elements.
    pub(crate) fn send(&self, send: &Buffer, part: Range<usize>, to: u32) -> Result<()> {
        let (data, to) = (send.part(&part), to as c_int);
        // SAFETY: as in `all_reduce`.
        unsafe { call!(self.ncclSend(data, part.len(), FLOAT32, to, self.comm, self.stream)) }
    }

    /// Has the stream run `function(argument)` when it gets there.
    ///
    /// # Safety
    /// `argument` must be good for `function` until the stream has been synchronised.
    pub(crate) unsafe fn host_function(&self, function: HostFunction, argument: *mut c_void) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.nccl.device.call(self.stream, function, argument) }
    }

    /// Waits for everything on the stream; the errors are also those of operations that failed since.
    pub(crate) fn synchronise(&self) -> Result<()> {
        self.nccl.device.synchronise(self.stream)
    }

    /// What `calls` puts on the stream, as a graph.
    pub(crate) fn capture(&self, calls: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let device = &self.nccl.device;
        device.begin_capture(self.stream)?;
        let called = calls();
        // Ended in any case: a stream that is left capturing is of no use.
        let instance = device.end_capture(self.stream);
        called?;
        instance.map(Graph)
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
        let beside = Self::new(self.nccl, self.comm)?;
        let result = calls(&beside);
        self.nccl.device.end(beside.stream)?;
        result
    }

    /// `ncclCommGetAsyncError`, and what the library says of it.
    pub(crate) fn state(&self) -> Result<(i32, String)> {
        let mut code = 0;
        // SAFETY: a live communicator and a valid place.
        unsafe { call!(self.ncclCommGetAsyncError(self.comm, &raw mut code)) }?;
        let text = match code {
            0 | IN_PROGRESS => String::new(),
            _ => last_error(self.functions.ncclGetLastError, self.comm),
        };
        Ok((code, text))
    }

    /// `ncclSimulateKernelTimeout`.
    pub(crate) fn simulate_kernel_timeout(&self) -> Result<()> {
        // SAFETY: a live communicator.
        unsafe { call!(self.ncclSimulateKernelTimeout(self.comm)) }
    }

    /// `ncclCommAbort`; then waits for what is left on the stream, and ends it.
    pub(crate) fn abort(self) -> Result<()> {
        let nccl = self.nccl;
        // SAFETY: a live communicator, used no more.
        unsafe { call!(nccl.ncclCommAbort(self.comm)) }?;
        nccl.device.synchronise(self.stream)?;
        nccl.device.end(self.stream)
    }

    /// Destroys the communicator and its stream.
    pub(crate) fn destroy(self) -> Result<()> {
        let nccl = self.nccl;
        // SAFETY: live, and used no more.
        unsafe { call!(nccl.ncclCommDestroy(self.comm)) }?;
        nccl.device.end(self.stream)
    }
}
