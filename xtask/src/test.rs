//! `cargo xtask test`: every layer of tests that this machine can run.

use std::{
    fs,
    path::Path,
    process::{Command, ExitCode},
    time::Instant,
};

use anyhow::{Result, bail};
use clap::Args;
use ringsight_testbed::{
    backend::VARIABLE as JAEGER,
    demo,
    faults::SOAKED_SEED,
    machine::c_toolchain,
    process,
    vm::{Series, unavailable, verbs_headers},
    workspace::{self, cargo, root},
};

pub(crate) mod counts;
pub(crate) mod failures;
mod suite;

use counts::Counts;
use suite::{Outcome, SkipLog, Suite};

use crate::{dist, setup, vm};

/// What to test.
#[derive(Args, Debug)]
pub struct Options {
    /// Also what takes longer: whole matrices instead of samples, benchmarks against their goals.
    #[arg(long)]
    full: bool,
    /// Only layers, or tests within the layers of tests, whose name contains this.
    filter: Option<String>,
}

/// Environment variable that names the file to which tests append what they skipped, one `name: reason` a line.
pub const SKIP_LOG: &str = "RINGSIGHT_SKIP_LOG";
/// Environment variable that makes tests which sample check everything.
pub const FULL: &str = "RINGSIGHT_TEST_FULL";
/// Environment variable with the path of a Chromium binary, for the tests that look at the page.
pub const CHROMIUM: &str = "RINGSIGHT_CHROMIUM";
/// Environment variable that names a folder of NVIDIA's headers to the tests.
const NCCL_INCLUDE: &str = "RINGSIGHT_NCCL_INCLUDE";
/// The same of libibverbs' headers.
const VERBS_INCLUDE: &str = "RINGSIGHT_VERBS_INCLUDE";

/// Environment variable that says to the tests of leaks that a leak checker looks at them.
const LEAK_CHECKER: &str = "RINGSIGHT_TEST_LEAK_CHECKER";
/// What those are built for.
const CHECKED: &str = "x86_64-unknown-linux-gnu";

fn check(command: &mut Command) -> Result<Outcome> {
    process::run(command)?;
    Ok(Outcome::Ran(Counts::PASSED))
}

fn has_loom_model() -> bool {
    fs::read_to_string(root().join("probes/records/Cargo.toml"))
        .is_ok_and(|manifest| manifest.contains("loom"))
}

/// Whether the toolchain has the runtime of a leak checker.
fn has_leak_checker() -> Result<bool> {
    let output = Command::new("rustc").args(["--print", "sysroot"]).output()?;
    let sysroot = String::from_utf8(output.stdout)?;
    let libraries = Path::new(sysroot.trim()).join(format!("lib/rustlib/{CHECKED}/lib"));
    let is_runtime = |entry: fs::DirEntry| entry.file_name().to_string_lossy().ends_with("_rt.lsan.a");
    Ok(fs::read_dir(libraries).is_ok_and(|entries| entries.flatten().any(is_runtime)))
}

