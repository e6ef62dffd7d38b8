//! The proxy: a service thread that sets connections up, and a progress thread that moves network steps.
//!
//! The service answers requests by id over a unix socket (Init, SharedInit, Setup, Connect, GetFd, Stop, Destroy), from
//! its own rank and from other ranks of the node; [`client::ProxyClient`] is the other side. Network connections are
//! served by the progress thread, which starts with the first of them: operations are saved, started, and then moved
//! step by step between a [`ringsight_kernels::Fifo`] and a socket, or the peer's memory where both have RDMA
//! ([`crate::transport::verbs`]).

pub mod affinity;
pub mod client;
mod engine;
pub(crate) mod events;
mod machine;
pub(crate) mod memory;
pub mod message;
pub(crate) mod moves;
mod progress;
pub(crate) mod requests;
mod service;
pub(crate) mod stalls;
mod told;

use std::{
    fmt, io,
    net::{IpAddr, SocketAddr, TcpListener},
    str::FromStr,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use ringsight_kernels::AbortWord;

use crate::bootstrap::{
    fork::ParentOnly,
    sys::{self, Wake},
    unix,
};
use crate::error::{self, ResultCode};
pub use crate::op::{ConnectionId, ProxyOp};
use crate::transport::{
    direct::{Pool, Slots},
    verbs::Rdma,
};
use moves::Moves;
use progress::{Command, Progress};
use requests::Requests;
use service::Service;
use stalls::Stalls;

/// What can go wrong with a proxy.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A call of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The proxy refused a request, or a peer's proxy could not be reached; the text says why.
    #[error("{0}")]
    Refused(String),
    /// Bytes that are no message.
    #[error("{0}")]
    Protocol(String),
    /// A peer's process is gone.
    #[error("{0}")]
    PeerLost(String),
    /// No answer in time.
    #[error("{0}")]
    TimedOut(String),
    /// The abort word was set.
    #[error("aborted while {0}")]
    Aborted(String),
}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::System { .. } | Error::TimedOut(_) => ResultCode::SystemError,
            Error::Refused(_) | Error::Protocol(_) | Error::PeerLost(_) => ResultCode::RemoteError,
            Error::Aborted(_) => ResultCode::InvalidUsage,
        };
        Self::new(code, error.to_string())
    }
}

/// Result of proxy calls.
pub type Result<T> = std::result::Result<T, Error>;

/// Called when a proxy operation has finished: (operation number, replay).
pub type OnCompleted = Arc<dyn Fn(u32, u32) + Send + Sync>;
/// Called with [`message::Endpoint::comm`] (or [`ProxyOp::comm`], where there is no connection) and a text that names peer, channel and step when a network connection fails.
pub type OnError = Arc<dyn Fn(u64, String) + Send + Sync>;

/// What a proxy is made of.
#[derive(Clone)]
pub struct ProxyConfig {
    /// The rank that it serves.
    pub rank: u32,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Secret that whoever asks must present ([`crate::bootstrap::Bootstrap::cookie`]).
    pub cookie: u64,
    /// Address to listen on for other nodes ([`crate::bootstrap::Bootstrap::local_ip`]).
    pub listen: IpAddr,
    /// Bytes of a slot of every connection; the same on all ranks.
    pub slot_bytes: usize,
    /// CPUs that its threads run on, if not on those of the thread that makes it.
    pub cpus: Option<affinity::Cpus>,
    /// RDMA that its connections may use; `None`: sockets.
    pub rdma: Option<Rdma>,
    /// Releases every wait.
    pub abort: Arc<AbortWord>,
    /// Told of finished operations, on the progress thread. Not called for operations that are given up.
    pub on_completed: OnCompleted,
    /// Told of the first failure of each connection, on the progress thread.
    pub on_error: OnError,
}

/// Where a proxy answers: an abstract unix socket for its node, a TCP port for other nodes' proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyAddress {
    /// Name of the abstract unix socket.
    pub unix: String,
    /// Where it listens for senders of other nodes.
    pub tcp: SocketAddr,
}

