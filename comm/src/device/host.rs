//! The host device: CUDA's execution model on CPU memory.
//!
//! A stream is a thread with a queue, an event a point in that order, a captured graph runs its independent branches on
//! threads of its own. The rules (what a capture refuses, what invalidates it) are CUDA's with capture mode "thread
//! local", so that a program that is right here is right on a GPU. There is no legacy default stream that
//! synchronises with others: stream 0 is an ordinary stream, one per device number.

mod capture;
mod graph;
mod runtime;
mod scheduling;
mod state;
mod streams;
mod worker;

#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use ringsight_comm_base::sync::lock;
use ringsight_kernels::{Launch, host::Kernel};
use ringsight_records::{Algorithm, DeviceClock};

use self::{
    graph::{Action, External, Step},
    state::{CURRENT, EventState, State, unknown, usage},
    worker::{Point, Worker, in_callback},
};
use super::{
    Contexts, DeviceError, Event, LaunchEnd, Launcher, Launches, Memory, Properties, Result, SavedContext,
    Sharing, Stream,
};

/// Alignment of [`Memory::allocate`], in bytes: a page, since windows begin at one.
const ALIGNMENT: usize = 4096;

/// The device; see the module's documentation.
pub struct HostDevice {
    state: Mutex<State>,
    /// Runs the destructors of captured graphs.
    reclaim: Arc<Worker>,
}

impl HostDevice {
    /// The device, with no streams yet.
    ///
    /// # Errors
    /// [`DeviceError::Resource`] if its housekeeping thread cannot be started.
    pub fn new() -> Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            reclaim: Arc::new(Worker::spawn("rs-reclaim")?),
        })
    }

    /// Locks the state; refused inside functions that the device calls.
    fn enter(&self) -> Result<std::sync::MutexGuard<'_, State>> {
        if in_callback() {
            return usage("a host function, destructor or observer that runs on the device must not call it");
        }
        Ok(lock(&self.state))
    }

    /// Appends work to a stream, or to its capture.
    fn submit(&self, stream: Stream, action: Action) -> Result<()> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        match state.capturing(handle)? {
            Some(capture) => capture.add(handle, Step::Action(action)),
            None => state.streams[&handle]
                .worker
                .push(Box::new(move || action.run(0))),
        }
        Ok(())
    }

    /// Appends a node that has to do with an event outside to a stream's capture.
    fn submit_external(&self, stream: Stream, event: Event, external: External) -> Result<()> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        let found = state.event(event)?.clone();
        let own = state.streams[&handle].capture;
        let Some(capture) = state.capturing(handle)? else {
            return usage(format!(
                "event {:#x} can be external to a capture only, and stream {handle:#x} is in none",
                event.0
            ));
        };
        if matches!(found, EventState::Captured { capture, .. } if Some(capture) == own) {
            return usage(format!(
                "event {:#x} was last recorded in this capture: it is not external to it",
                event.0
            ));
        }
        capture.add(handle, Step::External(external));
        Ok(())
    }

    /// The worker of a stream that may be waited for.
    fn waitable(&self, call: &str, stream: Stream) -> Result<Arc<Worker>> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        state.refuse_in_capture(call, Some(handle))?;
        Ok(state.streams[&handle].worker.clone())
    }

    /// The point of an event that may be waited for; `None` if it was never recorded.
    fn point(&self, call: &str, event: Event) -> Result<Option<Arc<Point>>> {
        let mut state = self.enter()?;
        let found = state.event(event)?.clone();
        state.refuse_in_capture(call, None)?;
        match found {
            EventState::Never => Ok(None),
            EventState::Recorded(point) => Ok(Some(point)),
            EventState::Captured { .. } => usage(format!(
                "{call}: event {:#x} was last recorded in a capture",
                event.0
            )),
        }
    }
}

fn check_address(name: &str, address: usize, bytes: usize) -> Result<()> {
    if bytes > 0 && (address == 0 || address.checked_add(bytes).is_none()) {
        let text = format!("{name} {address:#x} is no address of {bytes} bytes");
        return Err(DeviceError::InvalidHandle(text));
    }
    Ok(())
}

impl Properties for HostDevice {
    fn name(&self) -> &'static str {
        "host"
    }

    fn shares_addresses(&self) -> bool {
        true
    }

    fn supports(&self, algorithm: Algorithm) -> bool {
        ringsight_kernels::host::runs(algorithm)
    }

    fn clock(&self) -> Option<DeviceClock> {
        // Its threads report with the host's clock.
        Some(DeviceClock::of_host())
    }

    fn longest_scheduling_delay(&self) -> Duration {
        scheduling::longest_delay()
    }
}

impl Contexts for HostDevice {
    fn current(&self) -> Result<i32> {
        Ok(CURRENT.get())
    }

    fn set_current(&self, device: i32) -> Result<()> {
        if device < 0 {
            return Err(DeviceError::InvalidHandle(format!("device {device} is negative")));
        }
        CURRENT.set(device);
        Ok(())
    }

    fn save_context(&self) -> Result<SavedContext> {
        Ok(SavedContext(CURRENT.get() as usize))
    }

    fn restore(&self, saved: SavedContext) -> Result<()> {
        self.set_current(saved.0 as i32)
    }
}

impl Memory for HostDevice {
    fn allocate(&self, bytes: usize) -> Result<*mut u8> {
        let mut state = self.enter()?;
        if bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        let fail = || DeviceError::Resource(format!("cannot allocate {bytes} bytes"));
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT).ok_or_else(fail)?;
        // SAFETY: the alignment is a power of two that divides the size.
        let pointer = unsafe { libc::aligned_alloc(ALIGNMENT, rounded) };
        if pointer.is_null() {
            return Err(fail());
        }
        state.memory.insert(pointer as usize, bytes);
        Ok(pointer.cast())
    }

    fn free(&self, pointer: *mut u8) -> Result<()> {
        let mut state = self.enter()?;
        if !pointer.is_null() {
            state
                .memory
                .remove(&(pointer as usize))
                .ok_or_else(|| unknown("allocation", pointer as usize))?;
            // SAFETY: it came from `aligned_alloc` and was not freed since, or it would not have been listed.
            unsafe { libc::free(pointer.cast()) };
        }
        Ok(())
    }
}

/// Its ranks share nothing: they connect through host memory.
impl Sharing for HostDevice {}

impl Launches for HostDevice {
    fn launch_kernel(
        &self,
        stream: Stream,
        launch: Arc<Launch>,
        _launcher: &mut Launcher,
    ) -> Result<LaunchEnd> {
        for work in launch.channels.iter().flat_map(|channel| &channel.work) {
            work.check()
                .map_err(|error| DeviceError::InvalidUsage(error.to_string()))?;
            if work.connections.peers().is_some() {
                return usage(format!("op {}: the host device has no peer kernels", work.op));
            }
        }
        self.submit(stream, Action::Kernel(Arc::new(Kernel::new(launch))))?;
        Ok(LaunchEnd::ByEvent)
    }
}
