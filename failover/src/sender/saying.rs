//! What the receiver is told, until it shows that it knows.

use std::time::Duration;

use super::{Phase, Sender};
use crate::{Action, Message, Rules, Settings, Timer};

impl<R: Rules> Sender<R> {
    /// Whether the receiver may not know yet what is broken here: it notes it, or shows by an epoch or an offer that it does.
    pub(super) fn has_news(&self) -> bool {
        self.phase == Phase::Waiting
            || self.paths.indices().any(|path| {
                let path = self.paths[path];
                !path.state.is_live() && path.more.noted < path.generation && path.more.offered.is_none()
            })
    }

    /// Says that it has stopped, once nothing is under way. The receiver asks until it hears it.
    pub(super) fn say_drained(&self, out: &mut Vec<Action>) {
        if let Some(epoch) = self.held
            && self.acked == self.posted
        {
            let posted = self.posted;
            self.paths.tell(Message::Drained { epoch, posted }, out);
        }
    }

    pub(super) fn say_broken_soon(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.resend = self.settings.resend;
        self.say_broken(now, out);
    }

    pub(super) fn say_broken(&mut self, now: Duration, out: &mut Vec<Action>) {
        let generations = self.paths.given_up();
        let epoch = self.epoch;
        self.paths.tell(Message::Broken { epoch, generations }, out);
        self.timers.set(Timer::Resend, now + self.resend);
        self.resend = (self.resend * 2).min(Settings::RESEND_MAX);
        self.settle();
    }

    /// Stops saying what is known.
    pub(super) fn settle(&mut self) {
        if !self.has_news() {
            self.timers.clear(Timer::Resend);
        }
    }
}
