//! A debugger, as far as the watchdog can tell: a process that stops another one with all its threads by `ptrace`.
//!
//! Standard input: the process id. Standard output: `held` once the process stands. When standard input ends, the process goes on.

use std::{collections::BTreeMap, io, path::Path, process::Command, ptr::null_mut, time::Duration};

use anyhow::{Context as _, Result, ensure};
use fs_err as fs;

use crate::{process::Dialogue, ranks::say};

/// How long it may take to let go.
const LIMIT: Duration = Duration::from_secs(5);

/// A debugger that somebody has started. When it is dropped, whatever it held goes on.
pub(super) struct Debugger(Dialogue);

impl Debugger {
    /// Starts one, which holds nothing yet.
    pub(super) fn start(xtask: &Path) -> Result<Self> {
        Dialogue::start("the debugger", Command::new(xtask).arg("fault-debugger")).map(Self)
    }

    /// Lets it hold a process; returns when it does.
    pub(super) fn hold(&mut self, process: u32) -> Result<()> {
        let answer = self.0.ask(&process.to_string())?;
        ensure!(
            answer == "held",
            "the debugger cannot hold process {process}: {answer}"
        );
        Ok(())
    }

    /// Lets the process go on.
    pub(super) fn let_go(self) -> Result<()> {
        self.0.end(LIMIT)
    }
}

/// Is a debugger.
///
/// # Errors
/// The system does not let it hold the process.
pub fn run() -> Result<()> {
    let mut lines = io::stdin().lines();
    let Some(line) = lines.next() else {
        return Ok(());
    };
    let process = line?.trim().parse().context("process")?;
    let held = hold(process)?;
    say("held")?;
    // Whoever has started us is to let go, or gone.
    lines.for_each(drop);
    held.into_iter().for_each(|(thread, signal)| {
        // One that is gone needs nothing.
        let _ = ptrace(libc::PTRACE_DETACH, thread, signal);
    });
    Ok(())
}

fn ptrace(request: libc::c_uint, thread: i32, data: i32) -> io::Result<()> {
    let data: *mut libc::c_void = std::ptr::without_provenance_mut(data as usize);
    // SAFETY: none of the requests that are made here writes to memory of this process.
    match unsafe { libc::ptrace(request, thread, null_mut::<libc::c_void>(), data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Stops all threads of a process; with the signal that each was about to get, or 0.
fn hold(process: i32) -> Result<BTreeMap<i32, i32>> {
    let mut held = BTreeMap::new();
    loop {
        let before = held.len();
        // Threads that still run may have made others meanwhile. The first thread last: the process looks at that one (`/proc/self/status`)
        // to see whether it is traced, and none of its threads is to tell others before all stand.
        let mut threads = threads(process)?;
        threads.sort_by_key(|thread| *thread == process);
        for thread in threads {
            if held.contains_key(&thread) {
                continue;
            }
            match seize(thread) {
                Ok(signal) => {
                    held.insert(thread, signal);
                }
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {} // it has ended
                Err(error) => return Err(error).with_context(|| format!("thread {thread}")),
            }
        }
        if held.len() == before {
            return Ok(held);
        }
    }
}

fn threads(process: i32) -> Result<Vec<i32>> {
    let folder = format!("/proc/{process}/task");
    let entries = fs::read_dir(&folder)?;
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    Ok(entries.filter_map(number).collect())
}

fn seize(thread: i32) -> io::Result<i32> {
    ptrace(libc::PTRACE_SEIZE, thread, 0)?;
    ptrace(libc::PTRACE_INTERRUPT, thread, 0)?;
    let mut status = 0;
    // SAFETY: a valid place to write to.
    if unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL) } != thread {
        return Err(io::Error::last_os_error());
    }
    if !libc::WIFSTOPPED(status) {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    // What stops it otherwise than by an event is a signal on its way.
    Ok(if status >> 16 == 0 {
        libc::WSTOPSIG(status)
    } else {
        0
    })
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;
    use crate::process::Guarded;

    fn state(process: u32) -> String {
        let text = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
        let (_, rest) = text.rsplit_once(')').unwrap();
        rest.split_ascii_whitespace().next().unwrap().to_owned()
    }

    #[test]
    fn a_process_is_held_and_goes_on() {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Guarded::start("cat", &mut command, libc::SIGKILL).unwrap();
        let pid = process.pid();
        // All requests come from one thread, which the kernel takes for the debugger.
        let held = hold(pid as i32).unwrap();
        assert_eq!(held.keys().copied().collect::<Vec<_>>(), [pid as i32]);
        assert_eq!(state(pid), "t");
        for (thread, signal) in held {
            ptrace(libc::PTRACE_DETACH, thread, signal).unwrap();
        }
        drop(process.child().stdin.take());
        assert!(process.wait(LIMIT).unwrap().success());
    }
}
