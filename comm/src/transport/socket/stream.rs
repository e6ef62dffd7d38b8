//! A TCP connection that does not block.

use std::{
    io::{self, IoSlice, Read},
    net::TcpStream,
    os::fd::AsRawFd,
};

use ringsight_records::Carrier;

use crate::bootstrap::fork::ParentOnly;

/// A socket that does not block, with what the last attempts and polls said of it.
pub(crate) struct Socket {
    pub(crate) stream: ParentOnly<TcpStream>,
    /// A read may give something. Cleared when one would block.
    pub(crate) readable: bool,
    /// A write may take something. Cleared when one would block.
    pub(crate) writable: bool,
}

/// What it means that a peer has closed a connection.
const GONE: &str = "it aborted, was destroyed or its process ended";

fn broken(error: &io::Error) -> String {
    match error.kind() {
        // It closed the connection with something unread.
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => format!("{error}: {GONE}"),
        _ => error.to_string(),
    }
}

/// As `write_vectored`, which raises SIGPIPE once the peer has closed: that would end a process whose main program does not ignore it, where it is to
/// learn that a rank is gone.
fn send(stream: &TcpStream, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: all fields may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // `IoSlice` is laid out as `iovec` is; nothing is written through it.
    message.msg_iov = parts.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = parts.len() as _;
    // SAFETY: `message` points to `parts`, which live to the end of the call.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

impl Socket {
    pub(crate) fn new(stream: ParentOnly<TcpStream>) -> Self {
        Self {
            stream,
            readable: true,
            writable: true,
        }
    }

    /// Bytes read; 0 when it would block. The end of the stream is an error.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, String> {
        if !self.readable {
            return Ok(0);
        }
        match (&*self.stream).read(buffer) {
            Ok(0) => Err(format!("the peer closed the connection: {GONE}")),
            result => moved(result, &mut self.readable),
        }
    }

    /// What carries a step over it.
    pub(super) fn carrier(&self, step: u32) -> Carrier {
        Carrier {
            port: None,
            number: self.stream.as_raw_fd().cast_unsigned(),
            step,
        }
    }

    /// Bytes written; 0 when it would block.
    pub(crate) fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, String> {
        if !self.writable {
            return Ok(0);
        }
        moved(send(&self.stream, parts), &mut self.writable)
    }
}

/// Bytes that a call has moved; 0 when it would block, and then it is not `ready`.
fn moved(result: io::Result<usize>, ready: &mut bool) -> Result<usize, String> {
    match result {
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            *ready = false;
            Ok(0)
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        Err(error) => Err(broken(&error)),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::TcpListener,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;

    #[test]
    fn a_peer_that_is_gone_is_an_error_and_no_signal() {
        static RAISED: AtomicBool = AtomicBool::new(false);
        extern "C" fn raised(_: libc::c_int) {
            RAISED.store(true, Ordering::Relaxed);
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        drop(listener.accept().unwrap());
        let mut socket = Socket::new(ParentOnly::new(stream));
        // A Rust program ignores it; those that load the library need not.
        // SAFETY: the handler stores a flag.
        let before = unsafe { libc::signal(libc::SIGPIPE, raised as *const () as libc::sighandler_t) };
        // The first one is taken, and answered by a reset.
        let error = loop {
            if let Err(error) = socket.write(&[IoSlice::new(b"header"), IoSlice::new(b"data")]) {
                break error;
            }
        };
        let again = socket.write(&[IoSlice::new(b"data")]);
        // SAFETY: what it was.
        unsafe { libc::signal(libc::SIGPIPE, before) };
        assert!(error.ends_with(GONE), "{error}");
        assert!(again.is_err());
        assert!(!RAISED.load(Ordering::Relaxed));
    }
}
