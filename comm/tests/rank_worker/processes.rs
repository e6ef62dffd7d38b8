//! What ranks do that are processes.

use std::{
    path::Path,
    thread,
    time::{Duration, Instant},
};

use ringsight_records::Function;

use crate::common::{
    COLLECTIVES, Call, Rank, group, host, ok,
    processes::{rank_of_process, variable},
    variables::FOLDER,
};

/// Rank 1 has its part first, and leaves no earlier than rank 2 has called.
pub(crate) fn first_to_leave() {
    let rank = rank_of_process();
    let left = Path::new(&variable(FOLDER)).join("left");
    let scatter = Call {
        root: 0,
        ..Call::new(Function::Scatter, 100)
    };
    if rank.rank == 2 {
        // Rank 1 has its part from rank 0 long before this is over; this rank has called nothing yet.
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end {
            assert!(!left.exists(), "rank 1 has left");
            thread::sleep(Duration::from_millis(1));
        }
    }
    scatter.check(&rank, false);
    rank.leave();
    if rank.rank == 1 {
        std::fs::write(&left, "").unwrap();
    }
}

/// All collectives, messages and replays.
pub(crate) fn collectives() {
    let rank = rank_of_process();
    let ranks = rank.ranks;
    for function in COLLECTIVES {
        for count in [1, 17, 40_001, 70_003] {
            for in_place in [false, true] {
                Call {
                    root: count % ranks,
                    ..Call::new(function, count)
                }
                .check(&rank, in_place);
            }
        }
    }
    all_to_all(&rank, 70_001);
    replay(&rank);
    rank.leave();
}

fn all_to_all(rank: &Rank, count: usize) {
    let value = |from: usize, to: usize, i: usize| (from * 1000 + to * 100 + i % 97) as f32;
    let out: Vec<f32> = (0..rank.ranks * count)
        .map(|i| value(rank.rank, i / count, i % count))
        .collect();
    let mut into = vec![-1f32; rank.ranks * count];
    group(|| {
        for peer in 0..rank.ranks {
            let (send, recv) = (out[peer * count..].as_ptr(), into[peer * count..].as_mut_ptr());
            let calls = [Function::Send, Function::Recv].map(|function| Call::peer(function, count, peer));
            ok(rank.call(&calls[0], send.cast(), std::ptr::null_mut()));
            ok(rank.call(&calls[1], std::ptr::null(), recv.cast()));
        }
    });
    rank.synchronize();
    for (i, got) in into.iter().enumerate() {
        assert_eq!(*got, value(i / count, rank.rank, i % count), "element {i}");
    }
}

/// Replays between eager operations: the proxies must serve both in the order of the stream.
fn replay(rank: &Rank) {
    let device = host();
    let mut data = vec![0f32; 50_000];
    let mut sum = vec![0f32; 50_000];
    device.capture_begin(rank.stream).unwrap();
    ok(rank.call(
        &Call::new(Function::AllReduce, 50_000),
        data.as_ptr().cast(),
        sum.as_mut_ptr().cast(),
    ));
    let graph = device.capture_end(rank.stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_destroy(graph).unwrap();
    for step in 0..50 {
        data.fill(step as f32);
        device.graph_launch(exec, rank.stream).unwrap();
        Call::new(Function::AllGather, 1000).check(rank, false);
        assert_eq!(sum, vec![(step * rank.ranks) as f32; 50_000], "replay {step}");
    }
    device.graph_exec_destroy(exec).unwrap();
}
