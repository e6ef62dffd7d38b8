//! How long the operating system has kept kernel threads from running: a kernel that does not run moves nothing, and is not stuck.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use ringsight_comm_base::{fork::PerProcess, sync::lock, sys};

#[derive(Default)]
struct Threads {
    /// By thread: time that it had waited for a processor at the last look, nanoseconds.
    waited: BTreeMap<libc::pid_t, u64>,
    /// Sum over the looks of the longest wait since the look before.
    longest_ns: u64,
}

static CURRENT: PerProcess<Mutex<Threads>> = PerProcess::new();

/// Registers the calling thread as one that runs kernels, while this lives.
pub(super) struct Runs(libc::pid_t);

impl Runs {
    pub(super) fn new() -> Self {
        // SAFETY: gettid cannot fail.
        let thread = unsafe { libc::gettid() };
        lock(CURRENT.get())
            .waited
            .insert(thread, waited(thread).unwrap_or(0));
        Self(thread)
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        lock(CURRENT.get()).waited.remove(&self.0);
    }
}

/// How long a thread of this process has been ready to run without running, nanoseconds.
fn waited(thread: libc::pid_t) -> Option<u64> {
    let times = sys::read_text(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    times.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Total delay: between two calls, the longest delay of a thread counts.
pub(super) fn longest_delay() -> Duration {
    let mut threads = lock(CURRENT.get());
    let mut longest = 0;
    for (thread, before) in &mut threads.waited {
        if let Some(now) = waited(*thread) {
            longest = longest.max(now.saturating_sub(*before));
            *before = now;
        }
    }
    threads.longest_ns += longest;
    Duration::from_nanos(threads.longest_ns)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
        time::Instant,
    };

    use super::*;

    #[test]
    fn a_thread_that_shares_a_processor_is_kept_from_running() {
        let (ends, before) = (AtomicBool::new(false), longest_delay());
        let end = Instant::now() + Duration::from_secs(20);
        // SAFETY: a set of one processor on which this thread may run, for the threads that are made here.
        let spin = || unsafe {
            let mut all: libc::cpu_set_t = std::mem::zeroed();
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            let bytes = size_of::<libc::cpu_set_t>();
            assert_eq!(libc::sched_getaffinity(0, bytes, &raw mut all), 0);
            let first = (0..libc::CPU_SETSIZE as usize).find(|cpu| libc::CPU_ISSET(*cpu, &all));
            libc::CPU_SET(first.unwrap(), &mut one);
            assert_eq!(libc::sched_setaffinity(0, bytes, &raw const one), 0);
            let _runs = Runs::new();
            // Not for ever: the waiting test may have failed.
            while !ends.load(Ordering::Relaxed) && Instant::now() < end {
                std::hint::spin_loop();
            }
        };
        thread::scope(|scope| {
            scope.spawn(spin);
            scope.spawn(spin);
            while longest_delay() - before < Duration::from_millis(100) {
                assert!(Instant::now() < end, "{:?}", longest_delay());
                thread::sleep(Duration::from_millis(5));
            }
            ends.store(true, Ordering::Relaxed);
        });
    }
}
