//! What an end notices of its paths, for the log and on record.

use std::{ops::Range, time::Duration};

use ringsight_records::{
    PathCause, PathChange, State,
    connection::{Connection, ConnectionPath, DEVICE_NAME_BYTES, LinkStage, PathCondition},
    pages::put_text,
};
use ringsight_verbs::{
    endpoint::{self, End, EndSnapshot, Path, Role, TimedReport},
    failover::{Cause, LinkState, PathState, PathView, Report, Status},
    queue::Qp,
};

use super::Connected;
use crate::{
    log,
    observe::{self, ConnectionEntry},
    proxy::{
        ProxyOp, events,
        stalls::{Stall, Why},
    },
};

/// What is known of an end's paths.
pub(super) struct Paths {
    /// By path: number of its port among those of the process.
    ports: Vec<u8>,
    /// As [`Connected::is_backup_alone`].
    is_backup_alone: bool,
    /// The one in use.
    active: u8,
    /// The one before, and the position from which on steps go over the one in use.
    before: (u8, u64),
    /// Why the last one was left, until another one is in use.
    cause: Option<(PathCause, u8)>,
    /// The operation that the connection was at last.
    op: Option<ProxyOp>,
    /// It is at that one still.
    is_busy: bool,
    is_send: bool,
    /// As [`Connected::survives`].
    pub(super) survives: bool,
    /// Why a path was left last.
    left: Option<(PathCause, u8)>,
    /// Changes of the path in use, and when the last one was, `CLOCK_MONOTONIC` nanoseconds.
    switches: (u32, u64),
    /// Where readers of the pages see the connection; `None` before its first operation.
    entry: Option<ConnectionEntry>,
    /// What they see: the end's count of changes, and the communicator.
    told: Option<(u64, u64)>,
}

impl Paths {
    pub(super) fn new(connected: &Connected, is_send: bool) -> Self {
        Self {
            ports: connected.failover.ports.iter().map(|port| *port as u8).collect(),
            is_backup_alone: connected.is_backup_alone,
            // Where both ends begin.
            active: connected.paths.iter().position(Path::is_connected).unwrap_or(0) as u8,
            before: (0, 0),
            cause: None,
            op: None,
            is_busy: false,
            is_send,
            survives: connected.survives(),
            left: None,
            switches: (0, 0),
            entry: None,
            told: None,
        }
    }

    /// Tells readers of the pages what the connection is in, if that has changed.
    pub(super) fn show<R: Role>(&mut self, end: &End<R>) {
        let Some(op) = &self.op else { return };
        let now = Some((end.revision(), op.comm));
        if self.told == now {
            return;
        }
        self.told = now;
        if self.entry.is_none() {
            self.entry = ConnectionEntry::claim();
        }
        if let Some(entry) = &self.entry {
            entry.write(&self.view(op, &end.snapshot(), end.paths(), observe::now_ns()));
        }
    }

