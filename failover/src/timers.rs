//! Deadlines of an end.

use std::time::Duration;

use crate::MAX_PATHS;

/// What an end waits for by time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timer {
    /// Something unanswered is said again.
    Resend,
    /// The end gives up.
    GiveUp,
    /// Work requests should have ended; or, with none outstanding, the path is probed.
    Watch,
    /// Of a path: its next rebuild, probe, end of probation, or the end of its recovery window.
    Path(u8),
}

/// One deadline of each kind, if it is set. Times are since a moment of the driver's choice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Timers([Option<Duration>; 3 + MAX_PATHS]);

impl Timers {
    fn index(timer: Timer) -> usize {
        match timer {
            Timer::Resend => 0,
            Timer::GiveUp => 1,
            Timer::Watch => 2,
            Timer::Path(path) => 3 + usize::from(path),
        }
    }

    fn of_index(index: usize) -> Timer {
        match index {
            0 => Timer::Resend,
            1 => Timer::GiveUp,
            2 => Timer::Watch,
            path => Timer::Path((path - 3) as u8),
        }
    }

    pub(crate) fn set(&mut self, timer: Timer, deadline: Duration) {
        self.0[Self::index(timer)] = Some(deadline);
    }

    /// Sets it unless it is set.
    pub(crate) fn ensure(&mut self, timer: Timer, deadline: Duration) {
        self.0[Self::index(timer)].get_or_insert(deadline);
    }

    /// Has it be over then at the latest, if it is set.
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

    /// A timer that is over, which is cleared.
    pub(crate) fn expired(&mut self, now: Duration) -> Option<Timer> {
        let index = self
            .0
            .iter()
            .position(|deadline| deadline.is_some_and(|at| at <= now))?;
        self.0[index] = None;
        Some(Self::of_index(index))
    }

    /// The timers that are set.
    #[cfg(test)]
    pub(crate) fn armed(&self) -> impl Iterator<Item = Timer> {
        (0..self.0.len())
            .filter(|index| self.0[*index].is_some())
            .map(Self::of_index)
    }
}
