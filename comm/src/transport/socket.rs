//! Connections over TCP between two proxies: one for each direction of each channel.
//!
//! The sender writes a header and the slot's bytes for each step. The receiver writes credits: each is the number of steps that it has
//! room for since the connection began. It gives credit only for steps of an operation that its own rank has launched, so a sender
//! without credit waits for its peer's launch or for its peer's kernel.
//!
//! | phase of a sent step | the sender waits for |
//! |---|---|
//! | `Idle`, `Gpu` | the device to fill the slot |
//! | `Peer` | a credit |
//! | `Network` | the stream to accept the bytes |
//!
//! Invariants of the receiver: `consumed ≤ received ≤ granted ≤ consumed + SLOTS`.

use std::{collections::VecDeque, io::IoSlice, sync::Arc};

use ringsight_kernels::{Fifo, fifo::SLOTS};
use ringsight_records::State;

use super::{
    connection::{Connection, Moved, Progress, Waits},
    error::ConnectionError,
    events,
    stream::Stream,
    wire::{CREDIT_BYTES, STEP_BYTES, StepHeader, encode_credit, parse_credit},
};
use crate::op::ProxyOp;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SendPhase {
    /// The next step has not begun.
    Idle,
    /// The device has not written the slot.
    Gpu,
    /// The slot is filled, the credit is missing.
    Peer { position: u64, bytes: usize },
    /// Header and slot are being written; `written` bytes of both are out.
    Network {
        position: u64,
        bytes: usize,
        written: usize,
    },
}

/// The sending end: the consumer of the FIFO.
pub(crate) struct Sender {
    fifo: Arc<Fifo>,
    stream: Stream,
    /// Operations completed since the connection began.
    ops: u32,
    /// Steps sent since the connection began.
    sent: u64,
    /// Steps granted by the peer since the connection began.
    granted: u64,
    credit: [u8; CREDIT_BYTES],
    credit_bytes: usize,
    step: u32,
    phase: SendPhase,
    transferred: u64,
}

impl Sender {
    pub(crate) fn new(fifo: Arc<Fifo>, stream: Stream) -> Self {
        Self {
            fifo,
            stream,
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

    /// Moves `op` on as far as it goes now.
    fn advance(&mut self, op: &ProxyOp) -> Result<Moved, ConnectionError> {
        let mut moved = self.read_credits()?;
        loop {
            match self.phase {
                SendPhase::Idle if self.step == op.steps => {
                    let transferred = std::mem::take(&mut self.transferred);
                    self.step = 0;
                    self.ops = self.ops.wrapping_add(1);
                    return Ok(Moved::Completed(transferred));
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
                    events::carried(op, self.stream.carrier(self.step), State::START, bytes);
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
                    let now = self.write(op, (position, bytes), written)?;
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
                        events::carried(op, self.stream.carrier(self.step), State::STOP, bytes);
                        events::step(op, self.step, State::STOP, bytes);
                        self.step += 1;
                        self.phase = SendPhase::Idle;
                    }
                }
            }
            moved = true;
        }
        Ok(Moved::any(moved))
    }

    fn write(
        &mut self,
        op: &ProxyOp,
        (position, bytes): (u64, usize),
        written: usize,
    ) -> Result<usize, ConnectionError> {
        let header = StepHeader {
            op: self.ops,
            step: self.step,
            steps: op.steps,
            bytes: bytes as u32,
            tag: self.fifo.tag_at(position),
        }
        .encode();
        // SAFETY: the device posted the slot with `bytes` bytes (the FIFO bounds them by a slot) and does not touch it before its release;
        // the FIFO keeps it mapped.
        let data = unsafe { std::slice::from_raw_parts(self.fifo.slot(position, bytes).cast_const(), bytes) };
        let rest = written.saturating_sub(STEP_BYTES);
        self.stream.write(&[
            IoSlice::new(&header[written.min(STEP_BYTES)..]),
            IoSlice::new(&data[rest..]),
        ])
    }

    /// Reads credits. Returns whether any byte came.
    fn read_credits(&mut self) -> Result<bool, ConnectionError> {
        let mut moved = false;
        while self.stream.readable {
            let read = self.stream.read(&mut self.credit[self.credit_bytes..])?;
            self.credit_bytes += read;
            moved |= read > 0;
            if self.credit_bytes == CREDIT_BYTES {
                self.credit_bytes = 0;
                let granted = parse_credit(&self.credit)
                    .ok_or_else(|| ConnectionError::protocol("the peer sent something that is no credit"))?;
                // A credit grants more than the one before it: any number of others would keep this thread from other connections.
                if granted <= self.granted || granted > self.sent + SLOTS as u64 {
                    return Err(ConnectionError::Protocol(format!(
                        "the peer grants {granted} steps after {}, with {} sent and {SLOTS} slots",
                        self.granted, self.sent
                    )));
                }
                self.granted = granted;
            }
        }
        Ok(moved)
    }

    fn waits(&self) -> Waits {
        // Always POLLIN: for credits, and to learn that the peer is gone.
        match self.phase {
            SendPhase::Idle | SendPhase::Gpu => Waits {
                events: libc::POLLIN,
                device: true,
            },
            SendPhase::Peer { .. } => Waits {
                events: libc::POLLIN,
                ..Waits::default()
            },
            SendPhase::Network { .. } => Waits {
                events: libc::POLLIN | libc::POLLOUT,
                ..Waits::default()
            },
        }
    }
}

impl Connection for Sender {
    fn progress(&mut self, op: &ProxyOp) -> Result<Progress, ConnectionError> {
        let moved = self.advance(op)?;
        let waits = self.waits();
        Ok(Progress { moved, waits })
    }

