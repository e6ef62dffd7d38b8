//! The eBPF side of a session: loaded once, attached once per library file, told which processes to watch.

use std::{
    collections::{HashMap, HashSet},
    ffi::CString,
    fs::File,
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, Map, MapData, PerCpuHashMap, PerCpuValues, RingBuf},
    programs::{
        UProbe,
        uprobe::{UProbeAttachLocation, UProbeAttachPoint, UProbeLink, UProbeLinkId, UProbeScope},
    },
};
use ringsight_records::{
    Kind, ProbedRecord, Record,
    network::NetworkRecord,
    probed::{self, PidNamespace, ProbedCall, Tally},
};

use crate::{
    ask::Question,
    error::Unavailable,
    host,
    limits::{CpuBudget, POLL_TIME, STRIDE},
    multi,
    network::Network,
    procfs::ProcessDirectory,
    site::Site,
    target::{FileKey, Library},
};

mod network;

use network::NetworkMaps;

static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("BPF_OBJECT_PATH"));

/// Inode of the initial pid namespace (`PROC_PID_INIT_INO` in the kernel's `proc_ns.h`).
const INITIAL_PID_NAMESPACE: u64 = 0xefff_fffc;

#[derive(Clone, Copy)]
#[repr(transparent)]
struct PodTally(Tally);
// SAFETY: 64-bit integers only, no padding.
unsafe impl Pod for PodTally {}

#[derive(Clone, Copy)]
#[repr(transparent)]
struct PodNamespace(PidNamespace);
// SAFETY: as above.
unsafe impl Pod for PodNamespace {}

/// Links that a thread makes.
pub(crate) struct Linking {
    pub(crate) number: u64,
    pub(crate) question: Question<io::Result<Vec<OwnedFd>>>,
}

/// Places in a file: (offset, cookie).
type Points = Vec<(u64, u64)>;

/// The programs that sites of library `number` need, whether each is for returns, and its points.
fn parts(sites: &[Site], number: u64) -> Vec<(&'static str, bool, Points)> {
    let points = |returns: bool| -> Points {
        sites
            .iter()
            .filter(|site| !returns || site.returns)
            .map(|site| {
                (
                    site.offset,
                    probed::cookie(number, site.cookie & 0xff) | site.cookie & probed::STACK_ARGUMENTS,
                )
            })
            .collect()
    };
    let entry = if sites.iter().any(|site| site.returns) {
        "on_entry"
    } else {
        "on_record"
    };
    // Returns first: an entry whose return is not probed yet would stay pending.
    let mut parts = vec![("on_return", true, points(true)), (entry, false, points(false))];
    parts.retain(|(_, _, points)| !points.is_empty());
    parts
}

