//! The paths of an end: what their devices, other connections and threads tell, and what the agreement wants done.

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

use actions::Done;
use ringsight_failover::{
    Event, Link, MESSAGE_BYTES, Message, PathHealth, PathId, Report, Scope, Settings, Status, Work as Asked,
};

use super::{
    Control, Failure, Path,
    work::{Ended, Work},
    worker::Worker,
};
use crate::{
    bell::Bell,
    hub::{Hub, Told, local_port, remote_port},
    port::Net,
};

/// How long a drain may take; a completion queue that failed never ends one. The queue pair is in the error state and writes nothing
/// more, but what arrived and was not told by then is taken for lost: the sender posts it again, or, if the NIC had acknowledged it, ends
/// with an error.
const DRAIN: Duration = Duration::from_millis(500);
/// How often the paths that are not in use are looked at by a connection that is busy. One that waits has their descriptors.
const OTHERS_EVERY: Duration = Duration::from_millis(2);

/// What a connection needs besides its paths to learn of their failures, and to survive them.
#[derive(Clone)]
pub struct Failover {
    /// What the process's connections share.
    pub hub: Arc<Hub>,
    /// The connection's: the hub's, or with failover off where the peer has it so.
    pub settings: Arc<Settings>,
    /// The process's ports: a path is rebuilt on its port as it is then.
    pub net: Option<Arc<Net>>,
    /// By path: the number of its port among those.
    pub ports: Vec<usize>,
}

impl Failover {
    /// Of a connection of the process that has this hub and these ports, by path those with these numbers.
    #[must_use]
    pub fn new(hub: &Arc<Hub>, net: Option<&Arc<Net>>, ports: Vec<usize>) -> Self {
        Self {
            settings: Arc::clone(hub.settings()),
            hub: Arc::clone(hub),
            net: net.cloned(),
            ports,
        }
    }

    /// The same of a connection that fails with its path. It hears all the same when a device says that it cannot go on.
    #[must_use]
    pub fn disabled(mut self) -> Self {
        Arc::make_mut(&mut self.settings).enabled = false;
        self
    }
}

/// Something to put on record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    /// When, by [`Hub::now`].
    pub at: Duration,
    /// What.
    pub report: Report,
}

/// A queue pair that was given up and still has requests.
#[derive(Clone, Copy)]
struct Drain {
    link: Link,
    /// When its device had been told, and whether it has obeyed.
    told: Option<(Instant, bool)>,
}

/// The paths of an end and what is under way with them.
pub struct Driver {
    /// By path: does what may take long. The first to be dropped: paths share their queue pairs with it.
    workers: Vec<Worker>,
    pub(super) paths: Vec<Path>,
    pub(super) control: Control,
    failover: Failover,
    connection: u64,
    ids: Vec<PathId>,
    seen: u64,
    /// Rings when there is something new from devices, other connections, and threads that connect. `None` where none is left.
    bell: Option<Arc<Bell>>,
    last_look: Instant,
    /// By path: what was known of its port.
    told: Vec<Told>,
    /// By path: what is on its way to be fenced.
    drains: Vec<Option<Drain>>,
    /// What has happened and the end has not taken up.
    pub(super) events: VecDeque<Event>,
    /// Messages for outside.
    outgoing: VecDeque<[u8; MESSAGE_BYTES]>,
    noted: VecDeque<Noted>,
    /// What [`Condition`] says may have changed so often.
    pub(super) changes: u64,
    /// Room for what one poll of a path gives.
    ended: Vec<Ended>,
    done: Inbox<Done>,
    doing: Outbox<Done>,
    /// What the last error said.
    pub(super) last: Option<Failure>,
}

