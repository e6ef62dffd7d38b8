//! The verdict reaches the person: what `ringsight attach` prints, writes and exits with when a job hangs.

use std::{path::Path, time::Instant};

use anyhow::{Context, Result, ensure};
use ringsight_testbed::demo::{
    collector::{Collector, HANG_SEEN},
    truth::Delay,
};
use ringsight_tests::{LIMIT, alone, artifacts, folder, job, start, under_way};
use serde_json::Value;

/// The rank that the others wait for.
const CULPRIT: usize = 3;

/// What one observation printed and wrote.
struct Observed {
    code: Option<i32>,
    log: String,
    summary: Value,
    page: String,
    chrome: String,
}

/// Attaches to a job, waits until the terminal says `line`, runs `then`, ends the observation.
fn observe(pids: &[u32], folder: &Path, line: &str, then: impl FnOnce() -> Result<()>) -> Result<Observed> {
    let file = |name: &str| folder.join(name);
    let options = ["page.html", "trace.json"].map(|name| format!("--out={}", file(name).display()));
    let mut collector = Collector::attach(artifacts(), pids, &options, folder)?;
    wait_for(&collector, line)?;
    then()?;
    let (code, log) = collector.interrupt(LIMIT)?;
    let read = |name: &str| std::fs::read_to_string(file(name)).with_context(|| name.to_owned());
    Ok(Observed {
        code,
        log,
        summary: serde_json::from_str(&std::fs::read_to_string(collector.summary_file())?)?,
        page: read("page.html")?,
        chrome: read("trace.json")?,
    })
}

/// Waits until the terminal has a line with all of these words.
fn wait_for(collector: &Collector, words: &str) -> Result<()> {
    let begun = Instant::now();
    loop {
        let log = collector.log();
        if log
            .lines()
            .any(|line| words.split(' ').all(|word| line.contains(word)))
        {
            return Ok(());
        }
        ensure!(
            begun.elapsed() < LIMIT,
            "the terminal never says {words:?}:\n{log}"
        );
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

fn verdicts(summary: &Value) -> &[Value] {
    summary["verdicts"].as_array().map_or(&[], Vec::as_slice)
}

/// Every output names the culprit, with this cause.
fn check(observed: &Observed, cause: &str, pid: u32) -> Result<()> {
    let Observed {
        code,
        log,
        summary,
        page,
        chrome,
    } = observed;
    ensure!(*code == Some(HANG_SEEN), "exit code {code:?}:\n{log}");
    let rows = verdicts(summary);
    ensure!(!rows.is_empty(), "no verdict in the summary");
    for row in rows.iter().filter(|row| row["ended"] == false) {
        ensure!(
            row["culprit"] == CULPRIT && row["cause"] == cause && row["pid"] == pid,
            "{row:#}"
        );
    }
    ensure!(log.contains("still waiting at the end:"), "{log}");
    ensure!(log.contains(&format!("rank {CULPRIT} (pid {pid}")), "{log}");
    for (name, text) in [("page", page), ("Chrome file", chrome)] {
        ensure!(
            text.contains(&format!("rank {CULPRIT} (pid {pid}")) && text.contains(cause),
            "the {name} does not name the culprit"
        );
    }
    Ok(())
}

#[test]
fn a_rank_that_calls_nothing_is_named_on_the_terminal_and_in_every_file() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut configuration = job(4, 60, 10);
    configuration.delays = vec![Delay {
        step: 20,
        rank: CULPRIT as u32,
        ms: 120_000,
    }];
    let mut job = start(&configuration, folder.path())?;
    let pids = job.pids();
    job.go()?;
    let line = format!("HANG rank {CULPRIT} (pid {}, has not launched", pids[CULPRIT]);
    let observed = observe(&pids, folder.path(), &line, || Ok(()))?;
    check(&observed, "NOT_LAUNCHED", pids[CULPRIT])?;
    ensure!(
        observed.log.contains("next: see where it is: py-spy dump --pid"),
        "{}",
        observed.log
    );
    Ok(())
}

#[test]
fn an_attach_in_mid_hang_reads_what_the_pages_say() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = under_way(folder.path())?;
    let pids = job.pids();
    job.signal(CULPRIT, libc::SIGSTOP);
    // A first observation says when the watchdogs have spoken; the second begins after that.
    let line = format!("HANG rank {CULPRIT} (pid {}, is stopped", pids[CULPRIT]);
    observe(&pids, &folder.path().join("first"), &line, || Ok(()))?;
    let observed = observe(&pids, &folder.path().join("second"), &line, || Ok(()))?;
    job.signal(CULPRIT, libc::SIGCONT);
    check(&observed, "RANK_STOPPED", pids[CULPRIT])?;
    let named = verdicts(&observed.summary)
        .iter()
        .all(|row| row["operation"] != "collective");
    ensure!(
        named,
        "an operation has no name: {:#}",
        observed.summary["verdicts"]
    );
    Ok(())
}

#[test]
fn an_operation_with_a_verdict_has_its_culprit_everywhere() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = under_way(folder.path())?;
    let pids = job.pids();
    let line = "ENDED rank 1";
    job.signal(1, libc::SIGSTOP);
    let options = [format!("--out={}", folder.path().join("trace.jsonl").display())];
    let mut collector = Collector::attach(artifacts(), &pids, &options, folder.path())?;
    wait_for(&collector, "HANG rank 1 is stopped")?;
    job.signal(1, libc::SIGCONT);
    wait_for(&collector, line)?;
    collector.interrupt(LIMIT)?;
    let summary: Value = serde_json::from_str(&std::fs::read_to_string(collector.summary_file())?)?;
    let rows = verdicts(&summary);
    let traces: Vec<&Value> = rows.iter().map(|row| &row["trace_id"]).collect();
    let operations = summary["operations"].as_array().context("operations")?;
    let judged: Vec<&Value> = operations
        .iter()
        .filter(|operation| traces.contains(&&operation["trace_id"]))
        .collect();
    ensure!(!judged.is_empty(), "{rows:?}");
    for operation in judged {
        ensure!(operation["culprit"]["rank"] == 1, "{operation:#}");
        ensure!(
            operation["culprit"]["lag_ns"].as_u64() > Some(1_500_000_000),
            "{operation:#}"
        );
    }
    Ok(())
}

#[test]
fn a_rank_that_was_killed_is_named_as_dead() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = under_way(folder.path())?;
    let pids = job.pids();
    let mut collector = Collector::attach(artifacts(), &pids, &[], folder.path())?;
    // The others are in an operation that waits for it when it dies.
    job.signal(CULPRIT, libc::SIGSTOP);
    wait_for(
        &collector,
        &format!("HANG rank {CULPRIT} (pid {}, is stopped", pids[CULPRIT]),
    )?;
    job.signal(CULPRIT, libc::SIGKILL);
    // The others fail, and end: so does the observation.
    let (code, log) = collector.outcome(LIMIT)?;
    let dead = format!("rank {CULPRIT} (pid {}, host node-1) is dead", pids[CULPRIT]);
    ensure!(code == Some(HANG_SEEN) && log.contains(&dead), "{code:?}: {log}");
    ensure!(log.contains("still waiting at the end:"), "{log}");
    Ok(())
}
