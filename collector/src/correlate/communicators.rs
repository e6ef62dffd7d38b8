//! The communicators of the watched processes: who takes part, and what spans say about it.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use ringsight_exporters::model::Resource;
use ringsight_probes::sample::{self, Process};
use ringsight_records::{DeviceClock, pages};
use rustc_hash::FxHashMap;

use crate::{
    identity::{InstanceKey, foreign_communicator, process_identity},
    limits::{LeftOut, Limit, Limits},
    resource,
};

/// Destroyed communicators of a process that are still known, for operations that are settled after their end.
const DESTROYED: usize = 1024;

/// Whose a process is, among all that are watched: processes of one owner may be ranks of one communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(u32);

impl Owner {
    /// The last one of all, in their order.
    pub(crate) const LAST: Self = Self(u32::MAX);
}

/// A watched process as spans need it.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The process.
    pub process: Arc<Process>,
    /// Its identity among all hosts.
    pub identity: u64,
    /// Whose it is.
    pub owner: Owner,
    /// Its host's name.
    pub host: Arc<str>,
    /// Library version as text.
    pub version: Arc<str>,
    /// Resource of what is of the process and of no rank.
    pub resource: Arc<Resource>,
}

/// One rank of a communicator in a watched process.
#[derive(Clone, Debug)]
pub struct Member {
    /// Process.
    pub pid: u32,
    /// Rank.
    pub rank: u32,
    /// Rank among those of its node.
    pub local_rank: u32,
    /// Device number.
    pub device: i32,
    /// Process as spans need it.
    pub watched: Arc<Watched>,
    /// Resource of this rank.
    pub resource: Arc<Resource>,
    resource_rank: u32,
    is_destroyed: bool,
}

/// A communicator.
#[derive(Clone, Debug)]
pub struct Communicator {
    /// Ranks.
    pub ranks: u32,
    /// Its id as spans write it: 16 hexadecimal digits.
    pub id: Arc<str>,
    /// Name, empty if it has none.
    pub name: Arc<str>,
    /// Ranks in watched processes: each has one holder, the first that said so.
    members: FxHashMap<u32, Member>,
    /// Rank of a process's device, the first one where it has several.
    by_device: FxHashMap<(u32, i32), u32>,
    owner: Owner,
}

/// A port of a network device, as a process says that it uses it.
#[derive(Clone, Debug)]
pub struct Port {
    /// Name of the device.
    pub device: Arc<str>,
    /// Its number among the device's, from 1.
    pub number: u32,
    /// GID, as an IPv6 address is written; `None` where it needs none.
    pub gid: Option<Arc<str>>,
}

/// What one process has of a communicator.
#[derive(Clone, Copy, Debug, Default)]
struct Ranks {
    known: usize,
    destroyed: usize,
}

/// What is known of one process.
#[derive(Debug)]
struct OfProcess {
    watched: Arc<Watched>,
    /// Its communicators by id, and how many there are with each of its ranks counted.
    communicators: FxHashMap<u64, Ranks>,
    entries: usize,
    /// Ranks that were destroyed, the first ones first.
    destroyed: VecDeque<(u64, u32)>,
    /// By rank.
    resources: FxHashMap<u32, Arc<Resource>>,
    /// By device number.
    clocks: FxHashMap<i32, DeviceClock>,
    /// Network device of a queue pair; `None` where two devices have one of this number.
    queue_pairs: FxHashMap<u32, Option<Arc<str>>>,
    /// By number of the port.
    ports: BTreeMap<u8, Port>,
}

/// All communicators of the watched processes.
#[derive(Debug, Default)]
pub struct Communicators {
    known: FxHashMap<u64, Communicator>,
    processes: FxHashMap<u32, OfProcess>,
    /// Owners by user, and by control group where these are told apart.
    owners: FxHashMap<(u32, Option<Arc<str>>), Owner>,
    by_cgroup: bool,
    service: resource::Service,
    names: resource::Names,
    left_out: LeftOut,
    claimed_twice: u64,
    foreign: u64,
}

impl Communicators {
    /// Knows none; `service` replaces the service name that processes say themselves, `default` stands for one that they
    /// do not say. `by_cgroup`: processes of one user in different control groups have nothing to do with each other.
    #[must_use]
    pub fn new(service: Option<&str>, default: Option<&str>, by_cgroup: bool, limits: &Limits) -> Self {
        Self {
            names: resource::Names::new(limits),
            service: resource::Service {
                always: service.map(Into::into),
                default: default.map(Into::into),
            },
            by_cgroup,
            ..Self::default()
        }
    }

