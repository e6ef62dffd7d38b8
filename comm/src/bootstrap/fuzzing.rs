//! The bootstrap's parsers, for [`crate::fuzzing`].

use super::{
    frame::{Frame, FrameReader, join_parts, split_parts},
    id::{self, UniqueId},
    wire::{Answer, Hello, Upward},
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
    if Hello::missing(data) == 0
        && let Ok((cookie, hello)) = Hello::parse(data)
    {
        assert_eq!(Hello::parse(&hello.encode(cookie)), Ok((cookie, hello)));
    }
    if let Some(upward) = Upward::parse(data) {
        assert_eq!(Upward::parse(&upward.encode()), Some(upward));
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
