//! Ranks that are late in every step, each time by less than anybody would look at.
//!
//! Of each operation in which the others wait for the last rank, that rank's *loss* is how much earlier the operation would have begun without
//! it: its arrival minus the second last one. Per rank and communicator this module keeps how often it was last, the losses, and its lags.
//!
//! # When a rank is named
//! Both hold for the window, which is the last 4,096 to 8,192 operations of the communicator:
//! - *More than chance.* Operations that follow each other are late for one reason, so `BLOCK` of them are one trial: the rank with the
//!   largest loss has it. Were all *n* ranks alike, a rank would have each trial with probability 1/n. It is named if the binomial
//!   probability of as many trials as it had, times n, is below [`SIGNIFICANCE`].
//! - *Worth a look.* Its losses are at least [`SHARE`] of the time. A tenth of a block's time is the most that counts of it, so that a single
//!   long wait names nobody.
//!
//! Everything here is a pure function of the operations that it was given.

use std::sync::Arc;

use ringsight_exporters::model::Straggler;
use rustc_hash::FxHashMap;

use crate::limits::{LeftOut, Limit, Shared};

/// Operations of one trial.
const BLOCK: u32 = 16;
/// Operations after which a new half of the window begins.
const HALF: u64 = 4096;
/// Probability below which a rank's trials are no chance.
pub const SIGNIFICANCE: f64 = 1e-6;
/// Share of the time from which on a rank is named.
pub const SHARE: f64 = 0.01;

/// Buckets of lags: 0 for below 1 µs, then four for each doubling, up to an hour.
const BUCKETS: usize = 1 + 4 * 32;

/// Lags as a histogram; each bucket's bounds are a fifth apart.
#[derive(Clone, Debug)]
struct Lags([u32; BUCKETS]);

impl Default for Lags {
    fn default() -> Self {
        Self([0; BUCKETS])
    }
}

impl Lags {
    fn add(&mut self, lag_ns: i64) {
        let us = u64::try_from(lag_ns).unwrap_or(0) / 1000;
        let at = match us.checked_ilog2() {
            None => 0,
            Some(octave) => {
                // The two bits below the highest one.
                let quarter = ((us << 2) >> octave) & 3;
                1 + 4 * octave as usize + quarter as usize
            }
        };
        let bucket = &mut self.0[at.min(BUCKETS - 1)];
        *bucket = bucket.saturating_add(1);
    }

    /// The middle of a bucket, nanoseconds.
    fn middle_ns(at: usize) -> u64 {
        let Some(at) = at.checked_sub(1) else { return 0 };
        let (octave, quarter) = (at / 4, at % 4);
        let least_us = (1.0 + quarter as f64 / 4.0) * 2f64.powi(octave as i32);
        (least_us * (1.0 + 0.5 / (4.0 + quarter as f64)) * 1e3) as u64
    }

    fn quantile_ns(halves: [&Self; 2], quantile: f64) -> u64 {
        let count = |at: usize| u64::from(halves[0].0[at]) + u64::from(halves[1].0[at]);
        let all: u64 = (0..BUCKETS).map(count).sum();
        let wanted = (quantile * all as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        let at = (0..BUCKETS).find(|at| {
            seen += count(*at);
            seen >= wanted
        });
        at.map_or(0, Self::middle_ns)
    }
}

/// What is kept of one rank.
#[derive(Clone, Debug, Default)]
struct OfRank {
    rank: u32,
    lags: Lags,
    operations: u64,
    /// Operations in which it was last.
    last: u64,
    loss_ns: u64,
    /// The same, of each block no more than a tenth of its time.
    bounded_ns: u64,
    /// Trials that it had.
    trials: u32,
}

/// One half of the window.
#[derive(Clone, Debug, Default)]
struct Half {
    begun_ns: u64,
    ended_ns: u64,
    operations: u64,
    trials: u32,
    /// By rank.
    ranks: Vec<OfRank>,
}

impl Half {
    fn rank(&mut self, rank: u32) -> &mut OfRank {
        let at = match self.ranks.binary_search_by_key(&rank, |known| known.rank) {
            Ok(at) => at,
            Err(at) => {
                self.ranks.insert(
                    at,
                    OfRank {
                        rank,
                        ..OfRank::default()
                    },
                );
                at
            }
        };
        &mut self.ranks[at]
    }

