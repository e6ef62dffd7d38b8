//! Ranks that do not call alike.

use std::env;

use ringsight_comm::{abi, error::ResultCode, observe};
use ringsight_records::{Function, Kind};

use super::{CASE, ELEMENTS, has_begun, has_reported, texts, verdicts};
use crate::common::{
    Call, host, ok, rank_of_process, start_processes, state,
    waiting::{Marks, PATIENT_MS, eventually},
};

/// What a rank of [`deadlocked_rank`] calls, one after the other without waiting.
fn deadlocked_calls(case: &str, rank: usize) -> Vec<Call> {
    let collective = Call::new(Function::AllReduce, ELEMENTS);
    let message = |function| Call::peer(function, ELEMENTS, 1 - rank);
    match (case, rank) {
        ("a receive against a receive", _) => vec![message(Function::Recv)],
        // The other rank has called the all-reduce behind its receive, and never begins it.
        ("a receive against a collective", 0) => vec![message(Function::Recv), collective],
        ("a receive against a collective", _) => vec![collective, message(Function::Send)],
        _ => unreachable!("{case}"),
    }
}

/// One rank of [`ranks_that_wait_for_each_other_fail_with_who_waits_for_whom`].
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn deadlocked_rank() {
    let mut data = vec![1f32; ELEMENTS];
    let Some(rank) = rank_of_process() else { return };
    let calls = deadlocked_calls(&env::var(CASE).unwrap(), rank.rank);
    let at: *mut u8 = data.as_mut_ptr().cast();
    for call in &calls {
        ok(rank.call(call, at, at));
    }
    eventually("the communicator fails", || {
        state(rank.comm) != ResultCode::Success
    });
    assert_eq!(state(rank.comm), ResultCode::InvalidUsage);
    assert_eq!(rank.call(&calls[0], at, at), ResultCode::InvalidUsage);
    println!("\ntold {}", crate::common::last_error());
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    println!("\nrank done");
}

