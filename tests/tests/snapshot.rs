//! `ringsight snapshot` names the rank that the others wait for, and touches nobody.

use std::{
    collections::BTreeSet,
    io::BufRead,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ringsight_testbed::demo::{collector::HANG_SEEN, job::Job, truth::Delay};
use ringsight_tests::{LIMIT, alone, artifacts, folder, job, start, under_way};
use serde_json::Value;

fn signal(pid: u32, name: &str) -> Result<()> {
    let status = Command::new("kill").args([name, &pid.to_string()]).status()?;
    ensure!(status.success(), "kill {name} {pid}: {status}");
    Ok(())
}

fn snapshot(pids: &[u32], options: &[&str]) -> Result<String> {
    let output = Command::new(&artifacts().ringsight)
        .arg("snapshot")
        .args(pids.iter().map(u32::to_string))
        .args(options)
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    let saw_hang = output.status.code() == Some(HANG_SEEN);
    ensure!(output.status.success() || saw_hang, "{}: {error}", output.status);
    let text = String::from_utf8(output.stdout)?;
    let begins_with_it = |text: &str| text.starts_with("HANG ") || text.contains("\"root_cause\": {");
    ensure!(saw_hang == begins_with_it(&text), "{}: {text}", output.status);
    Ok(text)
}

/// A job of four ranks, the last of which calls nothing any more from step 20 on: the others wait in its first collective, and have launched
/// more behind it, messages among them.
fn hung(folder: &std::path::Path) -> Result<Job> {
    let mut configuration = job(4, 60, 10);
    configuration.delays = vec![Delay {
        step: 20,
        rank: 3,
        ms: 120_000,
    }];
    let mut job = start(&configuration, folder)?;
    job.go()?;
    Ok(job)
}

/// Takes snapshots of `pids` until one has a root cause that a watchdog has named, too.
fn wait_for_cause(pids: &[u32]) -> Result<Value> {
    let end = Instant::now() + LIMIT;
    loop {
        let taken: Value = serde_json::from_str(&snapshot(pids, &["--json"])?)?;
        let has_verdict = taken["verdicts"].as_array().is_some_and(|said| !said.is_empty());
        if has_verdict && !taken["root_cause"].is_null() {
            return Ok(taken);
        }
        ensure!(Instant::now() < end, "no root cause: {taken:#}");
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_first_line_is_the_root_cause_and_what_queues_is_folded_under_it() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let job = hung(folder.path())?;
    let pids = job.pids();
    let taken = wait_for_cause(&pids)?;
    let cause = &taken["root_cause"];
    ensure!(
        cause["culprit"] == 3 && cause["pid"] == pids[3] && cause["cause"] == "NOT_LAUNCHED",
        "{cause:#}"
    );
    let text = snapshot(&pids, &[])?;
    let mut lines = text.lines();
    let first = lines.next().context("no line")?;
    for words in [
        format!(
            "HANG  rank 3 (pid {}, host node-1) has not launched reduce_scatter",
            pids[3]
        ),
        "ranks 0-2 have waited".to_owned(),
        format!("next: see where it is: py-spy dump --pid {}", pids[3]),
    ] {
        ensure!(first.contains(&words), "{words:?} is not in {first:?}");
    }
    let second = lines.nth(1).context("no operation")?;
    ensure!(
        second.starts_with("  reduce_scatter"),
        "the cause stands first:\n{text}"
    );
    // The all_gather and four messages.
    ensure!(text.contains("    5 operations queue behind it\n"), "{text}");
    let waits: Vec<&str> = text
        .lines()
        .filter(|line| line.trim_start().starts_with("waits for"))
        .collect();
    ensure!(waits == ["    waits for rank 3"], "one culprit:\n{text}");
    // JSON has the same order.
    let operations = taken["communicators"][0]["operations"].as_array();
    let operations = operations.context("operations")?;
    ensure!(operations[0]["sequence"] == cause["sequence"] && operations[0]["behind"] == false);
    ensure!(
        operations[1..]
            .iter()
            .all(|operation| operation["behind"] == true),
        "{operations:#?}"
    );
    Ok(())
}

#[test]
fn from_some_of_the_ranks_the_root_cause_is_named_and_no_innocent_rank() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let job = hung(folder.path())?;
    let pids = job.pids();
    for seen in [&pids[..1], &pids[1..2], &pids[..3]] {
        let taken = wait_for_cause(seen)?;
        ensure!(taken["root_cause"]["culprit"] == 3, "{taken:#}");
        let text = snapshot(seen, &[])?;
        let first = text.lines().next().context("no line")?;
        ensure!(first.starts_with("HANG  rank 3 ("), "{text}");
        let innocent = text.lines().find(|line| {
            let waits = line.trim_start().strip_prefix("waits for rank ");
            waits.is_some_and(|ranks| ranks != "3")
        });
        ensure!(innocent.is_none(), "{innocent:?}:\n{text}");
    }
    Ok(())
}

#[test]
fn a_watched_snapshot_is_taken_again_until_the_processes_are_gone() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = hung(folder.path())?;
    let pids = job.pids();
    let mut command = Command::new(&artifacts().ringsight);
    command
        .args(["snapshot", "--json", "--watch=0.2", &pids[0].to_string()])
        .stdout(std::process::Stdio::piped());
    let mut watching = command.spawn()?;
    let lines = std::io::BufReader::new(watching.stdout.take().context("standard output")?).lines();
    let mut has_cause = false;
    for line in lines {
        let taken: Value = serde_json::from_str(&line?)?;
        if taken["root_cause"]["culprit"] == 3 && !has_cause {
            has_cause = true;
            job.kill(0);
        }
    }
    let status = watching.wait()?;
    ensure!(has_cause && status.code() == Some(HANG_SEEN), "{status}");
    Ok(())
}

