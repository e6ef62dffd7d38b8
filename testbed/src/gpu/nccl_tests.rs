//! nccl-tests, built from a source tree so that one binary runs with NCCL or with this library.
//!
//! The build uses NVIDIA's header and links this library, which shows that the library has every function that nccl-tests calls.
//! `LD_LIBRARY_PATH` chooses the library at run time.

use std::{
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::strip;
use crate::process;

/// What is built.
pub(super) const OPERATIONS: [&str; 9] = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "alltoall",
    "sendrecv",
    "gather",
    "scatter",
];

/// CUDA's runtime, which goes beside the programs: statically linked it would be in each of them.
const RUNTIME: &str = "libcudart.so.13";

/// What compiles them.
#[derive(Debug)]
pub struct Tools {
    /// NVIDIA's compiler, in the folder `bin` of a CUDA toolkit.
    pub nvcc: PathBuf,
    /// Folder of NVIDIA's `nccl.h`.
    pub headers: PathBuf,
}

/// Builds the tests of `source` and puts what they need into `out`: the programs, and `verifiable/` with their checks.
pub(super) fn build(source: &Path, tools: &Tools, library_folder: &Path, out: &Path) -> Result<()> {
    let source = fs::canonicalize(source)?;
    if !source.join("src/all_reduce.cu").is_file() || !source.join("verifiable").is_dir() {
        bail!(
            "{} is no source tree of nccl-tests: it has no src/all_reduce.cu or no verifiable/",
            source.display()
        );
    }
    let Tools { nvcc, headers } = tools;
    let cuda = nvcc
        .ancestors()
        .nth(2)
        .with_context(|| format!("{} is in no folder bin", nvcc.display()))?;
    let runtime = runtime(cuda)?;
    // Its Makefile writes where it is told to, and nowhere else.
    let work = out.with_extension("build");
    let home = work.join("home");
    let library = home.join("lib");
    fs::create_dir_all(&library)?;
    for (name, target) in [
        (home.join("include"), headers.clone()),
        (library.join("libnccl.so"), library_folder.join("libnccl.so.2")),
        (library.join("libcudart.so"), runtime.clone()),
    ] {
        symlink(&target, &name)?;
    }
    let built = work.join("built");
    let mut make = Command::new("make");
    make.arg("-C")
        .arg(source.join("src"))
        .arg(format!("-j{}", std::thread::available_parallelism()?))
        .args(variables(&built, cuda, nvcc, &home));
    process::run(&mut make).context("building nccl-tests")?;
    let verifiable = out.join("verifiable");
    fs::create_dir_all(&verifiable)?;
    for operation in OPERATIONS {
        let program = out.join(program(operation));
        fs::copy(built.join(self::program(operation)), &program)?;
        strip(&program)?;
    }
    // A link in the build folder: its name with a number is what the programs look for.
    let checks = verifiable.join("libverifiable.so.0");
    fs::copy(built.join("verifiable/libverifiable.so.0"), &checks)?;
    strip(&checks)?;
    fs::copy(&runtime, out.join(RUNTIME))?;
    Ok(fs::remove_dir_all(&work)?)
}

/// Name of an operation's program.
pub(super) fn program(operation: &str) -> String {
    format!("{operation}_perf")
}

/// The Makefile's variables: Hopper and, as PTX, what comes after it; no MPI.
fn variables(built: &Path, cuda: &Path, nvcc: &Path, home: &Path) -> Vec<String> {
    let folders = [
        ("BUILDDIR", built),
        ("CUDA_HOME", cuda),
        ("CUDA_LIB", &cuda.join("lib")),
        ("NVCC", nvcc),
        ("NCCL_HOME", home),
    ];
    let mut variables: Vec<_> = folders
        .map(|(name, folder)| format!("{name}={}", folder.display()))
        .into();
    variables.extend(["CUDARTLIB=cudart", "MPI=0"].map(str::to_owned));
    // The checks are most of what is compiled: one file for all programs.
    variables.push("DSO=1".to_owned());
    let codes = ["sm_90", "compute_90"].map(|code| format!("-gencode=arch=compute_90,code={code}"));
    variables.push(format!("NVCC_GENCODE={}", codes.join(" ")));
    variables.push(format!("BIN_FILES_LIST={}", OPERATIONS.join(" ")));
    variables
}

/// CUDA's runtime in the folder of the compiler.
fn runtime(cuda: &Path) -> Result<PathBuf> {
    ["lib", "lib64"]
        .iter()
        .map(|folder| cuda.join(folder).join(RUNTIME))
        .find(|file| file.is_file())
        .with_context(|| format!("{} has no {RUNTIME}", cuda.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_folder_is_no_source_tree() {
        let tools = Tools {
            nvcc: PathBuf::new(),
            headers: PathBuf::new(),
        };
        let error = build(&std::env::temp_dir(), &tools, Path::new("/"), Path::new("/")).unwrap_err();
        assert!(
            error.to_string().contains("no source tree of nccl-tests"),
            "{error}"
        );
        let error = build(
            Path::new("/no/such/folder"),
            &tools,
            Path::new("/"),
            Path::new("/"),
        )
        .unwrap_err();
        assert!(error.to_string().contains("/no/such/folder"), "{error}");
    }
}
