//! What was counted: by the target, and by the probes.

use ringsight_records::{Kind, probed::Tally};

use crate::{
    account::ByKind,
    attach::{CALL_BYTES, RECORD_BYTES},
};

/// The target's own counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Events by kind since attaching, as the library counted them.
    pub emitted: ByKind,
    /// Of those, events that found the shared ring full.
    pub lost: ByKind,
    /// What `emitted` was at attach.
    pub emitted_before: ByKind,
    /// What `lost` was at attach.
    pub lost_before: ByKind,
}

impl Counters {
    pub(crate) fn new((before, now): ((ByKind, ByKind), (ByKind, ByKind))) -> Self {
        let since =
            |now: ByKind, before: ByKind| std::array::from_fn(|kind| now[kind].wrapping_sub(before[kind]));
        Self {
            emitted: since(now.0, before.0),
            lost: since(now.1, before.1),
            emitted_before: before.0,
            lost_before: before.1,
        }
    }
}

/// What the probes did, over all processes of the session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeStats {
    /// Records by kind that passed a probe, lost ones included.
    pub hits: ByKind,
    /// Records by kind that found the eBPF ring buffer full.
    pub lost: ByKind,
    /// Records that could not be read from their process's memory.
    pub faults: u64,
    /// Calls of stock libraries, lost ones included.
    pub calls: u64,
    /// Calls that found the eBPF ring buffer full.
    pub calls_lost: u64,
    /// Bytes that went through the eBPF ring buffer.
    pub bytes: u64,
}

impl ProbeStats {
    pub(crate) fn add(&mut self, tally: &Tally) {
        for kind in 0..Kind::LIMIT {
            self.hits[kind] += tally.hits[kind];
            self.lost[kind] += tally.lost[kind];
            self.bytes += (tally.hits[kind] - tally.lost[kind].min(tally.hits[kind])) * RECORD_BYTES;
        }
        self.faults += tally.faults;
        self.calls += tally.calls;
        self.calls_lost += tally.calls_lost;
        self.bytes += (tally.calls - tally.calls_lost.min(tally.calls)) * CALL_BYTES;
    }
}
