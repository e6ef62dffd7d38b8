//! tests/abi.c, which drives every function of the ABI: against the shipped headers and against NVIDIA's own.

mod native;
#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use native::{include, library, listed, run};

/// Folder of NVIDIA's headers, with the CUDA headers that they need; `cargo xtask test` sets it.
const NVIDIA: &str = "RINGSIGHT_NCCL_INCLUDE";

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/abi.c")
}

/// Compiles the program and runs it; it says how many cases it checked.
#[track_caller]
fn drive(compiler: &str, arguments: &[&str]) -> u32 {
    let folder = tempfile::tempdir().unwrap();
    let (program, linked) = (folder.path().join("abi"), folder.path().join("libnccl.so.2"));
    fs::copy(library(), &linked).unwrap();
    run(Command::new(compiler)
        .args(arguments)
        .arg("-I")
        .arg(include())
        .arg(source())
        .args(["-x", "none", "-o"])
        .arg(&program)
        .arg(&linked));
    let said = run(Command::new(program)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env_remove("NCCL_DEBUG"));
    let summary = said.lines().last().unwrap_or_default();
    let cases = summary
        .strip_suffix(" cases, 0 failures")
        .unwrap_or_else(|| panic!("{said}"));
    cases.parse().unwrap()
}

#[test]
fn every_function_is_driven() {
    let program = fs::read_to_string(source()).unwrap();
    let mut functions = 0;
    for name in listed() {
        // No header declares the internal one, and the other is of ringsight.h.
        if name.starts_with("nccl")
            && !["ncclResetDebugInitInternal", "ncclSimulateKernelTimeout"].contains(&&name[..])
        {
            assert!(program.contains(&format!("{name}(")), "{name}");
            functions += 1;
        }
    }
    assert_eq!(functions, 52);
}

#[test]
fn by_the_shipped_headers() {
    let strict = ["-Wall", "-Wextra", "-Werror"];
    let c = drive("gcc", &[&["-std=gnu11"], &strict[..]].concat());
    let cpp = drive("g++", &[&["-std=c++14", "-x", "c++"], &strict[..]].concat());
    assert!(c > 300 && c == cpp, "{c} {cpp}");
}

#[test]
fn by_the_profiling_names() {
    let folder = tempfile::tempdir().unwrap();
    let header = folder.path().join("twins.h");
    let names = listed();
    let twins: String = names
        .iter()
        .filter(|name| names.contains(&format!("p{name}")))
        .map(|name| format!("#define {name} p{name}\n"))
        .collect();
    fs::write(&header, twins).unwrap();
    let define = format!("-DTWINS_HEADER=\"{}\"", header.display());
    assert!(drive("gcc", &["-std=gnu11", &define]) > 300);
}

#[test]
fn by_nvidias_headers() {
    let Some(headers) = env::var_os(NVIDIA).filter(|folder| !folder.is_empty()) else {
        skip::skip(
            "by_nvidias_headers",
            "RINGSIGHT_NCCL_INCLUDE names no folder of NVIDIA's headers",
        );
        return;
    };
    let system = format!("-I{}", headers.display());
    // NVIDIA's header of the device API is C++ only.
    let cases = drive(
        "g++",
        &["-std=c++14", "-x", "c++", "-w", &system, "-include", "nccl.h"],
    );
    assert!(cases > 300);
    // What was compiled is theirs.
    let defines =
        run(Command::new("gcc").args(["-E", "-dM", "-include", "nccl.h", &system, "-x", "c", "/dev/null"]));
    assert!(
        defines.contains("NCCL_SUFFIX") && !defines.contains("RINGSIGHT_"),
        "not NVIDIA's nccl.h"
    );
}
