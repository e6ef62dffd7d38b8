//! Copies by copy engines, between the two kernels of a launch ([`ringsight_kernels::cuda::gates`]).
//!
//! Several copies are queued side by side: those to different GPUs may go over different links, and what stays on this one goes over none. Eager
//! ones are forked from the caller's stream into streams of the communicator's own and joined again. They are no other communicator's:
//! in a stream that two share, a copy would wait for the kernel before another one's copies, which may wait for a rank whose next
//! operation waits for this one. Captured ones are nodes beside each other, with no other stream: one that has joined a capture stays in it
//! until that ends.
//!
//! All is queued by the call that launches the kernels, in sequence. Between them nobody else need call the driver.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUstream};
use ringsight_kernels::{
    Connections, Launch,
    cuda::{
        PeerLaunch,
        gates::{Copies, Copy},
    },
};

use super::{
    captures,
    driver::{Kernel, OutsideCapture, call, new_order_event, new_stream},
    gpu::Gpu,
    release,
};
use crate::device::{DeviceError, Result, Stream};

/// Streams beside the caller's: with more of them a GPU's link is no fuller.
const BESIDE: usize = 3;

/// What the copies of one communicator are queued with. Its operations run one after another, so each has it alone.
pub(super) struct Engines(Option<Lanes>);

struct Lanes {
    beside: [(CUstream, CUevent); BESIDE],
    /// That the first kernel has ended.
    begun: CUevent,
}

// SAFETY: handles, which belong to no thread.
unsafe impl Send for Lanes {}
// SAFETY: as above; calls with them are the driver's to order, and the communicator's operations are launched one after another.
unsafe impl Sync for Lanes {}

impl Drop for Lanes {
    fn drop(&mut self) {
        // SAFETY: made in `Engines::new`, and given back once. What is in the streams goes on; to destroy them waits for nothing.
        unsafe {
            for (stream, event) in self.beside.iter().filter(|(stream, _)| !stream.is_null()) {
                let _ = sys::cuStreamDestroy_v2(*stream);
                let _ = sys::cuEventDestroy_v2(*event);
            }
            let _ = sys::cuEventDestroy_v2(self.begun);
        }
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        // Not on whatever thread lets go of a launch.
        if let Some(lanes) = self.0.take() {
            release::later(lanes);
        }
    }
}

/// # Safety
/// The copy is of memory that is there until the stream has come behind it.
unsafe fn copy(stream: CUstream, copy: &Copy) -> Result<()> {
    // SAFETY: the caller's. Addresses say which memory they are of, also of other GPUs and processes.
    unsafe { call!(cuMemcpyAsync(copy.to, copy.from, copy.bytes as usize, stream)) }
}

impl Engines {
    /// For the GPU whose context is current.
    pub(super) fn new() -> Result<Self> {
        let _outside = OutsideCapture::enter()?;
        let mut lanes = Lanes {
            beside: [(std::ptr::null_mut(), std::ptr::null_mut()); BESIDE],
            begun: new_order_event()?,
        };
        // What has been made before one fails stays.
        for (beside, done) in &mut lanes.beside {
            (*beside, *done) = (new_stream()?, new_order_event()?);
        }
        Ok(Self(Some(lanes)))
    }

    /// Queues copies behind what is in the stream, which goes on when all are done.
    pub(super) fn copy(&self, stream: CUstream, copies: &Copies, captured: bool) -> Result<()> {
        match (copies.all(), &self.0) {
            ([only], _) => {
                // SAFETY: buffers of the caller's operation, and of the other ranks' in the window that the launch holds: they stay until the
                // operation has ended on all ranks.
                unsafe { copy(stream, only) }
            }
            (all, _) if captured => captured_beside(stream, all),
            (all, Some(lanes)) => lanes.copy(stream, all),
            (_, None) => Ok(()),
        }
    }
}

impl Lanes {
    fn copy(&self, stream: CUstream, copies: &[Copy]) -> Result<()> {
        let beside = &self.beside[..BESIDE.min(copies.len() - 1)];
        // SAFETY: streams and events of this communicator's device; as above.
        unsafe {
            call!(cuEventRecord(self.begun, stream))?;
            for (lane, _) in beside {
                call!(cuStreamWaitEvent(*lane, self.begun, 0))?;
            }
            let lanes = || std::iter::once(stream).chain(beside.iter().map(|(lane, _)| *lane));
            let mut copied = Ok(());
            for (one, lane) in copies.iter().zip(lanes().cycle()) {
                copied = copied.and_then(|()| copy(lane, one));
            }
            // What has been queued is waited for, whatever has become of the rest.
            for (lane, done) in beside {
                call!(cuEventRecord(*done, *lane))?;
                call!(cuStreamWaitEvent(stream, *done, 0))?;
            }
            copied
        }
    }
}

/// The same in a capture.
fn captured_beside(stream: CUstream, copies: &[Copy]) -> Result<()> {
    let handle = Stream(stream as usize);
    let (_, before) = captures::dependencies(handle)?;
    let mut all = Vec::with_capacity(copies.len());
    for one in copies {
        captures::set_dependencies(handle, &before)?;
        // SAFETY: as above; the caller keeps buffers of what it has captured.
        unsafe { copy(stream, one) }?;
        all.extend(captures::dependencies(handle)?.1);
    }
    captures::set_dependencies(handle, &all)
}

impl Gpu {
    /// Queues the copies of a launch whose first kernel has been launched, and its second one.
    pub(super) fn copy_between(
        &self,
        stream: CUstream,
        launch: &mut PeerLaunch,
        copies: &Copies,
        engines: &Engines,
        captured: bool,
    ) -> Result<()> {
        let copied = engines.copy(stream, copies, captured);
        if copied.is_err() {
            // The first kernel runs: the second one has to end what that has begun. The other ranks wait for this one, which has failed.
            launch.arguments.give_up();
        }
        let kernel = Kernel {
            function: self.peer_kernels[launch.kernel + 1],
            blocks: launch.blocks,
            threads: launch.threads,
            shared_bytes: 0,
            overlaps: false,
        };
        // SAFETY: the kernel's argument, the same as that of the first one. Where it cannot be launched, the launch is never over, and what
        // it has stays its own.
        let ended = unsafe { kernel.launch(stream, &mut [launch.arguments.as_mut_ptr()]) };
        copied.and(ended)
    }
}

/// What the copies of a launch are queued with.
pub(super) fn of(launch: &Launch) -> Result<Arc<Engines>> {
    let mut works = launch.channels.iter().flat_map(|channel| &channel.work);
    let found = works.find_map(|work| match &work.connections {
        Connections::Engines { window, .. } => window.engines.clone().downcast().ok(),
        _ => None,
    });
    found.ok_or_else(|| {
        DeviceError::InvalidUsage("a window that is not for this device's copy engines".into())
    })
}
