//! A training job of several processes, the collector attached to it, its traces, and a judge (`cargo xtask demo`).
//!
//! Every rank writes what it knows of its own run, by its own clock: the truth ([`truth`]). The collector never reads it. [`check`] compares
//! the collector's summary with the truth, and every difference is a problem in the report, which is the last line.
//!
//! | file | owns |
//! |---|---|
//! | `job`, `worker`, `model` | the ranks as processes; what a rank does; the model that it trains |
//! | `truth`, `counters` | what a rank knows; the library's own counters of events |
//! | `collector`, `summary` | `ringsight attach` as a child; what it reports |
//! | `report`, `check`, `lateness` | the last line; all comparisons; those of who was late |
//! | `vm`, `guest`, `failover_trace` | the demo in a guest, from outside and inside; what its trace has to say |

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;

pub mod check;
pub mod collector;
mod counters;
pub mod failover_trace;
pub mod guest;
pub mod job;
mod lateness;
mod model;
mod report;
#[cfg(test)]
mod sample;
pub mod summary;
pub mod truth;
pub mod vm;
pub mod worker;

use crate::{
    random::{Random, fresh_seed},
    workspace::{self, Artifacts},
};
use check::{Expectation, Report};
use collector::Collector;
use job::Job;
use summary::Summary;
use truth::{Configuration, Delay};

/// Files that the collector makes.
const OUTPUTS: [&str; 3] = ["trace.html", "trace.json", "trace.jsonl"];

/// What job to run, and what to do with its traces.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Ranks, one process each.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: u32,
    /// Nodes that the ranks pretend to be on.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    nodes: u32,
    /// Training steps.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    steps: u32,
    /// Samples in each rank's part of a step's batch: how much a step computes.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    batch: u32,
    /// Seed of weights, samples and delays; by default another one each time.
    #[arg(long)]
    seed: Option<u64>,
    /// How many times a rank is late, each time in another step.
    #[arg(long, value_name = "N", default_value_t = 5)]
    slow: u32,
    /// Nobody is late on purpose.
    #[arg(long, conflicts_with = "slow")]
    no_slow: bool,
    /// How long a late rank sleeps, milliseconds: one number, or a range to draw from.
    #[arg(long, value_name = "MS[-MS]", default_value = "20-80", value_parser = parse_delay)]
    delay: (u32, u32),
    /// From which lag on the collector names a rank, milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 10.0)]
    lag_threshold: f64,
    /// Compare what the collector found with what the ranks know; the last line is a report in JSON.
    #[arg(long)]
    check: bool,
    /// Folder for the trace files [default: target/demo].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Also send the traces there, e.g. http://localhost:4317.
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
    /// How to speak OTLP.
    #[arg(long, value_name = "PROTOCOL", default_value = "grpc", value_parser = ["grpc", "http/protobuf"])]
    otlp_protocol: String,
    /// Read the shared ring alone, without eBPF.
    #[arg(long)]
    no_ebpf: bool,
    /// Run the job alone, without a collector.
    #[arg(long, conflicts_with_all = ["check", "otlp", "no_ebpf"])]
    unwatched: bool,
    /// In a guest: two ranks on two nodes over RDMA, where a port goes down in the middle of an all_reduce and comes back. Of the
    /// other options --out, --check and --otlp (the backend's port for OTLP over HTTP) are taken.
    #[arg(long, conflicts_with_all = ["no_ebpf", "unwatched", "no_slow", "keep"])]
    vm: bool,
    /// Keep the ranks' own accounts and the collector's summary beside the trace files.
    #[arg(long)]
    keep: bool,
}

fn parse_delay(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| {
        text.trim()
            .parse::<u32>()
            .map_err(|_| format!("{text:?} is no number of milliseconds"))
    };
    let (least, most) = match text.split_once('-') {
        Some((least, most)) => (number(least)?, number(most)?),
        None => (number(text)?, number(text)?),
    };
    if least > most {
        return Err(format!("{least} is above {most}"));
    }
    Ok((least, most))
}

impl Arguments {
    /// The job that these arguments describe.
    ///
    /// # Errors
    /// If they contradict one another.
    pub fn configuration(&self) -> Result<Configuration> {
        if self.nodes > self.ranks {
            bail!(
                "--nodes {} is above --ranks {}: a node has at least one rank",
                self.nodes,
                self.ranks
            );
        }
        let seed = self.seed.unwrap_or_else(fresh_seed);
        let slow = if self.no_slow { 0 } else { self.slow };
        // The first two steps are left alone: caches are cold and every rank is late there now and then.
        if slow > self.steps.saturating_sub(2) {
            bail!(
                "--slow {slow} needs at least {} steps, one for each late rank and two before",
                slow + 2
            );
        }
        Ok(Configuration {
            ranks: self.ranks,
            nodes: self.nodes,
            steps: self.steps,
            batch: self.batch,
            seed,
            pace_ms: 0,
            delays: draw_delays(seed, slow, self.ranks, self.steps, self.delay),
            wire: None,
        })
    }
}

