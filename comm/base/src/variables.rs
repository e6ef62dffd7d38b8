//! Values of variables: the environment's, else those of NCCL's configuration files ([`conf`]). The log reads its settings here; all other
//! code reads variables by [`crate::env`], which logs them.

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

/// The value of a variable as it was written. Nothing is logged: the log reads its own variables so.
pub(crate) fn raw(name: &str) -> Option<String> {
    find(name).map(|(value, _)| value)
}

/// What is wrong with the configuration files, a sentence each.
pub(crate) fn complaints() -> &'static [String] {
    FILES.get().complaints()
}
