//! Ranks that die or stop, and systems that give nothing: the others are released, told whom they lost, and can end.

mod common;
#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{
    env,
    ffi::c_int,
    fs,
    os::unix::process::CommandExt,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use common::{Call, Rank, host, last_error, ok, place_of_process, rank_of_process, start_processes};
use ringsight_comm::{abi, communicator::Handle, error::ResultCode, observe};
use ringsight_records::Function;

/// How long after a death the others are released.
const RELEASE: Duration = Duration::from_secs(2);
const RANKS: usize = 4;
const FAULT: &str = "RINGSIGHT_TEST_FAULT";

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

fn die() -> ! {
    // SAFETY: ends this process as a machine check or the memory killer would.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("killed")
}

fn async_error(comm: Handle) -> ResultCode {
    let mut code: c_int = -1;
    // SAFETY: a live communicator and a valid place.
    ok(unsafe { abi::ncclCommGetAsyncError(comm, &raw mut code) });
    *ResultCode::ALL
        .iter()
        .find(|known| **known as c_int == code)
        .unwrap()
}

/// Where the victim is when it dies.
const PHASES: [&str; 3] = ["init", "collective", "finalize"];

/// Kills rank `victim` in a phase; the survivors say when they noticed, which is compared with the death.
fn killed(phase: &str, nodes: usize, seed: u64) {
    let victim = random(seed) as usize % RANKS;
    let delay = random(seed ^ 0xdead) % 20_000;
    let fault = format!("{phase} {victim} {delay}");
    // A rank that dies before it has told anybody that it is there is missed after this time.
    let variables = [(FAULT, &fault[..]), ("RINGSIGHT_BOOTSTRAP_TIMEOUT_MS", "4000")];
    let mut children = start_processes("mourner", RANKS, nodes, &variables);
    children[victim].wait().unwrap();
    let death = observe::now_ns();
    for (rank, child) in children
        .into_iter()
        .enumerate()
        .filter(|(rank, _)| *rank != victim)
    {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let context =
            format!("{phase}, {nodes} nodes, seed {seed}: rank {rank} without rank {victim}:\n{text}");
        assert!(output.status.success() && text.contains("rank done"), "{context}");
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

/// One rank of [`killed`].
#[test]
#[ignore = "helper: the body of one rank; started by the other tests"]
fn mourner() {
    let Some((id, rank, ranks)) = place_of_process() else {
        return;
    };
    let fault = env::var(FAULT).unwrap();
    let [phase, victim, delay] = *fault.split(' ').collect::<Vec<_>>() else {
        panic!("{fault}")
    };
    let (victim, delay): (usize, u64) = (victim.parse().unwrap(), delay.parse().unwrap());
    let doom = move || {
        if rank == victim {
            thread::spawn(move || {
                thread::sleep(Duration::from_micros(delay));
                die();
            });
        }
    };
    let device = host();
    if phase == "init" {
        doom();
    }
    let mut comm = Handle(0);
    // SAFETY: a valid place.
    let code = unsafe { abi::ncclCommInitRank(&raw mut comm, ranks as c_int, id, rank as c_int) };
    if code != ResultCode::Success {
        println!("\nnoticed {}", observe::now_ns());
        let text = last_error();
        assert_eq!(phase, "init", "{code:?}: {text}");
        match code {
            ResultCode::RemoteError => assert!(text.contains(&format!("rank {victim}")), "{text}"),
            ResultCode::SystemError if text.contains("did not come") => println!("missed"),
            _ => panic!("{code:?}: {text}"),
        }
        println!("rank done");
        return;
    }
    let rank = Rank {
        comm,
        rank,
        ranks,
        stream: device.stream_create().unwrap(),
    };
    let mut data = vec![1f32; 1 << 20];
    let at = data.as_mut_ptr().cast();
    let all_reduce = Call::new(Function::AllReduce, data.len());
    if phase == "finalize" {
        // Rank 0 (or 1) never takes part, so everybody else hangs in it.
        if rank.rank == usize::from(victim == 0) {
            while async_error(comm) == ResultCode::Success {
                thread::yield_now();
            }
        } else {
            let called = rank.call(&all_reduce, at, at);
            doom();
            // SAFETY: a live communicator.
            let code = unsafe { abi::ncclCommFinalize(comm) };
            assert_eq!(code, ResultCode::RemoteError, "{}", last_error());
            // The victim may have been faster.
            let whole = [ResultCode::Success, ResultCode::RemoteError].contains(&called);
            assert!(whole, "{called:?}");
        }
    } else {
        doom();
        loop {
            let code = rank.call(&all_reduce, at, at);
            if code != ResultCode::Success {
                assert_eq!(code, ResultCode::RemoteError, "{}", last_error());
                break;
            }
            rank.synchronize();
        }
    }
    println!("\nnoticed {}", observe::now_ns());
    assert_eq!(async_error(comm), ResultCode::RemoteError);
    let code = rank.call(&all_reduce, at, at);
    let text = last_error();
    assert_ne!(code, ResultCode::Success);
    assert!(
        text.contains(&format!("rank {victim}")) || text.contains("finalized"),
        "{text}"
    );
    let begin = Instant::now();
    rank.synchronize();
    device.stream_destroy(rank.stream).unwrap();
    // SAFETY: a live communicator.
    let code = unsafe {
        if rank.rank.is_multiple_of(2) {
            abi::ncclCommAbort(comm)
        } else {
            abi::ncclCommDestroy(comm)
        }
    };
    let ended = [ResultCode::Success, ResultCode::RemoteError].contains(&code);
    assert!(ended, "{code:?}: {}", last_error());
    assert!(begin.elapsed() < RELEASE, "{:?}", begin.elapsed());
    println!("rank done");
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
        let children = start_processes("patient", 2, nodes, &[(FAULT, stop.to_str().unwrap())]);
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
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && text.contains("rank done"), "{text}");
        }
    }
}

