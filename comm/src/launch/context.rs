//! What the launches of one communicator work with.

use std::sync::{Arc, Weak};

use ringsight_comm_base::{error::Result, sync::lock};
use ringsight_kernels::{AbortWord, PeerMemory};
use ringsight_records::{Flags, Kind, Record, State};

use super::{Order, Posting, SubmittedPlans};
use crate::{
    buffer_exchange::BufferExchange,
    checks::Checks,
    device::{Capture, Device, Launcher},
    observe,
    plan::Capabilities,
    progress::{ArrivalLog, RetireQueue, Retired},
    proxy::Connector,
    transport::RingConnections,
    watchdog::{RegisteredWatch, Watch},
};

/// What the launches of one communicator work with. It is fixed when the communicator is made.
pub(crate) struct LaunchContext {
    /// The communicator's id.
    pub(crate) comm: u64,
    /// Its device number.
    pub(crate) device: i32,
    /// What it can do.
    pub(crate) capabilities: Capabilities,
    /// By channel; `None` when there is one rank only.
    pub(crate) rings: Vec<Option<RingConnections>>,
    /// Makes point-to-point connections.
    pub(crate) connector: Connector,
    /// Memory that the kernels of all ranks reach, if they do.
    pub(crate) peers: Option<Arc<PeerMemory>>,
    /// Callers' memory that other processes map; `None` if all ranks are of this one, or do not reach each other's memory.
    pub(crate) buffer_exchange: Option<BufferExchange>,
    /// Network work.
    pub(crate) posting: Posting,
    /// Releases every wait.
    pub(crate) abort: Arc<AbortWord>,
    /// Where plans and graphs go that are over.
    pub(crate) retired: Arc<RetireQueue>,
    /// Whether the ranks call alike, and are there.
    pub(crate) checks: Arc<Checks>,
    /// `None` if all ranks are on one node.
    pub(crate) arrivals: Option<Arc<ArrivalLog>>,
    /// `None` if the watchdog is off.
    pub(crate) watch: Option<RegisteredWatch>,
}

/// What changes with each launch of a communicator: held by the thread that launches.
pub(crate) struct LaunchQueue {
    pub(crate) submitted: SubmittedPlans,
    pub(crate) order: Order,
    pub(crate) launcher: Launcher,
}

impl LaunchContext {
    /// Who looks for operations that do not end, if anybody does.
    pub(crate) fn watch(&self) -> Option<&Watch> {
        self.watch.as_ref().map(|watch| &***watch)
    }

    /// Sees to it that what a graph holds of the communicator is given back when the graph is gone; the first time that it is called in a capture.
    pub(super) fn retain_graph(
        &self,
        device: &dyn Device,
        capture: Capture,
        queue: &mut LaunchQueue,
    ) -> Result<()> {
        let graph = capture.id;
        let Some(ops) = queue.submitted.retain(graph) else {
            return Ok(());
        };
        let (retired, checks) = (self.retired.clone(), self.checks.clone());
        let watch = self.watch.as_ref().map(|watch| Arc::downgrade(watch));
        let forget = self.posting.on_graph_gone();
        let record = Record {
            comm: self.comm,
            rank: self.capabilities.rank,
            op: graph,
            pid: std::process::id(),
            ..Record::new(Kind::Graph, State::START, observe::now_ns())
        }
        .with_flags(Flags::GRAPH);
        device.capture_retain(
            capture,
            Box::new(move || {
                for op in lock(&ops).drain(..) {
                    observe::release_captured_op(op);
                }
                observe::emit(&Record {
                    state: State::STOP,
                    time_ns: observe::now_ns(),
                    ..record
                });
                checks.forget(graph);
                forget(graph);
                if let Some(watch) = watch.as_ref().and_then(Weak::upgrade) {
                    watch.forget_graph(graph);
                }
                retired.put(Retired::Graph(graph));
            }),
        )?;
        observe::emit(&record);
        Ok(())
    }
}
