//! The root: one thread, one rendezvous.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use super::{
    Error, Result, UniqueId,
    pending::Undecided,
    sys,
    wire::{Answer, Hello, MAX_RANKS},
};

/// How long a rank may take to read the answer before it counts as gone.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Pause of the listener when the process has no descriptor left.
const STARVED_PAUSE: Duration = Duration::from_millis(20);

/// A rank that waits for the others.
struct Member {
    stream: TcpStream,
    address: SocketAddr,
    /// When it wants to be told who is missing.
    deadline: Instant,
}

/// Starts the root of `id` on `listener` in a thread of its own. The thread ends with the rendezvous; until the first
/// rank comes it waits without limit, since an id may be passed around for long before it is used.
pub(super) fn start(listener: TcpListener, id: UniqueId) -> Result<()> {
    let system = |source| Error::System {
        what: "starting the bootstrap root".into(),
        source: Arc::new(source),
    };
    listener.set_nonblocking(true).map_err(system)?;
    let root = Root {
        listener,
        cookie: id.cookie,
        members: Vec::new(),
    };
    let run = move || root.run();
    thread::Builder::new()
        .name("rs-root".into())
        .stack_size(256 << 10)
        .spawn(run)
        .map_err(system)?;
    Ok(())
}

struct Root {
    listener: TcpListener,
    cookie: u64,
    /// By rank; empty until the first rank has said how many there are.
    members: Vec<Option<Member>>,
}

impl Root {
    fn run(mut self) {
        let mut undecided = Undecided::new(Hello::missing);
        let mut starved = false;
        loop {
            let mut fds = vec![sys::interest(
                &self.listener,
                if starved { 0 } else { libc::POLLIN },
            )];
            undecided.interests(&mut fds);
            fds.extend(
                self.members
                    .iter()
                    .flatten()
                    .map(|m| sys::interest(&m.stream, libc::POLLIN)),
            );
            let next = self.members.iter().flatten().map(|member| member.deadline).min();
            let mut timeout = next.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if !undecided.is_empty() {
                timeout = Some(timeout.unwrap_or(Duration::MAX).min(Duration::from_secs(1)));
            }
            if starved {
                timeout = Some(STARVED_PAUSE);
            }
            if sys::poll(&mut fds, timeout).is_err() {
                return; // only for want of memory; ranks see the root go
            }
            starved = !undecided.accept(&self.listener);
            for (stream, bytes) in undecided.decided() {
                // Whoever does not know the cookie is no rank of ours: dropped without a word.
                if let Some(hello) = Hello::parse(&bytes, self.cookie) {
                    self.welcome(stream, hello);
                }
            }
            if !self.members.is_empty() && self.members.iter().all(Option::is_some) {
                return self.give_table();
            }
            self.watch();
        }
    }

    fn welcome(&mut self, stream: TcpStream, hello: Hello) {
        let Hello::Join {
            rank,
            ranks,
            timeout_ms,
            address,
        } = hello
        else {
            return;
        };
        let refusal = if ranks == 0 || ranks > MAX_RANKS || rank >= ranks {
            Some(format!("rank {rank} of {ranks} is not possible"))
        } else if self.members.iter().any(Option::is_some) && self.members.len() != ranks as usize {
            Some(format!(
                "rank {rank} says {ranks} ranks, the first that came said {}",
                self.members.len()
            ))
        } else if self.members.get(rank as usize).is_some_and(Option::is_some) {
            Some(format!(
                "rank {rank} is there already: two processes use one rank"
            ))
        } else {
            None
        };
        if let Some(text) = refusal {
            return answer(stream, &Answer::Refused(text));
        }
        self.members.resize_with(ranks as usize, || None);
        let deadline = Instant::now() + Duration::from_millis(timeout_ms.into());
        self.members[rank as usize] = Some(Member {
            stream,
            address,
            deadline,
        });
    }

    /// Tells ranks whose time is up who is missing, and everyone when a rank that had come is gone.
    fn watch(&mut self) {
        let is_gone = |member: &Member| {
            // A rank says nothing after its hello: bytes, an end or an error all mean that it is not one any more.
            let would_block = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
            !matches!((&member.stream).read(&mut [0]), Err(error) if would_block(&error))
        };
        if let Some(rank) = self
            .members
            .iter()
            .position(|member| member.as_ref().is_some_and(is_gone))
        {
            self.members[rank] = None;
            for member in std::mem::take(&mut self.members).into_iter().flatten() {
                answer(member.stream, &Answer::Lost(rank as u32));
            }
            return;
        }
        let now = Instant::now();
        let absent = |members: &[Option<Member>]| {
            (0u32..)
                .zip(members)
                .filter(|(_, member)| member.is_none())
                .map(|(rank, _)| rank)
                .collect()
        };
        let missing: Vec<u32> = absent(&self.members);
        for slot in &mut self.members {
            if let Some(member) = slot.take_if(|member| member.deadline <= now) {
                answer(member.stream, &Answer::Missing(missing.clone()));
            }
        }
        if self.members.iter().all(Option::is_none) {
            self.members.clear(); // the ranks may try again, also in another number
        }
    }

    fn give_table(self) {
        let table = self
            .members
            .iter()
            .flatten()
            .map(|member| member.address)
            .collect();
        let bytes = Answer::Table(table).encode();
        for member in self.members.into_iter().flatten() {
            send(member.stream, &bytes);
        }
    }
}

fn answer(stream: TcpStream, answer: &Answer) {
    send(stream, &answer.encode());
}

/// Writes and closes. A rank that does not read is gone; the others will notice when they talk to it.
fn send(mut stream: TcpStream, bytes: &[u8]) {
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_write_timeout(Some(ANSWER_PATIENCE));
    let _ = stream.write_all(bytes);
}
