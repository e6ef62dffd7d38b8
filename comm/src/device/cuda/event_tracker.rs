//! Tracks one launch: turns events of the ring and finished runs into calls of its observer.
//!
//! States of a channel of an operation, in each run: nothing → started → stopped. The tracker reports every run in order and exactly once. It
//! makes up for events that were overwritten in the ring.
//!
//! A kernel reports that a run is over without waiting for its events to become visible. So the tracker waits up to [`LATE_NS`] for them.

use std::sync::Arc;

use ringsight_kernels::{
    Launch, Observer, When,
    cuda::{Event, EventKind, HAS_EVENTS},
};
use smallvec::SmallVec;

use crate::observe;

/// How long to wait for events of a finished run, nanoseconds.
///
/// They become visible a moment later, or they stand in the ring behind the event of another kernel: a short kernel takes the ring slot of its end
/// together with that of its start. It returns the slot after some 8 ms, but not while its blocks wait for room on the GPU. An event that has not
/// come by then was most likely overwritten.
const LATE_NS: u64 = 25_000_000;

/// One launch, which runs once or, captured, any number of times.
pub(super) struct EventTracker {
    observer: Arc<dyn Observer>,
    captured: bool,
    /// The current run: the replay, or 0.
    replay: u32,
    /// Runs whose end was reported.
    reported: u32,
    /// An event says that the current run was given up.
    gave_up: bool,
    /// Runs that are over, until all of them are reported. Runs that end meanwhile are looked at afterwards.
    finished: Option<Finished>,
    /// The channels of its operations, in the current run.
    channels: SmallVec<[ChannelState; 1]>,
}

#[derive(Clone, Copy)]
struct Finished {
    /// Number of finished runs.
    runs: u32,
    /// The last of them was given up.
    last_gave_up: bool,
    /// When this was found out, `CLOCK_MONOTONIC` nanoseconds.
    since_ns: u64,
}

/// One channel of one operation.
struct ChannelState {
    op: u32,
    channel: u8,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Nothing,
    Started,
    Stopped,
}

impl EventTracker {
    pub(super) fn new(launch: &Launch, captured: bool) -> Self {
        let mut channels: SmallVec<[ChannelState; 1]> = SmallVec::new();
        for channel in &launch.channels {
            for work in channel.work.iter().filter(|work| !work.is_tag_only()) {
                let is_known = channels
                    .iter()
                    .any(|known| (known.op, known.channel) == (work.op, channel.channel));
                if !is_known {
                    channels.push(ChannelState {
                        op: work.op,
                        channel: channel.channel,
                        stage: Stage::Nothing,
                    });
                }
            }
        }
        Self {
            observer: launch.observer.clone(),
            captured,
            replay: captured.into(),
            reported: 0,
            gave_up: false,
            finished: None,
            channels,
        }
    }

    pub(super) fn is_captured(&self) -> bool {
        self.captured
    }

    /// It has run and will not run again.
    pub(super) fn is_over(&self) -> bool {
        !self.captured && self.reported > 0
    }

    /// A replay has begun and is not over.
    pub(super) fn is_replaying(&self) -> bool {
        self.captured
            && self
                .channels
                .iter()
                .any(|channel| channel.stage != Stage::Nothing)
    }

    /// Whether some of `runs` finished runs are not reported yet.
    pub(super) fn is_behind(&self, runs: u32) -> bool {
        is_before(self.reported, runs)
    }

    /// Reports an event of this launch. `host_ns` converts the GPU's timer.
    pub(super) fn report(&mut self, event: &Event, host_ns: impl FnOnce(u64) -> u64) {
        // An event of a later replay: the current one is over, even if its end has not been looked at.
        while self.captured && event.replay > self.replay {
            let gave_up = self.finished.is_some_and(|finished| finished.last_gave_up);
            self.finish(gave_up && !self.is_complete());
        }
        let observer = &self.observer;
        if event.kind == EventKind::Mismatch {
            return observer.mismatch(event.op, event.replay, event.channel, event.value as u32);
        }
        let Some(state) = self
            .channels
            .iter_mut()
            .find(|state| (state.op, state.channel) == (event.op, event.channel))
        else {
            return;
        };
        if event.replay != self.replay || state.stage == Stage::Stopped {
            return;
        }
        let (op, replay, channel) = (event.op, event.replay, event.channel);
        let host_ns = host_ns(event.value);
        let when = When::At {
            timer_ns: event.value,
            host_ns,
        };
        if event.kind == EventKind::Started {
            if state.stage == Stage::Nothing {
                observer.channel_started(op, replay, channel, when);
            }
            state.stage = Stage::Started;
            return;
        }
        if state.stage == Stage::Nothing {
            observer.channel_started(op, replay, channel, When::Past { host_ns });
        }
        state.stage = Stage::Stopped;
        let aborted = event.kind == EventKind::Aborted;
        self.gave_up |= aborted;
        observer.channel_stopped(op, replay, channel, aborted, when);
    }

