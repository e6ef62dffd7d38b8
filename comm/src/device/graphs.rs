//! Captured graphs, as the library sees them: it works in captures that callers have begun, and learns of replays.

use super::{Counter, Event, Journal, Result, Stream};

/// The capture that a stream takes part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Capture {
    /// Unique in the process, never 0. Records carry it as the number of the graph.
    pub id: u32,
}

/// Work in captures, and words in host memory that a stream writes in order.
pub trait Graphs {
    /// The capture that a stream is in, if any.
    fn capture_of(&self, stream: Stream) -> Result<Option<Capture>>;

    /// Calls `destructor` once, when the captured graph and all its instances are gone and no replay runs (a CUDA user object). It runs on a
    /// thread of its own: it may wait for locks, and must not call the device.
    fn capture_retain(&self, capture: Capture, destructor: Box<dyn FnOnce() + Send>) -> Result<()>;

    /// Captures a record that each replay makes. From the launch of the graph on, a stream that waits for `event` waits until that replay has done
    /// `stream`'s present work. Refused outside captures, as CUDA does (`cudaEventRecordExternal`).
    fn event_record_external(&self, event: Event, stream: Stream) -> Result<()>;

    /// The same, and replaces the last record of `event` in this capture, if there is one. For an event that nothing within the capture waits for:
    /// one record at the end is faster than one behind each operation.
    fn event_record_external_last(&self, event: Event, stream: Stream) -> Result<()> {
        self.event_record_external(event, stream)
    }

    /// Captures a wait that each replay makes: later work in `stream` waits for what `event`, which is not of this capture, had recorded when the
    /// graph was launched, or for an earlier record of the same replay. Refused outside captures (`cudaEventWaitExternal`).
    fn stream_wait_event_external(&self, stream: Stream, event: Event) -> Result<()>;

    /// A new counter for [`Graphs::increment`].
    fn new_counter(&self) -> Result<Counter>;

    /// Increments a counter in stream order; in a capture each replay does. A host that sees the count also sees the earlier work done.
    ///
    /// The caller keeps a captured counter until the graph and its instances are gone. Otherwise its memory stays mapped, but another counter may
    /// use it.
    fn increment(&self, stream: Stream, counter: &Counter) -> Result<()>;

    /// A new, empty journal for [`Graphs::append`].
    fn new_journal(&self) -> Result<Journal>;

    /// Appends a word to a journal in stream order; in a capture each replay does. A host that sees the word also sees the earlier work done.
    ///
    /// Work that appends to one journal runs one after another. The caller keeps the journal until that work has run; a captured one until the graph
    /// and its instances are gone.
    fn append(&self, stream: Stream, journal: &Journal, word: u64) -> Result<()>;
}
