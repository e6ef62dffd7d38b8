//! A rank's part in the rendezvous: it tells a root where it listens, and is told where all others do.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use ringsight_kernels::AbortWord;

use super::{
    Error, Result, UniqueId, fnv1a,
    id::on_link_of,
    interface, listen_at, on_this_host, root, sys, system,
    wire::{Answer, GaveUp, Hello, Joining, MAX_RANKS},
};
use crate::observe;

/// How much longer than the time-out a rank waits for the root to say who is missing.
const ROOT_GRACE: Duration = Duration::from_secs(1);

/// How long the address of `NCCL_COMM_ID` may stay taken.
const FIXED_PATIENCE: Duration = Duration::from_secs(5);

/// Which of `roots` roots `rank` of `ranks` goes to: blocks of ranks one after the other, the first `ranks % roots` of
/// them one rank larger (NCCL's rule). `roots` is between 1 and `ranks`.
#[must_use]
pub fn root_of(rank: u32, ranks: u32, roots: u32) -> u32 {
    let (each, larger) = (ranks / roots, ranks % roots);
    let in_larger = larger * (each + 1);
    if rank < in_larger {
        rank / (each + 1)
    } else {
        (rank - in_larger) / each + larger
    }
}

/// What a rank has after the rendezvous.
pub(super) struct Joined {
    /// Secret of the ranks.
    pub(super) cookie: u64,
    /// Where each rank listens.
    pub(super) table: Vec<SocketAddr>,
    pub(super) listener: TcpListener,
    /// Where this rank is reached, with port 0.
    pub(super) local: SocketAddr,
}

/// Takes part as `rank` of `ranks`. When that fails, the ranks whose root is in this process have heard of it.
pub(super) fn join(
    ids: &[UniqueId],
    rank: u32,
    ranks: u32,
    abort: &AbortWord,
    timeout: Duration,
) -> Result<Joined> {
    let ids = &ids.iter().map(on_this_host).collect::<Vec<_>>();
    // Our connection is closed then, and the root sees that we are gone.
    try_join(ids, rank, ranks, abort, timeout).inspect_err(|_| root::settle(ids))
}

