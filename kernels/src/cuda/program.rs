//! Channel programs as the kernel reads them: a launch as tables in one block of bytes.
//!
//! The works of a channel form *lanes*. The works of one lane run one after another: all collectives are one lane, and the messages over
//! one FIFO are one lane. Message lanes take turns. A short program travels with the arguments; a longer one lies in pinned memory.

use std::{collections::HashSet, sync::Arc};

use ringsight_records::{Algorithm, DataType, ReduceOp};

use super::layout::{
    Arguments, Channel, Combination, ConnectionKind, Head, INLINE_BYTES, LANE_STATE_BYTES, Lane,
    NEXT_INDIRECT, NONE, OP_STATE_BYTES, Op, PREV_INDIRECT, Work,
};
use crate::{
    fifo::{Fifo, Halves},
    launch::{self, ChannelWork, Connections, Launch, Scalar, WorkError},
    reduce::Reduction,
};

/// The tables of a launch: works, channels, lanes, operations and ring orders, one after another.
#[derive(Clone, Debug, Default)]
pub struct Program {
    bytes: Vec<u8>,
    peers: u64,
    channels: u32,
    channels_at: u32,
    works_at: u32,
    lanes_at: u32,
    ops_at: u32,
    /// The largest number of lanes of a channel.
    lanes: u32,
    ops: u32,
    reduces: bool,
}

/// The tables under construction.
#[derive(Default)]
struct Tables {
    channels: Vec<Channel>,
    works: Vec<Work>,
    lanes: Vec<Lane>,
    ops: Vec<Op>,
    orders: Vec<u32>,
}

impl Program {
    /// The program of `launch`, whose works must pass [`launch::Work::check`]. It holds buffer and FIFO addresses as the host knows them.
    ///
    /// # Errors
    /// An algorithm without a channel program ([`runs`]), or a buffer that is not aligned to its element type.
    pub fn new(launch: &Launch) -> Result<Self, WorkError> {
        let mut tables = Tables::default();
        for channel in &launch.channels {
            tables.add_channel(channel)?;
        }
        let most = |count: fn(&Channel) -> u32| tables.channels.iter().map(count).max().unwrap_or(0);
        let (lanes, ops) = (
            most(|channel| channel.end_lane - channel.first_lane),
            most(|channel| channel.end_op - channel.first_op),
        );
        let mut program = Self {
            peers: launch
                .peers
                .as_ref()
                .and_then(|peers| peers.bases.get(peers.rank as usize))
                .map_or(0, |base| *base),
            channels: tables.channels.len() as u32,
            lanes,
            ops,
            reduces: tables
                .works
                .iter()
                .any(|work| work.combine != Combination::Copy as u8),
            ..Self::default()
        };
        program.works_at = 0;
        program.channels_at = (tables.works.len() * size_of::<Work>()) as u32;
        program.lanes_at = program.channels_at + (tables.channels.len() * size_of::<Channel>()) as u32;
        program.ops_at = program.lanes_at + (tables.lanes.len() * size_of::<Lane>()) as u32;
        let orders_at = program.ops_at + (tables.ops.len() * size_of::<Op>()) as u32;
        for work in &mut tables.works {
            // So far it was relative to the first order.
            work.order_at += orders_at;
        }
        program.append(&tables.works);
        program.append(&tables.channels);
        program.append(&tables.lanes);
        program.append(&tables.ops);
        program.append(&tables.orders);
        // The kernel copies it in words.
        program.bytes.resize(program.bytes.len().next_multiple_of(8), 0);
        Ok(program)
    }

    fn append<T: Plain>(&mut self, table: &[T]) {
        // SAFETY: `Plain` types have no padding, so that all bytes are initialised.
        self.bytes.extend_from_slice(unsafe {
            std::slice::from_raw_parts(table.as_ptr().cast(), size_of_val(table))
        });
    }