/// A path to the very file that is open.
fn file_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// How a library's sites are linked to the programs.
enum Links {
    /// One link for the entries, one for the returns if any.
    Multi(Vec<OwnedFd>),
    /// A link a site: (program, link).
    PerfEvent(Vec<(&'static str, UProbeLinkId)>),
}

/// Links that are in use no more. Dropping them takes the kernel its time: see [`multi`], and longer where a process that maps the library
/// keeps the lock of its memory.
pub(crate) enum Unlinked {
    Multi { _links: Vec<OwnedFd> },
    PerfEvent { _links: Vec<UProbeLink> },
}

struct Attachment {
    number: u64,
    links: Links,
    keys: HashSet<u64>,
}

/// What came out of the ring buffer.
pub(crate) enum Event {
    Record(ProbedRecord),
    Call(ProbedCall),
    Network(NetworkRecord),
}

/// The loaded programs and their maps.
pub(crate) struct Probes {
    ebpf: Ebpf,
    /// `None` where the kernel has no `uprobe_multi`.
    multi: Option<multi::Programs>,
    multi_loaded: HashMap<&'static str, OwnedFd>,
    ring: RingBuf<MapData>,
    processes: PerCpuHashMap<MapData, u64, PodTally>,
    namespaces: Array<MapData, PodNamespace>,
    known_namespaces: Vec<PidNamespace>,
    /// Held for its descriptor, which programs loaded later refer to.
    _pending: MapData,
    attachments: HashMap<FileKey, Attachment>,
    next_library: u64,
    cpus: usize,
    network_maps: NetworkMaps,
    network: Option<Network>,
}

fn map_error(error: impl std::fmt::Display) -> Unavailable {
    Unavailable::explain(error)
}

impl Probes {
    /// Loads the object: maps now, programs when first attached.
    pub(crate) fn load(force_perf_event: bool) -> Result<Self, Unavailable> {
        let mut ebpf = EbpfLoader::new()
            .load(OBJECT)
            .map_err(|error| Unavailable::explain(chain(&error)))?;
        let mut take = |name: &str| {
            ebpf.take_map(name)
                .ok_or_else(|| map_error(format!("no map {name} in the object")))
        };
        let (events, processes, namespaces, pending) = (
            take("EVENTS")?,
            take("PROCESSES")?,
            take("NAMESPACES")?,
            take("PENDING")?,
        );
        let (plans, scope, network_pending, network_tally) = (
            take("NETWORK_PLANS")?,
            take("NETWORK_SCOPE")?,
            take("NETWORK_PENDING")?,
            take("NETWORK_TALLY")?,
        );
        // Programs of one object refer to all of these, whichever are loaded.
        let fds = [
            ("EVENTS", &events),
            ("PROCESSES", &processes),
            ("NAMESPACES", &namespaces),
            ("PENDING", &pending),
            ("NETWORK_PLANS", &plans),
            ("NETWORK_SCOPE", &scope),
            ("NETWORK_PENDING", &network_pending),
            ("NETWORK_TALLY", &network_tally),
        ]
        .map(|(name, map)| (name, fd_of(map)));
        let (Map::LruHashMap(pending), Map::LruHashMap(network_pending)) = (pending, network_pending) else {
            return Err(map_error("a map of calls under way has another type"));
        };
        let multi = if force_perf_event || crate::kernel::version() < (6, 6) {
            None
        } else {
            Some(multi::Programs::new(OBJECT, &fds).map_err(map_error)?)
        };
        Ok(Self {
            multi,
            multi_loaded: HashMap::new(),
            ring: events.try_into().map_err(map_error)?,
            processes: processes.try_into().map_err(map_error)?,
            namespaces: namespaces.try_into().map_err(map_error)?,
            known_namespaces: Vec::new(),
            _pending: pending,
            attachments: HashMap::new(),
            next_library: 1,
            cpus: aya::util::nr_cpus().map_err(|(_, error)| map_error(error))?,
            network_maps: NetworkMaps {
                plans: plans.try_into().map_err(map_error)?,
                scope: scope.try_into().map_err(map_error)?,
                tally: network_tally.try_into().map_err(map_error)?,
                _pending: network_pending,
            },
            network: None,
            ebpf,
        })
    }

    /// Has a thread link the sites of a library, unless another process of the session already brought it or the kernel has no
    /// `uprobe_multi`. The kernel wants the memory lock of every process that maps the file, and any of them can keep it.
    pub(crate) fn begin_link(&mut self, library: &Library, sites: &[Site]) -> io::Result<Option<Linking>> {
        if self.multi.is_none() || self.attachments.contains_key(&library.key) {
            return Ok(None);
        }
        let number = self.new_number();
        let parts = parts(sites, number)
            .into_iter()
            .map(|(name, returns, points)| Ok((self.multi_program(name)?, returns, points)))
            .collect::<io::Result<Vec<_>>>()?;
        let file = library.file.try_clone()?;
        let link = move || -> io::Result<Vec<OwnedFd>> {
            // The very file that was examined, wherever its name leads by now.
            let path = CString::new(file_path(&file))?;
            let link = |(program, returns, points): &(OwnedFd, bool, Points)| {
                multi::link(program.as_fd(), &path, points, *returns)
            };
            parts.iter().map(link).collect()
        };
        let question = Question::ask(link)?;
        Ok(Some(Linking { number, question }))
    }

    /// A number for a library.
    fn new_number(&mut self) -> u64 {
        let number = self.next_library;
        self.next_library += 1;
        number
    }

    /// Watches process `pid` through its library: attaches to the file unless another process of the session already
    /// brought it, and lets the programs pass this process. Returns the process's key
    /// and its library's number. `linked` is what came of [`Probes::begin_link`].
    pub(crate) fn watch(
        &mut self,
        directory: &ProcessDirectory,
        library: &Library,
        sites: &[Site],
        linked: Option<(u64, io::Result<Vec<OwnedFd>>)>,
    ) -> io::Result<(u64, u64)> {
        let key = self.process_key(directory)?;
        let number = if let Some(attachment) = self.attachments.get(&library.key) {
            attachment.number
        } else {
            let (number, links) = match linked {
                Some((number, Ok(links))) => (number, Links::Multi(links)),
                Some((_, Err(error)))
                    if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | 524)) =>
                {
                    return Err(error);
                }
                other => {
                    if other.is_some() {
                        // The kernel was built without it.
                        self.multi = None;
                    }
                    let number = self.new_number();
                    (number, self.link_by_perf_events(library, sites, number)?)
                }
            };
            self.attachments.insert(
                library.key,
                Attachment {
                    number,
                    links,
                    keys: HashSet::new(),
                },
            );
            number
        };
        let values = PerCpuValues::try_from(vec![PodTally(Tally::new(number)); self.cpus])?;
        if let Err(error) = self.processes.insert(key, values, 0) {
            self.unlink_if_unused(library.key);
            return Err(io::Error::other(chain(&error)));
        }
        if let Some(attachment) = self.attachments.get_mut(&library.key) {
            attachment.keys.insert(key);
        }
        Ok((key, number))
    }