    /// A process is being watched.
    pub fn watch(&mut self, process: &Arc<Process>) {
        let next = Owner(u32::try_from(self.owners.len()).unwrap_or(u32::MAX));
        let sample::Owner { user, cgroup } = &process.owner;
        let cgroup = self.by_cgroup.then(|| cgroup.as_str().into());
        let owner = *self.owners.entry((*user, cgroup)).or_insert(next);
        let resource = resource::of_process(process, &self.service, &mut self.names);
        let watched = Arc::new(Watched {
            identity: process_identity(&process.host_id, process.pid, process.start_time),
            owner,
            host: process.host_name.as_str().into(),
            version: resource::version(process.library_version).into(),
            resource: Arc::new(resource),
            process: process.clone(),
        });
        self.processes
            .entry(process.pid)
            .and_modify(|own| own.watched = Arc::clone(&watched))
            .or_insert_with(|| OfProcess {
                watched,
                communicators: FxHashMap::default(),
                entries: 0,
                destroyed: VecDeque::new(),
                resources: FxHashMap::default(),
                clocks: FxHashMap::default(),
                queue_pairs: FxHashMap::default(),
                ports: BTreeMap::new(),
            });
    }

    /// How many owners the processes have that are, or were, watched.
    #[must_use]
    pub fn owners(&self) -> usize {
        self.owners.len()
    }

    /// A watched process, if its first sample has come.
    #[must_use]
    pub fn process(&self, pid: u32) -> Option<&Arc<Watched>> {
        self.processes.get(&pid).map(|own| &own.watched)
    }

    /// What a communicator that a process names is called here: as the process says, unless it is another owner's. Then it has
    /// an id of its own, so that what two owners do under one id is never one trace.
    #[must_use]
    pub fn named(&self, pid: u32, comm: u64) -> u64 {
        let Some(known) = self.known.get(&comm) else {
            return comm;
        };
        let Some(watched) = self.process(pid).filter(|watched| watched.owner != known.owner) else {
            return comm;
        };
        let sample::Owner { user, cgroup } = &watched.process.owner;
        let foreign = foreign_communicator(comm, *user, if self.by_cgroup { cgroup } else { "" });
        match self.known.get(&foreign) {
            // No id is a third one's either.
            Some(known) if known.owner != watched.owner => 0,
            _ => foreign,
        }
    }

    /// Whether a communicator is known as this process's owner's.
    #[must_use]
    pub fn is_known(&self, pid: u32, comm: u64) -> bool {
        let owner = self.process(pid).map(|watched| watched.owner);
        self.known.get(&comm).map(|known| known.owner) == owner && owner.is_some()
    }

    /// Whether a rank of a communicator is another process's.
    #[must_use]
    pub fn is_claimed_twice(&self, pid: u32, comm: u64, rank: u32) -> bool {
        let holder = self.known.get(&comm).and_then(|known| known.of_rank(rank));
        holder.is_some_and(|holder| holder.pid != pid)
    }

