//! Ranks that are late: the report, and the error that stays.

use std::env;

use ringsight_comm::{abi, error::ResultCode, observe};
use ringsight_records::{Algorithm, Function, Protocol, pages::DESCRIPTION_ENTRIES};

use super::{CASE, ELEMENTS, texts};
use crate::common::{
    Call, Rank, host, ok, rank_of_process, start_processes, state, unique_id,
    waiting::{Marks, eventually},
};

/// One rank of the tests below, where hangs set the error: rank 1 comes to the operation when rank 0 has the error.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn late_rank() {
    let Some(rank) = rank_of_process() else { return };
    let device = host();
    let mut data = vec![1f32; ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let call = Call::new(Function::AllReduce, ELEMENTS);
    let capture = || {
        device.capture_begin(rank.stream).unwrap();
        let code = rank.call(&call, at, at);
        (code, device.capture_end(rank.stream).unwrap())
    };
    let mode = env::var(CASE).unwrap();
    let mut sum = 2.0;
    let exec = ["graph", "instance"].contains(&mode.as_str()).then(|| {
        let (code, graph) = capture();
        ok(code);
        let exec = device.graph_instantiate(graph).unwrap();
        if mode == "graph" {
            return exec;
        }
        // Another instance of it has been replayed more often.
        for _ in 0..3 {
            device.graph_launch(exec, rank.stream).unwrap();
            sum *= 2.0;
        }
        rank.synchronize();
        let next = device.graph_instantiate(graph).unwrap();
        device.graph_exec_destroy(exec).unwrap();
        next
    });
    let launch = || match exec {
        Some(exec) => device.graph_launch(exec, rank.stream).unwrap(),
        None => ok(rank.call(&call, at, at)),
    };
    let marks = Marks::of_process();
    if rank.rank == 0 {
        launch();
        if mode == "busy" {
            work_alone();
        }
        eventually("the error", || state(rank.comm) != ResultCode::Success);
        print_description();
        marks.set("reported");
    } else {
        marks.wait("reported");
        launch();
    }
    // It completes, and the error stays: on the rank that waited.
    rank.synchronize();
    let expected = [ResultCode::SystemError, ResultCode::Success][rank.rank];
    assert_eq!(state(rank.comm), expected);
    if let Some(exec) = exec {
        // Graphs are launched without the library, which refuses nothing.
        launch();
        rank.synchronize();
        device.graph_exec_destroy(exec).unwrap();
        sum *= 2.0;
    }
    if rank.rank == 0 {
        let refused = |code| {
            crate::common::fails(
                code,
                ResultCode::SystemError,
                "comm has failed earlier: NOT_LAUNCHED",
            );
        };
        refused(rank.call(&call, at, at));
        let (code, graph) = capture();
        refused(code);
        device.graph_destroy(graph).unwrap();
    }
    assert!(data.iter().all(|value| *value == sum), "{:?}", data[0]);
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    println!("\nrank done");
}

/// Runs more operations of another communicator than have descriptions at a time.
fn work_alone() {
    let alone = Rank::join(unique_id(), 0, 1);
    let (from, mut to) = ([1_f32; 4], [0_f32; 4]);
    for _ in 0..2 * DESCRIPTION_ENTRIES {
        let call = Call::new(Function::AllReduce, from.len());
        ok(alone.call(&call, from.as_ptr().cast(), to.as_mut_ptr().cast()));
    }
    alone.synchronize();
    assert_eq!(to, from);
    alone.leave();
}

/// Prints the lines of the report that follow from the operation's description.
fn print_description() {
    let pages = observe::pages().unwrap();
    let operation = pages.descriptions().find(|operation| operation.ranks == 2);
    let operation = operation.unwrap();
    println!("\nexpected Comm: {:#x}, Rank: 0/2", operation.comm);
    println!(
        "expected Kernel: AllReduce(count {}, float32, sum), {}, {}, {} channels, collective 0",
        operation.count,
        Algorithm::from_code(operation.algorithm).unwrap(),
        Protocol::from_code(operation.protocol).unwrap(),
        operation.channels
    );
    println!("expected Channel Mask: {:#x}", operation.channel_mask);
    println!("expected Threads per Block: {}", operation.warps);
    println!("expected CUDA Device: 0");
    println!("expected Bytes: {}", operation.bytes);
    println!("expected Stream: {:#x}", operation.stream);
    println!("expected Operation: {}", operation.op);
}

