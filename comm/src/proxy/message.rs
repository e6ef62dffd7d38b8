//! Requests to a proxy's service, and its responses; one message each.

use std::{io, net::SocketAddr};

use ringsight_comm_base::sys;

pub use crate::op::{Endpoint, Transport};

use crate::bootstrap::{
    id::{decode_address, encode_address},
    wire::{printable, word},
};

/// First four bytes of every message: "RSPX".
const MAGIC: u32 = u32::from_le_bytes(*b"RSPX");
const VERSION: u16 = 4;
/// Magic u32 | version u16 | kind u16 | request id u64.
const HEADER: usize = 16;
/// Longest text of a refusal, bytes.
const MAX_TEXT: usize = 512;

/// What a proxy can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Makes a connection, or finds the one that is there. The first request of every client; the others are refused
    /// until it has presented the ranks' secret.
    Init {
        /// The ranks' secret.
        cookie: u64,
        /// The rank that asks: the proxy's own, or the endpoint's peer.
        rank: u32,
        /// The connection.
        endpoint: Endpoint,
    },
    /// Agrees on what the connections of a transport share: the slot size, and the progress thread for the network.
    SharedInit {
        /// From [`Reply::Init`].
        connection: u32,
        /// Bytes of a slot.
        slot_bytes: u32,
    },
    /// Allocates the connection's FIFO.
    Setup {
        /// From [`Reply::Init`].
        connection: u32,
    },
    /// Makes the connection ready. For a sender on the network: connects to the peer's proxy; answered once that
    /// proxy has agreed.
    Connect {
        /// From [`Reply::Init`].
        connection: u32,
        /// Where the peer's proxy listens; for a sender on the network.
        address: Option<SocketAddr>,
    },
    /// Asks for the descriptor behind a handle.
    GetFd {
        /// From [`Reply::Setup`].
        handle: u64,
    },
    /// Answered when every operation posted so far has finished or was given up. Own process only.
    Stop,
    /// Frees a connection. Own process only.
    Destroy {
        /// From [`Reply::Init`].
        connection: u32,
    },
}

/// What a request that was granted is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To [`Request::Init`].
    Init {
        /// Names the connection in later requests to this proxy.
        connection: u32,
    },
    /// To [`Request::SharedInit`].
    SharedInit,
    /// To [`Request::Setup`]: what the peer may know of the connection, and nothing else of it.
    Setup {
        /// Names the FIFO's descriptor for [`Request::GetFd`].
        handle: u64,
        /// Bytes of a slot.
        slot_bytes: u32,
    },
    /// To [`Request::Connect`].
    Connect {
        /// The port that RDMA goes over, by its number among those of the process; `None`: no RDMA.
        rdma: Option<u8>,
    },
    /// To [`Request::GetFd`]; the descriptor comes with the message.
    GetFd,
    /// To [`Request::Stop`].
    Stop,
    /// To [`Request::Destroy`].
    Destroy,
}

/// Why a request was not granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The reason.
    pub text: String,
    /// The proxy's process, or its system, has no descriptor or memory left.
    pub is_starved: bool,
}

impl From<String> for Refusal {
    fn from(text: String) -> Self {
        Self {
            text,
            is_starved: false,
        }
    }
}

/// Stands for the number of a request in a refusal of all requests of a connection. Requests have numbers from 1.
pub const EVERY_REQUEST: u64 = 0;

impl Refusal {
    /// A refusal because a call of the system failed.
    pub(super) fn system(what: &str, error: &io::Error) -> Self {
        Self {
            text: format!("{what}: {error}"),
            is_starved: sys::is_starved(error),
        }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u16, id: u64) -> Self {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(kind.to_le_bytes());
        bytes.extend(id.to_le_bytes());
        Self(bytes)
    }

    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
}

/// Splits a message into (kind, id, body).
fn open(bytes: &[u8]) -> Option<(u16, u64, &[u8])> {
    let (header, body) = bytes.split_at_checked(HEADER)?;
    if word(header, 0)? != MAGIC || header[4..6] != VERSION.to_le_bytes() {
        return None;
    }
    Some((u16::from_le_bytes([header[6], header[7]]), long(header, 8)?, body))
}

fn long(bytes: &[u8], offset: usize) -> Option<u64> {
    bytes
        .get(offset..offset + 8)?
        .try_into()
        .ok()
        .map(u64::from_le_bytes)
}

