//! The sending end: the FIFO's consumer. Steps are posted one after the other as the device fills slots and the peer grants them,
//! and up to all slots are under way at once; a slot is released when the peer's device has its bytes.

use std::{collections::VecDeque, os::fd::RawFd, sync::Arc, time::Duration};

use ringsight_kernels::{
    Fifo,
    fifo::{INLINE_BYTES, SLOTS},
};
use ringsight_records::{Carrier, State};
use ringsight_verbs::endpoint::{self, NOTICE_BYTES};

use super::{Connected, paths::Paths, slots_of, talk::Talk};
use crate::{
    proxy::{ProxyOp, events},
    transport::socket::{Needs, STEP_BYTES, Socket, StepHeader, Turn},
};

const _: () = assert!(STEP_BYTES + INLINE_BYTES <= NOTICE_BYTES);

/// How far the next step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It has not begun.
    Idle,
    /// The device has not written the slot.
    Gpu,
    /// The slot is there with so many bytes, the peer's credit is not.
    Peer(usize),
}

/// The sending end.
pub(crate) struct Sender {
    fifo: Arc<Fifo>,
    end: endpoint::Sender,
    talk: Talk,
    paths: Paths,
    /// An operation is under way.
    is_busy: bool,
    /// Operations before the present one.
    ops: u32,
    /// The position at which the present one begins.
    base: u64,
    /// Slots released: positions that the peer has and whose end was told.
    released: u64,
    /// Of the step at [`endpoint::Sender::posted`].
    phase: Phase,
    /// Bytes of the steps that are under way, and the queue pairs that they were posted to.
    sizes: VecDeque<(usize, u32)>,
    transferred: u64,
}

impl Sender {
    pub(crate) fn new(fifo: Arc<Fifo>, connected: Connected) -> Self {
        let (_, slots) = slots_of(&fifo);
        Self {
            paths: Paths::new(&connected, true),
            end: endpoint::Sender::with_failover(
                connected.paths,
                connected.control,
                slots,
                connected.failover,
            ),
            talk: Talk::new(),
            is_busy: false,
            fifo,
            ops: 0,
            base: 0,
            released: 0,
            phase: Phase::Idle,
            sizes: VecDeque::with_capacity(SLOTS),
            transferred: 0,
        }
    }

    /// The step that it is at, for messages.
    pub(crate) fn step(&self) -> u32 {
        (self.released - self.base) as u32
    }

    /// Moves `op` on as far as it goes now.
    pub(crate) fn turn(&mut self, op: &ProxyOp, socket: &mut Socket) -> Result<Turn, String> {
        self.set_busy(true);
        self.paths.set_op(op);
        // Before what has ended is looked at: all that a peer did before it went is there then.
        self.listen(socket);
        let end = self.base + u64::from(op.steps);
        let mut moved = false;
        loop {
            let before = (self.end.posted(), self.released, self.phase);
            if let Err(failure) = self.end.poll() {
                self.speak(socket, op.peer);
                self.paths.given_up(self.end.paths());
                return Err(failure.text);
            }
            self.release(op);
            if self.released == end {
                self.base = end;
                self.ops = self.ops.wrapping_add(1);
                self.set_busy(false);
                self.speak(socket, op.peer);
                return Ok(Turn::Done(std::mem::take(&mut self.transferred)));
            }
            if self.end.posted() < end {
                self.advance(op)?;
            }
            if before == (self.end.posted(), self.released, self.phase) {
                break;
            }
            moved = true;
        }
        self.speak(socket, op.peer);
        match self.talk.gone() {
            Some(text) if !moved => Err(text.to_owned()),
            _ => Ok(if moved { Turn::Moved } else { Turn::Waiting }),
        }
    }

    fn set_busy(&mut self, busy: bool) {
        if std::mem::replace(&mut self.is_busy, busy) != busy {
            self.end.set_busy(busy);
        }
    }

    /// Takes what the peer says beside RDMA. What follows from it is found by the next poll.
    fn listen(&mut self, socket: &mut Socket) {
        let Self { talk, end, .. } = self;
        talk.read(socket, |message| {
            let _ = end.hear(message);
        });
    }

