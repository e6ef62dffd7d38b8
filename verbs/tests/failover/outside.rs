//! Frames between the two processes, outside RDMA: tag, and bytes of a length that the tag says.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use ringsight_failover::MESSAGE_BYTES;
use ringsight_verbs::wire::OFFER_BYTES;

use super::PATIENCE;

pub(crate) const OFFER: u8 = 1;
pub(crate) const READY: u8 = 2;
/// A message of the sending end of rank 0, or to it; of rank 1's.
pub(crate) const MESSAGE: [u8; 2] = [3, 4];
/// A rank has come to the end of a case; what was wrong there, and what it cost.
pub(crate) const DONE: u8 = 5;
/// All links are up: the next case.
pub(crate) const GO: u8 = 6;
/// Bytes that say what was wrong.
const TEXT: usize = 120;
const DONE_BYTES: usize = TEXT + COSTS * 8;
/// Numbers that say what a case cost.
pub(crate) const COSTS: usize = 9;

/// The connection between them.
pub(crate) struct Outside {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// System calls that were made here, and by those who wait for it.
    pub(crate) calls: u64,
}

impl Outside {
    pub(crate) fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_nonblocking(true).unwrap();
        Self {
            stream,
            buffer: Vec::new(),
            calls: 0,
        }
    }

    pub(crate) fn put(&mut self, tag: u8, bytes: &[u8]) {
        let mut frame = vec![tag];
        frame.extend(bytes);
        let start = Instant::now();
        let mut rest = frame.as_slice();
        while !rest.is_empty() {
            self.calls += 1;
            match self.stream.write(rest) {
                Ok(count) => rest = &rest[count..],
                // The other one is behind.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    assert!(start.elapsed() < PATIENCE, "the other process reads nothing");
                    std::thread::sleep(Duration::from_micros(200));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The next frame, if all of it is here.
    pub(crate) fn take(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut more = [0; 4096];
        loop {
            self.calls += 1;
            match self.stream.read(&mut more) {
                // It has said all that it had to say: after the last case.
                Ok(0) if !self.buffer.is_empty() => break,
                Ok(0) => panic!("the other process is gone"),
                Ok(count) => self.buffer.extend(&more[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        let tag = *self.buffer.first()?;
        let length = match tag {
            OFFER => OFFER_BYTES,
            tag if MESSAGE.contains(&tag) => MESSAGE_BYTES,
            DONE => DONE_BYTES,
            _ => 0,
        };
        (self.buffer.len() > length).then(|| {
            let frame: Vec<u8> = self.buffer.drain(..=length).collect();
            (tag, frame[1..].to_vec())
        })
    }

    /// The next frame of a tag; messages before it are late ones of the case before.
    pub(crate) fn wait(&mut self, wanted: u8) -> Vec<u8> {
        let start = Instant::now();
        loop {
            match self.take() {
                Some((tag, bytes)) if tag == wanted => return bytes,
                Some((tag, _)) => assert!(MESSAGE.contains(&tag), "frame {tag} instead of {wanted}"),
                None => std::thread::sleep(Duration::from_micros(200)),
            }
            assert!(start.elapsed() < PATIENCE, "no frame {wanted}");
        }
    }

    /// Says that a case is over here.
    pub(crate) fn put_done(&mut self, wrong: &str, costs: [u64; COSTS]) {
        let mut bytes = [0; DONE_BYTES];
        for (to, from) in bytes[..TEXT].iter_mut().zip(wrong.bytes()) {
            *to = from;
        }
        for (to, from) in bytes[TEXT..].as_chunks_mut::<8>().0.iter_mut().zip(costs) {
            *to = from.to_le_bytes();
        }
        self.put(DONE, &bytes);
    }
}

/// What a frame of [`Outside::put_done`] says.
pub(crate) fn parse_done(bytes: &[u8]) -> (Option<String>, [u64; COSTS]) {
    let (text, costs) = bytes.split_at(TEXT);
    let text = String::from_utf8_lossy(text).trim_matches('\0').to_owned();
    let mut numbers = costs
        .as_chunks::<8>()
        .0
        .iter()
        .map(|chunk| u64::from_le_bytes(*chunk));
    (
        (!text.is_empty()).then_some(text),
        std::array::from_fn(|_| numbers.next().unwrap_or(0)),
    )
}