impl Request {
    /// What it is called in the log.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Init { .. } => "Init",
            Self::SharedInit { .. } => "SharedInit",
            Self::Setup { .. } => "Setup",
            Self::Connect { .. } => "Connect",
            Self::GetFd { .. } => "GetFd",
            Self::Stop => "Stop",
            Self::Destroy { .. } => "Destroy",
        }
    }

    /// The message that asks this under `id`.
    #[must_use]
    pub fn encode(&self, id: u64) -> Vec<u8> {
        let writer = |kind| Writer::new(kind, id);
        match *self {
            Self::Init {
                cookie,
                rank,
                endpoint,
            } => {
                let Endpoint {
                    comm,
                    peer,
                    channel,
                    p2p,
                    is_send,
                    transport,
                } = endpoint;
                let small = [channel, p2p.into(), is_send.into(), transport as u8];
                writer(1)
                    .u64(cookie)
                    .u32(rank)
                    .u32(peer)
                    .u32(u32::from_le_bytes(small))
                    .u64(comm)
            }
            Self::SharedInit {
                connection,
                slot_bytes,
            } => writer(2).u32(connection).u32(slot_bytes),
            Self::Setup { connection } => writer(3).u32(connection),
            Self::Connect { connection, address } => {
                let mut writer = writer(4).u32(connection);
                if let Some(address) = address {
                    writer.0.extend(encode_address(&address));
                }
                writer
            }
            Self::GetFd { handle } => writer(5).u64(handle),
            Self::Stop => writer(6),
            Self::Destroy { connection } => writer(7).u32(connection),
        }
        .0
    }

    /// Reads a message: (id, request). `None` for anything that [`Request::encode`] does not write.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<(u64, Self)> {
        let (kind, id, body) = open(bytes)?;
        let request = match (kind, body.len()) {
            (1, 28) => {
                let flag = |byte: u8| (byte <= 1).then_some(byte == 1);
                let transport = match body[19] {
                    1 => Transport::Shm,
                    2 => Transport::NetSocket,
                    _ => return None,
                };
                let (peer, channel) = (word(body, 12)?, body[16]);
                let endpoint = Endpoint {
                    comm: long(body, 20)?,
                    peer,
                    channel,
                    p2p: flag(body[17])?,
                    is_send: flag(body[18])?,
                    transport,
                };
                Self::Init {
                    cookie: long(body, 0)?,
                    rank: word(body, 8)?,
                    endpoint,
                }
            }
            (2, 8) => Self::SharedInit {
                connection: word(body, 0)?,
                slot_bytes: word(body, 4)?,
            },
            (3, 4) => Self::Setup {
                connection: word(body, 0)?,
            },
            (4, 4) => Self::Connect {
                connection: word(body, 0)?,
                address: None,
            },
            (4, 28) => {
                let address = decode_address(body[4..].try_into().ok()?)?;
                Self::Connect {
                    connection: word(body, 0)?,
                    address: Some(address),
                }
            }
            (5, 8) => Self::GetFd {
                handle: long(body, 0)?,
            },
            (6, 0) => Self::Stop,
            (7, 4) => Self::Destroy {
                connection: word(body, 0)?,
            },
            _ => return None,
        };
        Some((id, request))
    }
}

/// Kinds of responses: that of the request with this bit, or one of the refusals.
const RESPONSE: u16 = 0x8000;
const REFUSED: u16 = 0xffff;
const STARVED: u16 = 0xfffe;

/// The message that answers request `id`; a refusal's text is cut at 512 bytes.
#[must_use]
pub fn encode_response(id: u64, response: &Result<Reply, Refusal>) -> Vec<u8> {
    let writer = |kind| Writer::new(RESPONSE | kind, id);
    match response {
        Ok(Reply::Init { connection }) => writer(1).u32(*connection),
        Ok(Reply::SharedInit) => writer(2),
        Ok(Reply::Setup { handle, slot_bytes }) => writer(3).u64(*handle).u32(*slot_bytes),
        Ok(Reply::Connect { rdma }) => writer(4).u32(rdma.map_or(0, |port| u32::from(port) + 1)),
        Ok(Reply::GetFd) => writer(5),
        Ok(Reply::Stop) => writer(6),
        Ok(Reply::Destroy) => writer(7),
        Err(Refusal { text, is_starved }) => {
            // Both have the bit.
            let mut writer = writer(if *is_starved { STARVED } else { REFUSED });
            writer
                .0
                .extend(&text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]);
            writer
        }
    }
    .0
}

