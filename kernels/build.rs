//! Compiles the kernels of `cuda/` and leaves them in `$OUT_DIR/kernels.fatbin`: machine code for each architecture
//! below, and PTX for those that come after them.
//!
//! nvcc is looked for in this order:
//! 1. `RINGSIGHT_NVCC`: a path; `none` builds without kernels;
//! 2. `cuda-13.0` in `${RINGSIGHT_CACHE:-${XDG_CACHE_HOME:-~/.cache}/ringsight}`, where `cargo xtask setup` puts it;
//! 3. `PATH`.
//!
//! `RINGSIGHT_NVCC_FLAGS` are given to it besides, as in `-DRINGSIGHT_NO_EVENTS` (`cuda/report.cuh`). `RINGSIGHT_CUDA_ARCHITECTURES` names others than
//! those below, as in `90` for Hopper alone.
//!
//! Without nvcc, or without the C++ compiler that it needs, the crate is built without kernels: the host device works, and
//! opening the CUDA device says what is missing. Kernels that do not compile are an error.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, exit},
};

/// Ampere, Hopper, Blackwell; the first is that of the PTX.
const ARCHITECTURES: &str = "80 90 100";
/// Nothing is fused, so that results are the host device's, bit by bit.
const FLAGS: [&str; 4] = ["-O3", "-std=c++17", "-fmad=false", "--threads=2"];

fn main() {
    for source in ["build.rs", "cuda"] {
        println!("cargo::rerun-if-changed={source}");
    }
    for name in [
        "RINGSIGHT_NVCC",
        "RINGSIGHT_NVCC_FLAGS",
        "RINGSIGHT_CUDA_ARCHITECTURES",
        "RINGSIGHT_CACHE",
    ] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rustc-check-cfg=cfg(ringsight_no_events)");
    let flags = variable("RINGSIGHT_NVCC_FLAGS").unwrap_or_default();
    let flags = flags.to_string_lossy().replace("-D ", "-D");
    if flags
        .split_ascii_whitespace()
        .any(|flag| flag == "-DRINGSIGHT_NO_EVENTS")
    {
        println!("cargo::rustc-cfg=ringsight_no_events");
    }
    if let Err(message) = kernels() {
        println!(
            "cargo::error=kernels: {}",
            message.replace('\n', "\ncargo::error=")
        );
        exit(1);
    }
}

