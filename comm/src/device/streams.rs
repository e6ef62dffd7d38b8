//! Streams and events.

use super::{Result, Stream};

/// Opaque handle of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Event(pub usize);

/// Whether asynchronous work has finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Everything before this point is done.
    Done,
    /// Not yet.
    Pending,
}

/// Streams and events that order the library's work with the caller's.
pub trait Streams {
    /// Fails if kernels of device number `device` cannot be launched in a stream, which exists.
    fn check_stream(&self, _stream: Stream, _device: i32) -> Result<()> {
        Ok(())
    }

    /// A new stream on the current device.
    fn stream_create(&self) -> Result<Stream>;

    /// Destroys a stream once its work is done. Returns at once.
    fn stream_destroy(&self, stream: Stream) -> Result<()>;

    /// A number that no other stream of this process has or will have, even with the same handle.
    fn stream_id(&self, stream: Stream) -> Result<u64>;

    /// Makes later work in `stream` wait for what `event` recorded last. Joins a capture as CUDA does.
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()>;

    /// A new event for ordering streams, complete until it is first recorded. It need not know its time.
    fn event_create(&self) -> Result<Event>;

    /// Destroys an event. Pending work that refers to it is unaffected.
    fn event_destroy(&self, event: Event) -> Result<()>;

    /// Records an event behind the present work of `stream`.
    fn event_record(&self, event: Event, stream: Stream) -> Result<()>;

    /// Whether the work before its last record is done. Fails for an event that was recorded in a capture.
    fn event_query(&self, event: Event) -> Result<Progress>;

    /// From now on the calling thread may query and destroy events while other threads capture (capture mode "relaxed").
    fn allow_queries_during_captures(&self) -> Result<()> {
        Ok(())
    }
}
