//! What the watchdog said, held against what was true.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{
    cases::{Fault, Round, THRESHOLD},
    job::{Observed, Said},
    truth::What,
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
    /// How often it was run before, on a machine so slow that something else happened than was meant to.
    #[serde(default)]
    pub(super) repeated: u32,
    /// What was wrong, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) problems: Vec<String>,
}

/// The first rank that a text names.
pub(super) fn first_rank(text: &str) -> Option<u32> {
    text.match_indices("rank ").find_map(|(at, mark)| {
        let rest = &text[at + mark.len()..];
        let digits = rest
            .find(|c: char| !c.is_ascii_digit())
            .map_or(rest, |end| &rest[..end]);
        digits.parse().ok()
    })
}

struct Judge<'a> {
    round: &'a Round,
    observed: &'a Observed,
    score: Score,
}

/// Judges a round; `None` if the machine was so slow that another fault happened than was meant to.
#[must_use]
pub(super) fn judge(round: &Round, observed: &Observed) -> Option<Score> {
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
    if judge.is_other_than_meant() {
        return None;
    }
    if let Some(broken) = &observed.broken {
        judge.score.class = false;
        judge.score.problems.push(broken.clone());
    }
    judge.verdicts();
    judge.failures();
    judge.completions();
    Some(judge.score)
}

