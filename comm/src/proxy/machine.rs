//! The end of a network connection, over whichever transport it goes.

use std::{os::fd::RawFd, sync::Arc, time::Duration};

use ringsight_kernels::Fifo;

use super::{ProxyOp, message::Endpoint, stalls::Stall};
use crate::{
    bootstrap::{fork::ParentOnly, sys},
    log,
    transport::{
        socket::{self, Needs, Socket, Turn},
        verbs::{self, Confirmed},
    },
};

/// What came of making a connection: a socket, and RDMA beside it.
pub(super) struct Link {
    pub(super) stream: ParentOnly<std::net::TcpStream>,
    pub(super) rdma: Option<verbs::Connected>,
}

/// An end.
pub(super) enum Machine {
    SocketSender(socket::Sender),
    SocketReceiver(socket::Receiver),
    VerbsSender(Box<verbs::Sender>),
    /// Its sender has not said whether it is connected.
    Unconfirmed(Option<Box<verbs::Unconfirmed>>),
    VerbsReceiver(Box<verbs::Receiver>),
}

impl Machine {
    /// The end of a connection whose bytes go over its socket.
    pub(super) fn over_socket(fifo: Arc<Fifo>, is_send: bool) -> Self {
        if is_send {
            Self::SocketSender(socket::Sender::new(fifo))
        } else {
            Self::SocketReceiver(socket::Receiver::new(fifo))
        }
    }

    /// The end of one that has RDMA beside it.
    pub(super) fn over_verbs(fifo: Arc<Fifo>, is_send: bool, connected: verbs::Connected) -> Self {
        if is_send {
            Self::VerbsSender(Box::new(verbs::Sender::new(fifo, connected)))
        } else {
            Self::Unconfirmed(Some(Box::new(verbs::Unconfirmed::new(fifo, connected))))
        }
    }

    /// Moves `op` on as far as it goes now.
    pub(super) fn turn(&mut self, op: &ProxyOp, socket: &mut Socket) -> Result<Turn, String> {
        self.confirm(socket, op.peer, op.channel)?;
        match self {
            Self::SocketSender(end) => end.turn(op, socket),
            Self::SocketReceiver(end) => end.turn(op, socket),
            Self::VerbsSender(end) => end.turn(op, socket),
            Self::VerbsReceiver(end) => end.turn(op, socket),
            Self::Unconfirmed(_) => Ok(Turn::Waiting),
        }
    }

    /// Takes up what the sender says of an end that is not confirmed, if it has come.
    fn confirm(&mut self, socket: &mut Socket, peer: u32, channel: u8) -> Result<(), String> {
        let Self::Unconfirmed(end) = self else {
            return Ok(());
        };
        let Some(unconfirmed) = end else { return Ok(()) };
        let said = unconfirmed.read(socket)?;
        if matches!(said, Confirmed::NotYet) {
            return Ok(());
        }
        let Some(unconfirmed) = end.take() else {
            return Ok(());
        };
        *self = match said {
            Confirmed::Sockets(why) => {
                tracing::warn!(
                    target: log::NET,
                    "NET/IB : rank {peer} sends over a socket on channel {channel}, not over RDMA: {why}"
                );
                Self::SocketReceiver(socket::Receiver::new(unconfirmed.into_fifo()))
            }
            Confirmed::Rdma | Confirmed::NotYet => {
                if unconfirmed.survives() {
                    // From here on it finds out by itself whether its peer answers.
                    let _ = sys::bear_silence(&socket.stream);
                }
                Self::VerbsReceiver(Box::new(unconfirmed.into_receiver()))
            }
        };
        Ok(())
    }

    pub(super) fn needs(&self) -> Needs {
        match self {
            Self::SocketSender(end) => end.needs(),
            Self::SocketReceiver(end) => end.needs(),
            Self::VerbsSender(end) => end.needs(),
            Self::VerbsReceiver(end) => end.needs(),
            Self::Unconfirmed(_) => Needs {
                events: libc::POLLIN,
                ..Needs::default()
            },
        }
    }

    /// Where it waits for the network in its operation, and since when, if it has for long: to be asked after a turn that moved nothing.
    pub(super) fn stall(&mut self) -> Option<(u64, Stall)> {
        match self {
            Self::VerbsSender(end) => end.stall(),
            Self::VerbsReceiver(end) => end.stall(),
            // Whether TCP gets through nobody here knows.
            Self::SocketSender(_) | Self::SocketReceiver(_) | Self::Unconfirmed(_) => None,
        }
    }

    /// What there is to do without an operation: the peer of a connection over RDMA may need help with its paths. False: nothing, now
    /// and later.
    pub(super) fn tend(&mut self, socket: &mut Socket, endpoint: &Endpoint) -> bool {
        let (peer, channel) = (endpoint.peer, endpoint.channel);
        if self.confirm(socket, peer, channel).is_err() {
            // The first turn of an operation finds it, too, and says so.
            return false;
        }
        match self {
            Self::VerbsSender(end) => end.tend(socket, peer),
            Self::VerbsReceiver(end) => end.tend(socket, peer),
            Self::Unconfirmed(_) => true,
            Self::SocketSender(_) | Self::SocketReceiver(_) => false,
        }
    }

    /// The last that its peer hears, before its socket is closed in good order.
    pub(super) fn leave(&mut self, socket: &mut Socket) {
        match self {
            Self::VerbsReceiver(end) => end.leave(socket),
            // A sender's peer has what it was sent, and a socket's bytes come before its end.
            Self::VerbsSender(_) | Self::SocketSender(_) | Self::SocketReceiver(_) | Self::Unconfirmed(_) => {
            }
        }
    }

    /// Whether it has RDMA, or is to have it: then it is to be tended.
    pub(super) fn is_verbs(&self) -> bool {
        matches!(
            self,
            Self::VerbsSender(_) | Self::VerbsReceiver(_) | Self::Unconfirmed(_)
        )
    }

    /// Has [`Machine::fds`] tell of whatever happens next: to be followed by a turn before waiting for it. An error is what the turn
    /// finds, too.
    pub(super) fn arm(&self) {
        let _ = match self {
            Self::VerbsSender(end) => end.line.arm(),
            Self::VerbsReceiver(end) => end.line.arm(),
            Self::SocketSender(_) | Self::SocketReceiver(_) | Self::Unconfirmed(_) => Ok(()),
        };
    }

    /// Descriptors to wait for besides the socket, once armed.
    pub(super) fn fds(&self) -> Vec<RawFd> {
        match self {
            Self::VerbsSender(end) => end.line.fds(),
            Self::VerbsReceiver(end) => end.line.fds(),
            Self::SocketSender(_) | Self::SocketReceiver(_) | Self::Unconfirmed(_) => Vec::new(),
        }
    }

    /// How long to wait at most; `None`: until something happens.
    pub(super) fn wait(&self) -> Option<Duration> {
        match self {
            Self::VerbsSender(end) => end.line.wait(),
            Self::VerbsReceiver(end) => end.line.wait(),
            Self::SocketSender(_) | Self::SocketReceiver(_) | Self::Unconfirmed(_) => None,
        }
    }

    /// The step that it is at, for messages.
    pub(super) fn step(&self) -> u32 {
        match self {
            Self::SocketSender(end) => end.step(),
            Self::SocketReceiver(end) => end.step(),
            Self::VerbsSender(end) => end.step(),
            Self::VerbsReceiver(end) => end.step(),
            Self::Unconfirmed(_) => 0,
        }
    }
}
