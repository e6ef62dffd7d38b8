//! The driver of an end: owns its paths, collects events from devices, other connections and workers, and carries out the actions of the
//! state machine.

mod actions;

use std::{
    collections::VecDeque,
    os::fd::{AsRawFd, RawFd},
    sync::{
        Arc,
        mpsc::{self, Receiver as Inbox, Sender as Outbox},
    },
    time::{Duration, Instant},
};

use actions::JobResult;
use ringsight_failover::{
    Event, Link, MESSAGE_BYTES, Message, PathHealth, PathId, Report, Scope, Settings, Status, Work,
};

use super::{
    Control, Failure, Path,
    work::{PathEvent, WorkRequest},
    worker::Worker,
};
use crate::{
    port::Net,
    port_health::{PortHealth, PortState, local_port, remote_port},
    waker::Waker,
};

/// Time limit of a drain: a completion queue that failed never ends one. The queue pair is in the error state and writes nothing more.
/// Steps that arrived and were not polled by then count as lost: the sender posts them again or, if the NIC had acknowledged them, fails.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);
/// How often a busy connection polls its inactive paths. A connection that sleeps has their descriptors.
const INACTIVE_INTERVAL: Duration = Duration::from_millis(2);

/// What a connection needs besides its paths to detect and survive their failures.
#[derive(Clone)]
pub struct Failover {
    /// Port health of the process.
    pub port_health: Arc<PortHealth>,
    /// Settings of the connection: the process's, or with failover off if the peer has it off.
    pub settings: Arc<Settings>,
    /// Ports of the process: a path is rebuilt on its port in the port's present state.
    pub net: Option<Arc<Net>>,
    /// By path: index of its port in [`Failover::net`].
    pub ports: Vec<usize>,
}

impl Failover {
    /// For a connection whose paths use the ports with these indices.
    #[must_use]
    pub fn new(port_health: &Arc<PortHealth>, net: Option<&Arc<Net>>, ports: Vec<usize>) -> Self {
        Self {
            settings: Arc::clone(port_health.settings()),
            port_health: Arc::clone(port_health),
            net: net.cloned(),
            ports,
        }
    }

    /// As given, for a connection that fails with its path. It still fails at once when a device reports that it cannot go on.
    #[must_use]
    pub fn disabled(mut self) -> Self {
        Arc::make_mut(&mut self.settings).enabled = false;
        self
    }
}

/// A report of the state machine, with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedReport {
    /// When, by [`PortHealth::now`].
    pub at: Duration,
    /// The report.
    pub report: Report,
}

/// A fenced queue pair whose requests have not all completed.
#[derive(Clone, Copy)]
struct Drain {
    link: Link,
    /// When the worker had fenced it, and whether the device accepted that. `None` while the worker is at it.
    fenced: Option<(Instant, bool)>,
}

/// The paths of an end, with their pending events and jobs.
pub struct Driver {
    /// By path: its worker. Dropped first, because workers share the queue pairs of the paths.
    workers: Vec<Worker>,
    pub(super) paths: Vec<Path>,
    pub(super) control: Control,
    failover: Failover,
    connection: u64,
    ids: Vec<PathId>,
    /// [`PortHealth::version`] at the last look.
    seen_version: u64,
    /// Wakes for news of devices, other connections and workers. `None` if the process had no descriptor left.
    waker: Option<Arc<Waker>>,
    /// When the inactive paths were polled last.
    last_full_poll: Instant,
    /// By path: the state of its port at the last look.
    port_states: Vec<PortState>,
    /// By path: its drain, while one is under way.
    drains: Vec<Option<Drain>>,
    /// Events that the state machine has not processed.
    pub(super) events: VecDeque<Event>,
    /// Messages to be sent outside RDMA.
    outgoing: VecDeque<[u8; MESSAGE_BYTES]>,
    reports: VecDeque<TimedReport>,
    /// As [`End::revision`](super::End::revision).
    pub(super) revision: u64,
    /// Buffer for the events of one poll of a path.
    path_events: Vec<PathEvent>,
    job_results: Inbox<JobResult>,
    job_sender: Outbox<JobResult>,
    /// The last error.
    pub(super) last_failure: Option<Failure>,
}

