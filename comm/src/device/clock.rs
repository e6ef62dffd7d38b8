//! How a device's timer stands to `CLOCK_MONOTONIC`, found by reading one between two readings of the other.
//!
//! What is known of a sample is certain: the timer came to its reading between the two readings of the host's clock. If both
//! clocks go on evenly, the host's is a line over the timer that passes through the brackets of all samples. [`Fit`] keeps the
//! range of such lines, and gives the middle of it with half its width as the bound. No sample is taken for better than it is,
//! so a slow one (a thread that was interrupted, a busy bus) does no harm: its wide bracket says little.
//!
//! Clocks do not go on evenly for ever. What may have happened since a sample widens its bracket with its age ([`WANDER`]); and
//! where no line passes through all brackets (a clock was set, its rate was changed) the oldest samples go until one does.

use std::collections::VecDeque;

use ringsight_records::DeviceClock;

/// How far the rates of two clocks can be apart: crystals are off by 50 ppm, and NTP slews `CLOCK_MONOTONIC` by up to 500.
const MOST_DRIFT: f64 = 600e-6;
/// By how much the difference of the rates may change without being noticed: what crystals do as they get warm.
const WANDER: f64 = 0.1e-6;
/// What took longer than this says nothing, nanoseconds.
const MOST_WIDTH: u64 = 10_000_000_000;
/// Samples kept. One a second is taken, and older ones would say little.
const SAMPLES: usize = 32;

/// One reading of the device's timer between two of the host's clock; nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockSample {
    pub(crate) before_ns: u64,
    pub(crate) timer_ns: u64,
    pub(crate) after_ns: u64,
}

impl ClockSample {
    /// How much it leaves open.
    pub(crate) fn width_ns(&self) -> u64 {
        self.after_ns.saturating_sub(self.before_ns)
    }
}

/// The lines that pass through the brackets of all samples.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fit {
    /// By the timer's reading.
    samples: VecDeque<ClockSample>,
    /// The timer's step.
    resolution_ns: u64,
    breaks: u64,
    clock: Option<DeviceClock>,
}

/// Of the host's time minus the timer, relative to some number: at the newest sample, and how it grows.
#[derive(Clone, Copy)]
struct Lines {
    offset: (f64, f64),
    slope: (f64, f64),
}

impl Fit {
    /// What is known now; `None` before the first sample.
    pub(crate) fn clock(&self) -> Option<&DeviceClock> {
        self.clock.as_ref()
    }

    /// Takes in a sample, newer than all before, of a timer that goes on in steps of `resolution_ns`. One that says nothing (it
    /// took for ever, or ended before it began) is ignored.
    pub(crate) fn add(&mut self, sample: ClockSample, resolution_ns: u64) {
        if sample.after_ns < sample.before_ns || sample.width_ns() > MOST_WIDTH || resolution_ns > MOST_WIDTH
        {
            return;
        }
        self.resolution_ns = self.resolution_ns.max(resolution_ns);
        // A timer or a clock that went back has been set.
        let earlier =
            |last: &ClockSample| last.timer_ns >= sample.timer_ns || last.after_ns > sample.after_ns;
        if self.samples.back().is_some_and(earlier) {
            self.samples.clear();
            self.breaks += 1;
        }
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(sample);
        let mut broken = false;
        let lines = loop {
            match self.lines() {
                Some(lines) => break lines,
                // The newest alone has lines.
                None if self.samples.len() == 1 => return,
                None => {
                    broken = true;
                    self.samples.pop_front();
                }
            }
        };
        self.breaks += u64::from(broken);
        self.clock = Some(self.middle(sample, lines));
    }

    /// The bracket of the host's time minus the timer at a sample, relative to that of the newest one's beginning, as far as it
    /// says something about now; with how long ago it was.
    fn bracket(&self, sample: &ClockSample, newest: &ClockSample) -> (f64, f64, f64) {
        let age = (newest.timer_ns - sample.timer_ns) as f64;
        let relative = |host_ns: u64| {
            let host = host_ns.wrapping_sub(newest.before_ns).cast_signed();
            let timer = sample.timer_ns.wrapping_sub(newest.timer_ns).cast_signed();
            host.wrapping_sub(timer) as f64
        };
        let wander = age * WANDER;
        // The timer may have come to its reading a step ago.
        let low = relative(sample.before_ns) - self.resolution_ns as f64 - wander;
        (low, relative(sample.after_ns) + wander, age)
    }

    /// `None` if no line passes through all brackets. One sample alone has some.
    fn lines(&self) -> Option<Lines> {
        let newest = self.samples.back()?;
        let brackets: Vec<_> = self
            .samples
            .iter()
            .map(|sample| self.bracket(sample, newest))
            .collect();
        let mut slope = (-MOST_DRIFT, MOST_DRIFT);
        for (at, (low, high, age)) in brackets.iter().enumerate() {
            for (later_low, later_high, later_age) in &brackets[at + 1..] {
                let between = age - later_age;
                slope.0 = slope.0.max((later_low - high) / between);
                slope.1 = slope.1.min((later_high - low) / between);
            }
        }
        let mut offset = (f64::NEG_INFINITY, f64::INFINITY);
        for (low, high, age) in brackets {
            offset.0 = offset.0.max(low + slope.0 * age);
            offset.1 = offset.1.min(high + slope.1 * age);
        }
        (slope.0 <= slope.1 && offset.0 <= offset.1).then_some(Lines { offset, slope })
    }

    /// The middle of the lines, which ends at `newest`.
    fn middle(&self, newest: ClockSample, Lines { offset, slope }: Lines) -> DeviceClock {
        let middle = |(low, high): (f64, f64)| f64::midpoint(low, high);
        // Up, as is what the halves of nanoseconds below lose.
        let half = |(low, high): (f64, f64)| ((high - low) / 2.0).ceil() as u64 + 1;
        let ppt = |(low, high): (f64, f64)| (low * 1e12, high * 1e12);
        DeviceClock {
            timer_ns: newest.timer_ns,
            host_ns: newest
                .before_ns
                .wrapping_add_signed(middle(offset).round() as i64),
            drift: middle(ppt(slope)).round() as i64,
            uncertainty_ns: half(offset),
            drift_uncertainty: half(ppt((slope.0 - WANDER, slope.1 + WANDER))),
            resolution_ns: self.resolution_ns,
            samples: self.samples.len() as u64,
            breaks: self.breaks,
        }
    }
}

#[cfg(test)]
mod tests;
