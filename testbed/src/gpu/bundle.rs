//! The content of a GPU bundle.

use std::{path::Path, process::Command};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::{nccl_tests, strip};
use crate::{process, workspace};

/// The most that a bundle may have, bytes.
const MOST: u64 = 60 << 20;

/// Folder of the scripts in the workspace.
const SCRIPTS: &str = "tests/gpu";

/// In a bundle: the library without records.
pub(super) const WITHOUT_RECORDS: &str = "lib/without-records.so";

/// What a bundle is made of.
#[derive(Debug)]
pub struct Sources<'a> {
    /// Collector and library; beside them the runner, `gpu-run`.
    pub built: &'a workspace::Artifacts,
    /// The library without records.
    pub without_records: &'a Path,
    /// Source tree of nccl-tests with what compiles it, if they are to be in it.
    pub nccl_tests: Option<(&'a Path, &'a nccl_tests::Tools)>,
    /// Folder of compute-sanitizer in a CUDA toolkit, if it is to be in it.
    pub sanitizer: Option<&'a Path>,
}

/// Puts everything into `folder`; returns how much it is, bytes.
///
/// # Errors
/// What does not compile or cannot be copied, a bundle that is too large.
pub fn fill(folder: &Path, sources: &Sources<'_>) -> Result<u64> {
    let built = sources.built;
    for name in ["bin", "lib", "scripts"] {
        let folder = folder.join(name);
        fs::create_dir_all(&folder)?;
    }
    let release = built.target.join("release");
    let programs = [
        (built.ringsight.clone(), "bin/ringsight"),
        (release.join("gpu-run"), "bin/gpu-run"),
        (built.library_folder.join("libnccl.so.2"), "lib/libnccl.so.2"),
        (sources.without_records.to_owned(), WITHOUT_RECORDS),
    ];
    for (from, to) in &programs {
        fs::copy(from, folder.join(to))?;
        strip(&folder.join(to))?;
    }
    build_driver(&folder.join("bin/driver"))?;
    build_stuck(&folder.join("lib/stuck.so"))?;
    copy_scripts(&workspace::root().join(SCRIPTS), folder)?;
    if let Some((source, tools)) = sources.nccl_tests {
        nccl_tests::build(source, tools, &built.library_folder, &folder.join("nccl-tests"))?;
    }
    if let Some(source) = sources.sanitizer {
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
    let entries = fs::read_dir(from)?;
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
        fs::create_dir_all(&folder)?;
        fs::copy(&path, folder.join(name))?;
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
    fs::create_dir_all(folder)?;
    for file in fs::read_dir(source)? {
        let path = file?.path();
        if let Some(name) = path.file_name().filter(|_| path.is_file()) {
            fs::copy(&path, folder.join(name))?;
        }
    }
    Ok(())
}

/// Bytes of all files below `folder`.
fn size(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
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
    fn half_a_sanitizer_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        fs::write(folder.join("compute-sanitizer"), "").unwrap();
        let error = add_sanitizer(folder, &folder.join("out"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("TreeLauncherTargetLdPreloadHelper"), "{error}");
        fs::write(folder.join("TreeLauncherTargetLdPreloadHelper"), "").unwrap();
        add_sanitizer(folder, &folder.join("out")).unwrap();
        assert!(folder.join("out/compute-sanitizer").is_file());
    }

    #[test]
    fn scripts_go_where_the_runner_looks_for_them() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        copy_scripts(&workspace::root().join(SCRIPTS), folder).unwrap();
        for file in ["run.sh", "README.md", "scripts/train.py", "scripts/symm.py"] {
            assert!(folder.join(file).is_file(), "{file}");
        }
        assert!(process::is_program(&folder.join("run.sh")));
        assert!(!folder.join("stuck.c").exists(), "it is compiled");
    }
}
