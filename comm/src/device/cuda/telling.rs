//! What the observer of a launch is told of its runs, by what kernels say of them: events in the ring, and that a run is over.

use std::sync::Arc;

use ringsight_kernels::{
    Launch, Observer, When,
    cuda::{Event, EventKind, HAS_EVENTS},
};
use smallvec::SmallVec;

use crate::observe;

/// How long events of runs that are over are waited for, nanoseconds. They come a moment later than what says that these are over, or are behind another kernel's:
/// one that is short has its end's entry with its start's. If it takes longer it gives that back after some 8 ms, but not while its blocks wait for room on the
/// GPU. What has not come then has most likely been written over, and is made up for.
const LATE_NS: u64 = 25_000_000;

/// One launch, which runs once or, captured, any number of times.
pub(super) struct Telling {
    observer: Arc<dyn Observer>,
    captured: bool,
    /// The run that its events are about: the replay, or 0.
    replay: u32,
    /// Runs that the observer was told the end of.
    finished: u32,
    /// The present run was given up, as one of its events says.
    gave_up: bool,
    /// Runs that are known to be over, until they have been told. What ends meanwhile is looked at when they have.
    over: Option<Over>,
    /// The channels of its operations, and what was told of them in this run.
    told: SmallVec<[Told; 1]>,
}

#[derive(Clone, Copy)]
struct Over {
    /// All before this number are.
    runs: u32,
    /// Of these the last one.
    last_gave_up: bool,
    /// Since when that is known, `CLOCK_MONOTONIC` nanoseconds.
    since_ns: u64,
}

