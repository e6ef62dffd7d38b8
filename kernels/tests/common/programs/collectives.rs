//! Collectives against a plain reference.

use std::{ops::Range, sync::Arc, thread};

use ringsight_kernels::{
    ChannelWork, Connections, Fifo, Launch, Scalar, Work, ZeroCopy, schedule::divisible,
};
use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::{Log, Seen, ring, run, runs};

#[derive(Clone, Copy)]
struct Case {
    function: Function,
    algorithm: Algorithm,
    reduce_op: ReduceOp,
    ranks: usize,
    count: usize,
    channels: usize,
    slot_bytes: usize,
    in_place: bool,
    root: usize,
}

/// Parts of the elements that channels divide among themselves.
fn parts(elements: usize, channels: usize) -> Vec<Range<usize>> {
    // Unequal on purpose: the last channel takes what is left.
    let each = elements / channels;
    (0..channels)
        .map(|c| {
            c * each..if c + 1 == channels {
                elements
            } else {
                (c + 1) * each
            }
        })
        .collect()
}

fn value(rank: usize, at: usize) -> i32 {
    (rank as i32 + 1) * 1_000_003 + (at as i32).wrapping_mul(7919)
}

/// Runs a ring collective on `i32` with a thread per rank; returns each rank's receive buffer and checks that the
/// FIFOs moved exactly what `Work::steps` said.
fn collective(case: Case) -> Vec<Vec<i32>> {
    let Case {
        function,
        algorithm,
        reduce_op,
        ranks,
        count,
        channels,
        slot_bytes,
        in_place,
        root,
    } = case;
    let (sends, receives) = match function {
        Function::AllGather => (count, count * ranks),
        Function::ReduceScatter => (count * ranks, count),
        _ => (count, count),
    };
    let elements = divisible(function, algorithm, DataType::Int32, count, ranks as u32);
    // Each channel its own ring order: rotated and, on odd channels, reversed.
    let mut rings: Vec<Vec<Option<Connections>>> = Vec::new();
    for channel in 0..channels {
        let mut members: Vec<u32> = (0..ranks as u32).collect();
        if channel % 2 == 1 {
            members.reverse();
        }
        members.rotate_left(channel % ranks);
        let mut by_rank: Vec<Option<Connections>> = (0..ranks).map(|_| None).collect();
        for (member, connections) in members.iter().zip(ring(&members, slot_bytes)) {
            by_rank[*member as usize] = Some(connections);
        }
        rings.push(by_rank);
    }
    let threads: Vec<_> = (0..ranks)
        .map(|rank| {
            let connections: Vec<_> = rings.iter_mut().map(|ring| ring[rank].take().unwrap()).collect();
            thread::spawn(move || {
                let send: Vec<i32> = (0..sends).map(|at| value(rank, at)).collect();
                // In place: one buffer, the smaller of the two at its place in the larger.
                let mut memory = vec![0_i32; receives];
                let (send_address, recv_address);
                let mut whole = send.clone();
                if in_place {
                    match function {
                        Function::AllGather => {
                            memory[rank * count..(rank + 1) * count].copy_from_slice(&send);
                            recv_address = memory.as_mut_ptr() as usize;
                            send_address = recv_address + rank * count * 4;
                        }
                        Function::ReduceScatter => {
                            send_address = whole.as_mut_ptr() as usize;
                            recv_address = send_address + rank * count * 4;
                        }
                        _ => {
                            memory.copy_from_slice(&send);
                            recv_address = memory.as_mut_ptr() as usize;
                            send_address = recv_address;
                        }
                    }
                } else {
                    send_address = whole.as_mut_ptr() as usize;
                    recv_address = memory.as_mut_ptr() as usize;
                }
                let mut expected = Vec::new();
                let work = connections
                    .into_iter()
                    .zip(parts(elements, channels))
                    .enumerate()
                    .map(|(channel, (connections, part))| {
                        let Connections::Ring { prev, next, .. } = &connections else {
                            unreachable!()
                        };
                        let ends = (prev.clone(), next.clone());
                        let work = Work {
                            op: 5,
                            tag: 3,
                            function,
                            algorithm,
                            data_type: DataType::Int32,
                            reduce_op,
                            scalar: Scalar::None,
                            send: send_address,
                            recv: recv_address,
                            count,
                            part,
                            rank: rank as u32,
                            ranks: ranks as u32,
                            root: root as u32,
                            connections,
                            zero_copy: ZeroCopy::Off,
                            pushes: false,
                        };
                        work.check().unwrap();
                        expected.push((work.steps(), ends));
                        ChannelWork {
                            channel: channel as u8,
                            work: vec![work],
                        }
                    })
                    .collect();
                let log = Arc::new(Log::default());
                let launch = Launch {
                    peers: None,
                    channels: work,
                    abort: Arc::default(),
                    observer: log.clone(),
                };
                run(&launch, 3);
                check_log(&log, channels);
                for (steps, (prev, _)) in &expected {
                    assert_eq!(prev.released(), u64::from(steps.recv), "slots consumed");
                }
                let posted: Vec<(u32, Arc<Fifo>)> = expected
                    .into_iter()
                    .map(|(steps, (_, next))| (steps.send, next))
                    .collect();
                let result = if in_place && function == Function::ReduceScatter {
                    whole[rank * count..(rank + 1) * count].to_vec()
                } else {
                    memory
                };
                (result, posted)
            })
        })
        .collect();
    threads
        .into_iter()
        .map(|thread| {
            let (result, posted) = thread.join().unwrap();
            (result, posted)
        })
        // All threads are joined before the sender's counts are compared with what receivers released.
        .collect::<Vec<_>>()
        .into_iter()
        .map(|(result, posted)| {
            for (steps, next) in posted {
                assert_eq!(next.released(), u64::from(steps), "slots posted");
                assert!(next.posted().is_none(), "a slot was left over");
            }
            result
        })
        .collect()
}

