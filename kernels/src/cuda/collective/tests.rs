use std::sync::Arc;

use proptest::prelude::*;
use ringsight_records::{DataType, ReduceOp};

use super::*;
use crate::{
    cuda::{PeerOperation, testing},
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
        zero_copy: ZeroCopy::Off,
        pushes: false,
        connections: Connections::Peers(Arc::new(PeerMemory {
            rank,
            bases: vec![0; ranks as usize],
            max_blocks: 64,
            foreign: 0,
            memory: Box::new(()),
        })),
    }
}

#[test]
fn aligned_buffers_with_a_sum_kernel_are_zero_copy() {
    let all_reduce = |data_type, reduce_op, ranks| Work {
        data_type,
        reduce_op,
        ..work(Function::AllReduce, 1 << 20, 0, ranks, 0)
    };
    for data_type in [DataType::Float32, DataType::Float16, DataType::Bfloat16] {
        for ranks in 2..=8 {
            for reduce_op in [ReduceOp::Sum, ReduceOp::Avg] {
                let sum = all_reduce(data_type, reduce_op, ranks);
                assert_eq!(can_zero_copy(&sum), matches!(ranks, 2 | 4 | 8), "{ranks}");
            }
            assert!(!can_zero_copy(&all_reduce(data_type, ReduceOp::Max, ranks)));
        }
    }
    for reduce_op in [ReduceOp::Sum, ReduceOp::Avg] {
        assert!(!can_zero_copy(&all_reduce(DataType::Int32, reduce_op, 2)));
    }
    // Copies work for any type and number of ranks.
    let mut gather = work(Function::AllGather, 3, 0, 7, 0);
    gather.count = 4;
    assert!(can_zero_copy(&gather));
    gather.recv += 8;
    assert!(
        !can_zero_copy(&gather),
        "a buffer that does not begin at 16 bytes"
    );
}