impl Driver {
    pub(super) fn new(paths: Vec<Path>, control: Control, failover: Failover) -> Self {
        assert!(!paths.is_empty(), "a connection has a path");
        let port_health = &failover.port_health;
        let ids: Vec<PathId> = paths
            .iter()
            .map(|path| {
                let local = local_port(path.port().device(), path.port().number());
                let remote = path.peer().map_or(local, |peer| {
                    remote_port(peer.path.gid, peer.path.lid, peer.path.port)
                });
                PathId { local, remote }
            })
            .collect();
        let (job_sender, job_results) = mpsc::channel();
        let waker = port_health.waker();
        let connection = port_health.next_connection();
        // Read before the states of paths and ports, so that a later change causes another look.
        let seen_version = port_health.version();
        let orders: Vec<Option<Scope>> = ids
            .iter()
            .map(|id| port_health.add_connection(*id, connection))
            .collect();
        let port_states: Vec<PortState> = paths
            .iter()
            .map(|path| port_health.port_state(path.port().device(), path.port().number()))
            .collect();
        // The state machine assumes that ports are up and paths work.
        let down = (0_u8..)
            .zip(&port_states)
            .filter(|(_, state)| !state.up)
            .map(|(path, _)| Event::PortDown { path });
        let failed = paths
            .iter()
            .filter(|path| path.presumed_failed)
            .map(|path| Event::Failed { link: path.link() });
        let ordered = (0_u8..)
            .zip(&orders)
            .filter_map(|(path, scope)| scope.map(|scope| order_event(path, scope)))
            // As in `Driver::check_sources`.
            .filter(|_| failover.settings.enabled);
        let events = down.chain(failed).chain(ordered).collect();
        let mut driver = Self {
            connection,
            seen_version,
            waker,
            last_full_poll: Instant::now(),
            port_states,
            drains: vec![None; paths.len()],
            workers: paths.iter().map(|_| Worker::default()).collect(),
            events,
            outgoing: VecDeque::new(),
            reports: VecDeque::new(),
            revision: 0,
            path_events: Vec::new(),
            ids,
            paths,
            control,
            failover,
            job_results,
            job_sender,
            last_failure: None,
        };
        // A queue may have failed since it was made.
        (0..driver.paths.len()).for_each(|index| driver.check_queues(index));
        driver
    }

    pub(super) fn now(&self) -> Duration {
        self.failover.port_health.now()
    }

    /// Polls everything that can happen. Step and credit events go to `sink` with their queue pair, all others to `events`. Returns whether
    /// there was any completion.
    ///
    /// Each call polls the active path. The others are polled every [`INACTIVE_INTERVAL`], and in each call during a recovery (`all`).
    pub(super) fn poll(&mut self, active: usize, all: bool, mut sink: impl FnMut(Link, PathEvent)) -> bool {
        let all = self.check_sources() || all || self.is_waiting();
        let mut any = false;
        let mut path_events = std::mem::take(&mut self.path_events);
        for index in 0..self.paths.len() {
            if index != active && !all {
                continue;
            }
            let polled = self.paths[index].poll(&self.control, |event| {
                path_events.push(event);
                Ok(())
            });
            let link = self.paths[index].link();
            match polled {
                Ok(moved) => any |= moved,
                Err(failure) => self.fail(link, failure),
            }
            for event in path_events.drain(..) {
                match event {
                    PathEvent::Failed { work, code, qp } => {
                        let status = Status::from_verbs(code);
                        // Requests that a fence flushes say nothing about the path.
                        if !self.paths[index].is_fenced() {
                            let text = self.paths[index].status_text(work, code, qp);
                            self.last_failure = Some(self.paths[index].failure(Some(code), &text));
                            let work = protocol_work(work);
                            self.events.push_back(Event::Completed { link, work, status });
                        }
                    }
                    PathEvent::Probed => {
                        let (work, status) = (Work::Probe, Status::Success);
                        self.events.push_back(Event::Completed { link, work, status });
                    }
                    PathEvent::Message(bytes) => self.receive_message(&bytes),
                    event => sink(link, event),
                }
            }
            if let Some(Drain { link, fenced }) = self.drains[index]
                && let Some((since, sure)) = fenced
                && (self.paths[index].is_drained() || since.elapsed() > DRAIN_LIMIT)
            {
                self.drains[index] = None;
                self.events.push_back(Event::Fenced { link, sure });
            }
        }
        self.path_events = path_events;
        any
    }

    /// Collects events from devices, other connections and workers. Returns whether all paths must be polled.
    fn check_sources(&mut self) -> bool {
        if let Some(waker) = &self.waker {
            waker.clear();
        }
        let is_time = self.last_full_poll.elapsed() >= INACTIVE_INTERVAL;
        if is_time {
            self.last_full_poll = Instant::now();
        }
        while let Ok(result) = self.job_results.try_recv() {
            self.finish_job(result);
        }
        let port_health = Arc::clone(&self.failover.port_health);
        let version = port_health.version();
        if version == self.seen_version {
            return is_time;
        }
        for (index, path) in (0_u8..).zip(&self.paths) {
            let state = port_health.port_state(path.port().device(), path.port().number());
            let before = std::mem::replace(&mut self.port_states[usize::from(index)], state);
            // The port may be up again by now. Outstanding requests are lost all the same, and its GID may have changed.
            if state.downs != before.downs {
                self.events.push_back(Event::PortDown { path: index });
            }
            if state.up && state != before {
                self.events.push_back(Event::PortUp { path: index });
            }
            // A connection that could not switch does not leave its path for what others found.
            let order = match self.failover.settings.enabled {
                true => port_health.order(self.ids[usize::from(index)], self.connection, self.seen_version),
                false => None,
            };
            self.events.extend(order.map(|scope| order_event(index, scope)));
        }
        for index in 0..self.paths.len() {
            self.check_queues(index);
        }
        self.seen_version = version;
        self.revision += 1;
        true
    }

