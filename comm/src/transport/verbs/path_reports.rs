//! Reports about the paths of an end: to the log, to the records, and to the connection's entry in the shared pages.

use std::{ops::Range, time::Duration};

use ringsight_records::{
    PathCause, PathChange, State,
    connection::{Connection, ConnectionPath, DEVICE_NAME_BYTES, LinkStage, PathCondition},
    pages::put_text,
};
use ringsight_verbs::{
    endpoint::{End, EndSnapshot, Path, PathSnapshot, Role, TimedReport},
    failover::{Cause, LinkState, PathState, PathView, Report, Status},
    queue::Qp,
};

use ringsight_comm_base::log;

use super::setup::ConnectedEnd;
use crate::{
    observe::{self, ConnectionEntry},
    op::ProxyOp,
    transport::{
        events,
        stall::{Stall, StallCause},
    },
};

/// What readers of logs, records and pages learn about the paths of one end.
pub(super) struct PathReports {
    /// By path: index of its port in the process.
    ports: Vec<u8>,
    /// As [`ConnectedEnd::is_backup_alone`].
    is_backup_alone: bool,
    /// The active path.
    active: u8,
    /// The previous active path, and the position from which on steps use the present one.
    previous: (u8, u64),
    /// Why the active path failed, until another one is active.
    cause: Option<(PathCause, u8)>,
    /// The last operation of the connection.
    op: Option<ProxyOp>,
    /// That operation is under way.
    is_busy: bool,
    is_send: bool,
    /// As [`ConnectedEnd::survives`].
    pub(super) survives: bool,
    /// Why the last path was left.
    last_cause: Option<(PathCause, u8)>,
    /// Number of switches, and the time of the last one (`CLOCK_MONOTONIC`, nanoseconds).
    switches: (u32, u64),
    /// The connection's entry in the shared pages; `None` before its first operation.
    entry: Option<ConnectionEntry>,
    /// What the entry shows: the end's revision, and the communicator.
    published: Option<(u64, u64)>,
}

impl PathReports {
    pub(super) fn new(connected: &ConnectedEnd, is_send: bool) -> Self {
        Self {
            ports: connected.failover.ports.iter().map(|port| *port as u8).collect(),
            is_backup_alone: connected.is_backup_alone,
            // Both ends begin on the first connected path.
            active: connected.paths.iter().position(Path::is_connected).unwrap_or(0) as u8,
            previous: (0, 0),
            cause: None,
            op: None,
            is_busy: false,
            is_send,
            survives: connected.survives(),
            last_cause: None,
            switches: (0, 0),
            entry: None,
            published: None,
        }
    }

    /// Updates the connection's entry in the shared pages, if its state has changed.
    pub(super) fn publish<R: Role>(&mut self, end: &End<R>) {
        let Some(op) = &self.op else { return };
        let now = Some((end.revision(), op.comm));
        if self.published == now {
            return;
        }
        self.published = now;
        if self.entry.is_none() {
            self.entry = ConnectionEntry::claim();
        }
        if let Some(entry) = &self.entry {
            entry.write(&self.entry_of(op, &end.snapshot(), end.paths(), observe::now_ns()));
        }
    }

    fn entry_of(&self, op: &ProxyOp, snapshot: &EndSnapshot, paths: &[Path], now_ns: u64) -> Connection {
        let (cause, status) = self
            .last_cause
            .map_or((0, 0), |(cause, status)| (cause as u8, status));
        let mut view = Connection {
            comm: op.comm,
            updated_ns: now_ns,
            last_switch_ns: self.switches.1,
            rank: op.rank,
            peer: op.peer,
            epoch: snapshot.epoch,
            switches: self.switches.0,
            channel: op.channel,
            flags: [
                (self.is_send, Connection::SENDS),
                (op.p2p, Connection::MESSAGES),
                (self.survives, Connection::SURVIVES),
                (self.is_backup_alone, Connection::BACKUP_ALONE),
            ]
            .into_iter()
            .fold(
                0,
                |flags, (is_set, flag)| if is_set { flags | flag } else { flags },
            ),
            paths: paths.len() as u8,
            active: self.active,
            phase: match snapshot {
                EndSnapshot { failed: true, .. } => Connection::FAILED,
                EndSnapshot { recovers: true, .. } => Connection::RECOVERS,
                _ => Connection::FLOWS,
            },
            cause,
            status,
            ..Connection::default()
        };
        for (((place, known), path), index) in view
            .path
            .iter_mut()
            .zip(&snapshot.paths)
            .zip(paths)
            .zip(&self.ports)
        {
            *place = ConnectionPath {
                index: *index,
                ..path_entry(known, path, snapshot.now, now_ns)
            };
        }
        view
    }

