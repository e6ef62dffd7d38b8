//! Both ends of every hop agree, and ranks that call different operations meet.

use std::sync::Arc;

use proptest::prelude::*;
use ringsight_records::{DataType, ReduceOp};

use super::*;
use crate::{Fifo, fifo::tests::heap, launch::Scalar};

const RINGS: [Function; 8] = [
    Function::AllReduce,
    Function::AllGather,
    Function::ReduceScatter,
    Function::Broadcast,
    Function::Reduce,
    Function::AlltoAll,
    Function::Gather,
    Function::Scatter,
];

fn work(function: Function, data_type: DataType, members: &[u32], at: usize, slot: &Arc<Fifo>) -> Work {
    let ranks = members.len();
    Work {
        op: 0,
        tag: 1,
        function,
        algorithm: Algorithm::Ring,
        data_type,
        reduce_op: ReduceOp::Sum,
        scalar: Scalar::None,
        send: 0,
        recv: 0,
        count: 0,
        part: 0..0,
        rank: members[at],
        ranks: ranks as u32,
        root: 0,
        zero_copy: crate::ZeroCopy::Off,
        pushes: false,
        connections: Connections::Ring {
            order: (0..ranks).map(|hop| members[(at + hop) % ranks]).collect(),
            prev: slot.clone(),
            next: slot.clone(),
        },
    }
}

/// The ring, or one shot where that is wanted and possible.
fn algorithm(function: Function, bytes: usize, slot_bytes: usize, one_shot: bool) -> Algorithm {
    if one_shot && function == Function::AllReduce && bytes <= slot_bytes {
        Algorithm::OneShot
    } else {
        Algorithm::Ring
    }
}

fn all(schedule: &Schedule) -> Vec<Step> {
    let mut position = Position::default();
    std::iter::from_fn(|| {
        let step = schedule.seek(&mut position);
        position.pass();
        step
    })
    .collect()
}

proptest! {
    #[test]
    fn both_ends_agree_and_the_result_is_covered_once(
        function in proptest::sample::select(&RINGS[..]),
        data_type in proptest::sample::select(DataType::ALL),
        members in (2_u32..9).prop_flat_map(|ranks| Just((0..ranks).collect::<Vec<_>>()).prop_shuffle()),
        slot_bytes in 8_usize..600,
        before in 0_usize..50,
        len in prop_oneof![0_usize..60, 0_usize..3000],
        one_shot in any::<bool>(),
        after in 0_usize..50,
        root in any::<prop::sample::Index>(),
    ) {
        let fifo = heap(slot_bytes);
        let ranks = members.len();
        let of_messages = !RINGS[..5].contains(&function);
        let len = if of_messages { 0 } else { len };
        let algorithm = algorithm(function, len * data_type.size(), slot_bytes, one_shot);
        let mut count = before + len + after;
        let is_owned = function == Function::AllReduce && algorithm == Algorithm::Ring;
        if is_owned {
            // So that the rank which owns most has that many, and the last ones less or nothing, or as many.
            count = count.saturating_sub(1) * ranks + 1 + after % ranks;
        }
        // Of one rank.
        let each = if is_owned { owned(data_type, count, ranks as u32) } else { count };
        let works: Vec<Work> = (0..ranks)
            .map(|at| Work {
                count,
                part: before..before + len,
                root: root.index(ranks) as u32,
                algorithm,
                ..work(function, data_type, &members, at, &fifo)
            })
            .collect();
        let programs: Vec<Vec<Step>> = works.iter().map(|work| all(&Schedule::new(work))).collect();
        for (at, (work, steps)) in works.iter().zip(&programs).enumerate() {
            work.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
            let moved = |steps: &[Step], which: fn(&Step) -> bool| {
                steps.iter().filter(|step| which(step)).map(|step| step.elems).collect::<Vec<_>>()
            };
            let (sent, got) = (moved(steps, |step| step.send), moved(steps, |step| step.recv));
            prop_assert_eq!(work.steps(), Steps { send: sent.len() as u32, recv: got.len() as u32 });
            prop_assert_eq!(&sent, &moved(&programs[(at + 1) % ranks], |step| step.recv));
            prop_assert!(sent.iter().all(|elems| elems * data_type.size() <= slot_bytes));
            if len > 0 || of_messages {
                // Every hop shows its tag, and a slot at the head of the ring is never one of a later operation
                // while there is anything left to do.
                prop_assert!(!sent.is_empty() && !got.is_empty());
                prop_assert!(steps.last().is_some_and(|step| step.recv));
            }

            // Every element of this channel's result is stored exactly once; nothing else is.
            let outputs = if function == Function::AllGather { ranks } else { 1 };
            let mut stored = vec![0_u32; outputs * work.count];
            for step in steps {
                for at in step.store.map_or(0..0, |at| at..at + step.elems) {
                    stored[at] += 1;
                }
            }
            let has_result = function != Function::Reduce || work.rank == work.root;
            for (at, times) in stored.into_iter().enumerate() {
                prop_assert_eq!(times, u32::from(has_result && work.part.contains(&(at % each))));
            }
        }
    }
}

