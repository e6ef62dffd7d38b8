//! `cargo xtask fuzz`: runs the fuzzers of `fuzz/` on their kept corpora.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;
use ringsight_testbed::{
    process,
    workspace::{self, root},
};

use crate::setup;

/// Longest input, bytes: what the largest target (shared pages) looks at.
const MAX_INPUT: usize = 1 << 14;

/// Options of `cargo xtask fuzz`.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Which target; every one if not given.
    pub target: Option<String>,
    /// How long each target runs.
    #[arg(long, default_value_t = 60)]
    pub seconds: u64,
    /// Afterwards puts the smallest set of inputs that reaches as much code into fuzz/corpus.
    #[arg(long)]
    pub keep: bool,
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Outcome {
    executions: u64,
    features: u64,
}

impl Outcome {
    /// Reads a line of libFuzzer: `#123 NEW cov: 5 ft: 7 …`, `stat::number_of_executed_units: 123`.
    fn read(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if first == "stat::number_of_executed_units:" {
            self.executions = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        } else if let Some(count) = first.strip_prefix('#').and_then(|word| word.parse().ok()) {
            self.executions = count;
            if let Some(features) = words
                .skip_while(|word| *word != "ft:")
                .nth(1)
                .and_then(|word| word.parse().ok())
            {
                self.features = features;
            }
        }
    }
}

/// Runs the fuzzers.
pub fn run(options: &Options) -> Result<()> {
    let targets = targets(options.target.as_deref())?;
    let fuzzer = setup::cargo_fuzz()?;
    let folder = workspace::target()?.join("fuzz");
    let mut found = Vec::new();
    for name in &targets {
        let program = build(&fuzzer, &folder, name)?;
        let work = folder.join("run").join(name);
        let outcome = fuzz(&program, name, &work, options.seconds)?;
        match outcome {
            Ok((outcome, took)) => {
                println!(
                    "{name}: {} executions in {:.0} s ({:.0}/s), {} features, nothing found",
                    outcome.executions,
                    took.as_secs_f64(),
                    outcome.executions as f64 / took.as_secs_f64().max(1e-3),
                    outcome.features
                );
                if options.keep {
                    keep(&program, name, &work)?;
                }
            }
            Err(input) => {
                eprintln!("{name}: FOUND something: {}", input.display());
                found.push(*name);
            }
        }
    }
    if !found.is_empty() {
        bail!(
            "{}: put the input into fuzz/corpus once the defect is fixed",
            found.join(", ")
        );
    }
    Ok(())
}

/// Names of the targets.
const TARGETS: [&str; 10] = [
    "bootstrap",
    "config",
    "control",
    "elf",
    "failover",
    "pages",
    "procfs",
    "proxy",
    "records",
    "verbs",
];

fn targets(only: Option<&str>) -> Result<Vec<&'static str>> {
    let Some(only) = only else {
        return Ok(TARGETS.to_vec());
    };
    let target = TARGETS.into_iter().find(|name| *name == only);
    Ok(vec![target.with_context(|| {
        format!("no fuzz target {only}: there are {}", TARGETS.join(", "))
    })?])
}

fn corpus(name: &str) -> PathBuf {
    root().join("fuzz/corpus").join(name)
}

fn build(fuzzer: &Path, folder: &Path, name: &str) -> Result<PathBuf> {
    // Debug assertions stay on: an overflow is a finding.
    process::run(
        setup::nightly_command(fuzzer)?
            .args(["build", "--fuzz-dir", "fuzz", name])
            .current_dir(root())
            .env("CARGO_TARGET_DIR", folder),
    )?;
    let program = folder.join("x86_64-unknown-linux-gnu/release").join(name);
    if !process::is_program(&program) {
        bail!("cargo fuzz built no {}", program.display());
    }
    Ok(program)
}

/// Runs one target on a copy of its corpus; the input that it failed on, if it did.
fn fuzz(
    program: &Path,
    name: &str,
    work: &Path,
    seconds: u64,
) -> Result<Result<(Outcome, Duration), PathBuf>> {
    let (grown, artifacts) = (work.join("corpus"), root().join("fuzz/artifacts").join(name));
    for folder in [&grown, &artifacts] {
        fs::create_dir_all(folder)?;
    }
    let start = Instant::now();
    // New inputs go into the first corpus, the kept one is only read.
    let mut child = Command::new(program)
        .args([&grown, &corpus(name)])
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args([
            format!("-max_total_time={seconds}"),
            format!("-max_len={MAX_INPUT}"),
        ])
        .args(["-print_final_stats=1", "-timeout=10"])
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let mut outcome = Outcome::default();
    let mut last = Vec::new();
    let mut artifact = None;
    let errors = child.stderr.take().context("standard error is not piped")?;
    for line in BufReader::new(errors).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        outcome.read(&line);
        if let Some(at) = line.find("Test unit written to ") {
            artifact = Some(PathBuf::from(line[at + "Test unit written to ".len()..].trim()));
        }
        if !line.starts_with('#') {
            last.push(line);
        }
    }
    let status = child.wait()?;
    if status.success() {
        return Ok(Ok((outcome, start.elapsed())));
    }
    let Some(artifact) = artifact else {
        bail!("{name} failed without an input: {}", last.join("\n"));
    };
    eprintln!("{}", last.join("\n"));
    Ok(Err(artifact))
}

/// Merges what was found into the kept corpus, as few and as small inputs as reach the same.
fn keep(program: &Path, name: &str, work: &Path) -> Result<()> {
    let merged = work.join("merged");
    let _ = fs::remove_dir_all(&merged);
    fs::create_dir_all(&merged)?;
    process::output(
        Command::new(program)
            .args(["-merge=1", &format!("-max_len={MAX_INPUT}")])
            .args([&merged, &corpus(name), &work.join("corpus")]),
    )?;
    let kept = corpus(name);
    let mut inputs = 0;
    for entry in fs::read_dir(&merged)? {
        let entry = entry?;
        fs::copy(entry.path(), kept.join(entry.file_name()))?;
        inputs += 1;
    }
    // Inputs named by hand stay for what they are; those that a fuzzer named (by hash) and that nothing needs any more go.
    for entry in fs::read_dir(&kept)? {
        let entry = entry?;
        let hashed = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit()));
        if hashed && !merged.join(entry.file_name()).exists() {
            fs::remove_file(entry.path())?;
        }
    }
    println!("{name}: {inputs} inputs reach everything");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libfuzzers_lines_are_counted() {
        let mut outcome = Outcome::default();
        outcome.read("#114459\tREDUCE cov: 312 ft: 1027 corp: 232/986Kb lim: 8531 exec/s: 3815 rss: 491Mb");
        assert_eq!(
            outcome,
            Outcome {
                executions: 114_459,
                features: 1027
            }
        );
        outcome.read("stat::number_of_executed_units: 2000000");
        outcome.read("INFO: seed corpus: files: 3");
        outcome.read("");
        assert_eq!(outcome.executions, 2_000_000);
    }

    #[test]
    fn every_target_has_a_corpus_and_a_program() {
        for name in TARGETS {
            assert!(corpus(name).is_dir(), "{name}");
            assert!(root().join(format!("fuzz/targets/{name}.rs")).is_file(), "{name}");
        }
        assert!(
            targets(Some("nothing"))
                .unwrap_err()
                .to_string()
                .contains("records")
        );
    }
}
