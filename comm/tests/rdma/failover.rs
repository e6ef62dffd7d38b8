//! Operations whose ports go down.

use super::{
    links::{mend, two_ports},
    nodes::{check, patient, ranks_of_nodes, two_nodes},
    shared::DOWN,
};
use crate::fabric::{Fabric, Port};

#[test]
#[ignore = "guest: needs RDMA devices"]
fn operations_go_on_over_the_backup_when_a_port_goes_down() {
    let fabric = Fabric::here();
    for down in [1, 0] {
        let ended = two_nodes("failover::survive", |rank, command| {
            two_ports(rank, command).env(DOWN, down.to_string());
        });
        fabric.set_up(Port { rank: down, link: 0 }, true);
        for (rank, (well, text)) in ended.iter().enumerate() {
            let what = format!("port of rank {down} down, rank {rank}");
            assert!(well, "{what}:\n{text}");
            let [from, to] = [0, 1].map(|link| fabric.name(Port { rank, link }));
            let why = match fabric {
                Fabric::DualPort => "other port of the card",
                Fabric::SoftRoce | Fabric::Mlx5 => "neighbour",
            };
            let backup = format!("NET/IB : backup of {from} : {to}, {why}");
            assert!(text.contains(&backup), "{what}: no {backup:?} in\n{text}");
            let switch = format!("from {from} to {to} (epoch 1)");
            assert!(text.contains(&switch), "{what}: no {switch:?} in\n{text}");
            assert!(!text.contains("NET/Socket"), "{what}:\n{text}");
        }
    }
}

#[test]
#[ignore = "guest: needs RDMA devices"]
fn operations_go_on_while_ports_fail_in_turn_and_connections_are_made() {
    let ended = two_nodes("failover::go_on", |rank, command| {
        patient(two_ports(rank, command));
    });
    check(
        "ports fail in turn",
        &ended,
        &["[send] via NET/IB/0", "(epoch 1)"],
        &["via NET/Socket", "use a socket"],
    );
}

/// In a ring of three nodes a process sends to one peer and receives from another: what it knows of a path it has found out at the end
/// that it has there.
#[test]
#[ignore = "guest: needs two RDMA links"]
fn a_ring_of_three_nodes_leaves_a_path_and_goes_back_and_all_know_that_it_is_good() {
    // The third node has the first one's ports, which are not reached from themselves: between these two is a socket.
    let ended = ranks_of_nodes("failover::lose_and_find", 3, 3, |rank, command| {
        // With a second channel, whose ring goes the other way, processes would hear of the path from both ends.
        patient(two_ports(rank % 2, command)).env("NCCL_MAX_NCHANNELS", "1");
    });
    mend();
    check(
        "three nodes",
        &ended,
        &[
            "via NET/IB/0",
            "(epoch 1)",
            "(epoch 2)",
            "is ready again (path 0 ",
        ],
        &["has failed"],
    );
}

/// While its port has no carrier.
#[test]
#[ignore = "guest: needs soft-RoCE devices"]
fn a_connection_goes_back_to_a_port_whose_gid_has_moved() {
    let ended = two_nodes("failover::move_it", |rank, command| {
        patient(two_ports(rank, command));
    });
    Fabric::here().mend();
    check(
        "a GID moves",
        &ended,
        &["is ready again (path 0 ", "(epoch 2)"],
        &[
            "via NET/Socket",
            "use a socket",
            "begins on its backup",
            "has no backup yet",
        ],
    );
}
