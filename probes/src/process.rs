//! What `/proc` says about a process.

use std::{
    fs::File,
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::fs::FileExt as _,
    },
};

use ringsight_records::pages::Reader;

use crate::{
    ask,
    error::AttachError,
    host,
    limits::{ANSWER_TIME, CHECK_TIME, CpuBudget, LeftOut, Limit},
    procfs::{self, Environment, FileKey, ProcessDirectory, parse_stat, status_field},
    sample::{Owner, Process},
    target::{Flavour, Library, process_error},
};

/// The variable that names the host for the library.
const HOST_ID: &str = "NCCL_HOSTID";

/// The same, and the environment variables that are handed on for resource attributes.
const ENVIRONMENT: [&str; 17] = [
    HOST_ID,
    "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_PROCID",
    "SLURM_NODEID",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "JOB_NAME",
    "HOSTNAME",
];

/// Start time of a process in clock ticks since boot; `None` if it does not exist or is a zombie.
#[must_use]
pub fn start_time(pid: u32) -> Option<u64> {
    ProcessDirectory::open(pid).ok()?.start_time()
}

/// Start time of this process.
#[must_use]
pub fn own_start_time() -> u64 {
    let own = ProcessDirectory::own().ok();
    own.and_then(|own| own.start_time()).unwrap_or(0)
}

/// This process as it signs the lease of a ring.
#[must_use]
pub fn own_reader() -> Reader {
    // 0, which no namespace has, if there is no /proc to ask.
    let namespace = host::pid_namespace().map_or(0, |(_, inode)| inode);
    Reader::new(std::process::id(), own_start_time(), namespace)
}

/// Whether a reader certainly does not exist any more, as far as `own` can tell, which is this process. A number says nothing
/// in another pid namespace than the one that it was given in: a process there may be alive and not be seen from here.
pub(crate) fn is_gone(own: &Reader, reader: &Reader) -> bool {
    if own.namespace() == 0 || own.namespace() != reader.namespace() {
        return false;
    }
    let Some(pid) = i32::try_from(reader.pid()).ok().filter(|pid| *pid > 0) else {
        return false;
    };
    // By a signal that is none: `/proc` may hide other users' processes, or be another namespace's.
    // SAFETY: a system call on integers that does nothing but check.
    let exists =
        unsafe { libc::kill(pid, 0) } == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH);
    if !exists {
        return true;
    }
    // It may be a zombie, or another process of that number. A `/proc` of our own namespace tells. It may also be a process of the target's own
    // that keeps the answer back.
    let reader = *reader;
    let is_another = move || {
        let stat = || ProcessDirectory::open(reader.pid())?.text("stat");
        procfs::shows_own_namespace()
            && stat().is_ok_and(|stat| parse_stat(&stat).is_none_or(|started| started != reader.start_time()))
    };
    ask::within(CHECK_TIME, is_another).unwrap_or(false)
}

/// Whether the kernel says that the process by which a lease is signed may be the one that reads `pages`, the shared pages of a process of
/// user `owner`: it exists, it started when the lease says, it has the pages mapped, and its user is root, the owner, or this
/// process's. The lease itself is what the owner wrote there.
pub(crate) fn may_read(reader: &Reader, own: &Reader, owner: Option<u32>, pages: FileKey) -> bool {
    if own.namespace() == 0 || own.namespace() != reader.namespace() {
        return false;
    }
    let reader = *reader;
    let is_reader = move || {
        let directory = ProcessDirectory::open(reader.pid()).ok();
        let Some(directory) = directory.filter(|_| procfs::shows_own_namespace()) else {
            return false;
        };
        let own_user = ProcessDirectory::own().ok().and_then(|own| own.effective_user());
        let user = directory.effective_user();
        user.is_some()
            && [Some(0), owner, own_user].contains(&user)
            && directory.start_time() == Some(reader.start_time())
            && directory.maps_file(pages, CpuBudget::of(CHECK_TIME))
    };
    // It may be a process of the target's own that keeps the answer back.
    ask::within(CHECK_TIME, is_reader).unwrap_or(false)
}

/// Whether a process is stopped by a signal or a debugger; `None` if it is gone.
#[must_use]
pub fn is_stopped(pid: u32) -> Option<bool> {
    let status = ProcessDirectory::open(pid).ok()?.text("status").ok()?;
    let state = status_field(&status, "State:")?;
    Some(state.starts_with(['T', 't']))
}

/// `CLOCK_MONOTONIC` in nanoseconds.
#[must_use]
pub fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec to write to; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The directory of the process that thread `tid` belongs to.
pub(crate) fn directory_of(tid: u32) -> Result<ProcessDirectory, AttachError> {
    let open = || -> io::Result<_> {
        let directory = ProcessDirectory::open(tid)?;
        let status = directory.text("status")?;
        let pid = status_field(&status, "Tgid:").and_then(|text| text.parse().ok());
        match pid {
            Some(pid) if pid != tid => ProcessDirectory::open(pid),
            Some(_) => Ok(directory),
            None => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        }
    };
    open().map_err(|error| process_error(tid, "status", &error))
}

