//! Measurements against goals: a [`Row`] for each figure, with the [`Goal`] that its median has to reach.
//!
//! Criterion's benchmarks leave their medians in files ([`criterion`]). Benchmarks with a main function of their own print JSON ([`json`]).
//! The others ([`attached`], [`live`], [`probe`]) attach a collector to a process and measure from outside.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use serde::Serialize;

pub mod attached;
pub mod json;
pub mod live;
pub mod probe;

use crate::{
    process,
    workspace::{self, cargo},
};

/// Goals for criterion benchmarks: identifier and the most that its median may be, nanoseconds.
const GOALS: [(&str, f64); 3] = [
    ("comm_init/threads/256", 2e9),
    ("observe/probe function, unattached", 3.0),
    ("observe/dense event, armed", 40.0),
];

/// Where a median has to lie.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Goal {
    /// At this or below: costs.
    AtMost(f64),
    /// At this or above: rates.
    AtLeast(f64),
}

impl Goal {
    /// Whether `value` reaches it; what is not a number does not.
    #[must_use]
    pub fn met(self, value: f64) -> bool {
        match self {
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(most) => write!(f, "<= {most}"),
            Self::AtLeast(least) => write!(f, ">= {least}"),
        }
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Name.
    pub name: String,
    /// Median of several runs, or the one figure of what is measured once.
    pub median: f64,
    /// The least of the runs, if it is told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// Its unit.
    pub unit: &'static str,
    /// Where the median has to lie; `None` if there is no goal.
    pub goal: Option<Goal>,
    /// What else is worth knowing.
    pub note: String,
}

impl Row {
    /// A measurement without a goal.
    #[must_use]
    pub fn new(name: impl Into<String>, median: f64, unit: &'static str) -> Self {
        Self {
            name: name.into(),
            median,
            min: None,
            unit,
            goal: None,
            note: String::new(),
        }
    }

    /// The same with a goal.
    #[must_use]
    pub fn goal(self, goal: Goal) -> Self {
        Self {
            goal: Some(goal),
            ..self
        }
    }

    /// The same with what else is worth knowing.
    #[must_use]
    pub fn note(self, note: impl Into<String>) -> Self {
        Self {
            note: note.into(),
            ..self
        }
    }

    /// Whether the median reaches the goal, if there is one.
    #[must_use]
    pub fn meets(&self) -> Option<bool> {
        Some(self.goal?.met(self.median))
    }
}

/// Runs a criterion target and reads the medians that it leaves under `target/criterion`.
///
/// # Errors
/// If it cannot be built or run, or leaves nothing.
pub fn criterion(package: &str, target: &str) -> Result<Vec<Row>> {
    let folder = workspace::target()?.join("criterion");
    // What an earlier run left would look like this one's.
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let mut command = cargo();
    command
        .args(["bench", "--locked", "-p", package, "--bench", target])
        .env("CRITERION_HOME", &folder);
    // The rows below are the result; criterion's own lines go where progress goes.
    let status = command
        .stdout(std::io::stderr())
        .status()
        .with_context(|| process::line(&command))?;
    if !status.success() {
        bail!("{} failed: {}", process::line(&command), process::reason(status));
    }
    let mut rows = Vec::new();
    for file in estimates(&folder)? {
        rows.push(row(&file)?);
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    if rows.is_empty() {
        bail!(
            "{} left no estimates in {}",
            process::line(&command),
            folder.display()
        );
    }
    Ok(rows)
}

/// Every `new/estimates.json` below `folder`.
fn estimates(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.ends_with("new/estimates.json") {
                found.push(path);
            }
        }
    }
    Ok(found)
}

fn row(estimates: &Path) -> Result<Row> {
    let read = |file: &Path| -> Result<serde_json::Value> {
        let text = fs::read_to_string(file)?;
        serde_json::from_str(&text).with_context(|| file.display().to_string())
    };
    let median = read(estimates)?["median"]["point_estimate"]
        .as_f64()
        .context("no median in criterion's estimates")?;
    let benchmark = read(&estimates.with_file_name("benchmark.json"))?;
    let name = benchmark["full_id"]
        .as_str()
        .context("no name in criterion's benchmark.json")?
        .to_owned();
    // Throughput is per iteration: an iteration of many elements is worth its rate.
    let elements = benchmark["throughput"]["Elements"].as_f64();
    let note = elements.map_or_else(String::new, |n| format!("{:.2} M elements/s", n * 1e3 / median));
    let goal = GOALS
        .iter()
        .find(|(id, _)| *id == name)
        .map(|(_, most)| Goal::AtMost(*most));
    Ok(Row {
        goal,
        ..Row::new(name, median, "ns").note(note)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_have_a_direction() {
        assert!(Goal::AtMost(3.0).met(3.0) && !Goal::AtMost(3.0).met(3.1));
        assert!(Goal::AtLeast(3.0).met(3.0) && !Goal::AtLeast(3.0).met(2.9));
        assert!(!Goal::AtMost(3.0).met(f64::NAN) && !Goal::AtLeast(3.0).met(f64::NAN));
        assert_eq!(
            serde_json::to_string(&Goal::AtLeast(3.0)).unwrap(),
            r#"{"at_least":3.0}"#
        );
    }

    #[test]
    fn criterions_files_become_rows() {
        let top = tempfile::tempdir().unwrap();
        let folder = top.path().join("a/new");
        fs::create_dir_all(&folder).unwrap();
        let estimates_file = folder.join("estimates.json");
        fs::write(&estimates_file, r#"{"median":{"point_estimate":2.5}}"#).unwrap();
        let name = GOALS[0].0;
        fs::write(
            folder.join("benchmark.json"),
            format!(r#"{{"full_id":"{name}","throughput":{{"Elements":5}}}}"#),
        )
        .unwrap();
        assert_eq!(
            estimates(top.path()).unwrap(),
            std::slice::from_ref(&estimates_file)
        );
        let row = row(&estimates_file).unwrap();
        assert_eq!(
            (row.median, row.goal, row.meets()),
            (2.5, Some(Goal::AtMost(GOALS[0].1)), Some(true))
        );
        assert_eq!(row.note, "2000.00 M elements/s");
        fs::write(&estimates_file, "rubbish").unwrap();
        assert!(super::row(&estimates_file).is_err());
    }
}
