//! A plan in the making: work elements, network work and descriptions of its operations.

use std::{mem, ops::Range};

use ringsight_kernels::{
    Connections, ExportedBuffer, PeerMemory, Work, WorkError, ZeroCopy, cuda::collective::can_zero_copy,
    schedule::divisible,
};
use ringsight_records::{Algorithm, Flags, Function};
use smallvec::SmallVec;

use super::{Plan, again, channel_works::ChannelWorks, channels, estimate, exchange};
use crate::{
    checks,
    communicator::Communicator,
    device::device,
    error::{Error, Result},
    launch::{
        observer::{Contents, OpState},
        reclaim::{self, Spare},
    },
    observe,
    op::{ConnectionId, DataPath, Method, ProxyOp, Task},
};

/// A plan in the making.
pub(super) struct Builder<'a> {
    comm: &'a Communicator,
    /// As far as it is made.
    pub(super) plan: Plan,
    group: u32,
    /// Where it is not to be launched: what it would take.
    pub(super) simulated: Option<estimate::Load>,
    /// Work elements.
    pub(super) used: usize,
    /// Nothing may be added to its one operation.
    pub(super) alone: bool,
    /// Its operations are messages among peers.
    pub(super) is_among_peers: bool,
    picker: channels::Picker,
    /// What it is made of, but for the works.
    spare: Option<Spare>,
    work: ChannelWorks,
    pub(super) contents: Contents,
    /// See [`again`].
    serves_again: Option<Method>,
}

impl<'a> Builder<'a> {
    /// An empty plan of a group; without one it only says what it would take. It has the memory of one that is over, if
    /// there is one.
    pub(super) fn new(comm: &'a Communicator, group: Option<u32>, spare: Option<Spare>) -> Self {
        let mut spare = spare;
        let works = spare
            .as_mut()
            .map(|spare| mem::take(&mut spare.works))
            .unwrap_or_default();
        let number = group.map_or(0, |_| observe::next_plan());
        Self {
            spare,
            comm,
            plan: Plan::new(number),
            group: group.unwrap_or(0),
            simulated: group.is_none().then(estimate::Load::default),
            used: 0,
            alone: false,
            is_among_peers: false,
            picker: channels::Picker::new(comm.channels()),
            work: ChannelWorks::again(works),
            contents: Contents {
                number,
                states: SmallVec::new(),
                shared: Vec::new(),
                persistent: false,
            },
            serves_again: None,
        }
    }

    pub(super) fn add_collective(&mut self, task: &Task) -> Result<()> {
        let (request, method) = (&task.request, task.method);
        let elements = divisible(
            request.function,
            method.algorithm,
            request.data_type,
            request.count,
            self.comm.ranks,
        );
        let mut parts = channels::split(elements, request.data_type.size(), method.channels);
        parts.retain(|part| !part.is_empty());
        // Ranks that call different operations find out where these meet, so they must meet. Let the n-th collective of
        // a group be the first that differs. Where plans are cut depends on the operations before it alone, so all ranks have it
        // in the same plan, and the channels' loads are the same, since all before it was. What is picked for it are
        // the least loaded channels, more or fewer: the least loaded one is always among them, and has work. There
        // everybody comes to it after the same operations, and `ringsight_kernels::schedule` says why somebody sees it.
        let picked = self.picker.pick(parts.len(), task.info.bytes);
        let (mut mask, mut proxies) = (0u64, 0);
        for (channel, part) in picked.into_iter().zip(parts) {
            proxies += self.add_ring(task, channel, part, method.algorithm)?;
            mask |= 1 << channel;
        }
        self.add_op(task, None, mask, proxies, method);
        Ok(())
    }

