//! How long a plan would take: the model behind `ncclGroupSimulateEnd`.
//!
//! The model: a plan costs its launch, then all its channels' work one after another, since the host device runs them on
//! one thread. A work costs the handing over of each FIFO slot, and its bytes at the pace of the slots' link. It knows no
//! late peers, no busy machine and no overlap of one rank's steps with another's. Two ranks on two cores were measured to
//! take between half and twice as long; ranks that share cores take longer. That serves its purpose: comparing one group
//! of operations with another.

use std::time::Duration;

use ringsight_kernels::{Connections, Work};
use ringsight_records::{Algorithm, Function};

/// What handing over data costs, by where it goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkCost {
    /// Nanoseconds to hand over a slot.
    pub(crate) slot_ns: f64,
    /// Nanoseconds for each byte.
    pub(crate) byte_ns: f64,
}

/// Nanoseconds from a launch to the start of its work.
pub(crate) const LAUNCH_NS: f64 = 7_000.0;
/// Within a rank: a copy, no slots.
pub(crate) const LOCAL: LinkCost = LinkCost {
    slot_ns: 0.0,
    byte_ns: 0.08,
};
/// Through memory that both ranks have mapped.
pub(crate) const SHARED: LinkCost = LinkCost {
    slot_ns: 3_000.0,
    byte_ns: 0.3,
};
/// Through the proxies of both ranks.
pub(crate) const NETWORK: LinkCost = LinkCost {
    slot_ns: 25_000.0,
    byte_ns: 0.8,
};

/// The load of one plan.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Load {
    ns: f64,
}

impl Load {
    /// Adds `slots` slots with `bytes` bytes together.
    pub(crate) fn add(&mut self, link: LinkCost, slots: u32, bytes: usize) {
        self.ns += link.slot_ns * f64::from(slots) + link.byte_ns * bytes as f64;
    }

    /// Adds a work of a collective; `link` is that of its ring.
    pub(crate) fn add_work(&mut self, work: &Work, link: LinkCost) {
        let part = work.part.len() * work.data_type.size();
        if matches!(work.connections, Connections::Local) {
            return self.add(LOCAL, 0, part);
        }
        let steps = work.steps();
        let bytes = passed_on(work.function, work.algorithm, part, work.ranks as usize);
        self.add(link, steps.send.max(steps.recv), bytes);
    }

    /// How long the plan would take.
    pub(crate) fn time(self) -> Duration {
        Duration::from_nanos((LAUNCH_NS + self.ns) as u64)
    }
}

/// What each rank passes on of a part of so many bytes.
fn passed_on(function: Function, algorithm: Algorithm, part: usize, ranks: usize) -> usize {
    match (function, algorithm) {
        (Function::AllReduce, Algorithm::OneShot) => part * (ranks - 1),
        // A part of what each rank owns.
        (Function::AllReduce, Algorithm::Ring) => 2 * part * (ranks - 1),
        (Function::AllReduce, _) => 2 * part / ranks * (ranks - 1),
        (Function::AllGather | Function::ReduceScatter | Function::AlltoAll, _) => part * (ranks - 1),
        _ => part,
    }
}

#[cfg(test)]
mod tests {
    use ringsight_kernels::schedule::divisible;
    use ringsight_records::DataType;

    use super::*;

    #[test]
    fn an_all_reduce_moves_as_much_round_a_ring_as_among_peers() {
        let moved = |algorithm| {
            let part = divisible(Function::AllReduce, algorithm, DataType::Float32, 1 << 20, 4);
            passed_on(Function::AllReduce, algorithm, part * 4, 4)
        };
        assert_eq!(moved(Algorithm::Ring), 6 << 20);
        assert_eq!(moved(Algorithm::TwoShot), moved(Algorithm::Ring));
        assert_eq!(moved(Algorithm::OneShot), 3 << 22);
    }
}
