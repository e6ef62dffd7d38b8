//! Children of communicators that do not block, and of parents that are aborted meanwhile.

use std::{
    ptr::null_mut,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{abi, error::ResultCode};

use crate::common::children::{USAGE, member, shrink, split};
use crate::common::{Rank, config, host, last_error, ok, settled, state, unique_id};

#[test]
fn children_without_waiting() {
    host();
    let id = unique_id();
    thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let mut settings = config();
                settings.blocking = 0;
                let parent = Rank::join_with(id, rank, 3, &mut settings);
                // As PyTorch does it: the parent's state tells of the child.
                let (code, child) = split(&parent, (rank == 0).into(), 0, &raw mut settings);
                assert!(
                    matches!(code, ResultCode::InProgress | ResultCode::Success),
                    "{code:?}"
                );
                assert_eq!(settled(parent.comm), ResultCode::Success);
                assert_eq!(state(child), ResultCode::Success);
                let child = member((ResultCode::Success, child));
                assert_eq!(child.ranks, if rank == 0 { 1 } else { 2 });
                if rank != 1 {
                    let (code, pair) = shrink(&parent, &[1], null_mut(), 0);
                    assert_eq!(code, ResultCode::InProgress);
                    assert_eq!(settled(pair), ResultCode::Success);
                    member((ResultCode::Success, pair)).leave();
                }
                child.leave();
                assert_eq!(settled(parent.comm), ResultCode::Success);
                parent.leave();
            });
        }
    });
}

#[test]
fn aborting_the_parent_aborts_the_split() {
    host();
    let id = unique_id();
    let split_begun = Barrier::new(2);
    thread::scope(|scope| {
        for rank in 0..2 {
            let split_begun = &split_begun;
            scope.spawn(move || {
                let mut settings = config();
                settings.blocking = 0;
                let parent = Rank::join_with(id, rank, 2, &mut settings);
                if rank == 0 {
                    // The other rank never splits.
                    let (code, child) = split(&parent, 0, 0, null_mut());
                    assert_eq!(code, ResultCode::InProgress);
                    let begin = Instant::now();
                    // SAFETY: a live communicator.
                    ok(unsafe { abi::ncclCommAbort(parent.comm) });
                    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
                    assert_eq!(settled(child), USAGE, "{}", last_error());
                    // SAFETY: a handle that is still there.
                    ok(unsafe { abi::ncclCommAbort(child) });
                    host().stream_destroy(parent.stream).unwrap();
                    split_begun.wait();
                } else {
                    split_begun.wait();
                    // SAFETY: a live communicator.
                    ok(unsafe { abi::ncclCommAbort(parent.comm) });
                    host().stream_destroy(parent.stream).unwrap();
                }
            });
        }
    });
}
