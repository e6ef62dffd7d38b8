//! What programs call on the host device.

use std::{sync::Arc, time::Duration};

use super::{
    HostDevice,
    capture::Capturing,
    check_address,
    graph::{Action, Instance},
    state::{FIRST_HANDLE, unknown, usage},
};
use crate::{
    device::{DeviceError, Event, Graph, GraphExec, HostFunction, Progress, Result, Runtime, Stream},
    threads,
};

impl Runtime for HostDevice {
    fn stream_query(&self, stream: Stream) -> Result<Progress> {
        self.waitable("stream query", stream)?.query()
    }

    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        self.waitable("stream synchronize", stream)?.synchronize()
    }

    fn event_synchronize(&self, event: Event) -> Result<()> {
        if let Some(point) = self.point("event synchronize", event)? {
            point.wait();
        }
        Ok(())
    }

    fn event_elapsed(&self, start: Event, end: Event) -> Result<Duration> {
        let passed = |name: &str, event| match self.point("event elapsed time", event)? {
            None => Err(DeviceError::InvalidHandle(format!(
                "the {name} event was never recorded"
            ))),
            Some(point) => match point.passed() {
                Some(time) => Ok(time),
                None => usage(format!("the {name} event is not complete: synchronize it first")),
            },
        };
        Ok(passed("end", end)?.saturating_duration_since(passed("start", start)?))
    }

    fn memcpy(&self, destination: usize, source: usize, bytes: usize, stream: Stream) -> Result<()> {
        check_address("destination", destination, bytes)?;
        check_address("source", source, bytes)?;
        self.submit(
            stream,
            Action::Memcpy {
                destination,
                source,
                bytes,
            },
        )
    }

    fn memset(&self, destination: usize, value: u8, bytes: usize, stream: Stream) -> Result<()> {
        check_address("destination", destination, bytes)?;
        self.submit(
            stream,
            Action::Memset {
                destination,
                value,
                bytes,
            },
        )
    }

    fn launch_host(&self, stream: Stream, function: HostFunction) -> Result<()> {
        self.submit(stream, Action::Host(function))
    }

    fn capture_begin(&self, stream: Stream) -> Result<()> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        if state.streams[&handle].is_default {
            return usage("the default stream cannot be captured");
        }
        if let Some(id) = state.streams[&handle].capture {
            return usage(format!("stream {handle:#x} is already in capture {id}"));
        }
        let Some(id) = state.last_capture.checked_add(1) else {
            return Err(DeviceError::Resource("no capture number is left".into()));
        };
        state.last_capture = id;
        let capture = Capturing::new(id, handle, threads::number(), self.reclaim.clone());
        state.captures.insert(id, capture);
        if let Some(stream) = state.streams.get_mut(&handle) {
            stream.capture = Some(id);
        }
        Ok(())
    }

    fn capture_end(&self, stream: Stream) -> Result<Graph> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        let Some(id) = state.streams[&handle].capture else {
            return usage(format!("stream {handle:#x} is not being captured"));
        };
        let wrong = state.captures.get_mut(&id).and_then(|capture| {
            if capture.thread != threads::number() {
                return Some("a capture must be ended by the thread that began it");
            }
            (capture.origin != handle).then_some("a capture must be ended on the stream that it began on")
        });
        if let Some(why) = wrong {
            return usage(why);
        }
        let capture = state
            .remove_capture(id)
            .ok_or_else(|| unknown("capture", id as usize))?;
        // A failed capture drops its nodes, which may run code of the library: not under the lock.
        drop(state);
        let body = Arc::new(capture.finish()?);
        let mut state = self.enter()?;
        let handle = state.handle();
        state.graphs.insert(handle, body);
        Ok(Graph(handle))
    }

    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec> {
        let mut state = self.enter()?;
        let body = state
            .graphs
            .get(&graph.0)
            .cloned()
            .ok_or_else(|| unknown("graph", graph.0))?;
        let handle = state.handle();
        let instance = Arc::new(Instance::new(body, (handle - FIRST_HANDLE) / 16)?);
        state.instances.insert(handle, instance);
        Ok(GraphExec(handle))
    }

    fn graph_launch(&self, exec: GraphExec, stream: Stream) -> Result<()> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        let instance = state
            .instances
            .get(&exec.0)
            .cloned()
            .ok_or_else(|| unknown("graph instance", exec.0))?;
        if let Some(capture) = state.capturing(handle)? {
            let why = "a graph cannot be launched into a capture";
            capture.invalidate(why);
            return usage(why);
        }
        // Numbered under the lock, as events are recorded: the order of replays is the order of these calls.
        let outside = state.outside(&instance);
        let replay = instance.next(outside);
        state.streams[&handle].worker.push(Box::new(move || replay.run()));
        Ok(())
    }

    fn graph_exec_destroy(&self, exec: GraphExec) -> Result<()> {
        let removed = self.enter()?.instances.remove(&exec.0);
        removed.map(drop).ok_or_else(|| unknown("graph instance", exec.0))
    }

    fn graph_destroy(&self, graph: Graph) -> Result<()> {
        let removed = self.enter()?.graphs.remove(&graph.0);
        removed.map(drop).ok_or_else(|| unknown("graph", graph.0))
    }
}