impl fmt::Display for ProxyAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.unix, self.tcp)
    }
}

impl FromStr for ProxyAddress {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts = text.split_once('@').filter(|(unix, _)| !unix.is_empty());
        parts
            .and_then(|(unix, tcp)| {
                Some(Self {
                    unix: unix.to_owned(),
                    tcp: tcp.parse().ok()?,
                })
            })
            .ok_or_else(|| Error::Protocol(format!("{text:?} is no proxy's address")))
    }
}

/// What connections to other nodes use, once it is known.
struct Ports {
    /// Ports of [`ProxyConfig::rdma`].
    by_channel: Vec<usize>,
    /// Slots in the memory of the GPU.
    direct: Option<Arc<Pool>>,
}

/// The proxy of one rank of one communicator. Dropping it gives up what is left and joins its threads.
pub struct Proxy {
    address: ProxyAddress,
    config: ProxyConfig,
    ports: Arc<OnceLock<Ports>>,
    progress: Arc<Progress>,
    /// Operations saved and not yet started.
    saved: Mutex<Vec<ProxyOp>>,
    wake: Arc<Wake>,
    ending: Arc<AtomicBool>,
    service: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Opens the sockets and starts the service thread.
    ///
    /// # Errors
    /// [`Error::System`]; [`Error::Refused`] for slots of 0 bytes or more than `u32` can count.
    pub fn new(config: ProxyConfig) -> Result<Self> {
        if config.slot_bytes == 0 || u32::try_from(config.slot_bytes).is_err() {
            return Err(Error::Refused(format!(
                "slots of {} bytes are not possible",
                config.slot_bytes
            )));
        }
        let random = sys::random_u64().map_err(system("drawing a random name"))?;
        let name = format!(
            "ringsight-proxy-{}-{}-{random:016x}",
            std::process::id(),
            config.rank
        );
        let unix = unix::listen(&name).map_err(system(&format!("listening at @{name}")))?;
        let what = format!("listening on {}", config.listen);
        let tcp = TcpListener::bind((config.listen, 0)).map_err(system(&what))?;
        let tcp = ParentOnly::new(tcp);
        tcp.set_nonblocking(true).map_err(system(&what))?;
        let address = ProxyAddress {
            unix: name,
            tcp: tcp.local_addr().map_err(system(&what))?,
        };
        tracing::info!(target: crate::log::PROXY, "Proxy of rank {} listens on @{address}", config.rank);
        let wake = Arc::new(Wake::new().map_err(system("making an eventfd"))?);
        let ending = Arc::new(AtomicBool::new(false));
        let ProxyConfig {
            rank,
            abort,
            on_completed,
            on_error,
            ..
        } = config.clone();
        let progress = Arc::new(
            Progress::new(rank, abort, on_completed, on_error).map_err(system("making an eventfd"))?,
        );
        let signals = (Arc::clone(&wake), Arc::clone(&ending));
        let ports: Arc<OnceLock<Ports>> = Arc::default();
        let service = Service::new(
            (config.clone(), Arc::clone(&ports)),
            (unix, tcp),
            signals,
            Arc::clone(&progress),
        );
        let cpus = config.cpus.clone();
        let (tell, settled) = mpsc::sync_channel(1);
        let service = thread::Builder::new()
            .name("rs-proxy".into())
            .stack_size(256 << 10)
            .spawn(move || {
                // The progress thread is started by this one and runs where it does.
                let result = cpus.map_or(Ok(()), |cpus| cpus.apply());
                let settled = result.is_ok();
                // Whoever waits for it is there until then.
                let _ = tell.send(result);
                if settled {
                    service.run();
                }
            })
            .map_err(system("starting the proxy's service thread"))?;
        let proxy = Self {
            address,
            config,
            ports,
            progress,
            saved: Mutex::default(),
            wake,
            ending,
            service: Some(service),
        };
        if let Some(cpus) = &proxy.config.cpus {
            let what = format!("running the proxy's threads on CPUs {cpus}, by NCCL_PROXY_CPUSET");
            let settled = settled.recv().map_err(io::Error::other);
            settled.and_then(|result| result).map_err(system(&what))?;
            tracing::info!(target: crate::log::PROXY, "Proxy of rank {} runs on CPUs {cpus}", proxy.config.rank);
        }
        Ok(proxy)
    }

