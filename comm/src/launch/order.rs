//! The order of a communicator's operations, whatever streams they are given to and whether they are replayed.

use std::{collections::HashMap, sync::Arc};

use crate::{
    device::{Capture, Device, Event, Stream},
    error::Result,
};

/// The events by which a communicator's operations follow each other.
///
/// Its connections are used by one kernel at a time. So each operation waits for the one that was launched before it, and
/// a graph waits as a whole: its first operation for what was launched before the replay, and what is launched after the
/// replay for its last one.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// The end of what was launched last, eager or replayed.
    last: Option<Event>,
    /// Within captures, by graph number: the end of the operation that was captured last.
    captured: HashMap<u32, Event>,
    /// Held by every eager operation whose network work its stream has not posted yet.
    posting: Arc<()>,
}

impl Order {
    /// Lets what follows in `stream` wait for the operation before.
    pub(super) fn enter(
        &mut self,
        device: &dyn Device,
        stream: Stream,
        capture: Option<Capture>,
    ) -> Result<()> {
        let within = capture.map(|capture| self.captured.get(&capture.id));
        match (within, self.last) {
            (Some(Some(event)), _) => device.stream_wait_event(stream, *event)?,
            (Some(None), Some(last)) => device.stream_wait_event_external(stream, last)?,
            // Never recorded yet, but it may be before a replay.
            (Some(None), None) => {
                let last = *self.last.insert(device.order_event_create()?);
                device.stream_wait_event_external(stream, last)?;
            }
            (None, Some(last)) => device.stream_wait_event(stream, last)?,
            (None, None) => {}
        }
        Ok(())
    }

    /// For an eager operation whose network work its stream posts: to be held until then.
    pub(super) fn begin_posting(&self) -> Arc<()> {
        self.posting.clone()
    }

    /// Whether the network work of an earlier eager operation is still to be posted by its stream.
    pub(super) fn is_posting(&self) -> bool {
        // The count is read relaxed. Enough: who held it took the lock under which work is posted before it let go, so
        // whoever has seen it let go takes that lock later.
        Arc::strong_count(&self.posting) > 1
    }

    /// Notes the present end of `stream` as that of the operation; gives the event that stands for it, now or in this
    /// capture.
    pub(super) fn leave(
        &mut self,
        device: &dyn Device,
        stream: Stream,
        capture: Option<Capture>,
    ) -> Result<Event> {
        let last = match self.last {
            Some(last) => last,
            None => *self.last.insert(device.order_event_create()?),
        };
        let Some(capture) = capture else {
            device.event_record(last, stream)?;
            return Ok(last);
        };
        // What follows within the capture waits for the other event.
        device.event_record_external_last(last, stream)?;
        let end = match self.captured.get(&capture.id) {
            Some(end) => *end,
            None => {
                let end = device.order_event_create()?;
                self.captured.insert(capture.id, end);
                end
            }
        };
        device.event_record(end, stream)?;
        Ok(end)
    }

    /// Destroys the events of captures but those that `holds` says graphs may still come of.
    pub(super) fn retain(&mut self, device: &dyn Device, holds: impl Fn(u32) -> bool) {
        self.captured.retain(|graph, event| {
            let held = holds(*graph);
            if !held {
                // Nothing is left to be done about an event that cannot be destroyed.
                let _ = device.event_destroy(*event);
            }
            held
        });
    }

    /// Destroys the events.
    pub(crate) fn clear(&mut self, device: &dyn Device) {
        self.retain(device, |_| false);
        if let Some(last) = self.last.take() {
            let _ = device.event_destroy(last);
        }
    }
}
