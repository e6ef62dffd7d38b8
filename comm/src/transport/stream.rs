//! A TCP stream that does not block.

use std::{
    io::{self, IoSlice, Read},
    net::TcpStream,
    os::fd::AsRawFd,
    sync::Arc,
};

use ringsight_records::Carrier;

use ringsight_comm_base::fork::ParentOnly;

use super::error::ConnectionError;

/// A TCP stream that does not block, with its readiness as of the last calls and polls.
pub(crate) struct Stream {
    pub(crate) tcp: ParentOnly<TcpStream>,
    /// A read may return bytes. Cleared when a read would block.
    pub(crate) readable: bool,
    /// A write may accept bytes. Cleared when a write would block.
    pub(crate) writable: bool,
}

fn broken(error: io::Error) -> ConnectionError {
    match error.kind() {
        // The peer closed the connection with something unread.
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
            ConnectionError::PeerGone(error.to_string())
        }
        _ => ConnectionError::Stream(Arc::new(error)),
    }
}

/// As `write_vectored`, without SIGPIPE once the peer has closed: that signal would end a process whose main program does not ignore it.
fn send(stream: &TcpStream, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    // SAFETY: all fields may be zero.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // `IoSlice` has the layout of `iovec`; the call does not write through it.
    message.msg_iov = parts.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = parts.len() as _;
    // SAFETY: `message` points to `parts`, which live to the end of the call.
    let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

impl Stream {
    pub(crate) fn new(tcp: ParentOnly<TcpStream>) -> Self {
        Self {
            tcp,
            readable: true,
            writable: true,
        }
    }

    /// Reads; 0 bytes if the read would block. The end of the stream is an error.
    pub(crate) fn read(&mut self, buffer: &mut [u8]) -> Result<usize, ConnectionError> {
        if !self.readable {
            return Ok(0);
        }
        match (&*self.tcp).read(buffer) {
            Ok(0) => Err(ConnectionError::PeerGone("the peer closed the connection".into())),
            result => transferred(result, &mut self.readable),
        }
    }

    /// The carrier of a step over this stream, for records.
    pub(super) fn carrier(&self, step: u32) -> Carrier {
        Carrier {
            port: None,
            number: self.tcp.as_raw_fd().cast_unsigned(),
            step,
        }
    }

    /// Writes; 0 bytes if the write would block.
    pub(crate) fn write(&mut self, parts: &[IoSlice<'_>]) -> Result<usize, ConnectionError> {
        if !self.writable {
            return Ok(0);
        }
        transferred(send(&self.tcp, parts), &mut self.writable)
    }
}

/// The bytes that a call has transferred. 0 if it would block, which clears `ready`.
fn transferred(result: io::Result<usize>, ready: &mut bool) -> Result<usize, ConnectionError> {
    match result {
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            *ready = false;
            Ok(0)
        }
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(0),
        Err(error) => Err(broken(error)),
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
    fn a_peer_that_is_gone_causes_an_error_and_no_signal() {
        static RAISED: AtomicBool = AtomicBool::new(false);
        extern "C" fn raised(_: libc::c_int) {
            RAISED.store(true, Ordering::Relaxed);
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        drop(listener.accept().unwrap());
        let mut stream = Stream::new(ParentOnly::new(stream));
        // A Rust program ignores the signal; other programs that load the library need not.
        // SAFETY: the handler stores a flag.
        let before = unsafe { libc::signal(libc::SIGPIPE, raised as *const () as libc::sighandler_t) };
        // The first write is accepted, and answered by a reset.
        let error = loop {
            if let Err(error) = stream.write(&[IoSlice::new(b"header"), IoSlice::new(b"data")]) {
                break error;
            }
        };
        let again = stream.write(&[IoSlice::new(b"data")]);
        // SAFETY: restores the previous handler.
        unsafe { libc::signal(libc::SIGPIPE, before) };
        assert!(matches!(error, ConnectionError::PeerGone(_)), "{error}");
        assert!(again.is_err());
        assert!(!RAISED.load(Ordering::Relaxed));
    }
}
