//! The receiving end over RDMA: the producer of the FIFO.
//!
//! A receiver begins unconfirmed ([`UnconfirmedReceiver`]): it is connected, and its sender has not said whether it is, too. The sender's
//! word makes it a [`Receiver`], or a receiver over the socket.

use std::{collections::VecDeque, os::fd::RawFd, sync::Arc, time::Duration};

use ringsight_comm_base::{log, sys};
use ringsight_kernels::{
    Fifo,
    fifo::{INLINE_BYTES, SLOTS},
};
use ringsight_records::{Carrier, State};
use ringsight_verbs::{
    endpoint::{self, Failure, Receiving},
    queue::Qp,
};

use super::{end::VerbsEnd, path_reports::PathReports, setup::ConnectedEnd};
use crate::{
    bootstrap::wire::printable,
    op::ProxyOp,
    transport::{
        connection::{Connection, Moved, Progress, Waits},
        error::ConnectionError,
        events,
        gpu_direct::Slots,
        socket,
        stall::Stall,
        stream::Stream,
        wire::{HELLO_REPLY_BYTES, HelloReply, MAX_REASON, STEP_BYTES, StepHeader},
    },
};

/// The receiving end.
pub(crate) struct Receiver {
    fifo: Arc<Fifo>,
    /// Its slots, if they are in the memory of the GPU.
    direct: Option<Arc<Slots>>,
    common: VerbsEnd<Receiving>,
    /// The rank at the other end, as the proxies count ranks.
    peer: u32,
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
    /// The sender's rank has made another call. The slot that tells the kernel so is posted; later steps have no meaning.
    differs: bool,
    transferred: u64,
}

