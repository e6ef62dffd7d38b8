//! The communicators of the watched processes: who takes part, and what spans say about it.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use ringsight_exporters::model::Resource;
use ringsight_probes::sample::Process;
use ringsight_records::{DeviceClock, pages};
use rustc_hash::FxHashMap;

use crate::{
    identity::{InstanceKey, process_identity},
    resource,
};

/// Destroyed communicators that are still known, for operations that are settled after their end.
const DESTROYED: usize = 1024;

/// Queue pairs whose devices are known.
const QUEUE_PAIRS: usize = 65_536;

/// A watched process as spans need it.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The process.
    pub process: Arc<Process>,
    /// Its identity among all hosts.
    pub identity: u64,
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
    /// Ranks in watched processes.
    pub members: Vec<Member>,
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

/// All communicators of the watched processes.
#[derive(Debug, Default)]
pub struct Communicators {
    known: FxHashMap<u64, Communicator>,
    processes: FxHashMap<u32, Arc<Watched>>,
    resources: FxHashMap<(u32, u32), Arc<Resource>>,
    destroyed: VecDeque<(u64, u32, u32)>,
    /// By process and device number.
    clocks: FxHashMap<(u32, i32), DeviceClock>,
    /// Network device of a process's queue pair; `None` where two devices have one of this number.
    queue_pairs: FxHashMap<(u32, u32), Option<Arc<str>>>,
    /// By process and number of the port.
    ports: BTreeMap<(u32, u8), Port>,
    service: resource::Service,
    names: resource::Names,
}

impl Communicators {
    /// Knows none; `service` replaces the service name that processes say themselves, `default` stands for one that they
    /// do not say.
    #[must_use]
    pub fn new(service: Option<&str>, default: Option<&str>) -> Self {
        Self {
            service: resource::Service {
                always: service.map(Into::into),
                default: default.map(Into::into),
            },
            ..Self::default()
        }
    }

    /// A process is being watched.
    pub fn watch(&mut self, process: &Arc<Process>) {
        let watched = Watched {
            identity: process_identity(&process.host_id, process.pid, process.start_time),
            host: process.host_name.as_str().into(),
            version: resource::version(process.library_version).into(),
            resource: Arc::new(resource::of_process(
                process,
                &self.service,
                &mut self.names,
                None,
            )),
            process: process.clone(),
        };
        self.processes.insert(process.pid, Arc::new(watched));
    }

    /// A watched process, if its first sample has come.
    #[must_use]
    pub fn process(&self, pid: u32) -> Option<&Arc<Watched>> {
        self.processes.get(&pid)
    }

    /// A process has a communicator. Repeated entries change nothing.
    pub fn enter(&mut self, pid: u32, entry: &pages::Communicator) {
        let Some(watched) = self.processes.get(&pid).cloned() else {
            return;
        };
        // Ranks of a communicator that was split off are told by the rank in the job, as far as that is known: a process's
        // rank in the communicator that its device's others descend from.
        let parent = self.known.get(&entry.parent);
        let resource_rank = parent
            .and_then(|parent| {
                parent
                    .members
                    .iter()
                    .find(|m| m.pid == pid && m.device == entry.device)
            })
            .map_or(entry.rank, |member| member.resource_rank);
        let (service, names) = (&self.service, &mut self.names);
        let resource = self
            .resources
            .entry((pid, resource_rank))
            .or_insert_with(|| {
                Arc::new(resource::of_process(
                    &watched.process,
                    service,
                    names,
                    Some(resource_rank),
                ))
            })
            .clone();
        let known = self.known.entry(entry.id).or_insert_with(|| Communicator {
            ranks: entry.ranks,
            id: format!("{:016x}", entry.id).into(),
            name: entry.name().into(),
            members: Vec::new(),
        });
        if !known
            .members
            .iter()
            .any(|member| (member.pid, member.rank) == (pid, entry.rank))
        {
            known.members.push(Member {
                pid,
                rank: entry.rank,
                local_rank: entry.local_rank,
                device: entry.device,
                watched,
                resource,
                resource_rank,
            });
        }
    }

    /// What is known of a device's clock in a process.
    pub fn tick(&mut self, pid: u32, device: i32, clock: DeviceClock) {
        self.clocks.insert((pid, device), clock);
    }

