//! Ranks that find each other over the port that fails: TCP between them gets nothing over, and operations go on.

use std::{fs, process::Command};

use super::{
    links::{mend, tcp_as_usual, tcp_over_wire, two_ports},
    nodes::{Ended, check, patient, two_nodes},
    shared::MISSING,
};

/// How often TCP sends again before it takes a connection for dead: by default fifteen times, which is a quarter of an hour; so many are
/// three seconds.
const RETRIES: (&str, &str) = ("/proc/sys/net/ipv4/tcp_retries2", "3");

/// Ranks whose bootstrap and proxies talk over the interface that the first of their two ports is of.
fn over_the_port(worker: &str, change: impl Fn(&mut Command)) -> Ended {
    let (file, retries) = RETRIES;
    let usual = fs::read_to_string(file).unwrap();
    fs::write(file, retries).unwrap();
    tcp_over_wire();
    let ended = two_nodes(worker, |rank, command| {
        let command = patient(two_ports(rank, command));
        change(command.env("NCCL_SOCKET_IFNAME", ["=nic0", "=pnic0"][rank]));
    });
    fs::write(file, usual).unwrap();
    tcp_as_usual();
    mend();
    ended
}

#[test]
#[ignore = "guest: needs two RDMA links"]
fn operations_go_on_when_the_bootstraps_interface_is_the_port_that_fails() {
    let ended = over_the_port("interface::survive", |_| {});
    check(
        "the bootstrap's interface",
        &ended,
        &["(epoch 1)", "(epoch 2)", "(epoch 9)"],
        &["NET/Socket", "has failed", "is gone"],
    );
}

#[test]
#[ignore = "guest: needs two RDMA links"]
fn a_peer_that_dies_is_missed_when_the_bootstraps_interface_is_down() {
    let ended = over_the_port("interface::miss", |command| {
        let milliseconds = (MISSING / 2).as_millis().to_string();
        command
            .env("RINGSIGHT_NET_TIMEOUT_MS", &milliseconds)
            .env("RINGSIGHT_NET_GIVE_UP_MS", &milliseconds);
    });
    check(
        "a peer that dies",
        &ended[..1].to_vec(),
        &["no path to the peer works"],
        &[],
    );
}
