//! What a rank's callers and its service thread share: messages that have come, connections, and who is gone.
//!
//! A rank has one connection to its parent in a binary tree over the ranks ([`Shared::parent`]) and opens others when it
//! has something to send. Who sees a connection end without a goodbye tells everyone he is connected to, and so does who
//! hears of it for the first time; the ranks below the dead one connect to the next ancestor. So every rank hears of
//! every death over as many connections as there are ranks.

mod events;
mod gone;
mod spread;

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    net::SocketAddr,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use gone::{GRACE, Gone, How};
use ringsight_kernels::AbortWord;
use spread::Seen;

use super::{
    Error, OnControl, OnLost, Result,
    frame::{Frame, MAX_MESSAGE},
    link::Link,
    sys::{self, Wake},
    system,
    wire::Hello,
};

/// How long a rank may be silent that no connection would tell of.
const SILENCE: Duration = Duration::from_millis(250);

/// How many bytes of memory a rank's messages may take until somebody receives them.
const MAX_HELD: usize = 2 * MAX_MESSAGE;
/// What a message takes besides its bytes, about.
const MESSAGE_OVERHEAD: usize = 128;
/// How many bytes may wait for a rank that reads nothing. Control messages beyond it are not sent.
const MAX_UNSENT: usize = 64 << 20;

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

/// Which messages of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Class {
    Message,
    Gather,
}

/// How a wait ends early.
#[derive(Clone, Copy)]
pub(super) struct Wait<'a> {
    pub(super) abort: &'a AbortWord,
    pub(super) timeout: Duration,
    /// How much longer a message may take than `timeout`.
    pub(super) grace: Duration,
    /// Ranks whose going ends it; `None`: every rank.
    pub(super) needs: Option<&'a [u32]>,
}

#[derive(Default)]
pub(super) struct State {
    inbox: HashMap<(u32, Class, u64), VecDeque<Vec<u8>>>,
    /// Of each rank, how many bytes of memory its messages in `inbox` take.
    held: HashMap<u32, usize>,
    /// The connection by which messages to a peer go.
    outs: HashMap<u32, Arc<Link>>,
    /// All connections.
    links: Vec<Arc<Link>>,
    /// Connections that the service does not read yet.
    pub(super) fresh: Vec<Arc<Link>>,
    gone: BTreeMap<u32, Gone>,
    /// Ranks that have said goodbye on one connection and have another by which their last messages come.
    leaving: HashSet<u32>,
    /// A death is new, and the tree may have a hole.
    heal: bool,
    on_control: Option<OnControl>,
    controls: VecDeque<(u32, Vec<u8>)>,
    /// How many bytes these have.
    control_bytes: usize,
    on_lost: Option<OnLost>,
    losses: VecDeque<(u32, String)>,
    /// Messages that we have spread.
    spread: u32,
    /// What each rank has spread so far.
    seen: HashMap<u32, Seen>,
    /// Who is silent is none of our business.
    bears_silence: bool,
    /// We have said goodbye.
    left: bool,
    /// We never will: see [`Shared::forget_goodbye`].
    #[cfg(test)]
    is_killed: bool,
    pub(super) stop: bool,
}