/// Runs the layers.
///
/// # Errors
/// If not even the first can be begun; failures of layers make the exit code.
pub fn run(options: &Options) -> Result<ExitCode> {
    let start = Instant::now();
    let target = workspace::target()?;
    fs::create_dir_all(&target)?;
    let skips = target.join(format!("skipped-{}.log", std::process::id()));
    let mut suite = Suite::new(options.filter.clone(), SkipLog::new(skips));
    layers(&mut suite, options, &target);
    let good = suite.close_after(start);
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn layers(suite: &mut Suite, options: &Options, target: &Path) {
    suite.layer("format", false, |_| {
        process::run(cargo().args(["fmt", "--all", "--check"]))?;
        if root().join("probes/ebpf/Cargo.toml").is_file() {
            process::run(cargo().args(["fmt", "--manifest-path", "probes/ebpf/Cargo.toml", "--check"]))?;
        }
        Ok(Outcome::Ran(Counts::PASSED))
    });
    // Everything after this compiles `ringsight-probes`, which holds the eBPF object.
    let mut toolchain = Ok(());
    if options.filter.as_deref() != Some("format") {
        toolchain = setup::ebpf_toolchain().and_then(|()| c_toolchain());
    }
    if let Err(error) = toolchain {
        suite.layer("set-up", true, |_| Err(error));
        return;
    }
    suite.layer("kernels", false, |_| match setup::nvcc() {
        Ok(_) => check(cargo().args(["build", "--locked", "-p", "ringsight-kernels"])),
        // All but the CUDA device is built and tested without them.
        Err(error) => Ok(Outcome::Skipped(format!("{error:#}"))),
    });
    suite.layer("clippy", false, |_| {
        check(cargo().args([
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--",
            "-D",
            "warnings",
        ]))
    });
    suite.layer("docs", false, |_| {
        check(
            cargo()
                .args(["doc", "--workspace", "--no-deps", "--locked"])
                .env("RUSTDOCFLAGS", "-D warnings"),
        )
    });
    let chromium = setup::chromium();
    let skips = suite.skips().clone();
    suite.layer("unit and integration", true, |filter| {
        let mut command = cargo();
        command.args([
            "test",
            "--workspace",
            "--exclude",
            "ringsight-tests",
            "--locked",
            "--no-fail-fast",
        ]);
        if let Ok(chromium) = &chromium {
            command.env(CHROMIUM, chromium);
        }
        match setup::nvidia_headers() {
            Ok(headers) => {
                command.env(NCCL_INCLUDE, headers);
            }
            Err(error) => println!("no NVIDIA headers: {error:#}"),
        }
        match verbs_headers() {
            Ok(headers) => {
                command.env(VERBS_INCLUDE, headers);
            }
            Err(error) => println!("no headers of libibverbs: {error:#}"),
        }
        if options.full {
            // The whole of what is sampled otherwise.
            command.env(FULL, "1");
        }
        skips.cargo_test(&mut command, filter)
    });
    suite.layer("loom model", false, |_| {
        if !has_loom_model() {
            return Ok(Outcome::Skipped("ringsight-records has no loom model".to_owned()));
        }
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
            .env("CARGO_TARGET_DIR", target.join("loom"));
        skips.cargo_test(&mut command, None)
    });
    suite.layer("leaks", false, |_| {
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
            .env("CARGO_TARGET_DIR", target.join("leaks"))
            .env(LEAK_CHECKER, "1");
        if options.full {
            command.env(FULL, "1");
        }
        skips.cargo_test(&mut command, None)
    });
    end_to_end_layers(suite, &skips, options, chromium.ok().as_deref());
}

fn end_to_end_layers(suite: &mut Suite, skips: &SkipLog, options: &Options, chromium: Option<&Path>) {
    suite.layer("vm", false, |_| {
        // What is for one kernel alone that cannot be had is skipped by name.
        let kernels = Series::ALL.into_iter();
        if let Some(why) = kernels.map(unavailable).collect::<Option<Vec<_>>>() {
            return Ok(Outcome::Skipped(why.join("; ")));
        }
        let (counts, failures) = vm::test::jobs(&vm::test::Options::default())?;
        if counts.failed > 0 {
            return Ok(Outcome::Failed(counts, failures.join("\n")));
        }
        Ok(Outcome::Ran(counts))
    });
    suite.layer("release build", true, |filter| {
        setup::build()?;
        Ok(Outcome::Ran(if filter.is_some() {
            Counts::default()
        } else {
            Counts::PASSED
        }))
    });
    if suite.has_just_failed() {
        return;
    }
    suite.layer("demo", false, |_| check_demo(&[]));
    suite.layer("demo, nobody slow", false, |_| check_demo(&["--no-slow"]));
    suite.layer("faults", false, |_| check_faults(options.full));
    suite.layer("soak", false, |_| soak(options.full));
    let jaeger = setup::jaeger();
    suite.layer("end to end", true, |filter| {
        let mut command = cargo();
        // One at a time: each starts a job of several processes and checks times.
        command.args([
            "test",
            "--locked",
            "--no-fail-fast",
            "-p",
            "ringsight-tests",
            "--",
            "--test-threads=1",
        ]);
        if let Ok(jaeger) = &jaeger {
            command.env(JAEGER, jaeger);
        }
        if let Some(chromium) = chromium {
            command.env(CHROMIUM, chromium);
        }
        skips.cargo_test(&mut command, filter)
    });
    suite.layer("dist", false, |_| {
        dist::check()?;
        Ok(Outcome::Ran(Counts::PASSED))
    });
    if options.full {
        suite.layer("bench", false, |_| {
            let status = process::stream(
                Command::new(process::own_executable()?)
                    .args(["bench", "--check"])
                    .current_dir(root()),
                |_| (),
            )?;
            if !status.success() {
                bail!("a benchmark missed its goal");
            }
            Ok(Outcome::Ran(Counts::PASSED))
        });
    }
}

/// Rounds of each fault where not the whole matrix is run, by what tells the watchdog how far operations are.
const SAMPLED: [(&str, &str); 2] = [("pages", "2"), ("events", "1")];

/// What the sample is drawn by: the same rounds each time, so that a change is judged by what it changes. The whole matrix is drawn
/// anew each time.
const SAMPLED_SEED: &str = "20261122";

/// Runs the fault matrix, or a sample of it.
fn check_faults(full: bool) -> Result<Outcome> {
    if full {
        return faults(&["--full"]);
    }
    for (source, rounds) in SAMPLED {
        faults(&["--source", source, "--rounds", rounds, "--seed", SAMPLED_SEED])?;
    }
    Ok(Outcome::Ran(Counts::PASSED))
}

/// Minutes of a soak by each source; in full as many as it has by default.
const SOAKED: &str = "0.33";

/// Lets ranks be slow and pause.
fn soak(full: bool) -> Result<Outcome> {
    let seed = SOAKED_SEED.to_string();
    for (source, _) in SAMPLED {
        let mut arguments = vec!["--source", source, "--soak"];
        if !full {
            arguments.extend([SOAKED, "--seed", &seed]);
        }
        faults(&arguments)?;
    }
    Ok(Outcome::Ran(Counts::PASSED))
}

/// Runs `faults`, which prints its seed, with which it can be run again.
fn faults(arguments: &[&str]) -> Result<Outcome> {
    check(
        Command::new(process::own_executable()?)
            .args(["faults", "--check"])
            .args(arguments)
            .current_dir(root()),
    )
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
