//! Queue pairs that are given up, and made anew as the receiver offers.

use std::time::Duration;

use super::{Phase, Sender};
use crate::{Action, Address, Cause, Link, LinkState, Message, Reason, Report, Rules, Timer};

impl<R: Rules> Sender<R> {
    pub(super) fn offer(&mut self, now: Duration, link: Link, address: Address, out: &mut Vec<Action>) {
        let path = self.paths[link.path];
        if link.generation == path.generation && path.state == LinkState::Ready {
            // Our answer was lost.
            return self.accept(link.path, out);
        }
        let newest = path
            .more
            .offered
            .map_or(path.generation, |(generation, _)| generation);
        if link.generation < newest || link.generation == path.generation {
            return;
        }
        self.paths[link.path].more.offered = Some((link.generation, address));
        // The receiver has given up the one before.
        self.lose(now, link.path, Cause::Peer, out);
        self.advance(link.path, out);
        self.settle();
    }

    /// Takes up an offer, if there is one and it can.
    pub(super) fn advance(&mut self, index: u8, out: &mut Vec<Action>) {
        let path = &mut self.paths[index];
        if path.state != LinkState::Fenced || !path.port_up {
            return;
        }
        let Some((generation, address)) = path.more.offered.take() else {
            return;
        };
        path.more.peer = Some(address);
        path.generation = generation;
        path.state = LinkState::Building;
        path.own = None;
        out.push(Action::Rebuild {
            link: self.paths.link(index),
        });
    }

    pub(super) fn accept(&self, path: u8, out: &mut Vec<Action>) {
        if let Some(address) = self.paths[path].own {
            let link = self.paths.link(path);
            self.paths.tell(Message::Accept { link, address }, out);
        }
    }

    /// Gives up a queue pair, and says so.
    pub(super) fn fail(&mut self, now: Duration, path: u8, cause: Cause, out: &mut Vec<Action>) {
        if self.lose(now, path, cause, out) {
            self.say_broken_soon(now, out);
        }
    }

    /// A port went down. Who has nothing to go to leaves it to the device's tries, and to [`Timer::Watch`], whether it comes up in time.
    pub(super) fn port_fell(&mut self, now: Duration, path: u8, out: &mut Vec<Action>) {
        if self.settings.enabled {
            self.fail(now, path, Cause::Port, out);
        }
    }

    /// Gives up a queue pair; whether there is something to say of it.
    pub(super) fn lose(&mut self, now: Duration, path: u8, cause: Cause, out: &mut Vec<Action>) -> bool {
        if !self.paths[path].state.is_live() {
            return false;
        }
        let active = self.phase == Phase::Flowing && self.paths.link(path) == self.active;
        if active && !self.settings.enabled {
            self.give_up(Reason::Off(cause), out);
            return false;
        }
        self.fence(path, cause, out);
        if active {
            (self.phase, self.held) = (Phase::Waiting, None);
            self.timers.clear(Timer::Watch);
            self.limit(now);
        }
        true
    }

    pub(super) fn fence(&mut self, path: u8, cause: Cause, out: &mut Vec<Action>) {
        if !self.paths[path].state.is_live() {
            return;
        }
        let link = self.paths.link(path);
        let active = link == self.active;
        self.paths[path].state = LinkState::Fencing;
        if active {
            self.probing = false;
        }
        out.push(Action::Report(Report::Broken { link, cause, active }));
        out.push(Action::Fence { link });
    }
}