impl Driver {
    pub(super) fn new(paths: Vec<Path>, control: Control, failover: Failover) -> Self {
        assert!(!paths.is_empty(), "a connection has a path");
        let hub = &failover.hub;
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
        let (doing, done) = mpsc::channel();
        let bell = hub.bell();
        let connection = hub.connection();
        // Before what is read of paths and ports: what changes after is looked at again.
        let seen = hub.version();
        let orders: Vec<Option<Scope>> = ids.iter().map(|id| hub.joined(*id, connection)).collect();
        let told: Vec<Told> = paths
            .iter()
            .map(|path| hub.port(path.port().device(), path.port().number()))
            .collect();
        // Ends take ports to be up, and paths to work.
        let down = (0_u8..)
            .zip(&told)
            .filter(|(_, told)| !told.up)
            .map(|(path, _)| Event::PortDown { path });
        let failed = paths
            .iter()
            .filter(|path| path.presumed_failed)
            .map(|path| Event::Failed { link: path.link() });
        let ordered = (0_u8..)
            .zip(&orders)
            .filter_map(|(path, scope)| scope.map(|scope| ordered(path, scope)))
            // As in `Driver::look`.
            .filter(|_| failover.settings.enabled);
        let events = down.chain(failed).chain(ordered).collect();
        let mut driver = Self {
            connection,
            seen,
            bell,
            last_look: Instant::now(),
            told,
            drains: vec![None; paths.len()],
            workers: paths.iter().map(|_| Worker::default()).collect(),
            events,
            outgoing: VecDeque::new(),
            noted: VecDeque::new(),
            changes: 0,
            ended: Vec::new(),
            ids,
            paths,
            control,
            failover,
            done,
            doing,
            last: None,
        };
        // A queue may have failed since it was made.
        (0..driver.paths.len()).for_each(|index| driver.look_at_queues(index));
        driver
    }

    pub(super) fn now(&self) -> Duration {
        self.failover.hub.now()
    }

    /// Looks at everything that can happen; what did is in `events`, or was given to `sink` with the path's number.
    ///
    /// The path in use is looked at each time, the others now and then, and all while something is amiss (`all`).
    pub(super) fn poll(&mut self, active: usize, all: bool, mut sink: impl FnMut(Link, Ended)) -> bool {
        let all = self.look() || all || self.is_waiting();
        let mut any = false;
        let mut ended = std::mem::take(&mut self.ended);
        for index in 0..self.paths.len() {
            if index != active && !all {
                continue;
            }
            let polled = self.paths[index].poll(&self.control, |end| {
                ended.push(end);
                Ok(())
            });
            let link = self.paths[index].link();
            match polled {
                Ok(moved) => any |= moved,
                Err(failure) => self.fail(link, failure),
            }
            for end in ended.drain(..) {
                match end {
                    Ended::Failed { work, code, qp } => {
                        let status = Status::from_verbs(code);
                        // What a fence flushes says nothing.
                        if !self.paths[index].is_fenced() {
                            let text = self.paths[index].status_text(work, code, qp);
                            self.last = Some(self.paths[index].failure(Some(code), &text));
                            let work = told(work);
                            self.events.push_back(Event::Completed { link, work, status });
                        }
                    }
                    Ended::Probed => {
                        let (work, status) = (Asked::Probe, Status::Success);
                        self.events.push_back(Event::Completed { link, work, status });
                    }
                    Ended::Message(bytes) => self.hear(&bytes),
                    end => sink(link, end),
                }
            }
            if let Some(Drain { link, told }) = self.drains[index]
                && let Some((since, sure)) = told
                && (self.paths[index].is_drained() || since.elapsed() > DRAIN)
            {
                self.drains[index] = None;
                self.events.push_back(Event::Fenced { link, sure });
            }
        }
        self.ended = ended;
        any
    }

    /// Takes up what came from elsewhere: devices, other connections, threads that connect.
    /// Whether it is time to look at all paths.
    fn look(&mut self) -> bool {
        if let Some(bell) = &self.bell {
            bell.hush();
        }
        let is_time = self.last_look.elapsed() >= OTHERS_EVERY;
        if is_time {
            self.last_look = Instant::now();
        }
        while let Ok(done) = self.done.try_recv() {
            self.take_up(done);
        }
        let hub = Arc::clone(&self.failover.hub);
        let version = hub.version();
        if version == self.seen {
            return is_time;
        }
        for (index, path) in (0_u8..).zip(&self.paths) {
            let told = hub.port(path.port().device(), path.port().number());
            let before = std::mem::replace(&mut self.told[usize::from(index)], told);
            // Down and up again since we looked: what was under way is lost, and its address may be another one.
            if told.downs != before.downs {
                self.events.push_back(Event::PortDown { path: index });
            }
            if told.up && told != before {
                self.events.push_back(Event::PortUp { path: index });
            }
            // What others found is no reason to fail for who has nothing to go to.
            let order = match self.failover.settings.enabled {
                true => hub.order(self.ids[usize::from(index)], self.connection, self.seen),
                false => None,
            };
            self.events.extend(order.map(|scope| ordered(index, scope)));
        }
        for index in 0..self.paths.len() {
            self.look_at_queues(index);
        }
        self.seen = version;
        self.changes += 1;
        true
    }

