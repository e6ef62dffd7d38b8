//! The layers of a run, in their order: what each runs in the fast tier, and what it leaves to `--full`.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use anyhow::{Result, bail};
use ringsight_testbed::{
    backend::VARIABLE as JAEGER,
    demo,
    faults::SOAKED_SEED,
    machine::c_toolchain,
    process,
    vm::{Series, unavailable, verbs_headers},
    workspace::{cargo, root},
};

use super::{
    CHROMIUM, FULL, check, guests,
    libtest::Counts,
    programs::Tests,
    suite::{Outcome, Report},
};
use crate::{dist, ebpf, setup};

/// Environment variable that names a folder of NVIDIA's headers to the tests.
const NCCL_INCLUDE: &str = "RINGSIGHT_NCCL_INCLUDE";
/// The same of libibverbs' headers.
const VERBS_INCLUDE: &str = "RINGSIGHT_VERBS_INCLUDE";
/// Environment variable that says to the tests of leaks that a leak checker looks at them.
const LEAK_CHECKER: &str = "RINGSIGHT_TEST_LEAK_CHECKER";
/// What those are built for.
const CHECKED: &str = "x86_64-unknown-linux-gnu";

/// How much of a layer the fast tier runs.
enum Tier {
    /// All of it.
    Fast,
    /// A sample: what is left out, and why.
    Sample(&'static str, &'static str),
    /// Guests: their jobs say which are left out.
    Guests,
    /// Nothing: why.
    Full(&'static str),
}

/// What has to be there before a layer runs.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Needs {
    Nothing,
    /// The compilers: everything that compiles `ringsight-probes` needs them, which holds the eBPF object.
    Toolchain,
    /// The programs of `--release`.
    Release,
}

/// A layer of tests.
pub(super) struct Layer {
    pub(super) name: &'static str,
    /// Whether a filter may name tests inside it.
    pub(super) holds_tests: bool,
    tier: Tier,
    pub(super) needs: Needs,
    pub(super) run: fn(&Run, &mut Report) -> Result<Outcome>,
}

/// What layers are told of the run.
pub(super) struct Run {
    /// Whether nothing is sampled.
    pub(super) full: bool,
    /// Only tests whose name contains this.
    pub(super) filter: Option<String>,
    /// Cargo's target folder.
    pub(super) target: PathBuf,
}

impl Layer {
    /// A layer that the fast tier runs whole, and that no filter reaches into.
    const fn new(name: &'static str, needs: Needs, run: fn(&Run, &mut Report) -> Result<Outcome>) -> Self {
        Self {
            name,
            holds_tests: false,
            tier: Tier::Fast,
            needs,
            run,
        }
    }

    const fn holding_tests(self) -> Self {
        Self {
            holds_tests: true,
            ..self
        }
    }

    const fn tier(self, tier: Tier) -> Self {
        Self { tier, ..self }
    }

    pub(super) fn is_full_only(&self) -> bool {
        matches!(self.tier, Tier::Full(_))
    }

    /// What only `--full` runs of it, and why.
    pub(super) fn left_out(&self) -> Vec<(String, String)> {
        let of = |(what, why): (String, &str)| (format!("{}: {what}", self.name), why.to_owned());
        match self.tier {
            Tier::Fast => Vec::new(),
            Tier::Sample(what, why) => vec![of((what.to_owned(), why))],
            Tier::Guests => guests::left_out().into_iter().map(of).collect(),
            Tier::Full(why) => vec![(self.name.to_owned(), why.to_owned())],
        }
    }
}

/// All layers, in the order in which they run: what fails soonest is first.
pub(super) static LAYERS: [Layer; 16] = [
    Layer::new("format", Needs::Nothing, format),
    Layer::new("ebpf objects", Needs::Toolchain, ebpf_objects),
    Layer::new("kernels", Needs::Toolchain, kernels),
    Layer::new("clippy", Needs::Toolchain, clippy),
    Layer::new("docs", Needs::Toolchain, docs),
    Layer::new("unit and integration", Needs::Toolchain, unit_and_integration)
        .holding_tests()
        .tier(Tier::Sample(
            "each case of comm's matrix, 200 random groups",
            "a sample by a fixed seed runs each kind of call",
        )),
    Layer::new("loom model", Needs::Nothing, loom),
    Layer::new("leaks", Needs::Toolchain, leaks).tier(Tier::Full(
        "the same tests run without the checker, and compare threads, descriptors, mappings and memory",
    )),
    Layer::new("vm", Needs::Toolchain, guests).tier(Tier::Guests),
    Layer::new("demo", Needs::Release, |_, _| check_demo(&[])),
    Layer::new("demo, nobody slow", Needs::Release, |_, _| {
        check_demo(&["--no-slow"])
    }),
    Layer::new("faults", Needs::Release, |run, _| check_faults(run.full)).tier(Tier::Sample(
        "20 rounds of each fault, drawn anew",
        "two rounds by pages and one by events run each fault, by a fixed seed",
    )),
    Layer::new("soak", Needs::Release, |run, _| check_soak(run.full)).tier(Tier::Full(
        "it looks for verdicts that are false once in many minutes",
    )),
    Layer::new("end to end", Needs::Release, end_to_end)
        .holding_tests()
        .tier(Tier::Sample(
            "ten minutes of random content beside an honest job",
            "ten seconds write each kind of content, by a fresh seed",
        )),
    Layer::new("dist", Needs::Release, |_, _| {
        dist::check().map(|()| Outcome::Ran(Counts::PASSED))
    }),
    Layer::new("bench", Needs::Release, |_, _| bench())
        .tier(Tier::Full("its goals hold on a machine that does nothing else")),
];

