//! Which path an epoch is on, and when the next one begins.

use std::time::Duration;

use super::{Phase, Receiver};
use crate::{Action, LinkState, Report, Rules, Timer};

impl<R: Rules> Receiver<R> {
    /// Begins the next epoch on the first path that is ready: it may be the one that it is on.
    pub(super) fn choose(&mut self, now: Duration, out: &mut Vec<Action>) {
        let Some(path) = self.paths.indices().find(|path| self.is_usable(*path)) else {
            return self.strand(now);
        };
        let from = self.active;
        self.epoch += 1;
        self.active = self.paths.link(path);
        if self.active == from {
            self.phase = Phase::Resuming;
            self.say_switch(out);
            return self.resend_soon(now);
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
        self.say_switch(out);
        self.resend_soon(now);
        self.say_credit(out);
        self.watch(now);
    }

    /// There is no path to go on. However often those that failed did so: nothing is spared by leaving one alone for long, and the end
    /// may have given up by then.
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

    /// The sender is in our epoch.
    pub(super) fn flow(&mut self, now: Duration, out: &mut Vec<Action>) {
        let was_elsewhere = self.phase == Phase::Switching;
        self.phase = Phase::Flowing;
        self.limit(now);
        self.settle();
        if was_elsewhere {
            out.push(Action::Report(Report::Recovered { epoch: self.epoch }));
        }
        self.watch(now);
        self.fall_back(now, out);
    }

    /// Begins to leave the active path if one before it is ready. It works, and stays as it is: what the ends agree by goes over it,
    /// too, and if the other one fails at once it is there.
    pub(super) fn fall_back(&mut self, now: Duration, out: &mut Vec<Action>) {
        if self.settings.failback && self.has_better() {
            if !R::waits_for_stop() {
                return self.choose(now, out);
            }
            self.phase = Phase::Holding { drained: None };
            self.say_epoch(out);
            self.resend_soon(now);
        }
    }

    /// Leaves the active path when the sender has stopped, and all that it sent is here.
    pub(super) fn go_back(&mut self, now: Duration, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Holding { drained: Some(posted) } if posted <= self.committed) {
            self.choose(now, out);
        }
    }

    /// Whether a path before the active one is ready.
    pub(super) fn has_better(&self) -> bool {
        (0..self.active.path).any(|path| self.is_usable(path))
    }

    pub(super) fn is_usable(&self, path: u8) -> bool {
        self.paths[path].state == LinkState::Ready && self.paths[path].port_up
    }
}
