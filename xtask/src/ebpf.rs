//! The eBPF objects that the repository carries: building them from `probes/ebpf`, and checking that they are what the sources say.
//!
//! `probes` embeds the committed object of its target architecture (`probes/ebpf/object/<architecture>.bpf.o`), so that stable Rust alone
//! builds it. `cargo xtask ebpf` writes these objects anew; `cargo xtask ebpf --check` compares a fresh build with them.
//!
//! The programs need `core` from source, for a target that no toolchain ships (`bpfel-unknown-none`), and a linker of their own. The
//! compiler is, in this order:
//! 1. `RINGSIGHT_BPF_CARGO` and `RINGSIGHT_BPF_RUSTC`;
//! 2. Debian's `/usr/bin/cargo` and `/usr/bin/rustc` with the package `rust-web-src`;
//! 3. a rustup nightly with the component `rust-src`.
//!
//! The linker is `RINGSIGHT_BPF_LINKER`, else the one in the cache of tools ([`setup::ebpf_tools`]).
//!
//! Invariants:
//! - Neither an absolute path nor the place of the checkout reaches an object (`--remap-path-prefix`).
//! - An object holds no DWARF. BTF stays: the kernel's verifier reads it.
//! - `probes/ebpf/object/TOOLS` names the tools that made the objects. A difference found with other tools says so.

use std::{
    env,
    ffi::OsString,
    fmt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use clap::Args;
use fs_err as fs;
use object::build::elf::{Builder, SectionData};
use ringsight_testbed::{
    process,
    workspace::{root, target},
};

use crate::setup::{self, EbpfTools};

mod listing;

/// Architectures whose objects are committed: the registers that hold a probed function's arguments differ.
const ARCHITECTURES: [&str; 2] = ["aarch64", "x86_64"];
/// Folder of the committed objects, in the workspace.
const OBJECTS: &str = "probes/ebpf/object";
/// File in that folder that names the tools.
const TOOLS: &str = "TOOLS";
/// What precedes the tools' names in [`TOOLS`].
const TOOLS_HEAD: &str =
    "# The tools that made the objects in this folder. `cargo xtask ebpf` writes both.\n";

/// Options of `cargo xtask ebpf`.
#[derive(Args, Debug)]
pub struct Options {
    /// Compares a fresh build with the committed objects (instructions, maps, relocations) and changes nothing.
    #[arg(long)]
    check: bool,
    /// Writes objects whose programs log (feature `log`) to target/bpf/log, for RINGSIGHT_BPF_OBJECT; the committed ones stay.
    #[arg(long, conflicts_with = "check")]
    log: bool,
}

/// How a fresh build differs from the committed objects.
#[derive(Debug)]
pub struct Difference {
    /// Unified diffs of listings.
    report: String,
    /// `None` if the tools are those that made the committed objects: then the sources and the objects disagree. Otherwise both sets of
    /// tools by name: then the compiler may be the reason.
    pub other_tools: Option<String>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.report)?;
        match &self.other_tools {
            None => write!(
                f,
                "the committed eBPF objects differ from their sources: run `cargo xtask ebpf` and commit {OBJECTS}"
            ),
            Some(tools) => write!(
                f,
                "the build differs from the committed eBPF objects, and so do the tools: {tools}"
            ),
        }
    }
}

/// Runs the command; with `--check`, says whether nothing differs.
///
/// # Errors
/// If the toolchain cannot be had, or the programs do not compile.
pub fn run(options: &Options) -> Result<bool> {
    if options.check {
        let difference = check()?;
        match &difference {
            Some(difference) => println!("{difference}"),
            None => println!(
                "the committed eBPF objects have the instructions, maps and relocations of their sources"
            ),
        }
        return Ok(difference.is_none());
    }
    let toolchain = Toolchain::find()?;
    if options.log {
        write(&toolchain, &["log"], &target()?.join("bpf/log"))?;
        return Ok(true);
    }
    let folder = root().join(OBJECTS);
    let tools = toolchain.describe()?;
    write(&toolchain, &[], &folder)?;
    fs::write(folder.join(TOOLS), format!("{TOOLS_HEAD}{tools}"))?;
    Ok(true)
}

/// Builds the programs of every architecture and compares them with the committed objects.
pub fn check() -> Result<Option<Difference>> {
    let toolchain = Toolchain::find()?;
    let folder = root().join(OBJECTS);
    let mut report = String::new();
    for architecture in ARCHITECTURES {
        let path = folder.join(file_name(architecture));
        let committed = fs::read(&path)?;
        let built = toolchain.build(architecture, &[])?;
        let difference = listing::difference(&committed, &built)
            .with_context(|| format!("comparing with {}", path.display()))?;
        if let Some(difference) = difference {
            report += &format!("{OBJECTS}/{}:\n{difference}", file_name(architecture));
        }
    }
    if report.is_empty() {
        return Ok(None);
    }
    let pinned = fs::read_to_string(folder.join(TOOLS))?;
    let pinned = pinned.strip_prefix(TOOLS_HEAD).unwrap_or(&pinned).to_owned();
    let here = toolchain.describe()?;
    let words = |tools: &str| tools.trim_end().replace('\n', ", ");
    let other_tools =
        (here != pinned).then(|| format!("{} here, {} for the committed ones", words(&here), words(&pinned)));
    Ok(Some(Difference { report, other_tools }))
}