    /// Lets the programs pass this process no more; its tally is gone with it.
    pub(crate) fn forget(&mut self, key: u64) {
        let _ = self.processes.remove(&key);
    }

    /// Counts the process out of its library. The last one of a file gives up the links.
    pub(crate) fn unlink(&mut self, key: u64, library: FileKey) -> Option<Unlinked> {
        if let Some(attachment) = self.attachments.get_mut(&library) {
            attachment.keys.remove(&key);
        }
        self.unlink_if_unused(library)
    }

    /// What was seen of a process so far, over all CPUs.
    pub(crate) fn tally(&self, key: u64) -> Tally {
        let mut sum = Tally::new(0);
        let Ok(values) = self.processes.get(&key, 0) else {
            return sum;
        };
        for PodTally(tally) in values.iter() {
            for kind in 0..Kind::LIMIT {
                sum.hits[kind] += tally.hits[kind];
                sum.lost[kind] += tally.lost[kind];
            }
            sum.faults += tally.faults;
            sum.calls += tally.calls;
            sum.calls_lost += tally.calls_lost;
        }
        sum
    }

    /// Takes at most `limit` events out of the ring buffer, for [`POLL_TIME`] at most; `true` if it was drained before that.
    pub(crate) fn drain(&mut self, limit: usize, mut take: impl FnMut(Event)) -> bool {
        let budget = CpuBudget::of(POLL_TIME);
        for index in 1..=limit {
            if index.is_multiple_of(STRIDE) && budget.is_spent() {
                return false;
            }
            let Some(item) = self.ring.next() else { return true };
            if item.len() == size_of::<ProbedRecord>() {
                // SAFETY: the length was checked, and every bit pattern is a `ProbedRecord`.
                take(Event::Record(unsafe {
                    item.as_ptr().cast::<ProbedRecord>().read_unaligned()
                }));
            } else if item.len() == size_of::<ProbedCall>() {
                // SAFETY: the same.
                take(Event::Call(unsafe {
                    item.as_ptr().cast::<ProbedCall>().read_unaligned()
                }));
            } else if item.len() == size_of::<NetworkRecord>() {
                // SAFETY: the same.
                take(Event::Network(unsafe {
                    item.as_ptr().cast::<NetworkRecord>().read_unaligned()
                }));
            }
        }
        false
    }

