//! The progress thread: moves the operations of all network connections of one proxy.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ringsight_kernels::Fifo;
use ringsight_records::State;

use super::{
    ConnectionId, ProxyOp, events,
    machine::{Link, Machine},
    message::Endpoint,
    moves::Moves,
    progress::{Command, Progress},
    requests::Sources,
    stalls::Stall,
    told::Told,
};
use crate::{
    bootstrap::sys,
    transport::{
        socket::{Socket, Turn},
        verbs::Connected,
    },
};

/// How often the thread yields before it sleeps, when the device is to move next.
const YIELDS: u32 = 8;
/// First and longest sleep while the device is to move next: no event tells of what a kernel writes.
const SLEEP: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(100));
/// After this long without any movement the device is not about to move: sleep longer, so that a stalled job leaves the
/// processor to whoever holds it up.
const STALLED: (Duration, Duration) = (Duration::from_millis(20), Duration::from_micros(250));
/// Turns with movement between two looks at the sockets that would have blocked.
const POLL_EVERY: u32 = 8;

/// How far a connection is with its first operation; NCCL's `ncclProxyOpNone`, `ncclProxyOpReady`, `ncclProxyOpProgress`.
/// Each change is recorded: [`State::START`], [`State::OP_IN_PROGRESS`], and back to none [`State::STOP`] or
/// [`State::ABORTED`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum OpState {
    /// Not begun, or there is none.
    #[default]
    None,
    /// Its turn has come; there may be no socket yet.
    Ready,
    /// Its steps have begun.
    Progress,
}

struct Connection {
    endpoint: Endpoint,
    fifo: Arc<Fifo>,
    machine: Machine,
    socket: Option<Socket>,
    /// In the order saved; the first one is under way.
    ops: VecDeque<ProxyOp>,
    /// Of the first operation.
    state: OpState,
    told: Told,
    failed: bool,
    /// Without an operation, it still has a peer that may need it.
    is_tended: bool,
    /// Of the communicator whose it is, from its first operation on.
    moves: Option<Arc<Moves>>,
    /// What others are told of its waiting for the network, since when that is, and of how many operations.
    stalled: Option<(u64, Stall, usize)>,
}

pub(super) struct Engine<'a> {
    shared: &'a Progress,
    connections: BTreeMap<ConnectionId, Connection>,
    sources: Sources,
    /// Operations of all connections.
    active: usize,
    appended: u64,
    /// Completion queues tell of what happens next.
    is_armed: bool,
}

impl<'a> Engine<'a> {
    pub(super) fn new(shared: &'a Progress) -> Self {
        Self {
            shared,
            connections: BTreeMap::new(),
            sources: Sources::default(),
            active: 0,
            appended: 0,
            is_armed: false,
        }
    }

    pub(super) fn run(mut self) {
        let rank = self.shared.rank;
        let mut last_move = Instant::now();
        let (mut idle_turns, mut moved_turns) = (0u32, 0u32);
        loop {
            let was_idle = self.active == 0;
            self.take_ops();
            let ending = self.shared.is_ending();
            if ending || self.shared.abort.is_set() {
                self.give_up_everything();
            }
            if ending {
                return;
            }
            if was_idle && self.active > 0 {
                events::control(rank, State::CTRL_ACTIVE, 0);
                last_move = Instant::now();
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
                (last_move, idle_turns) = (Instant::now(), 0);
                self.is_armed = false;
                moved_turns += 1;
                if moved_turns % POLL_EVERY == 0 {
                    self.poll(Some(Duration::ZERO));
                    self.tend();
                }
                continue;
            }
            idle_turns += 1;
            self.tend();
            let waits_for_device = self.working().any(|connection| connection.machine.needs().device);
            if !waits_for_device {
                // What happened between the turn and the arming told nobody: one more turn after it.
                if self.is_armed || !self.arm() {
                    let most = self.wait().unwrap_or(sys::ABORT_CHECK);
                    self.poll(Some(most.min(sys::ABORT_CHECK)));
                    self.is_armed = false;
                }
            } else if idle_turns <= YIELDS {
                self.poll(Some(Duration::ZERO));
                thread::yield_now();
            } else if last_move.elapsed() < STALLED.0 {
                let doubled = SLEEP.0 * (1 << (idle_turns - YIELDS - 1).min(8));
                self.poll(Some(doubled.min(SLEEP.1)));
            } else {
                self.poll(Some(STALLED.1));
            }
        }
    }

    /// Connections that have an operation to move and a socket to move it over.
    fn working(&self) -> impl Iterator<Item = &Connection> {
        self.connections
            .values()
            .filter(|connection| !connection.ops.is_empty() && connection.socket.is_some())
    }

