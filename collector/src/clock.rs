//! Monotonic to wall-clock time.
//!
//! Records carry `CLOCK_MONOTONIC`; spans need Unix time. A sample of the offset between the two is the tightest of five
//! bracketed reads; samples are taken each second and times between two of them are interpolated, so that a slewed wall
//! clock does not make spans jump. A step of the wall clock (more than [`STEP_NS`] in one interval) is not smeared over the
//! interval: times before it keep the old offset.

use std::collections::VecDeque;

/// A change of offset between two samples beyond this is a step, not a slew (NTP slews at most 500 ppm).
pub const STEP_NS: i64 = 2_000_000;
/// How often a sample is due.
pub const INTERVAL_NS: u64 = 1_000_000_000;
/// How much later than it was told the time is at most, when something that has happened is taken in.
const AHEAD_NS: u64 = 1_000_000_000;
/// Samples kept: operations that began longer ago are converted with the oldest.
const SAMPLES: usize = 600;

/// One reading of both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockSample {
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub monotonic_ns: u64,
    /// Wall clock minus monotonic clock, nanoseconds.
    pub offset_ns: i64,
    /// Half the bracket of the reading: how far off the offset can be.
    pub uncertainty_ns: u64,
}

/// Converts monotonic to Unix nanoseconds.
#[derive(Clone, Debug)]
pub struct Clock {
    samples: VecDeque<ClockSample>,
    /// When it was last told what time it is.
    now_ns: u64,
    /// Nothing that has happened is later than this.
    latest_ns: u64,
}

impl Clock {
    /// A clock that knows one sample.
    #[must_use]
    pub fn new(sample: ClockSample) -> Self {
        Self {
            samples: VecDeque::from([sample]),
            now_ns: sample.monotonic_ns,
            latest_ns: u64::MAX,
        }
    }

    /// A clock with a fixed offset, for recorded or synthetic records.
    #[must_use]
    pub fn fixed(offset_ns: i64) -> Self {
        Self::new(ClockSample {
            monotonic_ns: 0,
            offset_ns,
            uncertainty_ns: 0,
        })
    }

    /// This machine's clock, read now.
    #[must_use]
    pub fn system() -> Self {
        Self::new(read())
    }

    /// Adds a sample; one that is not newer than the last is ignored.
    pub fn push(&mut self, sample: ClockSample) {
        if self
            .samples
            .back()
            .is_none_or(|last| last.monotonic_ns < sample.monotonic_ns)
        {
            if self.samples.len() == SAMPLES {
                self.samples.pop_front();
            }
            self.samples.push_back(sample);
        }
    }

    /// Takes a sample of this machine's clocks if one is due at `now_ns`.
    pub fn refresh(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        self.latest_ns = self.now_ns.saturating_add(AHEAD_NS);
        if self.latest().monotonic_ns.saturating_add(INTERVAL_NS) <= now_ns {
            self.push(read());
        }
    }

    /// Unix nanoseconds of a monotonic time.
    #[must_use]
    pub fn unix_ns(&self, monotonic_ns: u64) -> u64 {
        monotonic_ns.wrapping_add_signed(self.offset_at(monotonic_ns))
    }

    /// When something that happened at a monotonic time is taken in, Unix nanoseconds: by the last [`Clock::refresh`], but never
    /// before it happened.
    #[must_use]
    pub fn observed_unix_ns(&self, monotonic_ns: u64) -> u64 {
        self.unix_ns(monotonic_ns.max(self.now_ns))
    }

    /// What has happened has happened by then, monotonic nanoseconds: a second after the last [`Clock::refresh`]. A clock that is never
    /// told the time knows no such moment, and gives the last of all.
    #[inline]
    #[must_use]
    pub fn latest_ns(&self) -> u64 {
        self.latest_ns
    }

    /// How far off [`Clock::unix_ns`] can be at the moment.
    #[must_use]
    pub fn uncertainty_ns(&self) -> u64 {
        self.latest().uncertainty_ns
    }

    fn latest(&self) -> &ClockSample {
        // There is one from the start, and none is removed without another being added.
        self.samples.back().expect("a clock holds a sample")
    }