    /// The bytes that the caller must put where the device reaches them, aligned to 8; [`Program::arguments`] takes their address. `None` if
    /// the program travels with the arguments.
    #[must_use]
    pub fn outside(&self) -> Option<&[u8]> {
        (self.bytes.len() > INLINE_BYTES).then_some(&self.bytes)
    }

    /// Blocks of the launch: one or two per channel.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.channels
    }

    /// The largest number of operations of a channel.
    #[must_use]
    pub fn ops(&self) -> u32 {
        self.ops
    }

    /// Whether any of its works does more than copy.
    #[must_use]
    pub fn reduces(&self) -> bool {
        self.reduces
    }

    /// Dynamic shared memory of a block, in bytes.
    #[must_use]
    pub fn shared_bytes(&self) -> usize {
        self.staged() + self.lanes as usize * LANE_STATE_BYTES + self.ops as usize * OP_STATE_BYTES
    }

    /// Bytes that each block copies into shared memory: the whole program if it travels with the arguments, else 0.
    fn staged(&self) -> usize {
        // From host memory, each block reads only its own part: copying all of it into every block would take longer.
        if self.outside().is_none() {
            self.bytes.len()
        } else {
            0
        }
    }

    /// The kernel's arguments. `program` is the address of [`Program::outside`]; the caller sets the head.
    #[must_use]
    pub fn arguments(&self, program: u64) -> Arguments {
        let mut arguments = Arguments {
            head: Head::default(),
            program,
            peers: self.peers,
            channels_at: self.channels_at,
            works_at: self.works_at,
            lanes_at: self.lanes_at,
            ops_at: self.ops_at,
            lanes: self.lanes,
            staged: self.staged() as u32,
            inline_program: [0; INLINE_BYTES],
        };
        if self.outside().is_none() {
            arguments.inline_program[..self.bytes.len()].copy_from_slice(&self.bytes);
        }
        arguments
    }
}

/// Whether GPUs have channel programs of an algorithm ([`launch::Work::algorithm`]).
#[must_use]
pub fn runs(algorithm: Algorithm) -> bool {
    matches!(algorithm, Algorithm::Ring | Algorithm::Direct)
}

/// A type of [`super::layout`] without padding.
trait Plain: Copy {}
impl Plain for Work {}
impl Plain for Channel {}
impl Plain for Lane {}
impl Plain for Op {}
impl Plain for u32 {}

impl Tables {
    fn add_channel(&mut self, channel: &ChannelWork) -> Result<(), WorkError> {
        let (first_lane, first_op) = (self.lanes.len() as u32, self.ops.len());
        let (messages, collectives): (Vec<_>, Vec<_>) =
            channel.work.iter().partition(|work| work.function.is_p2p());
        if !collectives.is_empty() {
            self.add_lane(&collectives, first_op)?;
        }
        let first_message_lane = self.lanes.len() as u32;
        // Messages over one FIFO keep their order. Messages to oneself are one lane.
        let mut lanes: Vec<(Option<u64>, Vec<&launch::Work>)> = Vec::new();
        for work in messages {
            let fifo = match &work.connections {
                Connections::Send(fifo) | Connections::Recv(fifo) => Some(fifo.halves().consumer),
                Connections::Local
                | Connections::Ring { .. }
                | Connections::Peers(_)
                | Connections::CopyEngine { .. } => None,
            };
            match lanes.iter_mut().find(|lane| lane.0 == fifo) {
                Some(lane) => lane.1.push(work),
                None => lanes.push((fifo, vec![work])),
            }
        }
        let [leave, arrive] = split_lanes(lanes);
        for works in &leave {
            self.add_lane(works, first_op)?;
        }
        let block = Channel {
            channel: channel.channel.into(),
            first_lane,
            first_message_lane,
            end_lane: self.lanes.len() as u32,
            first_op: first_op as u32,
            end_op: self.ops.len() as u32,
        };
        self.channels.push(block);
        if arrive.is_empty() {
            return Ok(());
        }
        let first_op = self.ops.len();
        for works in &arrive {
            self.add_lane(works, first_op)?;
        }
        self.channels.push(Channel {
            first_lane: block.end_lane,
            first_message_lane: block.end_lane,
            end_lane: self.lanes.len() as u32,
            first_op: block.end_op,
            end_op: self.ops.len() as u32,
            ..block
        });
        Ok(())
    }

