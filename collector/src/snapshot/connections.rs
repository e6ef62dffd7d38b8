//! Connections between nodes at one moment: which path each is on, and what is wrong with the others.

use std::collections::BTreeMap;

use ringsight_records::{
    PathCause,
    connection::{Connection, ConnectionPath, LinkStage, PathCondition},
};

use super::Process;

/// One end of a connection. Times are nanoseconds until the moment of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// Process.
    pub pid: u32,
    /// Rank in the communicator.
    pub rank: u32,
    /// The rank at the other end.
    pub peer: u32,
    /// Channel.
    pub channel: u8,
    /// Whether this end sends.
    pub sends: bool,
    /// Whether it is of messages, not of collectives.
    pub messages: bool,
    /// Whether it survives a path.
    pub survives: bool,
    /// `flows`, `recovers` (between two paths) or `failed`.
    pub phase: &'static str,
    /// Number of the last switch; 0: it is on its first path.
    pub epoch: u32,
    /// Changes of the path in use, and since the last one.
    pub switches: u32,
    /// Since the last one, if there was any.
    pub switched_ns: Option<u64>,
    /// Why a path was left last, if one was.
    pub reason: Option<PathCause>,
    /// `enum ibv_wc_status` of the completion that told of it; 0 if none did.
    pub status: u8,
    /// Place of the path in use.
    pub active: usize,
    /// Whether it has its backup path alone.
    pub backup_alone: bool,
    /// The primary path, then its backup.
    pub paths: Vec<Path>,
}

/// One path of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    /// This end's device.
    pub device: String,
    /// Its port, from 1.
    pub port: u8,
    /// Whether that is up.
    pub port_up: bool,
    /// How often its queue pairs have been made.
    pub generation: u32,
    /// Number of this end's first queue pair.
    pub queue_pair: u32,
    /// What that is in, if it is known.
    pub stage: Option<LinkStage>,
    /// What all connections of the process know of the path.
    pub condition: Option<PathCondition>,
    /// Failures since it was last good.
    pub consecutive_failures: u32,
    /// Failures in all.
    pub failures: u64,
    /// What said that it failed, last.
    pub cause: Option<PathCause>,
    /// `enum ibv_wc_status` of the completion that told of it; 0 if none did.
    pub status: u8,
    /// Since a connection last switched away from it, if one has.
    pub left_ns: Option<u64>,
    /// Until its failures are forgotten, if it goes on working.
    pub recovered_in_ns: Option<u64>,
    /// Until this end next makes it anew; 0: now. `None`: no time is set, or the peer decides.
    pub next_attempt_in_ns: Option<u64>,
}

impl End {
    /// What the path at this place is called.
    #[must_use]
    pub fn role(&self, place: usize) -> &'static str {
        match place {
            0 if !self.backup_alone => "primary",
            _ => "backup",
        }
    }

    /// Whether it is on its first path and nothing is wrong with any.
    #[must_use]
    pub fn is_well(&self) -> bool {
        let well = |path: &Path| {
            path.port_up
                && path.stage == Some(LinkStage::Ready)
                && path.condition == Some(PathCondition::Good)
        };
        self.phase == "flows" && self.active == 0 && self.paths.iter().all(well)
    }

    fn of(pid: u32, connection: &Connection, now: u64) -> Self {
        Self {
            pid,
            rank: connection.rank,
            peer: connection.peer,
            channel: connection.channel,
            sends: connection.flags & Connection::SENDS != 0,
            messages: connection.flags & Connection::MESSAGES != 0,
            survives: connection.flags & Connection::SURVIVES != 0,
            phase: match connection.phase {
                Connection::FLOWS => "flows",
                Connection::RECOVERS => "recovers",
                _ => "failed",
            },
            epoch: connection.epoch,
            switches: connection.switches,
            switched_ns: ago(connection.last_switch_ns, now),
            reason: PathCause::from_code(connection.cause),
            status: connection.status,
            active: connection.active.into(),
            backup_alone: connection.flags & Connection::BACKUP_ALONE != 0,
            paths: connection.paths().map(|path| Path::of(path, now)).collect(),
        }
    }
}