impl Judge<'_> {
    /// When something happened on a rank.
    fn at(&self, rank: u32, what: &What) -> Option<u64> {
        let kind = std::mem::discriminant(what);
        self.observed
            .truth
            .iter()
            .find(|event| event.rank == rank && std::mem::discriminant(&event.what) == kind)
            .map(|event| event.ns)
    }

    fn problem(&mut self, text: String) {
        self.score.problems.push(text);
    }

    /// Something was said at `ns` that had to be within a time from `base` on.
    fn timed(&mut self, what: &str, ns: u64, base: u64, within: Duration) {
        let took = ns.saturating_sub(base) as f64 / 1e6;
        self.score.latency_ms = Some(self.score.latency_ms.unwrap_or(0.0).max(took));
        if took > within.as_secs_f64() * 1e3 {
            self.score.in_time = false;
            self.problem(format!("{what} after {took:.0} ms, not {within:?}"));
        }
    }

    /// Whether the machine, and not the fault, kept a rank from coming for as long as the threshold. What is said of that is that
    /// a rank is late, never that it hangs.
    fn is_other_than_meant(&self) -> bool {
        let (round, observed) = (self.round, self.observed);
        if observed.stalled > THRESHOLD / 4 {
            return true;
        }
        let is_late = |said: &Said| said.verdict.contains(" (late): ");
        let fault = self.at(round.victim, &What::Fault).unwrap_or(u64::MAX);
        if observed.said.iter().any(|said| said.ns < fault && is_late(said)) {
            return true;
        }
        let called = |rank| self.at(rank, &What::Called);
        let others = (0..round.ranks).filter(|rank| *rank != round.victim);
        let failed = || {
            observed.truth.iter().filter_map(|event| match &event.what {
                What::Failed { text, .. } => Some((event.ns, text)),
                _ => None,
            })
        };
        // Who is wrong can be said once most have called: the victim is to be the last.
        let is_last = !others.clone().any(|rank| called(rank) > called(round.victim))
            && !failed().any(|(_, text)| text.contains(" did not yet call it"));
        if matches!(round.fault, Fault::Count | Fault::Order) && !is_last {
            return true;
        }
        let is_expected = |said: &Said| is_late(said) || said.verdict.starts_with("METADATA_MISMATCH ");
        let until = match round.fault {
            // Until it calls something else than the others it is late, and they say so.
            Fault::SlowBelow | Fault::Crossed => called(round.victim),
            // Until they fail, ranks wait; normally not for long.
            Fault::Count | Fault::Order if observed.said.iter().all(is_expected) => {
                failed().map(|(ns, _)| ns).max()
            }
            _ => None,
        };
        let waited = until.zip(others.filter_map(called).min());
        waited.is_some_and(|(until, since)| {
            u128::from(until.saturating_sub(since)) >= THRESHOLD.as_nanos() * 9 / 10
        })
    }

    fn verdicts(&mut self) {
        let (round, observed) = (self.round, self.observed);
        let expectation = round.expectation();
        let fault = self.at(round.victim, &What::Fault).unwrap_or(0);
        for rank in 0..round.ranks {
            // Whoever asked while the fault lasted may say so a moment later: of the victim.
            let (said, after): (Vec<&Said>, Vec<&Said>) = observed
                .said
                .iter()
                .filter(|said| said.rank == rank)
                .partition(|said| said.ns <= observed.ended_ns);
            let names_victim = |said: &&&Said| first_rank(&said.verdict) == Some(round.victim);
            // And ranks that will never go on abort one after the other.
            let ended =
                |said: &&&Said| round.ends_in_aborts() && said.verdict.starts_with("PEER_ABORTED (hang): ");
            let wrong = after
                .iter()
                .filter(|said| !names_victim(said) && !ended(said))
                .count();
            let says = round.expects_of(expectation.by, rank) && self.at(rank, &What::TooLate).is_none();
            let expected = if says { &expectation.verdicts[..] } else { &[] };
            // Two that cross each other are each other's culprits; whether the one or the other or both say so first does not matter.
            let crossed = |said: &&&Said| {
                round.fault == Fault::Crossed && said.verdict.starts_with("METADATA_MISMATCH (hang)")
            };
            let more = said
                .iter()
                .skip(expected.len())
                .filter(|said| !crossed(said))
                .count();
            if more + wrong > 0 {
                self.score.false_verdicts += (more + wrong) as u32;
                self.problem(format!(
                    "rank {rank} said more than it should: {said:?}, after the end {after:?}"
                ));
            }
            let base = fault.max(self.at(rank, &What::Called).unwrap_or(0));
            for (index, expected) in expected.iter().enumerate() {
                let Some(said) = said.get(index) else {
                    (self.score.class, self.score.culprit) = (false, false);
                    self.problem(format!("rank {rank} did not say {}", expected.cause));
                    continue;
                };
                let begins = format!("{} ({}): ", expected.cause, expected.class);
                let right = said.verdict.starts_with(&begins) && said.verdict.contains(expected.words);
                if !right || !said.operation.contains(&expected.operation) {
                    self.score.class = false;
                    // Another verdict than the true one is a false one.
                    self.score.false_verdicts += 1;
                    self.problem(format!(
                        "rank {rank} said {} of {}, not {begins}",
                        said.verdict, said.operation
                    ));
                }
                if !names_victim(&said) {
                    self.score.culprit = false;
                    self.problem(format!(
                        "rank {rank} named another than rank {}: {}",
                        round.victim, said.verdict
                    ));
                }
                self.timed(
                    &format!("rank {rank} said {begins}"),
                    said.ns,
                    base,
                    expected.within,
                );
            }
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
            if !text.contains(&expected.text) {
                self.score.culprit = false;
                self.problem(format!(
                    "rank {rank} failed without \"{}\": {text}",
                    expected.text
                ));
            }
            self.timed(&format!("rank {rank} failed"), ns, base, expected.within);
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

/// The rounds of a case, as they are kept.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Tally {
    pub(super) case: String,
    pub(super) seed: u64,
    pub(super) rounds: u32,
    /// Rounds with the right class, the right culprit, in time.
    pub(super) class: u32,
    pub(super) culprit: u32,
    pub(super) in_time: u32,
    pub(super) false_verdicts: u32,
    /// Rounds that were run again, since the machine had been too slow.
    #[serde(default)]
    pub(super) repeated: u32,
    /// Median and worst of the rounds' latencies, and what is promised, milliseconds.
    pub(super) median_ms: Option<f64>,
    pub(super) worst_ms: Option<f64>,
    pub(super) promised_ms: u32,
    /// Of the rounds in which something was wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) problems: Vec<String>,
}

impl Tally {
    #[must_use]
    pub(super) fn of(case: String, seed: u64, promised: Duration, scores: &[Score]) -> Self {
        let count = |is: fn(&Score) -> bool| scores.iter().filter(|score| is(score)).count() as u32;
        let mut latencies: Vec<f64> = scores.iter().filter_map(|score| score.latency_ms).collect();
        latencies.sort_by(f64::total_cmp);
        let rounded = |ms: &f64| ms.round();
        Self {
            case,
            seed,
            rounds: scores.len() as u32,
            class: count(|score| score.class),
            culprit: count(|score| score.culprit),
            in_time: count(|score| score.in_time),
            false_verdicts: scores.iter().map(|score| score.false_verdicts).sum(),
            repeated: scores.iter().map(|score| score.repeated).sum(),
            median_ms: latencies.get(latencies.len() / 2).map(rounded),
            worst_ms: latencies.last().map(rounded),
            promised_ms: promised.as_millis() as u32,
            problems: scores
                .iter()
                .enumerate()
                .flat_map(|(round, score)| {
                    score
                        .problems
                        .iter()
                        .map(move |text| format!("round {round}: {text}"))
                })
                .collect(),
        }
    }
}

/// Rounds that may be repeated of a cell however few it has.
const FEW: u32 = 5;

impl Tally {
    /// More rounds were left out than count: what is left is no sample. Of few rounds some may be, where the machine is busy.
    fn is_too_often_repeated(&self) -> bool {
        self.repeated > self.rounds.max(FEW)
    }
}

/// The whole run, as its last line says.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) ok: bool,
    pub(super) seed: u64,
    pub(super) cases: usize,
    pub(super) rounds: u32,
    /// Parts of the rounds.
    pub(super) class: f64,
    pub(super) culprit: f64,
    pub(super) in_time: f64,
    pub(super) false_verdicts: u32,
    pub(super) repeated: u32,
    pub(super) worst_ms: f64,
    /// Cells that cannot be, and why.
    pub(super) impossible: Vec<String>,
    /// Cases in which something was wrong.
    pub(super) wrong: Vec<String>,
}