fn check_log(log: &Log, channels: usize) {
    let seen = log.0.lock().unwrap();
    assert_eq!(seen.last(), Some(&Seen::Finished(3, false)));
    assert_eq!(seen.len(), 2 * channels + 1);
    for channel in 0..channels as u8 {
        let at = |what| seen.iter().position(|s| *s == what).unwrap();
        assert!(at(Seen::Started(5, 3, channel)) < at(Seen::Stopped(5, 3, channel, false)));
    }
}

fn reduced(op: ReduceOp, ranks: usize, at: usize) -> i32 {
    let values = (0..ranks).map(|rank| value(rank, at));
    match op {
        ReduceOp::Sum => values.fold(0, i32::wrapping_add),
        ReduceOp::Max => values.max().unwrap(),
        ReduceOp::Avg => (i64::from(values.fold(0, i32::wrapping_add)) / ranks as i64) as i32,
        _ => unreachable!(),
    }
}

fn check(case: Case) {
    let Case {
        function,
        reduce_op,
        ranks,
        count,
        root,
        ..
    } = case;
    for (rank, got) in collective(case).into_iter().enumerate() {
        let want: Vec<i32> = match function {
            Function::AllReduce => (0..count).map(|at| reduced(reduce_op, ranks, at)).collect(),
            Function::ReduceScatter => (0..count)
                .map(|at| reduced(reduce_op, ranks, rank * count + at))
                .collect(),
            Function::AllGather => (0..ranks * count)
                .map(|at| value(at / count, at % count))
                .collect(),
            Function::Broadcast => (0..count).map(|at| value(root, at)).collect(),
            Function::Reduce if rank == root => (0..count).map(|at| reduced(reduce_op, ranks, at)).collect(),
            Function::Reduce => continue,
            _ => unreachable!(),
        };
        assert!(
            got == want,
            "{function} {reduce_op} rank {rank} of {ranks}, {count} elements"
        );
    }
}