    /// Adds an operation that a kernel does among peers: a collective, whose plan has nothing else and so is the same on all
    /// ranks, or one end of a message, with others.
    pub(super) fn add_among_peers(&mut self, task: &Task) -> Result<()> {
        let peers = self.comm.peers.clone();
        let peers = peers.ok_or_else(|| Error::internal("no memory is shared with peers"))?;
        let (all, method) = (0..task.request.count, task.method);
        let pushes = method.path == DataPath::Push;
        let zero_copy = if method.path.is_zero_copy() {
            self.straight(task, &peers, pushes)?
        } else {
            ZeroCopy::Off
        };
        let found = task
            .request
            .window
            .as_ref()
            .filter(|_| method.path.is_copy_engine());
        let connections = match found.and_then(|found| Some((found.window.clone()?, found.offset))) {
            Some((window, offset)) => Connections::CopyEngine { window, offset },
            None => Connections::Peers(peers),
        };
        self.serves_again = again::can_be(task).then_some(method);
        let work = Work {
            zero_copy,
            pushes,
            ..self.work_of(task, all, method.algorithm, connections)
        };
        work.check().map_err(invalid_work)?;
        if let Some(load) = &mut self.simulated {
            load.add_work(&work, estimate::SHARED);
        }
        let path = if method.path.is_zero_copy() && !may_go_straight(&work) {
            DataPath::Ll128
        } else {
            method.path
        };
        self.add_work(0, work);
        self.add_op(task, None, 1, 0, Method { path, ..method });
        Ok(())
    }

    /// Shows the tag of an operation that is made of messages to the next rank of a ring, and looks at the previous
    /// one's: where ranks call different operations, their messages need not meet, but rings do.
    pub(super) fn show_tag(&mut self, task: &Task) -> Result<()> {
        if self.comm.ranks > 1 {
            for channel in self.picker.pick(1, 0) {
                self.add_ring(task, channel, 0..0, Algorithm::Ring)?;
            }
            self.plan
                .calls
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
            work.check().map_err(invalid_work)?;
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
        work.check().map_err(invalid_work)?;
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
        let counted = !work.is_tag_only();
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
    /// Returns its channels.
    pub(super) fn add_to_self(&mut self, send: &Task, recv: &Task, from: usize, to: usize) -> Result<u64> {
        let bytes = |task: &Task| task.request.count * task.request.data_type.size();
        if bytes(send) != bytes(recv) {
            return Err(Error::usage(format!(
                "ncclSend to oneself of {} bytes is paired with ncclRecv from oneself of {} bytes",
                bytes(send),
                bytes(recv)
            )));
        }
        if let Some(load) = &mut self.simulated {
            load.add(estimate::LOCAL, 0, bytes(send));
        }
        let parts = channels::split(
            send.request.count,
            send.request.data_type.size(),
            send.method.channels,
        );
        let mut mask = 0u64;
        for (channel, part) in (0u8..).zip(parts) {
            if part.is_empty() && channel > 0 {
                break;
            }
            let work = Work {
                send: from,
                recv: to,
                ..self.message_of(send, Function::Send, part, Connections::Local)
            };
            work.check().map_err(invalid_work)?;
            self.add_work(channel, work);
            mask |= 1 << channel;
        }
        if send.request.function.is_p2p() {
            let method = Method {
                algorithm: Algorithm::Direct,
                path: DataPath::Fifo,
                ..send.method
            };
            self.add_op(send, Some(recv), mask, 0, method);
        }
        Ok(mask)
    }

    /// Adds one end of a message; returns its channels and its proxy operations.
    pub(super) fn add_message(
        &mut self,
        task: &Task,
        message: exchange::Message,
        is_send: bool,
    ) -> Result<(u64, u32)> {
        let (comm, request, peer) = (self.comm, &task.request, message.peer);
        let (source, destination) = if is_send {
            (comm.rank, peer)
        } else {
            (peer, comm.rank)
        };
        let (mut mask, mut proxies) = (0u64, 0);
        let parts = channels::split(request.count, request.data_type.size(), task.method.channels);
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
            work.check().map_err(invalid_work)?;
            let steps = work.steps();
            let steps = if is_send { steps.send } else { steps.recv };
            proxies += self.add_proxy(task, channel, proxy, peer, is_send, (steps, true));
            self.add_work(channel, work);
            mask |= 1 << channel;
        }
        Ok((mask, proxies))
    }

    /// A part of a message, without its addresses.
    pub(super) fn message_of(
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
            zero_copy: ZeroCopy::Off,
            pushes: false,
        }
    }

