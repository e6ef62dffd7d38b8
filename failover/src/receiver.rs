//! The end whose FIFO the steps go to. It begins the epochs.
//!
//! | phase | meaning | left by |
//! |---|---|---|
//! | `Flowing` | steps come over the active path | a break of the active path (→ `Fencing`), a better path that is ready (→ `Holding`) |
//! | `Fencing` | the active path is being fenced | [`Event::Fenced`] (→ `Switching`, or `Stranded` without another path) |
//! | `Stranded` | the active path is fenced, and no other path is ready | a path that is rebuilt (→ `Switching`) |
//! | `Switching` | the sender has been told of the new epoch and has not answered | [`Message::Switched`] or a step (→ `Flowing`) |
//! | `Holding` | the sender has been asked to stop, so that this end can go back to a better path | [`Message::Drained`] and every step committed (→ `Switching`); the better path fails (→ `Resuming`) |
//! | `Resuming` | the sender has been told to continue on the active path | [`Message::Switched`] or a step (→ `Flowing`) |
//! | `GaveUp` | this end has given up | – |
//!
//! Invariants: `committed ≤ granted`, positions are committed in order and once, and the epoch never decreases.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use crate::{
    links::{Cause, Link, LinkState, PathSet, PathView, Status, Work},
    message::Message,
    paths::{Path, Paths},
    protocol::{Action, Event, Protocol, Reason, Report, Timed},
    rules::{Rules, Sound},
    settings::Settings,
    timers::{Timer, Timers},
};

mod epochs;
#[cfg(test)]
mod tests;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Steps come over the active path.
    Flowing,
    /// The active path is being fenced.
    Fencing,
    /// The active path is fenced, and no other path is ready.
    Stranded,
    /// The sender has been told of the new epoch, and has not answered.
    Switching,
    /// A better path is ready, and the sender has been asked to stop. `drained`: the sender has stopped after so many steps. Once these
    /// are committed, nothing is under way on the active path.
    Holding { drained: Option<u64> },
    /// The better path has failed again, and the sender has been told to continue on the active path.
    Resuming,
    /// This end has given up.
    GaveUp,
}

/// What the receiver keeps of a path beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ReceiverPath {
    /// How long the path is left alone when it fails next.
    backoff: Duration,
    /// Probes that must still succeed.
    probes: u8,
    /// One of them is outstanding.
    probing: bool,
}

/// The end whose FIFO the steps go to. The [crate](crate) says what its driver does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver<R = Sound> {
    settings: Arc<Settings>,
    epoch: u32,
    active: Link,
    phase: Phase,
    committed: u64,
    granted: u64,
    /// The greatest credit that is known to have crossed the active path. The sender has the credit of every step that arrived, too.
    credited: u64,
    paths: Paths<ReceiverPath>,
    timers: Timers,
    /// Time until the next [`Timer::Resend`].
    resend: Duration,
    busy: bool,
    /// A probe of the active path is outstanding.
    probing: bool,
    rules: PhantomData<R>,
}

impl<R: Rules> Receiver<R> {
    /// An end with `count` paths.
    ///
    /// The paths in `ready` are connected as generation 1. Both ends must be given the same set; they begin on its first path. `None`
    /// if there are no paths, more than [`MAX_PATHS`](crate::MAX_PATHS), or none is ready.
    #[must_use]
    pub fn new(settings: Arc<Settings>, count: usize, ready: PathSet) -> Option<Self> {
        let extra = ReceiverPath {
            backoff: settings.backoff,
            probes: 0,
            probing: false,
        };
        let (paths, active) = Paths::new(count, ready, extra)?;
        let mut timers = Timers::default();
        // A path that is not ready at the beginning is rebuilt after the first back-off.
        for path in paths.indices().filter(|path| !ready.has(*path)) {
            timers.set(Timer::Path(path), settings.backoff);
        }
        Some(Self {
            resend: settings.resend,
            settings,
            epoch: 0,
            active,
            phase: Phase::Flowing,
            committed: 0,
            granted: 0,
            credited: 0,
            paths,
            timers,
            busy: false,
            probing: false,
            rules: PhantomData,
        })
    }

