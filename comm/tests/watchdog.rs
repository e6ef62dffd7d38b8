//! What the watchdog does besides telling verdicts: errors, and the abort that they lead to. The verdicts are held against
//! `docs/src/watchdog.md` by `cargo xtask faults`.

mod common;
#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{
    env,
    ffi::c_int,
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{Call, Rank, alone, host, in_child, ok, rank_of_process, start_processes, state, unique_id};
use ringsight_comm::{abi, device::Progress, error::ResultCode, observe};
use ringsight_records::{Algorithm, Description, Function, Kind, Protocol};

const FAULT: &str = "RINGSIGHT_TEST_FAULT";
/// Where ranks tell each other how far they are.
const FOLDER: &str = "RINGSIGHT_TEST_FOLDER";
/// Of the watchdog.
const THRESHOLD: Duration = Duration::from_millis(300);
/// From the end of the threshold to the verdict.
const PROMISED: Duration = Duration::from_secs(1);
const ELEMENTS: usize = 4096;

#[track_caller]
fn until(is: &dyn Fn() -> bool) {
    let end = Instant::now() + 20 * PROMISED;
    while !is() {
        assert!(Instant::now() < end, "it does not come");
        thread::sleep(Duration::from_millis(1));
    }
}

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
    let ranks = start_processes("frozen_rank", 3, 1, &variables);
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
    for output in common::outputs(ranks) {
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("rank done"), "{text}");
    }
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
    common::outputs(start_processes("differing_rank", 3, 2, &variables))
        .into_iter()
        .map(|output| {
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && text.contains("rank done"),
                "{mode}: {text}"
            );
            text.into_owned()
        })
        .collect()
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

