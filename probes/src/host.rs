//! Files of this machine and of this process: nothing that a target chooses.
#![expect(
    clippy::disallowed_methods,
    reason = "the one module that reads files of the host by their names"
)]

use std::{fs, io, os::unix::fs::MetadataExt as _};

/// The text of a file below `/proc/sys`, `/sys` or `/etc`, or of `/proc/self`.
pub(crate) fn text(path: &str) -> io::Result<String> {
    fs::read_to_string(path)
}

/// The content of such a file.
pub(crate) fn bytes(path: &str) -> io::Result<Vec<u8>> {
    fs::read(path)
}

/// Device and inode of this process's pid namespace.
pub(crate) fn pid_namespace() -> io::Result<(u64, u64)> {
    let about = fs::metadata("/proc/self/ns/pid")?;
    Ok((about.dev(), about.ino()))
}

/// Numbers of the processes that there are.
pub(crate) fn processes() -> io::Result<Vec<u32>> {
    let entries = fs::read_dir("/proc")?;
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    Ok(numbers.collect())
}
