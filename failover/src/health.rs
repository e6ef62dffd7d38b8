//! What the connections of a process know of ports, together.
//!
//! Health belongs to a path, a pair of ports: a peer may be reached well from one NIC and badly from another. What is said of a
//! NIC is derived: its port is down, or nothing gets over any of at least two paths that end there at different peers. So one
//! dead remote NIC condemns no local one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use crate::{Cause, Settings};

/// A port of a device, the same to everyone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId {
    /// Node GUID of the device.
    pub guid: u64,
    /// Port number, from 1.
    pub port: u8,
}

/// A pair of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId {
    /// This process's.
    pub local: PortId,
    /// The peer's.
    pub remote: PortId,
}

/// What a path is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathState {
    /// Nothing failed since it last worked.
    #[default]
    Good,
    /// It failed for some connection; others are to probe it.
    Suspect,
    /// Too many connections failed, or a port of it is down.
    Down,
    /// It works again, for less than the recovery window.
    Recovering,
}

/// How much follows from a failure for the other connections over the same ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// They probe it ([`crate::Event::Suspected`]): it may have been the peer's process that went.
    Suspect,
    /// They leave it ([`crate::Event::Condemned`]).
    Down,
}

/// What is known of a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathHealth {
    /// What it is in.
    pub state: PathState,
    /// Failures since it was last good.
    pub consecutive_failures: u32,
    /// Failures in all.
    pub failures: u64,
    /// Switches of connections away from it.
    pub switches: u64,
    /// When the last connection switched away from it.
    pub last_switch: Option<Duration>,
    /// When it works again: since when.
    pub recovering_since: Option<Duration>,
    /// What said that it failed, last.
    pub cause: Option<Cause>,
}

/// The same with whom it is about.
#[derive(Debug, Default)]
struct Known {
    health: PathHealth,
    /// Connections that use it.
    users: BTreeSet<u64>,
    /// Those that failed since it was last good.
    failing: BTreeSet<u64>,
}

/// What is said of a NIC's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicVerdict {
    /// Something gets over it, or nothing was tried.
    Good,
    /// Paths of it failed, to or from one other port: which of the two it is cannot be told.
    Suspect,
    /// Its port is down (known of local ports).
    PortDown,
    /// Nothing gets over it, to or from this many other ports.
    Unreachable(usize),
}

/// Health of all paths of a process. Its owner puts it behind a lock; nothing here is on the way of a step.
#[derive(Debug)]
pub struct Health {
    settings: Arc<Settings>,
    paths: BTreeMap<PathId, Known>,
    down: BTreeSet<PortId>,
}

impl Health {
    /// Of no paths yet.
    #[must_use]
    pub fn new(settings: Arc<Settings>) -> Self {
        Self {
            settings,
            paths: BTreeMap::new(),
            down: BTreeSet::new(),
        }
    }

    /// A connection uses a path from now on: what it is to be told of it, because of others. Of a local port that is down it knows
    /// itself.
    pub fn joined(&mut self, path: PathId, connection: u64) -> Option<Scope> {
        let is_down = self.down.contains(&path.local);
        let entry = self.paths.entry(path).or_default();
        entry.users.insert(connection);
        match entry.health.state {
            _ if is_down => {
                entry.health.state = PathState::Down;
                None
            }
            PathState::Good | PathState::Recovering => None,
            PathState::Suspect => Some(Scope::Suspect),
            PathState::Down => Some(Scope::Down),
        }
    }

    /// Paths and what is known of them.
    pub fn paths(&self) -> impl Iterator<Item = (&PathId, &PathHealth)> {
        self.paths.iter().map(|(id, known)| (id, &known.health))
    }

    /// What is known of one.
    #[must_use]
    pub fn path(&self, path: &PathId) -> Option<&PathHealth> {
        self.paths.get(path).map(|known| &known.health)
    }

