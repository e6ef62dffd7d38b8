//! What a program needs when something goes wrong: the asynchronous error, progress without waiting, abort.

use std::ffi::c_int;

use anyhow::Result;

use super::Communicator;

/// `ncclInProgress`.
const IN_PROGRESS: c_int = 7;

impl super::Nccl {
    /// Sets the calling thread's device.
    ///
    /// # Errors
    /// The library's.
    pub fn set_device(&self, number: u32) -> Result<()> {
        // SAFETY: no pointers.
        let result = unsafe { (self.functions.ringsightSetDevice)(number as c_int) };
        self.check("ringsightSetDevice", result, std::ptr::null_mut())
    }
}

impl Communicator<'_> {
    /// `ncclCommGetAsyncError`, and what the library says of it.
    ///
    /// # Errors
    /// The library's refusal of the call itself.
    pub fn state(&self) -> Result<(i32, String)> {
        let mut code = 0;
        // SAFETY: a live communicator and a valid place.
        let result = unsafe { (self.nccl.functions.ncclCommGetAsyncError)(self.comm, &raw mut code) };
        self.nccl.check("ncclCommGetAsyncError", result, self.comm)?;
        let text = match code {
            0 | IN_PROGRESS => String::new(),
            _ => self.nccl.last_error(self.comm),
        };
        Ok((code, text))
    }

    /// Whether there is work on the stream that is not done.
    ///
    /// # Errors
    /// The library's.
    pub fn is_pending(&self) -> Result<bool> {
        // SAFETY: a live stream.
        let result = unsafe { (self.nccl.functions.ringsightStreamQuery)(self.stream) };
        if result == IN_PROGRESS {
            return Ok(true);
        }
        self.nccl.check("ringsightStreamQuery", result, self.comm)?;
        Ok(false)
    }

    /// `ncclSimulateKernelTimeout`.
    ///
    /// # Errors
    /// The library's.
    pub fn simulate_kernel_timeout(&self) -> Result<()> {
        // SAFETY: a live communicator.
        let result = unsafe { (self.nccl.functions.ncclSimulateKernelTimeout)(self.comm) };
        self.nccl.check("ncclSimulateKernelTimeout", result, self.comm)
    }

    /// `ncclCommAbort`; then waits for what is left on the stream, and ends it.
    ///
    /// # Errors
    /// The library's.
    pub fn abort(self) -> Result<()> {
        // SAFETY: a live communicator, used no more.
        let result = unsafe { (self.nccl.functions.ncclCommAbort)(self.comm) };
        self.nccl.check("ncclCommAbort", result, std::ptr::null_mut())?;
        // SAFETY: a live stream.
        let result = unsafe { (self.nccl.functions.ringsightStreamSynchronize)(self.stream) };
        self.nccl
            .check("ringsightStreamSynchronize", result, std::ptr::null_mut())?;
        self.nccl.end(self.stream)
    }
}
