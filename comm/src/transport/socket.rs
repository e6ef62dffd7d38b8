//! TCP between two proxies: one connection for one direction of one channel.
//!
//! The sender writes a header and the slot's bytes for each step; the receiver writes credits, each the number of steps
//! it has room for since the connection began. A receiver gives credit only for steps of an operation that its own rank
//! has launched, so a sender that waits for credit waits for its peer's arrival or for its peer's kernel.

mod stream;
mod wire;

use std::{collections::VecDeque, io::IoSlice, sync::Arc};

use ringsight_kernels::{Fifo, fifo::SLOTS};
use ringsight_records::State;

pub(crate) use stream::Socket;
use wire::{CREDIT_BYTES, encode_credit, parse_credit};
pub(crate) use wire::{
    HELLO_BYTES, Hello, MOST_REASON, STEP_BYTES, StepHeader, VERDICT_BYTES, Verdict, fuzz,
};

use crate::proxy::{ProxyOp, events};

/// What one turn of a connection came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Something moved.
    Moved,
    /// Nothing can move before the socket or the device does something.
    Waiting,
    /// The operation is complete, with so many bytes.
    Done(u64),
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needs {
    /// Events of the socket.
    pub(crate) events: libc::c_short,

    /// The device, through the FIFO: nothing that poll could see.
    pub(crate) device: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendPhase {
    /// The next step has not begun.
    Idle,
    /// The device has not written the slot.
    Gpu,
    /// The slot is there, the peer's credit is not.
    Peer { position: u64, bytes: usize },
    /// Header and slot go out; so many bytes of both are gone.
    Network {
        position: u64,
        bytes: usize,
        written: usize,
    },
}

/// The sending end: the FIFO's consumer.
pub(crate) struct Sender {
    fifo: Arc<Fifo>,
    /// Operations before the present one.
    ops: u32,
    /// Steps sent since the connection began.
    sent: u64,
    /// Steps that the peer has room for since the connection began.
    granted: u64,
    credit: [u8; CREDIT_BYTES],
    credit_bytes: usize,
    step: u32,
    phase: SendPhase,
    transferred: u64,
}

impl Sender {
    pub(crate) fn new(fifo: Arc<Fifo>) -> Self {
        Self {
            fifo,
            ops: 0,
            sent: 0,
            granted: 0,
            credit: [0; CREDIT_BYTES],
            credit_bytes: 0,
            step: 0,
            phase: SendPhase::Idle,
            transferred: 0,
        }
    }

    /// The step that it is at, for messages.
    pub(crate) fn step(&self) -> u32 {
        self.step
    }

    /// Moves `op` on as far as it goes now.
    pub(crate) fn turn(&mut self, op: &ProxyOp, socket: &mut Socket) -> Result<Turn, String> {
        let mut moved = self.read_credits(socket)?;
        loop {
            match self.phase {
                SendPhase::Idle if self.step == op.steps => {
                    let transferred = std::mem::take(&mut self.transferred);
                    self.step = 0;
                    self.ops = self.ops.wrapping_add(1);
                    return Ok(Turn::Done(transferred));
                }
                SendPhase::Idle => {
                    events::step(op, self.step, State::START, 0);
                    events::step(op, self.step, State::STEP_SEND_GPU_WAIT, 0);
                    self.phase = SendPhase::Gpu;
                }
                SendPhase::Gpu => {
                    let Some((position, bytes)) = self.fifo.posted() else {
                        break;
                    };
                    events::step(op, self.step, State::STEP_SEND_PEER_WAIT, 0);
                    self.phase = SendPhase::Peer { position, bytes };
                }
                SendPhase::Peer { position, bytes } => {
                    if self.granted <= self.sent {
                        break;
                    }
                    events::step(op, self.step, State::STEP_SEND_WAIT, 0);
                    events::carried(op, socket.carrier(self.step), State::START, bytes);
                    self.phase = SendPhase::Network {
                        position,
                        bytes,
                        written: 0,
                    };
                }
                SendPhase::Network {
                    position,
                    bytes,
                    written,
                } => {
                    let now = self.write(op, socket, (position, bytes), written)?;
                    if now == 0 {
                        break;
                    }
                    self.phase = SendPhase::Network {
                        position,
                        bytes,
                        written: written + now,
                    };
                    if written + now == STEP_BYTES + bytes {
                        self.fifo.release(position);
                        self.sent += 1;
                        self.transferred += bytes as u64;
                        events::carried(op, socket.carrier(self.step), State::STOP, bytes);
                        events::step(op, self.step, State::STOP, bytes);
                        self.step += 1;
                        self.phase = SendPhase::Idle;
                    }
                }
            }
            moved = true;
        }
        Ok(if moved { Turn::Moved } else { Turn::Waiting })
    }

    fn write(
        &self,
        op: &ProxyOp,
        socket: &mut Socket,
        (position, bytes): (u64, usize),
        written: usize,
    ) -> Result<usize, String> {
        let header = StepHeader {
            op: self.ops,
            step: self.step,
            steps: op.steps,
            bytes: bytes as u32,
            tag: self.fifo.tag_at(position),
        }
        .encode();
        // SAFETY: the device posted the slot with `bytes` bytes (at most a slot, says the FIFO) and does not touch it
        // before it is released; the FIFO keeps it mapped.
        let data = unsafe { std::slice::from_raw_parts(self.fifo.slot(position, bytes).cast_const(), bytes) };
        let rest = written.saturating_sub(STEP_BYTES);
        socket.write(&[
            IoSlice::new(&header[written.min(STEP_BYTES)..]),
            IoSlice::new(&data[rest..]),
        ])
    }

    fn read_credits(&mut self, socket: &mut Socket) -> Result<bool, String> {
        let mut moved = false;
        while socket.readable {
            let read = socket.read(&mut self.credit[self.credit_bytes..])?;
            self.credit_bytes += read;
            moved |= read > 0;
            if self.credit_bytes == CREDIT_BYTES {
                self.credit_bytes = 0;
                let granted =
                    parse_credit(&self.credit).ok_or("the peer sent something that is no credit")?;
                if granted < self.granted || granted > self.sent + SLOTS as u64 {
                    return Err(format!(
                        "the peer grants {granted} steps after {}, with {} sent and {SLOTS} slots",
                        self.granted, self.sent
                    ));
                }
                self.granted = granted;
            }
        }
        Ok(moved)
    }

    pub(crate) fn needs(&self) -> Needs {
        // Always POLLIN: credits, and the news that the peer is gone.
        match self.phase {
            SendPhase::Idle | SendPhase::Gpu => Needs {
                events: libc::POLLIN,
                device: true,
            },
            SendPhase::Peer { .. } => Needs {
                events: libc::POLLIN,
                ..Needs::default()
            },
            SendPhase::Network { .. } => Needs {
                events: libc::POLLIN | libc::POLLOUT,
                ..Needs::default()
            },
        }
    }
}

/// The receiving end: the FIFO's producer.
pub(crate) struct Receiver {
    fifo: Arc<Fifo>,
    /// Operations before the present one.
    ops: u32,
    /// Steps granted, received and consumed by the device since the connection began; in this order, at most [`SLOTS`]
    /// apart.
    granted: u64,
    received: u64,
    consumed: u64,
    /// `granted`, `received` and `consumed` at the beginning of the operation.
    base: u64,
    /// Bytes of the steps that the device has not consumed yet.
    sizes: VecDeque<usize>,
    header: [u8; STEP_BYTES],
    /// Bytes of the present step that are here, header and data.
    here: usize,
    /// The present step's header is here, and its record.
    is_read: bool,
    /// Credit on its way out, and how much of it is gone.
    credit: [u8; CREDIT_BYTES],
    credit_written: usize,
    /// What the last credit said.
    announced: u64,
    /// The sender's rank does something else than ours: the slot that tells our kernel is posted, and nothing that
    /// follows could be understood.
    differs: bool,
    transferred: u64,
}

impl Receiver {
    pub(crate) fn new(fifo: Arc<Fifo>) -> Self {
        Self {
            fifo,
            ops: 0,
            granted: 0,
            received: 0,
            consumed: 0,
            base: 0,
            sizes: VecDeque::with_capacity(SLOTS),
            header: [0; STEP_BYTES],
            here: 0,
            is_read: false,
            credit: [0; CREDIT_BYTES],
            credit_written: CREDIT_BYTES,
            announced: 0,
            differs: false,
            transferred: 0,
        }
    }

    /// The step that it is at, for messages.
    pub(crate) fn step(&self) -> u32 {
        (self.received - self.base) as u32
    }

    /// Moves `op` on as far as it goes now.
    pub(crate) fn turn(&mut self, op: &ProxyOp, socket: &mut Socket) -> Result<Turn, String> {
        let mut moved = false;
        loop {
            let before = (
                self.consumed,
                self.granted,
                self.received,
                self.here,
                self.credit_written,
            );
            self.consume(op);
            self.grant(op);
            self.announce(socket)?;
            self.receive(op, socket)?;
            if self.consumed == self.base + u64::from(op.steps) && self.credit_written == CREDIT_BYTES {
                self.base = self.consumed;
                self.ops = self.ops.wrapping_add(1);
                return Ok(Turn::Done(std::mem::take(&mut self.transferred)));
            }
            if before
                == (
                    self.consumed,
                    self.granted,
                    self.received,
                    self.here,
                    self.credit_written,
                )
            {
                return Ok(if moved { Turn::Moved } else { Turn::Waiting });
            }
            moved = true;
        }
    }

    /// Ends the steps that the device is done with.
    fn consume(&mut self, op: &ProxyOp) {
        // What the device released cannot be more than what we posted, whatever its memory says.
        let released = self.fifo.released().min(self.received);
        while self.consumed < released {
            let bytes = self.sizes.pop_front().unwrap_or(0);
            events::step(op, (self.consumed - self.base) as u32, State::STOP, bytes);
            self.consumed += 1;
        }
    }

    /// Begins the steps that there is room for.
    fn grant(&mut self, op: &ProxyOp) {
        let end = self.base + u64::from(op.steps);
        while self.granted < end.min(self.consumed + SLOTS as u64) {
            let step = (self.granted - self.base) as u32;
            events::step(op, step, State::START, 0);
            events::step(op, step, State::STEP_RECV_WAIT, 0);
            self.granted += 1;
        }
    }

    fn announce(&mut self, socket: &mut Socket) -> Result<(), String> {
        if self.credit_written == CREDIT_BYTES && self.announced < self.granted {
            self.announced = self.granted;
            self.credit = encode_credit(self.granted);
            self.credit_written = 0;
        }
        if self.credit_written < CREDIT_BYTES {
            self.credit_written += socket.write(&[IoSlice::new(&self.credit[self.credit_written..])])?;
        }
        Ok(())
    }

    /// Reads one step, or what there is of it.
    fn receive(&mut self, op: &ProxyOp, socket: &mut Socket) -> Result<(), String> {
        if self.received == self.granted || self.differs {
            return Ok(());
        }
        if self.here < STEP_BYTES {
            self.here += socket.read(&mut self.header[self.here..])?;
            if self.here < STEP_BYTES {
                return Ok(());
            }
        }
        let header = self.check_header(op)?;
        let bytes = header.bytes as usize;
        let Some(position) = self.fifo.free() else {
            return Err("a granted slot is not free: the device released slots twice".into());
        };
        if !self.is_read {
            events::carried(op, socket.carrier(self.step()), State::START, bytes);
            self.is_read = true;
        }
        let have = self.here - STEP_BYTES;
        if have < bytes {
            // SAFETY: the slot is free, so the device does not touch it before it is posted; `bytes` is at most a slot
            // (checked with the header); the FIFO keeps it mapped.
            let slot = unsafe { std::slice::from_raw_parts_mut(self.fifo.slot(position, bytes), bytes) };
            self.here += socket.read(&mut slot[have..])?;
        }
        if self.here == STEP_BYTES + bytes {
            let step = self.step();
            events::carried(op, socket.carrier(step), State::STOP, bytes);
            self.is_read = false;
            events::step(op, step, State::STEP_RECV_FLUSH_WAIT, bytes);
            // CPU memory needs no flush: the release of the flag orders the bytes before it.
            events::step(op, step, State::STEP_RECV_GPU_WAIT, bytes);
            self.fifo.post(position, bytes, header.tag);
            self.differs = header.tag != op.tag;
            self.sizes.push_back(bytes);
            self.received += 1;
            self.transferred += bytes as u64;
            self.here = 0;
        }
        Ok(())
    }

    fn check_header(&self, op: &ProxyOp) -> Result<StepHeader, String> {
        let header = StepHeader::parse(&self.header).ok_or("the peer sent something that is no step")?;
        header.check(op, (self.ops, self.step()), self.fifo.slot_bytes())?;
        Ok(header)
    }

    pub(crate) fn needs(&self) -> Needs {
        let mut needs = Needs::default();
        if self.received < self.granted && !self.differs {
            needs.events |= libc::POLLIN;
        }
        if self.credit_written < CREDIT_BYTES {
            needs.events |= libc::POLLOUT;
        }
        needs.device = self.consumed < self.received;
        needs
    }
}
