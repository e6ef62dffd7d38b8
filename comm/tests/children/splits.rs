//! Communicators that are split.

use std::{
    ffi::c_int,
    ptr::{null, null_mut},
    thread,
};

use ringsight_comm::{abi, communicator::Handle, error::ResultCode, observe};

use ringsight_records::Function;

use crate::common::children::{NO_COLOR, id, member, shrink, split, works};
use crate::common::{Call, Rank, config, host, ok, on_ranks, unique_id};

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
fn what_a_failed_group_asked_for_is_not_counted() {
    let ids = on_ranks(2, |rank| {
        if rank.rank == 0 {
            let mut child = Handle(1);
            let mut byte = 0u8;
            let at = (&raw mut byte).cast();
            // SAFETY: a valid place, until the group has ended.
            unsafe {
                ok(abi::ncclGroupStart());
                ok(abi::ncclCommSplit(rank.comm, 0, 0, &raw mut child, null_mut()));
                let code = abi::ncclBroadcast(at, at, 1, 0, 99, rank.comm, rank.stream);
                assert_eq!(code, ResultCode::InvalidArgument);
                assert_eq!(abi::ncclGroupEnd(), ResultCode::InvalidArgument);
            }
            assert_eq!(child, Handle(0));
            let mut one = rank.rank as c_int;
            // SAFETY: a list of one rank, which is the caller; valid places.
            unsafe {
                ok(abi::ncclGroupStart());
                let code = abi::ncclCommShrink(rank.comm, &raw mut one, 1, &raw mut child, null_mut(), 0);
                assert_eq!(code, ResultCode::InvalidArgument);
                assert_eq!(abi::ncclGroupEnd(), ResultCode::InvalidArgument);
            }
        }
        // The first one of both ranks.
        let child = member(split(&rank, 0, 0, null_mut()));
        works(&child);
        let id = id(&child);
        child.leave();
        id
    });
    assert_eq!(ids[0], ids[1]);
}

#[test]
fn shrinks_of_a_failed_group_are_not_counted() {
    let ids = on_ranks(3, |rank| {
        if rank.rank == 0 {
            let (mut child, mut excluded) = (Handle(1), 2);
            let mut byte = 0u8;
            let at = (&raw mut byte).cast();
            // SAFETY: valid places, until the group has ended.
            unsafe {
                ok(abi::ncclGroupStart());
                ok(abi::ncclCommShrink(
                    rank.comm,
                    &raw mut excluded,
                    1,
                    &raw mut child,
                    null_mut(),
                    0,
                ));
                let code = abi::ncclBroadcast(at, at, 1, 0, 99, rank.comm, rank.stream);
                assert_eq!(code, ResultCode::InvalidArgument);
                assert_eq!(abi::ncclGroupEnd(), ResultCode::InvalidArgument);
            }
        }
        if rank.rank == 2 {
            return None;
        }
        let child = member(shrink(&rank, &[2], null_mut(), 0));
        works(&child);
        let id = id(&child);
        child.leave();
        Some(id)
    });
    assert_eq!(ids[0], ids[1]);
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