    /// A local port went up or down: the paths that end there, all of whose connections are to be told.
    pub fn port(&mut self, now: Duration, port: PortId, up: bool) -> Vec<PathId> {
        let changed = if up {
            self.down.remove(&port)
        } else {
            self.down.insert(port)
        };
        if !changed {
            return Vec::new();
        }
        let mut told = Vec::new();
        for (id, path) in self.paths.iter_mut().filter(|(id, _)| id.local == port) {
            if up {
                path.works(now);
            } else {
                path.health.fails(Cause::Port);
                path.health.state = PathState::Down;
            }
            told.push(*id);
        }
        told
    }

    /// A connection failed over a path: what the *others* are to be told, of this path and of others that follow from it.
    pub fn failed(&mut self, path: PathId, connection: u64, cause: Cause) -> Vec<(PathId, Scope)> {
        let condemn_after = self.settings.condemn_after as usize;
        let entry = self.paths.entry(path).or_default();
        let was = entry.health.state;
        entry.health.fails(cause);
        // What others found is no finding of one's own.
        if cause != Cause::Shared {
            entry.failing.insert(connection);
        }
        if was != PathState::Down {
            entry.health.state = match entry.failing.len() >= condemn_after {
                true => PathState::Down,
                false => PathState::Suspect,
            };
        }
        let mut told = match (was, entry.health.state) {
            (PathState::Down, _) => Vec::new(),
            (_, PathState::Down) => vec![(path, Scope::Down)],
            (PathState::Suspect, _) => Vec::new(),
            _ => vec![(path, Scope::Suspect)],
        };
        let condemned: Vec<PortId> = [path.local, path.remote]
            .into_iter()
            .filter(|port| matches!(self.nic(*port), NicVerdict::Unreachable(_)))
            .collect();
        for (id, other) in &mut self.paths {
            let ends_there = condemned.contains(&id.local) || condemned.contains(&id.remote);
            if ends_there && other.health.state == PathState::Suspect {
                other.health.state = PathState::Down;
                told.retain(|(told, _)| told != id);
                told.push((*id, Scope::Down));
            }
        }
        told
    }

    /// A connection switched away from a path.
    pub fn switched(&mut self, now: Duration, path: PathId) {
        let path = &mut self.paths.entry(path).or_default().health;
        path.switches += 1;
        path.last_switch = Some(now);
    }

    /// A path was rebuilt and proven by some connection.
    pub fn restored(&mut self, now: Duration, path: PathId) {
        self.paths.entry(path).or_default().works(now);
    }

    /// A connection is there no more. A path that none is left of those that it failed for is found out about anew: it counts as one that
    /// works again. Whether there is such a one. What no connection uses is forgotten.
    pub fn gone(&mut self, now: Duration, connection: u64) -> bool {
        self.paths.retain(|_, path| {
            path.users.remove(&connection);
            !path.users.is_empty()
        });
        let mut any = false;
        for (id, path) in &mut self.paths {
            if path.failing.remove(&connection) && path.failing.is_empty() && !self.down.contains(&id.local) {
                path.works(now);
                any = true;
            }
        }
        any
    }

    /// Ends recovery windows that are over; whether there were any.
    pub fn tick(&mut self, now: Duration) -> bool {
        let mut any = false;
        for path in self.paths.values_mut().map(|known| &mut known.health) {
            if let Some(since) = path.recovering_since
                && now.saturating_sub(since) >= self.settings.recovery_window
            {
                path.recovering_since = None;
                path.consecutive_failures = 0;
                path.state = PathState::Good;
                any = true;
            }
        }
        any
    }

    /// When [`Health::tick`] has something to do, if ever.
    #[must_use]
    pub fn due(&self) -> Option<Duration> {
        let since = self
            .paths
            .values()
            .filter_map(|path| path.health.recovering_since);
        since.min().map(|since| since + self.settings.recovery_window)
    }