/// Installs the compilers.
pub(super) fn set_up() -> Result<()> {
    setup::ebpf_toolchain()?;
    c_toolchain()
}

fn format(_: &Run, _: &mut Report) -> Result<Outcome> {
    process::run(cargo().args(["fmt", "--all", "--check"]))?;
    if root().join("probes/ebpf/Cargo.toml").is_file() {
        process::run(cargo().args(["fmt", "--manifest-path", "probes/ebpf/Cargo.toml", "--check"]))?;
    }
    Ok(Outcome::Ran(Counts::PASSED))
}

/// Builds the eBPF programs and compares them with the committed objects.
fn ebpf_objects(_: &Run, _: &mut Report) -> Result<Outcome> {
    let Some(difference) = ebpf::check()? else {
        return Ok(Outcome::Ran(Counts::PASSED));
    };
    match difference.other_tools {
        // Another compiler may make other instructions of unchanged sources.
        Some(tools) => Ok(Outcome::Skipped(format!(
            "other tools than those of the committed objects: {tools}"
        ))),
        None => bail!("{difference}"),
    }
}

fn kernels(_: &Run, _: &mut Report) -> Result<Outcome> {
    match setup::nvcc() {
        Ok(_) => check(cargo().args(["build", "--locked", "-p", "ringsight-kernels"])),
        // All but the CUDA device is built and tested without them.
        Err(error) => Ok(Outcome::Skipped(format!("{error:#}"))),
    }
}

fn clippy(_: &Run, _: &mut Report) -> Result<Outcome> {
    let words = [
        "clippy",
        "--workspace",
        "--all-targets",
        "--locked",
        "--",
        "-D",
        "warnings",
    ];
    check(cargo().args(words))
}

fn docs(_: &Run, _: &mut Report) -> Result<Outcome> {
    let words = ["doc", "--workspace", "--no-deps", "--locked"];
    check(cargo().args(words).env("RUSTDOCFLAGS", "-D warnings"))
}

/// The Chromium that tests of the page use, looked for once.
fn chromium() -> Option<&'static Path> {
    static CHROMIUM: OnceLock<Option<PathBuf>> = OnceLock::new();
    CHROMIUM.get_or_init(|| setup::chromium().ok()).as_deref()
}

