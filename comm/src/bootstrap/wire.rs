//! Messages of the rendezvous and between ranks, and the parsers that refuse everything else.

use std::net::SocketAddr;

use super::id::{VERSION, decode_address, encode_address};

/// First four bytes of every connection: "RSBS".
const MAGIC: u32 = u32::from_le_bytes(*b"RSBS");
const JOIN: u16 = 1;
const PEER: u16 = 2;
/// Magic u32 | version u16 | kind u16 | cookie u64.
const PRELUDE: usize = 16;
const JOIN_BYTES: usize = PRELUDE + 36;
const PEER_BYTES: usize = PRELUDE + 8;

/// Most ranks of a communicator.
pub(super) const MAX_RANKS: u32 = 1 << 16;
/// Longest message between two ranks, bytes.
pub(super) const MAX_MESSAGE: usize = 64 << 20;
/// Longest control message, bytes.
pub(super) const MAX_CONTROL: usize = 1 << 20;
/// Longest text about a rank, bytes.
const MAX_TEXT: usize = 4096;

/// What whoever connects says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hello {
    /// To the root: rank u32 | ranks u32 | time-out in ms u32 | address 24 bytes.
    Join {
        rank: u32,
        ranks: u32,
        timeout_ms: u32,
        address: SocketAddr,
    },
    /// To another rank: from u32 | to u32.
    Peer { from: u32, to: u32 },
}

impl Hello {
    pub(super) fn encode(&self, cookie: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(JOIN_BYTES);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend(VERSION.to_le_bytes());
        match self {
            Self::Join {
                rank,
                ranks,
                timeout_ms,
                address,
            } => {
                bytes.extend(JOIN.to_le_bytes());
                bytes.extend(cookie.to_le_bytes());
                for word in [rank, ranks, timeout_ms] {
                    bytes.extend(word.to_le_bytes());
                }
                bytes.extend(encode_address(address));
            }
            Self::Peer { from, to } => {
                bytes.extend(PEER.to_le_bytes());
                bytes.extend(cookie.to_le_bytes());
                bytes.extend(from.to_le_bytes());
                bytes.extend(to.to_le_bytes());
            }
        }
        bytes
    }

    /// How many more bytes `bytes` needs before it is a hello or is known to be none; 0: enough.
    /// Whoever reads never takes more than this, so that what follows the hello stays in the socket.
    pub(super) fn missing(bytes: &[u8]) -> usize {
        if bytes.len() < PRELUDE {
            return PRELUDE - bytes.len();
        }
        let whole = match u16::from_le_bytes([bytes[6], bytes[7]]) {
            JOIN => JOIN_BYTES,
            PEER => PEER_BYTES,
            _ => PRELUDE,
        };
        whole.saturating_sub(bytes.len())
    }

    /// Reads a whole hello ([`Hello::missing`] is 0); `None` for whoever does not know `cookie` or speaks otherwise.
    pub(super) fn parse(bytes: &[u8], cookie: u64) -> Option<Self> {
        let (prelude, body) = bytes.split_at_checked(PRELUDE)?;
        if prelude[..4] != MAGIC.to_le_bytes()
            || prelude[4..6] != VERSION.to_le_bytes()
            || prelude[8..] != cookie.to_le_bytes()
        {
            return None;
        }
        match u16::from_le_bytes([prelude[6], prelude[7]]) {
            JOIN => {
                let address = decode_address(body.get(12..36)?.try_into().ok()?)?;
                Some(Self::Join {
                    rank: word(body, 0)?,
                    ranks: word(body, 4)?,
                    timeout_ms: word(body, 8)?,
                    address,
                })
            }
            PEER => Some(Self::Peer {
                from: word(body, 0)?,
                to: word(body, 4)?,
            }),
            _ => None,
        }
    }
}

/// The root's answer to a rank: kind u32 | length u32 | payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Everyone is there: every rank's address, in rank order.
    Table(Vec<SocketAddr>),
    /// Your time is up and these ranks are missing.
    Missing(Vec<u32>),
    /// This rank had come and went away.
    Lost(u32),
    /// You cannot take part, because.
    Refused(String),
}

