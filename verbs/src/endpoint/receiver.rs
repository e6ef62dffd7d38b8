//! The receiving end.

use super::{Control, Failure, Path, SLOTS, control::NOTICE_BYTES, path::Ended};

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
pub struct Receiver {
    paths: Vec<Path>,
    active: usize,
    control: Control,
    /// Positions that were taken ([`Receiver::take`]): the first that may arrive.
    taken: u64,
    /// Positions granted, and the last credit posted.
    granted: u64,
    credited: u64,
    /// A credit is under way: one at a time, so that as many are posted as the peer takes and no more.
    is_crediting: bool,
    /// By position modulo [`SLOTS`], from `taken` on.
    parts: [Parts; SLOTS],
}

impl Receiver {
    /// An end over these paths, the first of which is active. Their control page is `control`.
    #[must_use]
    pub fn new(paths: Vec<Path>, control: Control) -> Self {
        assert!(!paths.is_empty(), "a connection has a path");
        Self {
            paths,
            active: 0,
            control,
            taken: 0,
            granted: 0,
            credited: 0,
            is_crediting: false,
            parts: Default::default(),
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

    /// Positions taken so far.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Whether the peer knows of every grant.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.credited == self.granted && !self.is_crediting
    }

    /// Grants positions up to `granted`, counted since the connection began: the slots of the last [`SLOTS`] of them are free.
    ///
    /// # Errors
    /// When the device takes no more: the path has failed.
    pub fn grant(&mut self, granted: u64) -> Result<(), Failure> {
        self.granted = self.granted.max(granted);
        self.credit()
    }

    fn credit(&mut self) -> Result<(), Failure> {
        if !self.is_crediting && self.credited < self.granted {
            self.active().post_credit(self.granted)?;
            (self.credited, self.is_crediting) = (self.granted, true);
        }
        Ok(())
    }

    /// Takes what has arrived and ended; whether there was any.
    ///
    /// # Errors
    /// When the path has failed, or the peer sends what it was not granted.
    pub fn poll(&mut self) -> Result<bool, Failure> {
        let Self {
            paths,
            active,
            taken,
            granted,
            parts,
            is_crediting,
            ..
        } = self;
        let path = &paths[*active];
        let any = path.poll(|ended| {
            match ended {
                Ended::Arrived { qp, immediate } => {
                    let Some(position) = position_of(immediate, *taken) else {
                        return Ok(()); // of a step that was taken: it came twice
                    };
                    if position >= *granted {
                        let text = format!(
                            "the peer sends step {position} of the connection, granted are {granted}"
                        );
                        return Err(path.failure(None, &text));
                    }
                    parts[position as usize % SLOTS].mask |= 1 << qp;
                }
                Ended::Credited => *is_crediting = false,
                Ended::Sent { .. } => {}
            }
            Ok(())
        })?;
        self.credit()?;
        Ok(any)
    }

    /// The next step, if all of it is here; each is given once, in order.
    ///
    /// # Errors
    /// When the peer told of a step and did not say what it is.
    pub fn take(&mut self) -> Result<Option<Arrived>, Failure> {
        let position = self.taken;
        let path = self.active();
        let here = self.parts[position as usize % SLOTS].mask;
        // The notice is there with the immediate of the queue pair that leads.
        if here & 1 << path.lead(position) == 0 {
            return Ok(None);
        }
        let Some((parts, notice, length)) = self.control.notice(position) else {
            return Err(path.failure(
                None,
                &format!("step {position} of the connection came without its notice"),
            ));
        };
        if usize::from(parts) > path.qps().len() {
            return Err(path.failure(
                None,
                &format!("a step of {parts} parts, with {} queue pairs", path.qps().len()),
            ));
        }
        if here.count_ones() < parts.into() {
            return Ok(None);
        }
        self.parts[position as usize % SLOTS] = Parts::default();
        self.taken += 1;
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
