//! What the observer of a launch is told of its runs, by what kernels say of them: events in the ring, and that a run is over.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use ringsight_kernels::{
    Launch, Observer, When,
    cuda::{Event, EventKind, TELLS},
};

use crate::{few::Few, observe};

/// How long events of a run that is over are waited for. They come a moment later than what says that it is over, or are behind another kernel's: one that is
/// short has its end's entry with its start's, and gives it back after some 8 ms if it takes longer (`Report::must_give_up`). What has not come then has been
/// written over.
const LATE: Duration = Duration::from_millis(25);

/// One launch, which runs once or, captured, any number of times.
pub(super) struct Telling {
    observer: Arc<dyn Observer>,
    captured: bool,
    /// The kernel was told of an abort.
    aborts: bool,
    /// The run that its events are about: the replay, or 0.
    replay: u32,
    /// Runs that the observer was told the end of.
    finished: u32,
    /// The present run was given up, as one of its events says.
    gave_up: bool,
    /// Since when the present run is known to be over, while its events are waited for.
    over: Option<Instant>,
    /// The channels of its operations, and what was told of them in this run.
    told: Few<Told>,
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
        let mut told: Few<Told> = Few::None;
        for channel in &launch.channels {
            for work in channel.work.iter().filter(|work| !work.only_shows_tag()) {
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
            aborts: false,
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

    /// A run of it is over whose events are waited for.
    pub(super) fn is_behind(&self) -> bool {
        self.over.is_some()
    }

    /// Its kernel is to give up: whether that is news.
    pub(super) fn aborts(&mut self) -> bool {
        !std::mem::replace(&mut self.aborts, true)
    }

    /// An event of this launch; `host_ns` says when the GPU's timer showed a time.
    pub(super) fn tell(&mut self, event: &Event, host_ns: impl FnOnce(u64) -> u64) {
        // The event of a later replay: the one before is over, though its end has not been looked at.
        while self.captured && event.replay > self.replay {
            self.finish(self.aborts && !self.is_told());
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

    /// Finishes what is over of so many `runs`; whether there was any. `aborted`: the last one gave up, and perhaps some before it: an abort word stays set.
    pub(super) fn catch_up(&mut self, runs: u32, aborted: bool) -> bool {
        let before = self.finished;
        loop {
            let behind = runs.wrapping_sub(self.finished);
            if behind == 0 || behind > u32::MAX / 2 {
                break;
            }
            let aborted = aborted && (behind == 1 || !self.is_told());
            if !aborted && self.awaits_events() {
                break;
            }
            self.finish(aborted);
        }
        self.finished != before
    }

    /// Whether all of the present run has been told.
    fn is_told(&self) -> bool {
        self.told.iter().all(|told| told.stage == Stage::Stopped)
    }

    /// Whether events of the present run, which is over, may still come.
    fn awaits_events(&mut self) -> bool {
        TELLS && !self.is_told() && self.over.get_or_insert_with(Instant::now).elapsed() < LATE
    }

    /// The present run is over. What was done and not told was lost, and is made up for.
    fn finish(&mut self, aborted: bool) {
        let aborted = aborted || self.gave_up;
        (self.over, self.gave_up) = (None, false);
        let lost = When::Past {
            host_ns: observe::now_ns(),
        };
        for told in self.told.iter_mut() {
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

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use ringsight_kernels::{ChannelWork, Connections, Scalar, Straight, Work};
    use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

    use super::*;

    /// What was told, in words.
    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl Heard {
        fn add(&self, text: String) {
            self.0.lock().unwrap().push(text);
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().unwrap())
        }
    }

    /// By the device's timer, or made up for.
    fn whose(when: When) -> String {
        match when {
            When::At { timer_ns, .. } => timer_ns.to_string(),
            When::Past { .. } => "past".into(),
            When::Now => "now".into(),
        }
    }

    impl Observer for Heard {
        fn channel_started(&self, op: u32, replay: u32, _channel: u8, when: When) {
            self.add(format!("{op}.{replay} started {}", whose(when)));
        }
        fn channel_stopped(&self, op: u32, replay: u32, _channel: u8, aborted: bool, when: When) {
            let how = if aborted { "gave up" } else { "stopped" };
            self.add(format!("{op}.{replay} {how} {}", whose(when)));
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
            straight: Straight::No,
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
        assert!(!telling.catch_up(1, false) && telling.is_behind() && !telling.is_over());
        telling.tell(&event(EventKind::Started, 7, 0, 100), |timer| timer);
        assert!(!telling.catch_up(1, false));
        telling.tell(&event(EventKind::Stopped, 7, 0, 200), |timer| timer);
        assert!(telling.catch_up(1, false) && telling.is_over() && !telling.is_behind());
        assert_eq!(heard.take(), ["7.0 started 100", "7.0 stopped 200", "0 finished"]);
    }

    #[test]
    fn what_was_written_over_is_made_up_for() {
        let (heard, mut telling) = telling(&[7], false);
        telling.tell(&event(EventKind::Started, 7, 0, 100), |timer| timer);
        while !telling.catch_up(1, false) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(
            heard.take(),
            ["7.0 started 100", "7.0 stopped past", "0 finished"]
        );
        // Of a replay, when the next one begins.
        let (heard, mut telling) = self::telling(&[7], true);
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
    fn each_replay_that_is_given_up_is_told_so() {
        let (heard, mut telling) = telling(&[7, 8], true);
        assert!(telling.aborts() && !telling.aborts());
        telling.tell(&event(EventKind::Started, 7, 1, 100), |timer| timer);
        telling.tell(&event(EventKind::Aborted, 7, 1, 200), |timer| timer);
        // The second operation has not begun; and of the third replay nothing has.
        telling.tell(&event(EventKind::Started, 7, 2, 300), |timer| timer);
        assert!(telling.catch_up(3, true));
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
    }

    #[test]
    fn a_replay_that_was_done_before_others_were_given_up_is_told_so() {
        let (heard, mut telling) = telling(&[7], true);
        telling.tell(&event(EventKind::Started, 7, 1, 100), |timer| timer);
        telling.tell(&event(EventKind::Stopped, 7, 1, 200), |timer| timer);
        assert!(telling.aborts());
        assert!(telling.catch_up(2, true));
        assert_eq!(
            heard.take(),
            ["7.1 started 100", "7.1 stopped 200", "1 finished", "2 aborted"]
        );
    }
}