    /// Whether a path's device has told that a queue of it cannot go on: its requests may never end.
    fn look_at_queues(&mut self, index: usize) {
        let path = &mut self.paths[index];
        let now = path.told_failures(&self.failover.hub);
        let before = std::mem::replace(&mut path.failures, now);
        if now == before {
            return;
        }
        let text = if now.completions == before.completions {
            "its device says that a queue pair, or itself, cannot go on"
        } else {
            // Whatever is made of it: what is rebuilt on it would never complete.
            path.spoil();
            "its device says that the completion queue cannot go on"
        };
        if !self.failover.hub.settings().async_events {
            return;
        }
        let (link, failure) = (path.link(), path.failure(None, text));
        self.fail(link, failure);
    }

    /// The next thing that has happened.
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
        self.changes += u64::from(!is_usual);
        Some(event)
    }

    /// By path: what all connections of the process know of it.
    pub(super) fn health(&self) -> Vec<PathHealth> {
        self.failover.hub.with_health(|health| {
            let of = |id| health.path(id).cloned().unwrap_or_default();
            self.ids.iter().map(of).collect()
        })
    }

    /// How long a path must work for its failures to be forgotten.
    pub(super) fn recovery_window(&self) -> Duration {
        self.failover.hub.settings().recovery_window
    }

    /// A message, however it came.
    pub(super) fn hear(&mut self, bytes: &[u8]) {
        // What cannot be read is as if it were lost: the peer says it again, or gives up.
        if let Some(message) = Message::parse(bytes) {
            self.events.push_back(Event::Heard(message));
        }
    }

    pub(super) fn take_outgoing(&mut self) -> Option<[u8; MESSAGE_BYTES]> {
        self.outgoing.pop_front()
    }

    pub(super) fn take_noted(&mut self) -> Option<Noted> {
        self.noted.pop_front()
    }

    /// A call failed: the queue pair is of no use.
    pub(super) fn fail(&mut self, link: Link, failure: Failure) {
        self.last = Some(failure);
        self.events.push_back(Event::Failed { link });
    }

    pub(super) fn path(&mut self, link: Link) -> Option<&mut Path> {
        self.paths
            .get_mut(usize::from(link.path))
            .filter(|path| path.link() == link)
    }

    /// Has all descriptors tell of what happens next.
    pub(super) fn arm(&self) -> Result<(), Failure> {
        self.paths.iter().try_for_each(Path::arm)
    }

    /// What to wait for once armed.
    pub(super) fn fds(&self) -> Vec<RawFd> {
        let mut fds: Vec<RawFd> = self.paths.iter().map(Path::fd).collect();
        fds.extend(self.bell.as_deref().map(AsRawFd::as_raw_fd));
        fds
    }

    /// Whether something is under way that no descriptor tells of.
    pub(super) fn is_waiting(&self) -> bool {
        !self.events.is_empty() || self.drains.iter().any(Option::is_some) || self.bell.is_none()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.failover.hub.gone(self.connection);
    }
}

/// What others found of a path, as the agreement is told.
fn ordered(path: u8, scope: Scope) -> Event {
    match scope {
        Scope::Suspect => Event::Suspected { path },
        Scope::Down => Event::Condemned { path },
    }
}

/// A request as the agreement knows it.
fn told(work: Option<Work>) -> Asked {
    match work {
        Some(Work::Step { position, .. } | Work::Data { position, .. }) => Asked::Step(position),
        Some(Work::Credit { granted }) => Asked::Credit(granted),
        Some(Work::Probe { .. }) => Asked::Probe,
        Some(Work::Message | Work::Receive { .. } | Work::Marker { .. }) | None => Asked::Message,
    }
}