fn file_name(architecture: &str) -> String {
    format!("{architecture}.bpf.o")
}

fn write(toolchain: &Toolchain, features: &[&str], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder)?;
    for architecture in ARCHITECTURES {
        let path = folder.join(file_name(architecture));
        let object = toolchain.build(architecture, features)?;
        fs::write(&path, object)?;
        println!("{}", path.display());
    }
    Ok(())
}

/// A compiler that can build `core` for `bpfel-unknown-none`, and the linker.
struct Toolchain(EbpfTools);

impl Toolchain {
    /// The tools that variables name; for others, installs what is missing.
    fn find() -> Result<Self> {
        let cargo = variable("RINGSIGHT_BPF_CARGO").zip(variable("RINGSIGHT_BPF_RUSTC"));
        let linker = variable("RINGSIGHT_BPF_LINKER").map(PathBuf::from);
        let found = match (&cargo, &linker) {
            (Some(_), Some(_)) => EbpfTools::default(),
            _ => setup::ebpf_tools()?,
        };
        let cargo = cargo.map(|(cargo, rustc)| (PathBuf::from(cargo), PathBuf::from(rustc)));
        let (cargo, rustc) = cargo.unwrap_or((found.cargo, found.rustc));
        let linker = linker.unwrap_or(found.linker);
        Ok(Self(EbpfTools { cargo, rustc, linker }))
    }

    /// Name and version of each tool that decides what the instructions are, one a line.
    fn describe(&self) -> Result<String> {
        let verbose = process::output(Command::new(&self.0.rustc).arg("-vV"))?;
        let llvm = verbose
            .lines()
            .find_map(|line| line.strip_prefix("LLVM version: "))
            .with_context(|| format!("{} -vV names no LLVM", self.0.rustc.display()))?;
        let rustc = verbose.lines().next().unwrap_or_default();
        let linker = process::output(Command::new(&self.0.linker).arg("--version"))?;
        Ok(format!("{rustc}\nLLVM {llvm}\n{linker}\n"))
    }

    /// Compiles the programs for probed processes of an architecture; the result is an object without DWARF.
    fn build(&self, architecture: &str, features: &[&str]) -> Result<Vec<u8>> {
        let target = target()?.join("bpf");
        let sysroot = process::output(Command::new(&self.0.rustc).args(["--print", "sysroot"]))?;
        let cargo_home = variable("CARGO_HOME")
            .map(PathBuf::from)
            .or_else(|| Some(Path::new(&variable("HOME")?).join(".cargo")));
        let library = Path::new(&sysroot).join("lib/rustlib/src/rust");
        let mut flags = vec![
            // BTF is made of debug information.
            "-Cdebuginfo=2".to_owned(),
            "-Clink-arg=--btf".to_owned(),
            format!("-Clinker={}", self.0.linker.display()),
            remap(&root(), "ringsight"),
            // By both of its names: Debian's is a link.
            remap(&library, "rust"),
        ];
        flags.extend(library.canonicalize().map(|library| remap(&library, "rust")));
        flags.extend(cargo_home.map(|home| remap(&home.join("registry/src"), "registry")));

        let mut build = Command::new(&self.0.cargo);
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
            .current_dir(root().join("probes/ebpf"))
            .env("RUSTC", &self.0.rustc)
            // Which registers `ctx.arg(n)` reads. A flag in its place would compile `core` once for each architecture.
            .env("AYA_BPF_TARGET_ARCH", architecture)
            // `-Zbuild-std` on a stable toolchain; the target's `core` exists in no other form.
            .env("RUSTC_BOOTSTRAP", "1")
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
            .args(["build", "--release", "--locked", "-Zbuild-std=core"])
            .arg("--target=bpfel-unknown-none")
            .arg("--features")
            .arg(features.join(","))
            .arg("--target-dir")
            .arg(&target);
        process::output(&mut build).context("compiling the eBPF programs")?;
        let built = target.join("bpfel-unknown-none/release/ringsight");
        let object = fs::read(&built)?;
        without_dwarf(&object).with_context(|| format!("reading {}", built.display()))
    }
}

fn remap(from: &Path, to: &str) -> String {
    format!("--remap-path-prefix={}={to}", from.display())
}

/// The object without the sections that only debuggers read.
fn without_dwarf(object: &[u8]) -> Result<Vec<u8>> {
    let mut builder = Builder::read(object)?;
    for section in &mut builder.sections {
        let name = section.name.as_slice();
        section.delete = name.starts_with(b".debug") || name.starts_with(b".rel.debug");
    }
    builder.delete_orphans();
    // LLVM keeps the names of sections and of symbols in one table, the builder in two.
    let names = builder.sections.add();
    names.name = b".shstrtab".as_slice().into();
    names.sh_type = object::elf::SHT_STRTAB;
    names.sh_addralign = 1;
    names.data = SectionData::SectionString;
    let mut bytes = Vec::new();
    builder.write(&mut bytes)?;
    Ok(bytes)
}

fn variable(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}
