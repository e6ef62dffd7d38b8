//! The sending end.

use ringsight_failover::{self as failover, Action, Event, Link, PathSet, Protocol, Status};

use super::{
    Control, Failover, Failure, Path, SLOTS, Slots,
    control::{NOTICE_BYTES, encode_notice},
    driver::Driver,
    end::{End, Role},
    work::PathEvent,
};

/// The size of a part of a step is a multiple of this, bytes.
const PART: usize = 128;

/// How a step was posted, for records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// Index of the path.
    pub path: usize,
    /// Number of the queue pair that carries its notice.
    pub qp: u32,
    /// Queue pairs that carry a part of it.
    pub parts: usize,
}

/// A position that is outstanding, kept to be posted again.
#[derive(Clone, Copy)]
struct Step {
    notice: [u8; NOTICE_BYTES],
    length: usize,
    bytes: usize,
    /// How it was posted last.
    posted: Posted,
}

/// The sending end.
pub type Sender = End<Sending>;

/// The part of an end that only the sender has.
pub struct Sending {
    slots: Slots,
    /// By position modulo [`SLOTS`]: the outstanding positions.
    steps: [Step; SLOTS],
    /// By position modulo [`SLOTS`]: completions that the position still needs on the active path.
    missing: [u8; SLOTS],
    /// Positions of which every part has completed on the active path, counted in order.
    completed: u64,
}

impl Role for Sending {
    type Machine = failover::Sender;

    fn act(&mut self, driver: &mut Driver, _: &failover::Sender, action: Action) {
        match action {
            Action::Replay { link, from, to } => self.replay(driver, link, from, to),
            other => driver.act(other),
        }
    }
}

impl Sending {
    /// Posts the requests of one position over a path.
    fn post_position(&mut self, driver: &mut Driver, link: Link, position: u64) -> Result<Posted, Failure> {
        let path = &mut driver.paths[usize::from(link.path)];
        let Step {
            notice,
            length,
            bytes,
            ..
        } = self.steps[position as usize % SLOTS];
        let (lead, count) = (path.lead(position), path.qps().len());
        let is_split = path.port().config().split;
        let (parts, part_bytes) = split(bytes, if is_split { count } else { 1 });
        self.missing[position as usize % SLOTS] = parts as u8;
        let posted = Posted {
            path: usize::from(link.path),
            qp: path.qps()[lead].number(),
            parts,
        };
        self.steps[position as usize % SLOTS].posted = posted;
        let (notice, length) = encode_notice(position, parts as u8, &notice[..length]);
        let slot = self.slots.at(position);
        for part in 0..parts {
            let end = ((part + 1) * part_bytes).min(bytes);
            // The first part carries the notice. The immediates of the others only signal that they have arrived.
            let head = if part == 0 { &notice[..length] } else { &[] };
            let data = slot + part * part_bytes..slot + end;
            path.post_step((lead + part) % count, position, head, data)?;
        }
        Ok(posted)
    }

    fn replay(&mut self, driver: &mut Driver, link: Link, from: u64, to: u64) {
        self.completed = from;
        for position in from..to {
            if let Err(failure) = self.post_position(driver, link, position) {
                return driver.fail(link, failure);
            }
        }
    }
}

impl Sender {
    /// An end over these paths; the first connected one is active. `control` is the control page of the paths, and `failover` holds the
    /// [`PortHealth`](crate::port_health::PortHealth) that they were made with.
    #[must_use]
    pub fn new(paths: Vec<Path>, control: Control, slots: Slots, failover: Failover) -> Self {
        let machine = |settings, count, ready| failover::Sender::new(settings, SLOTS as u64, count, ready);
        Self::over(paths, control, failover, machine, |_| Sending {
            slots,
            steps: [Step {
                notice: [0; NOTICE_BYTES],
                length: 0,
                bytes: 0,
                posted: Posted {
                    path: 0,
                    qp: 0,
                    parts: 0,
                },
            }; SLOTS],
            missing: [0; SLOTS],
            completed: 0,
        })
    }

    /// Positions posted so far: the number of the next one.
    #[must_use]
    pub fn posted(&self) -> u64 {
        self.machine.posted()
    }

