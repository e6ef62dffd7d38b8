//! What both ends have: paths with their driver, and the agreement with the peer on which is used.

use std::{os::fd::RawFd, sync::Arc, time::Duration};

use ringsight_failover::{
    self as failover, Action, Event, Link, MESSAGE_BYTES, PathSet, PathView, Rules, Settings,
};

use super::{Condition, Control, Failover, Failure, Noted, Path, driver::Driver};

/// The machine that an end follows; both have these.
pub trait Agreement {
    /// Where steps go.
    fn active(&self) -> Link;
    /// Whether it is between two paths.
    fn is_recovering(&self) -> bool;
    /// What the paths are in.
    fn views(&self) -> impl Iterator<Item = PathView>;
    /// Number of the last switch.
    fn epoch(&self) -> u32;
    /// Whether it has given up.
    fn is_over(&self) -> bool;
    /// When a path that failed is next made anew, if this end has set a time.
    fn next_attempt(&self, path: u8) -> Option<Duration>;
    /// Whether there is an operation.
    fn set_busy(&mut self, now: Duration, busy: bool);
    /// When it is to be called, if nothing happens before.
    fn deadline(&self) -> Option<Duration>;
    /// Does what is due.
    fn expire(&mut self, now: Duration, out: &mut Vec<Action>);
    /// Takes up an event.
    fn handle(&mut self, now: Duration, event: Event, out: &mut Vec<Action>);
}

macro_rules! agreement {
    ($machine:ident) => {
        impl<R: Rules> Agreement for failover::$machine<R> {
            fn active(&self) -> Link {
                self.active()
            }

            fn is_recovering(&self) -> bool {
                self.is_recovering()
            }

            fn views(&self) -> impl Iterator<Item = PathView> {
                self.paths()
            }

            fn epoch(&self) -> u32 {
                self.epoch()
            }

            fn is_over(&self) -> bool {
                self.is_over()
            }

            fn next_attempt(&self, path: u8) -> Option<Duration> {
                self.next_attempt(path)
            }

            fn set_busy(&mut self, now: Duration, busy: bool) {
                self.set_busy(now, busy);
            }

            fn deadline(&self) -> Option<Duration> {
                self.deadline()
            }

            fn expire(&mut self, now: Duration, out: &mut Vec<Action>) {
                self.expire(now, out);
            }

            fn handle(&mut self, now: Duration, event: Event, out: &mut Vec<Action>) {
                self.handle(now, event, out);
            }
        }
    };
}

agreement!(Sender);
agreement!(Receiver);

/// What only one of the two ends does.
pub trait Role {
    /// The machine that it follows.
    type Agreement: Agreement;

    /// Does what the agreement wants of this end; what it wants of either is the driver's.
    fn act(&mut self, driver: &mut Driver, agreement: &Self::Agreement, action: Action);
}

/// An end of a connection.
pub struct End<R: Role> {
    pub(super) driver: Driver,
    pub(super) agreement: R::Agreement,
    pub(super) role: R,
    actions: Vec<Action>,
    failure: Option<Failure>,
}

impl<R: Role> End<R> {
    /// An end over these paths. Those that are not connected could not be when the connection was made; one is.
    pub(super) fn over(
        paths: Vec<Path>,
        control: Control,
        failover: Failover,
        agree: impl FnOnce(Arc<Settings>, usize, PathSet) -> Option<R::Agreement>,
        role: impl FnOnce(Link) -> R,
    ) -> Self {
        let settings = Arc::clone(&failover.settings);
        let ready = (0_u8..).zip(&paths).filter(|(_, path)| path.is_connected());
        let ready = ready.fold(PathSet::EMPTY, |set, (index, _)| set.with(index));
        let agreement =
            agree(settings, paths.len(), ready).expect("one or two paths, of which one is connected");
        Self {
            driver: Driver::new(paths, control, failover),
            role: role(agreement.active()),
            agreement,
            actions: Vec::new(),
            failure: None,
        }
    }

