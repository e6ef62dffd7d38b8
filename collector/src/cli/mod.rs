//! The command line.

mod attach;
mod connections;
mod explain;
mod findings;
mod launcher;
mod list;
mod log;
mod outputs;
mod report;
mod signals;
mod snapshot;
mod verdicts;

use std::process::ExitCode;

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
    /// Nothing could be attached to, or only processes without a communicator whose children have one.
    NothingAttached = 3,
    /// Not everything reached where it was to go.
    ExportIncomplete = 4,
    /// A watchdog has called an operation a hang.
    HangSeen = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

#[derive(Debug, Parser)]
#[command(name = "ringsight", version, about = "Sees the collectives of running processes", long_about = None)]
#[command(
    after_help = "Exit codes: 0 success, 1 error, 2 wrong usage, 3 nothing could be attached, 4 export incomplete, 5 a hang was seen."
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
    Snapshot(snapshot::SnapshotArguments),
    /// Tell which algorithm a library takes for an operation, and why not another
    Explain(Box<explain::ExplainArguments>),
    /// Load the library on standard input in this process, which gives up all rights before. For `explain` alone
    #[command(name = ringsight_collector::explain::COMMAND, hide = true)]
    ExplainLibrary,
    /// Write a completion script for a shell to standard output
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
}

/// Runs the command that the arguments name.
pub(crate) fn main() -> ExitCode {
    let command = Arguments::parse().command;
    if matches!(command, Command::ExplainLibrary) {
        // Before anything is opened or started in this process.
        ringsight_collector::explain::answer();
        return Exit::Success.into();
    }
    let quiet = matches!(&command, Command::Attach(arguments) if arguments.quiet);
    if let Err(problem) = log::init(quiet) {
        // There is no log to say it in.
        eprintln!("ringsight: {problem}");
        return Exit::Usage.into();
    }
    let exit = match command {
        // It has handled signals, and waits for standard error accordingly.
        Command::Attach(arguments) => return attach::run(&arguments).into(),
        Command::List { pid, json } => list::run(pid, json),
        Command::Explain(arguments) => explain::run(&arguments),
        Command::Snapshot(arguments) => snapshot::run(&arguments),
        Command::ExplainLibrary => unreachable!("it has been run above"),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "ringsight", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
    };
    log::flush(|| false);
    exit.into()
}

/// Writes text to standard output. A name in it that others chose must be a [`ringsight_output::Printable`]: what a terminal would obey is
/// escaped here, too, but a line end stays.
fn print(text: &str) -> Exit {
    exit_of(write_stdout(&ringsight_output::lines(text)))
}

/// Writes JSON to standard output, indented.
fn print_json(value: &serde_json::Value) -> Exit {
    exit_of(write_stdout(&ringsight_output::json(&format!("{value:#}\n"))))
}

/// Writes to standard output what a terminal may obey. `false`: the reader has gone away, which is no error worth a message.
fn write_stdout(text: &str) -> std::io::Result<bool> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => {
            error!("cannot write to standard output: {error}");
            Err(error)
        }
    }
}

fn exit_of(written: std::io::Result<bool>) -> Exit {
    written.map_or(Exit::Error, |_| Exit::Success)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
