//! What libtest prints, counted.

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

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Counts of one closing line of libtest:
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

/// Start of the reason of an ignored test that runs in a guest: the guests' jobs count it, or name what they leave out.
pub(super) const GUEST: &str = "guest: ";

/// Name and reason of an ignored test, from libtest's line of it: `test NAME ... ignored, REASON`.
pub(super) fn ignored(line: &str) -> Option<(&str, &str)> {
    let (name, state) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let reason = state.strip_prefix("ignored")?;
    Some((name, reason.strip_prefix(", ").unwrap_or("no reason given")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libtests_closing_line_is_counted() {
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
}
