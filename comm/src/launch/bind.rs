//! Binding: filling in what a plan leaves open, so that the device can run it.
//!
//! - Messages get their connections, which are made at their first use.
//! - Operations in peer memory get what the other ranks' kernels reach of their buffers. Buffers are exported here.
//! - Network work gets the proxies that move it.
//!
//! [`Work`], the kernels' launch parameter, is made here and nowhere else. All of a group is bound before any of its operations is announced:
//! what fails here has no records.

use std::{collections::BTreeMap, mem, ops::Range, sync::Arc};

use ringsight_comm_base::error::{Error, Result};
use ringsight_kernels::{
    ChannelWork, Connections, ExportedBuffer, Launch, PeerMemory, Work, WorkError, ZeroCopy,
    cuda::collective::can_zero_copy,
};
use ringsight_records::{Algorithm, Flags, Function};
use smallvec::SmallVec;

use super::{
    LaunchContext,
    announce::{Described, announce},
    pool::{PooledPlan, is_cacheable},
    ready::ReadyPlan,
};
use crate::{
    checks,
    device::device,
    observe,
    op::{ConnectionId, DataPath, Method, OpInfo, ProxyOp, Task},
    plan::{Layout, Plan, PlannedWork, Route, estimate},
    progress::{Contents, OpState, PlanObserver, Shared},
    transport::RingConnections,
};

/// A plan that can be launched.
pub(super) struct BoundPlan {
    /// Plan number.
    pub(super) number: u32,
    /// What the device is given; `None` once it is launched.
    pub(super) ready: Option<ReadyPlan>,
    /// Network work; the replay is filled in when it is posted.
    pub(super) proxy_ops: Vec<ProxyOp>,
    /// Its operations.
    pub(super) ops: SmallVec<[OpInfo; 1]>,
    /// What was called for them, and for what shows its tag.
    pub(super) calls: SmallVec<[checks::Entry; 1]>,
}

/// The plans of one group on one communicator.
pub(super) type BoundPlans = SmallVec<[BoundPlan; 1]>;

/// What the operations of one binding have in common.
#[derive(Clone, Copy)]
pub(super) struct Binding {
    /// Group number.
    pub(super) group: u32,
    /// The plans are captured.
    pub(super) persistent: bool,
}

/// Binds what a group asks of one communicator, and announces its operations. The first plan takes `pooled`, if there is one. Nothing is announced
/// if binding fails.
///
/// # Errors
/// A connection that cannot be made; work that the kernels refuse.
pub(super) fn bind(
    context: &LaunchContext,
    layout: &Layout<'_>,
    binding: Binding,
    mut pooled: Option<PooledPlan>,
) -> Result<BoundPlans> {
    // By operation.
    let mut proxy_ops = BTreeMap::new();
    let plans = layout.plans.iter();
    let drafts: Result<SmallVec<[Draft<'_, '_>; 1]>> = plans
        .map(|plan| Draft::new(context, plan, pooled.take(), &mut proxy_ops))
        .collect();
    let mut drafts = drafts?;
    let proxy_ops = |task: &Task| proxy_ops.get(&task.info.op).copied().unwrap_or(0);
    for draft in &mut drafts {
        draft.enter_ops(context, binding, &proxy_ops);
    }
    for spread in &layout.spreads {
        let (task, proxy_ops) = (spread.task, proxy_ops(spread.task));
        let masks: SmallVec<[u64; 4]> = spread.masks.values().copied().collect();
        let described = Described {
            method: task.method,
            channel_mask: masks.iter().fold(0, |all, mask| all | mask),
            proxy_ops,
        };
        let state = OpState::new(task.info, None, described.channel_mask.count_ones(), proxy_ops);
        let (Some(first), Some(last)) = (spread.masks.keys().next(), spread.masks.keys().last()) else {
            return Err(Error::internal("an operation without messages"));
        };
        drafts[*first].enter(context, binding, task, described);
        if first == last {
            drafts[*first].contents.states.push(state);
            continue;
        }
        let state = Arc::new(state.split(&masks));
        for index in spread.masks.keys() {
            drafts[*index].contents.shared.push(Shared {
                state: state.clone(),
                begins: index == first,
                ends: index == last,
            });
        }
    }
    drafts
        .into_iter()
        .map(|draft| draft.finish(context, binding))
        .collect()
}

