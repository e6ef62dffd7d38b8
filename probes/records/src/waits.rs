//! What a kernel waits for, in one word: a device writes it by one store, and readers find it whole.

use core::fmt::{self, Display, Formatter};

/// What a wait is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// That the peer begins the operation.
    Begin = 1,
    /// Data from it.
    Data = 2,
    /// Room for data that goes to it.
    Room = 3,
    /// That it is done with this rank's buffers.
    End = 4,
    /// For copies that copy engines make of this rank's data: for no rank. No kernel looks meanwhile.
    Copies = 5,
}

impl Phase {
    /// As in a snapshot's JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Begin => "begin",
            Self::Data => "data",
            Self::Room => "room",
            Self::End => "end",
            Self::Copies => "copies",
        }
    }
}

/// A wait of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waits {
    /// The low half of the operation's number.
    pub op: u16,
    /// Channel, below 64.
    pub channel: u8,
    /// What for.
    pub phase: Phase,
    /// The rank, if it is known.
    pub peer: Option<u16>,
    /// Which of the steps of data, counted on from whatever; its lower bits.
    pub step: u16,
}

impl Waits {
    /// Nanoseconds: who has not said for so long that it waits does not any more, or has stopped altogether.
    pub const SAID: u64 = 500_000_000;

    const UNKNOWN: u16 = u16::MAX;

    /// What a word says that was written at `said_ns`, 0 for never, if it is of this operation and new enough `now`. Of copies it is said once,
    /// when they begin.
    #[must_use]
    pub const fn said(word: u64, said_ns: u64, op: u32, now: u64) -> Option<Self> {
        match Self::of(word) {
            Some(waits)
                if waits.op == op as u16
                    && said_ns != 0
                    && (waits.is_for_copies() || now.saturating_sub(said_ns) < Self::SAID) =>
            {
                Some(waits)
            }
            _ => None,
        }
    }

    /// Whether it is for this rank's own copies, and for no other rank.
    #[must_use]
    pub const fn is_for_copies(self) -> bool {
        matches!(self.phase, Phase::Copies)
    }

    /// The word; never 0. Its upper seven bits are 0: devices count in them how often they have looked.
    #[must_use]
    pub const fn word(self) -> u64 {
        let peer = match self.peer {
            Some(peer) => peer,
            None => Self::UNKNOWN,
        };
        (self.phase as u64) << 54
            | ((self.channel & 63) as u64) << 48
            | (self.op as u64) << 32
            | (peer as u64) << 16
            | self.step as u64
    }

    /// What a word says, however often who wrote it has looked; `None` if it says nothing.
    #[must_use]
    pub const fn of(word: u64) -> Option<Self> {
        let phase = match word >> 54 & 7 {
            1 => Phase::Begin,
            2 => Phase::Data,
            3 => Phase::Room,
            4 => Phase::End,
            5 => Phase::Copies,
            _ => return None,
        };
        let peer = (word >> 16) as u16;
        Some(Self {
            op: (word >> 32) as u16,
            channel: (word >> 48) as u8 & 63,
            phase,
            peer: if peer == Self::UNKNOWN { None } else { Some(peer) },
            step: word as u16,
        })
    }
}

/// As in `waits for data from rank 1 (channel 0, step 12)`.
impl Display for Waits {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let (channel, step) = (self.channel, self.step);
        let of = |f: &mut Formatter<'_>, what: &str| match self.peer {
            Some(peer) => write!(f, "waits {what} rank {peer}"),
            None => write!(f, "waits {what} another rank"),
        };
        match self.phase {
            Phase::Begin => {
                of(f, "for")?;
                write!(f, " to begin it")
            }
            Phase::Data => {
                of(f, "for data from")?;
                write!(f, " (channel {channel}, step {step})")
            }
            Phase::Room => {
                of(f, "for room at")?;
                write!(f, " (channel {channel}, step {step})")
            }
            Phase::End => {
                of(f, "for")?;
                write!(f, " to be done with its buffers")
            }
            Phase::Copies => f.write_str("copy engines copy its data"),
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::string::ToString;

    use super::*;

    #[test]
    fn a_word_says_what_it_was_made_of() {
        assert_eq!(Waits::of(0), None);
        for phase in [Phase::Begin, Phase::Data, Phase::Room, Phase::End, Phase::Copies] {
            for peer in [None, Some(0), Some(65534)] {
                let waits = Waits {
                    op: 0xfedc,
                    channel: 63,
                    phase,
                    peer,
                    step: 0xabcd,
                };
                assert_eq!(Waits::of(waits.word()), Some(waits));
                assert_eq!(waits.word() >> 57, 0);
                assert_eq!(Waits::of(waits.word() | 77 << 57), Some(waits), "after 77 looks");
            }
        }
    }

    #[test]
    fn what_is_old_or_of_another_operation_is_not_said() {
        let waits = Waits {
            op: 9,
            channel: 2,
            phase: Phase::Room,
            peer: Some(1),
            step: 1,
        };
        let (word, op) = (waits.word(), 3 << 16 | 9);
        assert_eq!(Waits::said(word, 1000, op, 1000 + Waits::SAID - 1), Some(waits));
        assert_eq!(Waits::said(word, 1000, op, 1000 + Waits::SAID), None);
        assert_eq!(Waits::said(word, 1000, op + 1, 1001), None);
        assert_eq!(Waits::said(word, 0, op, 1), None);
        // While engines copy nobody says it again.
        let copies = Waits {
            phase: Phase::Copies,
            peer: None,
            ..waits
        };
        let said = |op| Waits::said(copies.word(), 1000, op, 1000 + 9 * Waits::SAID);
        assert_eq!((said(op), said(op + 1)), (Some(copies), None));
        assert!(copies.is_for_copies() && !waits.is_for_copies());
    }

    #[test]
    fn it_is_told_as_a_sentence() {
        let waits = Waits {
            op: 9,
            channel: 2,
            phase: Phase::Data,
            peer: Some(1),
            step: 12,
        };
        assert_eq!(
            waits.to_string(),
            "waits for data from rank 1 (channel 2, step 12)"
        );
        let begin = Waits {
            phase: Phase::Begin,
            peer: None,
            ..waits
        };
        assert_eq!(begin.to_string(), "waits for another rank to begin it");
        let copies = Waits {
            phase: Phase::Copies,
            ..begin
        };
        assert_eq!(copies.to_string(), "copy engines copy its data");
    }
}