/// Draws who is late when: distinct steps from the third on, in order.
fn draw_delays(seed: u64, count: u32, ranks: u32, steps: u32, (least, most): (u32, u32)) -> Vec<Delay> {
    let mut random = Random::new(seed ^ 0x005e_ed0f_de1a_7500);
    let mut free: Vec<u32> = (3..=steps).collect();
    let mut delays: Vec<Delay> = (0..count)
        .map(|_| Delay {
            step: free.swap_remove(random.below(free.len() as u64) as usize),
            rank: random.below(ranks.into()) as u32,
            ms: least + random.below(u64::from(most - least) + 1) as u32,
        })
        .collect();
    delays.sort_by_key(|delay| delay.step);
    delays
}

/// Runs the demo, and says whether nothing was wrong; `build` makes collector, library and workers. With `--check` the last line is the report, whatever happens.
///
/// # Errors
/// What broke, without `--check`; with it, that is in the report, as is what the check found.
pub fn run(arguments: &Arguments, build: impl FnOnce() -> Result<Artifacts>) -> Result<bool> {
    if arguments.vm {
        return vm::run(arguments, &build()?);
    }
    if arguments.unwatched {
        return run_unwatched(&arguments.configuration()?);
    }
    let report = run_watched(arguments, build);
    if !arguments.check {
        return report.map(|_| true);
    }
    let report = report.unwrap_or_else(|error| Report::failed(format!("{error:#}")));
    for problem in &report.problems {
        println!("problem   {problem}");
    }
    println!("{}", serde_json::to_string(&report)?);
    Ok(report.ok)
}

/// Runs the job with a collector, prints what that found and compares it with what the ranks know.
fn run_watched(arguments: &Arguments, build: impl FnOnce() -> Result<Artifacts>) -> Result<Report> {
    let configuration = arguments.configuration()?;
    let artifacts = build()?;
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| artifacts.target.join("demo"));
    fs::create_dir_all(&out)?;
    let work = out.join("work");
    println!(
        "{} ranks on {} nodes, {} steps, seed {}, {} times a late rank",
        configuration.ranks,
        configuration.nodes,
        configuration.steps,
        configuration.seed,
        configuration.delays.len()
    );
    let outputs = OUTPUTS.map(|name| out.join(name));
    // An earlier run's files would be refused or appended to, or be taken for this run's where it fails.
    for file in &outputs {
        match fs::remove_file(file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing {}", file.display()));
            }
            _ => {}
        }
    }
    let (truths, summary, detach_ms) = observe(&configuration, &artifacts, &work, arguments, &outputs)?;
    let expectation = Expectation {
        configuration: &configuration,
        threshold_ns: (arguments.lag_threshold * 1e6) as u64,
        outputs: &outputs,
        otlp: arguments.otlp.is_some(),
    };
    let report = Report {
        detach_ms,
        ..check::check(&truths, &summary, &expectation)
    };
    print_table(&summary);
    print_outputs(&outputs, arguments.otlp.as_deref());
    if arguments.keep {
        println!("kept      {}", work.display());
    } else {
        fs::remove_dir_all(&work)?;
    }
    Ok(report)
}

/// Runs the job alone and checks that all ranks computed the same. Builds the library and the workers only: it works
/// where eBPF programs cannot be compiled.
fn run_unwatched(configuration: &Configuration) -> Result<bool> {
    let artifacts = workspace::build_job()?;
    let work = artifacts.target.join("demo/work");
    let mut job = Job::start(configuration, &artifacts, &work)?;
    job.go()?;
    job.wait_done(
        Duration::from_secs(60 + u64::from(configuration.steps)),
        |_, line| println!("{line}"),
    )?;
    let truths = job.exit()?;
    let problems = check::training_problems(&truths, configuration);
    for problem in &problems {
        println!("problem   {problem}");
    }
    let loop_ms = truths.iter().map(|truth| truth.loop_ns).max().unwrap_or(0) as f64 / 1e6;
    println!(
        "{} collectives a rank in {loop_ms:.1} ms",
        truths.first().map_or(0, |truth| truth.collectives.len())
    );
    Ok(problems.is_empty())
}