impl Shared {
    pub(super) fn new(
        (rank, cookie, table): (u32, u64, Vec<SocketAddr>),
        abort: Arc<AbortWord>,
        timeout: Duration,
        wake: Wake,
    ) -> Self {
        Self {
            rank,
            cookie,
            table,
            abort,
            timeout,
            wake,
            state: Mutex::default(),
            arrived: Condvar::new(),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // The state is whole between any two statements that could panic; a panicking caller does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pause<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let waited = self.arrived.wait_timeout(state, sys::ABORT_CHECK);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// A wait with the abort word and the time-out of the whole bootstrap, that needs every rank.
    pub(super) fn wait(&self) -> Wait<'_> {
        Wait {
            abort: &self.abort,
            timeout: self.timeout,
            grace: Duration::ZERO,
            needs: None,
        }
    }

    /// Sends a frame's header and payload to another rank; returns when the system has taken it.
    pub(super) fn send(&self, peer: u32, frame: &Frame, data: &[u8], wait: Wait<'_>) -> Result<()> {
        let doing = || format!("sending to rank {peer}");
        let deadline = Instant::now() + wait.timeout;
        let link = match self.link(peer) {
            Ok(link) => link,
            Err(Error::PeerLost { text, .. }) => return Err(self.unreachable(peer, text, wait)),
            Err(error) => return Err(error),
        };
        let end = link.push(&[&frame.header(data.len()), data]);
        loop {
            match link.flush() {
                Ok(taken) if taken >= end => return Ok(()),
                Ok(_) => {}
                Err(error) => {
                    let text = format!("rank {peer} is gone ({}: {error})", doing());
                    return Err(self.unreachable(peer, text, wait));
                }
            }
            let late = Instant::now() >= deadline;
            if wait.abort.is_set() || late {
                self.wake.wake(); // the service finishes the frame
                return Err(if late {
                    Error::TimedOut(format!("rank {peer} took no message for {:?}", wait.timeout))
                } else {
                    Error::Aborted(doing())
                });
            }
            sys::poll(
                &mut [sys::interest(&*link, libc::POLLOUT)],
                Some(sys::ABORT_CHECK),
            )
            .map_err(system("waiting for a connection"))?;
        }
    }

    /// A message of ours to ourselves.
    pub(super) fn keep(&self, class: Class, tag: u64, data: Vec<u8>) {
        self.state().hold(self.rank, class, tag, data);
        self.arrived.notify_all();
    }

    /// The connection to send to `peer` by, opened if need be; does not block.
    fn link(&self, peer: u32) -> Result<Arc<Link>> {
        self.link_of(&mut self.state(), peer)
    }

    fn link_of(&self, state: &mut State, peer: u32) -> Result<Arc<Link>> {
        if let Some(link) = state.outs.get(&peer) {
            return Ok(Arc::clone(link));
        }
        if let Some(gone) = state.gone.get(&peer) {
            let (rank, text) = (peer, gone.text.clone());
            return Err(Error::PeerLost { rank, text });
        }
        let hello = Hello::Peer {
            from: self.rank,
            to: peer,
        };
        let address = self.table[peer as usize];
        let link = Link::open(peer, &address, &hello.encode(self.cookie)).map_err(|error| {
            if sys::is_starved(&error) {
                return system(&format!("connecting to rank {peer} at {address}"))(error);
            }
            let text = format!("rank {peer} is gone (connecting to {address}: {error})");
            Error::PeerLost { rank: peer, text }
        })?;
        let link = Arc::new(link);
        self.begin(state, &link);
        state.outs.insert(peer, Arc::clone(&link));
        state.links.push(Arc::clone(&link));
        state.fresh.push(Arc::clone(&link));
        self.wake.wake();
        Ok(link)
    }

    /// Opens the connection to the parent, by which this rank hears of all others.
    pub(super) fn join_tree(&self) -> Result<()> {
        let mut state = self.state();
        let parent = Self::parent(&state, self.rank);
        parent.map_or(Ok(()), |parent| self.seek(&mut state, parent))
    }

    /// Opens a connection to a rank unless there is one. That it cannot be reached is only noted: what it said before may still come, and so
    /// may the reason.
    fn seek(&self, state: &mut State, peer: u32) -> Result<()> {
        match self.link_of(state, peer) {
            Err(Error::PeerLost { text, .. }) => {
                state.cannot_reach(peer, text);
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// The rank above `rank`: the nearest ancestor that has not died; without any, the least rank that has not.
    fn parent(state: &State, rank: u32) -> Option<u32> {
        let alive = |rank: &u32| state.gone.get(rank).is_none_or(|gone| gone.how != How::Died);
        let above = |rank: &u32| (*rank > 0).then(|| (*rank - 1) / 2);
        std::iter::successors(above(&rank), above)
            .find(alive)
            .or_else(|| (0..rank).find(alive))
    }

    /// Waits for the next message of (peer, class, tag).
    pub(super) fn recv(&self, peer: u32, class: Class, tag: u64, wait: Wait<'_>) -> Result<Vec<u8>> {
        let begin = Instant::now();
        let deadline = begin + wait.timeout + wait.grace;
        let mut state = self.state();
        loop {
            if let Some(message) = state.next(peer, class, tag) {
                return Ok(message);
            }
            if wait.abort.is_set() {
                return Err(Error::Aborted(format!("waiting for rank {peer}")));
            }
            if let Some(rank) = gone::missing(&state.gone, peer, wait.needs) {
                return Err(self.give_up(&mut state, rank));
            }
            if Instant::now() >= deadline {
                return Err(Error::TimedOut(format!(
                    "rank {peer} sent nothing for {:?} while rank {} waited",
                    wait.timeout, self.rank
                )));
            }
            // A rank that died before it connected to anybody is noticed by whoever tries to connect to it.
            if peer != self.rank
                && begin.elapsed() >= SILENCE
                && !state.links.iter().any(|link| link.peer == peer)
                && !state.gone.contains_key(&peer)
            {
                self.seek(&mut state, peer)?;
            }
            state = self.pause(state);
        }
    }

    /// The error for a peer that cannot be reached. It may have left over another's death and said so, or somebody else
    /// may know: the reason gets [`GRACE`] to arrive.
    fn unreachable(&self, peer: u32, text: String, wait: Wait<'_>) -> Error {
        let deadline = Instant::now() + GRACE;
        let mut state = self.state();
        loop {
            let needed = |rank: &&u32| wait.needs.is_none_or(|needs| needs.contains(rank));
            let died = state
                .gone
                .iter()
                .filter(|(_, gone)| gone.how == How::Died)
                .map(|(rank, _)| rank)
                .find(needed)
                .copied();
            let known = state.has_end(peer).then_some(peer);
            if let Some(rank) = died.or(known) {
                return self.give_up(&mut state, rank);
            }
            if Instant::now() >= deadline {
                state.cannot_reach(peer, text);
                return self.give_up(&mut state, peer);
            }
            if wait.abort.is_set() {
                return Error::PeerLost { rank: peer, text };
            }
            state = self.pause(state);
        }
    }

    /// Makes the error, and tells everyone: they may wait for us, not for who is gone.
    fn give_up(&self, state: &mut State, rank: u32) -> Error {
        let Some(gone) = state.gone.get_mut(&rank) else {
            return Error::internal_loss(rank);
        };
        let text = gone.text.clone();
        if !std::mem::replace(&mut gone.told, true) {
            let frame = gone.frame(rank);
            self.tell_all(state, &frame, None);
        }
        Error::PeerLost { rank, text }
    }

    /// How many connections there are with a rank.
    pub(super) fn links_of(&self, peer: u32) -> usize {
        let state = self.state();
        state.links.iter().filter(|link| link.peer == peer).count()
    }

    /// Queues a frame on every connection but `except`.
    fn tell_all(&self, state: &State, frame: &Frame, except: Option<&Arc<Link>>) {
        let bytes = frame.encode();
        let is_control = matches!(frame, Frame::Spread { .. });
        for link in &state.links {
            // Who is stopped hears of deaths when it goes on, and of what else was said it misses the rest.
            let is_full = is_control && link.unsent() > MAX_UNSENT;
            if !is_full && except.is_none_or(|except| !Arc::ptr_eq(link, except)) {
                link.push(&[&bytes]);
                // A broken connection is the service's to notice.
                let _ = link.flush();
            }
        }
        self.wake.wake();
    }

    /// Queues a frame on the connection to a rank, if there is one; does not block.
    pub(super) fn post(&self, peer: u32, frame: &Frame, data: &[u8]) {
        if let Some(link) = self.state().outs.get(&peer) {
            link.push(&[&frame.header(data.len()), data]);
            // A broken connection is the service's to notice.
            let _ = link.flush();
        }
        self.wake.wake();
    }

    /// Sends a control message; does not block.
    pub(super) fn post_control(&self, peer: u32, data: &[u8]) -> Result<()> {
        if peer == self.rank {
            self.state().control(peer, data.to_vec());
            self.wake.wake();
            return Ok(());
        }
        let link = self.link(peer)?;
        if link.unsent() > MAX_UNSENT {
            let text = format!("rank {peer} reads nothing: more than {MAX_UNSENT} bytes wait for it");
            return Err(Error::TimedOut(text));
        }
        let frame = Frame::Control { data: Vec::new() };
        link.push(&[&frame.header(data.len()), data]);
        // A broken connection is the service's to notice.
        let _ = link.flush();
        if link.has_unsent() {
            self.wake.wake();
        }
        Ok(())
    }

    /// Sends a control message to every other rank; does not block.
    pub(super) fn spread_control(&self, data: &[u8]) {
        let mut state = self.state();
        state.spread += 1;
        let frame = Frame::Spread {
            from: self.rank,
            number: state.spread,
            data: data.to_vec(),
        };
        self.tell_all(&state, &frame, None);
    }

    pub(super) fn on_control(&self, callback: OnControl) {
        self.state().on_control = Some(callback);
        self.wake.wake();
    }

    pub(super) fn on_lost(&self, callback: OnLost) {
        self.state().on_lost = Some(callback);
        self.wake.wake();
    }

    /// From here on a rank that is silent is not taken for dead.
    pub(super) fn bear_silence(&self) {
        let mut state = self.state();
        state.bears_silence = true;
        state.links.iter().for_each(|link| link.bear_silence());
    }

    /// Says goodbye to whoever is connected: from here on nobody's end matters to us, nor ours to others.
    pub(super) fn leave(&self, aborted: bool) {
        let mut state = self.state();
        if std::mem::replace(&mut state.left, true) {
            return;
        }
        for link in &state.links {
            let elsewhere = state
                .outs
                .get(&link.peer)
                .is_some_and(|out| !Arc::ptr_eq(out, link));
            link.push(&[&Frame::Goodbye { aborted, elsewhere }.encode()]);
            let _ = link.flush();
        }
        state.losses.clear();
        self.wake.wake();
    }

    /// Nothing will be said at the end, as if the process died.
    #[cfg(test)]
    pub(super) fn forget_goodbye(&self) {
        let mut state = self.state();
        (state.left, state.is_killed, state.stop) = (true, true, true);
    }

    /// Ends the service thread.
    pub(super) fn stop(&self) {
        self.state().stop = true;
        self.wake.wake();
    }
}

impl State {
    /// Keeps a message until somebody receives it. Returns whether its rank may go on sending.
    fn hold(&mut self, from: u32, class: Class, tag: u64, data: Vec<u8>) -> bool {
        let held = self.held.entry(from).or_default();
        *held += MESSAGE_OVERHEAD + data.len();
        let is_fine = *held <= MAX_HELD;
        self.inbox.entry((from, class, tag)).or_default().push_back(data);
        is_fine
    }

    /// Takes the oldest message that is kept.
    fn next(&mut self, from: u32, class: Class, tag: u64) -> Option<Vec<u8>> {
        let key = (from, class, tag);
        let queue = self.inbox.get_mut(&key)?;
        let message = queue.pop_front();
        if queue.is_empty() {
            self.inbox.remove(&key);
        }
        let message = message?;
        if let Some(held) = self.held.get_mut(&from) {
            *held -= MESSAGE_OVERHEAD + message.len();
        }
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_that_nobody_receives_are_bounded_for_each_rank() {
        let mut state = State::default();
        // Zeros take no memory before they are written.
        let long = || vec![0; MAX_MESSAGE - MESSAGE_OVERHEAD];
        assert!(state.hold(1, Class::Message, 7, long()));
        assert!(state.hold(1, Class::Gather, 8, long()));
        assert!(!state.hold(1, Class::Message, 9, vec![0]), "a byte too many");
        assert!(state.hold(2, Class::Message, 7, long()), "another rank");
        assert_eq!(
            state.next(1, Class::Message, 7).map(|data| data.len()),
            Some(long().len())
        );
        assert!(state.hold(1, Class::Message, 7, Vec::new()));
        assert_eq!(state.next(1, Class::Message, 6), None);
        for (class, tag) in [(Class::Gather, 8), (Class::Message, 9), (Class::Message, 7)] {
            assert!(state.next(1, class, tag).is_some());
        }
        assert_eq!((state.held[&1], state.inbox.len()), (0, 1));
    }

    #[test]
    fn control_messages_that_nobody_takes_are_bounded() {
        let mut state = State::default();
        for number in 0..100 {
            state.control(number, vec![0; super::super::frame::MAX_CONTROL]);
        }
        assert!(state.control_bytes <= 64 << 20, "{}", state.control_bytes);
        assert_eq!(state.controls.len(), state.control_bytes >> 20);
        assert_eq!(
            state.controls.back().map(|(from, _)| *from),
            Some(99),
            "the latest stays"
        );
        for number in 0..10_000 {
            state.control(number, Vec::new());
        }
        assert_eq!(state.controls.len(), 4096);
        while state.next_control().is_some() {}
        assert_eq!(state.control_bytes, 0);
    }
}
