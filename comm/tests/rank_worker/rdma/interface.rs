//! Ranks that find each other over the port that fails.

use std::{
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{abi, error::ResultCode};
use ringsight_records::{DataType, Function, ReduceOp, connection::Connection};

use super::{
    connections::ends,
    links::{set_link, tcp_over_wire},
    shared::MISSING,
};
use crate::common::{Call, Rank, last_error, ok, processes::rank_of_process, state};

/// How long the port is down: longer than keep-alive would bear (11 s).
const DOWN: Duration = Duration::from_secs(13);

/// How often the port is lost again as soon as it is in use.
const AGAIN: usize = 3;

/// What ending takes: a second, as documented, and what an emulated machine may take that others are at work on.
const END: Duration = Duration::from_secs(4);

/// All-reduces until both ranks have seen enough.
fn work(rank: &Rank, enough: impl Fn() -> bool) {
    let call = Call {
        data_type: DataType::Uint64,
        op: ReduceOp::Max,
        ..Call::new(Function::AllReduce, 1)
    };
    let mut goes_on = [1_u64];
    while goes_on == [1] {
        Call::new(Function::AllReduce, 5003).check(rank, true);
        goes_on = [u64::from(!enough())];
        let at = goes_on.as_mut_ptr().cast();
        ok(rank.call(&call, at, at));
        rank.synchronize();
    }
}

/// Whether all this rank's ends are on a path.
fn all_on(path: u8) -> bool {
    ends()
        .iter()
        .all(|end| end.active == path && end.phase == Connection::FLOWS)
}

/// Takes the port down, and works until both ranks' steps go over the other one.
fn lose_the_port(rank: &Rank) {
    if rank.rank == 0 {
        set_link(0, false);
    }
    work(rank, || all_on(1));
}

/// Loses the port again and again.
pub(crate) fn survive() {
    let rank = rank_of_process();
    work(&rank, || true);
    lose_the_port(&rank);
    let start = Instant::now();
    work(&rank, || start.elapsed() > DOWN);
    assert!(all_on(1), "{:?}", ends());
    if rank.rank == 0 {
        set_link(0, true);
        tcp_over_wire();
    }
    // The ends agree over the path that is left, whether TCP has come back or not; and when they have left it again it is there at once.
    for _ in 0..AGAIN {
        work(&rank, || all_on(0));
        lose_the_port(&rank);
        if rank.rank == 0 {
            set_link(0, true);
            tcp_over_wire();
        }
    }
    work(&rank, || all_on(0));
    lose_the_port(&rank);
    // The peer cannot be told.
    let start = Instant::now();
    rank.leave();
    assert!(start.elapsed() < END, "{:?}", start.elapsed());
}

/// Rank 0 kills rank 1 while the port is down.
pub(crate) fn miss() {
    let rank = rank_of_process();
    work(&rank, || true);
    lose_the_port(&rank);
    let mut processes = [0_u64; 2];
    let call = Call {
        data_type: DataType::Uint64,
        ..Call::new(Function::AllGather, 1)
    };
    let own = u64::from(std::process::id());
    ok(rank.call(&call, (&raw const own).cast(), processes.as_mut_ptr().cast()));
    rank.synchronize();
    if rank.rank == 1 {
        loop {
            thread::park();
        }
    }
    // SAFETY: a signal to the other rank's process.
    let killed = unsafe { libc::kill(processes[1] as libc::pid_t, libc::SIGKILL) };
    assert_eq!(killed, 0);
    let mut data = vec![1_f32; 5003];
    let at = data.as_mut_ptr().cast();
    let start = Instant::now();
    ok(rank.call(&Call::new(Function::AllReduce, data.len()), at, at));
    // Released when the communicator fails.
    rank.synchronize();
    assert!(start.elapsed() < MISSING + END, "{:?}", start.elapsed());
    assert_eq!(state(rank.comm), ResultCode::RemoteError);
    let start = Instant::now();
    // SAFETY: a live communicator.
    let code = unsafe { abi::ncclCommDestroy(rank.comm) };
    println!("{code:?}: {}", last_error());
    assert_eq!(code, ResultCode::RemoteError);
    assert!(start.elapsed() < END, "{:?}", start.elapsed());
}
