//! Paths of the workspace, and builds of what jobs run.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use serde_json::Value;

use crate::process;

/// Root of the workspace.
#[must_use]
pub fn root() -> PathBuf {
    // Cargo sets the variable for what it runs; the built-in path serves a binary that is started by hand.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let built_in = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = if manifest.parent().is_some_and(|root| root.join("xtask").is_dir()) {
        manifest
    } else {
        built_in.into()
    };
    manifest.parent().map_or(manifest.clone(), Path::to_path_buf)
}

/// The cargo that runs us, at the root of the workspace.
#[must_use]
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
    // What cargo told us of our own package is not the next build's: build scripts that watch such a variable (ring's
    // does) would run again each time that another package starts a build.
    for (name, _) in std::env::vars_os() {
        let own = [
            "CARGO_PKG_",
            "CARGO_MANIFEST_",
            "CARGO_CRATE_",
            "CARGO_BIN_",
            "CARGO_PRIMARY_",
        ];
        if name
            .to_str()
            .is_some_and(|name| own.iter().any(|prefix| name.starts_with(prefix)))
        {
            command.env_remove(name);
        }
    }
    command.current_dir(root());
    command
}

/// Cargo's target folder for this workspace.
///
/// # Errors
/// If cargo cannot tell.
pub fn target() -> Result<PathBuf> {
    if let Some(folder) = std::env::var_os("CARGO_TARGET_DIR") {
        return Ok(root().join(folder));
    }
    let metadata =
        process::output(cargo().args(["metadata", "--format-version=1", "--no-deps", "--offline"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("output of cargo metadata")?;
    metadata["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .context("cargo metadata names no target_directory")
}

/// What the demo, the tests and the archive run.
#[derive(Clone, Debug)]
pub struct Artifacts {
    /// The collector, `ringsight`.
    pub ringsight: PathBuf,
    /// Folder that holds the library as `libnccl.so.2`.
    pub library_folder: PathBuf,
    /// `xtask`, for worker processes.
    pub xtask: PathBuf,
    /// Cargo's target folder.
    pub target: PathBuf,
}

/// Builds collector, library and workers with optimisation, by the toolchains that are installed.
///
/// # Errors
/// If the build fails.
pub fn build() -> Result<Artifacts> {
    compile(&["ringsight-collector", "ringsight-comm", "xtask"])?;
    artifacts()
}

/// As [`build`] without the collector, which alone needs the eBPF toolchain.
pub(crate) fn build_job() -> Result<Artifacts> {
    compile(&["ringsight-comm", "xtask"])?;
    locate(&["libringsight_comm.so", "xtask"])
}

/// The library as [`build`] makes it, but for records and kernels' events: to measure what these cost.
///
/// # Errors
/// If the build fails.
pub fn without_records() -> Result<PathBuf> {
    let target = target()?.join("no-records");
    process::run(
        building(&["ringsight-comm"])
            // Kept apart: what differs would be built anew each time.
            .env("CARGO_TARGET_DIR", &target)
            .env("RINGSIGHT_NO_RECORDS", "1")
            .env("RINGSIGHT_NVCC_FLAGS", "-DRINGSIGHT_NO_EVENTS")
            // It is carried to GPUs: those that the figures are of, and, by PTX, newer ones.
            .env("RINGSIGHT_CUDA_ARCHITECTURES", "90"),
    )?;
    Ok(target.join("release/libringsight_comm.so"))
}

fn compile(packages: &[&str]) -> Result<()> {
    process::run(&mut building(packages))
}

fn building(packages: &[&str]) -> Command {
    let mut command = cargo();
    command
        .args(["build", "--release", "--locked"])
        .args(packages.iter().flat_map(|name| ["-p", name]))
        // Not `rank-worker`, which is of comm's tests.
        .arg("--lib");
    for (package, program) in [("ringsight-collector", "ringsight"), ("xtask", "xtask")] {
        if packages.contains(&package) {
            command.args(["--bin", program]);
        }
    }
    command
}

/// What [`build`] has built.
///
/// # Errors
/// Names the file that is missing.
pub fn artifacts() -> Result<Artifacts> {
    locate(&["ringsight", "libringsight_comm.so", "xtask"])
}

fn locate(needed: &[&str]) -> Result<Artifacts> {
    let target = target()?;
    let release = target.join("release");
    if let Some(file) = needed
        .iter()
        .map(|name| release.join(name))
        .find(|file| !file.is_file())
    {
        bail!(
            "{} is not built: cargo build --release -p ringsight-collector -p ringsight-comm -p xtask",
            file.display()
        );
    }
    let library_folder = target.join("ringsight-lib");
    install_library(&release.join("libringsight_comm.so"), &library_folder)?;
    Ok(Artifacts {
        ringsight: release.join("ringsight"),
        library_folder,
        xtask: release.join("xtask"),
        target,
    })
}

/// Copies the library to `folder/libnccl.so.2` if it differs from what is there. The old file is replaced, never
/// written to: a job may still run on it.
fn install_library(library: &Path, folder: &Path) -> Result<()> {
    let installed = folder.join("libnccl.so.2");
    let content = fs::read(library)?;
    if fs::read(&installed).is_ok_and(|present| present == content) {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    let fresh = folder.join(format!("libnccl.so.2.{}", std::process::id()));
    fs::write(&fresh, content)?;
    Ok(fs::rename(&fresh, &installed)?)
}

/// A test of a package, as cargo has built it.
#[derive(Clone, Debug)]
pub struct TestProgram {
    /// The test's program.
    pub file: PathBuf,
    /// Programs of its package, which its tests start by these paths.
    pub starts: Vec<PathBuf>,
}

/// Builds the test programs that `arguments` of cargo select; cargo's messages about programs, as `--message-format=json` has them.
///
/// # Errors
/// If something cannot be built.
pub fn test_artifacts(arguments: &[&str]) -> Result<Vec<Value>> {
    let mut command = cargo();
    command
        .args(["test", "--locked", "--no-run"])
        .arg("--message-format=json-render-diagnostics")
        .args(arguments)
        .stderr(Stdio::inherit());
    let messages = process::output(&mut command)?;
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    Ok(messages
        .filter(|message| message["executable"].is_string())
        .collect())
}

/// Builds a test of a package.
///
/// # Errors
/// If it cannot be built, or there is no such test.
pub fn test_program(package: &str, test: &str) -> Result<TestProgram> {
    let target: &[&str] = if test == "lib" {
        &["--lib"]
    } else {
        &["--test", test]
    };
    let (mut file, mut starts) = (None, Vec::new());
    for message in test_artifacts(&[&["-p", package], target].concat())? {
        let executable = PathBuf::from(message["executable"].as_str().unwrap_or_default());
        if message["profile"]["test"] == true {
            file = Some(executable);
        } else if message["target"]["kind"][0] == "bin" {
            starts.push(executable);
        }
    }
    let file = file.with_context(|| format!("cargo built no test {test} of {package}"))?;
    Ok(TestProgram { file, starts })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_the_workspace() {
        assert!(root().join("Cargo.toml").is_file());
        assert!(root().join("probes/records").is_dir());
    }
}
