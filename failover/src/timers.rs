//! The deadlines of an end.

use std::time::Duration;

use crate::links::MAX_PATHS;

/// A timer of an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timer {
    /// The end repeats an unanswered message.
    Resend,
    /// The end gives up.
    GiveUp,
    /// Outstanding work requests should have completed. With none outstanding, the end probes the path.
    Progress,
    /// A path's next rebuild, next probe, end of probation, or end of its recovery window.
    Path(u8),
}

/// One deadline per timer, if it is set. Times are since a moment of the driver's choice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Timers([Option<Duration>; Self::COUNT]);

impl Timers {
    pub(crate) const COUNT: usize = 3 + MAX_PATHS;

    fn index(timer: Timer) -> usize {
        match timer {
            Timer::Resend => 0,
            Timer::GiveUp => 1,
            Timer::Progress => 2,
            Timer::Path(path) => 3 + usize::from(path),
        }
    }

    fn from_index(index: usize) -> Timer {
        match index {
            0 => Timer::Resend,
            1 => Timer::GiveUp,
            2 => Timer::Progress,
            path => Timer::Path((path - 3) as u8),
        }
    }

    pub(crate) fn set(&mut self, timer: Timer, deadline: Duration) {
        self.0[Self::index(timer)] = Some(deadline);
    }

    /// Sets the timer unless it is set.
    pub(crate) fn ensure(&mut self, timer: Timer, deadline: Duration) {
        self.0[Self::index(timer)].get_or_insert(deadline);
    }

    /// Moves the deadline to `latest` if the timer is set to a later one.
    pub(crate) fn hasten(&mut self, timer: Timer, latest: Duration) {
        if let Some(deadline) = &mut self.0[Self::index(timer)] {
            *deadline = latest.min(*deadline);
        }
    }

    pub(crate) fn clear(&mut self, timer: Timer) {
        self.0[Self::index(timer)] = None;
    }

    pub(crate) fn clear_all(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn is_set(&self, timer: Timer) -> bool {
        self.at(timer).is_some()
    }

    pub(crate) fn at(&self, timer: Timer) -> Option<Duration> {
        self.0[Self::index(timer)]
    }

    /// The next deadline.
    pub(crate) fn next(&self) -> Option<Duration> {
        self.0.iter().flatten().min().copied()
    }

    /// Clears and returns one timer whose deadline has passed.
    pub(crate) fn take_expired(&mut self, now: Duration) -> Option<Timer> {
        let index = self
            .0
            .iter()
            .position(|deadline| deadline.is_some_and(|at| at <= now))?;
        self.0[index] = None;
        Some(Self::from_index(index))
    }

    /// The timers that are set.
    #[cfg(test)]
    pub(crate) fn armed(&self) -> impl Iterator<Item = Timer> {
        (0..self.0.len())
            .filter(|index| self.0[*index].is_some())
            .map(Self::from_index)
    }
}
