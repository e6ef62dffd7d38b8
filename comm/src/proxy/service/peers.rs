//! The TCP side of the service: connections to other proxies that are being made, and those that others make to this one.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
};

use super::{Service, Stage};
use crate::{
    bootstrap::fork::ParentOnly,
    proxy::{
        ConnectionId, ProxyConfig,
        message::{Endpoint, Reply, Transport},
        progress::Command,
    },
    transport::socket::{Hello, VERDICT_BYTES, Verdict},
};

/// A connection to another proxy that is being made.
pub(super) struct Outgoing {
    pub(super) connection: u32,
    /// Who asked: client and request.
    pub(super) asked: (u64, u64),
    pub(super) address: SocketAddr,
    pub(super) stream: ParentOnly<TcpStream>,
    /// The hello is on its way.
    pub(super) greeted: bool,
    pub(super) verdict: Vec<u8>,
}

impl Service {
    /// Moves the connections that are being made.
    pub(super) fn advance_outgoing(&mut self, ready: &[bool]) {
        let mut ready = ready.iter();
        for mut outgoing in std::mem::take(&mut self.outgoing) {
            // One that was added since the poll is at the end, and not ready.
            let outcome = if *ready.next().unwrap_or(&false) {
                self.advance(&mut outgoing)
            } else {
                Ok(false)
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
                Ok(false) => {
                    self.outgoing.push(Outgoing { stream, ..outgoing });
                    continue;
                }
                Ok(true) => {
                    connection.stage = Stage::Connected;
                    self.progress.tell(Command::Attach(ConnectionId(id), stream));
                    Ok(Reply::Connect)
                }
                Err(text) => {
                    connection.stage = Stage::SetUp;
                    Err(format!(
                        "the proxy of rank {} at {address}: {text}",
                        connection.endpoint.peer
                    ))
                }
            };
            self.log("Connect", Some(&response));
            self.respond(asked, &response, None);
        }
    }

    /// Greets once connected, then reads the verdict; true when it is good.
    fn advance(&self, outgoing: &mut Outgoing) -> Result<bool, String> {
        let Some(connection) = self.connections.get(&outgoing.connection) else {
            return Ok(false);
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
                slot_bytes: slot_bytes as u32,
            };
            // A new socket takes this little whole.
            (&*outgoing.stream).write_all(&hello.encode()).map_err(gone)?;
            outgoing.greeted = true;
            return Ok(false);
        }
        let mut piece = [0; VERDICT_BYTES];
        let wanted = VERDICT_BYTES - outgoing.verdict.len();
        match (&*outgoing.stream).read(&mut piece[..wanted]) {
            Ok(0) => {
                return Err("it closed the connection: not the proxy of this communicator, or gone".into());
            }
            Ok(read) => outgoing.verdict.extend_from_slice(&piece[..read]),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(gone(error)),
        }
        let Ok(verdict) = <&[u8; VERDICT_BYTES]>::try_from(&outgoing.verdict[..]) else {
            return Ok(false);
        };
        match Verdict::parse(verdict) {
            Some(Verdict::Welcome) => Ok(true),
            Some(Verdict::OtherSlots(bytes)) => Err(format!(
                "its slots have {bytes} bytes, ours {}: NCCL_BUFFSIZE differs between ranks",
                self.config.slot_bytes
            )),
            Some(Verdict::Taken) => Err(format!("channel {channel} from this rank is connected already")),
            Some(Verdict::Impossible) => Err("it cannot make its end of the connection".into()),
            None => Err("it answers rubbish".into()),
        }
    }

    /// Another proxy wants to send to us: makes our end, whether our rank has asked for it yet or not.
    pub(super) fn welcome(&mut self, stream: ParentOnly<TcpStream>, bytes: &[u8]) {
        let Some(hello) = Hello::parse(bytes, self.config.cookie) else {
            return;
        };
        let verdict = self.receiver_for(&hello);
        let answer = verdict
            .as_ref()
            .map_or_else(|verdict| *verdict, |_| Verdict::Welcome);
        // A new socket takes this little whole.
        if (&*stream).write_all(&answer.encode()).is_err() {
            return;
        }
        if let Ok(id) = verdict
            && let Some(connection) = self.connections.get_mut(&id)
        {
            connection.attached = true;
            self.progress.tell(Command::Attach(ConnectionId(id), stream));
        }
    }

    fn receiver_for(&mut self, hello: &Hello) -> Result<u32, Verdict> {
        let (own, slot_bytes) = (self.config.rank, self.config.slot_bytes as u32);
        if hello.to != own {
            return Err(Verdict::Impossible);
        }
        if hello.slot_bytes != slot_bytes {
            return Err(Verdict::OtherSlots(slot_bytes));
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
        let id = self.init(own, endpoint).map_err(|_| Verdict::Impossible)?;
        if self.connections[&id].attached {
            return Err(Verdict::Taken);
        }
        let made = self.shared_init(id, slot_bytes).and_then(|()| self.set_up(id));
        made.map(|_| id).map_err(|_| Verdict::Impossible)
    }
}
