//! Ports that go down at every work-request boundary of a transfer, in a guest (`cargo xtask vm failover`).
//!
//! The program in the guest is `verbs/tests/failover`: two processes, each with a port on either of two links. A case names the work, the
//! failure, the end at which it happens, and the boundary: after which of 128 work requests (two for each of 64 steps) it happens.
//!
//! A case counts if a work request was outstanding at that moment and the expected switches happened. A case that does not count is run
//! again, with more requests posted at once. A case whose guest died or fell silent is run again too, and stays a finding. All times are
//! those of an emulated machine.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    io::Write as _,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;
use serde_json::{Value, json};

use super::{Guest, Series};
use crate::{process::on_threads, random::fresh_seed, workspace::test_program};

mod cases;
mod identity;
mod measure;
mod report;

/// Cases of a sample.
const SAMPLE: usize = 24;
/// Cases of one boot.
const BATCH: usize = 24;
/// Lines of a program's output that are told when its guest was lost.
const LAST_LINES: usize = 20;
/// How often a case is run until it counts.
const TRIES: u32 = 5;
/// How long a case may take, on a machine that has other things to do.
const LONGEST: Duration = Duration::from_secs(100);
/// How long a guest may say nothing: longer than its program waits for a case before it says that it hangs.
const QUIET: Duration = Duration::from_secs(240);
/// Guests one after the other that may end before their first case.
const BARREN: u32 = 3;
/// Most work requests that are posted at once: as many as there are slots.
const MOST_AHEAD: u32 = 8;

/// Which failures.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Seed of the sample; by default another one each time.
    #[arg(long)]
    seed: Option<u64>,
    /// Cases of the sample.
    #[arg(long, value_name = "N", default_value_t = SAMPLE)]
    cases: usize,
    /// All cases.
    #[arg(long)]
    full: bool,
    /// JSON lines, one a case: cases found there are not run again if the code is the same, others are added.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Kernel.
    #[arg(long, value_enum, default_value = "6.1")]
    kernel: Series,
    /// Between mlx5 devices on the stand-in for their hardware, instead of over soft-RoCE.
    #[arg(long, conflicts_with = "measure")]
    mlx5: bool,
    /// Measures instead: times to the first byte on the backup, throughput there, failback, flapping, what it costs when nothing fails.
    #[arg(long, conflicts_with_all = ["full", "stress", "cases"])]
    measure: bool,
    /// Measures this alone; may be given several times.
    #[arg(long, value_enum, requires = "measure")]
    part: Vec<measure::Part>,
    /// Runs of each measured time.
    #[arg(long, value_name = "N", default_value_t = 200, requires = "measure")]
    runs: usize,
    /// This many transfers over links that fail at random, with time-outs so short that paths are left for no reason, and with
    /// processors that have other things to do: each must end, rightly or with an error.
    #[arg(long, value_name = "N", conflicts_with = "full")]
    stress: Option<usize>,
    /// Guests at a time. What is measured wants one that has the machine for itself.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..), conflicts_with = "measure")]
    jobs: u8,
    /// Fail if a case does.
    #[arg(long)]
    check: bool,
}

impl Options {
    /// A sample, over soft-RoCE.
    #[must_use]
    pub fn sample(kernel: Series, seed: u64, cases: usize) -> Self {
        Self {
            seed: Some(seed),
            cases,
            full: false,
            resume: None,
            kernel,
            mlx5: false,
            measure: false,
            part: Vec::new(),
            runs: 0,
            stress: None,
            jobs: 1,
            check: true,
        }
    }
}

/// Runs cases and says what came of them; `false` if a case failed, with `--check`.
///
/// # Errors
/// If no guest can be made, or what runs there does not.
pub fn run(options: &Options) -> Result<bool> {
    let (_, report, ok) = run_cases(options, &mut |line| println!("{line}"))?;
    println!("{report}");
    Ok(ok || !options.check)
}

