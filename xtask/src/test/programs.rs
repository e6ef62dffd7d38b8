//! The workspace's test programs: cargo builds them once, and up to [`LANES`] of them run at a time.
//!
//! `cargo test` runs one program after the other. Most of them wait as often as they compute, so two at a time finish earlier.
//! The programs of [`ALONE`] run by themselves at the end. A program's output goes to a file; it is printed where a test failed.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use ringsight_testbed::{
    process::{self, Guarded},
    workspace::{cargo, root, test_artifacts},
};
use serde_json::Value;

use super::{
    libtest::{Counts, Output, end_of},
    suite::{Outcome, Report, SkipLog, Step},
};

/// Programs that run at the same time.
const LANES: usize = 2;

/// How often a program that runs on is named.
const NOTICE: Duration = Duration::from_secs(120);

/// Programs that run with nothing beside them, and why.
const ALONE: &[(&str, &str)] = &[
    ("comm children", "an end is bounded by a second"),
    ("comm communicators", "an end is bounded by a second"),
    ("comm debugged", "verdicts are held against time-outs"),
    ("comm errors", "an end is bounded by a second"),
    ("comm faults", "a release is bounded by seconds"),
    (
        "comm leaks",
        "files of /tmp and /dev/shm are listed before and after",
    ),
    ("comm lib", "a set-up is bounded by a second"),
    ("comm unread", "a message is bounded by its time-out"),
    ("comm watchdog", "verdicts are held against time-outs"),
    ("comm watched", "verdicts are held against time-outs"),
    (
        "exporters html_chromium",
        "the first drawing is bounded by milliseconds",
    ),
    ("probes attach", "detaching is bounded by seconds"),
    ("probes leftovers", "detaching is bounded by 600 ms"),
    ("probes readers", "a refusal is bounded by seconds"),
];

/// A test program that cargo has built.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Program {
    /// The package's folder, then the test's name, or `lib` or `bin` for the unit tests: `comm records`.
    name: String,
    file: PathBuf,
    /// The package's folder, where the program runs.
    folder: PathBuf,
}

impl Program {
    /// The program of a line of `--message-format=json`, if it is about one.
    fn of_message(message: &Value, root: &Path) -> Option<Self> {
        if message["profile"]["test"] != true {
            return None;
        }
        let file = PathBuf::from(message["executable"].as_str()?);
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
        let package = folder.strip_prefix(root).unwrap_or(&folder).display();
        let target = match message["target"]["kind"][0].as_str()? {
            "test" => message["target"]["name"].as_str()?,
            "bin" => "bin",
            _ => "lib",
        };
        Some(Self {
            name: format!("{package} {target}"),
            file,
            folder,
        })
    }

    fn runs_alone(&self) -> bool {
        ALONE.iter().any(|(name, _)| *name == self.name)
    }

    /// The command that cargo would run it by.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .stdin(Stdio::null());
        command
    }
}

/// How one program ended.
struct Ran {
    name: String,
    took: Duration,
    output: Output,
    /// Why it failed, if it did.
    problem: Option<String>,
}

/// Builds the test programs of the packages that `arguments` select and returns them, sorted by name.
fn build(arguments: &[&str]) -> Result<Vec<Program>> {
    let (root, built) = (root(), test_artifacts(arguments)?);
    let programs: BTreeSet<Program> = built
        .iter()
        .filter_map(|message| Program::of_message(message, &root))
        .collect();
    Ok(programs.into_iter().collect())
}

/// Which tests run, and with what.
pub(super) struct Tests<'a> {
    /// Cargo's arguments that select packages.
    pub(super) packages: &'a [&'a str],
    /// Only tests, or whole programs, whose name contains this.
    pub(super) filter: Option<&'a str>,
    /// Environment of the programs.
    pub(super) environment: Vec<(&'static str, std::ffi::OsString)>,
    /// Folder for the programs' output.
    pub(super) logs: PathBuf,
    /// Whether each program runs with nothing beside it, and its tests one after the other.
    pub(super) in_turn: bool,
}

