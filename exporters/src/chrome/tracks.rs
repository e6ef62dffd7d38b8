//! Where an event stands: a process per rank, a thread per kind of work.
//!
//! Slices of one thread must nest; two operations in flight on one rank need not. So a kind of work has as many threads
//! ("lanes") as it had spans at once.

use std::{
    collections::{BTreeMap, HashMap},
    io::Write as _,
    sync::Arc,
};

use super::arguments::{Arguments, string, text};
use crate::model::{Resource, Span};

/// Process of the spans that belong to all ranks (the roots).
const COLLECTIVES_PID: u32 = 4_000_000;
/// Ranks that clash (two jobs in one trace) get process numbers from here on.
const SPARE_PID: u32 = 5_000_000;
/// Lanes of one kind of work at most; beyond, spans of one lane overlap and viewers cut them.
const MAX_LANES: usize = 32;
/// Intervals that a lane remembers: spans arrive nearly in order, this is how far from it they may be.
const LANE_MEMORY: usize = 1024;

/// Process and thread numbers of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) pid: u32,
    pub(super) tid: u32,
}

/// A kind of work on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Track {
    /// Operations of all ranks (roots), by communicator.
    Collective(Arc<str>),
    /// Operations as the rank sees them, from call to completion.
    Operation,
    /// API calls.
    Api,
    /// Launches.
    Launch,
    /// A device channel.
    Kernel(i64),
    /// Network sends: channel, peer.
    ProxySend(i64, i64),
    /// Network receives: channel, peer.
    ProxyRecv(i64, i64),
    /// Anything else, by span name.
    Other(&'static str),
}

impl Track {
    /// The track of a span.
    pub(super) fn of(span: &Span, attributes: &Arguments<'_>) -> Self {
        let channel = attributes.channel.unwrap_or(-1);
        let peer = attributes.peer.unwrap_or(-1);
        match span.name {
            "enqueue" => Self::Api,
            "launch" => Self::Launch,
            "kernel channel" => Self::Kernel(channel),
            "proxy send" => Self::ProxySend(channel, peer),
            "proxy recv" => Self::ProxyRecv(channel, peer),
            name if name.ends_with(" rank") => Self::Operation,
            name if span.parent_span_id.is_none() && attributes.operation == Some(name) => {
                // A root names its communicator's size; a call that was only timed on the host knows of none.
                if attributes.size.is_none() {
                    return Self::Api;
                }
                Self::Collective(
                    attributes
                        .communicator_name
                        .or(attributes.communicator)
                        .unwrap_or("")
                        .into(),
                )
            }
            name => Self::Other(name),
        }
    }

    /// The event category: what a viewer filters by.
    pub(super) fn category(&self) -> &'static str {
        match self {
            Self::Collective(_) => "collective",
            Self::Operation => "operation",
            Self::Api => "api",
            Self::Launch => "launch",
            Self::Kernel(_) => "kernel",
            Self::ProxySend(..) | Self::ProxyRecv(..) => "proxy",
            Self::Other(_) => "other",
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Collective(name) if name.is_empty() => "all communicators".into(),
            Self::Collective(name) => format!("communicator {name}"),
            Self::Operation => "operations".into(),
            Self::Api => "api".into(),
            Self::Launch => "launch".into(),
            Self::Kernel(channel) => format!("kernel channel {channel}"),
            Self::ProxySend(channel, peer) => format!("proxy send ch {channel} → rank {peer}"),
            Self::ProxyRecv(channel, peer) => format!("proxy recv ch {channel} ← rank {peer}"),
            Self::Other(name) => (*name).into(),
        }
    }

    /// Order of the threads in a process: along the path of an operation.
    fn sort_index(&self) -> i64 {
        let spread =
            |base: i64, channel: i64, peer: i64| base + channel.clamp(0, 63) * 4096 + peer.clamp(0, 4095);
        match self {
            Self::Collective(_) | Self::Operation => 0,
            Self::Api => 100,
            Self::Launch => 200,
            Self::Other(_) => 300,
            Self::Kernel(channel) => spread(1_000_000, *channel, 0),
            Self::ProxySend(channel, peer) => spread(2_000_000, *channel, *peer),
            Self::ProxyRecv(channel, peer) => spread(3_000_000, *channel, *peer),
        }
    }
}

/// A thread and the intervals that it holds already.
struct Lane {
    tid: u32,
    /// Start to end of recent spans.
    recent: BTreeMap<u64, u64>,
    /// Latest end among the forgotten ones: nothing may start before it.
    floor: u64,
    named: bool,
}

