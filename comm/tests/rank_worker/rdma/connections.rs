//! The connections of this process over RDMA, and work that goes on until they are as wanted.

use ringsight_comm::{abi, observe};
use ringsight_records::{
    Function,
    connection::{Connection, ConnectionSlot},
};

use super::control::{Control, WORDS};
use crate::common::{Call, Rank, ok, waiting::eventually};

/// The ends of this process's connections over RDMA, as `ringsight snapshot` sees them.
pub(crate) fn ends() -> Vec<Connection> {
    let slots = observe::pages().unwrap().connections().iter();
    slots.filter_map(ConnectionSlot::read).collect()
}

/// Works with the peer until neither rank counts anything any more, by a communicator that both have: both leave at the same time.
pub(crate) fn until_none(rank: &Rank, mut work: impl FnMut(), count: impl Fn() -> u64) {
    loop {
        work();
        let mut left = [count()];
        let sum = ringsight_records::ReduceOp::Sum.code().into();
        let (place, kind) = (
            (&raw mut left).cast(),
            ringsight_records::DataType::Uint64.code().into(),
        );
        // SAFETY: one number, which lives until the stream is synchronized.
        ok(unsafe { abi::ncclAllReduce(place, place, 1, kind, sum, rank.comm, rank.stream) });
        rank.synchronize();
        if left == [0] {
            return;
        }
    }
}

/// Waits until every end is so.
#[track_caller]
pub(crate) fn until_all(what: &str, is_so: impl Fn(&Connection) -> bool) {
    eventually(what, || {
        // One that is just being written is not seen.
        let ends = ends();
        !ends.is_empty() && ends.iter().all(&is_so)
    });
}

/// All-reduces until every end of either rank is on this path.
pub(crate) fn work_until_on(control: &Control, comm: &Rank, path: u8) {
    loop {
        Call::new(Function::AllReduce, 5003).check(comm, true);
        let all = ends()
            .iter()
            .all(|end| end.active == path && end.phase == Connection::FLOWS);
        if control
            .tell([all.into(); WORDS])
            .iter()
            .all(|words| words[0] == 1)
        {
            return;
        }
    }
}
