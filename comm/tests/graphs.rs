//! Graphs of one communicator, replayed on streams that nobody orders: its operations come one after another all the same,
//! in the order in which they were launched.

mod common;

use std::{
    sync::{Arc, Mutex, mpsc},
    thread,
};

use common::{Call, Rank, host, last_error, ok, on_ranks, rank_of_process, run_processes, state};
use ringsight_comm::{
    communicator::lookup,
    device::{Graph, GraphExec, Stream},
    error::ResultCode,
};
use ringsight_records::Function;

/// Elements: several slots, so that operations that run at once are sure to meet.
const COUNT: usize = 70_000;
/// Each multiplies by the number of ranks, two: numbers stay exact.
const ROUNDS: usize = 20;

/// A rank that launches on another stream.
fn on(rank: &Rank, stream: Stream) -> Rank {
    Rank { stream, ..*rank }
}

/// Adds up `data` over the ranks, in place.
fn add_up(rank: &Rank, data: &mut [f32]) {
    let at = data.as_mut_ptr().cast();
    ok(rank.call(&Call::new(Function::AllReduce, data.len()), at, at));
}

/// What `calls` does, as an instance of a graph.
fn captured(stream: Stream, calls: impl FnOnce()) -> GraphExec {
    let device = host();
    device.capture_begin(stream).unwrap();
    calls();
    instance(device.capture_end(stream).unwrap())
}

fn instance(graph: Graph) -> GraphExec {
    let exec = host().graph_instantiate(graph).unwrap();
    host().graph_destroy(graph).unwrap();
    exec
}

/// Two graphs and eager operations, each on a stream of its own or on another's, in an order that differs from round to
/// round but not from rank to rank. Nothing synchronizes before the end.
fn unordered_streams(rank: &Rank) {
    let device = host();
    let streams: Vec<Stream> = (0..3).map(|_| device.stream_create().unwrap()).collect();
    let mut data = vec![vec![1f32; COUNT]; 3];
    let graphs: Vec<GraphExec> = (0..2)
        .map(|at| captured(streams[at], || add_up(&on(rank, streams[at]), &mut data[at])))
        .collect();
    for round in 0..ROUNDS {
        for turn in 0..3 {
            let stream = streams[(round / 3 + turn) % 3];
            match (round + turn) % 3 {
                2 => add_up(&on(rank, stream), &mut data[2]),
                at => device.graph_launch(graphs[at], stream).unwrap(),
            }
        }
    }
    for stream in &streams {
        device.stream_synchronize(*stream).unwrap();
    }
    let expected = (rank.ranks as f32).powi(ROUNDS as i32);
    for (at, data) in data.iter().enumerate() {
        let wrong = data.iter().find(|got| **got != expected);
        assert_eq!(wrong, None, "buffer {at}: {expected} is right");
    }
    for exec in graphs {
        device.graph_exec_destroy(exec).unwrap();
    }
    for stream in streams {
        device.stream_destroy(stream).unwrap();
    }
}

#[test]
fn replays_and_eager_operations_on_unordered_streams_keep_the_order_of_their_launches() {
    on_ranks(2, |rank| unordered_streams(&rank));
}

#[test]
fn between_processes_and_nodes_too() {
    run_processes("worker", 2, 1);
    run_processes("worker", 2, 2);
}

#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn worker() {
    let Some(rank) = rank_of_process() else { return };
    unordered_streams(&rank);
    overtaken(&rank);
    sent_and_gone(&rank);
    rank.leave();
    println!("rank done");
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

#[test]
fn captures_that_take_turns_are_each_in_order() {
    on_ranks(2, |rank| {
        let device = host();
        let streams: Vec<Stream> = (0..4).map(|_| device.stream_create().unwrap()).collect();
        let mut data = vec![vec![1f32; COUNT]; 4];
        // Each capture has two streams, forked and joined; their operations are called in turns. That no stream orders
        // those of one capture is what the communicator is for.
        let event = device.event_create().unwrap();
        let follow = |waiting: Stream, stream: Stream| {
            device.event_record(event, stream).unwrap();
            device.stream_wait_event(waiting, event).unwrap();
        };
        for origin in [0, 2] {
            device.capture_begin(streams[origin]).unwrap();
            follow(streams[origin + 1], streams[origin]);
        }
        for _ in 0..3 {
            for at in [0, 2, 1, 3] {
                add_up(&on(&rank, streams[at]), &mut data[at]);
            }
        }
        let graphs = [0, 2].map(|origin| {
            follow(streams[origin], streams[origin + 1]);
            instance(device.capture_end(streams[origin]).unwrap())
        });
        for _ in 0..3 {
            device.graph_launch(graphs[0], streams[0]).unwrap();
            device.graph_launch(graphs[1], streams[2]).unwrap();
        }
        for stream in &streams {
            device.stream_synchronize(*stream).unwrap();
        }
        for (at, data) in data.iter().enumerate() {
            assert!(data.iter().all(|got| *got == 512.0), "buffer {at}: {}", data[0]);
        }
        device.event_destroy(event).unwrap();
        for exec in graphs {
            device.graph_exec_destroy(exec).unwrap();
        }
        for stream in streams {
            device.stream_destroy(stream).unwrap();
        }
    });
}

#[test]
fn a_graph_outlives_its_communicator() {
    on_ranks(1, |_| {
        let device = host();
        let rank = Rank::join(common::unique_id(), 0, 1);
        let mut data = vec![1f32; 100];
        let exec = captured(rank.stream, || add_up(&rank, &mut data));
        device.graph_launch(exec, rank.stream).unwrap();
        rank.synchronize();
        // SAFETY: a live communicator.
        ok(unsafe { ringsight_comm::abi::ncclCommDestroy(rank.comm) });
        device.graph_launch(exec, rank.stream).unwrap();
        rank.synchronize();
        device.graph_exec_destroy(exec).unwrap();
        device.stream_destroy(rank.stream).unwrap();
    });
}
