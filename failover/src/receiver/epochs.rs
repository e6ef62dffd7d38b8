//! The receiver's epochs: which path one is on, and when the next one begins.

use std::time::Duration;

use super::{Phase, Receiver};
use crate::{
    links::LinkState,
    protocol::{Action, Report},
    rules::Rules,
    timers::Timer,
};

impl<R: Rules> Receiver<R> {
    /// Begins the next epoch on the first usable path, which may be the active one.
    pub(super) fn begin_epoch(&mut self, now: Duration, out: &mut Vec<Action>) {
        let Some(path) = self.paths.indices().find(|path| self.is_usable(*path)) else {
            return self.strand(now);
        };
        let from = self.active;
        self.epoch += 1;
        self.active = self.paths.link(path);
        if self.active == from {
            self.phase = Phase::Resuming;
            self.send_switch(out);
            return self.start_resending(now);
        }
        let from = from.path;
        self.phase = Phase::Switching;
        self.probing = false;
        self.credited = 0;
        out.push(Action::Report(Report::Switched {
            epoch: self.epoch,
            from,
            to: path,
            committed: self.committed,
            replayed: 0,
        }));
        self.send_switch(out);
        self.start_resending(now);
        self.send_credit(out);
        self.arm_progress_timer(now);
    }

    /// No path is usable. Every failed path is retried after the shortest back-off: a longer one would spare nothing, and this end may
    /// have given up by then.
    pub(super) fn strand(&mut self, now: Duration) {
        self.phase = Phase::Stranded;
        for path in self
            .paths
            .indices()
            .filter(|path| !self.paths[*path].state.is_live())
        {
            self.timers.hasten(Timer::Path(path), now + self.settings.backoff);
        }
    }

    /// The sender has entered this end's epoch.
    pub(super) fn on_switched(&mut self, now: Duration, out: &mut Vec<Action>) {
        let has_switched = self.phase == Phase::Switching;
        self.phase = Phase::Flowing;
        self.arm_give_up_timer(now);
        self.stop_resending();
        if has_switched {
            out.push(Action::Report(Report::Recovered { epoch: self.epoch }));
        }
        self.arm_progress_timer(now);
        self.start_failback(now, out);
    }

    /// Begins to leave the active path if a better one is ready. The active path works and is not fenced: it carries messages, and it is
    /// ready should the better path fail at once.
    pub(super) fn start_failback(&mut self, now: Duration, out: &mut Vec<Action>) {
        if self.settings.failback && self.has_preferred_path() {
            if !R::waits_for_stop() {
                return self.begin_epoch(now, out);
            }
            self.phase = Phase::Holding { drained: None };
            self.send_epoch(out);
            self.start_resending(now);
        }
    }

    /// Leaves the active path once the sender has stopped and every step that it posted is committed.
    pub(super) fn switch_back_if_drained(&mut self, now: Duration, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Holding { drained: Some(posted) } if posted <= self.committed) {
            self.begin_epoch(now, out);
        }
    }

    /// Whether a path before the active one is ready.
    pub(super) fn has_preferred_path(&self) -> bool {
        (0..self.active.path).any(|path| self.is_usable(path))
    }

    pub(super) fn is_usable(&self, path: u8) -> bool {
        self.paths[path].state == LinkState::Ready && self.paths[path].port_up
    }
}
