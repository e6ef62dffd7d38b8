//! The CPUs that a proxy's threads run on. On a machine of one CPU this shows little.

mod common;

use std::thread;

use common::{
    cpus::{cpus_of, keep_to},
    processes::{alone, run_processes_with},
    variables::{EXPECTED, WHAT},
};

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
        variables.extend([(WHAT, last.as_str()), (EXPECTED, expected)]);
        run_processes_with("affinity::pinned", 2, 2, &variables);
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
        alone("affinity::refused", |command| {
            command.envs([("NCCL_PROXY_CPUSET", list), (EXPECTED, text), (WHAT, code)]);
        });
    }
}