    /// A process has a communicator. Repeated entries change nothing.
    pub fn enter(&mut self, pid: u32, entry: &pages::Communicator, limits: &Limits) {
        let (id, parent) = (self.named(pid, entry.id), self.named(pid, entry.parent));
        // Ranks of a communicator that was split off are told by the rank in the job, as far as that is known: a process's
        // rank in the communicator that its device's others descend from.
        let resource_rank = self
            .known
            .get(&parent)
            .and_then(|parent| parent.of_rank(*parent.by_device.get(&(pid, entry.device))?))
            .map_or(entry.rank, |member| member.resource_rank);
        if id == 0 {
            self.foreign += 1;
            return;
        }
        if self.is_claimed_twice(pid, id, entry.rank) {
            self.claimed_twice += 1;
            return;
        }
        let Some(own) = self.processes.get_mut(&pid) else {
            return;
        };
        let members = self.known.get_mut(&id).map(|known| &mut known.members);
        if let Some(member) = members.and_then(|members| members.get_mut(&entry.rank)) {
            // One that is made anew under the same id.
            if std::mem::take(&mut member.is_destroyed) {
                own.destroyed.retain(|place| *place != (id, entry.rank));
                if let Some(ranks) = own.communicators.get_mut(&id) {
                    ranks.destroyed = ranks.destroyed.saturating_sub(1);
                }
            }
            return;
        }
        if own.entries >= limits.communicators {
            // A destroyed one makes room.
            let Some((comm, rank)) = own.destroyed.front().copied() else {
                self.left_out.count(Limit::Communicators);
                return;
            };
            self.forget(pid, comm, rank);
        }
        let Some(own) = self.processes.get_mut(&pid) else {
            return;
        };
        let ranks = own.communicators.entry(id).or_default();
        if ranks.known >= limits.ranks_per_communicator {
            self.left_out.count(Limit::RanksPerCommunicator);
            return;
        }
        (ranks.known, own.entries) = (ranks.known + 1, own.entries + 1);
        self.foreign += u64::from(id != entry.id);
        let resource = if let Some(known) = own.resources.get(&resource_rank) {
            Arc::clone(known)
        } else if own.resources.len() < limits.resources {
            let made = resource::of_rank(&own.watched.resource, &own.watched.process, resource_rank);
            Arc::clone(own.resources.entry(resource_rank).or_insert(Arc::new(made)))
        } else {
            self.left_out.count(Limit::Resources);
            Arc::clone(&own.watched.resource)
        };
        let owner = own.watched.owner;
        let known = self.known.entry(id).or_insert_with(|| Communicator {
            ranks: entry.ranks,
            id: format!("{id:016x}").into(),
            name: entry.name().into(),
            members: FxHashMap::default(),
            by_device: FxHashMap::default(),
            owner,
        });
        known.by_device.entry((pid, entry.device)).or_insert(entry.rank);
        known.members.insert(
            entry.rank,
            Member {
                pid,
                rank: entry.rank,
                local_rank: entry.local_rank,
                device: entry.device,
                watched: Arc::clone(&own.watched),
                resource,
                resource_rank,
                is_destroyed: false,
            },
        );
    }

    /// What is known of a device's clock in a process.
    pub fn tick(&mut self, pid: u32, device: i32, clock: DeviceClock) {
        if let Some(own) = self.processes.get_mut(&pid) {
            own.clocks.insert(device, clock);
        }
    }

    /// The clock of a device as a process has found it.
    #[must_use]
    pub fn device_clock(&self, pid: u32, device: i32) -> Option<&DeviceClock> {
        self.processes.get(&pid)?.clocks.get(&device)
    }

    /// A process has a queue pair of this number on a network device. It stays known, as steps are told of later.
    pub fn queue_pair(&mut self, pid: u32, number: u32, device: &Arc<str>, limits: &Limits) {
        let Some(own) = self.processes.get_mut(&pid) else {
            return;
        };
        if own.queue_pairs.len() >= limits.queue_pairs.process && !own.queue_pairs.contains_key(&number) {
            self.left_out.count(Limit::QueuePairs);
            return;
        }
        let known = own
            .queue_pairs
            .entry(number)
            .or_insert_with(|| Some(Arc::clone(device)));
        if known.as_ref().is_some_and(|known| known != device) {
            *known = None;
        }
    }

    /// A process says what a port is, by its number among those that it may use.
    pub fn port(&mut self, pid: u32, index: u8, port: Port) {
        if let Some(own) = self.processes.get_mut(&pid) {
            own.ports.insert(index, port);
        }
    }

    /// What a process's port is, if it has said.
    #[must_use]
    pub fn said_port(&self, pid: u32, port: Option<u8>) -> Option<&Port> {
        self.processes.get(&pid)?.ports.get(&port?)
    }

    /// Network device of a process's port, if it has said. If it says so of none, of its queue pair, if that is known and certain:
    /// numbers of queue pairs are a device's own, so two may have the same.
    #[must_use]
    pub fn network_device(&self, pid: u32, port: Option<u8>, number: u32) -> Option<&Arc<str>> {
        let own = self.processes.get(&pid)?;
        if !own.ports.is_empty() {
            return own.ports.get(&port?).map(|port| &port.device);
        }
        own.queue_pairs.get(&number)?.as_ref()
    }

    /// A rank of a communicator was destroyed. It stays known for a while, as its last operations are not settled yet.
    pub fn destroyed(&mut self, comm: u64, pid: u32, rank: u32) {
        let members = self.known.get_mut(&comm).map(|known| &mut known.members);
        let Some(member) = members.and_then(|members| members.get_mut(&rank)) else {
            return;
        };
        let Some(own) = self.processes.get_mut(&pid) else {
            return;
        };
        if member.pid != pid || std::mem::replace(&mut member.is_destroyed, true) {
            return;
        }
        if let Some(ranks) = own.communicators.get_mut(&comm) {
            ranks.destroyed += 1;
        }
        own.destroyed.push_back((comm, rank));
        if own.destroyed.len() > DESTROYED
            && let Some((comm, rank)) = own.destroyed.front().copied()
        {
            self.forget(pid, comm, rank);
        }
    }

