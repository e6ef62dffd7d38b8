//! `cargo xtask gpu`: what runs on GPUs, put together where there is none.
//!
//! `gpu bundle` ([`bundle`]) makes a folder that needs neither compiler nor network; `run.sh` in it is [`mod@run`], which goes
//! there as a program of its own.

pub mod bundle;
mod nccl_tests;
pub mod run;

use anyhow::Result;
use clap::Subcommand;

/// What to do for GPUs.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Makes a folder that tests and measures the library on a GPU host: target/gpu-bundle/.
    ///
    /// Copy it there and run its run.sh; `run.sh --list` names the parts. It needs a driver and, for some parts, PyTorch
    /// and the NCCL that comes with it; no compiler and no network.
    Bundle(bundle::Options),
}

/// Runs it.
///
/// # Errors
/// What could not be built.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Bundle(options) => bundle::make(options).map(drop),
    }
}
