//! The end that posts steps.
//!
//! | phase | meaning | left by |
//! |---|---|---|
//! | `Flowing` | steps go over the active path | a break of the active path (→ `Waiting`), [`Message::Left`] (→ `PeerLeft`) |
//! | `Waiting` | the active path is given up; the receiver decides how to go on | [`Message::Switch`] to a path that is ready (→ `Flowing`) |
//! | `PeerLeft` | the receiver has ended its communicator | – |
//! | `GaveUp` | this end has given up | – |
//!
//! Invariants: `acked ≤ posted ≤ granted ≤ posted + slots`, and the epoch never decreases.

use std::{marker::PhantomData, sync::Arc, time::Duration};

use crate::{
    links::{Cause, Link, LinkState, PathSet, PathView, Status, Work},
    message::{Address, Message},
    paths::Paths,
    protocol::{Action, Event, Protocol, Reason, Report, Timed},
    rules::{Rules, Sound},
    settings::Settings,
    timers::{Timer, Timers},
};

mod rebuild;
#[cfg(test)]
mod tests;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    /// Steps go over the active path.
    Flowing,
    /// The active path is given up; the receiver decides how to go on.
    Waiting,
    /// The receiver has ended its communicator. This end sends and expects nothing more.
    PeerLeft,
    /// This end has given up.
    GaveUp,
}

/// What the sender keeps of a path beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct SenderPath {
    /// A newer generation that the receiver has offered and this end has not begun to build.
    offered: Option<(u32, Address)>,
    /// The newest generation that the receiver is known to have given up.
    known_broken: u32,
    /// The receiver's queue pair, to which this end's is connected.
    peer: Option<Address>,
    /// Something has crossed the path since it was connected, or the receiver has switched to it.
    proven: bool,
}

/// The end that posts steps. The [crate](crate) says what its driver does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sender<R = Sound> {
    settings: Arc<Settings>,
    /// Slots of the receiver's FIFO.
    slots: u64,
    epoch: u32,
    active: Link,
    phase: Phase,
    /// The receiver asked this end to stop until this epoch: it is about to leave a path that works.
    held: Option<u32>,
    posted: u64,
    acked: u64,
    granted: u64,
    paths: Paths<SenderPath>,
    timers: Timers,
    /// Time until the next [`Timer::Resend`].
    resend: Duration,
    busy: bool,
    /// A probe of the active path is outstanding.
    probing: bool,
    /// Nothing has crossed the active path in this epoch yet.
    recovering: bool,
    rules: PhantomData<R>,
}

