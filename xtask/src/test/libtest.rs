//! The lines that Rust's test harness prints: counts, ignored tests, and the text of failures.

use std::collections::VecDeque;

/// Lines that are kept of one program's failures, and of any text's end: enough for a panic and what led to it.
const KEPT: usize = 40;

/// Tests that passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Counts {
    pub(crate) const PASSED: Self = Self {
        passed: 1,
        failed: 0,
        skipped: 0,
    };

    pub(crate) const FAILED: Self = Self {
        passed: 0,
        failed: 1,
        skipped: 0,
    };

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// The same, with a failure at least: a crate that does not compile, or a test that took its process down, is in no count.
    pub(crate) fn at_least_one_failed(self) -> Self {
        Self {
            failed: self.failed.max(1),
            ..self
        }
    }

    /// Counts of one closing line:
    /// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s`.
    pub(crate) fn of_line(line: &str) -> Option<Self> {
        let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
        let number = |word: &str| {
            counts
                .split("; ")
                .find_map(|part| part.trim().strip_suffix(word)?.trim_end().parse::<u64>().ok())
        };
        Some(Self {
            passed: number("passed")?,
            failed: number("failed")?,
            skipped: number("ignored")?,
        })
    }
}

/// Starts of the reasons of ignored tests that count neither as passed nor as skipped here: the guests' jobs run and count the first, and
/// another test runs the second in a process of its own.
const ELSEWHERE: [&str; 2] = ["guest: ", "helper: "];

/// Name and reason of an ignored test, from its line: `test NAME ... ignored, REASON`.
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (name, state) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let reason = state.strip_prefix("ignored")?;
    Some((name, reason.strip_prefix(", ").unwrap_or("no reason given")))
}

/// What one or more test programs printed.
#[derive(Debug, Default)]
pub(crate) struct Output {
    counts: Counts,
    helpers: u64,
    /// Ignored tests that are no helpers, `name: reason` each.
    ignored: Vec<String>,
    failures: String,
    /// Text of the failures of the program that prints now.
    open: VecDeque<String>,
    is_in_failures: bool,
}

impl Output {
    /// Reads the next line.
    ///
    /// The text of failures is what stands between `failures:` and the failed result, and errors of cargo and the compiler.
    /// A failed test's text may itself hold results: those of tests that it ran in other processes.
    pub(crate) fn read(&mut self, line: &str) {
        match ignored(line) {
            Some((_, reason)) if ELSEWHERE.iter().any(|start| reason.starts_with(start)) => self.helpers += 1,
            Some((name, reason)) => self.ignored.push(format!("{name}: {reason}")),
            None => {}
        }
        if let Some(more) = Counts::of_line(line) {
            self.counts.add(more);
        }
        if line.starts_with("test result: FAILED") {
            let lines = std::mem::take(&mut self.open);
            self.failures.extend(lines.into_iter().map(|line| line + "\n"));
            self.is_in_failures = false;
        } else if line == "failures:" {
            self.is_in_failures = true;
        } else if line.starts_with("error") && !self.is_in_failures {
            self.failures += line;
            self.failures.push('\n');
        } else if self.is_in_failures && !line.trim().is_empty() {
            self.open.push_back(line.to_owned());
            if self.open.len() > KEPT {
                self.open.pop_front();
            }
        }
    }

    /// Reads all lines of `text`.
    pub(crate) fn of(text: &str) -> Self {
        let mut output = Self::default();
        text.lines().for_each(|line| output.read(line));
        output
    }

    /// Counts of all programs; helpers are in none of them.
    pub(crate) fn counts(&self) -> Counts {
        Counts {
            skipped: self.counts.skipped.saturating_sub(self.helpers),
            ..self.counts
        }
    }

    /// Ignored tests that are no helpers, `name: reason` each.
    pub(crate) fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// The text of the failures of all programs that have ended.
    pub(crate) fn failures(&self) -> &str {
        &self.failures
    }
}

/// The last lines of a text.
pub(crate) fn end_of(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(KEPT)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closing_line_is_counted() {
        let line =
            "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 1 filtered out; finished in 0.40s";
        assert_eq!(
            Counts::of_line(line),
            Some(Counts {
                passed: 12,
                failed: 0,
                skipped: 3
            })
        );
        let line = "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(
            Counts::of_line(line),
            Some(Counts {
                passed: 1,
                failed: 2,
                skipped: 0
            })
        );
        for other in [
            "",
            "test result: ",
            "test result: ok. x passed; 0 failed; 0 ignored",
            "12 passed; 0 failed",
        ] {
            assert_eq!(Counts::of_line(other), None, "{other}");
        }
    }

    #[test]
    fn helpers_are_not_skipped_tests() {
        let output = Output::of(
            "test a ... ok\ntest worker ... ignored, helper: one rank\ntest slow ... ignored, takes hours\n\
             test bare ... ignored\ntest result: ok. 5 passed; 0 failed; 3 ignored",
        );
        assert_eq!(
            output.counts(),
            Counts {
                passed: 5,
                failed: 0,
                skipped: 2
            }
        );
        assert_eq!(output.ignored(), ["slow: takes hours", "bare: no reason given"]);
    }

    #[test]
    fn the_text_of_failures_is_kept_and_nothing_else() {
        let passed = "running 1 test\ntest a ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored";
        let long: String = (0..KEPT - 1).map(|line| format!("line {line}\n")).collect();
        let failed = format!(
            "running 1 test\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\ntest result: ok. 1 passed; 0 failed\n{long}\nfailures:\n    b\n\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored"
        );
        let output = Output::of(&format!(
            "{passed}\n{failed}\n{passed}\nerror: test failed, to rerun pass `-p x`\n"
        ));
        let (text, error) = output.failures().trim_end().rsplit_once('\n').unwrap();
        assert_eq!(error, "error: test failed, to rerun pass `-p x`");
        assert_eq!(text.lines().count(), KEPT, "{text}");
        assert!(
            text.starts_with("line 0\n") && text.ends_with("\n    b"),
            "{text}"
        );
    }

    #[test]
    fn the_end_of_a_text_is_its_last_lines() {
        assert_eq!(end_of("a\n\nb\n"), "a\nb");
        let long: String = (0..=KEPT).map(|line| format!("{line}\n")).collect();
        assert!(end_of(&long).starts_with("1\n2\n"));
    }
}
