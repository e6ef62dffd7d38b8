//! What all connections of a process share about their ports: which are up, and what each found out.
//!
//! A device tells its events to whoever asks first, so one place asks for all. Connections look at its version, a relaxed load,
//! and read the rest when it has changed.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ringsight_failover::{Cause, Health, PathId, PortId, Scope, Settings};

use crate::device::{Context, EventKind};

/// State of a process's ports and paths.
pub struct Hub {
    settings: Arc<Settings>,
    start: Instant,
    version: AtomicU64,
    connections: AtomicU64,
    inner: Mutex<Inner>,
}

struct Inner {
    contexts: Vec<Arc<Context>>,
    /// By device and port: what was told. What is not here is up.
    ports: HashMap<(String, u8), Told>,
    health: Health,
    /// By path: what others are to do, and who said so.
    orders: BTreeMap<PathId, (Scope, u64, u64)>,
}

/// What a device told of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// It is up.
    pub(crate) up: bool,
    /// How often it went down: it may have come up since.
    pub(crate) downs: u64,
}

impl Told {
    /// Nothing was told.
    pub(crate) const NOTHING: Self = Self { up: true, downs: 0 };
}

/// A word that is the same for equal bytes, and hardly ever for others (FNV-1a).
fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// A local port.
#[must_use]
pub fn local_port(device: &str, port: u8) -> PortId {
    PortId {
        guid: digest(device.as_bytes()),
        port,
    }
}

/// A peer's port, known by its first address.
#[must_use]
pub fn remote_port(gid: [u8; 16], lid: u16, port: u8) -> PortId {
    let mut bytes = [0; 18];
    bytes[..16].copy_from_slice(&gid);
    bytes[16..].copy_from_slice(&lid.to_le_bytes());
    PortId {
        guid: digest(&bytes),
        port,
    }
}

impl Hub {
    /// Of a process whose connections have these settings.
    #[must_use]
    pub fn new(settings: Arc<Settings>) -> Arc<Self> {
        let inner = Inner {
            contexts: Vec::new(),
            ports: HashMap::new(),
            health: Health::new(Arc::clone(&settings)),
            orders: BTreeMap::new(),
        };
        Arc::new(Self {
            settings,
            start: Instant::now(),
            version: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            inner: Mutex::new(inner),
        })
    }

    /// The settings of all connections.
    #[must_use]
    pub fn settings(&self) -> &Arc<Settings> {
        &self.settings
    }

    /// Time since it was made: the connections' clock.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// A number for a connection.
    pub(crate) fn connection(&self) -> u64 {
        // Relaxed: only has to differ.
        self.connections.fetch_add(1, Ordering::Relaxed)
    }

    /// Changes whenever something else does.
    pub(crate) fn version(&self) -> u64 {
        // Acquire: what made it change is read under the lock; this only says when to look.
        self.version.load(Ordering::Acquire)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Has a device's events read here from now on, and looks at one of its ports now.
    pub(crate) fn watch(&self, context: &Arc<Context>, port: u8) {
        let up = context.port(port).is_ok_and(|state| state.active);
        let mut inner = self.inner();
        let told = inner
            .ports
            .entry((context.name().to_owned(), port))
            .or_insert(Told::NOTHING);
        // That a port which was up is down its device has told, or will.
        told.up &= up;
        if !inner.contexts.iter().any(|known| Arc::ptr_eq(known, context)) {
            inner.contexts.push(Arc::clone(context));
        }
    }

    /// Descriptors that are readable when a device has an event.
    #[must_use]
    pub fn fds(&self) -> Vec<RawFd> {
        self.inner().contexts.iter().map(AsRawFd::as_raw_fd).collect()
    }

    /// Reads what devices have to tell, unless somebody else is at it; never blocks.
    pub fn poll(&self) {
        let Ok(mut inner) = self.inner.try_lock() else {
            return;
        };
        let now = self.now();
        let mut changed = false;
        for context in inner.contexts.clone() {
            while let Some(event) = context.event() {
                let ports = match (event.kind, event.port) {
                    // The port that the event names: a device has several.
                    (EventKind::PortActive, Some(port)) => vec![(port, true)],
                    (EventKind::PortError, Some(port)) => vec![(port, false)],
                    (EventKind::DeviceFatal, _) => (1..=MOST_PORTS).map(|port| (port, false)).collect(),
                    _ => Vec::new(),
                };
                for (port, up) in ports {
                    let name = (context.name().to_owned(), port);
                    let told = inner.ports.entry(name).or_insert(Told::NOTHING);
                    if std::mem::replace(&mut told.up, up) != up {
                        told.downs += u64::from(!up);
                        inner.health.port(now, local_port(context.name(), port), up);
                        changed = true;
                    }
                }
            }
        }
        changed |= inner.health.tick(now);
        drop(inner);
        if changed {
            self.changed();
        }
    }

    /// What a port's device has told of it.
    pub(crate) fn port(&self, device: &str, port: u8) -> Told {
        let inner = self.inner();
        let told = inner.ports.get(&(device.to_owned(), port));
        told.copied().unwrap_or(Told::NOTHING)
    }

    /// A path that a connection uses.
    pub(crate) fn known(&self, path: PathId) {
        self.inner().health.known(path);
    }

    /// A connection failed over a path.
    pub(crate) fn failed(&self, path: PathId, connection: u64, cause: Cause) {
        let mut inner = self.inner();
        let told = inner.health.failed(path, connection, cause);
        let version = self.version() + 1;
        for (path, scope) in &told {
            inner.orders.insert(*path, (*scope, connection, version));
        }
        drop(inner);
        self.changed();
    }

    /// What a connection is to do about a path since `seen`, because of others.
    pub(crate) fn order(&self, path: PathId, connection: u64, seen: u64) -> Option<Scope> {
        let inner = self.inner();
        let (scope, by, version) = *inner.orders.get(&path)?;
        (version > seen && by != connection).then_some(scope)
    }

    /// A connection switched away from a path.
    pub(crate) fn switched(&self, path: PathId) {
        let now = self.now();
        self.inner().health.switched(now, path);
        self.changed();
    }

    /// A path has been rebuilt and proven.
    pub(crate) fn restored(&self, path: PathId) {
        let now = self.now();
        let mut inner = self.inner();
        inner.health.restored(now, path);
        inner.orders.remove(&path);
        drop(inner);
        self.changed();
    }

    /// Looks at the health of the process's paths.
    pub fn with_health<T>(&self, look: impl FnOnce(&Health) -> T) -> T {
        look(&self.inner().health)
    }
}

/// Ports of a device at most, here.
const MOST_PORTS: u8 = 4;