/// The refusal in place of a response, which is one of [`encode_response`].
pub(super) fn refuse(response: &[u8], refusal: Refusal) -> Vec<u8> {
    let id = open(response).map_or(0, |(_, id, _)| id);
    encode_response(id, &Err(refusal))
}

/// Reads a response: (id, outcome). `None` for anything that [`encode_response`] does not write.
#[must_use]
pub fn parse_response(bytes: &[u8]) -> Option<(u64, Result<Reply, Refusal>)> {
    let (kind, id, body) = open(bytes)?;
    let reply = match (kind, body.len()) {
        (REFUSED | STARVED, _) => {
            let refusal = Refusal {
                text: printable(body),
                is_starved: kind == STARVED,
            };
            return Some((id, Err(refusal)));
        }
        (0x8001, 4) => Reply::Init {
            connection: word(body, 0)?,
        },
        (0x8002, 0) => Reply::SharedInit,
        (0x8003, 12) => Reply::Setup {
            handle: long(body, 0)?,
            slot_bytes: word(body, 8)?,
        },
        (0x8004, 4) => Reply::Connect {
            rdma: match word(body, 0)? {
                0 => None,
                port => Some(u8::try_from(port - 1).ok()?),
            },
        },
        (0x8005, 0) => Reply::GetFd,
        (0x8006, 0) => Reply::Stop,
        (0x8007, 0) => Reply::Destroy,
        _ => return None,
    };
    Some((id, Ok(reply)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn requests() -> impl Strategy<Value = Request> {
        let endpoint = (
            any::<u64>(),
            any::<u32>(),
            any::<u8>(),
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
        )
            .prop_map(|(comm, peer, channel, p2p, is_send, net)| {
                let transport = if net { Transport::NetSocket } else { Transport::Shm };
                Endpoint {
                    comm,
                    peer,
                    channel,
                    p2p,
                    is_send,
                    transport,
                }
            });
        let address = proptest::option::of((any::<[u8; 4]>(), 1u16..).prop_map(SocketAddr::from));
        prop_oneof![
            (any::<u64>(), any::<u32>(), endpoint).prop_map(|(cookie, rank, endpoint)| Request::Init {
                cookie,
                rank,
                endpoint
            }),
            any::<(u32, u32)>().prop_map(|(connection, slot_bytes)| Request::SharedInit {
                connection,
                slot_bytes
            }),
            any::<u32>().prop_map(|connection| Request::Setup { connection }),
            (any::<u32>(), address)
                .prop_map(|(connection, address)| Request::Connect { connection, address }),
            any::<u64>().prop_map(|handle| Request::GetFd { handle }),
            Just(Request::Stop),
            any::<u32>().prop_map(|connection| Request::Destroy { connection }),
        ]
    }

    proptest! {
        #[test]
        fn requests_survive_and_cut_ones_are_refused(request in requests(), id: u64, cut: prop::sample::Index) {
            let bytes = request.encode(id);
            prop_assert_eq!(Request::parse(&bytes), Some((id, request)));
            let cut = Request::parse(&bytes[..cut.index(bytes.len())]);
            // The one message that is the beginning of another.
            let connect = matches!((request, cut), (Request::Connect { .. }, Some((_, Request::Connect { address: None, .. }))));
            prop_assert!(cut.is_none() || connect);
        }

        #[test]
        fn responses_survive(id: u64, handle: u64, small: u32, text in "\\PC{0,200}", is_starved: bool) {
            for response in [
                Ok(Reply::Init { connection: small }),
                Ok(Reply::SharedInit),
                Ok(Reply::Setup { handle, slot_bytes: small }),
                Ok(Reply::Connect { rdma: None }),
                Ok(Reply::Connect { rdma: Some(small as u8) }),
                Ok(Reply::GetFd),
                Ok(Reply::Stop),
                Ok(Reply::Destroy),
            ] {
                prop_assert_eq!(parse_response(&encode_response(id, &response)), Some((id, response)));
            }
            let refusal = Refusal { text: text.clone(), is_starved };
            let (_, refused) = parse_response(&encode_response(id, &Err(refusal))).unwrap();
            let refused = refused.unwrap_err();
            prop_assert!(text.starts_with(&refused.text));
            prop_assert_eq!(refused.is_starved, is_starved);
        }

        #[test]
        fn no_parser_panics(kind: u16, body in proptest::collection::vec(any::<u8>(), 0..64), raw in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut bytes = Writer::new(kind, 1).0;
            bytes.extend(body);
            let _ = (Request::parse(&bytes), parse_response(&bytes), Request::parse(&raw), parse_response(&raw));
        }
    }
}