    /// Says what is to be said beside RDMA, and tells the log what has happened.
    fn speak(&mut self, socket: &mut Socket, peer: u32) {
        let Self {
            talk,
            end,
            paths,
            sizes,
            ..
        } = self;
        talk.write(socket, || end.take_outgoing());
        while let Some(noted) = end.take_noted() {
            // The last ones that were posted.
            let bytes = |steps: u64| {
                let last = sizes.iter().rev().take(steps as usize);
                last.map(|(bytes, _)| *bytes as u64).sum()
            };
            paths.note(&noted, end.paths(), peer, bytes);
        }
    }

    /// What there is to do without an operation: a peer may need this end's help. Whether there may be more later.
    pub(crate) fn tend(&mut self, socket: &mut Socket, peer: u32) -> bool {
        self.listen(socket);
        let works = self.end.poll().is_ok();
        self.speak(socket, peer);
        works && self.talk.gone().is_none()
    }

    /// Moves the next step on by one phase, if it can.
    fn advance(&mut self, op: &ProxyOp) -> Result<(), String> {
        let position = self.end.posted();
        let step = (position - self.base) as u32;
        match self.phase {
            Phase::Idle => {
                events::step(op, step, State::START, 0);
                events::step(op, step, State::STEP_SEND_GPU_WAIT, 0);
                self.phase = Phase::Gpu;
            }
            Phase::Gpu => {
                // Within the ring from the oldest slot that is not released.
                let near = position < self.released + SLOTS as u64;
                if let Some(bytes) = near.then(|| self.fifo.size_at(position)).flatten() {
                    events::step(op, step, State::STEP_SEND_PEER_WAIT, 0);
                    self.phase = Phase::Peer(bytes);
                }
            }
            Phase::Peer(bytes) if self.end.may_post() => {
                events::step(op, step, State::STEP_SEND_WAIT, 0);
                let qp = self.post(op, position, bytes)?;
                events::carried(op, self.carrier(qp, step), State::START, bytes);
                self.sizes.push_back((bytes, qp));
                self.phase = Phase::Idle;
            }
            Phase::Peer(_) => {}
        }
        Ok(())
    }

    fn carrier(&self, qp: u32, step: u32) -> Carrier {
        Carrier {
            port: Some(self.paths.port()),
            number: qp,
            step,
        }
    }

    /// Posts the slot at a position: its bytes, if they do not go with the notice, and its header. The queue pair's number.
    fn post(&mut self, op: &ProxyOp, position: u64, bytes: usize) -> Result<u32, String> {
        let header = StepHeader {
            op: self.ops,
            step: (position - self.base) as u32,
            steps: op.steps,
            bytes: bytes as u32,
            tag: self.fifo.tag_at(position),
        };
        let mut notice = [0; NOTICE_BYTES];
        notice[..STEP_BYTES].copy_from_slice(&header.encode());
        let (length, data) = if bytes <= INLINE_BYTES {
            // SAFETY: the device posted the slot with these bytes and does not touch it before it is released.
            let own =
                unsafe { std::slice::from_raw_parts(self.fifo.slot(position, bytes).cast_const(), bytes) };
            notice[STEP_BYTES..STEP_BYTES + bytes].copy_from_slice(own);
            (STEP_BYTES + bytes, 0)
        } else {
            (STEP_BYTES, bytes)
        };
        let posted = self
            .end
            .post(&notice[..length], data)
            .map_err(|failure| failure.text)?;
        Ok(posted.qp)
    }

    /// Ends the steps that the peer has.
    fn release(&mut self, op: &ProxyOp) {
        while self.released < self.end.acked() {
            let (bytes, qp) = self.sizes.pop_front().unwrap_or((0, 0));
            self.fifo.release(self.released);
            self.transferred += bytes as u64;
            events::carried(op, self.carrier(qp, self.step()), State::STOP, bytes);
            events::step(op, self.step(), State::STOP, bytes);
            self.released += 1;
        }
    }

    /// Has its descriptor tell of the next end of anything: to be followed by a turn.
    pub(crate) fn arm(&self) -> Result<(), String> {
        self.end.arm().map_err(|failure| failure.text)
    }

    /// What to wait for once armed.
    pub(crate) fn fds(&self) -> Vec<RawFd> {
        self.end.fds()
    }

    /// How long to wait at most.
    pub(crate) fn wait(&self) -> Option<Duration> {
        self.end.wait()
    }

    pub(crate) fn needs(&self) -> Needs {
        Needs {
            events: self.talk.events(),
            device: matches!(self.phase, Phase::Idle | Phase::Gpu),
        }
    }
}
