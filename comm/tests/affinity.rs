//! The CPUs that a proxy's threads run on. On a machine of one CPU this shows little.

mod common;

use std::{env, ffi::c_int, fs, mem, thread};

use common::{Call, alone, fails, host, rank_of_process, run_processes_with, unique_id};
use ringsight_comm::{abi, communicator::Handle, error::ResultCode};
use ringsight_records::Function;

/// What a worker expects of the proxy's threads: a list of CPUs.
const EXPECTED: &str = "RINGSIGHT_TEST_EXPECTED";
/// The CPU that a worker's thread keeps to while it makes the communicator.
const OWN: &str = "RINGSIGHT_TEST_OWN";

/// Lets the calling thread, and those that it starts from now on, run on these CPUs, as far as it may.
fn keep_to(cpus: impl IntoIterator<Item = usize>) {
    // SAFETY: all-zero bytes are an empty set.
    let mut set: libc::cpu_set_t = unsafe { mem::zeroed() };
    for cpu in cpus {
        // SAFETY: numbers below the size of the set, or without effect.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: a set of this size.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// The CPUs of a thread of this process, as the kernel lists them.
fn cpus_of(task: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{task}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().trim().to_owned()
}

/// The first and the last CPU that this process may use, and all of them as a list.
fn usable() -> (String, String, String) {
    let all = thread::spawn(|| {
        keep_to(0..1024);
        cpus_of("thread-self")
    });
    let all = all.join().unwrap();
    let ends = || all.split([',', '-']).map(str::to_owned);
    (ends().next().unwrap(), ends().next_back().unwrap(), all)
}

#[test]
fn a_proxy_runs_where_the_thread_that_makes_its_communicator_does_unless_told_otherwise() {
    let (first, last, all) = usable();
    let run = |variables: &[(&str, &str)], expected: &str| {
        let mut variables = variables.to_vec();
        variables.extend([(OWN, last.as_str()), (EXPECTED, expected)]);
        run_processes_with("worker", 2, 2, &variables);
    };
    run(&[], &last);
    run(&[("NCCL_PROXY_CPUSET", &first)], &first);
    // Of a list, what there is.
    run(&[("NCCL_PROXY_CPUSET", &format!("{first},8191"))], &first);
    run(&[("NCCL_IGNORE_CPU_AFFINITY", "1")], &all);
    run(
        &[("NCCL_IGNORE_CPU_AFFINITY", "1"), ("NCCL_PROXY_CPUSET", &first)],
        &first,
    );
}

#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn worker() {
    let Ok(own) = env::var(OWN) else { return };
    keep_to([own.parse().unwrap()]);
    let rank = rank_of_process().unwrap();
    // Later threads, and the caller's later choices, are another matter.
    keep_to(0..1024);
    Call::new(Function::AllReduce, 1000).check(&rank, false);
    let expected = env::var(EXPECTED).unwrap();
    let mut found = Vec::new();
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap();
        let id = task.file_name().into_string().unwrap();
        if let "rs-proxy" | "rs-progress" = name.trim() {
            assert_eq!(cpus_of(&format!("self/task/{id}")), expected, "{name}");
            found.push(name.trim().to_owned());
        }
    }
    found.sort();
    assert_eq!(found, ["rs-progress", "rs-proxy"]);
    rank.leave();
    println!("rank done");
}

#[test]
fn cpus_that_are_none_fail_the_communicator_and_are_named() {
    for (list, code, text) in [
        (
            "0-",
            "4",
            "NCCL_PROXY_CPUSET=0-: \"0-\" is neither a CPU nor a range",
        ),
        ("all", "4", "a list of CPUs such as 0-3,8 is wanted"),
        (
            "8191",
            "2",
            "running the proxy's threads on CPUs 8191, by NCCL_PROXY_CPUSET",
        ),
    ] {
        alone("refused_alone", |command| {
            command.envs([("NCCL_PROXY_CPUSET", list), (EXPECTED, text), (OWN, code)]);
        });
    }
}

#[test]
#[ignore = "helper: run alone by another test"]
fn refused_alone() {
    let Ok(text) = env::var(EXPECTED) else { return };
    let code: usize = env::var(OWN).unwrap().parse().unwrap();
    host();
    let mut comm = Handle(0);
    // SAFETY: a valid place.
    let got = unsafe { abi::ncclCommInitRank(&raw mut comm, 1, unique_id(), 0 as c_int) };
    fails(got, ResultCode::ALL[code], &text);
    assert_eq!(comm, Handle(0));
}
