//! Tools that builds and tests use, installed as far as they are missing: CUDA's compiler, the toolchain of the eBPF objects, NVIDIA's
//! headers, Jaeger, Chromium, cargo-fuzz.
//!
//! Every function looks first, so a second run costs milliseconds. System packages come from apt (as root or through `sudo`). The rest is
//! compiled or unpacked into the cache ([`cache`]).

use std::{
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use ringsight_testbed::{
    machine::{apt, c_toolchain, cache, make_whole, say},
    process,
    workspace::{self, Artifacts},
};

mod tools;
mod ui;

pub use tools::{chromium, jaeger};
pub use ui::{cached_jaeger_ui, jaeger_ui, jaeger_ui_remedy};

/// Version of bpf-linker: the last one whose features name the LLVM that the compilers below bring.
const BPF_LINKER: &str = "0.13.0";
/// Version of cargo-fuzz.
const CARGO_FUZZ: &str = "0.13.2";
/// Debian's compiler for packages that need a recent one, and the source of its `core`.
const DEBIAN_RUST: [&str; 3] = ["rustc-web", "cargo-web", "rust-web-src"];

/// What NVIDIA's compiler consists of, as PyPI has it. kernels/build.rs looks for it in [`CUDA_FOLDER`] of the cache.
const CUDA_WHEELS: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
];
const CUDA_FOLDER: &str = "cuda-13.0";

/// A compiler that can build `core` for `bpfel-unknown-none`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Compiler {
    rustc: PathBuf,
    /// LLVM's major version, and its shared library.
    llvm: (u32, PathBuf),
}

/// What compiles eBPF programs.
#[derive(Debug, Default)]
pub struct EbpfTools {
    /// A cargo and a rustc that can build `core` for `bpfel-unknown-none`.
    pub cargo: PathBuf,
    /// See there.
    pub rustc: PathBuf,
    /// bpf-linker.
    pub linker: PathBuf,
}

/// Installs what compiles eBPF programs, as far as it is missing.
///
/// # Errors
/// Names the command to run where this cannot be done here.
pub fn ebpf_tools() -> Result<EbpfTools> {
    let compiler = match compiler() {
        Some(compiler) => compiler,
        None => install_compiler()?,
    };
    install_bpf_linker(&compiler)?;
    Ok(EbpfTools {
        cargo: compiler.rustc.with_file_name("cargo"),
        rustc: compiler.rustc,
        linker: cache()?.join("bin/bpf-linker"),
    })
}

/// As [`ebpf_tools`].
pub fn ebpf_toolchain() -> Result<()> {
    ebpf_tools().map(drop)
}

/// Puts the headers of all wheels in a folder (`nvidia/*/include` of each) into one, and drops the wheels.
const UNPACK: &str = r"
import glob, os, sys, zipfile
folder = sys.argv[1]
for wheel in glob.glob(folder + '/*.whl'):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            at = name.find('/include/')
            if at < 0 or name.endswith('/'):
                continue
            path = folder + name[at:]
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, 'wb') as file:
                file.write(archive.read(name))
    os.remove(wheel)
";

/// Folder of NVIDIA's `nccl.h` with the CUDA headers that it includes, unpacked once from PyPI's wheels (220 MB to download).
/// Nothing of them is linked or shipped: the library is tested against the header that it must agree with.
///
/// # Errors
/// Says what is missing; callers skip what needs it.
pub fn nvidia_headers() -> Result<PathBuf> {
    const WHEELS: [&str; 4] = [
        "nvidia-nccl-cu13==2.30.7",
        "nvidia-cuda-runtime==13.0.*",
        "nvidia-cuda-crt==13.0.*",
        "nvidia-cuda-cccl==13.0.*",
    ];
    let folder = cache()?.join("nccl-2.30.7/include");
    if folder.join("nccl.h").is_file() {
        return Ok(folder);
    }
    let python =
        process::find("python3").context("NVIDIA's headers are fetched by pip, and there is no python3")?;
    say("NVIDIA's NCCL headers (once, 220 MB to download)");
    make_whole(&cache()?.join("nccl-2.30.7"), |part| {
        fs::create_dir(part.join("include"))?;
        process::output(
            Command::new(&python)
                .args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"])
                .arg(part)
                .args(WHEELS),
        )?;
        process::output(Command::new(&python).args(["-c", UNPACK]).arg(part)).map(drop)
    })?;
    if !folder.join("nccl.h").is_file() {
        bail!("NVIDIA's wheel has no nccl.h");
    }
    Ok(folder)
}

/// Installs cargo-fuzz into the cache, once.
pub fn cargo_fuzz() -> Result<PathBuf> {
    let program = cache()?.join("bin/cargo-fuzz");
    let version = || process::output(Command::new(&program).arg("--version")).ok();
    if version().is_some_and(|text| text.ends_with(CARGO_FUZZ)) {
        return Ok(program);
    }
    say(&format!(
        "cargo-fuzz {CARGO_FUZZ} (compiled once, about a minute)"
    ));
    cargo_install("cargo-fuzz", CARGO_FUZZ, &[], None)?;
    Ok(program)
}

