//! What all connections of a process share about their ports: which are up, and what each found out.
//!
//! A device tells its events to whoever asks first, so one thread asks for all: it sleeps until there is one, and costs nothing while
//! nothing happens. Connections look at the version, a load, and read the rest when it has changed; those that sleep have a bell that rings.

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
    bell::{Bell, wait},
    device::{Context, EventKind, Queue},
};

/// State of a process's ports and paths.
pub struct Hub {
    state: Arc<State>,
    connections: AtomicU64,
    /// Reads devices' events; begins with the first device.
    listener: Mutex<Option<JoinHandle<()>>>,
}

/// What the thread that listens shares with the connections.
struct State {
    settings: Arc<Settings>,
    start: Instant,
    version: AtomicU64,
    inner: Mutex<Inner>,
    /// Tells the listener of a device more, or of the end.
    bell: Option<Bell>,
    ends: AtomicBool,
}

struct Inner {
    contexts: Vec<Arc<Context>>,
    /// Of connections that may sleep.
    bells: Vec<Weak<Bell>>,
    /// By device and port: what was told. What is not here is up.
    ports: HashMap<(String, u8), Told>,
    /// By device: how often it told that a queue cannot go on. Numbers of queues come again, so what is kept grows with the failures
    /// of a process at most.
    queues: HashMap<String, HashMap<Queue, u64>>,
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

/// How often a device told that queues cannot go on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failures {
    /// Queue pairs, or the device with all that it has.
    pub(crate) pairs: u64,
    /// Completion queues.
    pub(crate) completions: u64,
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

impl Inner {
    /// What a port's device has told of it.
    fn told(&self, device: &str, port: u8) -> Told {
        let told = self.ports.get(&(device.to_owned(), port));
        told.copied().unwrap_or(Told::NOTHING)
    }

    /// A port is up, or it is not; whether that is news.
    fn port_is(&mut self, now: Duration, device: &str, port: u8, up: bool) -> bool {
        let name = (device.to_owned(), port);
        let told = self.ports.entry(name).or_insert(Told::NOTHING);
        if std::mem::replace(&mut told.up, up) == up {
            return false;
        }
        told.downs += u64::from(!up);
        self.health.port(now, local_port(device, port), up);
        true
    }

    /// What a port was found to be when it was looked at; `None` if it could not be: then it is as it was. Whether that is news.
    fn port_was_found(
        &mut self,
        now: Duration,
        (device, port): (&str, u8),
        up: Option<bool>,
        is_new: bool,
    ) -> bool {
        match up {
            // Its device may have told and nobody has read it yet, which is no news any more then.
            Some(false) => self.port_is(now, device, port, false),
            // What a device told before it was opened anew is over. Else it tells that a port is up again, and when.
            Some(true) if is_new => self.port_is(now, device, port, true),
            Some(true) | None => false,
        }
    }
}

impl State {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has connections look: what changed is in `inner`, which is held until they are told, so that whoever sees the new version sees
    /// all that belongs to it.
    fn changed(&self, mut inner: MutexGuard<'_, Inner>) {
        // Release: as `Hub::version` acquires. What changed is read under the lock.
        self.version.fetch_add(1, Ordering::Release);
        inner.bells.retain(|bell| {
            let bell = bell.upgrade();
            if let Some(bell) = &bell {
                bell.ring();
            }
            bell.is_some()
        });
    }

    /// Reads what devices have to tell.
    fn read(&self, contexts: &[Arc<Context>]) {
        let mut inner = self.inner();
        let now = self.start.elapsed();
        let mut changed = false;
        for context in contexts {
            while let Some(event) = context.event() {
                if let Some(queue) = event.queue {
                    let queues = inner.queues.entry(context.name().to_owned()).or_default();
                    *queues.entry(queue).or_default() += 1;
                    changed = true;
                }
                let ports = match (event.kind, event.port) {
                    // The port that the event names: a device has several.
                    (EventKind::PortActive, Some(port)) => vec![(port, true)],
                    (EventKind::PortError, Some(port)) => vec![(port, false)],
                    (EventKind::DeviceFatal, _) if self.settings.async_events => {
                        (1..=MOST_PORTS).map(|port| (port, false)).collect()
                    }
                    _ => Vec::new(),
                };
                for (port, up) in ports {
                    changed |= inner.port_is(now, context.name(), port, up);
                }
            }
        }
        changed |= inner.health.tick(now);
        if changed {
            self.changed(inner);
        }
    }

