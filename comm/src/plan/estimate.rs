//! How long a plan would take: what `ncclGroupSimulateEnd` tells.
//!
//! The model: a plan costs its launch, then all its channels' work one after another, since the host device runs them on
//! one thread. A work costs the handing over of each FIFO slot, and its bytes at the pace of the slots' way. It knows no
//! late peers, no busy machine and no overlap of one rank's steps with another's. Two ranks on two cores were measured to
//! take between half and twice as long; ranks that share cores take longer. That serves its purpose: comparing one group
//! of operations with another.

use std::time::Duration;

use ringsight_kernels::{Connections, Work};
use ringsight_records::{Algorithm, Function};

/// What a way costs.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Nanoseconds to hand over a slot.
    pub slot_ns: f64,
    /// Nanoseconds for each byte.
    pub byte_ns: f64,
}

/// Nanoseconds from a launch to the start of its work.
pub const LAUNCH_NS: f64 = 7_000.0;
/// Within a rank: a copy, no slots.
pub const LOCAL: Way = Way {
    slot_ns: 0.0,
    byte_ns: 0.08,
};
/// Through memory that both ranks have mapped.
pub const SHARED: Way = Way {
    slot_ns: 3_000.0,
    byte_ns: 0.3,
};
/// Through the proxies of both ranks.
pub const NETWORK: Way = Way {
    slot_ns: 25_000.0,
    byte_ns: 0.8,
};

/// The load of one plan.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    ns: f64,
}

impl Load {
    /// Adds `slots` slots with `bytes` bytes together.
    pub(super) fn add(&mut self, way: Way, slots: u32, bytes: usize) {
        self.ns += way.slot_ns * f64::from(slots) + way.byte_ns * bytes as f64;
    }

    /// Adds a work of a collective; `way` is that of its ring.
    pub(super) fn add_work(&mut self, work: &Work, way: Way) {
        let part = work.part.len() * work.data_type.size();
        if matches!(work.connections, Connections::Local) {
            return self.add(LOCAL, 0, part);
        }
        let (steps, ranks) = (work.steps(), work.ranks as usize);
        // What each rank passes on of a part.
        let bytes = match work.function {
            Function::AllReduce if work.algorithm == Algorithm::OneShot => part * (ranks - 1),
            Function::AllReduce => 2 * part * (ranks - 1),
            Function::AllGather | Function::ReduceScatter | Function::AlltoAll => part * (ranks - 1),
            _ => part,
        };
        self.add(way, steps.send.max(steps.recv), bytes);
    }

    /// How long the plan would take.
    pub(super) fn time(self) -> Duration {
        Duration::from_nanos((LAUNCH_NS + self.ns) as u64)
    }
}
