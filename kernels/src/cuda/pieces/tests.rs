use std::collections::BTreeMap;

use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::*;
use crate::{
    cuda::{
        gates::Between,
        layout::NO_ROOT,
        testing::{self, APART, OFFSET, in_window},
    },
    launch::Scratch,
};

/// Where in each rank's memory scratch is, behind the window, and what is sent.
const SCRATCH: usize = APART / 4;
const SENDS: usize = APART / 2;

/// An all_reduce. `send`: where in the rank's memory the send buffer is; `None`: in place.
fn work(rank: u32, ranks: u32, count: usize, send: Option<usize>, piece_bytes: u64) -> Work {
    let scratch = Scratch {
        piece_bytes,
        bases: (1..=ranks as usize)
            .map(|rank| (rank * APART + SCRATCH) as u64)
            .collect(),
        memory: Box::new(()),
    };
    let work = in_window(rank, ranks, count, Some(scratch));
    Work {
        function: Function::AllReduce,
        algorithm: Algorithm::TwoShot,
        data_type: DataType::Float16,
        reduce_op: ReduceOp::Sum,
        send: (rank as usize + 1) * APART + send.unwrap_or(OFFSET as usize),
        ..work
    }
}

fn launched(work: Work) -> Result<Box<Pieces>, crate::WorkError> {
    match testing::launched(vec![work])?.expect("one").between {
        Some(Between::Pieces(pieces)) => Ok(pieces),
        other => panic!("{other:?}"),
    }
}

/// Goes through all copies and kernels of all ranks: what comes to a slot is what is reduced there, and each byte of all results is written once.
#[test]
fn every_element_is_made_of_all_ranks_and_comes_to_all() {
    for (ranks, count, send, piece) in [
        (2, 5000, None, 1 << 15),
        (2, 100_003, Some(SENDS), 1 << 15),
        (2, 3, None, LINE),
        (2, 10_000, None, LINE),
        (4, 40_001, Some(SENDS + 2), 1 << 13),
        (4, 60_000, None, 1 << 20),
        (8, 33_333, Some(SENDS), 1 << 12),
        (8, 0, None, LINE),
    ] {
        let bytes = 2 * count as u64;
        let all: Vec<_> = (0..ranks)
            .map(|rank| launched(work(rank, ranks, count, send, piece)).unwrap())
            .collect();
        let pieces = all[0].count();
        assert!(pieces >= 2 && all.iter().all(|one| one.count() == pieces));
        assert_eq!(pieces > 2, bytes.div_ceil(u64::from(ranks)) > 2 * piece);
        // By where something of a buffer begins and ends, how often it has been written.
        let mut results: Vec<BTreeMap<u64, u64>> = vec![BTreeMap::new(); ranks as usize];
        for number in 0..pieces {
            // What has come to a slot of which rank: where in the buffers it is from.
            let mut come: BTreeMap<u64, (usize, u64, u64)> = BTreeMap::new();
            for (me, rank) in all.iter().enumerate() {
                let base = (me + 1) as u64 * APART as u64;
                for copy in rank.pushes(number).others() {
                    let is_own = copy.to / APART as u64 - 1 == me as u64;
                    let from = copy.from - base - send.unwrap_or(OFFSET as usize) as u64;
                    if is_own {
                        assert_eq!((copy.to - base - OFFSET, send), (from, Some(SENDS + 2)));
                        continue;
                    }
                    let within = copy.to % APART as u64 - SCRATCH as u64;
                    assert!(
                        within + copy.bytes <= scratch_bytes(ranks as usize, piece)
                            && within.is_multiple_of(LINE)
                    );
                    let slot = (within, within + copy.bytes.max(1));
                    let base = copy.to - within;
                    let overlaps = |at: &u64, one: &(usize, u64, u64)| {
                        base <= *at
                            && *at < base + APART as u64 / 8
                            && at - base < slot.1
                            && slot.0 < at - base + one.2
                    };
                    assert!(
                        !come.iter().any(|(at, one)| overlaps(at, one)),
                        "slots of a piece overlap"
                    );
                    come.insert(copy.to, (me, from, copy.bytes));
                }
            }
            for (me, rank) in all.iter().enumerate() {
                let base = (me + 1) as u64 * APART as u64;
                let launch = rank.launch(number);
                assert!(
                    PeerLaunch::kernels()
                        .nth(launch.kernel)
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .ends_with(&format!("piece_sum_f16_{ranks}"))
                );
                let PeerArguments::Exchange(told) = launch.arguments else {
                    panic!()
                };
                assert_eq!((told.passes, told.root), (0, NO_ROOT));
                assert_eq!(rank.settles(number), None);
                let at = told.result - base - OFFSET;
                let own = told.own - base;
                let is_beside = send == Some(SENDS + 2) && told.result_bytes > 0;
                assert_eq!(
                    own,
                    at + if is_beside {
                        OFFSET
                    } else {
                        send.unwrap_or(OFFSET as usize) as u64
                    }
                );
                let are_aligned = told.own.is_multiple_of(16) && told.result.is_multiple_of(16);
                assert!(are_aligned || told.result_bytes == 0);
                // Each of the others' contributions is of the same bytes.
                for other in (0..ranks as usize).filter(|other| *other != me) {
                    assert_eq!(come[&told.from[other]], (other, at, told.result_bytes));
                }
                let gathered = rank.gathers(number);
                assert_eq!(gathered.others().len() as u32, ranks - 1);
                results[me].insert(at, told.result_bytes);
                for copy in gathered.others() {
                    let to = copy.to / APART as u64 - 1;
                    assert_eq!((copy.from, copy.bytes), (told.result, told.result_bytes));
                    assert_eq!(copy.to % APART as u64 - OFFSET, at);
                    if copy.bytes > 0 {
                        let before = results[to as usize].insert(at, copy.bytes);
                        assert_eq!(before.filter(|bytes| *bytes > 0), None);
                    }
                }
            }
        }
        for written in &mut results {
            written.retain(|_, bytes| *bytes > 0);
            let mut end = 0;
            for (at, bytes) in written {
                assert_eq!(*at, end);
                end += *bytes;
            }
            assert_eq!(end, bytes);
        }
    }
}

