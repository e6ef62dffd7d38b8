//! The guest's links, which fail, and what the kernel knows of the devices on them.

use std::{
    fs,
    io::Write as _,
    process::{Command, Stdio},
};

pub(crate) use crate::common::waiting::eventually;
use crate::fabric::{Fabric, Port};

/// Runs commands of `ip`, which are separated by newlines: one process for all, since to start one takes an emulated machine long.
fn ip(commands: &str) {
    let mut child = Command::new("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(commands.as_bytes()).unwrap();
    drop(input);
    assert!(child.wait().unwrap().success(), "ip: {commands}");
}

/// Has a rank use its ports on both links.
pub(crate) fn two_ports(rank: usize, command: &mut Command) -> &mut Command {
    let ports = [0, 1].map(|link| Fabric::here().name(Port { rank, link }));
    command.env("NCCL_IB_HCA", format!("={}", ports.join(",")))
}

/// A rank's devices: that on the first link, and that on the second. They may be one.
pub(crate) fn devices(rank: usize) -> [String; 2] {
    [0, 1].map(|link| Fabric::here().device(Port { rank, link }))
}

/// Sets how long an interface's packets may be. A device's own MTU is the largest power of two that fits with its headers.
pub(crate) fn set_mtu(interface: &str, bytes: u32) {
    ip(&format!("link set {interface} mtu {bytes}"));
}

/// Brings rank 0's port on a link up or down.
pub(crate) fn set_link(link: usize, up: bool) {
    Fabric::here().set_up(Port { rank: 0, link }, up);
}

/// Has the packets of a link lost, both ways, or no longer. No device notices.
pub(crate) fn lose_packets(link: usize, lost: bool) {
    Fabric::here().lose_packets(link, lost);
}

/// Brings both links up, with all their packets, and waits until the devices say so.
pub(crate) fn mend() {
    let fabric = Fabric::here();
    if fabric == Fabric::SoftRoce {
        hide_addresses(false);
    }
    fabric.mend();
}

/// Has nobody answer who asks for an address on the first link, or as usual.
pub(crate) fn hide_addresses(hidden: bool) {
    for rank in [0, 1] {
        hide_address(&interface(Port { rank, link: 0 }), hidden);
    }
}

/// The network interface of a port.
fn interface(Port { rank, link }: Port) -> String {
    format!("{}{link}", ["nic", "pnic"][rank])
}

fn hide_address(interface: &str, hidden: bool) {
    // 8: for no address; 1: for the interface's own, as the links are set up.
    let file = format!("/proc/sys/net/ipv4/conf/{interface}/arp_ignore");
    fs::write(file, if hidden { "8" } else { "1" }).unwrap();
}

/// Has a port not be found from the other end of its link, or as usual. It finds the other one as before: without asking, for who is
/// asked learns the address of who asks.
pub(crate) fn hide_port(port: Port, hidden: bool) {
    let Port { rank, link } = port;
    let (own, other) = (interface(port), interface(Port { rank: 1 - rank, link }));
    let peer = 2 - rank;
    hide_address(&own, hidden);
    let known = match hidden {
        true => {
            format!("replace 10.0.{link}.{peer} lladdr 02:00:00:00:0{link}:0{peer} dev {own} nud permanent")
        }
        false => format!("del 10.0.{link}.{peer} dev {own}"),
    };
    ip(&format!("neigh {known}\nneigh flush dev {other}"));
}

/// Has the GID of rank 0's IPv4 address on the first link stand at another index of its device's table: behind one of an IPv6 address. What the
/// index was, and what it is.
pub(crate) fn move_gid() -> [usize; 2] {
    let device = &devices(0)[0];
    let index = || {
        let wanted = "0000:0000:0000:0000:0000:ffff:0a00:0001";
        let at = |index: usize| {
            let file = format!("/sys/class/infiniband/{device}/ports/1/gids/{index}");
            fs::read_to_string(file).is_ok_and(|gid| gid.trim() == wanted)
        };
        (0..16).find(|index| at(*index))
    };
    let before = index().expect("a GID of the address");
    ip("addr del 10.0.0.1/24 dev nic0");
    eventually("its GID is gone", || index().is_none());
    ip("addr replace fd00::1/64 dev nic0 nodad");
    ip("addr add 10.0.0.1/24 dev nic0");
    eventually("its GID is there again", || index().is_some());
    [before, index().unwrap_or(before)]
}

/// Has TCP between the addresses of the first link go over its wire, as RDMA does. What is sent to an address of the machine itself stays
/// within it otherwise. To be said again when the link was down, which takes its routes away.
pub(crate) fn tcp_over_wire() {
    tcp_as_usual();
    ip(&format!(
        "rule add {WIRE}\nroute replace 10.0.0.2 dev nic0\nroute replace 10.0.0.1 dev pnic0"
    ));
}

/// Ends what [`tcp_over_wire`] began.
pub(crate) fn tcp_as_usual() {
    // Without such a rule there is nothing to delete.
    let delete = format!("rule del {WIRE}");
    let _ = Command::new("ip").args(delete.split(' ')).output();
}

const WIRE: &str = "pref 50 iif lo to 10.0.0.0/24 lookup main";

/// What a device has counted, `sent_pkts` or `rcvd_pkts`.
pub(crate) fn packets(device: &str, counter: &str) -> u64 {
    let file = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/{counter}");
    fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

/// Queue pairs, memory regions and completion queues that the kernel has of some devices, all processes' together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held([u64; 3]);

impl Held {
    /// Of these devices, now.
    pub(crate) fn of(devices: &[String]) -> Self {
        let output = Command::new("rdma").args(["resource", "show"]).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let mut held = [0; 3];
        for device in devices {
            // "1: hca0: qp 1 cq 1 pd 1 mr 0 …"
            let name = format!("{device}:");
            let line = text
                .lines()
                .find(|line| line.split_whitespace().nth(1) == Some(&name));
            let words: Vec<&str> = line.unwrap_or_default().split_whitespace().collect();
            for (sum, kind) in held.iter_mut().zip(["qp", "mr", "cq"]) {
                let pair = words.windows(2).find(|pair| pair[0] == kind);
                let count = pair.and_then(|pair| pair[1].parse::<u64>().ok());
                *sum += count.unwrap_or_else(|| panic!("no {kind} of {device} in {text:?}"));
            }
        }
        Self(held)
    }

    /// Whether there are more of each than in `before`.
    pub(crate) fn exceeds(self, before: Self) -> bool {
        self.0.iter().zip(before.0).all(|(now, before)| *now > before)
    }
}
