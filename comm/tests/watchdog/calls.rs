//! Ranks that do not call the same.

use std::{env, path::PathBuf};

use ringsight_comm::{abi, error::ResultCode, observe};
use ringsight_records::{Description, Function, Kind};

use super::{ELEMENTS, FAULT, FOLDER, texts, until};
use crate::common::{Call, host, ok, rank_of_process, start_processes, state, waiting::PATIENT_MS};

/// More than a message may have on its way while nobody takes it.
const MANY: usize = 16 << 20;

/// What a rank of [`crossed_rank`] calls, one after the other without waiting.
fn crossed_calls(fault: &str, rank: usize) -> Vec<Call> {
    let collective = Call::new(Function::AllReduce, ELEMENTS);
    let message = |function| Call::peer(function, ELEMENTS, 1 - rank);
    let (send, receive) = (message(Function::Send), message(Function::Recv));
    let large = |call: Call| Call { count: MANY, ..call };
    match (fault, rank) {
        ("recv recv", _) | ("recv all_reduce", 0) => vec![receive],
        // Rank 1 is the root, so that both wait.
        ("broadcast recv", 0) => vec![Call::peer(Function::Broadcast, ELEMENTS, 1)],
        ("broadcast recv", _) => vec![receive],
        ("recv all_reduce", _) => vec![collective],
        // The same with what the other one waits for behind it: called, and never begun.
        ("recv send recv send", _) => vec![receive, send],
        ("recv, recv send", 0) => vec![receive],
        ("recv, recv send", _) => vec![receive, send],
        ("recv all_reduce, all_reduce send", 0) => vec![receive, collective],
        ("recv all_reduce, all_reduce send", _) => vec![collective, send],
        ("all_reduce recv, send all_reduce", 0) => vec![collective, large(receive)],
        ("all_reduce recv, send all_reduce", _) => vec![large(send), collective],
        _ => unreachable!("{fault}"),
    }
}

/// One rank of [`ranks_that_wait_for_each_other_are_told_so`].
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn crossed_rank() {
    // Filled before the ranks meet: one that calls much later than the other is late.
    let calls = |rank| crossed_calls(&env::var(FAULT).unwrap(), rank);
    let most = [0, 1].map(|rank| calls(rank).iter().map(|call| call.count).max().unwrap());
    let mut data = vec![1f32; most[0].max(most[1])];
    let Some(rank) = rank_of_process() else { return };
    let calls = calls(rank.rank);
    let at: *mut u8 = data.as_mut_ptr().cast();
    for call in &calls {
        ok(rank.call(call, at, at));
    }
    until(&|| state(rank.comm) != ResultCode::Success);
    assert_eq!(state(rank.comm), ResultCode::InvalidUsage);
    assert_eq!(rank.call(&calls[0], at, at), ResultCode::InvalidUsage);
    println!("\ntold {}", crate::common::last_error());
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    println!("\nrank done");
}

#[test]
fn ranks_that_wait_for_each_other_are_told_so() {
    for fault in ["recv recv", "recv all_reduce", "broadcast recv"] {
        are_told_so(fault, "pages");
    }
}

#[test]
fn ranks_that_have_called_what_the_others_wait_for_are_told_so_too() {
    for (fault, source) in [
        ("recv send recv send", "pages"),
        ("recv send recv send", "events"),
        ("recv, recv send", "pages"),
        ("recv all_reduce, all_reduce send", "pages"),
        ("recv all_reduce, all_reduce send", "events"),
        ("all_reduce recv, send all_reduce", "pages"),
    ] {
        are_told_so(fault, source);
    }
}