    fn offset_at(&self, monotonic_ns: u64) -> i64 {
        let latest = self.latest();
        if monotonic_ns >= latest.monotonic_ns {
            return latest.offset_ns;
        }
        let mut after = latest;
        // From the newest: what is converted is recent.
        for before in self.samples.iter().rev().skip(1) {
            if monotonic_ns >= before.monotonic_ns {
                let change = after.offset_ns - before.offset_ns;
                if change.abs() > STEP_NS {
                    return before.offset_ns;
                }
                let span = i128::from(after.monotonic_ns - before.monotonic_ns);
                let part = i128::from(monotonic_ns - before.monotonic_ns);
                return before.offset_ns + (i128::from(change) * part / span) as i64;
            }
            after = before;
        }
        after.offset_ns
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds.
#[must_use]
pub fn monotonic_ns() -> u64 {
    read_clock(libc::CLOCK_MONOTONIC)
}

/// The tightest of five bracketed reads of both clocks.
#[must_use]
pub fn read() -> ClockSample {
    let one = || {
        let before = read_clock(libc::CLOCK_MONOTONIC);
        let wall = read_clock(libc::CLOCK_REALTIME);
        let after = read_clock(libc::CLOCK_MONOTONIC);
        let middle = before + (after - before) / 2;
        ClockSample {
            monotonic_ns: middle,
            offset_ns: wall.wrapping_sub(middle).cast_signed(),
            uncertainty_ns: (after - before).div_ceil(2),
        }
    };
    let mut best = one();
    for _ in 0..4 {
        let next = one();
        if next.uncertainty_ns < best.uncertainty_ns {
            best = next;
        }
    }
    best
}

fn read_clock(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec to write to; both clocks always exist.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: u64, offset_ns: i64) -> ClockSample {
        ClockSample {
            monotonic_ns: seconds * 1_000_000_000,
            offset_ns,
            uncertainty_ns: 10,
        }
    }

    #[test]
    fn interpolates_a_slew_and_keeps_a_step_a_step() {
        let mut clock = Clock::new(at(1, 1_000_000_000));
        clock.push(at(2, 1_000_400_000));
        clock.push(at(3, 5_000_000_000));
        assert_eq!(clock.unix_ns(1_500_000_000), 1_500_000_000 + 1_000_200_000);
        assert_eq!(
            clock.unix_ns(2_500_000_000),
            2_500_000_000 + 1_000_400_000,
            "before the step"
        );
        assert_eq!(clock.unix_ns(3_000_000_000), 8_000_000_000, "after it");
        assert_eq!(
            clock.unix_ns(500_000_000),
            1_500_000_000,
            "before the first sample"
        );
        clock.push(at(3, 0));
        assert_eq!(
            clock.unix_ns(3_000_000_000),
            8_000_000_000,
            "an older sample is ignored"
        );
    }

    #[test]
    fn the_machines_clock_is_within_its_own_uncertainty() {
        let clock = Clock::system();
        let before = read_clock(libc::CLOCK_REALTIME);
        let converted = clock.unix_ns(monotonic_ns());
        let after = read_clock(libc::CLOCK_REALTIME);
        // A slew within this test is below a microsecond.
        let slack = clock.uncertainty_ns() + 1_000;
        assert!(
            before - slack <= converted && converted <= after + slack,
            "{before} {converted} {after}"
        );
    }

    proptest! {
        #[test]
        fn order_is_kept_under_slews(
            slews in prop::collection::vec(-500_000i64..500_000, 1..30),
            mut times in prop::collection::vec(0u64..40_000_000_000, 2..50),
        ) {
            let mut clock = Clock::fixed(1_700_000_000_000_000_000);
            let mut offset = 1_700_000_000_000_000_000;
            for (second, slew) in (1..).zip(slews) {
                offset += slew;
                clock.push(at(second, offset));
            }
            times.sort_unstable();
            for pair in times.windows(2) {
                prop_assert!(clock.unix_ns(pair[0]) <= clock.unix_ns(pair[1]));
            }
        }
    }
}