/// The process's id in its own pid namespace.
pub(crate) fn innermost_pid(directory: &ProcessDirectory) -> io::Result<u32> {
    let status = directory.text("status")?;
    let inner = status_field(&status, "NSpid:").and_then(|text| text.split_whitespace().last()?.parse().ok());
    Ok(inner.unwrap_or(directory.pid()))
}

/// A descriptor that becomes readable when the process ends.
pub(crate) fn pidfd(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: a system call on integers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor (close-on-exec) and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Which of these processes have ended; never waits.
pub(crate) fn ended(pidfds: &[&OwnedFd]) -> Vec<bool> {
    let mut polled: Vec<libc::pollfd> = pidfds
        .iter()
        .map(|fd| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    // SAFETY: `polled` is an array of that many entries; with a timeout of zero the call returns at once.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
    polled
        .iter()
        .map(|entry| entry.revents & libc::POLLIN != 0)
        .collect()
}

/// The program that a process runs, as long as it runs it.
///
/// `/proc/PID/pagemap` belongs to the memory that the process had when the file was opened. After `execve`, of the same executable even,
/// that memory is gone and the file empty, while pid, start time and pidfd are as before.
#[derive(Debug)]
pub(crate) struct Program(File);

impl Program {
    /// The program that the process runs now.
    pub(crate) fn of(directory: &ProcessDirectory) -> io::Result<Self> {
        match directory.open_text("pagemap") {
            // A kernel without it. Reading `maps` waits for a lock that the process can hold.
            Err(error) if error.kind() == io::ErrorKind::NotFound => directory.open_text("maps").map(Self),
            opened => opened.map(Self),
        }
    }

    /// Whether the process, still running, has begun another program since.
    pub(crate) fn is_replaced(&self, directory: &ProcessDirectory) -> bool {
        // A process that is ending has no memory either, and never will again. To open its `pagemap` anew would tell as well, but that waits
        // for the end of an `execve`, which can be kept from ending.
        self.is_empty() && directory.has_memory()
    }

    /// Whether the memory is gone. As long as it is not, to read a part of one of `pagemap`'s entries is an error, and that is found out
    /// before any lock is taken.
    fn is_empty(&self) -> bool {
        self.0.read_at(&mut [0], 0).is_ok_and(|bytes| bytes == 0)
    }
}

/// Whose a process is, as the kernel says. One that is gone is nobody's: user `u32::MAX`, which no process has.
fn owner(directory: &ProcessDirectory) -> Owner {
    let cgroup = directory.text("cgroup").unwrap_or_default();
    Owner {
        user: directory.effective_user().unwrap_or(u32::MAX),
        cgroup: cgroup.lines().last().unwrap_or_default().to_owned(),
    }
}

/// The same of a process that is not watched.
#[must_use]
pub fn owner_of(pid: u32) -> Owner {
    let directory = ProcessDirectory::open(pid).ok();
    directory.as_ref().map_or_else(
        || Owner {
            user: u32::MAX,
            cgroup: String::new(),
        },
        owner,
    )
}

/// What a process says of itself.
#[derive(Debug)]
pub(crate) struct Said {
    /// Its name.
    name: String,
    /// The host identity in its environment.
    host: Option<String>,
    /// Other variables that are handed on.
    environment: Vec<(String, String)>,
    /// The variable that the session wants.
    pub(crate) variable: Result<Option<String>, String>,
}

impl Said {
    /// Reads name and environment.
    pub(crate) fn by(directory: &ProcessDirectory, variable: Option<&str>, left_out: &mut LeftOut) -> Self {
        let read = directory.environment();
        let variable = match (variable, &read) {
            (None, _) => Ok(None),
            (Some(name), Ok(environment)) => whole_variable(environment, name),
            (Some(_), Err(problem)) => Err(problem.to_string()),
        };
        // Another user's environment may be unreadable; then there is none.
        let environment = read.unwrap_or_default();
        if environment.is_cut() {
            left_out.count(Limit::Environment);
        }
        let mut host = None;
        let mut variables = Vec::new();
        for (name, found) in ENVIRONMENT.iter().zip(environment.variables(&ENVIRONMENT)) {
            let Some(found) = found else { continue };
            if found.is_cut {
                left_out.count(Limit::Variable);
            }
            let value = String::from_utf8_lossy(found.value).into_owned();
            if *name == HOST_ID {
                host = Some(value).filter(|host| !host.is_empty());
            } else {
                variables.push(((*name).to_owned(), value));
            }
        }
        Self {
            name: directory.text("comm").unwrap_or_default().trim_end().to_owned(),
            host,
            environment: variables,
            variable,
        }
    }
}

/// The variable `name` of an environment; `None` if it has none of that name. It must be UTF-8 and within its limits.
fn whole_variable(environment: &Environment, name: &str) -> Result<Option<String>, String> {
    match environment.variables(&[name]) {
        [Some(found)] if found.is_cut => Err(Limit::Variable.to_string()),
        [Some(found)] => str::from_utf8(found.value)
            .map(|value| Some(value.to_owned()))
            .map_err(|_| format!("{name} is not UTF-8")),
        [None] if environment.is_cut() => Err(Limit::Environment.to_string()),
        [None] => Ok(None),
    }
}

/// Describes a process for the collector. `pages` are library version and host identity that the library wrote into its pages, if it has
/// any.
pub(crate) fn describe(
    directory: &ProcessDirectory,
    started: u64,
    said: Said,
    library: &Library,
    pages: Option<(u32, String)>,
) -> Process {
    let (version, page_host) = pages.unwrap_or_default();
    let named = Some(page_host).filter(|host| !host.is_empty());
    let host_name = said.host.clone().or(named).unwrap_or_else(host_name);
    Process {
        pid: directory.pid(),
        start_time: started,
        name: said.name,
        library: library.path.clone(),
        library_version: if version == 0 { library.version } else { version },
        host_id: said.host.unwrap_or_else(machine_id),
        host_name,
        owner: owner(directory),
        instrumented: library.flavour == Flavour::Instrumented,
        environment: said.environment,
    }
}

/// The host of a process as its spans have it: `NCCL_HOSTID` of its environment, else `named`, else the machine's name.
#[must_use]
pub fn host_of(pid: u32, named: &str) -> String {
    let given = move || {
        let environment = ProcessDirectory::open(pid).ok()?.environment().ok()?;
        whole_variable(&environment, HOST_ID).ok()?
    };
    let given = ask::about(pid, ANSWER_TIME, given).flatten();
    let mut names = given.into_iter().chain([named.to_owned()]);
    names.find(|name| !name.is_empty()).unwrap_or_else(host_name)
}

/// The machine's host name. A process of another UTS namespace may call it something else; its root could tell, and is its own to fill.
fn host_name() -> String {
    let text = host::text("/proc/sys/kernel/hostname").unwrap_or_default();
    text.trim().to_owned()
}

/// `/etc/machine-id`, or the boot id where there is none.
fn machine_id() -> String {
    ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"]
        .iter()
        .filter_map(|path| host::text(path).ok())
        .map(|text| text.trim().to_owned())
        .find(|text| !text.is_empty())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_whose_a_process_is() {
        let own = owner_of(std::process::id());
        // SAFETY: a system call without arguments that cannot fail.
        assert_eq!(own.user, unsafe { libc::geteuid() });
        let cgroup = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        assert_eq!(own.cgroup, cgroup.lines().last().unwrap_or_default());
        assert_eq!(owner_of(u32::MAX).user, u32::MAX);
    }

    #[test]
    fn a_reader_is_gone_only_where_its_number_means_something() {
        let own = own_reader();
        assert_eq!(
            (own.pid(), own.start_time()),
            (std::process::id(), own_start_time())
        );
        assert!(!is_gone(&own, &own));
        let later = Reader::new(own.pid(), own.start_time() + 1, own.namespace());
        assert!(is_gone(&own, &later), "another process of the same number");
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let started = loop {
            // As long as it is no zombie it can be asked.
            match std::fs::read_to_string(format!("/proc/{}/stat", child.id())) {
                Ok(stat) if parse_stat(&stat).is_none() => break own.start_time(),
                _ => std::thread::yield_now(),
            }
        };
        let zombie = Reader::new(child.id(), started, own.namespace());
        assert!(is_gone(&own, &zombie), "a zombie reads nothing any more");
        child.wait().unwrap();
        assert!(is_gone(&own, &zombie));
        for namespace in [0, own.namespace() + 1] {
            let elsewhere = Reader::new(child.id(), started, namespace);
            assert!(
                !is_gone(&own, &elsewhere),
                "it may be alive and not be seen from here"
            );
        }
        assert!(!is_gone(&own, &Reader::new(0, 0, own.namespace())));
        assert!(!is_gone(&own, &Reader::new(u32::MAX, 0, own.namespace())));
    }

    #[test]
    fn any_variable_of_an_environment_is_found() {
        use std::{
            io::{Read as _, Write as _},
            os::unix::ffi::OsStrExt as _,
        };

        let mut child = std::process::Command::new("cat")
            .env("MYJOB", "seven")
            .env("LATIN", std::ffi::OsStr::from_bytes(b"\xe9"))
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Once it has echoed a byte it is `cat` for certain, and has its own environment.
        child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let directory = ProcessDirectory::open(child.id()).unwrap();
        let of = |name| Said::by(&directory, Some(name), &mut LeftOut::default()).variable;
        assert_eq!(of("MYJOB").unwrap().as_deref(), Some("seven"));
        assert_eq!(of("MYJOB_").unwrap(), None);
        assert!(of("LATIN").is_err());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(of("MYJOB").is_err());
    }

    #[test]
    fn a_pidfd_tells_the_end_of_its_process() {
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let fd = pidfd(child.id()).unwrap();
        assert_eq!(ended(&[&fd]), [false]);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(ended(&[&fd]), [true]);
    }
}
