//! Messages of the rendezvous and between ranks, and the parsers that refuse everything else.

use std::net::SocketAddr;

use super::id::{VERSION, decode_address, encode_address};

/// First four bytes of every connection: "RSBS".
const MAGIC: u32 = u32::from_le_bytes(*b"RSBS");
const JOIN: u16 = 1;
const PEER: u16 = 2;
const RELAY: u16 = 3;
/// Magic u32 | version u16 | kind u16 | cookie u64.
const PRELUDE: usize = 16;
const JOIN_BYTES: usize = PRELUDE + Joining::BYTES;
const PEER_BYTES: usize = PRELUDE + 8;

/// Most ranks of a communicator.
pub(super) const MAX_RANKS: u32 = 1 << 16;
/// Longest message between two ranks, bytes.
pub(super) const MAX_MESSAGE: usize = 64 << 20;
/// Longest control message, bytes.
pub(super) const MAX_CONTROL: usize = 1 << 20;
/// Longest text about a rank, bytes.
const MAX_TEXT: usize = 4096;

/// A rank that wants to take part: rank u32 | ranks u32 | time-out in ms u32 | library version u32 | hash of all unique
/// ids u64 | cookie of the first u64 | its address 24 bytes | the rank's address 24 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Joining {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    pub(super) timeout_ms: u32,
    /// What `ncclGetVersion` says.
    pub(super) library: u32,
    /// Of the ids that the rank was given: the same for all ranks.
    pub(super) ids: u64,
    /// The first of these ids: its root is the one that has the table.
    pub(super) main: (u64, SocketAddr),
    /// Where the rank listens.
    pub(super) address: SocketAddr,
}

impl Joining {
    pub(super) const BYTES: usize = 80;

    pub(super) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (place, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip([
            self.rank,
            self.ranks,
            self.timeout_ms,
            self.library,
        ]) {
            *place = word.to_le_bytes();
        }
        bytes[16..24].copy_from_slice(&self.ids.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.main.0.to_le_bytes());
        bytes[32..56].copy_from_slice(&encode_address(&self.main.1));
        bytes[56..].copy_from_slice(&encode_address(&self.address));
        bytes
    }

    /// `None` for what [`Joining::encode`] did not write.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let long = |at: usize| bytes[at..at + 8].try_into().map(u64::from_le_bytes).ok();
        let address = |at: usize| decode_address(bytes[at..at + 24].try_into().ok()?);
        Some(Self {
            rank: word(bytes, 0)?,
            ranks: word(bytes, 4)?,
            timeout_ms: word(bytes, 8)?,
            library: word(bytes, 12)?,
            ids: long(16)?,
            main: (long(24)?, address(32)?),
            address: address(56)?,
        })
    }
}

/// What whoever connects says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hello {
    /// A rank to its root.
    Join(Joining),
    /// To another rank: from u32 | to u32.
    Peer { from: u32, to: u32 },
    /// A root that speaks for the ranks that were given to it, to the root that has the table. [`Upward`] follows.
    Relay,
}

/// Why somebody's first bytes are not a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stranger {
    /// No rank of this library.
    Foreign,
    /// A rank of this library that speaks another version of this protocol.
    Version(u16),
    /// The beginning is right and the rest is not.
    Malformed,
}

impl Stranger {
    /// What it is told.
    pub(super) fn text(self) -> String {
        match self {
            Self::Foreign => "this port is for the ranks of a communicator".to_owned(),
            Self::Version(version) => format!(
                "another version of the library: it speaks bootstrap protocol {version}, this one {VERSION}; \
                 use one version on all ranks"
            ),
            Self::Malformed => "the hello cannot be read".to_owned(),
        }
    }
}

