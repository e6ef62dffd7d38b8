//! `ringsight`: watches running processes and sends what their collectives did.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
