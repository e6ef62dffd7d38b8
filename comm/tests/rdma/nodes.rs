//! Ranks on two nodes, each a process.

use std::{env, process::Command, thread};

use ringsight_comm::observe;
use ringsight_records::connection::{Connection, ConnectionSlot};

use crate::{
    common::start_each,
    fabric::{Fabric, Port},
};

/// What the ranks of one run came to: whether each ended well, and what it printed.
pub(crate) type Ended = Vec<(bool, String)>;

/// Two ranks, each a node, with the devices of a guest or those that `RINGSIGHT_TEST_HCAS` names; each is the test `worker` of a module
/// here.
pub(crate) fn two_nodes(worker: &str, change: impl Fn(usize, &mut Command)) -> Ended {
    ranks_of_two_nodes(worker, 2, change)
}

/// The same with so many ranks, half of them on each node.
pub(crate) fn ranks_of_two_nodes(worker: &str, ranks: usize, change: impl Fn(usize, &mut Command)) -> Ended {
    ranks_of_nodes(worker, ranks, 2, change)
}

/// The same with so many nodes. From the second on they share their devices, unless `change` says otherwise.
pub(crate) fn ranks_of_nodes(
    worker: &str,
    ranks: usize,
    nodes: usize,
    change: impl Fn(usize, &mut Command),
) -> Ended {
    let names = env::var("RINGSIGHT_TEST_HCAS").unwrap_or_else(|_| {
        let devices = [0, 1].map(|rank| Fabric::here().name(Port { rank, link: 0 }));
        devices.join(",")
    });
    let devices: Vec<String> = names.split(',').map(|name| format!("={name}")).collect();
    let children = start_each(&format!("rdma::{worker}"), ranks, nodes, |rank, command| {
        command
            .env("NCCL_IB_HCA", &devices[(rank * nodes / ranks).min(1)])
            .env("NCCL_DEBUG", "INFO")
            .env("NCCL_DEBUG_SUBSYS", "ALL")
            // Emulated processors are slow: that is no hang.
            .env("NCCL_KERNEL_TIMEOUT_MS", "0")
            // Soft-RoCE takes 7 for "without end".
            .env("NCCL_IB_RETRY_CNT", "6")
            .env("NCCL_IB_TIMEOUT", "16");
        change(rank, command);
    });
    // Side by side: a pipe that nobody reads holds up whoever logs.
    let readers: Vec<_> = children
        .into_iter()
        .map(|child| thread::spawn(|| child.wait_with_output().unwrap()))
        .collect();
    readers
        .into_iter()
        .map(|reader| {
            let output = reader.join().unwrap();
            let text = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&text).into_owned();
            (output.status.success() && text.contains("rank done"), text)
        })
        .collect()
}

/// Has paths fail by what devices say alone: an emulated machine may have other things to do for longer than the defaults allow.
pub(crate) fn patient(command: &mut Command) -> &mut Command {
    command
        .env("RINGSIGHT_NET_TIMEOUT_MS", "10000")
        .env("RINGSIGHT_NET_GIVE_UP_MS", "30000")
}

/// Every rank ended well, and printed each of `expected` and none of `unexpected`.
pub(crate) fn check(what: &str, ended: &Ended, expected: &[&str], unexpected: &[&str]) {
    let all = || {
        let texts: Vec<&str> = ended.iter().map(|(_, text)| text.as_str()).collect();
        // First, lest what shows a part of this leaves it out.
        let panics = texts.iter().zip(0..).flat_map(|(text, rank)| {
            let mut lines = text.lines();
            let at = lines.by_ref().find(|line| line.contains("panicked at"));
            at.map(|at| format!("rank {rank}: {at} {}\n", lines.next().unwrap_or_default()))
        });
        format!("{}{}", panics.collect::<String>(), texts.join("\n==\n"))
    };
    for (rank, (well, text)) in ended.iter().enumerate() {
        assert!(well, "{what}, rank {rank}:\n{}", all());
        for part in expected {
            assert!(
                text.contains(part),
                "{what}, rank {rank}: no {part:?} in\n{}",
                all()
            );
        }
        for part in unexpected {
            assert!(
                !text.contains(part),
                "{what}, rank {rank}: {part:?} in\n{}",
                all()
            );
        }
    }
}

/// The ends of this process's connections over RDMA, as `ringsight snapshot` sees them.
pub(crate) fn ends() -> Vec<Connection> {
    let slots = observe::pages().unwrap().connections().iter();
    slots.filter_map(ConnectionSlot::read).collect()
}
