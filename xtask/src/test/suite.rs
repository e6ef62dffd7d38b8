//! One run of layers: their outcomes and times, what tests skipped, and the tables at the end.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use ringsight_testbed::process;

use super::{
    SKIP_LOG,
    libtest::{Counts, Output},
};

/// Steps in the table of the slowest.
const SLOWEST: usize = 10;

/// How a layer ended.
pub(super) enum Outcome {
    Ran(Counts),
    /// What failed: a line for the table, then lines that are printed after it.
    Failed(Counts, String),
    Skipped(String),
}

/// A timed part of a layer: a test program, a build, a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) name: String,
    pub(crate) took: Duration,
}

impl Step {
    pub(crate) fn new(name: impl Into<String>, took: Duration) -> Self {
        Self {
            name: name.into(),
            took,
        }
    }
}

struct Row {
    name: String,
    outcome: Outcome,
    took: Duration,
    steps: Vec<Step>,
}

pub(super) struct Suite {
    rows: Vec<Row>,
    /// What only `--full` runs: what, and why.
    left_out: Vec<(String, String)>,
    skips: SkipLog,
}

impl Suite {
    /// A suite of which nothing has run yet.
    pub(super) fn new(skips: SkipLog) -> Self {
        Self {
            rows: Vec::new(),
            left_out: Vec::new(),
            skips,
        }
    }

    /// Runs a layer and prints its outcome.
    pub(super) fn layer(&mut self, name: &str, run: impl FnOnce(&mut Report) -> Result<Outcome>) {
        println!("\n=== {name}");
        let start = Instant::now();
        let mut report = Report {
            skips: &self.skips,
            steps: Vec::new(),
        };
        let outcome =
            run(&mut report).unwrap_or_else(|error| Outcome::Failed(Counts::FAILED, format!("{error:#}")));
        let steps = report.steps;
        let took = start.elapsed();
        let seconds = took.as_secs_f64();
        match &outcome {
            Outcome::Ran(counts) => println!("=== {name}: {} passed in {seconds:.1} s", counts.passed),
            Outcome::Failed(_, why) => {
                println!("=== {name}: FAILED after {seconds:.1} s: {}", first_line(why));
            }
            Outcome::Skipped(why) => println!("=== {name}: skipped: {why}"),
        }
        self.rows.push(Row {
            name: name.to_owned(),
            outcome,
            took,
            steps,
        });
    }

