//! Ranks as threads of one process: every function, type and shape against a plain reference.

mod common;

use std::{ffi::c_int, sync::Mutex};

use common::{COLLECTIVES, Call, EXACT_TYPES, Rank, encode, host, ok, on_ranks, unique_id};
use ringsight_comm::{abi, communicator::Handle, device::Stream, error::ResultCode};
use ringsight_records::{DataType, Function, ReduceOp};

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
];

/// Counts around what changes the program: one element, fewer than ranks, odd, one slot and more, all channels.
const COUNTS: [usize; 6] = [1, 3, 17, 1000, 40_001, 70_003];

#[test]
fn one_all_reduce() {
    for result in on_ranks(2, |rank| {
        Call::new(Function::AllReduce, 1024).check(&rank, false);
        rank.rank
    })
    .into_iter()
    .enumerate()
    {
        assert_eq!(result.0, result.1);
    }
}

#[test]
fn every_collective_at_every_size() {
    for ranks in [1, 2, 3, 4, 5, 8] {
        on_ranks(ranks, |rank| {
            for function in COLLECTIVES {
                for count in COUNTS {
                    let root = count % ranks;
                    let call = Call {
                        root,
                        ..Call::new(function, count)
                    };
                    for in_place in [false, true] {
                        call.check(&rank, in_place);
                    }
                }
            }
        });
    }
}

#[test]
fn every_type_and_reduction() {
    for ranks in [2, 3] {
        on_ranks(ranks, |rank| {
            for data_type in EXACT_TYPES {
                for op in OPS {
                    for function in [Function::AllReduce, Function::ReduceScatter, Function::Reduce] {
                        Call {
                            data_type,
                            op,
                            root: 1,
                            ..Call::new(function, 1001)
                        }
                        .check(&rank, false);
                    }
                }
                for function in [Function::AllGather, Function::Broadcast] {
                    Call {
                        data_type,
                        ..Call::new(function, 1001)
                    }
                    .check(&rank, true);
                }
            }
        });
    }
}

#[test]
fn empty_operations_do_nothing() {
    on_ranks(2, |rank| {
        let null = (std::ptr::null(), std::ptr::null_mut());
        for function in COLLECTIVES.into_iter().chain([Function::Send, Function::Recv]) {
            ok(rank.call(&Call::new(function, 0), null.0, null.1));
        }
        Call::new(Function::AllReduce, 5).check(&rank, false);
    });
}

fn floats(count: usize, value: impl Fn(usize) -> f32) -> Vec<f32> {
    (0..count).map(value).collect()
}

/// A grouped message to `to` and from `from`, of `count` floats; returns what came.
fn exchange(rank: &Rank, messages: &[(usize, usize, usize)]) -> Vec<Vec<f32>> {
    let sent: Vec<Vec<f32>> = messages
        .iter()
        .map(|(to, _, count)| floats(*count, |i| (rank.rank * 1000 + to * 100 + i % 97) as f32))
        .collect();
    let mut received: Vec<Vec<f32>> = messages.iter().map(|(_, _, count)| vec![-1.0; *count]).collect();
    ok(abi_group_start());
    for (((to, from, count), out), into) in messages.iter().zip(&sent).zip(&mut received) {
        ok(rank.call(
            &Call::peer(Function::Send, *count, *to),
            out.as_ptr().cast(),
            std::ptr::null_mut(),
        ));
        ok(rank.call(
            &Call::peer(Function::Recv, *count, *from),
            std::ptr::null(),
            into.as_mut_ptr().cast(),
        ));
    }
    ok(abi_group_end());
    rank.synchronize();
    received
}

fn abi_group_start() -> ResultCode {
    // SAFETY: no arguments.
    unsafe { abi::ncclGroupStart() }
}

fn abi_group_end() -> ResultCode {
    // SAFETY: no arguments.
    unsafe { abi::ncclGroupEnd() }
}

#[test]
fn a_ring_of_messages() {
    for ranks in [1, 2, 3, 8] {
        on_ranks(ranks, |rank| {
            let (next, prev) = ((rank.rank + 1) % ranks, (rank.rank + ranks - 1) % ranks);
            for count in COUNTS {
                let came = exchange(&rank, &[(next, prev, count)]);
                assert_eq!(
                    came[0],
                    floats(count, |i| (prev * 1000 + rank.rank * 100 + i % 97) as f32)
                );
            }
        });
    }
}

#[test]
fn all_to_all_with_several_messages_a_pair() {
    for ranks in [2, 4] {
        on_ranks(ranks, |rank| {
            // Twice round, to oneself too; the sizes of a pair's messages differ, so order matters.
            let messages: Vec<_> = (0..2 * ranks)
                .map(|i| {
                    let delta = i % ranks;
                    let to = (rank.rank + delta) % ranks;
                    let from = (rank.rank + ranks - delta) % ranks;
                    (to, from, 1000 + 70_000 * (i / ranks) + delta)
                })
                .collect();
            let came = exchange(&rank, &messages);
            for ((_, from, count), data) in messages.iter().zip(came) {
                assert_eq!(
                    data,
                    floats(*count, |i| (from * 1000 + rank.rank * 100 + i % 97) as f32)
                );
            }
        });
    }
}

