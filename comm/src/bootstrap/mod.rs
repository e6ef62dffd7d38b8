//! How the ranks of a new communicator find each other: a unique id, a rendezvous, and messages between ranks.
//!
//! One process makes a [`UniqueId`] and with it a root, a thread that listens on TCP. Each rank tells the root where it
//! listens; when all have come the root gives every rank the whole table and ends. From then on ranks talk directly,
//! over a tree and over connections that are opened at the first message, and every rank hears of every other's death
//! ([`Bootstrap::on_lost`]). Collective calls ([`Bootstrap::all_gather`]) are built from these messages.

mod collective;
mod frame;
pub(crate) mod fuzzing;
pub(crate) mod id;
mod interface;
mod link;
pub(crate) mod pending;
mod rendezvous;
mod root;
mod service;
mod shared;
#[cfg(test)]
mod tests;
pub(crate) mod unix;
pub(crate) mod wire;

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, ToSocketAddrs},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::Duration,
};

use fork::ParentOnly;
use frame::{Frame, MAX_CONTROL, MAX_MESSAGE};
pub use id::UniqueId;
pub use rendezvous::root_of;
use ringsight_kernels::AbortWord;
use shared::{Class, Shared};
use sys::Wake;

use crate::{
    error::{self, ResultCode},
    threads,
};

pub(crate) use ringsight_comm_base::hash::fnv1a;
pub(crate) use ringsight_comm_base::{fork, sys};

/// What can go wrong between ranks before there are connections.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The 128 bytes are not a unique id of this library.
    #[error("{0}")]
    InvalidId(String),
    /// An argument or environment variable that cannot be used.
    #[error("{0}")]
    InvalidArgument(String),
    /// A call of the system failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the system said.
        source: Arc<std::io::Error>,
    },
    /// The ranks did not all come, or did not answer, in time.
    #[error("{0}")]
    TimedOut(String),
    /// A rank's process ended or closed its connection.
    #[error("{text}")]
    PeerLost {
        /// The rank that is gone.
        rank: u32,
        /// What was seen, and by whom.
        text: String,
    },
    /// The root or a peer said something that this version does not understand, or refused us.
    #[error("{0}")]
    Protocol(String),
    /// The abort word was set.
    #[error("aborted while {0}")]
    Aborted(String),
}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        let code = match &error {
            Error::InvalidId(_) | Error::InvalidArgument(_) => ResultCode::InvalidArgument,
            Error::System { .. } | Error::TimedOut(_) => ResultCode::SystemError,
            Error::PeerLost { .. } | Error::Protocol(_) => ResultCode::RemoteError,
            Error::Aborted(_) => ResultCode::InvalidUsage,
        };
        Self::new(code, error.to_string())
    }
}

/// Result of bootstrap calls.
pub type Result<T> = std::result::Result<T, Error>;

/// How long ranks wait for each other: `RINGSIGHT_BOOTSTRAP_TIMEOUT_MS`, 120 s by default.
///
/// # Errors
/// The variable is no number.
pub fn default_timeout() -> Result<Duration> {
    const NAME: &str = "RINGSIGHT_BOOTSTRAP_TIMEOUT_MS";
    let milliseconds = crate::env::number(NAME).map_err(|error| Error::InvalidArgument(error.text))?;
    Ok(milliseconds.map_or(Duration::from_secs(120), Duration::from_millis))
}

/// Makes a unique id and starts its root.
///
/// With `NCCL_COMM_ID=host:port` the id names that address, and rank 0 starts the root there when it joins.
///
/// # Errors
/// When `NCCL_COMM_ID` is no address, `NCCL_SOCKET_IFNAME` matches no interface, or no listener can be opened.
pub fn create_root() -> Result<UniqueId> {
    if let Some(text) = crate::env::text("NCCL_COMM_ID") {
        return fixed_id(&text);
    }
    let interface = interface::default()?;
    let ip = interface.address.ip();
    tracing::info!(target: crate::log::BOOTSTRAP, "Bootstrap : Using {}:{ip}", interface.name);
    root::create(ip).inspect(|id| {
        tracing::info!(target: crate::log::BOOTSTRAP, "Bootstrap : root listens on {}", id.address);
    })
}

