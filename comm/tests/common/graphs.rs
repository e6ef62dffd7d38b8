//! Graphs of operations that are captured and replayed.

use ringsight_comm::device::{Graph, GraphExec, Stream};
use ringsight_records::Function;

use super::{Call, Rank, host, ok};

/// Elements: several slots, so that operations that run at once are sure to meet.
pub const COUNT: usize = 70_000;

/// Each multiplies by the number of ranks, two: numbers stay exact.
const ROUNDS: usize = 20;

/// A rank that launches on another stream.
pub fn on(rank: &Rank, stream: Stream) -> Rank {
    Rank { stream, ..*rank }
}

/// Adds up `data` over the ranks, in place.
pub fn add_up(rank: &Rank, data: &mut [f32]) {
    let at = data.as_mut_ptr().cast();
    ok(rank.call(&Call::new(Function::AllReduce, data.len()), at, at));
}

/// What `calls` does, as an instance of a graph.
pub fn captured(stream: Stream, calls: impl FnOnce()) -> GraphExec {
    let device = host();
    device.capture_begin(stream).unwrap();
    calls();
    instance(device.capture_end(stream).unwrap())
}

pub fn instance(graph: Graph) -> GraphExec {
    let exec = host().graph_instantiate(graph).unwrap();
    host().graph_destroy(graph).unwrap();
    exec
}

/// Two graphs and eager operations, each on a stream of its own or on another's, in an order that differs from round to
/// round but not from rank to rank. Nothing synchronizes before the end.
pub fn unordered_streams(rank: &Rank) {
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