/// What part of the rounds must have the right class and culprit.
const RIGHT: f64 = 0.99;

impl Report {
    #[must_use]
    pub(super) fn of(seed: u64, tallies: &[Tally], impossible: Vec<String>) -> Self {
        let sum = |of: fn(&Tally) -> u32| tallies.iter().map(of).sum::<u32>();
        let rounds = sum(|tally| tally.rounds);
        let part = |count: u32| f64::from(count) / f64::from(rounds.max(1));
        let (class, culprit) = (part(sum(|tally| tally.class)), part(sum(|tally| tally.culprit)));
        let in_time = part(sum(|tally| tally.in_time));
        let false_verdicts = sum(|tally| tally.false_verdicts);
        let right = class >= RIGHT && culprit >= RIGHT && in_time >= 1.0 && false_verdicts == 0;
        Self {
            ok: rounds > 0 && right && !tallies.iter().any(Tally::is_too_often_repeated),
            seed,
            cases: tallies.len(),
            rounds,
            class,
            culprit,
            in_time,
            false_verdicts,
            repeated: sum(|tally| tally.repeated),
            worst_ms: tallies
                .iter()
                .filter_map(|tally| tally.worst_ms)
                .fold(0.0, f64::max),
            impossible,
            wrong: tallies
                .iter()
                .filter(|tally| !tally.problems.is_empty() || tally.is_too_often_repeated())
                .map(|tally| tally.case.clone())
                .collect(),
        }
    }
}

/// Prints the table of the cases.
pub(super) fn print(tallies: &[Tally]) {
    println!(
        "\n{:<36} {:>6} {:>7} {:>8} {:>8} {:>6} {:>10} {:>9} {:>9}",
        "case", "rounds", "class", "culprit", "in time", "false", "median ms", "worst ms", "promised"
    );
    let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0}"));
    for tally in tallies {
        println!(
            "{:<36} {:>6} {:>7} {:>8} {:>8} {:>6} {:>10} {:>9} {:>9}",
            tally.case,
            tally.rounds,
            tally.class,
            tally.culprit,
            tally.in_time,
            tally.false_verdicts,
            number(tally.median_ms),
            number(tally.worst_ms),
            number((tally.promised_ms > 0).then_some(f64::from(tally.promised_ms)))
        );
    }
    for tally in tallies {
        if tally.is_too_often_repeated() {
            println!(
                "{}: {} rounds were repeated, of {} that count",
                tally.case, tally.repeated, tally.rounds
            );
        }
        for problem in &tally.problems {
            println!("{}: {problem}", tally.case);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        faults::{
            cases::{Case, Mode, Ranks, Source},
            truth::Event,
        },
        nccl::DeviceKind,
    };

    const MS: u64 = 1_000_000;

    fn withheld() -> Round {
        let case = Case {
            fault: Fault::SlowAbove,
            ranks: Ranks::Process,
            mode: Mode::Eager,
            source: Source::Pages,
        };
        let round = Round::draw(&case, DeviceKind::Host, 1, 0);
        Round {
            ranks: 3,
            victim: 1,
            ..round
        }
    }

    fn observed(verdicts: &[(u32, u64, &str)]) -> Observed {
        let event = |rank, ns, what| Event { rank, ns, what };
        Observed {
            said: verdicts
                .iter()
                .map(|(rank, ms, verdict)| Said {
                    ranks: 4,
                    rank: *rank,
                    ns: ms * MS,
                    operation: String::new(),
                    verdict: (*verdict).to_owned(),
                })
                .collect(),
            truth: vec![
                event(1, 100 * MS, What::Fault),
                event(0, 50 * MS, What::Called),
                event(2, 200 * MS, What::Called),
            ],
            ended_ns: 5000 * MS,
            text: String::new(),
            stalled: Duration::ZERO,
            broken: None,
        }
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
    fn a_run_is_good_only_if_nearly_all_of_it_is() {
        let score = |class, culprit| Score {
            class,
            culprit,
            in_time: true,
            latency_ms: Some(10.0),
            ..Score::default()
        };
        let mut scores = vec![score(true, true); 99];
        scores.push(score(true, false));
        let tally = |scores: &[Score]| Tally::of("x".to_owned(), 1, Duration::ZERO, scores);
        assert!(Report::of(1, &[tally(&scores)], Vec::new()).ok);
        scores.push(score(false, false));
        assert!(!Report::of(1, &[tally(&scores)], Vec::new()).ok);
        assert!(!Report::of(1, &[], Vec::new()).ok);
        scores.truncate(2);
        scores[0].repeated = FEW;
        assert!(Report::of(1, &[tally(&scores)], Vec::new()).ok);
        scores[1].repeated = 1;
        let report = Report::of(1, &[tally(&scores)], Vec::new());
        assert!(!report.ok && report.wrong == ["x"], "{report:?}");
        scores[1].repeated = 0;
        scores[0].false_verdicts = 1;
        assert!(!Report::of(1, &[tally(&scores)], Vec::new()).ok);
    }
}
