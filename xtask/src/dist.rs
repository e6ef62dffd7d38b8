//! stub
use anyhow::Result;
/// o
#[derive(clap::Args, Debug)]
pub struct Options {}
/// r
/// # Errors
/// n
pub fn run(_: &Options) -> Result<std::path::PathBuf> {
    anyhow::bail!("x")
}
/// c
/// # Errors
/// n
pub fn check() -> Result<()> {
    anyhow::bail!("x")
}
