//! stub
use anyhow::Result;
/// o
#[derive(clap::Args, Debug)]
pub struct Options {}
/// r
/// # Errors
/// n
pub fn run(_: &Options) -> Result<std::process::ExitCode> {
    anyhow::bail!("x")
}
