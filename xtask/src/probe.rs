//! `cargo xtask probe`: builds and runs `ringsight`.

use std::process::ExitCode;

use anyhow::{Context, Result};
use ringsight_testbed::{
    machine, process,
    workspace::{cargo, target},
};

/// Builds `ringsight` and runs it with `arguments`.
///
/// # Errors
/// If it cannot be built or started. Its own failure is the returned exit code.
pub fn run(arguments: &[String]) -> Result<ExitCode> {
    process::run(cargo().args([
        "build",
        "--release",
        "--locked",
        "--quiet",
        "-p",
        "ringsight-collector",
    ]))?;
    let program = target()?.join("release/ringsight");
    let mut command = machine::privileged(&program);
    let status = command
        .args(arguments)
        .status()
        .with_context(|| format!("cannot start {}", program.display()))?;
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::FAILURE, ExitCode::from))
}
