//! Operations whose queues fail under a port that is up: mlx5 only, where the stand-in for the hardware does it.

use ringsight_records::Function;

use super::{
    data::add_up,
    failover::until_none,
    links::two_ports,
    nodes::{check, ends, patient, two_nodes},
};
use crate::{
    common::{Call, rank_of_process},
    fabric::{Port, fail_completion_queue, fail_queue_pair},
};

#[test]
#[ignore = "helper: needs mlx5 devices, run in a guest"]
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
#[ignore = "helper: needs mlx5 devices, run in a guest"]
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

/// All-reduces, under one of which a queue pair of rank 0 fails, and, when its connection is back, under another its completion queue.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn go_on() {
    let Some(rank) = rank_of_process() else {
        return;
    };
    let call = Call::new(Function::AllReduce, 70_001);
    call.check(&rank, true);
    let mut data = vec![1_f32; 300_001];
    let port = Port { rank: 0, link: 0 };
    for (epoch, fail) in [(2, fail_queue_pair as fn(_, _)), (4, fail_completion_queue)] {
        add_up(&rank, rank.stream, &mut data);
        if rank.rank == 0 {
            // The first connection's, both times.
            fail(port, ends()[0].path[0].queue_pair);
        }
        rank.synchronize();
        let expected = 2_f32.powi(epoch as i32 / 2);
        assert!(data.iter().all(|value| *value == expected), "epoch {epoch}");
        // It left its path, and came back: an epoch each.
        let is_back = || ends().iter().any(|end| end.epoch >= epoch && end.active == 0);
        until_none(&rank, || call.check(&rank, true), || u64::from(!is_back()));
    }
    rank.leave();
    println!("rank done");
}