    /// Name of the kind of link in use.
    pub(crate) fn link_kind(&self) -> &'static str {
        if self.multi.is_some() {
            "uprobe_multi"
        } else {
            "perf_event"
        }
    }

    fn unlink_if_unused(&mut self, library: FileKey) -> Option<Unlinked> {
        if !self.attachments.get(&library)?.keys.is_empty() {
            return None;
        }
        Some(match self.attachments.remove(&library)?.links {
            Links::Multi(_links) => Unlinked::Multi { _links },
            Links::PerfEvent(links) => {
                let take = |(name, link)| self.program(name).ok()?.take_link(link).ok();
                let _links = links.into_iter().filter_map(take).collect();
                Unlinked::PerfEvent { _links }
            }
        })
    }

    fn link_by_perf_events(&mut self, library: &Library, sites: &[Site], number: u64) -> io::Result<Links> {
        let path = file_path(&library.file);
        let mut links = Vec::new();
        for (name, _, points) in parts(sites, number) {
            let program = self.program(name).map_err(io::Error::other)?;
            if program.fd().is_err() {
                program.load().map_err(|error| io::Error::other(chain(&error)))?;
            }
            for (offset, cookie) in points {
                let point = UProbeAttachPoint {
                    location: UProbeAttachLocation::AbsoluteOffset(offset),
                    cookie: Some(cookie),
                };
                let link = program
                    .attach(point, Path::new(&path), UProbeScope::AllProcesses)
                    .map_err(|error| io::Error::other(chain(&error)))?;
                links.push((name, link));
            }
        }
        Ok(Links::PerfEvent(links))
    }

    /// A program for `uprobe_multi` links, loaded once.
    fn multi_program(&mut self, name: &'static str) -> io::Result<OwnedFd> {
        if let Some(program) = self.multi_loaded.get(name) {
            return program.try_clone();
        }
        let programs = self.multi.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let program = programs.load(name)?;
        let ours = program.try_clone()?;
        self.multi_loaded.insert(name, program);
        Ok(ours)
    }

    fn program(&mut self, name: &str) -> Result<&mut UProbe, String> {
        let program = self
            .ebpf
            .program_mut(name)
            .ok_or_else(|| format!("no program {name} in the object"))?;
        program
            .try_into()
            .map_err(|error: aya::programs::ProgramError| error.to_string())
    }

    /// How the programs know the process: by its id in the initial pid namespace, or, where this collector lives in another
    /// one and cannot know that id, by its own namespace and its id there.
    fn process_key(&mut self, directory: &ProcessDirectory) -> io::Result<u64> {
        let (_, own) = host::pid_namespace()?;
        if own == INITIAL_PID_NAMESPACE {
            return Ok(probed::process_key(0, directory.pid()));
        }
        let (device, inode) = directory.pid_namespace()?;
        let namespace = PidNamespace {
            device: kernel_device(device),
            inode,
        };
        let index = match self.known_namespaces.iter().position(|known| *known == namespace) {
            Some(index) => index,
            None if self.known_namespaces.len() < probed::NAMESPACES as usize => {
                let index = self.known_namespaces.len();
                self.namespaces
                    .set(index as u32, PodNamespace(namespace), 0)
                    .map_err(io::Error::other)?;
                self.known_namespaces.push(namespace);
                index
            }
            None => {
                return Err(io::Error::other(
                    "processes of too many pid namespaces; start a second collector",
                ));
            }
        };
        let inner = crate::process::innermost_pid(directory)?;
        Ok(probed::process_key(index as u32 + 1, inner))
    }
}

/// A device number as the kernel keeps it (`MKDEV`), which `stat` recodes.
fn kernel_device(device: u64) -> u64 {
    u64::from(libc::major(device)) << 20 | u64::from(libc::minor(device))
}

fn fd_of(map: &Map) -> i32 {
    match map {
        Map::RingBuf(data)
        | Map::PerCpuHashMap(data)
        | Map::Array(data)
        | Map::PerCpuArray(data)
        | Map::LruHashMap(data) => data.fd().as_fd().as_raw_fd(),
        _ => -1,
    }
}

/// An error with its causes, on one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        cause = error.source();
    }
    text
}

/// Ring buffer bytes that a record takes with the kernel's header.
pub(crate) const RECORD_BYTES: u64 = (size_of::<ProbedRecord>() + 8) as u64;

/// The same for a call.
pub(crate) const CALL_BYTES: u64 = (size_of::<ProbedCall>() + 8) as u64;

/// Events are told apart by their lengths.
const _: () = assert!(
    size_of::<Record>() == 64
        && size_of::<ProbedRecord>() != size_of::<ProbedCall>()
        && size_of::<NetworkRecord>() != size_of::<ProbedCall>()
        && size_of::<NetworkRecord>() != size_of::<ProbedRecord>()
);
