//! From tasks to plans: what one kernel launch will do.
//!
//! Collectives drain before point-to-point: plans are cut where the work budget ends, and the number of sends and
//! receives differs between ranks. If these came first, ranks would cut their collectives at different places, and the
//! least-loaded channel picker, whose loads begin anew with each plan, would give different answers. AlltoAll, Gather and
//! Scatter are made of messages and drain with them; one of them may have messages in several plans.

pub mod algorithm;
pub mod channels;
pub mod estimate;
mod exchange;
mod reduce_ops;
mod sequence;

use std::{collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

use ringsight_kernels::{ChannelWork, Connections, Launch, Scalar, Work};
use ringsight_records::{
    Algorithm, DataType, Description, Flags, Function, Kind, Protocol, Record, ReduceOp, State,
};

use crate::{
    checks::{self, Call},
    communicator::Communicator,
    device::Stream,
    error::{Error, Result, ResultCode},
    launch::observer::{OpState, PlanObserver, Shared},
    observe,
    proxy::ProxyOp,
};

pub(crate) use exchange::Exchange;
pub(crate) use reduce_ops::ReduceOps;
pub(crate) use sequence::Sequences;

/// Work elements (one channel's part of one operation) that fit into a communicator's work FIFO. A plan that runs once
/// fills at most half of it, so that the next can be prepared meanwhile; a captured plan brings memory of its own.
pub const WORK_FIFO_DEPTH: usize = 4096;

/// One call of the API, checked, numbered, and not yet planned.
#[derive(Clone, Debug)]
pub struct Task {
    /// What was called.
    pub request: Request,
    /// What its records say.
    pub info: OpInfo,
    /// Number among the communicator's operations in the graph.
    pub node: u32,
    /// Graph number if captured, else 0.
    pub graph: u32,
    /// When the call began.
    pub api_start_ns: u64,
    /// When it returned; 0 for a lone call, which has not.
    pub api_end_ns: u64,
    /// Group depth of the call; 1 is implicit.
    pub group_depth: u32,
    /// Thread that made it.
    pub tid: u32,
}

/// The arguments of a communication function.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which function.
    pub function: Function,
    /// Send buffer, 0 if it has none.
    pub send: usize,
    /// Receive buffer, 0 if it has none.
    pub recv: usize,
    /// Elements.
    pub count: usize,
    /// Their type.
    pub data_type: DataType,
    /// Reduction.
    pub reduce_op: ReduceOp,
    /// What a PreMulSum multiplies with.
    pub scalar: Scalar,
    /// Root of a rooted collective, peer of a send or receive.
    pub peer: Option<u32>,
    /// The stream given.
    pub stream: Stream,
}

impl Request {
    /// What the ranks must agree on.
    #[must_use]
    pub fn call(&self) -> Call {
        Call {
            function: self.function,
            count: self.count,
            data_type: self.data_type,
            reduce_op: self.reduce_op,
            peer: self.peer,
        }
    }

    /// Message bytes by nccl-tests' definition.
    #[must_use]
    pub fn bytes(&self, ranks: u32) -> u64 {
        let one = (self.count * self.data_type.size()) as u64;
        match self.function {
            Function::AllGather
            | Function::ReduceScatter
            | Function::AlltoAll
            | Function::Gather
            | Function::Scatter => one * u64::from(ranks),
            _ => one,
        }
    }

    /// Its (send, receive) buffers: address, 0 if it has none, and bytes.
    pub(crate) fn buffers(&self, ranks: u32) -> [(usize, usize); 2] {
        let one = self.count * self.data_type.size();
        let all = one * ranks as usize;
        let (send, recv) = match self.function {
            Function::AllGather | Function::Gather => (one, all),
            Function::ReduceScatter | Function::Scatter => (all, one),
            Function::AlltoAll => (all, all),
            _ => (one, one),
        };
        [(self.send, send), (self.recv, recv)]
    }

