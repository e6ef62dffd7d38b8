//! The sending end.

use super::{
    Control, Failure, Path, SLOTS, Slots,
    control::{NOTICE_BYTES, encode_notice},
    path::Ended,
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

/// The sending end.
pub struct Sender {
    paths: Vec<Path>,
    active: usize,
    control: Control,
    slots: Slots,
    /// Positions posted, and granted by the peer.
    posted: u64,
    granted: u64,
    /// Positions whose every part the peer's device has; in order.
    acked: u64,
    /// Completions that a position still misses, by position modulo [`SLOTS`].
    missing: [u8; SLOTS],
}

impl Sender {
    /// An end over these paths, the first of which is active. Their control page is `control`.
    #[must_use]
    pub fn new(paths: Vec<Path>, control: Control, slots: Slots) -> Self {
        assert!(!paths.is_empty(), "a connection has a path");
        Self {
            paths,
            active: 0,
            control,
            slots,
            posted: 0,
            granted: 0,
            acked: 0,
            missing: [0; SLOTS],
        }
    }

    /// Its paths.
    #[must_use]
    pub fn paths(&self) -> &[Path] {
        &self.paths
    }

    /// The path in use.
    #[must_use]
    pub fn active(&self) -> &Path {
        &self.paths[self.active]
    }

    /// Positions posted so far: the next one's number.
    #[must_use]
    pub fn posted(&self) -> u64 {
        self.posted
    }

    /// Positions that the peer has granted.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Positions that the peer's device has: their slots may be used again.
    #[must_use]
    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// Whether the next position may be posted.
    #[must_use]
    pub fn may_post(&self) -> bool {
        self.posted < self.granted
    }

    /// Posts the next position: `notice` for the peer's owner, and the first `bytes` bytes of its slot (0: what there is goes with the
    /// notice).
    ///
    /// # Errors
    /// When the device takes no more: the path has failed.
    ///
    /// # Panics
    /// For more bytes than a slot or a notice has.
    pub fn post(&mut self, notice: &[u8], bytes: usize) -> Result<Posted, Failure> {
        assert!(notice.len() <= NOTICE_BYTES && bytes <= self.slots.bytes);
        let position = self.posted;
        let posted = self.post_position(position, notice, bytes)?;
        self.missing[position as usize % SLOTS] = posted.parts as u8;
        self.posted += 1;
        Ok(posted)
    }

    /// The requests of one position over the active path.
    fn post_position(&self, position: u64, notice: &[u8], bytes: usize) -> Result<Posted, Failure> {
        let path = self.active();
        let (lead, count) = (path.lead(position), path.qps().len());
        let is_split = path.port().config().split;
        let (parts, part_bytes) = split(bytes, if is_split { count } else { 1 });
        let (notice, length) = encode_notice(position, parts as u8, notice);
        let slot = self.slots.at(position);
        for part in 0..parts {
            let end = ((part + 1) * part_bytes).min(bytes);
            // The first part goes with the notice; the others' immediates say only that they are there.
            let told = if part == 0 { &notice[..length] } else { &[] };
            let data = slot + part * part_bytes..slot + end;
            path.post_step((lead + part) % count, position, told, data)?;
        }
        Ok(Posted {
            path: self.active,
            qp: path.qps()[lead].number(),
            parts,
        })
    }

    /// Takes what has ended and what was granted; whether there was any.
    ///
    /// # Errors
    /// When the path has failed, or the peer grants what it cannot have.
    pub fn poll(&mut self) -> Result<bool, Failure> {
        let Self {
            paths,
            active,
            missing,
            ..
        } = self;
        let path = &paths[*active];
        let mut told = false;
        let any = path.poll(|ended| {
            match ended {
                Ended::Sent { position } => {
                    let missing = &mut missing[position as usize % SLOTS];
                    *missing = missing.saturating_sub(1);
                }
                Ended::Arrived { .. } => told = true,
                Ended::Credited => {}
            }
            Ok(())
        })?;
        while self.acked < self.posted && self.missing[self.acked as usize % SLOTS] == 0 {
            self.acked += 1;
        }
        if told {
            self.take_credit(self.control.credit(self.active))?;
        }
        Ok(any)
    }

    fn take_credit(&mut self, granted: u64) -> Result<(), Failure> {
        // An earlier word than one that was seen comes late: it says nothing new.
        if granted > self.posted + SLOTS as u64 {
            let text = format!(
                "the peer grants {granted} steps, with {} posted and {SLOTS} slots",
                self.posted
            );
            return Err(self.active().failure(None, &text));
        }
        self.granted = self.granted.max(granted);
        Ok(())
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
