//! Who is watched by other rules: communicators that have a threshold by their name, and those of more ranks than are asked one by one.

mod common;

use std::{
    env,
    ffi::CString,
    fs::{self, File},
    path::PathBuf,
    process::{Child, Output},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use common::{
    Call, Rank, alone, config, ok, place_of_process, start_processes, state, unique_id, waiting::until,
};
use ringsight_comm::{abi, error::ResultCode, observe};
use ringsight_records::{Function, Kind};

/// How long a kernel of a communicator with a name may be stuck before that is an error, if it is one in so long.
fn becomes_an_error_within(longest: Duration, name: &str) -> Option<Duration> {
    let (name, mut settings) = (CString::new(name).unwrap(), config());
    settings.comm_name = name.as_ptr();
    let rank = Rank::join_with(unique_id(), 0, 1, &mut settings);
    let begin = Instant::now();
    ok(abi::ncclSimulateKernelTimeout(rank.comm));
    let mut after = None;
    while after.is_none() && begin.elapsed() < longest {
        after = (state(rank.comm) == ResultCode::SystemError).then(|| begin.elapsed());
        thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    after
}

#[test]
#[ignore = "helper: reads the environment: run alone, by `a_communicator_s_name_may_give_it_a_threshold`"]
fn named_alone() {
    let (long, short) = (Duration::from_secs(20), Duration::from_secs(2));
    let unnamed = becomes_an_error_within(long, "dp").unwrap();
    assert!(unnamed >= Duration::from_millis(200), "{unnamed:?}");
    let named = becomes_an_error_within(long, "tp").unwrap();
    assert!(named >= Duration::from_millis(900), "{named:?}");
    assert_eq!(becomes_an_error_within(short, "off"), None);
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
const THRESHOLD: Duration = Duration::from_secs(1);
const FAULT: &str = "RINGSIGHT_TEST_FAULT";
/// Where the processes tell each other how far they are.
const FOLDER: &str = "RINGSIGHT_TEST_FOLDER";
/// Who does not call the operation, of the second process.
const LATE: usize = EACH + 5;

#[test]
#[ignore = "helper: half of the ranks; started by the tests below"]
fn many_ranks() {
    let Some((id, process, _)) = place_of_process() else {
        return;
    };
    let stops = env::var(FAULT).unwrap() == "stopped";
    let folder = PathBuf::from(env::var(FOLDER).unwrap());
    let mark = |name: &str| drop(File::create(folder.join(format!("{name} {process}"))).unwrap());
    let await_mark = |name: &str, process: usize| {
        until(name, || folder.join(format!("{name} {process}")).exists());
    };
    let first = Barrier::new(EACH);
    let run = |number: usize| {
        let rank = Rank::join(id, process * EACH + number, 2 * EACH);
        let call = Call::new(Function::AllReduce, 100);
        call.check(&rank, false);
        // Before anybody is late: whoever needs that one to end the first operation is late for the second one, too.
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
        until("every verdict", || {
            observe::emitted(Kind::Verdict) >= waiting as u64
        });
        mark("judged");
    });
    println!("\nrank done");
}

/// Runs the ranks; `meanwhile` is given the processes while they run. What they wrote.
fn many(fault: &str, meanwhile: impl FnOnce(&[Child], &PathBuf)) -> String {
    let folder = env::temp_dir().join(format!("ringsight-watched-{}-{fault}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let name = folder.to_str().unwrap();
    let threshold = THRESHOLD.as_millis().to_string();
    let variables = [
        (FAULT, fault),
        (FOLDER, name),
        ("NCCL_KERNEL_TIMEOUT_MS", &threshold),
        ("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100"),
    ];
    let processes = start_processes("many_ranks", 2, 1, &variables);
    meanwhile(&processes, &folder);
    let outputs = common::outputs(processes);
    let text = |output: &Output| {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    let whole: String = outputs.iter().map(text).collect();
    // Of both, since the one may fail because of the other.
    for output in &outputs {
        let ended = output.status.success() && text(output).contains("rank done");
        assert!(ended, "{}: {whole}", output.status);
    }
    fs::remove_dir_all(&folder).unwrap();
    whole
}

/// Asserts that so many ranks have said just that, and nothing else. When is not asked: so many kernels of the host device, which wait by
/// looking, keep a small machine busy.
fn assert_said(text: &str, count: usize, verdict: &str) {
    let after = |line: &str, mark: &str| line.split_once(mark).map(|(_, rest)| rest.to_owned());
    let said: Vec<String> = text
        .lines()
        .filter_map(|line| after(line, " Verdict: "))
        .collect();
    assert!(
        said.len() == count && said.iter().all(|said| said.starts_with(verdict)),
        "{said:?}"
    );
}

#[test]
fn many_ranks_name_the_one_that_is_late() {
    let text = many("late", |_, _| ());
    assert_said(&text, 2 * EACH - 1, &format!("NOT_LAUNCHED (late): rank {LATE} "));
    // Its line is there, though it is not one of the first.
    let lines = text.matches(&format!(" Rank {LATE}: not launched")).count();
    assert_eq!(lines, 2 * EACH - 1);
}

#[test]
fn many_ranks_of_which_half_are_stopped_name_one_of_these() {
    let text = many("stopped", |processes, folder| {
        until("the verdicts", || folder.join("judged 0").exists());
        // SAFETY: a child of ours that has not been waited for.
        unsafe { libc::kill(processes[1].id() as libc::pid_t, libc::SIGCONT) };
    });
    assert_said(&text, EACH, "RANK_STOPPED (hang): ");
}