/// The id of `NCCL_COMM_ID`: its secret is no secret, since every rank has to come to the same one by itself.
fn fixed_id(text: &str) -> Result<UniqueId> {
    let invalid = |why: &str| {
        Error::InvalidArgument(format!(
            "NCCL_COMM_ID={text}: {why}; expected host:port, [address]:port for IPv6, [address%interface]:port where it is link-local"
        ))
    };
    let (found, name) = comm_id_addresses(text).map_err(|why| invalid(&why))?;
    // A host may have addresses of both families.
    let mut wanted = Vec::new();
    for address in found {
        if interface::family_admits(&address)? {
            wanted.push(address);
        }
    }
    let Some(address) = wanted.first().copied() else {
        return Err(invalid("the host has no address of the family that is wanted"));
    };
    if address.port() == 0 {
        return Err(invalid("port 0"));
    }
    Ok(UniqueId {
        address,
        name: fnv1a(&[b"name", name.as_bytes()].concat()),
        cookie: fnv1a(name.as_bytes()),
        fixed: true,
    })
}

/// The addresses that a text of `NCCL_COMM_ID` stands for, and the text without the scope, which is another one on each host.
fn comm_id_addresses(text: &str) -> std::result::Result<(Vec<SocketAddr>, String), String> {
    let bracketed = text.strip_prefix('[').and_then(|rest| rest.split_once("]:"));
    let Some((address, port)) = bracketed else {
        // The resolver asks over sockets.
        let _standard = sys::StandardTaken::new();
        let found = text.to_socket_addrs().map_err(|error| error.to_string())?;
        return Ok((found.collect(), text.to_owned()));
    };
    let (address, scope) = match address.split_once('%') {
        Some((address, scope)) => (address, Some(scope)),
        None => (address, None),
    };
    let ip: Ipv6Addr = address
        .parse()
        .map_err(|_| format!("{address} is no IPv6 address"))?;
    let port: u16 = port.parse().map_err(|_| format!("{port} is no port"))?;
    let index = match scope {
        Some(scope) => interface::index_of(scope).ok_or_else(|| format!("there is no interface {scope}"))?,
        None if ip.is_unicast_link_local() => {
            return Err(format!("{address} is link-local, and names no interface"));
        }
        None => 0,
    };
    let address = SocketAddrV6::new(ip, port, 0, index).into();
    Ok((vec![address], format!("[{ip}]:{port}")))
}

/// The id as this host reaches its root. One that names a link-local address may have been made on another host, where the interface has
/// another number: `NCCL_COMM_ID` says here which one it is.
fn on_this_host(id: &UniqueId) -> UniqueId {
    let is_link_local = matches!(id.address.ip(), IpAddr::V6(ip) if ip.is_unicast_link_local());
    if !is_link_local {
        return *id;
    }
    let own = crate::env::text("NCCL_COMM_ID").and_then(|text| comm_id_addresses(&text).ok());
    let same = |address: &SocketAddr| address.ip() == id.address.ip() && address.port() == id.address.port();
    let address = own.and_then(|(found, _)| found.into_iter().find(same));
    UniqueId {
        address: address.unwrap_or(id.address),
        ..*id
    }
}

fn system(what: &str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::System {
        what: what.to_owned(),
        source: Arc::new(source),
    }
}

impl Error {
    fn internal_loss(rank: u32) -> Self {
        let text = format!("rank {rank} is gone");
        Self::PeerLost { rank, text }
    }
}

/// Told of control messages: (from, bytes). Called on the bootstrap's thread: must not block.
pub type OnControl = Arc<dyn Fn(u32, &[u8]) + Send + Sync>;
/// Told of ranks whose process died or whose connection broke: (rank, what was seen). Called on the bootstrap's thread:
/// must not block.
pub type OnLost = Arc<dyn Fn(u32, &str) + Send + Sync>;

