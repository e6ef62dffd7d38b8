//! What sender and receiver over RDMA share: the end of the connection, its reports, and the messages beside RDMA over the stream.

use std::{io::IoSlice, ops::Range, os::fd::RawFd, time::Duration};

use ringsight_verbs::endpoint::{End, MESSAGE_BYTES, Role};

use super::path_reports::PathReports;
use crate::{
    observe,
    op::ProxyOp,
    transport::{connection::Moved, error::ConnectionError, stall::Stall, stream::Stream},
};

/// A connection that waits for the network for less than this is not stalled: packets are lost and retransmitted, and processors are busy.
const STALL_AFTER: Duration = Duration::from_millis(250);

/// One end of a connection over RDMA.
pub(super) struct VerbsEnd<R: Role> {
    pub(super) end: End<R>,
    pub(super) reports: PathReports,
    pub(super) stream: Stream,
    messages: MessageStream,
    /// An operation is under way.
    is_busy: bool,
    /// The progress counter when the end began to wait for the network, and when that was (`CLOCK_MONOTONIC`, nanoseconds).
    waiting_since: Option<(u64, u64)>,
}

impl<R: Role> VerbsEnd<R> {
    pub(super) fn new(end: End<R>, reports: PathReports, stream: Stream) -> Self {
        Self {
            end,
            reports,
            stream,
            messages: MessageStream::new(),
            is_busy: false,
            waiting_since: None,
        }
    }

    /// Begins a call of `progress` for `op`.
    pub(super) fn begin(&mut self, op: &ProxyOp) {
        self.set_busy(true);
        self.reports.set_op(op, self.end.paths());
        // Before completions and arrivals are polled: everything that a peer did before it closed the stream is there then.
        self.receive_messages();
    }

    /// The operation has ended.
    pub(super) fn finish_op(&mut self) {
        self.set_busy(false);
        self.reports.finish_op();
    }

    fn set_busy(&mut self, busy: bool) {
        if std::mem::replace(&mut self.is_busy, busy) != busy {
            self.end.set_busy(busy);
        }
    }

    /// Reads the peer's messages. The next poll of the end processes them.
    pub(super) fn receive_messages(&mut self) {
        let Self {
            messages,
            end,
            stream,
            ..
        } = self;
        messages.read(stream, |message| end.receive_message(message));
    }

    /// Writes messages to the peer, and updates the connection's entry in the shared pages.
    pub(super) fn send_messages(&mut self) {
        let Self {
            messages,
            end,
            reports,
            stream,
            ..
        } = self;
        messages.write(stream, || end.take_outgoing());
        reports.publish(end);
    }

    /// Logs and records the end's reports. `bytes` returns how many bytes the given positions had.
    pub(super) fn record_reports(&mut self, peer: u32, bytes: impl Fn(Range<u64>) -> u64) {
        let Self { end, reports, .. } = self;
        while let Some(report) = end.take_report() {
            reports.record_report(&report, end.paths(), peer, &bytes);
        }
    }

    /// Sends a last message before the stream is closed, as far as the stream accepts it. A peer that has read nothing for so long detects
    /// the end by itself.
    pub(super) fn send_last(&mut self, message: [u8; MESSAGE_BYTES]) {
        let Self { messages, stream, .. } = self;
        (stream.readable, stream.writable) = (true, true);
        // Closing a stream with unread bytes resets it, and the message might be lost.
        messages.read(stream, |_| ());
        let mut message = Some(message);
        messages.write(stream, || message.take());
    }

    /// Handles the failure of the connection: tells the peer, and records it if no path is left.
    pub(super) fn fail(&mut self, error: &ConnectionError) {
        self.send_messages();
        if matches!(error, ConnectionError::Paths(_)) {
            self.reports.record_failure(self.end.paths());
        }
    }