    fn step(&self) -> u32 {
        self.step
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn stream_mut(&mut self) -> &mut Stream {
        &mut self.stream
    }
}

/// The receiving end: the producer of the FIFO.
pub(crate) struct Receiver {
    fifo: Arc<Fifo>,
    stream: Stream,
    /// Operations completed since the connection began.
    ops: u32,
    /// Steps granted, received, and consumed by the device, since the connection began.
    granted: u64,
    received: u64,
    consumed: u64,
    /// `granted`, `received` and `consumed` at the beginning of the operation.
    base: u64,
    /// Bytes of the steps that the device has not consumed yet.
    sizes: VecDeque<usize>,
    header: [u8; STEP_BYTES],
    /// Bytes of the present step that have arrived, header and data.
    arrived: usize,
    /// The present step's header has arrived, and its record is written.
    is_recorded: bool,
    /// The credit that is being written, and how many bytes of it are out.
    credit: [u8; CREDIT_BYTES],
    credit_written: usize,
    /// The last credit.
    announced: u64,
    /// The sender's rank has made another call. The slot that tells the kernel so is posted; later bytes have no meaning.
    differs: bool,
    transferred: u64,
}

impl Receiver {
    pub(crate) fn new(fifo: Arc<Fifo>, stream: Stream) -> Self {
        Self {
            fifo,
            stream,
            ops: 0,
            granted: 0,
            received: 0,
            consumed: 0,
            base: 0,
            sizes: VecDeque::with_capacity(SLOTS),
            header: [0; STEP_BYTES],
            arrived: 0,
            is_recorded: false,
            credit: [0; CREDIT_BYTES],
            credit_written: CREDIT_BYTES,
            announced: 0,
            differs: false,
            transferred: 0,
        }
    }

    /// The step of the operation that is received next.
    fn next_step(&self) -> u32 {
        (self.received - self.base) as u32
    }

    /// Moves `op` on as far as it goes now.
    fn advance(&mut self, op: &ProxyOp) -> Result<Moved, ConnectionError> {
        let mut moved = false;
        loop {
            let before = self.position();
            self.consume(op);
            self.grant(op);
            self.write_credit()?;
            self.receive(op)?;
            if self.consumed == self.base + u64::from(op.steps) && self.credit_written == CREDIT_BYTES {
                self.base = self.consumed;
                self.ops = self.ops.wrapping_add(1);
                return Ok(Moved::Completed(std::mem::take(&mut self.transferred)));
            }
            if before == self.position() {
                return Ok(Moved::any(moved));
            }
            moved = true;
        }
    }