/// Bytes before an answer's payload.
pub(super) const ANSWER_HEADER: usize = 8;

impl Answer {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, payload): (u32, Vec<u8>) = match self {
            Self::Table(table) => (1, table.iter().flat_map(encode_address).collect()),
            Self::Missing(ranks) => (2, ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect()),
            Self::Lost(rank) => (3, rank.to_le_bytes().into()),
            Self::Refused(text) => (4, text.clone().into_bytes()),
        };
        let mut bytes = Vec::with_capacity(ANSWER_HEADER + payload.len());
        bytes.extend(kind.to_le_bytes());
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// How many more bytes it takes; `None`: longer than any answer.
    pub(super) fn missing(bytes: &[u8]) -> Option<usize> {
        let Some(length) = word(bytes, 4) else {
            return Some(ANSWER_HEADER - bytes.len());
        };
        (length <= MAX_RANKS * 24).then(|| (ANSWER_HEADER + length as usize).saturating_sub(bytes.len()))
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let payload = bytes.get(ANSWER_HEADER..)?;
        match word(bytes, 0)? {
            1 => {
                let (addresses, rest) = payload.as_chunks::<24>();
                let table: Option<Vec<_>> = addresses.iter().map(decode_address).collect();
                table.filter(|_| rest.is_empty()).map(Self::Table)
            }
            2 => {
                let (ranks, rest) = payload.as_chunks::<4>();
                rest.is_empty()
                    .then(|| Self::Missing(ranks.iter().map(|rank| u32::from_le_bytes(*rank)).collect()))
            }
            3 => Some(Self::Lost(word(payload, 0).filter(|_| payload.len() == 4)?)),
            4 => Some(Self::Refused(String::from_utf8_lossy(payload).into_owned())),
            _ => None,
        }
    }
}

/// What ranks tell each other over a connection: kind u32 | length of the payload u32 | tag u64 | payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frame {
    /// A message of this rank under a tag.
    Data { tag: u64, data: Vec<u8> },
    /// A part of a collective call.
    Gather { tag: u64, data: Vec<u8> },
    /// A control message of the rank at the other end.
    Control { data: Vec<u8> },
    /// A control message of `from`, for everyone: whoever sees it for the first time passes it on. `number` counts the
    /// messages of `from`, from 1. Tag: from u32 | number u32.
    Spread { from: u32, number: u32, data: Vec<u8> },
    /// What somebody saw of a rank that is gone, for everyone. Tag: rank u32 | died u32 (0, 1).
    Gone { rank: u32, died: bool, text: String },
    /// The last frame of a connection. Tag: bit 0: the rank aborted; bit 1: it also has another connection to us, by
    /// which its messages come.
    Goodbye { aborted: bool, elsewhere: bool },
    /// This connection is not wanted, and why.
    Refused { text: String },
}

/// Bytes before a frame's payload.
const FRAME_HEADER: usize = 16;

