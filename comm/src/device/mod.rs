//! The device that operations run on, behind one trait: [`host`] for CPU memory, [`cuda`] for GPUs.
//!
//! `RINGSIGHT_DEVICE=cuda|host` chooses (default `cuda`); there is no silent fallback.

pub(crate) mod clock;
pub mod cuda;
mod deferred;
pub mod host;
mod journal;
mod memory;

use std::{
    any::Any,
    os::fd::OwnedFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ringsight_kernels::Launch;
use ringsight_records::{Algorithm, DeviceClock};

pub use crate::op::Stream;
use crate::{
    error::{self, ResultCode},
    op::Task,
};

pub use journal::{Journal, Overrun};
pub use memory::{Allocation, Direct, Piece, Reached, Share};

/// Opaque handle of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Event(pub usize);

/// Opaque handle of a captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Graph(pub usize);

/// Opaque handle of an instantiated graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct GraphExec(pub usize);

/// The capture that a stream takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Capture {
    /// Unique in the process, never 0; the number that records carry as the graph.
    pub id: u32,
}

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

/// Whether asynchronous work has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Everything before this point is done.
    Done,
    /// Not yet.
    Pending,
}

/// A function that runs on a stream, in order; in a capture it becomes a node that runs at each replay. Its argument is
/// the replay (0 = eager, n = n-th replay).
pub type HostFunction = Arc<dyn Fn(u32) + Send + Sync>;

/// Keeps memory reachable for the device; `None` where all memory is.
pub type Reachable = Option<Box<dyn Send + Sync>>;

/// What a device launches the kernels of one communicator with, if it has that: see [`Device::launcher`].
pub type Launcher = Option<Box<dyn Any + Send>>;

/// How what is launched in another stream is made to wait for the end of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By an event that is recorded behind it.
    Marked,
    /// So, or by [`Device::follow`], whatever has become of the stream.
    Known,
}

/// What was current on a thread; see [`Device::mark`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark(usize);

/// A word in host memory that the device counts up, from 0; see [`Device::count`].
#[derive(Clone)]
pub struct Counter(Arc<dyn AsRef<AtomicU64> + Send + Sync>);

impl Counter {
    /// In memory of the host's own, for the device that is the host.
    fn of_host() -> Self {
        struct Word(AtomicU64);
        impl AsRef<AtomicU64> for Word {
            fn as_ref(&self) -> &AtomicU64 {
                &self.0
            }
        }
        Self::new(Word(AtomicU64::new(0)))
    }

    fn new(word: impl AsRef<AtomicU64> + Send + Sync + 'static) -> Self {
        Self(Arc::new(word))
    }

    fn word(&self) -> &AtomicU64 {
        (*self.0).as_ref()
    }

    /// How often it has been counted up. A look at memory: it calls nothing.
    #[must_use]
    pub fn value(&self) -> u64 {
        // Acquire: what the device did before it counted is there.
        self.word().load(Ordering::Acquire)
    }
}

fn not_in_pieces(start: usize) -> DeviceError {
    DeviceError::InvalidUsage(format!(
        "this device maps no memory by pieces, at {start:#x} neither"
    ))
}

