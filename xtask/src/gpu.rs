//! `cargo xtask gpu`: the bundle for GPU hosts, built where there is no GPU.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ringsight_testbed::{
    gpu::{
        bundle::{Sources, fill},
        nccl_tests::Tools,
    },
    machine::{c_toolchain, make_whole},
    process, workspace,
};

use crate::setup;

/// What to do for GPUs.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Makes a folder that tests and measures the library on a GPU host: target/gpu-bundle/.
    ///
    /// Copy it there and run its run.sh; `run.sh --list` names the parts. It needs a driver and, for some parts, PyTorch
    /// and the NCCL that comes with it; no compiler and no network.
    Bundle(Options),
}

/// Runs it.
pub fn run(command: &Command) -> Result<()> {
    match command {
        Command::Bundle(options) => make(options).map(drop),
    }
}

/// What goes into the bundle, and where it goes.
#[derive(Args, Clone, Debug, Default)]
pub struct Options {
    /// Source tree of nccl-tests (<https://github.com/NVIDIA/nccl-tests>), to be built and put in.
    #[arg(long, value_name = "DIR")]
    nccl_tests: Option<PathBuf>,
    /// Folder of compute-sanitizer in a CUDA toolkit, to be put in; without it the GPU host's own is used, if it has one.
    #[arg(long, value_name = "DIR")]
    sanitizer: Option<PathBuf>,
    /// Where to make it [default: target/gpu-bundle]. A bundle that is there is replaced.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// By this file a folder is known as a bundle, which may be replaced.
const MARK: &str = "run.sh";

/// Makes the bundle; returns its folder.
fn make(options: &Options) -> Result<PathBuf> {
    let out = match &options.out {
        Some(out) => out.clone(),
        None => workspace::target()?.join("gpu-bundle"),
    };
    if out.exists() && !out.join(MARK).is_file() {
        bail!(
            "{} is there and is no bundle: name another folder, or remove it",
            out.display()
        );
    }
    // The library without kernels would be of no use there.
    let nvcc = setup::nvcc().context("the library for GPUs needs nvcc")?;
    let built = setup::build()?;
    let without_records = workspace::without_records()?;
    process::run(workspace::cargo().args([
        "build",
        "--release",
        "--locked",
        "-p",
        "ringsight-testbed",
        "--bin",
        "gpu-run",
    ]))?;
    c_toolchain()?;
    let tools = match &options.nccl_tests {
        Some(_) => Some(Tools {
            nvcc,
            headers: setup::nvidia_headers()?,
        }),
        None => None,
    };
    let sources = Sources {
        built: &built,
        without_records: &without_records,
        nccl_tests: options.nccl_tests.as_deref().zip(tools.as_ref()),
        sanitizer: options.sanitizer.as_deref(),
    };
    let mut bytes = 0;
    make_whole(&out, |part| {
        bytes = fill(part, &sources)?;
        Ok(())
    })?;
    println!(
        "{} ({:.1} MiB): copy it to a GPU host and run its run.sh",
        out.display(),
        bytes as f64 / f64::from(1 << 20)
    );
    Ok(out)
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    #[test]
    fn a_folder_that_is_no_bundle_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        fs::write(folder.join("thesis.txt"), "years of work").unwrap();
        let options = Options {
            out: Some(folder.to_owned()),
            ..Options::default()
        };
        let error = make(&options).unwrap_err().to_string();
        assert!(error.contains("is no bundle"), "{error}");
        assert!(folder.join("thesis.txt").is_file());
    }
}
