//! What one communicator of a process finds out of a path, and another goes by.

use super::{
    links::{mend, two_ports},
    nodes::{check, two_nodes},
    shared::{BY_PROCESS, FOUND_DEAD_AFTER, LATER},
};

#[test]
#[ignore = "guest: needs two RDMA links"]
fn a_communicator_leaves_a_path_that_another_one_found_dead() {
    let ended = two_nodes("verdicts::path_found_dead", |rank, command| {
        two_ports(rank, command)
            // Nothing else finds out that packets are lost.
            .env("NCCL_IB_RETRY_CNT", "7")
            .env(
                "RINGSIGHT_NET_TIMEOUT_MS",
                FOUND_DEAD_AFTER.as_millis().to_string(),
            )
            .env("RINGSIGHT_NET_GIVE_UP_MS", "60000");
    });
    mend();
    check("verdicts", &ended, &["(epoch 1)"], &["use a socket"]);
    // Not on every rank: where the other one's time is over first, its ends may be heard before this process finds out by itself.
    for said in [BY_PROCESS, LATER] {
        let is_said = ended.iter().any(|(_, text)| text.contains(said));
        assert!(is_said, "no end {said}: {ended:?}");
    }
}
