//! A guest's console: what the kernel and the first process (`vm/init`) wrote, and the exit that the first process reports.

use std::path::Path;

use fs_err as fs;

/// What the first process says when it starts.
pub(super) const BOOTED: &str = "@@USERSPACE";

/// How a guest ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Exit code of the program.
    pub code: u8,
    /// Warnings of the guest's kernel: each is a finding, whatever the program said.
    pub warnings: u64,
    /// What the kernel and the first process said.
    pub console: String,
}

/// What the kernel and the first process said so far.
pub(super) fn read(path: &Path) -> String {
    String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).replace('\r', "")
}

/// The last lines of a console: as many as a panic has.
pub(super) fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(80)..].join("\n")
}

/// What the first process said at the end: `@@EXIT rc=<code> kwarn=<count> uptime=<seconds>`.
pub(super) fn ended(console: &str) -> Option<Ended> {
    let line = console
        .lines()
        .rev()
        .find_map(|line| line.split_once("@@EXIT ").map(|(_, rest)| rest))?;
    let number = |name: &str| {
        line.split_whitespace()
            .find_map(|word| word.strip_prefix(name)?.strip_prefix('=')?.parse::<u64>().ok())
    };
    Some(Ended {
        code: u8::try_from(number("rc")?).ok()?,
        warnings: number("kwarn")?,
        console: console.to_owned(),
    })
}

impl Ended {
    /// The kernel's first warnings, if there are any.
    #[must_use]
    pub fn warning_text(&self) -> Option<&str> {
        let start = self.console.find("@@KWARN")?;
        let end = self.console[start..]
            .find("@@EXIT")
            .map_or(self.console.len(), |end| start + end);
        Some(self.console[start..end].trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_read_from_the_console() {
        let console =
            "@@USERSPACE uptime=1.9\n@@KWARN 2\nWARNING: one\n[  3.1] x@@EXIT rc=42 kwarn=2 uptime=2.43\n";
        let ended = ended(console).unwrap();
        assert_eq!((ended.code, ended.warnings), (42, 2));
        assert_eq!(ended.warning_text(), Some("@@KWARN 2\nWARNING: one\n[  3.1] x"));
        for console in [
            "",
            "@@EXIT",
            "@@EXIT rc=300 kwarn=0",
            "@@EXIT rc=1",
            "@@EXIT rc=x kwarn=0",
        ] {
            assert!(super::ended(console).is_none(), "{console}");
        }
    }
}
