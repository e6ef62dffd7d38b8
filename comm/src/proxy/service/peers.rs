//! TCP streams of the service: those that it makes to other proxies, and those that other proxies make.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
};

use ringsight_comm_base::{fork::ParentOnly, log};

use super::{
    Service, Stage,
    rdma::{ONLY_RDMA, answer_missing},
};
use crate::{
    bootstrap::wire::printable,
    op::{ConnectionId, Endpoint, Transport},
    proxy::{
        ProxyConfig,
        message::{Refusal, Reply},
        progress::Command,
    },
    transport::{
        network::Link,
        verbs::{ConnectedEnd, PreparedEnd},
        wire::{HELLO_BYTES, HELLO_REPLY_BYTES, Hello, HelloReply},
    },
};

/// A stream to another proxy that is being made.
pub(super) struct Outgoing {
    pub(super) connection: u32,
    /// The client and the request.
    pub(super) asked: (u64, u64),
    pub(super) address: SocketAddr,
    pub(super) stream: ParentOnly<TcpStream>,
    /// The hello is sent.
    pub(super) greeted: bool,
    /// The peer's answer so far.
    pub(super) answer: Vec<u8>,
    /// This end over RDMA, if that is offered.
    pub(super) prepared: Option<PreparedEnd>,
}

/// Streams whose hello came before the ports were known.
pub(super) struct Early {
    most: usize,
    kept: Vec<(ParentOnly<TcpStream>, Vec<u8>)>,
}

impl Early {
    /// None yet, and never more than `most`.
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            kept: Vec::new(),
        }
    }

    /// Keeps a stream with its hello. Beyond the limit the peer is told that there is no room: a rank that has so many is broken.
    fn keep(&mut self, stream: ParentOnly<TcpStream>, hello: Vec<u8>) {
        if self.kept.len() < self.most {
            self.kept.push((stream, hello));
        } else {
            // A new stream accepts so few bytes at once. A peer that is gone needs none.
            let _ = (&*stream).write_all(&HelloReply::Starved.encode());
        }
    }

    /// Hands them out.
    pub(super) fn take(&mut self) -> Vec<(ParentOnly<TcpStream>, Vec<u8>)> {
        std::mem::take(&mut self.kept)
    }
}

/// The peer's answer.
enum Answer {
    /// It has not arrived whole.
    Pending,
    /// The connection is made, over RDMA if there is an end.
    Made(Option<ConnectedEnd>),
}

impl Service {
    /// Advances the streams that are being made.
    pub(super) fn advance_outgoing(&mut self, ready: &[bool]) {
        let mut ready = ready.iter();
        for mut outgoing in std::mem::take(&mut self.outgoing) {
            // A stream that was added since the poll is at the end, and not ready.
            let outcome = if *ready.next().unwrap_or(&false) {
                self.advance(&mut outgoing)
            } else {
                Ok(Answer::Pending)
            };
            let Outgoing {
                connection: id,
                asked,
                address,
                stream,
                ..
            } = outgoing;
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            let response = match outcome {
                Ok(Answer::Pending) => {
                    self.outgoing.push(Outgoing { stream, ..outgoing });
                    continue;
                }
                Ok(Answer::Made(rdma)) => {
                    connection.stage = Stage::Connected;
                    if let Some(slots) = rdma.as_ref().and_then(|connected| connected.direct.as_ref())
                        && let Some(fifo) = &connection.fifo
                    {
                        // Before the rank gets the reply and launches a kernel that fills the slots.
                        fifo.set_slots_address(slots.address());
                    }
                    connection.rdma = rdma.as_ref().map(|connected| connected.port);
                    let reply = Reply::Connect {
                        rdma: connection.rdma,
                    };
                    let link = Box::new(Link { tcp: stream, rdma });
                    self.progress.send(Command::Attach(ConnectionId(id), link));
                    Ok(reply)
                }
                Err(text) => {
                    connection.stage = Stage::SetUp;
                    let peer = connection.endpoint.peer;
                    Err(format!("the proxy of rank {peer} at {address}: {text}").into())
                }
            };
            self.log("Connect", Some(&response));
            self.respond(asked, &response, None);
        }
    }