/// How long a plan would take, by the model of [`estimate`]. Nothing is connected, described or launched.
///
/// # Errors
/// Work that the kernels refuse.
pub(super) fn estimate(context: &LaunchContext, plan: &Plan<'_>) -> Result<estimate::Load> {
    let mut load = estimate::Load::default();
    let capabilities = &context.capabilities;
    for planned in &plan.works {
        let bytes = planned.part.len() * planned.task.request.data_type.size();
        match planned.route {
            Route::Ring | Route::Tag => {
                let (work, ring) = ring_work(context, planned)?;
                let is_networked =
                    ring.is_some_and(|ring| ring.prev.proxy.is_some() || ring.next.proxy.is_some());
                load.add_work(&work, link(is_networked));
            }
            Route::Peers => {
                // No buffer is exported to know how long it would take.
                let work = peer_work(context, planned, Some(ZeroCopy::Unreachable))?;
                load.add_work(&work, estimate::SHARED);
            }
            Route::Local { .. } => load.add(estimate::LOCAL, 0, bytes),
            Route::Send { peer, .. } | Route::Recv { peer, .. } => {
                let topology = &capabilities.topology;
                let is_near = topology.node_of(peer) == topology.node_of(capabilities.rank);
                let slots = bytes.div_ceil(capabilities.slot_bytes) as u32;
                load.add(link(!is_near), slots, bytes);
            }
        }
    }
    Ok(load)
}

fn link(is_networked: bool) -> estimate::LinkCost {
    if is_networked {
        estimate::NETWORK
    } else {
        estimate::SHARED
    }
}

/// A plan in the making.
struct Draft<'l, 't> {
    plan: &'l Plan<'t>,
    bound: BoundPlan,
    works: ChannelWorks,
    /// What the plan is made of, but for the works.
    pooled: Option<PooledPlan>,
    contents: Contents,
    /// How its operations in peer memory are done, as far as this rank knows.
    methods: SmallVec<[Method; 1]>,
    cached: Option<Method>,
}

impl<'l, 't> Draft<'l, 't> {
    /// Binds the works of a plan; counts the proxy operations of each operation.
    fn new(
        context: &LaunchContext,
        plan: &'l Plan<'t>,
        mut pooled: Option<PooledPlan>,
        counts: &mut BTreeMap<u32, u32>,
    ) -> Result<Self> {
        let memory = pooled.as_mut().map(|pooled| mem::take(&mut pooled.works));
        let mut draft = Self {
            plan,
            bound: BoundPlan::new(observe::next_plan()),
            works: ChannelWorks::within(memory.unwrap_or_default()),
            pooled,
            contents: Contents {
                number: 0,
                states: SmallVec::new(),
                shared: Vec::new(),
                persistent: false,
            },
            methods: SmallVec::new(),
            cached: None,
        };
        draft.contents.number = draft.bound.number;
        for planned in &plan.works {
            draft.add(context, planned, counts)?;
        }
        Ok(draft)
    }

