//! Replays between processes and nodes.

use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
};

use ringsight_comm::{communicator::lookup, error::ResultCode};
use ringsight_records::Function;

use crate::common::{
    Call, Rank,
    graphs::{COUNT, add_up, captured, on, unordered_streams},
    host, last_error, ok,
    processes::rank_of_process,
    state,
};

/// One of two ranks, by processes.
pub(crate) fn replays() {
    let rank = rank_of_process();
    unordered_streams(&rank);
    overtaken(&rank);
    sent_and_gone(&rank);
    rank.leave();
}

/// A graph whose replays end before the network work that they ask for is looked at: it is moved though the graph is gone.
fn sent_and_gone(rank: &Rank) {
    const REPLAYS: usize = 200;
    let device = host();
    let peer = 1 - rank.rank;
    let mut data = [rank.rank as f32 + 5.0; 3];
    for _ in 0..3 {
        let exec = captured(rank.stream, || {
            let at = data.as_mut_ptr().cast();
            if rank.rank == 0 {
                ok(rank.call(&Call::peer(Function::Send, data.len(), peer), at, at));
            } else {
                ok(rank.call(&Call::peer(Function::Recv, data.len(), peer), at, at));
            }
        });
        for _ in 0..REPLAYS {
            device.graph_launch(exec, rank.stream).unwrap();
        }
        device.graph_exec_destroy(exec).unwrap();
    }
    add_up(rank, &mut data);
    rank.synchronize();
    assert_eq!(data, [10.0; 3]);
}

/// While graphs live, the network work of eager operations is asked for by the device. It must not be overtaken by that of
/// an operation which is called after the last graph has gone.
fn overtaken(rank: &Rank) {
    let device = host();
    let comm = lookup(rank.comm).unwrap();
    let other = device.stream_create().unwrap();
    let mut data = [vec![1f32; 10], vec![1f32; COUNT], vec![1f32; 3000]];
    let exec = captured(rank.stream, || add_up(rank, &mut data[0]));
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    device
        .launch_host(
            rank.stream,
            Arc::new(move |_| gate.lock().unwrap().recv().unwrap()),
        )
        .unwrap();
    add_up(rank, &mut data[1]);
    device.graph_exec_destroy(exec).unwrap();
    while comm.held_plans().1 > 0 {
        thread::yield_now();
    }
    add_up(&on(rank, other), &mut data[2]);
    open.send(()).unwrap();
    device.stream_synchronize(other).unwrap();
    device.stream_destroy(other).unwrap();
    rank.synchronize();
    assert_eq!(state(rank.comm), ResultCode::Success, "{}", last_error());
    for data in &data[1..] {
        assert!(data.iter().all(|got| *got == 2.0), "{}", data[0]);
    }
}
