//! The sending end: the FIFO's consumer. Steps are posted one after the other as the device fills slots and the peer grants them,
//! and up to all slots are under way at once; a slot is released when the peer's device has its bytes.

use std::{cell::Cell, collections::VecDeque, ops::Range, sync::Arc};

use ringsight_kernels::{
    Fifo,
    fifo::{INLINE_BYTES, SLOTS},
};
use ringsight_records::{Carrier, Numbering, State};
use ringsight_verbs::endpoint::{self, Failure, NOTICE_BYTES, Posted, Sending};

use super::{
    Connected,
    line::{Line, Stop},
    paths::Paths,
    prepared::slots_of,
};
use crate::{
    proxy::{ProxyOp, events, stalls::Stall},
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

/// Bytes of positions that are under way, of which `sizes` begin with that of position `first`.
fn bytes_of(sizes: &VecDeque<usize>, first: u64, positions: Range<u64>) -> u64 {
    let sizes = positions.map(|position| sizes.get(position.checked_sub(first)? as usize));
    sizes.flatten().map(|bytes| *bytes as u64).sum()
}

/// How an operation's requests are numbered that begins at a position, over so many queue pairs.
fn numbering(first: u64, queue_pairs: usize) -> Numbering {
    Numbering {
        first,
        queue_pairs: queue_pairs as u8,
    }
}

/// The sending end.
pub(crate) struct Sender {
    fifo: Arc<Fifo>,
    pub(crate) line: Line<Sending>,
    /// Operations before the present one.
    ops: u32,
    /// The position at which the present one begins.
    base: u64,
    /// Slots released: positions that the peer has and whose end was told.
    released: u64,
    /// Of the step at [`endpoint::Sender::posted`].
    phase: Phase,
    /// Bytes of the steps that are under way.
    sizes: VecDeque<usize>,
    transferred: u64,
}

impl Sender {
    pub(crate) fn new(fifo: Arc<Fifo>, connected: Connected) -> Self {
        let (_, slots) = slots_of(&fifo);
        let paths = Paths::new(&connected, true);
        let end = endpoint::Sender::new(connected.paths, connected.control, slots, connected.failover);
        Self {
            line: Line::new(end, paths),
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
        self.line.begin(op, socket);
        match self.move_on(op) {
            Ok(turn) => {
                self.speak(socket, op.peer, Some(op));
                Ok(turn)
            }
            Err(stop) => {
                self.note(op.peer, Some(op));
                Err(self.line.failed(stop, socket))
            }
        }
    }

    fn move_on(&mut self, op: &ProxyOp) -> Result<Turn, Stop> {
        let end = self.base + u64::from(op.steps);
        let mut moved = false;
        loop {
            let before = (self.line.end.posted(), self.released, self.phase);
            self.line.end.poll()?;
            self.note(op.peer, Some(op));
            self.release(op);
            if self.released == end {
                self.base = end;
                self.ops = self.ops.wrapping_add(1);
                self.line.rest();
                return Ok(Turn::Done(std::mem::take(&mut self.transferred)));
            }
            if self.line.end.posted() < end {
                self.advance(op)?;
            }
            if before == (self.line.end.posted(), self.released, self.phase) {
                break;
            }
            moved = true;
        }
        self.line.turned(moved, true)
    }

    /// Where it waits for the network, and since when, if it has for long: for steps to be acknowledged, or for a path.
    pub(crate) fn stall(&mut self) -> Option<(u64, Stall)> {
        let waits = self.released < self.line.end.posted();
        self.line.stall(waits, self.released)
    }

    /// Says what is to be said beside RDMA.
    fn speak(&mut self, socket: &mut Socket, peer: u32, op: Option<&ProxyOp>) {
        self.note(peer, op);
        self.line.speak(socket);
    }

    /// Tells what has happened, while it is known what has been sent again: before any of that is released.
    fn note(&mut self, peer: u32, op: Option<&ProxyOp>) {
        let Self {
            line,
            sizes,
            released,
            ..
        } = self;
        let again = Cell::new((0, 0));
        line.note(peer, |positions| {
            again.set((positions.start, positions.end));
            bytes_of(sizes, *released, positions)
        });
        let (from, to) = again.get();
        if let Some(op) = op {
            self.tell_again(op, from.max(self.released)..to);
        }
    }

    /// Tells what carries steps now that are sent again.
    fn tell_again(&self, op: &ProxyOp, positions: Range<u64>) {
        for position in positions {
            let posted = self.line.end.posted_over(position);
            // A call that failed has the rest wait for the next path.
            if posted.path == self.line.paths.active() {
                let bytes = bytes_of(&self.sizes, self.released, position..position + 1) as usize;
                self.tell_carried(op, (posted, (position - self.base) as u32), State::START, bytes);
            }
        }
    }

    /// What there is to do without an operation: a peer may need this end's help. Whether there may be more later.
    pub(crate) fn tend(&mut self, socket: &mut Socket, peer: u32) -> bool {
        self.line.listen(socket);
        let works = self.line.end.poll().is_ok();
        self.speak(socket, peer, None);
        works && self.line.has_peer()
    }

    /// Moves the next step on by one phase, if it can.
    fn advance(&mut self, op: &ProxyOp) -> Result<(), Stop> {
        let position = self.line.end.posted();
        let step = (position - self.base) as u32;
        match self.phase {
            Phase::Idle => {
                if step == 0 {
                    events::numbered(op, numbering(position, self.line.end.active().qps().len()));
                }
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
            Phase::Peer(bytes) if self.line.end.may_post() => {
                events::step(op, step, State::STEP_SEND_WAIT, 0);
                let posted = self.post(op, position, bytes)?;
                self.tell_carried(op, (posted, step), State::START, bytes);
                self.sizes.push_back(bytes);
                self.phase = Phase::Idle;
            }
            Phase::Peer(_) => {}
        }
        Ok(())
    }

    /// Tells what carries a step: path and queue pair, and the step's number.
    fn tell_carried(&self, op: &ProxyOp, (posted, step): (Posted, u32), state: State, bytes: usize) {
        let carrier = Carrier {
            port: Some(self.line.paths.port_of(posted.path)),
            number: posted.qp,
            step,
        };
        let is_backup = self.line.paths.is_backup(posted.path);
        events::carried_over(op, carrier, is_backup, state, bytes);
    }

    /// Posts the slot at a position: its bytes, if they do not go with the notice, and its header.
    fn post(&mut self, op: &ProxyOp, position: u64, bytes: usize) -> Result<Posted, Failure> {
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
        self.line.end.post(&notice[..length], data)
    }

    /// Ends the steps that the peer has.
    fn release(&mut self, op: &ProxyOp) {
        while self.released < self.line.end.acked() {
            let bytes = self.sizes.pop_front().unwrap_or(0);
            self.fifo.release(self.released);
            self.transferred += bytes as u64;
            // By what carried it last, which need not be what did first, nor what is in use now.
            let posted = self.line.end.posted_over(self.released);
            self.tell_carried(op, (posted, self.step()), State::STOP, bytes);
            events::step(op, self.step(), State::STOP, bytes);
            self.released += 1;
        }
    }

    pub(crate) fn needs(&self) -> Needs {
        Needs {
            events: self.line.events(),
            device: matches!(self.phase, Phase::Idle | Phase::Gpu),
        }
    }
}

#[cfg(test)]
mod tests {
    use ringsight_verbs::endpoint::WorkRequest;

    use super::*;

    #[test]
    fn what_is_sent_again_has_the_bytes_of_its_positions() {
        let sizes = VecDeque::from([100, 200, 300, 7]);
        assert_eq!(bytes_of(&sizes, 40, 40..44), 607);
        assert_eq!(bytes_of(&sizes, 40, 41..43), 500);
        assert_eq!(bytes_of(&sizes, 40, 43..43), 0);
        assert_eq!(
            bytes_of(&sizes, 40, 39..41),
            100,
            "what has been released is not known"
        );
    }

    #[test]
    fn requests_are_on_record_by_the_number_that_they_have() {
        for (first, queue_pairs) in [(0, 1), (7, 4), (u64::from(u32::MAX), 3), ((1 << 48) - 5, 16)] {
            let numbering = numbering(first, queue_pairs);
            for step in 0..4 {
                let position = first + u64::from(step);
                let qp = (position % queue_pairs as u64) as usize;
                let work = WorkRequest::from_id(numbering.wr_id(step));
                assert_eq!(work, Some(WorkRequest::Step { qp, position }));
            }
        }
    }
}
