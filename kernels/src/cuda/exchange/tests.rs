use std::sync::Arc;

use proptest::prelude::*;
use ringsight_records::{DataType, ReduceOp};

use super::*;
use crate::{
    cuda::testing,
    launch::{Connections, Scalar},
};

const SEND: usize = 1 << 40;
const RECV: usize = 2 << 40;

fn work(function: Function, count: usize, rank: u32, ranks: u32, root: u32) -> Work {
    let reduces = function.reduces();
    Work {
        op: 1,
        tag: 1,
        function,
        algorithm: if function == Function::AllReduce {
            Algorithm::TwoShot
        } else {
            Algorithm::Direct
        },
        data_type: DataType::Float32,
        reduce_op: if reduces { ReduceOp::Sum } else { ReduceOp::None },
        scalar: Scalar::None,
        send: SEND,
        recv: RECV,
        count,
        part: 0..count,
        rank,
        ranks,
        root,
        straight: Straight::No,
        pushes: false,
        connections: Connections::Peers(Arc::new(Peers {
            rank,
            bases: vec![0; ranks as usize],
            most_blocks: 64,
            foreign: 0,
            memory: Box::new(()),
        })),
    }
}

#[test]
fn what_a_kernel_is_made_for_goes_straight() {
    let all_reduce = |data_type, reduce_op, ranks| Work {
        data_type,
        reduce_op,
        ..work(Function::AllReduce, 1 << 20, 0, ranks, 0)
    };
    for data_type in [DataType::Float32, DataType::Float16, DataType::Bfloat16] {
        for ranks in 2..=8 {
            for reduce_op in [ReduceOp::Sum, ReduceOp::Avg] {
                let sum = all_reduce(data_type, reduce_op, ranks);
                assert_eq!(can_go_straight(&sum), matches!(ranks, 2 | 4 | 8), "{ranks}");
            }
            assert!(!can_go_straight(&all_reduce(data_type, ReduceOp::Max, ranks)));
        }
    }
    for reduce_op in [ReduceOp::Sum, ReduceOp::Avg] {
        assert!(!can_go_straight(&all_reduce(DataType::Int32, reduce_op, 2)));
    }
    // Copies are of any type among any number.
    let mut gather = work(Function::AllGather, 3, 0, 7, 0);
    gather.count = 4;
    assert!(can_go_straight(&gather));
    gather.recv += 8;
    assert!(
        !can_go_straight(&gather),
        "a buffer that does not begin at 16 bytes"
    );
}

#[test]
fn what_is_short_or_waits_anyhow_gains_by_a_graph() {
    let gains = |work: Work, overlaps| launch_of(work).gains_by_graph(overlaps);
    for ranks in [2, 4] {
        // In one shot, and each rank a part of it.
        for algorithm in [Algorithm::OneShot, Algorithm::TwoShot] {
            let of = |count| Work {
                algorithm,
                ..work(Function::AllReduce, count, 0, ranks, 0)
            };
            assert!(gains(of(16 << 10), true), "64 KiB of {ranks} ranks");
            assert!(!gains(of((16 << 10) + 32), true), "{algorithm} of {ranks}");
            assert!(gains(of(20 << 10), false), "it waits for the one before");
        }
        let of = |count| work(Function::AllGather, count, 0, ranks, 0);
        assert!(gains(of((16 << 10) / ranks as usize), true));
        assert!(!gains(of((16 << 10) / ranks as usize + 1), true));
    }
}

/// The same where so many blocks of a kernel run side by side.
fn on_device(most_blocks: u32, work: Work) -> Work {
    let peers = work.connections.peers().unwrap();
    let connections = Connections::Peers(Arc::new(Peers {
        rank: peers.rank,
        bases: peers.bases.clone(),
        most_blocks,
        foreign: 0,
        memory: Box::new(()),
    }));
    Work { connections, ..work }
}

fn launch_of(work: Work) -> PeerLaunch {
    testing::launched(vec![work]).unwrap().unwrap()
}

fn launched(work: Work) -> (PeerLaunch, Exchange) {
    let launch = launch_of(work);
    let PeerArguments::Exchange(arguments) = launch.arguments else {
        panic!("another kernel");
    };
    (launch, arguments)
}

