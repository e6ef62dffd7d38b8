//! The command line.

mod attach;
mod connections;
mod explain;
mod list;
mod log;
mod outputs;
mod report;
mod signals;
mod snapshot;
mod verdicts;

use std::{path::PathBuf, process::ExitCode};

use clap::{CommandFactory, Parser, Subcommand};
use tracing::error;

/// How a command ended. Usage errors exit with 2, which is clap's doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Everything went well.
    Success = 0,
    /// Something failed that is none of the others.
    Error = 1,
    /// The command line makes no sense.
    Usage = 2,
    /// Nothing could be attached to.
    NothingAttached = 3,
    /// Not everything reached where it was to go.
    ExportIncomplete = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[derive(Debug, Parser)]
#[command(name = "ringsight", version, about = "Sees the collectives of running processes", long_about = None)]
#[command(
    after_help = "Exit codes: 0 success, 1 error, 2 wrong usage, 3 nothing could be attached, 4 export incomplete."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Watch running processes until they end, a signal comes or the time is over
    Attach(Box<attach::AttachArguments>),
    /// Show what would be probed in a process, and what it would cost
    List {
        /// Process to look at
        pid: u32,
        /// Write JSON
        #[arg(long)]
        json: bool,
    },
    /// Show the operations that processes are in now, and which rank they wait for, without attaching
    Snapshot {
        /// Processes of one job, on this host; with all ranks of a communicator it can tell who is missing
        #[arg(required = true)]
        pids: Vec<u32>,
        /// Write JSON
        #[arg(long)]
        json: bool,
        /// Also write what each rank is in to PREFIX and its rank, a file of PyTorch's Flight Recorder
        #[arg(long, value_name = "PREFIX")]
        dump: Option<PathBuf>,
        /// The same as JSON
        #[arg(long, value_name = "PREFIX")]
        dump_json: Option<PathBuf>,
    },
    /// Tell which algorithm a library takes for an operation, and why not another
    Explain(Box<explain::ExplainArguments>),
    /// Write a completion script for a shell to standard output
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
}

/// Runs the command that the arguments name.
pub(crate) fn main() -> ExitCode {
    let command = Arguments::parse().command;
    let quiet = matches!(&command, Command::Attach(arguments) if arguments.quiet);
    if let Err(problem) = log::init(quiet) {
        // There is no log to say it in.
        eprintln!("ringsight: {problem}");
        return Exit::Usage.into();
    }
    let exit = match command {
        Command::Attach(arguments) => attach::run(&arguments),
        Command::List { pid, json } => list::run(pid, json),
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Snapshot {
            pids,
            json,
            dump,
            dump_json,
        } => snapshot::run(&pids, json, dump.as_deref(), dump_json.as_deref()),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "ringsight", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
    };
    exit.into()
}

/// Writes to standard output. A reader that has gone away is no error worth a message.
fn print(text: &str) -> Exit {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Exit::Success,
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Exit::Success,
        Err(error) => {
            error!("cannot write to standard output: {error}");
            Exit::Error
        }
    }
}

/// Writes a file so that a reader sees all of it or nothing: beside it first, then in its place. A pipe or a device is
/// written to: in its place a file would help nobody.
fn write_whole(path: &PathBuf, text: &str) -> Result<(), String> {
    if path.metadata().is_ok_and(|about| !about.is_file()) {
        return std::fs::write(path, text)
            .map_err(|error| format!("cannot write {}: {error}", path.display()));
    }
    let mut beside = path.clone().into_os_string();
    beside.push(format!(".{}.tmp", std::process::id()));
    std::fs::write(&beside, text)
        .and_then(|()| std::fs::rename(&beside, path))
        .map_err(|error| {
            // What is left of it, if anything, is of no use.
            let _ = std::fs::remove_file(&beside);
            format!("cannot write {}: {error}", path.display())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn files_appear_whole_and_leave_nothing_beside_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ready.json");
        write_whole(&path, "{}").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        let error = write_whole(&folder.path().join("no/such/folder"), "").unwrap_err();
        assert!(error.contains("no/such/folder"), "{error}");
        // A full device stays what it is.
        let link = folder.path().join("full");
        std::os::unix::fs::symlink("/dev/full", &link).unwrap();
        let error = write_whole(&link, "{}").unwrap_err();
        assert!(error.contains("No space left"), "{error}");
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
