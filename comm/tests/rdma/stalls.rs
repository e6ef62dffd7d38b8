//! What the watchdog says while the network carries nothing: who waits for it, and no hang, though hangs abort here.

use std::time::Duration;

use super::{
    links::mend,
    nodes::{check, two_nodes},
    shared::PHASES,
};

/// Threshold: an emulated machine may take long for what it does.
const THRESHOLD: Duration = Duration::from_secs(1);

#[test]
#[ignore = "guest: needs two RDMA links"]
fn a_network_that_carries_nothing_is_named_and_ends_no_job() {
    let ended = two_nodes("stalls::network_away", |_, command| {
        command
            .env("NCCL_KERNEL_TIMEOUT_MS", THRESHOLD.as_millis().to_string())
            .env("RINGSIGHT_WATCHDOG_ACTION", "abort")
            // One path each, which is not left before the network is there again.
            .env("NCCL_IB_RETRY_CNT", "7")
            .env("RINGSIGHT_NET_TIMEOUT_MS", "60000")
            .env("RINGSIGHT_NET_GIVE_UP_MS", "60000");
    });
    mend();
    let late = "Verdict: STUCK_NIC (late): the network of rank ";
    check(
        "stalls",
        &ended,
        &[
            late,
            "of which nothing is acknowledged, for ",
            "whose port is down, for ",
            "of graph 1, replay 1",
        ],
        &["(hang)", "use a socket"],
    );
    for (rank, (_, text)) in ended.iter().enumerate() {
        for (number, begin) in PHASES.iter().enumerate() {
            let phase = text
                .split(begin)
                .nth(1)
                .and_then(|rest| match PHASES.get(number + 1) {
                    Some(next) => rest.split(next).next(),
                    None => Some(rest),
                });
            assert!(
                phase.is_some_and(|text| text.contains(late)),
                "rank {rank}: no {late:?} in {begin:?} of\n{text}"
            );
        }
    }
}