    /// Sends the hello once connected, then reads the answer.
    fn advance(&self, outgoing: &mut Outgoing) -> Result<Answer, String> {
        let Some(connection) = self.connections.get(&outgoing.connection) else {
            return Ok(Answer::Pending);
        };
        let Endpoint {
            comm,
            peer,
            channel,
            p2p,
            ..
        } = connection.endpoint;
        let gone = |error: io::Error| format!("{error}: its process is gone or cannot be reached");
        if !outgoing.greeted {
            if let Some(error) = outgoing.stream.take_error().map_err(gone)? {
                return Err(gone(error));
            }
            let ProxyConfig {
                cookie,
                rank,
                slot_bytes,
                ..
            } = self.config;
            let hello = Hello {
                cookie,
                comm,
                from: rank,
                to: peer,
                channel,
                p2p,
                rdma: outgoing.prepared.is_some(),
                slot_bytes: slot_bytes as u32,
            };
            let mut bytes = hello.encode().to_vec();
            if let Some(prepared) = &outgoing.prepared {
                bytes.extend(prepared.offer.encode());
            }
            // A new stream accepts so few bytes at once.
            (&*outgoing.stream).write_all(&bytes).map_err(gone)?;
            outgoing.greeted = true;
            return Ok(Answer::Pending);
        }
        loop {
            let wanted = answer_missing(&outgoing.answer)?;
            if wanted == 0 {
                break;
            }
            let mut piece = [0; 64];
            match (&*outgoing.stream).read(&mut piece[..wanted.min(64)]) {
                Ok(0) => {
                    return Err(
                        "it closed the connection: not the proxy of this communicator, or gone".into(),
                    );
                }
                Ok(read) => outgoing.answer.extend_from_slice(&piece[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Answer::Pending),
                Err(error) => return Err(gone(error)),
            }
        }
        let (reply, rest) = outgoing
            .answer
            .split_first_chunk::<HELLO_REPLY_BYTES>()
            .and_then(|(reply, rest)| Some((HelloReply::parse(reply)?, rest)))
            .ok_or("it answers rubbish")?;
        match reply {
            HelloReply::Welcome if self.is_rdma_required() => Err(format!("it has no RDMA, and {ONLY_RDMA}")),
            HelloReply::Welcome => Ok(Answer::Made(None)),
            HelloReply::Rdma => {
                let prepared = outgoing
                    .prepared
                    .take()
                    .ok_or("it answers what was not offered")?;
                self.confirm((peer, channel), &outgoing.stream, prepared, rest)
                    .map(Answer::Made)
            }
            HelloReply::Sockets(_) => {
                self.fall_back(peer, channel, &printable(rest))?;
                Ok(Answer::Made(None))
            }
            HelloReply::OtherSlots(bytes) => Err(format!(
                "its slots have {bytes} bytes, ours {}: NCCL_BUFFSIZE differs between ranks",
                self.config.slot_bytes
            )),
            HelloReply::Taken => Err(format!("channel {channel} from this rank is connected already")),
            HelloReply::Starved => Err(
                "it has no descriptor or memory left for its end of the connection: too many open files?"
                    .into(),
            ),
            HelloReply::Impossible => Err("it cannot make its end of the connection".into()),
        }
    }

    /// Answers the hello of a sender's proxy: makes this end, whether this rank has asked for it or not.
    pub(super) fn welcome(&mut self, stream: ParentOnly<TcpStream>, bytes: Vec<u8>) {
        let Some((hello, offer)) = bytes
            .split_at_checked(HELLO_BYTES)
            .and_then(|(hello, offer)| Some((Hello::parse(hello, self.config.cookie)?, offer)))
        else {
            return;
        };
        if !self.knows_ports() {
            self.early.keep(stream, bytes);
            return;
        }
        let accepted = self.receiver_for(&hello).and_then(|id| {
            let (answer, rdma) = self.answer_offer(id, &hello, offer)?;
            Ok((id, answer, rdma))
        });
        let (answer, made) = match accepted {
            Ok((id, answer, rdma)) => (answer, Some((id, rdma))),
            Err(reply) => (reply.encode().to_vec(), None),
        };
        // A new stream accepts so few bytes at once.
        if (&*stream).write_all(&answer).is_err() {
            return;
        }
        if let Some((id, rdma)) = made
            && let Some(connection) = self.connections.get_mut(&id)
        {
            connection.attached = true;
            let link = Box::new(Link { tcp: stream, rdma });
            self.progress.send(Command::Attach(ConnectionId(id), link));
        }
    }

    fn receiver_for(&mut self, hello: &Hello) -> Result<u32, HelloReply> {
        let (own, slot_bytes) = (self.config.rank, self.config.slot_bytes as u32);
        if hello.to != own {
            return Err(HelloReply::Impossible);
        }
        if hello.slot_bytes != slot_bytes {
            return Err(HelloReply::OtherSlots(slot_bytes));
        }
        let transport = Transport::NetSocket;
        let endpoint = Endpoint {
            comm: hello.comm,
            peer: hello.from,
            channel: hello.channel,
            p2p: hello.p2p,
            is_send: false,
            transport,
        };
        let refused = |Refusal { text, is_starved }: Refusal| {
            tracing::info!(target: log::PROXY, "Proxy of rank {own} : a connection of rank {} is refused: {text}", hello.from);
            match is_starved {
                true => HelloReply::Starved,
                false => HelloReply::Impossible,
            }
        };
        let id = self.init(own, endpoint).map_err(refused)?;
        if self.connections[&id].attached {
            return Err(HelloReply::Taken);
        }
        let made = self.shared_init(id, slot_bytes).and_then(|()| self.set_up(id));
        made.map(|_| id).map_err(refused)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn streams_that_come_too_early_are_kept_up_to_a_limit() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut early = Early::new(2);
        let mut peers = Vec::new();
        for number in 0..3 {
            peers.push(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            let (stream, _) = listener.accept().unwrap();
            early.keep(ParentOnly::new(stream), vec![number]);
        }
        // The third one is told, and closed.
        let mut answer = Vec::new();
        peers[2].read_to_end(&mut answer).unwrap();
        assert_eq!(answer, HelloReply::Starved.encode());
        let kept: Vec<_> = early.take().into_iter().map(|(_, hello)| hello).collect();
        assert_eq!(kept, [[0], [1]]);
        assert!(early.take().is_empty());
    }
}
