//! Roots: where the ranks of new communicators tell their addresses and learn everyone else's.
//!
//! All unique ids of a process are served by one thread at one port, which ends when the last of them has been used: an
//! id that is never used costs a table entry, not a thread and a descriptor of its own. Which id a connection is for its
//! cookie says.
//!
//! With several ids for one communicator, the root of the first has the table; the others relay for the ranks that were
//! given to them, each over one connection, so that no root has more connections than its share of ranks and roots.

mod hall;
mod registry;

use std::{
    collections::{BTreeMap, HashMap},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use hall::{Failed, Hall};
use registry::Registry;
pub(super) use registry::{create, resume, serve, settle};

use super::{
    fork::ParentOnly,
    link::Link,
    pending::Undecided,
    sys,
    wire::{ANSWER_HEADER, Answer, DOWNWARD_HEADER, EVERYONE, Hello, Joining, Upward},
};
use crate::log;

/// How long somebody may take to read an answer before its connection is closed.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Pause of the listener when the process has no descriptor left.
const STARVED_PAUSE: Duration = Duration::from_millis(20);
/// How many bytes may wait for who reads nothing: a table of all ranks that there can be has a tenth of it.
const MAX_UNSENT: usize = 16 << 20;
/// Bytes that one read takes.
const PIECE: usize = 16 << 10;

/// Names a connection.
type Id = u64;

struct Connection {
    link: Link,
    /// Which id it is for.
    cookie: u64,
    role: Role,
}

enum Role {
    /// A rank that waits for its answer.
    Rank(Joining),
    /// A root that relays to us; what it has said of its next message.
    Relay(Vec<u8>),
    /// The root that we relay to; likewise.
    Main(Vec<u8>),
    /// It has its answer and is closed once it has been sent.
    Done(Instant),
}

struct Root {
    listener: ParentOnly<TcpListener>,
    registry: Arc<Registry>,
    connections: BTreeMap<Id, Connection>,
    next: Id,
    /// By cookie, while ranks wait.
    halls: HashMap<u64, Hall>,
    /// By cookie: how the last attempt failed, for ranks that come after it.
    failed: HashMap<u64, Failed>,
}

impl Root {
    /// A root that serves the ids of `registry` at `listener`.
    fn new(listener: TcpListener, registry: Arc<Registry>) -> Self {
        Self {
            listener: ParentOnly::new(listener),
            registry,
            connections: BTreeMap::new(),
            next: 0,
            halls: HashMap::new(),
            failed: HashMap::new(),
        }
    }

    fn run(mut self) {
        let mut undecided = Undecided::new(Hello::missing);
        let mut piece = vec![0; PIECE];
        let mut starved = false;
        let mut previous = 0;
        loop {
            let Some(turn) = self.registry.begin_turn(self.connections.is_empty()) else {
                return;
            };
            let mut fds = vec![
                sys::interest(&*self.registry, libc::POLLIN),
                sys::interest(&*self.listener, if starved { 0 } else { libc::POLLIN }),
            ];
            let ids: Vec<Id> = self.connections.keys().copied().collect();
            fds.extend(self.connections.values().map(|connection| {
                let out = if connection.link.has_unsent() {
                    libc::POLLOUT
                } else {
                    0
                };
                sys::interest(&connection.link, libc::POLLIN | out)
            }));
            undecided.interests(&mut fds);
            let mut timeout = self.next_deadline(starved, !undecided.is_empty());
            if turn != previous {
                // Somebody waits for this turn, whose wake may have ended the one before.
                timeout = Some(Duration::ZERO);
                previous = turn;
            }
            if sys::poll(&mut fds, timeout).is_err() {
                self.registry.end();
                return; // only for want of memory; ranks see the root go
            }
            if sys::is_ready(&fds[0]) {
                self.registry.drain();
            }
            for (id, fd) in ids.into_iter().zip(&fds[2..]) {
                if sys::is_ready(fd) {
                    self.serve(id, &mut piece);
                }
            }
            starved = sys::is_ready(&fds[1]) && !undecided.accept(&self.listener);
            for (stream, bytes) in undecided.decided() {
                self.welcome(stream, &bytes);
            }
            self.give_up();
            self.tell_news();
            let full =
                |(id, connection): (&Id, &Connection)| (connection.link.unsent() > MAX_UNSENT).then_some(*id);
            let full: Vec<Id> = self.connections.iter().filter_map(full).collect();
            full.into_iter().for_each(|id| self.ended(id));
            let now = Instant::now();
            self.connections.retain(|_, connection| match connection.role {
                Role::Done(deadline) => connection.link.has_unsent() && now < deadline,
                _ => true,
            });
            if !self
                .connections
                .values()
                .any(|connection| connection.link.has_unsent())
            {
                self.registry.finish_turn(turn);
            }
        }
    }

    fn next_deadline(&self, starved: bool, undecided: bool) -> Option<Duration> {
        if starved {
            return Some(STARVED_PAUSE);
        }
        let mut next = self.halls.values().filter_map(Hall::next_deadline).min();
        let closing = self
            .connections
            .values()
            .filter_map(|connection| match connection.role {
                Role::Done(deadline) => Some(deadline),
                _ => None,
            });
        next = next.into_iter().chain(closing).min();
        let mut timeout = next.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if undecided {
            timeout = Some(timeout.unwrap_or(Duration::MAX).min(Duration::from_secs(1)));
        }
        timeout
    }

    fn enter(&mut self, link: Link, cookie: u64, role: Role) -> Id {
        self.next += 1;
        self.connections
            .insert(self.next, Connection { link, cookie, role });
        self.next
    }

    /// Somebody has said hello, or something else.
    fn welcome(&mut self, stream: ParentOnly<TcpStream>, bytes: &[u8]) {
        let from = stream.peer_addr();
        let link = Link::accepted(0, stream);
        let refusal = match Hello::parse(bytes) {
            Ok((cookie, hello)) if self.registry.serves(cookie) => match hello {
                Hello::Join(joining) => {
                    let by = self.enter(link, cookie, Role::Rank(joining));
                    return self.join(cookie, joining, by, false);
                }
                Hello::Relay => {
                    self.enter(link, cookie, Role::Relay(Vec::new()));
                    return;
                }
                Hello::Peer { .. } => Answer::Refused("a rank's connection that came to a root".to_owned()),
            },
            Ok(_) => Answer::Unknown,
            Err(stranger) => Answer::Refused(stranger.text()),
        };
        // What it has said on is not read, but would make the system discard our answer.
        let _ = link.read(&mut [0; 512]);
        if let Ok(from) = from {
            tracing::info!(target: log::BOOTSTRAP, "Bootstrap : root refuses {from}: {refusal:?}");
        }
        let by = self.enter(link, 0, Role::Done(Instant::now() + ANSWER_PATIENCE));
        self.answer(by, None, &refusal);
    }

    /// Gives an answer to a rank over a connection, its own (`relayed` is `None`) or its relay's.
    fn answer(&mut self, by: Id, relayed: Option<u32>, answer: &Answer) {
        let Some(connection) = self.connections.get_mut(&by) else {
            return;
        };
        let rank = relayed.map(u32::to_le_bytes);
        connection
            .link
            .push(&[rank.as_ref().map_or(&[], |rank| &rank[..]), &answer.encode()]);
        // A broken connection is found by reading.
        let _ = connection.link.flush();
        if relayed.is_none() && !matches!(answer, Answer::Waiting { .. }) {
            connection.role = Role::Done(Instant::now() + ANSWER_PATIENCE);
        }
    }

    /// A connection has something to say, takes more of what we say, or has ended.
    fn serve(&mut self, id: Id, piece: &mut [u8]) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        let _ = connection.link.flush();
        let read = match connection.link.read(piece) {
            Ok(0) => None,
            Ok(read) => Some(&piece[..read]),
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted
                ) =>
            {
                return;
            }
            Err(_) => None,
        };
        match (&mut connection.role, read) {
            (Role::Relay(bytes) | Role::Main(bytes), Some(read)) => bytes.extend_from_slice(read),
            // A rank says nothing after its hello: bytes and an end alike mean that it is not one any more.
            (Role::Rank(_) | Role::Done(_), _) | (_, None) => return self.ended(id),
        }
        let fine = match connection.role {
            Role::Relay(_) => self.hear_relay(id),
            _ => self.hear_main(id),
        };
        if !fine {
            self.ended(id);
        }
    }

    /// Takes what a relay has said; false for rubbish.
    fn hear_relay(&mut self, id: Id) -> bool {
        loop {
            let Some(Connection {
                role: Role::Relay(bytes),
                cookie,
                ..
            }) = self.connections.get_mut(&id)
            else {
                return true;
            };
            if bytes.len() < Upward::BYTES {
                return true;
            }
            let message: Vec<u8> = bytes.drain(..Upward::BYTES).collect();
            let cookie = *cookie;
            match Upward::parse(&message) {
                Some(Upward::Joined(joining)) => self.join(cookie, joining, id, true),
                Some(Upward::Gone(joining)) => {
                    self.lost(cookie, |rank, member| rank == joining.rank && member.by == id);
                }
                None => return false,
            }
        }
    }

    /// Takes what the root with the table has said; false for rubbish.
    fn hear_main(&mut self, id: Id) -> bool {
        loop {
            let Some(Connection {
                role: Role::Main(bytes),
                cookie,
                ..
            }) = self.connections.get_mut(&id)
            else {
                return true;
            };
            let cookie = *cookie;
            let Some((rank, rest)) = bytes.split_first_chunk::<DOWNWARD_HEADER>() else {
                return true;
            };
            let rank = u32::from_le_bytes(*rank);
            match Answer::missing(rest) {
                None => return false,
                Some(0) => {}
                Some(_) => return true,
            }
            // The length stands in the header that `missing` has found whole.
            let whole = super::wire::word(rest, 4).map_or(0, |length| ANSWER_HEADER + length as usize);
            let Some(answer) = rest.get(..whole).and_then(Answer::parse) else {
                return false;
            };
            bytes.drain(..DOWNWARD_HEADER + whole);
            let is_table = matches!(answer, Answer::Table { .. });
            for by in self.ranks_of(cookie, |joining| rank == EVERYONE || joining.rank == rank) {
                self.answer(by, None, &answer);
            }
            if is_table {
                self.close(cookie);
            } else if self.ranks_of(cookie, |_| true).is_empty() {
                self.leave_hall(cookie); // the ranks may try again
            }
        }
    }

    /// A connection is at its end.
    fn ended(&mut self, id: Id) {
        let Some(Connection { cookie, role, .. }) = self.connections.remove(&id) else {
            return;
        };
        match role {
            Role::Rank(joining) => match self.halls.get(&cookie) {
                Some(Hall::Relay { by, .. }) => {
                    let by = *by;
                    if let Some(main) = self.connections.get(&by) {
                        main.link.push(&[&Upward::Gone(joining).encode()]);
                        let _ = main.link.flush();
                    }
                    if self.ranks_of(cookie, |_| true).is_empty() {
                        self.leave_hall(cookie);
                    }
                }
                _ => self.lost(cookie, |_, member| member.by == id),
            },
            Role::Relay(_) => self.lost(cookie, |_, member| member.by == id),
            Role::Main(_) => {
                let Some(Hall::Relay { main, .. }) = self.halls.remove(&cookie) else {
                    return;
                };
                let text = unreachable(&main.1, "it closed the connection");
                for by in self.ranks_of(cookie, |_| true) {
                    self.answer(by, None, &Answer::Refused(text.clone()));
                }
            }
            Role::Done(_) => {}
        }
    }
}

fn unreachable(address: &SocketAddr, why: &str) -> String {
    format!("the root of the first unique id, at {address}, cannot be reached ({why})")
}
