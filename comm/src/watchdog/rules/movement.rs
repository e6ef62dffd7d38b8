//! When something last moved, and which time does not count.

use std::time::Duration;

/// When a plan last moved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LastMove {
    /// `CLOCK_MONOTONIC` nanoseconds.
    at_ns: u64,
    /// The plan's count of moves at that time.
    count: u64,
}

impl LastMove {
    /// Of a plan that is launched now, with its present count of moves.
    pub(crate) fn at_launch(now_ns: u64, count: u64) -> Self {
        Self { at_ns: now_ns, count }
    }

    /// Takes the count of moves at a look. `lost_ns` of the time since the look before do not count.
    pub(crate) fn look(&mut self, now_ns: u64, count: u64, lost_ns: u64) {
        if count == self.count {
            self.at_ns = now_ns.min(self.at_ns + lost_ns);
        } else {
            *self = Self { at_ns: now_ns, count };
        }
    }

    /// For how long an operation of the plan, which began at `start_ns`, has not moved; 0 if it moved since the last look.
    pub(crate) fn still_ns(&self, now_ns: u64, count: u64, start_ns: u64) -> u64 {
        if count == self.count {
            now_ns.saturating_sub(self.at_ns.max(start_ns))
        } else {
            0
        }
    }
}

/// How much time the machine took from this process: what did not move meanwhile need not be stuck.
#[derive(Debug, Default)]
pub(crate) struct LostTime {
    /// When the watchdog looked last, 0 if it never did.
    looked_ns: u64,
    /// For how long kernels had been kept from running until then.
    kept: Duration,
}

impl LostTime {
    /// Nanoseconds that were lost since the look before. The watchdog looks every `rest`; a look that is later than twice
    /// that was kept from running. `kept` is for how long kernels have been kept from running, in all.
    pub(crate) fn look(&mut self, now_ns: u64, rest: Duration, kept: Duration) -> u64 {
        let since = if self.looked_ns == 0 {
            now_ns
        } else {
            self.looked_ns
        };
        let passed_ns = now_ns.saturating_sub(since);
        let late_ns = passed_ns.saturating_sub(2 * rest.as_nanos() as u64);
        let kept_ns = kept.saturating_sub(self.kept).as_nanos() as u64;
        (self.looked_ns, self.kept) = (now_ns, self.kept.max(kept));
        // A wait of a kernel is known when it is over, and waits of several threads overlap: no more is lost than passed.
        late_ns.max(kept_ns).min(passed_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn time_in_which_the_machine_ran_something_else_is_lost() {
        let mut lost = LostTime::default();
        let rest = Duration::from_millis(50);
        let mut look = |at_ms: u64, kept_ms| lost.look(at_ms * MS, rest, Duration::from_millis(kept_ms)) / MS;
        assert_eq!(look(1000, 70), 0, "the first look has nothing to compare with");
        assert_eq!(look(1050, 70), 0);
        assert_eq!(look(1100, 110), 40, "kernels did not run");
        assert_eq!(look(1500, 110), 300, "the watchdog did not run");
        assert_eq!(look(1900, 460), 350, "neither ran: the longer of both counts");
        assert_eq!(look(1950, 460), 0);
        assert_eq!(look(2000, 760), 50, "no more than passed");
    }

    #[test]
    fn stillness_counts_from_the_last_move_or_the_start() {
        let mut last = LastMove::at_launch(100, 7);
        assert_eq!(
            last.still_ns(500, 7, 300),
            200,
            "it has not moved since it started"
        );
        assert_eq!(last.still_ns(500, 8, 300), 0, "it moved after the last look");
        last.look(600, 8, 0);
        assert_eq!(last.still_ns(900, 8, 300), 300);
        last.look(900, 8, 250);
        assert_eq!(last.still_ns(1000, 8, 300), 150, "250 ns were lost");
        last.look(1000, 8, 5000);
        assert_eq!(last.still_ns(1000, 8, 300), 0, "never later than now");
    }
}
