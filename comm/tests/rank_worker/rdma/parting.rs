//! A receiver that ends its communicator as soon as it has its data.

use ringsight_comm::{abi, error::ResultCode};
use ringsight_records::DataType;

use super::{
    connections::work_until_on,
    control::Control,
    ends::{END, How, end},
    links::{devices, mend, packets, set_link},
};
use crate::{
    common::{Rank, ok, waiting::eventually},
    fabric::{Fabric, Port},
};

/// Several steps, fewer than a FIFO has slots: all of them are granted when the receiver's kernel runs.
const COUNT: usize = 200_001;

/// Ends both ranks in each way.
pub(crate) fn receiver_leaves() {
    let control = Control::of_process();
    for how in [How::Destroy, How::Finalize] {
        for goes_down in [false, true] {
            run(&control, how, goes_down);
        }
    }
    control.rank.leave();
}

/// Rank 0 sends to rank 1, which acknowledges nothing; with `goes_down` the port fails besides when the data is there.
fn run(control: &Control, how: How, goes_down: bool) {
    let rank = control.rank.rank;
    let comm = control.make();
    let mut data = vec![1_f32; COUNT];
    // The connection of messages is made.
    pass(&comm, &mut data);
    comm.synchronize();
    work_until_on(control, &comm, 0);
    let device = &devices(0)[0];
    let credits = packets(device, "rcvd_pkts");
    control.meet();
    if rank == 1 {
        data.fill(0.0);
        pass(&comm, &mut data);
    } else {
        data.fill(2.0);
        eventually("rank 1's credits are there", || {
            packets(device, "rcvd_pkts") > credits
        });
        Fabric::here().lose_sent(Port { rank: 1, link: 0 }, true);
        pass(&comm, &mut data);
    }
    if rank == 1 {
        comm.synchronize();
        assert!(data.iter().all(|value| *value == 2.0), "{how:?} {goes_down}");
    }
    control.meet();
    if rank == 0 && goes_down {
        set_link(0, false);
    }
    let (code, text, took) = end(&comm, how);
    println!(
        "parted {how:?} {goes_down} rank {rank}: {} ms {code:?} {text}",
        took.as_millis()
    );
    assert_eq!(
        code,
        ResultCode::Success,
        "{how:?} {goes_down} rank {rank}: {text}"
    );
    assert!(took < END, "{how:?} {goes_down} rank {rank} took {took:?}");
    crate::common::host().stream_destroy(comm.stream).unwrap();
    control.meet();
    if rank == 0 {
        mend();
    }
    control.meet();
}

/// Rank 0 sends the data to rank 1.
fn pass(comm: &Rank, data: &mut [f32]) {
    let (at, count, kind) = (data.as_mut_ptr(), data.len(), DataType::Float32.code().into());
    // SAFETY: so many numbers, which live until the stream is synchronized or the communicator has ended.
    ok(unsafe {
        match comm.rank {
            0 => abi::ncclSend(at.cast(), count, kind, 1, comm.comm, comm.stream),
            _ => abi::ncclRecv(at.cast(), count, kind, 0, comm.comm, comm.stream),
        }
    });
}
