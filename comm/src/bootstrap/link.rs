//! A connection between two ranks. Both ends send frames over it; bytes that the system does not take yet wait here, so
//! that nobody who must not block blocks, and a frame once begun is always finished.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    os::fd::{AsRawFd, RawFd},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use super::{fork::ParentOnly, sys};

/// One connection.
pub(super) struct Link {
    /// The rank at the other end.
    pub(super) peer: u32,
    /// We opened it.
    pub(super) ours: bool,
    stream: ParentOnly<TcpStream>,
    out: Mutex<Outbox>,
    /// The other end has said something.
    heard: AtomicBool,
}

/// Bytes on their way out.
#[derive(Default)]
struct Outbox {
    bytes: Vec<u8>,
    /// How many of `bytes` the system has taken.
    taken: usize,
    /// Bytes that the system took before those of `bytes`.
    before: u64,
}

impl Outbox {
    /// Bytes that are kept although the system has taken them, so that not every write moves those behind them.
    const SLACK: usize = 1 << 20;

    fn taken(&self) -> u64 {
        self.before + self.taken as u64
    }

    /// Forgets what the system has taken, which a slow reader may never be done with.
    fn forget_taken(&mut self) {
        if self.taken > Self::SLACK.max(self.bytes.len() / 2) {
            self.bytes.drain(..self.taken);
            self.before += self.taken as u64;
            self.taken = 0;
        }
    }
}

impl Link {
    /// Begins to connect to `peer`; `hello` goes first. Failures of the connect show as failures to write and read.
    pub(super) fn open(peer: u32, address: &SocketAddr, hello: &[u8]) -> io::Result<Self> {
        let stream = sys::connect_start(address)?;
        sys::keep_alive(&stream)?;
        let link = Self {
            peer,
            ours: true,
            stream: ParentOnly::new(stream),
            out: Mutex::default(),
            heard: AtomicBool::new(false),
        };
        link.push(&[hello]);
        // At once where the connection is made at once: who has said nothing is the first to be dropped.
        let _ = link.flush();
        Ok(link)
    }

    /// A connection that `peer` opened.
    pub(super) fn accepted(peer: u32, stream: ParentOnly<TcpStream>) -> Self {
        // A connection without keep-alive works as well; only a machine that vanishes is noticed later.
        let _ = sys::keep_alive(&stream);
        Self {
            peer,
            ours: false,
            stream,
            out: Mutex::default(),
            heard: AtomicBool::new(false),
        }
    }

    /// Lives on however long the other end does not answer.
    pub(super) fn bear_silence(&self) {
        // Without it works as well, and is less patient.
        let _ = sys::bear_silence(&self.stream);
    }

    fn out(&self) -> MutexGuard<'_, Outbox> {
        // Whole between any two statements that could panic.
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues `parts` as one piece; the position in the stream behind it, for [`Link::flush`].
    pub(super) fn push(&self, parts: &[&[u8]]) -> u64 {
        let mut out = self.out();
        out.forget_taken();
        for part in parts {
            out.bytes.extend_from_slice(part);
        }
        out.before + out.bytes.len() as u64
    }

    /// Gives the system what it takes now; the position up to which it has taken everything.
    ///
    /// # Errors
    /// When the connection is broken or could not be made.
    pub(super) fn flush(&self) -> io::Result<u64> {
        let mut out = self.out();
        while out.taken < out.bytes.len() {
            match (&*self.stream).write(&out.bytes[out.taken..]) {
                Ok(taken) => out.taken += taken,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(out.taken()),
                Err(error) => return Err(error),
            }
        }
        out.before = out.taken();
        out.taken = 0;
        out.bytes.clear();
        if out.bytes.capacity() > 1 << 20 {
            out.bytes = Vec::new();
        }
        Ok(out.before)
    }

    /// How many bytes wait for the system.
    pub(super) fn unsent(&self) -> usize {
        let out = self.out();
        out.bytes.len() - out.taken
    }

    /// Whether bytes wait for the system.
    pub(super) fn has_unsent(&self) -> bool {
        self.unsent() > 0
    }

    /// Whether the other end is known to have taken it. The system makes connections before a process accepts them: one that
    /// ends before anything came may have waited at a rank that was about to leave, or has left.
    pub(super) fn was_made(&self) -> bool {
        // Relaxed: asked by the thread that reads.
        !self.ours || self.heard.load(Ordering::Relaxed)
    }

    /// What has come, not blocking; 0 bytes: the end.
    pub(super) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = (&*self.stream).read(buffer)?;
        if read > 0 {
            self.heard.store(true, Ordering::Relaxed);
        }
        Ok(read)
    }

    /// Nothing more will be sent.
    pub(super) fn shut_down(&self) {
        // A connection that is broken needs no end.
        let _ = self.stream.shutdown(Shutdown::Write);
    }
}

impl AsRawFd for Link {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_a_slow_reader_has_taken_is_not_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // Else the system may make room for all that is ever sent.
        let bytes: libc::c_int = 64 << 10;
        // SAFETY: a socket, and an option that is an int.
        let set = unsafe {
            libc::setsockopt(
                listener.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVBUF,
                (&raw const bytes).cast(),
                size_of_val(&bytes) as libc::socklen_t,
            )
        };
        assert_eq!(set, 0);
        let link = Link::open(1, &listener.local_addr().unwrap(), b"hello").unwrap();
        let (mut reader, _) = listener.accept().unwrap();
        reader.read_exact(&mut [0; 5]).unwrap();
        let piece = vec![7; 4 << 20];
        let mut read = vec![0; piece.len()];
        // As many bytes wait as the system does not take: never none.
        let mut end = link.push(&[&piece, &piece, &piece]);
        for _ in 0..16 {
            end = link.push(&[&piece]);
            let begun = link.flush().unwrap();
            assert!(begun < end);
            let mut got = 0;
            while got < read.len() {
                got += reader.read(&mut read[got..]).unwrap();
                link.flush().unwrap();
            }
            assert!(read.iter().all(|byte| *byte == 7));
        }
        let kept = link.out().bytes.len();
        assert!(kept <= 8 * piece.len(), "{kept} bytes");
        assert!(link.unsent() > 0 && link.unsent() <= kept);
        assert_eq!(end, 5 + 19 * piece.len() as u64);
    }
}
