//! What tests of the shared library as C programs see it have in common.
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(unreachable_pub, reason = "a module of each test program")]

#[path = "../../../tests/src/compile.rs"]
mod compile;

use std::{
    collections::BTreeSet,
    env,
    path::{Path, PathBuf},
    process::Command,
};

/// The library that this test run built: beside the test's own directory.
pub fn library() -> PathBuf {
    let test = env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let candidates = [
        deps.join("libringsight_comm.so"),
        deps.parent().unwrap().join("libringsight_comm.so"),
    ];
    candidates
        .iter()
        .filter(|path| path.exists())
        .max_by_key(|path| path.metadata().and_then(|data| data.modified()).ok())
        .expect("cargo builds the shared library with the tests of its package")
        .clone()
}

/// The shipped headers.
pub fn include() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("include")
}

/// Output of a command that must succeed.
#[track_caller]
pub fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{command:?}:\n{text}");
    text
}

/// Builds the CUDA driver without a GPU, cuda/libcuda.cpp, the programs that run on it, and the RDMA library, into a folder.
pub fn build_cuda(folder: &Path) {
    compile::cuda_without_a_gpu(folder);
    // The RDMA library, and one from before it registered dma-bufs.
    for (library, flags) in [
        ("verbs/libibverbs.so.1", &[][..]),
        ("old/libibverbs.so.1", &["-DNO_DMA_BUF_MR"]),
    ] {
        compile::compile(
            Command::new("g++")
                .args(["-std=c++17", "-fPIC", "-shared"])
                .args(compile::STRICT)
                .args(flags)
                .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/libibverbs.cpp")),
            &folder.join(library),
        );
    }
}

/// Names that the library exports.
pub fn exports() -> Vec<String> {
    run(Command::new("nm").args(["-D", "--defined-only"]).arg(library()))
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().last().map(str::to_owned))
        .collect()
}

/// Functions of the list that no shipped header declares: those of a younger NCCL.
pub fn undeclared() -> BTreeSet<String> {
    let list =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("abi/exports.txt")).unwrap();
    let (_, younger) = list.split_once("# What NCCL 2.32.3 has besides").unwrap();
    younger
        .lines()
        .skip(1)
        .take_while(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The committed list of symbols.
pub fn listed() -> Vec<String> {
    let list =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("abi/exports.txt")).unwrap();
    let mut names = Vec::new();
    for line in list.lines() {
        let name = line.split('#').next().unwrap().trim();
        if name.is_empty() {
            continue;
        }
        names.push(name.to_owned());
        if name.starts_with("nccl") && !line.contains("no twin") {
            names.push(format!("p{name}"));
        }
    }
    names.sort();
    names
}
