//! Waiting.

use std::{
    thread,
    time::{Duration, Instant},
};

/// How a kernel waits for its peers: some spins for a peer on another core, then yields for a peer that shares this
/// core, then sleeps that grow with the wait, so that a rank that waits 80 ms for a late one costs next to nothing.
#[derive(Default)]
pub(super) struct Backoff {
    pauses: u32,
    /// When spinning ended.
    since: Option<Instant>,
}

impl Backoff {
    /// Some microseconds: a peer that does the same as this rank is no later than that, and a yield takes one, also where
    /// there is nobody to yield to.
    const SPINS: u32 = 100;
    /// Longer than a ring step of a crowd of ranks takes: once one rank of a ring sleeps, its peers wait longer, sleep
    /// too, and all go on at the pace of timers (8 ranks on 2 cores: 5 to 10 times slower with 100 µs here).
    const YIELD_FOR: Duration = Duration::from_micros(500);
    /// A sleep is this part of the wait so far: what oversleeping adds to a wait stays near 3 %.
    const SLEEP_PART: u32 = 32;
    const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
    const LONGEST_SLEEP: Duration = Duration::from_micros(500);

    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Waits for a moment; whether the wait is a long one by now.
    pub(super) fn pause(&mut self) -> bool {
        if self.pauses < Self::SPINS {
            self.pauses += 1;
            std::hint::spin_loop();
            return false;
        }
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if waited < Self::YIELD_FOR {
            thread::yield_now();
            return false;
        }
        thread::sleep((waited / Self::SLEEP_PART).clamp(Self::SHORTEST_SLEEP, Self::LONGEST_SLEEP));
        true
    }
}
