//! `cargo xtask bench`: the choice of benchmarks, and their table.

use anyhow::{Result, bail};
use clap::Args;
use ringsight_testbed::bench::{Row, attached, criterion, json, live, probe};

use crate::setup;

/// Which benchmarks, and how to report.
#[derive(Args, Debug)]
pub struct Options {
    /// Only benchmarks whose name contains this.
    name: Option<String>,
    /// Report as one line of JSON.
    #[arg(long)]
    json: bool,
    /// Fail if a goal is missed.
    #[arg(long)]
    check: bool,
    /// Pairs of windows in which the demo's loop runs with and without a collector.
    #[arg(long, default_value_t = 40)]
    pairs: u32,
    /// How long each case of the collector's throughput is measured, seconds of work.
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
}

/// Benchmarks written with criterion: package, target.
const CRITERION: [(&str, &str); 3] = [
    ("ringsight-comm", "bootstrap"),
    ("ringsight-comm", "observe"),
    ("ringsight-exporters", "otlp_encode"),
];

/// The longest that a process emits to a live collector, seconds.
const LIVE_SECONDS: u32 = 10;

/// Package and name of a benchmark.
type Bench = (&'static str, &'static str);
/// Runs a benchmark that prints JSON.
type Measure<'a> = &'a dyn Fn() -> Result<Vec<Row>>;

/// Runs the benchmarks.
pub fn run(options: &Options) -> Result<bool> {
    let wanted = |name: &str| options.name.as_deref().is_none_or(|part| name.contains(part));
    let mut rows = Vec::new();
    for (package, target) in CRITERION {
        if wanted(target) || wanted(package) {
            rows.extend(criterion(package, target)?);
        }
    }
    let throughput = || json::throughput(options.seconds);
    let printing: [(Bench, Measure<'_>); 5] = [
        (json::THROUGHPUT, &throughput),
        (json::PROBE, &json::probe),
        (json::CALLS, &json::calls),
        (json::LIMITS, &json::limits),
        (json::WATCHDOG, &json::watchdog),
    ];
    for ((package, target), measure) in printing {
        if wanted(target) || wanted(package) {
            rows.extend(measure()?);
        }
    }
    if wanted("probe") {
        rows.extend(probe::measure(&setup::build()?)?);
    }
    if wanted("live") {
        rows.extend(live::measure(
            &setup::build()?,
            options.seconds.min(LIVE_SECONDS),
        )?);
    }
    if wanted("attached") || wanted("demo") {
        rows.extend(attached::measure(&setup::build()?, options.pairs)?);
    }
    if rows.is_empty() {
        bail!(
            "no benchmark is called {}",
            options.name.as_deref().unwrap_or_default()
        );
    }
    if options.json {
        println!("{}", serde_json::to_string(&rows)?);
    } else {
        print(&rows);
    }
    let missed = rows.iter().any(|row| row.meets() == Some(false));
    Ok(!(options.check && missed))
}

fn print(rows: &[Row]) {
    println!(
        "\n{:<52} {:>14} {:>14} {:<10} {:>12}         note",
        "benchmark", "median", "min", "unit", "goal"
    );
    for row in rows {
        let goal = row.goal.map_or_else(String::new, |goal| goal.to_string());
        let verdict = row
            .meets()
            .map_or("", |meets| if meets { "met" } else { "MISSED" });
        println!(
            "{:<52} {:>14.3} {:>14} {:<10} {goal:>12} {verdict:<7} {}",
            row.name,
            row.median,
            row.min.map_or_else(String::new, |min| format!("{min:.3}")),
            row.unit,
            row.note
        );
    }
}
