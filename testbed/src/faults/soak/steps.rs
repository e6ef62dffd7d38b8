//! The steps of a soak. Every rank draws the same ones from the seed, and so does the judge.

use std::time::Duration;

use crate::{
    faults::cases::{Mode, PROMISED, THRESHOLD},
    random::Random,
};

pub(super) const RANKS: u32 = 4;

/// A communicator. Each has a size of its own, which is what a report tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Group {
    World,
    Trio,
    Pair,
}

impl Group {
    /// Its ranks, as ranks of the job. Rank 3 is in all of them: others wait for it while it waits elsewhere.
    pub(super) fn members(self) -> &'static [u32] {
        match self {
            Self::World => &[0, 1, 2, 3],
            Self::Trio => &[0, 2, 3],
            Self::Pair => &[1, 3],
        }
    }

    /// The place of its operation in a step.
    pub(super) fn slot(self) -> Slot {
        match self {
            Self::World => Slot::World,
            Self::Trio => Slot::Trio,
            Self::Pair => Slot::Pair,
        }
    }

    /// The one with so many ranks.
    pub(super) fn of_size(ranks: u32) -> Option<Self> {
        [Self::World, Self::Trio, Self::Pair]
            .into_iter()
            .find(|group| group.members().len() == ranks as usize)
    }
}

/// An operation's place in a step, in the order in which ranks call them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    Trio,
    Pair,
    World,
    /// The ranks agree on whether to go on.
    Agree,
}

impl Slot {
    pub(super) const ALL: [Self; 4] = [Self::Trio, Self::Pair, Self::World, Self::Agree];

    pub(super) fn group(self) -> Group {
        match self {
            Self::Trio => Group::Trio,
            Self::Pair => Group::Pair,
            Self::World | Self::Agree => Group::World,
        }
    }

    /// The number of the operation in the job.
    pub(super) fn number(self, step: u32) -> u32 {
        step * Self::ALL.len() as u32 + self as u32
    }
}

/// What all ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum World {
    /// A collective, called.
    Eager,
    /// One replayed.
    Graph,
    /// One of another graph, replayed on another stream.
    Beside,
    /// Messages around the ring, in one group.
    Exchange,
    /// Messages from each to each, themselves included, in one group.
    All,
    /// An all-reduce that takes longer than the threshold.
    Long,
}

/// How late a rank is, beside what the machine adds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Late {
    pub(super) time: Duration,
    /// Its stream is, not its host.
    pub(super) computes: bool,
    /// For the first operation of the step that it takes part in; otherwise for that of all ranks.
    first: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// How the smaller communicators' operations are launched, if there are any.
    pub(super) parts: Option<Mode>,
    pub(super) world: World,
    /// The smaller ones' operations are waited for before that of all ranks is called.
    pub(super) waits: bool,
    late: [Late; RANKS as usize],
}

impl Step {
    /// `long`: there are long operations.
    pub(super) fn draw(random: &mut Random, long: bool) -> Self {
        let world = match random.below(10) {
            0 | 1 => World::Eager,
            2 | 3 => World::Graph,
            4 | 5 => World::Beside,
            6 => World::Exchange,
            7 => World::All,
            _ if long => World::Long,
            _ => World::Eager,
        };
        let parts = match random.below(4) {
            0 => Some(Mode::Eager),
            1 => Some(Mode::Graph),
            _ => None,
        };
        let waits = random.below(2) == 0;
        let mut late = [Late::default(); RANKS as usize];
        if world == World::Long && random.below(2) == 0 {
            // Nobody is late: it is long by itself.
        } else if random.below(24) == 0 {
            // As for a checkpoint: all pause, each for as long as it has to write.
            for late in &mut late {
                late.time = Duration::from_millis(500 + random.below(2500));
                late.first = true;
            }
        } else {
            let victims = 1 + u32::from(random.below(4) == 0);
            for _ in 0..victims {
                let victim = random.below(u64::from(RANKS)) as usize;
                late[victim] = Late {
                    time: lateness(random),
                    computes: random.below(3) == 0,
                    first: random.below(2) == 0,
                };
            }
        }
        Self {
            parts,
            world,
            waits,
            late,
        }
    }