    /// Forgets the destroyed rank that was the first one of its process.
    fn forget(&mut self, pid: u32, comm: u64, rank: u32) {
        if let Some(own) = self.processes.get_mut(&pid) {
            own.destroyed.pop_front();
            own.entries = own.entries.saturating_sub(1);
            if let Some(ranks) = own.communicators.get_mut(&comm) {
                ranks.known = ranks.known.saturating_sub(1);
                ranks.destroyed = ranks.destroyed.saturating_sub(1);
                if ranks.known == 0 {
                    own.communicators.remove(&comm);
                }
            }
        }
        if let Some(known) = self.known.get_mut(&comm) {
            known.remove(rank);
            if known.members.is_empty() {
                self.known.remove(&comm);
            }
        }
    }

    /// A process is no longer watched: nothing more is to be expected from it.
    pub fn exited(&mut self, pid: u32) {
        let Some(own) = self.processes.remove(&pid) else {
            return;
        };
        for comm in own.communicators.keys() {
            let Some(known) = self.known.get_mut(comm) else {
                continue;
            };
            known.members.retain(|_, member| member.pid != pid);
            known.by_device.retain(|(of, _), _| *of != pid);
            if known.members.is_empty() {
                self.known.remove(comm);
            }
        }
    }

    /// Communicators that a process is in and has not destroyed, with its ranks there.
    pub fn live_ranks(&self, pid: u32) -> impl Iterator<Item = (u64, u32)> {
        let own = self.processes.get(&pid);
        let communicators = own.into_iter().flat_map(|own| own.communicators.keys().copied());
        communicators.flat_map(move |comm| {
            let members = self.known.get(&comm).into_iter().flat_map(|known| &known.members);
            let is_live = move |(_, member): &(&u32, &Member)| member.pid == pid && !member.is_destroyed;
            members.filter(is_live).map(move |(rank, _)| (comm, *rank))
        })
    }

    /// A communicator.
    #[must_use]
    pub fn get(&self, comm: u64) -> Option<&Communicator> {
        self.known.get(&comm)
    }

    /// Live communicators by process, for the metric.
    pub fn count_by_process(&self) -> impl Iterator<Item = (&Arc<Watched>, usize)> {
        self.processes.values().map(|own| {
            let is_live = |ranks: &&Ranks| ranks.known > ranks.destroyed;
            (&own.watched, own.communicators.values().filter(is_live).count())
        })
    }

    /// How many parts of an instance the watched processes are to deliver.
    #[must_use]
    pub fn expected(&self, key: &InstanceKey) -> usize {
        let Some(known) = self.known.get(&key.comm) else {
            return 1;
        };
        match key.pair {
            None => known.members.len(),
            Some((source, destination)) => [source, destination]
                .iter()
                .filter(|end| known.members.contains_key(end))
                .count(),
        }
    }

    /// What was left out at the limits of communicators.
    #[must_use]
    pub fn left_out(&self) -> LeftOut {
        let mut all = self.left_out;
        all.add_all(self.names.left_out());
        all
    }

    /// Ranks of communicators that a second process said were its own, and communicators of one owner that another one said
    /// were its own.
    #[must_use]
    pub fn claims(&self) -> (u64, u64) {
        (self.claimed_twice, self.foreign)
    }
}

impl Communicator {
    /// The member that an operation of this rank and process is of.
    #[must_use]
    pub fn member(&self, pid: u32, rank: u32) -> Option<&Member> {
        self.of_rank(rank).filter(|member| member.pid == pid)
    }

    /// The member that has a rank.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Option<&Member> {
        self.members.get(&rank)
    }

    /// Watched processes that have a rank in it; one with several ranks comes as often.
    pub fn processes(&self) -> impl Iterator<Item = u32> {
        self.members.values().map(|member| member.pid)
    }

    fn remove(&mut self, rank: u32) {
        if let Some(member) = self.members.remove(&rank) {
            let place = (member.pid, member.device);
            if self.by_device.get(&place) == Some(&rank) {
                self.by_device.remove(&place);
            }
        }
    }
}