impl Frame {
    /// The frame's header, for a payload of `length` bytes behind it.
    pub(super) fn header(&self, length: usize) -> [u8; FRAME_HEADER] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let (kind, tag) = match self {
            Self::Data { tag, .. } => (1u32, *tag),
            Self::Gather { tag, .. } => (2, *tag),
            Self::Control { .. } => (3, 0),
            Self::Spread { from, number, .. } => (4, pair(*from, *number)),
            Self::Gone { rank, died, .. } => (5, pair(*rank, u32::from(*died))),
            Self::Goodbye { aborted, elsewhere } => (6, u64::from(*aborted) | u64::from(*elsewhere) << 1),
            Self::Refused { .. } => (7, 0),
        };
        let mut bytes = [0; FRAME_HEADER];
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[4..8].copy_from_slice(&(length as u32).to_le_bytes());
        bytes[8..].copy_from_slice(&tag.to_le_bytes());
        bytes
    }

    fn payload(&self) -> &[u8] {
        match self {
            Self::Data { data, .. }
            | Self::Gather { data, .. }
            | Self::Control { data }
            | Self::Spread { data, .. } => data,
            Self::Gone { text, .. } | Self::Refused { text } => {
                &text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]
            }
            Self::Goodbye { .. } => &[],
        }
    }

    /// The whole frame.
    pub(super) fn encode(&self) -> Vec<u8> {
        let payload = self.payload();
        [&self.header(payload.len())[..], payload].concat()
    }

    /// `None` for a kind or a tag that does not exist.
    fn decode(kind: u32, tag: u64, data: Vec<u8>) -> Option<Self> {
        let (low, high) = (tag as u32, (tag >> 32) as u32);
        let text = |data: &[u8]| String::from_utf8_lossy(data).into_owned();
        Some(match (kind, tag) {
            (1, tag) => Self::Data { tag, data },
            (2, tag) => Self::Gather { tag, data },
            (3, 0) => Self::Control { data },
            (4, _) => Self::Spread {
                from: low,
                number: high,
                data,
            },
            (5, _) if high <= 1 => Self::Gone {
                rank: low,
                died: high == 1,
                text: text(&data),
            },
            (6, 0..4) if data.is_empty() => Self::Goodbye {
                aborted: tag & 1 != 0,
                elsewhere: tag & 2 != 0,
            },
            (7, 0) => Self::Refused { text: text(&data) },
            _ => return None,
        })
    }

    /// Longest payload of a kind.
    fn limit(kind: u32) -> usize {
        match kind {
            1 | 2 => MAX_MESSAGE,
            3 | 4 => MAX_CONTROL,
            5 | 7 => MAX_TEXT,
            _ => 0,
        }
    }
}

/// Puts frames together from whatever pieces the socket gives.
#[derive(Debug, Default)]
pub(super) struct FrameReader {
    bytes: Vec<u8>,
}

impl FrameReader {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame, if there is one.
    ///
    /// # Errors
    /// A text, for a frame that does not exist or is too long.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, String> {
        let Some((header, _)) = self.bytes.split_first_chunk::<FRAME_HEADER>() else {
            return Ok(None);
        };
        let [a, b, c, d, e, f, g, h, tag @ ..] = *header;
        let kind = u32::from_le_bytes([a, b, c, d]);
        let length = u32::from_le_bytes([e, f, g, h]) as usize;
        let tag = u64::from_le_bytes(tag);
        let limit = Frame::limit(kind);
        if length > limit {
            return Err(format!(
                "a message of kind {kind} with {length} bytes (limit {limit})"
            ));
        }
        if self.bytes.len() < FRAME_HEADER + length {
            return Ok(None);
        }
        let rest = self.bytes.split_off(FRAME_HEADER + length);
        let mut data = std::mem::replace(&mut self.bytes, rest);
        data.drain(..FRAME_HEADER);
        Frame::decode(kind, tag, data)
            .map(Some)
            .ok_or_else(|| format!("a message of unknown kind {kind} (tag {tag:#x})"))
    }
}

/// Numbered parts in one message: for each its number u32 | length u32 | bytes.
pub(super) fn join_parts<'a>(parts: impl IntoIterator<Item = (u32, &'a [u8])>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, part) in parts {
        bytes.extend(number.to_le_bytes());
        bytes.extend((part.len() as u32).to_le_bytes());
        bytes.extend(part);
    }
    bytes
}

/// Reads what [`join_parts`] wrote; `None` for anything else.
pub(super) fn split_parts(mut bytes: &[u8]) -> Option<Vec<(u32, &[u8])>> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let (number, length) = (word(bytes, 0)?, word(bytes, 4)? as usize);
        let (part, rest) = bytes[8..].split_at_checked(length)?;
        parts.push((number, part));
        bytes = rest;
    }
    Some(parts)
}

