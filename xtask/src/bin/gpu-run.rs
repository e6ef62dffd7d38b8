//! What `run.sh` of a GPU bundle starts.

use std::process::ExitCode;

use clap::Parser as _;
use xtask::gpu::run;

fn main() -> ExitCode {
    match run::run(&run::Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}