#[test]
fn ranks_that_wait_for_each_other_fail_with_who_waits_for_whom() {
    for (case, source) in [
        ("a receive against a receive", "pages"),
        ("a receive against a collective", "events"),
    ] {
        let variables = [
            (CASE, case),
            ("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS),
            ("RINGSIGHT_WATCHDOG_SOURCE", source),
        ];
        let ranks = start_processes("watchdog::calls::deadlocked_rank", 2, 1, &variables);
        for text in texts(case, ranks) {
            let told = text.lines().find_map(|line| line.strip_prefix("told "));
            let told = told.expect(&text);
            let whole = ["rank 0", "rank 1", "each waits for the other"];
            assert!(
                whole.iter().all(|part| told.contains(part)),
                "{case}, {source}: {told}"
            );
            let late = verdicts(&text)
                .into_iter()
                .find(|verdict| verdict.contains("(late)"));
            assert_eq!(late, None, "{case}, {source}: {text}");
        }
    }
}

/// Rank 1 calls an operation that cannot be launched, since its stream is gone. It calls it again when rank 0 has reported.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn refused_rank() {
    let Some(mut rank) = rank_of_process() else { return };
    let marks = Marks::of_process();
    let mut data = vec![1f32; ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let call = Call::new(Function::AllReduce, ELEMENTS);
    if rank.rank == 1 {
        let gone = rank.stream;
        // SAFETY: nothing is asked of the caller.
        ok(unsafe { abi::ncclGroupStart() });
        ok(rank.call(&call, at, at));
        host().stream_destroy(gone).unwrap();
        // SAFETY: as above.
        assert_ne!(unsafe { abi::ncclGroupEnd() }, ResultCode::Success);
        rank.stream = host().stream_create().unwrap();
        marks.wait("reported");
    }
    ok(rank.call(&call, at, at));
    if rank.rank == 0 {
        eventually("a verdict", has_reported);
        marks.set("reported");
    }
    rank.synchronize();
    assert_eq!(data, vec![2f32; ELEMENTS]);
    rank.leave();
    println!("\nrank done");
}

#[test]
fn a_call_that_could_not_be_launched_has_not_been_made() {
    for source in ["pages", "events"] {
        let folder = tempfile::tempdir().unwrap();
        let variables = [
            (Marks::FOLDER, folder.path().to_str().unwrap()),
            ("NCCL_KERNEL_TIMEOUT_MS", "300"),
            ("RINGSIGHT_WATCHDOG_SOURCE", source),
        ];
        let ranks = start_processes("watchdog::calls::refused_rank", 2, 1, &variables);
        let text = &texts(source, ranks)[0];
        let first = verdicts(text).into_iter().next().expect(text);
        assert!(
            first.starts_with("NOT_LAUNCHED (late): rank 1 "),
            "{source}: {text}"
        );
    }
}

/// One rank of [`calls_that_differ_are_a_verdict`]: rank 1 gives another count, when the others that launch wait.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn differing_rank() {
    let Some(rank) = rank_of_process() else { return };
    let device = host();
    let mut data = vec![1f32; ELEMENTS + 1];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let call = Call::new(Function::AllReduce, ELEMENTS + usize::from(rank.rank == 1));
    let capture = || {
        device.capture_begin(rank.stream).unwrap();
        ok(rank.call(&call, at, at));
        let graph = device.capture_end(rank.stream).unwrap();
        device.graph_instantiate(graph).unwrap()
    };
    let mode = env::var(CASE).unwrap();
    let exec = mode.starts_with("graph").then(capture);
    // The ranks that launch; the others have captured only.
    let launch = if mode == "graph of two" {
        [0, 1].as_slice()
    } else {
        &[0, 1, 2]
    };
    let launches = launch.contains(&rank.rank);
    let marks = Marks::of_process();
    if rank.rank == 1 {
        for other in launch.iter().filter(|other| **other != 1) {
            marks.wait(&format!("rank {other} waits"));
        }
    }
    match exec {
        _ if !launches => {}
        Some(exec) => device.graph_launch(exec, rank.stream).unwrap(),
        None => ok(rank.call(&call, at, at)),
    }
    if launches && rank.rank != 1 {
        eventually("the operation begins", has_begun);
        marks.set(&format!("rank {} waits", rank.rank));
    }
    eventually("the communicator fails", || {
        state(rank.comm) != ResultCode::Success
    });
    assert_eq!(state(rank.comm), ResultCode::InvalidUsage);
    let given = observe::emitted(Kind::Verdict);
    if let Ok(dumps) = env::var("RINGSIGHT_DUMP_JSON") {
        eventually("a dump", || {
            std::path::Path::new(&format!("{dumps}{}", rank.rank)).exists()
        });
    }
    println!("\nrecords {given}");
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    if let Some(exec) = exec {
        device.graph_exec_destroy(exec).unwrap();
    }
    println!("\nrank done");
}

/// What the three ranks of [`differing_rank`] wrote.
fn differing_ranks(mode: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let own = [(CASE, mode), (Marks::FOLDER, folder.path().to_str().unwrap())];
    let variables = [&own, variables].concat();
    let ranks = start_processes("watchdog::calls::differing_rank", 3, 2, &variables);
    texts(mode, ranks)
}

#[test]
fn calls_that_differ_are_a_verdict() {
    for (mode, source) in [
        ("eager", "pages"),
        ("eager", "events"),
        ("graph", "pages"),
        ("graph", "events"),
        // The difference is found before rank 2's replay begins.
        ("graph of two", "pages"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let dumps = folder.path().join("trace_");
        let variables = [
            ("RINGSIGHT_WATCHDOG_SOURCE", source),
            ("RINGSIGHT_DUMP_JSON", dumps.to_str().unwrap()),
        ];
        for text in differing_ranks(mode, &variables) {
            let begins = "METADATA_MISMATCH (hang): rank 1 has called something else: ranks 0, 2 called \
                          AllReduce(count 4096, float32, sum) while rank 1 called AllReduce(count 4097, float32, sum): ";
            assert!(
                matches!(verdicts(&text)[..], [verdict] if verdict.starts_with(begins)),
                "{mode}, {source}: {text}"
            );
            assert!(text.contains("\nrecords 1\n"), "{mode}, {source}: {text}");
        }
    }
}

#[test]
fn without_a_watchdog_calls_that_differ_only_fail() {
    for text in differing_ranks("eager", &[("NCCL_KERNEL_TIMEOUT_MS", "0")]) {
        assert!(!text.contains("Verdict: "), "{text}");
        assert!(text.contains("\nrecords 0\n"), "{text}");
    }
}
