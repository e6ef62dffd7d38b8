//! `hostile_target CASE LIBRARY`: a process that attacks the collector that looks at it. For the tests in
//! `tests/tests/hostile`, which start it as user 65534 in a folder of its own.
//!
//! It maps LIBRARY, which the collector takes for a communication library, and acts out CASE up to the point where the collector is to look.
//! Then it writes `ready`. If an unprivileged process cannot play the case on this machine, it writes `skip` and the reason instead.
//! For each line of its input it does what the case says, and answers by a line. It ends with its input.

mod library;
mod limits;
mod memory;
mod namespaces;
mod outputs;
mod pages;
mod process;
mod random;

use std::{
    ffi::OsString,
    fmt,
    fs::File,
    io::{self, BufRead as _, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

/// What a case does for a line of input; the text is the answer.
type Act = Box<dyn FnMut(&str) -> Result<String>>;

/// A case: what it does before the collector looks; then what it does for each line.
type Case = fn(&Path) -> Result<Act>;

/// Every case by name.
const CASES: &[(&str, Case)] = &[
    ("honest", honest),
    ("busy", busy),
    ("library-cut", library::cut),
    ("library-bombs", library::bombs),
    ("environment", process::environment),
    ("memory-lock", memory::lock),
    ("memory-exec", memory::exec),
    ("hostname-link", namespaces::hostname_link),
    ("hostname-pipe", namespaces::hostname_pipe),
    ("pages-bind-mount", namespaces::pages_bind_mount),
    ("pages-shrink", pages::shrink),
    ("pages-text", pages::text),
    ("pages-lease", pages::lease),
    ("described", outputs::described),
    ("names", outputs::names),
    ("proxies", limits::proxies),
    ("communicators", limits::communicators),
    ("ranks", limits::ranks),
    ("graphs", limits::graphs),
    ("many-ranks", limits::many_ranks),
    ("random-records", random::records),
    ("random-files", random::files),
];

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let mut argument = |what| arguments.next().with_context(|| format!("no {what} was given"));
    let (case, library): (OsString, PathBuf) = (argument("case")?, argument("library")?.into());
    let Some((_, begin)) = CASES.iter().find(|(name, _)| case == *name) else {
        bail!("there is no case {}", case.display());
    };
    let begun = begin(&library);
    if let Some(refused) = begun
        .as_ref()
        .err()
        .and_then(|error| error.downcast_ref::<NotHere>())
    {
        println!("skip {refused}");
        return Ok(());
    }
    let mut act = begun?;
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

/// A library, pages with a communicator, and an operation each millisecond.
fn busy(library: &Path) -> Result<Act> {
    map_library(library)?;
    let pages = pages::Own::make()?;
    pages.communicator("busy");
    thread::spawn(move || {
        for op in 1.. {
            pages.operation(op);
            thread::sleep(Duration::from_millis(1));
        }
    });
    Ok(Box::new(|_| Ok("done".to_owned())))
}

/// This machine does not let an unprivileged process do what the case takes.
#[derive(Debug)]
struct NotHere(String);

impl fmt::Display for NotHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NotHere {}

/// The error behind a system call that returned -1.
fn check(result: libc::c_int, what: &str) -> Result<()> {
    if result == -1 {
        return Err(io::Error::last_os_error()).with_context(|| what.to_owned());
    }
    Ok(())
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
