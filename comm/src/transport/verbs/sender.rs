//! The sending end over RDMA: the consumer of the FIFO.
//!
//! It posts steps in order, as the device fills slots and the peer grants credits. All slots may be outstanding at once. It releases a
//! slot when the peer's device has acknowledged its bytes.

use std::{cell::Cell, collections::VecDeque, ops::Range, os::fd::RawFd, sync::Arc, time::Duration};

use ringsight_kernels::{
    Fifo,
    fifo::{INLINE_BYTES, SLOTS},
};
use ringsight_records::{Carrier, Numbering, State};
use ringsight_verbs::endpoint::{self, Failure, NOTICE_BYTES, Posted, Sending};

use super::{
    end::VerbsEnd,
    path_reports::PathReports,
    setup::{ConnectedEnd, slots_of},
};
use crate::{
    op::ProxyOp,
    transport::{
        connection::{Connection, Moved, Progress, Waits},
        error::ConnectionError,
        events,
        stall::Stall,
        stream::Stream,
        wire::{STEP_BYTES, StepHeader},
    },
};

const _: () = assert!(STEP_BYTES + INLINE_BYTES <= NOTICE_BYTES);

/// Phase of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The step has not begun.
    Idle,
    /// The device has not written the slot.
    Gpu,
    /// The slot is filled with so many bytes, the credit is missing.
    Peer(usize),
}

/// Bytes of some outstanding positions. `sizes` are those of the outstanding positions from `first` on.
fn bytes_of(sizes: &VecDeque<usize>, first: u64, positions: Range<u64>) -> u64 {
    let sizes = positions.map(|position| sizes.get(position.checked_sub(first)? as usize));
    sizes.flatten().map(|bytes| *bytes as u64).sum()
}

/// The numbering of the work requests of an operation that begins at position `first`.
fn numbering(first: u64, queue_pairs: usize) -> Numbering {
    Numbering {
        first,
        queue_pairs: queue_pairs as u8,
    }
}

/// The sending end.
pub(crate) struct Sender {
    fifo: Arc<Fifo>,
    common: VerbsEnd<Sending>,
    /// The rank at the other end, as the proxies count ranks.
    peer: u32,
    /// Operations completed since the connection began.
    ops: u32,
    /// The position at which the present operation begins.
    base: u64,
    /// Positions whose slots are released: acknowledged by the peer, and recorded.
    released: u64,
    /// Phase of the step at [`endpoint::Sender::posted`].
    phase: Phase,
    /// Bytes of the outstanding steps.
    sizes: VecDeque<usize>,
    transferred: u64,
}

impl Sender {
    pub(crate) fn new(fifo: Arc<Fifo>, connected: ConnectedEnd, stream: Stream, peer: u32) -> Self {
        let (_, slots) = slots_of(&fifo);
        let reports = PathReports::new(&connected, true);
        let end = endpoint::Sender::new(connected.paths, connected.control, slots, connected.failover);
        Self {
            common: VerbsEnd::new(end, reports, stream),
            peer,
            fifo,
            ops: 0,
            base: 0,
            released: 0,
            phase: Phase::Idle,
            sizes: VecDeque::with_capacity(SLOTS),
            transferred: 0,
        }
    }

    /// The step of the operation that is released next.
    fn next_step(&self) -> u32 {
        (self.released - self.base) as u32
    }

    /// Moves `op` on as far as it goes now.
    fn advance(&mut self, op: &ProxyOp) -> Result<Moved, ConnectionError> {
        let end = self.base + u64::from(op.steps);
        let mut moved = false;
        loop {
            let before = (self.common.end.posted(), self.released, self.phase);
            self.common.end.poll()?;
            self.record_reports(op.peer, Some(op));
            self.release(op);
            if self.released == end {
                self.base = end;
                self.ops = self.ops.wrapping_add(1);
                self.common.finish_op();
                return Ok(Moved::Completed(std::mem::take(&mut self.transferred)));
            }
            if self.common.end.posted() < end {
                self.advance_step(op)?;
            }
            if before == (self.common.end.posted(), self.released, self.phase) {
                break;
            }
            moved = true;
        }
        self.common.moved(moved, true)
    }

    /// Logs and records the end's reports. Call it before anything is released, while the sizes of replayed steps are known.
    fn record_reports(&mut self, peer: u32, op: Option<&ProxyOp>) {
        let Self {
            common,
            sizes,
            released,
            ..
        } = self;
        let replayed = Cell::new((0, 0));
        common.record_reports(peer, |positions| {
            replayed.set((positions.start, positions.end));
            bytes_of(sizes, *released, positions)
        });
        let (from, to) = replayed.get();
        if let Some(op) = op {
            self.record_replayed(op, from.max(self.released)..to);
        }
    }

