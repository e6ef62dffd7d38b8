//! The progress thread as other threads see it: what they tell it, and wait for. What it does is [`super::engine`]'s.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use ringsight_kernels::{AbortWord, Fifo};

use super::{
    ConnectionId, OnCompleted, OnError, ProxyOp, engine::Engine, machine::Link, message::Endpoint,
    moves::MovesOfAll, requests::Requests, stalls::Stalls,
};
use crate::{bootstrap::sys::Wake, threads};

/// What the other threads tell the progress thread.
pub(super) enum Command {
    /// A connection exists; operations may come before its socket does.
    Add(ConnectionId, Endpoint, Arc<Fifo>),
    /// What it goes over.
    Attach(ConnectionId, Box<Link>),
    /// Forget it and give up its operations.
    Remove(ConnectionId),
    /// Operations to move.
    Ops(Vec<ProxyOp>),
    /// Tell when all that came before is done.
    Settle(SyncSender<()>),
    /// Whom the device asks for operations.
    Watch(Weak<dyn Requests>),
    /// One of those expects requests from now on.
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
    /// What moves over its connections.
    pub(super) moves: MovesOfAll,
    inbox: Mutex<Vec<Command>>,
    /// Operations posted and neither finished nor given up, by communicator; none is there with 0.
    outstanding: Mutex<BTreeMap<u64, usize>>,
    /// Told when a communicator has none left.
    drained: Condvar,
    ending: AtomicBool,
    thread: Mutex<Option<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that runs under these locks leaves their contents half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
            moves: MovesOfAll::default(),
            inbox: Mutex::default(),
            outstanding: Mutex::default(),
            drained: Condvar::new(),
            ending: AtomicBool::new(false),
            thread: Mutex::new(None),
        })
    }

    /// Starts the thread unless it runs.
    pub(super) fn ensure_started(self: &Arc<Self>) -> io::Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let this = Arc::clone(self);
            let builder = thread::Builder::new()
                .name("rs-progress".into())
                .stack_size(256 << 10);
            *thread = Some(builder.spawn(move || Engine::new(&this).run())?);
        }
        Ok(())
    }

    pub(super) fn tell(&self, command: Command) {
        if let Command::Ops(ops) = &command {
            ops.iter().for_each(|op| self.post(op));
        }
        lock(&self.inbox).push(command);
        self.wake.wake();
    }

    /// For the thread: what it was told since it asked last.
    pub(super) fn commands(&self) -> Vec<Command> {
        std::mem::take(&mut *lock(&self.inbox))
    }

    /// For the thread: whether it is to give up what is left, and end.
    pub(super) fn is_ending(&self) -> bool {
        // Acquire: pairs with `end`; what was posted before is in the inbox.
        self.ending.load(Ordering::Acquire)
    }

    /// Notes an operation that is to finish.
    pub(super) fn post(&self, op: &ProxyOp) {
        *lock(&self.outstanding).entry(op.comm).or_default() += 1;
    }

    /// Whether every posted operation has finished or was given up.
    pub(super) fn is_drained(&self) -> bool {
        lock(&self.outstanding).is_empty()
    }

    /// Waits for that, for the operations of communicator `comm` alone if one is named, or until `give_up` says so (asked
    /// ten times a second).
    pub(super) fn drain(&self, comm: Option<u64>, give_up: impl Fn() -> bool) {
        let mut outstanding = lock(&self.outstanding);
        let is_left = |outstanding: &BTreeMap<u64, usize>| match comm {
            Some(comm) => outstanding.contains_key(&comm),
            None => !outstanding.is_empty(),
        };
        // Operations posted to a thread that never ran (no connection, so no valid operation) are given up by `end`.
        while is_left(&outstanding) && lock(&self.thread).is_some() && !give_up() {
            outstanding = self
                .drained
                .wait_timeout(outstanding, Duration::from_millis(100))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Waits until all commands have been taken up that were given before, at most `limit`.
    pub(super) fn settle(&self, limit: Duration) {
        if lock(&self.thread).is_some() {
            let (tell, told) = sync_channel(1);
            self.tell(Command::Settle(tell));
            // A thread that has ended has nothing left.
            let _ = told.recv_timeout(limit);
        }
    }

    /// Gives up what is left and joins the thread.
    pub(super) fn end(&self) {
        // Release: pairs with the engine's acquire; what was posted before is in the inbox by then.
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

    /// Takes off an operation that has finished or was given up.
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
