//! What only `--full` runs, cut into parts of four minutes at most: CI runs one of them beside the fast tier, each commit the
//! next one, so that none of them rots. `cargo xtask test --rotating N` runs one by hand.

use anyhow::{Context as _, Result};
use ringsight_testbed::{process, vm::Series, workspace::root};

use super::guests::Selection;
use super::{
    FULL, layers,
    layers::Run,
    suite::{Outcome, Report},
};

/// A part of what only `--full` runs.
#[derive(Clone, Copy)]
pub(super) enum Part {
    /// The guests' jobs of this group, with this kernel, that the fast tier leaves out.
    Guests(&'static str, Series),
    /// Rounds, as in the whole matrix, of the faults whose case contains this.
    Faults(&'static str),
    /// For so many minutes by each source.
    Soak(&'static str),
    /// As it is without `--full`.
    Leaks,
    /// A test program of `comm` that samples elsewhere.
    Sampled(&'static str),
    /// Targets that write random content, for so many seconds.
    Hostile(&'static str),
}

pub(super) static PARTS: [Part; 26] = [
    Part::Guests("ports that fail", Series::V6_1),
    Part::Guests("ports that fail", Series::V6_12),
    Part::Guests("connections, mlx5", Series::V6_1),
    Part::Guests("connections, mlx5", Series::V6_12),
    Part::Guests("two ports", Series::V6_1),
    Part::Guests("two ports", Series::V6_12),
    Part::Guests("nodes, from the beginning on", Series::V6_1),
    Part::Guests("nodes, to the end", Series::V6_1),
    Part::Guests("nodes, replays", Series::V6_1),
    Part::Guests("nodes, mlx5", Series::V6_1),
    Part::Guests("nodes, mlx5", Series::V6_12),
    Part::Guests("mlx5", Series::V6_1),
    Part::Guests("mlx5", Series::V6_12),
    Part::Faults("process/eager/pages"),
    Part::Faults("process/eager/events"),
    Part::Faults("process/graph/pages"),
    Part::Faults("process/graph/events"),
    Part::Faults("thread/eager/pages"),
    Part::Faults("thread/eager/events"),
    Part::Faults("thread/graph/pages"),
    Part::Faults("thread/graph/events"),
    Part::Soak("1.5"),
    Part::Leaks,
    Part::Sampled("matrix"),
    Part::Sampled("groups"),
    Part::Hostile("150"),
];

impl Part {
    pub(super) fn name(self) -> String {
        match self {
            Self::Guests(group, kernel) => format!("guests on {kernel}: {group}"),
            Self::Faults(case) => format!("faults: {}", case.replace('/', ", ")),
            Self::Soak(_) => "soak".to_owned(),
            Self::Leaks => "leaks".to_owned(),
            Self::Sampled(test) => format!("comm's {test}"),
            Self::Hostile(_) => "hostile targets".to_owned(),
        }
    }

    pub(super) fn run(self, run: &Run, report: &mut Report) -> Result<Outcome> {
        match self {
            Self::Guests(group, kernel) => layers::run_guests(Selection::Left(group, kernel), report),
            Self::Faults(case) => layers::faults(&["--case", case, "--rounds", "20"]),
            Self::Soak(minutes) => layers::soak(&[minutes]),
            Self::Leaks => layers::leaks(run, report),
            Self::Sampled(test) => {
                let mut command = ringsight_testbed::workspace::cargo();
                command
                    .args(["test", "--locked", "-p", "ringsight-comm", "--test", test])
                    .env(FULL, "1");
                report.cargo_test(&mut command)
            }
            Self::Hostile(seconds) => {
                let mut command = ringsight_testbed::workspace::cargo();
                command
                    .args([
                        "test",
                        "--locked",
                        "-p",
                        "ringsight-tests",
                        "--test",
                        "hostile",
                        "random",
                    ])
                    .env("HOSTILE_SECONDS", seconds);
                report.cargo_test(&mut command)
            }
        }
    }
}

/// The part with this number.
pub(super) fn numbered(number: &str) -> Result<Part> {
    number
        .parse()
        .ok()
        .and_then(|number: usize| PARTS.get(number).copied())
        .with_context(|| format!("--rotating {number}: a number below {}, or `list`", PARTS.len()))
}

/// The part whose turn the checked-out commit is, and why it is.
pub(super) fn of_head() -> Result<(Part, String)> {
    let git = |arguments: &[&str]| {
        process::output(
            std::process::Command::new("git")
                .args(arguments)
                .current_dir(root()),
        )
    };
    let hash = git(&["rev-parse", "HEAD"])?;
    // A shallow clone does not know how many commits there are.
    let count = match git(&["rev-parse", "--is-shallow-repository"])?.as_str() {
        "false" => Some(git(&["rev-list", "--count", "HEAD"])?.parse()?),
        _ => None,
    };
    let (number, why) = turn(&hash, count, PARTS.len())?;
    Ok((PARTS[number], why))
}

/// The number of the part, of so many, whose turn a commit is: by how many commits there are up to it, which gives each
/// commit the next part; by its hash where that is not known.
fn turn(hash: &str, count: Option<u64>, parts: usize) -> Result<(usize, String)> {
    let short = hash.get(..8).context("a commit's hash is too short")?;
    let (value, what) = match count {
        Some(count) => (count, format!("commit {short} is number {count}")),
        None => (
            u64::from_str_radix(short, 16).with_context(|| format!("{hash} is no commit's hash"))?,
            format!("commit {short}, in a shallow clone, is taken by its hash"),
        ),
    };
    let number = (value % parts as u64) as usize;
    Ok((
        number,
        format!(
            "{what}, modulo {parts} parts is {number}; `cargo xtask test --rotating {number}` runs it again"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn commits_in_a_row_run_each_part_once() {
        let numbers: BTreeSet<usize> = (858..858 + 7)
            .map(|count| turn("ce79caa0c0ffee", Some(count), 7).unwrap().0)
            .collect();
        assert_eq!(numbers, (0..7).collect());
    }

    #[test]
    fn a_shallow_clone_goes_by_the_hash() {
        let (number, why) = turn("0000000a00000000", None, 7).unwrap();
        assert_eq!(number, 3);
        assert!(why.contains("0000000a") && why.contains("--rotating 3"), "{why}");
        assert!(turn("xyz", None, 7).is_err());
        assert!(turn("not hexadecimal", None, 7).is_err());
    }

    #[test]
    fn parts_are_numbered_and_differ() {
        let names: BTreeSet<String> = PARTS.iter().map(|part| part.name()).collect();
        assert_eq!(names.len(), PARTS.len());
        assert_eq!(numbered("0").unwrap().name(), PARTS[0].name());
        for absent in [PARTS.len().to_string().as_str(), "-1", "leaks", ""] {
            assert!(numbered(absent).is_err(), "{absent}");
        }
    }
}
