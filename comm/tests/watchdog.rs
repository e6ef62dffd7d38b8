//! The watchdog: for each fault the verdict, the culprit and the time that `docs/src/watchdog.md` promises.

mod common;

use std::{
    collections::BTreeMap,
    env,
    io::{BufRead, BufReader},
    process::Child,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use common::{Call, Rank, host, ok, rank_of_process, start_processes, state};
use ringsight_comm::{abi, device::Progress, error::ResultCode};
use ringsight_records::Function;

const RANKS: usize = 4;
const FAULT: &str = "RINGSIGHT_TEST_FAULT";
/// Of the watchdog.
const THRESHOLD: Duration = Duration::from_millis(300);
/// From the end of the threshold to the verdict.
const PROMISED: Duration = Duration::from_secs(1);
/// How long a fault lasts that passes.
const LONG: Duration = Duration::from_millis(1800);
/// Shorter than the threshold.
const SHORT: Duration = Duration::from_millis(120);
const ELEMENTS: usize = 4096;

/// What a rank said, and when.
#[derive(Debug, Default)]
struct Told {
    /// Times are from the fault on.
    verdicts: Vec<(Duration, String)>,
    text: String,
    succeeded: bool,
}

/// Lets `victim` have a fault, and listens to all ranks.
fn watched(fault: &str, victim: usize, nodes: usize, graph: bool, variables: &[(&str, &str)]) -> Vec<Told> {
    let what = format!("{fault} {victim} {graph}");
    let mut all = vec![
        (FAULT, &what[..]),
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100"),
    ];
    all.extend(variables);
    let children = start_processes("watched_rank", RANKS, nodes, &all);
    let victim_pid = children[victim].id();
    let (lines, heard) = mpsc::channel();
    let threads: Vec<_> = children
        .into_iter()
        .enumerate()
        .map(|(rank, child)| {
            let lines = lines.clone();
            thread::spawn(move || listen(rank, child, &lines))
        })
        .collect();
    drop(lines);
    let mut told: Vec<Told> = (0..RANKS).map(|_| Told::default()).collect();
    let mut faulty = None;
    // The fault is announced in one pipe and its consequences in others: kept until all have ended.
    let mut said: Vec<(usize, Instant, String)> = Vec::new();
    for (rank, when, line) in heard {
        if line.contains("fault now") {
            faulty = Some(when);
            if fault == "stopped" {
                thread::spawn(move || {
                    thread::sleep(LONG);
                    // SAFETY: a child of ours; its end is waited for by a thread that waits for this signal's effect.
                    unsafe { libc::kill(victim_pid as libc::pid_t, libc::SIGCONT) };
                });
            }
        }
        said.push((rank, when, line));
    }
    let faulty = faulty.expect("the fault happened");
    for (rank, when, line) in said {
        if let Some(at) = line.find("Verdict: ") {
            let verdict = line[at + 9..].to_owned();
            told[rank]
                .verdicts
                .push((when.saturating_duration_since(faulty), verdict));
        }
        told[rank].text += &(line + "\n");
    }
    for (rank, thread) in threads.into_iter().enumerate() {
        told[rank].succeeded = thread.join().unwrap() || (rank == victim && fault == "killed");
    }
    told
}

/// Sends every line of a rank with the time of its arrival; whether the rank succeeded.
fn listen(rank: usize, mut child: Child, lines: &mpsc::Sender<(usize, Instant, String)>) -> bool {
    let errors = child.stderr.take().unwrap();
    let (others, err) = (lines.clone(), rank);
    let stderr = thread::spawn(move || {
        for line in BufReader::new(errors).lines().map_while(Result::ok) {
            others.send((err, Instant::now(), line)).unwrap();
        }
    });
    for line in BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok)
    {
        lines.send((rank, Instant::now(), line)).unwrap();
    }
    stderr.join().unwrap();
    child.wait().unwrap().success()
}

/// What the others shall say of the victim: the verdict and its class; nothing if `None`.
fn expect(fault: &str, expected: Option<(&str, &str)>, variables: &[(&str, &str)]) {
    for (nodes, graph, victim) in [(1, false, 1), (2, false, 3), (2, true, 0)] {
        let told = watched(fault, victim, nodes, graph, variables);
        let context = format!("{fault}, {nodes} nodes, graph {graph}, victim {victim}: {told:#?}");
        let mut latest = BTreeMap::new();
        for (rank, told) in told.iter().enumerate() {
            assert!(told.succeeded, "rank {rank} failed: {context}");
            if rank == victim {
                continue;
            }
            if told.text.contains("too late to wait") {
                assert!(told.verdicts.is_empty(), "rank {rank}: {context}");
                continue;
            }
            let Some((mut cause, class)) = expected else {
                assert!(told.verdicts.is_empty(), "rank {rank}: {context}");
                continue;
            };
            if cause == "QUEUED_BEHIND_COMPUTE" && graph {
                // The library is not told when a graph is launched.
                cause = "NOT_LAUNCHED";
            }
            let [(when, verdict), later @ ..] = &told.verdicts[..] else {
                panic!("rank {rank} says nothing: {context}");
            };
            // One that goes on has not called the operation yet, and may be asked before it does.
            let all_after = later.iter().all(|(when, _)| *when >= LONG - THRESHOLD);
            assert!(
                later.is_empty() || fault == "stopped" && all_after,
                "rank {rank} says more than one verdict: {context}"
            );
            assert!(
                verdict.starts_with(&format!("{cause} ({class}): "))
                    && verdict.contains(&format!("rank {victim}")),
                "rank {rank}: {context}"
            );
            assert!(*when <= THRESHOLD + PROMISED, "rank {rank}: {when:?}: {context}");
            latest.insert(rank, *when);
        }
        println!("{fault}, {nodes} nodes, graph {graph}: {latest:?}");
    }
}

