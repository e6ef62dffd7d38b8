//! Chooses the eBPF object that the crate embeds, and gives its path to the compiler as `BPF_OBJECT_PATH`.
//!
//! The object is the committed one of the target's architecture, `ebpf/object/<architecture>.bpf.o`, so that building the crate
//! needs no eBPF toolchain. `RINGSIGHT_BPF_OBJECT` names another object, absolute or relative to this package.
//! `cargo xtask ebpf` makes objects from the sources in `ebpf/`.

use std::{env, path::Path};

/// The variable by which a user names an object.
const GIVEN: &str = "RINGSIGHT_BPF_OBJECT";

fn main() {
    println!("cargo::rerun-if-env-changed={GIVEN}");
    let given = env::var_os(GIVEN).filter(|path| !path.is_empty());
    let architecture = env::var("CARGO_CFG_TARGET_ARCH").unwrap_or_default();
    let package = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default();
    let object = match &given {
        Some(path) => Path::new(&package).join(path),
        None => Path::new(&package).join(format!("ebpf/object/{architecture}.bpf.o")),
    };
    let path = object.display();
    println!("cargo::rerun-if-changed={path}");
    if object.is_file() {
        println!("cargo::rustc-env=BPF_OBJECT_PATH={path}");
    } else if given.is_some() {
        println!("cargo::error={GIVEN} names {path}, which is no file");
    } else {
        println!("cargo::error=there is no eBPF object for {architecture} ({path}): set {GIVEN} to one");
    }
}