/// A reduce_scatter whose send buffer is in the window; `recv`: where in the rank's memory the receive buffer is; `None`: in place.
fn scattered(rank: u32, ranks: u32, count: usize, recv: Option<usize>, piece_bytes: u64) -> Work {
    let base = (rank as usize + 1) * APART;
    let send = base + OFFSET as usize;
    let in_place = send + rank as usize * count * 2;
    Work {
        function: Function::ReduceScatter,
        algorithm: Algorithm::Direct,
        send,
        recv: recv.map_or(in_place, |recv| base + recv),
        ..work(rank, ranks, count, None, piece_bytes)
    }
}

/// What comes to a slot is what is reduced there, and each byte of each rank's result is written once, where it is to be, and not copied to others.
#[test]
fn every_element_of_a_reduce_scatter_is_made_of_all_ranks() {
    for (ranks, count, recv, piece) in [
        (2, 5000, None, 1 << 15),
        (2, 100_000, Some(SENDS), 1 << 15),
        (2, 8, None, LINE),
        (4, 40_000, Some(SENDS + 2), 1 << 13),
        (4, 60_000, None, 1 << 20),
        (8, 33_336, Some(SENDS), 1 << 12),
        (8, 0, None, LINE),
    ] {
        let bytes = 2 * count as u64;
        let all: Vec<_> = (0..ranks)
            .map(|rank| launched(scattered(rank, ranks, count, recv, piece)).unwrap())
            .collect();
        let pieces = all[0].count();
        assert!(pieces >= 2 && all.iter().all(|one| one.count() == pieces));
        let mut ends = vec![0; ranks as usize];
        let mut lengths = Vec::new();
        for number in 0..pieces {
            let mut come: BTreeMap<u64, (usize, u64, u64)> = BTreeMap::new();
            for (me, rank) in all.iter().enumerate() {
                let base = (me + 1) as u64 * APART as u64;
                for copy in rank.pushes(number).others() {
                    let to = copy.to / APART as u64 - 1;
                    assert!(to != me as u64 && copy.to % APART as u64 >= SCRATCH as u64);
                    let from = copy.from - base - OFFSET - to * bytes;
                    come.insert(copy.to, (me, from, copy.bytes));
                }
                assert!(rank.gathers(number).others().is_empty());
            }
            for (me, rank) in all.iter().enumerate() {
                let base = (me + 1) as u64 * APART as u64;
                let PeerArguments::Exchange(told) = rank.launch(number).arguments else {
                    panic!()
                };
                assert!(told.own.is_multiple_of(16) && told.result.is_multiple_of(16));
                assert_eq!(told.own, base + OFFSET + me as u64 * bytes + ends[me]);
                for other in (0..ranks as usize).filter(|other| *other != me) {
                    assert_eq!(come[&told.from[other]], (other, ends[me], told.result_bytes));
                }
                let result = scattered(me as u32, ranks, count, recv, piece).recv as u64 + ends[me];
                if recv == Some(SENDS + 2) {
                    let copy = rank.settles(number).unwrap();
                    assert_eq!(
                        (copy.to, copy.from, copy.bytes),
                        (result, told.result, told.result_bytes)
                    );
                    assert!(told.from.contains(&told.result));
                } else {
                    assert_eq!((told.result, rank.settles(number)), (result, None));
                }
                ends[me] += told.result_bytes;
                lengths.push(told.result_bytes);
            }
        }
        assert!(ends.iter().all(|end| *end == bytes));
        // Nothing goes on beside the last one.
        assert!(lengths[lengths.len() - 1] <= lengths[0] / 4 && lengths.iter().all(|bytes| *bytes <= piece));
    }
}

