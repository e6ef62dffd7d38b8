//! The proxy of a rank: a service thread that makes connections, and a progress thread that drives those to other nodes.
//!
//! # Threads
//! - The *service thread* (`rs-proxy`, `service`) answers requests over a unix socket ([`message`]), of its own rank and of other ranks of
//!   the node. It also accepts and makes the TCP streams to other proxies. [`client::ProxyClient`] is the other side.
//! - The *progress thread* (`rs-progress`, `engine`) starts with the first network connection. It owns the connections
//!   (`crate::transport::connection`) and moves the steps of their operations.
//! - Launching threads save operations ([`Proxy::save_op`]) and post them ([`Proxy::start`]). They send commands through `progress`; none
//!   of them touches a connection.
//!
//! # A connection
//! | state in the service | entered by |
//! |---|---|
//! | initialised | `Init`, or the hello of a sender's proxy |
//! | shared | `SharedInit` |
//! | set up: it has its FIFO | `Setup` |
//! | connecting | `Connect` of a network sender; the peer's proxy has not answered |
//! | connected | `Connect`, or the peer's answer |
//!
//! | state in the progress thread | entered by |
//! |---|---|
//! | added: operations are queued | `Setup` of a network connection |
//! | attached: operations move | the proxies agree on socket or RDMA |
//! | failed: operations are dropped | an error, which is reported once; or an abort |
//!
//! # Invariants
//! - Operations of one connection run in the order in which they were posted.
//! - Every posted operation is retired once: completed, or given up.
//! - Neither thread blocks on a peer.
//!
//! # Modules, from the bottom
//! `affinity`, `message`, `activity`, `stalls`, `table_entry`, `requests` → `progress` → `engine` → `service` → this module → `client` →
//! `connector`.

pub(crate) mod activity;
pub mod affinity;
pub mod client;
pub mod connector;
mod engine;
pub mod message;
mod progress;
/// The watchdog's name of [`activity`].
pub(crate) mod moves {
    pub(crate) use super::activity::Activity as Moves;
}
pub(crate) mod requests;
mod service;
pub(crate) mod stalls;
mod table_entry;

