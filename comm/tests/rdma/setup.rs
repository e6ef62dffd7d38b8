//! Ports that fail at each command that the set-up of connections gives their device: mlx5 only, where the stand-in for the hardware counts them.

use super::{
    links::{mend, two_ports},
    nodes::{check, patient, two_nodes},
    shared::BACKUP,
};
use crate::fabric::refuse_commands;

#[test]
#[ignore = "guest: needs mlx5 devices"]
fn ports_go_down_at_each_command_of_a_connections_set_up() {
    let ended = two_nodes("setup::ports_fall", |rank, command| {
        patient(two_ports(rank, command));
    });
    mend();
    check("set-up", &ended, &["set up "], &["use a socket"]);
    let told = ended[0].1.lines().filter(|line| line.starts_with("set up "));
    told.for_each(|line| println!("{line}"));
}

/// Channels whose first port it is have their backup alone; the others have no backup.
#[test]
#[ignore = "guest: needs mlx5 devices"]
fn a_device_on_which_nothing_can_be_made_is_left_out() {
    let ended = two_nodes("setup::refused", |rank, command| {
        patient(two_ports(rank, command));
    });
    refuse_commands(BACKUP, 0);
    mend();
    check("refused", &ended, &["set up "], &["has failed", "use a socket"]);
    for wanted in [
        "NET/IB : no backup of port 0: registering ",
        "NET/IB : a connection has its backup alone, not port 1: registering ",
    ] {
        assert!(ended[0].1.contains(wanted), "{wanted}: {}", ended[0].1);
    }
    let wanted = "NET/IB : a connection has its backup alone: the peer cannot use its port";
    assert!(ended[1].1.contains(wanted), "{wanted}: {}", ended[1].1);
}
