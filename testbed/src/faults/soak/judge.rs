//! The verdicts of a soak against the journal. A verdict is true if its rank was late, on purpose or by a busy machine.

use std::time::Duration;

use super::{
    Lags, Report,
    steps::{Group, RANKS, Slot, Step},
};
use crate::faults::{
    cases::{PROMISED, Source, THRESHOLD},
    journal::{Event, Moment, What},
    observed::Verdict,
};

/// For so long an answer may be on its way: a verdict was true at some time since then. On a busy machine longer, by as much as each
/// of the threads that it goes through may be late: who answers, asks, says, and listens.
const AFTER: Duration = Duration::from_millis(700);
const THREADS: u64 = 4;
/// Who asks does so a little early by the others' clocks.
const WAITED: u64 = THRESHOLD.as_nanos() as u64 * 9 / 10;
/// How finely time is looked at.
const GRAIN: usize = 5_000_000;

/// When a rank was where in an operation, nanoseconds of `CLOCK_MONOTONIC`; `u64::MAX` if never.
#[derive(Clone, Copy)]
struct Times {
    called: u64,
    launched: u64,
    arrived: u64,
    finished: u64,
}

impl Times {
    const NEVER: Self = Self {
        called: u64::MAX,
        launched: u64::MAX,
        arrived: u64::MAX,
        finished: u64::MAX,
    };

    /// From then on it may be in the operation.
    fn from(self) -> u64 {
        self.called.max(self.arrived)
    }

    /// By then it is, if the machine lets it.
    fn by(self) -> u64 {
        self.launched.max(self.arrived)
    }
}

/// Why a rank is late, as the watchdog says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    NotLaunched,
    Queued,
}

impl Cause {
    /// Of what is said; `None` of a hang.
    fn of(verdict: &str) -> Option<Self> {
        match verdict.split("): ").next() {
            Some("NOT_LAUNCHED (late") => Some(Self::NotLaunched),
            Some("QUEUED_BEHIND_COMPUTE (late") => Some(Self::Queued),
            _ => None,
        }
    }
}

/// An operation: the step that it is of, its place there, and its number.
type Operation<'a> = (&'a Step, Slot, usize);

/// What was done.
pub(super) struct Course<'a> {
    steps: &'a [Step],
    /// By operation and rank.
    times: Vec<[Times; RANKS as usize]>,
    source: Source,
    /// Each rank has a device of its own.
    apart: bool,
}

impl<'a> Course<'a> {
    pub(super) fn new(steps: &'a [Step], truth: &[Event], source: Source, apart: bool) -> Self {
        let mut times = vec![[Times::NEVER; RANKS as usize]; steps.len() * Slot::ALL.len()];
        for event in truth {
            let What::Soaked { operation, moment } = event.what else {
                continue;
            };
            let Some(times) = times.get_mut(operation as usize) else {
                continue;
            };
            let times = &mut times[event.rank as usize];
            let place = match moment {
                Moment::Called => &mut times.called,
                Moment::Launched => &mut times.launched,
                Moment::Arrived => &mut times.arrived,
                Moment::Finished => &mut times.finished,
            };
            *place = event.ns;
        }
        Self {
            steps,
            times,
            source,
            apart,
        }
    }

