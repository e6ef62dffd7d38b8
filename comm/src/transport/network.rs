//! Making the connection of two proxies, of the kind that they have agreed on.

use std::{net::TcpStream, sync::Arc};

use ringsight_comm_base::{fork::ParentOnly, sys};
use ringsight_kernels::Fifo;

use super::{
    connection::Connection,
    socket,
    stream::Stream,
    verbs::{self, ConnectedEnd},
};
use crate::op::Endpoint;

/// The outcome of a handshake between two proxies: their stream, and an end over RDMA if they use that.
pub(crate) struct Link {
    pub(crate) tcp: ParentOnly<TcpStream>,
    pub(crate) rdma: Option<ConnectedEnd>,
}

impl Link {
    /// The connection of `endpoint` over this link. It fills or drains `fifo`.
    pub(crate) fn into_connection(self, fifo: Arc<Fifo>, endpoint: &Endpoint) -> Box<dyn Connection> {
        let Self { tcp, rdma } = self;
        let Endpoint {
            peer,
            channel,
            is_send,
            ..
        } = *endpoint;
        // A connection that survives its paths detects by itself whether its peer answers. Any other needs the system to detect that a
        // machine has vanished. A receiver whose sender has not confirmed RDMA has only the stream yet. If the option cannot be set, the
        // loss of a machine shows once this end sends.
        let survives = rdma.as_ref().is_some_and(ConnectedEnd::survives);
        let _ = match survives && is_send {
            true => sys::bear_silence(&tcp),
            false => sys::keep_alive(&tcp),
        };
        let stream = Stream::new(tcp);
        match (rdma, is_send) {
            (None, true) => Box::new(socket::Sender::new(fifo, stream)),
            (None, false) => Box::new(socket::Receiver::new(fifo, stream)),
            (Some(connected), true) => Box::new(verbs::Sender::new(fifo, connected, stream, peer)),
            (Some(connected), false) => {
                let names = (peer, channel);
                Box::new(verbs::UnconfirmedReceiver::new(fifo, connected, stream, names))
            }
        }
    }
}
