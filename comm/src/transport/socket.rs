//! TCP between two proxies: one connection for one direction of one channel.
//!
//! The sender writes a header and the slot's bytes for each step; the receiver writes credits, each the number of steps
//! it has room for since the connection began. A receiver gives credit only for steps of an operation that its own rank
//! has launched, so a sender that waits for credit waits for its peer's arrival or for its peer's kernel.

use std::{
    collections::VecDeque,
    io::{self, IoSlice, Read, Write},
    net::TcpStream,
    sync::Arc,
};

use ringsight_kernels::{Fifo, fifo::SLOTS};
use ringsight_records::State;

use crate::{
    bootstrap::wire::word,
    proxy::{ProxyOp, events},
};

/// First four bytes of a connection ("RSNT"), of a step ("RSST") and of a credit ("RSCR").
const HELLO_MAGIC: u32 = u32::from_le_bytes(*b"RSNT");
const STEP_MAGIC: u32 = u32::from_le_bytes(*b"RSST");
const CREDIT_MAGIC: u32 = u32::from_le_bytes(*b"RSCR");
const VERSION: u32 = 1;

/// Bytes of a [`Hello`].
pub(crate) const HELLO_BYTES: usize = 32;
/// Bytes of a [`Verdict`].
pub(crate) const VERDICT_BYTES: usize = 12;
const STEP_BYTES: usize = 20;
const CREDIT_BYTES: usize = 12;

/// What a sender's proxy says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) cookie: u64,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) channel: u8,
    pub(crate) p2p: bool,
    pub(crate) slot_bytes: u32,
}

impl Hello {
    /// Magic u32 | version u32 | cookie u64 | from u32 | to u32 | channel u8 | p2p u8 | zero u16 | slot bytes u32.
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&HELLO_MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.from.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to.to_le_bytes());
        bytes[24] = self.channel;
        bytes[25] = self.p2p.into();
        bytes[28..].copy_from_slice(&self.slot_bytes.to_le_bytes());
        bytes
    }

    /// How many bytes of a hello are still missing.
    pub(crate) fn missing(bytes: &[u8]) -> usize {
        HELLO_BYTES.saturating_sub(bytes.len())
    }

    /// `None` for whoever does not know `cookie` or speaks otherwise.
    pub(crate) fn parse(bytes: &[u8], cookie: u64) -> Option<Self> {
        let known = word(bytes, 0)? == HELLO_MAGIC
            && word(bytes, 4)? == VERSION
            && bytes.get(8..16)? == cookie.to_le_bytes()
            && bytes.len() == HELLO_BYTES
            && bytes[25] <= 1
            && bytes[26..28] == [0, 0];
        known.then_some(Self {
            cookie,
            from: word(bytes, 16)?,
            to: word(bytes, 20)?,
            channel: bytes[24],
            p2p: bytes[25] == 1,
            slot_bytes: word(bytes, 28)?,
        })
    }
}

/// What the receiver's proxy answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The connection stands.
    Welcome,
    /// The receiver's slots are of this many bytes.
    OtherSlots(u32),
    /// There is one already.
    Taken,
    /// No such rank or channel, or the receiver could not make its end.
    Impossible,
}

impl Verdict {
    /// Magic u32 | code u32 | detail u32.
    pub(crate) fn encode(self) -> [u8; VERDICT_BYTES] {
        let (code, detail) = match self {
            Self::Welcome => (0, 0),
            Self::OtherSlots(bytes) => (1, bytes),
            Self::Taken => (2, 0),
            Self::Impossible => (3, 0),
        };
        let mut bytes = [0; VERDICT_BYTES];
        for (place, value) in bytes
            .as_chunks_mut::<4>()
            .0
            .iter_mut()
            .zip([HELLO_MAGIC, code, detail])
        {
            *place = u32::to_le_bytes(value);
        }
        bytes
    }

