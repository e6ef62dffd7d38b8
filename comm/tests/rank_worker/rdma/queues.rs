//! Operations whose queues fail under a port that is up.

use ringsight_records::Function;

use super::{
    connections::{ends, until_none},
    data::add_up,
};
use crate::{
    common::{Call, processes::rank_of_process},
    fabric::{Port, fail_completion_queue, fail_queue_pair},
};

/// All-reduces, under one of which a queue pair of rank 0 fails, and, when its connection is back, under another its completion queue.
pub(crate) fn go_on() {
    let rank = rank_of_process();
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
}
