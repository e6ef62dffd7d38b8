//! The order of a communicator's operations, in whatever streams they run and whether they are replayed or not.

use std::collections::HashMap;

use ringsight_comm_base::error::Result;

use crate::device::{Capture, Device, Event, LaunchEnd, Launcher, Stream};

/// The events that order a communicator's operations.
///
/// One kernel at a time uses the communicator's connections. So each operation waits for the operation launched before it. A graph waits as a
/// whole: its first operation waits for what was launched before the replay, and what is launched after the replay waits for its last operation.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Recorded at the end of the last launch, eager or replayed, unless `ends_by_launcher`.
    last: Option<Event>,
    /// No event was recorded behind the last launch: other streams wait for it by the launcher ([`LaunchEnd::ByLauncher`]).
    ends_by_launcher: bool,
    /// Another stream has waited by the launcher once. That takes longer than recording an event, so events are recorded from then on.
    always_records: bool,
    /// The stream of the last launch, if that was eager and no replay could follow it. Later work in that stream follows it anyway.
    stream: Option<u64>,
    /// Within captures, by graph number: the end of the last captured operation.
    captured: HashMap<u32, Event>,
}

impl Order {
    /// Makes later work in `stream` wait for the operation before, which `launcher` may have launched. `replays`: graphs hold operations.
    pub(super) fn enter(
        &mut self,
        device: &dyn Device,
        stream: Stream,
        capture: Option<Capture>,
        launcher: &mut Launcher,
        replays: bool,
    ) -> Result<()> {
        let within = capture.map(|capture| self.captured.get(&capture.id).copied());
        let before = self.stream.take();
        // The first operation follows nothing.
        let follows = capture.is_none() && self.last.is_some();
        // While graphs exist, a replay may come in between. A graph that is gone has no replay left. Streams are compared by id, since a new stream
        // may have the handle of a destroyed one whose work has not ended.
        let id = (follows && !replays && self.captured.is_empty())
            .then(|| device.stream_id(stream))
            .transpose()?;
        if id.is_some() && id == before {
            self.stream = id;
            return Ok(());
        }
        if self.ends_by_launcher {
            self.always_records = true;
            if capture.is_none() {
                // This holds until an event is recorded behind the present operation.
                device.wait_for_launch(stream, launcher)?;
                self.stream = id;
                return Ok(());
            }
            self.record_end(device, launcher)?;
        }
        match (within, self.last) {
            (Some(Some(event)), _) => device.stream_wait_event(stream, event)?,
            (Some(None), Some(last)) => device.stream_wait_event_external(stream, last)?,
            // Not recorded yet, but it may be before a replay.
            (Some(None), None) => {
                let last = *self.last.insert(device.event_create()?);
                device.stream_wait_event_external(stream, last)?;
            }
            (None, Some(last)) => device.stream_wait_event(stream, last)?,
            (None, None) => {}
        }
        self.stream = id;
        Ok(())
    }

    /// Notes the present end of `stream` as the end of the launched operation. Returns the event that other streams wait for, if one was recorded
    /// behind the operation.
    pub(super) fn leave(
        &mut self,
        device: &dyn Device,
        stream: Stream,
        capture: Option<Capture>,
        end: LaunchEnd,
    ) -> Result<Event> {
        let last = match self.last {
            Some(last) => last,
            None => *self.last.insert(device.event_create()?),
        };
        let Some(capture) = capture else {
            // No event is needed if the next operation is in the same stream, as this one and all before were. If it is in another stream after all, this
            // stream may be destroyed by then. So only an end that the launcher can wait for goes without an event.
            self.ends_by_launcher =
                end == LaunchEnd::ByLauncher && self.stream.is_some() && !self.always_records;
            if !self.ends_by_launcher {
                device.event_record(last, stream)?;
            }
            return Ok(last);
        };
        // Later work within the capture waits for the other event.
        device.event_record_external_last(last, stream)?;
        let within = match self.captured.get(&capture.id) {
            Some(within) => *within,
            None => {
                let within = device.event_create()?;
                self.captured.insert(capture.id, within);
                within
            }
        };
        device.event_record(within, stream)?;
        Ok(within)
    }

    /// Records the event behind a last launch that ends by the launcher: replays wait for the event.
    #[cold]
    fn record_end(&mut self, device: &dyn Device, launcher: &mut Launcher) -> Result<()> {
        let Some(last) = self.last else { return Ok(()) };
        // A stream of its own: later work in a shared stream would wait, too.
        let stream = device.stream_create()?;
        let recorded = device
            .wait_for_launch(stream, launcher)
            .and_then(|()| device.event_record(last, stream));
        device.stream_destroy(stream)?;
        recorded?;
        self.ends_by_launcher = false;
        Ok(())
    }

    /// Destroys the events of captures, except those for which `holds` says that a graph may still come of them.
    pub(super) fn retain(&mut self, device: &dyn Device, holds: impl Fn(u32) -> bool) {
        self.captured.retain(|graph, event| {
            let held = holds(*graph);
            if !held {
                // Nothing can be done about an event that cannot be destroyed.
                let _ = device.event_destroy(*event);
            }
            held
        });
    }

