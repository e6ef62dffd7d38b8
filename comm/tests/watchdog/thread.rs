//! The watchdog's thread.

use ringsight_comm::{abi, error::ResultCode};

use crate::common::{Rank, alone, in_child, ok, state, unique_id, waiting::eventually};

fn has_thread() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    threads.flatten().any(|thread| {
        std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.trim() == "rs-watchdog")
    })
}

fn eventually_has_thread(expected: bool) {
    eventually("the thread comes or goes", || has_thread() == expected);
}

/// Has a kernel of this rank alone never end, until that is the communicator's error.
fn hang(rank: Rank) {
    ok(abi::ncclSimulateKernelTimeout(rank.comm));
    eventually("the error", || state(rank.comm) == ResultCode::SystemError);
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
}

/// The same with a communicator of its own.
fn join_and_hang() {
    let rank = Rank::join(unique_id(), 0, 1);
    eventually_has_thread(true);
    hang(rank);
}

#[test]
#[ignore = "helper: counts threads: run alone, by `the_thread_goes_with_the_last_communicator_and_comes_with_the_next`"]
fn hangs_alone() {
    for _ in 0..3 {
        assert!(!has_thread());
        join_and_hang();
        // It has been joined; its entry may still be there.
        eventually_has_thread(false);
    }
}

#[test]
#[ignore = "helper: forks: run alone, by `a_forked_child_has_a_thread_of_its_own`"]
fn hangs_in_child() {
    let rank = Rank::join(unique_id(), 0, 1);
    eventually_has_thread(true);
    let status = in_child(|| {
        assert!(!has_thread());
        join_and_hang();
        eventually_has_thread(false);
        0
    });
    assert_eq!(status, 0);
    // The parent's goes on.
    hang(rank);
    eventually_has_thread(false);
}

/// How often a kernel is reported as stuck.
fn reports_of(test: &str) -> usize {
    let text = alone(test, |command| {
        command
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_KERNEL_TIMEOUT_MS", "300")
            .env("RINGSIGHT_WATCHDOG_ACTION", "error");
    });
    text.matches(" Verdict: STUCK_KERNEL (hang): ").count()
}

#[test]
fn the_thread_goes_with_the_last_communicator_and_comes_with_the_next() {
    assert_eq!(reports_of("watchdog::thread::hangs_alone"), 3);
}

#[test]
fn a_forked_child_has_a_thread_of_its_own() {
    assert_eq!(reports_of("watchdog::thread::hangs_in_child"), 2);
}