    /// Steps that have arrived since the connection began: the position of the next one.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// Steps granted since the connection began.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Whether the active path is in use.
    fn is_active_in_use(&self) -> bool {
        !matches!(self.phase, Phase::Fencing | Phase::Stranded | Phase::GaveUp)
    }

    /// The last message to the sender, to go outside RDMA when this end's communicator ends. `None` if the sender could not rely on it:
    /// this end has given up, or has not received every step that it granted.
    #[must_use]
    pub fn goodbye(&self) -> Option<Message> {
        let is_whole = !self.has_given_up() && self.committed == self.granted;
        is_whole.then_some(Message::Left {
            committed: self.committed,
        })
    }

    /// Grants `steps` steps, counted since the connection began.
    pub fn grant(&mut self, now: Duration, steps: u64, out: &mut Vec<Action>) {
        if steps > self.granted {
            let had_outstanding = self.has_outstanding();
            self.granted = steps;
            if self.is_active_in_use() {
                self.send_credit(out);
                // A later credit does not extend the deadline of one that is outstanding.
                if !had_outstanding {
                    self.arm_progress_timer(now);
                }
            }
        }
    }

    /// The immediate of a step arrived on the active path.
    fn on_arrival(&mut self, now: Duration, immediate: u32, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Flowing | Phase::Holding { .. } | Phase::Resuming => {}
            // A step that arrived before the fence counts.
            Phase::Fencing => {}
            // The sender posts on the new path, so it knows of the epoch.
            Phase::Switching => self.on_switched(now, out),
            // The driver delivers nothing of a fenced queue pair.
            Phase::Stranded | Phase::GaveUp => return,
        }
        // Positions are compared by their low halves: at most a FIFO's slots are under way.
        let ahead = immediate.wrapping_sub(self.committed as u32).cast_signed();
        if ahead < 0 {
            return;
        }
        if ahead > 0 {
            return self.give_up(Reason::Protocol("a step is missing before one that arrived"), out);
        }
        if self.committed == self.granted {
            return self.give_up(Reason::Protocol("it sent a step without credit"), out);
        }
        let position = self.committed;
        self.committed += 1;
        out.push(Action::Commit { position });
        self.arm_progress_timer(now);
        self.switch_back_if_drained(now, out);
    }

    fn on_completion(
        &mut self,
        now: Duration,
        link: Link,
        work: Work,
        status: Status,
        out: &mut Vec<Action>,
    ) {
        let state = self.paths[link.path].state;
        // The status before anything else.
        if !R::succeeded(status) {
            // The first error names the cause; the errors of the drain follow from it.
            if state.is_live() {
                match status.is_survivable() {
                    true => self.fail(now, link.path, Cause::Completion(status), out),
                    false => self.give_up(Reason::Work(status), out),
                }
            }
            return;
        }
        if let Work::Credit(steps) = work
            && link == self.active
        {
            self.credited = steps.clamp(self.credited, self.granted);
            self.arm_progress_timer(now);
        }
        if work != Work::Probe {
            return;
        }
        if link == self.active {
            self.probing = false;
            self.arm_progress_timer(now);
        } else if state == LinkState::Probation && self.paths[link.path].extra.probing {
            let (interval, window) = (self.settings.probation, self.settings.recovery_window);
            let path = &mut self.paths[link.path];
            path.extra.probing = false;
            path.extra.probes = path.extra.probes.saturating_sub(1);
            if path.extra.probes > 0 {
                return self.timers.set(Timer::Path(link.path), now + interval);
            }
            path.state = LinkState::Ready;
            self.timers.set(Timer::Path(link.path), now + window);
            out.push(Action::Report(Report::Restored { link }));
            match self.phase {
                Phase::Stranded => self.begin_epoch(now, out),
                Phase::Flowing => self.start_failback(now, out),
                _ => {}
            }
        }
    }

    fn on_message(&mut self, now: Duration, message: Message, out: &mut Vec<Action>) {
        match message {
            Message::Broken { epoch, generations } if epoch <= self.epoch => {
                for (path, generation) in self.paths.indices().zip(generations) {
                    if generation >= self.paths[path].generation {
                        self.fail(now, path, Cause::Peer, out);
                    }
                }
                if self.phase == Phase::GaveUp {
                    return;
                }
                if epoch < self.epoch {
                    self.send_epoch(out);
                }
                let generations = self.paths.given_up_generations();
                self.paths.send(Message::BrokenAck { generations }, out);
            }
            Message::Switched { epoch }
                if epoch == self.epoch && matches!(self.phase, Phase::Switching | Phase::Resuming) =>
            {
                self.on_switched(now, out);
            }
            Message::Drained { epoch, posted } if epoch == self.epoch + 1 => {
                if let Phase::Holding { drained } = &mut self.phase {
                    *drained = Some(posted);
                    self.stop_resending();
                    self.switch_back_if_drained(now, out);
                }
            }
            Message::Accept { link, address } if self.paths.is_in(link, LinkState::Offered) => {
                self.paths[link.path].state = LinkState::Connecting;
                self.stop_resending();
                out.push(Action::Connect { link, peer: address });
            }
            Message::GaveUp => self.give_up(Reason::Peer, out),
            _ => {}
        }
    }

    /// Gives up a queue pair. If it was the active one, an epoch will follow.
    fn fail(&mut self, now: Duration, path: u8, cause: Cause, out: &mut Vec<Action>) {
        if !self.paths[path].state.is_live() {
            return;
        }
        let link = self.paths.link(path);
        let active = link == self.active && self.is_active_in_use();
        if active && !self.settings.enabled {
            return self.give_up(Reason::FailoverOff(cause), out);
        }
        out.push(Action::Report(Report::Broken { link, cause, active }));
        let longest = self.settings.backoff_max;
        let entry = &mut self.paths[path];
        entry.extra.probing = false;
        let wait = entry.extra.backoff;
        entry.extra.backoff = (wait * 2).min(longest);
        let wait = match self.phase {
            Phase::Stranded => self.settings.backoff,
            _ => wait,
        };
        self.timers.set(Timer::Path(path), now + wait);
        if active {
            self.probing = false;
            self.phase = Phase::Fencing;
            self.timers.clear(Timer::Progress);
            self.arm_give_up_timer(now);
        }
        self.paths[path].state = LinkState::Fencing;
        self.stop_resending();
        if R::fences() {
            out.push(Action::Fence { link });
        } else {
            self.paths[path].state = LinkState::Fenced;
            if active {
                self.begin_epoch(now, out);
            }
        }
        if matches!(self.phase, Phase::Holding { .. }) && !self.has_preferred_path() {
            self.begin_epoch(now, out);
        }
    }

    /// Limits a recovery that an operation waits for. Without an operation nothing is lost by waiting, and the timer is cleared.
    fn arm_give_up_timer(&mut self, now: Duration) {
        let is_between = matches!(self.phase, Phase::Fencing | Phase::Stranded | Phase::Switching);
        match self.busy && is_between {
            true => self.timers.ensure(Timer::GiveUp, now + self.settings.give_up),
            false => self.timers.clear(Timer::GiveUp),
        }
    }

    /// Begins to build the next generation, if the path is fenced, its port is up and its back-off is over.
    fn rebuild_if_due(&mut self, index: u8, out: &mut Vec<Action>) {
        let waits = self.timers.is_set(Timer::Path(index));
        let path = &mut self.paths[index];
        if path.state != LinkState::Fenced || !path.port_up || waits {
            return;
        }
        path.generation += 1;
        path.state = LinkState::Building;
        out.push(Action::Rebuild {
            link: self.paths.link(index),
        });
    }

    fn probe(&mut self, now: Duration, path: u8, out: &mut Vec<Action>) {
        self.paths[path].extra.probing = true;
        self.timers.set(Timer::Path(path), now + self.settings.timeout);
        out.push(Action::Probe {
            link: self.paths.link(path),
        });
    }

    fn probe_active(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.probing = true;
        out.push(Action::Probe { link: self.active });
        self.arm_progress_timer(now);
    }

    /// Whether work requests on the active path must complete before [`Timer::Progress`].
    fn has_outstanding(&self) -> bool {
        self.probing || self.credited.max(self.committed) < self.granted
    }

    /// Sets the time by which something must happen on the active path.
    fn arm_progress_timer(&mut self, now: Duration) {
        match () {
            () if !self.is_active_in_use() => self.timers.clear(Timer::Progress),
            () if self.has_outstanding() => {
                let timeout = self.paths.timeout(&self.settings);
                self.timers.set(Timer::Progress, now + timeout);
            }
            () if self.busy => self.timers.set(Timer::Progress, now + self.settings.probe),
            () => self.timers.clear(Timer::Progress),
        }
    }

    fn send_credit(&self, out: &mut Vec<Action>) {
        if self.granted > 0 {
            out.push(Action::Credit {
                link: self.active,
                steps: self.granted,
            });
        }
    }

    /// Sends the message of the current phase: which epoch begins, or which one is about to.
    fn send_epoch(&self, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Holding { .. } => {
                // Every way out of this phase leads to that epoch.
                let (epoch, link) = (self.epoch + 1, self.active);
                self.paths.send(Message::Hold { epoch, link }, out);
            }
            Phase::Flowing | Phase::Switching | Phase::Resuming => self.send_switch(out),
            Phase::Fencing | Phase::Stranded | Phase::GaveUp => {}
        }
    }

    fn send_switch(&self, out: &mut Vec<Action>) {
        let message = Message::Switch {
            epoch: self.epoch,
            link: self.active,
            committed: self.committed,
            granted: self.granted,
        };
        self.paths.send(message, out);
    }

    /// Has unanswered messages repeated, from the shortest interval on.
    fn start_resending(&mut self, now: Duration) {
        self.resend = self.settings.resend;
        self.timers.set(Timer::Resend, now + self.resend);
    }

    /// Repeats every message that has no answer.
    fn resend_unanswered(&mut self, now: Duration, out: &mut Vec<Action>) {
        if !self.has_unanswered() {
            return;
        }
        if self.is_epoch_unanswered() {
            self.send_epoch(out);
        }
        for path in self.paths.indices() {
            let Path { state, own, .. } = self.paths[path];
            if let (LinkState::Offered, Some(address)) = (state, own) {
                let link = self.paths.link(path);
                self.paths.send(Message::Offer { link, address }, out);
            }
        }
        self.resend = (self.resend * 2).min(Settings::RESEND_MAX);
        self.timers.set(Timer::Resend, now + self.resend);
    }

    /// Whether the sender has not answered the last message about an epoch.
    fn is_epoch_unanswered(&self) -> bool {
        matches!(
            self.phase,
            Phase::Switching | Phase::Resuming | Phase::Holding { drained: None }
        )
    }

    /// Whether any message has no answer: about an epoch, or an offer.
    fn has_unanswered(&self) -> bool {
        self.is_epoch_unanswered()
            || self
                .paths
                .indices()
                .any(|path| self.paths[path].state == LinkState::Offered)
    }

    /// Stops repeating once everything is answered.
    fn stop_resending(&mut self) {
        if !self.has_unanswered() {
            self.timers.clear(Timer::Resend);
        }
    }

    fn give_up(&mut self, reason: Reason, out: &mut Vec<Action>) {
        if reason != Reason::Peer {
            self.paths.send(Message::GaveUp, out);
        }
        self.phase = Phase::GaveUp;
        self.timers.clear_all();
        out.push(Action::GiveUp(reason));
    }
}

