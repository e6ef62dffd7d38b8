//! The roots of this process: which ids each serves, and whether what it had to say is out.

use std::{
    collections::HashSet,
    net::{IpAddr, SocketAddr, TcpListener},
    os::fd::{AsRawFd, RawFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use ringsight_comm_base::{fork::PerProcess, sync::lock};

use super::{
    super::{Result, UniqueId, listen_at, sys, sys::Wake, system},
    Root,
};

/// How long a rank that has failed waits for the root in its process to tell the others: its process may end right
/// afterwards.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// What a root's thread shares with the process.
pub(super) struct Registry {
    open: Mutex<Open>,
    /// Signalled when `finished` or `ended` changes.
    settled: Condvar,
    wake: Wake,
}

#[derive(Default)]
struct Open {
    /// The ids that are served.
    cookies: HashSet<u64>,
    /// Those of them under which an attempt has failed, and whose first rank has not come again ([`resume`]).
    failed: HashSet<u64>,
    /// The thread has ended, or is about to.
    ended: bool,
    /// How often somebody has asked for a turn of the thread.
    asked: u64,
    /// The last of these after which a whole turn was made that left nothing unsent.
    finished: u64,
}

impl Registry {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one more id; false when the thread has ended.
    fn add(&self, cookie: u64) -> bool {
        let mut open = self.open();
        if !open.ended {
            open.cookies.insert(cookie);
        }
        !open.ended
    }

    /// Whether an id is served.
    pub(super) fn serves(&self, cookie: u64) -> bool {
        self.open().cookies.contains(&cookie)
    }

    /// An id has done its service.
    pub(super) fn remove(&self, cookie: u64) {
        let mut open = self.open();
        open.cookies.remove(&cookie);
        open.failed.remove(&cookie);
    }

    /// An attempt under an id has failed.
    pub(super) fn set_failed(&self, cookie: u64) {
        self.open().failed.insert(cookie);
    }

    /// The thread begins a turn: what to give to [`Registry::finish_turn`], or `None` when it is to end, having no ids
    /// and no connections (`is_idle`).
    pub(super) fn begin_turn(&self, is_idle: bool) -> Option<u64> {
        let mut open = self.open();
        // Under one lock: an id that is added after this finds that the thread has ended.
        open.ended = open.cookies.is_empty() && is_idle;
        if open.ended {
            self.settled.notify_all();
            return None;
        }
        Some(open.asked)
    }

    /// The thread has looked at everything that was there when the turn began, and has sent all that followed from it.
    pub(super) fn finish_turn(&self, turn: u64) {
        let mut open = self.open();
        if open.finished != turn {
            open.finished = turn;
            self.settled.notify_all();
        }
    }

    /// The thread ends.
    pub(super) fn end(&self) {
        self.open().ended = true;
        self.settled.notify_all();
    }

    /// Waits until the thread has seen what has happened so far and has told everyone of it, or for [`LAST_WORDS`].
    fn settle(&self) {
        let mut open = self.open();
        open.asked += 1;
        let asked = open.asked;
        self.wake.wake();
        // Whoever does not read does not hear: the wait is no promise.
        let _ = self
            .settled
            .wait_timeout_while(open, LAST_WORDS, |open| open.finished < asked && !open.ended);
    }

    /// Takes back what ended the thread's poll.
    pub(super) fn drain(&self) {
        self.wake.drain();
    }
}

impl AsRawFd for Registry {
    fn as_raw_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }
}

/// A root's thread.
struct Running {
    registry: Arc<Registry>,
    address: SocketAddr,
    /// At the address of `NCCL_COMM_ID`, which it has to leave to others.
    fixed: bool,
}

/// The roots of this process. Process-wide because the ids of a process are: `ncclGetUniqueId` has nothing else to keep
/// them in. A child has none of its parent's threads.
static ROOTS: PerProcess<Mutex<Vec<Running>>> = PerProcess::new();

/// Makes an id and serves it, at `ip`.
pub(in crate::bootstrap) fn create(ip: IpAddr) -> Result<UniqueId> {
    let random = || sys::random_u64().map_err(system("drawing a random secret"));
    let (name, cookie) = (random()?, random()?);
    let mut roots = lock(ROOTS.get());
    let running = roots
        .iter()
        .find(|root| !root.fixed && root.address.ip() == ip && root.registry.add(cookie));
    let address = match running {
        Some(running) => running.address,
        None => start(&mut roots, listen_at((ip, 0).into())?, cookie, false)?,
    };
    Ok(UniqueId {
        address,
        name,
        cookie,
        fixed: false,
    })
}

/// Serves one id at a listener of its own, in a thread of its own.
pub(in crate::bootstrap) fn serve(listener: TcpListener, cookie: u64) -> Result<()> {
    start(&mut lock(ROOTS.get()), listener, cookie, true).map(drop)
}

/// Whether a root of this process at `address` can serve an id again, under which the last attempt has failed. Not
/// otherwise: then the id is in use for another communicator.
pub(in crate::bootstrap) fn resume(address: SocketAddr, cookie: u64) -> bool {
    lock(ROOTS.get()).iter().any(|root| {
        root.fixed && root.address == address && {
            let mut open = root.registry.open();
            !open.ended && open.failed.remove(&cookie)
        }
    })
}

/// Lets the roots of these ids that are in this process tell the other ranks what they know, before this process may end:
/// for a rank that has failed.
pub(in crate::bootstrap) fn settle(ids: &[UniqueId]) {
    let is_theirs = |root: &&Running| ids.iter().any(|id| id.address == root.address);
    let roots: Vec<Arc<Registry>> = lock(ROOTS.get())
        .iter()
        .filter(is_theirs)
        .map(|root| Arc::clone(&root.registry))
        .collect();
    for registry in roots {
        registry.settle();
    }
}

fn start(roots: &mut Vec<Running>, listener: TcpListener, cookie: u64, fixed: bool) -> Result<SocketAddr> {
    let address = listener
        .local_addr()
        .map_err(system("asking for the root's port"))?;
    let registry = Arc::new(Registry {
        open: Mutex::default(),
        settled: Condvar::new(),
        wake: Wake::new().map_err(system("making an eventfd"))?,
    });
    registry.add(cookie);
    let root = Root::new(listener, Arc::clone(&registry));
    thread::Builder::new()
        .name("rs-root".into())
        .stack_size(256 << 10)
        .spawn(move || root.run())
        .map_err(system("starting the bootstrap root"))?;
    roots.retain(|root| !root.registry.open().ended);
    roots.push(Running {
        registry,
        address,
        fixed,
    });
    Ok(address)
}
