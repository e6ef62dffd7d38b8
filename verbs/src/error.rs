//! Errors: of calls, of ports, and of connections.

use std::{fmt, io};

use ringsight_comm_base::sys::read_text;

/// A call of a device or of the library that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}{hint}")]
pub struct Error {
    what: String,
    source: io::Error,
    hint: String,
}

/// Result of a call of a device.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The error of a call that left its reason in `errno`.
    pub(crate) fn last(what: impl Into<String>) -> Self {
        Self::new(what, io::Error::last_os_error())
    }

    /// The error of a call that returned its reason.
    pub(crate) fn code(what: impl Into<String>, code: i32) -> Self {
        Self::new(what, io::Error::from_raw_os_error(code))
    }

    pub(crate) fn new(what: impl Into<String>, source: io::Error) -> Self {
        Self {
            what: what.into(),
            source,
            hint: String::new(),
        }
    }

    /// Adds a hint to the error of a call that locks memory, if the limit on locked memory may be the reason.
    pub(crate) fn of_locking(mut self, bytes: usize) -> Self {
        if matches!(
            self.source.raw_os_error(),
            Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM)
        ) && let Some(limit) = locked_limit()
        {
            self.hint = format!(
                " ({bytes} bytes to be locked, of which this process may have {limit}, see ulimit -l: raise the limit, or \
                 set NCCL_IB_DISABLE=1)"
            );
        }
        self
    }

    /// The system's error number.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}

/// Why a connection cannot go on over a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Index of the path.
    pub path: usize,
    /// `enum ibv_wc_status` of the completion that reported it. `None`: a call failed, or the peer broke the protocol.
    pub status: Option<u32>,
    /// Description.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Failure {}

/// Why libibverbs cannot be used; the same at every call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LibraryError(pub(crate) String);

/// Why a process has no usable RDMA port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetError {
    /// libibverbs is missing or incomplete.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The kernel lists no RDMA device.
    #[error("this machine has no RDMA device")]
    NoDevice,
    /// The filter excludes every port.
    #[error("NCCL_IB_HCA allows none of the RDMA ports {ports}{}", if unknown.is_empty() { String::new() } else { format!(" ({unknown} is none)") })]
    NoneAllowed {
        /// All ports.
        ports: String,
        /// Names in the filter that no port has.
        unknown: String,
    },
    /// Every usable port is down.
    #[error("no RDMA port is up of those that may be used: {ports}")]
    NoneUp {
        /// The usable ports.
        ports: String,
    },
}

/// Why a port cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// It is down.
    #[error("port {port} is down")]
    Down {
        /// Its name, `device:number`.
        port: String,
    },
    /// It has no P_Key at the configured index.
    #[error("port {port} has no P_Key at index {index} (NCCL_IB_PKEY) of {count}")]
    NoPkey {
        /// Its name.
        port: String,
        /// The configured index.
        index: u16,
        /// Entries of its table.
        count: u16,
    },
    /// A RoCE port without a suitable GID.
    #[error("port {port} has no GID, {wanted} was looked for; there are: {present}")]
    NoGid {
        /// Its name.
        port: String,
        /// What the configuration asks for.
        wanted: String,
        /// Indices that its table has.
        present: String,
    },
    /// The process has no port of this index.
    #[error("there is no port {0}")]
    NoIndex(usize),
    /// A connection without ports cannot rebuild a path.
    #[error("there are no ports to rebuild it on")]
    NoNet,
    /// The path belongs to no port of the process.
    #[error("the path has no port")]
    NoPort,
    /// The kernel does not list it any more.
    #[error("port {port} is gone")]
    Gone {
        /// Its name.
        port: String,
    },
    /// A call of its device failed.
    #[error(transparent)]
    Device(#[from] Error),
}

/// Why the ends of a path cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// This end's port is down.
    #[error("port {port} is down")]
    PortDown {
        /// Its name, `device:number`.
        port: String,
    },
    /// One port is RoCE, the other InfiniBand.
    #[error("{device} is {}, the peer's {peer} is {}", layer(*.ethernet), layer(!*.ethernet))]
    LinkLayers {
        /// This end's device.
        device: String,
        /// The peer's device.
        peer: String,
        /// This end's port is RoCE.
        ethernet: bool,
    },
    /// The ends have different numbers of queue pairs.
    #[error("{own} queue pairs here, {peer} at the peer: NCCL_IB_QPS_PER_CONNECTION differs between ranks")]
    QueuePairs {
        /// Queue pairs of this end.
        own: usize,
        /// Queue pairs of the peer.
        peer: usize,
    },
    /// A call of this end's device failed.
    #[error("{device} to the peer's {peer}: {source}")]
    Device {
        /// This end's device.
        device: String,
        /// The peer's device.
        peer: String,
        /// What the device reported.
        source: Error,
    },
}

fn layer(ethernet: bool) -> &'static str {
    if ethernet { "RoCE" } else { "InfiniBand" }
}

/// Why an offer of a peer cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    /// It is none of this protocol.
    #[error("the peer's connection data is malformed")]
    Malformed,
    /// The peer has another version of the protocol.
    #[error("the peer speaks version {theirs} of the connection data, we version {ours}")]
    Version {
        /// The peer's version.
        theirs: u16,
        /// This version.
        ours: u16,
    },
}

/// Bytes that this process may lock, if there is a limit for it.
fn locked_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is writable.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY && !may_lock_all()).then_some(limit.rlim_cur)
}

/// Whether the process has CAP_IPC_LOCK, so that no limit holds for it.
fn may_lock_all() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let status = read_text("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1)
}
