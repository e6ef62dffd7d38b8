//! Ranks that die or outlive one that does, and processes that get nothing from the system.

use std::{
    ffi::c_int,
    fs, thread,
    time::{Duration, Instant},
};

use ringsight_comm::{abi, communicator::Handle, error::ResultCode, observe};
use ringsight_records::Function;

use crate::common::{
    Call, Rank, host, last_error, ok,
    processes::{RELEASE, place_of_process, rank_of_process, variable},
    state,
    variables::{FOLDER, WHAT},
};

fn die() -> ! {
    // SAFETY: ends this process as a machine check or the memory killer would.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("killed")
}

/// Outlives the rank that is the victim, or is the victim.
pub(crate) fn survivor() {
    let (id, rank, ranks) = place_of_process();
    let fault = variable(WHAT);
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
            while state(comm) == ResultCode::Success {
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
    assert_eq!(state(comm), ResultCode::RemoteError);
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
}

/// Works until the file that it is named exists.
pub(crate) fn patient() {
    let rank = rank_of_process();
    let stop = variable(FOLDER);
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
    assert_eq!(state(rank.comm), ResultCode::Success);
    rank.leave();
    println!("{rounds} rounds");
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

/// Makes communicators until descriptors run out.
pub(crate) fn few_descriptors() {
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
}

/// Makes none, since no file may grow.
pub(crate) fn no_memory() {
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
}

/// Works though `/dev/shm` is full.
pub(crate) fn full_dev_shm() {
    host();
    let full = fs::write("/dev/shm/more", [0; 8192]);
    assert!(full.is_err(), "/dev/shm has room");
    let made = pair().unwrap();
    work(&made);
    part(made);
}
