//! Connections that are made while a port is down or a path cannot be made.

use super::{
    links::{hide_port, mend, two_ports},
    nodes::{check, patient, two_nodes},
    shared::{BEGIN_GIVE_UP, DOWN, HIDDEN, LITTLE},
};
use crate::fabric::{Fabric, Port};

#[test]
#[ignore = "guest: needs RDMA devices"]
fn a_connection_whose_port_is_down_begins_on_the_backup() {
    for down in [1, 0] {
        let ended = two_nodes("begin::on_the_backup", |rank, command| {
            // What shares its parent's proxy has its ports, which were up when these were looked at.
            two_ports(rank, command)
                .env(DOWN, down.to_string())
                .env("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1");
        });
        Fabric::here().set_up(Port { rank: down, link: 0 }, true);
        check(
            &format!("port of rank {down} down before"),
            &ended,
            &[
                "NET/IB : a connection begins on its backup: ",
                "is ready again (path 0 ",
            ],
            &["via NET/Socket", "use a socket"],
        );
    }
}

/// The ends that see the port down begin with the other one as their first, and go on over it when both are up.
#[test]
#[ignore = "guest: needs RDMA devices"]
fn a_port_may_be_down_before_the_processes_begin() {
    for down in [1, 0] {
        let port = Port { rank: down, link: 0 };
        Fabric::here().set_up(port, false);
        let ended = two_nodes("begin::without_a_port", |rank, command| {
            patient(two_ports(rank, command)).env(DOWN, down.to_string());
        });
        Fabric::here().set_up(port, true);
        check(
            &format!("port of rank {down} down at first"),
            &ended,
            &["via NET/IB/"],
            &["use a socket", "has failed"],
        );
    }
}

/// Connections are made when a communicator is; there may be no operation for long.
#[test]
#[ignore = "guest: needs RDMA devices"]
fn a_port_may_go_down_long_before_the_first_operation() {
    for down in [1, 0] {
        let ended = two_nodes("begin::late", |rank, command| {
            patient(two_ports(rank, command))
                .env(DOWN, down.to_string())
                .env("RINGSIGHT_NET_GIVE_UP_MS", BEGIN_GIVE_UP.as_millis().to_string());
        });
        Fabric::here().set_up(Port { rank: down, link: 0 }, true);
        check(
            &format!("port of rank {down} down before the first operation"),
            &ended,
            &["(epoch 1)"],
            &["use a socket", "has failed"],
        );
    }
}

/// Both ports are up, and one of them is not reached from the other.
#[test]
#[ignore = "guest: needs RDMA devices"]
fn a_connection_whose_first_path_cannot_be_made_begins_on_the_backup() {
    // One connection goes each way: of one the sender cannot connect its end, of the other the receiver.
    for hidden in [1, 0] {
        let port = Port {
            rank: hidden,
            link: 0,
        };
        hide_port(port, true);
        let ended = two_nodes("data::transfers", |rank, command| {
            patient(two_ports(rank, command)).env(LITTLE, "1");
        });
        hide_port(port, false);
        check(
            &format!("the port of rank {hidden} is not found"),
            &ended,
            &["via NET/IB/0"],
            &["via NET/Socket", "use a socket"],
        );
        let text = &ended[1 - hidden].1;
        let why = "NET/IB : a connection begins on its backup: ";
        let ends = text.matches(why).count();
        assert!(ends >= 2, "{ends} ends:\n{text}");
    }
}

/// Of one connection the sender cannot make its end of the backup, of the other one the receiver. Later it is there, and the first path fails.
#[test]
#[ignore = "guest: needs soft-RoCE devices"]
fn a_backup_that_cannot_be_made_joins_later() {
    hide_port(HIDDEN, true);
    let ended = two_nodes("begin::join_later", |rank, command| {
        // A second channel would begin on the second link.
        patient(two_ports(rank, command)).env("NCCL_MAX_NCHANNELS", "1");
    });
    hide_port(HIDDEN, false);
    mend();
    check(
        "no backup at first",
        &ended,
        &["via NET/IB/0", "is ready again (path 1 ", "(epoch 1)"],
        &["use a socket", "begins on its backup", "has failed"],
    );
    let text = &ended[1 - HIDDEN.rank].1;
    let ends = text.matches("NET/IB : a connection has no backup yet: ").count();
    assert!(ends >= 2, "{ends} ends:\n{text}");
}
