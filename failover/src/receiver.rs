//! The end whose FIFO steps go to; it makes the epochs.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use crate::{
    Action, Cause, Event, Link, LinkState, MAX_PATHS, Message, PathSet, PathView, Reason, Report, Rules,
    Settings, Sound, Status, Timer, Work, paths::Paths, timers::Timers,
};

mod epochs;
mod saying;
#[cfg(test)]
mod tests;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Steps come over the active path.
    Flowing,
    /// The active path is being fenced.
    Fencing,
    /// It is fenced, and there is no other one.
    Stranded,
    /// The sender has been told of the new epoch, and has not said that it knows.
    Switching,
    /// A path before the active one is ready, and the sender has been asked to stop. It has when it has got over so many steps: then
    /// nothing is under way on the active path, which is left as it is.
    Holding { drained: Option<u64> },
    /// That path is gone again, and the sender has been told to go on where it is.
    Resuming,
    /// Given up.
    Over,
}

/// What this end keeps of a path beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Trust {
    /// How long it is left alone when it fails next.
    backoff: Duration,
    /// Probes still to succeed.
    probes: u8,
    /// One of them is out.
    probing: bool,
}

/// The end whose FIFO steps go to. See the [crate](crate) for what its driver does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Receiver<R = Sound> {
    settings: Arc<Settings>,
    epoch: u32,
    active: Link,
    phase: Phase,
    committed: u64,
    granted: u64,
    /// Steps of which the sender is known to have the credit by one that got over the active path. Those that came it had, too.
    credited: u64,
    paths: Paths<Trust>,
    timers: Timers,
    /// Time until the next [`Timer::Resend`].
    resend: Duration,
    busy: bool,
    /// A probe of the active path is out.
    probing: bool,
    rules: PhantomData<R>,
}

impl<R: Rules> Receiver<R> {
    /// An end with `count` paths. Those in `ready` are connected as generation 1; both ends are given the same ones, and begin on
    /// the first. `None` if there are no paths, more than [`MAX_PATHS`], or none ready.
    #[must_use]
    pub fn new(settings: Arc<Settings>, count: usize, ready: PathSet) -> Option<Self> {
        let trust = Trust {
            backoff: settings.backoff,
            probes: 0,
            probing: false,
        };
        let (paths, active) = Paths::new(count, ready, trust)?;
        let mut timers = Timers::default();
        // What is not ready at the beginning is tried as soon as time passes.
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

    /// Steps that have arrived: the position of the next one.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.committed
    }

    /// Steps granted.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Where steps go in this epoch, or went last.
    #[must_use]
    pub fn active(&self) -> Link {
        self.active
    }

