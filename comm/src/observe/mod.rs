//! Writing what can be seen: records, shared pages, probe functions.

use ringsight_records::{Kind, Record};

/// `CLOCK_MONOTONIC` in nanoseconds, what `bpf_ktime_get_ns` reads.
#[must_use]
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec to write to; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Whether a dense event of this kind is worth building a record for: one relaxed load.
#[must_use]
pub fn wants(_kind: Kind) -> bool {
    false
}

/// Counts the event and hands it to its carriers: the ring if it is armed for the kind, the probe function if the kind is sparse.
pub fn emit(_record: &Record) {}
