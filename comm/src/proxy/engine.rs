//! The progress thread (`rs-progress`): drives the network connections of one proxy.
//!
//! The thread owns the connections; no other thread touches them. Each turn takes up commands and the device's requests, then calls
//! [`Connection::progress`] of every connection with an operation. When a turn moves nothing, the thread waits:
//!
//! | what the connections wait for | the thread |
//! |---|---|
//! | nothing: there is no operation | sleeps until a command, a stream, a completion queue or a request of the device |
//! | streams and completion queues only | arms the queues, makes one more turn, and sleeps on the descriptors |
//! | the device | yields some turns, then sleeps for short times: no descriptor reports what a kernel writes |

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    net::Shutdown,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ringsight_comm_base::sys;
use ringsight_kernels::Fifo;
use ringsight_records::State;

use super::{
    activity::Activity,
    progress::{Command, Progress},
    requests::Sources,
    table_entry::TableEntry,
};
use crate::{
    op::{ConnectionId, Endpoint, ProxyOp},
    transport::{
        connection::{Connection, Moved, Waits},
        events,
        stall::Stall,
    },
};

/// How often the thread yields before it sleeps while it waits for the device.
const YIELDS: u32 = 8;
/// First and longest sleep while the thread waits for the device.
const SLEEP: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(100));
/// After this long without progress the device is not about to move. The thread then sleeps for this longer time, so that a stalled job
/// leaves the processor to the threads that hold it up.
const STALLED: (Duration, Duration) = (Duration::from_millis(20), Duration::from_micros(250));
/// Turns with progress between two polls of the streams that would have blocked.
const POLL_EVERY: u32 = 8;

/// Starts the thread of `progress`, unless it runs.
pub(super) fn ensure_started(progress: &Arc<Progress>) -> io::Result<()> {
    progress.start_once(|| {
        let shared = Arc::clone(progress);
        thread::Builder::new()
            .name("rs-progress".into())
            .stack_size(256 << 10)
            .spawn(move || Engine::new(&shared).run())
    })
}

/// State of a connection's first operation; NCCL's `ncclProxyOpNone`, `ncclProxyOpReady`, `ncclProxyOpProgress`.
/// Each change is recorded: [`State::START`], [`State::OP_IN_PROGRESS`], and back to none [`State::STOP`] or
/// [`State::ABORTED`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum OpState {
    /// Not begun, or there is no operation.
    #[default]
    None,
    /// Its turn has come. The connection may not be made yet.
    Ready,
    /// Its steps have begun.
    Progress,
}

/// A connection of the proxy with its operations.
struct ProxyConnection {
    endpoint: Endpoint,
    fifo: Arc<Fifo>,
    /// `None` until the proxies have agreed on the kind of the connection, and after a failure.
    connection: Option<Box<dyn Connection>>,
    /// The connection after its failure, with its stream shut down. The proxy keeps it until the connection is removed: its entry in the
    /// shared pages tells readers that it has failed, and the peer may still write into its memory.
    failed_connection: Option<Box<dyn Connection>>,
    /// What the connection waits for, as of its last call.
    waits: Waits,
    /// In the order saved; the first one is under way.
    ops: VecDeque<ProxyOp>,
    /// Of the first operation.
    state: OpState,
    entry: TableEntry,
    failed: bool,
    /// The peer may need this end while it has no operation.
    serves_idle: bool,
    /// Activity of its communicator, from its first operation on.
    activity: Option<Arc<Activity>>,
    /// The stall that is in the table: since when, what, and of how many operations.
    stalled: Option<(u64, Stall, usize)>,
}

struct Engine<'a> {
    shared: &'a Progress,
    connections: BTreeMap<ConnectionId, ProxyConnection>,
    sources: Sources,
    /// Operations of all connections.
    active: usize,
    appended: u64,
    /// The completion queues are armed.
    is_armed: bool,
}

impl<'a> Engine<'a> {
    fn new(shared: &'a Progress) -> Self {
        Self {
            shared,
            connections: BTreeMap::new(),
            sources: Sources::default(),
            active: 0,
            appended: 0,
            is_armed: false,
        }
    }