/// Compiles a program from crates.io into the cache; `llvm` is where its build looks for LLVM.
fn cargo_install(name: &str, version: &str, features: &[&str], llvm: Option<&Path>) -> Result<()> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["install", name, "--version", version, "--locked", "--force"])
        .args(features)
        .arg("--root")
        .arg(cache()?)
        // A target folder or flags meant for the workspace are not meant for the tool.
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .envs(llvm.map(|llvm| ("LLVM_PREFIX", llvm)));
    process::run(&mut command)
}

/// `program` run with the nightly toolchain, which sanitizers need.
///
/// # Errors
/// Says how to install that toolchain where it is not.
pub fn nightly_command(program: &Path) -> Result<Command> {
    let rustup =
        process::find("rustup").context("fuzzers need rustup with a nightly toolchain: https://rustup.rs")?;
    process::output(Command::new(&rustup).args(["which", "--toolchain", "nightly", "rustc"]))
        .context("fuzzers need the nightly toolchain: rustup toolchain install nightly --profile minimal")?;
    let mut command = Command::new(rustup);
    command
        .args(["run", "nightly"])
        .arg(program)
        .arg("fuzz")
        // The stable cargo that runs us, which cargo-fuzz would run again.
        .env_remove("CARGO")
        .env_remove("RUSTC");
    Ok(command)
}

/// NVIDIA's compiler for the kernels, in `RINGSIGHT_NVCC` or fetched once from PyPI (60 MB); no GPU and no driver is needed.
///
/// # Errors
/// Says what is missing. Without it the library is built for the host device only.
pub fn nvcc() -> Result<PathBuf> {
    if let Some(nvcc) = std::env::var_os("RINGSIGHT_NVCC").filter(|path| !path.is_empty()) {
        return Ok(nvcc.into());
    }
    c_toolchain()?;
    let folder = cache()?.join(CUDA_FOLDER);
    let nvcc = folder.join("nvidia/cu13/bin/nvcc");
    let stamp = folder.join("wheels");
    let wheels = CUDA_WHEELS.join("\n");
    if process::is_program(&nvcc) && fs::read_to_string(&stamp).is_ok_and(|present| present == wheels) {
        return Ok(nvcc);
    }
    let pip = |python: &Path| {
        let mut pip = Command::new(python);
        pip.args(["-m", "pip"]);
        pip
    };
    let with_pip = || {
        let python = process::find("python3")?;
        process::output(pip(&python).arg("--version"))
            .is_ok()
            .then_some(python)
    };
    let python = match with_pip() {
        Some(python) => python,
        None => {
            apt::install(&["python3-pip"])?;
            with_pip().context("the package python3-pip brought no pip")?
        }
    };
    say("CUDA's compiler (nvcc 13.0, from PyPI, 60 MB)");
    make_whole(&folder, |part| {
        process::run(
            pip(&python)
                .args(["install", "--no-deps", "--only-binary=:all:", "--no-compile"])
                .arg("--target")
                .arg(part)
                .args(CUDA_WHEELS),
        )?;
        Ok(fs::write(part.join("wheels"), wheels)?)
    })?;
    if !process::is_program(&nvcc) {
        bail!("the wheels were unpacked, but {} is not there", nvcc.display());
    }
    Ok(nvcc)
}

/// The compiler that probes/build.rs will use: Debian's, else a rustup nightly; either with the source of its `core`.
fn compiler() -> Option<Compiler> {
    // Kept once it is found (each look starts five processes); its absence is not, since it may be installed next.
    static FOUND: OnceLock<Compiler> = OnceLock::new();
    if FOUND.get().is_none() {
        let compiler = debian().or_else(nightly)?;
        let _ = FOUND.set(compiler);
    }
    FOUND.get().cloned()
}

fn nightly() -> Option<Compiler> {
    let rustup = process::find("rustup")?;
    let rustc =
        process::output(Command::new(&rustup).args(["which", "--toolchain", "nightly", "rustc"])).ok()?;
    let rustc = PathBuf::from(rustc);
    let sysroot = PathBuf::from(process::output(Command::new(&rustc).args(["--print", "sysroot"])).ok()?);
    if !sysroot
        .join("lib/rustlib/src/rust/library/core/src/lib.rs")
        .is_file()
    {
        return None;
    }
    let llvm = llvm_of(&rustc, &sysroot.join("lib"))?;
    Some(Compiler { rustc, llvm })
}

fn debian() -> Option<Compiler> {
    let rustc = PathBuf::from("/usr/bin/rustc");
    if !process::is_program(Path::new("/usr/bin/cargo")) || !process::is_program(&rustc) {
        return None;
    }
    let version = process::output(Command::new(&rustc).arg("--version")).ok()?;
    // "rustc 1.96.0 (...)"; the packages of a plain `rustc` are too old and have no source beside them. So is the
    // `rustc-web` of a Debian 12 whose security suite is not among its sources: `llvm_of` refuses it.
    let version = version.split(' ').nth(1)?.to_owned();
    if !Path::new(&format!("/usr/src/rustc-{version}/library/core/src/lib.rs")).is_file() {
        return None;
    }
    let llvm = llvm_of(&rustc, Path::new("/usr/lib/x86_64-linux-gnu"))?;
    Some(Compiler { rustc, llvm })
}

