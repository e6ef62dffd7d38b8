//! The bootstrap's parsers, for [`crate::fuzzing`].

use super::{
    id::{self, UniqueId},
    wire::{Answer, Frame, FrameReader, Hello, join_parts, split_parts},
};

/// Feeds `data` to every parser; what one accepts must survive being written and read again.
pub(crate) fn messages(data: &[u8]) {
    if let Some((bytes, _)) = data.split_first_chunk::<{ UniqueId::BYTES }>() {
        // As it is, and with a checksum that lets it past the first check.
        for bytes in [*bytes, id::with_checksum(*bytes)] {
            if let Ok(id) = UniqueId::from_bytes(&bytes) {
                assert_eq!(UniqueId::from_bytes(&id.to_bytes()).ok(), Some(id));
            }
        }
    }
    // A stranger does not know the secret; a rank of another communicator does, so its bytes are looked at.
    let cookie = data
        .get(8..16)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes);
    if Hello::missing(data) == 0
        && let Some(hello) = Hello::parse(data, cookie)
    {
        assert_eq!(Hello::parse(&hello.encode(cookie), cookie), Some(hello));
    }
    if Answer::missing(data) == Some(0)
        && let Some(answer) = Answer::parse(data)
    {
        let again = Answer::parse(&answer.encode()).expect("what was read can be written and read");
        // A text that was no UTF-8 has become longer; everything else is the same.
        assert!(again == answer || matches!(answer, Answer::Refused(_)));
    }
    if let Some(parts) = split_parts(data) {
        assert_eq!(join_parts(parts), data);
    }
    // However the bytes come in pieces, the frames are the same.
    let frames = |piece: usize| {
        let (mut reader, mut frames) = (FrameReader::default(), Vec::new());
        for piece in data.chunks(piece) {
            reader.push(piece);
            loop {
                match reader.next() {
                    Ok(Some(frame)) => frames.push(frame),
                    Ok(None) => break,
                    Err(text) => return (frames, Some(text)),
                }
            }
        }
        (frames, None)
    };
    let (read, refused) = frames(data.len().max(1));
    assert_eq!(frames(7), (read.clone(), refused));
    for frame in read {
        let mut reader = FrameReader::default();
        reader.push(&frame.encode());
        let again = reader.next();
        let text = matches!(frame, Frame::Gone { .. } | Frame::Refused { .. });
        assert!(text || again == Ok(Some(frame)));
    }
}
