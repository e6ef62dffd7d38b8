//! The life of communicators: made without waiting, in groups, given up from other threads.

mod common;

use std::{
    ffi::{CStr, c_int},
    ptr::null_mut,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use common::{Call, Rank, config, fails, host, last_error, ok, on_ranks, settled, state, unique_id};
use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    communicator::{Handle, lookup},
    error::ResultCode,
};
use ringsight_records::Function;

const ARGUMENT: ResultCode = ResultCode::InvalidArgument;
const USAGE: ResultCode = ResultCode::InvalidUsage;

/// What `ncclGetLastError` says about a communicator.
fn reason(comm: Handle) -> String {
    // SAFETY: a C string that is valid until the next call.
    unsafe { CStr::from_ptr(abi::ncclGetLastError(comm)) }
        .to_string_lossy()
        .into_owned()
}

/// Begins to make one rank without waiting.
fn begin(comm: &mut Handle, ranks: usize, id: UniqueIdBytes, rank: usize) -> ResultCode {
    host().set_current(rank as i32).unwrap();
    let mut settings = config();
    settings.blocking = 0;
    // SAFETY: valid places.
    unsafe { abi::ncclCommInitRankConfig(comm, ranks as c_int, id, rank as c_int, &raw mut settings) }
}

/// `code`, or what the communicator's state is when it is no longer busy.
fn eventually(code: ResultCode, comm: Handle) -> ResultCode {
    if code == ResultCode::InProgress {
        settled(comm)
    } else {
        code
    }
}

#[track_caller]
fn group(body: impl FnOnce()) -> ResultCode {
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    body();
    // SAFETY: no arguments.
    unsafe { abi::ncclGroupEnd() }
}

fn abort(comm: Handle) {
    let begin = Instant::now();
    // SAFETY: any handle is checked.
    ok(unsafe { abi::ncclCommAbort(comm) });
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
}

#[test]
fn a_life_without_waiting() {
    host();
    let id = unique_id();
    let one = |rank: usize| {
        let mut comm = Handle(0);
        let begun = begin(&mut comm, 3, id, rank);
        assert!(
            matches!(begun, ResultCode::InProgress | ResultCode::Success),
            "{begun:?}"
        );
        assert_ne!(comm, Handle(0), "the handle is valid at once");
        assert_eq!(settled(comm), ResultCode::Success, "{}", reason(comm));
        let stream = host().stream_create().unwrap();
        let rank = Rank {
            comm,
            rank,
            ranks: 3,
            stream,
        };
        let call = Call::new(Function::AllReduce, 1000);
        let input: Vec<f32> = (0..1000)
            .map(|index| call.input(rank.rank, index) as f32)
            .collect();
        let mut output = vec![0f32; 1000];
        for _ in 0..20 {
            let code = rank.call(&call, input.as_ptr().cast(), output.as_mut_ptr().cast());
            assert_eq!(eventually(code, comm), ResultCode::Success, "{}", reason(comm));
        }
        rank.synchronize();
        let expected = (0..1000).map(|index| call.expected(rank.rank, 3, index).unwrap() as f32);
        assert!(expected.eq(output.iter().copied()));
        // SAFETY: a live communicator.
        let finalized = unsafe { abi::ncclCommFinalize(comm) };
        assert_eq!(eventually(finalized, comm), ResultCode::Success);
        // SAFETY: as above.
        fails(
            unsafe { abi::ncclCommFinalize(comm) },
            ARGUMENT,
            "finalized already",
        );
        rank.leave();
    };
    thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || one(rank));
        }
    });
}

#[test]
fn calls_on_a_communicator_in_progress_are_refused() {
    let mut comm = Handle(0);
    host();
    // Its peer never comes.
    assert_eq!(begin(&mut comm, 2, unique_id(), 0), ResultCode::InProgress);
    assert_eq!(state(comm), ResultCode::InProgress);
    let mut count = 0;
    let mut data = [0f32; 4];
    let at = data.as_mut_ptr().cast();
    let stream = host().stream_create().unwrap();
    let rank = Rank {
        comm,
        rank: 0,
        ranks: 2,
        stream,
    };
    // SAFETY: valid places; refused calls touch no buffer.
    unsafe {
        fails(abi::ncclCommCount(comm, &raw mut count), ARGUMENT, "busy");
        fails(abi::ncclCommUserRank(comm, &raw mut count), ARGUMENT, "busy");
        fails(
            rank.call(&Call::new(Function::AllReduce, 4), at, at),
            ARGUMENT,
            "busy",
        );
        fails(abi::ncclCommFinalize(comm), ARGUMENT, "busy");
        fails(abi::ncclCommDestroy(comm), ARGUMENT, "busy");
    }
    abort(comm);
    // SAFETY: a stale handle is refused.
    let stale = unsafe { abi::ncclCommGetAsyncError(comm, &raw mut count) };
    fails(stale, ARGUMENT, "destroyed or aborted");
    host().stream_destroy(stream).unwrap();
}