    /// Bytes by which its algorithm is chosen: those of one message where it is made of several.
    fn bytes_of_choice(&self, ranks: u32) -> u64 {
        if Exchange::serves(self.function) {
            (self.count * self.data_type.size()) as u64
        } else {
            self.bytes(ranks)
        }
    }
}

/// What all records of an operation say.
#[derive(Clone, Copy, Debug)]
pub struct OpInfo {
    /// Operation number.
    pub op: u32,
    /// Communicator id.
    pub comm: u64,
    /// Sequence.
    pub seq: u64,
    /// Message bytes.
    pub bytes: u64,
    /// This rank.
    pub rank: u32,
    /// Peer or root, -1 if neither.
    pub peer: i32,
    /// Flags.
    pub flags: Flags,
}

impl OpInfo {
    /// A record about this operation.
    #[must_use]
    pub fn record(&self, kind: Kind, state: State, time_ns: u64, replay: u32) -> Record {
        Record {
            comm: self.comm,
            seq: self.seq,
            bytes: self.bytes,
            op: self.op,
            replay,
            rank: self.rank,
            peer: self.peer,
            pid: observe::pid(),
            ..Record::new(kind, state, time_ns)
        }
        .with_flags(self.flags)
    }

    /// Emits a dense record about this operation if somebody wants it.
    pub fn emit(&self, kind: Kind, state: State, time_ns: u64) {
        if observe::wants(kind) {
            observe::emit(&self.record(kind, state, time_ns, 0));
        }
    }

    /// [`Kind::P2p`] or [`Kind::Coll`].
    #[must_use]
    pub fn kind(&self) -> Kind {
        if self.flags.contains(Flags::P2P) {
            Kind::P2p
        } else {
            Kind::Coll
        }
    }

    /// [`Kind::P2pApi`] or [`Kind::CollApi`].
    #[must_use]
    pub fn api_kind(&self) -> Kind {
        if self.flags.contains(Flags::P2P) {
            Kind::P2pApi
        } else {
            Kind::CollApi
        }
    }
}

/// One kernel launch and what goes with it.
pub(crate) struct Plan {
    /// Plan number.
    pub(crate) number: u32,
    /// What the device is given.
    pub(crate) launch: Arc<Launch>,
    /// The same as [`Launch::observer`].
    pub(crate) observer: Arc<PlanObserver>,
    /// Network work; the replay is filled in when it is posted.
    pub(crate) proxy_ops: Vec<ProxyOp>,
    /// Its operations.
    pub(crate) ops: Vec<OpInfo>,
    /// What was called for them.
    pub(crate) calls: Vec<checks::Entry>,
}

/// Plans everything that a group asks of one communicator.
pub(crate) fn build(
    comm: &Communicator,
    collectives: &[Task],
    exchange: &Exchange,
    persistent: bool,
    group: u32,
) -> Result<Vec<Plan>> {
    Plans::lay_out(comm, collectives, exchange, persistent, Some(group))?
        .into_iter()
        .map(|plan| plan.finish(persistent))
        .collect()
}

/// How long what a group asks of one communicator would take, by the model of [`estimate`]. Nothing is connected,
/// described or launched.
///
/// # Errors
/// As [`build`].
pub(crate) fn estimate(
    comm: &Communicator,
    collectives: &[Task],
    exchange: &Exchange,
    persistent: bool,
) -> Result<Duration> {
    let plans = Plans::lay_out(comm, collectives, exchange, persistent, None)?;
    Ok(plans
        .iter()
        .filter_map(|plan| plan.simulated)
        .map(estimate::Load::time)
        .sum())
}

