//! Port health: what all connections of a process share about their ports and paths.
//!
//! A port is up until its device reports it down (`PortState`). Path health is [`ringsight_failover::Health`].
//!
//! Threads:
//! - The *listener* (`ringsight-ports`) reads the asynchronous events of every device. A device delivers each event once, so one thread
//!   reads for all. It sleeps while nothing happens. It starts with the first device and ends with the [`PortHealth`].
//! - The threads of the connections compare `PortHealth::version`, one load, and read the tables when it has changed. A connection
//!   that sleeps has a `Waker`.
//! - Threads that make connections call `PortHealth::watch`.
//!
//! Invariants: the tables change only under their lock, and every change increments the version and wakes all wakers before the lock is
//! released. The lock is never held over a call of a device.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ringsight_failover::{Cause, Health, PathId, PortId, Scope, Settings};

use crate::{
    device::{Context, EventKind, Queue},
    waker::{Waker, wait},
};

/// Health of the ports and paths of a process.
pub struct PortHealth {
    shared: Arc<Shared>,
    connections: AtomicU64,
    /// Reads the devices' events; starts with the first device.
    listener: Mutex<Option<JoinHandle<()>>>,
}

/// What the listener shares with the connections.
struct Shared {
    settings: Arc<Settings>,
    start: Instant,
    version: AtomicU64,
    tables: Mutex<Tables>,
    /// Wakes the listener for a new device, a new recovery window, or its end. `None` if the process had no descriptor left.
    waker: Option<Waker>,
    ends: AtomicBool,
}

struct Tables {
    contexts: Vec<Arc<Context>>,
    /// Wakers of connections that may sleep.
    wakers: Vec<Weak<Waker>>,
    /// By device and port. A port that is not here is up.
    ports: HashMap<(String, u8), PortState>,
    /// By device: how often it reported that a queue cannot go on. Queue numbers are reused, so the table grows at most with the number of
    /// failures.
    queues: HashMap<String, HashMap<Queue, u64>>,
    health: Health,
    /// By path: what the other connections must do, which connection caused it, and the version of the order.
    orders: BTreeMap<PathId, (Scope, u64, u64)>,
}

/// State of a port, by the events of its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortState {
    /// The port is up.
    pub(crate) up: bool,
    /// How often the port went down. It may have come up since.
    pub(crate) downs: u64,
}

impl PortState {
    /// The state before any event.
    pub(crate) const INITIAL: Self = Self { up: true, downs: 0 };
}

/// How often a device reported that queues cannot go on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueFailures {
    /// Reports of queue pairs, or of the whole device.
    pub(crate) pairs: u64,
    /// Reports of completion queues.
    pub(crate) completions: u64,
}

