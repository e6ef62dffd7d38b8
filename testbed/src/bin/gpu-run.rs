//! The runner of a GPU bundle, which `run.sh` starts.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ringsight_testbed::{faults, gpu::run};

/// Tests and measures the library on the GPUs of this machine.
#[derive(Parser, Debug)]
#[command(
    name = "run.sh",
    bin_name = "run.sh",
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true,
    override_usage = "run.sh [OPTIONS] [PART]..."
)]
struct Program {
    #[command(subcommand)]
    piece: Option<Piece>,
    #[command(flatten)]
    options: Option<run::Options>,
}

/// What a part starts this program for.
#[derive(Subcommand, Debug)]
enum Piece {
    /// Faults of many kinds.
    #[command(hide = true)]
    Faults(faults::Arguments),
    /// Ranks of a round of `faults`.
    #[command(hide = true)]
    FaultWorker(faults::worker::Arguments),
    /// What holds a rank of such a round as debuggers do.
    #[command(hide = true)]
    FaultDebugger,
}

fn main() -> ExitCode {
    let program = Program::parse();
    let ended = match (&program.piece, &program.options) {
        (Some(Piece::Faults(arguments)), _) => faults::run(arguments),
        (Some(Piece::FaultWorker(arguments)), _) => faults::worker::run(arguments).map(|()| true),
        (Some(Piece::FaultDebugger), _) => faults::debugger::run().map(|()| true),
        (None, Some(options)) => run::run(options),
        (None, None) => Err(anyhow::anyhow!("start it by run.sh of a bundle")),
    };
    match ended {
        Ok(is_well) => ExitCode::from(u8::from(!is_well)),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
