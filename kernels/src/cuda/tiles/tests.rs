use std::collections::BTreeMap;

use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::*;
use crate::{
    cuda::{
        PeerOperation,
        layout::NO_ROOT,
        peer_operation::CopyPhase,
        testing::{self, APART, OFFSET, in_window},
    },
    launch::Scratch,
};

/// Offsets of scratch memory and of the send buffer in each rank's memory, behind the window.
const SCRATCH: usize = APART / 4;
const SENDS: usize = APART / 2;

/// An AllReduce. `send`: offset of the send buffer in the rank's memory; `None`: in place.
fn work(rank: u32, ranks: u32, count: usize, send: Option<usize>, tile_bytes: u64) -> Work {
    let scratch = Scratch {
        tile_bytes,
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

fn launched(work: Work) -> Result<Box<Tiles>, crate::WorkError> {
    match testing::launched(vec![work])?.expect("one").copy_phase {
        Some(CopyPhase::Tiles(tiles)) => Ok(tiles),
        other => panic!("{other:?}"),
    }
}

/// Follows all copies and kernels of all ranks: each slot is reduced with what was copied there, and each byte of a result is written once.
#[test]
fn every_element_is_made_of_all_ranks_and_comes_to_all() {
    for (ranks, count, send, tile) in [
        (2, 5000, None, 1 << 15),
        (2, 100_003, Some(SENDS), 1 << 15),
        (2, 3, None, ALIGNMENT),
        (2, 10_000, None, ALIGNMENT),
        (4, 40_001, Some(SENDS + 2), 1 << 13),
        (4, 60_000, None, 1 << 20),
        (8, 33_333, Some(SENDS), 1 << 12),
        (8, 0, None, ALIGNMENT),
    ] {
        let bytes = 2 * count as u64;
        let all: Vec<_> = (0..ranks)
            .map(|rank| launched(work(rank, ranks, count, send, tile)).unwrap())
            .collect();
        let tiles = all[0].count();
        assert!(tiles >= 2 && all.iter().all(|one| one.count() == tiles));
        assert_eq!(tiles > 2, bytes.div_ceil(u64::from(ranks)) > 2 * tile);
        // By start of a range of a result: its length.
        let mut results: Vec<BTreeMap<u64, u64>> = vec![BTreeMap::new(); ranks as usize];
        for number in 0..tiles {
            // By slot: rank, offset in its buffer, and length of what was copied there.
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
                        within + copy.bytes <= scratch_bytes(ranks as usize, tile)
                            && within.is_multiple_of(ALIGNMENT)
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
                        "slots of a tile overlap"
                    );
                    come.insert(copy.to, (me, from, copy.bytes));
                }
            }
            for (me, rank) in all.iter().enumerate() {
                let base = (me + 1) as u64 * APART as u64;
                let launch = rank.reduce(number);
                assert!(
                    PeerOperation::kernels()
                        .nth(launch.kernel)
                        .unwrap()
                        .to_str()
                        .unwrap()
                        .ends_with(&format!("tile_sum_f16_{ranks}"))
                );
                let PeerArguments::Collective(told) = launch.arguments else {
                    panic!()
                };
                assert_eq!((told.forwards, told.root), (0, NO_ROOT));
                assert_eq!(rank.result_copy(number), None);
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
                // Every other rank's contribution covers the same bytes.
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

/// A ReduceScatter whose send buffer is in the window. `recv`: offset of the receive buffer in the rank's memory; `None`: in place.
fn scattered(rank: u32, ranks: u32, count: usize, recv: Option<usize>, tile_bytes: u64) -> Work {
    let base = (rank as usize + 1) * APART;
    let send = base + OFFSET as usize;
    let in_place = send + rank as usize * count * 2;
    Work {
        function: Function::ReduceScatter,
        algorithm: Algorithm::Direct,
        send,
        recv: recv.map_or(in_place, |recv| base + recv),
        ..work(rank, ranks, count, None, tile_bytes)
    }
}

/// Each slot is reduced with what was copied there, and each byte of a rank's result is written once, on that rank only.
#[test]
fn every_element_of_a_reduce_scatter_is_made_of_all_ranks() {
    for (ranks, count, recv, tile) in [
        (2, 5000, None, 1 << 15),
        (2, 100_000, Some(SENDS), 1 << 15),
        (2, 8, None, ALIGNMENT),
        (4, 40_000, Some(SENDS + 2), 1 << 13),
        (4, 60_000, None, 1 << 20),
        (8, 33_336, Some(SENDS), 1 << 12),
        (8, 0, None, ALIGNMENT),
    ] {
        let bytes = 2 * count as u64;
        let all: Vec<_> = (0..ranks)
            .map(|rank| launched(scattered(rank, ranks, count, recv, tile)).unwrap())
            .collect();
        let tiles = all[0].count();
        assert!(tiles >= 2 && all.iter().all(|one| one.count() == tiles));
        let mut ends = vec![0; ranks as usize];
        let mut lengths = Vec::new();
        for number in 0..tiles {
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
                let PeerArguments::Collective(told) = rank.reduce(number).arguments else {
                    panic!()
                };
                assert!(told.own.is_multiple_of(16) && told.result.is_multiple_of(16));
                assert_eq!(told.own, base + OFFSET + me as u64 * bytes + ends[me]);
                for other in (0..ranks as usize).filter(|other| *other != me) {
                    assert_eq!(come[&told.from[other]], (other, ends[me], told.result_bytes));
                }
                let result = scattered(me as u32, ranks, count, recv, tile).recv as u64 + ends[me];
                if recv == Some(SENDS + 2) {
                    let copy = rank.result_copy(number).unwrap();
                    assert_eq!(
                        (copy.to, copy.from, copy.bytes),
                        (result, told.result, told.result_bytes)
                    );
                    assert!(told.from.contains(&told.result));
                } else {
                    assert_eq!((told.result, rank.result_copy(number)), (result, None));
                }
                ends[me] += told.result_bytes;
                lengths.push(told.result_bytes);
            }
        }
        assert!(ends.iter().all(|end| *end == bytes));
        // Nothing runs beside the last tile, so it is short.
        assert!(lengths[lengths.len() - 1] <= lengths[0] / 4 && lengths.iter().all(|bytes| *bytes <= tile));
    }
}

/// Within one operation; and no barrier has the exit kernel's word, 0.
#[test]
fn each_meeting_has_a_word_of_its_own() {
    for ranks in [2, 4, 8] {
        // A ReduceScatter has one tile more.
        let most = max_bytes(ranks as usize, ALIGNMENT) as usize / 2 / ranks as usize;
        let tiles = launched(scattered(0, ranks, most, None, ALIGNMENT)).unwrap();
        let word = |launch: PeerLaunch| {
            assert_eq!(
                PeerOperation::kernels().nth(launch.kernel).unwrap(),
                copy_engine::KERNELS[2]
            );
            assert_eq!(
                (launch.blocks, launch.threads),
                (1, copy_engine::COPY_ENGINE_THREADS)
            );
            let PeerArguments::CopyEngine(told) = launch.arguments else {
                panic!()
            };
            told.barrier
        };
        let words: Vec<_> = (0..tiles.count())
            .flat_map(|number| [word(tiles.arrival(number)), word(tiles.room(number))])
            .collect();
        assert!(
            words
                .iter()
                .all(|word| (1..MAX_ZERO_COPY_BLOCKS as u32).contains(word))
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
        (8, 128 * MIB, 768 * MIB / 14 / ALIGNMENT * ALIGNMENT),
        (2, 0, ALIGNMENT),
    ] {
        assert_eq!(tile_bytes(ranks, wanted), bytes, "{ranks} {wanted}");
        assert!(scratch_bytes(ranks, bytes) <= MAX_SCRATCH);
    }
    // Also for numbers of ranks without a kernel.
    for ranks in [1, 3, 250, 1 << 20] {
        assert!(tile_bytes(ranks, 128 * MIB) >= ALIGNMENT && max_bytes(ranks, MIB) < u64::MAX);
    }
}

#[test]
fn what_no_kernel_reduces_so_is_refused() {
    let good = || work(0, 2, 1000, None, ALIGNMENT);
    assert!(launched(good()).is_ok() && launched(scattered(0, 2, 1000, None, ALIGNMENT)).is_ok());
    let most = max_bytes(2, ALIGNMENT) as usize / 2;
    assert!(launched(work(0, 2, most, None, ALIGNMENT)).is_ok());
    for other in [
        work(0, 2, most + 1, None, ALIGNMENT),
        work(0, 3, 1000, None, ALIGNMENT),
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
        scattered(0, 2, most / 2 + 8, None, ALIGNMENT),
        scattered(0, 2, 1001, None, ALIGNMENT),
        Work {
            send: good().send + 8,
            ..scattered(0, 2, 1000, None, ALIGNMENT)
        },
        Work {
            algorithm: Algorithm::TwoShot,
            ..scattered(0, 2, 1000, None, ALIGNMENT)
        },
    ] {
        assert!(launched(other).is_err());
    }
}
