//! The journal of a round: what ranks, and what does something to them, write down, one JSON line an event. The library never reads it.

use std::{
    fs::{File, OpenOptions},
    io::Write as _,
    path::Path,
};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::ranks::monotonic_ns;

/// Something that happened on a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Event {
    pub(super) rank: u32,
    /// `CLOCK_MONOTONIC`, which processes of a machine share.
    pub(super) ns: u64,
    pub(super) what: What,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum What {
    /// The fault is about to begin.
    Fault,
    /// The rank is about to call an operation before the fault, by its number, or has called it (`launched`).
    Before { number: u32, launched: bool },
    /// The rank is about to call the operation.
    Called,
    /// It has called it.
    Launched,
    /// A thread of the rank's process that only sleeps did not run for so long when it was to, until now.
    Stalled { ms: u64 },
    /// Its communicator had failed before it came to that.
    TooLate,
    /// Its communicator has failed.
    Failed { code: i32, text: String },
    /// The operation is done; the state of the communicator then, and whether the result is right.
    Completed { code: i32, right: bool },
    /// The rank is at a point of an operation of a soak, by the operation's number.
    Soaked { operation: u32, moment: Moment },
    /// The rank is about to end without an error of its own.
    Done,
}

/// See [`What::Soaked`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Moment {
    /// It is about to call it.
    Called,
    /// It has called it.
    Launched,
    /// Its stream has nothing else to do before.
    Arrived,
    /// It is known to be done.
    Finished,
}

/// The file of a round that its ranks write.
pub(super) struct Journal(File);

impl Journal {
    /// Opens the file of a round, which all its ranks append to.
    pub(super) fn open(path: &Path) -> Result<Self> {
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map(Self)
            .with_context(|| format!("opening {}", path.display()))
    }

    /// Notes what happens on a rank now; on the disk before this returns, whatever becomes of the process.
    pub(super) fn note(&self, rank: u32, what: What) -> Result<()> {
        let ns = monotonic_ns();
        // One write: lines of several ranks do not mix.
        let line = serde_json::to_string(&Event { rank, ns, what })? + "\n";
        (&self.0)
            .write_all(line.as_bytes())
            .context("writing what is true")
    }
}

/// Reads what the ranks of a round have written.
///
/// # Errors
/// The system's, or the line that is none.
pub(super) fn read(path: &Path) -> Result<Vec<Event>> {
    let text = fs_err::read_to_string(path)?;
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("{}: {line}", path.display())))
        .collect()
}
