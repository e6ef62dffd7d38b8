//! What the guest's kernel says meanwhile.

use std::{
    fs::{File, OpenOptions},
    io::{Read as _, Seek as _, SeekFrom},
    os::unix::fs::OpenOptionsExt as _,
};

/// Words of a message that is a finding, whatever became of the case.
const WARNINGS: [&str; 4] = ["WARNING: ", "BUG: ", "Oops: ", "refcount_t: "];

/// The kernel's messages from here on; `None` where they cannot be read.
pub(crate) struct Messages(Option<File>);

impl Messages {
    pub(crate) fn new() -> Self {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/kmsg");
        Self(
            file.ok()
                .and_then(|mut file| file.seek(SeekFrom::End(0)).is_ok().then_some(file)),
        )
    }

    /// Warnings since the last call.
    pub(crate) fn warnings(&mut self) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut record = [0; 8192];
        while let Some(file) = &mut self.0 {
            match file.read(&mut record) {
                // One a read: numbers, a semicolon, the text, and lines of what it is about.
                Ok(length @ 1..) => {
                    let text = String::from_utf8_lossy(&record[..length]).into_owned();
                    let text = text.split_once(';').map_or(text.as_str(), |(_, text)| text);
                    let first = text.lines().next().unwrap_or_default();
                    if WARNINGS.iter().any(|word| first.contains(word)) {
                        warnings.push(first.to_owned());
                    }
                }
                // Some were overwritten before they were read.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Ok(_) | Err(_) => break,
            }
        }
        warnings
    }
}
