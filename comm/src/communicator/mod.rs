//! A communicator: one rank's part in a set of ranks.

mod arenas;
mod buffers;
mod child;
mod config;
mod ending;
mod family;
mod init;
mod lifecycle;
mod losses;
mod maps;
mod peers;
mod posting;
mod registration;
mod registry;
mod scratch;
mod terms;
mod windows;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak, atomic::AtomicBool};

use ringsight_kernels::{AbortWord, PeerMemory};
use ringsight_records::{Flags, Kind, Record, State};

use crate::{
    bootstrap::Bootstrap,
    checks::Checks,
    device::{Capture, Device, Launcher, device},
    error::{Error, Result},
    launch::{
        Order,
        reclaim::{Notes, Plans, Reclaim},
    },
    observe,
    plan::limits::Limits,
    plan::{ReduceOps, Sequences},
    topology::Topology,
    transport::{Connector, RingConnections},
    watchdog,
};

/// Feeds bytes to the parser of what ranks agree on, for [`crate::fuzzing`].
pub(crate) fn fuzz(data: &[u8]) {
    terms::Terms::fuzz(data);
}

pub(crate) use buffers::Buffers;
pub use child::{ChildJob, Selection};
pub use config::Config;
pub use init::InitJob;
pub(crate) use lifecycle::Background;
use lifecycle::Faults;
pub use lifecycle::Lifecycle;
use posting::Posting;
pub use registration::PAGE;
pub(crate) use registration::Registrations;
pub use registry::{Handle, find, fulfil, is_made, lookup, remove, reserve, state, tear_out, withdraw};
pub(crate) use ringsight_comm_base::sync::lock;
pub(crate) use windows::Part;

/// One rank of a communicator.
pub struct Communicator {
    /// Hash of the unique id and the size; the same on all ranks.
    pub id: u64,
    /// This rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Device number that was current when it was made.
    pub device: i32,
    /// What the caller chose for it.
    pub(crate) config: Config,
    /// Which rank runs where.
    pub(crate) topology: Arc<Topology>,
    /// By channel; `None` when there is one rank only.
    pub(crate) rings: Vec<Option<RingConnections>>,
    /// Bytes of a FIFO slot.
    pub(crate) slot_bytes: usize,
    /// Whether all ranks' devices do an operation in one shot.
    pub(crate) one_shot: bool,
    /// What the ranks' environments leave to the choice of algorithms.
    pub(crate) limits: Limits,
    /// Callers' memory that other processes map; `None` if all ranks are of this one, or do not reach each other's memory.
    pub(crate) maps: Option<maps::Maps>,
    /// Memory that the kernels of all ranks reach, if they do.
    pub(crate) peers: Option<Arc<PeerMemory>>,
    /// All operations have come to their end, and no more will come: who shares memory may free it.
    peers_ended_well: Arc<AtomicBool>,
    /// FIFOs in the memory of GPUs, if there are any.
    near: Option<arenas::Shared>,
    /// Work elements of its FIFO.
    pub(crate) work_fifo_depth: usize,
    /// Makes point-to-point connections.
    pub(crate) connector: Connector,
    /// Releases every wait.
    pub(crate) abort: Arc<AbortWord>,
    /// Reductions that the caller made.
    pub(crate) reduce_ops: ReduceOps,
    /// Where finished plans go.
    pub(crate) notes: Arc<Notes>,
    life: Arc<Lifecycle>,
    pub(crate) posting: Posting,
    membership: family::Membership,
    /// Its ranks, as its proxy counts them.
    proxy_ranks: Arc<[u32]>,
    faults: Arc<Faults>,
    planner: Mutex<Planner>,
    bootstrap: Arc<Bootstrap>,
    /// Whether the ranks call alike, and are there.
    pub(crate) checks: Arc<Checks>,
    /// `None` if the watchdog is off.
    watch: Option<watchdog::Detected>,
    children: Mutex<child::Counts>,
    registrations: Registrations,
    /// What is known of buffers that operations use.
    pub(crate) buffers: Buffers,
    /// Windows that all ranks have registered together.
    pub(crate) windows: windows::Windows,
    finalized: AtomicBool,
    /// Which call terminated its operations, leaving it only to be destroyed and to make children from.
    given_up: OnceLock<&'static str>,
    ended: AtomicBool,
    /// Which process it belongs to; see [`observe::fork_generation`].
    fork: u32,
    table: Mutex<Option<observe::TableEntry>>,
}

