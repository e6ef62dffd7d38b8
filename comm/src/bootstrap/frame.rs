//! Messages between ranks, and the parsers that refuse everything else.

use super::wire::{MAX_TEXT, printable, word};

/// Longest message between two ranks, bytes.
pub(super) const MAX_MESSAGE: usize = 64 << 20;
/// Longest control message, bytes.
pub(super) const MAX_CONTROL: usize = 1 << 20;

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
    fn decode(kind: u32, tag: u64, data: &[u8]) -> Option<Self> {
        let (low, high) = (tag as u32, (tag >> 32) as u32);
        Some(match (kind, tag) {
            (1, tag) => Self::Data {
                tag,
                data: data.to_vec(),
            },
            (2, tag) => Self::Gather {
                tag,
                data: data.to_vec(),
            },
            (3, 0) => Self::Control { data: data.to_vec() },
            (4, _) => Self::Spread {
                from: low,
                number: high,
                data: data.to_vec(),
            },
            (5, _) if high <= 1 => Self::Gone {
                rank: low,
                died: high == 1,
                text: printable(data),
            },
            (6, 0..4) if data.is_empty() => Self::Goodbye {
                aborted: tag & 1 != 0,
                elsewhere: tag & 2 != 0,
            },
            (7, 0) => Self::Refused {
                text: printable(data),
            },
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
    /// How many of them have been read.
    read: usize,
}

impl FrameReader {
    /// Room that is kept for the next pieces, in bytes.
    const KEPT: usize = 64 << 10;

    pub(super) fn push(&mut self, bytes: &[u8]) {
        // What was read is moved over once for a piece, not once for each frame in it.
        self.bytes.drain(..self.read);
        self.read = 0;
        if self.bytes.capacity() > Self::KEPT.max(2 * self.bytes.len()) {
            self.bytes.shrink_to(Self::KEPT);
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame, if there is one.
    ///
    /// # Errors
    /// A text, for a frame that does not exist or is too long.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, String> {
        let rest = &self.bytes[self.read..];
        let Some((header, rest)) = rest.split_first_chunk::<FRAME_HEADER>() else {
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
        let Some(data) = rest.get(..length) else {
            return Ok(None);
        };
        let frame = Frame::decode(kind, tag, data);
        self.read += FRAME_HEADER + length;
        frame
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
            (any::<u32>(), any::<bool>(), "\\PC{0,20}").prop_map(|(rank, died, text)| Frame::Gone {
                rank,
                died,
                text
            }),
            (any::<bool>(), any::<bool>())
                .prop_map(|(aborted, elsewhere)| Frame::Goodbye { aborted, elsewhere }),
            "\\PC{0,20}".prop_map(|text| Frame::Refused { text }),
        ]
    }

    proptest! {
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
        fn no_parser_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..9) {
            let _ = split_parts(&bytes);
            let mut likely = bytes;
            if let Some(first) = likely.get_mut(..4) {
                first.copy_from_slice(&u32::from(kind).to_le_bytes());
            }
            let mut reader = FrameReader::default();
            reader.push(&likely);
            while let Ok(Some(_)) = reader.next() {}
        }
    }

    #[test]
    fn short_messages_hold_no_more_memory_than_they_need() {
        let data = Frame::Data {
            tag: 0,
            data: vec![7],
        };
        let mut reader = FrameReader::default();
        let mut held = 0;
        // As the service reads: 16 KiB at once.
        for piece in data.encode().repeat(4096).chunks(16 << 10) {
            reader.push(piece);
            while let Some(frame) = reader.next().unwrap() {
                let Frame::Data { data, .. } = frame else {
                    panic!("{frame:?}");
                };
                held += data.capacity();
            }
        }
        assert!(held <= 4096 * 64, "{held} bytes for 4096 messages of one byte");
        // After a long one the room for it is given back.
        let long = Frame::Control {
            data: vec![7; MAX_CONTROL],
        };
        reader.push(&long.encode());
        assert_eq!(reader.next(), Ok(Some(long)));
        reader.push(&[]);
        assert!(
            reader.bytes.capacity() <= 2 * FrameReader::KEPT,
            "{}",
            reader.bytes.capacity()
        );
    }

    #[test]
    fn a_text_of_a_peer_moves_no_cursor_and_begins_no_line() {
        let text = "\u{1b}[2J\nhost:1:1 [0] NCCL WARN of somebody else\r\u{9b}";
        let refused = Frame::Refused { text: text.into() };
        let mut reader = FrameReader::default();
        reader.push(&refused.encode());
        let Ok(Some(Frame::Refused { text })) = reader.next() else {
            panic!("a refusal is read");
        };
        assert!(!text.chars().any(char::is_control), "{text:?}");
        assert!(text.starts_with("\\u{1b}[2J\\nhost"), "{text}");
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
    }
}
