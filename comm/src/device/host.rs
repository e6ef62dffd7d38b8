//! The host device: CUDA's execution model on CPU memory.
//!
//! A stream is a thread with a queue, an event a point in that order, a captured graph runs its independent branches on
//! threads of its own. The rules (what a capture refuses, what invalidates it) are CUDA's with capture mode "thread
//! local", so that a program that is right here is right on a GPU. There is no legacy default stream that
//! synchronises with others: stream 0 is an ordinary stream, one per device number.

mod capture;
mod graph;
mod kept;
mod state;
mod worker;

#[cfg(test)]
mod tests;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use ringsight_comm_base::sync::lock;
use ringsight_kernels::{Launch, host::Kernel};
use ringsight_records::{Algorithm, DeviceClock};

use self::{
    capture::Capturing,
    graph::{Action, Destructor, External, Instance, Step},
    state::{CURRENT, EventState, FIRST_HANDLE, State, unknown, usage},
    worker::{Point, Worker, in_callback},
};
use super::{
    Capture, Counter, Device, DeviceError, End, Event, Graph, GraphExec, HostFunction, Journal, Launcher,
    Mark, Progress, Result, Stream,
};
use crate::threads;

/// Alignment of [`Device::allocate`], in bytes: a page, since windows begin at one.
const ALIGNMENT: usize = 4096;

/// The device; see the module's documentation.
pub struct HostDevice {
    state: Mutex<State>,
    /// Runs the destructors of captured graphs.
    reclaim: Arc<Worker>,
}

impl HostDevice {
    /// The device, with no streams yet.
    ///
    /// # Errors
    /// [`DeviceError::Resource`] if its housekeeping thread cannot be started.
    pub fn new() -> Result<Self> {
        Ok(Self {
            state: Mutex::default(),
            reclaim: Arc::new(Worker::spawn("rs-reclaim")?),
        })
    }

    /// Locks the state; refused inside functions that the device calls.
    fn enter(&self) -> Result<std::sync::MutexGuard<'_, State>> {
        if in_callback() {
            return usage("a host function, destructor or observer that runs on the device must not call it");
        }
        Ok(lock(&self.state))
    }

    /// Appends work to a stream, or to its capture.
    fn submit(&self, stream: Stream, action: Action) -> Result<()> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        match state.capturing(handle)? {
            Some(capture) => capture.add(handle, Step::Action(action)),
            None => state.streams[&handle]
                .worker
                .push(Box::new(move || action.run(0))),
        }
        Ok(())
    }

    /// Appends a node that has to do with an event outside to a stream's capture.
    fn submit_external(&self, stream: Stream, event: Event, external: External) -> Result<()> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        let found = state.event(event)?.clone();
        let own = state.streams[&handle].capture;
        let Some(capture) = state.capturing(handle)? else {
            return usage(format!(
                "event {:#x} can be external to a capture only, and stream {handle:#x} is in none",
                event.0
            ));
        };
        if matches!(found, EventState::Captured { capture, .. } if Some(capture) == own) {
            return usage(format!(
                "event {:#x} was last recorded in this capture: it is not external to it",
                event.0
            ));
        }
        capture.add(handle, Step::External(external));
        Ok(())
    }

    /// The worker of a stream that may be waited for.
    fn waitable(&self, call: &str, stream: Stream) -> Result<Arc<Worker>> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        state.refuse_in_capture(call, Some(handle))?;
        Ok(state.streams[&handle].worker.clone())
    }

    /// The point of an event that may be waited for; `None` if it was never recorded.
    fn point(&self, call: &str, event: Event) -> Result<Option<Arc<Point>>> {
        let mut state = self.enter()?;
        let found = state.event(event)?.clone();
        state.refuse_in_capture(call, None)?;
        match found {
            EventState::Never => Ok(None),
            EventState::Recorded(point) => Ok(Some(point)),
            EventState::Captured { .. } => usage(format!(
                "{call}: event {:#x} was last recorded in a capture",
                event.0
            )),
        }
    }
}

fn check_address(name: &str, address: usize, bytes: usize) -> Result<()> {
    if bytes > 0 && (address == 0 || address.checked_add(bytes).is_none()) {
        let text = format!("{name} {address:#x} is no address of {bytes} bytes");
        return Err(DeviceError::InvalidHandle(text));
    }
    Ok(())
}