    /// Destroys the events.
    pub(crate) fn clear(&mut self, device: &dyn Device) {
        (self.stream, self.ends_by_launcher) = (None, false);
        self.retain(device, |_| false);
        if let Some(last) = self.last.take() {
            let _ = device.event_destroy(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Arc, Condvar, Mutex},
        time::Duration,
    };

    use super::*;
    use crate::device::{GraphExec, Graphs, Runtime, Streams, host::HostDevice};

    /// Which operation ran when: each says its name.
    #[derive(Default)]
    struct Ran {
        names: Mutex<Vec<&'static str>>,
        more: Condvar,
    }

    struct Test {
        device: HostDevice,
        order: Order,
        ran: Arc<Ran>,
        slow: bool,
    }

    impl Test {
        fn new() -> Self {
            Self {
                device: HostDevice::new().unwrap(),
                order: Order::default(),
                ran: Arc::default(),
                slow: true,
            }
        }

        fn stream(&self) -> Stream {
            self.device.stream_create().unwrap()
        }

        /// The first operation gives all others time to overtake it.
        fn operation(&mut self, name: &'static str, stream: Stream, capture: Option<Capture>) {
            self.order
                .enter(&self.device, stream, capture, &mut None, false)
                .unwrap();
            self.run(name, stream);
            self.order
                .leave(&self.device, stream, capture, LaunchEnd::ByEvent)
                .unwrap();
        }

        fn run(&mut self, name: &'static str, stream: Stream) {
            let (ran, slow) = (self.ran.clone(), std::mem::take(&mut self.slow));
            self.device
                .launch_host(
                    stream,
                    Arc::new(move |_| {
                        let mut names = ran.names.lock().unwrap();
                        if slow {
                            let limit = Duration::from_millis(50);
                            let overtaken = |names: &mut Vec<_>| names.is_empty();
                            names = ran.more.wait_timeout_while(names, limit, overtaken).unwrap().0;
                        }
                        names.push(name);
                        ran.more.notify_all();
                    }),
                )
                .unwrap();
        }

        /// A graph of one operation.
        fn graph(&mut self, name: &'static str) -> GraphExec {
            let stream = self.stream();
            self.device.capture_begin(stream).unwrap();
            let capture = self.device.capture_of(stream).unwrap();
            let slow = std::mem::take(&mut self.slow);
            self.operation(name, stream, capture);
            self.slow = slow;
            let graph = self.device.capture_end(stream).unwrap();
            self.device.graph_instantiate(graph).unwrap()
        }

        #[track_caller]
        fn ends(&self, streams: &[Stream], names: &[&str]) {
            for stream in streams {
                self.device.stream_synchronize(*stream).unwrap();
            }
            assert_eq!(*self.ran.names.lock().unwrap(), names);
        }
    }

    #[test]
    fn operations_follow_each_other_over_streams() {
        let mut test = Test::new();
        let [a, b] = [test.stream(), test.stream()];
        let all = ["1", "2", "3", "4", "5"];
        for (name, stream) in all.into_iter().zip([a, b, b, a, a]) {
            test.operation(name, stream, None);
        }
        test.ends(&[a, b], &all);
    }

    #[test]
    fn a_stream_that_was_destroyed_is_waited_for() {
        let mut test = Test::new();
        let [a, b] = [test.stream(), test.stream()];
        test.operation("1", a, None);
        test.operation("2", a, None);
        test.device.stream_destroy(a).unwrap();
        test.operation("3", b, None);
        test.ends(&[b], &["1", "2", "3"]);
    }

    #[test]
    fn a_replay_between_two_operations_of_a_stream_is_waited_for() {
        let mut test = Test::new();
        let graph = test.graph("replay");
        let [a, b] = [test.stream(), test.stream()];
        test.slow = false;
        test.operation("1", a, None);
        test.device.stream_synchronize(a).unwrap();
        // It waits in its stream, where the order cannot see it.
        test.ran.names.lock().unwrap().clear();
        test.slow = true;
        test.run("before", b);
        test.device.graph_launch(graph, b).unwrap();
        test.operation("2", a, None);
        test.ends(&[a, b], &["before", "replay", "2"]);
    }

    #[test]
    fn what_follows_in_the_same_stream_needs_no_event() {
        let mut test = Test::new();
        let [a, b] = [test.stream(), test.stream()];
        test.operation("0", a, None);
        test.operation("1", a, None);
        assert!(test.order.stream.is_some());
        let id = test.order.stream;
        test.operation("2", a, None);
        assert_eq!(test.order.stream, id);
        test.operation("3", b, None);
        assert_ne!(test.order.stream, id);
        // Replays of graphs may come between from now on, until these are gone.
        test.graph("4");
        test.operation("5", b, None);
        assert_eq!(test.order.stream, None);
        test.order.retain(&test.device, |_| false);
        test.operation("6", b, None);
        assert!(test.order.stream.is_some());
        test.ends(&[a, b], &["0", "1", "2", "3", "5", "6"]);
    }
}
