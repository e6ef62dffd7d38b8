//! The device that operations run on: [`cuda`] for GPUs, [`host`] for CPU memory.
//!
//! `RINGSIGHT_DEVICE=cuda|host` chooses (default `cuda`); there is no silent fallback. [`device`] opens it once for the life of the process.
//!
//! [`Device`] is the sum of small traits, by use:
//!
//! | trait | owns |
//! |---|---|
//! | [`Properties`] | what a planner and a profiler ask: name, algorithms, channels, warps, clock |
//! | [`Contexts`] | the calling thread's current device, and its health |
//! | [`Memory`] | buffers of callers, and memory for them |
//! | [`Sharing`] | memory that other ranks' devices, other processes and network devices reach |
//! | [`Streams`] | streams and events that order the library's work with the caller's |
//! | [`Graphs`] | captures, and words that replays write |
//! | [`Launches`] | kernels |
//!
//! [`Runtime`] is what programs call themselves, as they call CUDA: copies, synchronisation, captured graphs. Only the host device has it, for
//! `ringsight.h`.
//!
//! Invariants:
//! - Every call returns before the work is done unless it says otherwise.
//! - On a thread that captures a stream, no stream or event may be queried or synchronised; nor from any thread a stream that is being
//!   captured. Such a call fails and invalidates the capture (capture mode "thread local").
//! - Functions that run on the device must not call it.
//!
//! Threads that enter: callers' threads, the watchdog, proxies. Devices have threads of their own, which call an
//! [`Observer`](ringsight_kernels::Observer).

pub(crate) mod clock;
mod counters;
pub mod cuda;
mod deferred;
mod graphs;
pub mod host;
mod launch;
mod memory;
mod runtime;
mod sharing;
mod streams;

use std::{
    any::Any,
    sync::{Arc, OnceLock},
    time::Duration,
};

use ringsight_records::{Algorithm, DeviceClock};

pub use self::{
    counters::{Counter, Journal, Overrun},
    graphs::{Capture, Graphs},
    launch::{LaunchEnd, Launcher, Launches},
    memory::{Allocation, HostRegistration, Memory},
    runtime::{Graph, GraphExec, HostFunction, Runtime},
    sharing::{ImportedMemory, RdmaMemory, SharedMemory, Sharing, VmmChunk},
    streams::{Event, Progress, Streams},
};
pub use crate::op::Stream;
use crate::{
    error::{self, ResultCode},
    op::Task,
};

/// What a device call can fail with. The text says which argument and why.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    /// `RINGSIGHT_DEVICE` names no device that this build or machine has.
    #[error("{0}")]
    Unavailable(String),
    /// A handle that is not (or no longer) one of the device's, or an argument with an impossible value.
    #[error("{0}")]
    InvalidHandle(String),
    /// A call that is not allowed now: in a capture, in a host function, with a handle of another kind.
    #[error("{0}")]
    InvalidUsage(String),
    /// Not enough memory, threads or the like.
    #[error("{0}")]
    Resource(String),
    /// The device reported a fault.
    #[error("{0}")]
    Fault(String),
}

impl From<DeviceError> for error::Error {
    fn from(error: DeviceError) -> Self {
        let code = match &error {
            DeviceError::InvalidHandle(_) => ResultCode::InvalidArgument,
            DeviceError::InvalidUsage(_) => ResultCode::InvalidUsage,
            DeviceError::Resource(_) => ResultCode::SystemError,
            DeviceError::Unavailable(_) | DeviceError::Fault(_) => ResultCode::UnhandledCudaError,
        };
        Self::new(code, error.to_string())
    }
}

/// Result of a device call.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// What a device is and can do.
pub trait Properties {
    /// `"host"` or `"cuda"`.
    fn name(&self) -> &'static str;

    /// PCI address of device number `device`, as the kernel writes it (`0000:01:00.0`); `None` for a device without one.
    fn bus_id(&self, _device: i32) -> Option<String> {
        None
    }

    /// Whether it has channel programs of an algorithm ([`Work::algorithm`](ringsight_kernels::Work::algorithm)). Every device has those
    /// of [`Algorithm::Ring`] and [`Algorithm::Direct`].
    fn supports(&self, algorithm: Algorithm) -> bool;

    /// Warps of a block that does an operation of a communicator of `ranks` ranks, for profilers; 1 if a thread does it.
    fn warps(&self, _task: &Task, _ranks: u32) -> u8 {
        1
    }

    /// Threads of a warp.
    fn warp_threads(&self) -> u32 {
        1
    }

    /// Fewest channels of a communicator whose caller asks for none.
    fn min_channels(&self) -> u32 {
        1
    }

    /// The same if the ranks' FIFOs are in device memory ([`Sharing::allocate_shared`]); `None` if the device cannot share memory.
    fn min_p2p_channels(&self) -> Option<u32> {
        None
    }

