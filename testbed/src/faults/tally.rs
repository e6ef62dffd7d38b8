//! The scores of many rounds, summed up; the report that is the last line.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{FULL, premise::Reason, score::Score};

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
    /// Rounds that were run again, since something else had happened than was meant to; and why.
    #[serde(default)]
    pub(super) repeated: u32,
    #[serde(default)]
    pub(super) left_out: BTreeMap<Reason, u32>,
    /// Median and worst of the rounds' latencies, and what is promised, milliseconds.
    pub(super) median_ms: Option<f64>,
    pub(super) worst_ms: Option<f64>,
    pub(super) promised_ms: u32,
    /// Of the rounds in which something was wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) problems: Vec<String>,
}

impl Tally {
    pub(super) fn of(case: String, seed: u64, promised: Duration, scores: &[Score]) -> Self {
        let count = |is: fn(&Score) -> bool| scores.iter().filter(|score| is(score)).count() as u32;
        let mut latencies: Vec<f64> = scores.iter().filter_map(|score| score.latency_ms).collect();
        latencies.sort_by(f64::total_cmp);
        let rounded = |ms: &f64| ms.round();
        let left_out = sum(scores.iter().map(|score| &score.left_out));
        Self {
            case,
            seed,
            rounds: scores.len() as u32,
            class: count(|score| score.class),
            culprit: count(|score| score.culprit),
            in_time: count(|score| score.in_time),
            false_verdicts: scores.iter().map(|score| score.false_verdicts).sum(),
            repeated: left_out.values().sum(),
            left_out,
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

/// The counts of several, by reason.
fn sum<'a>(of: impl Iterator<Item = &'a BTreeMap<Reason, u32>>) -> BTreeMap<Reason, u32> {
    let mut sum = BTreeMap::new();
    for (reason, count) in of.flatten() {
        *sum.entry(*reason).or_default() += count;
    }
    sum
}

/// So many tries, in per cent, may be left out: what is left is a sample.
const LEFT_OUT: u32 = 10;
/// Tries that may be left out where there are so few that a single one is more: on a busy machine these come in bursts.
const FEW: u32 = 5;

/// Whether too many tries were left out.
fn is_no_sample(rounds: u32, left_out: u32) -> bool {
    let few = if rounds < FULL { FEW } else { 0 };
    left_out > few.max((rounds + left_out) * LEFT_OUT / 100)
}

impl Tally {
    fn is_no_sample(&self) -> bool {
        is_no_sample(self.rounds, self.repeated)
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
    /// Tries that do not count, and why.
    pub(super) repeated: u32,
    pub(super) left_out: BTreeMap<Reason, u32>,
    pub(super) worst_ms: f64,
    /// Cells that cannot be, and why.
    pub(super) impossible: Vec<String>,
    /// Cases in which something was wrong.
    pub(super) wrong: Vec<String>,
}

/// What part of the rounds must have the right class and culprit.
const RIGHT: f64 = 0.99;

impl Report {
    pub(super) fn of(seed: u64, tallies: &[Tally], impossible: Vec<String>) -> Self {
        let total = |of: fn(&Tally) -> u32| tallies.iter().map(of).sum::<u32>();
        let (rounds, repeated) = (total(|tally| tally.rounds), total(|tally| tally.repeated));
        let part = |count: u32| f64::from(count) / f64::from(rounds.max(1));
        let (class, culprit) = (
            part(total(|tally| tally.class)),
            part(total(|tally| tally.culprit)),
        );
        let in_time = part(total(|tally| tally.in_time));
        let false_verdicts = total(|tally| tally.false_verdicts);
        let right = class >= RIGHT && culprit >= RIGHT && in_time >= 1.0 && false_verdicts == 0;
        Self {
            ok: rounds > 0
                && right
                && !is_no_sample(rounds, repeated)
                && !tallies.iter().any(Tally::is_no_sample),
            seed,
            cases: tallies.len(),
            rounds,
            class,
            culprit,
            in_time,
            false_verdicts,
            repeated,
            left_out: sum(tallies.iter().map(|tally| &tally.left_out)),
            worst_ms: tallies
                .iter()
                .filter_map(|tally| tally.worst_ms)
                .fold(0.0, f64::max),
            impossible,
            wrong: tallies
                .iter()
                .filter(|tally| !tally.problems.is_empty() || tally.is_no_sample())
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
        if tally.is_no_sample() {
            println!(
                "{}: {} tries were left out, {} count",
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
        scores[0].left_out = BTreeMap::from([(Reason::Late, FEW)]);
        assert!(Report::of(1, &[tally(&scores)], Vec::new()).ok);
        scores[1].left_out = BTreeMap::from([(Reason::Stalled, 1)]);
        let report = Report::of(1, &[tally(&scores)], Vec::new());
        assert!(!report.ok && report.wrong == ["x"], "{report:?}");
        assert_eq!(
            serde_json::to_string(&report.left_out).unwrap(),
            r#"{"stalled":1,"late":5}"#
        );
        // Of many at most one in ten.
        let mut many = vec![score(true, true); FULL as usize];
        many[0].left_out = BTreeMap::from([(Reason::Stalled, 2)]);
        assert!(Report::of(1, &[tally(&many)], Vec::new()).ok);
        many[0].left_out = BTreeMap::from([(Reason::Stalled, 3)]);
        assert!(!Report::of(1, &[tally(&many)], Vec::new()).ok);
        scores[1].left_out.clear();
        scores[0].false_verdicts = 1;
        assert!(!Report::of(1, &[tally(&scores)], Vec::new()).ok);
    }
}
