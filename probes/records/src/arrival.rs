//! What a [`crate::Kind::Arrival`] record says: which rank of an operation arrived last, and by how much.
//!
//! | field of [`Record`] | bits | holds |
//! |---|---|---|
//! | `state` | | [`State::STOP`]: the rest is known; [`State::ABORTED`]: it is not |
//! | `value` | 0–39 | lag, nanoseconds |
//! | `value` | 40–63 | rank that arrived last |
//! | `bytes` | 0–39 | how long the writer waited for that rank, nanoseconds |
//! | `bytes` | 40–63 | uncertainty of the lag, units of 256 ns, rounded up |
//! | `channel` | 0–7 | ranks whose arrival is not known, 255 for more |
//!
//! With [`State::ABORTED`], `value` is an [`ArrivalGap`] and the other three are 0. The remaining fields are those of the operation.
//! A time that does not fit is written as the largest that does: 1,099 s, and 4.29 s of the uncertainty.

use crate::{Kind, Record, State};

/// Which rank of an operation arrived last, as one of the ranks that waited for it found out. A rank arrives when its first channel
/// starts on its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The rank that arrived last. 24 bits.
    pub rank: u32,
    /// Its arrival after the median of the other known ranks' arrivals, nanoseconds.
    pub lag_ns: u64,
    /// Its arrival after the writer's, nanoseconds.
    pub wait_ns: u64,
    /// How far `lag_ns` can be off, nanoseconds, also if another rank may have been the last.
    pub uncertainty_ns: u64,
    /// Ranks that the operation depends on and whose arrivals are not known.
    pub unknown_ranks: u8,
}

/// Whether a [`Kind::Arrival`] record follows the [`Kind::OpCompleted`] of an operation. A reader that hands operations on waits for
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ArrivalNotice {
    /// None follows.
    #[default]
    Never = 0,
    /// One follows within [`ArrivalNotice::PATIENCE_NS`]: this rank may have waited in the operation.
    Follows = 1,
    /// One follows within [`ArrivalNotice::HOLD_NS`] if another rank waited for this one.
    MayFollow = 2,
}

impl ArrivalNotice {
    /// How long after the end of an operation its arrivals are known at the latest, nanoseconds: the watchdog's interval, and how
    /// long it waits for answers.
    pub const PATIENCE_NS: u64 = 1_500_000_000;
    /// How long after the end of an operation in which another rank waited this rank usually knows, nanoseconds: two of the
    /// watchdog's intervals and two round trips.
    pub const HOLD_NS: u64 = 400_000_000;

    /// What a record of [`Kind::OpCompleted`] says.
    #[must_use]
    pub const fn of(record: &Record) -> Self {
        match record.channel {
            1 => Self::Follows,
            2 => Self::MayFollow,
            _ => Self::Never,
        }
    }
}

/// Why nothing is known of an operation's arrivals.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ArrivalGap {
    /// More operations waited than the ranks ask each other about at once.
    TooMany = 1,
    /// No rank that was asked knew its arrival: it does not answer, has left, or completed too many operations since.
    Unknown = 2,
}

const TIME_BITS: u32 = 40;
const TIME: u64 = (1 << TIME_BITS) - 1;
const UPPER: u64 = u64::MAX >> TIME_BITS;
/// Unit of the uncertainty, nanoseconds.
const UNIT_NS: u64 = 256;

/// A time in the lower bits and a number in the upper ones, both at their limits if they do not fit.
const fn pack(time_ns: u64, upper: u64) -> u64 {
    let time_ns = if time_ns < TIME { time_ns } else { TIME };
    let upper = if upper < UPPER { upper } else { UPPER };
    upper << TIME_BITS | time_ns
}

impl Arrival {
    /// `record`, which is of the operation, with this in it.
    #[must_use]
    pub const fn in_record(&self, record: Record) -> Record {
        Record {
            kind: Kind::Arrival as u8,
            state: State::STOP,
            value: pack(self.lag_ns, self.rank as u64),
            bytes: pack(self.wait_ns, self.uncertainty_ns.div_ceil(UNIT_NS)),
            channel: self.unknown_ranks,
            ..record
        }
    }

    /// What a record of [`Kind::Arrival`] says; `None` if nothing is known.
    #[must_use]
    pub const fn of(record: &Record) -> Option<Self> {
        if record.state.0 != State::STOP.0 {
            return None;
        }
        Some(Self {
            rank: (record.value >> TIME_BITS) as u32,
            lag_ns: record.value & TIME,
            wait_ns: record.bytes & TIME,
            uncertainty_ns: (record.bytes >> TIME_BITS) * UNIT_NS,
            unknown_ranks: record.channel,
        })
    }
}

impl ArrivalGap {
    /// `record`, which is of the operation, with this in it.
    #[must_use]
    pub const fn in_record(self, record: Record) -> Record {
        Record {
            kind: Kind::Arrival as u8,
            state: State::ABORTED,
            value: self as u64,
            bytes: 0,
            channel: 0,
            ..record
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_record_holds_an_arrival_in_the_documented_bits() {
        let operation = Record {
            comm: 7,
            seq: 9,
            bytes: 4096,
            op: 3,
            rank: 1,
            ..Record::new(Kind::OpCompleted, State::STOP, 5)
        };
        let arrival = Arrival {
            rank: 0xab_cdef,
            lag_ns: 30_000_000,
            wait_ns: 31_000_000,
            uncertainty_ns: 512,
            unknown_ranks: 2,
        };
        let record = arrival.in_record(operation);
        assert_eq!(record.kind(), Some(Kind::Arrival));
        assert_eq!((record.comm, record.seq, record.op, record.rank), (7, 9, 3, 1));
        assert_eq!(record.value, 0xab_cdef << 40 | 30_000_000);
        assert_eq!(record.bytes, 2 << 40 | 31_000_000);
        assert_eq!(Arrival::of(&record), Some(arrival));
        assert_eq!(Arrival::of(&ArrivalGap::TooMany.in_record(operation)), None);
    }

    #[test]
    fn what_does_not_fit_is_at_its_limit_and_an_uncertainty_is_never_understated() {
        let arrival = |uncertainty_ns| Arrival {
            rank: 1,
            lag_ns: u64::MAX,
            wait_ns: 1 << 40,
            uncertainty_ns,
            unknown_ranks: 255,
        };
        let of = |uncertainty_ns| {
            let record = arrival(uncertainty_ns).in_record(Record::new(Kind::Arrival, State::STOP, 0));
            Arrival::of(&record).unwrap()
        };
        let read = of(257);
        assert_eq!((read.rank, read.lag_ns, read.wait_ns), (1, TIME, TIME));
        assert_eq!(read.uncertainty_ns, 512);
        assert_eq!(of(u64::MAX).uncertainty_ns, UPPER * 256);
    }
}
