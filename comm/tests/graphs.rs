//! Graphs of one communicator, replayed on streams that nobody orders: its operations come one after another all the same,
//! in the order in which they were launched.

mod common;

use common::{
    Rank,
    graphs::{COUNT, add_up, captured, instance, on, unordered_streams},
    host, ok, on_ranks,
    processes::run_processes,
};

use ringsight_comm::device::Stream;

#[test]
fn replays_and_eager_operations_on_unordered_streams_keep_the_order_of_their_launches() {
    on_ranks(2, |rank| unordered_streams(&rank));
}

#[test]
fn between_processes_and_nodes_too() {
    run_processes("graphs::replays", 2, 1);
    run_processes("graphs::replays", 2, 2);
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
