//! `cargo xtask gpu bundle`: builds everything and puts it into one folder.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use clap::Args;

use super::nccl_tests;
use crate::{process, setup, workspace};

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

/// The most that a bundle may have, bytes.
const MOST: u64 = 60 << 20;

/// By this file a folder is known as a bundle, which may be replaced.
const MARK: &str = "run.sh";

/// Folder of the scripts in the workspace.
const SCRIPTS: &str = "tests/gpu";

/// In a bundle: the library without records.
pub(super) const WITHOUT_RECORDS: &str = "lib/without-records.so";

/// Makes the bundle; returns its folder.
///
/// # Errors
/// What is missing or does not compile, a folder that is no bundle, a bundle that is too large.
pub fn make(options: &Options) -> Result<PathBuf> {
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
    setup::nvcc().context("the library for GPUs needs nvcc")?;
    let built = workspace::build()?;
    let without_records = workspace::without_records()?;
    process::run(workspace::cargo().args([
        "build",
        "--release",
        "--locked",
        "-p",
        "xtask",
        "--bin",
        "gpu-run",
    ]))?;
    let part = out.with_extension(format!("{}.partial", std::process::id()));
    let _ = fs::remove_dir_all(&part);
    let made = fill(&part, &built, &without_records, options);
    if made.is_err() {
        let _ = fs::remove_dir_all(&part);
    }
    let bytes = made?;
    let _ = fs::remove_dir_all(&out);
    fs::rename(&part, &out).with_context(|| format!("creating {}", out.display()))?;
    println!(
        "{} ({:.1} MiB): copy it to a GPU host and run its run.sh",
        out.display(),
        bytes as f64 / f64::from(1 << 20)
    );
    Ok(out)
}

/// Puts everything into `folder`; returns how much it is, bytes.
fn fill(
    folder: &Path,
    built: &workspace::Artifacts,
    without_records: &Path,
    options: &Options,
) -> Result<u64> {
    for name in ["bin", "lib", "scripts"] {
        let folder = folder.join(name);
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    }
    let release = built.target.join("release");
    let programs = [
        (built.ringsight.clone(), "bin/ringsight"),
        (release.join("gpu-run"), "bin/gpu-run"),
        (built.library_folder.join("libnccl.so.2"), "lib/libnccl.so.2"),
        (without_records.to_owned(), WITHOUT_RECORDS),
    ];
    for (from, to) in &programs {
        copy(from, &folder.join(to))?;
        strip(&folder.join(to))?;
    }
    setup::c_toolchain()?;
    build_driver(&folder.join("bin/driver"))?;
    build_stuck(&folder.join("lib/stuck.so"))?;
    copy_scripts(&workspace::root().join(SCRIPTS), folder)?;
    if let Some(source) = &options.nccl_tests {
        nccl_tests::build(source, &built.library_folder, &folder.join("nccl-tests"))?;
    }
    if let Some(source) = &options.sanitizer {
        add_sanitizer(source, &folder.join("sanitizer"))?;
    }
    let bytes = size(folder)?;
    if bytes > MOST {
        bail!(
            "the bundle would be {} MiB, and may be {} MiB",
            bytes >> 20,
            MOST >> 20
        );
    }
    Ok(bytes)
}

/// The program that drives the library through its C interface, on a driver that it loads itself.
fn build_driver(program: &Path) -> Result<()> {
    process::run(
        Command::new("gcc")
            .args(["-std=gnu11", "-O2", "-s", "-Wall", "-Wextra", "-pthread"])
            .arg(workspace::root().join("comm/tests/cuda/driver.c"))
            .arg("-o")
            .arg(program)
            .args(["-ldl", "-lm"]),
    )
}

/// What makes a kernel of a program that knows nothing of it never end.
fn build_stuck(library: &Path) -> Result<()> {
    process::run(
        Command::new("gcc")
            .args(["-std=gnu11", "-O2", "-s", "-Wall", "-Wextra", "-shared", "-fPIC"])
            .arg(workspace::root().join(SCRIPTS).join("stuck.c"))
            .arg("-o")
            .arg(library)
            .arg("-ldl"),
    )
}

