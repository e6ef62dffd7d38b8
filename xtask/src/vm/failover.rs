//! `cargo xtask vm failover`: ports that go down at every work-request boundary of a transfer, in a guest with two soft-RoCE links.
//!
//! What runs in the guest is `verbs/tests/failover`: two processes, each with a port on either link. A case names what the ranks do,
//! what fails, at which end, and before which of 64 work requests. It counts only if a work request was outstanding then and the
//! switches happened that must; what did not come to that is run again. Times are those of an emulated machine.

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use super::{Guest, Series, test_program};

mod measure;

/// Work requests of a transfer.
const BOUNDARIES: u64 = 64;
/// Cases of a sample.
const SAMPLE: usize = 24;
/// Cases of one boot.
const BATCH: usize = 24;
/// How often a case is run until it counts.
const TRIES: u32 = 5;
/// How long a case may take, on a machine that has other things to do.
const LONGEST: Duration = Duration::from_secs(100);

const WORK: [&str; 2] = ["sendrecv", "allreduce"];
const FAILURES: [&str; 4] = ["primary", "backup", "primary-backup", "flap"];
const SIDES: [&str; 3] = ["sender", "receiver", "both"];

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
    /// JSON lines, one a case: cases found there are not run again, others are added.
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
    /// Runs of each measured time.
    #[arg(long, value_name = "N", default_value_t = 200, requires = "measure")]
    runs: usize,
    /// This many transfers over links that fail at random, with time-outs so short that paths are left for no reason, and with
    /// processors that have other things to do: each must end, rightly or with an error.
    #[arg(long, value_name = "N", conflicts_with = "full")]
    stress: Option<usize>,
    /// Fail if a case does.
    #[arg(long)]
    check: bool,
}

/// Every case, in the words that the guest's program takes.
fn all() -> Vec<String> {
    let mut cases = Vec::new();
    for work in WORK {
        for failure in FAILURES {
            for side in SIDES {
                cases.extend((0..BOUNDARIES).map(|boundary| format!("{work} {failure} {side} {boundary}")));
            }
        }
    }
    cases
}

/// Some of the cases, each equally likely, in an order of the seed (splitmix64, Fisher and Yates).
fn sample(mut cases: Vec<String>, count: usize, mut seed: u64) -> Vec<String> {
    for last in (1..cases.len()).rev() {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        cases.swap(last, (mix(seed) % (last as u64 + 1)) as usize);
    }
    cases.truncate(count);
    cases
}

/// Transfers over failing links, by a seed: it is in the case, and so are all that it says.
fn stress(count: usize, seed: u64) -> Vec<String> {
    let mut drawn = seed;
    let mut draw = |of: &[u64]| {
        drawn = drawn.wrapping_add(0x9e37_79b9_7f4a_7c15);
        of[(mix(drawn) >> 32) as usize % of.len()]
    };
    let case = |number: u64| {
        let work = WORK[draw(&[0, 0, 1]) as usize];
        // Those of a machine that is busy are right at the edge of what is too short.
        let settings = format!(
            "TIMEOUT_MS={} PROBE_MS={} RESEND_MS={} BACKOFF_MS={} PROBATION_MS={} GIVE_UP_MS={}",
            draw(&[10, 30, 60, 100, 200, 400]),
            draw(&[3, 20, 100]),
            draw(&[1, 20]),
            draw(&[5, 50]),
            draw(&[1, 20]),
            draw(&[1500, 4000]),
        );
        let (steps, flaps, load) = (draw(&[60, 200]), draw(&[0, 1, 2, 4, 8]), draw(&[0, 1, 3, 8]));
        let chaos = seed.wrapping_add(number) % 1_000_000_007;
        format!("{work} chaos both {chaos} loose=1 steps={steps} flaps={flaps} load={load} {settings}")
    };
    (0..count as u64).map(case).collect()
}