    /// Index of a path's port in the process.
    pub(super) fn port_of(&self, path: usize) -> u8 {
        self.ports.get(path).copied().unwrap_or(0)
    }

    /// Whether a path is the backup.
    pub(super) fn is_backup(&self, path: usize) -> bool {
        path > 0 || self.is_backup_alone
    }

    /// Index of the active path.
    pub(super) fn active(&self) -> usize {
        self.active.into()
    }

    /// Index of the path that the step of a position arrived on: the active path or the previous one.
    pub(super) fn arrival_path(&self, position: u64) -> usize {
        let (previous, since) = self.previous;
        usize::from(if position < since { previous } else { self.active })
    }

    /// An operation of the connection begins or continues. The first one determines the communicator of the queue pairs.
    pub(super) fn set_op(&mut self, op: &ProxyOp, paths: &[Path]) {
        let is_first = self.op.is_none();
        (self.op, self.is_busy) = (Some(*op), true);
        if is_first {
            for (index, _) in paths.iter().enumerate().filter(|(_, path)| path.is_connected()) {
                self.record(State::PATH_RESTORED, index as u8, index as u8, paths, 0);
            }
        }
    }

    /// The operation has ended.
    pub(super) fn finish_op(&mut self) {
        self.is_busy = false;
    }

    /// Logs and records a report. `bytes` returns how many bytes the given positions had.
    pub(super) fn record_report(
        &mut self,
        report: &TimedReport,
        paths: &[Path],
        peer: u32,
        bytes: impl Fn(Range<u64>) -> u64,
    ) {
        let direction = if self.is_send { "to" } else { "from" };
        let name = |path: u8| {
            let port = paths.get(usize::from(path)).map(Path::port);
            port.map_or_else(
                || "?".to_owned(),
                |port| format!("{}:{}", port.device(), port.number()),
            )
        };
        match report.report {
            Report::Broken { link, cause, active } => {
                let (port, at) = (
                    name(link.path),
                    if active { "" } else { ", which is not in use," },
                );
                tracing::warn!(target: log::NET, "NET/IB : {port}{at} {direction} rank {peer} failed: {cause} ({link})");
                if active {
                    self.last_cause = Some(cause_of(cause));
                    self.cause = Some(cause_of(cause));
                    self.record(State::START, link.path, link.path, paths, 0);
                }
            }
            Report::Switched {
                epoch,
                from,
                to,
                committed,
                replayed,
            } => {
                tracing::warn!(
                    target: log::NET,
                    "NET/IB : {direction} rank {peer}, from {} to {} (epoch {epoch}), {committed} steps were there, {replayed} are sent again",
                    name(from), name(to)
                );
                self.active = to;
                self.previous = (from, committed);
                self.switches = (self.switches.0.saturating_add(1), observe::now_ns());
                // Without a failure, a better path works again.
                self.last_cause = Some(*self.cause.get_or_insert((PathCause::Failback, 0)));
                let replayed_bytes = bytes(committed..committed + replayed);
                self.record(State::PATH_SWITCHED, from, to, paths, replayed_bytes);
                self.cause = None;
            }
            Report::Recovered { epoch } => {
                tracing::info!(target: log::NET, "NET/IB : {direction} rank {peer}, steps go on (epoch {epoch})");
                let state = match self.active {
                    0 => State::STOP,
                    _ => State::PATH_RECOVERED,
                };
                self.record(state, self.active, self.active, paths, 0);
            }
            Report::Restored { link } => {
                let port = name(link.path);
                tracing::info!(target: log::NET, "NET/IB : {port} {direction} rank {peer} is ready again ({link})");
                self.record(State::PATH_RESTORED, link.path, link.path, paths, 0);
            }
        }
    }

    /// The stall of an end that waits for the network.
    pub(super) fn stall<R: Role>(&self, end: &End<R>) -> Stall {
        let path = end.active();
        let is_down = |view: PathView| view.link.path == path.link().path && !view.port_up;
        let why = match self.cause {
            _ if end.path_views().any(is_down) => StallCause::PortDown,
            _ if !end.is_recovering() => StallCause::Unanswered,
            // A switch to a better path has left no failed one.
            None | Some((PathCause::Shared | PathCause::Peer | PathCause::Failback, _)) => StallCause::Told,
            Some((cause, status)) => StallCause::Left(cause, status),
        };
        let mut stall = Stall {
            why,
            for_ns: 0,
            peer: self.op.map_or(0, |op| op.peer),
            is_send: self.is_send,
            channel: self.op.map_or(0, |op| op.channel),
            device: [0; DEVICE_NAME_BYTES],
            port: path.port().number(),
            queue_pair: path.qps().first().map_or(0, Qp::number),
        };
        put_text(&mut stall.device, path.port().device());
        stall
    }