    fn of(&self, rank: u32) -> Option<&OfRank> {
        let at = self.ranks.binary_search_by_key(&rank, |known| known.rank);
        at.ok().map(|at| &self.ranks[at])
    }
}

/// One communicator.
#[derive(Clone, Debug, Default)]
struct OfCommunicator {
    /// Process that its ranks count for.
    pid: u32,
    /// Ranks that count.
    counted: usize,
    now: Half,
    before: Half,
    /// Losses in the block that has begun, by rank.
    block: Vec<(u32, u64)>,
    block_operations: u32,
    block_begun_ns: u64,
}

impl OfCommunicator {
    fn observe(&mut self, operation: &Operation<'_>) {
        if self.now.operations >= HALF {
            self.before = std::mem::take(&mut self.now);
        }
        if self.now.operations == 0 {
            // Time goes on between the halves.
            self.now.begun_ns = match self.before.ended_ns {
                0 => operation.begun_ns,
                ended_ns => ended_ns,
            };
        }
        self.now.operations += 1;
        self.now.ended_ns = self.now.ended_ns.max(operation.end_ns);
        for (rank, lag_ns) in operation.lags {
            let of_rank = self.now.rank(*rank);
            of_rank.operations += 1;
            of_rank.lags.add(*lag_ns);
        }
        if self.block_operations == 0 {
            self.block_begun_ns = operation.begun_ns;
        }
        self.block_operations += 1;
        if let Some(last) = operation.last.filter(|_| operation.loss_ns > 0) {
            let of_rank = self.now.rank(last);
            of_rank.last += 1;
            of_rank.loss_ns = of_rank.loss_ns.saturating_add(operation.loss_ns);
            match self.block.iter_mut().find(|(rank, _)| *rank == last) {
                Some((_, loss_ns)) => *loss_ns = loss_ns.saturating_add(operation.loss_ns),
                None => self.block.push((last, operation.loss_ns)),
            }
        }
        if self.block_operations == BLOCK {
            self.end_block(operation.end_ns);
        }
    }

    fn end_block(&mut self, end_ns: u64) {
        let most_ns = end_ns.saturating_sub(self.block_begun_ns) / 10;
        for (rank, loss_ns) in &self.block {
            let of_rank = self.now.rank(*rank);
            of_rank.bounded_ns = of_rank.bounded_ns.saturating_add(*loss_ns.min(&most_ns));
        }
        let worst = self.block.iter().max_by_key(|(_, loss_ns)| *loss_ns);
        if let Some((rank, _)) = worst.copied() {
            self.now.rank(rank).trials += 1;
            self.now.trials += 1;
        }
        self.block.clear();
        self.block_operations = 0;
    }