    /// Fails a path if its device has reported that one of its queues cannot go on: its requests may never complete.
    fn check_queues(&mut self, index: usize) {
        let path = &mut self.paths[index];
        let now = path.queue_failures(&self.failover.port_health);
        let before = std::mem::replace(&mut path.failures, now);
        if now == before {
            return;
        }
        let text = if now.completions == before.completions {
            "its device says that a queue pair, or itself, cannot go on"
        } else {
            // In any case: requests of queue pairs that are rebuilt on this completion queue would never complete.
            path.replace_cq_at_rebuild();
            "its device says that the completion queue cannot go on"
        };
        if !self.failover.port_health.settings().async_events {
            return;
        }
        let (link, failure) = (path.link(), path.failure(None, text));
        self.fail(link, failure);
    }

    /// The next event for the state machine.
    pub(super) fn next_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front()?;
        let is_usual = matches!(
            event,
            Event::Granted { .. }
                | Event::Completed {
                    status: Status::Success,
                    ..
                }
        );
        self.revision += u64::from(!is_usual);
        Some(event)
    }

    /// By path: its health in the process.
    pub(super) fn path_health(&self) -> Vec<PathHealth> {
        self.failover.port_health.with_health(|health| {
            let of = |id| health.path(id).cloned().unwrap_or_default();
            self.ids.iter().map(of).collect()
        })
    }

    /// How long a path must work for its failures to be forgotten.
    pub(super) fn recovery_window(&self) -> Duration {
        self.failover.port_health.settings().recovery_window
    }

    /// Takes a message of the peer, whichever way it came.
    pub(super) fn receive_message(&mut self, bytes: &[u8]) {
        // An unreadable message counts as lost: the peer repeats it, or gives up.
        if let Some(message) = Message::parse(bytes) {
            self.events.push_back(Event::Received(message));
        }
    }

    pub(super) fn take_outgoing(&mut self) -> Option<[u8; MESSAGE_BYTES]> {
        self.outgoing.pop_front()
    }

    pub(super) fn take_report(&mut self) -> Option<TimedReport> {
        self.reports.pop_front()
    }

    /// Fails a queue pair after a call of its device failed.
    pub(super) fn fail(&mut self, link: Link, failure: Failure) {
        self.last_failure = Some(failure);
        self.events.push_back(Event::Failed { link });
    }

    /// The path of a queue pair, if that is its present generation.
    pub(super) fn path(&mut self, link: Link) -> Option<&mut Path> {
        self.paths
            .get_mut(usize::from(link.path))
            .filter(|path| path.link() == link)
    }

    /// Arms the descriptors of [`Driver::fds`] for the next completion.
    pub(super) fn arm(&self) -> Result<(), Failure> {
        self.paths.iter().try_for_each(Path::arm)
    }

    /// The descriptors to wait for, once armed.
    pub(super) fn fds(&self) -> Vec<RawFd> {
        let mut fds: Vec<RawFd> = self.paths.iter().map(Path::fd).collect();
        fds.extend(self.waker.as_deref().map(AsRawFd::as_raw_fd));
        fds
    }

    /// Whether something is pending that no descriptor reports.
    pub(super) fn is_waiting(&self) -> bool {
        !self.events.is_empty() || self.drains.iter().any(Option::is_some) || self.waker.is_none()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.failover.port_health.remove_connection(self.connection);
    }
}

/// The event for what other connections' failures require on a path.
fn order_event(path: u8, scope: Scope) -> Event {
    match scope {
        Scope::Suspect => Event::Suspected { path },
        Scope::Down => Event::Condemned { path },
    }
}

/// A request, as the failover protocol names it.
fn protocol_work(work: Option<WorkRequest>) -> Work {
    match work {
        Some(WorkRequest::Step { position, .. } | WorkRequest::Data { position, .. }) => Work::Step(position),
        Some(WorkRequest::Credit { granted }) => Work::Credit(granted),
        Some(WorkRequest::Probe { .. }) => Work::Probe,
        Some(WorkRequest::Message | WorkRequest::Receive { .. } | WorkRequest::Marker { .. }) | None => {
            Work::Message
        }
    }
}