impl Receiver {
    fn new(fifo: Arc<Fifo>, connected: ConnectedEnd, stream: Stream, peer: u32) -> Self {
        let reports = PathReports::new(&connected, false);
        let direct = connected.direct.clone();
        let end = endpoint::Receiver::new(connected.paths, connected.control, connected.failover);
        Self {
            common: VerbsEnd::new(end, reports, stream),
            fifo,
            direct,
            peer,
            ops: 0,
            granted: 0,
            received: 0,
            consumed: 0,
            base: 0,
            sizes: VecDeque::with_capacity(SLOTS),
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
        let end = self.base + u64::from(op.steps);
        let mut moved = false;
        loop {
            let before = (self.consumed, self.granted, self.received);
            // Before the grant, which also checks deadlines: a thread that was away for long must see completions before time-outs. The
            // next poll posts the credits.
            let polled = self.common.end.poll();
            // Before arrivals are taken, so that the path that they came over is known.
            self.record_reports(op.peer);
            self.consume(op);
            self.grant(op, end)?;
            // Steps that have been received need neither peer nor path.
            if self.received < end && !self.differs {
                polled?;
                self.receive(op)?;
            }
            if self.consumed == end {
                self.base = end;
                self.ops = self.ops.wrapping_add(1);
                self.common.finish_op();
                return Ok(Moved::Completed(std::mem::take(&mut self.transferred)));
            }
            if before == (self.consumed, self.granted, self.received) {
                break;
            }
            moved = true;
        }
        self.common.moved(moved, self.received < end)
    }

    /// Logs and records the end's reports.
    fn record_reports(&mut self, peer: u32) {
        // Only the sender knows which steps are replayed.
        self.common.record_reports(peer, |_| 0);
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
    fn grant(&mut self, op: &ProxyOp, end: u64) -> Result<(), Failure> {
        let before = self.granted;
        while self.granted < end.min(self.consumed + SLOTS as u64) {
            let step = (self.granted - self.base) as u32;
            events::step(op, step, State::START, 0);
            events::step(op, step, State::STEP_RECV_WAIT, 0);
            self.granted += 1;
        }
        if self.granted > before {
            self.common.end.grant(self.granted)?;
        }
        Ok(())
    }

    /// Posts the steps that have arrived to the device.
    fn receive(&mut self, op: &ProxyOp) -> Result<(), ConnectionError> {
        // Everything that is taken below had arrived at the last poll: one flush covers all of it.
        let mut unflushed = self.direct.clone();
        while !self.differs
            && let Some(arrived) = self.common.end.take()?
        {
            let step = self.next_step();
            let (header, own) = arrived
                .notice()
                .split_first_chunk::<STEP_BYTES>()
                .and_then(|(header, own)| Some((StepHeader::parse(header)?, own)))
                .ok_or_else(|| ConnectionError::protocol("the peer sent something that is no step"))?;
            header.check(op, (self.ops, step), self.fifo.slot_bytes())?;
            let bytes = header.bytes as usize;
            if self.fifo.free() != Some(arrived.position) {
                let text = "a granted slot is not free: the device released slots twice";
                return Err(ConnectionError::protocol(text));
            }
            if bytes <= INLINE_BYTES {
                if own.len() != bytes {
                    let text = format!("the peer sent {} bytes with a step of {bytes}", own.len());
                    return Err(ConnectionError::Protocol(text));
                }
                // SAFETY: the slot is free, so the device does not touch it before it is posted, and it has room for these bytes; the FIFO
                // keeps it mapped.
                unsafe {
                    self.fifo
                        .slot(arrived.position, bytes)
                        .copy_from(own.as_ptr(), bytes);
                };
            }
            self.record_carried(op, arrived.position, bytes);
            events::step(op, step, State::STEP_RECV_FLUSH_WAIT, bytes);
            // CPU memory needs no flush: the completion was read after the bytes arrived, and the release of the flag orders both.
            if bytes > INLINE_BYTES
                && let Some(slots) = unflushed.take()
            {
                slots.flush()?;
            }
            events::step(op, step, State::STEP_RECV_GPU_WAIT, bytes);
            self.fifo.post(arrived.position, bytes, header.tag);
            self.differs = header.tag != op.tag;
            self.sizes.push_back(bytes);
            self.received += 1;
            self.transferred += bytes as u64;
        }
        Ok(())
    }

    /// Records the carrier of the step at a position. This end has no request for it, so only the arrival is recorded.
    fn record_carried(&self, op: &ProxyOp, position: u64, bytes: usize) {
        let path = self.common.reports.arrival_path(position);
        let queue_pair = self
            .common
            .end
            .paths()
            .get(path)
            .and_then(|path| path.qps().get(path.lead(position)));
        let carrier = Carrier {
            port: Some(self.common.reports.port_of(path)),
            number: queue_pair.map_or(0, Qp::number),
            step: (position - self.base) as u32,
        };
        let is_backup = self.common.reports.is_backup(path);
        events::carried_over(op, carrier, is_backup, State::STOP, bytes);
    }

    fn waits(&self) -> Waits {
        Waits {
            events: self.common.events(),
            device: self.consumed < self.received,
        }
    }
}

impl Connection for Receiver {
    fn progress(&mut self, op: &ProxyOp) -> Result<Progress, ConnectionError> {
        self.common.begin(op);
        let result = self.advance(op);
        self.record_reports(op.peer);
        match result {
            Ok(moved) => {
                self.common.send_messages();
                let waits = self.waits();
                Ok(Progress { moved, waits })
            }
            Err(error) => {
                self.common.fail(&error);
                Err(error)
            }
        }
    }

    fn step(&self) -> u32 {
        self.next_step()
    }

    fn stream(&self) -> &Stream {
        &self.common.stream
    }

    fn stream_mut(&mut self) -> &mut Stream {
        &mut self.common.stream
    }

    fn serves_idle(&self) -> bool {
        true
    }

    fn serve_idle(&mut self) -> Option<Waits> {
        self.common.receive_messages();
        let works = self.common.end.poll().is_ok();
        self.record_reports(self.peer);
        self.common.send_messages();
        (works && self.common.has_peer()).then(|| self.waits())
    }

    /// It waits for the peer to acknowledge credits, or for a path. That no step comes is for the sender to explain.
    fn stall(&mut self) -> Option<(u64, Stall)> {
        let waits = self.received < self.granted && !self.common.end.is_settled();
        self.common.stall(waits, self.received.wrapping_add(self.granted))
    }

    fn arm(&self) {
        self.common.arm();
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.common.descriptors()
    }

    fn max_wait(&self) -> Option<Duration> {
        self.common.max_wait()
    }

    /// A sender whose acknowledgements were lost has no peer to ask any more. It is told what has arrived, if that is everything that it
    /// was to send.
    fn close(&mut self) {
        let is_used = self.fifo.released() >= self.received && !self.differs;
        if is_used && let Some(message) = self.common.end.goodbye() {
            self.common.send_last(message);
        }
    }
}

/// A receiving end until its sender says over which way it sends.
pub(crate) struct UnconfirmedReceiver {
    state: Confirmation,
    channel: u8,
}

enum Confirmation {
    /// The sender's answer has not arrived whole; its bytes so far.
    Pending(Box<Receiver>, Vec<u8>),
    /// The sender has answered.
    Confirmed(Box<dyn Connection>),
    /// Between the two; never seen by a call.
    Changing,
}

/// The sender's answer.
enum Answer {
    /// It is connected.
    Rdma,
    /// It cannot use RDMA, and sends over the socket; why.
    Socket(String),
}

impl UnconfirmedReceiver {
    pub(crate) fn new(
        fifo: Arc<Fifo>,
        connected: ConnectedEnd,
        stream: Stream,
        (peer, channel): (u32, u8),
    ) -> Self {
        let receiver = Receiver::new(fifo, connected, stream, peer);
        Self {
            state: Confirmation::Pending(Box::new(receiver), Vec::new()),
            channel,
        }
    }

    /// Reads the sender's answer, if it has arrived.
    fn confirm(&mut self, peer: u32) -> Result<(), ConnectionError> {
        let Confirmation::Pending(receiver, bytes) = &mut self.state else {
            return Ok(());
        };
        let Some(answer) = read_answer(&mut receiver.common.stream, bytes)? else {
            return Ok(());
        };
        let Confirmation::Pending(receiver, _) = std::mem::replace(&mut self.state, Confirmation::Changing)
        else {
            return Ok(());
        };
        self.state = Confirmation::Confirmed(match answer {
            Answer::Rdma => {
                if receiver.common.reports.survives {
                    // From here on the end detects by itself whether its peer answers.
                    let _ = sys::bear_silence(&receiver.common.stream.tcp);
                }
                if let Some(slots) = &receiver.direct {
                    // Before the first slot is posted.
                    receiver.fifo.set_slots_address(slots.address());
                }
                receiver
            }
            Answer::Socket(why) => {
                let channel = self.channel;
                tracing::warn!(
                    target: log::NET,
                    "NET/IB : rank {peer} sends over a socket on channel {channel}, not over RDMA: {why}"
                );
                let Receiver { fifo, common, .. } = *receiver;
                Box::new(socket::Receiver::new(fifo, common.stream))
            }
        });
        Ok(())
    }

    fn confirmed(&self) -> Option<&dyn Connection> {
        match &self.state {
            Confirmation::Confirmed(connection) => Some(&**connection),
            Confirmation::Pending(..) | Confirmation::Changing => None,
        }
    }
}

/// Reads the sender's answer; `None` while bytes are missing.
fn read_answer(stream: &mut Stream, bytes: &mut Vec<u8>) -> Result<Option<Answer>, ConnectionError> {
    loop {
        let reply = bytes.first_chunk::<HELLO_REPLY_BYTES>().map(HelloReply::parse);
        let text = match reply {
            None => 0,
            Some(Some(HelloReply::Rdma)) => return Ok(Some(Answer::Rdma)),
            Some(Some(HelloReply::Sockets(length))) if length <= MAX_REASON => length as usize,
            Some(_) => return Err(ConnectionError::protocol("the peer confirms RDMA with rubbish")),
        };
        let wanted = HELLO_REPLY_BYTES + text - bytes.len();
        if wanted == 0 {
            let why = printable(&bytes[HELLO_REPLY_BYTES..]);
            return Ok(Some(Answer::Socket(why)));
        }
        let mut piece = [0; 64];
        let read = stream.read(&mut piece[..wanted.min(64)])?;
        if read == 0 {
            return Ok(None);
        }
        bytes.extend_from_slice(&piece[..read]);
    }
}

/// What an unconfirmed receiver waits for: the sender's answer.
const ANSWER: Waits = Waits {
    events: libc::POLLIN,
    device: false,
};

impl Connection for UnconfirmedReceiver {
    fn progress(&mut self, op: &ProxyOp) -> Result<Progress, ConnectionError> {
        self.confirm(op.peer)?;
        match &mut self.state {
            Confirmation::Confirmed(connection) => connection.progress(op),
            Confirmation::Pending(..) | Confirmation::Changing => Ok(Progress {
                moved: Moved::Nothing,
                waits: ANSWER,
            }),
        }
    }

    fn step(&self) -> u32 {
        self.confirmed().map_or(0, Connection::step)
    }

    fn stream(&self) -> &Stream {
        match &self.state {
            Confirmation::Pending(receiver, _) => receiver.stream(),
            Confirmation::Confirmed(connection) => connection.stream(),
            Confirmation::Changing => unreachable!("the state changes within one call"),
        }
    }

    fn stream_mut(&mut self) -> &mut Stream {
        match &mut self.state {
            Confirmation::Pending(receiver, _) => receiver.stream_mut(),
            Confirmation::Confirmed(connection) => connection.stream_mut(),
            Confirmation::Changing => unreachable!("the state changes within one call"),
        }
    }

    fn serves_idle(&self) -> bool {
        self.confirmed().is_none_or(Connection::serves_idle)
    }

    fn serve_idle(&mut self) -> Option<Waits> {
        let Confirmation::Pending(receiver, _) = &self.state else {
            return match &mut self.state {
                Confirmation::Confirmed(connection) => connection.serve_idle(),
                Confirmation::Pending(..) | Confirmation::Changing => None,
            };
        };
        let peer = receiver.peer;
        // The next operation finds the same error, and reports it.
        self.confirm(peer).ok()?;
        match &mut self.state {
            Confirmation::Confirmed(connection) => connection.serve_idle(),
            Confirmation::Pending(..) | Confirmation::Changing => Some(ANSWER),
        }
    }

    fn stall(&mut self) -> Option<(u64, Stall)> {
        match &mut self.state {
            Confirmation::Confirmed(connection) => connection.stall(),
            Confirmation::Pending(..) | Confirmation::Changing => None,
        }
    }

    fn arm(&self) {
        if let Some(connection) = self.confirmed() {
            connection.arm();
        }
    }

    fn descriptors(&self) -> Vec<RawFd> {
        self.confirmed().map_or_else(Vec::new, Connection::descriptors)
    }

    fn max_wait(&self) -> Option<Duration> {
        self.confirmed().and_then(Connection::max_wait)
    }

    fn close(&mut self) {
        if let Confirmation::Confirmed(connection) = &mut self.state {
            connection.close();
        }
    }
}