    pub(crate) fn parse(bytes: &[u8; VERDICT_BYTES]) -> Option<Self> {
        match (word(bytes, 0)? == HELLO_MAGIC, word(bytes, 4)?, word(bytes, 8)?) {
            (true, 0, 0) => Some(Self::Welcome),
            (true, 1, bytes) => Some(Self::OtherSlots(bytes)),
            (true, 2, 0) => Some(Self::Taken),
            (true, 3, 0) => Some(Self::Impossible),
            _ => None,
        }
    }
}

/// What stands before a step's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StepHeader {
    /// Operations of this connection before this one, modulo 2^32: both ends count them.
    op: u32,
    step: u32,
    steps: u32,
    bytes: u32,
}

impl StepHeader {
    fn encode(&self) -> [u8; STEP_BYTES] {
        let mut bytes = [0; STEP_BYTES];
        let words = [STEP_MAGIC, self.op, self.step, self.steps, self.bytes];
        for (place, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *place = u32::to_le_bytes(value);
        }
        bytes
    }

    fn parse(bytes: &[u8; STEP_BYTES]) -> Option<Self> {
        (word(bytes, 0)? == STEP_MAGIC).then_some(Self {
            op: word(bytes, 4)?,
            step: word(bytes, 8)?,
            steps: word(bytes, 12)?,
            bytes: word(bytes, 16)?,
        })
    }
}

/// A credit: magic u32 | steps granted since the connection began u64.
fn encode_credit(granted: u64) -> [u8; CREDIT_BYTES] {
    let mut bytes = [0; CREDIT_BYTES];
    bytes[..4].copy_from_slice(&CREDIT_MAGIC.to_le_bytes());
    bytes[4..].copy_from_slice(&granted.to_le_bytes());
    bytes
}

fn parse_credit(bytes: &[u8; CREDIT_BYTES]) -> Option<u64> {
    let granted = u64::from_le_bytes(bytes[4..].try_into().ok()?);
    (word(bytes, 0)? == CREDIT_MAGIC).then_some(granted)
}

/// A socket that does not block, with what the last attempts and polls said of it.
pub(crate) struct Socket {
    pub(crate) stream: TcpStream,
    /// A read may give something. Cleared when one would block.
    pub(crate) readable: bool,
    /// A write may take something. Cleared when one would block.
    pub(crate) writable: bool,
}