impl<R: Rules> Sender<R> {
    /// An end with `count` paths into a FIFO of `slots` slots.
    ///
    /// The paths in `ready` are connected as generation 1. Both ends must be given the same set; they begin on its first path. `None`
    /// if there are no paths, more than [`MAX_PATHS`](crate::MAX_PATHS), or none is ready.
    #[must_use]
    pub fn new(settings: Arc<Settings>, slots: u64, count: usize, ready: PathSet) -> Option<Self> {
        let extra = SenderPath {
            offered: None,
            known_broken: 0,
            peer: None,
            proven: true,
        };
        let (paths, active) = Paths::new(count, ready, extra)?;
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

    /// The queue pair for the next step. `None` without credit, without a path, or while the receiver holds this end.
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

    /// Steps that the receiver is known to have. The driver may reuse their sources.
    #[must_use]
    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// Steps granted since the connection began.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Notes that the driver has posted the step at [`Sender::posted`] to [`Sender::link`].
    pub fn post(&mut self, now: Duration) {
        debug_assert!(
            self.link().is_some(),
            "a step was posted without a credit or a path"
        );
        self.posted += 1;
        if self.posted == self.acked + 1 {
            self.arm_progress_timer(now);
        }
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
        // The status before anything else: a flushed work request is complete, but nobody has its bytes.
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
        if state == LinkState::Ready {
            self.mark_proven(link.path, out);
        }
        if link != self.active {
            return;
        }
        match work {
            Work::Step(position) if position >= self.acked && position < self.posted => {
                self.acked = position + 1;
                self.on_first_progress(out);
                self.arm_progress_timer(now);
                self.send_drained(out);
            }
            Work::Step(_) | Work::Credit(_) | Work::Message => {}
            Work::Probe => {
                self.probing = false;
                self.on_first_progress(out);
                self.arm_progress_timer(now);
            }
        }
    }

    fn on_grant(&mut self, now: Duration, steps: u64, out: &mut Vec<Action>) {
        // The receiver grants at most as many steps as it has slots beyond those that it got.
        if steps > self.posted + self.slots {
            self.give_up(Reason::Protocol("it granted more steps than it has slots"), out);
        } else if steps > self.granted {
            let was_waiting = self.posted == self.granted;
            self.granted = steps;
            if was_waiting && self.posted == self.acked {
                self.arm_progress_timer(now);
            }
        }
    }

    fn on_message(&mut self, now: Duration, message: Message, out: &mut Vec<Action>) {
        match message {
            Message::Switch {
                epoch,
                link,
                committed,
                granted,
            } if self.paths.knows(link.path) => {
                if epoch > self.epoch {
                    self.switch(now, epoch, link, committed, out);
                    if self.phase != Phase::GaveUp {
                        self.on_grant(now, granted, out);
                    }
                } else if epoch == self.epoch && self.phase == Phase::Flowing {
                    // The previous answer was lost.
                    self.paths.send(Message::Switched { epoch }, out);
                }
            }
            // In another phase this end has given the path up and said so: the receiver answers with a switch.
            Message::Hold { epoch, link }
                if epoch > self.epoch && link == self.active && self.phase == Phase::Flowing =>
            {
                self.held = Some(epoch);
                self.send_drained(out);
            }
            Message::Offer { link, address } if self.paths.knows(link.path) => {
                self.on_offer(now, link, address, out);
            }
            Message::BrokenAck { generations } => {
                for (path, newest) in self.paths.indices().zip(generations) {
                    let known_broken = &mut self.paths[path].extra.known_broken;
                    *known_broken = newest.max(*known_broken);
                }
                self.stop_resending();
            }
            Message::Left { committed } => self.on_peer_left(committed, out),
            Message::GaveUp => self.give_up(Reason::Peer, out),
            _ => {}
        }
    }

    /// Begins an epoch: continues from the receiver's committed position, on the path that the receiver names.
    fn switch(&mut self, now: Duration, epoch: u32, link: Link, committed: u64, out: &mut Vec<Action>) {
        let has_stopped = self.held.take().is_some() && self.acked == self.posted;
        if link == self.active {
            // The receiver stays on the active path, and nothing was fenced.
            self.epoch = epoch;
            return match self.phase {
                Phase::Flowing => self.paths.send(Message::Switched { epoch }, out),
                _ => self.start_sending_broken(now, out),
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
        // The receiver has fenced the old path, so no step of it can still arrive. Or this end had stopped and every step has arrived:
        // then the old path stays as it is. If it has failed at the receiver meanwhile, an offer will say so.
        if !has_stopped {
            if self.paths.is_newest(from) {
                self.fence(from.path, Cause::Peer, out);
            }
            let old = &mut self.paths[from.path].extra;
            old.known_broken = old.known_broken.max(from.generation);
        }
        (self.epoch, self.active) = (epoch, link);
        self.probing = false;
        self.acked = committed;
        self.recovering = true;
        if !self.paths.is_in(link, LinkState::Ready) {
            // The new path has failed here meanwhile.
            self.phase = Phase::Waiting;
            self.arm_give_up_timer(now);
            return self.start_sending_broken(now, out);
        }
        self.phase = Phase::Flowing;
        self.mark_proven(link.path, out);
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
        self.paths.send(Message::Switched { epoch }, out);
        self.stop_resending();
        if self.acked == self.posted {
            self.on_first_progress(out);
        }
        self.arm_progress_timer(now);
    }

    /// Something has crossed the path of this epoch, or nothing is outstanding: the recovery is over.
    fn on_first_progress(&mut self, out: &mut Vec<Action>) {
        if self.phase == Phase::Flowing && std::mem::take(&mut self.recovering) {
            self.timers.clear(Timer::GiveUp);
            out.push(Action::Report(Report::Recovered { epoch: self.epoch }));
        }
    }

    /// Notes that a path works, and reports it if the path was rebuilt.
    fn mark_proven(&mut self, path: u8, out: &mut Vec<Action>) {
        if !std::mem::replace(&mut self.paths[path].extra.proven, true) {
            let link = self.paths.link(path);
            out.push(Action::Report(Report::Restored { link }));
        }
    }

    fn probe(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.probing = true;
        out.push(Action::Probe { link: self.active });
        self.arm_progress_timer(now);
    }

    /// Limits a recovery that an operation waits for. Without an operation nothing is lost by waiting, and the timer is cleared.
    fn arm_give_up_timer(&mut self, now: Duration) {
        let is_between = match self.phase {
            Phase::Flowing => self.recovering,
            Phase::Waiting => true,
            Phase::PeerLeft | Phase::GaveUp => false,
        };
        match self.busy && is_between {
            true => self.timers.ensure(Timer::GiveUp, now + self.settings.give_up),
            false => self.timers.clear(Timer::GiveUp),
        }
    }

    /// Sets the time by which something must happen on the active path.
    fn arm_progress_timer(&mut self, now: Duration) {
        let wait = match () {
            () if self.phase != Phase::Flowing => None,
            () if self.probing || self.posted > self.acked => Some(self.paths.timeout(&self.settings)),
            () if self.busy => Some(self.settings.probe),
            () => None,
        };
        match wait {
            Some(wait) => self.timers.set(Timer::Progress, now + wait),
            None => self.timers.clear(Timer::Progress),
        }
    }

    /// The receiver has ended its communicator, having committed `committed` steps.
    ///
    /// This is its last message. Where acknowledgements were lost, nothing else will ever acknowledge those steps. Whatever is still
    /// under way over a path is older than this message.
    fn on_peer_left(&mut self, committed: u64, out: &mut Vec<Action>) {
        if committed < self.acked || committed > self.posted {
            return self.give_up(Reason::Protocol("it left with other steps than were sent"), out);
        }
        self.acked = committed;
        (self.phase, self.held, self.probing) = (Phase::PeerLeft, None, false);
        self.timers.clear_all();
    }

    /// Whether the receiver may not know yet of a path that is broken here. It shows that it knows by [`Message::BrokenAck`], an epoch,
    /// or an offer.
    fn has_unacknowledged_break(&self) -> bool {
        self.phase == Phase::Waiting
            || self.paths.indices().any(|path| {
                let path = self.paths[path];
                !path.state.is_live()
                    && path.extra.known_broken < path.generation
                    && path.extra.offered.is_none()
            })
    }

    /// Tells a receiver that holds this end that nothing is outstanding any more. The receiver repeats its request until then.
    fn send_drained(&self, out: &mut Vec<Action>) {
        if let Some(epoch) = self.held
            && self.acked == self.posted
        {
            let posted = self.posted;
            self.paths.send(Message::Drained { epoch, posted }, out);
        }
    }

    /// Sends [`Message::Broken`] now, and repeats it from the shortest interval on.
    fn start_sending_broken(&mut self, now: Duration, out: &mut Vec<Action>) {
        self.resend = self.settings.resend;
        self.send_broken(now, out);
    }

    fn send_broken(&mut self, now: Duration, out: &mut Vec<Action>) {
        let generations = self.paths.given_up_generations();
        let epoch = self.epoch;
        self.paths.send(Message::Broken { epoch, generations }, out);
        self.timers.set(Timer::Resend, now + self.resend);
        self.resend = (self.resend * 2).min(Settings::RESEND_MAX);
        self.stop_resending();
    }

    /// Stops repeating [`Message::Broken`] once the receiver knows everything.
    fn stop_resending(&mut self) {
        if !self.has_unacknowledged_break() {
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

impl<R: Rules> Timed for Sender<R> {
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
            Timer::Resend => self.send_broken(now, out),
            Timer::GiveUp => self.give_up(Reason::NoPath, out),
            Timer::Progress if self.phase != Phase::Flowing => {}
            Timer::Progress if self.probing || self.posted > self.acked => {
                self.fail(now, self.active.path, Cause::Timeout, out);
            }
            Timer::Progress => self.probe(now, out),
            Timer::Path(_) => {}
        }
    }
}

impl<R: Rules> Protocol for Sender<R> {
    fn active(&self) -> Link {
        self.active
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn is_recovering(&self) -> bool {
        self.phase == Phase::Waiting || self.held.is_some()
    }

    fn has_given_up(&self) -> bool {
        self.phase == Phase::GaveUp
    }

    fn paths(&self) -> impl Iterator<Item = PathView> {
        self.paths.views(self.active)
    }

    fn handle(&mut self, now: Duration, event: Event, out: &mut Vec<Action>) {
        if matches!(self.phase, Phase::PeerLeft | Phase::GaveUp) {
            return;
        }
        match event {
            Event::PortDown { path } if self.paths.knows(path) => {
                self.paths[path].port_up = false;
                self.on_port_down(now, path, out);
            }
            Event::PortUp { path } if self.paths.knows(path) => {
                self.paths[path].port_up = true;
                self.rebuild_if_offered(path, out);
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
                self.on_completion(now, link, work, status, out);
            }
            Event::Granted { steps } => self.on_grant(now, steps, out),
            Event::Received(message) => self.on_message(now, message, out),
            Event::Fenced { link, .. } if self.paths.is_in(link, LinkState::Fencing) => {
                // Sure or not: a fenced receiver ignores whatever this queue pair may still read and send.
                self.paths[link.path].state = LinkState::Fenced;
                self.rebuild_if_offered(link.path, out);
            }
            Event::Rebuilt { link, address } if self.paths.is_in(link, LinkState::Building) => {
                let path = &mut self.paths[link.path];
                path.own = Some(address);
                path.state = LinkState::Connecting;
                if let Some(peer) = path.extra.peer {
                    out.push(Action::Connect { link, peer });
                }
            }
            Event::Connected { link } if self.paths.is_in(link, LinkState::Connecting) => {
                let path = &mut self.paths[link.path];
                (path.state, path.extra.proven) = (LinkState::Ready, false);
                self.send_accept(link.path, out);
                // Only the receiver decides by probes, and this end sees none of those. This one is for the process's health table.
                out.push(Action::Probe { link });
            }
            Event::Failed { link } if self.paths.is_newest(link) => {
                self.fail(now, link.path, Cause::Build, out);
            }
            _ => {}
        }
    }
}