/// One rank of [`watched`].
#[test]
#[ignore = "helper: the body of one rank; started by the other tests"]
fn watched_rank() {
    let Some(rank) = rank_of_process() else { return };
    let fault = env::var(FAULT).unwrap();
    let [fault, victim, graph] = *fault.split(' ').collect::<Vec<_>>() else {
        panic!("{fault}")
    };
    let is_victim = rank.rank == victim.parse::<usize>().unwrap();
    let (device, mut data) = (host(), vec![1f32; ELEMENTS]);
    let at: *mut u8 = data.as_mut_ptr().cast();
    let call = Call::new(Function::AllReduce, ELEMENTS);
    let all_reduce: Box<dyn Fn()> = if graph == "true" {
        device.capture_begin(rank.stream).unwrap();
        ok(rank.call(&call, at, at));
        let graph = device.capture_end(rank.stream).unwrap();
        let exec = device.graph_instantiate(graph).unwrap();
        device.graph_destroy(graph).unwrap();
        Box::new(move || device.graph_launch(exec, rank.stream).unwrap())
    } else {
        Box::new(move || ok(rank.call(&call, at, at)))
    };
    for _ in 0..3 {
        all_reduce();
    }
    rank.synchronize();
    if is_victim {
        misbehave(fault, &rank);
    }
    if fault == "aborted" && is_victim {
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommAbort(rank.comm) });
        println!("\nrank done");
        return;
    }
    if fault == "killed" && state(rank.comm) == ResultCode::RemoteError {
        // On a busy machine the news may be faster than this rank, which then was in nothing.
        println!("\ntoo late to wait");
        return;
    }
    all_reduce();
    let lasting = ["killed", "aborted"].contains(&fault);
    if lasting {
        // The others wait for good.
        let end = Instant::now() + LONG;
        while Instant::now() < end && device.stream_query(rank.stream).unwrap() == Progress::Pending {
            thread::sleep(Duration::from_millis(5));
        }
        // Whoever aborts first takes the connections of the others with it.
        let expected = [ResultCode::RemoteError, ResultCode::Success];
        let expected = &expected[..if fault == "killed" { 1 } else { 2 }];
        assert!(expected.contains(&state(rank.comm)));
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommAbort(rank.comm) });
    } else {
        rank.synchronize();
        let expected = match env::var("RINGSIGHT_WATCHDOG_ACTION").as_deref() {
            Ok("error") if !is_victim => ResultCode::SystemError,
            _ => ResultCode::Success,
        };
        assert_eq!(state(rank.comm), expected);
        let sum = RANKS as f32;
        assert_eq!(data[ELEMENTS - 1], sum.powi(4));
        if env::var("RINGSIGHT_WATCHDOG_ACTION").is_err() {
            rank.leave();
        } else {
            // A communicator with an error does not wait for its network work.
            thread::sleep(Duration::from_millis(300));
        }
    }
    println!("\nrank done");
}

fn misbehave(fault: &str, rank: &Rank) {
    // The others are to be in the operation that this one is late for.
    thread::sleep(Duration::from_millis(100));
    println!("\nfault now");
    match fault {
        "withheld" => thread::sleep(LONG),
        "slow" => thread::sleep(SHORT),
        // SAFETY: signals to this process.
        "stopped" => unsafe {
            libc::raise(libc::SIGSTOP);
        },
        // SAFETY: as above.
        "killed" => unsafe {
            libc::kill(libc::getpid(), libc::SIGKILL);
        },
        "computing" => host()
            .launch_host(rank.stream, std::sync::Arc::new(|_| thread::sleep(LONG)))
            .unwrap(),
        "aborted" => {}
        other => panic!("{other}"),
    }
}

#[test]
fn a_rank_that_does_not_call_is_late() {
    expect("withheld", Some(("NOT_LAUNCHED", "late")), &[]);
}

#[test]
fn a_slow_rank_is_not_spoken_of() {
    expect("slow", None, &[]);
}

#[test]
fn a_stopped_rank_is_a_hang() {
    expect("stopped", Some(("RANK_STOPPED", "hang")), &[]);
}

#[test]
fn a_killed_rank_is_a_hang() {
    expect("killed", Some(("RANK_DEAD", "hang")), &[]);
}

#[test]
fn a_rank_that_aborted_is_a_hang() {
    expect("aborted", Some(("PEER_ABORTED", "hang")), &[]);
}

#[test]
fn a_rank_that_computes_is_late() {
    expect("computing", Some(("QUEUED_BEHIND_COMPUTE", "late")), &[]);
}

#[test]
fn a_hang_can_be_an_error() {
    expect(
        "stopped",
        Some(("RANK_STOPPED", "hang")),
        &[("RINGSIGHT_WATCHDOG_ACTION", "error")],
    );
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