use std::{
    fmt, io,
    net::SocketAddr,
    str::FromStr,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use ringsight_comm_base::{
    error::{self, ResultCode},
    fork::ParentOnly,
    log,
    sync::lock,
    sys::{self, Wake},
};
use ringsight_kernels::AbortWord;

pub use crate::op::{ConnectionId, ProxyOp};
use crate::{
    bootstrap::unix,
    transport::{
        gpu_direct::{SlotPool, Slots},
        rdma::Rdma,
    },
};
use activity::Activity;
pub use connector::Connector;
use progress::{Command, Progress};
use requests::Requests;
use service::Service;
use stalls::Stalls;

/// An error of a proxy.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A call of the system failed.
    #[error("{what}: {source}")]
    System {
        /// The call.
        what: String,
        /// The system's error.
        source: Arc<io::Error>,
    },
    /// The proxy refused a request, or a peer's proxy could not be reached.
    #[error("{0}")]
    Refused(String),
    /// Bytes that are no message.
    #[error("{0}")]
    Protocol(String),
    /// A peer's process is gone.
    #[error("{0}")]
    PeerLost(String),
    /// A proxy did not answer in time.
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
/// Called when a network connection fails, with its communicator and a text that names peer, channel and step. The communicator is
/// [`Endpoint::comm`](crate::op::Endpoint::comm), or [`ProxyOp::comm`] for an operation without a connection.
pub type OnError = Arc<dyn Fn(u64, String) + Send + Sync>;

/// Configuration of a proxy.
#[derive(Clone)]
pub struct ProxyConfig {
    /// The rank that it serves.
    pub rank: u32,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Secret that every client must present ([`crate::bootstrap::Bootstrap::cookie`]).
    pub cookie: u64,
    /// Address to listen on for other nodes ([`crate::bootstrap::Bootstrap::local_address`]).
    pub listen: SocketAddr,
    /// Bytes of a slot of every connection; the same on all ranks.
    pub slot_bytes: usize,
    /// CPUs for its threads; `None`: those of the thread that makes it.
    pub cpus: Option<affinity::Cpus>,
    /// RDMA for its connections; `None`: sockets.
    pub rdma: Option<Rdma>,
    /// Releases every wait.
    pub abort: Arc<AbortWord>,
    /// Called for finished operations, on the progress thread. Not called for operations that are given up.
    pub on_completed: OnCompleted,
    /// Called for the failure of each connection, on the progress thread.
    pub on_error: OnError,
}

/// Address of a proxy: an abstract unix socket for its node, a TCP port for other nodes' proxies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyAddress {
    /// Name of the abstract unix socket.
    pub unix: String,
    /// Address on which it listens for senders of other nodes.
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
        // A name stands in messages as it is.
        let is_name = |unix: &str| !unix.is_empty() && unix.bytes().all(|byte| byte.is_ascii_graphic());
        let parts = text.split_once('@').filter(|(unix, _)| is_name(unix));
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

/// The ports of network connections, once they are known.
struct Ports {
    /// By channel, in turn: index of the port in [`ProxyConfig::rdma`].
    by_channel: Vec<usize>,
    /// Slots in the memory of the GPU.
    direct: Option<Arc<SlotPool>>,
}

/// The proxy of one rank of one communicator. Dropping it gives up what is left and joins its threads.
pub struct Proxy {
    address: ProxyAddress,
    config: ProxyConfig,
    ports: Arc<OnceLock<Ports>>,
    progress: Arc<Progress>,
    /// Operations that are saved and not yet posted.
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
        let tcp = sys::bind(config.listen).map_err(system(&what))?;
        let tcp = ParentOnly::new(tcp);
        tcp.set_nonblocking(true).map_err(system(&what))?;
        let address = ProxyAddress {
            unix: name,
            tcp: tcp.local_addr().map_err(system(&what))?,
        };
        tracing::info!(target: log::PROXY, "Proxy of rank {} listens on @{address}", config.rank);
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
        let (report, settled) = mpsc::sync_channel(1);
        let service = thread::Builder::new()
            .name("rs-proxy".into())
            .stack_size(256 << 10)
            .spawn(move || {
                // This thread starts the progress thread, which inherits its CPUs.
                let result = cpus.map_or(Ok(()), |cpus| cpus.apply());
                let settled = result.is_ok();
                // The receiver lives until it has the result.
                let _ = report.send(result);
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
            tracing::info!(target: log::PROXY, "Proxy of rank {} runs on CPUs {cpus}", proxy.config.rank);
        }
        Ok(proxy)
    }

    /// Its address, as the text of a [`ProxyAddress`] for [`crate::topology::RankInfo::proxy_address`].
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Sets the ports of [`ProxyConfig::rdma`] for its connections: channel c uses the c-th, in turn; none: sockets. Their slots are in
    /// `direct`, while it has places. Peers that connect wait for this call. Only the first call has an effect.
    pub fn use_ports(&self, by_channel: Vec<usize>, direct: Option<Arc<SlotPool>>) {
        if self.ports.set(Ports { by_channel, direct }).is_ok() {
            self.wake.wake();
        }
    }

    /// Whether [`Proxy::use_ports`] has been called.
    pub(crate) fn knows_ports(&self) -> bool {
        self.ports.get().is_some()
    }

    /// The slots of a connection in the memory of the GPU, if it has any there.
    pub(crate) fn direct_slots(&self, connection: u32) -> Option<Arc<Slots>> {
        self.ports.get()?.direct.as_ref()?.of(connection)
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &ProxyConfig {
        &self.config
    }

    /// Queues an operation until the next [`Proxy::start`].
    pub fn save_op(&self, op: ProxyOp) {
        lock(&self.saved).push(op);
    }

    /// Posts the saved operations to the progress thread, in the order saved. Operations of one connection run in this order, those of
    /// different connections in parallel.
    pub fn start(&self) {
        // Posted under the lock, so that two concurrent calls cannot change the order.
        let mut saved = lock(&self.saved);
        if !saved.is_empty() {
            self.progress.send(Command::Ops(std::mem::take(&mut saved)));
        }
    }

    /// Adds a source of operations that the device requests.
    pub(crate) fn watch(&self, source: Weak<dyn Requests>) {
        self.progress.send(Command::Watch(source));
    }

    /// Has the progress thread look for the device's requests from now on.
    pub(crate) fn expect(&self) {
        self.progress.send(Command::Expect);
    }

    /// Network activity of a communicator ([`ProxyOp::comm`]).
    pub(crate) fn moves(&self, comm: u64) -> Arc<Activity> {
        self.progress.activities.of(comm)
    }

    /// Its stalled connections.
    pub(crate) fn stalls(&self) -> Arc<Stalls> {
        Arc::clone(&self.progress.stalls)
    }

    /// Waits until every posted operation has finished or been given up.
    pub fn stop(&self) {
        self.progress.drain(None, || false);
    }

    /// Waits until destroyed connections have freed everything that they held, at most `limit`.
    pub(crate) fn settle(&self, limit: Duration) {
        self.progress.settle(limit);
    }

    /// As [`Proxy::stop`], for the operations of communicator `comm` ([`ProxyOp::comm`]). Ends early when `give_up` returns true; it is called
    /// ten times a second.
    pub fn flush(&self, comm: u64, give_up: impl Fn() -> bool) {
        self.progress.drain(Some(comm), give_up);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Release: pairs with the service's acquire, which orders nothing else.
        self.ending.store(true, Ordering::Release);
        self.wake.wake();
        // The service first, because it could start the progress thread.
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
