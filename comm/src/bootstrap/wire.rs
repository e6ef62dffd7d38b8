//! Messages of the rendezvous, and the parsers that refuse everything else.

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

/// How many missing ranks those that wait are told by number.
pub(super) const NAMED: usize = 64;

/// How an attempt ended for which not all ranks came: waiter u32 | waited u32 | missing ranks u32 each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GaveUp {
    /// The rank whose time was up first.
    pub(super) waiter: u32,
    /// How long it had waited, in milliseconds.
    pub(super) waited_ms: u32,
    /// Who had not come.
    pub(super) missing: Vec<u32>,
}

/// The root's answer to a rank: kind u32 | length u32 | payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Everyone is there: a secret u64 | every rank's address, in rank order.
    Table { secret: u64, addresses: Vec<SocketAddr> },
    /// A rank's time is up, and so is yours.
    Missing(GaveUp),
    /// Not an answer yet: so many ranks are missing, the first [`NAMED`] of which are these.
    Waiting { missing: u32, first: Vec<u32> },
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
            Self::Table { secret, addresses } => {
                let mut payload = secret.to_le_bytes().to_vec();
                payload.extend(addresses.iter().flat_map(encode_address));
                (1, payload)
            }
            Self::Missing(gave_up) => {
                let head = [gave_up.waiter, gave_up.waited_ms];
                (2, to_bytes(head.iter().chain(&gave_up.missing)))
            }
            Self::Lost(rank) => (3, rank.to_le_bytes().into()),
            Self::Refused(text) => (4, text.clone().into_bytes()),
            Self::Unknown => (5, Vec::new()),
            Self::Waiting { missing, first } => (6, to_bytes([missing].into_iter().chain(first))),
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
        (length <= 8 + MAX_RANKS * 24).then(|| (ANSWER_HEADER + length as usize).saturating_sub(bytes.len()))
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let payload = bytes.get(ANSWER_HEADER..)?;
        match word(bytes, 0)? {
            1 => {
                let (secret, payload) = payload.split_first_chunk()?;
                let (addresses, rest) = payload.as_chunks::<24>();
                let addresses = addresses.iter().map(decode_address).collect::<Option<_>>()?;
                rest.is_empty().then_some(Self::Table {
                    secret: u64::from_le_bytes(*secret),
                    addresses,
                })
            }
            2 => {
                let words = from_bytes(payload)?;
                let ([waiter, waited_ms], missing) = words.split_first_chunk()?;
                Some(Self::Missing(GaveUp {
                    waiter: *waiter,
                    waited_ms: *waited_ms,
                    missing: missing.to_vec(),
                }))
            }
            3 => Some(Self::Lost(word(payload, 0).filter(|_| payload.len() == 4)?)),
            4 => Some(Self::Refused(printable(payload))),
            5 if payload.is_empty() => Some(Self::Unknown),
            6 => {
                let words = from_bytes(payload)?;
                let (missing, first) = words.split_first()?;
                Some(Self::Waiting {
                    missing: *missing,
                    first: first.to_vec(),
                })
            }
            _ => None,
        }
    }
}

fn to_bytes<'a>(words: impl Iterator<Item = &'a u32>) -> Vec<u8> {
    words.flat_map(|word| word.to_le_bytes()).collect()
}

/// Little-endian words; `None` if the bytes are not whole ones.
fn from_bytes(bytes: &[u8]) -> Option<Vec<u32>> {
    let (words, rest) = bytes.as_chunks::<4>();
    rest.is_empty()
        .then(|| words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

/// Longest text of another process, bytes.
pub(super) const MAX_TEXT: usize = 4096;

/// A text of another process, for a message or a line of the log: what controls a terminal is written out, and what is behind [`MAX_TEXT`]
/// bytes is left out.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let bytes = &bytes[..bytes.len().min(MAX_TEXT)];
    let mut text = String::with_capacity(bytes.len());
    for char in String::from_utf8_lossy(bytes).chars() {
        if char.is_control() {
            text.extend(char.escape_default());
        } else {
            text.push(char);
        }
    }
    // What is written out is longer.
    text.truncate(text.floor_char_boundary(MAX_TEXT));
    text
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
        fn a_printable_text_stays_as_it_is(bytes in proptest::collection::vec(any::<u8>(), 0..2 * MAX_TEXT)) {
            let text = printable(&bytes);
            prop_assert!(text.len() <= MAX_TEXT && !text.chars().any(char::is_control));
            prop_assert_eq!(printable(text.as_bytes()), text);
        }

        #[test]
        fn no_parser_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..9) {
            let _ = (Hello::missing(&bytes), Hello::parse(&bytes), Answer::parse(&bytes), Answer::missing(&bytes));
            let _ = (Upward::parse(&bytes), Joining::decode(&bytes));
            let mut likely = bytes.clone();
            if let Some(first) = likely.get_mut(..4) {
                first.copy_from_slice(&u32::from(kind).to_le_bytes());
            }
            let _ = Answer::parse(&likely);
        }

        #[test]
        fn answers_survive(table in proptest::collection::vec((any::<[u8; 4]>(), 1u16..), 0..9), ranks: Vec<u32>, waiter: u32, waited_ms: u32) {
            let addresses = table.into_iter().map(SocketAddr::from).collect();
            let secret = u64::from(waiter) << 20;
            for answer in [Answer::Table { secret, addresses }, Answer::Waiting { missing: waiter, first: ranks.clone() }, Answer::Missing(GaveUp { waiter, waited_ms, missing: ranks }), Answer::Lost(3), Answer::Refused("no".into()), Answer::Unknown] {
                let bytes = answer.encode();
                prop_assert_eq!(Answer::missing(&bytes), Some(0));
                prop_assert_eq!(Answer::parse(&bytes), Some(answer));
            }
        }
    }

    #[test]
    fn a_monstrous_length_is_refused_before_it_is_allocated() {
        assert_eq!(Answer::missing(&[1, 0, 0, 0, 255, 255, 255, 255]), None);
    }
}