impl<R: Rules> Timed for Receiver<R> {
    fn timers(&self) -> &Timers {
        &self.timers
    }

    fn timers_mut(&mut self) -> &mut Timers {
        &mut self.timers
    }

    fn busy_mut(&mut self) -> &mut bool {
        &mut self.busy
    }

    fn arm_busy_timers(&mut self, now: Duration) {
        self.arm_progress_timer(now);
        self.arm_give_up_timer(now);
    }

    fn on_timer(&mut self, now: Duration, timer: Timer, out: &mut Vec<Action>) {
        match timer {
            Timer::Resend => self.resend_unanswered(now, out),
            Timer::GiveUp => self.give_up(Reason::NoPath, out),
            Timer::Progress if self.has_outstanding() => {
                self.fail(now, self.active.path, Cause::Timeout, out);
            }
            Timer::Progress => self.probe_active(now, out),
            Timer::Path(path) => match self.paths[path].state {
                LinkState::Fenced => self.rebuild_if_due(path, out),
                LinkState::Probation if self.paths[path].extra.probing => {
                    self.fail(now, path, Cause::Timeout, out);
                }
                LinkState::Probation => self.probe(now, path, out),
                LinkState::Ready => self.paths[path].extra.backoff = self.settings.backoff,
                LinkState::Fencing | LinkState::Building | LinkState::Offered | LinkState::Connecting => {}
            },
        }
    }
}