fn mix(value: u64) -> u64 {
    let mut z = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Runs cases and says what came of them.
///
/// # Errors
/// If no guest can be made, or what runs there does not.
pub fn run(options: &Options) -> Result<ExitCode> {
    let seed = options.seed.unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        now.map_or(0, |now| now.as_nanos() as u64)
    });
    let cases = match (options.measure, options.stress, options.full) {
        (true, ..) => measure::cases(options.runs),
        (_, Some(count), _) => stress(count, seed),
        (.., true) => all(),
        (.., false) => {
            let mut cases = sample(all(), options.cases, seed);
            // With nothing left the ranks must fail, and in time.
            cases.push(format!(
                "{} all both {}",
                WORK[seed as usize % 2],
                seed % BOUNDARIES
            ));
            cases
        }
    };
    if !options.full && !options.measure {
        println!("seed {seed}, {} cases", cases.len());
    }
    let results = run_all(options, cases)?;
    let (report, ok) = match options.measure {
        true => measure::report(&results),
        false => report(&results),
    };
    println!("{report}");
    Ok(match ok || !options.check {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Runs the cases that were not run before, each until it counts.
fn run_all(options: &Options, mut cases: Vec<String>) -> Result<BTreeMap<String, Value>> {
    let mut results = known(options)?;
    cases.retain(|case| !results.contains_key(case));
    let program = test_program("ringsight-verbs", "failover")?;
    let mut waiting: VecDeque<(String, u32)> = cases.into_iter().map(|case| (case, 1)).collect();
    while !waiting.is_empty() {
        let batch: Vec<(String, u32)> = waiting.drain(..waiting.len().min(BATCH)).collect();
        let names: Vec<&str> = batch.iter().map(|(case, _)| case.as_str()).collect();
        let outcomes = boot(options, &program, &names)?;
        for (case, tries) in batch {
            let Some(outcome) = outcomes.get(&case) else {
                if tries == TRIES {
                    bail!("{case}: the guest said nothing of it {TRIES} times");
                }
                waiting.push_back((case, tries + 1));
                continue;
            };
            let counts = outcome["counts"] == true;
            if !counts && tries < TRIES {
                waiting.push_back((case, tries + 1));
                continue;
            }
            println!("{}", line(&case, outcome));
            if let Some(file) = &options.resume {
                let mut file = fs::OpenOptions::new().append(true).create(true).open(file)?;
                writeln!(file, "{outcome}")?;
            }
            results.insert(case, outcome.clone());
        }
    }
    Ok(results)
}

/// Cases that were run before.
fn known(options: &Options) -> Result<BTreeMap<String, Value>> {
    let Some(file) = options.resume.as_ref().filter(|file| file.exists()) else {
        return Ok(BTreeMap::new());
    };
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let parsed = text.lines().map(|line| {
        let outcome: Value =
            serde_json::from_str(line).with_context(|| format!("{}: {line}", file.display()))?;
        let case = outcome["case"]
            .as_str()
            .context("an outcome without a case")?
            .to_owned();
        Ok((case, outcome))
    });
    parsed.collect()
}

/// Runs cases in one guest; what it said of each.
fn boot(options: &Options, program: &std::path::Path, cases: &[&str]) -> Result<BTreeMap<String, Value>> {
    let mut guest = Guest::new(options.kernel, Vec::new());
    match options.mlx5 {
        true => guest.mlx5 = 4,
        false => guest.rdma = 2,
    }
    guest.limit = LONGEST * cases.len() as u32 + Duration::from_secs(60);
    guest
        .environment
        .push(("RINGSIGHT_FAILOVER_CASES".into(), cases.join("\n")));
    let file = guest.add(program)?;
    guest.program = [file.as_str(), "--exact", "links_fail", "--ignored", "--nocapture"]
        .map(str::to_owned)
        .to_vec();
    let mut output = Vec::new();
    let ended = guest.run(|piece| output.extend_from_slice(piece));
    let output = String::from_utf8_lossy(&output);
    let outcomes: BTreeMap<String, Value> = output
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|outcome| Some((outcome["case"].as_str()?.to_owned(), outcome.clone())))
        .collect();
    match ended {
        Ok(ended) => {
            if let Some(text) = ended.warning_text() {
                eprintln!("vm: the guest's kernel warned {} times:\n{text}", ended.warnings);
            }
            if outcomes.is_empty() {
                bail!("the guest's program said nothing of its cases:\n{output}");
            }
            if outcomes.len() < cases.len() {
                eprintln!("{output}");
            }
        }
        Err(error) if outcomes.is_empty() => return Err(error.context(output.into_owned())),
        Err(error) => eprintln!("vm: {error:#}"),
    }
    Ok(outcomes)
}

/// A case and its outcome, for people.
fn line(case: &str, outcome: &Value) -> String {
    let word = match (outcome["ok"] == true, outcome["counts"] == true) {
        (true, true) => "ok",
        (true, false) => "MISSED",
        (false, _) => "FAILED",
    };
    let mut text = format!(
        "{case}: {word}, {} outstanding, {} replayed",
        outcome["outstanding"], outcome["replayed"]
    );
    if let Some(time) = outcome["switch_ms"].as_f64() {
        text.push_str(&format!(", on the other path after {time} ms"));
    }
    if let Some(time) = outcome["back_ms"].as_f64() {
        text.push_str(&format!(", back {time} ms after it was up"));
    }
    if let Some(error) = outcome["error"].as_str() {
        text.push_str(&format!(", ended with {error:?}"));
    }
    if let Some(why) = outcome["text"].as_str() {
        text.push_str(&format!(": {why}"));
    }
    text
}

/// Everything in one line of JSON, and whether all is well.
fn report(results: &BTreeMap<String, Value>) -> (Value, bool) {
    let is = |outcome: &Value, key: &str| outcome[key] == true;
    let failed: Vec<&String> = results
        .iter()
        .filter(|(_, outcome)| !is(outcome, "ok"))
        .map(|(case, _)| case)
        .collect();
    let missed: Vec<&String> = results
        .iter()
        .filter(|(_, outcome)| is(outcome, "ok") && !is(outcome, "counts"))
        .map(|(case, _)| case)
        .collect();
    let times = |key: &str| {
        let times = results.values().filter_map(|outcome| outcome[key].as_f64());
        measure::spread(times.collect())
    };
    let longest = |key: &str| {
        let values = results.values().filter_map(|outcome| outcome[key].as_f64());
        values.max_by(f64::total_cmp)
    };
    let ended_with_errors = results
        .values()
        .filter(|outcome| outcome["error"].is_string())
        .count();
    let ok = failed.is_empty() && missed.is_empty() && !results.is_empty();
    let report = json!({
        "ok": ok,
        "cases": results.len(),
        "failed": failed,
        "missed": missed,
        "first_byte_on_backup_ms": times("switch_ms"),
        "first_step_over_backup_ms": times("recovered_ms"),
        "ended_with_errors": ended_with_errors,
        "longest_transfer_ms": longest("ran_ms"),
        "emulated": true,
    });
    (report, ok)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn samples_are_of_all_cases_and_follow_from_the_seed() {
        let all = all();
        let different: BTreeSet<&String> = all.iter().collect();
        assert_eq!((all.len(), different.len()), (1536, 1536));
        let drawn = sample(all.clone(), 24, 7);
        assert_eq!(drawn, sample(all.clone(), 24, 7));
        assert_ne!(drawn, sample(all.clone(), 24, 8));
        assert!(drawn.iter().all(|case| different.contains(case)) && drawn.len() == 24);
    }

    #[test]
    fn what_failed_or_never_counted_is_no_success() {
        let outcome = |ok: bool, counts: bool| json!({ "ok": ok, "counts": counts, "switch_ms": 3.0 });
        let of = |outcomes: &[Value]| {
            let results = outcomes
                .iter()
                .enumerate()
                .map(|(index, outcome)| (index.to_string(), outcome.clone()));
            report(&results.collect()).1
        };
        assert!(of(&[outcome(true, true)]));
        assert!(!of(&[]));
        assert!(!of(&[outcome(true, true), outcome(true, false)]));
        assert!(!of(&[outcome(true, true), outcome(false, true)]));
    }
}