fn try_join(ids: &[UniqueId], rank: u32, ranks: u32, abort: &AbortWord, timeout: Duration) -> Result<Joined> {
    if ranks == 0 || ranks > MAX_RANKS || rank >= ranks {
        return Err(Error::InvalidArgument(format!(
            "rank {rank} of {ranks} ranks is not possible"
        )));
    }
    let Some((main, others)) = ids.split_first().filter(|_| ids.len() <= ranks as usize) else {
        return Err(Error::InvalidArgument(format!(
            "{} unique ids for {ranks} ranks: there must be at least one and at most one for each rank",
            ids.len()
        )));
    };
    // One NCCL_COMM_ID gives the same id as often as it is asked for.
    let ids = if others.iter().all(|id| id == main) {
        &ids[..1]
    } else {
        ids
    };
    let root = root_of(rank, ranks, ids.len() as u32);
    let is_first = rank == 0 || root_of(rank - 1, ranks, ids.len() as u32) != root;
    let id = ids[root as usize];
    let deadline = Instant::now() + timeout + ROOT_GRACE;
    if id.fixed && is_first && !root::resume(id.address, id.cookie) {
        root::serve(listen_fixed(id.address, abort)?, id.cookie)?;
    }
    let all: Vec<u8> = ids
        .iter()
        .flat_map(|id| UniqueId::public_part(&id.to_bytes()))
        .collect();
    let mut listening: Option<(TcpListener, SocketAddr)> = None;
    loop {
        let stream = reach_root(&id, abort, deadline)?;
        let (_, address) = match &listening {
            Some(listening) => listening,
            None => listening.insert(listen_beside(&stream)?),
        };
        let hello = Hello::Join(Joining {
            rank,
            ranks,
            timeout_ms: timeout.as_millis().min(u128::from(u32::MAX)) as u32,
            library: observe::LIBRARY_VERSION,
            ids: fnv1a(&all),
            main: (main.cookie, main.address),
            address: *address,
        });
        // A broken connection shows when it is read.
        let _ = (&stream).write_all(&hello.encode(id.cookie));
        let mut news = None;
        let (secret, addresses) = match read_answer(&stream, &id, abort, deadline, &mut news)? {
            None if let Some(news) = &news => {
                return Err(Error::Protocol(format!(
                    "the root at {} ended while this rank waited: the process that made the unique id is gone{news}",
                    id.address
                )));
            }
            // Dropped without a word: among too many connections that said nothing, before ours could speak. When the
            // root is gone the next attempt says so.
            None => {
                thread::sleep(sys::ABORT_CHECK);
                continue;
            }
            Some(Answer::Table { secret, addresses }) if addresses.len() == ranks as usize => {
                (secret, addresses)
            }
            Some(Answer::Table { addresses, .. }) => {
                return Err(Error::Protocol(format!(
                    "the root knows {} ranks, we {ranks}",
                    addresses.len()
                )));
            }
            Some(Answer::Missing(gave_up)) => {
                return Err(Error::TimedOut(too_few(&gave_up, rank, ranks)));
            }
            Some(Answer::Lost(lost)) => {
                let text = format!("rank {lost} came and went away before all {ranks} ranks were there");
                return Err(Error::PeerLost { rank: lost, text });
            }
            // The root of the communicator before this one, at the same fixed address, is about to end.
            Some(Answer::Unknown) if id.fixed && Instant::now() < deadline => {
                thread::sleep(sys::ABORT_CHECK);
                continue;
            }
            Some(Answer::Unknown) => {
                return Err(Error::Protocol(format!(
                    "no ranks are awaited at {} under this unique id: it has been used already, or its process \
                     has ended and another one listens there",
                    id.address
                )));
            }
            Some(Answer::Refused(text)) => {
                let news = news.unwrap_or_default();
                return Err(Error::Protocol(format!(
                    "the root at {} refuses: {text}{news}",
                    id.address
                )));
            }
            Some(Answer::Waiting { .. }) => continue, // `read_answer` takes these as news
        };
        let Some((listener, address)) = listening else {
            continue; // made before the hello
        };
        let secrets = ids.iter().map(|id| id.cookie).chain([secret]);
        let secrets: Vec<u8> = secrets.flat_map(u64::to_le_bytes).collect();
        let mut local = address;
        local.set_port(0);
        return Ok(Joined {
            cookie: fnv1a(&secrets),
            table: addresses
                .into_iter()
                .map(|address| on_link_of(&local, address))
                .collect(),
            listener,
            local,
        });
    }
}

/// Listens at the address of `NCCL_COMM_ID`. The root of the communicator before this one may be about to leave it.
fn listen_fixed(address: SocketAddr, abort: &AbortWord) -> Result<TcpListener> {
    let deadline = Instant::now() + FIXED_PATIENCE;
    loop {
        match listen_at(address) {
            Err(Error::System { source, .. })
                if source.kind() == io::ErrorKind::AddrInUse
                    && Instant::now() < deadline
                    && !abort.is_set() =>
            {
                thread::sleep(sys::ABORT_CHECK);
            }
            outcome => return outcome,
        }
    }
}

/// Listens for other ranks: they reach us the way the root does, unless the user names an interface.
fn listen_beside(stream: &TcpStream) -> Result<(TcpListener, SocketAddr)> {
    let mut address = match interface::requested()? {
        Some(interface) => interface.address,
        None => stream
            .local_addr()
            .map_err(system("asking for the local address"))?,
    };
    address.set_port(0);
    let listener = listen_at(address)?;
    let address = listener.local_addr().map_err(system("asking for the port"))?;
    Ok((listener, address))
}

