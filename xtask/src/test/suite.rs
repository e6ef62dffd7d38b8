//! The layers of a run of tests, their outcomes, and what they skipped.

use std::{
    fs,
    io::Write as _,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use ringsight_testbed::process;

use super::{
    SKIP_LOG,
    counts::{Counts, GUEST, ignored},
    failures::Failures,
};

/// How a layer ended.
pub(super) enum Outcome {
    Ran(Counts),
    /// What failed: a line for the table, and lines that are said after it.
    Failed(Counts, String),
    Skipped(String),
}

struct Row {
    name: &'static str,
    outcome: Outcome,
    took: Duration,
}

pub(super) struct Suite {
    filter: Option<String>,
    rows: Vec<Row>,
    skips: SkipLog,
}

impl Suite {
    /// A suite of which nothing has run yet.
    pub(super) fn new(filter: Option<String>, skips: SkipLog) -> Self {
        Self {
            filter,
            rows: Vec::new(),
            skips,
        }
    }

    pub(super) fn skips(&self) -> &SkipLog {
        &self.skips
    }

    /// Runs a layer unless a filter excludes it. `tests` says whether the filter may name tests inside it.
    pub(super) fn layer(
        &mut self,
        name: &'static str,
        tests: bool,
        run: impl FnOnce(Option<&str>) -> Result<Outcome>,
    ) {
        let filter = self.filter.clone();
        let inner = match filter.as_deref() {
            Some(filter) if name.contains(filter) => None,
            Some(filter) if tests => Some(filter),
            Some(_) => return,
            None => None,
        };
        println!("\n=== {name}");
        let start = Instant::now();
        let outcome = run(inner).unwrap_or_else(|error| {
            Outcome::Failed(
                Counts {
                    failed: 1,
                    ..Counts::default()
                },
                format!("{error:#}"),
            )
        });
        let took = start.elapsed();
        match &outcome {
            Outcome::Ran(counts) => println!(
                "=== {name}: {} passed in {:.1} s",
                counts.passed,
                took.as_secs_f64()
            ),
            Outcome::Failed(_, why) => {
                println!(
                    "=== {name}: FAILED after {:.1} s: {}",
                    took.as_secs_f64(),
                    first_line(why)
                );
            }
            Outcome::Skipped(why) => println!("=== {name}: skipped: {why}"),
        }
        self.rows.push(Row { name, outcome, took });
    }

    /// Prints the table, what was skipped and what failed, by name, and the closing line; `true` if nothing failed.
    fn close(&self) -> bool {
        let mut total = Counts::default();
        println!(
            "\n{:<22} {:>9} {:>7} {:>7} {:>7}  note",
            "layer", "seconds", "passed", "failed", "skipped"
        );
        let mut skips = Vec::new();
        for row in &self.rows {
            let (counts, note) = match &row.outcome {
                Outcome::Ran(counts) => (*counts, ""),
                Outcome::Failed(counts, why) => (*counts, first_line(why)),
                Outcome::Skipped(why) => (
                    Counts {
                        skipped: 1,
                        ..Counts::default()
                    },
                    why.as_str(),
                ),
            };
            if let Outcome::Skipped(why) = &row.outcome {
                skips.push(format!("{}: {why}", row.name));
            }
            let Counts {
                passed,
                failed,
                skipped,
            } = counts;
            println!(
                "{:<22} {:>9.1} {passed:>7} {failed:>7} {skipped:>7}  {note}",
                row.name,
                row.took.as_secs_f64()
            );
            total.add(counts);
        }
        skips.extend(self.skips.lines());
        for skip in &skips {
            println!("skipped {skip}");
        }
        for row in &self.rows {
            if let Outcome::Failed(_, why) = &row.outcome {
                println!("\nfailed {}: {why}", row.name);
            }
        }
        println!(
            "\n{} passed, {} failed, {} skipped",
            total.passed, total.failed, total.skipped
        );
        total.failed == 0 && total.passed > 0
    }

    /// Whether the layer that ran last has failed.
    pub(super) fn has_just_failed(&self) -> bool {
        let last = self.rows.last();
        last.is_some_and(|row| matches!(row.outcome, Outcome::Failed(..)))
    }

    /// Says how it went; `true` if nothing failed.
    pub(super) fn close_after(&self, start: Instant) -> bool {
        if self.rows.is_empty() {
            println!(
                "no layer and no test is called {}",
                self.filter.as_deref().unwrap_or_default()
            );
        }
        println!("\nall layers: {:.0} s", start.elapsed().as_secs_f64());
        let good = self.close();
        let _ = fs::remove_file(&self.skips.0);
        good
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// The file to which tests append what they skipped.
#[derive(Clone)]
pub(super) struct SkipLog(PathBuf);

impl SkipLog {
    /// An empty one.
    pub(super) fn new(file: PathBuf) -> Self {
        let _ = fs::remove_file(&file);
        Self(file)
    }

    /// What tests have written to it so far.
    fn lines(&self) -> Vec<String> {
        fs::read_to_string(&self.0)
            .unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// Runs `cargo test` with `arguments` and counts; tests that logged a skip count as skipped, not as passed. Ignored
    /// tests are skipped, and logged here; but for those of guests, which the guests' jobs count.
    pub(super) fn cargo_test(&self, command: &mut Command, filter: Option<&str>) -> Result<Outcome> {
        let before = self.lines().len() as u64;
        command.env(SKIP_LOG, &self.0).args(filter);
        let mut counts = Counts::default();
        let (mut of_guests, mut left_out) = (0, String::new());
        let mut failures = Failures::default();
        let status = process::stream(command, |line| {
            failures.hear(line);
            match ignored(line) {
                Some((_, reason)) if reason.starts_with(GUEST) => of_guests += 1,
                Some((name, reason)) => left_out += &format!("{name}: {reason}\n"),
                None => {}
            }
            if let Some(more) = Counts::of_line(line) {
                counts.add(more);
            }
        })?;
        let skipped = self.lines().len() as u64 - before;
        counts.skipped = (counts.skipped + skipped).saturating_sub(of_guests);
        fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.0)
            .and_then(|mut log| log.write_all(left_out.as_bytes()))
            .with_context(|| format!("writing {}", self.0.display()))?;
        counts.passed = counts.passed.saturating_sub(skipped);
        if !status.success() {
            // A crate that does not compile, or a test that took its process down, appears in no count.
            counts.failed = counts.failed.max(1);
            return Ok(Outcome::Failed(
                counts,
                format!(
                    "{} {}\n{}",
                    process::line(command),
                    process::reason(status),
                    failures.text()
                ),
            ));
        }
        Ok(Outcome::Ran(counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logged_skip_is_not_a_pass_and_a_crash_is_a_failure() {
        let log = std::env::temp_dir().join(format!("ringsight-skip-test-{}", std::process::id()));
        let skips = SkipLog::new(log.clone());
        let script = format!(
            "echo 'test a ... ok'; echo 'test worker ... ignored, guest: needs a device'; echo 'test slow ... ignored, takes hours'
             echo 'test bare ... ignored'
             echo 'test result: ok. 5 passed; 0 failed; 3 ignored'; echo 'x: y' >> ${SKIP_LOG}"
        );
        let Outcome::Ran(counts) = skips
            .cargo_test(Command::new("sh").args(["-c", &script]), None)
            .unwrap()
        else {
            panic!("the script succeeds")
        };
        assert_eq!(
            counts,
            Counts {
                passed: 4,
                failed: 0,
                skipped: 3
            }
        );
        assert_eq!(
            skips.lines(),
            ["x: y", "slow: takes hours", "bare: no reason given"]
        );
        let script = "printf 'failures:\n\n---- a stdout ----\nleft: 1\n\ntest result: FAILED. 0 passed; 2 failed; 0 ignored\n'; exit 1";
        let Outcome::Failed(counts, why) = skips
            .cargo_test(Command::new("sh").args(["-c", script]), None)
            .unwrap()
        else {
            panic!("the script fails")
        };
        assert_eq!(counts.failed, 2);
        assert!(why.ends_with("---- a stdout ----\nleft: 1\n"), "{why}");
        fs::remove_file(&log).unwrap();
    }
}
