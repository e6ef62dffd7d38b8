//! Communicators that come of others: split, shrunk, revoked.

mod common;

use std::{
    ffi::c_int,
    ptr::{null, null_mut},
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use common::{
    Call, Rank, config, fails, host, last_error, ok, on_ranks, rank_of_process, run_processes,
    run_processes_with, settled, unique_id,
};
use ringsight_comm::{
    abi::{self, NcclConfig},
    communicator::{Handle, lookup},
    error::ResultCode,
    observe,
};
use ringsight_records::Function;

const ARGUMENT: ResultCode = ResultCode::InvalidArgument;
const USAGE: ResultCode = ResultCode::InvalidUsage;
const NO_COLOR: c_int = -1;

fn split(rank: &Rank, color: c_int, key: c_int, settings: *mut NcclConfig) -> (ResultCode, Handle) {
    let mut child = Handle(1);
    // SAFETY: valid places.
    let code = unsafe { abi::ncclCommSplit(rank.comm, color, key, &raw mut child, settings) };
    (code, child)
}

fn shrink(rank: &Rank, excluded: &[c_int], settings: *mut NcclConfig, flags: c_int) -> (ResultCode, Handle) {
    let mut child = Handle(1);
    let mut excluded = excluded.to_vec();
    // SAFETY: valid places.
    let code = unsafe {
        abi::ncclCommShrink(
            rank.comm,
            excluded.as_mut_ptr(),
            excluded.len() as c_int,
            &raw mut child,
            settings,
            flags,
        )
    };
    (code, child)
}

/// A rank of a child, with its own view of rank and size.
#[track_caller]
fn member((code, comm): (ResultCode, Handle)) -> Rank {
    ok(code);
    let (mut rank, mut ranks) = (-1, -1);
    // SAFETY: valid places.
    unsafe {
        ok(abi::ncclCommUserRank(comm, &raw mut rank));
        ok(abi::ncclCommCount(comm, &raw mut ranks));
    }
    Rank {
        comm,
        rank: rank as usize,
        ranks: ranks as usize,
        stream: host().stream_create().unwrap(),
    }
}

/// Data goes all the way round the communicator.
#[track_caller]
fn works(rank: &Rank) {
    Call::new(Function::AllReduce, 5000).check(rank, false);
    Call::new(Function::AllGather, 7).check(rank, false);
}

fn id(rank: &Rank) -> u64 {
    lookup(rank.comm).unwrap().id
}

#[test]
fn halves_and_a_duplicate() {
    let seen = on_ranks(4, |rank| {
        let half = member(split(&rank, (rank.rank % 2) as c_int, 0, null_mut()));
        assert_eq!((half.rank, half.ranks), (rank.rank / 2, 2));
        let reversed = member(split(&rank, 0, -(rank.rank as c_int), null_mut()));
        assert_eq!((reversed.rank, reversed.ranks), (3 - rank.rank, 4));
        // A child of a child.
        let alone = member(split(&half, half.rank as c_int, 0, null_mut()));
        assert_eq!((alone.rank, alone.ranks), (0, 1));
        for child in [&half, &reversed, &alone, &rank] {
            works(child);
        }
        let entry = observe::pages()
            .unwrap()
            .communicators()
            .iter()
            .filter_map(|slot| slot.is_live().then(|| slot.read()).flatten())
            .find(|entry| entry.id == id(&half) && entry.rank == half.rank as u32)
            .unwrap();
        assert_eq!((entry.parent, entry.ranks), (id(&rank), 2));
        let ids = [id(&rank), id(&half), id(&reversed), id(&alone)];
        alone.leave();
        half.leave();
        reversed.leave();
        ids
    });
    let column = |index: usize| seen.iter().map(move |ids| ids[index]).collect::<Vec<u64>>();
    assert!(column(0).iter().all(|id| *id == seen[0][0]));
    assert!(column(2).iter().all(|id| *id == seen[0][2]));
    assert_eq!(column(1)[0], column(1)[2]);
    assert_eq!(column(1)[1], column(1)[3]);
    let mut all: Vec<u64> = seen.into_iter().flatten().collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 1 + 2 + 1 + 4, "an id for each communicator");
}

#[test]
fn the_same_split_again_is_another_communicator() {
    let ids = on_ranks(2, |rank| {
        let children = [0; 3].map(|color| member(split(&rank, color, 0, null_mut())));
        let ids = children.map(|child| id(&child));
        children.iter().for_each(works);
        children.into_iter().for_each(Rank::leave);
        ids
    });
    assert_eq!(ids[0], ids[1]);
    assert!(ids[0][0] != ids[0][1] && ids[0][1] != ids[0][2]);
}

#[test]
fn a_rank_without_colour_gets_none() {
    on_ranks(3, |rank| {
        if rank.rank == 1 {
            let (code, child) = split(&rank, NO_COLOR, 0, null_mut());
            ok(code);
            assert_eq!(child, Handle(0));
        } else {
            let child = member(split(&rank, 5, 0, null_mut()));
            assert_eq!(child.ranks, 2);
            works(&child);
            child.leave();
        }
        works(&rank);
    });
}

