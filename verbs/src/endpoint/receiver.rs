//! The receiving end.

use ringsight_failover::{
    self as failover, Action, Event, Link, MESSAGE_BYTES, Message, Protocol, Status, Work,
};

use super::{
    Control, Failover, Failure, Path, SLOTS,
    control::NOTICE_BYTES,
    driver::Driver,
    end::{End, Role},
    work::PathEvent,
};

/// The parts of a position that have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Parts {
    /// Bit i: the part of queue pair i has arrived.
    mask: u16,
}

/// A step that has arrived.
#[derive(Clone, Copy)]
pub struct Arrived {
    /// Its position.
    pub position: u64,
    notice: [u8; NOTICE_BYTES],
    length: usize,
}

impl Arrived {
    /// The notice that the sender's owner gave.
    #[must_use]
    pub fn notice(&self) -> &[u8] {
        &self.notice[..self.length]
    }
}

/// The receiving end.
pub type Receiver = End<Receiving>;

/// The part of an end that only the receiver has.
pub struct Receiving {
    /// Positions taken by [`Receiver::take`]; at most those committed.
    taken: u64,
    /// The last credit: its queue pair, its value, and whether it is outstanding. Only one credit is outstanding at a time, so that credits are
    /// posted no faster than they complete.
    credit_link: Link,
    credited: u64,
    is_crediting: bool,
    /// By position modulo [`SLOTS`], for the positions after the committed ones.
    parts: [Parts; SLOTS],
    /// The queue pair that `parts` arrived on.
    parts_link: Link,
}

impl Role for Receiving {
    type Machine = failover::Receiver;

    fn act(&mut self, driver: &mut Driver, machine: &failover::Receiver, action: Action) {
        match action {
            Action::Credit { link, .. } => {
                if link != self.credit_link {
                    (self.credit_link, self.credited, self.is_crediting) = (link, 0, false);
                }
                self.credit(driver, machine.granted());
            }
            // The machine's `committed` says it.
            Action::Commit { .. } => {}
            other => driver.act(other),
        }
    }
}

impl Receiving {
    /// Posts the newest credit, `granted`, unless one is outstanding or the path is given up. After a switch it is posted again.
    fn credit(&mut self, driver: &mut Driver, granted: u64) {
        let link = self.credit_link;
        if self.is_crediting || self.credited >= granted {
            return;
        }
        let Some(path) = driver.path(link).filter(|path| !path.is_fenced()) else {
            return;
        };
        match path.post_credit(granted) {
            Ok(()) => (self.credited, self.is_crediting) = (granted, true),
            Err(failure) => driver.fail(link, failure),
        }
    }
}

impl Receiver {
    /// An end over these paths; the first connected one is active. `control` is the control page of the paths, and `failover` holds the
    /// [`PortHealth`](crate::port_health::PortHealth) that they were made with.
    #[must_use]
    pub fn new(paths: Vec<Path>, control: Control, failover: Failover) -> Self {
        Self::over(paths, control, failover, failover::Receiver::new, |active| {
            Receiving {
                taken: 0,
                credit_link: active,
                credited: 0,
                is_crediting: false,
                parts: Default::default(),
                parts_link: active,
            }
        })
    }