#[test]
fn an_init_that_waits_is_aborted_from_another_thread() {
    host();
    let id = unique_id();
    let place = AtomicUsize::new(0);
    thread::scope(|scope| {
        let place = &place;
        let waiting = scope.spawn(move || {
            // SAFETY: a valid place, written atomically.
            let code = unsafe { abi::ncclCommInitRank(place.as_ptr().cast(), 2, id, 0) };
            (code, last_error())
        });
        let comm = loop {
            match place.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                handle => break Handle(handle),
            }
        };
        abort(comm);
        let (code, text) = waiting.join().unwrap();
        assert_eq!(code, USAGE, "{text}");
        assert!(text.contains("abort"), "{text}");
    });
    assert_eq!(place.load(Ordering::Relaxed), 0, "there is no communicator");
}

#[test]
fn a_failed_init_is_told_by_its_state() {
    host();
    let mut comm = Handle(0);
    let rubbish = UniqueIdBytes([7; 128]);
    let code = begin(&mut comm, 1, rubbish, 0);
    assert_eq!(eventually(code, comm), ARGUMENT);
    assert!(reason(comm).contains("unique id"), "{}", reason(comm));
    let mut count = 0;
    // SAFETY: valid places.
    fails(
        unsafe { abi::ncclCommCount(comm, &raw mut count) },
        ARGUMENT,
        "unique id",
    );
    abort(comm);
}

#[test]
fn one_thread_makes_and_uses_several_in_a_group() {
    host();
    let (first, second) = (unique_id(), unique_id());
    let mut comms = [Handle(0); 5];
    let code = group(|| {
        let (left, right) = comms.split_at_mut(3);
        for (rank, comm) in left.iter_mut().enumerate() {
            ok(begin(comm, 3, first, rank));
        }
        for (rank, comm) in right.iter_mut().enumerate() {
            ok(begin(comm, 2, second, rank));
        }
    });
    assert_eq!(code, ResultCode::InProgress);
    for comm in comms {
        assert_eq!(settled(comm), ResultCode::Success, "{}", reason(comm));
    }
    let ranks: Vec<Rank> = (0..5)
        .map(|index| Rank {
            comm: comms[index],
            rank: index % 3,
            ranks: if index < 3 { 3 } else { 2 },
            stream: host().stream_create().unwrap(),
        })
        .collect();
    let mut data = vec![[1f32; 8]; 5];
    let code = group(|| {
        for (rank, data) in ranks.iter().zip(&mut data) {
            let at = data.as_mut_ptr().cast();
            ok(rank.call(&Call::new(Function::AllReduce, 8), at, at));
        }
    });
    assert_eq!(code, ResultCode::InProgress);
    for rank in &ranks {
        assert_eq!(settled(rank.comm), ResultCode::Success);
        rank.synchronize();
    }
    for (rank, data) in ranks.iter().zip(data) {
        assert_eq!(data, [rank.ranks as f32; 8]);
    }
    let code = group(|| {
        for comm in comms {
            // SAFETY: a live communicator.
            ok(unsafe { abi::ncclCommFinalize(comm) });
        }
    });
    assert_eq!(code, ResultCode::InProgress);
    for rank in ranks {
        assert_eq!(settled(rank.comm), ResultCode::Success);
        rank.leave();
    }
}