#[test]
fn collectives_match_the_reference() {
    use Algorithm::{OneShot, Ring};
    let cases = [
        (Function::AllReduce, Ring, ReduceOp::Sum),
        (Function::AllReduce, Ring, ReduceOp::Avg),
        (Function::AllReduce, OneShot, ReduceOp::Sum),
        (Function::AllReduce, OneShot, ReduceOp::Avg),
        (Function::AllGather, Ring, ReduceOp::None),
        (Function::ReduceScatter, Ring, ReduceOp::Max),
        (Function::ReduceScatter, Ring, ReduceOp::Avg),
        (Function::Broadcast, Ring, ReduceOp::None),
        (Function::Reduce, Ring, ReduceOp::Sum),
    ];
    for (function, algorithm, reduce_op) in cases.into_iter().filter(|case| runs(case.1)) {
        for ranks in [2, 3, 5, 8] {
            for (count, channels, slot_bytes) in [
                (1, 1, 64),
                (7, 2, 64),
                (150, 3, 256),
                (1000, 3, 256),
                (2047, 2, 4096),
                (4099, 2, 4096),
                (20_011, 1, 1000),
            ] {
                let fits = parts(count, channels)
                    .iter()
                    .all(|part| part.len() * 4 <= slot_bytes);
                if algorithm == OneShot && !fits {
                    continue;
                }
                for in_place in [false, true] {
                    let root = count % ranks;
                    check(Case {
                        function,
                        algorithm,
                        reduce_op,
                        ranks,
                        count,
                        channels,
                        slot_bytes,
                        in_place,
                        root,
                    });
                }
            }
        }
    }
}

#[test]
fn every_rank_gets_the_same_float_bits_however_many_channels_there_are() {
    for (algorithm, count) in [
        (Algorithm::Ring, 3001),
        (Algorithm::Ring, 33),
        (Algorithm::OneShot, 127),
    ] {
        if runs(algorithm) {
            let one = same_float_bits(algorithm, count, 1, 512);
            assert_eq!(
                one,
                same_float_bits(algorithm, count, 3, 512),
                "{algorithm}: 3 channels"
            );
            assert_eq!(
                one,
                same_float_bits(algorithm, count, 2, 1024),
                "{algorithm}: longer slots"
            );
        }
    }
}

/// The bits of an all_reduce, which are the same on all ranks; all channels' rings have one order.
fn same_float_bits(algorithm: Algorithm, count: usize, channels: usize, slot_bytes: usize) -> Vec<u32> {
    let ranks = 5;
    let members = [3_u32, 0, 4, 1, 2];
    let mut rings: Vec<_> = (0..channels)
        .map(|_| ring(&members, slot_bytes).into_iter())
        .collect();
    let elements = divisible(
        Function::AllReduce,
        algorithm,
        DataType::Float32,
        count,
        members.len() as u32,
    );
    let threads: Vec<_> = members
        .into_iter()
        .map(|rank| {
            let connections: Vec<_> = rings.iter_mut().map(|ring| ring.next().unwrap()).collect();
            thread::spawn(move || {
                let mut data: Vec<f32> = (0..count)
                    .map(|i| ((i * 37 + rank as usize * 11) % 1013) as f32 * 1.1e-3 + 1e4)
                    .collect();
                let address = data.as_mut_ptr() as usize;
                let channels = (0..)
                    .zip(connections.into_iter().zip(parts(elements, channels)))
                    .map(|(channel, (connections, part))| ChannelWork {
                        channel,
                        work: vec![Work {
                            op: 1,
                            tag: 3,
                            function: Function::AllReduce,
                            algorithm,
                            data_type: DataType::Float32,
                            reduce_op: ReduceOp::Avg,
                            scalar: Scalar::None,
                            send: address,
                            recv: address,
                            count,
                            part,
                            rank,
                            ranks,
                            root: 0,
                            connections,
                            zero_copy: ZeroCopy::Off,
                            pushes: false,
                        }],
                    })
                    .collect();
                run(
                    &Launch {
                        peers: None,
                        channels,
                        abort: Arc::default(),
                        observer: Arc::new(Log::default()),
                    },
                    0,
                );
                data.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            })
        })
        .collect();
    let mut results: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    assert!((f32::from_bits(results[0][0]) - 1e4).abs() < 2.0);
    results.swap_remove(0)
}
