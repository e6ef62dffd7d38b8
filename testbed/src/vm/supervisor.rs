//! A run of QEMU: boots that fail are repeated, and a guest that exceeds a limit, says nothing or stands still is ended.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::{
    console::{self, BOOTED},
    heartbeat::{self, Frozen, Heartbeats},
};
use crate::process;

/// How long a boot may take: twenty times what it takes on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(60);
/// How often a guest is booted. The emulator fails some boots (two of twelve on one machine, none of 58 on another: a kernel that died in its first
/// half second by flags no instruction had set, and one that said nothing); what is tested starts after the boot.
const BOOTS: u32 = 3;
/// How often it is looked whether a guest gets on.
const LOOK: Duration = Duration::from_secs(5);

/// In a guest's folder: its first file system, what its console says, what its processors say, and where QEMU takes orders.
pub(super) const INITIAL: &str = "initrd";
pub(super) const CONSOLE: &str = "console";
pub(super) const BEATS: &str = "beats";
pub(super) const MONITOR: &str = "monitor";

/// A guest's folder, which is removed with what is in it.
pub(super) struct Scratch(TempDir);

impl Scratch {
    pub(super) fn new() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("ringsight-vm-").tempdir();
        folder.map(Self).context("making a folder for the guest")
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}

/// How a guest's run ended.
#[derive(Debug)]
pub(super) enum End {
    /// QEMU did.
    Ended(ExitStatus),
    /// It took longer than its limit, or than a boot may take.
    TooLong,
    /// Its program said nothing for too long.
    Quiet,
    /// A processor of it did not get on.
    Frozen(Frozen),
}

/// A run of a guest.
pub(super) struct Supervisor<'a> {
    pub(super) scratch: &'a Scratch,
    /// How long it may take, boot included.
    pub(super) limit: Duration,
    /// How long its program may say nothing, if there is such a limit.
    pub(super) quiet: Option<Duration>,
    pub(super) processors: u32,
    /// Whether the terminal is the program's input.
    pub(super) interactive: bool,
}