/// `run.sh` and the README go to the top, what Python runs into `scripts`.
///
/// # Errors
/// A file that cannot be read or written.
pub fn copy_scripts(from: &Path, bundle: &Path) -> Result<()> {
    let entries = fs::read_dir(from).with_context(|| format!("reading {}", from.display()))?;
    for entry in entries {
        let path = entry
            .with_context(|| format!("reading {}", from.display()))?
            .path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else {
            continue;
        };
        let folder = match path.extension().and_then(|extension| extension.to_str()) {
            Some("py") => bundle.join("scripts"),
            // Compiled, not copied.
            Some("c") => continue,
            _ => bundle.to_path_buf(),
        };
        fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
        copy(&path, &folder.join(name))?;
    }
    Ok(())
}

/// NVIDIA's compute-sanitizer: the files beside the program. Its wheel on PyPI has not all of them, and what is there starts
/// no program.
fn add_sanitizer(source: &Path, folder: &Path) -> Result<()> {
    for needed in ["compute-sanitizer", "TreeLauncherTargetLdPreloadHelper"] {
        if !source.join(needed).is_file() {
            bail!(
                "{} is no folder of compute-sanitizer in a CUDA toolkit: it has no {needed}",
                source.display()
            );
        }
    }
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    for file in fs::read_dir(source).with_context(|| format!("reading {}", source.display()))? {
        let path = file?.path();
        if let Some(name) = path.file_name().filter(|_| path.is_file()) {
            copy(&path, &folder.join(name))?;
        }
    }
    Ok(())
}

pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("copying {} to {}", from.display(), to.display()))
}

/// Without symbols for debuggers; those that the dynamic linker and the collector look for stay.
pub(super) fn strip(file: &Path) -> Result<()> {
    process::run(Command::new("strip").arg("--strip-unneeded").arg(file))?;
    let mode = if file.extension().is_some() { 0o644 } else { 0o755 };
    fs::set_permissions(file, fs::Permissions::from_mode(mode))
        .with_context(|| format!("permissions of {}", file.display()))
}

/// Bytes of all files below `folder`.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))? {
        let entry = entry?;
        let about = entry.metadata()?;
        bytes += if about.is_dir() {
            size(&entry.path())?
        } else {
            about.len()
        };
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_no_bundle_is_left_alone() {
        let folder = std::env::temp_dir().join(format!("no-bundle-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("thesis.txt"), "years of work").unwrap();
        let options = Options {
            out: Some(folder.clone()),
            ..Options::default()
        };
        let error = make(&options).unwrap_err().to_string();
        assert!(error.contains("is no bundle"), "{error}");
        assert!(folder.join("thesis.txt").is_file());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn half_a_sanitizer_is_refused() {
        let folder = std::env::temp_dir().join(format!("sanitizer-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("compute-sanitizer"), "").unwrap();
        let error = add_sanitizer(&folder, &folder.join("out"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("TreeLauncherTargetLdPreloadHelper"), "{error}");
        fs::write(folder.join("TreeLauncherTargetLdPreloadHelper"), "").unwrap();
        add_sanitizer(&folder, &folder.join("out")).unwrap();
        assert!(folder.join("out/compute-sanitizer").is_file());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn scripts_go_where_the_runner_looks_for_them() {
        let folder = std::env::temp_dir().join(format!("scripts-{}", std::process::id()));
        copy_scripts(&workspace::root().join(SCRIPTS), &folder).unwrap();
        for file in ["run.sh", "README.md", "scripts/train.py", "scripts/symm.py"] {
            assert!(folder.join(file).is_file(), "{file}");
        }
        assert!(process::is_program(&folder.join("run.sh")));
        assert!(!folder.join("stuck.c").exists(), "it is compiled");
        fs::remove_dir_all(&folder).unwrap();
    }
}
