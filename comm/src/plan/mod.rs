//! From tasks to plans: what one kernel launch will do.
//!
//! Collectives drain before point-to-point: plans are cut where the work budget ends, and the number of sends and
//! receives differs between ranks. If these came first, ranks would cut their collectives at different places, and the
//! least-loaded channel picker, whose loads begin anew with each plan, would give different answers.

pub mod algorithm;
pub mod channels;
mod p2p;
mod sequence;

use std::{ops::Range, sync::Arc};

use ringsight_kernels::{ChannelWork, Connections, Launch, Work};
use ringsight_records::{
    Algorithm, DataType, Description, Flags, Function, Kind, Protocol, Record, ReduceOp, State,
};

use crate::{
    checks::Call,
    communicator::Communicator,
    device::Stream,
    error::{Error, Result},
    launch::observer::{OpState, PlanObserver},
    observe,
    proxy::ProxyOp,
};

pub(crate) use p2p::Exchange;
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
            Function::AllGather | Function::ReduceScatter => one * u64::from(ranks),
            _ => one,
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
            pid: std::process::id(),
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
}

/// Plans everything that a group asks of one communicator.
pub(crate) fn build(
    comm: &Communicator,
    collectives: Vec<Task>,
    exchange: Exchange,
    persistent: bool,
    group: u32,
) -> Result<Vec<Plan>> {
    let budget = if persistent {
        usize::MAX
    } else {
        comm.work_fifo_depth / 2
    };
    let mut plans = Vec::new();
    let mut plan = Builder::new(comm, budget, group);
    for task in collectives {
        let (channels, choice) = choice_of(&task, comm)?;
        // Not by its own channels: where ranks call something different, it shall be in the same plan all the same.
        if !plan.fits(comm.channels()) {
            plans.push(plan.finish(persistent)?);
            plan = Builder::new(comm, budget, group);
        }
        plan.add_collective(&task, channels, choice)?;
    }
    for round in exchange.rounds(comm.rank, comm.ranks)? {
        let needed: usize = round
            .tasks()
            .map(|task| choice_of(task, comm).map_or(1, |(channels, _)| channels))
            .sum();
        if !plan.fits(needed) {
            plans.push(plan.finish(persistent)?);
            plan = Builder::new(comm, budget, group);
        }
        plan.add_round(&round)?;
    }
    if !plan.is_empty() {
        plans.push(plan.finish(persistent)?);
    }
    Ok(plans)
}

fn choice_of(task: &Task, comm: &Communicator) -> Result<(usize, algorithm::Choice)> {
    let function = task.request.function;
    let choice = algorithm::choose(function, task.info.bytes)
        .ok_or_else(|| Error::internal(format!("no algorithm serves {function}")))?;
    Ok((choice.channels(task.info.bytes, comm.channels()), choice))
}

/// A plan in the making.
struct Builder<'a> {
    comm: &'a Communicator,
    number: u32,
    group: u32,
    budget: usize,
    used: usize,
    picker: channels::Picker,
    /// By channel number.
    work: Vec<Vec<Work>>,
    states: Vec<OpState>,
    ops: Vec<OpInfo>,
    proxy_ops: Vec<ProxyOp>,
}

impl<'a> Builder<'a> {
    fn new(comm: &'a Communicator, budget: usize, group: u32) -> Self {
        Self {
            comm,
            number: observe::next_plan(),
            group,
            budget,
            used: 0,
            picker: channels::Picker::new(comm.channels()),
            work: (0..comm.channels()).map(|_| Vec::new()).collect(),
            states: Vec::new(),
            ops: Vec::new(),
            proxy_ops: Vec::new(),
        }
    }

    fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Whether `elements` more work elements are within the budget. Something always fits into an empty plan.
    fn fits(&self, elements: usize) -> bool {
        self.is_empty() || self.used + elements <= self.budget
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
            let connections = match &self.comm.rings[usize::from(channel)] {
                None => Connections::Local,
                Some(ring) => Connections::Ring {
                    order: self.comm.topology.ring(channel),
                    prev: ring.prev.fifo.clone(),
                    next: ring.next.fifo.clone(),
                },
            };
            let work = self.work_of(task, task.info.op, part, connections);
            work.check()?;
            if let Some(ring) = &self.comm.rings[usize::from(channel)] {
                let (order, steps) = (self.comm.topology.ring(channel), work.steps());
                let (next, prev) = (order[1], order[order.len() - 1]);
                proxies += self.add_proxy(task, channel, ring.next.proxy, next, true, steps.send);
                proxies += self.add_proxy(task, channel, ring.prev.proxy, prev, false, steps.recv);
            }
            self.add_work(channel, work);
            mask |= 1 << channel;
        }
        self.add_op(task, None, mask, proxies, choice.algorithm, choice.protocol);
        Ok(())
    }

    fn add_round(&mut self, round: &p2p::Round) -> Result<()> {
        if let Some((send, recv)) = &round.to_self {
            let bytes = |task: &Task| task.info.bytes;
            if bytes(send) != bytes(recv) {
                return Err(Error::usage(format!(
                    "ncclSend to oneself of {} bytes is paired with ncclRecv from oneself of {} bytes",
                    bytes(send),
                    bytes(recv)
                )));
            }
            let mut work = self.work_of(send, send.info.op, 0..send.request.count, Connections::Local);
            work.recv = recv.request.recv;
            work.check()?;
            self.add_work(0, work);
            self.add_op(send, Some(recv), 1, 0, Algorithm::Direct, Protocol::Simple);
        }
        for task in round.send.iter().chain(&round.recv) {
            self.add_message(task)?;
        }
        Ok(())
    }

    fn add_message(&mut self, task: &Task) -> Result<()> {
        let (comm, request) = (self.comm, &task.request);
        let peer = request
            .peer
            .ok_or_else(|| Error::internal("a send or receive without peer"))?;
        let is_send = request.function == Function::Send;
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
            let (connections, proxy) = if is_send {
                let connection = comm.connector.connect_send(peer, channel)?;
                (Connections::Send(connection.fifo), connection.proxy)
            } else {
                let connection = comm.connector.connect_recv(peer, channel)?;
                (Connections::Recv(connection.fifo), connection.proxy)
            };
            let work = self.work_of(task, task.info.op, part, connections);
            work.check()?;
            let steps = work.steps();
            let steps = if is_send { steps.send } else { steps.recv };
            proxies += self.add_proxy(task, channel, proxy, peer, is_send, steps);
            self.add_work(channel, work);
            mask |= 1 << channel;
        }
        self.add_op(task, None, mask, proxies, choice.algorithm, choice.protocol);
        Ok(())
    }

    fn work_of(&self, task: &Task, op: u32, part: Range<usize>, connections: Connections) -> Work {
        let request = &task.request;
        Work {
            op,
            tag: request.call().tag(),
            function: request.function,
            data_type: request.data_type,
            reduce_op: request.reduce_op,
            send: request.send,
            recv: request.recv,
            count: request.count,
            part,
            rank: self.comm.rank,
            ranks: self.comm.ranks,
            root: if request.function.is_p2p() {
                0
            } else {
                request.peer.unwrap_or(0)
            },
            connections,
        }
    }

    fn add_work(&mut self, channel: u8, work: Work) {
        self.used += 1;
        self.work[usize::from(channel)].push(work);
    }

    /// Adds a proxy operation if the connection has a proxy and there are steps to move; returns how many were added.
    fn add_proxy(
        &mut self,
        task: &Task,
        channel: u8,
        connection: Option<crate::proxy::ConnectionId>,
        peer: u32,
        is_send: bool,
        steps: u32,
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
            chunk_bytes: self.comm.slot_bytes as u32,
            pid: std::process::id(),
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
        let now = observe::now_ns();
        for task in std::iter::once(task).chain(twin) {
            self.describe(task, channel_mask, proxy_ops, algorithm, protocol);
            task.info.emit(task.info.kind(), State::START, now);
            self.ops.push(task.info);
        }
        self.states.push(OpState::new(
            task.info,
            twin.map(|task| task.info),
            channel_mask.count_ones(),
            proxy_ops,
        ));
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
            persistent,
            self.comm.reclaim.clone(),
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
        })
    }
}