/// What one rank calls: function, data type, root, elements, whether in one shot where that is possible.
type Called = (Function, DataType, u32, usize, bool);

/// Lets every rank run the program of what it calls, over FIFOs that hold tags only. Returns whether a rank saw a tag
/// that was not its own; panics if all wait.
fn somebody_sees_it(calls: &[Called], members: &[u32], slot_bytes: usize, finished: &mut usize) -> bool {
    let (slot, ranks) = (heap(slot_bytes), members.len());
    let tag = |at: usize| calls.iter().position(|call| *call == calls[at]).unwrap();
    let mut programs: Vec<(Schedule, Position)> = (0..ranks)
        .map(|at| {
            let (function, data_type, root, count, one_shot) = calls[at];
            let algorithm = algorithm(function, count * data_type.size(), slot_bytes, one_shot);
            let part = if RINGS[..5].contains(&function) {
                0..divisible(function, algorithm, data_type, count, ranks as u32)
            } else {
                0..0
            };
            let work = Work {
                count,
                part,
                root,
                algorithm,
                ..work(function, data_type, members, at, &slot)
            };
            work.check().unwrap();
            (Schedule::new(&work), Position::default())
        })
        .collect();
    // What is on its way to each rank.
    let mut arriving = vec![std::collections::VecDeque::new(); ranks];
    loop {
        let (mut moved, mut running) = (false, 0);
        for (at, (schedule, position)) in programs.iter_mut().enumerate() {
            let Some(step) = schedule.seek(position) else {
                continue;
            };
            running += 1;
            let next = (at + 1) % ranks;
            match arriving[at].front() {
                Some(theirs) if *theirs != tag(at) => return true,
                None if step.recv => continue,
                _ => {}
            }
            if step.send && arriving[next].len() == crate::fifo::SLOTS {
                continue;
            }
            if step.recv {
                arriving[at].pop_front();
            }
            if step.send {
                arriving[next].push_back(tag(at));
            }
            position.pass();
            moved = true;
        }
        *finished = ranks - running;
        if running == 0 {
            return false;
        }
        assert!(moved, "all wait: {calls:?} in ring order {members:?}");
    }
}

proptest! {
    #[test]
    fn ranks_that_call_different_operations_meet(
        // Few values, so that many ranks call the same.
        pool in prop::collection::vec(
            (proptest::sample::select(&RINGS[..]), proptest::sample::select(DataType::ALL), 0_u32..9,
                prop_oneof![1_usize..60, 1_usize..2000], any::<bool>()), 1..4),
        choices in prop::collection::vec(any::<prop::sample::Index>(), 9),
        members in (2_u32..9).prop_flat_map(|ranks| Just((0..ranks).collect::<Vec<_>>()).prop_shuffle()),
        slot_bytes in 8_usize..600,
    ) {
        let ranks = members.len();
        let calls: Vec<Called> = (0..ranks).map(|at| {
            let (function, data_type, root, count, one_shot) = pool[choices[at].index(pool.len())];
            (function, data_type, root % ranks as u32, count, one_shot)
        }).collect();
        let differ = calls.iter().any(|call| *call != calls[0]);
        let mut finished = 0;
        prop_assert_eq!(somebody_sees_it(&calls, &members, slot_bytes, &mut finished), differ);
        prop_assert!(differ || finished == ranks);
    }
}

#[test]
fn steps_of_a_large_operation_are_counted_without_walking_it() {
    let fifo = heap(64);
    let large = Work {
        count: usize::MAX / 64,
        part: 0..1 << 29,
        ..work(Function::AllReduce, DataType::Uint8, &[0, 1], 0, &fifo)
    };
    // 64 bytes of each rank's a round, 2 slots each way.
    assert_eq!(
        large.steps(),
        Steps {
            send: 1 << 24,
            recv: 1 << 24
        }
    );
}