/// Asynchronous execution as CUDA has it. Every call returns before the work is done unless it says otherwise.
///
/// On a thread that captures a stream, no stream or event may be queried or synchronised, and from no thread a stream
/// that is being captured: the call fails and the capture is invalidated (capture mode "thread local"). Functions that
/// run on the device must not call it.
pub trait Device: Send + Sync + 'static {
    /// `"host"` or `"cuda"`.
    fn name(&self) -> &'static str;
    /// Whether its kernels have programs of an algorithm ([`Work::algorithm`](ringsight_kernels::Work::algorithm)). All have
    /// those of [`Algorithm::Ring`] and [`Algorithm::Direct`].
    fn runs(&self, algorithm: Algorithm) -> bool;
    /// Warps of a block that does an operation of a communicator of `ranks` ranks, as profilers are told; 1 where a thread does it.
    fn warps(&self, _task: &Task, _ranks: u32) -> u8 {
        1
    }
    /// Threads of a warp.
    fn warp_threads(&self) -> u32 {
        1
    }
    /// Fewest channels of a communicator whose caller asks for none.
    fn channels(&self) -> u32 {
        1
    }
    /// The same where ranks' FIFOs are in the memory of their devices ([`Device::share`]); `None` if it has no memory for that.
    fn near_channels(&self) -> Option<u32> {
        None
    }
    /// The calling thread's current device number.
    fn current(&self) -> Result<i32>;
    /// Sets the calling thread's current device number.
    fn set_current(&self, device: i32) -> Result<()>;
    /// What is current on the calling thread, to be given to [`Device::restore`]: more than a number, as a thread that has
    /// not used the device yet has none.
    fn mark(&self) -> Result<Mark>;
    /// Makes a device number current; what was before, where that is not the same.
    fn enter(&self, device: i32) -> Result<Option<Mark>> {
        let before = self.mark()?;
        self.set_current(device)?;
        Ok(Some(before))
    }
    /// Makes current what was.
    fn restore(&self, mark: Mark) -> Result<()>;
    /// How its timer stands to the host's clock where that is known from the start.
    fn clock(&self) -> Option<DeviceClock> {
        None
    }
    /// What has broken device number `device` for good, if anything has: nothing that was launched on it ends any more.
    fn check_health(&self, _device: i32) -> Result<()> {
        Ok(())
    }

    /// What has broken device number `device` for good ([`Device::check_health`]), if that has been found out: a look at memory, which has
    /// it looked at anew by a thread that may wait for the driver.
    fn fault(&self, _device: i32) -> Option<DeviceError> {
        None
    }

    /// For how long kernels have been kept from running by what else there is to do, ever: where they are threads, the one that was for
    /// longest. Kernels of a GPU run once they are there.
    fn kept_from_running(&self) -> Duration {
        Duration::ZERO
    }

    /// PCI address of device number `device`, as the kernel writes it (`0000:01:00.0`); `None` for one that has none.
    fn bus_id(&self, _device: i32) -> Option<String> {
        None
    }

    /// Device memory of `bytes` bytes, aligned to 4096; null for 0 bytes.
    fn allocate(&self, bytes: usize) -> Result<*mut u8>;
    /// Whether kernels of device number `device` can use what is at `address`, as far as that can be told without a fault. `unknown`: what nothing
    /// is known of may be there by the time that they run.
    fn check_buffer(&self, _address: usize, _device: i32, _unknown: bool) -> Result<()> {
        Ok(())
    }
    /// Whether kernels of device number `device` can be launched in a stream, which is one.
    fn check_stream(&self, _stream: Stream, _device: i32) -> Result<()> {
        Ok(())
    }
    /// Gives memory of [`Device::allocate`] back; null is accepted.
    fn free(&self, pointer: *mut u8) -> Result<()>;
    /// The allocation that a buffer is in, if that is memory of device `device` which every device reaches that reaches its shared memory
    /// ([`Device::reach_share`]): in this process at the same address, in others by [`Device::export`].
    fn allocation(&self, _address: usize, _bytes: usize, _device: i32) -> Option<Allocation> {
        None
    }
    /// What another process reaches the allocation that begins there by, with [`Device::reach_share`].
    ///
    /// # Errors
    /// The driver gives nothing for it.
    fn export(&self, start: usize) -> Result<Vec<u8>> {
        Err(DeviceError::InvalidHandle(format!(
            "{start:#x} is nothing that other processes reach"
        )))
    }
    /// The pieces that a buffer is in, one behind the other, if it is memory of device `device` that was mapped by pieces, each of which other processes may be
    /// given ([`Device::export_piece`]), and kernels of the devices `others` of this process reach each.
    fn pieces(&self, _address: usize, _bytes: usize, _device: i32, _others: &[i32]) -> Option<Vec<Piece>> {
        None
    }
    /// What a process that has been given the pieces from `start` on needs beside them for [`Device::reach_pieces`].
    ///
    /// # Errors
    /// The device maps nothing by pieces.
    fn export_pieces(&self, start: usize) -> Result<Vec<u8>> {
        Err(not_in_pieces(start))
    }
    /// A descriptor of a piece, to be given to another process. It keeps the memory.
    ///
    /// # Errors
    /// The driver gives none for it, or it is gone.
    fn export_piece(&self, piece: &Piece) -> Result<OwnedFd> {
        Err(not_in_pieces(piece.start))
    }
    /// Makes what another process has given reachable for kernels of the current device, one piece behind the other: `sizes` are their
    /// lengths, `next` gives one descriptor after another. The result keeps the memory.
    ///
    /// # Errors
    /// Of `next`, and what the driver refuses.
    fn reach_pieces(
        &self,
        _handle: &[u8],
        _sizes: &[u64],
        _next: &mut dyn FnMut() -> Result<OwnedFd>,
    ) -> Result<Reached> {
        Err(not_in_pieces(0))
    }
    /// Makes page-aligned host memory reachable for kernels on all devices, at the address that the host knows it by, while
    /// the result lives. The memory must stay mapped for longer.
    fn reach(&self, _base: usize, _bytes: usize) -> Result<Reachable> {
        Ok(None)
    }
    /// Zeroed memory of the current device that kernels of other devices and processes may reach; `None` if the device has none.
    fn share(&self, _bytes: usize) -> Result<Option<Share>> {
        Ok(None)
    }
    /// Makes what another rank of this machine got by [`Device::share`] reachable for kernels of the current device; that
    /// rank must keep it while the result lives.
    fn reach_share(&self, handle: &[u8]) -> Result<Reached> {
        Err(DeviceError::InvalidHandle(format!(
            "{} bytes are no memory of this device's",
            handle.len()
        )))
    }
    /// Copies to memory of [`Device::share`]; returns when that is done, and waits for no kernel.
    fn write_share(&self, _base: u64, _bytes: &[u8]) -> Result<()> {
        Err(DeviceError::InvalidUsage("this device shares no memory".into()))
    }
    /// Copies from memory of [`Device::share`]; otherwise as [`Device::write_share`].
    fn read_share(&self, _base: u64, _bytes: &mut [u8]) -> Result<()> {
        Err(DeviceError::InvalidUsage("this device shares no memory".into()))
    }
    /// What copies of one communicator on the current device are queued with beside the streams of its caller
    /// ([`ringsight_kernels::launch::Window::copy_engine`]).
    fn engines(&self) -> Result<Arc<dyn Any + Send + Sync>> {
        Err(DeviceError::InvalidUsage(
            "this device has no copy engines".into(),
        ))
    }
    /// Zeroed memory of the current device that network devices reach; `None` if the device has no memory of its own, but the host's.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`]: its driver has no dma-buf for it, or what network devices write would not be seen in order.
    fn direct(&self, _bytes: usize) -> Result<Option<Direct>> {
        Ok(None)
    }
    /// Returns when kernels of device number `device` see what network devices had written to its memory ([`Device::direct`]) before
    /// the host learned of it. The context of the device may be left current.
    fn flush_direct(&self, _device: i32) -> Result<()> {
        Ok(())
    }
    /// Drops what [`Device::reach`] gave for so many bytes, which only the caller holds, and what it was given for: to give it back may
    /// take as long as the device has anything to do, so that it may be kept.
    fn retire(&self, _bytes: usize, waste: Box<dyn Any + Send>) {
        drop(waste);
    }
    /// Drops what calls the device then, and waits for no kernel: not on this thread.
    fn discard(&self, waste: Box<dyn Any + Send>) {
        drop(waste);
    }

    /// A new stream on the current device.
    fn stream_create(&self) -> Result<Stream>;
    /// Ends a stream once its work is done; returns at once.
    fn stream_destroy(&self, stream: Stream) -> Result<()>;
    /// A number that no other stream of this process has or will have, whatever its handle.
    fn stream_id(&self, stream: Stream) -> Result<u64>;
    /// Whether all work in the stream is done.
    fn stream_query(&self, stream: Stream) -> Result<Progress>;
    /// Waits for all work in the stream.
    fn stream_synchronize(&self, stream: Stream) -> Result<()>;
    /// Makes later work in `stream` wait for what `event` last recorded. Joins a capture as CUDA does.
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()>;

    /// A new event, complete until first recorded.
    fn event_create(&self) -> Result<Event>;
    /// The same for order alone: it has no time.
    fn order_event_create(&self) -> Result<Event> {
        self.event_create()
    }
    /// Destroys it; pending work that refers to it is unaffected.
    fn event_destroy(&self, event: Event) -> Result<()>;
    /// Records it after the present work of `stream`.
    fn event_record(&self, event: Event, stream: Stream) -> Result<()>;
    /// Captures a record that each replay makes: from the launch of the graph on, who waits for `event` waits for the end
    /// of `stream`'s present work in that replay. Refused outside captures, as CUDA does (`cudaEventRecordExternal`).
    fn event_record_external(&self, event: Event, stream: Stream) -> Result<()>;
    /// The same in place of the last record of `event` in this capture, if there is one: for an event that nothing within the
    /// capture waits for. One record at the end takes less than one after each operation.
    fn event_record_external_last(&self, event: Event, stream: Stream) -> Result<()> {
        self.event_record_external(event, stream)
    }
    /// Captures a wait that each replay makes: later work in `stream` waits for what `event`, which is not of this capture,
    /// had recorded when the graph was launched, or was recorded by an earlier node of the same replay. Refused outside
    /// captures (`cudaEventWaitExternal`).
    fn stream_wait_event_external(&self, stream: Stream, event: Event) -> Result<()>;
    /// A counter for [`Device::count`].
    fn counter(&self) -> Result<Counter>;
    /// Counts up in stream order; in a capture each replay does. What was counted of work that comes before is done when the host
    /// sees the count. The caller keeps a counter that is captured until the graph and its instances are gone: its memory stays
    /// mapped, but would be another's.
    fn count(&self, stream: Stream, counter: &Counter) -> Result<()>;
    /// An empty list for [`Device::append`].
    fn journal(&self) -> Result<Journal>;
    /// Appends a word to a list in stream order; in a capture each replay does. What the device has done before is done when the host
    /// sees the word. Work that appends to one list runs one after another. The caller keeps the list until it has run, and one that
    /// is captured until the graph and its instances are gone.
    fn append(&self, stream: Stream, journal: &Journal, word: u64) -> Result<()>;
    /// From now on the calling thread may query and destroy events whatever is being captured by others (capture mode "relaxed").
    fn leave_captures(&self) -> Result<()> {
        Ok(())
    }
    /// Whether the work before its last record is done. An event recorded in a capture cannot be queried.
    fn event_query(&self, event: Event) -> Result<Progress>;
    /// Waits for it.
    fn event_synchronize(&self, event: Event) -> Result<()>;
    /// Time between two completed events.
    fn event_elapsed(&self, start: Event, end: Event) -> Result<Duration>;

    /// Copies `bytes` bytes in stream order.
    fn memcpy(&self, destination: usize, source: usize, bytes: usize, stream: Stream) -> Result<()>;
    /// Fills `bytes` bytes in stream order.
    fn memset(&self, destination: usize, value: u8, bytes: usize, stream: Stream) -> Result<()>;
    /// Runs a function in stream order.
    fn launch_host(&self, stream: Stream, function: HostFunction) -> Result<()>;
    /// Runs a kernel (all channels of a plan) in stream order; kept alive until it has finished, in a capture until
    /// the graph and its instances are gone.
    fn launch_kernel(&self, stream: Stream, launch: Arc<Launch>, launcher: &mut Launcher) -> Result<End>;
    /// The same for a caller who has checked the works, and has just asked: the stream is in no capture, and device number
    /// `device` is current.
    fn launch_kernel_at_once(
        &self,
        _device: i32,
        stream: Stream,
        launch: Arc<Launch>,
        launcher: &mut Launcher,
    ) -> Result<End> {
        self.launch_kernel(stream, launch, launcher)
    }
    /// Lets what follows in `stream`, which is in no capture, wait for the launch that was the last with `launcher` and whose end is
    /// [known](End::Known).
    fn follow(&self, _stream: Stream, _launcher: &mut Launcher) -> Result<()> {
        Err(DeviceError::InvalidUsage(
            "no end of a launch is known here".into(),
        ))
    }
    /// What kernels of a new communicator on the current device are launched with.
    fn launcher(&self) -> Result<Launcher> {
        Ok(None)
    }

    /// The capture that the stream is in, if any.
    fn capture_of(&self, stream: Stream) -> Result<Option<Capture>>;
    /// Begins to capture the stream (mode "thread local").
    fn capture_begin(&self, stream: Stream) -> Result<()>;
    /// Ends the capture that began on this stream. Fails if a forked stream was not joined.
    fn capture_end(&self, stream: Stream) -> Result<Graph>;
    /// Calls `destructor` once, when the captured graph and all its instances are gone and no replay runs (CUDA user object).
    /// It runs on a thread of its own kind: it may wait for locks, and must not call the device.
    fn capture_retain(&self, capture: Capture, destructor: Box<dyn FnOnce() + Send>) -> Result<()>;
    /// An executable instance of a graph.
    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec>;
    /// Replays it after the present work of `stream`; replays of one instance run one after another.
    fn graph_launch(&self, exec: GraphExec, stream: Stream) -> Result<()>;
    /// Destroys an instance; a running replay finishes first, the call does not wait for it.
    fn graph_exec_destroy(&self, exec: GraphExec) -> Result<()>;
    /// Destroys a graph; its instances live on.
    fn graph_destroy(&self, graph: Graph) -> Result<()>;
}