    /// What is said of a port, local or remote.
    #[must_use]
    pub fn nic(&self, port: PortId) -> NicVerdict {
        if self.down.contains(&port) {
            return NicVerdict::PortDown;
        }
        let mut others = BTreeSet::new();
        for (id, path) in &self.paths {
            let other = match (id.local == port, id.remote == port) {
                // A port that is down at the far end says nothing of this one.
                (true, _) => id.remote,
                (_, true) if !self.down.contains(&id.local) => id.local,
                _ => continue,
            };
            match path.health.state {
                PathState::Good | PathState::Recovering => return NicVerdict::Good,
                PathState::Suspect | PathState::Down => others.insert(other),
            };
        }
        match others.len() {
            0 => NicVerdict::Good,
            1 => NicVerdict::Suspect,
            count => NicVerdict::Unreachable(count),
        }
    }
}

impl PathHealth {
    fn fails(&mut self, cause: Cause) {
        self.consecutive_failures = self.consecutive_failures.saturating_add(1);
        self.failures += 1;
        self.cause = Some(cause);
        self.recovering_since = None;
    }
}

impl Known {
    fn works(&mut self, now: Duration) {
        if matches!(self.health.state, PathState::Suspect | PathState::Down) {
            self.health.state = PathState::Recovering;
            self.health.recovering_since = Some(now);
            self.failing.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    const RETRIES: Cause = Cause::Completion(Status::RetryExceeded);

    fn port(guid: u64) -> PortId {
        PortId { guid, port: 1 }
    }

    fn path(local: u64, remote: u64) -> PathId {
        PathId {
            local: port(local),
            remote: port(remote),
        }
    }

    fn health() -> Health {
        Health::new(Arc::new(Settings::default()))
    }

    #[test]
    fn one_connection_has_others_probe_and_two_have_them_leave() {
        let mut health = health();
        assert_eq!(
            health.failed(path(1, 9), 100, RETRIES),
            [(path(1, 9), Scope::Suspect)]
        );
        assert_eq!(health.failed(path(1, 9), 100, RETRIES), []);
        assert_eq!(health.failed(path(1, 9), 101, Cause::Shared), []);
        assert_eq!(
            health.failed(path(1, 9), 101, RETRIES),
            [(path(1, 9), Scope::Down)]
        );
        assert_eq!(health.failed(path(1, 9), 102, RETRIES), []);
        let seen = health.path(&path(1, 9)).unwrap();
        assert_eq!((seen.consecutive_failures, seen.failures), (5, 5));
    }

    #[test]
    fn a_dead_remote_nic_condemns_no_local_one() {
        let mut health = health();
        health.joined(path(1, 8), 0);
        for local in [1, 2, 3] {
            health.failed(path(local, 9), local, RETRIES);
        }
        assert_eq!(health.nic(port(9)), NicVerdict::Unreachable(3));
        assert_eq!(health.nic(port(1)), NicVerdict::Good);
        // Nothing else was tried from it: one pair that fails names neither.
        assert_eq!(health.nic(port(2)), NicVerdict::Suspect);
    }

    #[test]
    fn a_dead_local_nic_is_told_from_its_peers() {
        let mut health = health();
        health.joined(path(2, 8), 0);
        health.joined(path(2, 9), 0);
        assert_eq!(
            health.failed(path(1, 8), 1, RETRIES),
            [(path(1, 8), Scope::Suspect)]
        );
        // The second peer settles it, for both paths.
        let told = health.failed(path(1, 9), 2, RETRIES);
        assert_eq!(told, [(path(1, 8), Scope::Down), (path(1, 9), Scope::Down)]);
        assert_eq!(health.nic(port(1)), NicVerdict::Unreachable(2));
        assert_eq!(
            (health.nic(port(8)), health.nic(port(9))),
            (NicVerdict::Good, NicVerdict::Good)
        );
    }

    #[test]
    fn what_a_connection_found_goes_with_it() {
        let mut health = health();
        let at = Duration::from_secs;
        for (path, connection) in [
            (path(1, 9), 100),
            (path(1, 9), 102),
            (path(2, 8), 100),
            (path(2, 8), 101),
        ] {
            health.joined(path, connection);
        }
        health.joined(path(2, 8), 103);
        health.failed(path(1, 9), 100, RETRIES);
        health.failed(path(2, 8), 100, RETRIES);
        health.failed(path(2, 8), 101, RETRIES);
        assert!(health.gone(at(1), 100));
        let state = |health: &Health, path| health.path(&path).unwrap().state;
        assert_eq!(state(&health, path(1, 9)), PathState::Recovering);
        assert_eq!(state(&health, path(2, 8)), PathState::Down);
        assert!(!health.gone(at(1), 100));
        // Two are too many, and one of them is gone.
        assert_eq!(
            health.failed(path(1, 9), 102, RETRIES),
            [(path(1, 9), Scope::Suspect)]
        );
        // A port is down whoever found it.
        health.port(at(2), port(2), false);
        assert!(!health.gone(at(2), 101));
        assert_eq!(state(&health, path(2, 8)), PathState::Down);
    }

    #[test]
    fn who_comes_later_is_told_what_others_found() {
        let mut health = health();
        let at = Duration::from_secs;
        for connection in [100, 101] {
            assert_eq!(health.joined(path(1, 9), connection), None);
        }
        health.failed(path(1, 9), 100, RETRIES);
        assert_eq!(health.joined(path(1, 9), 102), Some(Scope::Suspect));
        health.failed(path(1, 9), 101, RETRIES);
        assert_eq!(health.joined(path(1, 9), 103), Some(Scope::Down));
        assert_eq!(health.joined(path(1, 8), 103), None, "another port");
        health.restored(at(1), path(1, 9));
        assert_eq!(health.joined(path(1, 9), 104), None);
        // Its own port is its own to see, and what it is in is known until it is up.
        health.port(at(2), port(2), false);
        assert_eq!(health.joined(path(2, 9), 104), None);
        assert_eq!(health.path(&path(2, 9)).unwrap().state, PathState::Down);
        health.port(at(3), port(2), true);
        assert_eq!(health.path(&path(2, 9)).unwrap().state, PathState::Recovering);
    }

    /// Else a peer that was reached once would speak for a NIC for ever.
    #[test]
    fn a_path_that_nobody_uses_is_forgotten() {
        let mut health = health();
        for (path, connection) in [
            (path(1, 7), 100),
            (path(1, 8), 101),
            (path(1, 9), 102),
            (path(1, 9), 103),
        ] {
            health.joined(path, connection);
        }
        health.failed(path(1, 8), 101, RETRIES);
        health.failed(path(1, 9), 102, RETRIES);
        assert_eq!(health.nic(port(1)), NicVerdict::Good, "the third peer is reached");
        health.gone(Duration::ZERO, 100);
        assert_eq!(health.nic(port(1)), NicVerdict::Unreachable(2));
        for connection in [101, 102] {
            health.gone(Duration::ZERO, connection);
        }
        assert_eq!(health.paths().count(), 1);
        health.gone(Duration::ZERO, 103);
        assert_eq!(health.paths().count(), 0);
    }

    #[test]
    fn ports_and_windows() {
        let mut health = health();
        let at = Duration::from_secs;
        health.joined(path(1, 8), 0);
        health.joined(path(2, 8), 0);
        assert_eq!(health.port(at(1), port(1), false), [path(1, 8)]);
        assert_eq!(health.port(at(1), port(1), false), []);
        health.switched(at(1), path(1, 8));
        assert_eq!(health.nic(port(1)), NicVerdict::PortDown);
        assert_eq!(health.nic(port(8)), NicVerdict::Good);
        health.port(at(2), port(1), true);
        health.tick(at(6));
        assert_eq!(health.path(&path(1, 8)).unwrap().state, PathState::Recovering);
        health.tick(at(7));
        let seen = health.path(&path(1, 8)).unwrap();
        assert_eq!(
            (seen.state, seen.consecutive_failures, seen.switches),
            (PathState::Good, 0, 1)
        );
        assert_eq!(seen.last_switch, Some(at(1)));
    }
}
