//! The sending end.

use ringsight_failover::{self as failover, Action, Event, Link, PathSet, Status};

use super::{
    Control, Failover, Failure, Path, SLOTS, Slots,
    control::{NOTICE_BYTES, encode_notice},
    driver::Driver,
    end::{End, Role},
    work::Ended,
};

/// A part of a step is a multiple of this.
const PART: usize = 128;

/// What a step's posting came to, for records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// Over which path.
    pub path: usize,
    /// Number of the queue pair of its notice.
    pub qp: u32,
    /// Queue pairs that carry a part of it.
    pub parts: usize,
}

/// What a position that is under way consists of, to be posted again.
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

/// What only the sending end has.
pub struct Sending {
    slots: Slots,
    /// By position modulo [`SLOTS`]: those that the peer is not known to have.
    steps: [Step; SLOTS],
    /// Completions that a position still misses on the active path, by position modulo [`SLOTS`].
    missing: [u8; SLOTS],
    /// Positions whose every part has ended well on the active path; in order.
    ended: u64,
}

impl Role for Sending {
    type Agreement = failover::Sender;

    fn act(&mut self, driver: &mut Driver, _: &failover::Sender, action: Action) {
        match action {
            Action::Replay { link, from, to } => self.replay(driver, link, from, to),
            other => driver.act(other),
        }
    }
}

impl Sending {
    /// The requests of one position over a path.
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
            // The first part goes with the notice; the others' immediates say only that they are there.
            let told = if part == 0 { &notice[..length] } else { &[] };
            let data = slot + part * part_bytes..slot + end;
            path.post_step((lead + part) % count, position, told, data)?;
        }
        Ok(posted)
    }

    fn replay(&mut self, driver: &mut Driver, link: Link, from: u64, to: u64) {
        self.ended = from;
        for position in from..to {
            if let Err(failure) = self.post_position(driver, link, position) {
                return driver.fail(link, failure);
            }
        }
    }
}

impl Sender {
    /// An end over these paths, the first that is connected of which is active. Their control page is `control`, and their hub that of
    /// `failover`.
    #[must_use]
    pub fn new(paths: Vec<Path>, control: Control, slots: Slots, failover: Failover) -> Self {
        let agree = |settings, count, ready| failover::Sender::new(settings, SLOTS as u64, count, ready);
        Self::over(paths, control, failover, agree, |_| Sending {
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
            ended: 0,
        })
    }

    /// Positions posted so far: the next one's number.
    #[must_use]
    pub fn posted(&self) -> u64 {
        self.agreement.posted()
    }

    /// Positions that the peer has granted.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.agreement.granted()
    }

    /// Positions that the peer's device has: their slots may be used again.
    #[must_use]
    pub fn acked(&self) -> u64 {
        self.agreement.acked()
    }

    /// How one of the last [`SLOTS`] positions that were posted was posted last: a switch may have had it posted again.
    #[must_use]
    pub fn posted_over(&self, position: u64) -> Posted {
        self.role.steps[position as usize % SLOTS].posted
    }

    /// Whether the next position may be posted.
    #[must_use]
    pub fn may_post(&self) -> bool {
        self.agreement.link().is_some()
    }

    /// Posts the next position: `notice` for the peer's owner, and the first `bytes` bytes of its slot (0: what there is goes with the
    /// notice). The slot stays as it is until [`Sender::acked`] has passed it.
    ///
    /// # Errors
    /// When the connection has failed.
    ///
    /// # Panics
    /// For more bytes than a slot or a notice has, and where it may not ([`Sender::may_post`]).
    pub fn post(&mut self, notice: &[u8], bytes: usize) -> Result<Posted, Failure> {
        assert!(notice.len() <= NOTICE_BYTES && bytes <= self.role.slots.bytes);
        let link = self.agreement.link().expect("a step that may be posted");
        let position = self.posted();
        let step = &mut self.role.steps[position as usize % SLOTS];
        step.notice[..notice.len()].copy_from_slice(notice);
        (step.length, step.bytes) = (notice.len(), bytes);
        self.agreement.post(self.driver.now());
        let posted = self.role.post_position(&mut self.driver, link, position);
        if let Err(failure) = &posted {
            // It counts as posted: what the peer lacks is posted again.
            self.driver.fail(link, failure.clone());
            self.settle()?;
        }
        Ok(posted.unwrap_or(Posted {
            path: usize::from(link.path),
            qp: 0,
            parts: 0,
        }))
    }

    /// Takes what has ended and what was granted; whether there was any.
    ///
    /// # Errors
    /// When no path is left, or the peer grants what it cannot have.
    pub fn poll(&mut self) -> Result<bool, Failure> {
        self.check()?;
        let Self {
            driver,
            agreement,
            role,
            ..
        } = self;
        let missing = &mut role.missing;
        let active = agreement.active();
        // By path: a write of the peer has told of a credit.
        let mut told = PathSet::EMPTY;
        let recovers = agreement.is_recovering();
        let any = driver.poll(usize::from(active.path), recovers, |link, ended| match ended {
            // What was posted before a switch says nothing of what was posted after.
            Ended::Sent { position } if link == active => {
                let missing = &mut missing[position as usize % SLOTS];
                *missing = missing.saturating_sub(1);
            }
            Ended::Arrived { .. } => told = told.with(link.path),
            _ => {}
        });
        let ended = &mut self.role.ended;
        while *ended < self.agreement.posted() && self.role.missing[*ended as usize % SLOTS] == 0 {
            *ended += 1;
        }
        if *ended > self.agreement.acked() {
            // Before all else that happened: a fence follows what it ends.
            let work = failover::Work::Step(*ended - 1);
            let status = Status::Success;
            self.driver.events.push_front(Event::Completed {
                link: active,
                work,
                status,
            });
        }
        for path in told.iter() {
            let steps = self.driver.control.credit(usize::from(path));
            self.driver.events.push_back(Event::Granted { steps });
        }
        self.settle()?;
        Ok(any)
    }
}

/// How many parts bytes are cut into, at most `count`, and the bytes of each but the last, which has what is left and some.
fn split(bytes: usize, count: usize) -> (usize, usize) {
    let part = bytes.div_ceil(count).next_multiple_of(PART);
    (bytes.div_ceil(part.max(1)).max(1), part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MOST_QPS;

    #[test]
    fn parts_are_the_whole_and_none_is_empty() {
        for bytes in [0, 1, 127, 128, 129, 1000, 4096, 4097, 1 << 20] {
            for count in 1..=MOST_QPS {
                let (parts, part) = split(bytes, count);
                assert!((1..=count).contains(&parts) && part % PART == 0);
                assert!(parts * part >= bytes && (parts - 1) * part <= bytes.saturating_sub(1));
            }
            assert_eq!(split(bytes, 1).0, 1);
        }
    }
}
