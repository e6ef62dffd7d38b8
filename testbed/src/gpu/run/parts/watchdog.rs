//! The watchdog on GPUs: a soak, faults of every case, a long operation that it leaves alone, and a kernel that never ends.

use std::{process::Command, time::Instant};

use anyhow::Result;
use fs_err as fs;
use serde_json::Value;

use super::{
    super::step::{StepResult, Steps, verdict_of},
    nccl_tests,
};
use crate::process;

/// Rounds of each case, and the seed of what is drawn.
const ROUNDS: u32 = 2;
const SEED: u32 = 7;
/// Minutes in which ranks are slow and pause.
const SOAKED: &str = "0.3";
/// `NCCL_KERNEL_TIMEOUT_MS` of the simulated time-out, and how long the program may go on after it: it starts, has its time-out,
/// is aborted, and frees its memory.
const TIMEOUT_MS: u32 = 1000;
const ENDS_WITHIN: u64 = 30;

/// The summary that `faults` prints last, in words.
fn summary(said: &str, words: impl FnOnce(&Value) -> String) -> StepResult {
    let last = said.lines().rev().find(|line| line.starts_with('{'));
    let report: Value = last
        .and_then(|line| serde_json::from_str(line).ok())
        .ok_or("it has printed no summary")?;
    let text = words(&report);
    verdict_of(report["ok"] == true, text)
}

/// What came of the matrix.
fn matrix(report: &Value) -> String {
    format!(
        "{} rounds of {} cases: right class {}, culprit {}, in time {}, worst {} ms, false {}",
        report["rounds"],
        report["cases"],
        report["class"],
        report["culprit"],
        report["in_time"],
        report["worst_ms"],
        report["false_verdicts"],
    )
}

/// What came of a soak.
fn soaked(report: &Value) -> String {
    format!(
        "{} operations, {} of {} long waits named, worst {} ms, {} verdicts, {} false",
        report["operations"],
        report["named"],
        report["late"],
        report["worst_ms"],
        report["verdicts"],
        report["false_verdicts"],
    )
}

/// Whether the watchdog has said nothing, and the results are right.
fn left_alone(said: &str) -> StepResult {
    match said.lines().find(|line| line.contains("Verdict: ")) {
        Some(line) => Err(format!("a verdict where nothing was wrong: {line}")),
        None => nccl_tests::right(said),
    }
}

/// Whether the kernel that never ended was reported with its rank; ranks whose operations wait behind it are late, and that may be said first.
fn reported(said: &str) -> StepResult {
    let verdicts: Vec<_> = said
        .lines()
        .filter_map(|line| line.split_once("Verdict: "))
        .map(|(_, verdict)| verdict)
        .collect();
    let stuck = verdicts
        .iter()
        .find(|verdict| verdict.starts_with("STUCK_KERNEL (hang)"));
    match (stuck, verdicts.first()) {
        (Some(stuck), _) => Ok((*stuck).to_owned()),
        (None, Some(other)) => Err(format!("another verdict than of a stuck kernel: {other}")),
        (None, None) => Err("no verdict".to_owned()),
    }
}

/// Slow ranks, and faults of every case, as this source tells of them.
pub(super) fn faults(steps: &mut Steps<'_>, source: &str) -> Result<()> {
    // Rounds in which something is wrong leave there what their ranks wrote.
    let folder = steps.file("faults");
    fs::create_dir_all(&folder)?;
    let (program, library) = (process::own_executable()?, steps.host.bundle.join("lib"));
    let faults = || {
        let mut command = Command::new(&program);
        command
            .args(["faults", "--device", "cuda", "--check", "--source", source])
            .args(["--seed", &SEED.to_string(), "--library"])
            .arg(&library)
            .env("TMPDIR", &folder);
        command
    };
    let mut command = faults();
    command.args(["--soak", SOAKED]);
    steps.run("soak", 60, command, |said| summary(said, soaked));
    let mut command = faults();
    command
        .args(["--full", "--jobs", "2", "--rounds", &ROUNDS.to_string()])
        .arg("--resume")
        .arg(steps.file("faults.jsonl"));
    steps.run("faults", 440, command, |said| summary(said, matrix));
    Ok(())
}

/// What is soon over comes first: the faults may take all of the part's time.
pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    match steps.host.lacks_gpus(2).or_else(|| steps.host.nccl_tests().err()) {
        Some(reason) => {
            steps.skip("8-gib", &reason);
            steps.skip("simulated", &reason);
        }
        None => left_alone_or_ended(steps)?,
    }
    faults(steps, "pages")
}

/// nccl-tests with nothing wrong for long, and with a kernel that never ends.
fn left_alone_or_ended(steps: &mut Steps<'_>) -> Result<()> {
    let library = steps.host.bundle.join("lib");
    let mut command = nccl_tests::command(steps, "all_reduce", &library, "-b 8G -e 8G -f 1 -g 2 -n 2")?;
    command.env("NCCL_DEBUG", "WARN");
    steps.run("8-gib", 120, command, left_alone);
    // A program that fails, as this one is to, is no failure of the step.
    let test = nccl_tests::command(steps, "all_reduce", &library, "-b 1M -e 1M -g 2 -n 20 -G 0 -c 0")?;
    let mut command = Command::new("sh");
    command
        .args(["-c", "if \"$@\"; then echo 'it has not failed'; exit 1; fi", "sh"])
        .arg(test.get_program())
        .args(test.get_args())
        .envs(test.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .env("LD_PRELOAD", steps.host.bundle.join("lib/stuck.so"))
        .env("NCCL_KERNEL_TIMEOUT_MS", TIMEOUT_MS.to_string())
        .env("RINGSIGHT_WATCHDOG_ACTION", "abort");
    let begun = Instant::now();
    if steps.run("simulated", ENDS_WITHIN, command, reported).is_some() {
        let took = begun.elapsed();
        steps.note(&format!(
            "all_reduce_perf with a simulated time-out of {TIMEOUT_MS} ms has ended after {took:.1?}\n\n"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_is_read_and_verdicts_are_found() {
        let line = r#"{"ok":true,"seed":7,"cases":50,"rounds":150,"class":1.0,"culprit":1.0,"in_time":1.0,"false_verdicts":0}"#;
        assert!(
            summary(&format!("table\n{line}\n"), matrix)
                .unwrap()
                .starts_with("150 rounds of 50 cases")
        );
        assert!(summary(&line.replace("true", "false"), matrix).is_err());
        assert!(summary("table\n", matrix).is_err());
        let line = r#"{"ok":true,"operations":372,"late":51,"named":51,"worst_ms":400,"verdicts":84,"false_verdicts":0}"#;
        assert!(
            summary(line, soaked)
                .unwrap()
                .starts_with("372 operations, 51 of 51 long waits")
        );
        let verdict = "h:1:2 [0] NCCL WARN Verdict: STUCK_KERNEL (hang): nothing moves, rank 0";
        assert!(reported(verdict).unwrap().contains("rank 0"));
        let late = "h NCCL WARN Verdict: QUEUED_BEHIND_COMPUTE (late): rank 1";
        assert!(reported(late).unwrap_err().contains("QUEUED_BEHIND_COMPUTE"));
        assert!(
            reported(&format!("{late}\n{verdict}"))
                .unwrap()
                .contains("rank 0")
        );
        assert!(reported("").is_err());
        assert!(
            left_alone(verdict)
                .unwrap_err()
                .contains("a verdict where nothing was wrong")
        );
    }
}
