//! Path health: what all connections of a process have found out about ports and paths.
//!
//! Health belongs to a path, that is a pair of ports: one NIC may reach a peer well and another may not. The verdict on a NIC is
//! derived from its paths. A NIC is unreachable only if at least two paths fail that end at different ports of other NICs, so one dead
//! remote NIC condemns no local one.
//!
//! | state of a path | meaning | entered by |
//! |---|---|---|
//! | `Good` | no failure since it last worked | the end of the recovery window |
//! | `Suspect` | one connection failed; the others probe it | [`Health::report_failure`] |
//! | `Down` | too many connections failed, or a port is down; the others leave it | [`Health::report_failure`], [`Health::set_port`] |
//! | `Recovering` | it works again, for less than the recovery window | [`Health::report_restored`], [`Health::set_port`], [`Health::remove_connection`] |
//!
//! The owner of a [`Health`] puts it behind a lock. No step waits for that lock.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use crate::{links::Cause, settings::Settings};

/// A port of a device; the same value in every process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId {
    /// Node GUID of the device.
    pub guid: u64,
    /// Port number, from 1.
    pub port: u8,
}

/// A path: a pair of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId {
    /// This process's port.
    pub local: PortId,
    /// The peer's port.
    pub remote: PortId,
}

/// State of a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathState {
    /// No failure since it last worked.
    #[default]
    Good,
    /// It failed for one connection; the others probe it.
    Suspect,
    /// Too many connections failed, or one of its ports is down.
    Down,
    /// It works again, for less than the recovery window.
    Recovering,
}

/// What a failure requires of the other connections over the same ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// They probe the path ([`Event::Suspected`](crate::Event::Suspected)): the failure may have been the end of the peer's process.
    Suspect,
    /// They leave the path ([`Event::Condemned`](crate::Event::Condemned)).
    Down,
}

/// What is known of a path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PathHealth {
    /// Its state.
    pub state: PathState,
    /// Failures since it was last good.
    pub consecutive_failures: u32,
    /// Failures in all.
    pub failures: u64,
    /// Switches of connections away from it.
    pub switches: u64,
    /// When the last connection switched away from it.
    pub last_switch: Option<Duration>,
    /// Since when it works again, while it is [`PathState::Recovering`].
    pub recovering_since: Option<Duration>,
    /// Cause of the last failure.
    pub cause: Option<Cause>,
}

/// A path with the connections that use it.
#[derive(Debug, Default)]
struct PathRecord {
    health: PathHealth,
    /// Connections that use it.
    users: BTreeSet<u64>,
    /// Connections that failed since the path was last good.
    failing: BTreeSet<u64>,
}

/// Verdict on a NIC's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NicVerdict {
    /// At least one path works, or none was tried.
    Good,
    /// Its paths to or from one other port failed. Either of the two ports may be at fault.
    Suspect,
    /// The port is down. Known of local ports only.
    PortDown,
    /// No path works, to or from this many other ports.
    Unreachable(usize),
}

/// Health of all paths of a process.
#[derive(Debug)]
pub struct Health {
    settings: Arc<Settings>,
    paths: BTreeMap<PathId, PathRecord>,
    down: BTreeSet<PortId>,
}

impl Health {
    /// A table without paths.
    #[must_use]
    pub fn new(settings: Arc<Settings>) -> Self {
        Self {
            settings,
            paths: BTreeMap::new(),
            down: BTreeSet::new(),
        }
    }

    /// Adds a connection to a path. Returns what other connections' failures require of it. A local port that is down requires nothing:
    /// the connection sees that itself.
    pub fn add_connection(&mut self, path: PathId, connection: u64) -> Option<Scope> {
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

    /// All paths, with their health.
    pub fn paths(&self) -> impl Iterator<Item = (&PathId, &PathHealth)> {
        self.paths.iter().map(|(id, known)| (id, &known.health))
    }

    /// Health of one path.
    #[must_use]
    pub fn path(&self, path: &PathId) -> Option<&PathHealth> {
        self.paths.get(path).map(|known| &known.health)
    }

    /// Sets whether a local port is up. Returns the paths that end there, if that is a change: all of their connections must learn of it.
    pub fn set_port(&mut self, now: Duration, port: PortId, up: bool) -> Vec<PathId> {
        let changed = if up {
            self.down.remove(&port)
        } else {
            self.down.insert(port)
        };
        if !changed {
            return Vec::new();
        }
        let mut affected = Vec::new();
        for (id, path) in self.paths.iter_mut().filter(|(id, _)| id.local == port) {
            if up {
                path.record_recovery(now);
            } else {
                path.health.record_failure(Cause::Port);
                path.health.state = PathState::Down;
            }
            affected.push(*id);
        }
        affected
    }

    /// A connection failed over a path. Returns what that requires of the *other* connections, on this path and on paths that follow
    /// from it.
    pub fn report_failure(&mut self, path: PathId, connection: u64, cause: Cause) -> Vec<(PathId, Scope)> {
        let condemn_after = self.settings.condemn_after as usize;
        let entry = self.paths.entry(path).or_default();
        let was = entry.health.state;
        entry.health.record_failure(cause);
        // A failure that other connections found does not count as this connection's.
        if cause != Cause::Shared {
            entry.failing.insert(connection);
        }
        if was != PathState::Down {
            entry.health.state = match entry.failing.len() >= condemn_after {
                true => PathState::Down,
                false => PathState::Suspect,
            };
        }
        let mut orders = match (was, entry.health.state) {
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
                orders.retain(|(path, _)| path != id);
                orders.push((*id, Scope::Down));
            }
        }
        orders
    }

