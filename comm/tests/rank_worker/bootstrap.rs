//! Communicators that are made, or not, by what the environment and the limits of a process say.

use std::{
    env,
    ffi::c_int,
    fs,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    bootstrap::{Bootstrap, UniqueId},
    communicator::Handle,
    error::ResultCode,
};

use crate::common::{
    host, init, last_error, ok,
    processes::{from_hex, to_hex, variable},
    unique_id,
    variables::{EXPECTED, ID, PLACE, WHAT},
};

const MANY: usize = 256;

/// How long all ranks of a communicator of [`MANY`] may take to be made.
const MADE_WITHIN: Duration = Duration::from_secs(2);

/// What this process has used of the processors.
fn processor_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid place; this clock exists.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(code, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// On a machine that others keep busy the wall clock says how busy they are: there, what counts is the part of the
/// processors' time that the ranks have used.
pub(crate) fn many_ranks() {
    host();
    let cores = thread::available_parallelism().unwrap().get();
    let load = fs::read_to_string("/proc/loadavg").unwrap();
    let load: f64 = load.split_ascii_whitespace().next().unwrap().parse().unwrap();
    let busy = load > cores as f64;
    let best = (0..3)
        .map(|_| {
            let (wall, used) = make_many();
            let used = used / cores as u32;
            println!("{MANY} ranks in {wall:?}, {used:?} of {cores} processors each, load {load}");
            if busy { wall.min(used) } else { wall }
        })
        .min()
        .unwrap();
    assert!(best <= MADE_WITHIN, "{best:?}, load {load} on {cores} processors");
}

/// Makes a communicator of [`MANY`] ranks: how long that took by the wall clock, and of the processors' time.
fn make_many() -> (Duration, Duration) {
    let id = unique_id();
    let (start, made) = (Barrier::new(MANY + 1), Barrier::new(MANY + 1));
    let entries = |path: &str| fs::read_dir(path).unwrap().count();
    let before = (entries("/proc/self/fd"), entries("/proc/self/task"));
    thread::scope(|scope| {
        for rank in 0..MANY {
            let (start, made) = (&start, &made);
            scope.spawn(move || {
                start.wait();
                let (code, comm) = init(id, rank, MANY);
                ok(code);
                made.wait();
                made.wait();
                let mut count = 0;
                // SAFETY: a valid place; a live communicator.
                ok(unsafe { abi::ncclCommCount(comm, &raw mut count) });
                assert_eq!(count, MANY as c_int);
                // SAFETY: a live communicator.
                ok(unsafe { abi::ncclCommDestroy(comm) });
            });
        }
        start.wait();
        let (begin, used) = (Instant::now(), processor_time());
        made.wait();
        let taken = (begin.elapsed(), processor_time().saturating_sub(used));
        let (files, threads) = (entries("/proc/self/fd"), entries("/proc/self/task"));
        made.wait();
        println!(
            "{MANY} ranks: {:.1} descriptors and {:.1} threads a rank",
            (files - before.0) as f64 / MANY as f64,
            // Each rank has the thread that made it, which is the caller's.
            (threads - before.1 - MANY) as f64 / MANY as f64,
        );
        taken
    })
}

/// One rank of four.
pub(crate) fn missing_ranks() {
    host();
    assert_eq!(init(unique_id(), 1, 4).0, ResultCode::SystemError);
    let text = last_error();
    assert!(
        text.contains("rank 1 of 4")
            && text.contains("3 of 4 ranks did not come within 300ms: rank 0, ranks 2-3"),
        "{text}"
    );
}

/// Prints the error.
pub(crate) fn no_number() {
    host();
    let (code, comm) = init(unique_id(), 0, 1);
    assert_eq!((code, comm), (ResultCode::InvalidArgument, Handle(0)));
    println!("{}", last_error());
}

/// Three ranks, at the address of `NCCL_COMM_ID`.
pub(crate) fn fixed_address() {
    host();
    // Every rank makes the id by itself; two communicators, one after the other, at the same address.
    for _ in 0..2 {
        thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let (code, comm) = init(unique_id(), rank, 3);
                    ok(code);
                    // SAFETY: a live communicator.
                    ok(unsafe { abi::ncclCommDestroy(comm) });
                });
            }
        });
    }
}