    fn operations(&self) -> impl Iterator<Item = Operation<'a>> {
        self.steps.iter().enumerate().flat_map(|(number, step)| {
            Slot::ALL.map(|slot| (step, slot, slot.number(number as u32) as usize))
        })
    }

    /// Those around an operation that may be under way with it: of its step and the ones beside it.
    fn near(&self, number: usize) -> impl Iterator<Item = Operation<'a>> {
        let step = number / Slot::ALL.len();
        self.operations()
            .skip(step.saturating_sub(1) * Slot::ALL.len())
            .take(3 * Slot::ALL.len())
    }

    fn of(&self, number: usize, rank: u32) -> Times {
        self.times[number][rank as usize]
    }

    /// Whether a rank waits in another operation at a time: surely, or (`perhaps`) possibly.
    fn is_held_up(&self, rank: u32, but: usize, at: u64, perhaps: bool) -> bool {
        self.near(but).any(|(step, slot, number)| {
            if number == but || !step.participants(slot).contains(&rank) {
                return false;
            }
            let mut awaited = step.waits_for(slot, rank, perhaps);
            if perhaps {
                self.of(number, rank).from() <= at
                    && (awaited.any(|other| self.of(number, other).by() > at)
                        || self.of(number, rank).finished > at)
            } else {
                self.of(number, rank).by() <= at && awaited.any(|other| self.of(number, other).from() > at)
            }
        })
    }

    /// Whether it may be true at a time that a rank is late for an operation, for that reason.
    fn may_be_late(&self, (step, slot, number): Operation<'_>, rank: u32, cause: Cause, at: u64) -> bool {
        let times = self.of(number, rank);
        // Of replays that are queued kernels tell nothing.
        let hidden = step.is_replay(slot) && self.source == Source::Pages;
        match cause {
            Cause::NotLaunched => at <= times.launched || hidden && at <= times.by(),
            Cause::Queued => !hidden && times.called <= at && at <= times.by(),
        }
    }

    fn is_surely_late(&self, (step, slot, number): Operation<'_>, rank: u32, cause: Cause, at: u64) -> bool {
        let times = self.of(number, rank);
        let hidden = step.is_replay(slot) && self.source == Source::Pages;
        match cause {
            Cause::NotLaunched => at < times.called || hidden && at < times.from(),
            Cause::Queued => !hidden && times.launched <= at && at < times.from(),
        }
    }

    /// Whether it may be right at a time to name `culprit`: no other that is as late is what all wait for, rather than it.
    fn may_be_named(&self, operation: Operation<'_>, culprit: u32, cause: Cause, at: u64) -> bool {
        let (step, slot, number) = operation;
        if !self.may_be_late(operation, culprit, cause, at) {
            return false;
        }
        // A message has no others. On a device that ranks share it is not told whose operation keeps it.
        if step.is_messages(slot) || !self.apart || !self.is_held_up(culprit, number, at, false) {
            return true;
        }
        let mut others = step.participants(slot).iter().filter(|other| **other != culprit);
        !others.any(|other| {
            self.is_surely_late(operation, *other, cause, at) && !self.is_held_up(*other, number, at, true)
        })
    }

    /// The ranks of the job that a verdict is by and names, if it is one on a late rank, and what for.
    fn read(said: &Verdict) -> Option<(Group, u32, u32, Cause)> {
        let group = Group::of_size(said.ranks)?;
        let rank = |rank: u32| group.members().get(rank as usize).copied();
        let (by, culprit) = (rank(said.rank)?, rank(said.first_rank()?)?);
        Some((group, by, culprit, Cause::of(&said.text)?))
    }

    fn is_true(&self, said: &Verdict, lags: &Lags) -> bool {
        let Some((group, by, culprit, cause)) = Self::read(said) else {
            return false;
        };
        self.operations().any(|operation| {
            let (step, slot, number) = operation;
            let awaited = || step.waits_for(slot, by, true).any(|rank| rank == culprit);
            if slot.group() != group || !step.participants(slot).contains(&by) || !awaited() {
                return false;
            }
            let (waits, comes) = (self.of(number, by).from(), self.of(number, culprit).by());
            if comes.saturating_sub(waits) < WAITED || said.ns.saturating_sub(waits) < WAITED {
                return false;
            }
            let after = AFTER.as_nanos() as u64 + THREADS * lags.around(said.ns);
            (said.ns.saturating_sub(after).max(waits)..=said.ns)
                .step_by(GRAIN)
                .any(|at| self.may_be_named(operation, culprit, cause, at))
        })
    }

    /// The report, with what is wrong printed.
    pub(super) fn judge(&self, said: &[Verdict], lags: &Lags) -> Report {
        let mut report = Report {
            steps: self.steps.len(),
            verdicts: said.len(),
            ..Report::default()
        };
        for said in said.iter().filter(|said| !self.is_true(said, lags)) {
            println!("false: {said:?}");
            report.false_verdicts += 1;
        }
        for (step, slot, number) in self.operations() {
            let ranks = step.participants(slot);
            let last = |of: fn(Times) -> u64| ranks.iter().map(|rank| of(self.of(number, *rank))).max();
            let Some((come, done)) = last(Times::by).zip(last(|times| times.finished)) else {
                continue;
            };
            if done == u64::MAX {
                continue;
            }
            report.operations += 1;
            let longest = done.saturating_sub(come) >= THRESHOLD.as_nanos() as u64;
            report.long_operations += usize::from(longest);
            for by in ranks {
                self.promise(&mut report, (said, lags), (step, slot, number), *by);
            }
        }
        report
    }

    /// Whoever waits for long enough has said so.
    fn promise(
        &self,
        report: &mut Report,
        (said, lags): (&[Verdict], &Lags),
        (step, slot, number): Operation<'_>,
        by: u32,
    ) {
        let waits = self.of(number, by).by();
        let awaited = step.waits_for(slot, by, false);
        let Some((last, comes)) = awaited
            .map(|rank| (rank, self.of(number, rank).from()))
            .max_by_key(|(_, comes)| *comes)
        else {
            return;
        };
        if comes.saturating_sub(waits) < (THRESHOLD + PROMISED).as_nanos() as u64 {
            return;
        }
        report.late += 1;
        let until = comes.saturating_add(AFTER.as_nanos() as u64 + THREADS * lags.around(comes));
        let answer = said.iter().find(|said| {
            let is = Self::read(said).is_some_and(|(group, of, ..)| (group, of) == (slot.group(), by));
            is && (waits..=until).contains(&said.ns)
        });
        match answer {
            Some(said) => {
                report.named += 1;
                report.worst_ms = report.worst_ms.max((said.ns - waits) / 1_000_000);
            }
            None => println!(
                "missed: rank {by} in operation {number} ({slot:?} of {step:?}) waited for rank {last} from {waits} to {comes}"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::steps::World;
    use super::*;
    use crate::{
        faults::{
            cases::Mode,
            observed::sample::{self, MS, event},
        },
        random::Random,
    };

    /// A step with the smaller communicators' operations called, or without.
    fn step(parts: Option<Mode>, world: World) -> Step {
        let mut random = Random::new(3);
        std::iter::repeat_with(|| Step::draw(&mut random, false))
            .find(|step| step.parts == parts && step.world == world)
            .unwrap()
    }

    /// A rank's events in an operation: called, launched and arrived at these times, milliseconds; done when all are.
    fn events(slot: Slot, times: &[(u32, u64, u64)]) -> Vec<Event> {
        let done = times
            .iter()
            .map(|(_, called, arrived)| called.max(arrived))
            .max()
            .unwrap()
            + 1;
        let event = |rank, ms, moment| {
            let operation = slot.number(0);
            event(rank, ms, What::Soaked { operation, moment })
        };
        let of_rank = |(rank, called, arrived): &(u32, u64, u64)| {
            [
                event(*rank, *called, Moment::Called),
                event(*rank, *called, Moment::Launched),
                event(*rank, *arrived, Moment::Arrived),
                event(*rank, done, Moment::Finished),
            ]
        };
        times.iter().flat_map(of_rank).collect()
    }

    fn verdict(rank: u32, ranks: u32, ms: u64, text: &str) -> Verdict {
        sample::verdict(rank, ranks, ms, "", text)
    }

    fn is_true(course: &Course<'_>, said: &Verdict) -> bool {
        course.is_true(said, &Lags::default())
    }

    const RIGHT: &str = "NOT_LAUNCHED (late): rank 2 has not launched it";
    const QUEUED: &str = "QUEUED_BEHIND_COMPUTE (late): rank 2 has not come to it";

    #[test]
    fn a_verdict_is_true_while_the_rank_is_late_and_a_long_wait_must_have_one() {
        let steps = [step(None, World::Eager)];
        let times = [(0, 1000, 1000), (1, 1010, 1010), (2, 3000, 3000), (3, 1020, 1020)];
        let truth = events(Slot::World, &times);
        let course = Course::new(&steps, &truth, Source::Pages, true);
        let said = [0, 1, 3].map(|rank| verdict(rank, 4, 1400, RIGHT));
        let report = course.judge(&said, &Lags::default());
        assert_eq!(
            (report.late, report.named, report.false_verdicts),
            (3, 3, 0),
            "{report:?}"
        );
        assert_eq!(
            (report.operations, report.long_operations, report.worst_ms),
            (1, 0, 400)
        );
        assert_eq!(course.judge(&said[..2], &Lags::default()).named, 2);
        for wrong in [
            verdict(0, 4, 1400, "NOT_LAUNCHED (late): rank 3 has not launched it"),
            verdict(0, 4, 1400, "NOT_LAUNCHED (hang): rank 2 has not launched it"),
            verdict(0, 4, 1400, "NO_ANSWER (hang): rank 2 does not answer"),
            verdict(0, 4, 1400, QUEUED),
            verdict(0, 4, 1100, RIGHT),
            verdict(0, 4, 4000, RIGHT),
            verdict(2, 4, 1400, RIGHT),
            verdict(0, 3, 1400, RIGHT),
        ] {
            assert!(!is_true(&course, &wrong), "{wrong:?}");
        }
    }

    #[test]
    fn a_rank_whose_stream_is_late_is_queued() {
        let steps = [step(None, World::Eager)];
        let times = [(0, 1000, 1000), (1, 1000, 1000), (2, 1000, 3000), (3, 1000, 1000)];
        let truth = events(Slot::World, &times);
        let course = Course::new(&steps, &truth, Source::Pages, true);
        assert!(is_true(&course, &verdict(0, 4, 1400, QUEUED)));
        assert!(!is_true(&course, &verdict(0, 4, 2000, RIGHT)));
        // A machine that has been late by 0.1 s lets it be said 0.4 s later.
        let late = Lags(vec![(4000 * MS, 100 * MS)]);
        assert!(!is_true(&course, &verdict(0, 4, 4000, QUEUED)));
        assert!(course.is_true(&verdict(0, 4, 4000, QUEUED), &late));
    }

    #[test]
    fn who_waits_elsewhere_is_not_the_one_to_name() {
        let steps = [step(Some(Mode::Eager), World::Eager)];
        // Rank 1 is late for the pair, rank 3 waits for it there, and both are late for the operation of all.
        let mut truth = events(Slot::Trio, &[(0, 900, 900), (2, 900, 900), (3, 900, 900)]);
        truth.extend(events(Slot::Pair, &[(1, 3000, 3000), (3, 910, 910)]));
        let all = [(0, 1000, 1000), (1, 3001, 3001), (2, 1000, 1000), (3, 3002, 3002)];
        truth.extend(events(Slot::World, &all));
        let course = Course::new(&steps, &truth, Source::Events, true);
        let names = |rank: u32| format!("NOT_LAUNCHED (late): rank {rank} has not launched it");
        assert!(is_true(&course, &verdict(0, 4, 1800, &names(1))));
        assert!(!is_true(&course, &verdict(0, 4, 1800, &names(3))));
        // In the pair it is rank 0 that is late, rank 1 of the job.
        assert!(is_true(&course, &verdict(1, 2, 1800, &names(0))));
        assert!(!is_true(&course, &verdict(0, 2, 1800, &names(1))));
        let shared = Course::new(&steps, &truth, Source::Events, false);
        assert!(is_true(&shared, &verdict(0, 4, 1800, &names(3))));
        // A message is waited for alone: of rank 3, whoever keeps that.
        let steps = [step(Some(Mode::Eager), World::Exchange)];
        let course = Course::new(&steps, &truth, Source::Events, true);
        assert!(is_true(&course, &verdict(0, 4, 1800, &names(3))));
        assert!(!is_true(&course, &verdict(0, 4, 1800, &names(2))));
    }
}
