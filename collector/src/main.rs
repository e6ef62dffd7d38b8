//! `ringsight`: watches running processes and sends what their collectives did.

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests play whoever else writes there")
)]

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
