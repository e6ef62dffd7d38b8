//! The guest's links, which fail.

use std::process::Command;

/// A guest's first two links: each rank has two ports.
pub(crate) fn two_ports(rank: usize, command: &mut Command) -> &mut Command {
    command.env("NCCL_IB_HCA", ["=hca0,hca1", "=peer0,peer1"][rank])
}

/// Brings an interface `up` or `down`.
pub(crate) fn set_link(interface: &str, state: &str) {
    let status = Command::new("ip")
        .args(["link", "set", interface, state])
        .status()
        .unwrap();
    assert!(status.success(), "ip link set {interface} {state}");
}