    /// Positions taken so far.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.role.taken
    }

    /// Whether the peer has acknowledged every grant.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.role.credited == self.machine.granted() && !self.role.is_crediting && !self.is_recovering()
    }

    /// The last message to the sender, to go outside RDMA when the communicator ends and all steps that were taken are consumed. `None` if
    /// other steps are left, or the connection has failed.
    #[must_use]
    pub fn goodbye(&self) -> Option<[u8; MESSAGE_BYTES]> {
        let is_whole = self.role.taken == self.machine.committed();
        self.machine
            .goodbye()
            .filter(|_| is_whole)
            .as_ref()
            .map(Message::encode)
    }

    /// Grants positions up to `granted`, counted since the connection began: the slots of the last [`SLOTS`] of them are free.
    ///
    /// # Errors
    /// The connection has failed.
    pub fn grant(&mut self, granted: u64) -> Result<(), Failure> {
        self.with_machine(|machine, now, out| machine.grant(now, granted, out));
        self.settle()
    }

    /// Polls arrivals and completions. Returns whether there was any.
    ///
    /// # Errors
    /// No path is left, or the peer sends a step that was not granted.
    pub fn poll(&mut self) -> Result<bool, Failure> {
        self.check()?;
        let Self {
            driver,
            machine,
            role,
            ..
        } = self;
        let Receiving {
            parts,
            parts_link,
            is_crediting,
            credit_link,
            ..
        } = role;
        let (active, committed, granted) = (machine.active(), machine.committed(), machine.granted());
        if *parts_link != active {
            // Parts of the previous path: uncommitted positions arrive again.
            (*parts, *parts_link) = (Default::default(), active);
        }
        let (mut excess, mut acknowledged) = (None, None);
        let recovers = machine.is_recovering();
        let any = driver.poll(usize::from(active.path), recovers, |link, event| match event {
            PathEvent::Arrived { qp, immediate } if link == active => {
                let Some(position) = position_of(immediate, committed) else {
                    return; // of a committed step, which arrived twice
                };
                match position < granted {
                    true => parts[position as usize % SLOTS].mask |= 1 << qp,
                    false => excess = Some(position),
                }
            }
            PathEvent::Credited { granted } if link == *credit_link => {
                (*is_crediting, acknowledged) = (false, Some(granted));
            }
            _ => {}
        });
        if let Some(position) = excess {
            let text = format!("the peer sends step {position} of the connection, granted are {granted}");
            return Err(self.active().failure(None, &text));
        }
        // Before all other events: a fence must come after the arrivals that precede it.
        self.commit(active)?;
        if let Some(granted) = acknowledged {
            let (work, status) = (Work::Credit(granted), Status::Success);
            let link = self.role.credit_link;
            let event = Event::Completed { link, work, status };
            self.with_machine(|machine, now, out| machine.handle(now, event, out));
        }
        self.settle()?;
        self.role.credit(&mut self.driver, self.machine.granted());
        self.settle()?;
        Ok(any)
    }

    /// Commits the steps that have arrived whole, in order.
    fn commit(&mut self, link: Link) -> Result<(), Failure> {
        loop {
            let position = self.machine.committed();
            let path = &self.driver.paths[usize::from(link.path)];
            let here = self.role.parts[position as usize % SLOTS].mask;
            // The notice has arrived with the immediate of the leading queue pair.
            if here & 1 << path.lead(position) == 0 {
                return Ok(());
            }
            let Some((parts, ..)) = self.driver.control.notice(position) else {
                let text = format!("step {position} of the connection came without its notice");
                return Err(path.failure(None, &text));
            };
            if usize::from(parts) > path.qps().len() {
                let text = format!("a step of {parts} parts, with {} queue pairs", path.qps().len());
                return Err(path.failure(None, &text));
            }
            if here.count_ones() < parts.into() {
                return Ok(());
            }
            self.role.parts[position as usize % SLOTS] = Parts::default();
            let immediate = position as u32;
            let event = Event::Arrived { link, immediate };
            self.with_machine(|machine, now, out| machine.handle(now, event, out));
            if self.machine.committed() == position {
                return Ok(());
            }
        }
    }

    /// The next committed step; each is returned once, in order.
    ///
    /// # Errors
    /// The notice of the step has been overwritten.
    pub fn take(&mut self) -> Result<Option<Arrived>, Failure> {
        let position = self.role.taken;
        if position == self.machine.committed() {
            return Ok(None);
        }
        let Some((_, notice, length)) = self.driver.control.notice(position) else {
            let text = format!("the notice of step {position} of the connection is gone");
            return Err(self.active().failure(None, &text));
        };
        self.role.taken += 1;
        Ok(Some(Arrived {
            position,
            notice,
            length,
        }))
    }
}

/// The position whose low 32 bits are `immediate`, of the [`SLOTS`] from `taken` on or later; `None` if it is before `taken`.
fn position_of(immediate: u32, taken: u64) -> Option<u64> {
    let ahead = immediate.wrapping_sub(taken as u32).cast_signed();
    u64::try_from(ahead).ok().map(|ahead| taken + ahead)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_follow_from_their_low_half() {
        for taken in [0, 5, u64::from(u32::MAX) - 2, 1 << 32, (7 << 32) + 9] {
            for ahead in 0..2 * SLOTS as u64 {
                assert_eq!(position_of((taken + ahead) as u32, taken), Some(taken + ahead));
            }
            for behind in 1..=taken.min(2 * SLOTS as u64) {
                assert_eq!(position_of((taken - behind) as u32, taken), None);
            }
        }
    }
}