    fn view(&self, op: &ProxyOp, condition: &EndSnapshot, paths: &[Path], now_ns: u64) -> Connection {
        let (cause, status) = self.left.map_or((0, 0), |(cause, status)| (cause as u8, status));
        let mut view = Connection {
            comm: op.comm,
            updated_ns: now_ns,
            last_switch_ns: self.switches.1,
            rank: op.rank,
            peer: op.peer,
            epoch: condition.epoch,
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
            phase: match condition {
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
            .zip(&condition.paths)
            .zip(paths)
            .zip(&self.ports)
        {
            *place = ConnectionPath {
                index: *index,
                ..path_view(known, path, condition.now, now_ns)
            };
        }
        view
    }

    /// The number of a path's port.
    pub(super) fn port_of(&self, path: usize) -> u8 {
        self.ports.get(path).copied().unwrap_or(0)
    }

    /// Whether a path is not the primary one.
    pub(super) fn is_backup(&self, path: usize) -> bool {
        path > 0 || self.is_backup_alone
    }

    /// The one in use.
    pub(super) fn active(&self) -> usize {
        self.active.into()
    }

    /// The one that the step of a position came over; of the last two that were in use.
    pub(super) fn came_over(&self, position: u64) -> usize {
        let (before, since) = self.before;
        usize::from(if position < since { before } else { self.active })
    }

    /// The operation that the connection is at. With the first one it has a communicator, whose its queue pairs then are.
    pub(super) fn set_op(&mut self, op: &ProxyOp, paths: &[Path]) {
        let is_first = self.op.is_none();
        (self.op, self.is_busy) = (Some(*op), true);
        if is_first {
            for (index, _) in paths.iter().enumerate().filter(|(_, path)| path.is_connected()) {
                self.record(State::PATH_RESTORED, index as u8, index as u8, paths, 0);
            }
        }
    }

    /// That one has ended.
    pub(super) fn rest(&mut self) {
        self.is_busy = false;
    }

    /// Takes down what was noticed; `bytes` says how many these positions have.
    pub(super) fn note(
        &mut self,
        noted: &TimedReport,
        paths: &[Path],
        peer: u32,
        bytes: impl Fn(Range<u64>) -> u64,
    ) {
        let way = if self.is_send { "to" } else { "from" };
        let name = |path: u8| {
            let port = paths.get(usize::from(path)).map(Path::port);
            port.map_or_else(
                || "?".to_owned(),
                |port| format!("{}:{}", port.device(), port.number()),
            )
        };
        match noted.report {
            Report::Broken { link, cause, active } => {
                let (port, at) = (
                    name(link.path),
                    if active { "" } else { ", which is not in use," },
                );
                tracing::warn!(target: log::NET, "NET/IB : {port}{at} {way} rank {peer} failed: {cause} ({link})");
                if active {
                    self.left = Some(cause_of(cause));
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
                    "NET/IB : {way} rank {peer}, from {} to {} (epoch {epoch}), {committed} steps were there, {replayed} are sent again",
                    name(from), name(to)
                );
                self.active = to;
                self.before = (from, committed);
                self.switches = (self.switches.0.saturating_add(1), observe::now_ns());
                // Nothing broke: a path that comes before it is good again.
                self.left = Some(*self.cause.get_or_insert((PathCause::Failback, 0)));
                let again = bytes(committed..committed + replayed);
                self.record(State::PATH_SWITCHED, from, to, paths, again);
                self.cause = None;
            }
            Report::Recovered { epoch } => {
                tracing::info!(target: log::NET, "NET/IB : {way} rank {peer}, steps go on (epoch {epoch})");
                let state = match self.active {
                    0 => State::STOP,
                    _ => State::PATH_RECOVERED,
                };
                self.record(state, self.active, self.active, paths, 0);
            }
            Report::Restored { link } => {
                let port = name(link.path);
                tracing::info!(target: log::NET, "NET/IB : {port} {way} rank {peer} is ready again ({link})");
                self.record(State::PATH_RESTORED, link.path, link.path, paths, 0);
            }
        }
    }

    /// What is told of an end that waits for the network.
    pub(super) fn stall<R: Role>(&self, end: &End<R>) -> Stall {
        let path = end.active();
        let is_down = |view: PathView| view.link.path == path.link().path && !view.port_up;
        let why = match self.cause {
            _ if end.path_views().any(is_down) => Why::PortDown,
            _ if !end.is_recovering() => Why::Unanswered,
            // On its way to a path that is good again, it has left none that failed.
            None | Some((PathCause::Shared | PathCause::Peer | PathCause::Failback, _)) => Why::Told,
            Some((cause, status)) => Why::Left(cause, status),
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

    /// The connection has failed.
    pub(super) fn given_up(&self, paths: &[Path]) {
        self.record(State::ABORTED, self.active, self.active, paths, 0);
    }

    fn record(&self, state: State, from: u8, to: u8, paths: &[Path], bytes: u64) {
        // Before its first operation a connection belongs to no communicator.
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

/// One path for readers of the pages. Its times are by another clock, which is at `at` when `CLOCK_MONOTONIC` is at `now_ns`.
fn path_view(known: &endpoint::PathSnapshot, path: &Path, at: Duration, now_ns: u64) -> ConnectionPath {
    let endpoint::PathSnapshot {
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

/// The cause as records have it, and the completion's status if there was one.
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
