//! A communicator: one rank's part in a set of ranks.

mod config;
mod init;
mod lifecycle;
mod registry;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::Sender,
    },
    time::Duration,
};

use ringsight_kernels::AbortWord;
use ringsight_records::{Flags, Kind, Record, State};

use crate::{
    bootstrap::Bootstrap,
    device::{Capture, Device, device},
    error::{Error, Result},
    launch::{
        Order,
        observer::PlanObserver,
        reclaim::{Plans, Reclaim},
    },
    observe,
    plan::{OpInfo, ReduceOps, Sequences},
    proxy::{Proxy, ProxyOp},
    topology::Topology,
    transport::{Connector, RingConnections},
};

pub use config::Config;
pub use init::InitJob;
pub(crate) use lifecycle::Background;
use lifecycle::Faults;
pub use lifecycle::Lifecycle;
pub use registry::{Handle, fulfil, is_made, lookup, remove, reserve, state, tear_out, withdraw};

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
    /// Which rank runs where.
    pub(crate) topology: Arc<Topology>,
    /// By channel; `None` when there is one rank only.
    pub(crate) rings: Vec<Option<RingConnections>>,
    /// Bytes of a FIFO slot.
    pub(crate) slot_bytes: usize,
    /// Work elements of its FIFO.
    pub(crate) work_fifo_depth: usize,
    /// Makes point-to-point connections.
    pub(crate) connector: Connector,
    /// Releases every wait.
    pub(crate) abort: Arc<AbortWord>,
    /// Reductions that the caller made.
    pub(crate) reduce_ops: ReduceOps,
    /// Where finished plans go.
    pub(crate) reclaim: Sender<Reclaim>,
    life: Arc<Lifecycle>,
    proxied: Arc<Proxied>,
    faults: Arc<Faults>,
    planner: Mutex<Planner>,
    proxy: Arc<Proxy>,
    bootstrap: Bootstrap,
    finalized: AtomicBool,
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
}

/// Proxy operations that are still to finish, by (operation, replay).
#[derive(Debug, Default)]
pub(crate) struct Proxied(Mutex<HashMap<(u32, u32), Outstanding>>);

/// Proxy operations of one run of one operation.
#[derive(Debug)]
struct Outstanding {
    left: u32,
    total: u32,
    info: OpInfo,
}

impl Proxied {
    /// Expects `count` proxy operations of `info` to finish.
    fn expect(&self, info: OpInfo, replay: u32, count: u32) {
        lock(&self.0).insert(
            (info.op, replay),
            Outstanding {
                left: count,
                total: count,
                info,
            },
        );
    }

    /// One has finished.
    pub(crate) fn completed(&self, op: u32, replay: u32) {
        let mut waiting = lock(&self.0);
        let Some(outstanding) = waiting.get_mut(&(op, replay)) else {
            return;
        };
        outstanding.left -= 1;
        if outstanding.left == 0 {
            let Outstanding { total, info, .. } = *outstanding;
            waiting.remove(&(op, replay));
            drop(waiting);
            let record = info.record(Kind::ProxyCompleted, State::STOP, observe::now_ns(), replay);
            observe::emit(&Record {
                value: u64::from(total),
                ..record
            });
        }
    }
}

/// Locks, whoever panicked while holding it: a panic is reported as an internal error at the call that it broke, and
/// what these locks guard is consistent between statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Communicator {
    /// Number of channels.
    #[must_use]
    pub fn channels(&self) -> usize {
        self.rings.len()
    }

    /// The planner, to be held while a group is enqueued or launched.
    pub(crate) fn planner(&self) -> MutexGuard<'_, Planner> {
        lock(&self.planner)
    }

    /// What its handle stands for.
    pub(crate) fn life(&self) -> &Arc<Lifecycle> {
        &self.life
    }

    /// What went wrong behind the caller's back, if anything did.
    #[must_use]
    pub fn async_error(&self) -> Option<Error> {
        self.faults.get()
    }

    /// Whether operations may be enqueued.
    ///
    /// # Errors
    /// After finalize, abort or an asynchronous error, and in a child of the process that made it.
    pub fn check_usable(&self) -> Result<()> {
        self.check_fork()?;
        if self.finalized.load(Ordering::Relaxed) {
            return Err(Error::usage(
                "comm has been finalized: only ncclCommDestroy and queries are left",
            ));
        }
        if self.abort.is_set() {
            return Err(Error::usage("comm has been aborted"));
        }
        match self.async_error() {
            Some(error) => Err(error.within("comm has failed earlier")),
            None => Ok(()),
        }
    }

    /// Posts network work to the proxy.
    pub(crate) fn post(&self, ops: &[ProxyOp], observer: &PlanObserver, replay: u32) {
        for (info, count) in observer.proxied() {
            self.proxied.expect(info, replay, count);
        }
        for op in ops {
            self.proxy.save_op(ProxyOp { replay, ..*op });
        }
        self.proxy.start();
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
        let reclaim = self.reclaim.clone();
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
                let _ = reclaim.send(Reclaim::Graph(graph));
            }),
        )?;
        observe::emit(&record);
        Ok(())
    }

    /// Nothing can be enqueued any more; [`Communicator::flush`] does the rest.
    ///
    /// # Errors
    /// That has been said before, or it belongs to the parent of this forked process.
    pub fn close(&self) -> Result<()> {
        self.check_fork()?;
        // Relaxed: a caller that enqueues meanwhile is on another thread without order to this one.
        if self.finalized.swap(true, Ordering::Relaxed) {
            return Err(Error::argument("comm has been finalized already"));
        }
        Ok(())
    }

    /// Waits until all work that was enqueued is done.
    ///
    /// # Errors
    /// What went wrong asynchronously meanwhile.
    pub fn flush(&self) -> Result<()> {
        let mut planner = self.planner();
        planner
            .plans
            .wait(|_| self.abort.is_set() || self.faults.get().is_some());
        drop(planner);
        if self.faults.get().is_none() && !self.abort.is_set() {
            self.proxy.stop();
        }
        self.async_error().map_or(Ok(()), Err)
    }

    fn check_fork(&self) -> Result<()> {
        if self.fork == observe::fork_generation() {
            return Ok(());
        }
        Err(Error::usage(
            "comm belongs to the parent of this forked process: make a communicator after the fork",
        ))
    }

    /// Ends the communicator: its threads are joined when the last reference is gone.
    fn end(&self, state: State) {
        // From here on replays of graphs that still hold plans of this communicator give up instead of waiting for
        // ranks and threads that are gone.
        self.abort.set();
        let mut planner = self.planner();
        planner.plans.wait_aborted(Duration::from_secs(10));
        if let Ok(device) = device() {
            planner.order.clear(&**device);
        }
        drop(planner);
        self.bootstrap.leave(state == State::ABORTED);
        lock(&self.table).take();
        if !self.ended.swap(true, Ordering::Relaxed) {
            observe::emit(&self.lifecycle(Kind::CommDestroy, state, 0));
        }
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

    /// Waits for its work and ends it.
    ///
    /// # Errors
    /// As [`Communicator::flush`]; the communicator is gone all the same.
    pub fn destroy(&self) -> Result<()> {
        self.check_fork()?;
        self.finalized.store(true, Ordering::Relaxed);
        let result = self.flush();
        let failed = self.abort.is_set() || self.faults.get().is_some();
        self.end(if failed { State::ABORTED } else { State::STOP });
        result
    }

    /// Ends it at once: every wait is released, work that has begun gives up.
    pub fn abort(&self) {
        if self.check_fork().is_err() {
            return;
        }
        self.life.abort();
        self.end(State::ABORTED);
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