    fn rows(&self, comm: u64) -> impl Iterator<Item = Straggler> {
        let halves = [&self.before, &self.now];
        let begun_ns = match self.before.operations {
            0 => self.now.begun_ns,
            _ => self.before.begun_ns,
        };
        let window_ns = self.now.ended_ns.saturating_sub(begun_ns).max(1);
        let trials = halves.iter().map(|half| half.trials).sum();
        let ranks = self.now.ranks.len() as u32;
        let empty = OfRank::default();
        let unnamed = Arc::from("");
        self.now.ranks.iter().map(move |now| {
            let before = self.before.of(now.rank).unwrap_or(&empty);
            let lags = [&before.lags, &now.lags];
            let loss_ns = before.loss_ns.saturating_add(now.loss_ns);
            let bounded_ns = before.bounded_ns.saturating_add(now.bounded_ns);
            let chance = chance(trials, before.trials + now.trials, ranks);
            Straggler {
                communicator: comm,
                communicator_name: Arc::clone(&unnamed),
                rank: now.rank,
                place: None,
                ranks,
                operations: before.operations + now.operations,
                last: before.last + now.last,
                median_ns: Lags::quantile_ns(lags, 0.5),
                p99_ns: Lags::quantile_ns(lags, 0.99),
                lost_ns: loss_ns.saturating_mul(u64::from(ranks.saturating_sub(1))),
                share: loss_ns as f64 / window_ns as f64,
                window_ns,
                chance,
                chronic: chance < SIGNIFICANCE && bounded_ns as f64 / window_ns as f64 >= SHARE,
            }
        })
    }
}

/// The probability that some of `ranks` equal ranks has at least `own` of `trials` trials, at most 1.
fn chance(trials: u32, own: u32, ranks: u32) -> f64 {
    if ranks < 2 || own == 0 {
        return 1.0;
    }
    let (p, n) = (1.0 / f64::from(ranks), f64::from(trials));
    // Logarithm of the binomial term, from that of no success on.
    let mut term = n * (1.0 - p).ln();
    let mut tail = 0.0;
    for at in 0..=trials {
        if at >= own {
            tail += term.exp();
        }
        let at = f64::from(at);
        term += ((n - at) / (at + 1.0)).ln() + (p / (1.0 - p)).ln();
    }
    (tail * f64::from(ranks)).min(1.0)
}

/// An operation in which the others wait for the last rank.
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    /// Communicator.
    pub comm: u64,
    /// A process that took part.
    pub pid: u32,
    /// The first arrival, nanoseconds.
    pub begun_ns: u64,
    /// The end, nanoseconds.
    pub end_ns: u64,
    /// Ranks with their [lags](crate::lag::Arrivals::lag_of), nanoseconds.
    pub lags: &'a [(u32, i64)],
    /// The rank that arrived last.
    pub last: Option<u32>,
    /// How long after the second last, nanoseconds.
    pub loss_ns: u64,
}

/// Lags of all ranks.
#[derive(Debug, Default)]
pub struct Chronic {
    communicators: FxHashMap<u64, OfCommunicator>,
    /// Ranks that count for a process, and its communicators.
    by_process: FxHashMap<u32, (usize, Vec<u64>)>,
    counted: usize,
    left_out: LeftOut,
}

impl Chronic {
    /// Takes in an operation. `limit` bounds the ranks that are kept, one process's and all.
    pub fn observe(&mut self, operation: &Operation<'_>, limit: Shared) {
        let known = self.communicators.get(&operation.comm);
        let counted = known.map_or(0, |known| known.counted);
        let pid = known.map_or(operation.pid, |known| known.pid);
        // Operations may be of ever other ranks.
        let is_new = |rank: u32| known.is_none_or(|known| known.now.of(rank).is_none());
        let new = operation.lags.iter().filter(|(rank, _)| is_new(*rank)).count();
        let kept = known.map_or(0, |known| known.now.ranks.len());
        let more = (kept + new).saturating_sub(counted);
        if more > 0 && !self.make_room(pid, operation.comm, more, limit) {
            self.left_out.count(Limit::Stragglers);
            return;
        }
        let own = self.by_process.entry(pid).or_default();
        own.0 += more;
        self.counted += more;
        let of_comm = self.communicators.entry(operation.comm).or_insert_with(|| {
            own.1.push(operation.comm);
            OfCommunicator {
                pid,
                ..OfCommunicator::default()
            }
        });
        of_comm.counted += more;
        of_comm.observe(operation);
    }

    /// Whether there is room for `more` ranks of a process. Its communicator that was used longest ago makes room.
    fn make_room(&mut self, pid: u32, comm: u64, more: usize, limit: Shared) -> bool {
        loop {
            let own = self.by_process.get(&pid).map_or(0, |own| own.0);
            if own + more <= limit.process && self.counted + more <= limit.all {
                return true;
            }
            let communicators = self.by_process.get(&pid).map_or(&[][..], |own| &own.1);
            let idle = communicators.iter().filter(|other| **other != comm);
            let ended = |other: &u64| {
                self.communicators
                    .get(other)
                    .map_or(0, |known| known.now.ended_ns)
            };
            let Some(oldest) = idle.copied().min_by_key(ended) else {
                return false;
            };
            self.remove(pid, oldest);
        }
    }