impl Lane {
    fn takes(&mut self, (start, end): (u64, u64)) -> bool {
        // An empty span still takes its place: two slices of one instant would not nest in a defined way.
        let end = end.max(start.saturating_add(1));
        let before = self
            .recent
            .range(..=start)
            .next_back()
            .is_some_and(|(_, other)| *other > start);
        let after = self
            .recent
            .range(start..)
            .next()
            .is_some_and(|(other, _)| *other < end);
        if start < self.floor || before || after {
            return false;
        }
        self.recent.insert(start, end);
        if self.recent.len() > LANE_MEMORY
            && let Some((_, end)) = self.recent.pop_first()
        {
            self.floor = self.floor.max(end);
        }
        true
    }
}

/// Who a process is.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Identity {
    host: String,
    process: String,
    rank: String,
}

struct Process {
    pid: u32,
    identity: Identity,
    service: String,
    named: bool,
    lanes: HashMap<Track, Vec<Lane>>,
    threads: u32,
}

/// All processes and threads of a file.
#[derive(Default)]
pub(super) struct Tracks {
    processes: Vec<Process>,
    by_identity: HashMap<Identity, usize>,
    /// The resource seen last for each process, kept alive so that its address means it.
    by_address: HashMap<usize, (Arc<Resource>, usize)>,
    collectives: Option<usize>,
}

impl Tracks {
    /// The place of a span on `track`; writes the names of a process or thread that is new to `buffer`.
    pub(super) fn place(
        &mut self,
        resource: &Arc<Resource>,
        track: &Track,
        interval: (u64, u64),
        buffer: &mut Vec<u8>,
    ) -> Place {
        let index = match track {
            Track::Collective(_) => self.collectives(),
            _ => self.of_resource(resource),
        };
        let process = &mut self.processes[index];
        process.introduce(buffer);
        process.lane(track, interval, buffer)
    }

    /// The process number of a resource.
    pub(super) fn process(&mut self, resource: &Arc<Resource>, buffer: &mut Vec<u8>) -> u32 {
        let index = self.of_resource(resource);
        let process = &mut self.processes[index];
        process.introduce(buffer);
        process.pid
    }

    /// Where the operations of rank `rank` in process `pid` on `host` stand. The rank may be one of a communicator with
    /// other numbers than the job's: a process with only one identity is taken whatever its rank.
    pub(super) fn operations(&mut self, host: &str, pid: u32, rank: u32, buffer: &mut Vec<u8>) -> Place {
        let (number, rank) = (pid.to_string(), rank.to_string());
        let here = |p: &&Process| p.identity.host == host && p.identity.process == number;
        let found = match self.processes.iter().filter(here).count() {
            1 => self.processes.iter().position(|p| here(&p)),
            _ => self
                .processes
                .iter()
                .position(|p| here(&p) && p.identity.rank == rank),
        };
        let index = found.unwrap_or_else(|| {
            self.add(
                Identity {
                    host: host.into(),
                    process: number,
                    rank,
                },
                String::new(),
            )
        });
        let process = &mut self.processes[index];
        process.introduce(buffer);
        process.first_lane(&Track::Operation, buffer)
    }

    /// Has every name written again before its next use.
    pub(super) fn forget_names(&mut self) {
        for process in &mut self.processes {
            process.named = false;
            process
                .lanes
                .values_mut()
                .flatten()
                .for_each(|lane| lane.named = false);
        }
    }

    fn collectives(&mut self) -> usize {
        *self.collectives.get_or_insert_with(|| {
            self.processes.push(Process {
                pid: COLLECTIVES_PID,
                identity: Identity {
                    host: String::new(),
                    process: String::new(),
                    rank: String::new(),
                },
                service: String::new(),
                named: false,
                lanes: HashMap::new(),
                threads: 0,
            });
            self.processes.len() - 1
        })
    }

    fn of_resource(&mut self, resource: &Arc<Resource>) -> usize {
        let address = Arc::as_ptr(resource).addr();
        if let Some((_, index)) = self.by_address.get(&address) {
            return *index;
        }
        let attribute = |key| {
            let found = resource.attributes.iter().find(|(name, _)| *name == key);
            found
                .map(|(_, value)| text(value).into_owned())
                .unwrap_or_default()
        };
        let (host, process) = (attribute("host.name"), attribute("process.pid"));
        let rank = match attribute("ccl.job.rank") {
            none if none.is_empty() => format!("{host}:{process}"),
            rank => rank,
        };
        let identity = Identity { host, process, rank };
        let index = match self.by_identity.get(&identity) {
            Some(index) => *index,
            None => self.add(identity, attribute("service.name")),
        };
        // A collector keeps one `Arc` per resource; for one that does not, only the latest is kept.
        self.by_address.retain(|_, (_, other)| *other != index);
        self.by_address.insert(address, (Arc::clone(resource), index));
        index
    }

