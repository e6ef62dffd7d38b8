//! Kernels that stop, or never end.

use std::{
    env,
    ffi::c_int,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{abi, device::Progress, error::ResultCode, observe};
use ringsight_records::{Description, Function};

use super::{ELEMENTS, FOLDER, PROMISED, THRESHOLD, texts, until};
use crate::common::{Call, host, ok, rank_of_process, start_processes, state};

/// A thread that [`hold`] holds goes on.
static GOES_ON: AtomicBool = AtomicBool::new(false);

extern "C" fn hold(_signal: c_int) {
    while !GOES_ON.load(Ordering::Relaxed) {
        // SAFETY: a sleep may be called in a signal's handler.
        unsafe { libc::usleep(1000) };
    }
}

/// Lets the threads of this process that run kernels do nothing any more.
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

/// One rank of [`a_kernel_that_stops_is_named`]: rank 1's kernel stops where it waits for rank 2, which comes only then.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn frozen_rank() {
    let Some(rank) = rank_of_process() else { return };
    let mut data = vec![1f32; ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let folder = PathBuf::from(env::var(FOLDER).unwrap());
    let await_mark = |name: &str| until(&|| folder.join(name).exists());
    let mark = |name: &str| std::fs::write(folder.join(name), "").unwrap();
    match rank.rank {
        0 => {}
        1 => await_mark("first has begun"),
        _ => await_mark("second has stopped"),
    }
    ok(rank.call(&Call::new(Function::AllReduce, ELEMENTS), at, at));
    let in_progress = |operation: Description| operation.device_start_ns != 0;
    until(&|| observe::pages().unwrap().descriptions().any(in_progress));
    match rank.rank {
        0 => mark("first has begun"),
        1 => {
            // It has looked for the others, in vain.
            thread::sleep(Duration::from_millis(50));
            hold_kernels();
            mark("second has stopped");
        }
        _ => {}
    }
    await_mark("all have told");
    GOES_ON.store(true, Ordering::Relaxed);
    rank.synchronize();
    assert_eq!(data, vec![3f32; ELEMENTS]);
    rank.leave();
    println!("\nrank done");
}

/// Not the rank that began first, and so did not move for longest.
#[test]
fn a_kernel_that_stops_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log.%p");
    let variables = [
        (FOLDER, folder.path().to_str().unwrap()),
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
    let end = Instant::now() + 20 * PROMISED;
    while logs().iter().filter(|log| log.contains(verdict)).count() < 3 && Instant::now() < end {
        thread::sleep(Duration::from_millis(10));
    }
    std::fs::write(folder.path().join("all have told"), "").unwrap();
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
    let device = host();
    if rank.rank == 1 {
        ok(abi::ncclSimulateKernelTimeout(rank.comm));
        // The communicator's next operation waits behind it, on whatever stream.
        let data = [0_u8; 8];
        // SAFETY: as many bytes, which nothing ever touches.
        ok(unsafe { abi::ncclSend(data.as_ptr().cast(), 8, 0, 0, rank.comm, rank.stream) });
    }
    thread::sleep(THRESHOLD + PROMISED);
    let mut expected = (ResultCode::Success, Progress::Done);
    if rank.rank == 1 {
        expected = (ResultCode::SystemError, Progress::Pending);
    }
    assert_eq!(
        (state(rank.comm), device.stream_query(rank.stream).unwrap()),
        expected
    );
    let begin = Instant::now();
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    println!("\nrank done");
}

#[test]
fn a_stuck_kernel_is_a_hang_and_can_be_aborted() {
    let variables = [
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_WATCHDOG_ACTION", "error"),
    ];
    let ranks = start_processes("watchdog::stuck::stuck_rank", 2, 1, &variables);
    for (rank, text) in texts("stuck_rank", ranks).into_iter().enumerate() {
        let verdicts: Vec<&str> = text.lines().filter(|line| line.contains("Verdict: ")).collect();
        if rank == 1 {
            assert!(
                verdicts.len() == 1
                    && verdicts[0].contains("Verdict: STUCK_KERNEL (hang): every rank has come"),
                "{text}"
            );
        } else {
            assert_eq!(verdicts, [""; 0], "{text}");
        }
    }
}
