//! A captured all-reduce, replayed a thousand times, whose port goes down midway.

use super::{
    links::{mend, two_ports},
    nodes::{check, patient, two_nodes},
};

#[test]
#[ignore = "guest: needs two RDMA links"]
fn a_thousand_replays_lose_their_port_midway() {
    let ended = two_nodes("replays::thousand", |rank, command| {
        patient(two_ports(rank, command));
    });
    mend();
    check("replays", &ended, &["(epoch 1)"], &["NET/Socket"]);
}
