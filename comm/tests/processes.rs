//! Ranks as processes: on one node over shared memory, on two over sockets.
//!
//! Each rank is this test binary again, running [`worker`] alone, with its part in the environment.

mod common;

use std::{
    env,
    process::{Child, Command, Output, Stdio},
};

use common::{COLLECTIVES, Call, Rank, host, ok, unique_id};
use ringsight_comm::{abi, abi::UniqueIdBytes};
use ringsight_records::Function;

const ID: &str = "RINGSIGHT_TEST_ID";
const PLACE: &str = "RINGSIGHT_TEST_PLACE";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// Starts `ranks` processes on `nodes` nodes and waits for them.
fn run(ranks: usize, nodes: usize) -> Vec<Output> {
    host();
    let id = unique_id();
    let children: Vec<Child> = (0..ranks)
        .map(|rank| {
            Command::new(env::current_exe().unwrap())
                .args(["--exact", "worker", "--ignored", "--nocapture"])
                .env(ID, hex(&id.0))
                .env(PLACE, format!("{rank} {ranks}"))
                .env("RINGSIGHT_DEVICE", "host")
                .env("NCCL_SOCKET_IFNAME", "lo")
                .env("NCCL_HOSTID", format!("node{}", rank * nodes / ranks))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

#[track_caller]
fn succeed(outputs: Vec<Output>) {
    for (rank, output) in outputs.into_iter().enumerate() {
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "rank {rank}:\n{out}\n{err}");
        assert!(out.contains("rank done"), "rank {rank} did not run:\n{out}");
    }
}

#[test]
fn one_node() {
    succeed(run(2, 1));
    succeed(run(4, 1));
}

#[test]
fn two_nodes() {
    succeed(run(2, 2));
    succeed(run(4, 2));
}

/// What each rank does; does nothing when it is not one.
#[test]
#[ignore = "the body of one rank; started by the other tests"]
fn worker() {
    let (Ok(id), Ok(place)) = (env::var(ID), env::var(PLACE)) else { return };
    let (rank, ranks) = place.split_once(' ').unwrap();
    let id = UniqueIdBytes(unhex(&id).try_into().unwrap());
    let rank = Rank::join(id, rank.parse().unwrap(), ranks.parse().unwrap());
    let ranks = rank.ranks;
    for function in COLLECTIVES {
        for count in [1, 17, 40_001, 300_003] {
            for in_place in [false, true] {
                Call { root: count % ranks, ..Call::new(function, count) }.check(&rank, in_place);
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
    let out: Vec<f32> = (0..rank.ranks * count).map(|i| value(rank.rank, i / count, i % count)).collect();
    let mut into = vec![-1f32; rank.ranks * count];
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    for peer in 0..rank.ranks {
        let (send, recv) = (out[peer * count..].as_ptr(), into[peer * count..].as_mut_ptr());
        ok(rank.call(&Call::peer(Function::Send, count, peer), send.cast(), std::ptr::null_mut()));
        ok(rank.call(&Call::peer(Function::Recv, count, peer), std::ptr::null(), recv.cast()));
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
    ok(rank.call(&Call::new(Function::AllReduce, 50_000), data.as_ptr().cast(), sum.as_mut_ptr().cast()));
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
