//! Communicators with thresholds by their names, and those with more ranks than are asked one by one.

mod common;

use std::{
    env,
    ffi::CString,
    fs,
    process::{Child, Output},
    sync::Barrier,
    thread,
};

use common::{
    Call, Rank, alone, config, ok, place_of_process, start_processes, state, unique_id,
    waiting::{Marks, PATIENT_MS, eventually},
};
use ringsight_comm::{abi, error::ResultCode, observe};
use ringsight_records::{Function, Kind};

/// A communicator of this rank alone with a name.
fn named(name: &str) -> Rank {
    let (name, mut settings) = (CString::new(name).unwrap(), config());
    settings.comm_name = name.as_ptr();
    Rank::join_with(unique_id(), 0, 1, &mut settings)
}

fn has_watchdog() -> bool {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    threads.flatten().any(|thread| {
        fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.trim() == "rs-watchdog")
    })
}

#[test]
#[ignore = "helper: reads the environment: run alone, by `a_communicator_s_name_may_give_it_a_threshold`"]
fn named_alone() {
    for name in ["dp", "tp"] {
        let rank = named(name);
        ok(abi::ncclSimulateKernelTimeout(rank.comm));
        eventually("the error", || state(rank.comm) == ResultCode::SystemError);
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommAbort(rank.comm) });
    }
    // The thread has ended with the last communicator, and does not start for this one.
    let off = named("off");
    ok(abi::ncclSimulateKernelTimeout(off.comm));
    eventually("no thread is left", || !has_watchdog());
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(off.comm) });
}

#[test]
fn a_communicator_s_name_may_give_it_a_threshold() {
    let text = alone("named_alone", |command| {
        command
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_KERNEL_TIMEOUT_MS", "200")
            .env("RINGSIGHT_KERNEL_TIMEOUTS_MS", "tp=900,off=0")
            .env("RINGSIGHT_WATCHDOG_ACTION", "error");
    });
    let thresholds: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once("(threshold: ").map(|(_, rest)| rest))
        .collect();
    assert_eq!(thresholds, ["200 ms)", "900 ms)"], "{text}");
}

/// Ranks of each of two processes: together more than are asked one by one.
const EACH: usize = 36;
const FAULT: &str = "RINGSIGHT_TEST_FAULT";
/// The rank that does not call the operation, of the second process.
const LATE: usize = EACH + 5;

#[test]
#[ignore = "helper: half of the ranks; started by the tests below"]
fn many_ranks() {
    let Some((id, process, _)) = place_of_process() else {
        return;
    };
    let stops = env::var(FAULT).unwrap() == "stopped";
    let marks = Marks::of_process();
    let mark = |name: &str| marks.set(&format!("{name} {process}"));
    let await_mark = |name: &str, process: usize| marks.wait(&format!("{name} {process}"));
    let first = Barrier::new(EACH);
    let run = |number: usize| {
        let rank = Rank::join(id, process * EACH + number, 2 * EACH);
        let call = Call::new(Function::AllReduce, 100);
        call.check(&rank, false);
        // Before a rank is late: a rank that needs it to end the first operation would be late for the second one, too.
        if first.wait().is_leader() {
            mark("first");
        }
        for process in 0..2 {
            await_mark("first", process);
        }
        let is_late = if stops { process == 1 } else { rank.rank == LATE };
        if is_late {
            if stops && number == 0 {
                // SAFETY: the other process lets this one go on.
                unsafe { libc::raise(libc::SIGSTOP) };
            }
            await_mark("judged", 0);
            if !stops {
                await_mark("judged", 1);
            }
        }
        call.check(&rank, false);
        rank.leave();
    };
    let run = &run;
    thread::scope(|scope| {
        for number in 0..EACH {
            scope.spawn(move || run(number));
        }
        let waiting = match (stops, process) {
            (true, 1) => return,
            (true, _) => EACH,
            (false, process) => EACH - process,
        };
        eventually("every verdict", || {
            observe::emitted(Kind::Verdict) >= waiting as u64
        });
        mark("judged");
    });
    println!("\nrank done");
}

/// Runs the ranks; `meanwhile` is given the processes while they run. Returns what they wrote.
fn many(fault: &str, meanwhile: impl FnOnce(&[Child], &Marks)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let variables = [
        (FAULT, fault),
        (Marks::FOLDER, folder.path().to_str().unwrap()),
        ("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS),
        ("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100"),
    ];
    let processes = start_processes("many_ranks", 2, 1, &variables);
    meanwhile(&processes, &Marks::in_folder(folder.path()));
    let outputs = common::outputs(processes);
    let text = |output: &Output| {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    let whole: String = outputs.iter().map(text).collect();
    // The text of both, since the one may fail because of the other.
    for output in &outputs {
        let ended = output.status.success() && text(output).contains("rank done");
        assert!(ended, "{}: {whole}", output.status);
    }
    whole
}

/// Asserts that `count` ranks have reported this verdict, and no other one.
fn assert_reported(text: &str, count: usize, verdict: &str) {
    let after = |line: &str, mark: &str| line.split_once(mark).map(|(_, rest)| rest.to_owned());
    let reported: Vec<String> = text
        .lines()
        .filter_map(|line| after(line, " Verdict: "))
        .collect();
    assert!(
        reported.len() == count && reported.iter().all(|reported| reported.starts_with(verdict)),
        "{reported:?}"
    );
}

#[test]
fn many_ranks_name_the_one_that_is_late() {
    let text = many("late", |_, _| ());
    assert_reported(&text, 2 * EACH - 1, &format!("NOT_LAUNCHED (late): rank {LATE} "));
    // Its line is there, though its rank is not among the first ones.
    let lines = text.matches(&format!(" Rank {LATE}: not launched")).count();
    assert_eq!(lines, 2 * EACH - 1);
}

#[test]
fn many_ranks_of_which_half_are_stopped_name_one_of_these() {
    let text = many("stopped", |processes, marks| {
        marks.wait("judged 0");
        // SAFETY: a child of ours that has not been waited for.
        unsafe { libc::kill(processes[1].id() as libc::pid_t, libc::SIGCONT) };
    });
    assert_reported(&text, EACH, "RANK_STOPPED (hang): ");
}