/// Of one operation, and none has that of the end, which is 0.
#[test]
fn each_meeting_has_a_word_of_its_own() {
    for ranks in [2, 4, 8] {
        // Of a reduce_scatter one more.
        let most = most_bytes(ranks as usize, LINE) as usize / 2 / ranks as usize;
        let pieces = launched(scattered(0, ranks, most, None, LINE)).unwrap();
        let word = |launch: PeerLaunch| {
            assert_eq!(
                PeerLaunch::kernels().nth(launch.kernel).unwrap(),
                gates::KERNELS[2]
            );
            assert_eq!((launch.blocks, launch.threads), (1, gates::GATE_THREADS));
            let PeerArguments::Gate(told) = launch.arguments else {
                panic!()
            };
            told.meeting
        };
        let words: Vec<_> = (0..pieces.count())
            .flat_map(|number| [word(pieces.arrival(number)), word(pieces.room(number))])
            .collect();
        assert!(
            words
                .iter()
                .all(|word| (1..STRAIGHT_BLOCKS as u32).contains(word))
        );
        assert!(words.is_sorted_by(|a, b| a < b));
    }
}

#[test]
fn pieces_are_as_long_as_there_is_room_for() {
    const MIB: u64 = 1 << 20;
    for (ranks, wanted, bytes) in [
        (2, 128 * MIB, 128 * MIB),
        (4, 128 * MIB, 128 * MIB),
        (4, 200 * MIB, 128 * MIB),
        (4, 5000, 4864),
        (8, 128 * MIB, 768 * MIB / 14 / LINE * LINE),
        (2, 0, LINE),
    ] {
        assert_eq!(piece_bytes(ranks, wanted), bytes, "{ranks} {wanted}");
        assert!(scratch_bytes(ranks, bytes) <= MOST_SCRATCH);
    }
    // Of numbers of ranks that no kernel is for as well.
    for ranks in [1, 3, 250, 1 << 20] {
        assert!(piece_bytes(ranks, 128 * MIB) >= LINE && most_bytes(ranks, MIB) < u64::MAX);
    }
}

#[test]
fn what_no_kernel_reduces_so_is_refused() {
    let good = || work(0, 2, 1000, None, LINE);
    assert!(launched(good()).is_ok() && launched(scattered(0, 2, 1000, None, LINE)).is_ok());
    let most = most_bytes(2, LINE) as usize / 2;
    assert!(launched(work(0, 2, most, None, LINE)).is_ok());
    for other in [
        work(0, 2, most + 1, None, LINE),
        work(0, 3, 1000, None, LINE),
        Work {
            data_type: DataType::Int32,
            ..good()
        },
        Work {
            reduce_op: ReduceOp::Max,
            ..good()
        },
        Work {
            recv: good().recv + 2,
            ..good()
        },
        Work {
            algorithm: Algorithm::Direct,
            ..good()
        },
        scattered(0, 2, most / 2 + 8, None, LINE),
        scattered(0, 2, 1001, None, LINE),
        Work {
            send: good().send + 8,
            ..scattered(0, 2, 1000, None, LINE)
        },
        Work {
            algorithm: Algorithm::TwoShot,
            ..scattered(0, 2, 1000, None, LINE)
        },
    ] {
        assert!(launched(other).is_err());
    }
}
