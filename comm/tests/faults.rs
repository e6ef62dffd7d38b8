//! Ranks that die or stop, and systems that give nothing: the others are released, told whom they lost, and can end.

mod common;

#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{
    ffi::c_int,
    fs,
    os::unix::process::CommandExt,
    process::{Child, Command},
    thread,
    time::Duration,
};

use common::{
    processes::{RELEASE, alone, start_processes, text, worker},
    variables::{FOLDER, WHAT},
};
use ringsight_comm::observe;

const RANKS: usize = 4;

/// Numbers that look random and are the same for the same seed (SplitMix64).
fn random(seed: u64) -> u64 {
    let z = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn signal(child: u32, signal: c_int) {
    // SAFETY: a child of ours that has not been waited for.
    assert_eq!(unsafe { libc::kill(child as libc::pid_t, signal) }, 0);
}

/// Where the victim is when it dies.
const PHASES: [&str; 3] = ["init", "collective", "finalize"];

/// Kills rank `victim` in a phase; the survivors say when they noticed, which is compared with the death.
fn killed(phase: &str, nodes: usize, seed: u64) {
    let victim = random(seed) as usize % RANKS;
    let delay = random(seed ^ 0xdead) % 20_000;
    let fault = format!("{phase} {victim} {delay}");
    // A rank that dies before it has told anybody that it is there is missed after this time.
    let variables = [(WHAT, &fault[..]), ("RINGSIGHT_BOOTSTRAP_TIMEOUT_MS", "4000")];
    let mut children = start_processes("faults::survivor", RANKS, nodes, &variables);
    children[victim].wait().unwrap();
    let death = observe::now_ns();
    for (rank, child) in children
        .into_iter()
        .enumerate()
        .filter(|(rank, _)| *rank != victim)
    {
        let output = child.wait_with_output().unwrap();
        let text = text(&output);
        let context =
            format!("{phase}, {nodes} nodes, seed {seed}: rank {rank} without rank {victim}:\n{text}");
        assert!(output.status.success(), "{context}");
        let noticed = text.lines().find_map(|line| line.strip_prefix("noticed "));
        let noticed: u64 = noticed.expect(&context).parse().unwrap();
        let late = Duration::from_nanos(noticed.saturating_sub(death));
        let limit = if text.contains("missed") {
            Duration::from_secs(6)
        } else {
            RELEASE
        };
        assert!(late <= limit, "{late:?} after the death; {context}");
    }
}

#[test]
fn the_others_survive_a_killed_rank() {
    for seed in 0..20 {
        for phase in PHASES {
            killed(phase, 1 + seed as usize % 2, seed);
        }
    }
}

/// A rank that is stopped is late and no more.
#[test]
fn a_stopped_rank_is_waited_for() {
    for nodes in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let stop = folder.path().join("stop");
        let children = start_processes("faults::patient", 2, nodes, &[(FOLDER, stop.to_str().unwrap())]);
        let ids: Vec<u32> = children.iter().map(Child::id).collect();
        for round in 0..10 {
            // Any time: whatever it is in then.
            thread::sleep(Duration::from_micros(random(round) % 50_000));
            let stopped = ids[round as usize % 2];
            signal(stopped, libc::SIGSTOP);
            thread::sleep(Duration::from_millis(100));
            signal(stopped, libc::SIGCONT);
        }
        fs::write(&stop, []).unwrap();
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", text(&output));
        }
    }
}

/// Runs a body that `change` has lack something.
fn lacking(body: &str, change: impl FnOnce(&mut Command)) {
    alone(body, |command| {
        command
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("RINGSIGHT_BOOTSTRAP_TIMEOUT_MS", "3000");
        change(command);
    });
}

/// Sets a limit of a process to be.
fn limit(command: &mut Command, resource: libc::__rlimit_resource_t, most: libc::rlim_t) {
    let set = move || {
        let limit = libc::rlimit {
            rlim_cur: most,
            rlim_max: most,
        };
        // SAFETY: a valid limit; the call is safe between fork and exec.
        match unsafe { libc::setrlimit(resource, &raw const limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: it only makes a system call.
    unsafe { command.pre_exec(set) };
}

#[test]
fn few_descriptors_are_an_error_and_nothing_leaks() {
    lacking("faults::few_descriptors", |command| {
        limit(command, libc::RLIMIT_NOFILE, 64);
    });
}

/// FIFOs are sealed memfds, which no limit on `/dev/shm` concerns; a limit on the size of files does.
#[test]
fn memory_that_cannot_be_had_is_an_error() {
    lacking("faults::no_memory", |command| {
        limit(command, libc::RLIMIT_FSIZE, 64 << 10);
    });
}

#[test]
fn a_full_dev_shm_does_not_matter() {
    let worker = worker("faults::full_dev_shm");
    let script = "mount -t tmpfs -o size=4k none /dev/shm && echo mounted && head -c 4096 /dev/zero >/dev/shm/full && \
                  exec \"$0\" \"$@\"";
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script])
        .arg(worker.get_program())
        .args(worker.get_args())
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .output();
    let ended = output.map(|output| (output.status, text(&output)));
    match ended {
        Ok((status, text)) if text.contains("mounted") => assert!(status.success(), "{text}"),
        other => skip::skip(
            "a_full_dev_shm_does_not_matter",
            &format!("no mount namespace can be had here: {other:?}"),
        ),
    }
}