    fn take_commands(&mut self) {
        for command in self.shared.commands() {
            match command {
                Command::Add(id, endpoint, fifo) => {
                    let machine = Machine::over_socket(Arc::clone(&fifo), endpoint.is_send);
                    let (socket, ops, state, failed) = (None, VecDeque::new(), OpState::None, false);
                    self.connections.insert(
                        id,
                        Connection {
                            endpoint,
                            fifo,
                            machine,
                            socket,
                            ops,
                            state,
                            told: Told::default(),
                            failed,
                            is_tended: false,
                            moves: None,
                            stalled: None,
                        },
                    );
                }
                Command::Attach(id, link) => {
                    if let Some(connection) = self.connections.get_mut(&id) {
                        let Link { stream, rdma } = *link;
                        // A connection that survives its paths finds out by itself whether its peer answers; any other has only the
                        // system to tell it of a machine that vanished. Without either, it is told by whoever has something to send.
                        // A receiver whose sender has not confirmed that it is connected has nothing but the socket, yet.
                        let survives = rdma.as_ref().is_some_and(Connected::survives);
                        let _ = match survives && connection.endpoint.is_send {
                            true => sys::bear_silence(&stream),
                            false => sys::keep_alive(&stream),
                        };
                        if let Some(connected) = rdma {
                            let fifo = Arc::clone(&connection.fifo);
                            connection.machine =
                                Machine::over_verbs(fifo, connection.endpoint.is_send, connected);
                        }
                        connection.socket = Some(Socket::new(stream));
                        connection.is_tended = connection.machine.is_verbs();
                    }
                }
                Command::Remove(id) => {
                    if let Some(mut connection) = self.connections.remove(&id) {
                        self.active -= connection.give_up(self.shared);
                        connection.hang_up();
                    }
                }
                Command::Ops(ops) => self.append(ops),
                // There is room for it, and who no longer waits needs none.
                Command::Settle(tell) => drop(tell.try_send(())),
                Command::Watch(source) => self.sources.add(source),
                Command::Expect => {}
            }
        }
    }

