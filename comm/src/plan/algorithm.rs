//! Which algorithm serves an operation, by [a table of data](super::table). Every rank reads the same table with the same values, so that
//! all come to the same choice. Why a row does not serve an operation is data, too ([`Reason`]): `ringsight explain` tells it.

use std::fmt;

use ringsight_kernels::cuda::peers::one_shot_bytes;
use ringsight_records::{Algorithm, Function, Protocol, ReduceOp};

use super::table::TABLE;

/// What the choice depends on; all of it is the same on every rank.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Function.
    pub function: Function,
    /// Reduction.
    pub reduce_op: ReduceOp,
    /// [`super::Request::bytes`], or those of one message where the operation is made of several.
    pub bytes: u64,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Bytes of a FIFO slot.
    pub slot_bytes: usize,
    /// Whether all ranks' devices have programs of [`Algorithm::OneShot`].
    pub one_shot: bool,
    /// Whether all ranks' kernels reach each other's memory.
    pub peers: bool,
    /// Bytes of all ranks together from which on it may go straight between callers' buffers.
    pub straight_bytes: u64,
}

/// A row of [the table](super::table::TABLE): the first whose conditions hold, and whose algorithm is possible, is taken.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// For which functions.
    pub functions: &'static [Function],
    /// For at most so many [`Asked::bytes`] of all ranks together.
    pub max_bytes_of_all: u64,
    /// For at most so many ranks.
    pub max_ranks: u32,
    /// What they get.
    pub choice: Choice,
}

/// How an operation is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Arrangement of the ranks.
    pub algorithm: Algorithm,
    /// How data and flags travel.
    pub protocol: Protocol,
    /// One more channel for each so many bytes.
    pub bytes_per_channel: u64,
    /// Kernels do it in memory that all ranks reach.
    pub among_peers: bool,
}

/// The same where FIFOs are in the memory of GPUs: one block is far from filling a link.
const NEAR_BYTES_PER_CHANNEL: u64 = 32 << 10;

/// Bytes of all ranks together from which on it pays to go straight, unless `RINGSIGHT_STRAIGHT_BYTES` says another number: it begins with
/// one more way over NVLink, and ends with a fence and another.
pub const STRAIGHT_BYTES: u64 = 8 << 20;

/// Why a row does not serve an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It is for other functions.
    Function,
    /// It is for at least so many bytes of all ranks together.
    Short(u64),
    /// It is for at most so many bytes of all ranks together.
    BytesOfAll(u64),
    /// It is for at most so many ranks.
    Ranks(u32),
    /// One rank has nobody to send to.
    OneRank,
    /// Each rank's factor (`ncclRedOpCreatePreMulSum`) is known to that rank alone.
    OwnFactors,
    /// Some rank's device has no program of it.
    NoProgram,
    /// Not all ranks' kernels reach each other's memory.
    NoPeers,
    /// The memory among peers holds so many bytes.
    PeerMemory(u64),
    /// A slot of a FIFO holds so many bytes.
    Slot(u64),
    /// A row before it serves the operation.
    Earlier,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Function => f.write_str("it is for other operations"),
            Self::Short(least) => write!(f, "it is for at least {least} bytes of all ranks together"),
            Self::BytesOfAll(most) => write!(f, "it is for at most {most} bytes of all ranks together"),
            Self::Ranks(most) => write!(f, "it is for at most {most} ranks"),
            Self::OneRank => f.write_str("one rank has nobody to send to"),
            Self::OwnFactors => {
                f.write_str("each rank's factor (ncclRedOpCreatePreMulSum) is known to that rank alone")
            }
            Self::NoProgram => f.write_str("some rank's device has no program of it"),
            Self::NoPeers => f.write_str("not all ranks' kernels reach each other's memory"),
            Self::PeerMemory(most) => write!(f, "the memory among peers holds {most} bytes"),
            Self::Slot(most) => write!(f, "a slot of a FIFO holds {most} bytes"),
            Self::Earlier => f.write_str("a row before it serves the operation"),
        }
    }
}