    /// Positions that the peer has granted.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.machine.granted()
    }

    /// Positions that the peer's device has acknowledged. Their slots may be reused.
    #[must_use]
    pub fn acked(&self) -> u64 {
        self.machine.acked()
    }

    /// How one of the last [`SLOTS`] positions was posted. After a switch a position may have been posted again.
    #[must_use]
    pub fn posted_over(&self, position: u64) -> Posted {
        self.role.steps[position as usize % SLOTS].posted
    }

    /// Whether the next position may be posted.
    #[must_use]
    pub fn may_post(&self) -> bool {
        self.machine.link().is_some()
    }

    /// Posts the next position: `notice` for the peer's owner, and the first `bytes` bytes of its slot (0 if the notice holds them). The
    /// slot must stay unchanged until [`Sender::acked`] has passed the position.
    ///
    /// # Errors
    /// The connection has failed.
    ///
    /// # Panics
    /// If a slot or a notice has fewer bytes, or [`Sender::may_post`] is false.
    pub fn post(&mut self, notice: &[u8], bytes: usize) -> Result<Posted, Failure> {
        assert!(notice.len() <= NOTICE_BYTES && bytes <= self.role.slots.bytes);
        let link = self.machine.link().expect("a step that may be posted");
        let position = self.posted();
        let step = &mut self.role.steps[position as usize % SLOTS];
        step.notice[..notice.len()].copy_from_slice(notice);
        (step.length, step.bytes) = (notice.len(), bytes);
        self.machine.post(self.driver.now());
        let posted = self.role.post_position(&mut self.driver, link, position);
        if let Err(failure) = &posted {
            // It counts as posted: a switch posts again what the peer lacks.
            self.driver.fail(link, failure.clone());
            self.settle()?;
        }
        Ok(posted.unwrap_or(Posted {
            path: usize::from(link.path),
            qp: 0,
            parts: 0,
        }))
    }

    /// Polls completions and credits. Returns whether there was any completion.
    ///
    /// # Errors
    /// No path is left, or the peer grants more than it has slots.
    pub fn poll(&mut self) -> Result<bool, Failure> {
        self.check()?;
        let Self {
            driver,
            machine,
            role,
            ..
        } = self;
        let missing = &mut role.missing;
        let active = machine.active();
        // The paths over which a credit has arrived.
        let mut credited = PathSet::EMPTY;
        let recovers = machine.is_recovering();
        let any = driver.poll(usize::from(active.path), recovers, |link, event| match event {
            // Requests from before a switch do not count for those after it.
            PathEvent::Sent { position } if link == active => {
                let missing = &mut missing[position as usize % SLOTS];
                *missing = missing.saturating_sub(1);
            }
            PathEvent::Arrived { .. } => credited = credited.with(link.path),
            _ => {}
        });
        let completed = &mut self.role.completed;
        while *completed < self.machine.posted() && self.role.missing[*completed as usize % SLOTS] == 0 {
            *completed += 1;
        }
        if *completed > self.machine.acked() {
            // Before all other events: a fence must come after the completions that it flushes.
            let work = failover::Work::Step(*completed - 1);
            let status = Status::Success;
            self.driver.events.push_front(Event::Completed {
                link: active,
                work,
                status,
            });
        }
        for path in credited.iter() {
            let steps = self.driver.control.credit(usize::from(path));
            self.driver.events.push_back(Event::Granted { steps });
        }
        self.settle()?;
        Ok(any)
    }
}

/// Splits bytes into at most `count` parts. Returns the number of parts, and the size of each but the last, which is smaller or equal.
fn split(bytes: usize, count: usize) -> (usize, usize) {
    let part = bytes.div_ceil(count).next_multiple_of(PART);
    (bytes.div_ceil(part.max(1)).max(1), part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MAX_QPS;

    #[test]
    fn parts_cover_all_bytes_and_none_is_empty() {
        for bytes in [0, 1, 127, 128, 129, 1000, 4096, 4097, 1 << 20] {
            for count in 1..=MAX_QPS {
                let (parts, part) = split(bytes, count);
                assert!((1..=count).contains(&parts) && part % PART == 0);
                assert!(parts * part >= bytes && (parts - 1) * part <= bytes.saturating_sub(1));
            }
            assert_eq!(split(bytes, 1).0, 1);
        }
    }
}