#[test]
fn a_stopped_rank_is_who_the_others_wait_for() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = under_way(folder.path())?;
    let pids = job.pids();
    signal(pids[2], "-STOP")?;
    // The others come to wait for it.
    let stopped = Instant::now();
    let (taken, operations) = loop {
        thread::sleep(Duration::from_millis(200));
        let taken: Value = serde_json::from_str(&snapshot(&pids, &["--json"])?)?;
        let groups = taken["communicators"].as_array().context("communicators")?;
        let operations: Vec<Value> = groups
            .iter()
            .flat_map(|group| group["operations"].as_array().into_iter().flatten())
            .cloned()
            .collect();
        let is_old = |operation: &Value| operation["oldest_ns"].as_u64() > Some(900_000_000);
        if !operations.is_empty() && operations.iter().all(is_old) {
            break (taken, operations);
        }
        ensure!(
            stopped.elapsed() < LIMIT,
            "nothing waits for it, or not all do: {taken:#}"
        );
    };
    let text = snapshot(&pids, &[])?;
    let prefix = folder.path().join("dumps/rank_");
    let prefix = prefix.to_str().context("path")?;
    snapshot(&pids, &["--dump-json", prefix])?;
    signal(pids[2], "-CONT")?;
    // It goes on as if nothing had been.
    job.wait_step(40, LIMIT)?;

    // Some wait for rank 2 itself, the others for ranks that are kept by what waits for it.
    let mut kept = BTreeSet::from([2]);
    let awaits = |operation: &Value, kept: &BTreeSet<u64>| {
        let awaited = operation["awaited"].as_array().into_iter().flatten();
        awaited.filter_map(Value::as_u64).any(|rank| kept.contains(&rank))
    };
    ensure!(
        operations.iter().any(|operation| awaits(operation, &kept)),
        "{taken:#}"
    );
    for _ in &operations {
        for operation in operations
            .iter()
            .filter(|operation| awaits(operation, &kept))
            .collect::<Vec<_>>()
        {
            let parts = operation["parts"].as_array().into_iter().flatten();
            let running = parts.filter(|part| part["place"] == "running");
            kept.extend(running.filter_map(|part| part["rank"].as_u64()));
        }
    }
    for operation in &operations {
        ensure!(awaits(operation, &kept), "{operation:#}");
    }
    ensure!(
        text.contains("waits for rank 2") && text.contains(&format!("process {}, process stopped", pids[2])),
        "{text}"
    );
    // The last collective that all others are in is not among those of the rank that is stopped, or it has not begun.
    let dumps = (0..4)
        .map(|rank| -> Result<Value> {
            Ok(serde_json::from_str(&std::fs::read_to_string(format!(
                "{prefix}{rank}"
            ))?)?)
        })
        .collect::<Result<Vec<_>>>()?;
    let state = |rank: usize, operation: &Value| -> Option<Value> {
        let entries = dumps[rank]["entries"].as_array()?;
        let same = |key: &str, entry: &&Value| entry[key] == operation[key];
        let entry = entries
            .iter()
            .find(|entry| same("collective_seq_id", entry) && same("process_group", entry))?;
        Some(entry["state"].clone())
    };
    let entries = dumps[0]["entries"].as_array().context("entries")?;
    let hung: Vec<&Value> = entries
        .iter()
        .filter(|entry| entry["state"] == "started")
        .collect();
    ensure!(!hung.is_empty(), "{:#}", dumps[0]);
    for operation in hung {
        ensure!(
            state(2, operation).is_none_or(|state| state != "completed"),
            "{operation:#}"
        );
    }
    ensure!(dumps.iter().all(|dump| dump["version"] == "2.10"));

    // With one process looked at the others are not known.
    let alone = snapshot(&pids[..1], &[]).unwrap_or_default();
    ensure!(alone.contains("4 ranks, 1 looked at"), "{alone}");
    Ok(())
}