    /// The ranks of one of its operations.
    pub(super) fn participants(&self, slot: Slot) -> &'static [u32] {
        match slot {
            Slot::Trio | Slot::Pair if self.parts.is_none() => &[],
            _ => slot.group().members(),
        }
    }

    /// How late a rank is for one of its operations.
    pub(super) fn late(&self, rank: u32, slot: Slot) -> Late {
        let late = self.late[rank as usize];
        let mut own = Slot::ALL
            .into_iter()
            .filter(|slot| self.participants(*slot).contains(&rank));
        let at = if late.first { own.next() } else { Some(Slot::World) };
        if at == Some(slot) { late } else { Late::default() }
    }

    /// Whether nobody is meant to be late.
    pub(super) fn is_prompt(&self) -> bool {
        self.late.iter().all(|late| late.time < THRESHOLD / 20)
    }

    /// Whether one of its operations is a replay.
    pub(super) fn is_replay(&self, slot: Slot) -> bool {
        match slot {
            Slot::Trio | Slot::Pair => self.parts == Some(Mode::Graph),
            Slot::World => matches!(self.world, World::Graph | World::Beside),
            Slot::Agree => false,
        }
    }

    /// Whether one of its operations is messages, each of two ranks.
    pub(super) fn is_messages(&self, slot: Slot) -> bool {
        slot == Slot::World && matches!(self.world, World::Exchange | World::All)
    }

    /// The ranks without which an operation does not end on a rank: `all` those that it may wait for, otherwise those that it
    /// surely does. What it sends around the ring may fit into what the next one's FIFO has room for.
    pub(super) fn waits_for(&self, slot: Slot, rank: u32, all: bool) -> impl Iterator<Item = u32> {
        let ring = slot == Slot::World && self.world == World::Exchange;
        let members = self.participants(slot).iter().copied();
        members.filter(move |other| match (rank, ring) {
            (rank, _) if rank == *other => false,
            (_, false) => true,
            (rank, true) => *other == before(rank) || all && before(*other) == rank,
        })
    }
}

/// The rank that a rank receives from.
fn before(rank: u32) -> u32 {
    (rank + RANKS - 1) % RANKS
}

fn lateness(random: &mut Random) -> Duration {
    let threshold = THRESHOLD.as_millis() as u64;
    Duration::from_millis(match random.below(10) {
        // Long enough that the promise of a verdict ends before the rank comes.
        0 => threshold + PROMISED.as_millis() as u64 + 100 + random.below(1200),
        // Around the threshold.
        1 => threshold * 8 / 10 + random.below(threshold * 8 / 10),
        2..=6 => random.below(threshold * 7 / 10),
        _ => random.below(5),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In twenty seconds a job does some fifty steps, and fewer on a busy machine. The first long operations are for finding out how long they
    /// have to be.
    #[test]
    fn the_short_soak_of_the_tests_has_long_operations_early() {
        let mut random = Random::new(crate::faults::SOAKED_SEED);
        let steps = (0..25).map(|_| Step::draw(&mut random, true));
        let long = steps.filter(|step| step.world == World::Long && step.is_prompt());
        assert!(long.count() >= 7);
    }

    #[test]
    fn a_soak_has_steps_of_every_kind() {
        let mut random = Random::new(1);
        let steps: Vec<Step> = (0..500).map(|_| Step::draw(&mut random, true)).collect();
        for world in [
            World::Eager,
            World::Graph,
            World::Beside,
            World::Exchange,
            World::All,
            World::Long,
        ] {
            assert!(steps.iter().any(|step| step.world == world), "{world:?}");
        }
        for parts in [None, Some(Mode::Eager), Some(Mode::Graph)] {
            assert!(steps.iter().any(|step| step.parts == parts), "{parts:?}");
        }
        let pauses = |step: &&Step| step.late.iter().all(|late| late.time > THRESHOLD);
        assert!(steps.iter().any(|step| pauses(&step)), "no checkpoint");
        let late = |computes: bool, least: Duration| {
            let is = move |late: &Late| late.computes == computes && late.time > least;
            steps.iter().any(|step| step.late.iter().any(is))
        };
        for computes in [false, true] {
            assert!(late(computes, THRESHOLD + PROMISED), "computes: {computes}");
        }
        let mut random = Random::new(1);
        assert!((0..500).all(|_| Step::draw(&mut random, false).world != World::Long));
    }

    #[test]
    fn a_rank_is_late_once_a_step_and_waits_for_those_that_it_needs() {
        let late = Late {
            time: Duration::from_secs(2),
            computes: false,
            first: true,
        };
        let step = Step {
            parts: Some(Mode::Eager),
            world: World::Exchange,
            waits: false,
            late: [Late::default(), late, Late::default(), late],
        };
        let slots = |rank: u32| Slot::ALL.map(|slot| step.late(rank, slot) == late);
        assert_eq!(slots(1), [false, true, false, false]);
        assert_eq!(slots(3), [true, false, false, false]);
        let without = Step { parts: None, ..step };
        assert_eq!(without.late(3, Slot::World), late);
        let waits = |slot, rank, all| step.waits_for(slot, rank, all).collect::<Vec<_>>();
        assert_eq!(waits(Slot::World, 0, false), [3]);
        assert_eq!(waits(Slot::World, 0, true), [1, 3]);
        assert_eq!(waits(Slot::Trio, 2, false), [0, 3]);
        assert_eq!(Group::of_size(3), Some(Group::Trio));
        assert_eq!(Group::of_size(5), None);
        assert!(
            Slot::ALL
                .iter()
                .all(|slot| Slot::ALL[slot.number(7) as usize % 4] == *slot)
        );
    }
}