#[track_caller]
fn are_told_so(fault: &str, source: &str) {
    let variables = [
        (FAULT, fault),
        ("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS),
        ("RINGSIGHT_WATCHDOG_SOURCE", source),
    ];
    let ranks = start_processes("watchdog::calls::crossed_rank", 2, 1, &variables);
    for text in texts(fault, ranks) {
        let told = text.lines().find_map(|line| line.strip_prefix("told "));
        let told = told.expect(&text);
        let whole = ["rank 0", "rank 1", "each waits for the other"];
        assert!(
            whole.iter().all(|part| told.contains(part)),
            "{fault}, {source}: {told}"
        );
        // Nobody is late.
        let late = text
            .lines()
            .find(|line| line.contains("Verdict: ") && line.contains("(late)"));
        assert_eq!(late, None, "{fault}, {source}: {text}");
    }
}

/// Rank 1 calls an operation that cannot be launched, since its stream is gone, and calls it again when rank 0 has said something.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn refused_rank() {
    let Some(mut rank) = rank_of_process() else { return };
    let told = PathBuf::from(env::var(FOLDER).unwrap()).join("told");
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
        until(&|| told.exists());
    }
    ok(rank.call(&call, at, at));
    if rank.rank == 0 {
        until(&|| observe::emitted(Kind::Verdict) > 0);
        std::fs::write(told, "").unwrap();
    }
    rank.synchronize();
    assert_eq!(data, vec![2f32; ELEMENTS]);
    rank.leave();
    println!("\nrank done");
}

#[test]
fn what_could_not_be_launched_has_not_been_called() {
    for source in ["pages", "events"] {
        let folder = tempfile::tempdir().unwrap();
        let variables = [
            (FOLDER, folder.path().to_str().unwrap()),
            ("NCCL_KERNEL_TIMEOUT_MS", "300"),
            ("RINGSIGHT_WATCHDOG_SOURCE", source),
        ];
        let ranks = start_processes("watchdog::calls::refused_rank", 2, 1, &variables);
        let text = &texts(source, ranks)[0];
        let first = text.lines().find_map(|line| line.split_once("Verdict: "));
        let (_, verdict) = first.expect(text);
        assert!(
            verdict.starts_with("NOT_LAUNCHED (late): rank 1 "),
            "{source}: {text}"
        );
    }
}

/// One rank of [`calls_that_differ_are_a_verdict`]: rank 1 gives another count, when the others wait.
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
    let exec = (env::var(FAULT).unwrap() == "graph").then(capture);
    let folder = PathBuf::from(env::var(FOLDER).unwrap());
    let waits = |rank: usize| folder.join(rank.to_string());
    if rank.rank == 1 {
        until(&|| [0, 2].iter().all(|other| waits(*other).exists()));
    }
    match exec {
        Some(exec) => device.graph_launch(exec, rank.stream).unwrap(),
        None => ok(rank.call(&call, at, at)),
    }
    if rank.rank != 1 {
        let in_progress = |operation: Description| operation.device_start_ns != 0;
        until(&|| observe::pages().unwrap().descriptions().any(in_progress));
        std::fs::write(waits(rank.rank), "").unwrap();
    }
    until(&|| state(rank.comm) != ResultCode::Success);
    assert_eq!(state(rank.comm), ResultCode::InvalidUsage);
    let given = observe::emitted(Kind::Verdict);
    if let Ok(dumps) = env::var("RINGSIGHT_DUMP_JSON") {
        until(&|| std::path::Path::new(&format!("{dumps}{}", rank.rank)).exists());
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

/// Of three ranks of [`differing_rank`], what each wrote.
fn differing_ranks(mode: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let own = [(FAULT, mode), (FOLDER, folder.path().to_str().unwrap())];
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
    ] {
        let folder = tempfile::tempdir().unwrap();
        let dumps = folder.path().join("trace_");
        let variables = [
            ("RINGSIGHT_WATCHDOG_SOURCE", source),
            ("RINGSIGHT_DUMP_JSON", dumps.to_str().unwrap()),
        ];
        for text in differing_ranks(mode, &variables) {
            let verdicts: Vec<&str> = text
                .lines()
                .filter_map(|line| line.split_once("Verdict: "))
                .map(|(_, verdict)| verdict)
                .collect();
            let begins = "METADATA_MISMATCH (hang): rank 1 has called something else: ranks 0, 2 called \
                          AllReduce(count 4096, float32, sum) while rank 1 called AllReduce(count 4097, float32, sum): ";
            assert!(
                matches!(verdicts[..], [verdict] if verdict.starts_with(begins)),
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
