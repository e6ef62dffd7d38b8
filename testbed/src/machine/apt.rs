//! Debian's packages, as root or through `sudo`.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

use super::{is_root, say, sudo_works};
use crate::process;

/// The command that installs packages.
#[must_use]
pub fn line<'a>(packages: &[&'a str]) -> Vec<&'a str> {
    let mut line = if is_root() { vec![] } else { vec!["sudo"] };
    // Another apt may be at work: wait for it. The compiler's recommended packages are not needed.
    line.extend([
        "apt-get",
        "-o",
        "DPkg::Lock::Timeout=500",
        "install",
        "-y",
        "--no-install-recommends",
    ]);
    line.extend(packages);
    line
}

/// Whether apt offers the package, after fetching its lists if it does not seem to.
#[must_use]
pub fn has(package: &str) -> bool {
    if process::find("apt-get").is_none() {
        return false;
    }
    let known = || {
        process::output(Command::new("apt-cache").args(["policy", package])).is_ok_and(|text| {
            text.lines()
                .any(|line| line.contains("Candidate:") && !line.contains("(none)"))
        })
    };
    if known() {
        return true;
    }
    update();
    known()
}

/// Fetches the package lists, once in a run. A failure shows in what is installed next.
pub fn update() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        if is_root() || sudo_works() {
            say("package lists (apt-get update)");
            let mut line = if is_root() { vec![] } else { vec!["sudo"] };
            line.extend(["apt-get", "-o", "DPkg::Lock::Timeout=500", "update"]);
            let _ = process::run(Command::new(line[0]).args(&line[1..]));
        }
    });
}

/// Installs packages, as root or through `sudo`; never asks.
///
/// # Errors
/// Names the command to run where this cannot be done here.
pub fn install(packages: &[&str]) -> Result<()> {
    let line = line(packages);
    if process::find("apt-get").is_none() || !(is_root() || sudo_works()) {
        bail!(
            "this needs system packages. Run\n    {}\nand then this command again",
            line.join(" ")
        );
    }
    say(&format!("{} (apt-get)", packages.join(" ")));
    let attempt = || {
        process::run(
            Command::new(line[0])
                .args(&line[1..])
                .env("DEBIAN_FRONTEND", "noninteractive")
                // A question would wait for ever where nobody is there to answer.
                .stdin(Stdio::null()),
        )
    };
    // Lists that are there may be of an older state than the archive: fetched anew after a failure, not before.
    attempt().or_else(|_| {
        update();
        attempt()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_apt_line_never_asks_and_waits_for_the_lock() {
        let line = line(&["one", "two"]).join(" ");
        assert!(
            line.ends_with("install -y --no-install-recommends one two"),
            "{line}"
        );
        assert!(line.contains("DPkg::Lock::Timeout="), "{line}");
    }
}
