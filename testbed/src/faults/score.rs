//! One round judged: the watchdog's verdicts against the promises and the journal.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    cases::{Fault, PROMISED, Round, THRESHOLD},
    expectation::{LASTS, NOT_BEFORE},
    journal::What,
    observed::{Observed, Verdict},
    premise::{self, Reason},
};

/// The outcome of a round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Score {
    /// Every rank gave the verdicts, or failed with the code, that the fault has, and with the right class.
    pub(super) class: bool,
    /// All of them named the victim.
    pub(super) culprit: bool,
    /// From when a rank waited and the fault was there to what it said, the longest over the ranks, milliseconds.
    pub(super) latency_ms: Option<f64>,
    /// Everything was said in time.
    pub(super) in_time: bool,
    /// Verdicts that should not have been given.
    pub(super) false_verdicts: u32,
    /// How often it was run before, and why that does not count.
    #[serde(default)]
    pub(super) left_out: BTreeMap<Reason, u32>,
    /// What was wrong, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) problems: Vec<String>,
}

struct Judge<'a> {
    round: &'a Round,
    observed: &'a Observed,
    score: Score,
}

/// Judges a round, unless the machine was so busy that something else happened than was meant to.
///
/// # Errors
/// Why it is to be left out.
pub(super) fn judge(round: &Round, observed: &Observed) -> Result<Score, Reason> {
    if let Some(reason) = premise::broken(round, observed) {
        // No machine is so busy that a rank crashes.
        let (wrong, broken) = (
            premise::false_in_any_round(round, observed),
            observed.broken.as_ref(),
        );
        if wrong.is_empty() && broken.is_none() {
            return Err(reason);
        }
        return Ok(Score {
            false_verdicts: wrong.len() as u32,
            problems: vec![format!("to be left out ({reason}), but for {wrong:?} {broken:?}")],
            ..Score::default()
        });
    }
    let mut judge = Judge {
        round,
        observed,
        score: Score {
            class: true,
            culprit: true,
            in_time: true,
            ..Score::default()
        },
    };
    if let Some(broken) = &observed.broken {
        judge.score.class = false;
        judge.score.problems.push(broken.clone());
    }
    match round.crossing() {
        Some(two) => judge.crossing(two),
        None => judge.verdicts(),
    }
    judge.failures();
    judge.completions();
    Ok(judge.score)
}

