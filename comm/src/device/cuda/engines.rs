//! Copies by copy engines, between the two kernels of a launch ([`ringsight_kernels::cuda::gates`]).
//!
//! Those to other GPUs come one after another: one alone fills a GPU's link, and three side by side among four GPUs had 60 % of it
//! (docs/src/performance/library-gpu.md). What stays on this GPU goes over no link, and is queued beside them. An eager copy of that is forked
//! from the caller's stream into a stream of the communicator's own and joined again. That is no other communicator's:
//! in a stream that two share, a copy would wait for the kernel before another one's copies, which may wait for a rank whose next
//! operation waits for this one. A captured one is a node beside the others, with no other stream: one that has joined a capture stays in it
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

/// What the copies of one communicator are queued with. Its operations run one after another, so each has it alone.
pub(super) struct Engines(Option<Lane>);

struct Lane {
    beside: CUstream,
    /// That the first kernel has ended.
    begun: CUevent,
    /// That what is in the stream has.
    done: CUevent,
}

// SAFETY: handles, which belong to no thread.
unsafe impl Send for Lane {}
// SAFETY: as above; calls with them are the driver's to order, and the communicator's operations are launched one after another.
unsafe impl Sync for Lane {}

impl Drop for Lane {
    fn drop(&mut self) {
        // SAFETY: made in `Engines::new`, as far as they are there, and given back once. What is in the stream goes on; to destroy it waits for
        // nothing.
        unsafe {
            if !self.beside.is_null() {
                let _ = sys::cuStreamDestroy_v2(self.beside);
            }
            for event in [self.begun, self.done] {
                if !event.is_null() {
                    let _ = sys::cuEventDestroy_v2(event);
                }
            }
        }
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        // Not on whatever thread lets go of a launch.
        if let Some(lane) = self.0.take() {
            release::later(lane);
        }
    }
}

/// # Safety
/// The copy is of memory that is there until the stream has come behind it.
unsafe fn copy(stream: CUstream, copy: &Copy) -> Result<()> {
    // SAFETY: the caller's. Addresses say which memory they are of, also of other GPUs and processes.
    unsafe { call!(cuMemcpyAsync(copy.to, copy.from, copy.bytes as usize, stream)) }
}

/// # Safety
/// As for [`copy`].
unsafe fn copy_all(stream: CUstream, copies: &[Copy]) -> Result<()> {
    // SAFETY: the caller's.
    copies.iter().try_for_each(|one| unsafe { copy(stream, one) })
}

impl Engines {
    /// For the GPU whose context is current.
    pub(super) fn new() -> Result<Self> {
        let _outside = OutsideCapture::enter()?;
        let mut lane = Lane {
            beside: new_stream()?,
            begun: std::ptr::null_mut(),
            done: std::ptr::null_mut(),
        };
        lane.begun = new_order_event()?;
        lane.done = new_order_event()?;
        Ok(Self(Some(lane)))
    }

    /// Queues copies behind what is in the stream, which goes on when all are done.
    pub(super) fn copy(&self, stream: CUstream, copies: &Copies, captured: bool) -> Result<()> {
        let Some(own) = &copies.own else {
            // SAFETY: buffers of the caller's operation, and of the other ranks' in the window that the launch holds: they stay until the
            // operation has ended on all ranks.
            return unsafe { copy_all(stream, copies.others()) };
        };
        match &self.0 {
            Some(lane) if !captured => lane.copy_beside(stream, own, copies.others()),
            _ => captured_beside(stream, own, copies.others()),
        }
    }
}

impl Lane {
    fn copy_beside(&self, stream: CUstream, own: &Copy, others: &[Copy]) -> Result<()> {
        // SAFETY: a stream and events of this communicator's device; as above.
        unsafe {
            call!(cuEventRecord(self.begun, stream))?;
            call!(cuStreamWaitEvent(self.beside, self.begun, 0))?;
            let copied = copy(self.beside, own).and_then(|()| copy_all(stream, others));
            // What has been queued is waited for, whatever has become of the rest.
            call!(cuEventRecord(self.done, self.beside))?;
            call!(cuStreamWaitEvent(stream, self.done, 0))?;
            copied
        }
    }
}

/// The same in a capture.
fn captured_beside(stream: CUstream, own: &Copy, others: &[Copy]) -> Result<()> {
    let handle = Stream(stream as usize);
    let (_, before) = captures::dependencies(handle)?;
    // SAFETY: as above; the caller keeps buffers of what it has captured.
    unsafe { copy(stream, own) }?;
    let mut all = captures::dependencies(handle)?.1;
    captures::set_dependencies(handle, &before)?;
    // SAFETY: as above.
    unsafe { copy_all(stream, others) }?;
    all.extend(captures::dependencies(handle)?.1);
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