/// Runs the job with a collector attached to all of it. For a check, another one attaches before and lets go of the ranks as
/// they wait; how long that took comes back, in milliseconds.
fn observe(
    configuration: &Configuration,
    artifacts: &Artifacts,
    work: &Path,
    arguments: &Arguments,
    outputs: &[PathBuf],
) -> Result<(Vec<truth::Truth>, Summary, Option<f64>)> {
    let mut job = Job::start(configuration, artifacts, work)?;
    let pids = job.pids();
    println!(
        "processes {}",
        pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
    );
    let mut options = vec![format!("--lag-threshold={}", arguments.lag_threshold)];
    if arguments.no_ebpf {
        options.push("--no-ebpf".to_owned());
    }
    let detach_ms = if arguments.check {
        let mut before = Collector::attach(artifacts, &pids, &options, work)?;
        Some(before.stop(Duration::from_secs(60))?.detach_ms)
    } else {
        None
    };
    if let Some(url) = &arguments.otlp {
        options.extend([
            format!("--otlp={url}"),
            format!("--otlp-protocol={}", arguments.otlp_protocol),
        ]);
    }
    for file in outputs {
        options.push(format!("--out={}", file.display()));
    }
    let mut collector = Collector::attach(artifacts, &pids, &options, work)?;
    job.go()?;
    let limit = Duration::from_secs(60 + u64::from(configuration.steps));
    job.wait_done(limit, |_, line| println!("{line}"))?;
    let truths = job.exit()?;
    // The processes it watched have ended, so it ends.
    let summary = collector.finish(Duration::from_secs(60))?;
    Ok((truths, summary, detach_ms))
}

/// A line for each kind of operation, and one for each operation that somebody was late at.
fn print_table(summary: &Summary) {
    println!(
        "\n{:<16} {:>6} {:>12} {:>12} {:>12}",
        "operation", "count", "bytes", "median ms", "longest ms"
    );
    for row in summary.by_name() {
        println!(
            "{:<16} {:>6} {:>12} {:>12.3} {:>12.3}",
            row.name, row.count, row.bytes, row.median_ms, row.longest_ms
        );
    }
    let late: Vec<_> = summary
        .operations
        .iter()
        .filter_map(|op| Some((op, op.culprit.as_ref()?)))
        .collect();
    if late.is_empty() {
        println!("\nnobody was late");
    } else {
        println!(
            "\n{:<16} {:>9} {:>10} {:>9} {:>9}  trace",
            "operation", "sequence", "bytes", "late rank", "lag ms"
        );
    }
    for (operation, culprit) in late {
        println!(
            "{:<16} {:>9} {:>10} {:>9} {:>9.1}  {}",
            operation.name,
            operation.sequence,
            operation.bytes,
            culprit.rank,
            culprit.lag_ns as f64 / 1e6,
            operation.trace_id
        );
    }
}

fn print_outputs(outputs: &[PathBuf], otlp: Option<&str>) {
    let uses = [
        "a browser: every operation by rank, no network needed",
        "https://ui.perfetto.dev",
        "any OTLP JSON reader",
    ];
    println!();
    for (file, with) in outputs.iter().zip(uses) {
        println!("open      {} with {with}", file.display());
    }
    if let Some(url) = otlp {
        println!("sent to   {url}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn delays_are_drawn_as_asked(seed: u64, count in 0u32..20, ranks in 2u32..9, least in 0u32..50, more in 0u32..50) {
            let delays = draw_delays(seed, count, ranks, 40, (least, least + more));
            prop_assert_eq!(delays.len(), count as usize);
            prop_assert!(delays.windows(2).all(|pair| pair[0].step < pair[1].step));
            for delay in &delays {
                prop_assert!((3..=40).contains(&delay.step) && delay.rank < ranks);
                prop_assert!((least..=least + more).contains(&delay.ms));
            }
            prop_assert_eq!(delays, draw_delays(seed, count, ranks, 40, (least, least + more)));
        }
    }

    #[test]
    fn delays_are_a_number_or_a_range() {
        assert_eq!(parse_delay("30"), Ok((30, 30)));
        assert_eq!(parse_delay("20-80"), Ok((20, 80)));
        for wrong in ["", "-", "80-20", "a", "1-b", "-5"] {
            assert!(parse_delay(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn nodes_hold_blocks_of_ranks() {
        let arguments = |ranks, nodes| Configuration {
            ranks,
            nodes,
            steps: 1,
            batch: 32,
            seed: 0,
            pace_ms: 0,
            delays: vec![],
            wire: None,
        };
        let nodes = |ranks, nodes| {
            (0..ranks)
                .map(|r| arguments(ranks, nodes).node(r))
                .collect::<Vec<_>>()
        };
        assert_eq!(nodes(4, 2), [0, 0, 1, 1]);
        assert_eq!(nodes(5, 2), [0, 0, 0, 1, 1]);
        assert_eq!(nodes(3, 3), [0, 1, 2]);
    }
}