    fn run(mut self) {
        let rank = self.shared.rank;
        let mut last_progress = Instant::now();
        let (mut idle_turns, mut moved_turns) = (0u32, 0u32);
        loop {
            let was_idle = self.active == 0;
            self.take_ops();
            let ending = self.shared.is_ending();
            if ending || self.shared.abort.is_set() {
                self.give_up_all();
            }
            if ending {
                return;
            }
            if was_idle && self.active > 0 {
                events::control(rank, State::CTRL_ACTIVE, 0);
                last_progress = Instant::now();
            }
            let moved = self.turn();
            if self.active == 0 {
                if !was_idle {
                    events::control(rank, State::CTRL_IDLE, 0);
                }
                events::control(rank, State::CTRL_SLEEP, 0);
                self.sleep();
                events::control(rank, State::CTRL_WAKEUP, 0);
                continue;
            }
            if moved {
                (last_progress, idle_turns) = (Instant::now(), 0);
                self.is_armed = false;
                moved_turns += 1;
                if moved_turns % POLL_EVERY == 0 {
                    self.poll(Some(Duration::ZERO));
                    self.serve_idle();
                }
                continue;
            }
            idle_turns += 1;
            self.serve_idle();
            let waits_for_device = self.working().any(|connection| connection.waits.device);
            if !waits_for_device {
                // An event between the turn and the arming is reported by no descriptor, so one more turn follows the arming.
                if self.is_armed || !self.arm() {
                    let most = self.max_wait().unwrap_or(sys::ABORT_CHECK);
                    self.poll(Some(most.min(sys::ABORT_CHECK)));
                    self.is_armed = false;
                }
            } else if idle_turns <= YIELDS {
                self.poll(Some(Duration::ZERO));
                thread::yield_now();
            } else if last_progress.elapsed() < STALLED.0 {
                let doubled = SLEEP.0 * (1 << (idle_turns - YIELDS - 1).min(8));
                self.poll(Some(doubled.min(SLEEP.1)));
            } else {
                self.poll(Some(STALLED.1));
            }
        }
    }

    /// Connections that are made and have an operation.
    fn working(&self) -> impl Iterator<Item = &ProxyConnection> {
        self.connections
            .values()
            .filter(|connection| !connection.ops.is_empty() && connection.connection.is_some())
    }

