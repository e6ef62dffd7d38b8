//! A communicator: one rank's part in a set of ranks.

mod buffers;
mod child;
mod config;
mod device_fifos;
mod ending;
mod grow;
mod init;
mod lifecycle;
mod losses;
mod negotiation;
mod peer_memory;
mod reduce_ops;
mod registration;
mod registry;
mod scratch;
mod sequence;
mod shared_proxy;
mod windows;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, atomic::AtomicBool};

use ringsight_comm_base::error::{Error, Result};
use ringsight_records::{Kind, Record, State};

use crate::{
    bootstrap::Bootstrap,
    device::{Device, device},
    launch::{LaunchContext, LaunchQueue},
    observe,
    topology::Topology,
    watchdog,
};

/// Feeds bytes to the parser of what ranks agree on, for [`crate::fuzzing`].
pub(crate) fn fuzz(data: &[u8]) {
    negotiation::Proposal::fuzz(data);
}

pub(crate) use buffers::Buffers;
pub use child::{ChildJob, Selection};
pub use config::Config;
pub use grow::GrowJob;
pub use init::InitJob;
pub(crate) use lifecycle::Background;
use lifecycle::Faults;
pub use lifecycle::Lifecycle;
use reduce_ops::ReduceOps;
pub use registration::PAGE;
pub(crate) use registration::Registrations;
pub use registry::{Handle, all, find, fulfil, is_made, lookup, remove, reserve, state, tear_out, withdraw};
pub(crate) use ringsight_comm_base::sync::lock;
use sequence::Sequences;
pub(crate) use windows::{Part, WindowPointers};

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
    /// What its launches work with.
    pub(crate) launch: LaunchContext,
    /// All operations have come to their end, and no more will come: who shares memory may free it.
    peers_ended_well: Arc<AtomicBool>,
    /// FIFOs in the memory of GPUs, if there are any.
    device_fifos: Option<device_fifos::DeviceFifos>,
    /// Reductions that the caller made.
    pub(crate) reduce_ops: ReduceOps,
    life: Arc<Lifecycle>,
    membership: shared_proxy::Membership,
    /// Its ranks, as its proxy counts them.
    proxy_ranks: Arc<[u32]>,
    faults: Arc<Faults>,
    planner: Mutex<Planner>,
    bootstrap: Arc<Bootstrap>,
    children: Mutex<child::Counts>,
    grows: Mutex<grow::Grows>,
    registrations: Registrations,
    /// What is known of buffers that operations use.
    pub(crate) buffers: Buffers,
    /// Windows that all ranks have registered together.
    pub(crate) windows: windows::Windows,
    finalized: AtomicBool,
    /// Which call terminated its operations, leaving it only to be destroyed and to make children from.
    given_up: OnceLock<&'static str>,
    ended: AtomicBool,
    /// Which process it belongs to; see [`fork::generation`].
    fork: u32,
    table: Mutex<Option<observe::TableEntry>>,
}

/// What the thread that makes calls on a communicator works on.
pub(crate) struct Planner {
    pub(crate) sequences: Sequences,
    pub(crate) queue: LaunchQueue,
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

    /// The planner, to be held while a group is enqueued or launched.
    pub(crate) fn planner(&self) -> MutexGuard<'_, Planner> {
        lock(&self.planner)
    }

    /// Bytes of the device's memory that it holds for itself.
    pub(crate) fn device_bytes(&self) -> usize {
        self.device_fifos.as_ref().map_or(0, |fifos| fifos.bytes)
    }

    /// Who looks for operations that do not end, if anybody does.
    pub(crate) fn watch(&self) -> Option<&watchdog::Watch> {
        self.launch.watch()
    }

    /// What its handle stands for.
    pub(crate) fn life(&self) -> &Arc<Lifecycle> {
        &self.life
    }

    /// Plans that it holds memory for, once all notes of finished ones are read: those that run once, and those of graphs.
    #[must_use]
    pub fn held_plans(&self) -> (usize, usize) {
        let mut planner = self.planner();
        planner.queue.submitted.drain();
        planner.queue.submitted.held()
    }

    /// What went wrong behind the caller's back, if anything did.
    #[must_use]
    pub fn async_error(&self) -> Option<Error> {
        self.faults.get()
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
            self.launch.checks.stop();
            self.stop_buffer_exchange();
        }
    }
}
