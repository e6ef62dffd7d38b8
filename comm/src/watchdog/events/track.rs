//! How far one plan is, as its events and counters tell.

use std::sync::Mutex;

use crate::{
    communicator::lock,
    device::{Counter, Device, Event, Progress, Stream},
    error::Result,
    observe,
    progress::Seen,
};

/// A plan between two records: of an event before its kernel and of one behind it. In a graph also between two counts.
pub(crate) struct Track {
    /// Before the kernel and behind it.
    pub(super) events: [Event; 2],
    /// Of a captured plan: how often it has begun and how often it has ended.
    counts: Option<[Counter; 2]>,
    told: Mutex<Told>,
}

/// What is known.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    polled: Option<Polled>,
    /// Since when it has been in the present run, or launched for it.
    since: Option<Since>,
}

/// The events at the last query that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Polled {
    /// The counts before it and after it, which were the same.
    counts: [u64; 2],
    start: Progress,
    end: Progress,
}

#[derive(Clone, Copy, Debug)]
struct Since {
    /// It runs; otherwise it is launched.
    runs: bool,
    replay: u32,
    ns: u64,
}

/// A captured plan is...
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// ... where it was before the first replay, or after the last one.
    Over,
    /// ... launched for one more, and has not begun.
    Launched,
    /// ... in this replay.
    Runs { replay: u64 },
    /// ... done with this one, which has not been counted yet.
    Done { replay: u64 },
}

/// What counts and events say together. The stream passes, in this order: the start's record, the first count, the kernel, the
/// end's record, the second count.
///
/// Events alone do not tell a replay that hangs with the next one queued from one that is done with the next one queued: each
/// launch of the graph resets both. Counts alone do not tell whether the graph has been launched.
fn phase([begun, ended]: [u64; 2], polled: Option<(Progress, Progress)>) -> Phase {
    use Progress::{Done, Pending};
    if begun > ended {
        return match polled {
            Some((_, Done)) => Phase::Done { replay: begun },
            // Latched: also with the next replay queued, for which the start is pending again.
            _ => Phase::Runs { replay: begun },
        };
    }
    match polled {
        Some((Pending, _)) => Phase::Launched,
        // Reached, though a GPU that is full has not come to count it.
        Some((Done, Pending)) => Phase::Runs { replay: ended + 1 },
        _ => Phase::Over,
    }
}

/// Two new events.
pub(super) fn events(device: &dyn Device) -> Result<[Event; 2]> {
    let start = device.order_event_create()?;
    let end = device.order_event_create().inspect_err(|_| {
        // It was never used: nothing is left to be done where it cannot be destroyed.
        let _ = device.event_destroy(start);
    })?;
    Ok([start, end])
}

impl Track {
    /// Of events that nothing in flight refers to.
    pub(super) fn eager(events: [Event; 2]) -> Self {
        Self {
            events,
            counts: None,
            told: Mutex::default(),
        }
    }

    /// Of new events, in a graph.
    pub(super) fn captured(device: &dyn Device) -> Result<Self> {
        let counts = [device.counter()?, device.counter()?];
        Ok(Self {
            counts: Some(counts),
            ..Self::eager(events(device)?)
        })
    }

    pub(super) fn is_captured(&self) -> bool {
        self.counts.is_some()
    }

    /// Before the kernel.
    pub(super) fn record_start(&self, device: &dyn Device, stream: Stream) -> Result<()> {
        self.record(0, device, stream)
    }

    /// Behind it.
    pub(super) fn record_end(&self, device: &dyn Device, stream: Stream) -> Result<()> {
        self.record(1, device, stream)
    }

    fn record(&self, place: usize, device: &dyn Device, stream: Stream) -> Result<()> {
        let event = self.events[place];
        match &self.counts {
            None => device.event_record(event, stream)?,
            Some(counts) => {
                device.event_record_external(event, stream)?;
                device.count(stream, &counts[place])?;
            }
        }
        Ok(())
    }