    fn take_commands(&mut self) {
        for command in self.shared.commands() {
            match command {
                Command::Add(id, endpoint, fifo) => {
                    self.connections.insert(id, ProxyConnection::new(endpoint, fifo));
                }
                Command::Attach(id, link) => {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        let fifo = Arc::clone(&connection.fifo);
                        let made = link.into_connection(fifo, &connection.endpoint);
                        connection.serves_idle = made.serves_idle();
                        connection.connection = Some(made);
                    }
                }
                Command::Remove(id) => {
                    if let Some(mut connection) = self.connections.remove(&id) {
                        self.active -= connection.give_up(self.shared);
                        connection.close();
                    }
                }
                Command::Ops(ops) => self.append(ops),
                // The channel has room; a receiver that no longer waits needs no answer.
                Command::Settle(answer) => drop(answer.try_send(())),
                Command::Watch(source) => self.sources.add(source),
                Command::Expect => {}
            }
        }
    }

    /// Takes up commands, and requests of the device.
    ///
    /// Both bring operations, and those of a connection must come in the order in which the device reaches them. An operation that was
    /// posted before a request could be made is among the commands once the request is seen. So requests are read first and appended
    /// last. A caller that must not overtake a request posts when it is taken up ([`Sources::settle`]).
    fn take_ops(&mut self) {
        let mut requested = Vec::new();
        let failed = self.sources.take(|op| {
            // Counted before any thread can see that the request was taken.
            self.shared.post(&op);
            requested.push(op);
        });
        self.take_commands();
        if !requested.is_empty() {
            self.append(requested);
            self.sources.settle();
        }
        for (comm, text) in failed {
            (self.shared.on_error)(comm, text);
        }
    }

    fn append(&mut self, ops: Vec<ProxyOp>) {
        events::control(self.shared.rank, State::CTRL_APPEND, self.appended);
        for op in ops {
            self.appended += 1;
            match self.connections.get_mut(&op.connection) {
                Some(connection) if !connection.failed => {
                    connection.ops.push_back(op);
                    self.active += 1;
                }
                // The failure was reported when it happened.
                Some(_) => self.shared.retire(&op),
                None => {
                    self.shared.retire(&op);
                    let text = format!(
                        "proxy operation of operation {} on a connection ({}) that does not exist",
                        op.op, op.connection.0
                    );
                    (self.shared.on_error)(op.comm, text);
                }
            }
        }
        events::control(self.shared.rank, State::CTRL_APPEND_END, self.appended);
    }

    /// Calls every connection with an operation. Returns whether anything moved.
    fn turn(&mut self) -> bool {
        let mut moved = false;
        for connection in self.connections.values_mut() {
            let Some(op) = connection.ops.front().copied() else {
                continue;
            };
            connection.reach(OpState::Ready, &op);
            let Some(made) = &mut connection.connection else {
                continue;
            };
            match made.progress(&op) {
                Ok(progress) => {
                    connection.waits = progress.waits;
                    if progress.moved == Moved::Nothing {
                        let stall = made.stall();
                        connection.set_stall(stall, self.shared);
                        continue;
                    }
                    moved = true;
                    let step = made.step();
                    connection.set_stall(None, self.shared);
                    let activity = &mut connection.activity;
                    activity
                        .get_or_insert_with(|| self.shared.activities.of(op.comm))
                        .count_move();
                    connection.reach(OpState::Progress, &op);
                    connection.entry.move_to(&op, step);
                    if let Moved::Completed(bytes) = progress.moved {
                        events::op(&op, State::STOP, bytes);
                        connection.state = OpState::None;
                        connection.entry.finish();
                        connection.ops.pop_front();
                        self.active -= 1;
                        if op.counted {
                            (self.shared.on_completed)(op.op, op.replay);
                        }
                        self.shared.retire(&op);
                    }
                }
                Err(error) => {
                    let step = made.step();
                    let text = connection.describe(self.shared.rank, &op, step, &error.to_string());
                    connection.fail();
                    self.active -= connection.give_up(self.shared);
                    (self.shared.on_error)(connection.endpoint.comm, text);
                    moved = true;
                }
            }
        }
        moved
    }

    /// Connections that may have something to do: with an operation, or with a peer that may need them.
    fn awake(&self) -> impl Iterator<Item = (&ProxyConnection, &dyn Connection)> {
        self.connections
            .values()
            .filter(|connection| connection.is_awake())
            .filter_map(|connection| Some((connection, connection.connection.as_deref()?)))
    }

    /// Arms the completion queues. Returns whether there are any.
    fn arm(&mut self) -> bool {
        self.awake().for_each(|(_, made)| made.arm());
        let any = self.awake().any(|(_, made)| made.serves_idle());
        self.is_armed = any;
        any
    }

    /// How long the connections and the device's requests let the thread sleep.
    fn max_wait(&self) -> Option<Duration> {
        self.awake()
            .filter_map(|(_, made)| made.max_wait())
            .chain(self.sources.max_wait())
            .min()
    }

    /// Sleeps without operations, until an event or a request of the device.
    fn sleep(&mut self) {
        loop {
            self.arm();
            self.serve_idle();
            let woken = self.poll(self.max_wait());
            self.is_armed = false;
            self.serve_idle();
            if woken || self.sources.max_wait().is_none() || self.sources.has_requests() {
                return;
            }
        }
    }

    /// Serves the peers of connections without an operation.
    fn serve_idle(&mut self) {
        for connection in self.connections.values_mut() {
            if connection.ops.is_empty()
                && connection.serves_idle
                && let Some(made) = &mut connection.connection
            {
                match made.serve_idle() {
                    Some(waits) => connection.waits = waits,
                    None => connection.serves_idle = false,
                }
            }
        }
    }

    /// Waits for a command, for the streams of the connections that are awake, and for their completion queues if these are armed, at most
    /// for `timeout`. Returns whether any of these has come.
    fn poll(&mut self, timeout: Option<Duration>) -> bool {
        let mut fds = vec![sys::interest(&self.shared.wake, libc::POLLIN)];
        fds.extend(
            self.awake()
                .map(|(connection, made)| sys::interest(&*made.stream().tcp, connection.waits.events)),
        );
        let streams = fds.len();
        if self.is_armed {
            let queues = self.awake().flat_map(|(_, made)| made.descriptors());
            fds.extend(queues.map(|fd| sys::interest(&fd, libc::POLLIN)));
        }
        if sys::poll(&mut fds, timeout).is_err() {
            thread::yield_now(); // no memory: the next turns try the streams all the same
        }
        if sys::is_ready(&fds[0]) {
            self.shared.wake.drain();
        }
        let awake = self
            .connections
            .values_mut()
            .filter(|connection| connection.is_awake())
            .filter_map(|connection| connection.connection.as_mut());
        for (fd, made) in fds[1..streams].iter().zip(awake) {
            let broken = fd.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0;
            let stream = made.stream_mut();
            stream.readable |= broken || fd.revents & libc::POLLIN != 0;
            stream.writable |= broken || fd.revents & libc::POLLOUT != 0;
        }
        fds.iter().any(sys::is_ready)
    }

    fn give_up_all(&mut self) {
        for connection in self.connections.values_mut() {
            self.active -= connection.give_up(self.shared);
            // An operation was cut off: later bytes on this connection would have no meaning.
            connection.failed = true;
            connection.close();
        }
    }
}

