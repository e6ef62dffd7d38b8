//! How far one plan is, as its CUDA events and counters tell.

use std::sync::Mutex;

use ringsight_comm_base::sync::lock;

use crate::{
    device::{Counter, Device, Event, Progress, Stream},
    error::Result,
    observe,
    progress::Seen,
};

/// A plan between two records: of an event before its kernel and of one behind it. A captured plan is between two counts
/// as well.
pub(crate) struct TrackedPlan {
    /// Before the kernel and behind it.
    pub(super) events: [Event; 2],
    /// Of a captured plan: how often it has begun and how often it has ended.
    counters: Option<[Counter; 2]>,
    known: Mutex<Known>,
}

/// What is known of a plan from its last query.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    queried: Option<Queried>,
    /// The run that the plan was last seen in.
    seen_in: Option<SeenIn>,
}

/// The result of the last query that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Queried {
    /// The counts before and after the query, which were the same.
    counts: [u64; 2],
    start: Progress,
    end: Progress,
}

/// A run that a plan is launched for or runs in, and since when that is seen.
#[derive(Clone, Copy, Debug)]
struct SeenIn {
    /// It runs; otherwise it is launched.
    runs: bool,
    replay: u32,
    since_ns: u64,
}

/// Where a captured plan is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Before the first replay, or after the last one.
    Idle,
    /// Launched for the next replay, and not begun.
    Launched,
    /// In this replay.
    Running { replay: u64 },
    /// Done with this replay, which is not counted yet.
    Done { replay: u64 },
}

/// The phase from the counts begun and ended, and from the events at the same counts. The stream passes, in this order: the
/// start's event, the first count, the kernel, the end's event, the second count.
///
/// Events alone do not tell a replay that hangs with the next one queued from one that is done with the next one queued:
/// each launch of the graph resets both. Counts alone do not tell whether the graph has been launched.
fn phase([begun, ended]: [u64; 2], events: Option<(Progress, Progress)>) -> Phase {
    use Progress::{Done, Pending};
    if begun > ended {
        return match events {
            Some((_, Done)) => Phase::Done { replay: begun },
            // Latched: with the next replay queued the start is pending again, and this replay runs all the same.
            _ => Phase::Running { replay: begun },
        };
    }
    match events {
        Some((Pending, _)) => Phase::Launched,
        // Reached, though a GPU that is full has not come to count it.
        Some((Done, Pending)) => Phase::Running { replay: ended + 1 },
        _ => Phase::Idle,
    }
}

/// Creates the two events of a plan.
pub(super) fn create_events(device: &dyn Device) -> Result<[Event; 2]> {
    let start = device.event_create()?;
    let end = device.event_create().inspect_err(|_| {
        // It was never used: nothing is left to be done where it cannot be destroyed.
        let _ = device.event_destroy(start);
    })?;
    Ok([start, end])
}

impl TrackedPlan {
    /// A plan that runs once, with events that nothing in flight refers to.
    pub(super) fn eager(events: [Event; 2]) -> Self {
        Self {
            events,
            counters: None,
            known: Mutex::default(),
        }
    }

    /// A plan of a graph, with events and counters of its own.
    pub(super) fn captured(device: &dyn Device) -> Result<Self> {
        let counters = [device.new_counter()?, device.new_counter()?];
        Ok(Self {
            counters: Some(counters),
            ..Self::eager(create_events(device)?)
        })
    }

    pub(super) fn is_captured(&self) -> bool {
        self.counters.is_some()
    }

    /// Records the start, before the kernel.
    pub(super) fn record_start(&self, device: &dyn Device, stream: Stream) -> Result<()> {
        self.record(0, device, stream)
    }

    /// Records the end, behind the kernel.
    pub(super) fn record_end(&self, device: &dyn Device, stream: Stream) -> Result<()> {
        self.record(1, device, stream)
    }

