//! Kernels of the host device that stop half-way. They are threads of this process.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, AtomicI32, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use fs_err as fs;

/// Threads that [`wait`] may go on.
static GO_ON: AtomicBool = AtomicBool::new(false);

extern "C" fn wait(_signal: c_int) {
    // Relaxed: nothing is handed over but that it goes on.
    while !GO_ON.load(Ordering::Relaxed) {
        // SAFETY: a sleep may be called in a signal's handler.
        unsafe { libc::usleep(1000) };
    }
}

/// How long a kernel is waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// Waits until the kernel that has been launched on a stream waits for another rank, or has not come to that in so long that the other rank has come.
/// `thread` gets the number of the stream's thread when the stream comes to the kernel.
pub(super) fn await_kernel(thread: &AtomicI32) -> Result<()> {
    let pause = || thread::sleep(Duration::from_millis(1));
    let thread = loop {
        // Relaxed: nothing is handed over but the number.
        match thread.load(Ordering::Relaxed) {
            0 => pause(),
            thread => break thread,
        }
    };
    let before = sleeps(thread)?;
    let begin = Instant::now();
    // A kernel that waits sleeps again and again; a stream that has nothing to do, once.
    while sleeps(thread)? < before + 10 && begin.elapsed() < PATIENCE {
        pause();
    }
    Ok(())
}

/// How often a thread of this process has slept.
fn sleeps(thread: i32) -> Result<u64> {
    let path = format!("/proc/self/task/{thread}/status");
    let status = fs::read_to_string(&path)?;
    let count = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count
        .and_then(|count| count.trim().parse().ok())
        .with_context(|| format!("no voluntary_ctxt_switches in {path}"))
}

/// Lets the threads that run kernels do nothing any more, once in a process.
pub(super) fn hold() -> Result<()> {
    // SAFETY: the handler calls nothing but what it may.
    unsafe { libc::signal(libc::SIGUSR1, wait as *const () as libc::sighandler_t) };
    let mut held = 0;
    for thread in fs::read_dir("/proc/self/task").context("listing threads")? {
        let thread = thread?;
        let name = fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        if !name.starts_with("rs-stream") {
            continue;
        }
        let number: c_int = thread
            .file_name()
            .to_string_lossy()
            .parse()
            .context("a thread's number")?;
        // SAFETY: a signal that has a handler, to a thread of this process.
        let result = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), number, libc::SIGUSR1) };
        ensure!(
            result == 0,
            "stopping thread {number}: {}",
            std::io::Error::last_os_error()
        );
        held += 1;
    }
    ensure!(held > 0, "no thread runs kernels");
    Ok(())
}

/// Lets them go on.
pub(super) fn let_go() {
    GO_ON.store(true, Ordering::Relaxed);
}