/// Hash of bytes (FNV-1a).
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |value, byte| {
        (value ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Identity of a local port.
#[must_use]
pub fn local_port(device: &str, port: u8) -> PortId {
    PortId {
        guid: hash(device.as_bytes()),
        port,
    }
}

/// Identity of a peer's port, from its first address.
#[must_use]
pub fn remote_port(gid: [u8; 16], lid: u16, port: u8) -> PortId {
    let mut bytes = [0; 18];
    bytes[..16].copy_from_slice(&gid);
    bytes[16..].copy_from_slice(&lid.to_le_bytes());
    PortId {
        guid: hash(&bytes),
        port,
    }
}

impl Tables {
    /// State of a port.
    fn port_state(&self, device: &str, port: u8) -> PortState {
        let state = self.ports.get(&(device.to_owned(), port));
        state.copied().unwrap_or(PortState::INITIAL)
    }

    /// Sets whether a port is up. Returns whether that is a change.
    fn set_port(&mut self, now: Duration, device: &str, port: u8, up: bool) -> bool {
        let name = (device.to_owned(), port);
        let state = self.ports.entry(name).or_insert(PortState::INITIAL);
        if std::mem::replace(&mut state.up, up) == up {
            return false;
        }
        state.downs += u64::from(!up);
        self.health.set_port(now, local_port(device, port), up);
        true
    }

    /// Takes the result of a query of a port; `None` if the query failed, which changes nothing. Returns whether that is a change.
    fn set_queried_port(
        &mut self,
        now: Duration,
        (device, port): (&str, u8),
        up: Option<bool>,
        is_new: bool,
    ) -> bool {
        match up {
            // The event of this change may still be unread; it will then be no change.
            Some(false) => self.set_port(now, device, port, false),
            // Events from before a device was opened anew are obsolete. Otherwise the device reports when a port comes up.
            Some(true) if is_new => self.set_port(now, device, port, true),
            Some(true) | None => false,
        }
    }
}

impl Shared {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notifies all connections of a change. The tables stay locked until then, so that whoever sees the new version sees everything that
    /// belongs to it.
    fn notify(&self, mut tables: MutexGuard<'_, Tables>) {
        // Release: pairs with the acquire in `PortHealth::version`. The tables themselves are read under the lock.
        self.version.fetch_add(1, Ordering::Release);
        tables.wakers.retain(|waker| {
            let waker = waker.upgrade();
            if let Some(waker) = &waker {
                waker.wake();
            }
            waker.is_some()
        });
    }

    /// Reads the pending events of devices.
    fn read_events(&self, contexts: &[Arc<Context>]) {
        let mut tables = self.tables();
        let now = self.start.elapsed();
        let mut changed = false;
        for context in contexts {
            while let Some(event) = context.event() {
                if let Some(queue) = event.queue {
                    let queues = tables.queues.entry(context.name().to_owned()).or_default();
                    *queues.entry(queue).or_default() += 1;
                    changed = true;
                }
                let ports = match (event.kind, event.port) {
                    // A device has several ports: the one that the event names.
                    (EventKind::PortActive, Some(port)) => vec![(port, true)],
                    (EventKind::PortError, Some(port)) => vec![(port, false)],
                    (EventKind::DeviceFatal, _) if self.settings.async_events => {
                        (1..=MAX_PORTS).map(|port| (port, false)).collect()
                    }
                    _ => Vec::new(),
                };
                for (port, up) in ports {
                    changed |= tables.set_port(now, context.name(), port, up);
                }
            }
        }
        changed |= tables.health.expire(now);
        if changed {
            self.notify(tables);
        }
    }

    /// The listener thread.
    fn listen(&self, waker: &Waker) {
        let mut failed: Vec<Arc<Context>> = Vec::new();
        loop {
            let tables = self.tables();
            let mut contexts = tables.contexts.clone();
            let deadline = tables.health.deadline();
            drop(tables);
            contexts.retain(|context| !failed.iter().any(|failed| Arc::ptr_eq(failed, context)));
            let timeout = deadline.map(|deadline| deadline.saturating_sub(self.start.elapsed()));
            let slept = wait(waker, &contexts, &mut failed, timeout);
            // Acquire: pairs with the release in `PortHealth::drop`.
            if self.ends.load(Ordering::Acquire) || !slept {
                return;
            }
            self.read_events(&contexts);
        }
    }
}

impl PortHealth {
    /// A table without ports and paths, for connections with these settings.
    #[must_use]
    pub fn new(settings: Arc<Settings>) -> Arc<Self> {
        let tables = Tables {
            contexts: Vec::new(),
            wakers: Vec::new(),
            ports: HashMap::new(),
            queues: HashMap::new(),
            health: Health::new(Arc::clone(&settings)),
            orders: BTreeMap::new(),
        };
        let shared = Shared {
            settings,
            start: Instant::now(),
            version: AtomicU64::new(0),
            tables: Mutex::new(tables),
            waker: Waker::new().ok(),
            ends: AtomicBool::new(false),
        };
        Arc::new(Self {
            shared: Arc::new(shared),
            connections: AtomicU64::new(0),
            listener: Mutex::new(None),
        })
    }

    /// The settings of all connections.
    #[must_use]
    pub fn settings(&self) -> &Arc<Settings> {
        &self.shared.settings
    }

    /// Time since this table was made: the clock of all connections.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.shared.start.elapsed()
    }

    /// A new connection number.
    pub(crate) fn next_connection(&self) -> u64 {
        // Relaxed: the numbers only have to differ.
        self.connections.fetch_add(1, Ordering::Relaxed)
    }

    /// Number of changes of the tables so far.
    pub(crate) fn version(&self) -> u64 {
        // Acquire: pairs with the release in `Shared::notify`. The tables are read under the lock; the version only says when to look.
        self.shared.version.load(Ordering::Acquire)
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.shared.tables()
    }

    /// A waker that wakes at every change; `None` if the process has no descriptor left.
    pub(crate) fn waker(&self) -> Option<Arc<Waker>> {
        let waker = Arc::new(Waker::new().ok()?);
        self.tables().wakers.push(Arc::downgrade(&waker));
        Some(waker)
    }

    /// Adds a device to the listener, and queries one of its ports.
    pub(crate) fn watch(&self, context: &Arc<Context>, port: u8) {
        let mut tables = self.tables();
        let is_new = !tables.contexts.iter().any(|known| Arc::ptr_eq(known, context));
        if is_new {
            // The query below includes what these events report.
            while context.event().is_some() {}
            tables.contexts.push(Arc::clone(context));
        }
        drop(tables);
        if is_new {
            self.update_listener();
        }
        let before = self.port_state(context.name(), port);
        // No lock is held: other connections need not wait for a device that does not answer.
        let up = context.port(port).ok().map(|state| state.active);
        let now = self.now();
        let mut tables = self.tables();
        // An event that was read since is newer than the query.
        let is_newest = tables.port_state(context.name(), port) == before;
        if is_newest && tables.set_queried_port(now, (context.name(), port), up, is_new) {
            self.shared.notify(tables);
        }
    }

    /// Starts the listener if it does not run, and has it learn of a new device. Without a listener paths fail by completions and time-outs
    /// alone.
    fn update_listener(&self) {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if listener.is_none() && self.shared.waker.is_some() {
            let shared = Arc::clone(&self.shared);
            let listen = move || shared.waker.iter().for_each(|waker| shared.listen(waker));
            *listener = thread::Builder::new()
                .name("ringsight-ports".into())
                .spawn(listen)
                .ok();
        }
        self.shared.waker.iter().for_each(Waker::wake);
    }

    /// State of a port.
    pub(crate) fn port_state(&self, device: &str, port: u8) -> PortState {
        self.tables().port_state(device, port)
    }

    /// How often a device has reported that one of these queues cannot go on.
    pub(crate) fn queue_failures(&self, device: &str, queues: impl Iterator<Item = Queue>) -> QueueFailures {
        let tables = self.tables();
        let mut failures = QueueFailures::default();
        let Some(failed) = tables.queues.get(device) else {
            return failures;
        };
        for queue in queues {
            let sum = match queue {
                Queue::Pair(_) | Queue::All => &mut failures.pairs,
                Queue::Completions(_) => &mut failures.completions,
            };
            *sum += failed.get(&queue).copied().unwrap_or(0);
        }
        failures
    }

    /// Adds a connection to a path. Returns what other connections' failures require of it.
    pub(crate) fn add_connection(&self, path: PathId, connection: u64) -> Option<Scope> {
        self.tables().health.add_connection(path, connection)
    }

    /// A connection failed over a path.
    pub(crate) fn report_failure(&self, path: PathId, connection: u64, cause: Cause) {
        let now = self.now();
        let mut tables = self.tables();
        tables.health.expire(now);
        let orders = tables.health.report_failure(path, connection, cause);
        // The next version: it changes only under the lock.
        let version = self.version() + 1;
        for (path, scope) in &orders {
            tables.orders.insert(*path, (*scope, connection, version));
        }
        self.shared.notify(tables);
    }

    /// What other connections' failures after version `seen` require of a connection on a path.
    pub(crate) fn order(&self, path: PathId, connection: u64, seen: u64) -> Option<Scope> {
        let tables = self.tables();
        let (scope, by, version) = *tables.orders.get(&path)?;
        (version > seen && by != connection).then_some(scope)
    }

    /// A connection switched away from a path.
    pub(crate) fn report_switch(&self, path: PathId) {
        let now = self.now();
        let mut tables = self.tables();
        tables.health.report_switch(now, path);
        self.shared.notify(tables);
    }

    /// A connection has rebuilt and proven a path.
    pub(crate) fn report_restored(&self, path: PathId) {
        let now = self.now();
        let mut tables = self.tables();
        tables.health.report_restored(now, path);
        tables.orders.remove(&path);
        self.shared.notify(tables);
        // The listener ends the recovery window.
        self.shared.waker.iter().for_each(Waker::wake);
    }

    /// Removes a connection.
    pub(crate) fn remove_connection(&self, connection: u64) {
        let now = self.now();
        let mut tables = self.tables();
        let has_changed = tables.health.remove_connection(now, connection);
        let Tables { orders, health, .. } = &mut *tables;
        orders.retain(|path, _| health.path(path).is_some());
        if has_changed {
            self.shared.notify(tables);
            // As above.
            self.shared.waker.iter().for_each(Waker::wake);
        }
    }

    /// Calls `read` with the health of the process's paths.
    pub fn with_health<T>(&self, read: impl FnOnce(&Health) -> T) -> T {
        let now = self.now();
        let mut tables = self.tables();
        tables.health.expire(now);
        read(&tables.health)
    }
}

impl Drop for PortHealth {
    fn drop(&mut self) {
        // Release: pairs with the acquire in `Shared::listen`.
        self.shared.ends.store(true, Ordering::Release);
        self.shared.waker.iter().for_each(Waker::wake);
        let listener = self.listener.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(listener) = listener.take() {
            let _ = listener.join();
        }
    }
}

/// Ports of a device, at most.
const MAX_PORTS: u8 = 4;

#[cfg(test)]
mod tests {
    use ringsight_failover::PathState;

    use super::*;

    const DEVICE: &str = "mlx5_0";
    const PATH: PathId = PathId {
        local: PortId { guid: 0, port: 1 },
        remote: PortId { guid: 9, port: 1 },
    };

    /// A table with a path of port 1 of the device.
    fn port_health() -> (Arc<PortHealth>, PathId) {
        let table = PortHealth::new(Arc::new(Settings::default()));
        let path = PathId {
            local: local_port(DEVICE, 1),
            ..PATH
        };
        table.add_connection(path, 0);
        (table, path)
    }

    #[test]
    fn a_port_that_a_query_finds_down_is_down_for_all() {
        let (table, path) = port_health();
        let expect = |change: bool, up, downs| {
            assert_eq!(table.port_state(DEVICE, 1), PortState { up, downs });
            change
        };
        let now = table.now();
        let query = |up| table.tables().set_queried_port(now, (DEVICE, 1), up, false);
        let event = |up| table.tables().set_port(now, DEVICE, 1, up);
        assert!(!expect(query(Some(true)), true, 0));
        // The query of a new connection, before the listener reads the device's event.
        assert!(expect(query(Some(false)), false, 1));
        let state = || table.with_health(|health| health.path(&path).map(|path| path.state));
        assert_eq!(state(), Some(PathState::Down));
        assert!(!expect(event(false), false, 1));
        // A query that fails changes nothing.
        assert!(!expect(query(None), false, 1));
        assert!(!expect(query(Some(true)), false, 1));
        assert!(expect(event(true), true, 1));
        assert_eq!(state(), Some(PathState::Recovering));
        assert!(!expect(query(None), true, 1));
        assert!(expect(event(false), false, 2));
    }

    #[test]
    fn a_query_replaces_the_state_of_a_reopened_device() {
        let (table, _) = port_health();
        let now = table.now();
        assert!(table.tables().set_port(now, DEVICE, 1, false));
        let mut inner = table.tables();
        assert!(inner.set_queried_port(now, (DEVICE, 1), Some(true), true));
        assert!(!inner.set_queried_port(now, (DEVICE, 1), Some(true), true));
        drop(inner);
        assert_eq!(table.port_state(DEVICE, 1), PortState { up: true, downs: 1 });
    }
}
