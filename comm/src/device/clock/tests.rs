use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;
/// Far from zero, as timers are that count from 1970.
const EPOCH: u64 = 1_790_000_000_000_000_000;

/// A timer and a host's clock that are as they are said to be.
#[derive(Clone, Copy, Debug)]
struct Clocks {
    /// The host's time when the timer was at [`EPOCH`].
    start_ns: u64,
    /// What the host gains in a nanosecond of the timer.
    drift: f64,
    /// Steps of the timer.
    step_ns: u64,
}

impl Clocks {
    /// The host's time `away` nanoseconds of the timer after its epoch.
    fn host(&self, away: u64) -> u64 {
        (self.start_ns + away).wrapping_add_signed((away as f64 * self.drift).round() as i64)
    }

    fn reading(&self, away: u64) -> u64 {
        EPOCH + away / self.step_ns * self.step_ns
    }

    /// A sample that was asked for so long before the timer was read, and answered so long after.
    fn sample(&self, away: u64, (before, after): (u64, u64)) -> ClockSample {
        let host = self.host(away);
        ClockSample {
            before_ns: host - before,
            timer_ns: self.reading(away),
            after_ns: host + after,
        }
    }

    /// How far off a clock is for what happens then.
    fn error(&self, clock: &DeviceClock, away: u64) -> u64 {
        clock.host_ns(self.reading(away)).abs_diff(self.host(away))
    }
}

fn clocks() -> impl Strategy<Value = Clocks> {
    (
        10 * SECOND..1 << 50,
        -400e-6..400e-6,
        prop::sample::select(vec![1, 32, 1024]),
    )
        .prop_map(|(start_ns, drift, step_ns)| Clocks {
            start_ns,
            drift,
            step_ns,
        })
}

/// Most are quick, and as long on one side as on the other or not; some took a millisecond somewhere.
fn delays() -> impl Strategy<Value = (u64, u64)> {
    let quick = || 300..3_000_u64;
    prop_oneof![8 => (quick(), quick()), 1 => (quick(), 3_000..1_000_000_u64), 1 => (3_000..1_000_000_u64, quick())]
}

#[test]
fn the_bound_shrinks_to_what_samples_say() {
    let clocks = Clocks {
        start_ns: 77 * SECOND,
        drift: 12.5e-6,
        step_ns: 32,
    };
    let mut fit = Fit::default();
    assert_eq!(fit.clock(), None);
    fit.add(clocks.sample(0, (700, 900)), 32);
    let first = *fit.clock().unwrap();
    assert!(first.uncertainty_ns < 850, "{first:?}");
    assert_eq!(first.drift_uncertainty / 1_000_000, 600, "all that clocks may do");
    for second in 1..=10 {
        fit.add(clocks.sample(second * SECOND, (700 + second % 3 * 100, 900)), 32);
    }
    let clock = *fit.clock().unwrap();
    assert_eq!((clock.samples, clock.breaks, clock.resolution_ns), (11, 0, 32));
    assert!(clock.drift.abs_diff(12_500_000) < 100_000, "{clock:?}");
    assert!(clock.drift_uncertainty < 700_000, "0.7 ppm: {clock:?}");
    assert!(clock.uncertainty_ns < 900, "{clock:?}");
    assert!(clocks.error(&clock, 11 * SECOND) <= clock.uncertainty_at(EPOCH + 11 * SECOND));
}

/// A slow sample is no better than it is, and takes nothing from the others.
#[test]
fn slow_samples_do_no_harm() {
    let clocks = Clocks {
        start_ns: 77 * SECOND,
        drift: -3e-6,
        step_ns: 1,
    };
    let fit = |slow: bool| {
        let mut fit = Fit::default();
        for second in 0..=12 {
            let after = if slow && second % 2 == 1 { 5_000_000 } else { 800 };
            fit.add(clocks.sample(second * SECOND, (800, after)), 1);
        }
        *fit.clock().unwrap()
    };
    let (quick, slow) = (fit(false), fit(true));
    assert_eq!((quick.breaks, slow.breaks), (0, 0));
    assert!(
        slow.uncertainty_ns <= quick.uncertainty_ns + 100,
        "{quick:?} {slow:?}"
    );
}