impl Tests<'_> {
    /// Builds and runs them, documentation tests included.
    ///
    /// # Errors
    /// If they cannot be built or started. A failed test is an outcome.
    pub(super) fn run(&self, report: &mut Report) -> Result<Outcome> {
        let start = Instant::now();
        let programs = build(self.packages)?;
        report.step(Step::new("build", start.elapsed()));
        let skips = report.skips();
        fs::create_dir_all(&self.logs).with_context(|| format!("creating {}", self.logs.display()))?;
        let before = skips.len();
        let (alone, shared): (Vec<&Program>, Vec<&Program>) = programs
            .iter()
            .partition(|program| self.in_turn || program.runs_alone());
        let mut ran = self.run_lanes(&shared, LANES, skips)?;
        ran.extend(self.run_lanes(&alone, 1, skips)?);
        ran.push(self.run_documentation(skips)?);
        let outputs: Vec<&Output> = ran.iter().map(|ran| &ran.output).collect();
        let counts = skips.count(before, &outputs)?;
        let failures: String = ran
            .iter()
            .filter_map(|ran| Some((ran, ran.problem.as_ref()?)))
            .map(|(ran, problem)| format!("{}: {problem}\n{}", ran.name, ran.output.failures()))
            .collect();
        for ran in ran {
            report.step(Step::new(ran.name, ran.took));
        }
        Ok(match failures.as_str() {
            "" => Outcome::Ran(counts),
            _ => Outcome::Failed(counts.at_least_one_failed(), format!("tests failed\n{failures}")),
        })
    }

    /// Runs programs, so many at a time, and prints a line of each that ran tests.
    fn run_lanes(&self, programs: &[&Program], lanes: usize, skips: &SkipLog) -> Result<Vec<Ran>> {
        let next = AtomicUsize::new(0);
        let all = Mutex::new(Vec::with_capacity(programs.len()));
        let lane = || -> Result<()> {
            while let Some(program) = programs.get(next.fetch_add(1, Ordering::Relaxed)) {
                let ran = self.run_program(program, skips)?;
                all.lock().unwrap_or_else(PoisonError::into_inner).push(ran);
            }
            Ok(())
        };
        process::on_threads(0..lanes, |_| lane())?;
        Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn run_program(&self, program: &Program, skips: &SkipLog) -> Result<Ran> {
        let mut command = program.command();
        if let Some(filter) = self.filter.filter(|filter| !program.name.contains(filter)) {
            command.arg(filter);
        }
        if self.in_turn {
            command.arg("--test-threads=1");
        }
        self.observe(&program.name, &mut command, skips)
    }

    fn run_documentation(&self, skips: &SkipLog) -> Result<Ran> {
        let mut command = cargo();
        command
            .args(["test", "--quiet", "--locked", "--doc"])
            .args(self.packages);
        if let Some(filter) = self.filter {
            command.args(["--", filter]);
        }
        self.observe("documentation", &mut command, skips)
    }

    /// Runs a command to its end, prints what came of it, and reads its output.
    fn observe(&self, name: &str, command: &mut Command, skips: &SkipLog) -> Result<Ran> {
        let log = self.logs.join(format!("{}.log", name.replace([' ', '/'], "-")));
        let file = File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        command
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env(super::SKIP_LOG, skips.file())
            .stdout(file.try_clone()?)
            .stderr(file);
        let start = Instant::now();
        let mut child = Guarded::start(name, command, libc::SIGKILL)?;
        let status = loop {
            match child.wait(NOTICE) {
                Ok(status) => break status,
                Err(_) => println!(
                    "{name}: still running after {:.0} s; its output is in {}",
                    start.elapsed().as_secs_f64(),
                    log.display()
                ),
            }
        };
        let took = start.elapsed();
        let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
        let output = Output::of(&text);
        let counts = output.counts();
        let seconds = took.as_secs_f64();
        let problem = (!status.success()).then(|| process::reason(status));
        match &problem {
            // One piece, so that the lanes' lines do not mix.
            Some(problem) => println!("{text}\n{name}: FAILED ({problem}) after {seconds:.1} s"),
            None if counts == Counts::default() => {}
            None => println!("{name}: {} passed in {seconds:.1} s", counts.passed),
        }
        let problem = problem.map(|problem| match output.failures() {
            "" => format!("{problem}\n{}\n", end_of(&text)),
            _ => problem,
        });
        Ok(Ran {
            name: name.to_owned(),
            took,
            output,
            problem,
        })
    }
}
