//! Targets that write random content without end, beside an honest job that the same collector watches.
//!
//! `HOSTILE_SECONDS` says how long; `RINGSIGHT_TEST_FULL=1` (`cargo xtask test --full`) makes it ten minutes. The test prints its seed,
//! and `HOSTILE_SEED` gives one.

use std::{
    collections::BTreeMap,
    env, fs,
    io::Write as _,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use ringsight_testbed::{
    demo::{collector::Collector, summary::Summary, truth::Truth},
    random::fresh_seed,
};
use ringsight_tests::{LIMIT, alone, folder, job, start};
use serde_json::{Value, json};

use crate::{Collected, Target, target::ringsight};

/// Steps of the honest job in a second.
const STEPS: u32 = 10;
/// Most memory that the collector may take, KiB.
const MEMORY_KIB: u64 = 256 << 10;
/// How long the end of `attach` may take: 2 s for what is left, and the writing of the summary, by a build without optimisation on a busy machine.
const END: Duration = Duration::from_secs(10);
/// How long a command that looks once may take.
const LOOK: Duration = Duration::from_secs(20);

fn number(variable: &str) -> Result<Option<u64>> {
    let value = env::var(variable).ok();
    let number = value.map(|value| {
        value
            .parse()
            .with_context(|| format!("{variable}={value} is no number"))
    });
    number.transpose()
}

/// Says something that the harness does not keep to itself.
fn say(line: &str) {
    // Nobody may listen.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The id of a communicator of these processes, hexadecimal.
fn communicator(folder: &Path, pids: &[u32]) -> Result<String> {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let mut arguments = vec!["snapshot", "--json"];
    arguments.extend(pids.iter().map(String::as_str));
    let snapshot = Collected::of(folder, &arguments)?;
    let json: Value = serde_json::from_str(&snapshot.output).with_context(|| format!("{snapshot:?}"))?;
    let id = json["communicators"][0]["id"].as_str();
    Ok(id.with_context(|| format!("{json:#}"))?.to_owned())
}

/// The memory that a process has now, KiB: its own, and pages of its targets. Its program's file is not counted, which is 40 MiB larger with
/// debug information. `None` once the process is gone.
fn memory_kib(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some(field("RssAnon:")? + field("RssShmem:")?)
}

/// Operations of the job that the summary has, by name: all of them are complete, and of all ranks that take part.
fn operations(summary: &Summary, pids: &[u32]) -> Result<BTreeMap<String, usize>> {
    let mut by_name = BTreeMap::new();
    for operation in &summary.operations {
        let [own, all] = [true, false].map(|own| {
            let parts = operation.by_rank.iter();
            parts.filter(|part| !own || pids.contains(&part.pid)).count()
        });
        if own == 0 {
            continue;
        }
        let is_message = operation.name == "send_recv";
        let ranks = if is_message { 2 } else { pids.len() };
        ensure!(
            operation.complete && (own, all) == (ranks, ranks),
            "{operation:?}"
        );
        *by_name.entry(operation.name.clone()).or_insert(0) += 1;
    }
    Ok(by_name)
}

/// Operations that the job has launched, by name.
fn launched(truths: &[Truth]) -> BTreeMap<String, usize> {
    let mut by_name = BTreeMap::new();
    for collective in truths.iter().take(1).flat_map(|truth| &truth.collectives) {
        *by_name.entry(collective.name.clone()).or_insert(0) += 1;
    }
    let messages = truths.iter().map(|truth| truth.sent.len()).sum();
    if messages > 0 {
        by_name.insert("send_recv".to_owned(), messages);
    }
    by_name
}

/// Looks at the hostile processes by commands that look once, until `is_over`; how many did.
fn look(folder: &Path, pids: &[u32], is_over: &AtomicBool) -> Result<u64> {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let mut looks = 0;
    while !is_over.load(Ordering::Relaxed) {
        for command in [&["snapshot", "--json"][..], &["snapshot"], &["list"]] {
            for pid in &pids {
                let looked = Collected::of(folder, &[command, &[pid]].concat())?;
                // What it cannot read it says.
                ensure!(
                    matches!(looked.code, Some(0..=5)) && looked.elapsed < LOOK,
                    "{command:?}: {:?} after {:?}: {}",
                    looked.code,
                    looked.elapsed,
                    looked.errors
                );
                looks += 1;
            }
        }
    }
    Ok(looks)
}

#[test]
fn random_content_costs_an_honest_job_nothing() -> Result<()> {
    let name = "random_content_costs_an_honest_job_nothing";
    let seed = number("HOSTILE_SEED")?.unwrap_or_else(fresh_seed);
    let whole = if env::var_os("RINGSIGHT_TEST_FULL").is_some() {
        600
    } else {
        10
    };
    let seconds = number("HOSTILE_SECONDS")?.unwrap_or(whole);
    say(&format!("{name}: HOSTILE_SEED={seed}, {seconds} s"));
    let Some(mut records) = Target::start(name, "random-records")? else {
        return Ok(());
    };
    let Some(mut files) = Target::start(name, "random-files")? else {
        return Ok(());
    };
    let _alone = alone();
    let folder = folder()?;
    let mut job = start(
        &job(4, seconds as u32 * STEPS, u64::from(1000 / STEPS)),
        folder.path(),
    )?;
    let pids = job.pids();
    let id = communicator(folder.path(), &pids)?;
    let hostile = [records.pid(), files.pid()];
    let watched = [&pids[..], &hostile].concat();
    let mut collector = Collector::start(ringsight(), &watched, &[], folder.path())?;
    let collector_pid = collector.pid();
    let (is_over, memory, end) = (AtomicBool::new(false), AtomicU64::new(0), AtomicBool::new(false));
    let limit = LIMIT + Duration::from_secs(4 * seconds);
    let (looks, truths, summary, end_took) = thread::scope(|scope| -> Result<_> {
        // The last reading is that of its end.
        scope.spawn(|| {
            while let (Some(kib), false) = (memory_kib(collector_pid), end.load(Ordering::Relaxed)) {
                memory.fetch_max(kib, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(20));
            }
        });
        records.ask(&format!("{seed} {id}"))?;
        files.ask(&seed.to_string())?;
        let looks = scope.spawn(|| look(folder.path(), &hostile, &is_over));
        let watch = (|| {
            job.go()?;
            job.wait_done(limit, |_, _| ())?;
            let truths = job.exit()?;
            let begun = Instant::now();
            let summary = collector.stop(END)?;
            Ok((truths, summary, begun.elapsed()))
        })();
        is_over.store(true, Ordering::Relaxed);
        end.store(true, Ordering::Relaxed);
        let looks = looks.join().ok().context("the looks panicked")?;
        let (truths, summary, end_took) =
            watch.map_err(|error: anyhow::Error| error.context(collector.log()))?;
        Ok((looks?, truths, summary, end_took))
    })?;
    let [records, files] = [records.ask("")?, files.ask("")?];
    let (memory_kib, operations) = (memory.into_inner(), operations(&summary, &pids)?);
    let written = |line: &str, at: usize| line.split(' ').nth(at).and_then(|word| word.parse::<u64>().ok());
    let result = json!({
        "seed": seed,
        "seconds": seconds,
        "records": written(&records, 0),
        "entries": written(&records, 1),
        "probe_calls": written(&records, 2),
        "files": written(&files, 3),
        "looks": looks,
        "operations": operations.values().sum::<usize>(),
        "memory_mib": memory_kib as f64 / 1024.0,
        "end_s": end_took.as_secs_f64(),
    });
    say(&result.to_string());
    ensure!(
        operations == launched(&truths),
        "{operations:?}: {}",
        collector.log()
    );
    ensure!(memory_kib <= MEMORY_KIB, "{memory_kib} KiB");
    ensure!(
        written(&records, 0) > Some(0) && written(&files, 3) > Some(0),
        "{result}"
    );
    Ok(())
}
