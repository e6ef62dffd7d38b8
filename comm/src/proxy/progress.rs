//! The progress thread as other threads see it: its commands, and what they wait for. [`super::engine`] is the thread itself.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io,
    sync::{
        Arc, Condvar, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use ringsight_comm_base::{sync::lock, sys::Wake, threads};
use ringsight_kernels::{AbortWord, Fifo};

use super::{OnCompleted, OnError, activity::Activities, requests::Requests, stalls::Stalls};
use crate::{
    op::{ConnectionId, Endpoint, ProxyOp},
    transport::network::Link,
};

/// A command to the progress thread.
pub(super) enum Command {
    /// A connection exists. Operations may come before it is attached.
    Add(ConnectionId, Endpoint, Arc<Fifo>),
    /// The proxies have agreed on the connection's kind.
    Attach(ConnectionId, Box<Link>),
    /// Remove a connection, and give up its operations.
    Remove(ConnectionId),
    /// Operations to move.
    Ops(Vec<ProxyOp>),
    /// Answer once all earlier commands are done.
    Settle(SyncSender<()>),
    /// A source of operations that the device requests.
    Watch(Weak<dyn Requests>),
    /// A source expects requests from now on.
    Expect,
}

/// The other threads' side of the progress thread.
pub(super) struct Progress {
    pub(super) rank: u32,
    pub(super) abort: Arc<AbortWord>,
    pub(super) on_completed: OnCompleted,
    pub(super) on_error: OnError,
    pub(super) wake: Wake,
    /// Connections that wait for the network.
    pub(super) stalls: Arc<Stalls>,
    /// Activity of the communicators.
    pub(super) activities: Activities,
    inbox: Mutex<Vec<Command>>,
    /// By communicator: operations that are posted and neither finished nor given up. No entry is 0.
    outstanding: Mutex<BTreeMap<u64, usize>>,
    /// Signalled when a communicator has no operation left.
    drained: Condvar,
    ending: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Progress {
    pub(super) fn new(
        rank: u32,
        abort: Arc<AbortWord>,
        on_completed: OnCompleted,
        on_error: OnError,
    ) -> io::Result<Self> {
        Ok(Self {
            rank,
            abort,
            on_completed,
            on_error,
            wake: Wake::new()?,
            stalls: Arc::default(),
            activities: Activities::default(),
            inbox: Mutex::default(),
            outstanding: Mutex::default(),
            drained: Condvar::new(),
            ending: AtomicBool::new(false),
            thread: Mutex::new(None),
        })
    }

    /// Starts the thread by `start`, unless it runs.
    pub(super) fn start_once(&self, start: impl FnOnce() -> io::Result<JoinHandle<()>>) -> io::Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            *thread = Some(start()?);
        }
        Ok(())
    }

    /// Sends a command to the thread.
    pub(super) fn send(&self, command: Command) {
        if let Command::Ops(ops) = &command {
            ops.iter().for_each(|op| self.post(op));
        }
        lock(&self.inbox).push(command);
        self.wake.wake();
    }

    /// For the thread: the commands since its last call.
    pub(super) fn commands(&self) -> Vec<Command> {
        std::mem::take(&mut *lock(&self.inbox))
    }

    /// For the thread: whether it must give up what is left, and end.
    pub(super) fn is_ending(&self) -> bool {
        // Acquire: pairs with the release in `end`; everything posted before is in the inbox.
        self.ending.load(Ordering::Acquire)
    }

    /// Counts an operation as outstanding.
    pub(super) fn post(&self, op: &ProxyOp) {
        *lock(&self.outstanding).entry(op.comm).or_default() += 1;
    }

    /// Whether every posted operation has finished or been given up.
    pub(super) fn is_drained(&self) -> bool {
        lock(&self.outstanding).is_empty()
    }

    /// Waits until every posted operation, or those of communicator `comm`, has finished or been given up. Ends early when `give_up` returns
    /// true; it is called ten times a second.
    pub(super) fn drain(&self, comm: Option<u64>, give_up: impl Fn() -> bool) {
        let mut outstanding = lock(&self.outstanding);
        let is_left = |outstanding: &BTreeMap<u64, usize>| match comm {
            Some(comm) => outstanding.contains_key(&comm),
            None => !outstanding.is_empty(),
        };
        // Operations that are posted to a thread that never ran have no connection, and `end` gives them up.
        while is_left(&outstanding) && lock(&self.thread).is_some() && !give_up() {
            outstanding = self
                .drained
                .wait_timeout(outstanding, Duration::from_millis(100))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits until all earlier commands are done, at most `limit`.
    pub(super) fn settle(&self, limit: Duration) {
        if lock(&self.thread).is_some() {
            let (answer, done) = sync_channel(1);
            self.send(Command::Settle(answer));
            // A thread that has ended has nothing left to do.
            let _ = done.recv_timeout(limit);
        }
    }

    /// Has the thread give up what is left, and joins it.
    pub(super) fn end(&self) {
        // Release: pairs with the acquire in `is_ending`; everything posted before is in the inbox.
        self.ending.store(true, Ordering::Release);
        self.wake.wake();
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            threads::join(thread);
        }
        lock(&self.inbox).clear();
        lock(&self.outstanding).clear();
        self.drained.notify_all();
    }

    /// Uncounts an operation that has finished or been given up.
    pub(super) fn retire(&self, op: &ProxyOp) {
        let mut outstanding = lock(&self.outstanding);
        if let Entry::Occupied(mut entry) = outstanding.entry(op.comm) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
                self.drained.notify_all();
            }
        }
    }
}
