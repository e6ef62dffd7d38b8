//! The relation of a device's timer to `CLOCK_MONOTONIC`. A sample is a reading of the timer between two readings of the host's clock.
//!
//! A sample is a certain bound: the timer reached its reading between the host's two readings, its *bracket*. If both clocks run evenly, the
//! host's time is a line over the timer that passes through the brackets of all samples. [`Fit`] keeps the range of such lines. It returns the
//! middle line, with half the width of the range as its uncertainty. A slow sample (an interrupted thread, a busy bus) does no harm, since its
//! bracket is wide.
//!
//! Clocks do not run evenly for ever. So a bracket widens with the age of its sample ([`WANDER`]). If no line passes through all brackets (a clock was
//! set, its rate was changed), the oldest samples are dropped until one does.

use std::collections::VecDeque;

use ringsight_records::DeviceClock;

/// Largest difference of the two clocks' rates: crystals are off by 50 ppm, and NTP slews `CLOCK_MONOTONIC` by up to 500 ppm.
const MOST_DRIFT: f64 = 600e-6;
/// Largest unnoticed change of that difference, as crystals get warm.
const WANDER: f64 = 0.1e-6;
/// Widest bracket that is of use, nanoseconds.
const MOST_WIDTH: u64 = 10_000_000_000;
/// Samples that are kept. One is taken per second, and older brackets are too wide to be of use.
const SAMPLES: usize = 32;

/// One reading of the device's timer between two of the host's clock; nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockSample {
    pub(crate) before_ns: u64,
    pub(crate) timer_ns: u64,
    pub(crate) after_ns: u64,
}

impl ClockSample {
    /// Width of its bracket.
    pub(crate) fn width_ns(&self) -> u64 {
        self.after_ns.saturating_sub(self.before_ns)
    }
}

/// The lines that pass through the brackets of all samples.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fit {
    /// In order of the timer's readings.
    samples: VecDeque<ClockSample>,
    /// The timer's step.
    resolution_ns: u64,
    breaks: u64,
    clock: Option<DeviceClock>,
}

/// Lines of the host's time minus the timer, relative to a constant: their range at the newest sample, and of their slopes.
#[derive(Clone, Copy)]
struct Lines {
    offset: (f64, f64),
    slope: (f64, f64),
}

impl Fit {
    /// The clock as known now; `None` before the first sample.
    pub(crate) fn clock(&self) -> Option<&DeviceClock> {
        self.clock.as_ref()
    }

    /// Adds a sample, newer than all before, of a timer that advances in steps of `resolution_ns`. Ignores a sample that took too long or ended
    /// before it began.
    pub(crate) fn add(&mut self, sample: ClockSample, resolution_ns: u64) {
        if sample.after_ns < sample.before_ns || sample.width_ns() > MOST_WIDTH || resolution_ns > MOST_WIDTH
        {
            return;
        }
        self.resolution_ns = self.resolution_ns.max(resolution_ns);
        // If the timer or the clock went back, it was set.
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
                // The newest sample alone always has lines.
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

    /// The bracket of the host's time minus the timer at a sample, relative to the beginning of the newest sample and widened by its age; and
    /// that age.
    fn bracket(&self, sample: &ClockSample, newest: &ClockSample) -> (f64, f64, f64) {
        let age = (newest.timer_ns - sample.timer_ns) as f64;
        let relative = |host_ns: u64| {
            let host = host_ns.wrapping_sub(newest.before_ns).cast_signed();
            let timer = sample.timer_ns.wrapping_sub(newest.timer_ns).cast_signed();
            host.wrapping_sub(timer) as f64
        };
        let wander = age * WANDER;
        // The timer may have reached its reading up to one step earlier.
        let low = relative(sample.before_ns) - self.resolution_ns as f64 - wander;
        (low, relative(sample.after_ns) + wander, age)
    }

    /// `None` if no line passes through all brackets. One sample alone always has lines.
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

    /// The middle line, at `newest`.
    fn middle(&self, newest: ClockSample, Lines { offset, slope }: Lines) -> DeviceClock {
        let middle = |(low, high): (f64, f64)| f64::midpoint(low, high);
        // Rounded up, plus what rounding to nanoseconds loses below.
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