impl<R: Rules> Protocol for Receiver<R> {
    fn active(&self) -> Link {
        self.active
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn is_recovering(&self) -> bool {
        !matches!(self.phase, Phase::Flowing | Phase::GaveUp)
    }

    fn has_given_up(&self) -> bool {
        self.phase == Phase::GaveUp
    }

    fn paths(&self) -> impl Iterator<Item = PathView> {
        self.paths.views(self.active)
    }

    fn next_attempt(&self, path: u8) -> Option<Duration> {
        let waits = self.paths.knows(path) && !self.paths[path].state.is_live();
        waits.then(|| self.timers.at(Timer::Path(path))).flatten()
    }

    fn handle(&mut self, now: Duration, event: Event, out: &mut Vec<Action>) {
        if self.phase == Phase::GaveUp {
            return;
        }
        match event {
            Event::PortDown { path } if self.paths.knows(path) => {
                self.paths[path].port_up = false;
                // With failover off this end waits: the port may come up within the device's retries, or before [`Timer::Progress`].
                if self.settings.enabled {
                    self.fail(now, path, Cause::Port, out);
                }
            }
            Event::PortUp { path } if self.paths.knows(path) => {
                self.paths[path].port_up = true;
                if self.phase == Phase::Stranded && !self.paths[path].state.is_live() {
                    self.timers.clear(Timer::Path(path));
                }
                self.rebuild_if_due(path, out);
            }
            Event::Suspected { path }
                if path == self.active.path && self.phase == Phase::Flowing && !self.probing =>
            {
                self.probe_active(now, out);
            }
            Event::Condemned { path }
                if self.paths.knows(path) && self.paths[path].state == LinkState::Ready =>
            {
                self.fail(now, path, Cause::Shared, out);
            }
            Event::Completed { link, work, status } if self.paths.is_newest(link) => {
                self.on_completion(now, link, work, status, out);
            }
            Event::Arrived { link, immediate } if link == self.active => self.on_arrival(now, immediate, out),
            Event::Received(message) => self.on_message(now, message, out),
            Event::Fenced { link, sure } if self.paths.is_in(link, LinkState::Fencing) => {
                if !sure && link == self.active {
                    // Steps went over this queue pair: a late one could land in a slot that is in use again.
                    return self.give_up(Reason::NotFenced(link), out);
                }
                self.paths[link.path].state = LinkState::Fenced;
                if self.phase == Phase::Fencing && link == self.active {
                    self.begin_epoch(now, out);
                }
                self.rebuild_if_due(link.path, out);
            }
            Event::Rebuilt { link, address } if self.paths.is_in(link, LinkState::Building) => {
                let path = &mut self.paths[link.path];
                (path.own, path.state) = (Some(address), LinkState::Offered);
                self.paths.send(Message::Offer { link, address }, out);
                self.start_resending(now);
            }
            Event::Connected { link } if self.paths.is_in(link, LinkState::Connecting) => {
                let probes = match self.phase {
                    // With no other path one success is enough.
                    Phase::Stranded => 1,
                    _ => self.settings.probation_probes,
                };
                let path = &mut self.paths[link.path];
                (path.state, path.extra.probes) = (LinkState::Probation, probes);
                self.probe(now, link.path, out);
            }
            Event::Failed { link } if self.paths.is_newest(link) => {
                self.fail(now, link.path, Cause::Build, out);
            }
            _ => {}
        }
    }
}
