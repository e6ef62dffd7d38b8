//! The receiving end.

use ringsight_failover::{
    self as failover, Action, Event, Link, MESSAGE_BYTES, Message, Status, Work as Asked,
};

use super::{
    Control, Failover, Failure, Path, SLOTS,
    control::NOTICE_BYTES,
    driver::Driver,
    end::{End, Role},
    work::Ended,
};

/// What came of a position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Parts {
    /// The queue pairs whose part is here, as bits.
    mask: u16,
}

/// A step that is here.
#[derive(Clone, Copy)]
pub struct Arrived {
    /// Its position.
    pub position: u64,
    notice: [u8; NOTICE_BYTES],
    length: usize,
}

impl Arrived {
    /// What the sender's owner said of it.
    #[must_use]
    pub fn notice(&self) -> &[u8] {
        &self.notice[..self.length]
    }
}

/// The receiving end.
pub type Receiver = End<Receiving>;

/// What only the receiving end has.
pub struct Receiving {
    /// Positions that were taken ([`Receiver::take`]): behind those that are committed.
    taken: u64,
    /// Where the last credit went, what it said, and whether it is under way: one at a time, so that as many are posted as the peer
    /// takes and no more.
    credit_link: Link,
    credited: u64,
    is_crediting: bool,
    /// By position modulo [`SLOTS`], from the committed ones on.
    parts: [Parts; SLOTS],
    /// The link that `parts` came over.
    parts_link: Link,
}

impl Role for Receiving {
    type Agreement = failover::Receiver;

    fn act(&mut self, driver: &mut Driver, agreement: &failover::Receiver, action: Action) {
        match action {
            Action::Credit { link, .. } => {
                if link != self.credit_link {
                    (self.credit_link, self.credited, self.is_crediting) = (link, 0, false);
                }
                self.credit(driver, agreement.granted());
            }
            // Told by `committed`.
            Action::Commit { .. } => {}
            other => driver.act(other),
        }
    }
}

impl Receiving {
    /// Posts the newest credit, `granted`, unless one is under way. Not over a path that was given up: it is told anew after the switch.
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
    /// An end over these paths, the first that is connected of which is active. Their control page is `control`, and their hub that of
    /// `failover`.
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

    /// Whether the peer knows of every grant.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.role.credited == self.agreement.granted() && !self.role.is_crediting && !self.is_recovering()
    }

    /// What to tell the sender last of all, outside RDMA, when the communicator ends and the steps that were taken are done with; `None` if
    /// there are others, or the connection has failed.
    #[must_use]
    pub fn last_word(&self) -> Option<[u8; MESSAGE_BYTES]> {
        let is_whole = self.role.taken == self.agreement.committed();
        self.agreement
            .last_word()
            .filter(|_| is_whole)
            .as_ref()
            .map(Message::encode)
    }

    /// Grants positions up to `granted`, counted since the connection began: the slots of the last [`SLOTS`] of them are free.
    ///
    /// # Errors
    /// When the connection has failed.
    pub fn grant(&mut self, granted: u64) -> Result<(), Failure> {
        self.agree(|agreement, now, out| agreement.grant(now, granted, out));
        self.settle()
    }

    /// Takes what has arrived and ended; whether there was any.
    ///
    /// # Errors
    /// When no path is left, or the peer sends what it was not granted.
    pub fn poll(&mut self) -> Result<bool, Failure> {
        self.check()?;
        let Self {
            driver,
            agreement,
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
        let (active, committed, granted) = (agreement.active(), agreement.committed(), agreement.granted());
        if *parts_link != active {
            // Of the path before: what is not committed comes again.
            (*parts, *parts_link) = (Default::default(), active);
        }
        let (mut excess, mut known) = (None, None);
        let recovers = agreement.is_recovering();
        let any = driver.poll(usize::from(active.path), recovers, |link, ended| match ended {
            Ended::Arrived { qp, immediate } if link == active => {
                let Some(position) = position_of(immediate, committed) else {
                    return; // of a step that was committed: it came twice
                };
                match position < granted {
                    true => parts[position as usize % SLOTS].mask |= 1 << qp,
                    false => excess = Some(position),
                }
            }
            Ended::Credited { granted } if link == *credit_link => {
                (*is_crediting, known) = (false, Some(granted));
            }
            _ => {}
        });
        if let Some(position) = excess {
            let text = format!("the peer sends step {position} of the connection, granted are {granted}");
            return Err(self.active().failure(None, &text));
        }
        // Before all else that happened: a fence follows what it ends.
        self.commit(active)?;
        if let Some(granted) = known {
            let (work, status) = (Asked::Credit(granted), Status::Success);
            let link = self.role.credit_link;
            let event = Event::Completed { link, work, status };
            self.agree(|agreement, now, out| agreement.handle(now, event, out));
        }
        self.settle()?;
        self.role.credit(&mut self.driver, self.agreement.granted());
        self.settle()?;
        Ok(any)
    }

    /// Commits the steps of which all is here, in order.
    fn commit(&mut self, link: Link) -> Result<(), Failure> {
        loop {
            let position = self.agreement.committed();
            let path = &self.driver.paths[usize::from(link.path)];
            let here = self.role.parts[position as usize % SLOTS].mask;
            // The notice is there with the immediate of the queue pair that leads.
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
            self.agree(|agreement, now, out| agreement.handle(now, event, out));
            if self.agreement.committed() == position {
                return Ok(());
            }
        }
    }

    /// The next step, if all of it is here; each is given once, in order.
    ///
    /// # Errors
    /// When the peer told of a step and did not say what it is.
    pub fn take(&mut self) -> Result<Option<Arrived>, Failure> {
        let position = self.role.taken;
        if position == self.agreement.committed() {
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
    fn positions_are_found_by_their_low_half() {
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