#[test]
fn a_clock_that_is_set_or_slewed_is_a_break() {
    let clocks = Clocks {
        start_ns: 77 * SECOND,
        drift: 5e-6,
        step_ns: 32,
    };
    type Change = Box<dyn Fn(ClockSample) -> ClockSample>;
    let changes: [(&str, Change); 4] = [
        (
            "the timer began anew",
            Box::new(|sample| ClockSample {
                timer_ns: sample.timer_ns - EPOCH + 5,
                ..sample
            }),
        ),
        (
            "the timer went ahead by 50 µs",
            Box::new(|sample| ClockSample {
                timer_ns: sample.timer_ns + 50_000,
                ..sample
            }),
        ),
        (
            "the timer went back by 50 µs",
            Box::new(|sample| ClockSample {
                timer_ns: sample.timer_ns - 50_000,
                ..sample
            }),
        ),
        (
            "the host's clock is slewed by 40 ppm",
            Box::new(|sample| {
                let gained = (sample.timer_ns - EPOCH - 20 * SECOND) / 25_000;
                ClockSample {
                    before_ns: sample.before_ns + gained,
                    after_ns: sample.after_ns + gained,
                    ..sample
                }
            }),
        ),
    ];
    for (name, change) in changes {
        let mut fit = Fit::default();
        for second in 0..20 {
            fit.add(clocks.sample(second * SECOND, (700, 700)), 32);
        }
        assert_eq!(fit.clock().unwrap().breaks, 0);
        for second in 20..30 {
            let truth = change(clocks.sample(second * SECOND, (0, 0)));
            fit.add(change(clocks.sample(second * SECOND, (700, 700))), 32);
            let clock = fit.clock().unwrap();
            // Whatever happened: the newest sample is certain.
            let error = clock.host_ns(truth.timer_ns).abs_diff(truth.before_ns);
            assert!(
                error <= 1_500,
                "{name}: off by {error} ns at {second} s, {clock:?}"
            );
            if second > 25 {
                assert!((1..4).contains(&clock.breaks), "{name}: {clock:?}");
                assert!(error <= clock.uncertainty_at(truth.timer_ns), "{name}: {clock:?}");
            }
        }
    }
}

#[test]
fn a_sample_that_ends_before_it_began_says_nothing() {
    let mut fit = Fit::default();
    fit.add(
        ClockSample {
            before_ns: 10,
            timer_ns: 5,
            after_ns: 9,
        },
        1,
    );
    assert_eq!(fit.clock(), None);
}

proptest! {
    /// Between samples, and for seconds after the last, the line is within its bound.
    #[test]
    fn the_line_is_within_its_bound(
        clocks in clocks(),
        samples in prop::collection::vec((1_000_000..2 * SECOND, delays()), 1..60),
        later in 0..5 * SECOND,
    ) {
        let (mut fit, mut away) = (Fit::default(), 0);
        for (gap, delays) in samples {
            let before = away;
            away += gap;
            fit.add(clocks.sample(away, delays), clocks.step_ns);
            let clock = fit.clock().unwrap();
            prop_assert_eq!(clock.breaks, 0);
            for moment in [away, away + later, before + gap / 2] {
                let (error, bound) = (clocks.error(clock, moment), clock.uncertainty_at(clocks.reading(moment)));
                prop_assert!(error <= bound, "off by {} ns, bound {} ns, {:?}", error, bound, clock);
            }
        }
    }

    /// So it is where the rate changes by as much as it may, either way.
    #[test]
    fn what_clocks_may_wander_is_within_the_bound(
        clocks in clocks(),
        wander in prop::collection::vec((-1.0..1.0_f64, delays()), 2..50),
    ) {
        let (mut fit, mut gained) = (Fit::default(), 0.0);
        for (second, (share, delays)) in (0..).zip(wander) {
            // The host's clock has gained this much more by the end of each second.
            gained += share * WANDER / 2.0 * SECOND as f64;
            let wandered = |host: u64| host.wrapping_add_signed(gained.round() as i64);
            let sample = clocks.sample(second * SECOND, delays);
            fit.add(
                ClockSample {
                    before_ns: wandered(sample.before_ns),
                    after_ns: wandered(sample.after_ns),
                    ..sample
                },
                clocks.step_ns,
            );
            let clock = fit.clock().unwrap();
            prop_assert_eq!(clock.breaks, 0);
            let reading = clocks.reading(second * SECOND);
            let error = clock.host_ns(reading).abs_diff(wandered(clocks.host(second * SECOND)));
            prop_assert!(error <= clock.uncertainty_at(reading), "{} {:?}", error, clock);
        }
    }

    /// Whatever comes: no panic, and the newest sample is where it was.
    #[test]
    fn rubbish_is_taken(samples in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 1..50)) {
        let mut fit = Fit::default();
        for (before_ns, timer_ns, after_ns) in samples {
            fit.add(ClockSample { before_ns, timer_ns, after_ns }, 32);
            if let Some(clock) = fit.clock() {
                let _ = (clock.host_ns(0), clock.uncertainty_at(u64::MAX));
            }
        }
    }
}