    fn remove(&mut self, pid: u32, comm: u64) {
        let counted = self.communicators.remove(&comm).map_or(0, |known| known.counted);
        self.counted -= counted;
        if let Some(own) = self.by_process.get_mut(&pid) {
            own.0 -= counted;
            own.1.retain(|other| *other != comm);
        }
    }

    /// What was left out so far.
    #[must_use]
    pub fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// Every rank that is known, by communicator and rank. Names and places are the caller's to add.
    #[must_use]
    pub fn rows(&self) -> Vec<Straggler> {
        let mut rows: Vec<Straggler> = self
            .communicators
            .iter()
            .flat_map(|(comm, known)| known.rows(*comm))
            .collect();
        rows.sort_by_key(|row| (row.communicator, row.rank));
        rows
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lag::Arrivals;

    const MS: u64 = 1_000_000;
    const LIMIT: Shared = Shared {
        process: 4096,
        all: 65_536,
    };

    /// A job of `ranks` ranks: an operation every 30 ms, in which each arrives so much later than the first could.
    fn job(ranks: u32, operations: u64, mut delay: impl FnMut(u64, u32) -> u64) -> Vec<Straggler> {
        let mut chronic = Chronic::default();
        let mut now = 1_000 * MS;
        for at in 0..operations {
            let arrivals: Vec<u64> = (0..ranks).map(|rank| now + delay(at, rank)).collect();
            let mut sorted = Arrivals::default();
            sorted.set(arrivals.iter().copied());
            let lags: Vec<(u32, i64)> = (0..)
                .zip(&arrivals)
                .map(|(rank, at)| (rank, sorted.lag_of(*at)))
                .collect();
            let mut order: Vec<(u64, u32)> = arrivals.iter().copied().zip(0..).collect();
            order.sort_unstable();
            let [.., second, last] = order[..] else {
                panic!("two ranks at least")
            };
            let end_ns = last.0 + MS / 10;
            chronic.observe(
                &Operation {
                    comm: 7,
                    pid: 1,
                    begun_ns: order[0].0,
                    end_ns,
                    lags: &lags,
                    last: Some(last.1),
                    loss_ns: last.0 - second.0,
                },
                LIMIT,
            );
            now = end_ns + 22 * MS;
        }
        chronic.rows()
    }

    #[test]
    fn operations_of_ever_other_ranks_take_no_more_room_than_there_is() {
        let mut chronic = Chronic::default();
        for at in 0..4000 {
            let (one, two) = (2 * at, 2 * at + 1);
            let operation = Operation {
                comm: 7,
                pid: 1,
                begun_ns: 1000,
                end_ns: 3000,
                lags: &[(one, 0), (two, 1000)],
                last: Some(two),
                loss_ns: 1000,
            };
            chronic.observe(&operation, LIMIT);
        }
        assert_eq!(chronic.rows().len(), LIMIT.process);
        assert!(chronic.left_out().of(Limit::Stragglers) > 0);
    }

    fn named(rows: &[Straggler]) -> Vec<u32> {
        rows.iter()
            .filter(|row| row.chronic)
            .map(|row| row.rank)
            .collect()
    }

    /// Delays below `most`, alike for all ranks.
    fn noise(seed: u64, most: u64) -> impl FnMut(u64, u32) -> u64 {
        let mut state = seed | 1;
        move |_, _| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        }
    }

    #[test]
    fn a_rank_that_is_8_ms_late_in_every_step_is_named_with_what_it_costs() {
        let mut noise = noise(3, MS / 2);
        let rows = job(4, 1000, |at, rank| {
            noise(at, rank) + if rank == 2 { 8 * MS } else { 0 }
        });
        assert_eq!(named(&rows), [2]);
        let row = &rows[2];
        assert!((row.share - 0.26).abs() < 0.02, "{row:?}");
        let lost = row.share * row.window_ns as f64 * 3.0;
        assert!((row.lost_ns as f64 / lost - 1.0).abs() < 0.01, "{row:?}");
        assert!(
            row.median_ns.abs_diff(8 * MS) < MS && row.p99_ns.abs_diff(8 * MS) < 3 * MS / 2,
            "{row:?}"
        );
        assert_eq!((row.operations, row.last), (1000, 1000));
    }

