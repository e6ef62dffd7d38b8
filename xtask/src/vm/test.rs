//! `cargo xtask vm test`: what is tested in guests, one boot each.

mod jobs;

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;

use jobs::{JOBS, Job, Program};

use super::{Ended, Guest, Series, failover, image::Image, test_program};
use crate::{demo, test::counts::Counts, workspace};

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
const LIMIT: Duration = Duration::from_secs(600);

/// Runs the tests in guests.
///
/// # Errors
/// If guests cannot be made here.
pub fn run(options: &Options) -> Result<ExitCode> {
    let counts = jobs(options)?;
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

/// Why no guest with this kernel can be made here, if none can.
#[must_use]
pub(crate) fn unavailable(series: Series) -> Option<String> {
    Image::get(series).err().map(|error| format!("{error:#}"))
}

/// The tests whose name contains the filter, with those kernels that can be had; the others are skipped by name. `None` where
/// no guest can be made.
///
/// # Errors
/// If a test cannot be built.
pub(crate) fn jobs(options: &Options) -> Result<Counts> {
    let mut counts = Counts::default();
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
            counts.add(job.run(series, options.verbose)?);
        }
    }
    Ok(counts)
}

impl Job {
    /// Runs the test once; what it says is shown when it is through and has failed, or as it comes if `verbose`.
    fn run(&self, series: Series, verbose: bool) -> Result<Counts> {
        match self.program {
            Program::Demo => return self.run_demo(series, verbose),
            Program::Failures { seed, cases } => return self.run_failures(series, (seed, cases), verbose),
            Program::Script(_) | Program::Cargo { .. } => {}
        }
        let start = Instant::now();
        let mut guest = Guest::new(series, Vec::new());
        guest.rdma = self.rdma;
        guest.mlx5 = self.mlx5;
        guest.mlx5_ports = self.ports;
        guest.verbose = verbose;
        guest.limit = LIMIT;
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
                let file: PathBuf = test_program(package, test)?;
                // One at a time: they share the guest's devices.
                let first = guest.add(&file)?;
                let words = [first.as_str(), "--ignored", "--test-threads=1"];
                words
                    .iter()
                    .chain(filters)
                    .map(|word| (*word).to_owned())
                    .collect()
            }
        };
        let (output, ended) = guest.output();
        let name = format!("{} on {}", self.name, series.name());
        let (counts, problem) = judge(self.program, &output, &ended);
        match &problem {
            None => println!(
                "vm: {name}: {} passed in {:.1} s",
                counts.passed,
                start.elapsed().as_secs_f64()
            ),
            Some(problem) => println!("{output}\nvm: {name}: FAILED: {problem}"),
        }
        if verbose && problem.is_none() {
            println!("{output}");
        }
        Ok(counts)
    }
}

impl Job {
    /// Runs a sample of failures: one test, however many cases.
    fn run_failures(&self, series: Series, (seed, cases): (u64, usize), verbose: bool) -> Result<Counts> {
        let start = Instant::now();
        let options = failover::Options::sample(series, seed, cases);
        let mut said = String::new();
        let ran = failover::run_cases(&options, &mut |line| said += &format!("{line}\n"));
        let name = format!("{} on {}", self.name, series.name());
        let (report, problem) = match ran {
            Ok((count, report, true)) if report["kernel_warnings"] == json!({}) => {
                if verbose {
                    println!("{said}");
                }
                println!(
                    "vm: {name}: {count} cases passed in {:.1} s",
                    start.elapsed().as_secs_f64()
                );
                return Ok(Counts::PASSED);
            }
            Ok((_, report, ok)) => {
                let problem = if ok { "the kernel warned" } else { "a case failed" };
                (report.to_string(), problem.to_owned())
            }
            Err(error) => (String::new(), format!("{error:#}")),
        };
        println!("{said}{report}\nvm: {name}: FAILED: {problem}");
        Ok(Counts {
            failed: 1,
            ..Counts::default()
        })
    }

    /// Runs the demo in a guest and looks at what the collector made of it.
    fn run_demo(&self, series: Series, verbose: bool) -> Result<Counts> {
        let artifacts = workspace::build()?;
        let start = Instant::now();
        let out = artifacts.target.join("vm-test");
        let mut said = String::new();
        let problems = demo::vm::traces(&artifacts, series, &out, &mut |line| said += &format!("{line}\n"))
            .and_then(|()| {
                let (lines, problems) =
                    demo::failover::look(&demo::failover::read(&out.join("trace.jsonl"))?);
                said += &lines.join("\n");
                Ok(problems)
            })
            .unwrap_or_else(|error| vec![format!("{error:#}")]);
        let name = format!("{} on {}", self.name, series.name());
        if verbose || !problems.is_empty() {
            println!("{said}");
        }
        if problems.is_empty() {
            println!("vm: {name}: 1 passed in {:.1} s", start.elapsed().as_secs_f64());
            return Ok(Counts::PASSED);
        }
        println!("vm: {name}: FAILED: {}", problems.join("; "));
        Ok(Counts {
            failed: 1,
            ..Counts::default()
        })
    }
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
        let shared = ["control", "links", "nodes"];
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