impl Path {
    fn of(path: &ConnectionPath, now: u64) -> Self {
        let condition = PathCondition::from_code(path.condition);
        // A connection without an operation does not look when the window is over.
        let is_over = condition == Some(PathCondition::Recovering)
            && path.recovered_ns != 0
            && path.recovered_ns <= now;
        let until = |at: u64| (at != 0 && !is_over).then(|| at.saturating_sub(now));
        Self {
            device: path.device().to_owned(),
            port: path.port,
            port_up: path.port_up != 0,
            generation: path.generation,
            queue_pair: path.queue_pair,
            stage: LinkStage::from_code(path.stage),
            condition: if is_over {
                Some(PathCondition::Good)
            } else {
                condition
            },
            consecutive_failures: if is_over { 0 } else { path.consecutive_failures },
            failures: path.failures,
            cause: PathCause::from_code(path.cause),
            status: path.status,
            left_ns: ago(path.last_switch_ns, now),
            recovered_in_ns: until(path.recovered_ns),
            next_attempt_in_ns: until(path.next_attempt_ns),
        }
    }
}

fn ago(at: u64, now: u64) -> Option<u64> {
    (at != 0).then(|| now.saturating_sub(at))
}

/// The ends of connections, by communicator and user.
pub(super) fn by_communicator(processes: &[Process], now: u64) -> BTreeMap<(u64, u32), Vec<End>> {
    let mut ends: BTreeMap<(u64, u32), Vec<End>> = BTreeMap::new();
    for process in processes {
        for connection in &process.connections {
            let of = ends.entry((connection.comm, process.user)).or_default();
            of.push(End::of(process.pid, connection, now));
        }
    }
    for ends in ends.values_mut() {
        ends.sort_by_key(|end| (end.rank, end.messages, end.channel, end.peer, !end.sends, end.pid));
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn path(condition: PathCondition) -> ConnectionPath {
        ConnectionPath {
            condition: condition as u8,
            port_up: 1,
            ..ConnectionPath::default()
        }
    }

    fn ends(connections: Vec<Connection>, now: u64) -> Vec<End> {
        let process = Process {
            pid: 9,
            connections,
            ..Process::default()
        };
        by_communicator(&[process], now)
            .remove(&(7, 0))
            .unwrap_or_default()
    }

    #[test]
    fn a_recovery_window_ends_though_nobody_looks() {
        let mut connection = Connection {
            comm: 7,
            paths: 2,
            ..Connection::default()
        };
        connection.path[0] = ConnectionPath {
            consecutive_failures: 2,
            failures: 5,
            recovered_ns: 10 * SECOND,
            ..path(PathCondition::Recovering)
        };
        connection.path[1] = path(PathCondition::Good);
        let taken = ends(vec![connection], 9 * SECOND);
        let recovering = &taken[0].paths[0];
        assert_eq!(recovering.recovered_in_ns, Some(SECOND));
        assert_eq!(recovering.consecutive_failures, 2);
        assert!(!taken[0].is_well());
        let taken = ends(vec![connection], 10 * SECOND);
        let good = &taken[0].paths[0];
        assert_eq!(
            (good.condition, good.consecutive_failures),
            (Some(PathCondition::Good), 0)
        );
        assert_eq!((good.recovered_in_ns, good.failures), (None, 5));
        assert!(taken[0].is_well());
    }

    #[test]
    fn what_is_due_is_due_now_and_others_connections_are_left_out() {
        let mut mine = Connection {
            comm: 7,
            rank: 3,
            paths: 200,
            phase: Connection::RECOVERS,
            last_switch_ns: 4 * SECOND,
            cause: PathCause::Completion as u8,
            status: 12,
            ..Connection::default()
        };
        mine.path[1] = ConnectionPath {
            next_attempt_ns: 2 * SECOND,
            stage: LinkStage::Fenced as u8,
            condition: 77,
            ..path(PathCondition::Down)
        };
        let other = Connection { comm: 8, ..mine };
        let taken = ends(vec![other, mine], 5 * SECOND);
        let [end] = &taken[..] else { panic!("{taken:?}") };
        assert_eq!((end.rank, end.pid, end.phase), (3, 9, "recovers"));
        assert_eq!(end.switched_ns, Some(SECOND));
        assert_eq!((end.reason, end.status), (Some(PathCause::Completion), 12));
        assert_eq!(end.paths[1].next_attempt_in_ns, Some(0));
        assert_eq!(
            (end.paths[1].stage, end.paths[1].condition),
            (Some(LinkStage::Fenced), None)
        );
    }
}