/// The device that `RINGSIGHT_DEVICE` names (`cuda`, the default, or `host`), opened at the first call.
///
/// # Errors
/// [`DeviceError::Unavailable`] if the name is unknown or the device cannot be used here; the answer stays the same for
/// the life of the process.
pub fn device() -> Result<&'static Arc<dyn Device>> {
    DEVICE
        .get_or_init(|| {
            let opened = open(crate::env::text("RINGSIGHT_DEVICE").as_deref());
            crate::log::show_device(|| self::opened()?.current().ok());
            opened
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// The device if it has been opened: asking does not open it.
pub(crate) fn opened() -> Option<&'static Arc<dyn Device>> {
    DEVICE.get()?.as_ref().ok()
}

static DEVICE: OnceLock<Result<Arc<dyn Device>>> = OnceLock::new();

fn open(name: Option<&str>) -> Result<Arc<dyn Device>> {
    let unavailable = |text: String| Err(DeviceError::Unavailable(text));
    match name {
        Some("host") => Ok(Arc::new(host::HostDevice::new()?)),
        None | Some("" | "cuda") => Ok(Arc::new(cuda::CudaDevice::new()?)),
        Some(other) => unavailable(format!(
            "RINGSIGHT_DEVICE={other} is unknown; accepted are cuda and host"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_the_one_named_or_none() {
        assert_eq!(open(Some("host")).map(|device| device.name()).ok(), Some("host"));
        for name in [None, Some("cuda")] {
            match open(name).map(|device| device.name()) {
                Ok(opened) => assert_eq!(opened, "cuda"),
                // Where there is no GPU.
                Err(error) => assert!(error.to_string().contains("RINGSIGHT_DEVICE=host"), "{error}"),
            }
        }
        let error = open(Some("gpu"))
            .map(|device| device.name())
            .expect_err("unknown");
        assert!(
            error.to_string().contains("accepted are cuda and host"),
            "{error}"
        );
    }
}