impl ProxyConnection {
    fn new(endpoint: Endpoint, fifo: Arc<Fifo>) -> Self {
        Self {
            endpoint,
            fifo,
            connection: None,
            failed_connection: None,
            waits: Waits::default(),
            ops: VecDeque::new(),
            state: OpState::None,
            entry: TableEntry::default(),
            failed: false,
            serves_idle: false,
            activity: None,
            stalled: None,
        }
    }

    /// With an operation, or with a peer that may need it.
    fn is_awake(&self) -> bool {
        !self.ops.is_empty() || self.serves_idle
    }

    /// Advances the state of its first operation to `state`, unless it has been reached.
    fn reach(&mut self, state: OpState, op: &ProxyOp) {
        if self.state < state {
            self.state = state;
            let recorded = match state {
                OpState::None => return,
                OpState::Ready => {
                    self.entry.begin(op, self.ops.len().saturating_sub(1));
                    State::START
                }
                OpState::Progress => State::OP_IN_PROGRESS,
            };
            events::op(op, recorded, 0);
        }
    }

    /// Updates the table of stalls, if the stall of its operations has changed.
    fn set_stall(&mut self, stalled: Option<(u64, Stall)>, shared: &Progress) {
        let stalled = stalled.map(|(since_ns, stall)| (since_ns, stall, self.ops.len()));
        if self.stalled == stalled {
            return;
        }
        let Some(first) = self.ops.front() else { return };
        match stalled {
            Some((since_ns, stall, _)) => shared.stalls.insert(&self.ops, since_ns, stall),
            None => shared.stalls.remove(first.connection),
        }
        self.stalled = stalled;
    }

    /// Ends the use of the connection after an error. The peer reads the end of the stream.
    fn fail(&mut self) {
        self.failed = true;
        self.failed_connection = self.connection.take().inspect(|connection| {
            // A stream that is broken already has no peer to tell.
            let _ = connection.stream().tcp.shutdown(Shutdown::Both);
        });
    }

    /// Closes the connection in good order. A failed one is closed already.
    fn close(&mut self) {
        if let Some(mut connection) = self.connection.take() {
            connection.close();
        }
    }

    /// Gives up its operations. Returns their number.
    fn give_up(&mut self, shared: &Progress) -> usize {
        let count = self.ops.len();
        if std::mem::take(&mut self.state) != OpState::None
            && let Some(op) = self.ops.front()
        {
            events::op(op, State::ABORTED, 0);
            self.entry.finish();
        }
        self.set_stall(None, shared);
        self.ops.drain(..).for_each(|op| shared.retire(&op));
        count
    }

    fn describe(&self, rank: u32, op: &ProxyOp, step: u32, text: &str) -> String {
        let Endpoint { peer, channel, .. } = self.endpoint;
        let (from, to) = if op.is_send { (rank, peer) } else { (peer, rank) };
        let steps = op.steps;
        format!(
            "network, rank {from} to rank {to}, channel {channel}, step {step} of {steps}, seen by rank {rank}: {text}"
        )
    }
}
