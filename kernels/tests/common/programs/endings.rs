//! Launches that do not come to their end.

use std::{sync::Arc, thread};

use ringsight_kernels::{AbortWord, ChannelWork, Connections, Launch, Work};
use ringsight_records::Function;

use super::{Log, Seen, fifo, p2p, run};

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
        peers: None,
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

/// A rank that finds a slot of another operation says so once, moves nothing more and waits to be aborted.
#[test]
fn a_slot_of_another_operation_is_reported_and_left_alone() {
    let (wire, other) = (fifo(64), fifo(64));
    wire.post(0, 0, 8);
    let (abort, log) = (Arc::new(AbortWord::default()), Arc::new(Log::default()));
    let mut buffer = vec![7_u8; 100];
    let at = buffer.as_mut_ptr() as usize;
    let launch = Launch {
        peers: None,
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
