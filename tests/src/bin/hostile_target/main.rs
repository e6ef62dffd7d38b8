//! `hostile_target CASE LIBRARY`: a process that attacks the collector that looks at it. For the tests in
//! `tests/tests/hostile`, which start it as user 65534 in a folder of its own.
//!
//! It maps LIBRARY, which the collector takes for a communication library, acts out CASE up to the point where the collector is to look,
//! writes `ready`, and then does what the case says for each line of its input, which it answers by a line. It ends with its
//! input.

mod pages;

use std::{
    ffi::OsString,
    fs::File,
    io::{self, BufRead as _, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

/// What a case does for a line of input; the text is the answer.
type Act = Box<dyn FnMut(&str) -> Result<String>>;

/// A case: what it does before the collector looks; then what it does for each line.
type Case = fn(&Path) -> Result<Act>;

/// Every case by name.
const CASES: &[(&str, Case)] = &[("honest", honest)];

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let mut argument = |what| arguments.next().with_context(|| format!("no {what} was given"));
    let (case, library): (OsString, PathBuf) = (argument("case")?, argument("library")?.into());
    let Some((_, begin)) = CASES.iter().find(|(name, _)| case == *name) else {
        bail!("there is no case {}", case.display());
    };
    let mut act = begin(&library)?;
    let mut output = io::stdout().lock();
    writeln!(output, "ready")?;
    for line in io::stdin().lock().lines() {
        writeln!(output, "{}", act(&line?)?)?;
    }
    Ok(())
}

/// A library, pages with a communicator, and no attack. Each line names another communicator.
fn honest(library: &Path) -> Result<Act> {
    map_library(library)?;
    let pages = pages::Own::make()?;
    pages.communicator("honest");
    Ok(Box::new(move |name| {
        pages.communicator(name);
        Ok("done".to_owned())
    }))
}

/// Maps a file as a loader does: readable and executable, until the process ends.
fn map_library(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let bytes = usize::try_from(file.metadata()?.len())?;
    // SAFETY: a fresh mapping at an address of the kernel's choice; nothing in it is run or referred to.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error()).context("mapping the library");
    }
    Ok(())
}