#[test]
fn verdicts_and_proxies_are_in_the_pages_for_whoever_comes_later() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let job = under_way(folder.path())?;
    let pids = job.pids();
    let before: Value = serde_json::from_str(&snapshot(&pids, &["--json"])?)?;
    ensure!(before["verdicts"] == Value::Array(Vec::new()), "{before:#}");
    signal(pids[2], "-STOP")?;
    let of_stopped = |verdict: &&Value| {
        verdict["cause"] == "RANK_STOPPED" && verdict["culprit"] == 2 && verdict["hang"] == true
    };
    let end = Instant::now() + LIMIT;
    let (taken, text) = loop {
        let taken: Value = serde_json::from_str(&snapshot(&pids, &["--json"])?)?;
        let verdicts = taken["verdicts"].as_array().context("verdicts")?;
        let speaking: BTreeSet<u64> = verdicts
            .iter()
            .filter_map(|verdict| verdict["pid"].as_u64())
            .collect();
        // Nobody watches: what was said is there all the same. Who waits for one that itself waits says that of it.
        if speaking.len() == 3 && verdicts.iter().any(|verdict| of_stopped(&verdict)) {
            break (taken, snapshot(&pids, &[])?);
        }
        ensure!(Instant::now() < end, "{taken:#}");
        thread::sleep(Duration::from_millis(50));
    };
    signal(pids[2], "-CONT")?;
    let verdicts = taken["verdicts"].as_array().context("verdicts")?;
    let groups = taken["communicators"].as_array().context("communicators")?;
    let mut moving = 0;
    for group in groups {
        let operations = group["operations"].as_array().context("operations")?;
        let on_its_way = |of: &Value| {
            operations.iter().any(|operation| {
                (&operation["sequence"], &operation["pair"]) == (&of["sequence"], &of["pair"])
            })
        };
        for verdict in verdicts
            .iter()
            .filter(|verdict| verdict["communicator"] == group["id"])
        {
            let still = verdict["ended"] != false || on_its_way(verdict);
            ensure!(still && verdict["waited_ns"].as_u64() > Some(0), "{verdict:#}");
        }
        // Its operation may be done as far as its rank is concerned, and yet wait for the receiver.
        for proxy in group["proxies"].as_array().context("proxies")? {
            moving += 1;
            ensure!(
                proxy["rank"] != proxy["peer"] && proxy["step"].as_u64() <= proxy["steps"].as_u64(),
                "{proxy:#}"
            );
            ensure!(proxy["since_ns"].as_u64() > Some(0), "{proxy:#}");
        }
    }
    ensure!(moving > 0, "no proxy moves anything: {taken:#}");
    ensure!(
        text.contains("RANK_STOPPED (hang): the process of rank 2 is stopped; it was in progress for ")
            && text.contains("  proxy of rank "),
        "{text}"
    );
    // They stay, and say that it is over once it is.
    let is_over = |after: &Value, verdict: &Value| -> Result<bool> {
        let kept = after["verdicts"].as_array().context("verdicts")?;
        let same = |other: &&Value| {
            ["pid", "cause", "culprit", "sequence", "pair", "waited_ns"]
                .iter()
                .all(|key| other[key] == verdict[key])
        };
        let still = kept.iter().find(same);
        let still = still.with_context(|| format!("not kept: {verdict:#}"))?;
        Ok(still["ended"] != false)
    };
    loop {
        let after: Value = serde_json::from_str(&snapshot(&pids, &["--json"])?)?;
        let over: Vec<bool> = verdicts
            .iter()
            .map(|verdict| is_over(&after, verdict))
            .collect::<Result<_>>()?;
        if over.iter().all(|over| *over) {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{after:#}");
        thread::sleep(Duration::from_millis(20));
    }
}
