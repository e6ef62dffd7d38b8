//! Operations whose queues fail under a port that is up: mlx5 only, where the stand-in for the hardware does it.

use super::{
    links::two_ports,
    nodes::{check, patient, two_nodes},
};

#[test]
#[ignore = "guest: needs mlx5 devices"]
fn operations_go_on_over_the_backup_when_a_queue_fails_and_go_back() {
    let ended = two_nodes("queues::go_on", |rank, command| {
        patient(two_ports(rank, command));
    });
    check(
        "queues fail",
        &ended,
        &["(epoch 4)"],
        &["via NET/Socket", "use a socket", "no completion in time"],
    );
    let said = "failed: queue pair not usable (path 0 ";
    assert!(ended[0].1.contains(said), "no {said:?} in\n{}", ended[0].1);
}

/// The requests of a queue that has failed never end here: without its device's word only the time-out finds it.
#[test]
#[ignore = "guest: needs mlx5 devices"]
fn a_queue_that_fails_is_found_by_time_out_where_events_are_not_heeded() {
    let ended = two_nodes("queues::go_on", |rank, command| {
        two_ports(rank, command).env("NCCL_IB_RETURN_ASYNC_EVENTS", "0");
    });
    check(
        "queues fail",
        &ended,
        &["(epoch 4)"],
        &["via NET/Socket", "use a socket", "queue pair not usable"],
    );
    // By the one of the two that has requests under way.
    let said = "failed: no completion in time (path 0 ";
    assert!(
        ended.iter().any(|(_, text)| text.contains(said)),
        "no {said:?}: {ended:?}"
    );
}
