//! Kernels that stop, or never end.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicBool, Ordering},
};

use ringsight_comm::{abi, device::Progress, error::ResultCode, observe};
use ringsight_records::Function;

use super::{ELEMENTS, has_begun, texts, verdicts};
use crate::common::{
    Call, host, ok, rank_of_process, start_processes, state,
    waiting::{Marks, eventually},
};

/// A thread that [`hold`] holds goes on.
static GOES_ON: AtomicBool = AtomicBool::new(false);

extern "C" fn hold(_signal: c_int) {
    while !GOES_ON.load(Ordering::Relaxed) {
        // SAFETY: a sleep may be called in a signal's handler.
        unsafe { libc::usleep(1000) };
    }
}

/// Stops the threads of this process that run kernels, until [`GOES_ON`].
fn hold_kernels() {
    // SAFETY: the handler calls nothing but what it may.
    unsafe { libc::signal(libc::SIGUSR1, hold as *const () as libc::sighandler_t) };
    for thread in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let name = std::fs::read_to_string(thread.path().join("comm")).unwrap_or_default();
        if name.starts_with("rs-stream") {
            let number: c_int = thread.file_name().to_str().unwrap().parse().unwrap();
            // SAFETY: a thread of ours, and a signal that has a handler.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), number, libc::SIGUSR1) };
        }
    }
}

/// Whether the kernel of this process says that it waits for another rank.
fn kernel_waits() -> bool {
    let pages = observe::pages().expect("a communicator has pages");
    pages.descriptions().any(|operation| operation.waits != 0)
}

/// One rank of [`a_kernel_that_stops_is_named`]: rank 1's kernel stops where it waits for rank 2, which comes only then.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn frozen_rank() {
    let Some(rank) = rank_of_process() else { return };
    let marks = Marks::of_process();
    let mut data = vec![1f32; ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    match rank.rank {
        0 => {}
        1 => marks.wait("rank 0 has begun"),
        _ => marks.wait("rank 1 has stopped"),
    }
    ok(rank.call(&Call::new(Function::AllReduce, ELEMENTS), at, at));
    eventually("the operation begins", has_begun);
    match rank.rank {
        0 => marks.set("rank 0 has begun"),
        1 => {
            eventually("the kernel waits for another rank", kernel_waits);
            hold_kernels();
            marks.set("rank 1 has stopped");
        }
        _ => {}
    }
    marks.wait("all have reported");
    GOES_ON.store(true, Ordering::Relaxed);
    rank.synchronize();
    assert_eq!(data, vec![3f32; ELEMENTS]);
    rank.leave();
    println!("\nrank done");
}

/// It is not the rank that began first, and so stood still for longest.
#[test]
fn a_kernel_that_stops_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log.%p");
    let variables = [
        (Marks::FOLDER, folder.path().to_str().unwrap()),
        ("NCCL_DEBUG", "WARN"),
        ("NCCL_DEBUG_FILE", log.to_str().unwrap()),
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
    ];
    let ranks = start_processes("watchdog::stuck::frozen_rank", 3, 1, &variables);
    let verdict =
        "Verdict: STUCK_KERNEL (hang): every rank has come, nothing moves, and rank 1 stopped first";
    let logs = || {
        let files = std::fs::read_dir(folder.path()).unwrap().flatten();
        let logs = files.filter(|file| file.file_name().to_string_lossy().starts_with("log."));
        let texts = logs.map(|log| std::fs::read_to_string(log.path()).unwrap());
        texts.collect::<Vec<_>>()
    };
    eventually("the verdict of every rank", || {
        logs().iter().filter(|log| log.contains(verdict)).count() == 3
    });
    Marks::in_folder(folder.path()).set("all have reported");
    texts("frozen_rank", ranks);
    assert_eq!(logs().len(), 3);
    for log in logs() {
        let (_, report) = log.split_once(verdict).expect(&log);
        let line = |rank: &str| report.lines().find(|line| line.contains(rank)).expect(report);
        assert!(
            line("Rank 2: ").contains(", waits for data from rank 1 (channel 0, step "),
            "{log}"
        );
        assert!(!line("Rank 1: ").contains("waits"), "{log}");
    }
}

/// One rank of [`a_stuck_kernel_is_a_hang_and_can_be_aborted`].
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn stuck_rank() {
    let Some(rank) = rank_of_process() else { return };
    let (marks, device) = (Marks::of_process(), host());
    if rank.rank == 1 {
        ok(abi::ncclSimulateKernelTimeout(rank.comm));
        // The communicator's next operation waits behind it, on whatever stream.
        let data = [0_u8; 8];
        // SAFETY: as many bytes, which nothing ever touches.
        ok(unsafe { abi::ncclSend(data.as_ptr().cast(), 8, 0, 0, rank.comm, rank.stream) });
        eventually("the error", || state(rank.comm) != ResultCode::Success);
        marks.set("rank 1 has the error");
    }
    // What rank 1 finds is no error of rank 0.
    marks.wait("rank 1 has the error");
    let expected = match rank.rank {
        1 => (ResultCode::SystemError, Progress::Pending),
        _ => (ResultCode::Success, Progress::Done),
    };
    assert_eq!(
        (state(rank.comm), device.stream_query(rank.stream).unwrap()),
        expected
    );
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    eventually("the stream is released", || {
        device.stream_query(rank.stream).unwrap() == Progress::Done
    });
    println!("\nrank done");
}

#[test]
fn a_stuck_kernel_is_a_hang_and_can_be_aborted() {
    let folder = tempfile::tempdir().unwrap();
    let variables = [
        (Marks::FOLDER, folder.path().to_str().unwrap()),
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_WATCHDOG_ACTION", "error"),
    ];
    let ranks = start_processes("watchdog::stuck::stuck_rank", 2, 1, &variables);
    let texts = texts("stuck_rank", ranks);
    assert!(verdicts(&texts[0]).is_empty(), "{}", texts[0]);
    assert!(
        matches!(verdicts(&texts[1])[..], [verdict] if verdict.starts_with("STUCK_KERNEL (hang): every rank has come")),
        "{}",
        texts[1]
    );
}