    /// Whether the other ranks' kernels reach what they need of the buffers of an operation that may go straight between those of all: where
    /// contributions are pushed, that is where results are passed on to.
    fn straight(&self, task: &Task, peers: &PeerMemory, pushes: bool) -> Result<ZeroCopy> {
        // To know what it would take, nobody need know.
        if self.simulated.is_some() {
            return Ok(ZeroCopy::Unreachable);
        }
        let device = &**device()?;
        let request = &task.request;
        // Of a message it is the sender who has to reach the receiver's buffer.
        let is_foreign = match request.peer {
            Some(peer) if request.function.is_p2p() => peers.is_foreign(peer),
            _ => peers.foreign != 0,
        };
        let shown = |(address, bytes)| {
            if address == 0 || bytes == 0 {
                return Some(ExportedBuffer::default());
            }
            if is_foreign {
                let captured = task.info.flags.contains(Flags::GRAPH);
                return self
                    .comm
                    .maps
                    .as_ref()?
                    .of_operation(device, (address, bytes), captured);
            }
            let allocation = device.allocation(address, bytes, self.comm.device);
            allocation.map(|_| ExportedBuffer::default())
        };
        let [sent, received] = request.used_buffers(self.comm.rank, self.comm.ranks);
        let sent = if pushes || request.function == Function::Send {
            (0, 0)
        } else {
            sent
        };
        let (sent, received) = (shown(sent), shown(received));
        Ok(match (sent, received) {
            (Some(sent), Some(received)) => ZeroCopy::Reachable {
                send: sent,
                recv: received,
            },
            _ => ZeroCopy::Unreachable,
        })
    }

    pub(super) fn add_work(&mut self, channel: u8, work: Work) {
        self.used += 1;
        self.work.of(channel).push(work);
    }

    /// Adds a proxy operation if the connection has a proxy and there are steps to move; returns how many were added.
    /// What is not `counted` is beside the operation's own.
    fn add_proxy(
        &mut self,
        task: &Task,
        channel: u8,
        connection: Option<ConnectionId>,
        peer: u32,
        is_send: bool,
        (steps, counted): (u32, bool),
    ) -> u32 {
        let (Some(connection), true) = (connection, steps > 0) else {
            return 0;
        };
        self.plan.proxy_ops.push(ProxyOp {
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

    /// Enters an operation whose work has been added; `twin` is the receive that a send to oneself is done with. `method` is how it is
    /// done as far as this rank knows.
    pub(super) fn add_op(
        &mut self,
        task: &Task,
        twin: Option<&Task>,
        channel_mask: u64,
        proxy_ops: u32,
        method: Method,
    ) {
        if self.simulated.is_some() {
            return;
        }
        for task in std::iter::once(task).chain(twin) {
            self.announce(task, channel_mask, proxy_ops, method);
        }
        self.contents.states.push(OpState::new(
            task.info,
            twin.map(|task| task.info),
            channel_mask.count_ones(),
            proxy_ops,
        ));
    }

    /// Describes an operation and lists it.
    pub(super) fn announce(&mut self, task: &Task, channel_mask: u64, proxy_ops: u32, method: Method) {
        self.plan
            .announce(self.comm.ranks, self.group, task, channel_mask, proxy_ops, method);
    }

    /// Makes it ready to be launched.
    pub(super) fn finish(&mut self, persistent: bool) -> Result<()> {
        self.contents.persistent = persistent;
        let works = mem::take(&mut self.work).finish();
        let ready = reclaim::assemble(
            self.comm,
            self.spare.take(),
            works,
            &mut self.contents,
            self.serves_again,
        )?;
        self.plan.ready = Some(ready);
        Ok(())
    }
}

/// Whether this rank knows of nothing that keeps an operation from going straight. Of what it sends the receiver knows.
fn may_go_straight(work: &Work) -> bool {
    match work.function {
        Function::Send => true,
        Function::Recv => work.zero_copy != ZeroCopy::Unreachable,
        _ => work.zero_copy != ZeroCopy::Unreachable && can_zero_copy(work),
    }
}

/// Work that the kernels refuse is a defect of the planner.
fn invalid_work(error: WorkError) -> Error {
    Error::internal(error.0)
}