    /// A connection switched away from a path.
    pub fn report_switch(&mut self, now: Duration, path: PathId) {
        let path = &mut self.paths.entry(path).or_default().health;
        path.switches += 1;
        path.last_switch = Some(now);
    }

    /// A connection has rebuilt and proven a path.
    pub fn report_restored(&mut self, now: Duration, path: PathId) {
        self.paths.entry(path).or_default().record_recovery(now);
    }

    /// Removes a connection. A path whose failing connections are all gone counts as working again, until the next one finds out.
    /// Returns whether there is such a path. Paths without connections are forgotten.
    pub fn remove_connection(&mut self, now: Duration, connection: u64) -> bool {
        self.paths.retain(|_, path| {
            path.users.remove(&connection);
            !path.users.is_empty()
        });
        let mut any = false;
        for (id, path) in &mut self.paths {
            if path.failing.remove(&connection) && path.failing.is_empty() && !self.down.contains(&id.local) {
                path.record_recovery(now);
                any = true;
            }
        }
        any
    }

    /// Ends the recovery windows that are over. Returns whether there were any.
    pub fn expire(&mut self, now: Duration) -> bool {
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

    /// When [`Health::expire`] has something to do, if ever.
    #[must_use]
    pub fn deadline(&self) -> Option<Duration> {
        let since = self
            .paths
            .values()
            .filter_map(|path| path.health.recovering_since);
        since.min().map(|since| since + self.settings.recovery_window)
    }

    /// The verdict on a port, local or remote.
    #[must_use]
    pub fn nic(&self, port: PortId) -> NicVerdict {
        if self.down.contains(&port) {
            return NicVerdict::PortDown;
        }
        let mut others = BTreeSet::new();
        for (id, path) in &self.paths {
            let other = match (id.local == port, id.remote == port) {
                // A local port that is down says nothing of the remote port at the far end.
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
    fn record_failure(&mut self, cause: Cause) {
        self.consecutive_failures = self.consecutive_failures.saturating_add(1);
        self.failures += 1;
        self.cause = Some(cause);
        self.recovering_since = None;
    }
}

impl PathRecord {
    fn record_recovery(&mut self, now: Duration) {
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
    use crate::links::Status;

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
    fn one_failure_makes_others_probe_and_two_make_them_leave() {
        let mut health = health();
        assert_eq!(
            health.report_failure(path(1, 9), 100, RETRIES),
            [(path(1, 9), Scope::Suspect)]
        );
        assert_eq!(health.report_failure(path(1, 9), 100, RETRIES), []);
        assert_eq!(health.report_failure(path(1, 9), 101, Cause::Shared), []);
        assert_eq!(
            health.report_failure(path(1, 9), 101, RETRIES),
            [(path(1, 9), Scope::Down)]
        );
        assert_eq!(health.report_failure(path(1, 9), 102, RETRIES), []);
        let seen = health.path(&path(1, 9)).unwrap();
        assert_eq!((seen.consecutive_failures, seen.failures), (5, 5));
    }

    #[test]
    fn a_dead_remote_nic_condemns_no_local_one() {
        let mut health = health();
        health.add_connection(path(1, 8), 0);
        for local in [1, 2, 3] {
            health.report_failure(path(local, 9), local, RETRIES);
        }
        assert_eq!(health.nic(port(9)), NicVerdict::Unreachable(3));
        assert_eq!(health.nic(port(1)), NicVerdict::Good);
        // No other path of it was tried: one failing pair of ports accuses neither.
        assert_eq!(health.nic(port(2)), NicVerdict::Suspect);
    }

    #[test]
    fn a_dead_local_nic_is_distinguished_from_its_peers() {
        let mut health = health();
        health.add_connection(path(2, 8), 0);
        health.add_connection(path(2, 9), 0);
        assert_eq!(
            health.report_failure(path(1, 8), 1, RETRIES),
            [(path(1, 8), Scope::Suspect)]
        );
        // The second peer decides, for both paths.
        let orders = health.report_failure(path(1, 9), 2, RETRIES);
        assert_eq!(orders, [(path(1, 8), Scope::Down), (path(1, 9), Scope::Down)]);
        assert_eq!(health.nic(port(1)), NicVerdict::Unreachable(2));
        assert_eq!(
            (health.nic(port(8)), health.nic(port(9))),
            (NicVerdict::Good, NicVerdict::Good)
        );
    }

    #[test]
    fn failures_of_a_connection_are_forgotten_with_it() {
        let mut health = health();
        let at = Duration::from_secs;
        for (path, connection) in [
            (path(1, 9), 100),
            (path(1, 9), 102),
            (path(2, 8), 100),
            (path(2, 8), 101),
        ] {
            health.add_connection(path, connection);
        }
        health.add_connection(path(2, 8), 103);
        health.report_failure(path(1, 9), 100, RETRIES);
        health.report_failure(path(2, 8), 100, RETRIES);
        health.report_failure(path(2, 8), 101, RETRIES);
        assert!(health.remove_connection(at(1), 100));
        let state = |health: &Health, path| health.path(&path).unwrap().state;
        assert_eq!(state(&health, path(1, 9)), PathState::Recovering);
        assert_eq!(state(&health, path(2, 8)), PathState::Down);
        assert!(!health.remove_connection(at(1), 100));
        // Two failing connections condemn a path, and one of them is gone.
        assert_eq!(
            health.report_failure(path(1, 9), 102, RETRIES),
            [(path(1, 9), Scope::Suspect)]
        );
        // A port that is down stays down, whichever connection found it.
        health.set_port(at(2), port(2), false);
        assert!(!health.remove_connection(at(2), 101));
        assert_eq!(state(&health, path(2, 8)), PathState::Down);
    }

    #[test]
    fn later_connections_learn_of_earlier_failures() {
        let mut health = health();
        let at = Duration::from_secs;
        for connection in [100, 101] {
            assert_eq!(health.add_connection(path(1, 9), connection), None);
        }
        health.report_failure(path(1, 9), 100, RETRIES);
        assert_eq!(health.add_connection(path(1, 9), 102), Some(Scope::Suspect));
        health.report_failure(path(1, 9), 101, RETRIES);
        assert_eq!(health.add_connection(path(1, 9), 103), Some(Scope::Down));
        assert_eq!(health.add_connection(path(1, 8), 103), None, "another port");
        health.report_restored(at(1), path(1, 9));
        assert_eq!(health.add_connection(path(1, 9), 104), None);
        // A connection sees its own port itself; the path stays down until that port is up.
        health.set_port(at(2), port(2), false);
        assert_eq!(health.add_connection(path(2, 9), 104), None);
        assert_eq!(health.path(&path(2, 9)).unwrap().state, PathState::Down);
        health.set_port(at(3), port(2), true);
        assert_eq!(health.path(&path(2, 9)).unwrap().state, PathState::Recovering);
    }

    /// Otherwise a peer that was reached once would vouch for a NIC for ever.
    #[test]
    fn unused_paths_are_forgotten() {
        let mut health = health();
        for (path, connection) in [
            (path(1, 7), 100),
            (path(1, 8), 101),
            (path(1, 9), 102),
            (path(1, 9), 103),
        ] {
            health.add_connection(path, connection);
        }
        health.report_failure(path(1, 8), 101, RETRIES);
        health.report_failure(path(1, 9), 102, RETRIES);
        assert_eq!(health.nic(port(1)), NicVerdict::Good, "the third peer is reached");
        health.remove_connection(Duration::ZERO, 100);
        assert_eq!(health.nic(port(1)), NicVerdict::Unreachable(2));
        for connection in [101, 102] {
            health.remove_connection(Duration::ZERO, connection);
        }
        assert_eq!(health.paths().count(), 1);
        health.remove_connection(Duration::ZERO, 103);
        assert_eq!(health.paths().count(), 0);
    }

    #[test]
    fn port_changes_and_recovery_windows() {
        let mut health = health();
        let at = Duration::from_secs;
        health.add_connection(path(1, 8), 0);
        health.add_connection(path(2, 8), 0);
        assert_eq!(health.set_port(at(1), port(1), false), [path(1, 8)]);
        assert_eq!(health.set_port(at(1), port(1), false), []);
        health.report_switch(at(1), path(1, 8));
        assert_eq!(health.nic(port(1)), NicVerdict::PortDown);
        assert_eq!(health.nic(port(8)), NicVerdict::Good);
        health.set_port(at(2), port(1), true);
        health.expire(at(6));
        assert_eq!(health.path(&path(1, 8)).unwrap().state, PathState::Recovering);
        health.expire(at(7));
        let seen = health.path(&path(1, 8)).unwrap();
        assert_eq!(
            (seen.state, seen.consecutive_failures, seen.switches),
            (PathState::Good, 0, 1)
        );
        assert_eq!(seen.last_switch, Some(at(1)));
    }
}