    /// Its paths.
    #[must_use]
    pub fn paths(&self) -> &[Path] {
        &self.driver.paths
    }

    /// The path in use.
    #[must_use]
    pub fn active(&self) -> &Path {
        &self.driver.paths[usize::from(self.agreement.active().path)]
    }

    /// What its paths are in.
    pub fn views(&self) -> impl Iterator<Item = PathView> {
        self.agreement.views()
    }

    /// Changes when [`End::condition`] may have; not with each step.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.driver.changes
    }

    /// What it is in, for whoever wants to see it.
    #[must_use]
    pub fn condition(&self) -> Condition {
        Condition::new(&self.driver, &self.agreement)
    }

    /// Whether it is between two paths.
    #[must_use]
    pub fn is_recovering(&self) -> bool {
        self.agreement.is_recovering()
    }

    /// Whether there is an operation for it: an idle end does not ask whether its path works.
    pub fn set_busy(&mut self, busy: bool) {
        self.agreement.set_busy(self.driver.now(), busy);
    }

    /// A message of the peer that came outside RDMA. The next poll takes it up, after what has ended by then: who was away for longer
    /// than a time-out would else find that over first, and leave a path that is good.
    pub fn hear(&mut self, message: &[u8]) {
        self.driver.hear(message);
    }

    /// A message for the peer, to go outside RDMA, too.
    pub fn take_outgoing(&mut self) -> Option<[u8; MESSAGE_BYTES]> {
        self.driver.take_outgoing()
    }

    /// Something for the record.
    pub fn take_noted(&mut self) -> Option<Noted> {
        self.driver.take_noted()
    }

    /// How long to wait at most before the next poll; `None`: until a descriptor tells of something.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        // No descriptor tells of a drain that is over.
        const SOON: Duration = Duration::from_millis(1);
        let due = self
            .agreement
            .deadline()
            .map(|deadline| deadline.saturating_sub(self.driver.now()));
        match (due, self.driver.is_waiting()) {
            (due, false) => due,
            (due, true) => Some(due.map_or(SOON, |due| due.min(SOON))),
        }
    }

    /// Has its descriptors tell of what happens next. Poll once more before waiting for them.
    ///
    /// # Errors
    /// As the device says.
    pub fn arm(&self) -> Result<(), Failure> {
        self.driver.arm()
    }

    /// What to wait for once armed.
    #[must_use]
    pub fn fds(&self) -> Vec<RawFd> {
        self.driver.fds()
    }

    /// What it failed with.
    pub(super) fn check(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Tells the agreement something that is not the driver's to find, with the time.
    pub(super) fn agree<T>(
        &mut self,
        tell: impl FnOnce(&mut R::Agreement, Duration, &mut Vec<Action>) -> T,
    ) -> T {
        tell(&mut self.agreement, self.driver.now(), &mut self.actions)
    }

    /// Takes up what has happened, and does what follows.
    pub(super) fn settle(&mut self) -> Result<(), Failure> {
        let mut actions = std::mem::take(&mut self.actions);
        let mut is_on_time = false;
        loop {
            for action in actions.drain(..) {
                match action {
                    Action::GiveUp(reason) => self.failure = Some(self.driver.given_up(reason)),
                    action => self.role.act(&mut self.driver, &self.agreement, action),
                }
            }
            // As late as it is: to do something may take its time, and what is waited for from here on has not waited yet.
            let now = self.driver.now();
            if let Some(event) = self.driver.next_event() {
                self.agreement.handle(now, event, &mut actions);
            } else if !is_on_time && self.agreement.deadline().is_some_and(|deadline| deadline <= now) {
                // After all that has happened: who was away for long finds the deadline over, and what it is about done.
                is_on_time = true;
                self.driver.changes += 1;
                self.agreement.expire(now, &mut actions);
            } else {
                break;
            }
        }
        self.actions = actions;
        self.check()
    }
}
