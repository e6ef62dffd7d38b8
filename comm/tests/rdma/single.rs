//! Connections with failover off, at both ends or at one: they end with their path, in bounded time, whatever is wrong with it.

use std::{env, process::Command, time::Duration};

use ringsight_comm::error::ResultCode;

use super::{
    control::Control,
    ends::{END, How, Work, end, work_until_on},
    links::{lose_packets, mend, two_ports, until},
    nodes::{Ended, check, ends, two_nodes},
};
use crate::{
    common::{host, state},
    fabric::{Port, fail_completion_queue, fail_device, fail_queue_pair},
};

/// What fails.
const WHAT: &str = "RDMA_TEST_WHAT";
/// A device does not come back.
pub(super) const DEVICE: &str = "device";
/// The first port of rank 0.
const PORT: Port = Port { rank: 0, link: 0 };
/// How long requests may be without an answer, where that is what ends it.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);

/// Runs the ranks with failover off at `off`, and a device that never gives up by itself: `what` fails.
pub(super) fn fails(what: &str, off: &[usize], change: impl Fn(&mut Command)) -> Ended {
    let ended = two_nodes("single::worker", |rank, command| {
        two_ports(rank, command)
            .env(WHAT, what)
            .env("NCCL_IB_TIMEOUT", "20")
            .env("NCCL_IB_RETRY_CNT", "7");
        if off.contains(&rank) {
            command.env("RINGSIGHT_NET_FAILOVER", "0");
        }
        change(command);
    });
    if what != DEVICE {
        mend();
    }
    check(
        what,
        &ended,
        &["failed as it should: "],
        &["use a socket", "(epoch 1)"],
    );
    for (_, text) in &ended {
        let told = text
            .lines()
            .filter(|line| line.starts_with("failed as it should"));
        told.for_each(|line| println!("{what}: {line}"));
    }
    ended
}

/// Some rank says why.
#[track_caller]
pub(super) fn says(ended: &Ended, why: &str) {
    let is_said = ended.iter().any(|(_, text)| {
        let mut lines = text
            .lines()
            .filter(|line| line.starts_with("failed as it should"));
        lines.any(|line| line.contains(why))
    });
    assert!(is_said, "no {why:?}: {ended:?}");
}

/// Nothing is told of packets that are lost, and soft-RoCE takes seven retries for no limit.
#[test]
#[ignore = "helper: needs soft-RoCE devices, run in a guest"]
fn packets_that_are_lost_for_good_end_a_connection_without_failover() {
    for off in [&[0, 1][..], &[1]] {
        let ended = fails("packets", off, |command| {
            let half = (TIMEOUT / 2).as_millis().to_string();
            command
                .env("RINGSIGHT_NET_TIMEOUT_MS", &half)
                .env("RINGSIGHT_NET_GIVE_UP_MS", &half);
        });
        says(&ended, "no completion in time");
    }
}

#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn worker() {
    let (Some(control), Ok(what)) = (Control::of_process(), env::var(WHAT)) else {
        return;
    };
    let rank = control.rank.rank;
    let comm = control.make();
    work_until_on(&control, &comm, 0);
    control.meet();
    if rank == 0 {
        // The first connection's.
        let number = ends()[0].path[0].queue_pair;
        match what.as_str() {
            "packets" => lose_packets(0, true),
            "queue pair" => fail_queue_pair(PORT, number),
            "completion queue" => fail_completion_queue(PORT, number),
            _ => fail_device(PORT),
        }
    }
    control.meet();
    let work = Work::begin(&comm);
    // The other connections end with the communicator, whatever they are in.
    until("the communicator has failed", || {
        state(comm.comm) != ResultCode::Success
    });
    let (code, text, took) = end(&comm, How::Destroy);
    println!("failed as it should: rank {rank} {code:?} {text}");
    assert_ne!(code, ResultCode::Success);
    assert!(took < END, "{took:?}");
    assert!(!work.came_to_its_end());
    host().stream_destroy(comm.stream).unwrap();
    control.meet();
    control.rank.leave();
    println!("rank done");
}