    /// The epoch that it is in.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Whether it is between two paths.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        !matches!(self.phase, Phase::Flowing | Phase::Over)
    }

    /// Whether the active path is in use.
    fn flows(&self) -> bool {
        !matches!(self.phase, Phase::Fencing | Phase::Stranded | Phase::Over)
    }

    /// Whether it has given up.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// What the sender is to be told outside RDMA, last of all, when this end's communicator ends; `None` where there is nothing that it
    /// could go by: this end has given up, or has not got all that it granted.
    #[must_use]
    pub fn last_word(&self) -> Option<Message> {
        let is_whole = !self.is_over() && self.committed == self.granted;
        is_whole.then_some(Message::Left {
            committed: self.committed,
        })
    }

    /// Its paths, in order.
    pub fn paths(&self) -> impl Iterator<Item = PathView> {
        self.paths.views(self.active)
    }

    /// When a path that failed is next made anew, if it is this end's port that decides.
    #[must_use]
    pub fn next_attempt(&self, path: u8) -> Option<Duration> {
        let waits = self.paths.knows(path) && !self.paths[path].state.is_live();
        waits.then(|| self.timers.at(Timer::Path(path))).flatten()
    }

    /// There is room for `steps` steps since the connection began.
    pub fn grant(&mut self, now: Duration, steps: u64, out: &mut Vec<Action>) {
        if steps > self.granted {
            let was_owed = self.is_owed();
            self.granted = steps;
            if self.flows() {
                self.say_credit(out);
                // One that is under way is not late for what comes after it.
                if !was_owed {
                    self.watch(now);
                }
            }
        }
    }

    /// Whether the driver has an operation for it. An idle end probes nothing, and does not give up for want of a path.
    pub fn set_busy(&mut self, now: Duration, busy: bool) {
        if self.busy != busy {
            self.busy = busy;
            self.watch(now);
            self.limit(now);
        }
    }

    /// When [`Receiver::expire`] is to be called, if nothing happens before.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        self.timers.next()
    }

    /// Does what is due.
    pub fn expire(&mut self, now: Duration, out: &mut Vec<Action>) {
        // What a timer sets is later than now, unless a setting is 0: then it waits for the next call.
        for _ in 0..3 + MAX_PATHS {
            let Some(timer) = self.timers.expired(now) else {
                return;
            };
            self.fire(now, timer, out);
        }
    }

    fn fire(&mut self, now: Duration, timer: Timer, out: &mut Vec<Action>) {
        match timer {
            Timer::Resend => self.say_again(now, out),
            Timer::GiveUp => self.give_up(Reason::NoPath, out),
            Timer::Watch if self.is_owed() => self.fail(now, self.active.path, Cause::Timeout, out),
            Timer::Watch => self.probe_active(now, out),
            Timer::Path(path) => match self.paths[path].state {
                LinkState::Fenced => self.advance(path, out),
                LinkState::Probation if self.paths[path].more.probing => {
                    self.fail(now, path, Cause::Timeout, out);
                }
                LinkState::Probation => self.probe(now, path, out),
                LinkState::Ready => self.paths[path].more.backoff = self.settings.backoff,
                LinkState::Fencing | LinkState::Building | LinkState::Offered | LinkState::Connecting => {}
            },
        }
    }

    /// Takes up an event.
    pub fn handle(&mut self, now: Duration, event: Event, out: &mut Vec<Action>) {
        if self.phase == Phase::Over {
            return;
        }
        match event {
            Event::PortDown { path } if self.paths.knows(path) => {
                self.paths[path].port_up = false;
                // Who has nothing to go to leaves it to the device's tries, and to the watch, whether it comes up in time.
                if self.settings.enabled {
                    self.fail(now, path, Cause::Port, out);
                }
            }
            Event::PortUp { path } if self.paths.knows(path) => {
                self.paths[path].port_up = true;
                if self.phase == Phase::Stranded && !self.paths[path].state.is_live() {
                    self.timers.clear(Timer::Path(path));
                }
                self.advance(path, out);
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
                self.completed(now, link, work, status, out);
            }
            Event::Arrived { link, immediate } if link == self.active => self.arrive(now, immediate, out),
            Event::Heard(message) => self.hear(now, message, out),
            Event::Fenced { link, sure } if self.paths.is_in(link, LinkState::Fencing) => {
                if !sure && link == self.active {
                    // Steps went over it: a late one could land in a slot that is in use again.
                    return self.give_up(Reason::NotFenced(link), out);
                }
                self.paths[link.path].state = LinkState::Fenced;
                if self.phase == Phase::Fencing && link == self.active {
                    self.choose(now, out);
                }
                self.advance(link.path, out);
            }
            Event::Rebuilt { link, address } if self.paths.is_in(link, LinkState::Building) => {
                let path = &mut self.paths[link.path];
                (path.own, path.state) = (Some(address), LinkState::Offered);
                self.paths.tell(Message::Offer { link, address }, out);
                self.resend_soon(now);
            }
            Event::Connected { link } if self.paths.is_in(link, LinkState::Connecting) => {
                let probes = match self.phase {
                    // It need not be better than another one.
                    Phase::Stranded => 1,
                    _ => self.settings.probation_probes,
                };
                let path = &mut self.paths[link.path];
                (path.state, path.more.probes) = (LinkState::Probation, probes);
                self.probe(now, link.path, out);
            }
            Event::Failed { link } if self.paths.is_newest(link) => {
                self.fail(now, link.path, Cause::Build, out);
            }
            _ => {}
        }
    }

    /// A step's immediate, on the active path.
    fn arrive(&mut self, now: Duration, immediate: u32, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Flowing | Phase::Holding { .. } | Phase::Resuming => {}
            // What was here before the fence counts.
            Phase::Fencing => {}
            // The sender posts on it: it knows.
            Phase::Switching => self.flow(now, out),
            // Nothing is told of a queue pair that is fenced.
            Phase::Stranded | Phase::Over => return,
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
        self.watch(now);
        self.go_back(now, out);
    }

    fn completed(&mut self, now: Duration, link: Link, work: Work, status: Status, out: &mut Vec<Action>) {
        let state = self.paths[link.path].state;
        // The status before anything else.
        if !R::succeeded(status) {
            // The first error names the cause; those of the drain follow from it.
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
            self.watch(now);
        }
        if work != Work::Probe {
            return;
        }
        if link == self.active {
            self.probing = false;
            self.watch(now);
        } else if state == LinkState::Probation && self.paths[link.path].more.probing {
            let (interval, window) = (self.settings.probation, self.settings.recovery_window);
            let path = &mut self.paths[link.path];
            path.more.probing = false;
            path.more.probes = path.more.probes.saturating_sub(1);
            if path.more.probes > 0 {
                return self.timers.set(Timer::Path(link.path), now + interval);
            }
            path.state = LinkState::Ready;
            self.timers.set(Timer::Path(link.path), now + window);
            out.push(Action::Report(Report::Restored { link }));
            match self.phase {
                Phase::Stranded => self.choose(now, out),
                Phase::Flowing => self.fall_back(now, out),
                _ => {}
            }
        }
    }

    fn hear(&mut self, now: Duration, message: Message, out: &mut Vec<Action>) {
        match message {
            Message::Broken { epoch, generations } if epoch <= self.epoch => {
                for (path, generation) in self.paths.indices().zip(generations) {
                    if generation >= self.paths[path].generation {
                        self.fail(now, path, Cause::Peer, out);
                    }
                }
                if self.phase == Phase::Over {
                    return;
                }
                if epoch < self.epoch {
                    self.say_epoch(out);
                }
                let generations = self.paths.given_up();
                self.paths.tell(Message::Noted { generations }, out);
            }
            Message::Switched { epoch }
                if epoch == self.epoch && matches!(self.phase, Phase::Switching | Phase::Resuming) =>
            {
                self.flow(now, out);
            }
            Message::Drained { epoch, posted } if epoch == self.epoch + 1 => {
                if let Phase::Holding { drained } = &mut self.phase {
                    *drained = Some(posted);
                    self.settle();
                    self.go_back(now, out);
                }
            }
            Message::Accept { link, address } if self.paths.is_in(link, LinkState::Offered) => {
                self.paths[link.path].state = LinkState::Connecting;
                self.settle();
                out.push(Action::Connect { link, peer: address });
            }
            Message::GaveUp => self.give_up(Reason::Peer, out),
            _ => {}
        }
    }

    /// Gives up a queue pair; if it was the active one, an epoch will follow.
    fn fail(&mut self, now: Duration, path: u8, cause: Cause, out: &mut Vec<Action>) {
        if !self.paths[path].state.is_live() {
            return;
        }
        let link = self.paths.link(path);
        let active = link == self.active && self.flows();
        if active && !self.settings.enabled {
            return self.give_up(Reason::Off(cause), out);
        }
        out.push(Action::Report(Report::Broken { link, cause, active }));
        let longest = self.settings.backoff_max;
        let entry = &mut self.paths[path];
        entry.more.probing = false;
        let wait = entry.more.backoff;
        entry.more.backoff = (wait * 2).min(longest);
        let wait = match self.phase {
            Phase::Stranded => self.settings.backoff,
            _ => wait,
        };
        self.timers.set(Timer::Path(path), now + wait);
        if active {
            self.probing = false;
            self.phase = Phase::Fencing;
            self.timers.clear(Timer::Watch);
            self.limit(now);
        }
        self.paths[path].state = LinkState::Fencing;
        self.settle();
        if R::fences() {
            out.push(Action::Fence { link });
        } else {
            self.paths[path].state = LinkState::Fenced;
            if active {
                self.choose(now, out);
            }
        }
        if matches!(self.phase, Phase::Holding { .. }) && !self.has_better() {
            self.choose(now, out);
        }
    }

    /// Sets the end of what an operation waits for, unless it is set. Without one nothing is lost by waiting.
    fn limit(&mut self, now: Duration) {
        let is_between = matches!(self.phase, Phase::Fencing | Phase::Stranded | Phase::Switching);
        match self.busy && is_between {
            true => self.timers.ensure(Timer::GiveUp, now + self.settings.give_up),
            false => self.timers.clear(Timer::GiveUp),
        }
    }

    /// Rebuilds a path if it may be now.
    fn advance(&mut self, index: u8, out: &mut Vec<Action>) {
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
        self.paths[path].more.probing = true;
        self.timers.set(Timer::Path(path), now + self.settings.timeout);
        out.push(Action::Probe {
            link: self.paths.link(path),
        });
    }

    fn probe_active(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.probing = true;
        out.push(Action::Probe { link: self.active });
        self.watch(now);
    }

    /// Whether something that was posted to the active path should have ended by [`Timer::Watch`].
    fn is_owed(&self) -> bool {
        self.probing || self.credited.max(self.committed) < self.granted
    }

    /// Sets the time by which something should have happened on the active path.
    fn watch(&mut self, now: Duration) {
        match () {
            () if !self.flows() => self.timers.clear(Timer::Watch),
            () if self.is_owed() => {
                let timeout = self.paths.timeout(&self.settings);
                self.timers.set(Timer::Watch, now + timeout);
            }
            () if self.busy => self.timers.set(Timer::Watch, now + self.settings.probe),
            () => self.timers.clear(Timer::Watch),
        }
    }

    fn give_up(&mut self, reason: Reason, out: &mut Vec<Action>) {
        if reason != Reason::Peer {
            self.paths.tell(Message::GaveUp, out);
        }
        self.phase = Phase::Over;
        self.timers.clear_all();
        out.push(Action::GiveUp(reason));
    }
}

#[cfg(test)]
impl<R: Rules> Receiver<R> {
    /// Has a timer be over, whatever the time.
    pub(crate) fn fire_now(&mut self, timer: Timer, out: &mut Vec<Action>) {
        self.timers.clear(timer);
        self.fire(Duration::ZERO, timer, out);
    }

    pub(crate) fn armed(&self) -> impl Iterator<Item = Timer> {
        self.timers.armed()
    }
}
