//! Connections with failover off, at both ends or at one: they end with their path, in bounded time, whatever is wrong with it.

use std::{process::Command, time::Duration};

use super::{
    links::{mend, two_ports},
    nodes::{Ended, check, two_nodes},
    shared::DEVICE,
};
use crate::common::variables::WHAT;

/// How long requests may be without an answer, where that is what ends it.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);

/// Runs the ranks with failover off at `off`, and a device that never gives up by itself: `what` fails.
pub(super) fn fails(what: &str, off: &[usize], change: impl Fn(&mut Command)) -> Ended {
    let ended = two_nodes("single::connection_fails", |rank, command| {
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
#[ignore = "guest: needs soft-RoCE devices"]
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
