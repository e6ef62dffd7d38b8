//! Communicators leave nothing behind: no thread, descriptor, mapping, file or memory, whatever order they come and go in.

mod common;

#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{fs, process::Command};

use common::{
    holdings::is_checked,
    processes::{alone_on_host, finish, worker},
};

/// Whether what is not found is not there.
#[test]
fn the_checker_finds_a_leak() {
    if !is_checked() {
        return skip::skip(
            "the_checker_finds_a_leak",
            "no leak checker: the layer `leaks` of `cargo xtask test` has one",
        );
    }
    let output = worker("leaks::leaky").output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("leak of 4321 byte(s)"),
        "{text}"
    );
    assert_eq!(text.matches(" leak of ").count(), 1, "{text}");
}

/// What tells the watchdog how far operations are: events come and go with communicators and graphs.
const SOURCES: [&str; 2] = ["pages", "events"];

#[test]
fn a_thousand_communicators_leave_nothing() {
    for source in SOURCES {
        apart("leaks::communicators", &[("RINGSIGHT_WATCHDOG_SOURCE", source)]);
    }
}

#[test]
fn thousands_of_graphs_leave_nothing() {
    for source in SOURCES {
        apart("leaks::graphs", &[("RINGSIGHT_WATCHDOG_SOURCE", source)]);
    }
}

#[test]
fn shared_children_have_no_proxy_of_their_own() {
    alone_on_host("leaks::shared", &[]);
}

/// Runs a body in a process of its own, with these variables; it finds that nothing is left, and leaves no temporary file.
fn apart(body: &str, variables: &[(&str, &str)]) {
    let temporary = tempfile::tempdir().unwrap();
    // With folders of its own, where that can be had: other processes have files in those of the system.
    let apart = ["--mount", "--map-root-user", "sh", "-c"];
    let script = "mount -t tmpfs none /dev/shm && exec \"$0\" \"$@\"";
    let can = Command::new("unshare")
        .args(apart)
        .args([script, "true"])
        .status();
    let worker = worker(body);
    let mut command = if can.is_ok_and(|status| status.success()) {
        let mut command = Command::new("unshare");
        command
            .args(apart)
            .arg(script)
            .arg(worker.get_program())
            .args(worker.get_args());
        command
    } else {
        worker
    };
    command
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("TMPDIR", temporary.path())
        .envs(variables.iter().copied());
    let text = finish(&mut command);
    let told = text.lines().find(|line| line.contains("nothing left"));
    println!("{}", told.expect("it says so"));
    assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
}
