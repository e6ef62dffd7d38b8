//! Who sets a variable, and what to: the environment, else NCCL's configuration files ([`conf`]).
//!
//! The log reads its variables here, and [`crate::env`] those of everything else, which it logs.

mod conf;

use std::fmt;

use conf::ConfFiles;

use crate::fork::PerProcess;

/// Read at the first variable that the environment does not set. A forked child reads them anew: the thread that held the lock of
/// an unfinished reading does not exist there.
static FILES: PerProcess<ConfFiles> = PerProcess::new();

/// Who set a variable.
pub(crate) enum Source {
    Environment,
    /// The file with this path.
    File(&'static str),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Environment => "environment",
            Self::File(path) => path,
        })
    }
}

/// The value of a variable as it was written, and who set it.
pub(crate) fn find(name: &str) -> Option<(String, Source)> {
    if let Some(value) = std::env::var_os(name) {
        return Some((value.to_string_lossy().into_owned(), Source::Environment));
    }
    let (value, path) = FILES.get().value(name)?;
    Some((value.to_owned(), Source::File(path)))
}

/// What is wrong with the configuration files, a sentence each.
pub(crate) fn complaints() -> &'static [String] {
    FILES.get().complaints()
}