/// What the ranks of [`late_rank`] wrote.
fn late_ranks(mode: &str, source: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let variables = [
        (CASE, mode),
        (Marks::FOLDER, folder.path().to_str().unwrap()),
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_ARRIVAL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_WATCHDOG_ACTION", "error"),
        ("RINGSIGHT_WATCHDOG_SOURCE", source),
    ];
    let ranks = start_processes("watchdog::late::late_rank", 2, 1, &variables);
    texts(&format!("{mode}, {source}"), ranks)
}

#[test]
fn an_error_stays_and_later_calls_are_refused() {
    for (mode, source) in [
        ("eager", "events"),
        ("graph", "pages"),
        ("graph", "events"),
        ("instance", "events"),
    ] {
        late_ranks(mode, source);
    }
}

/// The numbers that stand in a line where its pattern has `#`.
fn numbers(pattern: &str, line: &str) -> Option<Vec<f64>> {
    let (first, rest) = pattern
        .split_once('#')
        .map_or((pattern, None), |(a, b)| (a, Some(b)));
    let line = line.strip_prefix(first)?;
    let Some(rest) = rest else {
        return line.is_empty().then(Vec::new);
    };
    let end = line
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(line.len());
    let mut found = vec![line[..end].parse().ok()?];
    found.extend(numbers(rest, &line[end..])?);
    Some(found)
}

/// Users of such reports look for communicator, rank, kernel, algorithm and protocol, time-out and threshold, channel mask,
/// threads of a block and device.
#[test]
fn a_report_has_every_line() {
    // Also if the process does much else meanwhile.
    for mode in ["eager", "busy"] {
        has_every_line(&late_ranks(mode, "pages")[0]);
    }
}

fn has_every_line(text: &str) {
    let lines: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once(" NCCL WARN "))
        .map(|(_, line)| line)
        .skip_while(|line| *line != "NCCL KERNEL TIMEOUT DETECTED")
        .collect();
    let mut expected = text.lines().filter_map(|line| line.strip_prefix("expected "));
    let mut next = || expected.next().expect(text);
    let patterns = [
        "NCCL KERNEL TIMEOUT DETECTED",
        "=== NCCL Kernel Timeout Report ===",
        next(),
        next(),
        "Timeout: # ms (threshold: # ms)",
        next(),
        next(),
        next(),
        next(),
        next(),
        next(),
        "Enqueued: # ms ago",
        "Launched: # ms ago",
        "Started: # ms ago",
        "Told by: kernels",
        "Verdict: NOT_LAUNCHED (hang): rank # has not launched it; its last launch on this communicator was # s ago",
        "Rank #: running # s, moved # s ago, waits for data from rank # (channel #, step #)",
        "Rank #: not launched, idle # s",
        "==================================",
    ];
    let found: Vec<Vec<f64>> = patterns
        .iter()
        .zip(&lines)
        .map(|(pattern, line)| {
            numbers(pattern, line).unwrap_or_else(|| panic!("{line} is not {pattern}:\n{text}"))
        })
        .collect();
    assert_eq!(found.len(), patterns.len(), "{text}");
    let [timeout, enqueued, launched, started] = [4, 11, 12, 13].map(|at| found[at][0]);
    assert!(timeout >= 300.0 && found[4][1] == 300.0, "{text}");
    assert!(
        enqueued >= launched && launched >= started && started == timeout,
        "{text}"
    );
    // The ranks that the verdict, and the lines of both ranks, name.
    assert_eq!([15, 16, 17].map(|at| found[at][0]), [1.0, 0.0, 1.0], "{text}");
}
