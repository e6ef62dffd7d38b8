//! Making communicators as a program does: many ranks, missing ranks, and what the environment says.
//!
//! What depends on the environment or on limits runs in a process of its own.

mod common;

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    os::unix::process::CommandExt,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use common::{
    host, init, last_error,
    processes::{alone, finish, to_hex, worker},
    unique_id,
    variables::{EXPECTED, ID, PLACE, WHAT},
};

use ringsight_comm::{abi::UniqueIdBytes, error::ResultCode};

/// Runs a body in a process of its own, with these variables, and returns what it wrote.
fn run(body: &str, environment: &[(&str, &str)]) -> String {
    alone(body, |command| {
        command.envs(environment.iter().copied());
    })
}

#[test]
fn many_ranks_are_threads_of_one_process_with_the_usual_limit_of_open_files() {
    let lower = || {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: a valid place.
        unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
        limit.rlim_cur = limit.rlim_max.min(1024);
        // SAFETY: a valid limit.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        Ok(())
    };
    let text = alone("bootstrap::many_ranks", |command| {
        // SAFETY: the closure makes two system calls and allocates nothing.
        unsafe { command.pre_exec(lower) };
    });
    print!("{text}");
}

#[test]
fn a_missing_rank_is_named() {
    run(
        "bootstrap::missing_ranks",
        &[("RINGSIGHT_BOOTSTRAP_TIMEOUT_MS", "300")],
    );
}

#[test]
fn variables_that_are_no_numbers_are_named() {
    for name in [
        "RINGSIGHT_BOOTSTRAP_TIMEOUT_MS",
        "NCCL_KERNEL_TIMEOUT_MS",
        "NCCL_MAX_CTAS",
    ] {
        let text = run("bootstrap::no_number", &[(name, "soon")]);
        assert!(text.contains(&format!("{name}=soon is not a number")), "{text}");
    }
}

#[test]
fn a_fixed_address_takes_the_place_of_the_unique_id() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    run("bootstrap::fixed_address", &[("NCCL_COMM_ID", &address)]);
}

#[test]
fn an_impossible_interface_or_address_is_named() {
    for (name, value) in [
        ("NCCL_SOCKET_IFNAME", "=nosuch0"),
        ("NCCL_SOCKET_FAMILY", "AF_IB"),
        ("NCCL_COMM_ID", "nowhere"),
    ] {
        run(
            "bootstrap::impossible_environment",
            &[(name, value), (EXPECTED, value)],
        );
    }
}

/// Its time-out, in milliseconds.
type Patience = &'static str;

/// Ranks in processes that end as soon as initialisation fails, as frameworks' do; these make the ids, come in this order,
/// one `pause` after the other, and the rest stay away. What each says in the end, by rank.
fn come(
    ranks: usize,
    makers: &[usize],
    coming: &[(usize, Patience)],
    pause: Duration,
) -> Vec<(usize, String)> {
    let start = |(rank, patience): &(usize, Patience)| {
        let mut command = worker("bootstrap::rank_that_ends_at_once");
        command
            .env(PLACE, format!("{rank} {ranks}"))
            .env("RINGSIGHT_BOOTSTRAP_TIMEOUT_MS", patience)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if makers.contains(rank) {
            command.env(WHAT, "make an id");
        }
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        (*rank, child, said)
    };
    let mut processes: Vec<_> = coming.iter().map(start).collect();
    // All are ready before the first comes.
    let mut ids: Vec<(usize, String)> = processes
        .iter_mut()
        .map(|(rank, _, said)| (*rank, after(said, "ID=")))
        .collect();
    ids.sort_unstable();
    let line = ids.iter().fold(String::new(), |line, (_, id)| line + id + " ") + "\n";
    for (_, child, _) in &mut processes {
        child.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
        thread::sleep(pause);
    }
    let ends = processes.into_iter().map(|(rank, mut child, mut said)| {
        let text = after(&mut said, "END=");
        child.wait().unwrap();
        (rank, text)
    });
    ends.collect()
}

