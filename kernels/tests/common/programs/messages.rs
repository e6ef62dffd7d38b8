//! Sends, receives and copies.

use std::{sync::Arc, thread};

use ringsight_kernels::{ChannelWork, Connections, Launch, Steps, Work};
use ringsight_records::{Function, ReduceOp};

use super::{Log, Seen, fifo, p2p, run};

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
                        peers: None,
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
                    peers: None,
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
            peers: None,
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
            peers: None,
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
