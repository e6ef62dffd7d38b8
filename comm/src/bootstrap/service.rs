//! The rank's own thread: accepts connections of other ranks, reads messages into the inbox, notices who is gone.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use ringsight_kernels::AbortWord;

use super::{
    Error, Result,
    pending::Undecided,
    sys::{self, Wake},
    wire::{FrameKind, FrameReader, Hello, frame_header},
};

/// How long messages of a rank may still be under way on its own connection after it closed ours.
const GRACE: Duration = Duration::from_millis(500);
/// How long a rank may go on waiting for one that is well after a third one gave up over a loss.
const HEARSAY_GRACE: Duration = Duration::from_secs(1);

/// A connection between two ranks. Messages go one way; the other way carries at most a [`FrameKind::Lost`].
pub(super) struct Link {
    stream: TcpStream,
    /// Held for the length of a frame.
    writing: Mutex<()>,
}

/// What the service thread and the callers share.
pub(super) struct Shared {
    pub(super) rank: u32,
    pub(super) cookie: u64,
    /// Where each rank listens.
    pub(super) table: Vec<SocketAddr>,
    pub(super) abort: Arc<AbortWord>,
    pub(super) timeout: Duration,
    pub(super) wake: Wake,
    state: Mutex<State>,
    arrived: Condvar,
}

#[derive(Default)]
struct State {
    inbox: HashMap<(u32, u32), VecDeque<Vec<u8>>>,
    /// Connections that we opened, by peer.
    outs: HashMap<u32, Arc<Link>>,
    /// Connections that peers opened.
    ins: Vec<(u32, Arc<Link>)>,
    /// Connections that the service does not know yet.
    fresh: Vec<(u32, Arc<Link>)>,
    /// Peers whose own connection to us ended: nothing more will come.
    ended: HashMap<u32, String>,
    /// Peers that closed our connection to them, and when.
    closed: HashMap<u32, (Instant, String)>,
    /// Peers that gave up, when we heard of it, and over whose loss: (rank, what was seen).
    gave_up: HashMap<u32, (Instant, u32, String)>,
    /// We gave up and have told so.
    announced: bool,
    stop: bool,
}

