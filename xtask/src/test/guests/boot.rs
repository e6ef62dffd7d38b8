//! One guest that runs several jobs, and what came of each.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Result;
use ringsight_testbed::{
    vm::{Ended, Guest, Series, guest::is_emulators_fault},
    workspace::{self, TestProgram, test_program},
};

use super::{Job, Program, run_demo, run_failures};
use crate::test::libtest::Counts;

/// How long a job may take: several times what the longest takes on an idle machine, which others may be at work on.
const LIMIT: Duration = Duration::from_secs(1500);
/// How long a guest may print nothing; each of a program's tests prints that it has ended.
const QUIET: Duration = Duration::from_secs(360);
/// How often a job runs whose guest the emulator breaks.
const TRIES: u32 = 3;
/// Memory of a guest, MiB: the programs of all its jobs lie in it, 60 MB each.
const MEMORY: u32 = 1024;

/// What the script prints before and behind each job: `@@begin JOB UPTIME`, `@@end JOB CODE WARNINGS UPTIME`.
const BEGIN: &str = "@@begin ";
const END: &str = "@@end ";

/// Functions of the script. `finish` waits until all ports are active, at most 20 s: else the job has left them otherwise.
const FUNCTIONS: &str = "\
uptime() { read -r up _ < /proc/uptime; echo $up; }
warnings() { dmesg | grep -cE 'WARNING: |BUG: |Oops: |refcount_t: '; }
active() { ibv_devinfo 2>/dev/null | grep -c PORT_ACTIVE; }
finish() {
  code=$2; tries=0
  until [ \"$(active)\" = \"$ports\" ] || [ $tries -ge 100 ]; do tries=$((tries + 1)); sleep 0.2; done
  [ $tries -lt 100 ] || { echo; echo \"$(active) of $ports ports are active\"; [ $code != 0 ] || code=125; }
  echo; echo \"@@end $1 $code $(warnings) $(uptime)\"
}
ports=$(active)
";

/// What came of a job.
#[derive(Clone, Debug)]
pub(super) struct Ran {
    pub(super) counts: Counts,
    /// What was wrong, if anything.
    pub(super) problem: Option<String>,
    pub(super) output: String,
    pub(super) took: Duration,
}

impl Ran {
    /// Of a job that counts as one test.
    fn whole(output: String, problem: Option<String>, took: Duration) -> Self {
        let counts = problem.as_ref().map_or(Counts::PASSED, |_| Counts::FAILED);
        Self {
            counts,
            problem,
            output,
            took,
        }
    }
}

/// Jobs of one guest.
#[derive(Debug)]
pub(super) struct Boot<'a> {
    kernel: Series,
    jobs: Vec<&'a Job>,
}

impl<'a> Boot<'a> {
    /// Boots for these jobs: one for those with the same devices, in their order, and one for each that boots by itself.
    pub(super) fn cut(jobs: &[&'a Job], kernel: Series) -> Vec<Self> {
        let mut boots: Vec<Self> = Vec::new();
        for job in jobs {
            let same = |boot: &&mut Self| {
                let first = boot.jobs[0];
                job.shares() && first.shares() && first.devices == job.devices
            };
            match boots.iter_mut().find(same) {
                Some(boot) => boot.jobs.push(job),
                None => boots.push(Self {
                    kernel,
                    jobs: vec![job],
                }),
            }
        }
        boots
    }

    /// Runs the jobs and gives `each` what came of every one.
    pub(super) fn run(&self, verbose: bool, each: &mut dyn FnMut(&Job, &Ran)) -> Result<()> {
        let start = Instant::now();
        let alone = match self.jobs[0].program {
            Program::Demo => Some(run_demo(self.kernel)?),
            Program::Failures { seed, cases } => Some(run_failures(self.kernel, seed, cases)),
            Program::Script(_) | Program::Cargo { .. } => None,
        };
        if let Some((output, problem)) = alone {
            each(self.jobs[0], &Ran::whole(output, problem, start.elapsed()));
            return Ok(());
        }
        let mut programs = BTreeMap::new();
        for job in &self.jobs {
            if let Program::Cargo { package, test, .. } = job.program
                && !programs.contains_key(&(package, test))
            {
                programs.insert((package, test), test_program(package, test)?);
            }
        }
        let mut left = self.jobs.as_slice();
        let mut tries = 1;
        while let [first, ..] = left {
            let guest = self.guest(left, &programs, verbose)?;
            let mut output = Vec::new();
            let ended = guest.run(|piece| output.extend_from_slice(piece));
            let output = String::from_utf8_lossy(&output).into_owned();
            let (done, open) = read(&output);
            for (job, said) in left.iter().zip(&done) {
                each(job, &said.judge(job.program, &ended));
            }
            left = &left[done.len()..];
            match &ended {
                // All have ended, or the guest did before its first job.
                Ok(_) if left.is_empty() => {}
                Err(error) if is_emulators_fault(error) && (tries < TRIES || !done.is_empty()) => {
                    tries = if done.is_empty() { tries + 1 } else { 2 };
                    eprintln!(
                        "vm: {error:#}\nvm: the job had printed\n{open}\nvm: another guest runs it ({tries} of {TRIES})"
                    );
                }
                _ => {
                    let job = left.first().unwrap_or(first);
                    let problem = match &ended {
                        Err(error) => format!("{error:#}"),
                        Ok(ended) => format!("the guest ended before it, with exit code {}", ended.code),
                    };
                    each(job, &Ran::whole(open, Some(problem), start.elapsed()));
                    left = left.get(1..).unwrap_or_default();
                    tries = 1;
                }
            }
        }
        Ok(())
    }

    fn guest(
        &self,
        jobs: &[&Job],
        programs: &BTreeMap<(&str, &str), TestProgram>,
        verbose: bool,
    ) -> Result<Guest> {
        let mut guest = Guest::new(self.kernel, Vec::new());
        let devices = jobs[0].devices;
        guest.rdma = devices.rdma;
        guest.mlx5 = devices.mlx5;
        guest.mlx5_ports = devices.ports;
        guest.memory = MEMORY;
        guest.verbose = verbose;
        (guest.limit, guest.quiet) = (LIMIT * jobs.len() as u32, Some(QUIET));
        let scripts = workspace::root().join("vm/tests");
        guest.add(&scripts.join("lib.sh"))?;
        let mut text = FUNCTIONS.to_owned();
        for (number, job) in jobs.iter().enumerate() {
            let command = match job.program {
                Program::Script(name) => format!("/bin/sh -ex {}", guest.add(&scripts.join(name))?),
                Program::Cargo {
                    package,
                    test,
                    filters,
                } => {
                    // One at a time: they share the guest's devices.
                    let program = guest.add_test(&programs[&(package, test)])?;
                    let filters: String = filters.iter().map(|filter| format!(" '{filter}'")).collect();
                    format!("{program} --ignored --test-threads=1{filters}")
                }
                Program::Demo | Program::Failures { .. } => continue,
            };
            text += &format!("echo; echo \"{BEGIN}{number} $(uptime)\"\n{command}\nfinish {number} $?\n");
        }
        guest.files.sort();
        guest.files.dedup();
        guest.program = ["/bin/sh", "-c", &text].map(str::to_owned).to_vec();
        Ok(guest)
    }
}

/// What a guest's output says of a job that has ended.
#[derive(Debug, PartialEq)]
struct Said {
    output: String,
    code: u8,
    /// Warnings of the kernel, in this job alone.
    warnings: u64,
    took: Duration,
}

/// The jobs that have ended, in their order, and what the one printed that has not.
fn read(output: &str) -> (Vec<Said>, String) {
    let mut done = Vec::new();
    let mut text = String::new();
    let (mut begun, mut warned) = (0.0, 0);
    for line in output.lines().map(|line| line.trim_end_matches('\r')) {
        if let Some(words) = line.strip_prefix(BEGIN) {
            let uptime = words.split(' ').nth(1).and_then(|up| up.parse().ok());
            begun = uptime.unwrap_or(0.0);
            text.clear();
        } else if let Some(end) = line.strip_prefix(END).and_then(numbers) {
            let (code, warnings, uptime) = end;
            done.push(Said {
                output: std::mem::take(&mut text),
                code,
                warnings: warnings.saturating_sub(warned),
                took: Duration::from_secs_f64((uptime - begun).max(0.0)),
            });
            warned = warnings;
        } else {
            text += line;
            text.push('\n');
        }
    }
    (done, text)
}

/// Code, warnings and uptime of what stands behind [`END`].
fn numbers(words: &str) -> Option<(u8, u64, f64)> {
    let mut words = words.split(' ').skip(1);
    Some((
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
        words.next()?.parse().ok()?,
    ))
}

impl Said {
    /// What a job came to, and what was wrong with it.
    fn judge(&self, program: Program, ended: &Result<Ended>) -> Ran {
        let is_counted = matches!(program, Program::Cargo { .. });
        let mut counts = Counts::default();
        for more in self.output.lines().filter_map(Counts::of_line) {
            counts.add(more);
        }
        let problem = match self {
            Self { code: 1.., .. } => Some(format!("exit code {}", self.code)),
            Self { warnings: 1.., .. } => {
                let text = ended.as_ref().ok().and_then(Ended::warning_text);
                Some(format!(
                    "the kernel warned {} times:\n{}",
                    self.warnings,
                    text.unwrap_or_default()
                ))
            }
            _ if is_counted && counts.passed == 0 => Some("no test ran".to_owned()),
            _ => None,
        };
        let mut ran = Ran::whole(self.output.clone(), problem, self.took);
        if is_counted {
            ran.counts = match ran.problem {
                Some(_) => counts.at_least_one_failed(),
                None => counts,
            };
        }
        ran
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(output: &str, code: u8, warnings: u64) -> Said {
        Said {
            output: output.to_owned(),
            code,
            warnings,
            took: Duration::from_secs(1),
        }
    }

    fn ended() -> Result<Ended> {
        Ok(Ended {
            code: 0,
            warnings: 1,
            console: "@@KWARN 1\nWARNING: x\n@@EXIT".to_owned(),
        })
    }

    #[test]
    fn a_job_passes_only_with_its_tests_its_code_and_a_quiet_kernel() {
        let script = Program::Script("x");
        let ran = said("", 0, 0).judge(script, &ended());
        assert_eq!((ran.counts, ran.problem), (Counts::PASSED, None));
        for bad in [said("", 1, 0), said("", 0, 1)] {
            let ran = bad.judge(script, &ended());
            assert_eq!(ran.counts, Counts::FAILED);
            assert!(ran.problem.is_some());
        }
        let warned = said("", 0, 1).judge(script, &ended()).problem.unwrap();
        assert!(warned.contains("WARNING: x"), "{warned}");
        let test = Program::Cargo {
            package: "p",
            test: "t",
            filters: &[],
        };
        let line = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 1 filtered out";
        assert_eq!(said(line, 0, 0).judge(test, &ended()).counts.passed, 3);
        // A test program that ran nothing has shown nothing.
        let ran = said("test result: ok. 0 passed; 0 failed; 0 ignored", 0, 0).judge(test, &ended());
        assert!(ran.counts.failed == 1 && ran.problem.is_some());
    }

    #[test]
    fn jobs_are_told_apart_in_a_guests_output() {
        let output = "\n@@begin 0 2.50\r\na\r\n\n@@end 0 0 0 4.00\n\n@@begin 1 4.00\nb\n\n@@end 1 101 2 5.00\n\
                      \n@@begin 2 5.00\nc\n@@end nothing\n";
        let (done, open) = read(output);
        assert_eq!(done.len(), 2);
        assert_eq!((done[0].code, done[0].warnings), (0, 0));
        assert_eq!(done[0].took, Duration::from_millis(1500));
        assert_eq!(done[0].output.trim(), "a");
        assert_eq!((done[1].code, done[1].warnings), (101, 2));
        assert!(open.contains("c\n"), "{open}");
        // The kernel's count goes on; the next job's warnings are its own.
        let (done, _) = read("@@begin 0 1\n@@end 0 0 2 2\n@@begin 1 2\n@@end 1 0 2 3\n");
        assert_eq!((done[0].warnings, done[1].warnings), (2, 0));
    }
}