    /// Listens to devices until the end.
    fn listen(&self, bell: &Bell) {
        let mut gone: Vec<Arc<Context>> = Vec::new();
        loop {
            let inner = self.inner();
            let mut contexts = inner.contexts.clone();
            let due = inner.health.due();
            drop(inner);
            contexts.retain(|context| !gone.iter().any(|gone| Arc::ptr_eq(gone, context)));
            let most = due.map(|due| due.saturating_sub(self.start.elapsed()));
            let slept = wait(bell, &contexts, &mut gone, most);
            // Acquire: as `Hub::drop` releases.
            if self.ends.load(Ordering::Acquire) || !slept {
                return;
            }
            self.read(&contexts);
        }
    }
}

impl Hub {
    /// Of a process whose connections have these settings.
    #[must_use]
    pub fn new(settings: Arc<Settings>) -> Arc<Self> {
        let inner = Inner {
            contexts: Vec::new(),
            bells: Vec::new(),
            ports: HashMap::new(),
            queues: HashMap::new(),
            health: Health::new(Arc::clone(&settings)),
            orders: BTreeMap::new(),
        };
        let state = State {
            settings,
            start: Instant::now(),
            version: AtomicU64::new(0),
            inner: Mutex::new(inner),
            bell: Bell::new().ok(),
            ends: AtomicBool::new(false),
        };
        Arc::new(Self {
            state: Arc::new(state),
            connections: AtomicU64::new(0),
            listener: Mutex::new(None),
        })
    }

    /// The settings of all connections.
    #[must_use]
    pub fn settings(&self) -> &Arc<Settings> {
        &self.state.settings
    }

    /// Time since it was made: the connections' clock.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.state.start.elapsed()
    }

    /// A number for a connection.
    pub(crate) fn connection(&self) -> u64 {
        // Relaxed: only has to differ.
        self.connections.fetch_add(1, Ordering::Relaxed)
    }

    /// Changes whenever something else does.
    pub(crate) fn version(&self) -> u64 {
        // Acquire: what made it change is read under the lock; this only says when to look.
        self.state.version.load(Ordering::Acquire)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.state.inner()
    }

    /// Rings whenever something changes.
    pub(crate) fn bell(&self) -> Option<Arc<Bell>> {
        let bell = Arc::new(Bell::new().ok()?);
        self.inner().bells.push(Arc::downgrade(&bell));
        Some(bell)
    }

    /// Has a device's events read here from now on, and looks at one of its ports now.
    pub(crate) fn watch(&self, context: &Arc<Context>, port: u8) {
        let mut inner = self.inner();
        let is_new = !inner.contexts.iter().any(|known| Arc::ptr_eq(known, context));
        if is_new {
            // What was told before is in the state that is read below.
            while context.event().is_some() {}
            inner.contexts.push(Arc::clone(context));
        }
        drop(inner);
        if is_new {
            self.listen();
        }
        let before = self.port(context.name(), port);
        // Nothing is held meanwhile: a device that does not answer is no reason for other connections to wait.
        let up = context.port(port).ok().map(|state| state.active);
        let now = self.now();
        let mut inner = self.inner();
        // What its device has told since is newer than what was found. What it tells from here on comes after it.
        let is_newest = inner.told(context.name(), port) == before;
        if is_newest && inner.port_was_found(now, (context.name(), port), up, is_new) {
            self.state.changed(inner);
        }
    }

    /// Has the thread that reads events know all devices. Without it paths fail by completions and time-outs alone.
    fn listen(&self) {
        let mut listener = self.listener.lock().unwrap_or_else(PoisonError::into_inner);
        if listener.is_none() && self.state.bell.is_some() {
            let state = Arc::clone(&self.state);
            let listen = move || state.bell.iter().for_each(|bell| state.listen(bell));
            *listener = thread::Builder::new()
                .name("ringsight-ports".into())
                .spawn(listen)
                .ok();
        }
        self.state.bell.iter().for_each(Bell::ring);
    }

    /// What a port's device has told of it.
    pub(crate) fn port(&self, device: &str, port: u8) -> Told {
        self.inner().told(device, port)
    }