fn kernels() -> Result<(), String> {
    let out = PathBuf::from(variable("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let built = out.join("kernels.fatbin");
    let missing = match toolchain() {
        Ok(nvcc) => {
            compile(&nvcc, &out, &built)?;
            String::new()
        }
        Err(missing) => {
            fs::write(&built, []).map_err(|error| format!("cannot write {}: {error}", built.display()))?;
            missing
        }
    };
    println!("cargo::rustc-env=RINGSIGHT_NO_KERNELS={missing}");
    Ok(())
}

/// nvcc, or what is missing.
fn toolchain() -> Result<PathBuf, String> {
    let nvcc = match variable("RINGSIGHT_NVCC") {
        Some(name) if name == "none" => return Err("RINGSIGHT_NVCC=none when it was built".into()),
        Some(path) => PathBuf::from(path),
        None => {
            let cached = cache().map(|cache| cache.join("cuda-13.0/nvidia/cu13/bin/nvcc"));
            match &cached {
                Some(cached) if cached.is_file() => println!("cargo::rerun-if-changed={}", cached.display()),
                // Seen when set-up creates it: cargo looks at a folder's files, and this one holds few.
                Some(cached) => {
                    if let Some(folder) = cached.ancestors().nth(4).filter(|folder| folder.is_dir()) {
                        println!("cargo::rerun-if-changed={}", folder.display());
                    }
                }
                None => {}
            }
            cached
                .filter(|path| path.is_file())
                .or_else(|| find("nvcc"))
                .ok_or("nvcc was not found when it was built (`cargo xtask setup` installs it)")?
        }
    };
    find("g++")
        .map(|_| nvcc)
        .ok_or_else(|| "g++, which nvcc needs, was not found when it was built".into())
}

fn compile(nvcc: &Path, out: &Path, built: &Path) -> Result<(), String> {
    let folder =
        PathBuf::from(variable("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?).join("cuda");
    let mut command = Command::new(nvcc);
    command.args(FLAGS).arg("--fatbin");
    if let Some(flags) = variable("RINGSIGHT_NVCC_FLAGS") {
        command.args(flags.to_string_lossy().split_ascii_whitespace());
    }
    let architectures = match variable("RINGSIGHT_CUDA_ARCHITECTURES") {
        Some(told) => told.to_string_lossy().into_owned(),
        None => ARCHITECTURES.to_owned(),
    };
    let architectures: Vec<&str> = architectures.split_ascii_whitespace().collect();
    let is_number = |word: &&str| word.starts_with(|first: char| first.is_ascii_digit());
    let (Some(oldest), true) = (architectures.first(), architectures.iter().all(is_number)) else {
        return Err(format!(
            "RINGSIGHT_CUDA_ARCHITECTURES={}: is to be numbers, the oldest first, as in {ARCHITECTURES}",
            architectures.join(" ")
        ));
    };
    for architecture in &architectures {
        command.arg(format!(
            "-gencode=arch=compute_{architecture},code=sm_{architecture}"
        ));
    }
    command.arg(format!("-gencode=arch=compute_{oldest},code=compute_{oldest}"));

    // Profiles and clones share what takes most of a minute and does not depend on them.
    // target/<profile>/build/<package>/out is the place where there is no cache.
    let shared = cache()
        .unwrap_or_else(|| out.ancestors().nth(4).unwrap_or(out).into())
        .join("kernels");
    let key = key(&folder, &command)?;
    let ready = shared.join(format!("{key:016x}.fatbin"));
    let write = |error| format!("cannot write {}: {error}", ready.display());
    if !ready.is_file() {
        fs::create_dir_all(&shared).map_err(write)?;
        // Under another name until it is whole.
        let partial = shared.join(format!("{key:016x}.{}", std::process::id()));
        command.arg("-o").arg(&partial).arg(folder.join("kernels.cu"));
        let output = command
            .output()
            .map_err(|error| format!("cannot run {}: {error}", nvcc.display()))?;
        if !output.status.success() {
            let messages = [output.stdout, output.stderr].concat();
            let messages = String::from_utf8_lossy(&messages);
            return Err(format!(
                "{} failed ({}):\n{messages}",
                nvcc.display(),
                output.status
            ));
        }
        fs::rename(&partial, &ready).map_err(write)?;
    }
    fs::copy(&ready, built)
        .map(drop)
        .map_err(|error| format!("cannot copy {}: {error}", ready.display()))
}

/// What the result depends on: sources, compiler, flags.
fn key(folder: &Path, command: &Command) -> Result<u64, String> {
    let read =
        |path: &Path| fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()));
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .map_err(|error| format!("cannot read {}: {error}", folder.display()))?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    files.sort();
    let mut text = format!("{command:?}").into_bytes();
    let version = Command::new(command.get_program()).arg("--version").output();
    text.extend(
        version
            .map_err(|error| format!("cannot run {command:?}: {error}"))?
            .stdout,
    );
    for file in files {
        text.extend(read(&file)?);
    }
    // FNV-1a.
    Ok(text.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    }))
}

fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

fn find(program: &str) -> Option<PathBuf> {
    env::split_paths(&variable("PATH")?)
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

fn cache() -> Option<PathBuf> {
    let home = || variable("HOME").map(|home| Path::new(&home).join(".cache"));
    variable("RINGSIGHT_CACHE").map(PathBuf::from).or_else(|| {
        let caches = variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        Some(caches.join("ringsight"))
    })
}