    /// Everything that changes when something moves.
    fn position(&self) -> (u64, u64, u64, usize, usize) {
        let Self {
            consumed,
            granted,
            received,
            arrived,
            credit_written,
            ..
        } = *self;
        (consumed, granted, received, arrived, credit_written)
    }

    /// Ends the steps that the device has consumed.
    fn consume(&mut self, op: &ProxyOp) {
        // The device cannot have released more than was posted, whatever its memory says.
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

    /// Writes the newest credit, if the peer does not have it.
    fn write_credit(&mut self) -> Result<(), ConnectionError> {
        if self.credit_written == CREDIT_BYTES && self.announced < self.granted {
            self.announced = self.granted;
            self.credit = encode_credit(self.granted);
            self.credit_written = 0;
        }
        if self.credit_written < CREDIT_BYTES {
            self.credit_written += self
                .stream
                .write(&[IoSlice::new(&self.credit[self.credit_written..])])?;
        }
        Ok(())
    }

    /// Reads one step, or as much of it as has arrived.
    fn receive(&mut self, op: &ProxyOp) -> Result<(), ConnectionError> {
        if self.received == self.granted || self.differs {
            return Ok(());
        }
        if self.arrived < STEP_BYTES {
            self.arrived += self.stream.read(&mut self.header[self.arrived..])?;
            if self.arrived < STEP_BYTES {
                return Ok(());
            }
        }
        let header = self.check_header(op)?;
        let bytes = header.bytes as usize;
        let Some(position) = self.fifo.free() else {
            let text = "a granted slot is not free: the device released slots twice";
            return Err(ConnectionError::protocol(text));
        };
        if !self.is_recorded {
            events::carried(op, self.stream.carrier(self.next_step()), State::START, bytes);
            self.is_recorded = true;
        }
        let have = self.arrived - STEP_BYTES;
        if have < bytes {
            // SAFETY: the slot is free, so the device does not touch it before it is posted; `bytes` is at most a slot (checked with the
            // header); the FIFO keeps it mapped.
            let slot = unsafe { std::slice::from_raw_parts_mut(self.fifo.slot(position, bytes), bytes) };
            self.arrived += self.stream.read(&mut slot[have..])?;
        }
        if self.arrived == STEP_BYTES + bytes {
            let step = self.next_step();
            events::carried(op, self.stream.carrier(step), State::STOP, bytes);
            self.is_recorded = false;
            events::step(op, step, State::STEP_RECV_FLUSH_WAIT, bytes);
            // CPU memory needs no flush: the release of the flag orders the bytes before it.
            events::step(op, step, State::STEP_RECV_GPU_WAIT, bytes);
            self.fifo.post(position, bytes, header.tag);
            self.differs = header.tag != op.tag;
            self.sizes.push_back(bytes);
            self.received += 1;
            self.transferred += bytes as u64;
            self.arrived = 0;
        }
        Ok(())
    }

    fn check_header(&self, op: &ProxyOp) -> Result<StepHeader, ConnectionError> {
        let header = StepHeader::parse(&self.header)
            .ok_or_else(|| ConnectionError::protocol("the peer sent something that is no step"))?;
        header.check(op, (self.ops, self.next_step()), self.fifo.slot_bytes())?;
        Ok(header)
    }

    fn waits(&self) -> Waits {
        let mut waits = Waits::default();
        if self.received < self.granted && !self.differs {
            waits.events |= libc::POLLIN;
        }
        if self.credit_written < CREDIT_BYTES {
            waits.events |= libc::POLLOUT;
        }
        waits.device = self.consumed < self.received;
        waits
    }
}

impl Connection for Receiver {
    fn progress(&mut self, op: &ProxyOp) -> Result<Progress, ConnectionError> {
        let moved = self.advance(op)?;
        let waits = self.waits();
        Ok(Progress { moved, waits })
    }

    fn step(&self) -> u32 {
        self.next_step()
    }

    fn stream(&self) -> &Stream {
        &self.stream
    }

    fn stream_mut(&mut self) -> &mut Stream {
        &mut self.stream
    }
}