    #[test]
    fn one_that_is_late_in_the_first_of_three_operations_of_a_step_is_named_too() {
        let mut noise = noise(5, MS / 2);
        let rows = job(4, 600, |at, rank| {
            noise(at, rank) + if rank == 2 && at % 3 == 0 { 8 * MS } else { 0 }
        });
        assert_eq!(named(&rows), [2]);
    }

    #[test]
    fn one_long_wait_and_ranks_that_take_turns_are_no_stragglers() {
        let mut first = noise(7, MS / 100);
        assert!(
            named(&job(4, 2000, |at, rank| first(at, rank)
                + if rank == 1 && at == 900 { 6000 * MS } else { 0 }))
            .is_empty()
        );
        let mut second = noise(9, MS / 2);
        assert!(
            named(&job(4, 4000, |at, rank| second(at, rank)
                + if at % 4 == u64::from(rank) { 8 * MS } else { 0 }))
            .is_empty()
        );
        // Always last, by what nobody notices.
        let mut third = noise(11, 100);
        assert!(
            named(&job(4, 2000, |at, rank| third(at, rank)
                + if rank == 0 { MS / 50 } else { 0 }))
            .is_empty()
        );
    }

    #[test]
    fn a_rank_that_has_recovered_is_forgotten_with_its_window() {
        let mut noise = noise(13, MS / 2);
        let late = |at: u64, rank: u32| if rank == 2 && at < HALF { 8 * MS } else { 0 };
        let rows = job(4, 3 * HALF, |at, rank| noise(at, rank) + late(at, rank));
        assert!(named(&rows).is_empty(), "{rows:?}");
        assert!(rows[2].operations <= 2 * HALF);
    }

    #[test]
    fn the_binomial_tail() {
        assert!((chance(10, 10, 2) - 2.0 / 1024.0).abs() < 1e-9);
        assert!((chance(4, 1, 4) - 1.0).abs() < 1e-9);
        assert!((chance(3, 2, 3) - 3.0 * 7.0 / 27.0).abs() < 1e-9);
        assert_eq!((chance(0, 0, 4), chance(5, 5, 1)), (1.0, 1.0));
        assert!(chance(512, 512, 2) < 1e-100);
    }

    #[test]
    fn a_process_has_room_for_so_many_ranks_and_its_oldest_communicator_makes_room() {
        let mut chronic = Chronic::default();
        let lags = [(0, 0), (1, 5)];
        let operation = |comm, end_ns| Operation {
            comm,
            pid: 1,
            begun_ns: end_ns - 1,
            end_ns,
            lags: &lags,
            last: Some(1),
            loss_ns: 5,
        };
        let limit = Shared { process: 4, all: 6 };
        for comm in 1..=3 {
            chronic.observe(&operation(comm, 10 * comm), limit);
        }
        let kept: Vec<u64> = chronic.rows().iter().map(|row| row.communicator).collect();
        assert_eq!(kept, [2, 2, 3, 3]);
        chronic.observe(
            &Operation {
                pid: 2,
                ..operation(4, 50)
            },
            limit,
        );
        // Nothing of its own makes room.
        chronic.observe(
            &Operation {
                pid: 3,
                ..operation(5, 60)
            },
            limit,
        );
        assert_eq!(
            (chronic.rows().len(), chronic.left_out().of(Limit::Stragglers)),
            (6, 1)
        );
    }

    proptest! {
        #[test]
        fn lags_that_are_alike_name_nobody(seed: u64, ranks in 2u32..9, most in 1u64..20) {
            let rows = job(ranks, 2048, noise(seed, most * MS));
            prop_assert!(named(&rows).is_empty(), "{rows:?}");
        }

        #[test]
        fn a_lag_stands_in_its_bucket(us in 1u64..3_000_000_000) {
            let mut lags = Lags::default();
            lags.add(i64::try_from(us * 1000).unwrap());
            let read = Lags::quantile_ns([&lags, &Lags::default()], 0.5) as f64 / 1e3;
            prop_assert!((read / us as f64 - 1.0).abs() < 0.13, "{us} µs is read as {read}");
        }
    }
}