#[test]
fn blocking_and_non_blocking_do_not_mix() {
    host();
    let id = unique_id();
    let mut comms = [Handle(0); 2];
    let code = group(|| {
        ok(begin(&mut comms[0], 2, id, 0));
        assert_ne!(comms[0], Handle(0));
        // SAFETY: a valid place.
        let mixed = unsafe { abi::ncclCommInitRank(&raw mut comms[1], 2, id, 1) };
        fails(mixed, ARGUMENT, "non-blocking");
    });
    fails(code, ARGUMENT, "non-blocking");
    assert_eq!(comms, [Handle(0); 2], "nothing was made");
    on_ranks(1, |rank| {
        let mut other = Handle(0);
        let made = begin(&mut other, 1, unique_id(), 0);
        assert_eq!(eventually(made, other), ResultCode::Success);
        let data = [1f32; 4];
        let mut out = [0f32; 4];
        let call = Call::new(Function::AllReduce, 4);
        let code = group(|| {
            ok(rank.call(&call, data.as_ptr().cast(), out.as_mut_ptr().cast()));
            let stream = rank.stream;
            let other = Rank {
                comm: other,
                stream,
                ..rank
            };
            fails(
                other.call(&call, data.as_ptr().cast(), out.as_mut_ptr().cast()),
                ARGUMENT,
                "non-blocking",
            );
        });
        fails(code, ARGUMENT, "non-blocking");
        rank.synchronize();
        assert_eq!(out, [0.0; 4], "nothing was launched");
        abort(other);
        Call::new(Function::AllReduce, 10).check(&rank, false);
    });
}

#[test]
fn aborting_one_releases_the_group_that_makes_it() {
    host();
    let mut comms = [Handle(0); 2];
    let code = group(|| {
        for comm in &mut comms {
            ok(begin(comm, 2, unique_id(), 0));
        }
    });
    assert_eq!(code, ResultCode::InProgress);
    abort(comms[0]);
    assert_eq!(settled(comms[1]), USAGE, "{}", reason(comms[1]));
    abort(comms[1]);
    // SAFETY: null is fine.
    ok(unsafe { abi::ncclCommAbort(Handle(null_mut::<u8>() as usize)) });
}

#[test]
fn ranks_meet_over_several_roots() {
    host();
    let ids = [(); 3].map(|()| unique_id());
    let comm_ids = thread::scope(|scope| {
        let threads: Vec<_> = (0..5)
            .map(|rank| {
                scope.spawn(move || {
                    host().set_current(rank as i32).unwrap();
                    let mut comm = Handle(0);
                    // SAFETY: valid places.
                    ok(unsafe {
                        abi::ncclCommInitRankScalable(
                            &raw mut comm,
                            5,
                            rank as c_int,
                            3,
                            ids.as_ptr(),
                            null_mut(),
                        )
                    });
                    let stream = host().stream_create().unwrap();
                    let rank = Rank {
                        comm,
                        rank,
                        ranks: 5,
                        stream,
                    };
                    Call::new(Function::AllGather, 100).check(&rank, false);
                    let id = lookup(comm).unwrap().id;
                    rank.leave();
                    id
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect::<Vec<u64>>()
    });
    assert!(comm_ids.iter().all(|id| *id == comm_ids[0]));
}

#[test]
fn scalable_inits_are_checked() {
    host();
    let ids = [UniqueIdBytes([0; 128]); 2];
    let refused = |count, ids, text: &str| {
        let mut comm = Handle(0);
        // SAFETY: valid places.
        let code = unsafe { abi::ncclCommInitRankScalable(&raw mut comm, 2, 0, count, ids, null_mut()) };
        fails(code, ARGUMENT, text);
    };
    refused(0, ids.as_ptr(), "nId (0)");
    refused(3, ids.as_ptr(), "nId (3)");
    refused(1, std::ptr::null(), "commIds is NULL");
    refused(2, ids.as_ptr(), "unique id");
}

#[test]
fn all_ranks_of_a_process_need_a_device_each() {
    host();
    let refused = |devices: &[c_int], code: ResultCode, text: &str| {
        let mut comms = [Handle(0); 4];
        // SAFETY: as many places as devices.
        let made =
            unsafe { abi::ncclCommInitAll(comms.as_mut_ptr(), devices.len() as c_int, devices.as_ptr()) };
        fails(made, code, text);
        assert_eq!(comms, [Handle(0); 4]);
    };
    refused(&[0, 2, 0], USAGE, "devlist[2] (0)");
    refused(&[1, -1], ARGUMENT, "devlist[1] (-1)");
    let mut comms = [Handle(0); 2];
    // SAFETY: as many places as devices.
    unsafe {
        ok(abi::ncclCommInitAll(comms.as_mut_ptr(), 2, [5, 3].as_ptr()));
        for (comm, device) in comms.into_iter().zip([5, 3]) {
            let mut number = -1;
            ok(abi::ncclCommCuDevice(comm, &raw mut number));
            assert_eq!(number, device);
            ok(abi::ncclCommDestroy(comm));
        }
    }
}