    fn record(&self, place: usize, device: &dyn Device, stream: Stream) -> Result<()> {
        let event = self.events[place];
        match &self.counters {
            None => device.event_record(event, stream)?,
            Some(counters) => {
                device.event_record_external(event, stream)?;
                device.increment(stream, &counters[place])?;
            }
        }
        Ok(())
    }

    /// How often a captured plan has begun and ended.
    fn counts(&self) -> Option<[u64; 2]> {
        // The first counter is read first, so of one replay it is never seen behind the second. A second counter that is
        // ahead ended a replay that began in between.
        let [begun, ended] = self.counters.as_ref()?.each_ref().map(Counter::value);
        Some([begun.max(ended), ended])
    }

    /// Queries the events of a captured plan. Returns whether the plan is launched and has not begun, so that no later plan
    /// of its graph has.
    pub(super) fn query(&self, device: &dyn Device) -> bool {
        let counts = self.counts();
        // A broken device answers nothing any more: what was known stays.
        let [Ok(start), Ok(end)] = self.events.map(|event| device.event_query(event)) else {
            return false;
        };
        if self.counts() != counts {
            return false;
        }
        self.set_queried(counts.unwrap_or_default(), start, end);
        matches!(self.progress(), Seen::Launched { .. })
    }

    /// Notes, without a query, that an earlier plan of the same launch has not begun.
    pub(super) fn is_behind(&self) {
        let counts = self.counts().unwrap_or_default();
        if counts[0] == counts[1] {
            self.set_queried(counts, Progress::Pending, Progress::Pending);
            self.progress();
        }
    }

    /// Notes what a query found of an eager plan.
    pub(super) fn found(&self, start: Progress, end: Progress) {
        self.set_queried([0, 0], start, end);
        // Latches the time.
        self.progress();
    }

    fn set_queried(&self, counts: [u64; 2], start: Progress, end: Progress) {
        lock(&self.known).queried = Some(Queried { counts, start, end });
    }

    /// Where the plan is; a look at memory.
    pub(crate) fn progress(&self) -> Seen {
        let counts = self.counts();
        lock(&self.known).progress(counts, observe::now_ns)
    }
}

impl Known {
    /// Where a plan is with these counts, `None` for an eager plan. The clock is read only for what is seen first.
    fn progress(&mut self, counts: Option<[u64; 2]>, clock: impl FnOnce() -> u64) -> Seen {
        let Some(counts) = counts else {
            return match self.queried.map(|queried| (queried.start, queried.end)) {
                Some((_, Progress::Done)) => Seen::Completed { replay: 0 },
                Some((Progress::Done, _)) => Seen::InProgress {
                    replay: 0,
                    start_ns: self.since(true, 0, clock),
                },
                _ => Seen::NotReached,
            };
        };
        let queried = self.queried.filter(|queried| queried.counts == counts);
        // Replay numbers wrap in graphs that are replayed more often than 32 bits count.
        match phase(counts, queried.map(|queried| (queried.start, queried.end))) {
            Phase::Running { replay } => Seen::InProgress {
                replay: replay as u32,
                start_ns: self.since(true, replay as u32, clock),
            },
            Phase::Done { replay } => Seen::Completed {
                replay: replay as u32,
            },
            Phase::Launched => {
                let replay = counts[1] as u32 + 1;
                Seen::Launched {
                    replay,
                    launched_ns: self.since(false, replay, clock),
                }
            }
            Phase::Idle if counts[1] == 0 => Seen::NotReached,
            Phase::Idle => Seen::Completed {
                replay: counts[1] as u32,
            },
        }
    }

