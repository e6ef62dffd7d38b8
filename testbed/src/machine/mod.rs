//! This machine: the cache of compiled tools, Debian's packages, the rights that commands have, network devices.

use std::{
    io,
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};
use fs_err as fs;

use crate::process;

pub mod apt;

/// Where compiled tools are kept: `$RINGSIGHT_CACHE`, else `ringsight` in the user's cache folder.
///
/// # Errors
/// If neither that variable nor `XDG_CACHE_HOME` nor `HOME` is set.
pub fn cache() -> Result<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    variable("RINGSIGHT_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("ringsight")))
        .or_else(|| variable("HOME").map(|folder| folder.join(".cache/ringsight")))
        .context("no place for tools: set RINGSIGHT_CACHE to a folder")
        // What is run from there may run elsewhere.
        .and_then(|folder| std::path::absolute(&folder).with_context(|| folder.display().to_string()))
}

/// Installs what tests of the library's C interface run: compilers of C and C++, `nm` and `make`.
///
/// # Errors
/// Names the command to run where this cannot be done here.
pub fn c_toolchain() -> Result<()> {
    let missing: Vec<_> = [
        ("gcc", "gcc"),
        ("g++", "g++"),
        ("nm", "binutils"),
        ("make", "make"),
    ]
    .into_iter()
    .filter(|(program, _)| process::find(program).is_none())
    .map(|(_, package)| package)
    .collect();
    if missing.is_empty() {
        return Ok(());
    }
    apt::install(&missing)
}

/// `program` with the rights to attach probes, as far as they can be had without a question to the user.
#[must_use]
pub fn privileged(program: &Path) -> Command {
    if is_root() || !sudo_works() {
        return Command::new(program);
    }
    let mut command = Command::new("sudo");
    command
        .args(["--non-interactive", "--preserve-env", "--"])
        .arg(program);
    command
}

fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

fn sudo_works() -> bool {
    Command::new("sudo")
        .args(["--non-interactive", "true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Says what is being fetched or built.
pub fn say(what: &str) {
    eprintln!("set-up: {what}");
}

/// Makes a folder whole or not at all: `fill` gets an empty folder beside it, which takes its place at the end. What an interrupted run
/// leaves has another name.
///
/// # Errors
/// Those of `fill`, or if the folder cannot be made.
pub fn make_whole(folder: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let mut name = folder.file_name().context("the folder has no name")?.to_owned();
    name.push(format!(".{}.partial", std::process::id()));
    let part = folder.with_file_name(name);
    let _ = fs::remove_dir_all(&part);
    fs::create_dir_all(&part)?;
    let made = fill(&part).and_then(|()| {
        let _ = fs::remove_dir_all(folder);
        Ok(fs::rename(&part, folder)?)
    });
    let _ = fs::remove_dir_all(&part);
    made
}

/// Takes a network device up or down, as `ip link set` does, within microseconds of the call.
pub(crate) fn set_link(name: &str, up: bool) -> io::Result<()> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
    // SAFETY: plain data; zero is a value of each field.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (place, letter) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = letter.cast_signed();
    }
    // SAFETY: an open socket, and a request of the kernel's layout with a name that ends with a zero.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has put them there.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let bit = libc::IFF_UP as libc::c_short;
    request.ifr_ifru.ifru_flags = if up { flags | bit } else { flags & !bit };
    // SAFETY: as above.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