/// Variables by which tests find Chromium and the tools that are given. A tool that is not there is named, and the tests that
/// want it skip themselves.
fn tools(wanted: Vec<(&'static str, Result<PathBuf>)>) -> Vec<(&'static str, OsString)> {
    let mut variables: Vec<(&'static str, OsString)> = chromium()
        .map(|path| (CHROMIUM, path.into()))
        .into_iter()
        .collect();
    for (variable, found) in wanted {
        match found {
            Ok(path) => variables.push((variable, path.into())),
            Err(error) => println!("no {variable}: {error:#}"),
        }
    }
    variables
}

fn unit_and_integration(run: &Run, report: &mut Report) -> Result<Outcome> {
    let mut environment = tools(vec![
        (NCCL_INCLUDE, setup::nvidia_headers()),
        (VERBS_INCLUDE, verbs_headers()),
    ]);
    if run.full {
        environment.push((FULL, "1".into()));
    }
    let tests = Tests {
        packages: &["--workspace", "--exclude", "ringsight-tests"],
        filter: run.filter.as_deref(),
        environment,
        logs: run.target.join("test-logs"),
        in_turn: false,
    };
    tests.run(report)
}

fn loom(run: &Run, report: &mut Report) -> Result<Outcome> {
    let mut command = cargo();
    command
        .args([
            "test",
            "--release",
            "--locked",
            "-p",
            "ringsight-records",
            "--lib",
            "model",
        ])
        // Other flags compile everything anew: kept apart from the other layers' builds.
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_TARGET_DIR", run.target.join("loom"));
    report.cargo_test(&mut command)
}

/// Whether the toolchain has the runtime of a leak checker.
fn has_leak_checker() -> Result<bool> {
    let sysroot = process::output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let libraries = Path::new(&sysroot).join(format!("lib/rustlib/{CHECKED}/lib"));
    let is_runtime = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().ends_with("_rt.lsan.a");
    Ok(std::fs::read_dir(libraries).is_ok_and(|entries| entries.flatten().any(is_runtime)))
}

/// Communicators and graphs that come and go under LeakSanitizer; with `--full` ten times as many.
pub(super) fn leaks(run: &Run, report: &mut Report) -> Result<Outcome> {
    if !has_leak_checker()? {
        return Ok(Outcome::Skipped(
            "this Rust toolchain has no LeakSanitizer".to_owned(),
        ));
    }
    let mut command = cargo();
    command
        .args(["test", "--locked", "-p", "ringsight-comm", "--test", "leaks"])
        // Named, so that only what runs there is built for the checker, and not what builds it.
        .args(["--target", CHECKED])
        // The toolchain brings the checker's runtime along; the flag that asks for it is not stable.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=leak")
        .env("CARGO_TARGET_DIR", run.target.join("leaks"))
        .env(LEAK_CHECKER, "1");
    if run.full {
        command.env(FULL, "1");
    }
    report.cargo_test(&mut command)
}

fn guests(run: &Run, report: &mut Report) -> Result<Outcome> {
    let selection = match run.full {
        true => guests::Selection::All,
        false => guests::Selection::Fast,
    };
    run_guests(selection, report)
}

/// Runs the guests' jobs that are selected; skipped if no kernel can be had.
pub(super) fn run_guests(selection: guests::Selection, report: &mut Report) -> Result<Outcome> {
    // What is for one kernel alone that cannot be had is skipped by name.
    let kernels = Series::ALL.into_iter();
    if let Some(why) = kernels.map(unavailable).collect::<Option<Vec<_>>>() {
        return Ok(Outcome::Skipped(why.join("; ")));
    }
    let ran = guests::jobs(selection, &guests::Options::default())?;
    for step in ran.steps {
        report.step(step);
    }
    Ok(match ran.counts.failed {
        0 => Outcome::Ran(ran.counts),
        _ => Outcome::Failed(ran.counts, ran.failures.join("\n")),
    })
}

/// Runs the demo with `--check` in a process of its own: what it leaves behind would show in this one's exit.
fn check_demo(more: &[&str]) -> Result<Outcome> {
    let mut command = Command::new(process::own_executable()?);
    command
        .args(["demo", "--check", "--ranks", "4", "--steps", "60", "--seed", "7"])
        .args(more)
        .current_dir(root());
    let mut last = String::new();
    let status = process::stream(&mut command, |line| line.clone_into(&mut last))?;
    let report: demo::check::Report = match serde_json::from_str(&last) {
        Ok(report) => report,
        Err(error) => bail!("the demo's last line is no report ({error}): {last}"),
    };
    if !status.success() || !report.ok {
        bail!("the demo found: {}", report.problems.join("; "));
    }
    Ok(Outcome::Ran(Counts::PASSED))
}

/// Rounds of each fault in the fast tier, by what tells the watchdog how far operations are.
const SAMPLED: [(&str, &str); 2] = [("pages", "2"), ("events", "1")];

/// Seed of the fast tier's rounds: the same rounds each time, so that a change is judged by what it changes. The whole matrix
/// is drawn anew each time.
const SAMPLED_SEED: &str = "20261122";

fn check_faults(full: bool) -> Result<Outcome> {
    if full {
        return faults(&["--full"]);
    }
    for (source, rounds) in SAMPLED {
        faults(&["--source", source, "--rounds", rounds, "--seed", SAMPLED_SEED])?;
    }
    Ok(Outcome::Ran(Counts::PASSED))
}

/// Runs `faults`, which prints its seed, with which it can be run again.
pub(super) fn faults(arguments: &[&str]) -> Result<Outcome> {
    check(
        Command::new(process::own_executable()?)
            .args(["faults", "--check"])
            .args(arguments)
            .current_dir(root()),
    )
}

/// Minutes of a soak by each source where `--full` is not given; with it, as many as a soak has by default.
const SOAKED: &str = "0.33";

fn check_soak(full: bool) -> Result<Outcome> {
    match full {
        true => soak(&[]),
        false => soak(&[SOAKED, "--seed", &SOAKED_SEED.to_string()]),
    }
}

/// Lets ranks be slow and pause, by each source of the watchdog, for as long as `arguments` say.
pub(super) fn soak(arguments: &[&str]) -> Result<Outcome> {
    for (source, _) in SAMPLED {
        faults(&[&["--source", source, "--soak"], arguments].concat())?;
    }
    Ok(Outcome::Ran(Counts::PASSED))
}

fn end_to_end(run: &Run, report: &mut Report) -> Result<Outcome> {
    let mut environment = tools(vec![(JAEGER, setup::jaeger())]);
    if run.full {
        environment.push((FULL, "1".into()));
    }
    let tests = Tests {
        packages: &["-p", "ringsight-tests"],
        filter: run.filter.as_deref(),
        environment,
        logs: run.target.join("test-logs"),
        // Each starts a job of several processes and checks times.
        in_turn: true,
    };
    tests.run(report)
}

fn bench() -> Result<Outcome> {
    check(
        Command::new(process::own_executable()?)
            .args(["bench", "--check"])
            .current_dir(root()),
    )
}