    fn counted(&self) -> [u64; 2] {
        // The first one first: it is never seen to be behind the other of the same replay. Whoever sees the second one ahead has
        // seen a replay that began in between end, too.
        let counts = self.counts.as_ref();
        let [begun, ended] = counts.map_or([0, 0], |counts| counts.each_ref().map(Counter::value));
        [begun.max(ended), ended]
    }

    /// Queries the events of a captured plan; whether it is launched and has not begun, so that none behind it has.
    pub(super) fn query(&self, device: &dyn Device) -> bool {
        let counts = self.counted();
        // A device that is broken answers nothing any more: what was known stays.
        let [Ok(start), Ok(end)] = self.events.map(|event| device.event_query(event)) else {
            return false;
        };
        if self.counted() != counts {
            return false;
        }
        lock(&self.told).polled = Some(Polled { counts, start, end });
        // Latches the time.
        matches!(self.seen(), Seen::Launched { .. })
    }

    /// The same, without asking: an earlier plan of the same launch has not begun.
    pub(super) fn is_behind(&self) {
        let counts = self.counted();
        if counts[0] == counts[1] {
            lock(&self.told).polled = Some(Polled {
                counts,
                start: Progress::Pending,
                end: Progress::Pending,
            });
            self.seen();
        }
    }

    /// What a query found out about an eager plan.
    pub(super) fn tell(&self, start: Progress, end: Progress) {
        let mut told = lock(&self.told);
        told.polled = Some(Polled {
            counts: [0, 0],
            start,
            end,
        });
        drop(told);
        self.seen();
    }

    /// Where it is, from memory.
    pub(crate) fn seen(&self) -> Seen {
        let mut told = lock(&self.told);
        if self.counts.is_none() {
            return match told.polled {
                Some(Polled {
                    end: Progress::Done, ..
                }) => Seen::Completed { replay: 0 },
                Some(Polled {
                    start: Progress::Done,
                    ..
                }) => Seen::InProgress {
                    replay: 0,
                    start_ns: told.since(true, 0),
                },
                _ => Seen::NotReached,
            };
        }
        let counts = self.counted();
        let polled = told.polled.filter(|polled| polled.counts == counts);
        // Of a graph that is replayed more often than that the numbers begin anew.
        match phase(counts, polled.map(|polled| (polled.start, polled.end))) {
            Phase::Runs { replay } => Seen::InProgress {
                replay: replay as u32,
                start_ns: told.since(true, replay as u32),
            },
            Phase::Done { replay } => Seen::Completed {
                replay: replay as u32,
            },
            Phase::Launched => {
                let replay = counts[1] as u32 + 1;
                Seen::Launched {
                    replay,
                    launched_ns: told.since(false, replay),
                }
            }
            Phase::Over if counts[1] == 0 => Seen::NotReached,
            Phase::Over => Seen::Completed {
                replay: counts[1] as u32,
            },
        }
    }
}

impl Told {
    /// Since when it has been so: as long as it is, the time stays.
    fn since(&mut self, runs: bool, replay: u32) -> u64 {
        match self.since {
            Some(since) if (since.runs, since.replay) == (runs, replay) => since.ns,
            _ => {
                let ns = observe::now_ns();
                self.since = Some(Since { runs, replay, ns });
                ns
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_events_tell_replays_apart() {
        use Phase::{Launched, Over, Runs};
        use Progress::{Done, Pending};
        let cases = [
            ("never launched", [0, 0], Done, Done, Over),
            ("launched", [0, 0], Pending, Pending, Launched),
            ("reached, not counted", [0, 0], Done, Pending, Runs { replay: 1 }),
            ("in replay 3", [3, 2], Done, Pending, Runs { replay: 3 }),
            (
                "3 hangs, 4 is queued",
                [3, 2],
                Pending,
                Pending,
                Runs { replay: 3 },
            ),
            ("3 is done, 4 is queued", [3, 3], Pending, Pending, Launched),
            ("3 is done", [3, 3], Done, Done, Over),
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
        // Without a query that is of the present counts.
        assert_eq!(phase([3, 2], None), Runs { replay: 3 });
        assert_eq!(phase([3, 3], None), Over);
    }
}