/// All collectives among so many ranks, by all algorithms that these kernels have for them.
fn collectives(ranks: u32) -> impl Iterator<Item = (Function, Algorithm)> {
    let collectives = Function::ALL.iter().filter(|function| !function.is_p2p());
    collectives.flat_map(move |function| {
        let two_shots = has_two_shots(*function, ranks as usize).then_some(Algorithm::TwoShot);
        let direct = (*function != Function::AllReduce).then_some(Algorithm::Direct);
        two_shots
            .into_iter()
            .chain(direct)
            .map(|algorithm| (*function, algorithm))
    })
}

proptest! {
    // Ranks wait for each other: what one sends is what the other takes, and all take as many steps.
    #[test]
    fn ranks_agree(count in 1_usize..600_000, ranks in 2_u32..=8, root in 0_u32..8, most_blocks in 1_u32..=140) {
        let root = root % ranks;
        for (function, algorithm) in collectives(ranks) {
            let work = |rank| on_device(most_blocks, Work { algorithm, ..work(function, count, rank, ranks, root) });
            let all: Vec<_> = (0..ranks).map(|rank| launched(work(rank))).collect();
            let (first, steps) = (&all[0].0, (all[0].1.piece, all[0].1.chunk));
            for (rank, (launch, one)) in all.iter().enumerate() {
                prop_assert_eq!((launch.blocks, launch.threads), (first.blocks, first.threads));
                prop_assert_eq!(launch.threads, exchange_threads(function, algorithm, ranks as usize, false, false));
                prop_assert_eq!((one.piece, one.chunk), steps, "{}", function);
                prop_assert!(one.chunk as usize <= chunk_rows(ranks as usize) * ROW_BYTES && one.chunk > 0);
                prop_assert!(launch.blocks as usize * (launch.threads as usize / 32 - 1) <= lanes(ranks as usize));
                prop_assert!(launch.blocks <= most_blocks);
                let straight = |pushes| launched(Work { straight: Straight::Closed, pushes, ..work(rank as u32) });
                for pushes in [false, true] {
                    let (launch, _) = straight(pushes);
                    prop_assert_eq!(launch.threads, exchange_threads(function, algorithm, ranks as usize, true, pushes));
                    prop_assert!(launch.blocks as usize <= STRAIGHT_BLOCKS && launch.blocks <= most_blocks);
                }
                let (launch, straight) = straight(true);
                prop_assert!(launch.blocks >= first.blocks);
                let most = push_chunk(ranks as usize);
                prop_assert!(straight.push as usize <= most && (straight.push > 0) == (most > 0));
                prop_assert_eq!(straight.push, pushed(ranks as usize, straight.piece as usize, launch.blocks as usize));
                // Whole rounds of a block's threads.
                prop_assert_eq!(straight.push as usize * ranks as usize % (HALF_WARPS * 16 * 512), 0);
                for (peer, (_, other)) in all.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                    // What is reduced, or passed on, is as long as the result of who does; the rest goes where it was to go.
                    let expected = match (one.reduces, one.passes) {
                        (0, 1) if peer as u32 != root => 0,
                        (0, 0) => one.takes[peer],
                        _ => one.result_bytes,
                    };
                    prop_assert_eq!(other.sends[rank], expected, "{} from {} to {}", function, peer, rank);
                    prop_assert!(other.sends[rank] <= one.piece);
                    if one.passes == 1 {
                        let is_root = rank as u32 == root;
                        let takes = match function {
                            Function::Broadcast => !is_root,
                            Function::Reduce => is_root,
                            _ => true,
                        };
                        prop_assert_eq!(one.takes[peer], if takes { other.result_bytes } else { 0 });
                    }
                }
            }
        }
    }

    // Every byte of the result is written once.
    #[test]
    fn results_are_whole(count in 1_usize..300_000, ranks in 2_u32..=8, root in 0_u32..8) {
        let root = root % ranks;
        for (function, algorithm) in collectives(ranks) {
            for rank in 0..ranks {
                let (_, one) = launched(Work { algorithm, ..work(function, count, rank, ranks, root) });
                let bytes = count as u64 * 4;
                let expected = match function {
                    Function::AllGather | Function::AlltoAll => bytes * u64::from(ranks),
                    Function::Gather if rank == root => bytes * u64::from(ranks),
                    Function::Gather | Function::Reduce if rank != root => 0,
                    _ => bytes,
                };
                // What the root of a broadcast in parts sends it keeps; parts of a reduction with a root are stored there alone.
                let keeps = |peer: usize| (one.from[peer] - one.own + one.result, one.sends[peer]);
                let is_kept = one.root == rank && function == Function::Broadcast;
                let own = if one.root != NO_ROOT && function == Function::Reduce { 0 } else { one.result_bytes };
                let mut written: Vec<(u64, u64)> = (0..ranks as usize)
                    .map(|peer| if is_kept && peer as u32 != rank { keeps(peer) } else { (one.to[peer], one.takes[peer]) })
                    .chain([(one.result, own)])
                    .filter(|(_, length)| *length > 0)
                    .collect();
                written.sort_unstable();
                let mut end = RECV as u64;
                for (start, length) in written {
                    prop_assert_eq!(start, end, "{} on rank {}", function, rank);
                    end += length;
                }
                prop_assert_eq!(end - RECV as u64, expected, "{} on rank {}", function, rank);
            }
        }
    }
}