    fn add(
        &mut self,
        context: &LaunchContext,
        planned: &PlannedWork<'_>,
        counts: &mut BTreeMap<u32, u32>,
    ) -> Result<()> {
        let PlannedWork {
            task, channel, route, ..
        } = *planned;
        let work = match route {
            Route::Ring | Route::Tag => {
                let (work, ring) = ring_work(context, planned)?;
                if let (Some(ring), Connections::Ring { order, .. }) = (ring, &work.connections) {
                    let (next, prev) = (order[1], order[order.len() - 1]);
                    if ring.next.proxy.is_some() || ring.prev.proxy.is_some() {
                        let (steps, counted) = (work.steps(), !work.is_tag_only());
                        for (proxy, peer, is_send, steps) in [
                            (ring.next.proxy, next, true, steps.send),
                            (ring.prev.proxy, prev, false, steps.recv),
                        ] {
                            self.add_proxy(
                                context,
                                planned,
                                proxy,
                                (peer, is_send),
                                (steps, counted),
                                counts,
                            );
                        }
                    }
                }
                work
            }
            Route::Peers => {
                let work = peer_work(context, planned, None)?;
                let path = task.method.path;
                let path = if path.is_zero_copy() && !may_be_zero_copy(&work) {
                    DataPath::Ll128
                } else {
                    path
                };
                self.methods.push(Method { path, ..task.method });
                self.cached = is_cacheable(task).then_some(task.method);
                work
            }
            Route::Local { from, to } => {
                let connections = Connections::Local;
                let work = message_work(context, planned, Function::Send, connections);
                checked(Work {
                    send: from,
                    recv: to,
                    ..work
                })?
            }
            Route::Send { peer, from } => {
                let connection = context.connector.connect_send(peer, channel)?;
                let connections = Connections::Send(connection.fifo);
                let work = message_work(context, planned, Function::Send, connections);
                let work = checked(Work { send: from, ..work })?;
                if connection.proxy.is_some() {
                    let steps = work.steps().send;
                    self.add_proxy(
                        context,
                        planned,
                        connection.proxy,
                        (peer, true),
                        (steps, true),
                        counts,
                    );
                }
                work
            }
            Route::Recv { peer, to } => {
                let connection = context.connector.connect_recv(peer, channel)?;
                let connections = Connections::Recv(connection.fifo);
                let work = message_work(context, planned, Function::Recv, connections);
                let work = checked(Work { recv: to, ..work })?;
                if connection.proxy.is_some() {
                    let steps = work.steps().recv;
                    self.add_proxy(
                        context,
                        planned,
                        connection.proxy,
                        (peer, false),
                        (steps, true),
                        counts,
                    );
                }
                work
            }
        };
        self.works.of(channel).push(work);
        Ok(())
    }

    /// Adds a proxy operation if the connection has a proxy and there are steps to move. What is not `counted` is beside the operation's own.
    fn add_proxy(
        &mut self,
        context: &LaunchContext,
        planned: &PlannedWork<'_>,
        connection: Option<ConnectionId>,
        (peer, is_send): (u32, bool),
        (steps, counted): (u32, bool),
        counts: &mut BTreeMap<u32, u32>,
    ) {
        let (Some(connection), true) = (connection, steps > 0) else {
            return;
        };
        let (task, info) = (planned.task, &planned.task.info);
        self.bound.proxy_ops.push(ProxyOp {
            connection,
            op: info.op,
            replay: 0,
            comm: info.comm,
            seq: info.seq,
            rank: info.rank,
            peer,
            channel: planned.channel,
            is_send,
            p2p: info.flags.contains(Flags::P2P),
            graph: info.flags.contains(Flags::GRAPH),
            steps,
            tag: task.request.call().tag(),
            counted,
            chunk_bytes: context.capabilities.slot_bytes as u32,
            pid: observe::pid(),
        });
        if counted {
            *counts.entry(info.op).or_default() += 1;
        }
    }

    /// Enters the operations that are in this plan alone, and the calls whose tags it shows.
    fn enter_ops(&mut self, context: &LaunchContext, binding: Binding, proxy_ops: &dyn Fn(&Task) -> u32) {
        for task in &self.plan.tagged {
            let call = checks::Entry::new(&task.info, task.request.call());
            self.bound.calls.push(call);
        }
        let plan = self.plan;
        for (index, op) in plan.ops.iter().enumerate() {
            let method = match (self.methods.get(index), op.twin) {
                (Some(method), _) => *method,
                (None, None) => op.task.method,
                (None, Some(_)) => Method {
                    algorithm: Algorithm::Direct,
                    path: DataPath::Fifo,
                    ..op.task.method
                },
            };
            let described = Described {
                method,
                channel_mask: op.channel_mask,
                proxy_ops: proxy_ops(op.task),
            };
            for task in std::iter::once(op.task).chain(op.twin) {
                self.enter(context, binding, task, described);
            }
            self.contents.states.push(OpState::new(
                op.task.info,
                op.twin.map(|twin| twin.info),
                op.channel_mask.count_ones(),
                described.proxy_ops,
            ));
        }
    }