/// A plan of one operation that never ends on this rank, and that no other rank takes part in: a receive from itself over a
/// FIFO that nobody sends to.
pub(crate) fn stuck(comm: &Communicator, stream: Stream, group: u32) -> Result<Plan> {
    let fifo = crate::proxy::memory::private(comm.slot_bytes)
        .map_err(|error| Error::new(ResultCode::SystemError, format!("memory for a FIFO: {error}")))?;
    let (op, now) = (observe::next_op(), observe::now_ns());
    let task = Task {
        request: Request {
            function: Function::Recv,
            send: 0,
            recv: 0,
            count: 1,
            data_type: DataType::Int8,
            reduce_op: ReduceOp::None,
            scalar: Scalar::None,
            peer: Some(comm.rank),
            stream,
        },
        info: OpInfo {
            op,
            comm: comm.id,
            // Of no sequence that counts anything.
            seq: SIMULATED | u64::from(op),
            bytes: 1,
            rank: comm.rank,
            peer: comm.rank.cast_signed(),
            flags: Flags::P2P,
        },
        node: 0,
        graph: 0,
        api_start_ns: now,
        api_end_ns: now,
        group_depth: 1,
        tid: 0,
    };
    let mut plan = Builder::new(comm, Some(group));
    let work = plan.message_of(&task, Function::Recv, 0..1, Connections::Recv(fifo));
    plan.add_work(0, work);
    plan.add_op(&task, None, 1, 0, Algorithm::Direct, Protocol::Simple);
    plan.finish(false)
}

/// In the sequence numbers of operations that only one rank knows.
const SIMULATED: u64 = 1 << 63;

fn choice_of(task: &Task, comm: &Communicator) -> Result<(usize, algorithm::Choice)> {
    let function = task.request.function;
    let bytes = task.request.bytes_of_choice(comm.ranks);
    let asked = algorithm::Asked {
        function,
        reduce_op: task.request.reduce_op,
        bytes,
        ranks: comm.ranks,
        slot_bytes: comm.slot_bytes,
        one_shot: comm.one_shot,
    };
    let choice = algorithm::choose(&asked)
        .ok_or_else(|| Error::internal(format!("no algorithm serves {function}")))?;
    Ok((choice.channels(bytes, comm.channels()), choice))
}

/// The plans of a group on one communicator.
struct Plans<'a> {
    comm: &'a Communicator,
    /// Work elements of a plan.
    budget: usize,
    /// `None`: only to know what they would take.
    group: Option<u32>,
    made: Vec<Builder<'a>>,
}

