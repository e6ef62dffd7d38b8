//! Whether a GPU still works, as far as is known.
//!
//! To ask the driver may take as long as another thread's call holds its lock, and a `cudaFree` does until all kernels have ended. So a
//! thread asks, whenever somebody wants to know, and everybody else looks at what it has found out.

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
    /// Asks the thread to ask; it is there from the first time on, if there can be one.
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

    /// What has broken the GPU for good, by the driver's answer; may wait for its lock.
    pub(super) fn check(&self) -> Result<()> {
        query(self.stream)
    }

    /// The same as far as it is known, which is made to be known better. Calls nothing.
    pub(super) fn fault(&self) -> Option<DeviceError> {
        if let Some(fault) = self.found.get() {
            return Some(fault.clone());
        }
        if let Some(ask) = self.ask.get_or_init(|| self.start()) {
            // It has been asked already, or has found something.
            let _ = ask.try_send(());
        }
        None
    }

    fn start(&self) -> Option<SyncSender<()>> {
        let (sender, asked) = sync_channel(1);
        let (stream, found) = (self.stream, self.found.clone());
        // Without it a fault is found out by the next call that the caller makes.
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

/// What a kernel did wrong is the answer to every call in its context.
fn query(stream: Own) -> Result<()> {
    // Somebody's capture has nothing to do with it.
    let _outside = OutsideCapture::enter()?;
    // SAFETY: a stream of our own.
    match unsafe { sys::cuStreamQuery(stream.0) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(()),
        result => check("a kernel on the GPU", result),
    }
}
