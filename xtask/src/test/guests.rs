//! `cargo xtask vm test`: jobs in guests. Jobs that want the same devices and kernel share a boot.
//!
//! A boot runs its jobs one after the other; each leaves all ports active, or has failed. Where a guest dies, the job that ran
//! has failed, and another guest runs the jobs that are left. Where the emulator broke the guest, the job runs again.

mod boot;
mod jobs;

use anyhow::{Result, bail};
use clap::Args;
use ringsight_testbed::{
    demo,
    vm::{Series, failover, unavailable},
};

use boot::{Boot, Ran};
use jobs::{JOBS, Job, Program};

use crate::{
    setup,
    test::{
        libtest::{Counts, end_of},
        suite::Step,
    },
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

/// Which jobs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Selection {
    /// All of them, with each of their kernels.
    All,
    /// Those of the fast tier.
    Fast,
    /// Those that only `--full` runs, of this group and with this kernel.
    Left(&'static str, Series),
}

impl Selection {
    fn has(self, job: &Job, kernel: Series) -> bool {
        job.kernels.contains(&kernel)
            && match self {
                Self::All => true,
                Self::Fast => job.is_fast(kernel),
                Self::Left(group, only) => group == job.group && only == kernel && !job.is_fast(kernel),
            }
    }
}

/// What only `--full` runs, and why: jobs with the same reason together.
pub(crate) fn left_out() -> Vec<(String, &'static str)> {
    let mut left: Vec<(String, &'static str)> = Vec::new();
    for (job, kernel) in all() {
        let Some(why) = job.left_out(kernel) else {
            continue;
        };
        let name = format!("{} on {kernel}", job.name);
        match left.iter_mut().find(|(_, known)| *known == why) {
            Some((names, _)) => *names += &format!("; {name}"),
            None => left.push((name, why)),
        }
    }
    left
}

/// Each job with each of its kernels, by kernel.
fn all() -> impl Iterator<Item = (&'static Job, Series)> {
    Series::ALL.into_iter().flat_map(|kernel| {
        JOBS.iter()
            .filter(move |job| job.kernels.contains(&kernel))
            .map(move |job| (job, kernel))
    })
}

/// Runs the tests in guests.
pub fn run(options: &Options) -> Result<bool> {
    let Report { counts, .. } = jobs(Selection::All, options)?;
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
    Ok(counts.failed == 0)
}

/// What came of the selected jobs.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) counts: Counts,
    /// Of each that failed a line with its problem, and the end of its output.
    pub(crate) failures: Vec<String>,
    /// The time of each.
    pub(crate) steps: Vec<Step>,
}

impl Report {
    fn add(&mut self, name: &str, ran: &Ran, verbose: bool) {
        if verbose || ran.problem.is_some() {
            println!("{}", ran.output);
        }
        match &ran.problem {
            None => println!(
                "vm: {name}: {} passed in {:.1} s",
                ran.counts.passed,
                ran.took.as_secs_f64()
            ),
            Some(problem) => {
                println!("vm: {name}: FAILED: {problem}");
                self.failures
                    .push(format!("{name}: {problem}\n{}", end_of(&ran.output)));
            }
        }
        self.counts.add(ran.counts);
        self.steps.push(Step::new(name, ran.took));
    }
}

/// Runs the selected jobs whose name contains the filter, with those kernels that can be had; the others are skipped by name.
pub(crate) fn jobs(selection: Selection, options: &Options) -> Result<Report> {
    let mut report = Report::default();
    for kernel in Series::ALL {
        if options.kernel.is_some_and(|only| only != kernel) {
            continue;
        }
        let filter = options.filter.as_deref();
        let jobs: Vec<&Job> = JOBS
            .iter()
            .filter(|job| selection.has(job, kernel))
            .filter(|job| filter.is_none_or(|filter| job.name.contains(filter)))
            .collect();
        if jobs.is_empty() {
            continue;
        }
        if let Some(why) = unavailable(kernel) {
            for job in jobs {
                println!("vm: {} on {kernel}: skipped: {why}", job.name);
                report.counts.skipped += 1;
            }
            continue;
        }
        for boot in Boot::cut(&jobs, kernel) {
            boot.run(options.verbose, &mut |job, ran| {
                report.add(&format!("{} on {kernel}", job.name), ran, options.verbose);
            })?;
        }
    }
    Ok(report)
}

/// A sample of ports that fail, which boots its own guests.
fn run_failures(series: Series, seed: u64, cases: usize) -> (String, Option<String>) {
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
    (said, problem)
}

/// The demo, which boots its own guest, and a look at what the collector made of it.
fn run_demo(series: Series) -> Result<(String, Option<String>)> {
    let artifacts = setup::build()?;
    let out = artifacts.target.join("vm-test");
    let mut said = String::new();
    let problems = demo::vm::traces(&artifacts, series, &out, &mut |line| said += &format!("{line}\n"))
        .and_then(|()| {
            let (lines, problems) =
                demo::failover_trace::look(&demo::failover_trace::read(&out.join("trace.jsonl"))?);
            said += &lines.join("\n");
            Ok(problems)
        })
        .unwrap_or_else(|error| vec![format!("{error:#}")]);
    Ok((said, (!problems.is_empty()).then(|| problems.join("; "))))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use ringsight_testbed::workspace;

    use super::{jobs::Tier, *};

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

    #[test]
    fn the_fast_tier_boots_three_guests() {
        let fast: Vec<(&Job, Series)> = all()
            .filter(|(job, kernel)| Selection::Fast.has(job, *kernel))
            .collect();
        let boots: usize = Series::ALL
            .into_iter()
            .map(|kernel| {
                let jobs: Vec<&Job> = fast
                    .iter()
                    .filter(|(_, of)| *of == kernel)
                    .map(|(job, _)| *job)
                    .collect();
                Boot::cut(&jobs, kernel).len()
            })
            .sum();
        assert_eq!(boots, 3);
        for tested in ["data", "failover", "network probes", "mlx5"] {
            assert!(fast.iter().any(|(job, _)| job.name.contains(tested)), "{tested}");
        }
    }

    #[test]
    fn a_job_is_in_the_fast_tier_or_left_out_with_a_reason() {
        let mut left = 0;
        for (job, kernel) in all() {
            let is_fast = Selection::Fast.has(job, kernel);
            assert_eq!(is_fast, job.left_out(kernel).is_none(), "{}", job.name);
            left += usize::from(!is_fast);
        }
        let names: Vec<String> = left_out().into_iter().map(|(names, _)| names).collect();
        assert_eq!(names.join("; ").split("; ").count(), left);
    }

    #[test]
    fn jobs_are_called_differently() {
        let names: BTreeSet<&str> = JOBS.iter().map(|job| job.name).collect();
        assert_eq!(names.len(), JOBS.len());
    }

    #[test]
    fn a_fast_jobs_kernel_is_one_of_its_kernels() {
        for job in JOBS {
            if let Tier::Fast(kernel) = job.tier {
                assert!(job.kernels.contains(&kernel), "{}", job.name);
            }
        }
    }
}
