//! How a device's timer stands to the host's clock: what the process that drives the device last found, for readers of its
//! pages.

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// A line through what two clocks showed, and how far off it can be; 64 bytes.
///
/// It holds as long as both clocks go on as they did: what it says of a time is off by [`DeviceClock::uncertainty_at`] at
/// most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct DeviceClock {
    /// A reading of the device's timer, nanoseconds.
    pub timer_ns: u64,
    /// `CLOCK_MONOTONIC` when the timer came to it.
    pub host_ns: u64,
    /// How many nanoseconds more than the timer the host's clock gains in 10¹² of the timer.
    pub drift: i64,
    /// How far off [`DeviceClock::host_ns`] can be.
    pub uncertainty_ns: u64,
    /// How far off [`DeviceClock::drift`] can be, in its unit.
    pub drift_uncertainty: u64,
    /// The timer's step, nanoseconds: what happened at a reading may have happened so much later.
    pub resolution_ns: u64,
    /// Readings of both clocks that it rests on; 0 where both are one clock.
    pub samples: u64,
    /// How often the clocks did not go on as before, and earlier readings were dropped.
    pub breaks: u64,
}

/// Unit of [`DeviceClock::drift`].
const DRIFT_UNIT: i128 = 1_000_000_000_000;

impl DeviceClock {
    /// That of a device whose timer is the host's clock.
    #[must_use]
    pub const fn of_host() -> Self {
        Self {
            timer_ns: 0,
            host_ns: 0,
            drift: 0,
            uncertainty_ns: 0,
            drift_uncertainty: 0,
            resolution_ns: 1,
            samples: 0,
            breaks: 0,
        }
    }

    /// `CLOCK_MONOTONIC` when the device's timer was at `timer_ns`. Wraps for rubbish.
    #[must_use]
    pub const fn host_ns(&self, timer_ns: u64) -> u64 {
        let away = timer_ns.wrapping_sub(self.timer_ns).cast_signed();
        let gained = away as i128 * self.drift as i128 / DRIFT_UNIT;
        self.host_ns
            .wrapping_add_signed(away)
            .wrapping_add_signed(gained as i64)
    }

    /// How far off [`DeviceClock::host_ns`] can be for something that happened at that reading, the timer's step included.
    #[must_use]
    pub const fn uncertainty_at(&self, timer_ns: u64) -> u64 {
        let away = timer_ns.wrapping_sub(self.timer_ns).cast_signed().unsigned_abs();
        let grown = away as u128 * self.drift_uncertainty as u128 / DRIFT_UNIT as u128;
        self.uncertainty_ns
            .saturating_add(self.resolution_ns)
            .saturating_add(if grown > u64::MAX as u128 {
                u64::MAX
            } else {
                grown as u64
            })
    }
}

const WORDS: usize = size_of::<DeviceClock>() / 8;
const _: () = assert!(size_of::<DeviceClock>() == 64 && align_of::<DeviceClock>() == 8);

/// What the pages say of one device: its clock, under a sequence lock like that of
/// [`DescriptionSlot`](crate::DescriptionSlot), and a counter; 128 bytes.
///
/// There is one writer, the thread that keeps the device's clock.
#[derive(Debug)]
#[repr(C)]
pub struct DeviceSlot {
    version: AtomicU64,
    words: [AtomicU64; WORDS],
    /// Starts and ends of operations that the device wrote over older ones before these were read. Those operations are told
    /// without their device times.
    pub overwritten: AtomicU64,
    reserved: [u64; 6],
}

const _: () = assert!(size_of::<DeviceSlot>() == 128);

impl DeviceSlot {
    /// Replaces the clock.
    pub fn write(&self, clock: &DeviceClock) {
        let version = self.version.load(Ordering::Relaxed) | 1;
        // Odd version first, then the words, as in `DescriptionSlot::write`.
        self.version.store(version, Ordering::Relaxed);
        fence(Ordering::Release);
        // SAFETY: `DeviceClock` is `repr(C)`, a multiple of 8 bytes, without padding, and plain data.
        let words = unsafe { &*core::ptr::from_ref(clock).cast::<[u64; WORDS]>() };
        for (slot, word) in self.words.iter().zip(words) {
            slot.store(*word, Ordering::Relaxed);
        }
        // Release: whoever reads this even version also reads the words above.
        self.version.store(version.wrapping_add(1), Ordering::Release);
    }

    /// The clock; `None` if there is none yet or it is being rewritten without end.
    #[must_use]
    pub fn read(&self) -> Option<DeviceClock> {
        for _ in 0..64 {
            // Acquire: the words read below are at least as new as this version.
            let before = self.version.load(Ordering::Acquire);
            if before & 1 == 1 {
                core::hint::spin_loop();
                continue;
            }
            let words = self.words.each_ref().map(|word| word.load(Ordering::Relaxed));
            // Pairs with the writer's release fence, as in `DescriptionSlot::read`.
            fence(Ordering::Acquire);
            if self.version.load(Ordering::Relaxed) == before {
                // SAFETY: `DeviceClock` is plain data of exactly `WORDS` words; every bit pattern is valid.
                let clock = unsafe { core::mem::transmute::<[u64; WORDS], DeviceClock>(words) };
                return (before != 0).then_some(clock);
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn times_and_uncertainties_are_on_the_line() {
        let clock = DeviceClock {
            timer_ns: 1_700_000_000_000_000_000,
            host_ns: 5_000_000_000,
            // 20 ppm.
            drift: 20_000_000,
            uncertainty_ns: 700,
            // 0.5 ppm.
            drift_uncertainty: 500_000,
            resolution_ns: 32,
            samples: 9,
            breaks: 0,
        };
        let second = 1_000_000_000;
        assert_eq!(clock.host_ns(clock.timer_ns), 5_000_000_000);
        assert_eq!(clock.host_ns(clock.timer_ns + second), 6_000_020_000);
        assert_eq!(clock.host_ns(clock.timer_ns - second), 3_999_980_000);
        assert_eq!(clock.uncertainty_at(clock.timer_ns), 732);
        assert_eq!(clock.uncertainty_at(clock.timer_ns + second), 1232);
        assert_eq!(clock.uncertainty_at(clock.timer_ns - 2 * second), 1732);
        let host = DeviceClock::of_host();
        assert_eq!((host.host_ns(77), host.uncertainty_at(77)), (77, 1));
        // Rubbish in the pages of a damaged target: some number, and no panic.
        let rubbish = DeviceClock {
            timer_ns: u64::MAX,
            host_ns: u64::MAX,
            drift: i64::MIN,
            uncertainty_ns: u64::MAX,
            drift_uncertainty: u64::MAX,
            resolution_ns: u64::MAX,
            samples: u64::MAX,
            breaks: u64::MAX,
        };
        for timer in [0, 1, u64::MAX / 2, u64::MAX] {
            let _ = rubbish.host_ns(timer);
            assert_eq!(rubbish.uncertainty_at(timer), u64::MAX);
        }
    }

    #[test]
    fn a_slot_holds_what_was_written_last() {
        // SAFETY: atomics and integers; zero is a value of each.
        let slot: DeviceSlot = unsafe { core::mem::zeroed() };
        assert_eq!(slot.read(), None);
        for samples in 1..4 {
            let clock = DeviceClock {
                samples,
                ..DeviceClock::of_host()
            };
            slot.write(&clock);
            assert_eq!(slot.read(), Some(clock));
        }
        // A writer that is in the middle of it, or died there.
        slot.version.store(9, Ordering::Relaxed);
        assert_eq!(slot.read(), None);
    }
}