/// The rest of the line on which `mark` is next.
fn after(said: &mut impl BufRead, mark: &str) -> String {
    let mut line = String::new();
    while said.read_line(&mut line).unwrap() > 0 {
        if let Some((_, rest)) = line.split_once(mark) {
            return rest.trim().to_owned();
        }
        line.clear();
    }
    panic!("ended without {mark}");
}

#[test]
fn every_rank_names_the_missing_one_also_when_the_roots_process_ends_at_once() {
    for (coming, pause) in [
        ([(0, "1000"), (1, "1000"), (3, "1000")], 0),
        ([(0, "1000"), (1, "1000"), (3, "1000")], 30),
        ([(3, "1000"), (1, "1000"), (0, "1000")], 30),
        // It is the root's own rank that gives up, or another one.
        ([(0, "1000"), (3, "60000"), (1, "60000")], 150),
        ([(1, "60000"), (3, "1000"), (0, "60000")], 150),
    ] {
        for (rank, text) in come(4, &[0], &coming, Duration::from_millis(pause)) {
            assert!(
                text.starts_with("SystemError")
                    && text.contains("1 of 4 ranks did not come")
                    && text.ends_with(": rank 2"),
                "rank {rank} of {coming:?}: {text}"
            );
        }
    }
}

#[test]
fn every_rank_names_the_missing_one_also_when_the_processes_of_several_roots_end_at_once() {
    // Ranks 0-1, 2-3 and 4-5.
    for coming in [
        [
            (0, "1000"),
            (1, "60000"),
            (2, "60000"),
            (4, "60000"),
            (5, "60000"),
        ],
        [
            (4, "1000"),
            (2, "60000"),
            (0, "60000"),
            (5, "60000"),
            (1, "60000"),
        ],
        [(5, "1000"), (4, "1000"), (2, "1000"), (1, "1000"), (0, "1000")],
    ] {
        for (rank, text) in come(6, &[0, 2, 4], &coming, Duration::from_millis(20)) {
            assert!(
                text.starts_with("SystemError")
                    && text.contains("1 of 6 ranks did not come")
                    && text.ends_with(": rank 3"),
                "rank {rank} of {coming:?}: {text}"
            );
        }
    }
}

#[test]
fn want_of_descriptors_is_not_blamed_on_the_root() {
    let id = to_hex(unique_id_of_host());
    run("bootstrap::without_descriptors", &[(ID, &id)]);
}

fn unique_id_of_host() -> UniqueIdBytes {
    host();
    unique_id()
}

#[test]
fn a_forked_child_makes_communicators_whatever_other_threads_were_doing() {
    let mut command = worker("bootstrap::forks_beside_others");
    let ignore = || {
        // SAFETY: signal numbers and a disposition.
        unsafe {
            libc::signal(libc::SIGSEGV, libc::SIG_IGN);
            libc::signal(libc::SIGBUS, libc::SIG_IGN);
        }
        Ok(())
    };
    // The standard library of a Rust program (not of one that loads ours) handles these signals, unless it finds them taken, and then
    // has a lock of its own that every new thread takes: a thread of the parent may hold that at the fork.
    // SAFETY: the closure makes two system calls and allocates nothing.
    unsafe { command.pre_exec(ignore) };
    finish(&mut command);
}

#[test]
fn a_rank_that_is_killed_in_init_is_named_by_all_others() {
    host();
    let id = unique_id();
    let mut command = worker("bootstrap::killed_in_init");
    command.env(ID, to_hex(id));
    let begin = Instant::now();
    let mut child = command.spawn().unwrap();
    let ends = thread::scope(|scope| {
        let ranks = [0, 1, 2, 4, 5, 6].map(|rank| {
            scope.spawn(move || {
                let code = init(id, rank, 7).0;
                (code, last_error())
            })
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    child.wait().unwrap();
    let taken = begin.elapsed();
    for (code, text) in &ends {
        assert_eq!(*code, ResultCode::RemoteError, "{text}");
        assert!(
            text.contains("rank 3") && text.contains("its process ended"),
            "{text}"
        );
    }
    // All hear of it within a second; more is allowed for a machine that is busy with something else.
    assert!(taken < Duration::from_secs(10), "{taken:?}");
}
