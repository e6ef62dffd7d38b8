//! Ranks on two nodes, each a process.

use std::{env, process::Command};

use crate::{
    common::processes::{outputs, start_each, text},
    fabric::{Fabric, Port},
};

/// What the ranks of one run came to: whether each ended well, and what it printed.
pub(crate) type Ended = Vec<(bool, String)>;

/// Two ranks, each a node, with the devices of a guest or those that `RINGSIGHT_TEST_HCAS` names; each runs the body
/// `rdma::BODY`.
pub(crate) fn two_nodes(body: &str, change: impl Fn(usize, &mut Command)) -> Ended {
    ranks_of_two_nodes(body, 2, change)
}

/// The same with so many ranks, half of them on each node.
pub(crate) fn ranks_of_two_nodes(body: &str, ranks: usize, change: impl Fn(usize, &mut Command)) -> Ended {
    ranks_of_nodes(body, ranks, 2, change)
}

/// The same with so many nodes. From the second on they share their devices, unless `change` says otherwise.
pub(crate) fn ranks_of_nodes(
    body: &str,
    ranks: usize,
    nodes: usize,
    change: impl Fn(usize, &mut Command),
) -> Ended {
    let names = env::var("RINGSIGHT_TEST_HCAS").unwrap_or_else(|_| {
        let devices = [0, 1].map(|rank| Fabric::here().name(Port { rank, link: 0 }));
        devices.join(",")
    });
    let devices: Vec<String> = names.split(',').map(|name| format!("={name}")).collect();
    let children = start_each(&format!("rdma::{body}"), ranks, nodes, |rank, command| {
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
    outputs(children)
        .iter()
        .map(|output| (output.status.success(), text(output)))
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