impl<'a> Plans<'a> {
    /// Puts every task into a plan.
    fn lay_out(
        comm: &'a Communicator,
        collectives: &[Task],
        exchange: &Exchange,
        persistent: bool,
        group: Option<u32>,
    ) -> Result<Vec<Builder<'a>>> {
        let budget = if persistent {
            usize::MAX
        } else {
            comm.work_fifo_depth / 2
        };
        let mut plans = Self {
            comm,
            budget,
            group,
            made: Vec::new(),
        };
        let tasks = exchange.tasks();
        // In call order, so that ranks that call in another order differ.
        let mut of_messages = tasks
            .iter()
            .filter(|task| !task.request.function.is_p2p())
            .peekable();
        for task in collectives {
            while let Some(earlier) = of_messages.next_if(|other| other.info.seq < task.info.seq) {
                plans.with_room(comm.channels()).0.show_tag(earlier)?;
            }
            let (channels, choice) = choice_of(task, comm)?;
            // Not by its own channels: where ranks call something different, it shall be in the same plan all the same.
            let (plan, _) = plans.with_room(comm.channels());
            plan.add_collective(task, channels, choice)?;
        }
        for task in of_messages {
            plans.with_room(comm.channels()).0.show_tag(task)?;
        }
        // Operations made of several messages, by their task.
        let mut spreads: BTreeMap<usize, Spread> = BTreeMap::new();
        for round in exchange.rounds(comm.rank, comm.ranks)? {
            let needed = round
                .messages()
                .map(|message| choice_of(&tasks[message.task], comm).map_or(1, |(channels, _)| channels))
                .sum();
            let (plan, index) = plans.with_room(needed);
            for (send, recv) in &round.to_self {
                plan.add_to_self(&tasks[send.task], &tasks[recv.task], send.address, recv.address)?;
                if !tasks[send.task].request.function.is_p2p() {
                    spreads.entry(send.task).or_default().add(index, 1, 0);
                }
            }
            for (message, is_send) in [(round.send, true), (round.recv, false)] {
                let Some(message) = message else { continue };
                let task = &tasks[message.task];
                let (mask, proxies, choice) = plan.add_message(task, message, is_send)?;
                if task.request.function.is_p2p() {
                    plan.add_op(task, None, mask, proxies, choice.algorithm, choice.protocol);
                } else {
                    spreads.entry(message.task).or_default().add(index, mask, proxies);
                }
            }
        }
        for (task, spread) in spreads {
            plans.add_spread(&tasks[task], &spread)?;
        }
        Ok(plans.made)
    }

    /// A plan with room for `elements` more work elements, and its index: the last one, or a new one. Something always
    /// fits into an empty plan.
    fn with_room(&mut self, elements: usize) -> (&mut Builder<'a>, usize) {
        if self
            .made
            .last()
            .is_none_or(|plan| plan.used > 0 && plan.used + elements > self.budget)
        {
            self.made.push(Builder::new(self.comm, self.group));
        }
        let index = self.made.len() - 1;
        (&mut self.made[index], index)
    }

    /// Enters an operation whose messages have been added: with the plan that it begins in, and as seen by all.
    fn add_spread(&mut self, task: &Task, spread: &Spread) -> Result<()> {
        let (_, choice) = choice_of(task, self.comm)?;
        let mask = spread.masks.values().fold(0, |all, mask| all | mask);
        let (Some(begins), Some(ends)) = (spread.masks.keys().next(), spread.masks.keys().last()) else {
            return Err(Error::internal("an operation without messages"));
        };
        if begins == ends || self.group.is_none() {
            self.made[*begins].add_op(
                task,
                None,
                mask,
                spread.proxies,
                choice.algorithm,
                choice.protocol,
            );
            return Ok(());
        }
        let masks: Vec<u64> = spread.masks.values().copied().collect();
        let state = OpState::new(task.info, None, mask.count_ones(), spread.proxies);
        let state = Arc::new(state.split(&masks));
        self.made[*begins].announce(task, mask, spread.proxies, choice.algorithm, choice.protocol);
        for index in spread.masks.keys() {
            self.made[*index].shared.push(Shared {
                state: state.clone(),
                begins: index == begins,
            });
        }
        Ok(())
    }
}

/// Where the messages of one operation went.
#[derive(Debug, Default)]
struct Spread {
    /// Channels taken, by index of the plan.
    masks: BTreeMap<usize, u64>,
    /// Proxy operations.
    proxies: u32,
}

impl Spread {
    fn add(&mut self, plan: usize, mask: u64, proxies: u32) {
        *self.masks.entry(plan).or_default() |= mask;
        self.proxies += proxies;
    }
}

/// A plan in the making.
struct Builder<'a> {
    comm: &'a Communicator,
    number: u32,
    group: u32,
    /// Where it is not to be launched: what it would take.
    simulated: Option<estimate::Load>,
    /// Work elements.
    used: usize,
    picker: channels::Picker,
    /// By channel number.
    work: Vec<Vec<Work>>,
    states: Vec<OpState>,
    shared: Vec<Shared>,
    ops: Vec<OpInfo>,
    calls: Vec<checks::Entry>,
    proxy_ops: Vec<ProxyOp>,
}

impl<'a> Builder<'a> {
    /// An empty plan of a group; without one it only says what it would take.
    fn new(comm: &'a Communicator, group: Option<u32>) -> Self {
        Self {
            comm,
            number: group.map_or(0, |_| observe::next_plan()),
            group: group.unwrap_or(0),
            simulated: group.is_none().then(estimate::Load::default),
            used: 0,
            picker: channels::Picker::new(comm.channels()),
            work: (0..comm.channels()).map(|_| Vec::new()).collect(),
            states: Vec::new(),
            shared: Vec::new(),
            ops: Vec::new(),
            calls: Vec::new(),
            proxy_ops: Vec::new(),
        }
    }