#[test]
fn what_is_called_most_has_kernels_of_its_own() {
    let name = |work: Work| {
        PeerLaunch::kernels()
            .nth(launched(work).0.kernel)
            .unwrap()
            .to_str()
            .unwrap()
    };
    let all_reduce = |ranks| work(Function::AllReduce, 1 << 20, 0, ranks, 0);
    assert_eq!(name(all_reduce(2)), "ringsight_lines_sum_f32_2");
    assert_eq!(name(all_reduce(8)), "ringsight_lines_sum_f32_8");
    assert_eq!(name(all_reduce(3)), "ringsight_lines_any");
    let half = |data_type| Work {
        data_type,
        ..work(Function::ReduceScatter, 1 << 20, 0, 4, 0)
    };
    assert_eq!(name(half(DataType::Float16)), "ringsight_lines_sum_f16_4");
    assert_eq!(name(half(DataType::Bfloat16)), "ringsight_lines_sum_bf16_4");
    assert_eq!(name(half(DataType::Int32)), "ringsight_lines_any");
    // What may go straight has kernels whose code is longer.
    let straight = |work| Work {
        straight: Straight::Closed,
        ..work
    };
    let gather = |ranks| work(Function::AllGather, 1 << 20, 0, ranks, 0);
    assert_eq!(name(straight(all_reduce(4))), "ringsight_straight_sum_f32_4");
    assert_eq!(name(straight(all_reduce(3))), "ringsight_straight_any");
    assert_eq!(name(straight(gather(4))), "ringsight_straight_words");
    assert_eq!(name(gather(4)), "ringsight_lines_words_4");
    assert_eq!(name(gather(8)), "ringsight_lines_words_8");
    assert_eq!(name(gather(3)), "ringsight_lines_words");
    // An odd number of elements ends within a word, and other ranks' blocks begin there.
    assert_eq!(
        name(work(Function::AllGather, 1 << 20, 0, 2, 0)),
        "ringsight_lines_words"
    );
    assert_eq!(
        name(work(Function::AllGather, 1001, 0, 2, 0)),
        "ringsight_lines_elements"
    );
    let shifted = Work {
        send: SEND + 4,
        ..all_reduce(2)
    };
    assert_eq!(name(shifted), "ringsight_lines_any");
}

/// A GPU stores no words elsewhere than where words begin.
#[test]
fn a_buffer_that_does_not_begin_at_words_is_gone_through_by_elements() {
    for (function, algorithm) in collectives(4) {
        for rank in 0..4 {
            let kernel = |send, recv| {
                let (launch, _) = launched(Work {
                    algorithm,
                    send,
                    recv,
                    ..work(function, 1 << 20, rank, 4, 2)
                });
                PeerLaunch::kernels()
                    .nth(launch.kernel)
                    .unwrap()
                    .to_str()
                    .unwrap()
            };
            let by_words = |kernel: &str| !kernel.ends_with("_elements") && !kernel.ends_with("_any");
            assert!(by_words(kernel(SEND, RECV)), "{function} by {algorithm}");
            let root = rank == 2;
            let sends = root || !matches!(function, Function::Broadcast | Function::Scatter);
            let receives = root || !matches!(function, Function::Reduce | Function::Gather);
            let shifted = [
                (sends, kernel(SEND + 4, RECV)),
                (receives, kernel(SEND, RECV + 4)),
            ];
            for (is_used, kernel) in shifted {
                assert!(
                    !is_used || !by_words(kernel),
                    "{function} by {algorithm} on rank {rank}: {kernel}"
                );
            }
        }
    }
}