    fn add_lane(&mut self, works: &[&launch::Work], first_op: usize) -> Result<(), WorkError> {
        let first_work = self.works.len() as u32;
        for work in works {
            let state = if work.is_tag_only() {
                NONE
            } else {
                self.state_of(work.op, first_op)
            };
            let work = self.work_of(work, state)?;
            self.works.push(work);
        }
        self.lanes.push(Lane {
            first_work,
            end_work: self.works.len() as u32,
        });
        Ok(())
    }

    /// Index of the operation in the channel's table. Counts one more work for it.
    fn state_of(&mut self, number: u32, first_op: usize) -> u32 {
        let ops = &mut self.ops[first_op..];
        if let Some(index) = ops.iter().position(|op| op.number == number) {
            ops[index].works += 1;
            return index as u32;
        }
        self.ops.push(Op { number, works: 1 });
        (self.ops.len() - 1 - first_op) as u32
    }

    fn work_of(&mut self, work: &launch::Work, state: u32) -> Result<Work, WorkError> {
        if !runs(work.algorithm) {
            return Err(WorkError(format!(
                "op {} ({}): kernels of GPUs have no {} program",
                work.op, work.function, work.algorithm
            )));
        }
        let mut order_at = 0;
        const NO_FIFO: Halves = Halves {
            consumer: 0,
            producer: 0,
        };
        let (connections, prev, next, slot_bytes) = match &work.connections {
            Connections::Local => (ConnectionKind::Local, NO_FIFO, NO_FIFO, 0),
            Connections::Ring { order, prev, next } => {
                // Works of one ring follow each other and share its order.
                if !self.orders.ends_with(order) {
                    self.orders.extend_from_slice(order);
                }
                order_at = ((self.orders.len() - order.len()) * size_of::<u32>()) as u32;
                let (prev, slot_bytes) = (prev.halves(), next.slot_bytes());
                (ConnectionKind::Ring, prev, next.halves(), slot_bytes)
            }
            Connections::Peers(_) | Connections::CopyEngine { .. } => {
                return Err(WorkError(format!(
                    "op {} ({}): peer work is no channel program",
                    work.op, work.function
                )));
            }
            Connections::Send(next) => (ConnectionKind::Send, NO_FIFO, next.halves(), next.slot_bytes()),
            Connections::Recv(prev) => (ConnectionKind::Recv, prev.halves(), NO_FIFO, prev.slot_bytes()),
        };
        let indirect = match &work.connections {
            Connections::Local | Connections::Peers(_) | Connections::CopyEngine { .. } => 0,
            Connections::Ring { prev, next, .. } => indirect(Some(prev), Some(next)),
            Connections::Send(next) => indirect(None, Some(next)),
            Connections::Recv(prev) => indirect(Some(prev), None),
        };
        check_alignment(work)?;
        let (scalar, scalar_kind) = match work.scalar {
            Scalar::Device(address) => (address as u64, 1),
            Scalar::None => (argument(work, 0), 0),
            Scalar::Immediate(bits) => (argument(work, bits), 0),
        };
        Ok(Work {
            send: work.send as u64,
            recv: work.recv as u64,
            count: work.count as u64,
            part_start: work.part.start as u64,
            part_end: work.part.end as u64,
            prev: prev.consumer,
            prev_producer: prev.producer,
            next: next.consumer,
            next_producer: next.producer,
            scalar,
            order_at,
            slot_bytes: slot_bytes as u32,
            op: work.op,
            tag: work.tag,
            ranks: work.ranks,
            root: work.root,
            state,
            connections: connections as u8,
            function: work.function.code(),
            data_type: work.data_type.code(),
            combine: combination(work) as u8,
            scalar_kind,
            indirect,
            reserved: [0; 6],
        })
    }
}