/// Major version and shared library of the LLVM in `rustc`: its bitcode can be linked by the same LLVM only.
fn llvm_of(rustc: &Path, folder: &Path) -> Option<(u32, PathBuf)> {
    let text = process::output(Command::new(rustc).arg("-vV")).ok()?;
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("LLVM version: "))?;
    let major: u32 = version.split('.').next()?.parse().ok()?;
    if !LLVM_MAJORS.contains(&major) {
        return None;
    }
    // `libLLVM.so.22.1` from Debian, `libLLVM.so.22.1-rust-1.97.0-nightly` from rustup.
    let prefix = format!("libLLVM.so.{major}.");
    let library = fs::read_dir(folder)
        .ok()?
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))?
        .path();
    Some((major, library))
}

/// LLVM versions that this bpf-linker has a feature for.
const LLVM_MAJORS: std::ops::RangeInclusive<u32> = 21..=23;

/// The first of these that works: Debian's packages, a rustup nightly.
fn install_compiler() -> Result<Compiler> {
    let rustup = process::find("rustup");
    let mut failures = Vec::new();
    if apt::has(DEBIAN_RUST[0]) {
        // Debian 12 brings a new enough compiler as a security update: lists from before it know an old one only.
        apt::update();
        match apt::install(&DEBIAN_RUST).and_then(|()| {
            debian().context(
                "the packages hold no compiler of LLVM 21 or newer (Debian 12: the suite bookworm-security has one)",
            )
        }) {
            Ok(compiler) => return Ok(compiler),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    let mut rustup_line = vec![
        "toolchain",
        "install",
        "nightly",
        "--profile=minimal",
        "--component=rust-src",
    ];
    if let Some(rustup) = &rustup {
        say("a nightly Rust compiler with the source of `core` (rustup)");
        let done = process::run(Command::new(rustup).args(&rustup_line));
        match done.and_then(|()| nightly().context("rustup installed no usable nightly")) {
            Ok(compiler) => return Ok(compiler),
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    rustup_line.insert(0, "rustup");
    bail!(
        "eBPF programs need a compiler with the source of `core`. Run one of\n    {}\n    {}\nand then this command \
         again. What was tried here:\n    {}",
        rustup_line.join(" "),
        apt::line(&DEBIAN_RUST).join(" "),
        if failures.is_empty() {
            "nothing: neither apt nor rustup is here".to_owned()
        } else {
            failures.join("\n    ")
        }
    )
}

fn install_bpf_linker(compiler: &Compiler) -> Result<()> {
    let cache = cache()?;
    let program = cache.join("bin/bpf-linker");
    // The program may be there and not start: built for a compiler that was replaced since.
    let works = |program: &Path| {
        process::output(Command::new(program).arg("--version"))
            .is_ok_and(|version| version.ends_with(BPF_LINKER))
            && process::output(Command::new("ldd").arg(program))
                .is_ok_and(|libraries| libraries.contains(&format!("libLLVM.so.{}.", compiler.llvm.0)))
    };
    if works(&program) {
        return Ok(());
    }
    let (major, library) = &compiler.llvm;
    let prefix = cache.join(format!("llvm{major}-prefix"));
    let links = prefix.join("lib");
    fs::create_dir_all(&links)?;
    // Under the name that the linker looks for, and under its own: the program is started with this folder as run path.
    let own_name = library.file_name().context("libLLVM has no name")?;
    for name in [std::ffi::OsStr::new("libLLVM.so"), own_name] {
        let link = links.join(name);
        let _ = fs::remove_file(&link);
        symlink(library, &link)?;
    }
    say(&format!(
        "bpf-linker {BPF_LINKER} for LLVM {major} (compiled once, about a minute)"
    ));
    let start = Instant::now();
    let feature = format!("llvm-{major}");
    let features = ["--no-default-features", "--features", &feature];
    cargo_install("bpf-linker", BPF_LINKER, &features, Some(&prefix))?;
    if !works(&program) {
        bail!(
            "{} was built but does not run with {}; `ldd` on it says what it misses",
            program.display(),
            library.display()
        );
    }
    say(&format!(
        "bpf-linker is ready after {:.0} s",
        start.elapsed().as_secs_f64()
    ));
    Ok(())
}

/// Installs what the build can use, then builds collector, library and workers with optimisation.
pub fn build() -> Result<Artifacts> {
    optional("nvcc", nvcc());
    workspace::build()
}

/// Says what an optional tool came to.
pub fn optional(name: &str, found: Result<PathBuf>) {
    match found {
        Ok(path) => say(&format!("{name}: {}", path.display())),
        Err(error) => say(&format!("{name}: none ({error:#})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_without_its_llvm_is_none() {
        assert_eq!(llvm_of(Path::new("/nonexistent/rustc"), Path::new("/")), None);
    }
}
