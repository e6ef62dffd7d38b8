//! `cargo xtask dist`: the release archive, and a test that unpacks and uses it without cargo.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::Args;
use fs_err as fs;
use ringsight_testbed::{
    process::{self, Guarded},
    workspace::root,
};

use crate::setup;

/// Newest glibc that the archive may ask for: Ubuntu 22.04's, older than Debian 12's 2.36.
const GLIBC: (u32, u32) = (2, 35);
/// Shells that completions are made for, and the file names that these shells look for.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "ringsight"),
    ("zsh", "_ringsight"),
    ("fish", "ringsight.fish"),
];
/// A program of two ranks, compiled against the unpacked header and library.
const TWO_RANKS: &str = include_str!("two_ranks.c");
const README: &str = include_str!("README.in");

/// Nothing to choose yet.
#[derive(Args, Debug)]
pub struct Options {
    /// Also unpack the archive elsewhere and use it.
    #[arg(long)]
    check: bool,
}

/// Makes the archive and says what it needs.
pub fn run(options: &Options) -> Result<()> {
    let archive = pack()?;
    if options.check {
        try_out(&archive)?;
        println!("unpacked elsewhere, it ran `ringsight --version` and a program of two ranks");
    }
    Ok(())
}

/// Makes the archive and uses it as somebody without cargo would.
pub fn check() -> Result<()> {
    run(&Options { check: true })
}

fn pack() -> Result<PathBuf> {
    let artifacts = setup::build()?;
    let name = format!("ringsight-{}-x86_64-linux", env!("CARGO_PKG_VERSION"));
    let dist = artifacts.target.join("dist");
    let folder = dist.join(&name);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    for part in ["bin", "lib", "include", "completions"] {
        let part = folder.join(part);
        fs::create_dir_all(&part)?;
    }
    let (program, library) = (folder.join("bin/ringsight"), folder.join("lib/libnccl.so.2"));
    strip(&artifacts.ringsight, &program)?;
    strip(&artifacts.library_folder.join("libnccl.so.2"), &library)?;
    std::os::unix::fs::symlink("libnccl.so.2", folder.join("lib/libnccl.so"))?;
    for header in ["nccl.h", "nccl_device.h", "ringsight.h"] {
        copy(
            &root().join("comm/include").join(header),
            &folder.join("include").join(header),
        )?;
    }
    copy(&root().join("LICENSE"), &folder.join("LICENSE"))?;
    // Of the eBPF programs that `ringsight` embeds.
    copy(
        &root().join("probes/ebpf/LICENSE-GPL2"),
        &folder.join("LICENSE-GPL2"),
    )?;
    for (shell, file) in COMPLETIONS {
        let text = process::output(Command::new(&program).args(["completions", shell]))?;
        fs::write(folder.join("completions").join(file), text + "\n")?;
    }
    let needed = glibc(&program)?.max(glibc(&library)?);
    if needed > GLIBC {
        bail!(
            "the archive would need glibc {}.{}, {}.{} is the newest meant",
            needed.0,
            needed.1,
            GLIBC.0,
            GLIBC.1
        );
    }
    let readme = README
        .replace("@VERSION@", env!("CARGO_PKG_VERSION"))
        .replace("@GLIBC@", &format!("{}.{}", needed.0, needed.1));
    fs::write(folder.join("README"), readme)?;

    let archive = dist.join(format!("{name}.tar.gz"));
    // The same content gives the same bytes: sorted, no owner, the time of the last commit, gzip without a time.
    let time = process::output(
        Command::new("git")
            .args(["log", "-1", "--format=%ct"])
            .current_dir(root()),
    )
    .unwrap_or_else(|_| "0".to_owned());
    process::run(
        Command::new("tar")
            .args([
                "--sort=name",
                "--owner=0",
                "--group=0",
                "--numeric-owner",
                "--mode=go-w",
            ])
            .arg(format!("--mtime=@{time}"))
            .args(["--use-compress-program=gzip -n -9", "-cf"])
            .arg(&archive)
            .arg("-C")
            .arg(&dist)
            .arg(&name),
    )?;
    let size = archive.metadata()?.len() as f64 / f64::from(1 << 20);
    println!("{}  {size:.1} MiB", archive.display());
    println!(
        "needs glibc {}.{} or newer (Debian 12 has 2.36, Ubuntu 22.04 has 2.35)",
        needed.0, needed.1
    );
    Ok(archive)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    Ok(fs::copy(from, to).map(drop)?)
}