    /// The relation of its timer to the host's clock, if it is known from the start.
    fn clock(&self) -> Option<DeviceClock> {
        None
    }

    /// Whether all ranks of a process reach its memory at the addresses that the program has.
    fn shares_addresses(&self) -> bool {
        false
    }

    /// The longest time so far for which the operating system has kept a ready kernel from running. Zero for GPUs, whose kernels are not
    /// threads.
    fn longest_scheduling_delay(&self) -> Duration {
        Duration::ZERO
    }
}

/// What was current on a thread; see [`Contexts::save_context`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedContext(usize);

/// The calling thread's current device, and the health of devices.
pub trait Contexts {
    /// The calling thread's current device number.
    fn current(&self) -> Result<i32>;

    /// Sets the calling thread's current device number.
    fn set_current(&self, device: i32) -> Result<()>;

    /// What is current on the calling thread, for [`Contexts::restore`]. It is more than a number: a thread that has not used the device has
    /// no context.
    fn save_context(&self) -> Result<SavedContext>;

    /// Makes a device number current. Returns what was current before, or `None` if it was current already.
    fn enter(&self, device: i32) -> Result<Option<SavedContext>> {
        let before = self.save_context()?;
        self.set_current(device)?;
        Ok(Some(before))
    }

    /// Makes current what was current.
    fn restore(&self, saved: SavedContext) -> Result<()>;

    /// Fails if device number `device` is broken for good: nothing launched on it ends any more. May wait for the driver.
    fn check_health(&self, _device: i32) -> Result<()> {
        Ok(())
    }

    /// The known fault of device number `device`, if it is broken for good. Only reads memory, and asks a thread that may wait for the driver
    /// to look again.
    fn fault(&self, _device: i32) -> Option<DeviceError> {
        None
    }
}

/// Asynchronous execution as CUDA has it; see the module's documentation.
pub trait Device:
    Any + Properties + Contexts + Memory + Sharing + Streams + Graphs + Launches + Send + Sync
{
}

impl<T> Device for T where
    T: Any + Properties + Contexts + Memory + Sharing + Streams + Graphs + Launches + Send + Sync
{
}

/// The opened device.
struct Opened {
    device: Arc<dyn Device>,
    /// The same device, if it has a [`Runtime`].
    runtime: Option<Arc<dyn Runtime>>,
}

static OPENED: OnceLock<Result<Opened>> = OnceLock::new();

fn open_once() -> Result<&'static Opened> {
    OPENED
        .get_or_init(|| {
            // The driver keeps descriptors of its own.
            let _standard = ringsight_comm_base::sys::StandardTaken::new();
            let opened = open(crate::env::text("RINGSIGHT_DEVICE").as_deref());
            crate::log::show_device(|| self::opened()?.current().ok());
            opened
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// The device that `RINGSIGHT_DEVICE` names (`cuda`, the default, or `host`), opened at the first call.
///
/// # Errors
/// [`DeviceError::Unavailable`] if the name is unknown or the device cannot be used here. The answer stays the same for the life of the process.
pub fn device() -> Result<&'static Arc<dyn Device>> {
    Ok(&open_once()?.device)
}

/// The device's [`Runtime`].
///
/// # Errors
/// As for [`device`]; [`DeviceError::InvalidUsage`] if the device has an interface of its own, as CUDA has.
pub fn runtime() -> Result<&'static Arc<dyn Runtime>> {
    let Opened { device, runtime } = open_once()?;
    runtime.as_ref().ok_or_else(|| {
        DeviceError::InvalidUsage(format!("the device is {}: use its own interface", device.name()))
    })
}

/// The device if it has been opened. Does not open it.
pub(crate) fn opened() -> Option<&'static Arc<dyn Device>> {
    Some(&OPENED.get()?.as_ref().ok()?.device)
}

fn open(name: Option<&str>) -> Result<Opened> {
    match name {
        Some("host") => {
            let host = Arc::new(host::HostDevice::new()?);
            Ok(Opened {
                device: host.clone(),
                runtime: Some(host),
            })
        }
        None | Some("" | "cuda") => Ok(Opened {
            device: Arc::new(cuda::CudaDevice::new()?),
            runtime: None,
        }),
        Some(other) => Err(DeviceError::Unavailable(format!(
            "RINGSIGHT_DEVICE={other} is unknown; accepted are cuda and host"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_the_one_named_or_none() {
        let name = |named| open(named).map(|opened| opened.device.name());
        assert_eq!(name(Some("host")).ok(), Some("host"));
        for named in [None, Some("cuda")] {
            match name(named) {
                Ok(opened) => assert_eq!(opened, "cuda"),
                // Where there is no GPU.
                Err(error) => assert!(error.to_string().contains("RINGSIGHT_DEVICE=host"), "{error}"),
            }
        }
        let error = name(Some("gpu")).expect_err("unknown");
        assert!(
            error.to_string().contains("accepted are cuda and host"),
            "{error}"
        );
    }
}
