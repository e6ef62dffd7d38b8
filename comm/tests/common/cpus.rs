//! CPUs that threads run on.

use std::{fs, mem};

/// Lets the calling thread, and those that it starts from now on, run on these CPUs, as far as it may.
pub fn keep_to(cpus: impl IntoIterator<Item = usize>) {
    // SAFETY: all-zero bytes are an empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for cpu in cpus {
        // SAFETY: numbers below the size of the set, or without effect.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: a set of this size.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// The CPUs of a thread of this process, as the kernel lists them.
pub fn cpus_of(task: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{task}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().trim().to_owned()
}