    fn add_collective(&mut self, task: &Task, wanted: usize, choice: algorithm::Choice) -> Result<()> {
        let request = &task.request;
        let mut parts = channels::split(request.count, request.data_type.size(), wanted);
        parts.retain(|part| !part.is_empty());
        // Ranks that call different operations find out where these meet, so they must meet. Let the n-th collective of
        // a group be the first that differs. Where plans are cut depends on the operations before it alone, so all ranks have it
        // in the same plan, and the channels' loads are the same, since all before it was. What is picked for it are
        // the least loaded channels, more or fewer: the least loaded one is always among them, and has work. There
        // everybody comes to it after the same operations, and `ringsight_kernels::schedule` says why somebody sees it.
        let picked = self.picker.pick(parts.len(), task.info.bytes);
        let (mut mask, mut proxies) = (0u64, 0);
        for (channel, part) in picked.into_iter().zip(parts) {
            proxies += self.add_ring(task, channel, part, choice.algorithm)?;
            mask |= 1 << channel;
        }
        self.add_op(task, None, mask, proxies, choice.algorithm, choice.protocol);
        Ok(())
    }

    /// Shows the tag of an operation that is made of messages to the next rank of a ring, and looks at the previous
    /// one's: where ranks call different operations, their messages need not meet, but rings do.
    fn show_tag(&mut self, task: &Task) -> Result<()> {
        if self.comm.ranks > 1 {
            for channel in self.picker.pick(1, 0) {
                self.add_ring(task, channel, 0..0, Algorithm::Ring)?;
            }
            self.calls
                .push(checks::Entry::new(&task.info, task.request.call()));
        }
        Ok(())
    }

    /// Adds one channel's part of an operation that goes round its ring; returns how many proxy operations it takes.
    fn add_ring(
        &mut self,
        task: &Task,
        channel: u8,
        part: Range<usize>,
        algorithm: Algorithm,
    ) -> Result<u32> {
        let Some(ring) = &self.comm.rings[usize::from(channel)] else {
            let work = self.work_of(task, part, algorithm, Connections::Local);
            work.check()?;
            if let Some(load) = &mut self.simulated {
                load.add_work(&work, estimate::SHARED);
            }
            self.add_work(channel, work);
            return Ok(0);
        };
        let order = self.comm.topology.ring(channel);
        let (next, prev) = (order[1], order[order.len() - 1]);
        let connections = Connections::Ring {
            order,
            prev: ring.prev.fifo.clone(),
            next: ring.next.fifo.clone(),
        };
        let work = self.work_of(task, part, algorithm, connections);
        work.check()?;
        if let Some(load) = &mut self.simulated {
            let networked = ring.prev.proxy.is_some() || ring.next.proxy.is_some();
            let way = if networked {
                estimate::NETWORK
            } else {
                estimate::SHARED
            };
            load.add_work(&work, way);
        }
        let steps = work.steps();
        let counted = !work.only_shows_tag();
        self.add_work(channel, work);
        let proxies = [
            (ring.next.proxy, next, true, steps.send),
            (ring.prev.proxy, prev, false, steps.recv),
        ]
        .into_iter()
        .map(|(proxy, peer, is_send, steps)| {
            self.add_proxy(task, channel, proxy, peer, is_send, (steps, counted))
        })
        .sum();
        Ok(proxies)
    }

    /// Adds a message from this rank to itself: a send and its receive, or a part of an operation made of messages.
    fn add_to_self(&mut self, send: &Task, recv: &Task, from: usize, to: usize) -> Result<()> {
        let bytes = |task: &Task| task.request.count * task.request.data_type.size();
        if bytes(send) != bytes(recv) {
            return Err(Error::usage(format!(
                "ncclSend to oneself of {} bytes is paired with ncclRecv from oneself of {} bytes",
                bytes(send),
                bytes(recv)
            )));
        }
        let work = Work {
            send: from,
            recv: to,
            ..self.message_of(send, Function::Send, 0..send.request.count, Connections::Local)
        };
        work.check()?;
        if let Some(load) = &mut self.simulated {
            load.add(estimate::LOCAL, 0, bytes(send));
        }
        self.add_work(0, work);
        if send.request.function.is_p2p() {
            self.add_op(send, Some(recv), 1, 0, Algorithm::Direct, Protocol::Simple);
        }
        Ok(())
    }

