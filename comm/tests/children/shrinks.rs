//! Communicators that are shrunk, revoked or neither.

use std::{
    ffi::c_int,
    ptr::null_mut,
    sync::Barrier,
    time::{Duration, Instant},
};

use ringsight_comm::{abi, communicator::Handle, error::ResultCode};
use ringsight_records::Function;

use crate::common::children::{ARGUMENT, USAGE, member, shrink, split, stuck, works};
use crate::common::{Call, config, fails, ok, on_ranks, state};

#[test]
fn wrong_splits_and_shrinks_are_refused() {
    on_ranks(2, |rank| {
        let refused = |(code, child): (ResultCode, Handle), text: &str| {
            fails(code, ARGUMENT, text);
            assert_eq!(child, Handle(0));
        };
        refused(split(&rank, -2, 0, null_mut()), "color (-2)");
        let mut settings = config();
        settings.magic = 0;
        refused(split(&rank, 0, 0, &raw mut settings), "config.magic");
        let own = rank.rank as c_int;
        refused(shrink(&rank, &[], null_mut(), 0), "excludeRanksCount");
        refused(shrink(&rank, &[2], null_mut(), 0), "names 2");
        refused(shrink(&rank, &[own], null_mut(), 0), "the caller");
        refused(shrink(&rank, &[1 - own, 1 - own], null_mut(), 0), "twice");
        refused(shrink(&rank, &[1 - own], null_mut(), 2), "shrinkFlags (2)");
        let mut child = Handle(1);
        // SAFETY: null is refused.
        unsafe {
            fails(
                abi::ncclCommSplit(rank.comm, 0, 0, null_mut(), null_mut()),
                ARGUMENT,
                "newcomm is NULL",
            );
            fails(
                abi::ncclCommSplit(Handle(0), 0, 0, &raw mut child, null_mut()),
                ARGUMENT,
                "comm is NULL",
            );
            fails(
                abi::ncclCommShrink(rank.comm, null_mut(), 1, &raw mut child, null_mut(), 0),
                ARGUMENT,
                "excludeRanksList is NULL",
            );
            fails(abi::ncclCommRevoke(rank.comm, 1), ARGUMENT, "revokeFlags (1)");
        }
        works(&rank);
    });
}

#[test]
fn ranks_are_excluded() {
    on_ranks(4, |rank| {
        if rank.rank != 2 {
            let child = member(shrink(&rank, &[2], null_mut(), 0));
            assert_eq!((child.rank, child.ranks), ([0, 1, 9, 2][rank.rank], 3));
            works(&child);
            if rank.rank != 0 {
                // Another set of members: rank 0 has not counted this one.
                let pair = member(shrink(&rank, &[2, 0], null_mut(), 0));
                assert_eq!(pair.ranks, 2);
                works(&pair);
                pair.leave();
            }
            child.leave();
        }
        works(&rank);
    });
}

#[test]
fn shrinking_terminates_what_is_stuck() {
    let barrier = Barrier::new(3);
    on_ranks(3, |rank| {
        if rank.rank < 2 {
            let mut data = Vec::new();
            stuck(&rank, &mut data);
            let begin = Instant::now();
            let child = member(shrink(&rank, &[2], null_mut(), 1));
            assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
            rank.synchronize();
            works(&child);
            let at = data.as_mut_ptr().cast();
            let refused = rank.call(&Call::new(Function::AllReduce, 1), at, at);
            fails(refused, USAGE, "NCCL_SHRINK_ABORT");
            // Not for the first time: nothing is left to terminate.
            let again = member(shrink(&rank, &[2], null_mut(), 1));
            works(&again);
            again.leave();
            child.leave();
        }
        barrier.wait();
    });
}

#[test]
fn a_revoked_communicator_can_be_split_and_shrunk() {
    on_ranks(3, |rank| {
        let mut data = Vec::new();
        if rank.rank < 2 {
            stuck(&rank, &mut data);
        }
        let begin = Instant::now();
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommRevoke(rank.comm, 0) });
        rank.synchronize();
        assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        assert_eq!(state(rank.comm), ResultCode::Success);
        let mut one = [1f32];
        let at = one.as_mut_ptr().cast();
        fails(
            rank.call(&Call::new(Function::AllReduce, 1), at, at),
            USAGE,
            "ncclCommRevoke",
        );
        // SAFETY: a live communicator.
        unsafe {
            fails(abi::ncclCommRevoke(rank.comm, 0), ARGUMENT, "revoked already");
            fails(abi::ncclCommFinalize(rank.comm), ARGUMENT, "revoked");
        }
        let all = member(split(&rank, 0, 0, null_mut()));
        works(&all);
        all.leave();
        if rank.rank != 1 {
            let two = member(shrink(&rank, &[1], null_mut(), 0));
            works(&two);
            two.leave();
        }
    });
}

#[test]
fn a_finalized_communicator_is_neither_revoked_nor_split() {
    on_ranks(1, |rank| {
        // SAFETY: a live communicator.
        unsafe {
            ok(abi::ncclCommFinalize(rank.comm));
            fails(abi::ncclCommRevoke(rank.comm, 0), ARGUMENT, "finalized");
        }
        let (code, child) = split(&rank, 0, 0, null_mut());
        fails(code, USAGE, "finalized");
        assert_eq!(child, Handle(0));
        // SAFETY: null is fine.
        ok(unsafe { abi::ncclCommRevoke(Handle(0), 0) });
    });
}
