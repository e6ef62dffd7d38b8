//! The trait of a device: streams, graphs, memory.

use std::ffi::c_void;

use anyhow::Result;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A stream's handle, as the C ABI has it.
pub(super) type Stream = *mut c_void;
/// An instance of a graph.
pub(super) type GraphInstance = *mut c_void;
/// What a stream calls when it gets there.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Which devices operations run on, as `RINGSIGHT_DEVICE` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// The library's host device: CPU memory, streams of its own.
    #[default]
    Host,
    /// NVIDIA's GPUs.
    Cuda,
}

display_by_name!(Kind);

/// A kind of device. Handles are those that it gave and has not taken back.
pub(super) trait Device: Send + Sync {
    /// Sets the calling thread's device. Ranks beyond the devices that there are share them.
    fn choose(&self, number: u32) -> Result<()>;
    /// A stream of the calling thread's device.
    fn stream(&self) -> Result<Stream>;
    /// Ends a stream.
    fn end(&self, stream: Stream) -> Result<()>;
    /// Waits for everything on a stream.
    fn synchronise(&self, stream: Stream) -> Result<()>;
    /// Has a stream run `function(argument)` when it gets there.
    ///
    /// # Safety
    /// `argument` must be good for `function` until the stream has been synchronised.
    unsafe fn call(&self, stream: Stream, function: HostFunction, argument: *mut c_void) -> Result<()>;
    /// Begins to capture what is put on a stream.
    fn begin_capture(&self, stream: Stream) -> Result<()>;
    /// Ends the capture; an instance of what was captured.
    fn end_capture(&self, stream: Stream) -> Result<GraphInstance>;
    /// Replays a graph on a stream.
    fn replay(&self, graph: GraphInstance, stream: Stream) -> Result<()>;
    /// Gives a graph back.
    fn forget(&self, graph: GraphInstance) -> Result<()>;
    /// So many zeroed bytes that both the host and kernels reach at this address.
    fn allocate(&self, bytes: usize) -> Result<*mut c_void>;
    /// Gives memory back.
    ///
    /// # Safety
    /// `memory` is of [`Device::allocate`] with so many bytes, and nobody uses it any more.
    unsafe fn free(&self, memory: *mut c_void, bytes: usize);
}