/// What the thread that makes calls on a communicator works on.
pub(crate) struct Planner {
    pub(crate) sequences: Sequences,
    pub(crate) plans: Plans,
    pub(crate) order: Order,
    pub(crate) launcher: Launcher,
}

impl Communicator {
    /// Calls `what` with the communicator's device number current, as kernels, default streams and new memory depend on it.
    ///
    /// # Errors
    /// Of `what`, and of the device.
    pub(crate) fn on_device<T>(&self, what: impl FnOnce(&dyn Device) -> Result<T>) -> Result<T> {
        let device = &**device()?;
        let before = device.enter(self.device)?;
        let result = what(device);
        if let Some(before) = before {
            device.restore(before)?;
        }
        result
    }

    /// Number of channels.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.rings.len()
    }

    /// Parts of a message that have room in the memory of GPUs, where all FIFOs are there.
    pub(crate) fn near_parts(&self) -> Option<usize> {
        let near = self.near.as_ref().filter(|near| near.is_whole);
        near.map(|near| near.arena.parts())
    }

    /// The planner, to be held while a group is enqueued or launched.
    pub(crate) fn planner(&self) -> MutexGuard<'_, Planner> {
        lock(&self.planner)
    }

    /// Who looks for operations that do not end, if anybody does.
    pub(crate) fn watch(&self) -> Option<&watchdog::Watch> {
        self.watch.as_ref().map(|watch| &***watch)
    }

    /// What its handle stands for.
    pub(crate) fn life(&self) -> &Arc<Lifecycle> {
        &self.life
    }

    /// Plans that it holds memory for, once all notes of finished ones are read: those that run once, and those of graphs.
    #[must_use]
    pub fn held_plans(&self) -> (usize, usize) {
        let mut planner = self.planner();
        planner.plans.drain();
        planner.plans.held()
    }

    /// What went wrong behind the caller's back, if anything did.
    #[must_use]
    pub fn async_error(&self) -> Option<Error> {
        self.faults.get()
    }

    /// Ties what a graph holds of this communicator to the graph's life.
    pub(crate) fn retain_graph(
        &self,
        device: &dyn Device,
        capture: Capture,
        planner: &mut Planner,
    ) -> Result<()> {
        let graph = capture.id;
        let Some(ops) = planner.plans.retain(graph) else {
            return Ok(());
        };
        let (notes, checks) = (self.notes.clone(), self.checks.clone());
        let watch = self.watch.as_ref().map(|watch| Arc::downgrade(watch));
        let forget = self.posting.forget();
        let record = Record {
            comm: self.id,
            rank: self.rank,
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
                    watch.forget(graph);
                }
                notes.put(Reclaim::Graph(graph));
            }),
        )?;
        observe::emit(&record);
        Ok(())
    }

    fn lifecycle(&self, kind: Kind, state: State, value: u64) -> Record {
        Record {
            comm: self.id,
            rank: self.rank,
            value,
            pid: std::process::id(),
            ..Record::new(kind, state, observe::now_ns())
        }
    }

    /// Whether it lives in one process with all its peers, for tests of the topology.
    #[must_use]
    pub fn nodes(&self) -> u32 {
        self.topology.nodes()
    }

    /// The bootstrap network, for what later steps exchange between ranks.
    #[must_use]
    pub fn bootstrap(&self) -> &Bootstrap {
        &self.bootstrap
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Also where nobody ended it: a thread of the checks would keep them. Not of a forked child's parent: its threads are
        // not there.
        if self.check_fork().is_ok() {
            self.checks.stop();
            self.stop_mapping();
        }
    }
}
