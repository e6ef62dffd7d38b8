//! The interface between a network connection and the thread that drives it.
//!
//! The progress thread of a proxy ([`crate::proxy`]) owns every [`Connection`] and calls it from that thread alone. No call blocks: a
//! connection moves what can be moved now, and says what it waits for. Connections in shared memory and between GPUs need no proxy, so
//! they have no implementation: their kernels move the data.

use std::{os::fd::RawFd, time::Duration};

use super::{error::ConnectionError, stall::Stall, stream::Stream};
use crate::op::ProxyOp;

/// One end of a connection between two nodes: the sender or the receiver, over sockets or RDMA.
pub(crate) trait Connection: Send {
    /// Moves `op` on as far as it goes now.
    ///
    /// # Errors
    /// The connection has failed. It can move nothing more.
    fn progress(&mut self, op: &ProxyOp) -> Result<Progress, ConnectionError>;

    /// The step of the operation that is under way, for messages.
    fn step(&self) -> u32;

    /// The stream to the peer's proxy. The driver polls it for [`Waits::events`].
    fn stream(&self) -> &Stream;

    /// The stream to the peer's proxy, whose readiness the driver sets.
    fn stream_mut(&mut self) -> &mut Stream;

    /// Whether the peer may need this end while it has no operation ([`Connection::serve_idle`]).
    fn serves_idle(&self) -> bool {
        false
    }

    /// Serves the peer while this end has no operation: a peer over RDMA may need help to change or repair a path. `None`: the peer needs
    /// nothing, now and later.
    fn serve_idle(&mut self) -> Option<Waits> {
        None
    }

    /// The connection's stall, and since when it lasts (`CLOCK_MONOTONIC`, nanoseconds). Call it after a [`Connection::progress`] that
    /// moved nothing. `None` if the connection does not wait for the network, or cannot tell.
    fn stall(&mut self) -> Option<(u64, Stall)> {
        None
    }

    /// Has [`Connection::descriptors`] become readable at the next event. Call [`Connection::progress`] once more before waiting. An error
    /// is reported by that call.
    fn arm(&self) {}

    /// Descriptors to wait for besides the stream, once armed.
    fn descriptors(&self) -> Vec<RawFd> {
        Vec::new()
    }

    /// How long to wait at most; `None`: until an event.
    fn max_wait(&self) -> Option<Duration> {
        None
    }

    /// Sends the last message to the peer, before the stream is closed in good order.
    fn close(&mut self) {}
}

/// The result of [`Connection::progress`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) moved: Moved,
    pub(crate) waits: Waits,
}

/// How much a call has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// Nothing: nothing can move before the stream or the device does something.
    Nothing,
    /// Something.
    Something,
    /// The rest of the operation, which has moved so many bytes in all.
    Completed(u64),
}

impl Moved {
    /// [`Moved::Something`] if so, else [`Moved::Nothing`].
    pub(super) fn any(any: bool) -> Self {
        if any { Self::Something } else { Self::Nothing }
    }
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waits {
    /// Events of the stream, as for `poll`.
    pub(crate) events: libc::c_short,
    /// The device, through the FIFO: no descriptor reports what a kernel writes.
    pub(crate) device: bool,
}
