//! Targets that have, or write, more than the collector keeps of a process (`docs/src/limits.md`).

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use ringsight_testbed::demo::collector::Collector;
use serde_json::Value;

use crate::{
    Collected, Target,
    target::{Beside, ringsight, watch_beside},
};

/// How long `attach --duration 1` may take, and its end after a signal: what is left has 2 s, and this is a build without optimisation.
const END: Duration = Duration::from_secs(6);

/// What metrics count as left out at a limit.
fn metered(beside: &Beside, limit: &str) -> Option<u64> {
    let attribute = |point: &Value| point["attributes"][0]["value"]["stringValue"] == limit;
    let mut last = None;
    for metric in beside.metrics() {
        if metric["name"] != "ccl.collector.left_out" {
            continue;
        }
        let points = metric["sum"]["dataPoints"].as_array().into_iter().flatten();
        for point in points.filter(|point| attribute(point)) {
            last = point["asInt"].as_str().and_then(|count| count.parse().ok());
        }
    }
    last
}

/// A target that plays `case` beside an honest one that is busy: the honest one's operations are complete, the watch ends in time, and what was
/// left out at `limits` is said in the summary, the report and metrics.
fn is_left_out(test: &str, case: &str, limits: &[&str]) -> Result<()> {
    let Some(target) = Target::start(test, case)? else {
        return Ok(());
    };
    let Some(beside) = watch_beside(&target)? else {
        return Ok(());
    };
    let collected = &beside.collected;
    ensure!(
        collected.code == Some(0) && collected.elapsed < END,
        "{collected:?}"
    );
    for limit in limits {
        let count = beside.summary["limits"][limit].as_u64();
        ensure!(count > Some(0), "{limit}: {:#}", beside.summary);
        ensure!(metered(&beside, limit) == count, "{limit}: {count:?}");
        let said = format!("({limit})");
        let is_said = |line: &str| line.contains("left out at a limit: ") && line.contains(&said);
        let report = collected.output.lines().chain(collected.errors.lines());
        ensure!(report.into_iter().any(is_said), "{limit}: {collected:?}");
    }
    Ok(())
}

/// H6
#[test]
fn proxy_operations_without_end_are_left_out() -> Result<()> {
    let name = "proxy_operations_without_end_are_left_out";
    is_left_out(name, "proxies", &["proxies_per_operation"])
}

/// H6
#[test]
fn a_signal_ends_the_watch_of_a_target_that_writes_without_end() -> Result<()> {
    let name = "a_signal_ends_the_watch_of_a_target_that_writes_without_end";
    let Some(target) = Target::start(name, "proxies")? else {
        return Ok(());
    };
    let folder = target.folder().join("collector");
    let options = ["--no-ebpf".to_owned()];
    let mut collector = Collector::start(ringsight(), &[target.pid()], &options, &folder)?;
    let summary = collector.stop(END)?;
    ensure!(summary.records["proxy_op"].received > 0, "{summary:?}");
    Ok(())
}

/// H9
#[test]
fn ever_new_communicators_are_left_out() -> Result<()> {
    is_left_out(
        "ever_new_communicators_are_left_out",
        "communicators",
        &["communicators"],
    )
}

/// H9
#[test]
fn ever_more_ranks_of_one_process_are_left_out() -> Result<()> {
    let name = "ever_more_ranks_of_one_process_are_left_out";
    is_left_out(name, "ranks", &["ranks_per_communicator"])
}

/// H9
#[test]
fn graphs_destroyed_in_the_far_future_are_left_out() -> Result<()> {
    is_left_out(
        "graphs_destroyed_in_the_far_future_are_left_out",
        "graphs",
        &["graphs"],
    )
}

/// H10
#[test]
fn a_communicator_of_impossibly_many_ranks_is_left_out_of_a_snapshot() -> Result<()> {
    let name = "a_communicator_of_impossibly_many_ranks_is_left_out_of_a_snapshot";
    let Some(target) = Target::start(name, "many-ranks")? else {
        return Ok(());
    };
    let Some(honest) = Target::start(name, "described")? else {
        return Ok(());
    };
    let pids = [target.pid().to_string(), honest.pid().to_string()];
    let snapshot = Collected::of(target.folder(), &["snapshot", "--json", &pids[0], &pids[1]])?;
    let is_small = |text: &str| text.len() < 1 << 20;
    ensure!(snapshot.elapsed < Duration::from_secs(10), "{snapshot:?}");
    ensure!(is_small(&snapshot.output) && is_small(&snapshot.errors));
    ensure!(snapshot.code == Some(1), "something was left out: {snapshot:?}");
    let said = "communicator 0000000000000064 is left out, it says that it has 100000000 ranks";
    ensure!(snapshot.errors.contains(said), "{snapshot:?}");
    let more = "1 more communicators are left out like it";
    ensure!(snapshot.errors.contains(more), "{snapshot:?}");
    let json: Value = serde_json::from_str(&snapshot.output)?;
    let communicators = json["communicators"].as_array().context("communicators")?;
    let ids: Vec<_> = communicators.iter().map(|one| one["id"].as_str()).collect();
    // The honest one's, and of the other the one that is possible.
    ensure!(
        ids.len() == 2 && ids.contains(&Some("0000000000000066")),
        "{json:#}"
    );
    // Watched, they are communicators of which almost all ranks are elsewhere.
    let Some(beside) = watch_beside(&target)? else {
        return Ok(());
    };
    ensure!(beside.collected.elapsed < END, "{:?}", beside.collected);
    Ok(())
}

/// Each of many processes has filled its ring when they are let go.
#[test]
fn many_full_rings_are_not_all_kept_at_the_end() -> Result<()> {
    use ringsight_probes::{Source as _, limits::LET_GO_SAMPLES};

    const TARGETS: usize = 40;
    let mut targets = Vec::new();
    for _ in 0..TARGETS {
        let name = "many_full_rings_are_not_all_kept_at_the_end";
        let Some(target) = Target::start(name, "proxies")? else {
            return Ok(());
        };
        targets.push(target);
    }
    let mut session = crate::files::session()?;
    for target in &targets {
        session.attach(target.pid())?;
    }
    // Time to write 8192 records each, which one look at a ring takes at most.
    std::thread::sleep(Duration::from_secs(3));
    session.detach_all();
    let mut samples = Vec::new();
    session.poll(&mut samples).map_err(anyhow::Error::msg)?;
    // With what is said of each process beside its records.
    let most = LET_GO_SAMPLES + 1000;
    ensure!(samples.len() > LET_GO_SAMPLES / 2, "{} samples", samples.len());
    ensure!(samples.len() <= most, "{} samples", samples.len());
    Ok(())
}
