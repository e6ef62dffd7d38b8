//! Children of ranks that are processes, one of which may be dead.

use std::{
    ffi::c_int,
    ptr::null_mut,
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{
    abi,
    communicator::{Handle, lookup},
    error::ResultCode,
};
use ringsight_records::Function;

use crate::common::{
    Call,
    children::{member, shrink, split, stuck, works},
    fails, host, last_error, ok,
    processes::rank_of_process,
    state,
};

/// Ranks of two nodes, which are split across the nodes and within them.
pub(crate) fn splits() {
    let rank = rank_of_process();
    // Across the nodes, and within them.
    let across = member(split(&rank, (rank.rank % 2) as c_int, 0, null_mut()));
    let within = member(split(&rank, (rank.rank / 2) as c_int, 0, null_mut()));
    for child in [across, within, rank] {
        works(&child);
    }
    // One that is aborted in the middle of an operation does the others no harm.
    let doomed = member(split(&rank, 0, 0, null_mut()));
    let mut data = Vec::new();
    if rank.rank < 3 {
        stuck(&doomed, &mut data);
    }
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(doomed.comm) });
    host().stream_destroy(doomed.stream).unwrap();
    for child in [rank, across] {
        works(&child);
    }
    rank.leave();
    works(&across);
    // Of a child whose parent is gone.
    let pair = member(split(&across, 0, 1, null_mut()));
    works(&pair);
    pair.leave();
    across.leave();
    within.leave();
}

/// Rank 1 dies; the others exclude it.
pub(crate) fn survivor() {
    let rank = rank_of_process();
    works(&rank);
    let comm = lookup(rank.comm).unwrap();
    if rank.rank == 1 {
        // Not before the others have what it sent.
        for other in [0, 2, 3] {
            comm.bootstrap().recv(other, 1).unwrap();
        }
        // SAFETY: ends the process, which says goodbye to nobody.
        unsafe { libc::_exit(0) };
    }
    comm.bootstrap().send(1, 1, &[]).unwrap();
    drop(comm);
    // Into a collective that the dead rank is missing from, unless its death is known already.
    let mut data = vec![1f32; 1 << 20];
    let at = data.as_mut_ptr().cast();
    let code = rank.call(&Call::new(Function::AllReduce, data.len()), at, at);
    assert!(
        matches!(code, ResultCode::Success | ResultCode::RemoteError),
        "{}",
        last_error()
    );
    let end = Instant::now() + Duration::from_secs(30);
    while state(rank.comm) == ResultCode::Success {
        assert!(Instant::now() < end, "nobody has noticed");
        thread::yield_now();
    }
    let (code, child) = shrink(&rank, &[1], null_mut(), 0);
    fails(code, ResultCode::RemoteError, "NCCL_SHRINK_ABORT");
    assert_eq!(child, Handle(0));
    let child = member(shrink(&rank, &[1], null_mut(), 1));
    rank.synchronize();
    assert_eq!((child.rank, child.ranks), ([0, 9, 1, 2][rank.rank], 3));
    works(&child);
    child.leave();
    rank.leave();
}