#[test]
fn short_or_waiting_launches_gain_by_a_graph() {
    let gains = |work: Work, overlaps| launch_of(work).gains_by_graph(overlaps);
    for ranks in [2, 4] {
        // One-shot, then two-shot.
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

/// The same work on a device that runs `max_blocks` blocks side by side.
fn on_device(max_blocks: u32, work: Work) -> Work {
    let peers = work.connections.peers().unwrap();
    let connections = Connections::Peers(Arc::new(PeerMemory {
        rank: peers.rank,
        bases: peers.bases.clone(),
        max_blocks,
        foreign: 0,
        memory: Box::new(()),
    }));
    Work { connections, ..work }
}

fn launch_of(work: Work) -> PeerLaunch {
    testing::launched(vec![work]).unwrap().unwrap().launch
}

fn launched(work: Work) -> (PeerLaunch, Collective) {
    let launch = launch_of(work);
    let PeerArguments::Collective(arguments) = launch.arguments else {
        panic!("another kernel");
    };
    (launch, arguments)
}

/// All collectives among `ranks` ranks, with every algorithm that has a kernel.
fn collectives(ranks: u32) -> impl Iterator<Item = (Function, Algorithm)> {
    let collectives = Function::ALL.iter().filter(|function| !function.is_p2p());
    collectives.flat_map(move |function| {
        let two_shots = has_two_shot(*function, ranks as usize).then_some(Algorithm::TwoShot);
        let direct = (*function != Function::AllReduce).then_some(Algorithm::Direct);
        two_shots
            .into_iter()
            .chain(direct)
            .map(|algorithm| (*function, algorithm))
    })
}

proptest! {
    // Ranks wait for each other: what one sends, the other receives, and all take the same steps.
    #[test]
    fn ranks_agree(count in 1_usize..600_000, ranks in 2_u32..=8, root in 0_u32..8, max_blocks in 1_u32..=140) {
        let root = root % ranks;
        for (function, algorithm) in collectives(ranks) {
            let work = |rank| on_device(max_blocks, Work { algorithm, ..work(function, count, rank, ranks, root) });
            let all: Vec<_> = (0..ranks).map(|rank| launched(work(rank))).collect();
            let (first, steps) = (&all[0].0, (all[0].1.longest_part, all[0].1.chunk));
            for (rank, (launch, one)) in all.iter().enumerate() {
                prop_assert_eq!((launch.blocks, launch.threads), (first.blocks, first.threads));
                prop_assert_eq!(launch.threads, collective_threads(function, algorithm, ranks as usize, false, false));
                prop_assert_eq!((one.longest_part, one.chunk), steps, "{}", function);
                prop_assert!(one.chunk as usize <= chunk_rows(ranks as usize) * ROW_BYTES && one.chunk > 0);
                prop_assert!(launch.blocks as usize * (launch.threads as usize / 32 - 1) <= lanes(ranks as usize));
                prop_assert!(launch.blocks <= max_blocks);
                let zero_copy = |pushes| launched(Work { zero_copy: ZeroCopy::Unreachable, pushes, ..work(rank as u32) });
                for pushes in [false, true] {
                    let (launch, _) = zero_copy(pushes);
                    prop_assert_eq!(launch.threads, collective_threads(function, algorithm, ranks as usize, true, pushes));
                    prop_assert!(launch.blocks as usize <= MAX_ZERO_COPY_BLOCKS && launch.blocks <= max_blocks);
                }
                let (launch, zero_copy) = zero_copy(true);
                prop_assert!(launch.blocks >= first.blocks);
                let most = max_push_chunk(ranks as usize);
                prop_assert!(zero_copy.push_chunk as usize <= most && (zero_copy.push_chunk > 0) == (most > 0));
                prop_assert_eq!(zero_copy.push_chunk, push_chunk(ranks as usize, zero_copy.longest_part as usize, launch.blocks as usize));
                // A whole number of rounds of a block's threads.
                prop_assert_eq!(zero_copy.push_chunk as usize * ranks as usize % (HALF_WARPS * 16 * 512), 0);
                for (peer, (_, other)) in all.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                    // A reduced or forwarded part is as long as its owner's result. Otherwise the receiver says how much it takes.
                    let expected = match (one.reduces, one.forwards) {
                        (0, 1) if peer as u32 != root => 0,
                        (0, 0) => one.takes[peer],
                        _ => one.result_bytes,
                    };
                    prop_assert_eq!(other.sends[rank], expected, "{} from {} to {}", function, peer, rank);
                    prop_assert!(other.sends[rank] <= one.longest_part);
                    if one.forwards == 1 {
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
                // The root of a two-shot Broadcast keeps what it sends. Parts of a two-shot Reduce are stored on the root only.
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
fn frequent_operations_have_specialised_kernels() {
    let name = |work: Work| {
        PeerOperation::kernels()
            .nth(launched(work).0.kernel)
            .unwrap()
            .to_str()
            .unwrap()
    };
    let all_reduce = |ranks| work(Function::AllReduce, 1 << 20, 0, ranks, 0);
    assert_eq!(name(all_reduce(2)), "ringsight_ll128_sum_f32_2");
    assert_eq!(name(all_reduce(8)), "ringsight_ll128_sum_f32_8");
    assert_eq!(name(all_reduce(3)), "ringsight_ll128_any");
    let half = |data_type| Work {
        data_type,
        ..work(Function::ReduceScatter, 1 << 20, 0, 4, 0)
    };
    assert_eq!(name(half(DataType::Float16)), "ringsight_ll128_sum_f16_4");
    assert_eq!(name(half(DataType::Bfloat16)), "ringsight_ll128_sum_bf16_4");
    assert_eq!(name(half(DataType::Int32)), "ringsight_ll128_any");
    // Kernels that may be zero-copy are named differently.
    let zero_copy = |work| Work {
        zero_copy: ZeroCopy::Unreachable,
        ..work
    };
    let gather = |ranks| work(Function::AllGather, 1 << 20, 0, ranks, 0);
    assert_eq!(name(zero_copy(all_reduce(4))), "ringsight_zero_copy_sum_f32_4");
    assert_eq!(name(zero_copy(all_reduce(3))), "ringsight_zero_copy_any");
    assert_eq!(name(zero_copy(gather(4))), "ringsight_zero_copy_words");
    assert_eq!(name(gather(4)), "ringsight_ll128_words_4");
    assert_eq!(name(gather(8)), "ringsight_ll128_words_8");
    assert_eq!(name(gather(3)), "ringsight_ll128_words");
    // An odd number of elements ends within a word, and other ranks' blocks begin there.
    assert_eq!(
        name(work(Function::AllGather, 1 << 20, 0, 2, 0)),
        "ringsight_ll128_words"
    );
    assert_eq!(
        name(work(Function::AllGather, 1001, 0, 2, 0)),
        "ringsight_ll128_elements"
    );
    let shifted = Work {
        send: SEND + 4,
        ..all_reduce(2)
    };
    assert_eq!(name(shifted), "ringsight_ll128_any");
}

/// A GPU stores words only at aligned addresses.
#[test]
fn unaligned_buffers_are_moved_by_elements() {
    for (function, algorithm) in collectives(4) {
        for rank in 0..4 {
            let kernel = |send, recv| {
                let (launch, _) = launched(Work {
                    algorithm,
                    send,
                    recv,
                    ..work(function, 1 << 20, rank, 4, 2)
                });
                PeerOperation::kernels()
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