#[test]
fn several_splits_in_a_group() {
    on_ranks(3, |rank| {
        let mut comms = [Handle(1); 3];
        // SAFETY: valid places, until the group has ended.
        unsafe {
            ok(abi::ncclGroupStart());
            let [one, two, three] = &mut comms;
            ok(abi::ncclCommSplit(rank.comm, 0, 0, one, null_mut()));
            ok(abi::ncclCommSplit(
                rank.comm,
                (rank.rank == 0).into(),
                0,
                two,
                null_mut(),
            ));
            ok(abi::ncclCommSplit(rank.comm, NO_COLOR, 0, three, null_mut()));
            ok(abi::ncclGroupEnd());
        }
        assert_eq!(comms[2], Handle(0));
        let sizes = [3, if rank.rank == 0 { 1 } else { 2 }];
        for (comm, size) in comms.into_iter().zip(sizes) {
            let child = member((ResultCode::Success, comm));
            assert_eq!(child.ranks, size);
            works(&child);
            child.leave();
        }
    });
}

#[test]
fn one_thread_splits_all_its_ranks_in_a_group() {
    host();
    let mut comms = [Handle(0); 4];
    // SAFETY: a valid place.
    ok(unsafe { abi::ncclCommInitAll(comms.as_mut_ptr(), 4, null()) });
    let mut children = [Handle(0); 4];
    // SAFETY: valid places, until the group has ended.
    unsafe {
        ok(abi::ncclGroupStart());
        for (index, (comm, child)) in comms.iter().zip(&mut children).enumerate() {
            ok(abi::ncclCommSplit(
                *comm,
                (index / 2) as c_int,
                0,
                child,
                null_mut(),
            ));
        }
        ok(abi::ncclGroupEnd());
    }
    let members = children.map(|child| member((ResultCode::Success, child)));
    assert_eq!(
        members.map(|member| (member.rank, member.ranks)),
        [(0, 2), (1, 2), (0, 2), (1, 2)]
    );
    let mut data = [[1f32; 8]; 4];
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    for (member, data) in members.iter().zip(&mut data) {
        let at = data.as_mut_ptr().cast();
        ok(member.call(&Call::new(Function::AllReduce, 8), at, at));
    }
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupEnd() });
    for (member, data) in members.iter().zip(&data) {
        member.synchronize();
        assert_eq!(*data, [2.0; 8]);
    }
    for comm in comms {
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommDestroy(comm) });
    }
    members.into_iter().for_each(Rank::leave);
}

#[test]
fn a_child_outlives_its_parent() {
    for share in [0, 1] {
        host();
        let id = unique_id();
        thread::scope(|scope| {
            for rank in 0..3 {
                scope.spawn(move || {
                    let mut settings = config();
                    settings.split_share = share;
                    let rank = Rank::join_with(id, rank, 3, &mut settings);
                    let child = member(split(&rank, 0, 2 - rank.rank as c_int, null_mut()));
                    works(&rank);
                    works(&child);
                    rank.leave();
                    works(&child);
                    child.leave();
                });
            }
        });
    }
}

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

/// All ranks but the last are stuck in a collective that it never calls.
fn stuck<'a>(rank: &Rank, data: &'a mut Vec<f32>) -> &'a mut Vec<f32> {
    data.resize(1 << 20, 1.0);
    let at = data.as_mut_ptr().cast();
    ok(rank.call(&Call::new(Function::AllReduce, data.len()), at, at));
    data
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
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
        assert_eq!(common::state(rank.comm), ResultCode::Success);
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
                assert_eq!(common::state(child), ResultCode::Success);
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

#[test]
fn children_in_processes_of_two_nodes() {
    for share in ["0", "1"] {
        run_processes_with(
            "child_worker",
            4,
            2,
            &[("NCCL_COMM_SPLIT_SHARE_RESOURCES", share)],
        );
    }
}

#[test]
#[ignore = "a rank of `children_in_processes_of_two_nodes`"]
fn child_worker() {
    let Some(rank) = rank_of_process() else { return };
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
    println!("rank done");
}

#[test]
fn a_dead_rank_is_excluded() {
    for nodes in [1, 2] {
        run_processes("survivor_worker", 4, nodes);
    }
}

#[test]
#[ignore = "a rank of `a_dead_rank_is_excluded`"]
fn survivor_worker() {
    let Some(rank) = rank_of_process() else { return };
    works(&rank);
    let comm = lookup(rank.comm).unwrap();
    if rank.rank == 1 {
        // Not before the others have what it sent.
        for other in [0, 2, 3] {
            comm.bootstrap().recv(other, 1).unwrap();
        }
        println!("rank done");
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
    while common::state(rank.comm) == ResultCode::Success {
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
    println!("rank done");
}
