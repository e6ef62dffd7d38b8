//! Queues and devices that fail under connections with failover off. Needs mlx5 devices: soft-RoCE's do not fail so.

use super::{
    shared::DEVICE,
    single::{TIMEOUT, fails, says},
};

/// By the device's word alone: the requests of what has failed never end here, and time-outs are as by default, more than a minute.
#[test]
#[ignore = "guest: needs mlx5 devices"]
fn queues_and_devices_that_fail_end_a_connection_without_failover() {
    for (what, off, why) in [
        ("queue pair", &[0, 1][..], "a queue pair, or itself, cannot go on"),
        ("queue pair", &[1], "a queue pair, or itself, cannot go on"),
        ("completion queue", &[0, 1], "the completion queue cannot go on"),
        // Last.
        (DEVICE, &[0, 1], "a queue pair, or itself, cannot go on"),
    ] {
        says(&fails(what, off, |_| {}), why);
    }
}

/// Without the device's word, by time.
#[test]
#[ignore = "guest: needs mlx5 devices"]
fn a_queue_that_fails_without_a_word_ends_a_connection_without_failover() {
    let ended = fails("queue pair", &[0, 1], |command| {
        let half = (TIMEOUT / 2).as_millis().to_string();
        command
            .env("NCCL_IB_RETURN_ASYNC_EVENTS", "0")
            .env("RINGSIGHT_NET_TIMEOUT_MS", &half)
            .env("RINGSIGHT_NET_GIVE_UP_MS", &half);
    });
    says(&ended, "no completion in time");
}