/// Runs cases and gives `each` a line of every one; how many there are, all in one line of JSON, and whether all is well.
///
/// # Errors
/// As [`run`].
pub fn run_cases(options: &Options, each: &mut dyn FnMut(&str)) -> Result<(usize, Value, bool)> {
    let seed = options.seed.unwrap_or_else(fresh_seed);
    let cases = match (options.measure, options.stress, options.full) {
        (true, ..) => measure::cases(options.runs, &options.part),
        (_, Some(count), _) => cases::stress(count, seed),
        (.., true) => cases::all(),
        (.., false) => cases::some(options.cases, seed),
    };
    let drawn = match options.full || options.measure {
        true => String::new(),
        false => format!("seed {seed}, "),
    };
    each(&format!("{drawn}{} cases", cases.len()));
    let results = run_all(options, cases, each)?;
    let (report, ok) = match options.measure {
        true => measure::report(&results, &options.part),
        false => report::report(&results),
    };
    Ok((results.len(), report, ok))
}

/// A case to run, and what came of it so far.
#[derive(Clone, Debug, Default)]
struct Waiting {
    case: String,
    /// Why earlier tries did not count.
    missed: Vec<String>,
    /// How the guests ended that never said what came of it.
    lost: Vec<String>,
    /// What the kernel warned of in earlier tries.
    kernel_warnings: Vec<Value>,
}

impl Waiting {
    fn new(case: String) -> Self {
        Self {
            case,
            ..Self::default()
        }
    }

    fn tries(&self) -> u32 {
        (self.missed.len() + self.lost.len()) as u32
    }

    /// As the guest's program is told: the oftener it did not count, the more requests are posted at once.
    fn line(&self) -> String {
        match self.missed.len() as u32 {
            0 => self.case.clone(),
            missed => format!("{} ahead={}", self.case, MOST_AHEAD.min(1 << missed.min(8))),
        }
    }

    /// Takes down a try; the outcome for the record, if it was the last one.
    fn tried(&mut self, outcome: Option<&Value>, end: &str) -> Option<Value> {
        let (mut outcome, tries) = match outcome {
            Some(outcome) if outcome["counts"] == true || self.tries() + 1 >= TRIES => {
                (outcome.clone(), self.tries() + 1)
            }
            Some(outcome) => {
                let why = outcome["text"].as_str().unwrap_or("it did not count");
                self.missed.push(why.to_owned());
                let warnings = outcome["kernel_warnings"].as_array();
                self.kernel_warnings
                    .extend(warnings.into_iter().flatten().cloned());
                return None;
            }
            None => {
                self.lost.push(end.to_owned());
                if self.tries() < TRIES {
                    return None;
                }
                let text = format!("{} of {TRIES} guests were lost in it", self.lost.len());
                (json!({ "ok": false, "counts": true, "text": text }), self.tries())
            }
        };
        outcome["case"] = json!(self.case);
        outcome["tries"] = json!(tries);
        outcome["missed"] = json!(self.missed);
        outcome["lost"] = json!(self.lost);
        if let Some(warnings) = outcome["kernel_warnings"].as_array_mut() {
            warnings.append(&mut self.kernel_warnings);
        }
        Some(outcome)
    }
}

/// Runs the cases that were not run before, each until it counts.
fn run_all(
    options: &Options,
    mut cases: Vec<String>,
    each: &mut dyn FnMut(&str),
) -> Result<BTreeMap<String, Value>> {
    let made_by = MadeBy::those(options)?;
    let (mut results, others) = match options.resume.as_ref().filter(|file| file.exists()) {
        Some(file) => {
            let text = fs::read_to_string(file)?;
            known(&text, &made_by).with_context(|| file.display().to_string())?
        }
        None => (BTreeMap::new(), 0),
    };
    if others > 0 {
        each(&format!(
            "{others} outcomes are of other code, kernels or devices, and do not count"
        ));
    }
    let wanted: BTreeSet<&String> = cases.iter().collect();
    results.retain(|case, _| wanted.contains(case));
    cases.retain(|case| !results.contains_key(case));
    let program = test_program("ringsight-verbs", "failover")?.file;
    let mut waiting: VecDeque<Waiting> = cases.into_iter().map(Waiting::new).collect();
    let mut barren = 0;
    while !waiting.is_empty() {
        let batch: Vec<Waiting> = waiting
            .drain(..waiting.len().min(BATCH * usize::from(options.jobs)))
            .collect();
        let lines: Vec<String> = batch.iter().map(Waiting::line).collect();
        let mut said = Vec::new();
        // All guests at the same time.
        let guests = on_threads(lines.chunks(BATCH), |lines| {
            let first = options.measure.then(measure::warm_up);
            let all: Vec<String> = first.into_iter().chain(lines.iter().cloned()).collect();
            boot(options, &program, &all)
        })?;
        for (guest, lines) in guests.into_iter().zip(lines.chunks(BATCH)) {
            let has_begun = lines.iter().any(|line| guest.begun.contains(line));
            barren = if has_begun { 0 } else { barren + 1 };
            if barren == BARREN {
                bail!("{BARREN} guests ended before their first case: {}", guest.end);
            }
            said.push(guest);
        }
        for (at, (line, mut case)) in lines.iter().zip(batch).enumerate() {
            let said = &said[at / BATCH];
            // What a guest did not come to is no try.
            let outcome = said.outcomes.get(line);
            let tried = said.begun.contains(line);
            let Some(mut outcome) = tried.then(|| case.tried(outcome, &said.end)).flatten() else {
                waiting.push_back(case);
                continue;
            };
            made_by.sign(&mut outcome);
            each(&report::line(&case.case, &outcome));
            if let Some(file) = &options.resume {
                let mut file = fs::OpenOptions::new().append(true).create(true).open(file)?;
                writeln!(file, "{outcome}")?;
            }
            results.insert(case.case, outcome);
        }
    }
    Ok(results)
}