/// One rank's end of the bootstrap network of a communicator. Dropping it says goodbye ([`Bootstrap::leave`]) and closes
/// every connection; ranks that still wait for this one get an error.
pub struct Bootstrap {
    shared: Arc<Shared>,
    /// With port 0.
    local: SocketAddr,
    /// Collective calls so far; locked for the length of one, so that all ranks count them alike.
    collectives: Mutex<u64>,
    service: Option<JoinHandle<()>>,
}

impl Bootstrap {
    /// Takes part in the rendezvous of `id` as `rank` of `ranks`; returns when all ranks have come. `timeout` holds for
    /// this and for every later wait ([`default_timeout`]).
    ///
    /// # Errors
    /// [`Error::TimedOut`] naming the missing ranks, [`Error::PeerLost`], [`Error::Protocol`] when the root refuses
    /// (rank taken, another number of ranks, another version), [`Error::Aborted`] within 100 ms of `abort`.
    pub fn init(
        id: &UniqueId,
        rank: u32,
        ranks: u32,
        abort: Arc<AbortWord>,
        timeout: Duration,
    ) -> Result<Self> {
        Self::init_scalable(std::slice::from_ref(id), rank, ranks, abort, timeout)
    }

    /// As [`Bootstrap::init`] with 1 to `ranks` ids, the same in the same order on all ranks, among whose roots the ranks
    /// are spread ([`root_of`]).
    ///
    /// # Errors
    /// As [`Bootstrap::init`]; [`Error::InvalidArgument`] for another number of ids.
    pub fn init_scalable(
        ids: &[UniqueId],
        rank: u32,
        ranks: u32,
        abort: Arc<AbortWord>,
        timeout: Duration,
    ) -> Result<Self> {
        sys::raise_descriptor_limit();
        let joined = rendezvous::join(ids, rank, ranks, &abort, timeout)?;
        let ours = (rank, joined.cookie, joined.table);
        Self::open(ours, joined.listener, joined.local, abort, timeout)
    }

    /// The rank's end of a network whose table (rank, secret, addresses) is known.
    fn open(
        ours: (u32, u64, Vec<SocketAddr>),
        listener: TcpListener,
        local: SocketAddr,
        abort: Arc<AbortWord>,
        timeout: Duration,
    ) -> Result<Self> {
        let wake = Wake::new().map_err(system("making an eventfd"))?;
        let shared = Arc::new(Shared::new(ours, abort, timeout, wake));
        shared.join_tree()?;
        let serving = Arc::clone(&shared);
        let service = thread::Builder::new()
            .name("rs-bootstrap".into())
            .stack_size(256 << 10)
            .spawn(move || serving.serve(&ParentOnly::new(listener)))
            .map_err(system("starting the bootstrap thread"))?;
        Ok(Self {
            shared,
            local,
            collectives: Mutex::default(),
            service: Some(service),
        })
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.shared.table.len() as u32
    }

    /// Secret that the ranks share: what a connection between them has to present.
    #[must_use]
    pub fn cookie(&self) -> u64 {
        self.shared.cookie
    }