impl Hello {
    pub(super) fn encode(&self, cookie: u64) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(JOIN_BYTES);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend(VERSION.to_le_bytes());
        let kind = match self {
            Self::Join(_) => JOIN,
            Self::Peer { .. } => PEER,
            Self::Relay => RELAY,
        };
        bytes.extend(kind.to_le_bytes());
        bytes.extend(cookie.to_le_bytes());
        match self {
            Self::Join(joining) => bytes.extend(joining.encode()),
            Self::Peer { from, to } => {
                bytes.extend(from.to_le_bytes());
                bytes.extend(to.to_le_bytes());
            }
            Self::Relay => {}
        }
        bytes
    }

    /// How many more bytes `bytes` needs before it is a hello or is known to be none; 0: enough.
    /// Whoever reads never takes more than this, so that what follows the hello stays in the socket.
    pub(super) fn missing(bytes: &[u8]) -> usize {
        let (begun, magic) = (bytes.len().min(4), MAGIC.to_le_bytes());
        if bytes[..begun] != magic[..begun] {
            return 0;
        }
        if bytes.len() < PRELUDE {
            return PRELUDE - bytes.len();
        }
        if bytes[4..6] != VERSION.to_le_bytes() {
            return 0;
        }
        let whole = match u16::from_le_bytes([bytes[6], bytes[7]]) {
            JOIN => JOIN_BYTES,
            PEER => PEER_BYTES,
            _ => PRELUDE,
        };
        whole.saturating_sub(bytes.len())
    }

    /// Reads a whole hello ([`Hello::missing`] is 0) and the cookie that it presents.
    ///
    /// # Errors
    /// Who it comes from otherwise.
    pub(super) fn parse(bytes: &[u8]) -> Result<(u64, Self), Stranger> {
        let (prelude, body) = bytes.split_at_checked(PRELUDE).ok_or(Stranger::Foreign)?;
        let [m, a, g, i, v, w, k, l, cookie @ ..] = prelude else {
            return Err(Stranger::Foreign);
        };
        if [*m, *a, *g, *i] != MAGIC.to_le_bytes() {
            return Err(Stranger::Foreign);
        }
        let version = u16::from_le_bytes([*v, *w]);
        if version != VERSION {
            return Err(Stranger::Version(version));
        }
        let read = || {
            Some(match (u16::from_le_bytes([*k, *l]), body.len()) {
                (JOIN, Joining::BYTES) => Self::Join(Joining::decode(body)?),
                (PEER, 8) => Self::Peer {
                    from: word(body, 0)?,
                    to: word(body, 4)?,
                },
                (RELAY, 0) => Self::Relay,
                _ => return None,
            })
        };
        let cookie = cookie.try_into().map_or(0, u64::from_le_bytes);
        read().map(|hello| (cookie, hello)).ok_or(Stranger::Malformed)
    }
}

/// What a root that relays says upward: kind u32 | [`Joining`] (1: a rank has come; 2: it has gone, of which only the
/// rank is read).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Upward {
    Joined(Joining),
    Gone(Joining),
}

impl Upward {
    pub(super) const BYTES: usize = 4 + Joining::BYTES;

    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, joining) = match self {
            Self::Joined(joining) => (1u32, joining),
            Self::Gone(joining) => (2, joining),
        };
        [&kind.to_le_bytes()[..], &joining.encode()].concat()
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let joining = Joining::decode(bytes.get(4..)?)?;
        match word(bytes, 0)? {
            1 => Some(Self::Joined(joining)),
            2 => Some(Self::Gone(joining)),
            _ => None,
        }
    }
}

/// The rank of a answer to all in what a root says to one that relays.
pub(super) const EVERYONE: u32 = u32::MAX;
/// Bytes before the answer in what a root says to one that relays: the rank u32.
pub(super) const DOWNWARD_HEADER: usize = 4;

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
    /// No ranks are awaited under this unique id.
    Unknown,
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
            Self::Unknown => (5, Vec::new()),
        };
        let mut bytes = Vec::with_capacity(ANSWER_HEADER + payload.len());
        bytes.extend(kind.to_le_bytes());
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(payload);
        bytes
    }

    /// How many more bytes the answer that `bytes` begins takes; `None`: longer than any answer.
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
            5 if payload.is_empty() => Some(Self::Unknown),
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
            words: [u32; 4], ids: u64, main: u64, port in 1u16.., ip: [u8; 4], cookie: u64, flip in 0usize..JOIN_BYTES, bit in 0u8..8,
        ) {
            let [rank, ranks, timeout_ms, library] = words;
            let address = (ip, port).into();
            let joining = Joining { rank, ranks, timeout_ms, library, ids, main: (main, address), address };
            let hello = Hello::Join(joining);
            let mut bytes = hello.encode(cookie);
            prop_assert_eq!(Hello::missing(&bytes), 0);
            prop_assert_eq!(Hello::parse(&bytes), Ok((cookie, hello)));
            prop_assert_eq!(Upward::parse(&Upward::Joined(joining).encode()), Some(Upward::Joined(joining)));
            bytes[flip] ^= 1 << bit;
            prop_assert_ne!(Hello::parse(&bytes), Ok((cookie, hello)));
            match flip {
                0..4 => prop_assert_eq!((Hello::missing(&bytes[..4]), Hello::parse(&bytes)), (0, Err(Stranger::Foreign))),
                4..6 => prop_assert!(matches!(Hello::parse(&bytes), Err(Stranger::Version(_)))),
                _ => {}
            }
        }

        #[test]
        fn no_parser_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..9) {
            let _ = (Hello::missing(&bytes), Hello::parse(&bytes), Answer::parse(&bytes), Answer::missing(&bytes));
            let _ = (split_parts(&bytes), Upward::parse(&bytes), Joining::decode(&bytes));
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
            for answer in [Answer::Table(table), Answer::Missing(ranks), Answer::Lost(3), Answer::Refused("no".into()), Answer::Unknown] {
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
