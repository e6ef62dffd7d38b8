//! What a rank knows of its own run, by its own clock, and what it was told to do. The collector never reads these files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One rank's account. Times are `CLOCK_REALTIME` nanoseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Truth {
    /// Rank.
    pub(crate) rank: u32,
    /// Process.
    pub(crate) pid: u32,
    /// Node name (`NCCL_HOSTID`).
    pub(crate) host: String,
    /// Collectives in the order in which they were called.
    pub collectives: Vec<Collective>,
    /// Messages sent, in order.
    pub sent: Vec<Message>,
    /// Messages received, in order.
    pub(crate) received: Vec<Message>,
    /// The library's own count of events by kind when the loop was about to begin.
    pub(crate) events_at_gate: BTreeMap<String, u64>,
    /// The same after the communicator was destroyed.
    pub(crate) events: BTreeMap<String, u64>,
    /// The library's own count of events that found its ring full, all kinds.
    pub(crate) ring_lost: u64,
    /// Mean loss over all ranks after each step.
    pub(crate) loss: Vec<f32>,
    /// Accuracy on all validation points at each evaluation.
    pub(crate) accuracy: Vec<f32>,
    /// FNV-1a of the final weights' bits, in hexadecimal.
    pub(crate) weights: String,
    /// From the opened gate to the last step's end.
    pub(crate) loop_ns: u64,
}

/// One collective on one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Collective {
    /// Name, as spans have it.
    pub name: String,
    /// Step of the training loop; 0 before the first.
    pub(crate) step: u32,
    /// Message bytes by nccl-tests' definition.
    pub(crate) bytes: u64,
    /// The note of [`Self::arrived_ns`] was about to be put on the stream.
    pub(crate) queued_ns: u64,
    /// The call was about to be made.
    pub(crate) called_ns: u64,
    /// The call had returned.
    pub(crate) returned_ns: u64,
    /// The stream had got there: noted by a host function put on the stream right before the collective.
    pub(crate) arrived_ns: u64,
    /// The stream had gone past it: noted in the same way right behind the collective.
    pub(crate) left_ns: u64,
    /// How long this rank slept right before the call, on purpose.
    pub(crate) slept_ms: u32,
}

/// One message.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The other rank.
    pub(crate) peer: u32,
    /// Bytes.
    pub(crate) bytes: u64,
    /// The group's first call was about to be made.
    pub(crate) called_ns: u64,
}

/// What a worker is to do. Every rank gets the same.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Configuration {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of nodes that they pretend to be on, in blocks.
    pub nodes: u32,
    /// Training steps.
    pub steps: u32,
    /// Samples in each rank's part of a step's batch: how much a step computes.
    pub batch: u32,
    /// Seed of weights and samples.
    pub seed: u64,
    /// Rest after each step, milliseconds: a job that lasts, for tests that need time during it.
    pub pace_ms: u64,
    /// Who sleeps when.
    pub delays: Vec<Delay>,
    /// RDMA between the nodes, one of whose links fails.
    #[serde(default)]
    pub wire: Option<Wire>,
}

/// RDMA between two nodes of one guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wire {
    /// By node: `NCCL_IB_HCA`.
    pub devices: Vec<String>,
    /// Network device under the first port of node 0.
    pub link: String,
    /// In this step all ranks average a large buffer, and rank 0 takes the link down once it has called for that.
    pub step: u32,
}

/// One intended delay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Delay {
    /// Step, counted from 1.
    pub step: u32,
    /// Rank that sleeps before its first collective of the step.
    pub rank: u32,
    /// For how long, milliseconds.
    pub ms: u32,
}

impl Configuration {
    /// Node of `rank`: ranks are dealt in blocks, as launchers do.
    #[must_use]
    pub fn node(&self, rank: u32) -> u32 {
        (u64::from(rank) * u64::from(self.nodes) / u64::from(self.ranks)) as u32
    }
}
