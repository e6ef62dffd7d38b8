//! Streams, events and captures of the host device.

use std::sync::Arc;

use super::{
    HostDevice,
    graph::{Action, Destructor, External},
    state::{EventState, FIRST_HANDLE, unknown, usage},
    worker::Point,
};
use crate::device::{
    Capture, Counter, DeviceError, Event, Graphs, Journal, Progress, Result, Stream, Streams,
};

impl Streams for HostDevice {
    fn stream_create(&self) -> Result<Stream> {
        let mut state = self.enter()?;
        let number = (state.last_handle.max(FIRST_HANDLE) - FIRST_HANDLE) / 16;
        state
            .add_stream(&format!("rs-stream-{number}"), false)
            .map(Stream)
    }

    fn stream_destroy(&self, stream: Stream) -> Result<()> {
        let mut state = self.enter()?;
        if stream.0 == 0 {
            return Err(DeviceError::InvalidHandle(
                "the default stream cannot be destroyed".into(),
            ));
        }
        let handle = state.resolve(stream)?;
        if let Some(id) = state.streams[&handle].capture {
            return usage(format!(
                "stream {handle:#x} is being captured (capture {id}): end the capture first"
            ));
        }
        // The thread ends once the queue is empty.
        state.streams.remove(&handle);
        Ok(())
    }

    fn stream_id(&self, stream: Stream) -> Result<u64> {
        // Handles are given out once.
        self.enter()?.resolve(stream).map(|handle| handle as u64)
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        let found = state.event(event)?.clone();
        let own = state.capturing(handle)?;
        match found {
            EventState::Never => Ok(()),
            EventState::Recorded(point) => {
                if let Some(capture) = own {
                    let why = format!(
                        "a captured stream cannot wait for event {:#x}, recorded outside",
                        event.0
                    );
                    capture.invalidate(&why);
                    return usage(why);
                }
                if point.passed().is_none() {
                    state.streams[&handle].worker.push(Box::new(move || {
                        point.wait();
                        Ok(())
                    }));
                }
                Ok(())
            }
            EventState::Captured { capture: id, tip } => {
                let own = state.streams[&handle].capture;
                let is_default = state.streams[&handle].is_default;
                let Some(capture) = state.captures.get_mut(&id) else {
                    return usage(format!(
                        "event {:#x} was recorded in a capture that has ended",
                        event.0
                    ));
                };
                capture.check()?;
                let refused = match own {
                    Some(other) if other != id => Some(format!("event {:#x} would merge captures", event.0)),
                    None if is_default => Some("the default stream cannot join a capture".to_owned()),
                    _ => None,
                };
                if let Some(why) = refused {
                    capture.invalidate(&why);
                    if let Some(other) = own.and_then(|other| state.captures.get_mut(&other)) {
                        other.invalidate(&why);
                    }
                    return usage(why);
                }
                capture.follow(handle, &tip);
                if let Some(stream) = state.streams.get_mut(&handle) {
                    stream.capture = Some(id);
                }
                Ok(())
            }
        }
    }

    fn event_create(&self) -> Result<Event> {
        let mut state = self.enter()?;
        let handle = state.handle();
        state.events.insert(handle, EventState::Never);
        Ok(Event(handle))
    }

    fn event_destroy(&self, event: Event) -> Result<()> {
        self.enter()?
            .events
            .remove(&event.0)
            .map(drop)
            .ok_or_else(|| unknown("event", event.0))
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        state.event(event)?;
        let id = state.streams[&handle].capture;
        let recorded = match (id, state.capturing(handle)?) {
            (Some(capture), Some(capturing)) => EventState::Captured {
                capture,
                tip: capturing.tip(handle),
            },
            _ => {
                let point = Arc::new(Point::default());
                let reached = point.clone();
                state.streams[&handle].worker.push(Box::new(move || {
                    reached.pass();
                    Ok(())
                }));
                EventState::Recorded(point)
            }
        };
        *state.event(event)? = recorded;
        Ok(())
    }

    fn event_query(&self, event: Event) -> Result<Progress> {
        let point = self.point("event query", event)?;
        let done = point.is_none_or(|point| point.passed().is_some());
        Ok(if done { Progress::Done } else { Progress::Pending })
    }
}

impl Graphs for HostDevice {
    fn capture_of(&self, stream: Stream) -> Result<Option<Capture>> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        Ok(state.streams[&handle].capture.map(|id| Capture { id }))
    }

    fn capture_retain(&self, capture: Capture, destructor: Destructor) -> Result<()> {
        let mut state = self.enter()?;
        let found = state
            .captures
            .get_mut(&capture.id)
            .ok_or_else(|| unknown("capture", capture.id as usize))?;
        found.check()?;
        found.retain(destructor);
        Ok(())
    }

    fn event_record_external(&self, event: Event, stream: Stream) -> Result<()> {
        self.submit_external(stream, event, External::Record(event.0))
    }

    fn stream_wait_event_external(&self, stream: Stream, event: Event) -> Result<()> {
        self.submit_external(stream, event, External::Wait(event.0))
    }

    fn new_counter(&self) -> Result<Counter> {
        Ok(Counter::of_host())
    }

    fn increment(&self, stream: Stream, counter: &Counter) -> Result<()> {
        self.submit(stream, Action::Count(counter.clone()))
    }

    fn new_journal(&self) -> Result<Journal> {
        Ok(Journal::of_host())
    }

    fn append(&self, stream: Stream, journal: &Journal, word: u64) -> Result<()> {
        self.submit(stream, Action::Append(journal.clone(), word))
    }
}
