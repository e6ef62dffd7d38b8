//! Whether a GPU still works.
//!
//! A query of the driver may take as long as another thread's call holds the driver's lock: a `cudaFree` holds it until all kernels have ended. So a
//! thread queries whenever somebody asks, and callers look at what it has found.

use std::{
    ffi::c_int,
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
};

use cudarc::driver::sys::{self, CUresult, CUstream};

use super::driver::{OutsideCapture, check};
use crate::device::{DeviceError, Result};

/// A stream of the module's own, in which nothing waits for a kernel.
#[derive(Clone, Copy)]
struct Own(CUstream);

// SAFETY: a handle that any thread may use, of a stream that is never destroyed.
unsafe impl Send for Own {}
// SAFETY: as above.
unsafe impl Sync for Own {}

/// See the module's documentation.
pub(super) struct Health {
    device: c_int,
    stream: Own,
    found: Arc<OnceLock<DeviceError>>,
    /// Wakes the thread. Set at the first use; `None` if the thread could not be started.
    ask: OnceLock<Option<SyncSender<()>>>,
}

impl Health {
    pub(super) fn new(device: c_int, stream: CUstream) -> Self {
        Self {
            device,
            stream: Own(stream),
            found: Arc::default(),
            ask: OnceLock::new(),
        }
    }

    /// Queries the driver; may wait for its lock. Fails if the GPU is broken for good.
    pub(super) fn check(&self) -> Result<()> {
        query(self.stream)
    }

    /// The known fault. Only reads memory, and wakes the thread for another query.
    pub(super) fn fault(&self) -> Option<DeviceError> {
        if let Some(fault) = self.found.get() {
            return Some(fault.clone());
        }
        if let Some(ask) = self.ask.get_or_init(|| self.start()) {
            // Otherwise it is already awake, or has found a fault.
            let _ = ask.try_send(());
        }
        None
    }

    fn start(&self) -> Option<SyncSender<()>> {
        let (sender, asked) = sync_channel(1);
        let (stream, found) = (self.stream, self.found.clone());
        // Without the thread, the caller's next driver call finds a fault.
        let thread = thread::Builder::new()
            .name(format!("rs-health-{}", self.device))
            .stack_size(64 << 10)
            .spawn(move || run(stream, &found, &asked));
        thread.is_ok().then_some(sender)
    }
}

fn run(stream: Own, found: &OnceLock<DeviceError>, asked: &Receiver<()>) {
    while asked.recv().is_ok() {
        if let Err(fault) = query(stream) {
            let _ = found.set(fault);
            return;
        }
    }
}

/// After a kernel fault, every call in its context returns the fault.
fn query(stream: Own) -> Result<()> {
    // Other threads' captures must go on.
    let _outside = OutsideCapture::enter()?;
    // SAFETY: the module's own stream.
    match unsafe { sys::cuStreamQuery(stream.0) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(()),
        result => check("a kernel on the GPU", result),
    }
}