    /// Since when the plan is seen in this run. The time is latched for as long as that lasts.
    fn since(&mut self, runs: bool, replay: u32, clock: impl FnOnce() -> u64) -> u64 {
        match self.seen_in {
            Some(seen) if (seen.runs, seen.replay) == (runs, replay) => seen.since_ns,
            _ => {
                let since_ns = clock();
                self.seen_in = Some(SeenIn {
                    runs,
                    replay,
                    since_ns,
                });
                since_ns
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Progress::{Done, Pending};

    #[test]
    fn counts_and_events_tell_replays_apart() {
        use Phase::{Idle, Launched, Running};
        let cases = [
            ("never launched", [0, 0], Done, Done, Idle),
            ("launched", [0, 0], Pending, Pending, Launched),
            (
                "reached, not counted",
                [0, 0],
                Done,
                Pending,
                Running { replay: 1 },
            ),
            ("in replay 3", [3, 2], Done, Pending, Running { replay: 3 }),
            (
                "3 hangs, 4 is queued",
                [3, 2],
                Pending,
                Pending,
                Running { replay: 3 },
            ),
            ("3 is done, 4 is queued", [3, 3], Pending, Pending, Launched),
            ("3 is done", [3, 3], Done, Done, Idle),
            (
                "3 is done, not counted",
                [3, 2],
                Done,
                Done,
                Phase::Done { replay: 3 },
            ),
        ];
        for (name, counts, start, end, expected) in cases {
            assert_eq!(phase(counts, Some((start, end))), expected, "{name}");
        }
        // Without a query at the present counts.
        assert_eq!(phase([3, 2], None), Running { replay: 3 });
        assert_eq!(phase([3, 3], None), Idle);
    }

    /// A plan whose query found this at `now`.
    fn query(known: &mut Known, counts: Option<[u64; 2]>, events: (Progress, Progress), now: u64) -> Seen {
        known.queried = Some(Queried {
            counts: counts.unwrap_or_default(),
            start: events.0,
            end: events.1,
        });
        known.progress(counts, || now)
    }

    #[test]
    fn the_begin_of_a_replay_is_latched_while_the_next_one_is_queued() {
        let mut known = Known::default();
        let in_replay_2 = Seen::InProgress {
            replay: 2,
            start_ns: 100,
        };
        assert_eq!(query(&mut known, Some([2, 1]), (Done, Pending), 100), in_replay_2);
        // The launch of replay 3 resets both events.
        assert_eq!(
            query(&mut known, Some([2, 1]), (Pending, Pending), 200),
            in_replay_2
        );
        assert_eq!(
            known.progress(Some([2, 1]), || 300),
            in_replay_2,
            "without a query"
        );
        let queued = Seen::Launched {
            replay: 3,
            launched_ns: 400,
        };
        assert_eq!(query(&mut known, Some([2, 2]), (Pending, Pending), 400), queued);
        assert_eq!(query(&mut known, Some([2, 2]), (Pending, Pending), 500), queued);
        let in_replay_3 = Seen::InProgress {
            replay: 3,
            start_ns: 600,
        };
        assert_eq!(query(&mut known, Some([2, 2]), (Done, Pending), 600), in_replay_3);
        assert_eq!(
            known.progress(Some([3, 2]), || 700),
            in_replay_3,
            "now it is counted"
        );
        assert_eq!(
            query(&mut known, Some([3, 3]), (Done, Done), 800),
            Seen::Completed { replay: 3 }
        );
    }

    #[test]
    fn an_eager_plan_queued_behind_compute_has_not_begun() {
        let mut known = Known::default();
        assert_eq!(
            known.progress(None, || 50),
            Seen::NotReached,
            "nobody has queried it"
        );
        assert_eq!(query(&mut known, None, (Pending, Pending), 100), Seen::NotReached);
        let runs = Seen::InProgress {
            replay: 0,
            start_ns: 200,
        };
        assert_eq!(query(&mut known, None, (Done, Pending), 200), runs);
        assert_eq!(query(&mut known, None, (Done, Pending), 300), runs);
        assert_eq!(
            query(&mut known, None, (Done, Done), 400),
            Seen::Completed { replay: 0 }
        );
    }
}