    /// Adds one end of a message; returns its channels, its proxy operations, and how it goes.
    fn add_message(
        &mut self,
        task: &Task,
        message: exchange::Message,
        is_send: bool,
    ) -> Result<(u64, u32, algorithm::Choice)> {
        let (comm, request, peer) = (self.comm, &task.request, message.peer);
        let (source, destination) = if is_send {
            (comm.rank, peer)
        } else {
            (peer, comm.rank)
        };
        let (wanted, choice) = choice_of(task, comm)?;
        let (mut mask, mut proxies) = (0u64, 0);
        let parts = channels::split(request.count, request.data_type.size(), wanted);
        for (index, part) in parts.into_iter().enumerate().filter(|(_, part)| !part.is_empty()) {
            let channel = channels::p2p_channel(source, destination, comm.ranks, index, comm.channels());
            if let Some(load) = &mut self.simulated {
                // No connection is made for this.
                let bytes = part.len() * request.data_type.size();
                let near = comm.topology.node_of(peer) == comm.topology.node_of(comm.rank);
                let way = if near { estimate::SHARED } else { estimate::NETWORK };
                load.add(way, bytes.div_ceil(comm.slot_bytes) as u32, bytes);
                self.used += 1;
                continue;
            }
            let (work, proxy) = if is_send {
                let connection = comm.connector.connect_send(peer, channel)?;
                let work = self.message_of(task, Function::Send, part, Connections::Send(connection.fifo));
                let send = message.address;
                (Work { send, ..work }, connection.proxy)
            } else {
                let connection = comm.connector.connect_recv(peer, channel)?;
                let work = self.message_of(task, Function::Recv, part, Connections::Recv(connection.fifo));
                let recv = message.address;
                (Work { recv, ..work }, connection.proxy)
            };
            work.check()?;
            let steps = work.steps();
            let steps = if is_send { steps.send } else { steps.recv };
            proxies += self.add_proxy(task, channel, proxy, peer, is_send, (steps, true));
            self.add_work(channel, work);
            mask |= 1 << channel;
        }
        Ok((mask, proxies, choice))
    }

    /// A part of a message, without its addresses.
    fn message_of(
        &self,
        task: &Task,
        function: Function,
        part: Range<usize>,
        connections: Connections,
    ) -> Work {
        Work {
            function,
            send: 0,
            recv: 0,
            root: 0,
            ..self.work_of(task, part, Algorithm::Direct, connections)
        }
    }

    fn work_of(
        &self,
        task: &Task,
        part: Range<usize>,
        algorithm: Algorithm,
        connections: Connections,
    ) -> Work {
        let request = &task.request;
        Work {
            op: task.info.op,
            tag: request.call().tag(),
            function: request.function,
            algorithm,
            data_type: request.data_type,
            reduce_op: request.reduce_op,
            scalar: request.scalar,
            send: request.send,
            recv: request.recv,
            count: request.count,
            part,
            rank: self.comm.rank,
            ranks: self.comm.ranks,
            root: request.peer.unwrap_or(0),
            connections,
        }
    }

    fn add_work(&mut self, channel: u8, work: Work) {
        self.used += 1;
        self.work[usize::from(channel)].push(work);
    }

