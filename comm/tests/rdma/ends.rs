//! How communicators end, whatever their connections are in just then: the kernel has no queue pair, memory region or completion queue
//! of theirs any more, and it takes no longer than is documented.

use std::time::Duration;

use super::{
    links::{mend, two_ports},
    nodes::{check, patient, two_nodes},
    shared::END_GIVE_UP,
};
use crate::common::variables::WHAT;

#[test]
#[ignore = "guest: needs two RDMA links"]
fn communicators_end_in_every_state_and_leave_nothing() {
    // Two processes for many situations: to load what RDMA needs takes an emulated machine seconds.
    let long = Duration::from_secs(60);
    for (run, (give_up, probes)) in [(long, "3"), (END_GIVE_UP, "3"), (long, "1")]
        .into_iter()
        .enumerate()
    {
        let ended = two_nodes("ends::situations", |rank, command| {
            two_ports(rank, command)
                .env(WHAT, run.to_string())
                // Only what is brought about here brings it out of a state.
                .env("NCCL_IB_RETRY_CNT", "7")
                .env("RINGSIGHT_NET_TIMEOUT_MS", "60000")
                .env("RINGSIGHT_NET_PROBE_MS", "60000")
                .env("RINGSIGHT_NET_PROBATION_MS", "60000")
                .env("RINGSIGHT_NET_PROBATION_PROBES", probes)
                .env("RINGSIGHT_NET_GIVE_UP_MS", give_up.as_millis().to_string());
        });
        mend();
        check("ends", &ended, &["ended "], &["use a socket"]);
        for (_, text) in &ended {
            let told = text.lines().filter(|line| line.starts_with("ended "));
            told.for_each(|line| println!("{line}"));
        }
    }
}

#[test]
#[ignore = "guest: needs two RDMA links"]
fn children_that_share_a_proxy_end_and_leave_what_is_their_parents() {
    let ended = two_nodes("ends::sharer", |rank, command| {
        patient(two_ports(rank, command));
    });
    mend();
    check("children", &ended, &["(epoch 1)"], &["use a socket"]);
}
