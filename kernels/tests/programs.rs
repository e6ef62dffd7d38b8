//! The programs of the host device.

#[path = "common/programs/mod.rs"]
mod cases;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ringsight_kernels::{
    ChannelWork, Connections, Launch,
    host::{run, runs},
};
use ringsight_records::Function;

/// CPU time of the calling thread.
fn thread_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

#[test]
fn waiting_for_a_late_peer_costs_little() {
    let wire = cases::fifo(64);
    let late = Duration::from_millis(80);
    // Before the other thread begins to be late.
    let wall = Instant::now();
    let sender = thread::spawn({
        let wire = wire.clone();
        move || {
            thread::sleep(late);
            let position = wire.free().unwrap();
            wire.post(position, 10, 3);
        }
    });
    let mut buffer = vec![0_u8; 10];
    let work = vec![cases::p2p(
        0,
        Function::Recv,
        buffer.as_mut_ptr() as usize,
        10,
        Connections::Recv(wire),
    )];
    let channels = vec![ChannelWork { channel: 0, work }];
    let cpu = thread_cpu();
    run(
        &Launch {
            peers: None,
            channels,
            abort: Arc::default(),
            observer: Arc::new(cases::Log::default()),
        },
        0,
    );
    let (used, waited) = (thread_cpu() - cpu, wall.elapsed());
    sender.join().unwrap();
    println!("{used:?} of CPU time for a wait of {late:?}");
    assert!(waited >= late, "{waited:?}");
    assert!(used < late / 4, "{used:?} of CPU time for a wait of {late:?}");
}
