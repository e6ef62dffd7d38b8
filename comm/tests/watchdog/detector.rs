//! The thread that looks.

use ringsight_comm::{abi, error::ResultCode};

use super::until;
use crate::common::{Rank, alone, in_child, ok, state, unique_id};

fn has_detector() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    threads.flatten().any(|thread| {
        std::fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.trim() == "rs-watchdog")
    })
}

/// A communicator of this rank alone whose kernel never ends, until that has been said.
fn hang() {
    let rank = Rank::join(unique_id(), 0, 1);
    until(&has_detector);
    ok(abi::ncclSimulateKernelTimeout(rank.comm));
    until(&|| state(rank.comm) == ResultCode::SystemError);
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
}

#[test]
#[ignore = "helper: counts threads: run alone, by `the_detector_goes_with_the_last_communicator_and_comes_with_the_next`"]
fn hangs_alone() {
    for _ in 0..3 {
        assert!(!has_detector());
        hang();
        // It has been joined; its entry may still be there.
        until(&|| !has_detector());
    }
}

#[test]
#[ignore = "helper: forks: run alone, by `a_forked_child_has_a_detector_of_its_own`"]
fn hangs_in_child() {
    let rank = Rank::join(unique_id(), 0, 1);
    until(&has_detector);
    let status = in_child(|| {
        assert!(!has_detector());
        hang();
        until(&|| !has_detector());
        0
    });
    assert_eq!(status, 0);
    // The parent's goes on.
    ok(abi::ncclSimulateKernelTimeout(rank.comm));
    until(&|| state(rank.comm) == ResultCode::SystemError);
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    until(&|| !has_detector());
}

/// How often it is said that a kernel is stuck.
fn verdicts_of(test: &str) -> usize {
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
fn the_detector_goes_with_the_last_communicator_and_comes_with_the_next() {
    assert_eq!(verdicts_of("watchdog::detector::hangs_alone"), 3);
}

#[test]
fn a_forked_child_has_a_detector_of_its_own() {
    assert_eq!(verdicts_of("watchdog::detector::hangs_in_child"), 2);
}