/// One rank of [`a_hang_is_dumped_by_every_rank`]: rank 1 never calls the last operation; before it there was one of each kind, and
/// a replayed graph.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn dumped_rank() {
    let Some(rank) = rank_of_process() else { return };
    let device = host();
    let mut data = vec![1f32; 3 * ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let mut copy = vec![1f32; 3 * ELEMENTS];
    let other: *mut u8 = copy.as_mut_ptr().cast();
    for function in common::COLLECTIVES {
        ok(rank.call(&Call::new(function, ELEMENTS), at, other));
    }
    match rank.rank {
        0 => ok(rank.call(&Call::peer(Function::Send, ELEMENTS, 2), at, at)),
        2 => ok(rank.call(&Call::peer(Function::Recv, ELEMENTS, 0), at, at)),
        _ => {}
    }
    device.capture_begin(rank.stream).unwrap();
    ok(rank.call(&Call::new(Function::AllReduce, ELEMENTS), at, at));
    let graph = device.capture_end(rank.stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_launch(exec, rank.stream).unwrap();
    rank.synchronize();
    if rank.rank != 1 {
        ok(rank.call(&Call::new(Function::AllReduce, 7), at, at));
    }
    let end = Instant::now() + 20 * PROMISED;
    let files = env::var("RINGSIGHT_DUMP_FILE").unwrap();
    while !(0..rank.ranks).all(|rank| std::path::Path::new(&format!("{files}{rank}")).exists()) {
        assert!(Instant::now() < end, "no dumps");
        thread::sleep(Duration::from_millis(5));
    }
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    device.graph_exec_destroy(exec).unwrap();
    println!("\nrank done");
}

/// Prints what PyTorch's analyzer looks for: the entries of each process group that not all of its ranks have, or not alike.
const ANALYZE: &str = r#"
import pickle, sys, ast
dumps = {rank: pickle.load(open(sys.argv[1] + str(rank), "rb")) for rank in range(3)}
found = {}
for rank, dump in dumps.items():
    assert dump["version"] == "2.10", dump["version"]
    for entry in dump["entries"]:
        group, description = entry["process_group"]
        ranks = ast.literal_eval(dump["pg_config"][group]["ranks"])
        assert rank in ranks and dump["pg_config"][group]["desc"] == description
        found.setdefault((group, tuple(ranks), entry["collective_seq_id"]), {})[rank] = entry
print("operations", len(found))
for (group, ranks, number), entries in sorted(found.items()):
    states = {entry["state"] for entry in entries.values()}
    kinds = sorted({entry["profiling_name"] for entry in entries.values()})
    missing = sorted(set(ranks) - set(entries))
    if missing or len(states) > 1:
        print("wrong", kinds, sorted(states), "missing", missing)
    if len(ranks) == 2:
        print("message", kinds, sorted(states))
    if number >> 32:
        print("captured", kinds, sorted(states))
"#;

#[test]
fn a_hang_is_dumped_by_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let (pickles, texts) = (folder.path().join("fr/trace_"), folder.path().join("json/trace_"));
    let variables = [
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_ARRIVAL_TIMEOUT_MS", "600"),
        ("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100"),
        ("RINGSIGHT_DUMP_FILE", pickles.to_str().unwrap()),
        ("RINGSIGHT_DUMP_JSON", texts.to_str().unwrap()),
    ];
    common::run_processes_with("dumped_rank", 3, 2, &variables);
    let mut names: Vec<_> = std::fs::read_dir(folder.path().join("fr"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["trace_0", "trace_1", "trace_2"]);
    let Ok(output) = std::process::Command::new("python3")
        .args(["-c", ANALYZE])
        .arg(&pickles)
        .output()
    else {
        return skip::skip("a_hang_is_dumped_by_every_rank", "no python3 reads the dumps");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let expected = [
        "operations 11",
        "wrong ['nccl:all_reduce'] ['started'] missing [1]",
        "captured ['nccl:all_reduce'] ['completed']",
        "message ['nccl:recv 1<-0', 'nccl:send 0->1'] ['completed']",
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected, "{text}");
}

/// One rank of the tests below, whose hangs set the error: rank 1 comes to the operation when rank 0 has been told that it hangs.
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
    let exec = (env::var(FAULT).unwrap() == "graph").then(|| {
        let (code, graph) = capture();
        ok(code);
        device.graph_instantiate(graph).unwrap()
    });
    let launch = || match exec {
        Some(exec) => device.graph_launch(exec, rank.stream).unwrap(),
        None => ok(rank.call(&call, at, at)),
    };
    let told = PathBuf::from(env::var(FOLDER).unwrap()).join("told");
    if rank.rank == 0 {
        launch();
        until(&|| state(rank.comm) != ResultCode::Success);
        print_description();
        std::fs::write(told, "").unwrap();
    } else {
        until(&|| told.exists());
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
    }
    if rank.rank == 0 {
        let refused = |code| {
            common::fails(
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
    let sum = if exec.is_some() { 4.0 } else { 2.0 };
    assert!(data.iter().all(|value| *value == sum), "{:?}", data[0]);
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    println!("\nrank done");
}

/// Prints the lines that a report has of the one operation of this process as its description has them.
fn print_description() {
    let operation = observe::pages().unwrap().descriptions().next().unwrap();
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
        (FAULT, mode),
        (FOLDER, folder.path().to_str().unwrap()),
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_ARRIVAL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_WATCHDOG_ACTION", "error"),
        ("RINGSIGHT_WATCHDOG_SOURCE", source),
    ];
    common::outputs(start_processes("late_rank", 2, 1, &variables))
        .into_iter()
        .map(|output| {
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && text.contains("rank done"),
                "{mode}, {source}: {text}"
            );
            text.into_owned()
        })
        .collect()
}

#[test]
fn an_error_stays_though_the_operation_completes_and_later_calls_are_refused() {
    for (mode, source) in [
        ("eager", "pages"),
        ("eager", "events"),
        ("graph", "pages"),
        ("graph", "events"),
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

/// Communicator, rank, kernel, algorithm and protocol, time-out and threshold, channel mask, threads of a block and device are what users of
/// such reports look for.
#[test]
fn a_report_has_every_line() {
    let text = &late_ranks("eager", "pages")[0];
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
    assert_eq!([15, 16, 17].map(|at| found[at][0]), [1.0, 0.0, 1.0], "{text}");
}

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
    assert_eq!(verdicts_of("hangs_alone"), 3);
}

#[test]
fn a_forked_child_has_a_detector_of_its_own() {
    assert_eq!(verdicts_of("hangs_in_child"), 2);
}
