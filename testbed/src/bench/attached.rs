//! How much slower a job runs with a collector attached: windows with and without, by turns, in one job.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Goal, Row};
use crate::{
    demo::{collector::Collector, job::Job, truth::Configuration},
    stats::median,
    workspace::Artifacts,
};

/// Length of a window: some ten stretches of steps, so that one which the machine disturbed does not count.
const WINDOW: Duration = Duration::from_secs(1);

/// Samples of a rank in a step: some 10 ms of computation between collectives, a fraction of what training steps take.
const BATCH: u32 = 1024;

/// Runs `pairs` pairs of windows; the order within a pair alternates, so that a drift of the machine cancels out.
///
/// # Errors
/// If it cannot be built or run.
pub fn measure(artifacts: &Artifacts, pairs: u32) -> Result<Vec<Row>> {
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
        wire: None,
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
            let pace = median(job.paces_until(Instant::now() + WINDOW)?).context("an empty window")?;
            windows.push((attached, pace));
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
    let (low, high) = interval(ratios.clone());
    let spread = format!(
        "95 % confidence {low:.4} to {high:.4}, {} pairs of {} ms",
        ratios.len(),
        WINDOW.as_millis()
    );
    let row = |name: &str, values: Vec<f64>, unit| -> Result<Row> {
        Ok(Row::new(name, median(values).context("no windows")?, unit))
    };
    Ok(vec![
        row("demo step, nobody attached", without, "ms")?
            .note(format!("{} ranks, {BATCH} samples each", configuration.ranks)),
        row("demo step, collector attached", with, "ms")?,
        row("demo step, attached / not", ratios, "")?
            .goal(Goal::AtMost(1.01))
            .note(spread),
        row("probe hits for each operation of a rank", hits, "")?.goal(Goal::AtMost(0.1)),
    ])
}

/// Where the median of what `values` are drawn from lies with 95 % confidence, whatever its distribution: order
/// statistics, with the binomial distribution taken as normal (Conover, Practical Nonparametric Statistics, 3.2).
fn interval(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let reach = 1.96 * n.sqrt() / 2.0;
    let at = |rank: f64| {
        let index = (rank.max(1.0) as usize).min(values.len()).saturating_sub(1);
        values.get(index).copied().unwrap_or(f64::NAN)
    };
    (at((n / 2.0 - reach).floor()), at((n / 2.0 + reach + 1.0).ceil()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_narrows_with_the_number_of_values() {
        let values = |n: u32| (0..n).map(f64::from).collect::<Vec<_>>();
        assert_eq!(interval(values(4)), (0.0, 3.0), "few values: all of them");
        let (low, high) = interval(values(100));
        assert_eq!((low, high), (39.0, 60.0));
        assert!(interval(Vec::new()).0.is_nan());
    }
}