    /// The clock of a device as a process has found it.
    #[must_use]
    pub fn device_clock(&self, pid: u32, device: i32) -> Option<&DeviceClock> {
        self.clocks.get(&(pid, device))
    }

    /// A process has a queue pair of this number on a network device. It stays known, as steps are told of later.
    pub fn queue_pair(&mut self, pid: u32, number: u32, device: &Arc<str>) {
        if self.queue_pairs.len() >= QUEUE_PAIRS && !self.queue_pairs.contains_key(&(pid, number)) {
            return;
        }
        let known = self
            .queue_pairs
            .entry((pid, number))
            .or_insert_with(|| Some(Arc::clone(device)));
        if known.as_ref().is_some_and(|known| known != device) {
            *known = None;
        }
    }

    /// A process says what a port is, by its number among those that it may use.
    pub fn port(&mut self, pid: u32, index: u8, port: Port) {
        self.ports.insert((pid, index), port);
    }

    /// What a process's port is, if it has said.
    #[must_use]
    pub fn said_port(&self, pid: u32, port: Option<u8>) -> Option<&Port> {
        self.ports.get(&(pid, port?))
    }

    /// Network device of a process's port, if it has said. If it says so of none, of its queue pair, if that is known and certain:
    /// numbers of queue pairs are a device's own, so two may have the same.
    #[must_use]
    pub fn network_device(&self, pid: u32, port: Option<u8>, number: u32) -> Option<&Arc<str>> {
        let said = self.said_port(pid, port);
        if said.is_some() || self.ports.range((pid, 0)..=(pid, u8::MAX)).next().is_some() {
            return said.map(|port| &port.device);
        }
        self.queue_pairs.get(&(pid, number))?.as_ref()
    }

    /// A rank of a communicator was destroyed. It stays known for a while, as its last operations are not settled yet.
    pub fn destroyed(&mut self, comm: u64, pid: u32, rank: u32) {
        self.destroyed.push_back((comm, pid, rank));
        if self.destroyed.len() > DESTROYED
            && let Some((comm, pid, rank)) = self.destroyed.pop_front()
        {
            self.remove(comm, |member| member.pid == pid && member.rank == rank);
        }
    }

    /// A process is no longer watched: nothing more is to be expected from it.
    pub fn exited(&mut self, pid: u32) {
        self.processes.remove(&pid);
        self.resources.retain(|(of, _), _| *of != pid);
        self.clocks.retain(|(of, _), _| *of != pid);
        self.queue_pairs.retain(|(of, _), _| *of != pid);
        self.ports.retain(|(of, _), _| *of != pid);
        self.destroyed.retain(|(_, of, _)| *of != pid);
        let ids: Vec<u64> = self.known.keys().copied().collect();
        for id in ids {
            self.remove(id, |member| member.pid == pid);
        }
    }

    fn remove(&mut self, comm: u64, which: impl Fn(&Member) -> bool) {
        if let Some(known) = self.known.get_mut(&comm) {
            known.members.retain(|member| !which(member));
            if known.members.is_empty() {
                self.known.remove(&comm);
            }
        }
    }

    /// A communicator.
    #[must_use]
    pub fn get(&self, comm: u64) -> Option<&Communicator> {
        self.known.get(&comm)
    }

    /// Live communicators by process, for the metric.
    pub fn count_by_process(&self) -> impl Iterator<Item = (&Arc<Watched>, usize)> {
        self.processes.values().map(|watched| {
            let pid = watched.process.pid;
            let of = |known: &&Communicator| known.members.iter().any(|member| member.pid == pid);
            let dead = self.destroyed.iter().filter(|(_, of, _)| *of == pid).count();
            (
                watched,
                self.known.values().filter(of).count().saturating_sub(dead),
            )
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
                .filter(|end| known.members.iter().any(|member| member.rank == **end))
                .count(),
        }
    }
}

impl Communicator {
    /// The member that an operation of this rank and process is of.
    #[must_use]
    pub fn member(&self, pid: u32, rank: u32) -> Option<&Member> {
        // Ranks are entered in order more often than not.
        self.members
            .get(rank as usize)
            .filter(|member| member.rank == rank && member.pid == pid)
            .or_else(|| {
                self.members
                    .iter()
                    .find(|member| member.rank == rank && member.pid == pid)
            })
    }
}