/// Copies without debug information; the symbols stay, probes are placed by them.
fn strip(from: &Path, to: &Path) -> Result<()> {
    process::run(Command::new("objcopy").arg("--strip-debug").arg(from).arg(to))
}

/// The newest glibc whose symbols a file asks for.
fn glibc(file: &Path) -> Result<(u32, u32)> {
    let symbols = process::output(Command::new("objdump").arg("-T").arg(file))?;
    newest_glibc(&symbols).with_context(|| format!("{} asks for no symbol of glibc", file.display()))
}

fn newest_glibc(symbols: &str) -> Option<(u32, u32)> {
    symbols
        .lines()
        // Weak symbols may be absent.
        .filter(|line| line.contains("*UND*") && line.split_whitespace().nth(1) != Some("w"))
        .filter_map(|line| {
            let version = line
                .split("GLIBC_")
                .nth(1)?
                .split(|c: char| c != '.' && !c.is_ascii_digit())
                .next()?;
            let mut numbers = version.split('.').map(str::parse);
            Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
        })
        .max()
}

/// Unpacks the archive into a fresh folder and uses it with an environment that knows nothing of cargo.
fn try_out(archive: &Path) -> Result<()> {
    let folder = tempfile::tempdir().context("making a folder to unpack into")?;
    use_in(archive, folder.path())
}

fn use_in(archive: &Path, folder: &Path) -> Result<()> {
    process::run(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(folder))?;
    let name = archive
        .file_name()
        .and_then(|name| name.to_str())
        .and_then(|name| name.strip_suffix(".tar.gz"));
    let unpacked = folder.join(name.context("the archive has no name")?);
    let clean = |program: PathBuf| {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
        command
    };
    for licence in ["LICENSE", "LICENSE-GPL2"] {
        if !unpacked.join(licence).is_file() {
            bail!("the archive has no {licence}");
        }
    }
    let version = process::output(clean(unpacked.join("bin/ringsight")).arg("--version"))?;
    if !version.contains(env!("CARGO_PKG_VERSION")) {
        bail!("`ringsight --version` says {version}");
    }
    for (_, file) in COMPLETIONS {
        let file = unpacked.join("completions").join(file);
        let text = fs::read_to_string(&file)?;
        if !text.contains("attach") {
            bail!("{} does not complete `attach`", file.display());
        }
    }
    let (source, program) = (folder.join("two_ranks.c"), folder.join("two_ranks"));
    fs::write(&source, TWO_RANKS)?;
    process::run(
        clean("cc".into())
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-I"])
            .arg(unpacked.join("include"))
            .arg(&source)
            .arg("-o")
            .arg(&program)
            .arg(unpacked.join("lib/libnccl.so.2")),
    )?;
    let mut command = clean(program);
    command
        .env("LD_LIBRARY_PATH", unpacked.join("lib"))
        .env("RINGSIGHT_DEVICE", "host");
    command.env("NCCL_SOCKET_IFNAME", "lo");
    let status = Guarded::start("two_ranks", &mut command, libc::SIGKILL)?.wait(Duration::from_secs(60))?;
    if !status.success() {
        bail!("the program of two ranks failed: {}", process::reason(status));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_needed_glibc_is_found() {
        let symbols = "\
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.2.5) free
0000000000000000  w   DF *UND*  0000000000000000 (GLIBC_2.99) maybe
0000000000000000      DF *UND*  0000000000000000 (GLIBC_2.34) pthread_create
0000000000000000      DF *UND*  0000000000000000 (GCC_3.0)   _Unwind_Resume
0000000000001000 g    DF .text  0000000000000001  GLIBC_2.98  ours
rubbish GLIBC_ *UND*
";
        assert_eq!(newest_glibc(symbols), Some((2, 34)));
        assert_eq!(newest_glibc(""), None);
    }
}
