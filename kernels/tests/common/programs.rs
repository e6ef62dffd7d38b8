//! Channel programs: threads as ranks over FIFOs on the heap, every function against a plain reference.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ops::Range,
    sync::{Arc, Mutex},
    thread,
};

use ringsight_kernels::{AbortWord, ChannelWork, Connections, Fifo, Launch, Observer, Scalar, Steps, Work};
use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::{run, runs};

/// Heap memory for a FIFO.
struct Heap(*mut u8, Layout);
// SAFETY: only an address that is freed once.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}
impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `fifo` with this layout.
        unsafe { dealloc(self.0, self.1) };
    }
}

pub(crate) fn fifo(slot_bytes: usize) -> Arc<Fifo> {
    let layout = Layout::from_size_align(Fifo::memory_bytes(slot_bytes), 4096).unwrap();
    // SAFETY: the layout is not empty.
    let base = unsafe { alloc_zeroed(layout) };
    // SAFETY: aligned, zeroed, and freed by the last owner of `Heap`.
    Arc::new(unsafe { Fifo::new(base, slot_bytes, Arc::new(Heap(base, layout))) })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Started(u32, u32, u8),
    Stopped(u32, u32, u8, bool),
    Mismatch(u32, u32, u8, u32),
    Finished(u32, bool),
}

#[derive(Default)]
pub(crate) struct Log(Mutex<Vec<Seen>>);
impl Observer for Log {
    fn channel_started(&self, op: u32, replay: u32, channel: u8) {
        self.0.lock().unwrap().push(Seen::Started(op, replay, channel));
    }
    fn channel_stopped(&self, op: u32, replay: u32, channel: u8, aborted: bool) {
        self.0
            .lock()
            .unwrap()
            .push(Seen::Stopped(op, replay, channel, aborted));
    }
    fn mismatch(&self, op: u32, replay: u32, channel: u8, theirs: u32) {
        self.0
            .lock()
            .unwrap()
            .push(Seen::Mismatch(op, replay, channel, theirs));
    }
    fn launch_finished(&self, replay: u32, aborted: bool) {
        self.0.lock().unwrap().push(Seen::Finished(replay, aborted));
    }
}

/// A ring through `members` on one channel: `(order, prev, next)` of each, in the order of `members`.
fn ring(members: &[u32], slot_bytes: usize) -> Vec<Connections> {
    let n = members.len();
    let fifos: Vec<_> = (0..n).map(|_| fifo(slot_bytes)).collect();
    (0..n)
        .map(|at| Connections::Ring {
            order: (0..n).map(|hop| members[(at + hop) % n]).collect(),
            prev: fifos[(at + n - 1) % n].clone(),
            next: fifos[at].clone(),
        })
        .collect()
}

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