impl Supervisor<'_> {
    /// Runs what `qemu` makes, again if it ends, or its time is over, before the first process starts.
    pub(super) fn boot(
        &self,
        mut qemu: impl FnMut() -> Result<Command>,
        mut each: impl FnMut(&[u8]) + Send,
    ) -> Result<End> {
        let mut boots = 1;
        loop {
            let end = self.drive(&mut qemu()?, self.limit.min(BOOT_LIMIT), &mut each)?;
            let text = console::read(&self.scratch.file(CONSOLE));
            if text.contains(BOOTED) || boots == BOOTS || self.limit < BOOT_LIMIT {
                return Ok(end);
            }
            boots += 1;
            let how = match end {
                End::Ended(status) => process::reason(status),
                _ => format!("in {} s", BOOT_LIMIT.as_secs()),
            };
            eprintln!(
                "vm: the guest did not boot ({how}); it is tried again ({boots} of {BOOTS}). Its console ends with\n{}",
                console::tail(&text)
            );
        }
    }

    /// Runs QEMU, whose guest may take so long to boot.
    fn drive(
        &self,
        command: &mut Command,
        boot: Duration,
        each: &mut (impl FnMut(&[u8]) + Send),
    ) -> Result<End> {
        command
            .stdin(if self.interactive {
                Stdio::inherit()
            } else {
                Stdio::null()
            })
            .stdout(Stdio::piped());
        let mut qemu = process::Guarded::start("QEMU", command, libc::SIGKILL)?;
        let mut output = qemu.child().stdout.take().context("QEMU's output is not piped")?;
        let heard = Mutex::new(Instant::now());
        let last = || *heard.lock().unwrap_or_else(PoisonError::into_inner);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut piece = [0; 1 << 14];
                while let Ok(length @ 1..) = output.read(&mut piece) {
                    each(&piece[..length]);
                    *heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
                }
            });
            let end = match qemu.wait(boot) {
                Ok(status) => End::Ended(status),
                Err(_) if console::read(&self.scratch.file(CONSOLE)).contains(BOOTED) => {
                    self.watch(&mut qemu, Instant::now() + (self.limit - boot), &last)
                }
                Err(_) => End::TooLong,
            };
            // Ends it if it still runs, and with it the output.
            drop(qemu);
            if reader.join().is_err() {
                bail!("what reads the guest's output panicked");
            }
            Ok(end)
        })
    }

    /// Waits for the end of a guest that has booted, and until when. `last` says when its program spoke last.
    fn watch(&self, qemu: &mut process::Guarded, until: Instant, last: &dyn Fn() -> Instant) -> End {
        // From here on, at the earliest: a boot says nothing.
        let booted = Instant::now();
        let mut beats = Heartbeats::new(&self.scratch.file(BEATS), self.processors, booted);
        loop {
            let now = Instant::now();
            let silence = now.saturating_duration_since(last().max(booted));
            let left = self
                .quiet
                .map_or(Duration::MAX, |quiet| quiet.saturating_sub(silence));
            if left.is_zero() {
                return End::Quiet;
            }
            let left = left.min(until.saturating_duration_since(now)).min(LOOK);
            if left.is_zero() {
                return End::TooLong;
            }
            if let Ok(status) = qemu.wait(left) {
                return End::Ended(status);
            }
            if let Some(processor) = beats.silent(Instant::now()) {
                return End::Frozen(Frozen {
                    processor,
                    places: heartbeat::places(&self.scratch.file(MONITOR), self.processors),
                    console: console::tail(&console::read(&self.scratch.file(CONSOLE))),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(scratch: &Scratch) -> Supervisor<'_> {
        Supervisor {
            scratch,
            limit: Duration::from_secs(120),
            quiet: None,
            processors: 2,
            interactive: false,
        }
    }

    #[test]
    fn a_boot_that_fails_is_repeated_and_nothing_after_it_is() {
        let scratch = Scratch::new().unwrap();
        let console = scratch.file(CONSOLE);
        // How many boots fail, what the program ends with, how often it is booted, and what it wrote.
        for (fail, code, boots, wrote) in [(0, 3, 1, "x"), (2, 0, 3, "x"), (2, 3, 3, "x"), (3, 0, 3, "")] {
            let mut tries = 0;
            let mut output = Vec::new();
            let end = drive(&scratch).boot(
                || {
                    tries += 1;
                    let mut qemu = Command::new("sh");
                    let end = if tries <= fail {
                        "exit 0".to_owned()
                    } else {
                        format!("echo @@USERSPACE >> \"$0\"; printf x; exit {code}")
                    };
                    qemu.args(["-c", &format!(": > \"$0\"; {end}")]).arg(&console);
                    Ok(qemu)
                },
                |piece| output.extend_from_slice(piece),
            );
            let End::Ended(status) = end.unwrap() else {
                panic!("a shell that ends is no guest that does not")
            };
            assert_eq!(status.code(), Some(code));
            assert_eq!((tries, output.as_slice()), (boots, wrote.as_bytes()));
        }
    }

    #[test]
    fn a_guest_that_says_nothing_is_ended() {
        let scratch = Scratch::new().unwrap();
        let guest = Supervisor {
            // An hour that is not waited for.
            limit: Duration::from_secs(3600),
            quiet: Some(Duration::from_millis(50)),
            ..drive(&scratch)
        };
        let mut qemu = Command::new("sh");
        qemu.args(["-c", "echo @@USERSPACE > \"$0\"; exec sleep 3600"])
            .arg(scratch.file(CONSOLE));
        let boot = Duration::from_secs(1);
        let end = guest.drive(&mut qemu, boot, &mut |_: &[u8]| {}).unwrap();
        assert!(matches!(end, End::Quiet), "{end:?}");
    }
}