/// The choice for an operation; `None` if no row serves it.
#[must_use]
pub fn choose(asked: &Asked) -> Option<Choice> {
    TABLE
        .iter()
        .find(|row| row.refuses(asked).is_none())
        .map(|row| row.choice)
}

/// Every row of the table in its order, with the reason why it is not taken; the one without a reason is what [`choose`]
/// gives.
pub fn explain(asked: &Asked) -> impl Iterator<Item = (&'static Row, Option<Reason>)> {
    let mut found = false;
    TABLE.iter().map(move |row| {
        let reason = row.refuses(asked).or(found.then_some(Reason::Earlier));
        found |= reason.is_none();
        (row, reason)
    })
}

impl Row {
    /// One that serves these functions, however many bytes and ranks there are.
    pub(super) const fn of(functions: &'static [Function], choice: Choice) -> Self {
        Self {
            functions,
            max_bytes_of_all: u64::MAX,
            max_ranks: u32::MAX,
            choice,
        }
    }

    /// Only up to so many bytes of all ranks together.
    pub(super) const fn up_to_of_all(self, max_bytes_of_all: u64) -> Self {
        Self {
            max_bytes_of_all,
            ..self
        }
    }

    /// Only up to so many ranks.
    pub(super) const fn up_to_ranks(self, max_ranks: u32) -> Self {
        Self { max_ranks, ..self }
    }

    /// Why it does not serve an operation; `None` if it does.
    fn refuses(&self, asked: &Asked) -> Option<Reason> {
        if !self.functions.contains(&asked.function) {
            return Some(Reason::Function);
        }
        let of_all = asked.bytes.saturating_mul(asked.ranks.into());
        if self.choice.is_straight() && of_all < asked.straight_bytes {
            return Some(Reason::Short(asked.straight_bytes));
        }
        if of_all > self.max_bytes_of_all {
            return Some(Reason::BytesOfAll(self.max_bytes_of_all));
        }
        if asked.ranks > self.max_ranks {
            return Some(Reason::Ranks(self.max_ranks));
        }
        self.choice.is_impossible(asked)
    }
}

impl Choice {
    /// Whether kernels do it in memory that all ranks reach.
    #[must_use]
    pub fn is_among_peers(&self) -> bool {
        self.among_peers
    }

    /// Whether they do it straight between callers' buffers where they reach them.
    #[must_use]
    pub fn is_straight(&self) -> bool {
        self.among_peers && self.protocol == Protocol::Simple
    }

    /// Why there is no program, wherever the table puts its limits.
    fn is_impossible(&self, asked: &Asked) -> Option<Reason> {
        if self.algorithm != Algorithm::OneShot && !self.is_among_peers() {
            return None;
        }
        if asked.ranks < 2 {
            return Some(Reason::OneRank);
        }
        if asked.reduce_op == ReduceOp::PreMulSum {
            return Some(Reason::OwnFactors);
        }
        let (absent, most, reason): (_, _, fn(u64) -> Reason) = if self.is_among_peers() {
            let most = match self.algorithm {
                Algorithm::OneShot => one_shot_bytes(asked.ranks as usize),
                _ => usize::MAX,
            };
            (
                (!asked.peers).then_some(Reason::NoPeers),
                most,
                Reason::PeerMemory,
            )
        } else {
            let absent = (!asked.one_shot).then_some(Reason::NoProgram);
            (absent, asked.slot_bytes, Reason::Slot)
        };
        let most = most as u64;
        absent.or((asked.bytes > most).then(|| reason(most)))
    }

