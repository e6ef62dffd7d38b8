//! Calls that fail in processes with a state of their own.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use ringsight_comm::{abi, communicator::Handle, device::Stream, error::ResultCode};
use ringsight_records::{DataType, Function};

use crate::common::{Call, Rank, host, last_error, ok, on_ranks, unique_id};

/// Threads and descriptors of this process.
fn holdings() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/task"), count("/proc/self/fd"))
}

/// Rank 1 never calls the collective; rank 0 is stuck in it until it is aborted from another thread.
pub(crate) fn abort() {
    let once = || {
        let calls = AtomicUsize::new(0);
        let handles = Mutex::new([Handle(0); 2]);
        let id = unique_id();
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let (calls, handles) = (&calls, &handles);
                scope.spawn(move || {
                    let rank = Rank::join(id, rank, 2);
                    handles.lock().unwrap()[rank.rank] = rank.comm;
                    if rank.rank == 0 {
                        let mut data = vec![1f32; 1 << 20];
                        let at = data.as_mut_ptr().cast();
                        ok(rank.call(&Call::new(Function::AllReduce, 1 << 20), at, at));
                        calls.fetch_add(1, Ordering::Release);
                        rank.synchronize();
                    }
                    calls.fetch_add(1, Ordering::Release);
                    host().stream_destroy(rank.stream).unwrap();
                });
            }
            while calls.load(Ordering::Acquire) < 2 {
                std::thread::yield_now();
            }
            for comm in *handles.lock().unwrap() {
                let begin = Instant::now();
                // SAFETY: a live communicator.
                ok(unsafe { abi::ncclCommAbort(comm) });
                assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
            }
        });
    };
    // The first round makes what stays for the life of the process, and leaves threads that are about to end.
    once();
    let before = holdings();
    for _ in 0..10 {
        once();
    }
    // Streams end on a thread of their own.
    let end = Instant::now() + Duration::from_secs(10);
    let more = |(threads, files): (usize, usize)| threads > before.0 || files > before.1;
    while more(holdings()) {
        assert!(
            Instant::now() < end,
            "threads and descriptors: {:?}, before {before:?}",
            holdings()
        );
        std::thread::yield_now();
    }
}

/// Makes a communicator without a device and prints the error.
pub(crate) fn no_device() {
    let id = unique_id();
    let mut comm = Handle(1);
    // SAFETY: a valid place.
    let code = unsafe { abi::ncclCommInitRank(&raw mut comm, 1, id, 0) };
    assert_eq!((code, comm), (ResultCode::UnhandledCudaError, Handle(0)));
    println!("{}", last_error());
}

/// Calls in a forked child.
pub(crate) fn forked() {
    on_ranks(1, |rank| {
        let data = [0f32; 1];
        let at = data.as_ptr().cast_mut().cast();
        // SAFETY: the child makes one call that takes no lock held by others, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let refused = rank.call(&Call::new(Function::AllReduce, 1), at, at) == ResultCode::InvalidUsage;
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let mut status = -1;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        Call {
            data_type: DataType::Int32,
            ..Call::new(Function::AllReduce, 10)
        }
        .check(&rank, false);
    });
}

/// Makes a stream, which only the host device has.
pub(crate) fn cuda_device() {
    let mut stream = Stream(0);
    // SAFETY: a live local.
    let code = unsafe { abi::ringsightStreamCreate(&raw mut stream) };
    assert_eq!(code, ResultCode::InvalidUsage);
    assert!(last_error().contains("RINGSIGHT_DEVICE=host"), "{}", last_error());
}
