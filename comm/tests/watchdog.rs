//! What the watchdog does besides telling verdicts: errors, and the abort that they lead to. The verdicts are held against
//! `docs/src/watchdog.md` by `cargo xtask faults`.

mod common;

use std::{
    env, thread,
    time::{Duration, Instant},
};

use common::{Call, host, ok, rank_of_process, start_processes, state};
use ringsight_comm::{abi, device::Progress, error::ResultCode};
use ringsight_records::Function;

const FAULT: &str = "RINGSIGHT_TEST_FAULT";
/// Of the watchdog.
const THRESHOLD: Duration = Duration::from_millis(300);
/// From the end of the threshold to the verdict.
const PROMISED: Duration = Duration::from_secs(1);
const ELEMENTS: usize = 4096;

/// One rank of [`ranks_that_wait_for_each_other_are_told_so`].
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn crossed_rank() {
    let Some(rank) = rank_of_process() else { return };
    let mut data = vec![1f32; ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let function = match (env::var(FAULT).unwrap().as_str(), rank.rank) {
        ("recv recv", _) | ("recv all_reduce", 0) => Function::Recv,
        ("broadcast recv", 0) => Function::Broadcast,
        ("broadcast recv", _) => Function::Recv,
        _ => Function::AllReduce,
    };
    // Rank 1 is the root, so that both wait.
    let peer = if function == Function::Broadcast {
        1
    } else {
        1 - rank.rank
    };
    let call = if function == Function::AllReduce {
        Call::new(function, ELEMENTS)
    } else {
        Call::peer(function, ELEMENTS, peer)
    };
    ok(rank.call(&call, at, at));
    let end = Instant::now() + THRESHOLD + 2 * PROMISED;
    while state(rank.comm) == ResultCode::Success && Instant::now() < end {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(state(rank.comm), ResultCode::InvalidUsage);
    assert_eq!(rank.call(&call, at, at), ResultCode::InvalidUsage);
    println!("\ntold {}", common::last_error());
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    println!("\nrank done");
}

#[test]
fn ranks_that_wait_for_each_other_are_told_so() {
    for fault in ["recv recv", "recv all_reduce", "broadcast recv"] {
        let variables = [(FAULT, fault), ("NCCL_KERNEL_TIMEOUT_MS", "300")];
        let mut texts = Vec::new();
        for child in start_processes("crossed_rank", 2, 1, &variables) {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && text.contains("rank done"),
                "{fault}: {text}"
            );
            let told = text.lines().find_map(|line| line.strip_prefix("told "));
            texts.push(told.expect(&text).to_owned());
        }
        for text in &texts {
            let whole = ["rank 0", "rank 1", "each waits for the other"];
            assert!(whole.iter().all(|part| text.contains(part)), "{fault}: {text}");
        }
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
    for (rank, child) in start_processes("stuck_rank", 2, 1, &variables)
        .into_iter()
        .enumerate()
    {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("rank done"), "{text}");
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