    /// Enters an operation that begins in this plan.
    fn enter(&mut self, context: &LaunchContext, binding: Binding, task: &Task, described: Described) {
        let ranks = context.capabilities.ranks;
        announce(task, described, (ranks, binding.group, self.bound.number));
        self.bound.enter(task);
    }

    fn finish(mut self, context: &LaunchContext, binding: Binding) -> Result<BoundPlan> {
        self.contents.persistent = binding.persistent;
        let works = self.works.finish();
        let ready = assemble(context, self.pooled, works, &mut self.contents, self.cached)?;
        self.bound.ready = Some(ready);
        Ok(self.bound)
    }
}

/// The works of a plan, by channel, in memory of a pooled plan.
#[derive(Default)]
struct ChannelWorks {
    /// Those with work, in channel order; then what is left of the pooled plan.
    all: Vec<ChannelWork>,
    used: usize,
}

impl ChannelWorks {
    /// None yet, in the memory of these.
    fn within(mut all: Vec<ChannelWork>) -> Self {
        all.iter_mut().for_each(|channel| channel.work.clear());
        Self { all, used: 0 }
    }

    /// The works of one channel.
    fn of(&mut self, number: u8) -> &mut Vec<Work> {
        let used = &self.all[..self.used];
        let place = used.partition_point(|channel| channel.channel < number);
        if used.get(place).is_none_or(|channel| channel.channel != number) {
            if self.used == self.all.len() {
                self.all.push(ChannelWork {
                    channel: number,
                    work: Vec::new(),
                });
            }
            self.all[self.used].channel = number;
            self.all[place..=self.used].rotate_right(1);
            self.used += 1;
        }
        &mut self.all[place].work
    }

    fn finish(mut self) -> Vec<ChannelWork> {
        self.all.truncate(self.used);
        self.all
    }
}

impl BoundPlan {
    /// Of nothing yet.
    pub(super) fn new(number: u32) -> Self {
        Self {
            number,
            ready: None,
            proxy_ops: Vec::new(),
            ops: SmallVec::new(),
            calls: SmallVec::new(),
        }
    }

    /// Lists an operation.
    pub(super) fn enter(&mut self, task: &Task) {
        self.ops.push(task.info);
        let call = checks::Entry::new(&task.info, task.request.call());
        self.calls.push(call);
    }
}

/// A plan, ready to be launched.
pub(super) fn assemble(
    context: &LaunchContext,
    pooled: Option<PooledPlan>,
    mut works: Vec<ChannelWork>,
    contents: &mut Contents,
    cached: Option<Method>,
) -> Result<ReadyPlan> {
    let number = contents.number;
    if let Some(launch) = pooled.and_then(|pooled| pooled.refill(&mut works, contents)) {
        return ReadyPlan::new(launch, number, cached);
    }
    let observer = PlanObserver::new(
        contents,
        context.retired.clone(),
        context.checks.clone(),
        context.arrivals.clone(),
    );
    let launch = Launch {
        channels: works,
        abort: context.abort.clone(),
        observer: Arc::new(observer),
        peers: context.peers.clone(),
    };
    ReadyPlan::new(Arc::new(launch), number, cached)
}

/// One channel's part of an operation that goes round its ring, and the ring unless this rank is alone.
fn ring_work<'a>(
    context: &'a LaunchContext,
    planned: &PlannedWork<'_>,
) -> Result<(Work, Option<&'a RingConnections>)> {
    let algorithm = match planned.route {
        Route::Tag => Algorithm::Ring,
        _ => planned.task.method.algorithm,
    };
    let ring = context.rings[usize::from(planned.channel)].as_ref();
    let connections = match ring {
        None => Connections::Local,
        Some(ring) => Connections::Ring {
            order: context.capabilities.topology.ring(planned.channel),
            prev: ring.prev.fifo.clone(),
            next: ring.next.fifo.clone(),
        },
    };
    let work = work_of(
        context,
        planned.task,
        planned.part.clone(),
        algorithm,
        connections,
    );
    Ok((checked(work)?, ring))
}

