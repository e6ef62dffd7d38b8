//! Shared pages of a target.

use std::{io, os::fd::FromRawFd as _, path::Path, process::Command};

use anyhow::{Result, ensure};
use ringsight_testbed::process::Guarded;

use crate::{
    Collected, Target,
    files::session,
    target::{SECRET, watch_both},
};

/// Notes whenever a file is opened, read or written.
struct Touches(std::fs::File);

impl Touches {
    fn of(path: &Path) -> Result<Self> {
        let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
        // SAFETY: a system call on integers.
        let fd = unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) };
        ensure!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: the kernel just returned this descriptor, and nobody else has it.
        let file = unsafe { std::fs::File::from_raw_fd(fd) };
        let what = libc::IN_OPEN | libc::IN_ACCESS | libc::IN_MODIFY;
        // SAFETY: a string that lives across the call.
        let watch = unsafe { libc::inotify_add_watch(fd, path.as_ptr(), what) };
        ensure!(watch >= 0, "{}", io::Error::last_os_error());
        Ok(Self(file))
    }

    fn any(mut self) -> Result<bool> {
        match io::Read::read(&mut self.0, &mut [0; 4096]) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// H4
#[test]
fn a_file_with_the_name_of_pages_is_not_opened() -> Result<()> {
    let name = "a_file_with_the_name_of_pages_is_not_opened";
    let Some(target) = Target::start(name, "pages-bind-mount")? else {
        return Ok(());
    };
    let secret = target.folder().join("secret");
    let touches = Touches::of(&secret)?;
    let pid = target.pid().to_string();
    for command in [
        &["list", &pid][..],
        &["snapshot", &pid],
        &["attach", &pid, "--no-ebpf", "--duration", "0.2"],
    ] {
        let collected = Collected::of(target.folder(), command)?;
        ensure!(collected.errors.contains("it is no memory file"), "{collected:?}");
    }
    ensure!(!touches.any()?, "root opened the file");
    ensure!(std::fs::read_to_string(&secret)? == SECRET);
    let mut session = session()?;
    ensure!(session.attach(target.pid()).is_err() && session.left_out().pages_refused == 1);
    Ok(())
}

/// H5
#[test]
fn pages_that_may_shrink_are_refused() -> Result<()> {
    let name = "pages_that_may_shrink_are_refused";
    let Some(target) = Target::start(name, "pages-shrink")? else {
        return Ok(());
    };
    watch_both(&target, |both| {
        ensure!(both.errors.contains("it is not sealed"), "{both:?}");
        Ok(())
    })
}

/// H12
#[test]
fn a_text_that_changes_while_it_is_read_is_text() -> Result<()> {
    let name = "a_text_that_changes_while_it_is_read_is_text";
    let Some(target) = Target::start(name, "pages-text")? else {
        return Ok(());
    };
    let mut session = session()?;
    for _ in 0..2000 {
        let attached = session.attach(target.pid())?;
        // What is claimed to be text, byte by byte.
        let bytes = attached.process.host_name.as_bytes().to_vec();
        ensure!(
            String::from_utf8(bytes).is_ok(),
            "{:x?}",
            attached.process.host_name.as_bytes()
        );
        session.detach(target.pid());
    }
    Ok(())
}

/// H15
#[test]
fn nobody_is_named_as_a_reader_by_the_target_alone() -> Result<()> {
    let name = "nobody_is_named_as_a_reader_by_the_target_alone";
    let Some(mut target) = Target::start(name, "pages-lease")? else {
        return Ok(());
    };
    let innocent = Guarded::start("sleep", Command::new("sleep").arg("600"), libc::SIGKILL)?;
    target.ask(&innocent.pid().to_string())?;
    let pid = target.pid().to_string();
    let collected = Collected::of(
        target.folder(),
        &["attach", &pid, "--no-ebpf", "--duration", "0.2"],
    )?;
    ensure!(collected.errors.contains("is being watched by"), "{collected:?}");
    let innocent = format!("process {}", innocent.pid());
    ensure!(!collected.errors.contains(&innocent), "{collected:?}");
    ensure!(!collected.errors.contains("stop that one"), "{collected:?}");
    Ok(())
}