fn parts(count: usize, channels: usize) -> Vec<Range<usize>> {
    // Unequal on purpose: the last channel takes what is left.
    let each = count / channels;
    (0..channels)
        .map(|c| c * each..if c + 1 == channels { count } else { (c + 1) * each })
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
                    .zip(parts(count, channels))
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
fn every_rank_gets_the_same_float_bits() {
    for (algorithm, count) in [(Algorithm::Ring, 3001), (Algorithm::OneShot, 127)] {
        if runs(algorithm) {
            same_float_bits(algorithm, count);
        }
    }
}

fn same_float_bits(algorithm: Algorithm, count: usize) {
    let ranks = 5;
    let mut connections: Vec<_> = ring(&[3, 0, 4, 1, 2], 512).into_iter().map(Some).collect();
    let threads: Vec<_> = [3_u32, 0, 4, 1, 2]
        .into_iter()
        .enumerate()
        .map(|(at, rank)| {
            let connections = connections[at].take().unwrap();
            thread::spawn(move || {
                let mut data: Vec<f32> = (0..count)
                    .map(|i| ((i * 37 + rank as usize * 11) % 1013) as f32 * 1.1e-3 + 1e4)
                    .collect();
                let address = data.as_mut_ptr() as usize;
                let work = Work {
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
                    part: 0..count,
                    rank,
                    ranks,
                    root: 0,
                    connections,
                };
                let channels = vec![ChannelWork {
                    channel: 0,
                    work: vec![work],
                }];
                run(
                    &Launch {
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
    let results: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    assert!((f32::from_bits(results[0][0]) - 1e4).abs() < 2.0);
}

pub(crate) fn p2p(
    op: u32,
    function: Function,
    address: usize,
    count: usize,
    connections: Connections,
) -> Work {
    let (send, recv) = if function == Function::Send {
        (address, 0)
    } else {
        (0, address)
    };
    Work {
        op,
        tag: 3,
        function,
        algorithm: Algorithm::Direct,
        data_type: DataType::Uint8,
        reduce_op: ReduceOp::None,
        scalar: Scalar::None,
        send,
        recv,
        count,
        part: 0..count,
        rank: 0,
        ranks: 4,
        root: 0,
        connections,
    }
}

/// All to all with every rank listing its receives first: none of them may wait for another.
#[test]
fn sends_and_receives_run_side_by_side() {
    const RANKS: usize = 4;
    let bytes = 50_000;
    let fifos: Vec<Vec<_>> = (0..RANKS)
        .map(|_| (0..RANKS).map(|_| fifo(512)).collect())
        .collect();
    let threads: Vec<_> = (0..RANKS)
        .map(|rank| {
            let fifos = fifos.clone();
            thread::spawn(move || {
                let send: Vec<Vec<u8>> = (0..RANKS)
                    .map(|to| (0..bytes).map(|i| (i * 3 + rank * 7 + to) as u8).collect())
                    .collect();
                let mut recv = vec![vec![0_u8; bytes]; RANKS];
                let mut work = Vec::new();
                for from in (0..RANKS).filter(|&from| from != rank) {
                    let to = recv[from].as_mut_ptr() as usize;
                    let connection = Connections::Recv(fifos[from][rank].clone());
                    work.push(p2p(from as u32, Function::Recv, to, bytes, connection));
                }
                for to in (0..RANKS).filter(|&to| to != rank) {
                    let connection = Connections::Send(fifos[rank][to].clone());
                    let from = send[to].as_ptr() as usize;
                    work.push(p2p(10 + to as u32, Function::Send, from, bytes, connection));
                }
                let own = Work {
                    recv: recv[rank].as_mut_ptr() as usize,
                    ..p2p(
                        20,
                        Function::Send,
                        send[rank].as_ptr() as usize,
                        bytes,
                        Connections::Local,
                    )
                };
                work.push(own);
                let log = Arc::new(Log::default());
                let channels = vec![ChannelWork { channel: 2, work }];
                run(
                    &Launch {
                        channels,
                        abort: Arc::default(),
                        observer: log.clone(),
                    },
                    0,
                );
                assert_eq!(log.0.lock().unwrap().len(), 2 * 7 + 1);
                for (from, got) in recv.iter().enumerate() {
                    assert!(
                        got.iter()
                            .enumerate()
                            .all(|(i, &b)| b == (i * 3 + from * 7 + rank) as u8)
                    );
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
}

/// Two messages to one peer share a FIFO and must arrive in order.
#[test]
fn messages_of_one_pair_keep_their_order() {
    let wire = fifo(64);
    let sender = {
        let wire = wire.clone();
        thread::spawn(move || {
            let (first, second) = (vec![1_u8; 1000], vec![2_u8; 77]);
            let work = vec![
                p2p(
                    0,
                    Function::Send,
                    first.as_ptr() as usize,
                    1000,
                    Connections::Send(wire.clone()),
                ),
                p2p(
                    1,
                    Function::Send,
                    second.as_ptr() as usize,
                    77,
                    Connections::Send(wire),
                ),
            ];
            assert_eq!(work[0].steps(), Steps { send: 16, recv: 0 });
            assert_eq!(work[1].steps(), Steps { send: 2, recv: 0 });
            let channels = vec![ChannelWork { channel: 0, work }];
            run(
                &Launch {
                    channels,
                    abort: Arc::default(),
                    observer: Arc::new(Log::default()),
                },
                0,
            );
        })
    };
    let (mut first, mut second) = (vec![0_u8; 1000], vec![0_u8; 77]);
    let work = vec![
        p2p(
            0,
            Function::Recv,
            first.as_mut_ptr() as usize,
            1000,
            Connections::Recv(wire.clone()),
        ),
        p2p(
            1,
            Function::Recv,
            second.as_mut_ptr() as usize,
            77,
            Connections::Recv(wire),
        ),
    ];
    let channels = vec![ChannelWork { channel: 0, work }];
    run(
        &Launch {
            channels,
            abort: Arc::default(),
            observer: Arc::new(Log::default()),
        },
        0,
    );
    sender.join().unwrap();
    assert!(first.iter().all(|&b| b == 1) && second.iter().all(|&b| b == 2));
}

#[test]
fn one_rank_copies_and_empty_work_is_done_at_once() {
    let send: Vec<u8> = (0..3_000_000).map(|i| i as u8).collect();
    let mut recv = vec![0_u8; send.len()];
    let mut work = p2p(
        1,
        Function::Send,
        send.as_ptr() as usize,
        send.len(),
        Connections::Local,
    );
    (work.function, work.ranks, work.recv) = (Function::AllReduce, 1, recv.as_mut_ptr() as usize);
    work.reduce_op = ReduceOp::Sum;
    work.check().unwrap();
    assert_eq!(work.steps(), Steps::default());
    let empty = p2p(2, Function::Recv, 0, 0, Connections::Recv(fifo(64)));
    assert_eq!(empty.steps(), Steps::default());
    let log = Arc::new(Log::default());
    let channels = vec![ChannelWork {
        channel: 0,
        work: vec![work, empty],
    }];
    run(
        &Launch {
            channels,
            abort: Arc::default(),
            observer: log.clone(),
        },
        0,
    );
    assert!(send == recv);
    let seen = log.0.lock().unwrap().clone();
    assert_eq!(
        seen,
        [
            Seen::Started(1, 0, 0),
            Seen::Stopped(1, 0, 0, false),
            Seen::Started(2, 0, 0),
            Seen::Stopped(2, 0, 0, false),
            Seen::Finished(0, false)
        ]
    );
}

/// A receive whose peer never comes is released by the abort word; what was finished stays finished.
#[test]
fn abort_releases_a_wait() {
    let abort = Arc::new(AbortWord::default());
    let log = Arc::new(Log::default());
    let mut buffer = vec![0_u8; 100];
    let copy = Work {
        send: buffer.as_ptr() as usize,
        recv: buffer.as_mut_ptr() as usize,
        ..p2p(1, Function::Broadcast, 0, 100, Connections::Local)
    };
    let work = vec![
        copy,
        p2p(
            2,
            Function::Recv,
            buffer.as_mut_ptr() as usize,
            100,
            Connections::Recv(fifo(64)),
        ),
    ];
    let launch = Launch {
        channels: vec![ChannelWork { channel: 1, work }],
        abort: abort.clone(),
        observer: log.clone(),
    };
    let aborter = thread::spawn({
        let log = log.clone();
        move || {
            while !log.0.lock().unwrap().contains(&Seen::Started(2, 9, 1)) {
                thread::yield_now();
            }
            abort.set();
        }
    });
    run(&launch, 9);
    aborter.join().unwrap();
    let seen = log.0.lock().unwrap().clone();
    assert_eq!(
        seen,
        [
            Seen::Started(1, 9, 1),
            Seen::Stopped(1, 9, 1, false),
            Seen::Started(2, 9, 1),
            Seen::Stopped(2, 9, 1, true),
            Seen::Finished(9, true)
        ]
    );
}

#[test]
fn what_cannot_run_is_refused_with_a_reason() {
    let good = || {
        let connections = ring(&[0, 1, 2], 64).remove(0);
        Work {
            ranks: 3,
            algorithm: Algorithm::Ring,
            ..p2p(4, Function::AllGather, 0, 10, connections)
        }
    };
    good().check().unwrap();
    let refused = |work: Work| work.check().unwrap_err().to_string();
    assert!(
        refused(Work {
            function: Function::AlltoAll,
            ..good()
        })
        .contains("no ring program")
    );
    assert!(
        refused(Work {
            function: Function::AllReduce,
            ..good()
        })
        .contains("no none reduction")
    );
    assert!(
        refused(Work {
            part: 3..11,
            ..good()
        })
        .contains("part 3..11")
    );
    assert!(refused(Work { rank: 1, ..good() }).contains("rank 1 first"));
    assert!(refused(Work { root: 3, ..good() }).contains("root 3"));
    assert!(
        refused(Work {
            connections: Connections::Send(fifo(64)),
            ..good()
        })
        .contains("needs a ring")
    );
    assert!(
        refused(Work {
            algorithm: Algorithm::Tree,
            ..good()
        })
        .contains("no tree program round a ring")
    );
    let ring_of_two = p2p(0, Function::Send, 0, 10, Connections::Send(fifo(64)));
    assert!(
        refused(Work {
            algorithm: Algorithm::Ring,
            ..ring_of_two
        })
        .contains("no ring program between two")
    );
    let one_shot = || Work {
        function: Function::AllReduce,
        reduce_op: ReduceOp::Sum,
        algorithm: Algorithm::OneShot,
        ..good()
    };
    one_shot().check().unwrap();
    assert!(
        refused(Work {
            function: Function::ReduceScatter,
            ..one_shot()
        })
        .contains("no one_shot program")
    );
    assert!(
        refused(Work {
            reduce_op: ReduceOp::PreMulSum,
            scalar: Scalar::Immediate(2),
            ..one_shot()
        })
        .contains("each rank's factor")
    );
    assert!(
        refused(Work {
            count: 65,
            part: 0..65,
            ..one_shot()
        })
        .contains("65 bytes for a one_shot program of slots of 64")
    );
    let mut odd = good();
    if let Connections::Ring { prev, .. } = &mut odd.connections {
        *prev = fifo(128);
    }
    assert!(refused(odd).contains("slots of a ring differ"));
}

/// A rank that finds a slot of another operation says so once, moves nothing more and waits to be aborted.
#[test]
fn a_slot_of_another_operation_is_reported_and_left_alone() {
    let (wire, other) = (fifo(64), fifo(64));
    wire.post(0, 0, 8);
    let (abort, log) = (Arc::new(AbortWord::default()), Arc::new(Log::default()));
    let mut buffer = vec![7_u8; 100];
    let at = buffer.as_mut_ptr() as usize;
    let launch = Launch {
        channels: vec![ChannelWork {
            channel: 1,
            work: vec![
                p2p(2, Function::Recv, at, 100, Connections::Recv(wire.clone())),
                p2p(4, Function::Send, at, 100, Connections::Send(other.clone())),
            ],
        }],
        abort: abort.clone(),
        observer: log.clone(),
    };
    let kernel = thread::spawn(move || run(&launch, 9));
    while !log.0.lock().unwrap().contains(&Seen::Mismatch(2, 9, 1, 8)) {
        thread::yield_now();
    }
    abort.set();
    kernel.join().unwrap();
    let seen = log.0.lock().unwrap().clone();
    assert_eq!(
        seen,
        [
            Seen::Started(2, 9, 1),
            Seen::Mismatch(2, 9, 1, 8),
            Seen::Stopped(2, 9, 1, true),
            Seen::Finished(9, true)
        ]
    );
    assert_eq!((wire.released(), buffer), (0, vec![7; 100]));
    assert!(other.posted().is_none(), "something moved on");
}
