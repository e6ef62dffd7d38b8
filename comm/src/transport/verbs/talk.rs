//! What the ends of a connection say to each other beside RDMA: messages of one length over the socket, when a path fails and when
//! one is mended. Nobody's only way: the paths that work carry them, too.

use std::io::IoSlice;

use ringsight_verbs::endpoint::MESSAGE_BYTES;

use crate::transport::socket::Socket;

/// One end's part.
pub(super) struct Talk {
    /// The message that is being read, and how much of it is here.
    message: [u8; MESSAGE_BYTES],
    here: usize,
    /// The message that is being written, and how much of it is gone.
    unsent: Option<([u8; MESSAGE_BYTES], usize)>,
    /// Why nothing more comes.
    gone: Option<String>,
}

impl Talk {
    pub(super) fn new() -> Self {
        Self {
            message: [0; MESSAGE_BYTES],
            here: 0,
            unsent: None,
            gone: None,
        }
    }

    /// Reads what there is, and gives each message to `hear`.
    pub(super) fn read(&mut self, socket: &mut Socket, mut hear: impl FnMut(&[u8])) {
        while self.gone.is_none() {
            match socket.read(&mut self.message[self.here..]) {
                Ok(0) => return,
                Ok(read) => self.here += read,
                Err(text) => self.gone = Some(text),
            }
            if self.here == MESSAGE_BYTES {
                self.here = 0;
                hear(&self.message);
            }
        }
    }

    /// Writes what `next` has, as far as the socket takes it.
    pub(super) fn write(
        &mut self,
        socket: &mut Socket,
        mut next: impl FnMut() -> Option<[u8; MESSAGE_BYTES]>,
    ) {
        loop {
            let Some((message, written)) = self.unsent.or_else(|| Some((next()?, 0))) else {
                return;
            };
            // A socket that is broken is found so when it is read.
            let now = socket
                .write(&[IoSlice::new(&message[written..])])
                .unwrap_or(MESSAGE_BYTES);
            self.unsent = (written + now < MESSAGE_BYTES).then_some((message, written + now));
            if now == 0 {
                return;
            }
        }
    }

    /// Whether the peer has closed the socket: its process or its communicator is gone.
    pub(super) fn gone(&self) -> Option<&str> {
        self.gone.as_deref()
    }

    /// Events of the socket that it waits for.
    pub(super) fn events(&self) -> libc::c_short {
        let read = if self.gone.is_none() { libc::POLLIN } else { 0 };
        read | if self.unsent.is_some() { libc::POLLOUT } else { 0 }
    }
}
