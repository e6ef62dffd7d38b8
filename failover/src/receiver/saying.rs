//! What the sender is told, until it answers.

use std::time::Duration;

use super::{Phase, Receiver};
use crate::{Action, LinkState, Message, Rules, Settings, Timer, paths::Path};

impl<R: Rules> Receiver<R> {
    pub(super) fn say_credit(&self, out: &mut Vec<Action>) {
        if self.granted > 0 {
            out.push(Action::Credit {
                link: self.active,
                steps: self.granted,
            });
        }
    }

    /// Says which epoch begins, or which one is about to.
    pub(super) fn say_epoch(&self, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Holding { .. } => {
                // There is no other way on from here than to that one.
                let (epoch, link) = (self.epoch + 1, self.active);
                self.paths.tell(Message::Hold { epoch, link }, out);
            }
            Phase::Flowing | Phase::Switching | Phase::Resuming => self.say_switch(out),
            Phase::Fencing | Phase::Stranded | Phase::Over => {}
        }
    }

    pub(super) fn say_switch(&self, out: &mut Vec<Action>) {
        let message = Message::Switch {
            epoch: self.epoch,
            link: self.active,
            committed: self.committed,
            granted: self.granted,
        };
        self.paths.tell(message, out);
    }

    pub(super) fn resend_soon(&mut self, now: Duration) {
        self.resend = self.settings.resend;
        self.timers.set(Timer::Resend, now + self.resend);
    }

    /// Says again what has no answer.
    pub(super) fn say_again(&mut self, now: Duration, out: &mut Vec<Action>) {
        if !self.has_unanswered() {
            return;
        }
        if self.is_unanswered() {
            self.say_epoch(out);
        }
        for path in self.paths.indices() {
            let Path { state, own, .. } = self.paths[path];
            if let (LinkState::Offered, Some(address)) = (state, own) {
                let link = self.paths.link(path);
                self.paths.tell(Message::Offer { link, address }, out);
            }
        }
        self.resend = (self.resend * 2).min(Settings::RESEND_MAX);
        self.timers.set(Timer::Resend, now + self.resend);
    }

    /// Whether the sender has not said that it knows of what was said last.
    pub(super) fn is_unanswered(&self) -> bool {
        matches!(
            self.phase,
            Phase::Switching | Phase::Resuming | Phase::Holding { drained: None }
        )
    }

    pub(super) fn has_unanswered(&self) -> bool {
        self.is_unanswered()
            || self
                .paths
                .indices()
                .any(|path| self.paths[path].state == LinkState::Offered)
    }

    pub(super) fn settle(&mut self) {
        if !self.has_unanswered() {
            self.timers.clear(Timer::Resend);
        }
    }
}