#[test]
fn messages_without_group_in_opposite_order() {
    on_ranks(2, |rank| {
        let other = 1 - rank.rank;
        let out = floats(100, |i| (rank.rank * 1000 + i) as f32);
        let mut into = vec![0f32; 100];
        let send = Call::peer(Function::Send, 100, other);
        let recv = Call::peer(Function::Recv, 100, other);
        // Small enough for the FIFO: rank 0 sends before rank 1 has asked for anything.
        let calls = if rank.rank == 0 {
            [send, recv]
        } else {
            [recv, send]
        };
        for call in calls {
            ok(rank.call(&call, out.as_ptr().cast(), into.as_mut_ptr().cast()));
        }
        rank.synchronize();
        assert_eq!(into, floats(100, |i| (other * 1000 + i) as f32));
    });
}

#[test]
fn collectives_and_messages_in_one_group() {
    on_ranks(4, |rank| {
        let (next, prev) = ((rank.rank + 1) % 4, (rank.rank + 3) % 4);
        let out = floats(5000, |i| (rank.rank * 7 + i % 13) as f32);
        let (mut sum, mut from_prev, mut all) = (vec![0f32; 5000], vec![0f32; 5000], vec![0f32; 20_000]);
        ok(abi_group_start());
        ok(abi_group_start());
        let (o, s) = (out.as_ptr().cast(), sum.as_mut_ptr().cast());
        ok(rank.call(&Call::peer(Function::Send, 5000, next), o, std::ptr::null_mut()));
        ok(rank.call(&Call::new(Function::AllReduce, 5000), o, s));
        ok(abi_group_end());
        // Rank 0 does not receive in the same order as the others: collectives are drained first everywhere.
        ok(rank.call(
            &Call::peer(Function::Recv, 5000, prev),
            std::ptr::null(),
            from_prev.as_mut_ptr().cast(),
        ));
        ok(rank.call(&Call::new(Function::AllGather, 5000), o, all.as_mut_ptr().cast()));
        ok(abi_group_end());
        rank.synchronize();
        assert_eq!(sum, floats(5000, |i| (42 + 4 * (i % 13)) as f32));
        assert_eq!(from_prev, floats(5000, |i| (prev * 7 + i % 13) as f32));
        assert_eq!(all, floats(20_000, |i| (i / 5000 * 7 + i % 5000 % 13) as f32));
    });
}

#[test]
fn operations_on_two_streams_keep_their_order() {
    on_ranks(2, |rank| {
        let device = host();
        let other = Rank {
            stream: device.stream_create().unwrap(),
            ..rank
        };
        // Each adds up what the one before it on the other stream left.
        let mut data = vec![1f32; 4096];
        let at = data.as_mut_ptr().cast();
        for step in 0..20 {
            let rank = if step % 2 == 0 { &rank } else { &other };
            ok(rank.call(&Call::new(Function::AllReduce, 4096), at, at));
        }
        rank.synchronize();
        other.synchronize();
        device.stream_destroy(other.stream).unwrap();
        assert_eq!(data, vec![(1 << 20) as f32; 4096]);
    });
}

#[test]
fn a_group_over_two_streams_is_complete_on_both() {
    on_ranks(2, |rank| {
        let device = host();
        let other = Rank {
            stream: device.stream_create().unwrap(),
            ..rank
        };
        let (mut a, mut b) = (vec![0f32; 50_000], vec![0f32; 50_000]);
        let (one, two) = (vec![1f32; 50_000], vec![2f32; 50_000]);
        // The input of the second operation is made on its own stream: the group must wait for it.
        let mut input = vec![0f32; 50_000];
        device
            .memcpy(
                input.as_mut_ptr() as usize,
                two.as_ptr() as usize,
                200_000,
                other.stream,
            )
            .unwrap();
        ok(abi_group_start());
        let call = Call::new(Function::AllReduce, 50_000);
        ok(rank.call(&call, one.as_ptr().cast(), a.as_mut_ptr().cast()));
        ok(other.call(&call, input.as_ptr().cast(), b.as_mut_ptr().cast()));
        ok(abi_group_end());
        other.synchronize();
        assert_eq!(b, vec![4f32; 50_000]);
        assert_eq!(
            a,
            vec![2f32; 50_000],
            "the other stream waits for the whole group"
        );
        device.stream_destroy(other.stream).unwrap();
    });
}