    /// Records that the connection has failed.
    pub(super) fn record_failure(&self, paths: &[Path]) {
        self.record(State::ABORTED, self.active, self.active, paths, 0);
    }

    fn record(&self, state: State, from: u8, to: u8, paths: &[Path], bytes: u64) {
        // A connection belongs to no communicator before its first operation.
        let Some(last) = &self.op else { return };
        let none = ProxyOp {
            op: 0,
            seq: 0,
            replay: 0,
            graph: false,
            ..*last
        };
        let op = if self.is_busy { last } else { &none };
        let qp = paths.get(usize::from(to)).and_then(|path| path.qps().first());
        let change = PathChange {
            cause: self.cause.map(|(cause, _)| cause),
            status: self.cause.map_or(0, |(_, status)| status),
            from,
            to,
            port: self.ports.get(usize::from(to)).copied(),
            number: qp.map_or(0, Qp::number),
        };
        events::path(op, state, change, bytes);
    }
}

/// A path's part of the entry. The snapshot's clock is at `at` when `CLOCK_MONOTONIC` is at `now_ns`.
fn path_entry(known: &PathSnapshot, path: &Path, at: Duration, now_ns: u64) -> ConnectionPath {
    let PathSnapshot {
        view,
        health,
        recovered,
        next_attempt,
    } = known;
    let monotonic = |time: Option<Duration>| {
        time.map_or(0, |time| {
            let ahead = time.saturating_sub(at).as_nanos() as u64;
            let behind = at.saturating_sub(time).as_nanos() as u64;
            now_ns.saturating_add(ahead).saturating_sub(behind)
        })
    };
    let (cause, status) = health.cause.map_or((0, 0), |cause| {
        let (cause, status) = cause_of(cause);
        (cause as u8, status)
    });
    let mut place = ConnectionPath {
        last_switch_ns: monotonic(health.last_switch),
        recovered_ns: monotonic(*recovered),
        next_attempt_ns: monotonic(*next_attempt),
        failures: health.failures,
        consecutive_failures: health.consecutive_failures,
        generation: view.link.generation,
        queue_pair: path.qps().first().map_or(0, Qp::number),
        port: path.port().number(),
        port_up: view.port_up.into(),
        stage: stage_of(view.state) as u8,
        condition: condition_of(health.state) as u8,
        cause,
        status,
        gid: path.port().gid().map_or([0; 16], |(gid, _)| gid),
        ..ConnectionPath::default()
    };
    put_text(&mut place.device, path.port().device());
    place
}

fn stage_of(state: LinkState) -> LinkStage {
    match state {
        LinkState::Ready => LinkStage::Ready,
        LinkState::Fencing => LinkStage::Fencing,
        LinkState::Fenced => LinkStage::Fenced,
        LinkState::Building => LinkStage::Building,
        LinkState::Offered => LinkStage::Offered,
        LinkState::Connecting => LinkStage::Connecting,
        LinkState::Probation => LinkStage::Probation,
    }
}

fn condition_of(state: PathState) -> PathCondition {
    match state {
        PathState::Good => PathCondition::Good,
        PathState::Suspect => PathCondition::Suspect,
        PathState::Down => PathCondition::Down,
        PathState::Recovering => PathCondition::Recovering,
    }
}

/// The cause for records, and the status of the completion, or 0.
fn cause_of(cause: Cause) -> (PathCause, u8) {
    match cause {
        Cause::Port => (PathCause::Port, 0),
        Cause::Completion(status) => (PathCause::Completion, status_of(status)),
        Cause::Timeout => (PathCause::Timeout, 0),
        Cause::Shared => (PathCause::Shared, 0),
        Cause::Peer => (PathCause::Peer, 0),
        Cause::Build => (PathCause::Build, 0),
    }
}

/// `enum ibv_wc_status`.
fn status_of(status: Status) -> u8 {
    match status {
        Status::Success => 0,
        Status::LocalOperation => 2,
        Status::Flushed => 5,
        Status::RetryExceeded => 12,
        Status::NotReady => 13,
        Status::Other(other) => other as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_keep_their_numbers() {
        for status in 0..=23 {
            assert_eq!(u32::from(status_of(Status::from_verbs(status))), status);
        }
    }
}