impl Socket {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            readable: true,
            writable: true,
        }
    }

    /// Bytes read; 0 when it would block. The end of the stream is an error.
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, String> {
        if !self.readable {
            return Ok(0);
        }
        match (&self.stream).read(buffer) {
            Ok(0) => {
                Err("the peer closed the connection: it aborted, was destroyed or its process ended".into())
            }
            Ok(read) => Ok(read),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.readable = false;
                Ok(0)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Bytes written; 0 when it would block.
    fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, String> {
        if !self.writable {
            return Ok(0);
        }
        match (&self.stream).write_vectored(parts) {
            Ok(written) => Ok(written),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.writable = false;
                Ok(0)
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
            Err(error) => Err(error.to_string()),
        }
    }
}

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
        }
        .encode();
        // SAFETY: the device posted the slot with `bytes` bytes (at most a slot, says the FIFO) and does not touch it
        // before it is released; the FIFO keeps it mapped.
        let data = unsafe { std::slice::from_raw_parts(self.fifo.slot(position).cast_const(), bytes) };
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
                device: false,
            },
            SendPhase::Network { .. } => Needs {
                events: libc::POLLIN | libc::POLLOUT,
                device: false,
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
    /// Credit on its way out, and how much of it is gone.
    credit: [u8; CREDIT_BYTES],
    credit_written: usize,
    /// What the last credit said.
    announced: u64,
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
            credit: [0; CREDIT_BYTES],
            credit_written: CREDIT_BYTES,
            announced: 0,
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
        if self.received == self.granted {
            return Ok(());
        }
        if self.here < STEP_BYTES {
            self.here += socket.read(&mut self.header[self.here..])?;
            if self.here < STEP_BYTES {
                return Ok(());
            }
        }
        let bytes = self.check_header(op)?;
        let Some(position) = self.fifo.free() else {
            return Err("a granted slot is not free: the device released slots twice".into());
        };
        let have = self.here - STEP_BYTES;
        if have < bytes {
            // SAFETY: the slot is free, so the device does not touch it before it is posted; `bytes` is at most a slot
            // (checked with the header); the FIFO keeps it mapped.
            let slot = unsafe { std::slice::from_raw_parts_mut(self.fifo.slot(position), bytes) };
            self.here += socket.read(&mut slot[have..])?;
        }
        if self.here == STEP_BYTES + bytes {
            let step = self.step();
            events::step(op, step, State::STEP_RECV_FLUSH_WAIT, bytes);
            // CPU memory needs no flush: the release of the tail orders the bytes before it.
            events::step(op, step, State::STEP_RECV_GPU_WAIT, bytes);
            self.fifo.post(position, bytes);
            self.sizes.push_back(bytes);
            self.received += 1;
            self.transferred += bytes as u64;
            self.here = 0;
        }
        Ok(())
    }

    fn check_header(&self, op: &ProxyOp) -> Result<usize, String> {
        let expected = StepHeader {
            op: self.ops,
            step: self.step(),
            steps: op.steps,
            bytes: 0,
        };
        let header = StepHeader::parse(&self.header).ok_or("the peer sent something that is no step")?;
        if (StepHeader { bytes: 0, ..header }) != expected {
            return Err(format!(
                "the peer sends step {} of {} of the connection's operation {}, expected was step {} of {} of operation \
                 {}: the ranks do not call the same operations with the same sizes",
                header.step, header.steps, header.op, expected.step, expected.steps, expected.op
            ));
        }
        let (bytes, slot) = (header.bytes as usize, self.fifo.slot_bytes());
        if bytes > slot {
            return Err(format!(
                "the peer sends a step of {bytes} bytes, a slot has {slot}"
            ));
        }
        Ok(bytes)
    }

    pub(crate) fn needs(&self) -> Needs {
        let mut needs = Needs::default();
        if self.received < self.granted {
            needs.events |= libc::POLLIN;
        }
        if self.credit_written < CREDIT_BYTES {
            needs.events |= libc::POLLOUT;
        }
        needs.device = self.consumed < self.received;
        needs
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_survive_and_rubbish_is_refused(
            cookie: u64, from: u32, to: u32, channel: u8, p2p: bool, slot_bytes: u32, rubbish: [u8; HELLO_BYTES], flip in 0usize..16, bit in 0u8..8,
        ) {
            let hello = Hello { cookie, from, to, channel, p2p, slot_bytes };
            let mut bytes = hello.encode();
            prop_assert_eq!(Hello::parse(&bytes, cookie), Some(hello));
            prop_assert_eq!(Hello::parse(&bytes, !cookie), None);
            prop_assert_eq!(Hello::parse(&bytes[..31], cookie), None);
            bytes[flip] ^= 1 << bit;
            prop_assert_eq!(Hello::parse(&bytes, cookie), None);
            prop_assert_eq!(Hello::parse(&rubbish, cookie), None);
            for verdict in [Verdict::Welcome, Verdict::OtherSlots(slot_bytes), Verdict::Taken, Verdict::Impossible] {
                prop_assert_eq!(Verdict::parse(&verdict.encode()), Some(verdict));
            }
            let header = StepHeader { op: from, step: to, steps: slot_bytes, bytes: 7 };
            let mut encoded = header.encode();
            prop_assert_eq!(StepHeader::parse(&encoded), Some(header));
            encoded[flip % 4] ^= 1 << bit;
            prop_assert_eq!(StepHeader::parse(&encoded), None);
            let mut encoded = encode_credit(cookie);
            prop_assert_eq!(parse_credit(&encoded), Some(cookie));
            encoded[flip % 4] ^= 1 << bit;
            prop_assert_eq!(parse_credit(&encoded), None);
        }
    }
}