/// Makes no unique id and names what is wrong.
pub(crate) fn impossible_environment() {
    host();
    let mut id = UniqueIdBytes([0; 128]);
    // SAFETY: a valid place.
    let code = unsafe { abi::ncclGetUniqueId(&raw mut id) };
    assert_eq!(code, ResultCode::InvalidArgument);
    let (text, expected) = (last_error(), variable(EXPECTED));
    assert!(text.contains(&expected), "{text}");
}

/// Prints its unique id if it is to make one, reads all, joins, prints how that ended, and ends with nothing in order.
pub(crate) fn rank_that_ends_at_once() {
    host();
    let place = variable(PLACE);
    let (rank, ranks) = place.split_once(' ').unwrap();
    let id = env::var_os(WHAT).map(|_| to_hex(unique_id()));
    println!("ID={}", id.unwrap_or_default());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let ids: Vec<UniqueIdBytes> = line.split_whitespace().map(from_hex).collect();
    let mut comm = Handle(0);
    // SAFETY: a valid place and as many ids as said; a null config is the default one.
    let code = unsafe {
        abi::ncclCommInitRankScalable(
            &raw mut comm,
            ranks.parse().unwrap(),
            rank.parse().unwrap(),
            ids.len() as c_int,
            ids.as_ptr(),
            std::ptr::null_mut(),
        )
    };
    println!("END={code:?} {}", last_error());
    // SAFETY: ends the process without any more ado.
    unsafe { libc::_exit(0) };
}

/// Joins with no descriptor left.
pub(crate) fn without_descriptors() {
    host();
    let id = from_hex(&variable(ID));
    let limit = libc::rlimit {
        rlim_cur: 3,
        rlim_max: 3,
    };
    // SAFETY: a valid limit.
    let lowered = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(lowered, 0);
    assert_eq!(init(id, 1, 2).0, ResultCode::SystemError);
    let text = last_error();
    assert!(
        text.contains("Too many open files") && !text.contains("no root"),
        "{text}"
    );
}

/// Forks while other threads make communicators; the children make some, too.
pub(crate) fn forks_beside_others() {
    host();
    let stop = AtomicBool::new(false);
    let make = || {
        let (code, comm) = init(unique_id(), 0, 1);
        // SAFETY: a live communicator.
        code == ResultCode::Success && unsafe { abi::ncclCommDestroy(comm) } == ResultCode::Success
    };
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                // Relaxed: nothing else is read by it.
                while !stop.load(Ordering::Relaxed) {
                    assert!(make());
                }
            });
        }
        for number in 0..60 {
            thread::sleep(Duration::from_millis(3)); // somewhere in the middle of what they do
            // SAFETY: the child uses only the library, which is to allow it, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: no pointers; ends the child without running the parent's exit handlers.
                unsafe {
                    libc::alarm(20);
                    libc::_exit(i32::from(!make()));
                }
            }
            let mut status = -1;
            // SAFETY: waits for the child just made.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            if status != 0 {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!(status, 0, "child {number}");
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Rank 3 of 7, whose process is killed when it has met the others.
pub(crate) fn killed_in_init() {
    let id = UniqueId::from_bytes(&from_hex(&variable(ID)).0).unwrap();
    let patience = Duration::from_secs(30);
    // It knows the others, they know it, and then it takes no part in what follows.
    let _bootstrap = Bootstrap::init(&id, 3, 7, Arc::default(), patience).unwrap();
    // A data loader's worker outlives it. It says nothing to anybody, but it has inherited whatever was open.
    // SAFETY: the child makes only calls that are allowed after a fork of a process with threads.
    unsafe {
        if libc::fork() == 0 {
            (0..3).for_each(|standard| {
                libc::close(standard);
            });
            libc::alarm(20);
            libc::pause();
            libc::_exit(0);
        }
    }
    // SAFETY: kills this very process, as a machine would.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}