/// [`Work::indirect`] of a work with these FIFOs.
fn indirect(prev: Option<&Arc<Fifo>>, next: Option<&Arc<Fifo>>) -> u8 {
    let of = |fifo: Option<&Arc<Fifo>>, bit| fifo.filter(|fifo| fifo.has_indirect_slots()).map_or(0, |_| bit);
    of(prev, PREV_INDIRECT) | of(next, NEXT_INDIRECT)
}

/// From this many bytes in both directions on, incoming messages of a channel get a block of their own. A block moves one slot at a time, and
/// while it stores what has arrived it would leave the link idle.
const SPLIT_BYTES: usize = 64 << 10;

/// Divides a channel's message lanes among its two blocks: outgoing, incoming.
fn split_lanes(lanes: Vec<(Option<u64>, Vec<&launch::Work>)>) -> [Vec<Vec<&launch::Work>>; 2] {
    let arrives = |works: &[&launch::Work]| matches!(works[0].connections, Connections::Recv(_));
    let bytes = |arriving: bool| -> usize {
        let lanes = lanes.iter().filter(|(_, works)| arrives(works) == arriving);
        let works = lanes.flat_map(|(_, works)| works);
        works.map(|work| work.part.len() * work.data_type.size()).sum()
    };
    let is_long = bytes(true) >= SPLIT_BYTES && bytes(false) >= SPLIT_BYTES;
    let (mut arrive, mut leave) = (Vec::new(), Vec::new());
    let mut ops = HashSet::new();
    for (_, works) in lanes {
        let arriving = is_long && arrives(&works);
        if !arriving {
            ops.extend(works.iter().map(|work| work.op));
        }
        if arriving { &mut arrive } else { &mut leave }.push(works);
    }
    // Only one block may report an operation of a channel.
    if arrive.iter().flatten().any(|work| ops.contains(&work.op)) {
        leave.append(&mut arrive);
    }
    [leave, arrive]
}

/// Checks that buffers and scalar are aligned to the element type.
pub(super) fn check_alignment(work: &launch::Work) -> Result<(), WorkError> {
    let size = work.data_type.size();
    for (name, address) in [
        ("sendbuff", work.send),
        ("recvbuff", work.recv),
        ("scalar", work.scalar.address()),
    ] {
        if address % size != 0 {
            return Err(WorkError(format!(
                "{name} {address:#x} is no multiple of the {size} bytes of {}",
                work.data_type
            )));
        }
    }
    Ok(())
}

pub(super) fn argument(work: &launch::Work, scalar: u64) -> u64 {
    Reduction::argument(work.reduce_op, work.data_type, work.ranks, scalar)
}

pub(super) fn combination(work: &launch::Work) -> Combination {
    let integers = matches!(
        work.data_type,
        DataType::Int8
            | DataType::Uint8
            | DataType::Int32
            | DataType::Uint32
            | DataType::Int64
            | DataType::Uint64
    );
    match work.reduce_op {
        ReduceOp::None => Combination::Copy,
        ReduceOp::Sum => Combination::Sum,
        ReduceOp::Prod => Combination::Prod,
        ReduceOp::Max => Combination::Max,
        ReduceOp::Min => Combination::Min,
        ReduceOp::PreMulSum => Combination::MulSum,
        // As on the host: the average of one rank's elements is the elements.
        ReduceOp::Avg if work.ranks == 1 => Combination::Copy,
        ReduceOp::Avg if integers => Combination::SumDiv,
        ReduceOp::Avg => Combination::MulSum,
    }
}