impl Judge<'_> {
    fn at(&self, rank: u32, what: &What) -> Option<u64> {
        self.observed.at(rank, what)
    }

    fn problem(&mut self, text: String) {
        self.score.problems.push(text);
    }

    /// Something was said at `ns` that had to be within a time from `base` on, and not before `earliest`.
    fn timed(&mut self, what: &str, ns: u64, (base, within): (u64, Duration), earliest: u64) {
        if ns < earliest {
            let by = (earliest - ns) as f64 / 1e6;
            self.score.in_time = false;
            self.problem(format!("{what} {by:.0} ms before it may"));
        }
        let took = ns.saturating_sub(base) as f64 / 1e6;
        self.score.latency_ms = Some(self.score.latency_ms.unwrap_or(0.0).max(took));
        if took > within.as_secs_f64() * 1e3 {
            self.score.in_time = false;
            self.problem(format!("{what} after {took:.0} ms, not {within:?}"));
        }
    }

    fn verdicts(&mut self) {
        let (round, observed) = (self.round, self.observed);
        let expectation = round.expectation();
        let fault = self.at(round.victim, &What::Fault).unwrap_or(0);
        for rank in 0..round.ranks {
            // Whoever asked while the fault lasted may say so a moment later, once: what there was to say, of the victim.
            let (said, after): (Vec<&Verdict>, Vec<&Verdict>) = observed
                .verdicts
                .iter()
                .filter(|said| said.rank == rank)
                .partition(|said| said.ns <= observed.ended_ns);
            let names_victim = |said: &&Verdict| said.first_rank() == Some(round.victim);
            let says = round.expects_of(expectation.by, rank) && self.at(rank, &What::TooLate).is_none();
            let expected = if says { &expectation.promises[..] } else { &[] };
            let remains = |said: &&&Verdict| {
                let is = |begins: &str| said.text.starts_with(begins);
                let was_to_be_said = expected.iter().any(|expected| is(&expected.begins()));
                names_victim(said) && was_to_be_said
            };
            // And ranks that will never go on abort one after the other.
            let ended =
                |said: &&&Verdict| round.ends_in_aborts() && said.text.starts_with("PEER_ABORTED (hang): ");
            let left = after.iter().filter(|said| !ended(said));
            let wrong = left.clone().count() - left.filter(remains).count().min(1);
            let more = said.iter().skip(expected.len()).count();
            if more + wrong > 0 {
                self.score.false_verdicts += (more + wrong) as u32;
                self.problem(format!(
                    "rank {rank} said more than it should: {said:?}, after the end {after:?}"
                ));
            }
            // Until all have come something may move.
            let last = round.comes_last().unwrap_or(rank);
            let called = [rank, last].map(|rank| self.at(rank, &What::Called).unwrap_or(0));
            let base = fault.max(called[0]).max(called[1]);
            for (index, expected) in expected.iter().enumerate() {
                let Some(said) = said.get(index) else {
                    (self.score.class, self.score.culprit) = (false, false);
                    self.problem(format!("rank {rank} did not say {}", expected.cause));
                    continue;
                };
                let begins = expected.begins();
                let right = said.text.starts_with(&begins) && said.text.contains(expected.words);
                if !right || !said.operation.contains(&expected.operation) {
                    self.score.class = false;
                    // Another verdict than the true one is a false one.
                    self.score.false_verdicts += 1;
                    self.problem(format!(
                        "rank {rank} said {} of {}, not {begins}",
                        said.text, said.operation
                    ));
                }
                if !names_victim(said) {
                    self.score.culprit = false;
                    self.problem(format!(
                        "rank {rank} named another than rank {}: {}",
                        round.victim, said.text
                    ));
                }
                // Its time begins with the operation, whenever the fault came.
                let since = match called[0] {
                    0 => fault,
                    _ if expected.not_before.is_zero() => fault,
                    called => called,
                };
                self.timed(
                    &format!("rank {rank} said {begins}"),
                    said.ns,
                    (base, expected.within),
                    since + expected.not_before.as_nanos() as u64,
                );
            }
        }
    }

    /// Two that wait for each other are each other's culprits: at least one of them says so. The others may say in the meantime that the one or
    /// the other has not come, or has called it and not come to it.
    fn crossing(&mut self, two: [u32; 2]) {
        let called = (0..self.round.ranks).filter_map(|rank| self.at(rank, &What::Called));
        let base = called.max().unwrap_or(0);
        let mut found = false;
        for said in &self.observed.verdicts {
            let named = said.first_rank().filter(|named| two.contains(named));
            let is_of_two = two.contains(&said.rank);
            let is = |begins: &str| said.text.starts_with(begins);
            if is("METADATA_MISMATCH (hang): ") && is_of_two && named.is_some_and(|named| named != said.rank)
            {
                found = true;
                let within = THRESHOLD + PROMISED + LASTS;
                let since = self.at(said.rank, &What::Called).unwrap_or(0);
                let earliest = since + NOT_BEFORE.as_nanos() as u64;
                self.timed(
                    &format!("rank {} said it", said.rank),
                    said.ns,
                    (base, within),
                    earliest,
                );
                continue;
            }
            let is_late = is("NOT_LAUNCHED (late): ") || is("QUEUED_BEHIND_COMPUTE (late): ");
            if !is_late || is_of_two || named.is_none() {
                self.score.false_verdicts += 1;
                self.problem(format!("rank {} said {}", said.rank, said.text));
            }
        }
        if !found {
            (self.score.class, self.score.culprit) = (false, false);
            self.problem(format!(
                "none of {two:?} said METADATA_MISMATCH: {:?}",
                self.observed.verdicts
            ));
        }
    }

    fn failures(&mut self) {
        let Some(expected) = self.round.expectation().failure else {
            return;
        };
        let fault = self.at(self.round.victim, &What::Fault).unwrap_or(0);
        let called = (0..self.round.ranks).filter_map(|rank| self.at(rank, &What::Called));
        // Calls that differ can be compared once they have been made.
        let base = match self.round.fault {
            Fault::Killed => fault,
            _ => called.max().unwrap_or(0).max(fault),
        };
        for rank in 0..self.round.ranks {
            if !self.round.expects_of(expected.by, rank) {
                continue;
            }
            let found = self.observed.truth.iter().find_map(|event| match &event.what {
                What::Failed { code, text } if event.rank == rank => Some((event.ns, *code, text.clone())),
                _ => None,
            });
            let Some((ns, code, text)) = found else {
                (self.score.class, self.score.culprit) = (false, false);
                self.problem(format!("rank {rank} did not fail"));
                continue;
            };
            if code != expected.code {
                self.score.class = false;
                self.problem(format!("rank {rank} failed with {code}: {text}"));
            }
            if let Some(missing) = expected.texts.iter().find(|part| !text.contains(*part)) {
                self.score.culprit = false;
                self.problem(format!("rank {rank} failed without \"{missing}\": {text}"));
            }
            self.timed(&format!("rank {rank} failed"), ns, (base, expected.within), fault);
        }
    }

    /// A wrong result would be a wrong test.
    fn completions(&mut self) {
        let wrong = self
            .observed
            .truth
            .iter()
            .filter(|event| matches!(event.what, What::Completed { right: false, .. }))
            .count();
        if wrong > 0 {
            self.score.class = false;
            self.problem(format!("{wrong} ranks have a wrong result"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            cases::{Mode, Source},
            observed::sample::{self, event, verdict},
        },
        *,
    };

    fn withheld() -> Round {
        Round::sample(Fault::SlowAbove, Mode::Eager, Source::Pages)
    }

    fn observed(verdicts: &[(u32, u64, &str)]) -> Observed {
        let verdicts = verdicts
            .iter()
            .map(|(rank, ms, text)| verdict(*rank, 4, *ms, "", text));
        let truth = vec![
            event(1, 100, What::Fault),
            event(0, 50, What::Called),
            event(2, 200, What::Called),
        ];
        sample::observed(verdicts.collect(), truth, 5000)
    }

    #[test]
    fn what_is_right_scores_and_what_is_wrong_does_not() {
        let right = "NOT_LAUNCHED (late): rank 1 has not launched it; its last";
        let score = |verdicts: &[(u32, u64, &str)]| judge(&withheld(), &observed(verdicts)).unwrap();
        let good = score(&[(0, 500, right), (2, 600, right)]);
        assert_eq!(
            (good.class, good.culprit, good.in_time, good.false_verdicts),
            (true, true, true, 0),
            "{good:?}"
        );
        assert_eq!(good.latency_ms, Some(400.0));
        assert!(!score(&[(0, 500, right)]).class);
        assert!(!score(&[(0, 500, right), (2, 1600, right)]).in_time);
        let other = score(&[(0, 500, right), (2, 600, "NOT_LAUNCHED (late): rank 0 has not")]);
        assert_eq!((other.class, other.culprit), (true, false));
        let hang = score(&[(0, 500, right), (2, 600, "NOT_LAUNCHED (hang): rank 1 has not")]);
        assert_eq!((hang.class, hang.false_verdicts), (false, 1));
        let victim = score(&[(0, 500, right), (2, 600, right), (1, 700, right)]);
        assert_eq!((victim.class, victim.false_verdicts), (true, 1));
        assert_eq!(
            score(&[(0, 500, right), (2, 600, right), (0, 900, right)]).false_verdicts,
            1
        );
        // Said late, but of the victim.
        assert_eq!(
            score(&[(0, 500, right), (2, 600, right), (0, 5001, right)]).false_verdicts,
            0
        );
    }

    #[test]
    fn who_speaks_before_the_time_is_up_speaks_too_early() {
        let right = "NOT_LAUNCHED (late): rank 1 has not launched it; its last";
        let score = |verdicts: &[(u32, u64, &str)]| judge(&withheld(), &observed(verdicts)).unwrap();
        // Rank 0 waits from 100 ms on, rank 2 from 200 ms on.
        assert!(score(&[(0, 375, right), (2, 475, right)]).in_time);
        let early = score(&[(0, 500, right), (2, 460, right)]);
        assert!(
            !early.in_time && early.class && !early.problems.is_empty(),
            "{early:?}"
        );
        assert!(
            !score(&[(0, 500, right), (2, 150, right)]).in_time,
            "before it waited"
        );
        let hang = "NOT_LAUNCHED (hang): rank 1 has not launched it; its last";
        let withheld = Round {
            fault: Fault::Withheld,
            ..withheld()
        };
        let score = |hang_ms| {
            let (late, hung) = ([(0, 500, right), (2, 600, right)], (0, hang_ms, hang));
            let verdicts = [late[0], late[1], hung, (2, 1600, hang)];
            judge(&withheld, &observed(&verdicts)).unwrap()
        };
        assert!(score(1400).in_time);
        assert!(
            !score(1200).in_time,
            "a rank that is late is no hang before the arrival time-out"
        );
    }

    #[test]
    fn after_the_end_no_other_cause_or_class_is_excused() {
        let right = "NOT_LAUNCHED (late): rank 1 has not launched it; its last";
        let hang = "NOT_LAUNCHED (hang): rank 1 has not launched it; its last";
        let stuck = "STUCK_KERNEL (hang): every rank has come, nothing moves, and rank 1 stopped first";
        let wrong = |after: &[(u32, u64, &str)]| {
            let said = [&[(0, 500, right), (2, 600, right)], after].concat();
            judge(&withheld(), &observed(&said)).unwrap().false_verdicts
        };
        assert_eq!(wrong(&[(0, 5001, right), (2, 5002, right)]), 0);
        assert_eq!(wrong(&[(0, 5001, right), (0, 5002, right)]), 1, "one a rank");
        assert_eq!(wrong(&[(0, 5001, hang)]), 1);
        assert_eq!(wrong(&[(2, 5001, stuck)]), 1);
        assert_eq!(wrong(&[(1, 5001, right)]), 1, "of itself");
    }

    #[test]
    fn of_two_that_wait_for_each_other_one_says_so() {
        let round = Round {
            fault: Fault::Crossed,
            ..withheld()
        };
        let mismatch = |rank| format!("METADATA_MISMATCH (hang): rank {rank} is in another operation");
        let score = |verdicts: &[(u32, u64, &str)]| {
            let mut score = Judge {
                round: &round,
                observed: &observed(verdicts),
                score: Score {
                    class: true,
                    culprit: true,
                    in_time: true,
                    ..Score::default()
                },
            };
            score.crossing(round.crossing().unwrap());
            score.score
        };
        let late = "NOT_LAUNCHED (late): rank 1 has not launched it";
        let good = score(&[(0, 520, late), (2, 600, &mismatch(1)), (1, 700, &mismatch(2))]);
        assert!(
            good.class && good.culprit && good.in_time && good.false_verdicts == 0,
            "{good:?}"
        );
        assert!(!score(&[(0, 520, late)]).class, "nobody said so");
        let queued = "QUEUED_BEHIND_COMPUTE (late): rank 1 has launched it";
        assert_eq!(
            score(&[(0, 520, queued), (2, 600, &mismatch(1))]).false_verdicts,
            0
        );
        for wrong in [
            (2, 600, &*mismatch(0)),
            (0, 600, &mismatch(1)),
            (2, 600, late),
            (2, 600, queued),
        ] {
            assert_eq!(
                score(&[(1, 500, &mismatch(2)), wrong]).false_verdicts,
                1,
                "{wrong:?}"
            );
        }
        assert!(score(&[(2, 2000, &mismatch(1))]).in_time);
        assert!(!score(&[(2, 2200, &mismatch(1))]).in_time);
    }

    #[test]
    fn a_busy_machine_excuses_no_false_hang() {
        let right = "NOT_LAUNCHED (late): rank 1 has not launched it; its last";
        let mut observed = observed(&[(0, 500, right), (2, 600, right)]);
        observed.stalled = Duration::from_millis(500);
        assert_eq!(judge(&withheld(), &observed), Err(Reason::Stalled));
        observed.broken = Some("rank 2 was killed by signal 11".to_owned());
        let crashed = judge(&withheld(), &observed).unwrap();
        assert!(!crashed.class && crashed.problems.len() == 1, "{crashed:?}");
        observed.broken = None;
        "NO_ANSWER (hang): rank 1 does not answer".clone_into(&mut observed.verdicts[1].text);
        let score = judge(&withheld(), &observed).unwrap();
        assert!(
            score.false_verdicts == 1 && !score.class && !score.problems.is_empty(),
            "{score:?}"
        );
    }

    #[test]
    fn what_was_said_before_the_fault_is_judged_and_no_excuse() {
        let right = "NOT_LAUNCHED (late): rank 1 has not launched it; its last";
        let early = observed(&[(0, 60, right), (0, 500, right), (2, 600, right)]);
        assert_eq!(judge(&withheld(), &early).unwrap().false_verdicts, 1);
    }
}
