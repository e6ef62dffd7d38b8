//! The end that posts steps.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use crate::{
    Action, Address, Cause, Event, Link, LinkState, MAX_PATHS, Message, PathSet, PathView, Reason, Report,
    Rules, Settings, Sound, Status, Timer, Work, paths::Paths, timers::Timers,
};

mod leaving;
mod links;
mod saying;
#[cfg(test)]
mod tests;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Steps go over the active path.
    Flowing,
    /// The active path is given up; the receiver is to say how to go on.
    Waiting,
    /// The receiver has ended its communicator: nothing more goes to it or comes from it.
    Left,
    /// Given up.
    Over,
}

/// What this end keeps of a path beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Dealings {
    /// A newer one at the receiver, not taken up yet.
    offered: Option<(u32, Address)>,
    /// The newest generation that the receiver is known to know as given up.
    noted: u32,
    /// The receiver's queue pair that ours is to be connected to.
    peer: Option<Address>,
    /// Something got over it since it was connected, or the receiver goes by it.
    proven: bool,
}

/// The end that posts steps. See the [crate](crate) for what its driver does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender<R = Sound> {
    settings: Arc<Settings>,
    /// Slots of the receiver's FIFO.
    slots: u64,
    epoch: u32,
    /// Where steps go in this epoch.
    active: Link,
    phase: Phase,
    /// The receiver asked it to stop until this epoch: it is about to leave a path that works.
    held: Option<u32>,
    posted: u64,
    acked: u64,
    granted: u64,
    paths: Paths<Dealings>,
    timers: Timers,
    /// Time until the next [`Timer::Resend`].
    resend: Duration,
    busy: bool,
    /// A probe of the active path is out.
    probing: bool,
    /// The epoch has brought nothing over yet.
    recovering: bool,
    rules: PhantomData<R>,
}

impl<R: Rules> Sender<R> {
    /// An end with `count` paths into a FIFO of `slots` slots. Those in `ready` are connected as generation 1; both ends are given
    /// the same ones, and begin on the first. `None` if there are no paths, more than [`MAX_PATHS`], or none ready.
    #[must_use]
    pub fn new(settings: Arc<Settings>, slots: u64, count: usize, ready: PathSet) -> Option<Self> {
        let dealings = Dealings {
            offered: None,
            noted: 0,
            peer: None,
            proven: true,
        };
        let (paths, active) = Paths::new(count, ready, dealings)?;
        Some(Self {
            resend: settings.resend,
            settings,
            slots,
            epoch: 0,
            active,
            phase: Phase::Flowing,
            held: None,
            posted: 0,
            acked: 0,
            granted: 0,
            paths,
            timers: Timers::default(),
            busy: false,
            probing: false,
            recovering: false,
            rules: PhantomData,
        })
    }

    /// Where the next step is to be posted now; `None` while there is no credit for it or no path, or it is to change.
    #[must_use]
    pub fn link(&self) -> Option<Link> {
        let may = self.phase == Phase::Flowing && self.held.is_none();
        (may && self.posted < self.granted).then_some(self.active)
    }

    /// Steps posted since the connection began: the position of the next one.
    #[must_use]
    pub fn posted(&self) -> u64 {
        self.posted
    }

    /// Steps that the receiver is known to have: their sources are free.
    #[must_use]
    pub fn acked(&self) -> u64 {
        self.acked
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
        self.phase == Phase::Waiting || self.held.is_some()
    }

    /// Whether it has given up.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// As [`crate::Receiver::next_attempt`]: none, as it is the receiver that decides.
    #[must_use]
    pub fn next_attempt(&self, _path: u8) -> Option<Duration> {
        None
    }

    /// Its paths, in order.
    pub fn paths(&self) -> impl Iterator<Item = PathView> {
        self.paths.views(self.active)
    }

    /// The step at [`Sender::posted`] has been posted to [`Sender::link`].
    pub fn post(&mut self, now: Duration) {
        debug_assert!(
            self.link().is_some(),
            "a step was posted without a credit or a path"
        );
        self.posted += 1;
        if self.posted == self.acked + 1 {
            self.watch(now);
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

    /// When [`Sender::expire`] is to be called, if nothing happens before.
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
            Timer::Resend => self.say_broken(now, out),
            Timer::GiveUp => self.give_up(Reason::NoPath, out),
            Timer::Watch if self.phase != Phase::Flowing => {}
            Timer::Watch if self.probing || self.posted > self.acked => {
                self.fail(now, self.active.path, Cause::Timeout, out);
            }
            Timer::Watch => self.probe(now, out),
            Timer::Path(_) => {}
        }
    }