#[test]
fn a_captured_step_is_replayed() {
    for ranks in [1, 3] {
        on_ranks(ranks, |rank| {
            let device = host();
            let next = (rank.rank + 1) % ranks;
            let prev = (rank.rank + ranks - 1) % ranks;
            let mut data = vec![0f32; 10_000];
            let (mut sum, mut from) = (vec![0f32; 10_000], vec![0f32; 10_000]);
            let (d, s, f) = (
                data.as_mut_ptr().cast(),
                sum.as_mut_ptr().cast(),
                from.as_mut_ptr().cast(),
            );
            device.capture_begin(rank.stream).unwrap();
            ok(rank.call(&Call::new(Function::AllReduce, 10_000), d, s));
            ok(abi_group_start());
            ok(rank.call(&Call::peer(Function::Send, 10_000, next), s, std::ptr::null_mut()));
            ok(rank.call(&Call::peer(Function::Recv, 10_000, prev), std::ptr::null(), f));
            ok(abi_group_end());
            let graph = device.capture_end(rank.stream).unwrap();
            let exec = device.graph_instantiate(graph).unwrap();
            device.graph_destroy(graph).unwrap();
            for replay in 0..50 {
                data.fill(replay as f32);
                device.graph_launch(exec, rank.stream).unwrap();
                rank.synchronize();
                let expected = vec![(replay * ranks) as f32; 10_000];
                assert!(sum == expected && from == expected, "replay {replay}");
                // Eager work between replays.
                Call::new(Function::AllGather, 100).check(&rank, false);
            }
            device.graph_exec_destroy(exec).unwrap();
        });
    }
}

#[test]
fn one_thread_holds_all_ranks() {
    host();
    const RANKS: usize = 4;
    let mut comms = [Handle(0); RANKS];
    // SAFETY: as many places as ranks.
    ok(unsafe { abi::ncclCommInitAll(comms.as_mut_ptr(), RANKS as c_int, std::ptr::null()) });
    let device = host();
    let ranks: Vec<Rank> = comms
        .iter()
        .enumerate()
        .map(|(rank, comm)| {
            let (mut count, mut number, mut at) = (0, -1, -1);
            // SAFETY: valid places.
            unsafe {
                ok(abi::ncclCommCount(*comm, &raw mut count));
                ok(abi::ncclCommUserRank(*comm, &raw mut number));
                ok(abi::ncclCommCuDevice(*comm, &raw mut at));
            }
            assert_eq!(
                (count, number, at),
                (RANKS as c_int, rank as c_int, rank as c_int)
            );
            Rank {
                comm: *comm,
                rank,
                ranks: RANKS,
                stream: device.stream_create().unwrap(),
            }
        })
        .collect();
    let inputs: Vec<Vec<f32>> = (0..RANKS).map(|rank| vec![rank as f32; 100_000]).collect();
    let mut outputs = vec![vec![0f32; 100_000]; RANKS];
    for _ in 0..10 {
        ok(abi_group_start());
        for ((rank, input), output) in ranks.iter().zip(&inputs).zip(&mut outputs) {
            let call = Call::new(Function::AllReduce, 100_000);
            ok(rank.call(&call, input.as_ptr().cast(), output.as_mut_ptr().cast()));
        }
        ok(abi_group_end());
        for rank in &ranks {
            rank.synchronize();
        }
        for output in &mut outputs {
            assert_eq!(*output, vec![6f32; 100_000]);
            output.fill(0.0);
        }
    }
    for rank in ranks {
        rank.leave();
    }
}

#[test]
fn ranks_are_made_in_a_group() {
    host();
    let id = unique_id();
    let mut comms = [Handle(0); 3];
    ok(abi_group_start());
    for (rank, comm) in comms.iter_mut().enumerate() {
        // SAFETY: valid until the group ends.
        ok(unsafe { abi::ncclCommInitRank(&raw mut *comm, 3, id, rank as c_int) });
    }
    ok(abi_group_end());
    for comm in comms {
        assert_ne!(comm, Handle(0));
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommDestroy(comm) });
    }
}

#[test]
fn the_default_stream_works() {
    on_ranks(2, |rank| {
        let rank = Rank {
            stream: Stream(0),
            ..rank
        };
        Call {
            data_type: DataType::Int64,
            ..Call::new(Function::AllReduce, 999)
        }
        .check(&rank, true);
    });
}

#[test]
fn results_are_the_same_bit_by_bit_on_all_ranks_and_each_time() {
    let results = Mutex::new(Vec::new());
    for _ in 0..3 {
        on_ranks(5, |rank| {
            let count = 123_457;
            let input = floats(count, |i| ((rank.rank * 31 + i * 17) % 1009) as f32 / 7.0);
            let mut output = vec![0f32; count];
            let call = Call::new(Function::AllReduce, count);
            ok(rank.call(&call, input.as_ptr().cast(), output.as_mut_ptr().cast()));
            rank.synchronize();
            let bits: Vec<u32> = output.iter().map(|value| value.to_bits()).collect();
            results.lock().unwrap().push(bits);
        });
    }
    let results = results.into_inner().unwrap();
    assert_eq!(results.len(), 15);
    assert!(results.iter().all(|bits| *bits == results[0]));
}

#[test]
fn encoded_numbers_are_what_they_say() {
    assert_eq!(encode(DataType::Float16, 1), 0x3c00u16.to_ne_bytes());
    assert_eq!(encode(DataType::Float16, 256), 0x5c00u16.to_ne_bytes());
    assert_eq!(encode(DataType::Bfloat16, 1), 0x3f80u16.to_ne_bytes());
}
