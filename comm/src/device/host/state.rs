//! The handles of the host device and what they stand for.

use std::{cell::Cell, collections::HashMap, sync::Arc};

use super::{
    capture::Capturing,
    graph::{External, GraphBody, Instance},
    worker::{Point, Worker},
};
use crate::{
    device::{DeviceError, Event, Result, Stream},
    threads,
};

/// First handle: small values are CUDA's special streams or a caller's mistake.
pub(super) const FIRST_HANDLE: usize = 0x1000;

thread_local! {
    /// The thread's current device number.
    pub(super) static CURRENT: Cell<i32> = const { Cell::new(0) };
}

/// Everything that handles stand for.
#[derive(Default)]
pub(super) struct State {
    pub(super) last_handle: usize,
    pub(super) last_capture: u32,
    pub(super) streams: HashMap<usize, StreamState>,
    /// Default streams by device number.
    pub(super) defaults: HashMap<i32, usize>,
    pub(super) events: HashMap<usize, EventState>,
    pub(super) captures: HashMap<u32, Capturing>,
    pub(super) graphs: HashMap<usize, Arc<GraphBody>>,
    pub(super) instances: HashMap<usize, Arc<Instance>>,
    /// Sizes of allocations by address.
    pub(super) memory: HashMap<usize, usize>,
}

/// A stream.
pub(super) struct StreamState {
    pub(super) worker: Arc<Worker>,
    /// The capture it takes part in.
    pub(super) capture: Option<u32>,
    pub(super) is_default: bool,
}

/// What an event stands for.
#[derive(Clone)]
pub(super) enum EventState {
    Never,
    /// Recorded in a running stream.
    Recorded(Arc<Point>),
    /// Recorded in a capture, after these of its nodes.
    Captured {
        capture: u32,
        tip: Vec<usize>,
    },
}

pub(super) fn usage<T>(text: impl Into<String>) -> Result<T> {
    Err(DeviceError::InvalidUsage(text.into()))
}

pub(super) fn unknown(what: &str, handle: usize) -> DeviceError {
    DeviceError::InvalidHandle(format!("{what} {handle:#x} does not exist or was destroyed"))
}

impl State {
    pub(super) fn handle(&mut self) -> usize {
        self.last_handle = self.last_handle.max(FIRST_HANDLE) + 16;
        self.last_handle
    }

    pub(super) fn add_stream(&mut self, name: &str, is_default: bool) -> Result<usize> {
        let handle = self.handle();
        let worker = Arc::new(Worker::spawn(name)?);
        self.streams.insert(
            handle,
            StreamState {
                worker,
                capture: None,
                is_default,
            },
        );
        Ok(handle)
    }

    /// Handle of a stream that exists; the default stream is made when first used.
    pub(super) fn resolve(&mut self, stream: Stream) -> Result<usize> {
        if stream.0 == 0 {
            let device = CURRENT.get();
            if let Some(&handle) = self.defaults.get(&device) {
                return Ok(handle);
            }
            let handle = self.add_stream(&format!("rs-default-{device}"), true)?;
            self.defaults.insert(device, handle);
            return Ok(handle);
        }
        match self.streams.get(&stream.0) {
            Some(found) if !found.is_default => Ok(stream.0),
            _ => Err(unknown("stream", stream.0)),
        }
    }

    pub(super) fn event(&mut self, event: Event) -> Result<&mut EventState> {
        self.events
            .get_mut(&event.0)
            .ok_or_else(|| unknown("event", event.0))
    }

    /// The points that the nodes of a graph wait for or pass outside, by node, now that it is launched. Events that are
    /// gone or were never recorded are waited for by nobody.
    pub(super) fn outside(&mut self, instance: &Instance) -> Vec<(usize, Arc<Point>)> {
        let mut outside = Vec::new();
        for &(node, external) in instance.externals() {
            match external {
                External::Wait(event) => {
                    if let Some(EventState::Recorded(point)) = self.events.get(&event) {
                        outside.push((node, point.clone()));
                    }
                }
                External::Record(event) => {
                    if let Some(event) = self.events.get_mut(&event) {
                        let point = Arc::new(Point::default());
                        *event = EventState::Recorded(point.clone());
                        outside.push((node, point));
                    }
                }
            }
        }
        outside
    }

    /// The capture that `stream` (resolved) is in, if it is whole.
    pub(super) fn capturing(&mut self, stream: usize) -> Result<Option<&mut Capturing>> {
        let Some(id) = self.streams[&stream].capture else {
            return Ok(None);
        };
        let capture = self
            .captures
            .get_mut(&id)
            .ok_or_else(|| unknown("capture", id as usize))?;
        capture.check()?;
        Ok(Some(capture))
    }

    /// Refuses a call that waits for or asks about running work, as CUDA does: always for a stream (resolved) in a
    /// capture, and for anything at all on a thread that captures. Either way the capture is lost.
    pub(super) fn refuse_in_capture(&mut self, call: &str, stream: Option<usize>) -> Result<()> {
        let me = threads::number();
        let mut refused = None;
        if let Some(id) = stream.and_then(|stream| self.streams[&stream].capture) {
            refused = Some(format!("{call} on a stream that is being captured"));
            if let (Some(capture), Some(why)) = (self.captures.get_mut(&id), &refused) {
                capture.invalidate(why);
            }
        }
        for capture in self.captures.values_mut().filter(|capture| capture.thread == me) {
            let why = refused.get_or_insert_with(|| format!("{call} on a thread that captures a stream"));
            capture.invalidate(why);
        }
        refused.map_or(Ok(()), |why| {
            usage(format!("{why}: not permitted, the capture is invalidated"))
        })
    }

    /// Takes a capture and its streams apart.
    pub(super) fn remove_capture(&mut self, id: u32) -> Option<Capturing> {
        let capture = self.captures.remove(&id)?;
        for stream in capture.streams() {
            if let Some(stream) = self.streams.get_mut(&stream) {
                stream.capture = None;
            }
        }
        Some(capture)
    }
}
