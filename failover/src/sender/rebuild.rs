//! The sender's queue pairs: giving one up, and building the next one that the receiver offers.

use std::time::Duration;

use super::{Phase, Sender};
use crate::{
    links::{Cause, Link, LinkState},
    message::{Address, Message},
    protocol::{Action, Reason, Report},
    rules::Rules,
    timers::Timer,
};

impl<R: Rules> Sender<R> {
    pub(super) fn on_offer(&mut self, now: Duration, link: Link, address: Address, out: &mut Vec<Action>) {
        let path = self.paths[link.path];
        if link.generation == path.generation && path.state == LinkState::Ready {
            // The previous answer was lost.
            return self.send_accept(link.path, out);
        }
        let newest = path
            .extra
            .offered
            .map_or(path.generation, |(generation, _)| generation);
        if link.generation < newest || link.generation == path.generation {
            return;
        }
        self.paths[link.path].extra.offered = Some((link.generation, address));
        // The receiver has given up the generation before.
        self.abandon(now, link.path, Cause::Peer, out);
        self.rebuild_if_offered(link.path, out);
        self.stop_resending();
    }

    /// Begins to build the offered generation, if there is one, the path is fenced and its port is up.
    pub(super) fn rebuild_if_offered(&mut self, index: u8, out: &mut Vec<Action>) {
        let path = &mut self.paths[index];
        if path.state != LinkState::Fenced || !path.port_up {
            return;
        }
        let Some((generation, address)) = path.extra.offered.take() else {
            return;
        };
        path.extra.peer = Some(address);
        path.generation = generation;
        path.state = LinkState::Building;
        path.own = None;
        out.push(Action::Rebuild {
            link: self.paths.link(index),
        });
    }

    pub(super) fn send_accept(&self, path: u8, out: &mut Vec<Action>) {
        if let Some(address) = self.paths[path].own {
            let link = self.paths.link(path);
            self.paths.send(Message::Accept { link, address }, out);
        }
    }

    /// Gives up a queue pair, and tells the receiver.
    pub(super) fn fail(&mut self, now: Duration, path: u8, cause: Cause, out: &mut Vec<Action>) {
        if self.abandon(now, path, cause, out) {
            self.start_sending_broken(now, out);
        }
    }

    /// A port went down. With failover off this end waits: the port may come up within the device's retries, or before
    /// [`Timer::Progress`].
    pub(super) fn on_port_down(&mut self, now: Duration, path: u8, out: &mut Vec<Action>) {
        if self.settings.enabled {
            self.fail(now, path, Cause::Port, out);
        }
    }

    /// Gives up a queue pair. Returns whether the receiver must be told.
    pub(super) fn abandon(&mut self, now: Duration, path: u8, cause: Cause, out: &mut Vec<Action>) -> bool {
        if !self.paths[path].state.is_live() {
            return false;
        }
        let active = self.phase == Phase::Flowing && self.paths.link(path) == self.active;
        if active && !self.settings.enabled {
            self.give_up(Reason::FailoverOff(cause), out);
            return false;
        }
        self.fence(path, cause, out);
        if active {
            (self.phase, self.held) = (Phase::Waiting, None);
            self.timers.clear(Timer::Progress);
            self.arm_give_up_timer(now);
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