    /// Records the carriers of replayed steps.
    fn record_replayed(&self, op: &ProxyOp, positions: Range<u64>) {
        for position in positions {
            let posted = self.common.end.posted_over(position);
            // After a failed post the remaining positions wait for the next path.
            if posted.path == self.common.reports.active() {
                let bytes = bytes_of(&self.sizes, self.released, position..position + 1) as usize;
                self.record_carried(op, (posted, (position - self.base) as u32), State::START, bytes);
            }
        }
    }

    /// Moves the next step on by one phase, if possible.
    fn advance_step(&mut self, op: &ProxyOp) -> Result<(), ConnectionError> {
        let position = self.common.end.posted();
        let step = (position - self.base) as u32;
        match self.phase {
            Phase::Idle => {
                if step == 0 {
                    events::numbered(op, numbering(position, self.common.end.active().qps().len()));
                }
                events::step(op, step, State::START, 0);
                events::step(op, step, State::STEP_SEND_GPU_WAIT, 0);
                self.phase = Phase::Gpu;
            }
            Phase::Gpu => {
                // Within the ring, counted from the oldest slot that is not released.
                let near = position < self.released + SLOTS as u64;
                if let Some(bytes) = near.then(|| self.fifo.size_at(position)).flatten() {
                    events::step(op, step, State::STEP_SEND_PEER_WAIT, 0);
                    self.phase = Phase::Peer(bytes);
                }
            }
            Phase::Peer(bytes) if self.common.end.may_post() => {
                events::step(op, step, State::STEP_SEND_WAIT, 0);
                let posted = self.post(op, position, bytes)?;
                self.record_carried(op, (posted, step), State::START, bytes);
                self.sizes.push_back(bytes);
                self.phase = Phase::Idle;
            }
            Phase::Peer(_) => {}
        }
        Ok(())
    }

    /// Records the carrier of a step.
    fn record_carried(&self, op: &ProxyOp, (posted, step): (Posted, u32), state: State, bytes: usize) {
        let carrier = Carrier {
            port: Some(self.common.reports.port_of(posted.path)),
            number: posted.qp,
            step,
        };
        let is_backup = self.common.reports.is_backup(posted.path);
        events::carried_over(op, carrier, is_backup, state, bytes);
    }

    /// Posts the slot at a position: its header as the notice, and its bytes, which go inside the notice if they are few.
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
            // SAFETY: the device posted the slot with these bytes and does not touch it before its release.
            let own =
                unsafe { std::slice::from_raw_parts(self.fifo.slot(position, bytes).cast_const(), bytes) };
            notice[STEP_BYTES..STEP_BYTES + bytes].copy_from_slice(own);
            (STEP_BYTES + bytes, 0)
        } else {
            (STEP_BYTES, bytes)
        };
        self.common.end.post(&notice[..length], data)
    }

    /// Ends the steps that the peer has acknowledged.
    fn release(&mut self, op: &ProxyOp) {
        while self.released < self.common.end.acked() {
            let bytes = self.sizes.pop_front().unwrap_or(0);
            self.fifo.release(self.released);
            self.transferred += bytes as u64;
            // The last carrier, which need not be the first one nor the active path.
            let posted = self.common.end.posted_over(self.released);
            self.record_carried(op, (posted, self.next_step()), State::STOP, bytes);
            events::step(op, self.next_step(), State::STOP, bytes);
            self.released += 1;
        }
    }

    fn waits(&self) -> Waits {
        Waits {
            events: self.common.events(),
            device: matches!(self.phase, Phase::Idle | Phase::Gpu),
        }
    }
}

impl Connection for Sender {
    fn progress(&mut self, op: &ProxyOp) -> Result<Progress, ConnectionError> {
        self.common.begin(op);
        let result = self.advance(op);
        self.record_reports(op.peer, Some(op));
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
        self.record_reports(self.peer, None);
        self.common.send_messages();
        (works && self.common.has_peer()).then(|| self.waits())
    }

    /// It waits for acknowledgements, or for a path.
    fn stall(&mut self) -> Option<(u64, Stall)> {
        let waits = self.released < self.common.end.posted();
        self.common.stall(waits, self.released)
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
}

#[cfg(test)]
mod tests {
    use ringsight_verbs::endpoint::WorkRequest;

    use super::*;

    #[test]
    fn bytes_of_positions_are_summed() {
        let sizes = VecDeque::from([100, 200, 300, 7]);
        assert_eq!(bytes_of(&sizes, 40, 40..44), 607);
        assert_eq!(bytes_of(&sizes, 40, 41..43), 500);
        assert_eq!(bytes_of(&sizes, 40, 43..43), 0);
        assert_eq!(
            bytes_of(&sizes, 40, 39..41),
            100,
            "sizes of released positions are gone"
        );
    }

    #[test]
    fn records_number_requests_as_the_end_does() {
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
