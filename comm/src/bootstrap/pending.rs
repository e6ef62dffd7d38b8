//! Connections that have not yet said who they are: anybody may connect to a port, so they are read without blocking,
//! no further than their hello, not for long, and not without number.

use std::{
    io::{self, Read},
    net::{TcpListener, TcpStream},
    time::{Duration, Instant},
};

use super::{fork::ParentOnly, sys};

/// How long a connection may take over its hello.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many may be undecided at once; beyond it the oldest is dropped.
const LIMIT: usize = 512;
/// How many are accepted at once, so that those that have said everything are decided before any is dropped.
const BATCH: usize = 64;

/// One undecided connection.
pub(crate) struct Pending {
    stream: ParentOnly<TcpStream>,
    bytes: Vec<u8>,
    since: Instant,
}

impl Pending {
    /// What a hello is made of: bytes still missing (0: whole).
    fn read(&mut self, missing: fn(&[u8]) -> usize) -> io::Result<bool> {
        loop {
            let wanted = missing(&self.bytes);
            if wanted == 0 {
                return Ok(true);
            }
            let mut piece = [0; 64];
            match (&*self.stream).read(&mut piece[..wanted.min(64)]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.bytes.extend_from_slice(&piece[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// The undecided connections of one listener.
pub(crate) struct Undecided {
    list: Vec<Pending>,
    missing: fn(&[u8]) -> usize,
}

impl Undecided {
    /// None yet; `missing` says how many bytes a beginning of a hello still lacks.
    pub(crate) fn new(missing: fn(&[u8]) -> usize) -> Self {
        Self {
            list: Vec::new(),
            missing,
        }
    }

    /// Adds what there is to poll.
    pub(crate) fn interests(&self, fds: &mut Vec<libc::pollfd>) {
        fds.extend(
            self.list
                .iter()
                .map(|pending| sys::interest(&*pending.stream, libc::POLLIN)),
        );
    }

    /// Whether there are any, so that a poll must not last beyond [`PATIENCE`].
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Accepts what waits at the listener, some of it: to be called before every [`Undecided::decided`]. False when the
    /// process is out of descriptors: poll the listener later again.
    pub(crate) fn accept(&mut self, listener: &TcpListener) -> bool {
        for _ in 0..BATCH {
            match sys::accept(listener) {
                Ok(stream) => {
                    if stream.set_nonblocking(true).is_ok() && stream.set_nodelay(true).is_ok() {
                        if self.list.len() >= LIMIT {
                            self.list.remove(0);
                        }
                        self.list.push(Pending {
                            stream: ParentOnly::new(stream),
                            bytes: Vec::new(),
                            since: Instant::now(),
                        });
                    }
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR | libc::ECONNABORTED) => {}
                    _ => return !sys::is_starved(&error),
                },
            }
        }
        true
    }

    /// Reads on; gives the connections whose hello is whole, and drops the broken and the slow.
    pub(crate) fn decided(&mut self) -> Vec<(ParentOnly<TcpStream>, Vec<u8>)> {
        let mut decided = Vec::new();
        for mut pending in std::mem::take(&mut self.list) {
            match pending.read(self.missing) {
                Ok(true) => decided.push((pending.stream, pending.bytes)),
                Ok(false) if pending.since.elapsed() < PATIENCE => self.list.push(pending),
                Ok(false) | Err(_) => {}
            }
        }
        decided
    }
}
