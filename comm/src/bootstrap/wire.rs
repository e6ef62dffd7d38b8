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

/// A message between ranks: kind u32 | tag u32 | length u32 | payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: FrameKind,
    pub(super) tag: u32,
    pub(super) data: Vec<u8>,
}

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// A message under `tag`.
    Data,
    /// Rank `tag` is lost; the data says what was seen. Sent by whoever gives up because of it.
    Lost,
}

const FRAME_HEADER: usize = 12;

/// Header of a frame; the payload follows.
pub(super) fn frame_header(kind: FrameKind, tag: u32, length: usize) -> [u8; FRAME_HEADER] {
    let mut bytes = [0; FRAME_HEADER];
    bytes[0] = match kind {
        FrameKind::Data => 1,
        FrameKind::Lost => 2,
    };
    bytes[4..8].copy_from_slice(&tag.to_le_bytes());
    bytes[8..].copy_from_slice(&(length as u32).to_le_bytes());
    bytes
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
    /// A text, for a kind that does not exist or a length beyond [`MAX_MESSAGE`].
    pub(super) fn next(&mut self) -> Result<Option<Frame>, String> {
        let (Some(kind), Some(tag), Some(length)) =
            (word(&self.bytes, 0), word(&self.bytes, 4), word(&self.bytes, 8))
        else {
            return Ok(None);
        };
        let kind = match kind {
            1 => FrameKind::Data,
            2 => FrameKind::Lost,
            other => return Err(format!("a message of unknown kind {other}")),
        };
        let length = length as usize;
        if length > MAX_MESSAGE {
            return Err(format!("a message of {length} bytes (limit {MAX_MESSAGE})"));
        }
        if self.bytes.len() < FRAME_HEADER + length {
            return Ok(None);
        }
        let rest = self.bytes.split_off(FRAME_HEADER + length);
        let mut data = std::mem::replace(&mut self.bytes, rest);
        data.drain(..FRAME_HEADER);
        Ok(Some(Frame { kind, tag, data }))
    }
}

/// Length-prefixed parts (u32 each) in one message.
pub(super) fn join_parts<'a>(parts: impl IntoIterator<Item = &'a Vec<u8>>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend((part.len() as u32).to_le_bytes());
        bytes.extend(part);
    }
    bytes
}

/// Reads what [`join_parts`] wrote; `None` unless it is exactly `count` parts.
pub(super) fn split_parts(mut bytes: &[u8], count: usize) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::new();
    for _ in 0..count {
        let length = word(bytes, 0)? as usize;
        let (part, rest) = bytes[4..].split_at_checked(length)?;
        parts.push(part.to_vec());
        bytes = rest;
    }
    bytes.is_empty().then_some(parts)
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
        fn no_parser_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..6, count in 0usize..9) {
            let _ = (Hello::missing(&bytes), Hello::parse(&bytes, 0), Answer::parse(&bytes), Answer::missing(&bytes));
            let _ = split_parts(&bytes, count);
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
        fn frames_survive_any_cutting(
            messages in proptest::collection::vec((any::<u32>(), proptest::collection::vec(any::<u8>(), 0..40)), 0..8),
            cut in 1usize..30,
        ) {
            let mut stream = Vec::new();
            for (tag, data) in &messages {
                stream.extend(frame_header(FrameKind::Data, *tag, data.len()));
                stream.extend(data);
            }
            let (mut reader, mut read) = (FrameReader::default(), Vec::new());
            for piece in stream.chunks(cut) {
                reader.push(piece);
                while let Some(frame) = reader.next().unwrap() {
                    read.push((frame.tag, frame.data));
                }
            }
            prop_assert_eq!(read, messages);
        }

        #[test]
        fn parts_survive(parts in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..9)) {
            let bytes = join_parts(&parts);
            prop_assert_eq!(split_parts(&bytes, parts.len()), Some(parts.clone()));
            prop_assert_eq!(split_parts(&bytes, parts.len() + 1), None);
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
        reader.push(&frame_header(FrameKind::Data, 0, MAX_MESSAGE + 1));
        assert!(reader.next().unwrap_err().contains("limit"));
        assert_eq!(Answer::missing(&[1, 0, 0, 0, 255, 255, 255, 255]), None);
    }
}