    fn add(&mut self, identity: Identity, service: String) -> usize {
        let index = self.processes.len();
        // Number 0 is the idle process to viewers that also read kernel traces.
        let wanted = identity
            .rank
            .parse::<u32>()
            .ok()
            .filter(|rank| *rank < COLLECTIVES_PID - 1)
            .map(|rank| rank + 1);
        let pid = match wanted {
            Some(pid) if self.processes.iter().all(|p| p.pid != pid) => pid,
            _ => SPARE_PID + index as u32,
        };
        self.by_identity.insert(identity.clone(), index);
        self.processes.push(Process {
            pid,
            identity,
            service,
            named: false,
            lanes: HashMap::new(),
            threads: 0,
        });
        index
    }
}

impl Process {
    fn introduce(&mut self, buffer: &mut Vec<u8>) {
        if std::mem::replace(&mut self.named, true) {
            return;
        }
        let pid = self.pid;
        let name = if pid == COLLECTIVES_PID {
            "collectives".into()
        } else {
            let Identity { host, process, rank } = &self.identity;
            // An instance that is not numbered by rank is named after its host and process: nothing new.
            let numbered = rank.bytes().all(|byte| byte.is_ascii_digit());
            let parts = [
                ("rank ", if numbered { rank.as_str() } else { "" }),
                ("", host),
                ("pid ", process),
            ];
            let parts = parts.iter().filter(|(_, value)| !value.is_empty());
            parts
                .map(|(prefix, value)| format!("{prefix}{value}"))
                .collect::<Vec<_>>()
                .join(" · ")
        };
        metadata(buffer, Place { pid, tid: 0 }, "process_name", &name);
        if !self.service.is_empty() {
            metadata(buffer, Place { pid, tid: 0 }, "process_labels", &self.service);
        }
        let order = if pid == COLLECTIVES_PID {
            -1
        } else {
            i64::from(pid)
        };
        sort_index(buffer, Place { pid, tid: 0 }, "process_sort_index", order);
    }

    fn lane(&mut self, track: &Track, interval: (u64, u64), buffer: &mut Vec<u8>) -> Place {
        let count = {
            let lanes = self.lanes.entry(track.clone()).or_default();
            if let Some(at) = lanes.iter_mut().position(|lane| lane.takes(interval)) {
                return self.name_lane(track, at, buffer);
            }
            lanes.len()
        };
        if count == MAX_LANES {
            return self.name_lane(track, count - 1, buffer);
        }
        self.add_lane(track).takes(interval);
        self.name_lane(track, count, buffer)
    }

    fn first_lane(&mut self, track: &Track, buffer: &mut Vec<u8>) -> Place {
        if !self.lanes.contains_key(track) {
            self.add_lane(track);
        }
        self.name_lane(track, 0, buffer)
    }

    fn add_lane(&mut self, track: &Track) -> &mut Lane {
        self.threads += 1;
        // Never the process's own number, which viewers take for its main thread.
        let tid = self.pid.wrapping_mul(1000).wrapping_add(self.threads);
        let lanes = self.lanes.entry(track.clone()).or_default();
        lanes.push(Lane {
            tid,
            recent: BTreeMap::new(),
            floor: 0,
            named: false,
        });
        let last = lanes.len() - 1;
        &mut lanes[last]
    }

    fn name_lane(&mut self, track: &Track, at: usize, buffer: &mut Vec<u8>) -> Place {
        let pid = self.pid;
        let Some(lane) = self.lanes.get_mut(track).and_then(|lanes| lanes.get_mut(at)) else {
            return Place { pid, tid: 0 };
        };
        let place = Place { pid, tid: lane.tid };
        if !std::mem::replace(&mut lane.named, true) {
            let number = if at == 0 {
                String::new()
            } else {
                format!(" ({})", at + 1)
            };
            metadata(buffer, place, "thread_name", &(track.name() + &number));
            sort_index(buffer, place, "thread_sort_index", track.sort_index() + at as i64);
        }
        place
    }
}

fn metadata(buffer: &mut Vec<u8>, place: Place, kind: &str, name: &str) {
    let key = if kind == "process_labels" {
        "labels"
    } else {
        "name"
    };
    write!(
        buffer,
        ",\n{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"{kind}\",\"args\":{{\"{key}\":",
        place.pid, place.tid
    )
    .ok();
    string(buffer, name);
    buffer.extend_from_slice(b"}}");
}

fn sort_index(buffer: &mut Vec<u8>, place: Place, kind: &str, index: i64) {
    write!(
        buffer,
        ",\n{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"{kind}\",\"args\":{{\"sort_index\":{index}}}}}",
        place.pid, place.tid
    )
    .ok();
}