impl Device for HostDevice {
    fn kept_from_running(&self) -> Duration {
        kept::so_far()
    }

    fn name(&self) -> &'static str {
        "host"
    }

    fn clock(&self) -> Option<DeviceClock> {
        // What its threads tell, they tell with the host's time.
        Some(DeviceClock::of_host())
    }

    fn runs(&self, algorithm: Algorithm) -> bool {
        ringsight_kernels::host::runs(algorithm)
    }

    fn current(&self) -> Result<i32> {
        Ok(CURRENT.get())
    }

    fn set_current(&self, device: i32) -> Result<()> {
        if device < 0 {
            return Err(DeviceError::InvalidHandle(format!("device {device} is negative")));
        }
        CURRENT.set(device);
        Ok(())
    }

    fn mark(&self) -> Result<Mark> {
        Ok(Mark(CURRENT.get() as usize))
    }

    fn restore(&self, mark: Mark) -> Result<()> {
        self.set_current(mark.0 as i32)
    }

    fn allocate(&self, bytes: usize) -> Result<*mut u8> {
        let mut state = self.enter()?;
        if bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        let fail = || DeviceError::Resource(format!("cannot allocate {bytes} bytes"));
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT).ok_or_else(fail)?;
        // SAFETY: the alignment is a power of two that divides the size.
        let pointer = unsafe { libc::aligned_alloc(ALIGNMENT, rounded) };
        if pointer.is_null() {
            return Err(fail());
        }
        state.memory.insert(pointer as usize, bytes);
        Ok(pointer.cast())
    }

    fn free(&self, pointer: *mut u8) -> Result<()> {
        let mut state = self.enter()?;
        if !pointer.is_null() {
            state
                .memory
                .remove(&(pointer as usize))
                .ok_or_else(|| unknown("allocation", pointer as usize))?;
            // SAFETY: it came from `aligned_alloc` and was not freed since, or it would not have been listed.
            unsafe { libc::free(pointer.cast()) };
        }
        Ok(())
    }

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

    fn stream_query(&self, stream: Stream) -> Result<Progress> {
        self.waitable("stream query", stream)?.query()
    }

    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        self.waitable("stream synchronize", stream)?.synchronize()
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

    fn event_record_external(&self, event: Event, stream: Stream) -> Result<()> {
        self.submit_external(stream, event, External::Record(event.0))
    }

    fn stream_wait_event_external(&self, stream: Stream, event: Event) -> Result<()> {
        self.submit_external(stream, event, External::Wait(event.0))
    }

    fn counter(&self) -> Result<Counter> {
        Ok(Counter::of_host())
    }

    fn count(&self, stream: Stream, counter: &Counter) -> Result<()> {
        self.submit(stream, Action::Count(counter.clone()))
    }

    fn journal(&self) -> Result<Journal> {
        Ok(Journal::of_host())
    }

    fn append(&self, stream: Stream, journal: &Journal, word: u64) -> Result<()> {
        self.submit(stream, Action::Append(journal.clone(), word))
    }

    fn event_query(&self, event: Event) -> Result<Progress> {
        let point = self.point("event query", event)?;
        let done = point.is_none_or(|point| point.passed().is_some());
        Ok(if done { Progress::Done } else { Progress::Pending })
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

    fn launch_kernel(&self, stream: Stream, launch: Arc<Launch>, _launcher: &mut Launcher) -> Result<End> {
        for work in launch.channels.iter().flat_map(|channel| &channel.work) {
            work.check()
                .map_err(|error| DeviceError::InvalidUsage(error.to_string()))?;
            if work.connections.peers().is_some() {
                return usage(format!(
                    "op {}: the host device has no program among peers",
                    work.op
                ));
            }
        }
        self.submit(stream, Action::Kernel(Arc::new(Kernel::new(launch))))?;
        Ok(End::Marked)
    }

    fn capture_of(&self, stream: Stream) -> Result<Option<Capture>> {
        let mut state = self.enter()?;
        let handle = state.resolve(stream)?;
        Ok(state.streams[&handle].capture.map(|id| Capture { id }))
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
