//! Builds the eBPF programs of `ebpf/` and leaves the object in `$OUT_DIR/ringsight.bpf.o`.
//!
//! The programs need another target (`bpfel-unknown-none`), hence `core` from source and a linker of its own. Looked for,
//! in this order:
//! 1. `RINGSIGHT_BPF_OBJECT`: a ready object, nothing is compiled;
//! 2. `RINGSIGHT_BPF_CARGO`, `RINGSIGHT_BPF_RUSTC`, `RINGSIGHT_BPF_LINKER`: tools by path;
//! 3. Debian's `/usr/bin/rustc` and `/usr/bin/cargo` with the `rust-web-src` package;
//! 4. a rustup nightly with the `rust-src` component.
//!
//! The linker is `bpf-linker` in `${RINGSIGHT_CACHE:-${XDG_CACHE_HOME:-~/.cache}/ringsight}/bin` or in `PATH`.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::{Command, exit},
};

const REMEDY: &str =
    "run `cargo xtask setup`, which installs what is missing, or set RINGSIGHT_BPF_OBJECT to a ready object";
const VARIABLES: [&str; 5] = [
    "RINGSIGHT_BPF_OBJECT",
    "RINGSIGHT_BPF_CARGO",
    "RINGSIGHT_BPF_RUSTC",
    "RINGSIGHT_BPF_LINKER",
    "RINGSIGHT_CACHE",
];

fn main() {
    for source in [
        "build.rs",
        "ebpf/src",
        "ebpf/Cargo.toml",
        "ebpf/Cargo.lock",
        "records/src",
        "records/Cargo.toml",
    ] {
        println!("cargo::rerun-if-changed={source}");
    }
    for name in VARIABLES {
        println!("cargo::rerun-if-env-changed={name}");
    }
    if let Err(message) = object() {
        println!("cargo::error=eBPF programs: {message}; {REMEDY}");
        exit(1);
    }
}

fn object() -> Result<(), String> {
    let out = PathBuf::from(variable("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let object = out.join("ringsight.bpf.o");
    if let Some(ready) = variable("RINGSIGHT_BPF_OBJECT") {
        return fs::copy(&ready, &object)
            .map(drop)
            .map_err(|error| format!("cannot copy RINGSIGHT_BPF_OBJECT {}: {error}", ready.display()));
    }
    let (cargo, rustc) = toolchain()?;
    let linker = linker()?;
    let manifest = PathBuf::from(variable("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set")?);
    // target/<profile>/build/<package>/out: one build of `core` serves every profile.
    let target_dir = out.ancestors().nth(4).unwrap_or(&out).join("bpf");
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let flags = [
        // Which registers `ctx.arg(n)` reads.
        format!("--cfg=bpf_target_arch=\"{architecture}\""),
        "-Cdebuginfo=2".into(),
        "-Clink-arg=--btf".into(),
        format!("-Clinker={}", linker.display()),
    ]
    .join("\x1f");

    let mut build = Command::new(&cargo);
    // What the outer cargo and rustup put into the environment speaks of another build.
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if (name.starts_with("CARGO") && name != "CARGO_HOME")
            || (name.starts_with("RUST") && name != "RUSTUP_HOME")
        {
            build.env_remove(name);
        }
    }
    build
        .current_dir(manifest.join("ebpf"))
        .env("RUSTC", &rustc)
        // `-Zbuild-std` on a stable toolchain; the target's `core` exists in no other form.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags)
        .args([
            "build",
            "--release",
            "--locked",
            "-Zbuild-std=core",
            "--target=bpfel-unknown-none",
        ])
        .arg("--target-dir")
        .arg(&target_dir);
    let output = build
        .output()
        .map_err(|error| format!("cannot run {}: {error}", cargo.display()))?;
    if !output.status.success() {
        return Err(format!(
            "`{}` failed ({}):\n{}",
            cargo.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )
        .replace('\n', "\ncargo::error="));
    }
    let built = target_dir.join("bpfel-unknown-none/release/ringsight");
    fs::copy(&built, &object)
        .map(drop)
        .map_err(|error| format!("cannot copy {}: {error}", built.display()))
}

fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// `cargo` and `rustc` of one toolchain that has the library source.
fn toolchain() -> Result<(PathBuf, PathBuf), String> {
    if let (Some(cargo), Some(rustc)) = (variable("RINGSIGHT_BPF_CARGO"), variable("RINGSIGHT_BPF_RUSTC")) {
        return Ok((cargo.into(), rustc.into()));
    }
    let debian = (PathBuf::from("/usr/bin/cargo"), PathBuf::from("/usr/bin/rustc"));
    if has_library_source(&debian.1) && debian.0.exists() {
        return Ok(debian);
    }
    let rustup = |tool: &str| {
        let output = Command::new("rustup")
            .args(["which", "--toolchain", "nightly", tool])
            .output()
            .ok()?;
        let path = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| PathBuf::from(path.trim()))
    };
    if let (Some(cargo), Some(rustc)) = (rustup("cargo"), rustup("rustc"))
        && has_library_source(&rustc)
    {
        return Ok((cargo, rustc));
    }
    Err(
        "no Rust toolchain with library source: neither Debian's rustc-web, cargo-web and rust-web-src \
         nor a rustup nightly with rust-src"
            .into(),
    )
}

fn has_library_source(rustc: &Path) -> bool {
    let Ok(output) = Command::new(rustc).args(["--print", "sysroot"]).output() else {
        return false;
    };
    let sysroot = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success()
        && Path::new(&sysroot)
            .join("lib/rustlib/src/rust/library/core")
            .exists()
}

fn linker() -> Result<PathBuf, String> {
    if let Some(path) = variable("RINGSIGHT_BPF_LINKER") {
        return Ok(path.into());
    }
    let home = || variable("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = variable("RINGSIGHT_CACHE").map(PathBuf::from).or_else(|| {
        Some(
            variable("XDG_CACHE_HOME")
                .map(PathBuf::from)
                .or_else(home)?
                .join("ringsight"),
        )
    });
    let path = variable("PATH").unwrap_or_default();
    cache
        .into_iter()
        .map(|cache| cache.join("bin"))
        .chain(env::split_paths(&path))
        .map(|directory| directory.join("bpf-linker"))
        .find(|file| file.is_file())
        .ok_or_else(|| "bpf-linker was not found".into())
}
