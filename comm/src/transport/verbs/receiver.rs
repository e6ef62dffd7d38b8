//! The receiving end: the FIFO's producer.

use std::{collections::VecDeque, sync::Arc};

use ringsight_kernels::{
    Fifo,
    fifo::{INLINE_BYTES, SLOTS},
};
use ringsight_records::{Carrier, State};
use ringsight_verbs::{
    endpoint::{self, Failure, Receiving},
    queue::Qp,
};

use super::{
    Connected,
    line::{Line, Stop},
    paths::Paths,
};
use crate::{
    proxy::{ProxyOp, events, stalls::Stall},
    transport::{
        direct::Slots,
        socket::{MOST_REASON, Needs, STEP_BYTES, Socket, StepHeader, Turn, VERDICT_BYTES, Verdict},
    },
};

/// The receiving end.
pub(crate) struct Receiver {
    fifo: Arc<Fifo>,
    /// Its slots, where they are in the memory of the GPU.
    direct: Option<Arc<Slots>>,
    pub(crate) line: Line<Receiving>,
    /// Operations before the present one.
    ops: u32,
    /// Steps granted, received and consumed by the device since the connection began; in this order, at most [`SLOTS`] apart.
    granted: u64,
    received: u64,
    consumed: u64,
    /// All of them at the beginning of the operation.
    base: u64,
    /// Bytes of the steps that the device has not consumed yet.
    sizes: VecDeque<usize>,
    /// The sender's rank does something else than ours: the slot that tells our kernel is posted, and nothing that follows could be
    /// understood.
    differs: bool,
    transferred: u64,
}

