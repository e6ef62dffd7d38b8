//! Compiles C and C++ of the tests, and again only if a source or the command has changed. Shared by the test crates of the
//! workspace through `#[path]`.
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(unreachable_pub, reason = "public in one of the crates that include it")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

/// Runs a compiler's `command`, which lacks its output, unless `output` is what the same command made of the same sources.
///
/// The sources are those that the compiler itself listed. A file with the new content takes the old one's place, so that a
/// program which runs keeps the one that it has.
///
/// # Panics
/// If the compiler cannot be started, or refuses.
#[track_caller]
pub fn compile(command: &mut Command, output: &Path) {
    let beside = |extension: &str| {
        let mut path = output.as_os_str().to_owned();
        path.push(extension);
        PathBuf::from(path)
    };
    let (sources, made_by) = (beside(".d"), beside(".command"));
    let line = format!("{command:?}");
    if fs::read_to_string(&made_by).is_ok_and(|made| made == line) && is_newest(output, &sources) {
        return;
    }
    let folder = output.parent().expect("a file is in a folder");
    fs::create_dir_all(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let fresh = beside(&format!(".{}", std::process::id()));
    let result = command
        .args(["-MMD", "-MF"])
        .arg(&sources)
        .arg("-o")
        .arg(&fresh)
        .output()
        .unwrap_or_else(|error| panic!("cannot start {line}: {error}"));
    let said = String::from_utf8_lossy(&result.stderr);
    assert!(result.status.success(), "{line}:\n{said}");
    fs::rename(&fresh, output).unwrap_or_else(|error| panic!("{}: {error}", output.display()));
    fs::write(&made_by, line).unwrap_or_else(|error| panic!("{}: {error}", made_by.display()));
}

/// Whether a file is newer than all that a list of make's names behind its colon.
fn is_newest(file: &Path, list: &Path) -> bool {
    let time = |path: &Path| -> Option<SystemTime> { path.metadata().ok()?.modified().ok() };
    let (Some(made), Ok(list)) = (time(file), fs::read_to_string(list)) else {
        return false;
    };
    let Some((_, sources)) = list.split_once(": ") else {
        return false;
    };
    sources
        .split_whitespace()
        .filter(|word| *word != "\\")
        .all(|source| time(Path::new(source)).is_some_and(|changed| changed < made))
}

/// Compiles the CUDA driver without a GPU and the programs that run on it into `folder`: `libcuda.so.1`, `driver`, `calls`.
///
/// # Panics
/// As [`compile`].
#[track_caller]
pub fn cuda_without_a_gpu(folder: &Path) {
    // Each crate that includes this file has its folder in the root.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let sources = root.join("comm/tests/cuda");
    compile(
        Command::new("g++")
            .args(["-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-I"])
            .arg(root.join("kernels/cuda"))
            .args(STRICT)
            .arg(sources.join("libcuda.cpp")),
        &folder.join("libcuda.so.1"),
    );
    for program in ["driver", "calls"] {
        compile(
            Command::new("gcc")
                .args(["-std=gnu11", "-Wno-unused-function", "-Wno-unused-variable"])
                .args(STRICT)
                .arg(sources.join(program).with_extension("c"))
                .args(["-ldl", "-lm"]),
            &folder.join(program),
        );
    }
}

/// What all of them are compiled with.
pub const STRICT: [&str; 5] = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread"];