    /// Takes in that `runs` runs are over and whether the last one was given up. The caller passes their events to [`Self::report`] afterwards.
    pub(super) fn set_finished(&mut self, runs: u32, last_gave_up: bool) {
        if self.finished.is_none() && is_before(self.reported, runs) {
            self.finished = Some(Finished {
                runs,
                last_gave_up,
                since_ns: observe::now_ns(),
            });
        }
    }

    /// Reports the end of finished runs. Returns whether there was one. `waits`: wait for late events as long as they may take.
    pub(super) fn catch_up(&mut self, waits: bool) -> bool {
        let before = self.reported;
        while let Some(finished) = self.finished {
            if !is_before(self.reported, finished.runs) {
                self.finished = None;
                break;
            }
            // The abort word stays set, so earlier runs may have been given up as well.
            let last = self.reported.wrapping_add(1) == finished.runs;
            let gave_up = finished.last_gave_up && (last || !self.is_complete());
            let may_come = HAS_EVENTS && !self.is_complete() && !(last && finished.last_gave_up);
            if waits && may_come && observe::now_ns().saturating_sub(finished.since_ns) < LATE_NS {
                break;
            }
            self.finish(gave_up);
        }
        self.reported != before
    }

    /// Whether every channel of the current run has stopped.
    fn is_complete(&self) -> bool {
        self.channels
            .iter()
            .all(|channel| channel.stage == Stage::Stopped)
    }

    /// Reports the end of the current run, and makes up for lost events.
    fn finish(&mut self, aborted: bool) {
        let aborted = std::mem::take(&mut self.gave_up) || aborted;
        let known = self
            .finished
            .filter(|finished| is_before(self.reported, finished.runs));
        let host_ns = known.map_or_else(observe::now_ns, |finished| finished.since_ns);
        let lost = When::Past { host_ns };
        for state in &mut self.channels {
            if !aborted && state.stage == Stage::Nothing {
                self.observer
                    .channel_started(state.op, self.replay, state.channel, lost);
            }
            if !aborted && state.stage != Stage::Stopped {
                self.observer
                    .channel_stopped(state.op, self.replay, state.channel, false, lost);
            }
            state.stage = Stage::Nothing;
        }
        self.observer.launch_finished(self.replay, aborted);
        self.reported = self.reported.wrapping_add(1);
        self.replay += u32::from(self.captured);
    }
}

