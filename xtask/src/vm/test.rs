//! `cargo xtask vm test`: what is tested in guests, one boot each.

mod jobs;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use ringsight_testbed::{
    demo,
    vm::{Ended, Guest, Series, failover, unavailable},
    workspace::{self, test_program},
};

use jobs::{JOBS, Job, Program};

use crate::{
    setup,
    test::{counts::Counts, failures::end_of},
};

/// Options of `cargo xtask vm test`.
#[derive(Args, Clone, Debug, Default)]
pub struct Options {
    /// Only tests whose name contains this.
    filter: Option<String>,
    /// Only this kernel.
    #[arg(long, value_enum)]
    kernel: Option<Series>,
    /// Prints consoles and times.
    #[arg(long)]
    verbose: bool,
}

/// How long one of them may take: several times what the longest takes on an idle machine, which others may be at work on.
const LIMIT: Duration = Duration::from_secs(1500);
/// How long it may say nothing; each of a program's tests says that it has ended.
const QUIET: Duration = Duration::from_secs(360);

/// Runs the tests in guests.
///
/// # Errors
/// If guests cannot be made here.
pub fn run(options: &Options) -> Result<ExitCode> {
    let (counts, _) = jobs(options)?;
    println!(
        "\n{} passed, {} failed, {} skipped",
        counts.passed, counts.failed, counts.skipped
    );
    if counts.passed == 0 && counts.failed == 0 {
        bail!(
            "no test in a guest is called {}",
            options.filter.as_deref().unwrap_or_default()
        );
    }
    Ok(if counts.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The tests whose name contains the filter, with those kernels that can be had; the others are skipped by name. What of those failed: a
/// line of each with its problem, and the end of what it said.
///
/// # Errors
/// If a test cannot be built.
pub(crate) fn jobs(options: &Options) -> Result<(Counts, Vec<String>)> {
    let mut counts = Counts::default();
    let mut failures = Vec::new();
    for series in Series::ALL {
        if options.kernel.is_some_and(|only| only != series) {
            continue;
        }
        let jobs: Vec<_> = JOBS
            .iter()
            .filter(|job| job.kernels.contains(&series))
            .filter(|job| {
                options
                    .filter
                    .as_deref()
                    .is_none_or(|filter| job.name.contains(filter))
            })
            .collect();
        if jobs.is_empty() {
            continue;
        }
        if let Some(why) = unavailable(series) {
            for job in jobs {
                println!("vm: {} on {}: skipped: {why}", job.name, series.name());
                counts.skipped += 1;
            }
            continue;
        }
        for job in jobs {
            let start = Instant::now();
            let ran = job.run(series, options.verbose)?;
            let name = format!("{} on {}", job.name, series.name());
            if options.verbose || ran.problem.is_some() {
                println!("{}", ran.said);
            }
            match ran.problem {
                None => println!(
                    "vm: {name}: {} passed in {:.1} s",
                    ran.counts.passed,
                    start.elapsed().as_secs_f64()
                ),
                Some(problem) => {
                    println!("vm: {name}: FAILED: {problem}");
                    failures.push(format!("{name}: {problem}\n{}", end_of(&ran.said)));
                }
            }
            counts.add(ran.counts);
        }
    }
    Ok((counts, failures))
}

/// What came of a test.
struct Ran {
    counts: Counts,
    /// What was wrong, if anything.
    problem: Option<String>,
    said: String,
}

impl Ran {
    /// One test, however much it looks at.
    fn one(said: String, problem: Option<String>) -> Self {
        let counts = match problem {
            None => Counts::PASSED,
            Some(_) => Counts {
                failed: 1,
                ..Counts::default()
            },
        };
        Self {
            counts,
            problem,
            said,
        }
    }
}

impl Job {
    fn run(&self, series: Series, verbose: bool) -> Result<Ran> {
        match self.program {
            Program::Demo => return run_demo(series),
            Program::Failures { seed, cases } => return Ok(run_failures(series, seed, cases)),
            Program::Script(_) | Program::Cargo { .. } => {}
        }
        let mut guest = Guest::new(series, Vec::new());
        guest.rdma = self.rdma;
        guest.mlx5 = self.mlx5;
        guest.mlx5_ports = self.ports;
        guest.verbose = verbose;
        (guest.limit, guest.quiet) = (LIMIT, Some(QUIET));
        guest.program = match self.program {
            Program::Demo | Program::Failures { .. } => Vec::new(),
            Program::Script(name) => {
                let folder = workspace::root().join("vm/tests");
                guest.add(&folder.join("lib.sh"))?;
                let file = folder.join(name);
                vec!["/bin/sh".to_owned(), "-ex".to_owned(), guest.add(&file)?]
            }
            Program::Cargo {
                package,
                test,
                filters,
            } => {
                // One at a time: they share the guest's devices.
                let first = guest.add_test(&test_program(package, test)?)?;
                let words = [first.as_str(), "--ignored", "--test-threads=1"];
                words
                    .iter()
                    .chain(filters)
                    .map(|word| (*word).to_owned())
                    .collect()
            }
        };
        let (said, ended) = guest.output();
        let (counts, problem) = judge(self.program, &said, &ended);
        Ok(Ran {
            counts,
            problem,
            said,
        })
    }
}

/// A sample of failures.
fn run_failures(series: Series, seed: u64, cases: usize) -> Ran {
    let options = failover::Options::sample(series, seed, cases);
    let mut said = String::new();
    let ran = failover::run_cases(&options, &mut |line| said += &format!("{line}\n"));
    let problem = match ran {
        Ok((_, report, ok)) => {
            said += &report.to_string();
            (!ok).then(|| "a case failed".to_owned())
        }
        Err(error) => Some(format!("{error:#}")),
    };
    Ran::one(said, problem)
}

/// The demo in a guest, and a look at what the collector made of it.
fn run_demo(series: Series) -> Result<Ran> {
    let artifacts = setup::build()?;
    let out = artifacts.target.join("vm-test");
    let mut said = String::new();
    let problems = demo::vm::traces(&artifacts, series, &out, &mut |line| said += &format!("{line}\n"))
        .and_then(|()| {
            let (lines, problems) = demo::failover::look(&demo::failover::read(&out.join("trace.jsonl"))?);
            said += &lines.join("\n");
            Ok(problems)
        })
        .unwrap_or_else(|error| vec![format!("{error:#}")]);
    Ok(Ran::one(
        said,
        (!problems.is_empty()).then(|| problems.join("; ")),
    ))
}

/// What a run came to, and what was wrong with it.
fn judge(program: Program, output: &str, ended: &Result<Ended>) -> (Counts, Option<String>) {
    let mut counts = match program {
        Program::Script(_) | Program::Demo | Program::Failures { .. } => Counts::PASSED,
        Program::Cargo { .. } => {
            output
                .lines()
                .filter_map(Counts::of_line)
                .fold(Counts::default(), |mut sum, more| {
                    sum.add(more);
                    sum
                })
        }
    };
    let problem = match ended {
        Err(error) => Some(format!("{error:#}")),
        Ok(ended) if ended.code != 0 => Some(format!("exit code {}", ended.code)),
        Ok(ended) if ended.warnings > 0 => Some(format!(
            "the kernel warned {} times:\n{}",
            ended.warnings,
            ended.warning_text().unwrap_or_default()
        )),
        Ok(_) if counts.passed == 0 => Some("no test ran".to_owned()),
        Ok(_) => None,
    };
    if problem.is_some() {
        counts.failed = counts.failed.max(1);
        if matches!(program, Program::Script(_)) {
            counts.passed = 0;
        }
    }
    (counts, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(code: u8, warnings: u64) -> Result<Ended> {
        Ok(Ended {
            code,
            warnings,
            console: "@@KWARN 1\nWARNING: x\n@@EXIT".to_owned(),
        })
    }

    #[test]
    fn a_run_passes_only_with_its_tests_its_code_and_a_quiet_kernel() {
        let script = Program::Script("x");
        assert_eq!(judge(script, "", &ended(0, 0)), (Counts::PASSED, None));
        for bad in [ended(1, 0), ended(0, 1), Err(anyhow::anyhow!("died"))] {
            let (counts, problem) = judge(script, "", &bad);
            assert!(counts.failed == 1 && counts.passed == 0 && problem.is_some());
        }
        let test = Program::Cargo {
            package: "p",
            test: "t",
            filters: &[],
        };
        let line = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out";
        assert_eq!(judge(test, line, &ended(0, 0)).0.passed, 3);
        // A test program that ran nothing has shown nothing.
        let (counts, problem) = judge(
            test,
            "test result: ok. 0 passed; 0 failed; 0 ignored",
            &ended(0, 0),
        );
        assert!(counts.failed == 1 && problem.is_some());
    }

    #[test]
    fn no_module_of_a_test_that_is_run_in_parts_is_left_out() {
        let filters: Vec<&str> = JOBS
            .iter()
            .filter_map(|job| match job.program {
                Program::Cargo {
                    test: "rdma",
                    filters,
                    ..
                } => Some(filters),
                _ => None,
            })
            .flatten()
            .copied()
            .collect();
        // What the others use, and no test.
        let shared = ["links", "nodes", "shared"];
        for entry in std::fs::read_dir(workspace::root().join("comm/tests/rdma")).unwrap() {
            let path = entry.unwrap().path();
            let module = path.file_stem().and_then(|name| name.to_str()).unwrap();
            let is_run = filters.contains(&format!("rdma::{module}").as_str());
            assert!(is_run != shared.contains(&module), "{module}");
        }
    }

    #[test]
    fn every_script_of_a_job_is_there() {
        for job in JOBS {
            if let Program::Script(name) = job.program {
                assert!(workspace::root().join("vm/tests").join(name).is_file(), "{name}");
            }
        }
    }
}
