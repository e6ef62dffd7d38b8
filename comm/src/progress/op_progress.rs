//! How far an operation is: written by the thread that hears of its device, read by any other without a lock.

#[cfg(loom)]
use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

#[cfg(not(loom))]
use std::{
    hint::spin_loop,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Replays of an operation run one after another, so one state serves all.
#[derive(Debug, Default)]
pub(crate) struct OpProgress {
    /// When it was learnt that the first channel had started, 0 if none has.
    start_ns: AtomicU64,
    /// The replay that this was in.
    replay: AtomicU32,
    /// The replay that was completed last, plus one.
    completed: AtomicU32,
}

/// Where an operation is, as the device told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// It has not begun.
    NotReached,
    /// It is captured, its graph has been launched for this replay, and it has not begun. Events alone tell this.
    Launched {
        replay: u32,
        /// When that was noticed.
        launched_ns: u64,
    },
    /// It has begun and is not done; if it is captured, in this replay.
    InProgress {
        replay: u32,
        /// When its first channel started.
        start_ns: u64,
    },
    /// It is done; if it is captured, this replay is, and no later one has begun.
    Completed { replay: u32 },
}

/// The orders of the places where order counts. Others than [`Orders::RIGHT`] are for the model, which must catch them.
#[derive(Clone, Copy, Debug)]
struct Orders {
    /// Store of the replay's number: who sees it sees that the replay before is over.
    number: Ordering,
    /// Store of the start: who sees it sees the number of the replay.
    begin: Ordering,
    /// Store of what is completed: who sees it sees the start of that replay, or later ones.
    complete: Ordering,
    /// Store of no start: who sees that it runs no more sees that it is completed, and all that was done before.
    end: Ordering,
    /// The first load of what is completed, for `complete`.
    look_completed: Ordering,
    /// Load of the start, for `begin` and `end`.
    look: Ordering,
    /// Load of the number. If it is that of a later replay, the end of the one that the start is of is seen afterwards, and the two are
    /// not taken for one.
    look_number: Ordering,
}

impl Orders {
    const RIGHT: Self = Self {
        number: Ordering::Release,
        begin: Ordering::Release,
        complete: Ordering::Release,
        end: Ordering::Release,
        look_completed: Ordering::Acquire,
        look: Ordering::Acquire,
        look_number: Ordering::Acquire,
    };
}

impl OpProgress {
    /// A channel has started; whether it is the first one, whose time is kept. The replay is the same from all channels.
    pub(crate) fn begin(&self, replay: u32, now: u64) -> bool {
        self.begin_with(Orders::RIGHT, replay, now)
    }

    fn begin_with(&self, orders: Orders, replay: u32, now: u64) -> bool {
        self.replay.store(replay, orders.number);
        self.start_ns
            .compare_exchange(0, now, orders.begin, Ordering::Relaxed)
            .is_ok()
    }

    /// It is completed; when it had started, 0 if it had not. The next replay may begin.
    pub(crate) fn end(&self, replay: u32) -> u64 {
        self.end_with(Orders::RIGHT, replay)
    }

    fn end_with(&self, orders: Orders, replay: u32) -> u64 {
        self.completed.store(replay.wrapping_add(1), orders.complete);
        self.start_ns.swap(0, orders.end)
    }

    /// Whether this replay, or any if none is given, has been completed: for the thread that says so, or who comes after it.
    pub(crate) fn is_completed(&self, replay: Option<u32>) -> bool {
        let completed = self.completed.load(Ordering::Relaxed);
        replay.map_or(completed != 0, |replay| completed == replay.wrapping_add(1))
    }

    /// Where it is.
    pub(crate) fn seen(&self) -> Seen {
        self.seen_with(Orders::RIGHT)
    }

    fn seen_with(&self, orders: Orders) -> Seen {
        loop {
            let completed = self.completed.load(orders.look_completed);
            let start_ns = self.start_ns.load(orders.look);
            if start_ns != 0 {
                let replay = self.replay.load(orders.look_number);
                if self.start_ns.load(Ordering::Relaxed) == start_ns {
                    return Seen::InProgress { replay, start_ns };
                }
            } else if self.completed.load(Ordering::Relaxed) == completed {
                // The same before it was seen not to run and afterwards: no later replay is about to be completed, which would be seen to run
                // at the next look.
                return match completed {
                    0 => Seen::NotReached,
                    completed => Seen::Completed {
                        replay: completed - 1,
                    },
                };
            }
            spin_loop();
        }
    }
}

/// `loom` tries every order that the memory model allows; built with the models of `ringsight-records`.
#[cfg(all(test, loom))]
mod model {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use loom::{sync::Arc, thread};

    use super::*;

    /// Two replays, and somebody who looks twice meanwhile: what is seen is of one replay, and never goes back.
    fn replays_are_seen(orders: Orders) {
        let mut model = loom::model::Builder::new();
        // Whoever is kept from going on more often is seen in no other place.
        model.preemption_bound = Some(2);
        model.check(move || {
            let progress: Arc<OpProgress> = Arc::default();
            let result = Arc::new(AtomicU32::new(0));
            let device = {
                let (progress, result) = (progress.clone(), result.clone());
                thread::spawn(move || {
                    for replay in 1..=2 {
                        assert!(progress.begin_with(orders, replay, u64::from(replay) * 10));
                        result.store(replay, Ordering::Relaxed);
                        assert_eq!(progress.end_with(orders, replay), u64::from(replay) * 10);
                    }
                })
            };
            let mut before = 0;
            for _ in 0..2 {
                let place = match progress.seen_with(orders) {
                    Seen::NotReached => 0,
                    Seen::InProgress { replay, start_ns } => {
                        assert_eq!(start_ns, u64::from(replay) * 10, "of two replays");
                        2 * replay - 1
                    }
                    Seen::Completed { replay } => {
                        assert!(
                            result.load(Ordering::Relaxed) >= replay,
                            "what it did is not there"
                        );
                        2 * replay
                    }
                    Seen::Launched { .. } => unreachable!("events alone tell this"),
                };
                assert!(place >= before, "{place} after {before}");
                before = place;
            }
            device.join().unwrap();
            assert_eq!(progress.seen(), Seen::Completed { replay: 2 });
        });
    }

    #[test]
    fn model_of_replays_and_who_looks() {
        replays_are_seen(Orders::RIGHT);
    }

    #[test]
    fn model_catches_weaker_orders() {
        let right = Orders::RIGHT;
        let relaxed = Ordering::Relaxed;
        for weak in [
            Orders {
                number: relaxed,
                ..right
            },
            Orders {
                begin: relaxed,
                ..right
            },
            Orders {
                complete: relaxed,
                ..right
            },
            Orders {
                look_completed: relaxed,
                ..right
            },
            Orders {
                end: relaxed,
                ..right
            },
            Orders {
                look: relaxed,
                ..right
            },
            Orders {
                look_number: relaxed,
                ..right
            },
        ] {
            let caught = catch_unwind(AssertUnwindSafe(|| replays_are_seen(weak)));
            assert!(caught.is_err(), "{weak:?}");
        }
    }
}