    /// Address by which other ranks reach this one, with port 0.
    #[must_use]
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Sends a message; returns when the system has taken it. Messages of one (peer, tag) arrive in order.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::TimedOut`], [`Error::Aborted`]; [`Error::InvalidArgument`] for a rank that does not
    /// exist or more than 64 MiB.
    pub fn send(&self, peer: u32, tag: u32, data: &[u8]) -> Result<()> {
        self.check(peer)?;
        if data.len() > MAX_MESSAGE {
            let text = format!(
                "a bootstrap message of {} bytes (limit {})",
                data.len(),
                MAX_MESSAGE
            );
            return Err(Error::InvalidArgument(text));
        }
        let tag = tag.into();
        if peer == self.rank() {
            self.shared.keep(Class::Message, tag, data.to_vec());
            return Ok(());
        }
        let frame = Frame::Data {
            tag,
            data: Vec::new(),
        };
        self.shared.send(peer, &frame, data, self.shared.wait())
    }

    /// Waits for the next message of (peer, tag).
    ///
    /// # Errors
    /// [`Error::PeerLost`] naming whose loss it is, [`Error::TimedOut`], [`Error::Aborted`];
    /// [`Error::InvalidArgument`] as in [`Bootstrap::send`].
    pub fn recv(&self, peer: u32, tag: u32) -> Result<Vec<u8>> {
        self.check(peer)?;
        self.shared
            .recv(peer, Class::Message, tag.into(), self.shared.wait())
    }

    fn check(&self, peer: u32) -> Result<()> {
        if peer < self.ranks() {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "there is no rank {peer} among {}",
            self.ranks()
        )))
    }

    /// Sends a control message to one rank (this one, too), from any thread; does not block and does not wait. Control
    /// messages of one rank to another arrive in order, independently of the abort word. A connection is opened if there is none: to tell
    /// everyone, use [`Bootstrap::post_control_to_all`].
    ///
    /// # Errors
    /// [`Error::PeerLost`] for a rank that is known to be gone; [`Error::System`] when no connection can be opened;
    /// [`Error::InvalidArgument`] for a rank that does not exist or more than 1 MiB.
    pub fn post_control(&self, peer: u32, data: &[u8]) -> Result<()> {
        self.check(peer)?;
        check_control(data)?;
        self.shared.post_control(peer, data)
    }

    /// Sends a control message to every other rank, from rank to rank over the connections that there are; does not
    /// block and does not wait. Each arrives once, two of them in any order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more than 1 MiB.
    pub fn post_control_to_all(&self, data: &[u8]) -> Result<()> {
        check_control(data)?;
        self.shared.spread_control(data);
        Ok(())
    }

    /// Gives control messages to `callback`, first those that have come already.
    pub fn on_control(&self, callback: OnControl) {
        self.shared.on_control(callback);
    }

    /// Tells `callback` of every rank whose process died or whose connection broke without a goodbye, once a rank, first
    /// of those that did already. Not called any more once this rank has said goodbye.
    pub fn on_lost(&self, callback: OnLost) {
        self.shared.on_lost(callback);
    }

    /// From here on keeps connections whose other end is silent, however long that lasts, instead of taking its rank for dead after
    /// about 11 s: for ranks whose data take other ways, by which they learn whether a peer is there. That a process ends is known
    /// as before, where its end can be told.
    pub fn bear_silence(&self) {
        self.shared.bear_silence();
    }

    /// Says goodbye: an orderly destroy (or an abort, if `aborted`), so that nobody takes this rank for dead. Messages
    /// that were sent before arrive. Ranks that wait for this one get an error. Once is enough.
    pub fn leave(&self, aborted: bool) {
        self.shared.leave(aborted);
    }
}

fn check_control(data: &[u8]) -> Result<()> {
    if data.len() <= MAX_CONTROL {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!(
        "a control message of {} bytes (limit {})",
        data.len(),
        MAX_CONTROL
    )))
}

/// A listener, not blocking, with room for many that connect at once: where the queue is full, the system drops the
/// connection and the other end tries again only after a second.
fn listen_at(address: SocketAddr) -> Result<TcpListener> {
    let listening = || format!("listening on {address}");
    let listener = sys::bind(address).map_err(system(&listening()))?;
    sys::deepen_queue(&listener).map_err(system(&listening()))?;
    listener.set_nonblocking(true).map_err(system(&listening()))?;
    Ok(listener)
}

impl Drop for Bootstrap {
    fn drop(&mut self) {
        self.leave(self.shared.abort.is_set());
        self.shared.stop();
        if let Some(service) = self.service.take() {
            threads::join(service);
        }
    }
}
