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

/// Maps the library into this process, which calls nothing of it: as a launcher does that imports the framework.
fn map_the_library() -> Result<()> {
    let library = artifacts().library_folder.join("libnccl.so.2");
    let path = std::ffi::CString::new(library.to_str().context("path")?)?;
    // SAFETY: a string that ends with 0; the library's constructors may run in any process, and it stays mapped.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    ensure!(!handle.is_null(), "{} cannot be mapped", library.display());
    Ok(())
}

#[test]
fn a_launcher_is_told_from_its_ranks() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    map_the_library()?;
    let job = under_way(folder.path())?;
    let launcher = std::process::id();
    let mut ranks = job.pids();
    ranks.sort_unstable();
    let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let ranks = ranks.join(" ");
    let mut collector = Collector::attach(artifacts(), &[launcher], &[], folder.path())?;
    wait_for(&collector, &format!("ringsight attach {ranks}"))?;
    let (code, log) = collector.interrupt(LIMIT)?;
    ensure!(
        code == Some(3) && log.contains("nothing was seen"),
        "{code:?}: {log}"
    );
    let output = std::process::Command::new(&artifacts().ringsight)
        .args(["snapshot", &launcher.to_string()])
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(text.contains(&format!("ringsight snapshot {ranks}")), "{text}");
    Ok(())
}

#[test]
fn an_observation_that_ends_in_the_middle_gives_up_nothing() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = under_way(folder.path())?;
    let mut collector = Collector::attach(artifacts(), &job.pids(), &[], folder.path())?;
    job.wait_step(60, LIMIT)?;
    let (_, log) = collector.interrupt(LIMIT)?;
    let summary: Value = serde_json::from_str(&std::fs::read_to_string(collector.summary_file())?)?;
    ensure!(
        summary["operations"]
            .as_array()
            .is_some_and(|operations| !operations.is_empty()),
        "{log}"
    );
    let given_up = &summary["given_up"];
    ensure!(
        given_up["timed_out_instance"].as_u64().unwrap_or(0) == 0,
        "{given_up:#}: {log}"
    );
    Ok(())
}

#[test]
fn a_rank_that_dies_between_two_operations_is_named_as_dead() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    // The ranks rest for longer than they work.
    let mut job = start(&job(4, 100_000, 400), folder.path())?;
    job.go()?;
    job.wait_step(1, LIMIT)?;
    let pids = job.pids();
    let mut collector = Collector::attach(artifacts(), &pids, &[], folder.path())?;
    job.signal(CULPRIT, libc::SIGKILL);
    let (code, log) = collector.outcome(LIMIT)?;
    let dead = format!("rank {CULPRIT} (pid {}, host node-1) is dead", pids[CULPRIT]);
    ensure!(code == Some(HANG_SEEN) && log.contains(&dead), "{code:?}: {log}");
    let summary: Value = serde_json::from_str(&std::fs::read_to_string(collector.summary_file())?)?;
    let rows = verdicts(&summary);
    ensure!(!rows.is_empty(), "{log}");
    for row in rows {
        ensure!(
            row["cause"] == "RANK_DEAD" && row["culprit"] == CULPRIT,
            "{row:#}"
        );
        ensure!(row["first_unix_ns"].as_u64() > Some(0), "{row:#}");
    }
    Ok(())
}

#[test]
fn a_rank_that_is_a_little_late_in_every_step_is_named_at_the_end() -> Result<()> {
    const SLOW: u32 = 2;
    let _alone = alone();
    let folder = folder()?;
    let mut configuration = job(4, 100_000, 20);
    configuration.delays = (1..2_000)
        .map(|step| Delay {
            step,
            rank: SLOW,
            ms: 8,
        })
        .collect();
    let mut job = start(&configuration, folder.path())?;
    job.go()?;
    job.wait_step(20, LIMIT)?;
    let pids = job.pids();
    let mut collector = Collector::attach(artifacts(), &pids, &[], folder.path())?;
    job.wait_step(200, LIMIT)?;
    let (_, log) = collector.interrupt(LIMIT)?;
    let line = format!("  rank {SLOW} (pid {}, host node-1) of", pids[SLOW as usize]);
    ensure!(
        log.contains("late in every step:") && log.contains(&line),
        "{log}"
    );
    let summary: Value = serde_json::from_str(&std::fs::read_to_string(collector.summary_file())?)?;
    let rows = summary["stragglers"].as_array().context("stragglers")?;
    ensure!(rows.len() == 4, "{rows:#?}");
    for row in rows {
        ensure!(row["chronic"] == (row["rank"] == SLOW), "{rows:#?}");
    }
    // 8 ms of a step of at least 28 ms.
    let share = rows[SLOW as usize]["share"].as_f64().context("share")?;
    ensure!((0.05..0.35).contains(&share), "{rows:#?}");
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
