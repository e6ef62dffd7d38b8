//! What both ends have: the end itself, and what goes beside RDMA over the socket.

use std::{ops::Range, os::fd::RawFd, time::Duration};

use ringsight_verbs::endpoint::{End, Failure, MESSAGE_BYTES, Role};

use super::{paths::Paths, talk::Talk};
use crate::{
    observe,
    proxy::{ProxyOp, stalls::Stall},
    transport::socket::{Socket, Turn},
};

/// One end of a connection.
pub(crate) struct Line<R: Role> {
    pub(super) end: End<R>,
    pub(super) paths: Paths,
    talk: Talk,
    /// An operation is under way.
    is_busy: bool,
    /// How far it was when it began to wait for the network, and when that was, `CLOCK_MONOTONIC` nanoseconds.
    waits: Option<(u64, u64)>,
}

/// Why a turn fails.
pub(super) enum Stop {
    /// There is no path left, or what goes over them is out of step.
    Paths(Failure),
    /// Anything else.
    Other(String),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Paths(failure)
    }
}

impl From<String> for Stop {
    fn from(text: String) -> Self {
        Self::Other(text)
    }
}

/// A connection that waits for the network for less does not count as stalled: packets are lost and sent again, and processors busy.
const PATIENCE: Duration = Duration::from_millis(250);

impl<R: Role> Line<R> {
    pub(super) fn new(end: End<R>, paths: Paths) -> Self {
        Self {
            end,
            paths,
            talk: Talk::new(),
            is_busy: false,
            waits: None,
        }
    }

    /// A turn of `op` begins.
    pub(super) fn begin(&mut self, op: &ProxyOp, socket: &mut Socket) {
        self.set_busy(true);
        self.paths.set_op(op, self.end.paths());
        // Before what has ended and arrived is looked at: all that a peer did before it went is there then.
        self.listen(socket);
    }

    /// The operation has ended.
    pub(super) fn rest(&mut self) {
        self.set_busy(false);
        self.paths.rest();
    }

    /// Whether there is an operation.
    fn set_busy(&mut self, busy: bool) {
        if std::mem::replace(&mut self.is_busy, busy) != busy {
            self.end.set_busy(busy);
        }
    }

    /// Takes what the peer says beside RDMA. What follows from it is found by the next poll.
    pub(super) fn listen(&mut self, socket: &mut Socket) {
        let Self { talk, end, .. } = self;
        talk.read(socket, |message| end.receive_message(message));
    }

    /// Says what is to be said beside RDMA, and shows what the connection is in.
    pub(super) fn speak(&mut self, socket: &mut Socket) {
        let Self { talk, end, paths, .. } = self;
        talk.write(socket, || end.take_outgoing());
        paths.show(end);
    }

    /// Tells the log and the records what has happened; `bytes` says how many these positions have that were under way then.
    pub(super) fn note(&mut self, peer: u32, bytes: impl Fn(Range<u64>) -> u64) {
        let Self { end, paths, .. } = self;
        while let Some(noted) = end.take_report() {
            paths.note(&noted, end.paths(), peer, &bytes);
        }
    }

    /// Says something before the socket is closed. It goes as far as the socket takes it: a peer that has read nothing for so long finds its
    /// end by itself.
    pub(super) fn say_last(&mut self, socket: &mut Socket, word: [u8; MESSAGE_BYTES]) {
        (socket.readable, socket.writable) = (true, true);
        // What is unread when a socket is closed has it reset instead, and what is on its way may be lost.
        self.talk.read(socket, |_| ());
        let mut words = Some(word);
        self.talk.write(socket, || words.take());
    }

    /// What a turn ends with that fails: the peer is told first, and a connection that has given up tells so on record.
    pub(super) fn failed(&mut self, stop: Stop, socket: &mut Socket) -> String {
        self.speak(socket);
        match stop {
            Stop::Paths(failure) => {
                self.paths.given_up(self.end.paths());
                failure.text
            }
            Stop::Other(text) => text,
        }
    }

    /// What a turn came to that did not end the operation. A peer that has gone is an error once nothing of it is left to take.
    pub(super) fn turned(&self, moved: bool, needs_peer: bool) -> Result<Turn, Stop> {
        match self.talk.gone() {
            Some(text) if !moved && needs_peer => Err(text.to_owned().into()),
            _ => Ok(if moved { Turn::Moved } else { Turn::Waiting }),
        }
    }

    /// Where it waits for the network, and since when, if it has for long. `waits`: something that was posted has neither ended nor failed;
    /// `at` grows when something does.
    pub(super) fn stall(&mut self, waits: bool, at: u64) -> Option<(u64, Stall)> {
        if !waits && !self.end.is_recovering() {
            self.waits = None;
            return None;
        }
        let now = observe::now_ns();
        let since = match self.waits {
            Some((was_at, since)) if was_at == at => since,
            _ => now,
        };
        self.waits = Some((at, since));
        (u128::from(now - since) >= PATIENCE.as_nanos()).then(|| (since, self.paths.stall(&self.end)))
    }

    /// Whether the peer is there.
    pub(super) fn has_peer(&self) -> bool {
        self.talk.gone().is_none()
    }

    /// Events of the socket that it waits for.
    pub(super) fn events(&self) -> libc::c_short {
        self.talk.events()
    }

    /// Has its descriptors tell of the next end of anything: to be followed by a turn.
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
}
