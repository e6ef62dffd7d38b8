//! What programs call themselves: the part of CUDA's runtime that programs on the host device need (`ringsight.h`).

use std::{sync::Arc, time::Duration};

use super::{Device, Event, Progress, Result, Stream};

/// Opaque handle of a captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Graph(pub usize);

/// Opaque handle of an instantiated graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct GraphExec(pub usize);

/// A function that runs on a stream, in order. In a capture it becomes a node that runs at each replay. Its argument is the replay: 0 for eager work,
/// n for the n-th replay.
pub type HostFunction = Arc<dyn Fn(u32) + Send + Sync>;

/// A device that programs without CUDA can use by itself.
pub trait Runtime: Device {
    /// Whether all work in the stream is done.
    fn stream_query(&self, stream: Stream) -> Result<Progress>;

    /// Waits for all work in the stream.
    fn stream_synchronize(&self, stream: Stream) -> Result<()>;

    /// Waits for the work before the event's last record.
    fn event_synchronize(&self, event: Event) -> Result<()>;

    /// The time between two completed events.
    fn event_elapsed(&self, start: Event, end: Event) -> Result<Duration>;

    /// Copies `bytes` bytes in stream order.
    fn memcpy(&self, destination: usize, source: usize, bytes: usize, stream: Stream) -> Result<()>;

    /// Fills `bytes` bytes in stream order.
    fn memset(&self, destination: usize, value: u8, bytes: usize, stream: Stream) -> Result<()>;

    /// Runs a function in stream order.
    fn launch_host(&self, stream: Stream, function: HostFunction) -> Result<()>;

    /// Begins to capture the stream (mode "thread local").
    fn capture_begin(&self, stream: Stream) -> Result<()>;

    /// Ends the capture that began on this stream. Fails if a forked stream was not joined.
    fn capture_end(&self, stream: Stream) -> Result<Graph>;

    /// An executable instance of a graph.
    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec>;

    /// Replays an instance behind the present work of `stream`. Replays of one instance run one after another.
    fn graph_launch(&self, exec: GraphExec, stream: Stream) -> Result<()>;

    /// Destroys an instance. A running replay finishes first; the call does not wait for it.
    fn graph_exec_destroy(&self, exec: GraphExec) -> Result<()>;

    /// Destroys a graph. Its instances live on.
    fn graph_destroy(&self, graph: Graph) -> Result<()>;
}
