//! What the end-to-end tests share: the built programs, jobs, and traces read back from files and backends.
//!
//! The tests run what users run: `ringsight` and worker processes on `libnccl.so.2`, from outside.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use ringsight_testbed::{
    demo::{job::Job, truth::Configuration},
    workspace::{self, Artifacts},
};

pub mod compile;
#[cfg(test)]
mod compile_tests;
mod skip;
pub mod traces;

pub use skip::skip;

/// The longest that a job of these tests may take.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Collector, library and workers, built at the first call.
///
/// # Panics
/// If they cannot be built.
#[must_use]
pub fn artifacts() -> &'static Artifacts {
    static BUILT: OnceLock<Artifacts> = OnceLock::new();
    BUILT.get_or_init(|| {
        workspace::build().unwrap_or_else(|error| panic!("building what is tested: {error:#}"))
    })
}

/// Jobs have the machine to themselves: times are checked.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this process may attach probes; tests of the fallback run in either case.
#[must_use]
pub fn may_attach() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// A job of `ranks` ranks on two nodes, with nobody late.
#[must_use]
pub fn job(ranks: u32, steps: u32, pace_ms: u64) -> Configuration {
    Configuration {
        ranks,
        nodes: ranks.min(2),
        steps,
        batch: 32,
        seed: 11,
        pace_ms,
        delays: Vec::new(),
        wire: None,
    }
}

/// Starts a job; its files go to `folder/job`.
///
/// # Errors
/// See [`Job::start`].
pub fn start(configuration: &Configuration, folder: &Path) -> Result<Job> {
    Job::start(configuration, artifacts(), &folder.join("job"))
}

/// A job of four ranks that goes on for as long as it is let, and has come to its 20th step.
///
/// # Errors
/// It cannot be started, or does not come so far.
pub fn under_way(folder: &Path) -> Result<Job> {
    let mut job = start(&job(4, 100_000, 0), folder)?;
    job.go()?;
    job.wait_step(20, LIMIT)?;
    Ok(job)
}

/// Jaeger's binary, if `cargo xtask test` (or the user) names one, or the cache has one.
#[must_use]
pub fn jaeger_binary() -> Option<PathBuf> {
    let named = std::env::var_os(ringsight_testbed::backend::VARIABLE).map(PathBuf::from);
    named.or_else(ringsight_testbed::backend::cached)
}

/// A folder that goes away with the test.
///
/// # Errors
/// If it cannot be made.
pub fn folder() -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("ringsight-test-")
        .tempdir()
        .context("making a folder for the test")
}