    /// Takes up an event.
    pub fn handle(&mut self, now: Duration, event: Event, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::Left | Phase::Over) {
            return;
        }
        match event {
            Event::PortDown { path } if self.paths.knows(path) => {
                self.paths[path].port_up = false;
                self.port_fell(now, path, out);
            }
            Event::PortUp { path } if self.paths.knows(path) => {
                self.paths[path].port_up = true;
                self.advance(path, out);
            }
            Event::Suspected { path }
                if path == self.active.path && self.phase == Phase::Flowing && !self.probing =>
            {
                self.probe(now, out);
            }
            Event::Condemned { path }
                if self.paths.knows(path) && self.paths[path].state == LinkState::Ready =>
            {
                self.fail(now, path, Cause::Shared, out);
            }
            Event::Completed { link, work, status } if self.paths.is_newest(link) => {
                self.completed(now, link, work, status, out);
            }
            Event::Granted { steps } => self.grant(now, steps, out),
            Event::Heard(message) => self.hear(now, message, out),
            Event::Fenced { link, .. } if self.paths.is_in(link, LinkState::Fencing) => {
                // Sure or not: what this end's queue pair may still read is ignored by a receiver that is fenced.
                self.paths[link.path].state = LinkState::Fenced;
                self.advance(link.path, out);
            }
            Event::Rebuilt { link, address } if self.paths.is_in(link, LinkState::Building) => {
                let path = &mut self.paths[link.path];
                path.own = Some(address);
                path.state = LinkState::Connecting;
                if let Some(peer) = path.more.peer {
                    out.push(Action::Connect { link, peer });
                }
            }
            Event::Connected { link } if self.paths.is_in(link, LinkState::Connecting) => {
                let path = &mut self.paths[link.path];
                (path.state, path.more.proven) = (LinkState::Ready, false);
                self.accept(link.path, out);
                // For what the process knows of the path: only the receiver decides by probes, and of those this end sees none.
                out.push(Action::Probe { link });
            }
            Event::Failed { link } if self.paths.is_newest(link) => {
                self.fail(now, link.path, Cause::Build, out);
            }
            _ => {}
        }
    }

    fn completed(&mut self, now: Duration, link: Link, work: Work, status: Status, out: &mut Vec<Action>) {
        let state = self.paths[link.path].state;
        // The status before anything else: a flushed work request is complete, too, but nobody has its bytes.
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
        if state == LinkState::Ready {
            self.prove(link.path, out);
        }
        if link != self.active {
            return;
        }
        match work {
            Work::Step(position) if position >= self.acked && position < self.posted => {
                self.acked = position + 1;
                self.got_over(out);
                self.watch(now);
                self.say_drained(out);
            }
            Work::Step(_) | Work::Credit(_) | Work::Message => {}
            Work::Probe => {
                self.probing = false;
                self.got_over(out);
                self.watch(now);
            }
        }
    }

    fn grant(&mut self, now: Duration, steps: u64, out: &mut Vec<Action>) {
        // The receiver grants at most as many steps as it has slots beyond those that it got.
        if steps > self.posted + self.slots {
            self.give_up(Reason::Protocol("it granted more steps than it has slots"), out);
        } else if steps > self.granted {
            let was_waiting = self.posted == self.granted;
            self.granted = steps;
            if was_waiting && self.posted == self.acked {
                self.watch(now);
            }
        }
    }

    fn hear(&mut self, now: Duration, message: Message, out: &mut Vec<Action>) {
        match message {
            Message::Switch {
                epoch,
                link,
                committed,
                granted,
            } if self.paths.knows(link.path) => {
                if epoch > self.epoch {
                    self.switch(now, epoch, link, committed, out);
                    if self.phase != Phase::Over {
                        self.grant(now, granted, out);
                    }
                } else if epoch == self.epoch && self.phase == Phase::Flowing {
                    // Our answer was lost.
                    self.paths.tell(Message::Switched { epoch }, out);
                }
            }
            // Who has given the path up has said so, and is told where to go on.
            Message::Hold { epoch, link }
                if epoch > self.epoch && link == self.active && self.phase == Phase::Flowing =>
            {
                self.held = Some(epoch);
                self.say_drained(out);
            }
            Message::Offer { link, address } if self.paths.knows(link.path) => {
                self.offer(now, link, address, out);
            }
            Message::Noted { generations } => {
                for (path, newest) in self.paths.indices().zip(generations) {
                    let noted = &mut self.paths[path].more.noted;
                    *noted = newest.max(*noted);
                }
                self.settle();
            }
            Message::Left { committed } => self.leave(committed, out),
            Message::GaveUp => self.give_up(Reason::Peer, out),
            _ => {}
        }
    }

    /// Begins an epoch: goes on from what the receiver has, on the path that it names.
    fn switch(&mut self, now: Duration, epoch: u32, link: Link, committed: u64, out: &mut Vec<Action>) {
        let has_stopped = self.held.take().is_some() && self.acked == self.posted;
        if link == self.active {
            // It stays where it was, and nothing was fenced.
            self.epoch = epoch;
            return match self.phase {
                Phase::Flowing => self.paths.tell(Message::Switched { epoch }, out),
                _ => self.say_broken_soon(now, out),
            };
        }
        if committed < self.acked || committed > self.posted {
            let what = match committed < self.acked {
                true => "it lost steps that its NIC had acknowledged",
                false => "it has steps that were never posted",
            };
            return self.give_up(Reason::Protocol(what), out);
        }
        let from = self.active;
        // The receiver has fenced it, so no step of it can arrive any more; or all have, and it stays as it is. If it has failed over
        // there meanwhile, an offer will say so.
        if !has_stopped {
            if self.paths.is_newest(from) {
                self.fence(from.path, Cause::Peer, out);
            }
            let old = &mut self.paths[from.path].more;
            old.noted = old.noted.max(from.generation);
        }
        (self.epoch, self.active) = (epoch, link);
        self.probing = false;
        self.acked = committed;
        self.recovering = true;
        if !self.paths.is_in(link, LinkState::Ready) {
            // It failed here meanwhile.
            self.phase = Phase::Waiting;
            self.limit(now);
            return self.say_broken_soon(now, out);
        }
        self.phase = Phase::Flowing;
        self.prove(link.path, out);
        let start = R::replay_from(committed, self.posted);
        out.push(Action::Report(Report::Switched {
            epoch,
            from: from.path,
            to: link.path,
            committed,
            replayed: self.posted - start,
        }));
        out.push(Action::Replay {
            link,
            from: start,
            to: self.posted,
        });
        self.paths.tell(Message::Switched { epoch }, out);
        self.settle();
        if self.acked == self.posted {
            self.got_over(out);
        }
        self.watch(now);
    }

    /// Something got over the path of this epoch, or there is nothing that has to.
    fn got_over(&mut self, out: &mut Vec<Action>) {
        if self.phase == Phase::Flowing && std::mem::take(&mut self.recovering) {
            self.timers.clear(Timer::GiveUp);
            out.push(Action::Report(Report::Recovered { epoch: self.epoch }));
        }
    }

    /// A path works. Says so of one that was rebuilt.
    fn prove(&mut self, path: u8, out: &mut Vec<Action>) {
        if !std::mem::replace(&mut self.paths[path].more.proven, true) {
            let link = self.paths.link(path);
            out.push(Action::Report(Report::Restored { link }));
        }
    }

    fn probe(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.probing = true;
        out.push(Action::Probe { link: self.active });
        self.watch(now);
    }

    /// Sets the end of what an operation waits for, unless it is set. Without one nothing is lost by waiting.
    fn limit(&mut self, now: Duration) {
        let is_between = match self.phase {
            Phase::Flowing => self.recovering,
            Phase::Waiting => true,
            Phase::Left | Phase::Over => false,
        };
        match self.busy && is_between {
            true => self.timers.ensure(Timer::GiveUp, now + self.settings.give_up),
            false => self.timers.clear(Timer::GiveUp),
        }
    }

    /// Sets the time by which something should have happened on the active path.
    fn watch(&mut self, now: Duration) {
        let wait = match () {
            () if self.phase != Phase::Flowing => None,
            () if self.probing || self.posted > self.acked => Some(self.paths.timeout(&self.settings)),
            () if self.busy => Some(self.settings.probe),
            () => None,
        };
        match wait {
            Some(wait) => self.timers.set(Timer::Watch, now + wait),
            None => self.timers.clear(Timer::Watch),
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
impl<R: Rules> Sender<R> {
    /// Has a timer be over, whatever the time.
    pub(crate) fn fire_now(&mut self, timer: Timer, out: &mut Vec<Action>) {
        self.timers.clear(timer);
        self.fire(Duration::ZERO, timer, out);
    }

    pub(crate) fn armed(&self) -> impl Iterator<Item = Timer> {
        self.timers.armed()
    }
}
