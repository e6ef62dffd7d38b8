//! `cargo xtask demo --check` ends with its report, also when the run breaks.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use ringsight_testbed::demo::check::Report;
use ringsight_tests::{alone, artifacts, folder, may_attach};

/// Runs the demo, its files in `out`; `each` is given every line while the demo runs. Returns the last line's report.
fn demo(out: &Path, arguments: &[&str], mut each: impl FnMut(&str) -> Result<()>) -> Result<Report> {
    let mut command = Command::new(&artifacts().xtask);
    command
        .args(["demo", "--check", "--seed", "7", "--out"])
        .arg(out)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    if !may_attach() {
        command.arg("--no-ebpf");
    }
    let mut process = command.spawn().context("starting the demo")?;
    let output = process.stdout.take().context("standard output is not piped")?;
    let mut last = String::new();
    for line in BufReader::new(output).lines() {
        last = line?;
        each(&last)?;
    }
    let status = process.wait()?;
    let report: Report =
        serde_json::from_str(&last).with_context(|| format!("the last line is no report: {last:?}"))?;
    ensure!(
        status.code() == Some(i32::from(!report.ok)),
        "{status} with this report: {last}"
    );
    Ok(report)
}

fn ensure_failed(report: &Report, words: &str) -> Result<()> {
    ensure!(!report.ok, "the run is reported as good");
    ensure!(
        report.problems.iter().any(|problem| problem.contains(words)),
        "{words:?} is in none of {:?}",
        report.problems
    );
    Ok(())
}

#[test]
fn arguments_that_contradict_one_another_are_reported() -> Result<()> {
    let folder = folder()?;
    let report = demo(folder.path(), &["--ranks", "2", "--nodes", "3"], |_| Ok(()))?;
    ensure_failed(&report, "--nodes 3")
}

#[test]
fn a_backend_that_is_not_there_is_reported() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let stale = folder.path().join("trace.jsonl");
    std::fs::write(&stale, "an earlier run's")?;
    // Nothing listens on the discard port of a machine that is not meant to have one.
    let report = demo(
        folder.path(),
        &[
            "--ranks",
            "2",
            "--steps",
            "5",
            "--no-slow",
            "--otlp",
            "http://127.0.0.1:9",
        ],
        |_| Ok(()),
    )?;
    ensure_failed(&report, "127.0.0.1:9")?;
    let kept = std::fs::read_to_string(&stale).unwrap_or_default();
    ensure!(
        !kept.contains("an earlier run's"),
        "an earlier run's file is still there"
    );
    Ok(())
}

#[test]
fn a_rank_that_dies_is_reported() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    // More steps than can be done before the signal is there.
    let report = demo(
        folder.path(),
        &["--ranks", "2", "--nodes", "1", "--steps", "100000", "--no-slow"],
        |line| {
            if let Some(pids) = line.strip_prefix("processes ") {
                let last = pids.split_whitespace().next_back().context("no processes")?;
                let pid = last.parse()?;
                // SAFETY: kill has no preconditions; the process is a child of the demo, which has not reaped it.
                let result = unsafe { libc::kill(pid, libc::SIGKILL) };
                ensure!(result == 0, "rank 1 could not be killed");
            }
            Ok(())
        },
    )?;
    ensure!(!report.ok && report.problems.len() == 1, "{report:?}");
    Ok(())
}