    /// How often a device has told that one of these queues of it cannot go on.
    pub(crate) fn failures(&self, device: &str, queues: impl Iterator<Item = Queue>) -> Failures {
        let inner = self.inner();
        let mut failures = Failures::default();
        let Some(failed) = inner.queues.get(device) else {
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

    /// A connection uses a path from now on: what it is to do about it, because of others.
    pub(crate) fn joined(&self, path: PathId, connection: u64) -> Option<Scope> {
        self.inner().health.joined(path, connection)
    }

    /// A connection failed over a path.
    pub(crate) fn failed(&self, path: PathId, connection: u64, cause: Cause) {
        let now = self.now();
        let mut inner = self.inner();
        inner.health.tick(now);
        let told = inner.health.failed(path, connection, cause);
        // The one that is next: it changes under the lock alone.
        let version = self.version() + 1;
        for (path, scope) in &told {
            inner.orders.insert(*path, (*scope, connection, version));
        }
        self.state.changed(inner);
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
        let mut inner = self.inner();
        inner.health.switched(now, path);
        self.state.changed(inner);
    }

    /// A path has been rebuilt and proven.
    pub(crate) fn restored(&self, path: PathId) {
        let now = self.now();
        let mut inner = self.inner();
        inner.health.restored(now, path);
        inner.orders.remove(&path);
        self.state.changed(inner);
        // It has a recovery window to end.
        self.state.bell.iter().for_each(Bell::ring);
    }

    /// A connection is there no more.
    pub(crate) fn gone(&self, connection: u64) {
        let now = self.now();
        let mut inner = self.inner();
        let has_news = inner.health.gone(now, connection);
        let Inner { orders, health, .. } = &mut *inner;
        orders.retain(|path, _| health.path(path).is_some());
        if has_news {
            self.state.changed(inner);
            // As above.
            self.state.bell.iter().for_each(Bell::ring);
        }
    }

    /// Looks at the health of the process's paths.
    pub fn with_health<T>(&self, look: impl FnOnce(&Health) -> T) -> T {
        let now = self.now();
        let mut inner = self.inner();
        inner.health.tick(now);
        look(&inner.health)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // Release: as `State::listen` acquires.
        self.state.ends.store(true, Ordering::Release);
        self.state.bell.iter().for_each(Bell::ring);
        let listener = self.listener.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(listener) = listener.take() {
            let _ = listener.join();
        }
    }
}

/// Ports of a device at most, here.
const MOST_PORTS: u8 = 4;

#[cfg(test)]
mod tests {
    use ringsight_failover::PathState;

    use super::*;

    const DEVICE: &str = "mlx5_0";
    const PATH: PathId = PathId {
        local: PortId { guid: 0, port: 1 },
        remote: PortId { guid: 9, port: 1 },
    };

    /// A hub that knows a path of port 1 of the device.
    fn hub() -> (Arc<Hub>, PathId) {
        let hub = Hub::new(Arc::new(Settings::default()));
        let path = PathId {
            local: local_port(DEVICE, 1),
            ..PATH
        };
        hub.joined(path, 0);
        (hub, path)
    }

    #[test]
    fn a_port_that_is_found_down_is_down_for_all() {
        let (hub, path) = hub();
        let told = |news: bool, up, downs| {
            assert_eq!(hub.port(DEVICE, 1), Told { up, downs });
            news
        };
        let now = hub.now();
        let found = |up| hub.inner().port_was_found(now, (DEVICE, 1), up, false);
        let tells = |up| hub.inner().port_is(now, DEVICE, 1, up);
        assert!(!told(found(Some(true)), true, 0));
        // By who makes a connection, before the device's event is read.
        assert!(told(found(Some(false)), false, 1));
        let state = || hub.with_health(|health| health.path(&path).map(|path| path.state));
        assert_eq!(state(), Some(PathState::Down));
        assert!(!told(tells(false), false, 1));
        // A device that does not answer says nothing of its ports.
        assert!(!told(found(None), false, 1));
        assert!(!told(found(Some(true)), false, 1));
        assert!(told(tells(true), true, 1));
        assert_eq!(state(), Some(PathState::Recovering));
        assert!(!told(found(None), true, 1));
        assert!(told(tells(false), false, 2));
    }

    #[test]
    fn a_device_that_is_opened_anew_is_as_it_is_found() {
        let (hub, _) = hub();
        let now = hub.now();
        assert!(hub.inner().port_is(now, DEVICE, 1, false));
        let mut inner = hub.inner();
        assert!(inner.port_was_found(now, (DEVICE, 1), Some(true), true));
        assert!(!inner.port_was_found(now, (DEVICE, 1), Some(true), true));
        drop(inner);
        assert_eq!(hub.port(DEVICE, 1), Told { up: true, downs: 1 });
    }
}
