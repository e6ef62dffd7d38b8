//! Calls for jobs in which something goes wrong: the asynchronous error, a simulated time-out, abort.

use anyhow::Result;

use super::{Communicator, IN_PROGRESS};

impl Communicator<'_> {
    /// `ncclCommGetAsyncError`, and what the library says of it.
    pub(crate) fn state(&self) -> Result<(i32, String)> {
        let mut code = 0;
        // SAFETY: a live communicator and a valid place.
        let result = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(self.comm, &raw mut code) };
        self.nccl.check("ncclCommGetAsyncError", result, self.comm)?;
        let text = match code {
            0 | IN_PROGRESS => String::new(),
            _ => self.nccl.last_error.text(self.comm),
        };
        Ok((code, text))
    }

    /// `ncclSimulateKernelTimeout`.
    pub(crate) fn simulate_kernel_timeout(&self) -> Result<()> {
        // SAFETY: a live communicator.
        let result = unsafe { (self.nccl.functions.ncclSimulateKernelTimeout)(self.comm) };
        self.nccl.check("ncclSimulateKernelTimeout", result, self.comm)
    }

    /// `ncclCommAbort`; then waits for what is left on the stream, and ends it.
    pub(crate) fn abort(self) -> Result<()> {
        // SAFETY: a live communicator, used no more.
        let result = unsafe { (self.nccl.functions.ncclCommAbort)(self.comm) };
        self.nccl.check("ncclCommAbort", result, std::ptr::null_mut())?;
        self.nccl.device.synchronise(self.stream)?;
        self.nccl.device.end(self.stream)
    }
}
