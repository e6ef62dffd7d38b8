//! Tests and measurements on GPUs: the content of a bundle ([`bundle`]), and its runner ([`mod@run`]).
//!
//! A bundle is a folder that needs neither compiler nor network. `gpu-run` in it is the runner.

use std::{os::unix::fs::PermissionsExt as _, path::Path, process::Command};

use anyhow::Result;
use fs_err as fs;

use crate::process;

pub mod bundle;
pub mod nccl_tests;
pub mod run;

/// Without symbols for debuggers; those that the dynamic linker and the collector look for stay.
fn strip(file: &Path) -> Result<()> {
    process::run(Command::new("strip").arg("--strip-unneeded").arg(file))?;
    let mode = if file.extension().is_some() { 0o644 } else { 0o755 };
    Ok(fs::set_permissions(file, std::fs::Permissions::from_mode(mode))?)
}