/// What an outcome is of: another one says nothing of these cases.
struct MadeBy([(&'static str, String); 3]);

impl MadeBy {
    fn those(options: &Options) -> Result<Self> {
        let devices = if options.mlx5 { "mlx5" } else { "soft-roce" };
        Ok(Self::new(
            &identity::identity()?,
            &options.kernel.to_string(),
            devices,
        ))
    }

    fn new(code: &str, kernel: &str, devices: &str) -> Self {
        Self(
            [("code", code), ("kernel", kernel), ("devices", devices)]
                .map(|(key, word)| (key, word.to_owned())),
        )
    }

    fn sign(&self, outcome: &mut Value) {
        for (key, word) in &self.0 {
            outcome[*key] = json!(word);
        }
    }

    fn signed(&self, outcome: &Value) -> bool {
        self.0.iter().all(|(key, word)| outcome[*key] == **word)
    }
}

/// Cases that were run before by this, and how many outcomes are of something else.
fn known(text: &str, made_by: &MadeBy) -> Result<(BTreeMap<String, Value>, usize)> {
    let (mut known, mut others) = (BTreeMap::new(), 0);
    for line in text.lines() {
        let outcome: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        let case = outcome["case"].as_str().context("an outcome without a case")?;
        match made_by.signed(&outcome) {
            true => _ = known.insert(case.to_owned(), outcome),
            false => others += 1,
        }
    }
    Ok((known, others))
}

/// What a guest said of its cases.
#[derive(Debug, Default)]
struct Said {
    begun: BTreeSet<String>,
    outcomes: BTreeMap<String, Value>,
    /// How it ended, if it said nothing of a case that it began.
    end: String,
}

impl Said {
    fn of(output: &str) -> Self {
        let mut said = Self::default();
        for line in output.lines() {
            let Ok(line) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            if let Some(case) = line["begins"].as_str() {
                said.begun.insert(case.to_owned());
            } else if let Some(case) = line["case"].as_str() {
                said.outcomes.insert(case.to_owned(), line.clone());
            }
        }
        said
    }
}

/// Runs cases in one guest; what it said of each.
fn boot(options: &Options, program: &Path, cases: &[String]) -> Result<Said> {
    let mut guest = Guest::new(options.kernel, Vec::new());
    match options.mlx5 {
        true => guest.mlx5 = 4,
        false => guest.rdma = 2,
    }
    guest.limit = LONGEST * cases.len() as u32 + QUIET;
    guest.quiet = Some(QUIET);
    guest
        .environment
        .push(("RINGSIGHT_FAILOVER_CASES".into(), cases.join("\n")));
    let file = guest.add(program)?;
    guest.program = [file.as_str(), "--exact", "links_fail", "--ignored", "--nocapture"]
        .map(str::to_owned)
        .to_vec();
    let (output, ended) = guest.output();
    let mut said = Said::of(&output);
    let last = || {
        let is_text = |line: &&str| !line.trim().is_empty() && !line.starts_with('{');
        let lines: Vec<&str> = output.lines().filter(is_text).collect();
        lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
    };
    match ended {
        Ok(ended) => {
            if let Some(text) = ended.warning_text() {
                eprintln!("vm: the guest's kernel warned {} times:\n{text}", ended.warnings);
            }
            said.end = format!("the program ended with {}: {}", ended.code, last());
        }
        Err(error) => said.end = format!("{error:#}; the program's output ends with\n{}", last()),
    }
    if said.outcomes.len() < cases.len() {
        eprintln!(
            "vm: the guest said what came of {} cases of {}, and began {}: {}",
            said.outcomes.len(),
            cases.len(),
            said.begun.len(),
            said.end
        );
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_tried_again_until_it_counts_and_what_became_of_it_is_kept() {
        let (missed, right) = (
            json!({ "case": "x ahead=2", "ok": true, "counts": false, "text": "nothing", "kernel_warnings": ["early"] }),
            json!({ "case": "x ahead=4", "ok": true, "counts": true, "kernel_warnings": ["late"] }),
        );
        let mut case = Waiting::new("x".into());
        assert_eq!(case.line(), "x");
        assert_eq!(case.tried(Some(&missed), ""), None);
        assert_eq!(case.tried(None, "died"), None);
        assert_eq!(case.line(), "x ahead=2");
        let outcome = case.tried(Some(&right), "").unwrap();
        assert_eq!(
            [
                &outcome["case"],
                &outcome["tries"],
                &outcome["missed"],
                &outcome["lost"]
            ],
            [&json!("x"), &json!(3), &json!(["nothing"]), &json!(["died"])]
        );
        assert_eq!(outcome["kernel_warnings"], json!(["late", "early"]));
        // The last try stands, whatever came of it.
        let mut case = Waiting::new("x".into());
        for _ in 1..TRIES {
            assert_eq!(case.tried(Some(&missed), ""), None);
        }
        assert_eq!(case.line(), "x ahead=8");
        let outcome = case.tried(Some(&missed), "").unwrap();
        assert_eq!(
            (&outcome["counts"], &outcome["tries"]),
            (&json!(false), &json!(TRIES))
        );
        let mut case = Waiting::new("x".into());
        let last = (0..TRIES)
            .map(|_| case.tried(None, "died"))
            .last()
            .flatten()
            .unwrap();
        assert_eq!((&last["ok"], &last["tries"]), (&json!(false), &json!(TRIES)));
        // A guest that failed in it is no failure of the case alone: the next one may be right.
        let mut case = Waiting::new("x".into());
        for _ in 1..TRIES {
            case.tried(None, "died");
        }
        let outcome = case.tried(Some(&right), "").unwrap();
        assert_eq!((&outcome["ok"], &outcome["tries"]), (&json!(true), &json!(TRIES)));
    }

    #[test]
    fn outcomes_of_something_else_do_not_count() {
        let text = concat!(
            "{\"case\":\"a\",\"ok\":true,\"code\":\"1\",\"kernel\":\"6.1\",\"devices\":\"mlx5\"}\n",
            "{\"case\":\"b\",\"ok\":true,\"code\":\"2\",\"kernel\":\"6.1\",\"devices\":\"mlx5\"}\n",
            "{\"case\":\"a\",\"ok\":false,\"code\":\"2\",\"kernel\":\"6.1\",\"devices\":\"mlx5\"}\n",
            "{\"case\":\"c\",\"ok\":true}\n",
        );
        let of = |code, kernel, devices| known(text, &MadeBy::new(code, kernel, devices));
        let (of_one, others) = of("1", "6.1", "mlx5").unwrap();
        assert_eq!((of_one.len(), others), (1, 3));
        assert_eq!(of_one["a"]["ok"], true);
        assert_eq!(of("2", "6.1", "mlx5").unwrap().0.len(), 2);
        for (kernel, devices) in [("6.12", "mlx5"), ("6.1", "soft-roce")] {
            assert_eq!(of("2", kernel, devices).unwrap().0.len(), 0);
        }
        let made_by = MadeBy::new("1", "6.1", "mlx5");
        assert!(known("{}", &made_by).is_err() && known("x", &made_by).is_err());
    }

    #[test]
    fn a_case_that_began_is_told_from_one_that_did_not() {
        let output = "kernel\n{\"begins\":\"a\"}\n{\"case\":\"a\",\"ok\":true}\n{\"begins\":\"b\"}\nOops";
        let said = Said::of(output);
        assert_eq!(said.begun, ["a", "b"].map(str::to_owned).into());
        assert!(said.outcomes.contains_key("a") && !said.outcomes.contains_key("b"));
    }
}