    /// Adds a proxy operation if the connection has a proxy and there are steps to move; returns how many were added.
    /// What is not `counted` is beside the operation's own.
    fn add_proxy(
        &mut self,
        task: &Task,
        channel: u8,
        connection: Option<crate::proxy::ConnectionId>,
        peer: u32,
        is_send: bool,
        (steps, counted): (u32, bool),
    ) -> u32 {
        let (Some(connection), true) = (connection, steps > 0) else {
            return 0;
        };
        self.proxy_ops.push(ProxyOp {
            connection,
            op: task.info.op,
            replay: 0,
            comm: task.info.comm,
            seq: task.info.seq,
            rank: task.info.rank,
            peer,
            channel,
            is_send,
            p2p: task.info.flags.contains(Flags::P2P),
            graph: task.info.flags.contains(Flags::GRAPH),
            steps,
            tag: task.request.call().tag(),
            counted,
            chunk_bytes: self.comm.slot_bytes as u32,
            pid: observe::pid(),
        });
        1
    }

    /// Enters an operation whose work has been added; `twin` is the receive that a send to oneself is done with.
    fn add_op(
        &mut self,
        task: &Task,
        twin: Option<&Task>,
        channel_mask: u64,
        proxy_ops: u32,
        algorithm: Algorithm,
        protocol: Protocol,
    ) {
        if self.simulated.is_some() {
            return;
        }
        for task in std::iter::once(task).chain(twin) {
            self.announce(task, channel_mask, proxy_ops, algorithm, protocol);
        }
        self.states.push(OpState::new(
            task.info,
            twin.map(|task| task.info),
            channel_mask.count_ones(),
            proxy_ops,
        ));
    }

    /// Describes an operation and lists it.
    fn announce(
        &mut self,
        task: &Task,
        channel_mask: u64,
        proxy_ops: u32,
        algorithm: Algorithm,
        protocol: Protocol,
    ) {
        self.describe(task, channel_mask, proxy_ops, algorithm, protocol);
        crate::log::choice(task, channel_mask, (algorithm, protocol));
        task.info.emit(task.info.kind(), State::START, observe::now_ns());
        self.ops.push(task.info);
        self.calls
            .push(checks::Entry::new(&task.info, task.request.call()));
    }

    fn describe(
        &self,
        task: &Task,
        channel_mask: u64,
        proxy_ops: u32,
        algorithm: Algorithm,
        protocol: Protocol,
    ) {
        let (request, info) = (&task.request, &task.info);
        let p2p = request.function.is_p2p();
        let peer = request.peer.map_or(-1, |peer| peer as i32);
        observe::describe(&Description {
            comm: info.comm,
            seq: info.seq,
            count: request.count as u64,
            bytes: info.bytes,
            send_buffer: request.send as u64,
            recv_buffer: request.recv as u64,
            stream: request.stream.0 as u64,
            channel_mask,
            api_start_ns: task.api_start_ns,
            api_end_ns: task.api_end_ns,
            op: info.op,
            group: self.group,
            plan: self.number,
            rank: info.rank,
            ranks: self.comm.ranks,
            root: if p2p { -1 } else { peer },
            peer: if p2p { peer } else { -1 },
            proxy_ops,
            graph: task.graph,
            node: task.node,
            group_depth: task.group_depth,
            tid: task.tid,
            function: request.function.code(),
            data_type: request.data_type.code(),
            reduce_op: request.reduce_op.code(),
            algorithm: algorithm.code(),
            protocol: protocol.code(),
            channels: channel_mask.count_ones() as u8,
            warps: 1,
            flags: info.flags.0,
            ..Default::default()
        });
    }

    fn finish(self, persistent: bool) -> Result<Plan> {
        let observer = Arc::new(PlanObserver::new(
            self.number,
            self.states,
            self.shared,
            persistent,
            self.comm.reclaim.clone(),
            self.comm.checks.clone(),
        ));
        let channels = self
            .work
            .into_iter()
            .enumerate()
            .filter(|(_, work)| !work.is_empty())
            .map(|(channel, work)| ChannelWork {
                channel: channel as u8,
                work,
            })
            .collect();
        Ok(Plan {
            number: self.number,
            launch: Arc::new(Launch {
                channels,
                abort: self.comm.abort.clone(),
                observer: observer.clone(),
            }),
            observer,
            proxy_ops: self.proxy_ops,
            ops: self.ops,
            calls: self.calls,
        })
    }
}