    /// Takes up commands, and what the device has asked for.
    ///
    /// Both tell of operations, and those of a connection must come in the order in which the device comes to them. What was
    /// posted before the device could ask for something is among the commands once the request is seen; so requests are read
    /// first and taken up last. And whoever may not overtake a request posts when it is taken up ([`Sources::settle`]).
    fn take_ops(&mut self) {
        let mut requested = Vec::new();
        let failed = self.sources.take(|op| {
            // Counted before anybody can see that it was taken.
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

    /// One turn of every connection; whether anything moved.
    fn turn(&mut self) -> bool {
        let mut moved = false;
        for connection in self.connections.values_mut() {
            let Some(op) = connection.ops.front().copied() else {
                continue;
            };
            connection.reach(OpState::Ready, &op);
            let Some(socket) = &mut connection.socket else {
                continue;
            };
            match connection.machine.turn(&op, socket) {
                Ok(Turn::Waiting) => {
                    let stall = connection.machine.stall();
                    connection.tell_stall(stall, self.shared);
                }
                Ok(turn) => {
                    moved = true;
                    connection.tell_stall(None, self.shared);
                    let moves = &mut connection.moves;
                    moves.get_or_insert_with(|| self.shared.moves.of(op.comm)).moved();
                    connection.reach(OpState::Progress, &op);
                    connection.told.move_to(&op, connection.machine.step());
                    if let Turn::Done(bytes) = turn {
                        events::op(&op, State::STOP, bytes);
                        connection.state = OpState::None;
                        connection.told.rest();
                        connection.ops.pop_front();
                        self.active -= 1;
                        if op.counted {
                            (self.shared.on_completed)(op.op, op.replay);
                        }
                        self.shared.retire(&op);
                    }
                }
                Err(text) => {
                    let step = connection.machine.step();
                    let text = connection.describe(self.shared.rank, &op, step, &text);
                    connection.failed = true;
                    connection.socket = None;
                    self.active -= connection.give_up(self.shared);
                    (self.shared.on_error)(connection.endpoint.comm, text);
                    moved = true;
                }
            }
        }
        moved
    }

    /// Connections that something is expected of: with an operation, or with a peer that may need them.
    fn awake(&self) -> impl Iterator<Item = &Connection> {
        self.connections
            .values()
            .filter(|connection| connection.socket.is_some() && connection.is_awake())
    }

    /// Has completion queues tell of what happens next; whether there are any.
    fn arm(&mut self) -> bool {
        self.awake().for_each(|connection| connection.machine.arm());
        let any = self.awake().any(|connection| connection.machine.is_verbs());
        self.is_armed = any;
        any
    }

    /// How long the connections, and the device's requests, let it sleep.
    fn wait(&self) -> Option<Duration> {
        self.awake()
            .filter_map(|connection| connection.machine.wait())
            .chain(self.sources.rest())
            .min()
    }

    /// Without operations: until something happens, or the device asks for some.
    fn sleep(&mut self) {
        loop {
            self.arm();
            self.tend();
            let woken = self.poll(self.wait());
            self.is_armed = false;
            self.tend();
            if woken || self.sources.rest().is_none() || self.sources.is_asked() {
                return;
            }
        }
    }

    /// Looks after the connections that have no operation and may be needed.
    fn tend(&mut self) {
        for connection in self.connections.values_mut() {
            if connection.ops.is_empty()
                && connection.is_tended
                && let Some(socket) = &mut connection.socket
            {
                connection.is_tended = connection.machine.tend(socket, &connection.endpoint);
            }
        }
    }

    /// Waits for the sockets of the connections at work, and their completion queues if they are armed, for a command, and at most
    /// `timeout`. Whether any of these has come.
    fn poll(&mut self, timeout: Option<Duration>) -> bool {
        let mut fds = vec![sys::interest(&self.shared.wake, libc::POLLIN)];
        for connection in self.awake() {
            if let Some(socket) = &connection.socket {
                fds.push(sys::interest(&*socket.stream, connection.machine.needs().events));
            }
        }
        let sockets = fds.len();
        if self.is_armed {
            let queues = self.awake().flat_map(|connection| connection.machine.fds());
            fds.extend(queues.map(|fd| sys::interest(&fd, libc::POLLIN)));
        }
        if sys::poll(&mut fds, timeout).is_err() {
            thread::yield_now(); // only for want of memory: the next turns try the sockets by themselves
        }
        if sys::is_ready(&fds[0]) {
            self.shared.wake.drain();
        }
        let working = self
            .connections
            .values_mut()
            .filter(|c| c.is_awake())
            .filter_map(|c| c.socket.as_mut());
        for (fd, socket) in fds[1..sockets].iter().zip(working) {
            let broken = fd.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0;
            socket.readable |= broken || fd.revents & libc::POLLIN != 0;
            socket.writable |= broken || fd.revents & libc::POLLOUT != 0;
        }
        fds.iter().any(sys::is_ready)
    }

    fn give_up_everything(&mut self) {
        for connection in self.connections.values_mut() {
            self.active -= connection.give_up(self.shared);
            // What was under way is torn: nothing that follows on this connection could be understood.
            connection.failed = true;
            connection.hang_up();
        }
    }
}

impl Connection {
    /// With an operation, or with a peer that may need it.
    fn is_awake(&self) -> bool {
        !self.ops.is_empty() || self.is_tended
    }

    /// Brings its first operation as far as `state`, unless it is.
    fn reach(&mut self, state: OpState, op: &ProxyOp) {
        if self.state < state {
            self.state = state;
            let recorded = match state {
                OpState::None => return,
                OpState::Ready => {
                    self.told.begin(op, self.ops.len().saturating_sub(1));
                    State::START
                }
                OpState::Progress => State::OP_IN_PROGRESS,
            };
            events::op(op, recorded, 0);
        }
    }

    /// Tells whether its operations wait for the network, and since when, if that has changed.
    fn tell_stall(&mut self, stalled: Option<(u64, Stall)>, shared: &Progress) {
        let stalled = stalled.map(|(since_ns, stall)| (since_ns, stall, self.ops.len()));
        if self.stalled == stalled {
            return;
        }
        let Some(first) = self.ops.front() else { return };
        match stalled {
            Some((since_ns, stall, _)) => shared.stalls.enter(&self.ops, since_ns, stall),
            None => shared.stalls.leave(first.connection),
        }
        self.stalled = stalled;
    }

    /// Closes its socket. One that has failed has none any more.
    fn hang_up(&mut self) {
        if let Some(mut socket) = self.socket.take() {
            self.machine.leave(&mut socket);
        }
    }

    /// Drops its operations; how many there were.
    fn give_up(&mut self, shared: &Progress) -> usize {
        let count = self.ops.len();
        if std::mem::take(&mut self.state) != OpState::None
            && let Some(op) = self.ops.front()
        {
            events::op(op, State::ABORTED, 0);
            self.told.rest();
        }
        self.tell_stall(None, shared);
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