impl Shared {
    pub(super) fn new(
        (rank, cookie, table): (u32, u64, Vec<SocketAddr>),
        abort: Arc<AbortWord>,
        timeout: Duration,
        wake: Wake,
    ) -> Self {
        let (state, arrived) = (Mutex::default(), Condvar::new());
        Self {
            rank,
            cookie,
            table,
            abort,
            timeout,
            wake,
            state,
            arrived,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements that could panic; a panicking caller does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the service thread.
    pub(super) fn stop(&self) {
        self.state().stop = true;
        self.wake.wake();
    }

    /// Sends one message to another rank (or to ourselves).
    pub(super) fn send(&self, peer: u32, tag: u32, data: &[u8]) -> Result<()> {
        if peer == self.rank {
            self.state()
                .inbox
                .entry((peer, tag))
                .or_default()
                .push_back(data.to_vec());
            self.arrived.notify_all();
            return Ok(());
        }
        let doing = || format!("sending to rank {peer}");
        let deadline = Instant::now() + self.timeout;
        let link = self.link(peer, deadline)?;
        let _frame = link.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut written = self.write(
            &link.stream,
            &frame_header(FrameKind::Data, tag, data.len()),
            deadline,
        );
        if matches!(written, Ok(true)) {
            written = self.write(&link.stream, data, deadline);
        }
        match written {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Aborted(doing())),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(Error::TimedOut(format!(
                "rank {peer} took no message for {:?}",
                self.timeout
            ))),
            Err(error) => Err(self.unreachable(peer, format!("rank {peer} is gone ({}: {error})", doing()))),
        }
    }

    /// Writes everything; `Ok(false)`: aborted.
    fn write(&self, mut stream: &TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<bool> {
        while !bytes.is_empty() {
            match stream.write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.abort.is_set() {
                        return Ok(false);
                    }
                    if Instant::now() >= deadline {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    sys::poll(
                        &mut [sys::interest(stream, libc::POLLOUT)],
                        Some(sys::ABORT_CHECK),
                    )?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Our connection to `peer`, opened if need be.
    fn link(&self, peer: u32, deadline: Instant) -> Result<Arc<Link>> {
        if let Some(link) = self.state().outs.get(&peer) {
            return Ok(Arc::clone(link));
        }
        let address = self.table[peer as usize];
        let opened = sys::connect(&address, deadline, &|| self.abort.is_set());
        let stream = match opened {
            Ok(Some(stream)) => stream,
            Ok(None) => return Err(Error::Aborted(format!("connecting to rank {peer}"))),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(Error::TimedOut(format!(
                    "rank {peer} did not accept a connection at {address}"
                )));
            }
            Err(error) => {
                let text = format!("rank {peer} is gone (connecting to {address}: {error})");
                return Err(self.unreachable(peer, text));
            }
        };
        let link = Arc::new(Link {
            stream,
            writing: Mutex::new(()),
        });
        let hello = Hello::Peer {
            from: self.rank,
            to: peer,
        }
        .encode(self.cookie);
        let mut state = self.state();
        if let Some(earlier) = state.outs.get(&peer) {
            return Ok(Arc::clone(earlier)); // another thread was faster; a connection without hello is ignored
        }
        // A new socket takes this little without blocking; if not, it is broken and the next write says so.
        let _ = (&link.stream).write(&hello);
        state.outs.insert(peer, Arc::clone(&link));
        state.fresh.push((peer, Arc::clone(&link)));
        drop(state);
        self.wake.wake();
        Ok(link)
    }

    /// Waits for the next message of (peer, tag).
    pub(super) fn recv(&self, peer: u32, tag: u32) -> Result<Vec<u8>> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.state();
        loop {
            if let Some(queue) = state.inbox.get_mut(&(peer, tag)) {
                let message = queue.pop_front();
                if queue.is_empty() {
                    state.inbox.remove(&(peer, tag));
                }
                if let Some(message) = message {
                    return Ok(message);
                }
            }
            if self.abort.is_set() {
                return Err(Error::Aborted(format!("waiting for rank {peer}")));
            }
            if let Some((rank, text)) = state.is_lost(peer) {
                drop(state);
                return Err(self.give_up(rank, text));
            }
            if Instant::now() >= deadline {
                let text = format!(
                    "rank {peer} sent nothing for {:?} while rank {} waited",
                    self.timeout, self.rank
                );
                return Err(Error::TimedOut(text));
            }
            if peer != self.rank
                && !state.outs.contains_key(&peer)
                && !state.ins.iter().any(|(r, _)| *r == peer)
            {
                // Nothing that would tell us of its death: open a connection of our own, only to watch it.
                drop(state);
                self.link(peer, deadline)?;
                state = self.state();
                continue;
            }
            state = self
                .arrived
                .wait_timeout(state, sys::ABORT_CHECK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The error for a peer that cannot be reached. It may have left over another's loss and said so: its last words get
    /// [`GRACE`] to arrive.
    fn unreachable(&self, peer: u32, text: String) -> Error {
        let deadline = Instant::now() + GRACE;
        let mut state = self.state();
        while !state.gave_up.contains_key(&peer)
            && !state.ended.contains_key(&peer)
            && Instant::now() < deadline
            && !self.abort.is_set()
        {
            state = self
                .arrived
                .wait_timeout(state, sys::ABORT_CHECK)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        let hearsay = state.gave_up.get(&peer).or_else(|| state.gave_up.values().next());
        let (rank, text) = hearsay.map_or((peer, text), |(_, rank, text)| (*rank, text.clone()));
        drop(state);
        self.give_up(rank, text)
    }

    /// Makes the error, and tells the ranks that we are connected to, once: they may wait for us, not for the culprit.
    fn give_up(&self, rank: u32, text: String) -> Error {
        let mut state = self.state();
        if !std::mem::replace(&mut state.announced, true) {
            let mut frame = frame_header(FrameKind::Lost, rank, text.len()).to_vec();
            frame.extend(text.as_bytes());
            let outs = &state.outs;
            // Behind our messages where there are any, so that nobody gives up what he could still have had.
            let backwards = state.ins.iter().filter(|(peer, _)| !outs.contains_key(peer));
            for link in outs.values().chain(backwards.map(|(_, link)| link)) {
                // Only if nobody is in the middle of a frame, and only if it fits: this is a courtesy.
                if let Ok(_writing) = link.writing.try_lock() {
                    let _ = (&link.stream).write(&frame);
                }
            }
        }
        Error::PeerLost { rank, text }
    }

    /// The service thread.
    pub(super) fn serve(&self, listener: &TcpListener) {
        let mut undecided = Undecided::new(Hello::missing);
        let mut readers: Vec<Reader> = Vec::new();
        let mut starved = false;
        loop {
            {
                let mut state = self.state();
                if state.stop {
                    return;
                }
                for (peer, link) in state.fresh.drain(..) {
                    readers.push(Reader {
                        peer,
                        link,
                        out: true,
                        frames: FrameReader::default(),
                    });
                }
            }
            let mut fds = vec![
                sys::interest(&self.wake, libc::POLLIN),
                sys::interest(listener, if starved { 0 } else { libc::POLLIN }),
            ];
            let first = fds.len();
            fds.extend(
                readers
                    .iter()
                    .map(|reader| sys::interest(&reader.link.stream, libc::POLLIN)),
            );
            let after = fds.len();
            undecided.interests(&mut fds);
            let timeout = match (starved, undecided.is_empty()) {
                (true, _) => Some(Duration::from_millis(20)),
                (false, false) => Some(Duration::from_secs(1)),
                (false, true) => None,
            };
            if sys::poll(&mut fds, timeout).is_err() {
                return; // only for want of memory; our peers see the connections close
            }
            if sys::is_ready(&fds[0]) {
                self.wake.drain();
            }
            starved = !undecided.accept(listener);
            for (stream, bytes) in undecided.decided() {
                if let Some(Hello::Peer { from, to }) = Hello::parse(&bytes, self.cookie)
                    && to == self.rank
                    && (from as usize) < self.table.len()
                {
                    let link = Arc::new(Link {
                        stream,
                        writing: Mutex::new(()),
                    });
                    self.state().ins.push((from, Arc::clone(&link)));
                    readers.push(Reader {
                        peer: from,
                        link,
                        out: false,
                        frames: FrameReader::default(),
                    });
                }
            }
            // New readers stand behind those that were polled; the next poll sees them.
            let mut ready = fds[first..after].iter().map(sys::is_ready);
            readers.retain_mut(|reader| !ready.next().unwrap_or(false) || self.read(reader));
        }
    }

    /// Takes what a connection has; false when it is at its end.
    fn read(&self, reader: &mut Reader) -> bool {
        let mut piece = vec![0; 64 << 10];
        let end = match (&reader.link.stream).read(&mut piece) {
            Ok(0) => Some("closed its connection: it aborted, was destroyed or its process ended".to_owned()),
            Ok(read) => {
                reader.frames.push(&piece[..read]);
                None
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                ) =>
            {
                None
            }
            Err(error) => Some(format!("is gone ({error})")),
        };
        let mut state = self.state();
        let end = loop {
            match reader.frames.next() {
                Ok(Some(frame)) if frame.kind == FrameKind::Lost => {
                    let text = String::from_utf8_lossy(&frame.data).into_owned();
                    state
                        .gave_up
                        .entry(reader.peer)
                        .or_insert((Instant::now(), frame.tag, text));
                }
                Ok(Some(frame)) => state
                    .inbox
                    .entry((reader.peer, frame.tag))
                    .or_default()
                    .push_back(frame.data),
                Ok(None) => break end,
                Err(text) => break Some(format!("sent {text}")),
            }
        };
        if let Some(text) = &end {
            let text = format!("rank {} {text}", reader.peer);
            if reader.out {
                state.closed.insert(reader.peer, (Instant::now(), text));
            } else {
                state.ins.retain(|(_, link)| !Arc::ptr_eq(link, &reader.link));
                state.ended.insert(reader.peer, text);
            }
        }
        drop(state);
        self.arrived.notify_all();
        end.is_none()
    }
}

impl State {
    /// Why nothing more will come from `peer`, if so: (whose loss it is, what was seen).
    ///
    /// The end of its own connection is certain, since messages come in order before it. The end of ours alone is not:
    /// its connection may be on its way, so it gets [`GRACE`]. A peer that gave up sends nothing more, either; if
    /// another rank did, `peer` may not have noticed yet or may not depend on it, so it gets [`HEARSAY_GRACE`].
    fn is_lost(&self, peer: u32) -> Option<(u32, String)> {
        if let Some((_, rank, text)) = self.gave_up.get(&peer) {
            return Some((*rank, text.clone()));
        }
        if let Some(text) = self.ended.get(&peer) {
            return Some((peer, text.clone()));
        }
        let connected = self.ins.iter().any(|(rank, _)| *rank == peer);
        if let Some((since, text)) = self.closed.get(&peer).filter(|_| !connected)
            && since.elapsed() >= GRACE
        {
            return Some((peer, text.clone()));
        }
        let mut hearsay = self
            .gave_up
            .values()
            .filter(|(since, ..)| since.elapsed() >= HEARSAY_GRACE);
        hearsay.next().map(|(_, rank, text)| (*rank, text.clone()))
    }
}

/// A connection as the service thread reads it.
struct Reader {
    peer: u32,
    link: Arc<Link>,
    out: bool,
    frames: FrameReader,
}
