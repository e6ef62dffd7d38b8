//! Operations that are called faster than they run: calls wait rather than fail.

mod common;

use std::{
    env, fs,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use common::{Call, Rank, alone, host, last_error, ok, on_ranks, state, unique_id, waiting::eventually};
use ringsight_comm::{abi, error::ResultCode};
use ringsight_records::Function;

/// Work elements of the small FIFO; each operation here takes one.
const DEPTH: usize = 64;

/// Adds up one number over the ranks, in place.
fn add_up(rank: &Rank, data: &mut [i64; 1]) -> ResultCode {
    let call = Call {
        data_type: ringsight_records::DataType::Int64,
        ..Call::new(Function::AllReduce, 1)
    };
    let at = data.as_mut_ptr().cast();
    rank.call(&call, at, at)
}

/// Whether a thread of this process sleeps.
fn sleeps(thread: libc::pid_t) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    // The state stands behind the name, which is in parentheses.
    stat.rsplit_once(") ")
        .is_some_and(|(_, state)| state.starts_with('S'))
}

/// Keeps a stream from going on until the sender is used or dropped.
fn gate(rank: &Rank) -> mpsc::Sender<()> {
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    let wait = move |_| {
        let _ = gate.lock().unwrap().recv();
    };
    host().launch_host(rank.stream, Arc::new(wait)).unwrap();
    open
}

#[test]
fn ten_thousand_operations_are_called_without_waiting_for_any() {
    on_ranks(2, |rank| {
        let mut data = [1];
        for _ in 0..10_000 {
            ok(add_up(&rank, &mut data));
        }
        rank.synchronize();
        // 2 to the 10,000th, as 64 bits wrap.
        assert_eq!(data, [0]);
        assert_eq!(state(rank.comm), ResultCode::Success, "{}", last_error());
    });
}

#[test]
fn calls_wait_while_the_work_fifo_is_full() {
    alone("full_alone", |command| {
        command.env("RINGSIGHT_WORK_FIFO_DEPTH", DEPTH.to_string());
    });
}

#[test]
#[ignore = "helper: run alone by `calls_wait_while_the_work_fifo_is_full`"]
fn full_alone() {
    if env::var_os("RINGSIGHT_WORK_FIFO_DEPTH").is_none() {
        return;
    }
    on_ranks(2, |rank| {
        const CALLS: usize = 500;
        let called = AtomicUsize::new(0);
        let mut data = [1];
        thread::scope(|scope| {
            let open = gate(&rank);
            let called = &called;
            // SAFETY: no arguments.
            let caller = unsafe { libc::gettid() };
            scope.spawn(move || {
                eventually("the FIFO is full", || called.load(Ordering::Relaxed) >= DEPTH);
                // The next call waits. If it did not, the thread would make all its calls before it sleeps.
                eventually("the next call waits", || sleeps(caller));
                assert_eq!(called.load(Ordering::Relaxed), DEPTH);
                open.send(()).unwrap();
            });
            for _ in 0..CALLS {
                ok(add_up(&rank, &mut data));
                called.fetch_add(1, Ordering::Relaxed);
            }
        });
        rank.synchronize();
        assert_eq!(data, [0]);
    });
    // An abort ends the wait.
    let rank = Rank::join(unique_id(), 0, 1);
    let open = gate(&rank);
    let called = AtomicUsize::new(0);
    let mut data = [1];
    thread::scope(|scope| {
        scope.spawn(|| {
            let failed = loop {
                let code = add_up(&rank, &mut data);
                if code != ResultCode::Success {
                    break code;
                }
                called.fetch_add(1, Ordering::Relaxed);
            };
            assert_eq!(failed, ResultCode::InvalidUsage, "{}", last_error());
        });
        eventually("the FIFO is full", || called.load(Ordering::Relaxed) >= DEPTH);
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommAbort(rank.comm) });
    });
    drop(open);
    rank.synchronize();
    host().stream_destroy(rank.stream).unwrap();
}