impl Receiver {
    fn new(fifo: Arc<Fifo>, connected: Connected) -> Self {
        let paths = Paths::new(&connected, false);
        let direct = connected.direct.clone();
        let end = endpoint::Receiver::new(connected.paths, connected.control, connected.failover);
        Self {
            line: Line::new(end, paths),
            fifo,
            direct,
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

    /// The step that it is at, for messages.
    pub(crate) fn step(&self) -> u32 {
        (self.received - self.base) as u32
    }

    /// Moves `op` on as far as it goes now.
    pub(crate) fn turn(&mut self, op: &ProxyOp, socket: &mut Socket) -> Result<Turn, String> {
        self.line.begin(op, socket);
        match self.move_on(op) {
            Ok(turn) => {
                self.speak(socket, op.peer);
                Ok(turn)
            }
            Err(stop) => {
                self.note(op.peer);
                Err(self.line.failed(stop, socket))
            }
        }
    }

    fn move_on(&mut self, op: &ProxyOp) -> Result<Turn, Stop> {
        let end = self.base + u64::from(op.steps);
        let mut moved = false;
        loop {
            let before = (self.consumed, self.granted, self.received);
            // First: a grant looks at the times, too, and who was away for long takes what has ended before it finds one over. The credits
            // go out with the next poll.
            let polled = self.line.end.poll();
            // Before what has arrived is taken: by then it is known what it came over.
            self.note(op.peer);
            self.consume(op);
            self.grant(op, end)?;
            // What has been received needs no peer and no path.
            if self.received < end && !self.differs {
                polled?;
                self.receive(op)?;
            }
            if self.consumed == end {
                self.base = end;
                self.ops = self.ops.wrapping_add(1);
                self.line.rest();
                return Ok(Turn::Done(std::mem::take(&mut self.transferred)));
            }
            if before == (self.consumed, self.granted, self.received) {
                break;
            }
            moved = true;
        }
        self.line.turned(moved, self.received < end)
    }

    /// Where it waits for the network, and since when, if it has for long: for the peer to have its credits, or for a path. That no step
    /// comes is the peer's to explain.
    pub(crate) fn stall(&mut self) -> Option<(u64, Stall)> {
        let waits = self.received < self.granted && !self.line.end.is_settled();
        self.line.stall(waits, self.received.wrapping_add(self.granted))
    }

    /// Says what is to be said beside RDMA.
    fn speak(&mut self, socket: &mut Socket, peer: u32) {
        self.note(peer);
        self.line.speak(socket);
    }

    /// Tells what has happened.
    fn note(&mut self, peer: u32) {
        // What is sent again the sender knows.
        self.line.note(peer, |_| 0);
    }

    /// What there is to do without an operation: a peer may need this end's help. Whether there may be more later.
    pub(crate) fn tend(&mut self, socket: &mut Socket, peer: u32) -> bool {
        self.line.listen(socket);
        let works = self.line.end.poll().is_ok();
        self.speak(socket, peer);
        works && self.line.has_peer()
    }

    /// Before its socket is closed in good order: a sender whose acknowledgements were lost has nobody to ask any more, so it is told what
    /// is here, if that is all that it was to send.
    pub(crate) fn leave(&mut self, socket: &mut Socket) {
        let is_used = self.fifo.released() >= self.received && !self.differs;
        if is_used && let Some(word) = self.line.end.goodbye() {
            self.line.say_last(socket, word);
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
    fn grant(&mut self, op: &ProxyOp, end: u64) -> Result<(), Failure> {
        let before = self.granted;
        while self.granted < end.min(self.consumed + SLOTS as u64) {
            let step = (self.granted - self.base) as u32;
            events::step(op, step, State::START, 0);
            events::step(op, step, State::STEP_RECV_WAIT, 0);
            self.granted += 1;
        }
        if self.granted > before {
            self.line.end.grant(self.granted)?;
        }
        Ok(())
    }

    /// Gives the device what is here.
    fn receive(&mut self, op: &ProxyOp) -> Result<(), Stop> {
        // All that is taken below was there when the completions were last polled: one flush is for all of it.
        let mut unflushed = self.direct.clone();
        while !self.differs
            && let Some(arrived) = self.line.end.take()?
        {
            let step = self.step();
            let (header, own) = arrived
                .notice()
                .split_first_chunk::<STEP_BYTES>()
                .and_then(|(header, own)| Some((StepHeader::parse(header)?, own)))
                .ok_or_else(|| "the peer sent something that is no step".to_owned())?;
            header.check(op, (self.ops, step), self.fifo.slot_bytes())?;
            let bytes = header.bytes as usize;
            if self.fifo.free() != Some(arrived.position) {
                let text = "a granted slot is not free: the device released slots twice";
                return Err(text.to_owned().into());
            }
            if bytes <= INLINE_BYTES {
                if own.len() != bytes {
                    let text = format!("the peer sent {} bytes with a step of {bytes}", own.len());
                    return Err(text.into());
                }
                // SAFETY: the slot is free, so the device does not touch it before it is posted, and has room for this many; the FIFO
                // keeps it mapped.
                unsafe {
                    self.fifo
                        .slot(arrived.position, bytes)
                        .copy_from(own.as_ptr(), bytes);
                };
            }
            self.tell_carried(op, arrived.position, bytes);
            events::step(op, step, State::STEP_RECV_FLUSH_WAIT, bytes);
            // CPU memory needs no flush: the completion was read after the bytes were there, and the release of the flag orders both.
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

    /// Tells what has carried the step at a position. There is no request for it at this end, so only its arrival is told of.
    fn tell_carried(&self, op: &ProxyOp, position: u64, bytes: usize) {
        let path = self.line.paths.came_over(position);
        let queue_pair = self
            .line
            .end
            .paths()
            .get(path)
            .and_then(|path| path.qps().get(path.lead(position)));
        let carrier = Carrier {
            port: Some(self.line.paths.port_of(path)),
            number: queue_pair.map_or(0, Qp::number),
            step: (position - self.base) as u32,
        };
        let is_backup = self.line.paths.is_backup(path);
        events::carried_over(op, carrier, is_backup, State::STOP, bytes);
    }

    pub(crate) fn needs(&self) -> Needs {
        Needs {
            events: self.line.events(),
            device: self.consumed < self.received,
        }
    }
}

/// A receiving end that its sender has not confirmed.
pub(crate) struct Unconfirmed {
    receiver: Receiver,
    answer: Vec<u8>,
}

/// What the sender said.
pub(crate) enum Confirmed {
    /// Nothing yet.
    NotYet,
    /// It is connected.
    Rdma,
    /// It cannot, and sends over the socket; why.
    Sockets(String),
}

impl Unconfirmed {
    pub(crate) fn new(fifo: Arc<Fifo>, connected: Connected) -> Self {
        Self {
            receiver: Receiver::new(fifo, connected),
            answer: Vec::new(),
        }
    }

    /// As [`Connected::survives`].
    pub(crate) fn survives(&self) -> bool {
        self.receiver.line.paths.survives
    }

    /// Reads what the sender says.
    pub(crate) fn read(&mut self, socket: &mut Socket) -> Result<Confirmed, String> {
        loop {
            let verdict = self.answer.first_chunk::<VERDICT_BYTES>().map(Verdict::parse);
            let text = match verdict {
                None => 0,
                Some(Some(Verdict::Rdma)) => return Ok(Confirmed::Rdma),
                Some(Some(Verdict::Sockets(bytes))) if bytes <= MOST_REASON => bytes as usize,
                Some(_) => return Err("the peer confirms RDMA with rubbish".into()),
            };
            let wanted = VERDICT_BYTES + text - self.answer.len();
            if wanted == 0 {
                let why = String::from_utf8_lossy(&self.answer[VERDICT_BYTES..]).into_owned();
                return Ok(Confirmed::Sockets(why));
            }
            let mut piece = [0; 64];
            let read = socket.read(&mut piece[..wanted.min(64)])?;
            if read == 0 {
                return Ok(Confirmed::NotYet);
            }
            self.answer.extend_from_slice(&piece[..read]);
        }
    }

    /// The end, which is confirmed.
    pub(crate) fn into_receiver(self) -> Receiver {
        if let Some(slots) = &self.receiver.direct {
            // Before the first of them is posted.
            self.receiver.fifo.set_slots_address(slots.address());
        }
        self.receiver
    }

    /// Its FIFO, for another end: it is not to be.
    pub(crate) fn into_fifo(self) -> Arc<Fifo> {
        self.receiver.fifo
    }
}