/// One rank of [`a_stopped_rank_is_waited_for`]: works until the file that it is named exists.
#[test]
#[ignore = "helper: the body of one rank; started by the other tests"]
fn patient() {
    let Some(rank) = rank_of_process() else { return };
    let stop = env::var(FAULT).unwrap();
    let call = Call::new(Function::AllReduce, 100_000);
    let mut data = vec![0f32; call.count];
    let mut rounds = 0;
    loop {
        // The ranks agree on when to stop.
        data.fill(1.0);
        data[0] = f32::from(u8::from(fs::exists(&stop).unwrap()));
        let at = data.as_mut_ptr().cast();
        ok(rank.call(&call, at, at));
        rank.synchronize();
        assert!(data[1..].iter().all(|value| *value == 2.0));
        rounds += 1;
        if data[0] > 0.0 {
            break;
        }
    }
    assert_eq!(async_error(rank.comm), ResultCode::Success);
    rank.leave();
    println!("{rounds} rounds\nrank done");
}

/// Runs an ignored test of this file in a process of its own.
fn alone(test: &str, change: impl FnOnce(&mut Command)) -> String {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"])
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("RINGSIGHT_BOOTSTRAP_TIMEOUT_MS", "3000");
    change(&mut command);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    text.into_owned()
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

/// Two ranks of a communicator as threads; what each init said, and its communicator.
fn pair() -> Result<[Rank; 2], Vec<(ResultCode, String)>> {
    let mut id = abi::UniqueIdBytes([0; 128]);
    // SAFETY: a valid place.
    let code = unsafe { abi::ncclGetUniqueId(&raw mut id) };
    if code != ResultCode::Success {
        return Err(vec![(code, last_error())]);
    }
    let made: Vec<_> = thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                scope.spawn(move || {
                    let mut comm = Handle(0);
                    // SAFETY: a valid place.
                    let code = unsafe { abi::ncclCommInitRank(&raw mut comm, 2, id, rank) };
                    (code, last_error(), comm)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    if made.iter().all(|(code, ..)| *code == ResultCode::Success) {
        let rank = |rank: usize| Rank {
            comm: made[rank].2,
            rank,
            ranks: 2,
            stream: host().stream_create().unwrap(),
        };
        return Ok([rank(0), rank(1)]);
    }
    let failed = |(code, text, comm): (ResultCode, String, Handle)| {
        if code == ResultCode::Success {
            // SAFETY: a live communicator.
            ok(unsafe { abi::ncclCommAbort(comm) });
            return None;
        }
        assert_eq!(comm, Handle(0));
        Some((code, text))
    };
    Err(made.into_iter().filter_map(failed).collect())
}

fn work(pair: &[Rank; 2]) {
    thread::scope(|scope| {
        for rank in pair {
            scope.spawn(|| Call::new(Function::AllReduce, 1000).check(rank, false));
        }
    });
}

fn part(pair: [Rank; 2]) {
    thread::scope(|scope| {
        for rank in pair {
            scope.spawn(move || rank.leave());
        }
    });
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
#[ignore = "helper: lacks descriptors: run alone, by `few_descriptors_are_an_error_and_nothing_leaks`"]
fn few_descriptors() {
    host();
    part(pair().unwrap());
    let settled = || {
        let begin = Instant::now();
        let mut least = descriptors();
        // Threads that are about to end hold some a little longer.
        while begin.elapsed() < Duration::from_millis(500) {
            least = least.min(descriptors());
            thread::yield_now();
        }
        least
    };
    let before = settled();
    let mut pairs = Vec::new();
    let errors = loop {
        match pair() {
            Ok(made) => pairs.push(made),
            Err(errors) => break errors,
        }
        assert!(pairs.len() < 64, "no limit");
    };
    println!("{} pairs, then {errors:?}", pairs.len());
    assert!(!pairs.is_empty() && !errors.is_empty());
    let told = errors
        .iter()
        .any(|(_, text)| text.contains("Too many open files"));
    assert!(told, "{errors:?}");
    // What was made is as good as before, and its end gives everything back.
    for pair in pairs {
        work(&pair);
        part(pair);
    }
    // The root of the id that failed listens on: its ranks may come late.
    let after = settled();
    assert!(after <= before + 1, "{after} descriptors, {before} before");
    let again = pair().unwrap();
    work(&again);
    part(again);
    println!("nothing leaked");
}

#[test]
fn few_descriptors_are_an_error_and_nothing_leaks() {
    let text = alone("few_descriptors", |command| {
        limit(command, libc::RLIMIT_NOFILE, 64);
    });
    assert!(text.contains("nothing leaked"), "{text}");
}

#[test]
#[ignore = "helper: lacks memory: run alone, by `memory_that_cannot_be_had_is_an_error`"]
fn no_memory() {
    host();
    // What stays for the life of the process is made by the first attempt.
    pair().map(|_| ()).unwrap_err();
    let before = descriptors();
    let errors = pair().map(|_| ()).unwrap_err();
    println!("{errors:?}");
    assert!(
        errors.iter().all(|(_, text)| text.contains("File too large")),
        "{errors:?}"
    );
    assert!(
        errors.iter().any(|(code, _)| *code == ResultCode::SystemError),
        "{errors:?}"
    );
    let begin = Instant::now();
    while descriptors() > before {
        assert!(
            begin.elapsed() < RELEASE,
            "{} descriptors, {before} before",
            descriptors()
        );
        thread::yield_now();
    }
    println!("said so");
}

/// FIFOs are sealed memfds, which no limit on `/dev/shm` concerns; a limit on the size of files does.
#[test]
fn memory_that_cannot_be_had_is_an_error() {
    let text = alone("no_memory", |command| {
        limit(command, libc::RLIMIT_FSIZE, 64 << 10);
    });
    assert!(text.contains("said so"), "{text}");
}

#[test]
#[ignore = "helper: has no room in /dev/shm: run alone, by `a_full_dev_shm_does_not_matter`"]
fn full_dev_shm() {
    host();
    let full = fs::write("/dev/shm/more", [0; 8192]);
    assert!(full.is_err(), "/dev/shm has room");
    let made = pair().unwrap();
    work(&made);
    part(made);
    println!("worked");
}

#[test]
fn a_full_dev_shm_does_not_matter() {
    let program = env::current_exe().unwrap();
    let script = "mount -t tmpfs -o size=4k none /dev/shm && echo mounted && head -c 4096 /dev/zero >/dev/shm/full && \
                  exec \"$0\" --exact full_dev_shm --ignored --nocapture";
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script])
        .arg(program)
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .output();
    let text = output.map(|output| {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    });
    match text {
        Ok(text) if text.contains("mounted") => assert!(text.contains("worked"), "{text}"),
        other => skip::skip(
            "a_full_dev_shm_does_not_matter",
            &format!("no mount namespace can be had here: {other:?}"),
        ),
    }
}
