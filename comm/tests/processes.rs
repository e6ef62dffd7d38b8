//! Ranks as processes: on one node over shared memory, on two over sockets.
//!
//! Each rank is this test binary again, running [`worker`] alone; see [`common::run_processes`].

mod common;

use std::{
    env,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use common::{COLLECTIVES, Call, Rank, host, ok, rank_of_process, run_processes, run_processes_with};
use ringsight_comm::abi;
use ringsight_records::Function;

#[test]
fn one_node() {
    run_processes("worker", 2, 1);
    run_processes("worker", 4, 1);
}

#[test]
fn two_nodes() {
    run_processes("worker", 2, 2);
    run_processes("worker", 4, 2);
}

/// Each rank checks that the previous one calls the same operation, also where it receives nothing from it. So a rank
/// that has all it asked for still owes that to the next one, and must not leave before.
#[test]
fn a_rank_that_is_done_first_does_not_leave_the_next_one_in_doubt() {
    let folder = env::temp_dir().join(format!("ringsight-first-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    run_processes_with("first_worker", 3, 3, &[(FOLDER, folder.to_str().unwrap())]);
    std::fs::remove_dir_all(folder).unwrap();
}

/// Where [`first_worker`] says that it has left.
const FOLDER: &str = "RINGSIGHT_TEST_FOLDER";

#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn first_worker() {
    let Some(rank) = rank_of_process() else { return };
    let left = Path::new(&env::var_os(FOLDER).unwrap()).join("left");
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
    println!("rank done");
}

/// What each rank does; does nothing when it is not one.
#[test]
#[ignore = "helper: the body of one rank; started by the other tests"]
fn worker() {
    let Some(rank) = rank_of_process() else { return };
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
    println!("rank done");
}

fn all_to_all(rank: &Rank, count: usize) {
    let value = |from: usize, to: usize, i: usize| (from * 1000 + to * 100 + i % 97) as f32;
    let out: Vec<f32> = (0..rank.ranks * count)
        .map(|i| value(rank.rank, i / count, i % count))
        .collect();
    let mut into = vec![-1f32; rank.ranks * count];
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    for peer in 0..rank.ranks {
        let (send, recv) = (out[peer * count..].as_ptr(), into[peer * count..].as_mut_ptr());
        ok(rank.call(
            &Call::peer(Function::Send, count, peer),
            send.cast(),
            std::ptr::null_mut(),
        ));
        ok(rank.call(
            &Call::peer(Function::Recv, count, peer),
            std::ptr::null(),
            recv.cast(),
        ));
    }
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupEnd() });
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