/// One channel of one operation.
struct Told {
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

impl Telling {
    pub(super) fn new(launch: &Launch, captured: bool) -> Self {
        let mut told: SmallVec<[Told; 1]> = SmallVec::new();
        for channel in &launch.channels {
            for work in channel.work.iter().filter(|work| !work.is_tag_only()) {
                if !told
                    .iter()
                    .any(|told| (told.op, told.channel) == (work.op, channel.channel))
                {
                    told.push(Told {
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
            finished: 0,
            gave_up: false,
            over: None,
            told,
        }
    }

    pub(super) fn is_captured(&self) -> bool {
        self.captured
    }

    /// It has run and will not again.
    pub(super) fn is_over(&self) -> bool {
        !self.captured && self.finished > 0
    }

    /// A replay of it has begun and is not over.
    pub(super) fn is_replaying(&self) -> bool {
        self.captured && self.told.iter().any(|told| told.stage != Stage::Nothing)
    }

    /// Whether some of so many runs, which are over, have not been told.
    pub(super) fn is_behind(&self, runs: u32) -> bool {
        is_before(self.finished, runs)
    }

    /// An event of this launch; `host_ns` says when the GPU's timer showed a time.
    pub(super) fn tell(&mut self, event: &Event, host_ns: impl FnOnce(u64) -> u64) {
        // The event of a later replay: the one before is over, though its end has not been looked at.
        while self.captured && event.replay > self.replay {
            let gave_up = self.over.is_some_and(|over| over.last_gave_up);
            self.finish(gave_up && !self.is_told());
        }
        let observer = &self.observer;
        if event.kind == EventKind::Mismatch {
            return observer.mismatch(event.op, event.replay, event.channel, event.value as u32);
        }
        let Some(told) = self
            .told
            .iter_mut()
            .find(|told| (told.op, told.channel) == (event.op, event.channel))
        else {
            return;
        };
        if event.replay != self.replay || told.stage == Stage::Stopped {
            return;
        }
        let (op, replay, channel) = (event.op, event.replay, event.channel);
        let host_ns = host_ns(event.value);
        let when = When::At {
            timer_ns: event.value,
            host_ns,
        };
        if event.kind == EventKind::Started {
            if told.stage == Stage::Nothing {
                observer.channel_started(op, replay, channel, when);
            }
            told.stage = Stage::Started;
            return;
        }
        if told.stage == Stage::Nothing {
            observer.channel_started(op, replay, channel, When::Past { host_ns });
        }
        told.stage = Stage::Stopped;
        let aborted = event.kind == EventKind::Aborted;
        self.gave_up |= aborted;
        observer.channel_stopped(op, replay, channel, aborted, when);
    }

    /// So many `runs` are over, and the last one gave up or not; to be told before their events are.
    pub(super) fn are_over(&mut self, runs: u32, last_gave_up: bool) {
        if self.over.is_none() && is_before(self.finished, runs) {
            self.over = Some(Over {
                runs,
                last_gave_up,
                since_ns: observe::now_ns(),
            });
        }
    }

    /// Finishes what is over; whether anything was. `waits`: for events that have not come yet, as long as they may.
    pub(super) fn catch_up(&mut self, waits: bool) -> bool {
        let before = self.finished;
        while let Some(over) = self.over {
            if !is_before(self.finished, over.runs) {
                self.over = None;
                break;
            }
            // An abort word stays set: who gave up may have been not the last one alone.
            let last = self.finished.wrapping_add(1) == over.runs;
            let gave_up = over.last_gave_up && (last || !self.is_told());
            let may_come = HAS_EVENTS && !self.is_told() && !(last && over.last_gave_up);
            if waits && may_come && observe::now_ns().saturating_sub(over.since_ns) < LATE_NS {
                break;
            }
            self.finish(gave_up);
        }
        self.finished != before
    }

    /// Whether all of the present run has been told.
    fn is_told(&self) -> bool {
        self.told.iter().all(|told| told.stage == Stage::Stopped)
    }

    /// The present run is over. What was done and not told was lost, and is made up for.
    fn finish(&mut self, aborted: bool) {
        let aborted = std::mem::take(&mut self.gave_up) || aborted;
        let known = self.over.filter(|over| is_before(self.finished, over.runs));
        let host_ns = known.map_or_else(observe::now_ns, |over| over.since_ns);
        let lost = When::Past { host_ns };
        for told in &mut self.told {
            if !aborted && told.stage == Stage::Nothing {
                self.observer
                    .channel_started(told.op, self.replay, told.channel, lost);
            }
            if !aborted && told.stage != Stage::Stopped {
                self.observer
                    .channel_stopped(told.op, self.replay, told.channel, false, lost);
            }
            told.stage = Stage::Nothing;
        }
        self.observer.launch_finished(self.replay, aborted);
        self.finished = self.finished.wrapping_add(1);
        self.replay += u32::from(self.captured);
    }
}

/// Of counts of runs, which may begin anew.
fn is_before(one: u32, other: u32) -> bool {
    (1..u32::MAX / 2).contains(&other.wrapping_sub(one))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use ringsight_kernels::{ChannelWork, Connections, Scalar, Work, ZeroCopy};
    use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

    use super::*;

    /// What was told, in words.
    #[derive(Default)]
    struct Heard {
        told: Mutex<Vec<String>>,
        /// Those that were made up.
        times: Mutex<Vec<u64>>,
    }

    impl Heard {
        fn add(&self, text: String) {
            self.told.lock().unwrap().push(text);
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.told.lock().unwrap())
        }

        /// By the device's timer, or made up for.
        fn whose(&self, when: When) -> String {
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

    impl Observer for Heard {
        fn channel_started(&self, op: u32, replay: u32, _channel: u8, when: When) {
            self.add(format!("{op}.{replay} started {}", self.whose(when)));
        }
        fn channel_stopped(&self, op: u32, replay: u32, _channel: u8, aborted: bool, when: When) {
            let how = if aborted { "gave up" } else { "stopped" };
            self.add(format!("{op}.{replay} {how} {}", self.whose(when)));
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

    /// Of these operations on one channel.
    fn telling(ops: &[u32], captured: bool) -> (Arc<Heard>, Telling) {
        let heard = Arc::new(Heard::default());
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
            observer: heard.clone(),
        };
        (heard, Telling::new(&launch, captured))
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
        let (heard, mut telling) = telling(&[7], false);
        telling.are_over(1, false);
        assert!(!telling.catch_up(true) && telling.is_behind(1) && !telling.is_over());
        telling.tell(&event(EventKind::Started, 7, 0, 100), |timer| timer);
        assert!(!telling.catch_up(true));
        telling.tell(&event(EventKind::Stopped, 7, 0, 200), |timer| timer);
        assert!(telling.catch_up(true) && telling.is_over() && !telling.is_behind(1));
        assert_eq!(heard.take(), ["7.0 started 100", "7.0 stopped 200", "0 finished"]);
    }

    #[test]
    fn what_was_written_over_is_made_up_for_by_when_it_was_over() {
        let (heard, mut telling) = telling(&[7], true);
        telling.tell(&event(EventKind::Started, 7, 1, 100), |timer| timer);
        let before = observe::now_ns();
        telling.are_over(3, false);
        let known = observe::now_ns();
        // What ends meanwhile has its own time.
        telling.are_over(4, false);
        while !telling.catch_up(true) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(observe::now_ns() - before >= LATE_NS);
        assert!(!telling.is_behind(3), "the other runs have been over for as long");
        let times = std::mem::take(&mut *heard.times.lock().unwrap());
        assert_eq!(times.len(), 5);
        assert!(
            times.iter().all(|time| (before..=known).contains(time)),
            "{times:?}"
        );
        assert_eq!(
            heard.take(),
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
        // When the next one begins, or where there is no time to wait.
        telling.tell(&event(EventKind::Started, 7, 5, 300), |timer| timer);
        telling.are_over(5, false);
        assert!(telling.catch_up(false));
        assert_eq!(
            heard.take(),
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
    fn each_replay_that_is_given_up_is_told_so() {
        let (heard, mut telling) = telling(&[7, 8], true);
        telling.tell(&event(EventKind::Started, 7, 1, 100), |timer| timer);
        telling.tell(&event(EventKind::Aborted, 7, 1, 200), |timer| timer);
        // The second operation has not begun; and of the third replay nothing has.
        telling.tell(&event(EventKind::Started, 7, 2, 300), |timer| timer);
        telling.are_over(3, true);
        assert!(telling.catch_up(false));
        assert!(!telling.is_behind(3));
        assert_eq!(
            heard.take(),
            [
                "7.1 started 100",
                "7.1 gave up 200",
                "1 aborted",
                "7.2 started 300",
                "2 aborted",
                "3 aborted"
            ]
        );
        // It says nothing of those after it.
        telling.tell(&event(EventKind::Aborted, 7, 4, 400), |timer| timer);
        telling.are_over(4, true);
        assert!(telling.catch_up(true));
        telling.tell(&event(EventKind::Started, 7, 5, 500), |timer| timer);
        telling.are_over(5, false);
        assert!(telling.catch_up(false));
        assert_eq!(heard.take().last().unwrap(), "5 finished");
    }

    #[test]
    fn a_replay_that_was_done_is_no_aborted_one() {
        // Before others were given up.
        let (heard, mut telling) = telling(&[7], true);
        telling.tell(&event(EventKind::Started, 7, 1, 100), |timer| timer);
        telling.tell(&event(EventKind::Stopped, 7, 1, 200), |timer| timer);
        telling.are_over(2, true);
        assert!(telling.catch_up(true));
        assert_eq!(
            heard.take(),
            ["7.1 started 100", "7.1 stopped 200", "1 finished", "2 aborted"]
        );
        // Where nobody gave up, and the first one's events were lost.
        let (heard, mut telling) = self::telling(&[7], true);
        telling.are_over(2, false);
        telling.tell(&event(EventKind::Started, 7, 2, 300), |timer| timer);
        assert_eq!(
            heard.take(),
            [
                "7.1 started past",
                "7.1 stopped past",
                "1 finished",
                "7.2 started 300"
            ]
        );
    }

    #[test]
    fn counts_of_runs_may_begin_anew() {
        assert!(is_before(u32::MAX, 1) && is_before(3, 4));
        assert!(!is_before(4, 4) && !is_before(5, 4) && !is_before(1, u32::MAX));
    }
}