    /// Notes what only `--full` runs.
    pub(super) fn leave_out(&mut self, what: impl Into<String>, why: impl Into<String>) {
        self.left_out.push((what.into(), why.into()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Whether the layer that ran last has failed.
    pub(super) fn has_just_failed(&self) -> bool {
        let last = self.rows.last();
        last.is_some_and(|row| matches!(row.outcome, Outcome::Failed(..)))
    }

    /// Prints the tables, what was skipped, left out and failed, by name, and the closing line; `true` if nothing failed.
    pub(super) fn close(&self, took: Duration) -> bool {
        println!("\nall layers: {:.0} s", took.as_secs_f64());
        println!("\n{}", self.slowest());
        let (table, total) = self.table();
        println!("{table}");
        for row in &self.rows {
            if let Outcome::Skipped(why) = &row.outcome {
                println!("skipped {}: {why}", row.name);
            }
        }
        for skip in self.skips.lines() {
            println!("skipped {skip}");
        }
        for (what, why) in &self.left_out {
            println!("left to --full: {what}: {why}");
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
        let _ = fs::remove_file(self.skips.file());
        total.failed == 0 && total.passed > 0
    }

    /// The table of layers, and the sum of their counts.
    fn table(&self) -> (String, Counts) {
        let mut total = Counts::default();
        let mut table = format!(
            "{:<26} {:>9} {:>7} {:>7} {:>7}  note\n",
            "layer", "seconds", "passed", "failed", "skipped"
        );
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
            let Counts {
                passed,
                failed,
                skipped,
            } = counts;
            let line = format!(
                "{:<26} {:>9.1} {passed:>7} {failed:>7} {skipped:>7}  {note}",
                row.name,
                row.took.as_secs_f64()
            );
            table += line.trim_end();
            table.push('\n');
            total.add(counts);
        }
        (table, total)
    }

    /// The table of the slowest steps. A layer whose parts were timed is listed by its parts; parts that ran at the same
    /// time add up to more than the layer.
    fn slowest(&self) -> String {
        let mut steps: Vec<(Duration, String)> = Vec::new();
        for row in &self.rows {
            match row.steps.as_slice() {
                [] => steps.push((row.took, row.name.clone())),
                parts => steps.extend(
                    parts
                        .iter()
                        .map(|step| (step.took, format!("{}: {}", row.name, step.name))),
                ),
            }
        }
        steps.sort_by(|(one, _), (other, _)| other.cmp(one));
        steps.truncate(SLOWEST);
        let lines = steps
            .iter()
            .map(|(took, name)| format!("{:>9.1}  {name}\n", took.as_secs_f64()));
        format!("{:>9}  slowest steps\n{}", "seconds", lines.collect::<String>())
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// What a layer reports while it runs.
pub(super) struct Report<'a> {
    skips: &'a SkipLog,
    steps: Vec<Step>,
}

impl Report<'_> {
    pub(super) fn skips(&self) -> &SkipLog {
        self.skips
    }

    /// Adds a part that was timed.
    pub(super) fn step(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// Runs `cargo test` and counts. Tests that log a skip end as passed, and count as skipped.
    pub(super) fn cargo_test(&mut self, command: &mut Command) -> Result<Outcome> {
        let before = self.skips.len();
        command.env(SKIP_LOG, self.skips.file());
        let mut output = Output::default();
        let status = process::stream(command, |line| output.read(line))?;
        let counts = self.skips.count(before, &[&output])?;
        if status.success() {
            return Ok(Outcome::Ran(counts));
        }
        let line = process::line(command);
        let why = format!("{line} {}\n{}", process::reason(status), output.failures());
        Ok(Outcome::Failed(counts.at_least_one_failed(), why))
    }
}

/// The file to which tests append what they skipped, one `name: reason` a line.
pub(super) struct SkipLog(PathBuf);

impl SkipLog {
    /// An empty one.
    pub(super) fn new(file: PathBuf) -> Self {
        let _ = fs::remove_file(&file);
        Self(file)
    }

    pub(super) fn file(&self) -> &Path {
        &self.0
    }

    fn lines(&self) -> Vec<String> {
        fs::read_to_string(&self.0)
            .unwrap_or_default()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// How many lines there are.
    pub(super) fn len(&self) -> usize {
        self.lines().len()
    }

    /// Adds lines.
    fn add(&self, lines: &[String]) -> Result<()> {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.0)
            .and_then(|mut log| log.write_all(text.as_bytes()))
            .with_context(|| format!("writing {}", self.0.display()))
    }

    /// Counts of programs that have ended since the log had `before` lines, and notes their ignored tests. A test that
    /// logs a skip ends as passed, and counts as skipped.
    pub(super) fn count(&self, before: usize, outputs: &[&Output]) -> Result<Counts> {
        let logged = (self.len() - before) as u64;
        let mut counts = Counts::default();
        for output in outputs {
            counts.add(output.counts());
            self.add(output.ignored())?;
        }
        counts.passed = counts.passed.saturating_sub(logged);
        counts.skipped += logged;
        Ok(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(name: &str) -> Suite {
        let file = format!("ringsight-suite-{name}-{}", std::process::id());
        Suite::new(SkipLog::new(std::env::temp_dir().join(file)))
    }

    #[test]
    fn a_logged_skip_is_not_a_pass_and_a_crash_is_a_failure() {
        let Suite { skips, .. } = &suite("skips");
        let mut report = Report {
            skips,
            steps: Vec::new(),
        };
        let script = format!(
            "echo 'test a ... ok'; echo 'test worker ... ignored, helper: one rank'; echo 'test slow ... ignored, takes hours'
             echo 'test result: ok. 5 passed; 0 failed; 2 ignored'; echo 'x: y' >> ${SKIP_LOG}"
        );
        let Outcome::Ran(counts) = report
            .cargo_test(Command::new("sh").args(["-c", &script]))
            .unwrap()
        else {
            panic!("the script succeeds")
        };
        assert_eq!(
            counts,
            Counts {
                passed: 4,
                failed: 0,
                skipped: 2
            }
        );
        assert_eq!(skips.lines(), ["x: y", "slow: takes hours"]);
        let script = "printf 'failures:\n\n---- a stdout ----\nleft: 1\n\ntest result: FAILED. 0 passed; 2 failed; 0 ignored\n'; exit 1";
        let Outcome::Failed(counts, why) = report
            .cargo_test(Command::new("sh").args(["-c", script]))
            .unwrap()
        else {
            panic!("the script fails")
        };
        assert_eq!(counts.failed, 2);
        assert!(why.ends_with("---- a stdout ----\nleft: 1\n"), "{why}");
        fs::remove_file(skips.file()).unwrap();
    }

    #[test]
    fn the_ten_slowest_steps_are_listed_parts_in_place_of_their_layer() {
        let mut suite = suite("slowest");
        let row = |name: &str, seconds, steps: &[(&str, u64)]| Row {
            name: name.to_owned(),
            outcome: Outcome::Ran(Counts::PASSED),
            took: Duration::from_secs(seconds),
            steps: steps
                .iter()
                .map(|(name, seconds)| Step::new(*name, Duration::from_secs(*seconds)))
                .collect(),
        };
        suite
            .rows
            .push(row("tests", 50, &[("comm records", 30), ("probes attach", 20)]));
        suite.rows.push(row("demo", 25, &[]));
        let parts: Vec<(String, u64)> = (1..=9)
            .map(|seconds| (format!("part {seconds}"), seconds))
            .collect();
        let parts: Vec<(&str, u64)> = parts.iter().map(|(name, took)| (name.as_str(), *took)).collect();
        suite.rows.push(row("many", 45, &parts));
        let table = suite.slowest();
        let lines: Vec<&str> = table.lines().map(str::trim).collect();
        assert_eq!(lines.len(), 1 + SLOWEST);
        assert_eq!(
            lines[..5],
            [
                "seconds  slowest steps",
                "30.0  tests: comm records",
                "25.0  demo",
                "20.0  tests: probes attach",
                "9.0  many: part 9",
            ]
        );
        assert_eq!(lines[SLOWEST], "3.0  many: part 3");
    }

    #[test]
    fn the_table_sums_the_layers_and_names_what_failed() {
        let mut suite = suite("table");
        let counts = Counts {
            passed: 3,
            failed: 0,
            skipped: 1,
        };
        suite.layer("good", |_| Ok(Outcome::Ran(counts)));
        suite.layer("absent", |_| Ok(Outcome::Skipped("no network".to_owned())));
        assert!(!suite.has_just_failed());
        suite.layer("bad", |_| anyhow::bail!("it broke\nat line 7"));
        assert!(suite.has_just_failed());
        let (table, total) = suite.table();
        let rows: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(rows[1], ["good", "0.0", "3", "0", "1"]);
        assert_eq!(rows[2], ["absent", "0.0", "0", "0", "1", "no", "network"]);
        assert_eq!(rows[3], ["bad", "0.0", "0", "1", "0", "it", "broke"]);
        assert_eq!(
            total,
            Counts {
                passed: 3,
                failed: 1,
                skipped: 2
            }
        );
        assert!(!suite.close(Duration::ZERO));
    }
}