    /// Where it answers, the text of a [`ProxyAddress`]: what [`crate::topology::RankInfo::proxy_address`] carries.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Tells which ports of [`ProxyConfig::rdma`] its connections use, by channel, round and round; none: sockets. Slots of those over them
    /// are in `direct`, as far as that goes. Until then those who connect to it wait. The first call counts.
    pub fn use_ports(&self, by_channel: Vec<usize>, direct: Option<Arc<Pool>>) {
        if self.ports.set(Ports { by_channel, direct }).is_ok() {
            self.wake.wake();
        }
    }

    /// Whether they have been told.
    pub(crate) fn knows_ports(&self) -> bool {
        self.ports.get().is_some()
    }

    /// The slots in the memory of the GPU that a connection which is set up may have.
    pub(crate) fn direct_slots(&self, connection: u32) -> Option<Arc<Slots>> {
        self.ports.get()?.direct.as_ref()?.of(connection)
    }

    /// What it was made of.
    #[must_use]
    pub fn config(&self) -> &ProxyConfig {
        &self.config
    }

    /// Queues an operation until the next [`Proxy::start`].
    pub fn save_op(&self, op: ProxyOp) {
        self.saved.lock().unwrap_or_else(PoisonError::into_inner).push(op);
    }

    /// Posts the saved operations to the progress thread, in the order saved. Operations of one connection run in this
    /// order, those of different connections side by side.
    pub fn start(&self) {
        // Posted under the lock, so that two threads that start at once cannot change the order.
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        if !saved.is_empty() {
            self.progress.tell(Command::Ops(std::mem::take(&mut saved)));
        }
    }

    /// Lets the device ask for operations: the progress thread looks at what `source` is asked.
    pub(crate) fn watch(&self, source: Weak<dyn Requests>) {
        self.progress.tell(Command::Watch(source));
    }

    /// Whoever is asked by the device expects it to do so from now on.
    pub(crate) fn expect(&self) {
        self.progress.tell(Command::Expect);
    }

    /// How often something of a communicator ([`ProxyOp::comm`]) moves over its connections.
    pub(crate) fn moves(&self, comm: u64) -> Arc<Moves> {
        self.progress.moves.of(comm)
    }

    /// Its connections that wait for the network.
    pub(crate) fn stalls(&self) -> Arc<Stalls> {
        Arc::clone(&self.progress.stalls)
    }

    /// Waits until every posted operation has finished, or was given up after a failure or abort.
    pub fn stop(&self) {
        self.progress.drain(None, || false);
    }

    /// Waits until connections that were destroyed are gone with all that they held, at most `limit`.
    pub(crate) fn settle(&self, limit: Duration) {
        self.progress.settle(limit);
    }

    /// Waits for that for the operations of communicator `comm` ([`ProxyOp::comm`]), those that nobody is told of
    /// included, or until `give_up` says so (asked ten times a second).
    pub fn flush(&self, comm: u64, give_up: impl Fn() -> bool) {
        self.progress.drain(Some(comm), give_up);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Release: pairs with the service's acquire; it reads nothing else by it.
        self.ending.store(true, Ordering::Release);
        self.wake.wake();
        // The service first: it could start the progress thread.
        if let Some(service) = self.service.take() {
            let _ = service.join();
        }
        self.progress.end();
    }
}

fn system(what: &str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::System {
        what: what.to_owned(),
        source: Arc::new(source),
    }
}