    /// The result of a call of `progress` that did not complete the operation. A peer that has gone is an error only once nothing of it is
    /// left to process.
    pub(super) fn moved(&self, moved: bool, needs_peer: bool) -> Result<Moved, ConnectionError> {
        match &self.messages.error {
            Some(error) if !moved && needs_peer => Err(error.clone()),
            _ => Ok(Moved::any(moved)),
        }
    }

    /// The stall of this end, if it has waited for the network for [`STALL_AFTER`], and since when. `waits`: a posted request has neither
    /// completed nor failed. `position` grows with every completion.
    pub(super) fn stall(&mut self, waits: bool, position: u64) -> Option<(u64, Stall)> {
        if !waits && !self.end.is_recovering() {
            self.waiting_since = None;
            return None;
        }
        let now = observe::now_ns();
        let since = match self.waiting_since {
            Some((before, since)) if before == position => since,
            _ => now,
        };
        self.waiting_since = Some((position, since));
        let is_stalled = u128::from(now - since) >= STALL_AFTER.as_nanos();
        is_stalled.then(|| (since, self.reports.stall(&self.end)))
    }

    /// Whether the peer has not closed the stream.
    pub(super) fn has_peer(&self) -> bool {
        self.messages.error.is_none()
    }

    /// Events of the stream to wait for.
    pub(super) fn events(&self) -> libc::c_short {
        self.messages.events()
    }

    /// As [`Connection::arm`](crate::transport::connection::Connection::arm).
    pub(super) fn arm(&self) {
        // The poll of the next `progress` finds the same error.
        let _ = self.end.arm();
    }

    /// As [`Connection::descriptors`](crate::transport::connection::Connection::descriptors).
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        self.end.fds()
    }

    /// As [`Connection::max_wait`](crate::transport::connection::Connection::max_wait).
    pub(super) fn max_wait(&self) -> Option<Duration> {
        self.end.wait()
    }
}

/// Messages of the failover protocol over the stream, all of one length. The ends exchange them when a path fails or is repaired; working
/// paths carry copies.
struct MessageStream {
    /// The message that is being read, and how many bytes of it have arrived.
    incoming: [u8; MESSAGE_BYTES],
    arrived: usize,
    /// The message that is being written, and how many bytes of it are out.
    outgoing: Option<([u8; MESSAGE_BYTES], usize)>,
    /// Why nothing more comes: the peer's process or communicator is gone, or the stream is broken.
    error: Option<ConnectionError>,
}

impl MessageStream {
    fn new() -> Self {
        Self {
            incoming: [0; MESSAGE_BYTES],
            arrived: 0,
            outgoing: None,
            error: None,
        }
    }

    /// Reads what has arrived, and passes each message to `receive`.
    fn read(&mut self, stream: &mut Stream, mut receive: impl FnMut(&[u8])) {
        while self.error.is_none() {
            match stream.read(&mut self.incoming[self.arrived..]) {
                Ok(0) => return,
                Ok(read) => self.arrived += read,
                Err(error) => self.error = Some(error),
            }
            if self.arrived == MESSAGE_BYTES {
                self.arrived = 0;
                receive(&self.incoming);
            }
        }
    }

    /// Writes the messages of `next`, as far as the stream accepts them.
    fn write(&mut self, stream: &mut Stream, mut next: impl FnMut() -> Option<[u8; MESSAGE_BYTES]>) {
        loop {
            let Some((message, written)) = self.outgoing.or_else(|| Some((next()?, 0))) else {
                return;
            };
            // Reading finds a broken stream.
            let now = stream
                .write(&[IoSlice::new(&message[written..])])
                .unwrap_or(MESSAGE_BYTES);
            self.outgoing = (written + now < MESSAGE_BYTES).then_some((message, written + now));
            if now == 0 {
                return;
            }
        }
    }

    fn events(&self) -> libc::c_short {
        let read = if self.error.is_none() { libc::POLLIN } else { 0 };
        read | if self.outgoing.is_some() { libc::POLLOUT } else { 0 }
    }
}