    /// Channels for `bytes` bytes when the communicator has `available`, `near` if their FIFOs are in the memory of GPUs.
    #[must_use]
    pub fn channels(&self, bytes: u64, available: usize, near: bool) -> usize {
        let each = self
            .bytes_per_channel
            .min(if near { NEAR_BYTES_PER_CHANNEL } else { u64::MAX });
        usize::try_from(bytes.div_ceil(each))
            .unwrap_or(usize::MAX)
            .clamp(1, available)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(function: Function, bytes: u64) -> Asked {
        Asked {
            function,
            reduce_op: ReduceOp::Sum,
            bytes,
            ranks: 4,
            slot_bytes: 8 << 10,
            one_shot: true,
            peers: false,
            straight_bytes: STRAIGHT_BYTES,
        }
    }

    #[test]
    fn peers_do_a_short_all_reduce_in_one_shot_and_a_longer_one_in_two() {
        let chosen = |ranks: u32, bytes| {
            let asked = Asked {
                ranks,
                peers: true,
                ..asked(Function::AllReduce, bytes)
            };
            let choice = choose(&asked).unwrap();
            assert_eq!(choice.is_among_peers(), ranks > 1);
            choice.algorithm
        };
        for ranks in 2..=8 {
            let most = (512 << 10) / u64::from(ranks);
            assert_eq!(chosen(ranks, 1), Algorithm::OneShot);
            // As far as lines are whole.
            assert_eq!(chosen(ranks, most - 8 * u64::from(ranks)), Algorithm::OneShot);
            assert_eq!(chosen(ranks, most + 1), Algorithm::TwoShot);
        }
        assert_eq!(chosen(1, 8), Algorithm::Ring);
    }

    #[test]
    fn peers_do_all_but_what_a_ring_does_better() {
        for function in Function::ALL {
            for (ranks, bytes) in [(2, 8), (2, 1 << 30), (4, 8), (4, 1 << 30)] {
                let near = Asked {
                    ranks,
                    peers: true,
                    ..asked(*function, bytes)
                };
                let rooted = matches!(function, Function::Broadcast | Function::Reduce);
                let expected = !(rooted && ranks > 2 && bytes > 8);
                assert_eq!(choose(&near).unwrap().is_among_peers(), expected, "{near:?}");
                let apart = Asked { peers: false, ..near };
                let own_factors = Asked {
                    reduce_op: ReduceOp::PreMulSum,
                    ..near
                };
                for other in [apart, own_factors] {
                    assert!(!choose(&other).unwrap().is_among_peers(), "{other:?}");
                }
            }
        }
    }

    #[test]
    fn long_collectives_go_straight_unless_told_otherwise() {
        for function in Function::ALL.iter().filter(|function| !function.is_p2p()) {
            let near = |bytes, straight_bytes| Asked {
                ranks: 2,
                peers: true,
                straight_bytes,
                ..asked(*function, bytes)
            };
            let is_straight = |asked| choose(&asked).unwrap().is_straight();
            assert!(is_straight(near(STRAIGHT_BYTES / 2, STRAIGHT_BYTES)));
            assert!(!is_straight(near(STRAIGHT_BYTES / 2 - 1, STRAIGHT_BYTES)));
            assert!(!is_straight(near(1 << 40, u64::MAX)), "{function}");
            assert!(choose(&near(1 << 40, u64::MAX)).unwrap().is_among_peers());
        }
    }

    #[test]
    fn small_messages_take_one_channel_and_large_ones_all() {
        let choice = choose(&asked(Function::AllReduce, 8)).unwrap();
        assert_eq!(choice.channels(8, 4, false), 1);
        assert_eq!(choice.channels(0, 4, false), 1);
        assert_eq!(choice.channels(choice.bytes_per_channel + 1, 4, false), 2);
        assert_eq!(choice.channels(choice.bytes_per_channel, 4, true), 4);
        assert_eq!(choice.channels(NEAR_BYTES_PER_CHANNEL, 4, true), 1);
        assert_eq!(choice.channels(u64::MAX, 4, false), 4);
    }

    #[test]
    fn every_row_but_the_chosen_one_has_a_reason() {
        for function in Function::ALL {
            for bytes in [0, 4 << 10, 64 << 10, u64::MAX] {
                for peers in [false, true] {
                    let asked = Asked {
                        peers,
                        ..asked(*function, bytes)
                    };
                    let rows: Vec<_> = explain(&asked).collect();
                    assert_eq!(rows.len(), TABLE.len());
                    let taken: Vec<_> = rows.iter().filter(|(_, reason)| reason.is_none()).collect();
                    assert_eq!(taken.len(), 1, "{asked:?}");
                    assert_eq!(Some(taken[0].0.choice), choose(&asked));
                }
            }
        }
        let reason = |asked: Asked, algorithm, protocol| {
            let row = |(row, _): &(&Row, Option<Reason>)| {
                row.functions.contains(&asked.function)
                    && (row.choice.algorithm, row.choice.protocol) == (algorithm, protocol)
            };
            explain(&asked).find(row).unwrap().1
        };
        use Algorithm::{Direct, OneShot, Ring, TwoShot};
        use Protocol::{Ll, Ll128, Simple};
        let short = asked(Function::AllReduce, 8);
        assert_eq!(reason(short, OneShot, Ll), Some(Reason::NoPeers));
        assert_eq!(reason(short, TwoShot, Ll128), Some(Reason::NoPeers));
        assert_eq!(reason(short, OneShot, Simple), None);
        assert_eq!(reason(short, Ring, Simple), Some(Reason::Earlier));
        let without = Asked {
            one_shot: false,
            ..short
        };
        assert_eq!(reason(without, OneShot, Simple), Some(Reason::NoProgram));
        let long = asked(Function::AllReduce, 1 << 20);
        assert_eq!(reason(long, OneShot, Ll), Some(Reason::BytesOfAll(512 << 10)));
        assert_eq!(reason(long, OneShot, Simple), Some(Reason::BytesOfAll(16 << 10)));
        assert_eq!(reason(long, Ring, Simple), None);
        let slot = Asked {
            slot_bytes: 2 << 10,
            ..asked(Function::AllReduce, 4 << 10)
        };
        assert_eq!(reason(slot, OneShot, Simple), Some(Reason::Slot(2 << 10)));
        let alone = Asked { ranks: 1, ..short };
        assert_eq!(reason(alone, OneShot, Ll), Some(Reason::OneRank));
        let scaled = Asked {
            reduce_op: ReduceOp::PreMulSum,
            ..short
        };
        assert_eq!(reason(scaled, OneShot, Simple), Some(Reason::OwnFactors));
        let four = Asked {
            peers: true,
            ..asked(Function::Broadcast, 1 << 30)
        };
        assert_eq!(reason(four, Direct, Ll128), Some(Reason::Ranks(2)));
        assert_eq!(explain(&short).last().unwrap().1, Some(Reason::Function));
    }

    #[test]
    fn every_function_served_is_served_at_every_size() {
        for function in Function::ALL {
            for bytes in [0, u64::MAX] {
                assert!(choose(&asked(*function, bytes)).is_some(), "{function}");
            }
        }
    }

    #[test]
    fn a_short_all_reduce_is_done_in_one_shot_where_that_is_possible() {
        let chosen = |asked: Asked| choose(&asked).unwrap().algorithm;
        let short = asked(Function::AllReduce, 4 << 10);
        assert_eq!(chosen(short), Algorithm::OneShot);
        let longer = asked(Function::AllReduce, (4 << 10) + 1);
        let others = [
            longer,
            asked(Function::Reduce, 8),
            Asked { ranks: 1, ..short },
            Asked { ranks: 5, ..short },
            Asked {
                slot_bytes: 2 << 10,
                ..short
            },
            Asked {
                one_shot: false,
                ..short
            },
            Asked {
                reduce_op: ReduceOp::PreMulSum,
                ..short
            },
        ];
        for other in others {
            assert_eq!(chosen(other), Algorithm::Ring, "{other:?}");
        }
    }
}
