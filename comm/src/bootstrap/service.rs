//! The rank's own thread: accepts connections of other ranks, reads frames, notices who is gone.

use std::{
    io,
    net::{TcpListener, TcpStream},
    sync::Arc,
    time::Duration,
};

use super::{
    fork::ParentOnly,
    frame::{Frame, FrameReader},
    link::Link,
    pending::Undecided,
    shared::Shared,
    sys,
    wire::Hello,
};

/// Pause of the listener when the process has no descriptor left.
const STARVED_PAUSE: Duration = Duration::from_millis(20);
/// Connections that a rank may have opened to this one. Two ranks that connect at the same time have two; a rank that connects again
/// after the other has noticed the end of a connection has one more.
const MAX_LINKS: usize = 8;
/// Bytes that one read takes.
const PIECE: usize = 16 << 10;

/// A connection as the service thread reads it.
struct Reader {
    link: Arc<Link>,
    frames: FrameReader,
}

impl Reader {
    fn new(link: Arc<Link>) -> Self {
        Self {
            link,
            frames: FrameReader::default(),
        }
    }

    /// Takes what the connection has; why it is at its end, if it is.
    fn read(&mut self, shared: &Shared, piece: &mut [u8]) -> Result<(), String> {
        let end = match self.link.read(piece) {
            Ok(0) => Err("closed its connection without a goodbye: its process ended".to_owned()),
            Ok(read) => {
                self.frames.push(&piece[..read]);
                Ok(())
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                Ok(())
            }
            Err(error) => Err(format!("is gone ({error})")),
        };
        while let Some(frame) = self.frames.next().map_err(|text| format!("sent {text}"))? {
            shared.take(&self.link, frame)?;
        }
        end
    }
}

impl Shared {
    /// The connection of another rank; anybody else is told why it is closed.
    fn welcome(&self, stream: ParentOnly<TcpStream>, bytes: &[u8]) -> Option<Arc<Link>> {
        let text = match Hello::parse(bytes) {
            Ok((cookie, Hello::Peer { from, to })) if cookie == self.cookie => {
                if to != self.rank || from == self.rank || from as usize >= self.table.len() {
                    format!("this is rank {}, and not rank {to} of rank {from}", self.rank)
                } else if self.links_of(from) >= MAX_LINKS {
                    format!("rank {from} has {MAX_LINKS} connections to rank {to} already")
                } else {
                    return Some(Arc::new(Link::accepted(from, stream)));
                }
            }
            Ok(_) => format!("this is rank {} of another communicator", self.rank),
            Err(stranger) => stranger.text(),
        };
        let link = Link::accepted(self.rank, stream);
        // What it has said on is not read, but would make the system discard our answer.
        let _ = link.read(&mut [0; 512]);
        link.push(&[&Frame::Refused { text }.encode()]);
        let _ = link.flush();
        link.shut_down();
        None
    }

    /// The service thread.
    pub(super) fn serve(&self, listener: &TcpListener) {
        let mut undecided = Undecided::new(Hello::missing);
        let mut readers: Vec<Reader> = Vec::new();
        let mut piece = vec![0; PIECE];
        let mut starved = false;
        loop {
            self.heal();
            self.deliver();
            {
                let mut state = self.state();
                readers.extend(state.fresh.drain(..).map(Reader::new));
                if state.stop {
                    break;
                }
            }
            let mut fds = vec![
                sys::interest(&self.wake, libc::POLLIN),
                sys::interest(listener, if starved { 0 } else { libc::POLLIN }),
            ];
            let first = fds.len();
            fds.extend(readers.iter().map(|reader| {
                let out = if reader.link.has_unsent() {
                    libc::POLLOUT
                } else {
                    0
                };
                sys::interest(&*reader.link, libc::POLLIN | out)
            }));
            let after = fds.len();
            undecided.interests(&mut fds);
            let timeout = match (starved, undecided.is_empty()) {
                (true, _) => Some(STARVED_PAUSE),
                (false, false) => Some(Duration::from_secs(1)),
                (false, true) => None,
            };
            if sys::poll(&mut fds, timeout).is_err() {
                break; // only for want of memory; our peers see the connections close
            }
            if sys::is_ready(&fds[0]) {
                self.wake.drain();
            }
            let mut ready = fds[first..after].iter();
            readers.retain_mut(|reader| {
                if !ready.next().is_some_and(sys::is_ready) {
                    return true;
                }
                // The system says why a connection could not be made to whoever asks first: read after writing, both
                // fail, and either text will do.
                let flushed = reader.link.flush();
                let read = reader.read(self, &mut piece);
                let why = match (read, flushed) {
                    (_, Err(error)) if !reader.link.was_made() => format!("cannot be reached ({error})"),
                    (Err(why), _) => why,
                    (Ok(()), _) => return true,
                };
                self.ended(&reader.link, &why);
                false
            });
            starved = sys::is_ready(&fds[1]) && !undecided.accept(listener);
            for (stream, bytes) in undecided.decided() {
                if let Some(link) = self.welcome(stream, &bytes) {
                    self.adopt(&link);
                    readers.push(Reader::new(link));
                }
            }
        }
        self.close();
    }
}