/// Whether one count of runs comes before another. Counts wrap around.
fn is_before(one: u32, other: u32) -> bool {
    (1..u32::MAX / 2).contains(&other.wrapping_sub(one))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use ringsight_kernels::{ChannelWork, Connections, Scalar, Work, ZeroCopy};
    use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

    use super::*;

    /// An observer that keeps what is reported, as text.
    #[derive(Default)]
    struct Recorder {
        reports: Mutex<Vec<String>>,
        /// Times of events that were made up for.
        times: Mutex<Vec<u64>>,
    }

    impl Recorder {
        fn add(&self, text: String) {
            self.reports.lock().unwrap().push(text);
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.reports.lock().unwrap())
        }

        /// The time as text: the device's, or of a lost event.
        fn time(&self, when: When) -> String {
            match when {
                When::At { timer_ns, .. } => timer_ns.to_string(),
                When::Past { host_ns } => {
                    self.times.lock().unwrap().push(host_ns);
                    "past".into()
                }
                When::Now => "now".into(),
            }
        }
    }

    impl Observer for Recorder {
        fn channel_started(&self, op: u32, replay: u32, _channel: u8, when: When) {
            self.add(format!("{op}.{replay} started {}", self.time(when)));
        }
        fn channel_stopped(&self, op: u32, replay: u32, _channel: u8, aborted: bool, when: When) {
            let how = if aborted { "gave up" } else { "stopped" };
            self.add(format!("{op}.{replay} {how} {}", self.time(when)));
        }
        fn mismatch(&self, op: u32, _replay: u32, _channel: u8, _theirs: u32) {
            self.add(format!("{op} differs"));
        }
        fn launch_finished(&self, replay: u32, aborted: bool) {
            self.add(format!(
                "{replay} {}",
                if aborted { "aborted" } else { "finished" }
            ));
        }
    }

    /// A tracker of these operations on one channel.
    fn tracker(ops: &[u32], captured: bool) -> (Arc<Recorder>, EventTracker) {
        let recorder = Arc::new(Recorder::default());
        let work = |op: &u32| Work {
            op: *op,
            tag: 1,
            function: Function::AllReduce,
            algorithm: Algorithm::Ring,
            data_type: DataType::Uint8,
            reduce_op: ReduceOp::Sum,
            scalar: Scalar::None,
            send: 0,
            recv: 0,
            count: 8,
            part: 0..8,
            rank: 0,
            ranks: 1,
            root: 0,
            connections: Connections::Local,
            zero_copy: ZeroCopy::Off,
            pushes: false,
        };
        let launch = Launch {
            peers: None,
            channels: vec![ChannelWork {
                channel: 0,
                work: ops.iter().map(work).collect(),
            }],
            abort: Arc::default(),
            observer: recorder.clone(),
        };
        (recorder, EventTracker::new(&launch, captured))
    }

    fn event(kind: EventKind, op: u32, replay: u32, value: u64) -> Event {
        Event {
            kind,
            launch: 1,
            op,
            replay,
            channel: 0,
            value,
        }
    }

    #[test]
    fn events_that_come_after_the_end_are_waited_for() {
        let (recorder, mut tracker) = tracker(&[7], false);
        tracker.set_finished(1, false);
        assert!(!tracker.catch_up(true) && tracker.is_behind(1) && !tracker.is_over());
        tracker.report(&event(EventKind::Started, 7, 0, 100), |timer| timer);
        assert!(!tracker.catch_up(true));
        tracker.report(&event(EventKind::Stopped, 7, 0, 200), |timer| timer);
        assert!(tracker.catch_up(true) && tracker.is_over() && !tracker.is_behind(1));
        assert_eq!(
            recorder.take(),
            ["7.0 started 100", "7.0 stopped 200", "0 finished"]
        );
    }

    #[test]
    fn overwritten_events_are_made_up_for_by_the_time_of_the_end() {
        let (recorder, mut tracker) = tracker(&[7], true);
        tracker.report(&event(EventKind::Started, 7, 1, 100), |timer| timer);
        let before = observe::now_ns();
        tracker.set_finished(3, false);
        let known = observe::now_ns();
        // A run that ends later has a time of its own.
        tracker.set_finished(4, false);
        while !tracker.catch_up(true) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(observe::now_ns() - before >= LATE_NS);
        assert!(!tracker.is_behind(3), "the other runs have been over for as long");
        let times = std::mem::take(&mut *recorder.times.lock().unwrap());
        assert_eq!(times.len(), 5);
        assert!(
            times.iter().all(|time| (before..=known).contains(time)),
            "{times:?}"
        );
        assert_eq!(
            recorder.take(),
            [
                "7.1 started 100",
                "7.1 stopped past",
                "1 finished",
                "7.2 started past",
                "7.2 stopped past",
                "2 finished",
                "7.3 started past",
                "7.3 stopped past",
                "3 finished"
            ]
        );
        // At once, if the next replay begins, or if there is no time to wait.
        tracker.report(&event(EventKind::Started, 7, 5, 300), |timer| timer);
        tracker.set_finished(5, false);
        assert!(tracker.catch_up(false));
        assert_eq!(
            recorder.take(),
            [
                "7.4 started past",
                "7.4 stopped past",
                "4 finished",
                "7.5 started 300",
                "7.5 stopped past",
                "5 finished"
            ]
        );
    }

    #[test]
    fn each_replay_that_is_given_up_is_reported() {
        let (recorder, mut tracker) = tracker(&[7, 8], true);
        tracker.report(&event(EventKind::Started, 7, 1, 100), |timer| timer);
        tracker.report(&event(EventKind::Aborted, 7, 1, 200), |timer| timer);
        // The second operation has not begun, nor has the third replay.
        tracker.report(&event(EventKind::Started, 7, 2, 300), |timer| timer);
        tracker.set_finished(3, true);
        assert!(tracker.catch_up(false));
        assert!(!tracker.is_behind(3));
        assert_eq!(
            recorder.take(),
            [
                "7.1 started 100",
                "7.1 gave up 200",
                "1 aborted",
                "7.2 started 300",
                "2 aborted",
                "3 aborted"
            ]
        );
        // That says nothing about later replays.
        tracker.report(&event(EventKind::Aborted, 7, 4, 400), |timer| timer);
        tracker.set_finished(4, true);
        assert!(tracker.catch_up(true));
        tracker.report(&event(EventKind::Started, 7, 5, 500), |timer| timer);
        tracker.set_finished(5, false);
        assert!(tracker.catch_up(false));
        assert_eq!(recorder.take().last().unwrap(), "5 finished");
    }

    #[test]
    fn a_replay_that_was_done_is_no_aborted_one() {
        // A finished replay before one that was given up.
        let (recorder, mut tracker) = tracker(&[7], true);
        tracker.report(&event(EventKind::Started, 7, 1, 100), |timer| timer);
        tracker.report(&event(EventKind::Stopped, 7, 1, 200), |timer| timer);
        tracker.set_finished(2, true);
        assert!(tracker.catch_up(true));
        assert_eq!(
            recorder.take(),
            ["7.1 started 100", "7.1 stopped 200", "1 finished", "2 aborted"]
        );
        // Without a give-up, and with the first replay's events lost.
        let (recorder, mut tracker) = self::tracker(&[7], true);
        tracker.set_finished(2, false);
        tracker.report(&event(EventKind::Started, 7, 2, 300), |timer| timer);
        assert_eq!(
            recorder.take(),
            [
                "7.1 started past",
                "7.1 stopped past",
                "1 finished",
                "7.2 started 300"
            ]
        );
    }

    #[test]
    fn counts_of_runs_wrap_around() {
        assert!(is_before(u32::MAX, 1) && is_before(3, 4));
        assert!(!is_before(4, 4) && !is_before(5, 4) && !is_before(1, u32::MAX));
    }
}
