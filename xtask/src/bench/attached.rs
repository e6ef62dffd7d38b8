//! How much slower a job runs with a collector attached: one job, windows with and without, in turns.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Goal, Row, median};
use crate::{
    demo::{collector::Collector, job::Job, truth::Configuration},
    workspace::Artifacts,
};

/// Length of a window.
const WINDOW: Duration = Duration::from_millis(500);

/// Samples of a rank in a step: some 10 ms of computation between collectives, a fraction of what training steps take.
const BATCH: u32 = 1024;

/// Runs `pairs` pairs of windows; the order within a pair alternates, so that a drift of the machine cancels out.
pub(super) fn measure(artifacts: &Artifacts, pairs: u32) -> Result<Vec<Row>> {
    let work = artifacts.target.join("bench");
    // Far more steps than fit; the job is ended when the windows are through.
    let configuration = Configuration {
        ranks: 2,
        nodes: 1,
        steps: 200_000,
        batch: BATCH,
        seed: 1,
        pace_ms: 0,
        delays: Vec::new(),
    };
    let mut job = Job::start(&configuration, artifacts, &work)?;
    job.go()?;
    job.wait_step(30, Duration::from_secs(60))?;
    let mut windows = Vec::new();
    let mut hits = Vec::new();
    for pair in 0..pairs {
        for attached in [pair % 2 == 0, pair % 2 == 1] {
            let mut collector = attached
                .then(|| Collector::attach(artifacts, &job.pids(), &[], &work))
                .transpose()?;
            windows.push((attached, job.pace_until(Instant::now() + WINDOW)?));
            if let Some(collector) = &mut collector {
                let summary = collector.stop(Duration::from_secs(30))?;
                let operations: usize = summary.operations.iter().map(|op| op.by_rank.len()).sum();
                hits.push(summary.probe_hits as f64 / operations.max(1) as f64);
            }
        }
    }
    drop(job);
    let of = |attached| {
        windows
            .iter()
            .filter(|w| w.0 == attached)
            .map(|w| w.1)
            .collect::<Vec<_>>()
    };
    let (with, without) = (of(true), of(false));
    let ratios: Vec<f64> = with
        .iter()
        .zip(&without)
        .map(|(with, without)| with / without)
        .collect();
    let spread = format!(
        "pairs {}",
        ratios
            .iter()
            .map(|ratio| format!("{ratio:.3}"))
            .collect::<Vec<_>>()
            .join(" ")
    );
    let row = |name: &str, values: Vec<f64>, unit, goal, note: String| -> Result<Row> {
        let median = median(values).context("no windows")?;
        Ok(Row {
            name: name.to_owned(),
            median,
            unit,
            goal,
            note,
        })
    };
    Ok(vec![
        row(
            "demo step, nobody attached",
            without,
            "ms",
            None,
            format!("{} ranks, {BATCH} samples each", configuration.ranks),
        )?,
        row("demo step, collector attached", with, "ms", None, String::new())?,
        row(
            "demo step, attached / not",
            ratios,
            "",
            Some(Goal::AtMost(1.01)),
            spread,
        )?,
        row(
            "probe hits for each operation of a rank",
            hits,
            "",
            Some(Goal::AtMost(3.0)),
            String::new(),
        )?,
    ])
}
