//! What both ends of a connection have: a driver with paths, and the state machine that decides which path is used.

use std::{os::fd::RawFd, sync::Arc, time::Duration};

use ringsight_failover::{Action, Link, MESSAGE_BYTES, PathHealth, PathSet, PathView, Protocol, Settings};

use super::{
    Control, Failure, Path,
    driver::{Driver, Failover, TimedReport},
};

/// The part of an end that differs between sender and receiver.
pub trait Role {
    /// The state machine of this end.
    type Machine: Protocol;

    /// Carries out an action of the machine. Actions that are the same at both ends go to the driver.
    fn act(&mut self, driver: &mut Driver, machine: &Self::Machine, action: Action);
}

/// An end of a connection.
pub struct End<R: Role> {
    pub(super) driver: Driver,
    pub(super) machine: R::Machine,
    pub(super) role: R,
    actions: Vec<Action>,
    failure: Option<Failure>,
}

/// State of an end at one moment. Times are by [`PortHealth::now`](crate::port_health::PortHealth::now).
#[derive(Clone, Debug)]
pub struct EndSnapshot {
    /// The moment.
    pub now: Duration,
    /// The epoch: the number of switches so far.
    pub epoch: u32,
    /// The end is between two paths.
    pub recovers: bool,
    /// The end has failed.
    pub failed: bool,
    /// Its paths, in order.
    pub paths: Vec<PathSnapshot>,
}

/// State of one path of an end.
#[derive(Clone, Debug)]
pub struct PathSnapshot {
    /// The path as this end sees it.
    pub view: PathView,
    /// The path as all connections of the process see it.
    pub health: PathHealth,
    /// When its failures will be forgotten, if it continues to work.
    pub recovered: Option<Duration>,
    /// When this end rebuilds it. `None` at the sender: only the receiver schedules rebuilds.
    pub next_attempt: Option<Duration>,
}

impl<R: Role> End<R> {
    /// An end over these paths. At least one is connected; the others could not be connected when the connection was made.
    pub(super) fn over(
        paths: Vec<Path>,
        control: Control,
        failover: Failover,
        machine: impl FnOnce(Arc<Settings>, usize, PathSet) -> Option<R::Machine>,
        role: impl FnOnce(Link) -> R,
    ) -> Self {
        let settings = Arc::clone(&failover.settings);
        let ready = (0_u8..).zip(&paths).filter(|(_, path)| path.is_connected());
        let ready = ready.fold(PathSet::EMPTY, |set, (index, _)| set.with(index));
        let machine =
            machine(settings, paths.len(), ready).expect("one or two paths, of which one is connected");
        Self {
            driver: Driver::new(paths, control, failover),
            role: role(machine.active()),
            machine,
            actions: Vec::new(),
            failure: None,
        }
    }

    /// Its paths.
    #[must_use]
    pub fn paths(&self) -> &[Path] {
        &self.driver.paths
    }

    /// The active path.
    #[must_use]
    pub fn active(&self) -> &Path {
        &self.driver.paths[usize::from(self.machine.active().path)]
    }

    /// The state of each path.
    pub fn path_views(&self) -> impl Iterator<Item = PathView> {
        self.machine.paths()
    }

    /// A number that changes whenever [`End::snapshot`] may have changed. It does not change with each step.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.driver.revision
    }

    /// The end's present state.
    #[must_use]
    pub fn snapshot(&self) -> EndSnapshot {
        let window = self.driver.recovery_window();
        let paths = self
            .driver
            .path_health()
            .into_iter()
            .zip(self.machine.paths())
            .map(|(health, view)| PathSnapshot {
                view,
                recovered: health.recovering_since.map(|since| since + window),
                health,
                next_attempt: self.machine.next_attempt(view.link.path),
            });
        EndSnapshot {
            now: self.driver.now(),
            epoch: self.machine.epoch(),
            recovers: self.machine.is_recovering(),
            failed: self.machine.has_given_up(),
            paths: paths.collect(),
        }
    }

    /// Whether the end is between two paths.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        self.machine.is_recovering()
    }

    /// Sets whether there is an operation for this end. An idle end does not probe its path.
    pub fn set_busy(&mut self, busy: bool) {
        self.machine.set_busy(self.driver.now(), busy);
    }

    /// Takes a message of the peer that came outside RDMA. The next poll processes it, after all completions until then: a thread that
    /// was away for longer than a time-out would otherwise see the time-out first, and leave a path that works.
    pub fn receive_message(&mut self, message: &[u8]) {
        self.driver.receive_message(message);
    }

    /// The next message for the peer, to be sent outside RDMA.
    pub fn take_outgoing(&mut self) -> Option<[u8; MESSAGE_BYTES]> {
        self.driver.take_outgoing()
    }

    /// The next report that has not been taken.
    pub fn take_report(&mut self) -> Option<TimedReport> {
        self.driver.take_report()
    }

    /// How long to wait at most before the next poll; `None`: until a descriptor is readable.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        // No descriptor reports the end of a drain.
        const DRAIN_POLL: Duration = Duration::from_millis(1);
        let due = self
            .machine
            .deadline()
            .map(|deadline| deadline.saturating_sub(self.driver.now()));
        match (due, self.driver.is_waiting()) {
            (due, false) => due,
            (due, true) => Some(due.map_or(DRAIN_POLL, |due| due.min(DRAIN_POLL))),
        }
    }

    /// Arms the descriptors of [`End::fds`] for the next completion. Poll once more before waiting for them.
    ///
    /// # Errors
    /// A call of a device failed.
    pub fn arm(&self) -> Result<(), Failure> {
        self.driver.arm()
    }

    /// The descriptors to wait for, once armed.
    #[must_use]
    pub fn fds(&self) -> Vec<RawFd> {
        self.driver.fds()
    }

    /// The failure of this end, as an error.
    pub(super) fn check(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Calls the machine with the present time and the list of its actions.
    pub(super) fn with_machine<T>(
        &mut self,
        call: impl FnOnce(&mut R::Machine, Duration, &mut Vec<Action>) -> T,
    ) -> T {
        call(&mut self.machine, self.driver.now(), &mut self.actions)
    }

    /// Delivers pending events to the machine, and carries out its actions, until there are none.
    pub(super) fn settle(&mut self) -> Result<(), Failure> {
        let mut actions = std::mem::take(&mut self.actions);
        let mut has_expired = false;
        loop {
            for action in actions.drain(..) {
                match action {
                    Action::GiveUp(reason) => self.failure = Some(self.driver.give_up(reason)),
                    action => self.role.act(&mut self.driver, &self.machine, action),
                }
            }
            // The time is read here because an action may take long, and a deadline that the machine sets now must not count that.
            let now = self.driver.now();
            if let Some(event) = self.driver.next_event() {
                self.machine.handle(now, event, &mut actions);
            } else if !has_expired && self.machine.deadline().is_some_and(|deadline| deadline <= now) {
                // After all events: a thread that was away for long finds the deadline over, but what it was set for has happened.
                has_expired = true;
                self.driver.revision += 1;
                self.machine.expire(now, &mut actions);
            } else {
                break;
            }
        }
        self.actions = actions;
        self.check()
    }
}