/// An operation in peer memory. Whether the others' kernels reach its buffers is found out unless `zero_copy` says so.
fn peer_work(
    context: &LaunchContext,
    planned: &PlannedWork<'_>,
    zero_copy: Option<ZeroCopy>,
) -> Result<Work> {
    let (task, method) = (planned.task, planned.task.method);
    let peers = context.peers.clone();
    let peers = peers.ok_or_else(|| Error::internal("no memory is shared with peers"))?;
    let zero_copy = match zero_copy {
        _ if !method.path.is_zero_copy() => ZeroCopy::Off,
        Some(zero_copy) => zero_copy,
        None => reachable_buffers(context, task, &peers)?,
    };
    let buffer = task
        .request
        .window
        .as_ref()
        .filter(|_| method.path.is_copy_engine());
    let connections = match buffer.and_then(|buffer| Some((buffer.window.clone()?, buffer.offset))) {
        Some((window, offset)) => Connections::CopyEngine { window, offset },
        None => Connections::Peers(peers),
    };
    let work = work_of(context, task, planned.part.clone(), method.algorithm, connections);
    checked(Work {
        zero_copy,
        pushes: method.path == DataPath::Push,
        ..work
    })
}

/// A part of a message, without its addresses.
fn message_work(
    context: &LaunchContext,
    planned: &PlannedWork<'_>,
    function: Function,
    connections: Connections,
) -> Work {
    let part = planned.part.clone();
    message_of(context, planned.task, function, part, connections)
}

/// A part of a message, without its addresses.
pub(super) fn message_of(
    context: &LaunchContext,
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
        ..work_of(context, task, part, Algorithm::Direct, connections)
    }
}

fn work_of(
    context: &LaunchContext,
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
        rank: context.capabilities.rank,
        ranks: context.capabilities.ranks,
        root: request.peer.unwrap_or(0),
        connections,
        zero_copy: ZeroCopy::Off,
        pushes: false,
    }
}

/// Work that the kernels refuse is a defect of the planner.
fn checked(work: Work) -> Result<Work> {
    work.check().map_err(|WorkError(text)| Error::internal(text))?;
    Ok(work)
}

/// Whether the other ranks' kernels reach what they need of the buffers of a zero-copy operation: where contributions are pushed, that is where
/// results are passed on to.
fn reachable_buffers(context: &LaunchContext, task: &Task, peers: &PeerMemory) -> Result<ZeroCopy> {
    let device = &**device()?;
    let (request, capabilities) = (&task.request, &context.capabilities);
    // Of a message it is the sender who has to reach the receiver's buffer.
    let is_foreign = match request.peer {
        Some(peer) if request.function.is_p2p() => peers.is_foreign(peer),
        _ => peers.foreign != 0,
    };
    let export = |(address, bytes)| {
        if address == 0 || bytes == 0 {
            return Some(ExportedBuffer::default());
        }
        if is_foreign {
            let captured = task.info.flags.contains(Flags::GRAPH);
            return context.buffer_exchange.as_ref()?.export_for_operation(
                device,
                (address, bytes),
                captured,
            );
        }
        let allocation = device.allocation(address, bytes, context.device);
        allocation.map(|_| ExportedBuffer::default())
    };
    let [sent, received] = request.used_buffers(capabilities.rank, capabilities.ranks);
    let pushes = task.method.path == DataPath::Push;
    let sent = if pushes || request.function == Function::Send {
        (0, 0)
    } else {
        sent
    };
    let (sent, received) = (export(sent), export(received));
    Ok(match (sent, received) {
        (Some(sent), Some(received)) => ZeroCopy::Reachable {
            send: sent,
            recv: received,
        },
        _ => ZeroCopy::Unreachable,
    })
}

/// Whether this rank knows of nothing that keeps an operation from being zero-copy. Of what it sends the receiver knows.
fn may_be_zero_copy(work: &Work) -> bool {
    match work.function {
        Function::Send => true,
        Function::Recv => work.zero_copy != ZeroCopy::Unreachable,
        _ => work.zero_copy != ZeroCopy::Unreachable && can_zero_copy(work),
    }
}
