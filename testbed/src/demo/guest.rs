//! The demo inside a guest: the job over RDMA between two nodes, a link that fails and returns, and the collector.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;
use serde_json::Value;

use super::{
    OUTPUTS, check,
    collector::{Collector, HANG_SEEN},
    job::Job,
    truth::{Configuration, Wire},
};
use crate::{machine::set_link, process, workspace::Artifacts};

/// What job to run.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Training steps.
    #[arg(long)]
    steps: u32,
    /// Seed of weights and samples.
    #[arg(long)]
    seed: u64,
}

/// How long the connections may take to leave a path, and to return to it.
const LIMIT: Duration = Duration::from_secs(60);
/// Where the collector's files are.
const FOLDER: &str = "/tmp/demo";

/// What stands before a file that is handed out, its name behind it, and what stands after it.
pub(super) const FILE: &str = "@@file ";
pub(super) const FILE_END: &str = "@@end";

/// Runs it, and says whether the ranks agree; what came of it is printed, the files in base64 of gzip.
///
/// # Errors
/// What broke.
pub fn run(arguments: &Arguments) -> Result<bool> {
    let wire = Wire {
        devices: ["=hca0,hca1", "=peer0,peer1"].map(str::to_owned).to_vec(),
        link: "nic0".to_owned(),
        step: arguments.steps.div_ceil(2),
    };
    let configuration = Configuration {
        ranks: 2,
        nodes: 2,
        steps: arguments.steps,
        batch: 8,
        seed: arguments.seed,
        pace_ms: 0,
        delays: Vec::new(),
        wire: Some(wire.clone()),
    };
    let artifacts = Artifacts {
        ringsight: PathBuf::from("/test/ringsight"),
        library_folder: PathBuf::from("/test/lib"),
        xtask: process::own_executable()?,
        target: PathBuf::from("/tmp"),
    };
    let folder = Path::new(FOLDER);
    fs::create_dir_all(folder)?;
    let mut job = Job::start(&configuration, &artifacts, &folder.join("work"))?;
    let pids = job.pids();
    let outputs = OUTPUTS.map(|name| folder.join(name));
    let options: Vec<String> = outputs
        .iter()
        .map(|file| format!("--out={}", file.display()))
        .collect();
    let mut collector = Collector::attach(&artifacts, &pids, &options, &folder.join("work"))?;
    let watched = Snapshots {
        ringsight: artifacts.ringsight.clone(),
        pids,
    };
    job.go()?;
    let mut repaired = Ok(());
    job.wait_done(LIMIT + LIMIT, |_, line| {
        println!("{line}");
        if line.starts_with("link ") {
            // The ranks go on meanwhile.
            repaired = watched
                .wait("leave the link", Some(|end| end["active"] == 1))
                .and_then(|text| {
                    println!("{text}");
                    set_link(&wire.link, true).context("taking the link up")
                });
            println!("link {} up", wire.link);
        }
    })?;
    repaired?;
    println!("{}", watched.wait("return to the link", None)?);
    let truths = job.exit()?;
    let summary = collector.finish(LIMIT)?;
    let problems = check::training_problems(&truths, &configuration);
    for problem in &problems {
        println!("problem   {problem}");
    }
    println!(
        "{} operations, {} records lost",
        summary.operations.len(),
        summary.lost
    );
    for (name, file) in OUTPUTS.iter().zip(&outputs) {
        println!("{FILE}{name}");
        let packed = format!("gzip -c '{}' | base64", file.display());
        process::run(Command::new("sh").args(["-c", &packed]))?;
        println!("{FILE_END}");
    }
    Ok(problems.is_empty())
}

/// `ringsight snapshot` of the job.
struct Snapshots {
    ringsight: PathBuf,
    pids: Vec<u32>,
}

impl Snapshots {
    fn take(&self, option: Option<&str>) -> Result<String> {
        let mut command = Command::new(&self.ringsight);
        command.arg("snapshot").args(self.pids.iter().map(u32::to_string));
        let output = command.args(option).stderr(Stdio::inherit()).output()?;
        // Ranks wait while a connection fails over.
        if !output.status.success() && output.status.code() != Some(HANG_SEEN) {
            bail!("ringsight snapshot failed: {}", process::reason(output.status));
        }
        Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
    }

    /// Waits until a snapshot has an end of a connection of which `is_one` is true; without it, until all are on their first
    /// paths. Returns it as text.
    fn wait(&self, what: &str, is_one: Option<fn(&Value) -> bool>) -> Result<String> {
        let begun = Instant::now();
        loop {
            let taken: Value = serde_json::from_str(&self.take(Some("--json"))?)?;
            let ends: Vec<&Value> = taken["communicators"]
                .as_array()
                .into_iter()
                .flatten()
                .flat_map(|group| group["connections"].as_array().into_iter().flatten())
                .collect();
            let is_back = |end: &&Value| end["active"] == 0 && end["phase"] == "flows";
            let has_come = match is_one {
                Some(is_one) => ends.iter().any(|end| is_one(end)),
                None => !ends.is_empty() && ends.iter().all(is_back),
            };
            if has_come {
                return self.take(None);
            }
            if begun.elapsed() > LIMIT {
                bail!("the connections did not {what} in {LIMIT:?}: {taken:#}");
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}