/// The little-endian u32 at an offset.
pub(crate) fn word(bytes: &[u8], offset: usize) -> Option<u32> {
    bytes
        .get(offset..offset + 4)?
        .try_into()
        .ok()
        .map(u32::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame() -> impl Strategy<Value = Frame> {
        let data = || proptest::collection::vec(any::<u8>(), 0..40);
        prop_oneof![
            (any::<u64>(), data()).prop_map(|(tag, data)| Frame::Data { tag, data }),
            (any::<u64>(), data()).prop_map(|(tag, data)| Frame::Gather { tag, data }),
            data().prop_map(|data| Frame::Control { data }),
            (any::<u32>(), any::<u32>(), data()).prop_map(|(from, number, data)| Frame::Spread {
                from,
                number,
                data
            }),
            (any::<u32>(), any::<bool>(), ".{0,20}").prop_map(|(rank, died, text)| Frame::Gone {
                rank,
                died,
                text
            }),
            (any::<bool>(), any::<bool>())
                .prop_map(|(aborted, elsewhere)| Frame::Goodbye { aborted, elsewhere }),
            ".{0,20}".prop_map(|text| Frame::Refused { text }),
        ]
    }

    proptest! {
        #[test]
        fn hellos_survive_and_rubbish_does_not(
            rank: u32, ranks: u32, timeout_ms: u32, port in 1u16.., ip: [u8; 4], cookie: u64, flip in 0usize..52, bit in 0u8..8,
        ) {
            let hello = Hello::Join { rank, ranks, timeout_ms, address: (ip, port).into() };
            let mut bytes = hello.encode(cookie);
            prop_assert_eq!(Hello::missing(&bytes), 0);
            prop_assert_eq!(Hello::parse(&bytes, cookie), Some(hello));
            bytes[flip] ^= 1 << bit;
            if flip < PRELUDE && flip != 6 && flip != 7 {
                prop_assert_eq!(Hello::parse(&bytes, cookie), None);
            } else {
                prop_assert_ne!(Hello::parse(&bytes, cookie), Some(hello));
            }
        }

        #[test]
        fn no_parser_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..9) {
            let _ = (Hello::missing(&bytes), Hello::parse(&bytes, 0), Answer::parse(&bytes), Answer::missing(&bytes));
            let _ = split_parts(&bytes);
            let mut likely = bytes.clone();
            if let Some(first) = likely.get_mut(..4) {
                first.copy_from_slice(&u32::from(kind).to_le_bytes());
            }
            let _ = Answer::parse(&likely);
            let mut reader = FrameReader::default();
            reader.push(&likely);
            while let Ok(Some(_)) = reader.next() {}
        }

        #[test]
        fn frames_survive_any_cutting(frames in proptest::collection::vec(frame(), 0..8), cut in 1usize..30) {
            let stream: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
            let (mut reader, mut read) = (FrameReader::default(), Vec::new());
            for piece in stream.chunks(cut) {
                reader.push(piece);
                while let Some(frame) = reader.next().unwrap() {
                    read.push(frame);
                }
            }
            prop_assert_eq!(read, frames);
        }

        #[test]
        fn parts_survive(parts in proptest::collection::vec((any::<u32>(), proptest::collection::vec(any::<u8>(), 0..20)), 1..9)) {
            let parts: Vec<(u32, &[u8])> = parts.iter().map(|(number, part)| (*number, &part[..])).collect();
            let bytes = join_parts(parts.iter().copied());
            prop_assert_eq!(split_parts(&bytes), Some(parts));
            prop_assert_eq!(split_parts(&bytes[..bytes.len() - 1]).is_some_and(|parts| parts.is_empty()), bytes.len() == 1);
        }

        #[test]
        fn answers_survive(table in proptest::collection::vec((any::<[u8; 4]>(), 1u16..), 0..9), ranks: Vec<u32>) {
            let table = table.into_iter().map(SocketAddr::from).collect();
            for answer in [Answer::Table(table), Answer::Missing(ranks), Answer::Lost(3), Answer::Refused("no".into())] {
                let bytes = answer.encode();
                prop_assert_eq!(Answer::missing(&bytes), Some(0));
                prop_assert_eq!(Answer::parse(&bytes), Some(answer));
            }
        }
    }

    #[test]
    fn a_monstrous_length_is_refused_before_it_is_allocated() {
        let mut reader = FrameReader::default();
        let data = Frame::Data {
            tag: 0,
            data: Vec::new(),
        };
        reader.push(&data.header(MAX_MESSAGE + 1));
        assert!(reader.next().unwrap_err().contains("limit"));
        assert_eq!(Answer::missing(&[1, 0, 0, 0, 255, 255, 255, 255]), None);
    }
}
