//! What libtest prints of tests that failed, kept for the end of a run that has thousands of lines.

use std::collections::VecDeque;

/// Lines of one program's failures, and of any text's end, that are said again: enough for a panic and what led to it.
const KEPT: usize = 40;

/// What programs of tests said of their failures.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    text: String,
    /// Those of the program that speaks.
    lines: VecDeque<String>,
    is_told: bool,
}

impl Failures {
    /// Takes the next line of the output. What is kept are errors of what compiles and runs tests, and from `failures:` to the failed result; tests that a failed one has run in another process have
    /// results of their own between.
    pub(crate) fn hear(&mut self, line: &str) {
        if line.starts_with("test result: FAILED") {
            let lines = std::mem::take(&mut self.lines);
            self.text.extend(lines.into_iter().map(|line| line + "\n"));
            self.is_told = false;
        } else if line == "failures:" {
            self.is_told = true;
        } else if line.starts_with("error") && !self.is_told {
            // Cargo's or a compiler's.
            self.text += line;
            self.text.push('\n');
        } else if self.is_told && !line.trim().is_empty() {
            self.lines.push_back(line.to_owned());
            if self.lines.len() > KEPT {
                self.lines.pop_front();
            }
        }
    }

    /// Of all programs that have ended.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

/// The last lines of what something said.
pub(crate) fn end_of(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(KEPT)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_is_kept_and_nothing_else() {
        let mut failures = Failures::default();
        let passed = "running 1 test\ntest a ... ok\n\ntest result: ok. 1 passed; 0 failed; 0 ignored";
        let long: String = (0..KEPT - 1).map(|line| format!("line {line}\n")).collect();
        let failed = format!(
            "running 1 test\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\ntest result: ok. 1 passed; 0 failed\n{long}\nfailures:\n    b\n\n\
             test result: FAILED. 0 passed; 1 failed; 0 ignored"
        );
        for line in passed.lines().chain(failed.lines()).chain(passed.lines()) {
            failures.hear(line);
        }
        failures.hear("error: test failed, to rerun pass `-p x`");
        let text = failures.text();
        let (text, error) = text.trim_end().rsplit_once('\n').unwrap();
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