/// Connects to the root. With `NCCL_COMM_ID` it may not be there yet.
fn reach_root(id: &UniqueId, abort: &AbortWord, deadline: Instant) -> Result<TcpStream> {
    let address = &id.address;
    loop {
        match sys::connect(address, deadline, &|| abort.is_set()) {
            Ok(Some(stream)) => return Ok(stream),
            Ok(None) => return Err(Error::Aborted(format!("connecting to the root at {address}"))),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(Error::TimedOut(format!("the root at {address} does not answer")));
            }
            Err(error) if !is_the_roots(&error) => {
                return Err(system(&format!("connecting to the root at {address}"))(error));
            }
            Err(_) if id.fixed && Instant::now() < deadline => thread::sleep(sys::ABORT_CHECK),
            Err(error) => {
                return Err(Error::Protocol(format!(
                    "no root at {address} ({error}): the process that made the unique id has ended, or the id has \
                     been used already"
                )));
            }
        }
    }
}

/// Whether a connection failed for the other end or the way to it, not for want of something in this process.
fn is_the_roots(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::ConnectionRefused
            | Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::HostUnreachable
            | Kind::NetworkUnreachable
            | Kind::NetworkDown
    )
}

/// The error of an attempt that was given up.
fn too_few(gave_up: &GaveUp, rank: u32, ranks: u32) -> String {
    let GaveUp {
        waiter,
        waited_ms,
        missing,
    } = gave_up;
    let waited = Duration::from_millis((*waited_ms).into());
    let (number, names) = (missing.len(), ranges(missing));
    if *waiter == rank {
        format!("{number} of {ranks} ranks did not come within {waited:?}: {names}")
    } else if missing.contains(&rank) {
        format!(
            "rank {rank} came too late: rank {waiter} had given up after {waited:?}, when {number} of {ranks} ranks had \
             not come: {names}"
        )
    } else {
        format!(
            "{number} of {ranks} ranks did not come while rank {waiter} waited for {waited:?}, which has given up: \
             {names}"
        )
    }
}

/// The end of a message: who was missing when it was last heard.
fn still_missing(missing: u32, first: &[u32]) -> String {
    let more = match missing.saturating_sub(first.len() as u32) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("; missing were {}{more}", ranges(first))
}

/// Waits for the root's answer; `None` when it closes without one. What it says before goes to `news`, as the end of a
/// message.
fn read_answer(
    mut stream: &TcpStream,
    id: &UniqueId,
    abort: &AbortWord,
    deadline: Instant,
    news: &mut Option<String>,
) -> Result<Option<Answer>> {
    let rubbish = || {
        Error::Protocol(format!(
            "the root at {} answers rubbish: something else listens there",
            id.address
        ))
    };
    let mut bytes = Vec::new();
    loop {
        let missing = Answer::missing(&bytes).ok_or_else(rubbish)?;
        if missing == 0 {
            match Answer::parse(&bytes).ok_or_else(rubbish)? {
                Answer::Waiting { missing, first } => *news = Some(still_missing(missing, &first)),
                answer => return Ok(Some(answer)),
            }
            bytes.clear();
            continue;
        }
        let mut piece = vec![0; missing.min(64 << 10)];
        match stream.read(&mut piece) {
            Ok(read @ 1..) => bytes.extend_from_slice(&piece[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if abort.is_set() {
                    return Err(Error::Aborted("waiting for the other ranks".into()));
                }
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Error::TimedOut(format!(
                        "the root at {} does not answer",
                        id.address
                    )));
                }
                sys::poll(
                    &mut [sys::interest(stream, libc::POLLIN)],
                    Some(left.min(sys::ABORT_CHECK)),
                )
                .map_err(system("waiting for the root"))?;
            }
            Ok(0) | Err(_) if bytes.is_empty() && Instant::now() < deadline => return Ok(None),
            Ok(0) => {
                return Err(Error::Protocol(format!(
                    "the root at {} closed the connection: its process ended",
                    id.address
                )));
            }
            Err(error) => return Err(system(&format!("reading from the root at {}", id.address))(error)),
        }
    }
}

/// "3, 5-7" for sorted ranks.
pub(super) fn ranges(ranks: &[u32]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b);
    let texts: Vec<String> = runs
        .map(|run| match run {
            [one] => format!("rank {one}"),
            [first, .., last] => format!("ranks {first}-{last}"),
            [] => String::new(),
        })
        .collect();
    texts.join(", ")
}
