//! Connections without failover, one of which fails.

use ringsight_comm::error::ResultCode;

use super::{
    connections::{ends, work_until_on},
    control::Control,
    ends::{END, How, Work, end},
    links::lose_packets,
};
use crate::{
    common::{host, processes::variable, state, variables::WHAT, waiting::eventually},
    fabric::{Port, fail_completion_queue, fail_device, fail_queue_pair},
};

/// The first port of rank 0.
const PORT: Port = Port { rank: 0, link: 0 };

/// Has what the test names fail, and ends the communicator.
pub(crate) fn connection_fails() {
    let (control, what) = (Control::of_process(), variable(WHAT));
    let rank = control.rank.rank;
    let comm = control.make();
    work_until_on(&control, &comm, 0);
    control.meet();
    if rank == 0 {
        // The first connection's.
        let number = ends()[0].path[0].queue_pair;
        match what.as_str() {
            "packets" => lose_packets(0, true),
            "queue pair" => fail_queue_pair(PORT, number),
            "completion queue" => fail_completion_queue(PORT, number),
            _ => fail_device(PORT),
        }
    }
    control.meet();
    let work = Work::begin(&comm);
    // The other connections end with the communicator, whatever they are in.
    eventually("the communicator has failed", || {
        state(comm.comm) != ResultCode::Success
    });
    let (code, text, took) = end(&comm, How::Destroy);
    println!("failed as it should: rank {rank} {code:?} {text}");
    assert_ne!(code, ResultCode::Success);
    assert!(took < END, "{took:?}");
    assert!(!work.came_to_its_end());
    host().stream_destroy(comm.stream).unwrap();
    control.meet();
    control.rank.leave();
}
