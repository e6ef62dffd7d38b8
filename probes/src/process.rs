//! What `/proc` says about a process.

use std::{
    fs, io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::fs::{FileExt as _, MetadataExt as _},
    },
};

use ringsight_records::pages::Reader;

use crate::{
    error::AttachError,
    sample::Process,
    target::{Flavour, Library, process_error},
};

/// Environment variables that are handed on for resource attributes.
const ENVIRONMENT: [&str; 16] = [
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
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Start time of this process. By `/proc/self`: the number that it has in its own pid namespace may be another process's in
/// the namespace that `/proc` was mounted for.
#[must_use]
pub fn own_start_time() -> u64 {
    fs::read_to_string("/proc/self/stat")
        .ok()
        .and_then(|stat| parse_stat(&stat))
        .unwrap_or(0)
}

/// Field 22 of a `stat` line. The name in field 2 may hold anything, so fields are counted from its closing parenthesis.
fn parse_stat(stat: &str) -> Option<u64> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// This process as it signs the lease of a ring.
#[must_use]
pub fn own_reader() -> Reader {
    // 0, which no namespace has, if there is no /proc to ask.
    let namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
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
    // It may be a zombie, or another process of that number. A `/proc` of our own namespace tells: this process has one
    // number in it.
    let numbers = fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| Some(status_field(&status, "NSpid:")?.split_whitespace().count()));
    numbers == Some(1)
        && fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| parse_stat(&stat).is_none_or(|started| started != reader.start_time()))
}

/// Whether a process is stopped by a signal or a debugger; `None` if it is gone.
#[must_use]
pub fn is_stopped(pid: u32) -> Option<bool> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may hold anything; the state follows it.
    let state = stat.rsplit(')').next()?.split_whitespace().next()?;
    Some(matches!(state, "T" | "t"))
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

/// The process that thread `tid` belongs to.
pub(crate) fn process_of(tid: u32) -> Result<u32, AttachError> {
    let status = fs::read_to_string(format!("/proc/{tid}/status"))
        .map_err(|error| process_error(tid, "status", &error))?;
    status_field(&status, "Tgid:")
        .and_then(|text| text.parse().ok())
        .ok_or(AttachError::Gone { pid: tid })
}

/// The process's id in its own pid namespace.
pub(crate) fn innermost_pid(pid: u32) -> io::Result<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let inner = status_field(&status, "NSpid:").and_then(|text| text.split_whitespace().last()?.parse().ok());
    Ok(inner.unwrap_or(pid))
}

fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .map(str::trim)
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
/// `/proc/<pid>/maps` belongs to the memory that the process had when the file was opened. After `execve`, of the same
/// executable even, that memory is gone and the file empty, while pid, start time and pidfd are as before.
#[derive(Debug)]
pub(crate) struct Program(fs::File);

impl Program {
    /// The program that `pid` runs now.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        fs::File::open(format!("/proc/{pid}/maps")).map(Self)
    }

    /// Whether the process, still running, has begun another program since.
    pub(crate) fn is_replaced(&self, pid: u32) -> bool {
        let is_empty = |file: &fs::File| file.read_at(&mut [0], 0).is_ok_and(|bytes| bytes == 0);
        // A process that is ending has no memory either, and never will again.
        is_empty(&self.0) && Self::of(pid).is_ok_and(|now| !is_empty(&now.0))
    }
}

/// The variable `name` of a process's environment as it was started; `None` if it has none of that name.
///
/// # Errors
/// If the environment cannot be read, or the value is not UTF-8.
pub fn environment_variable(pid: u32, name: &str) -> io::Result<Option<String>> {
    let environ = fs::read(format!("/proc/{pid}/environ"))?;
    variable(&environ, name)
        .map(|value| {
            let wrong = |_| io::Error::new(io::ErrorKind::InvalidData, format!("{name} is not UTF-8"));
            str::from_utf8(value).map(str::to_owned).map_err(wrong)
        })
        .transpose()
}

/// A variable among the `NAME=value` entries, each ended by a zero.
fn variable<'a>(environ: &'a [u8], name: &str) -> Option<&'a [u8]> {
    environ
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
}

/// Describes a process for the collector. `host` is the identity that the library wrote into its pages, if it has any.
pub(crate) fn describe(pid: u32, started: u64, library: &Library, pages: Option<(u32, String)>) -> Process {
    let read = |what: &str| fs::read_to_string(format!("/proc/{pid}/{what}")).unwrap_or_default();
    // Another user's environment may be unreadable; then there is none.
    let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let variable =
        |name: &str| variable(&environ, name).map(|value| String::from_utf8_lossy(value).into_owned());
    let host = variable("NCCL_HOSTID").filter(|host| !host.is_empty());
    let (version, page_host) = pages.unwrap_or_default();
    let named = Some(page_host).filter(|host| !host.is_empty());
    let host_name = host.clone().or(named).unwrap_or_else(|| host_name(pid));
    Process {
        pid,
        start_time: started,
        name: read("comm").trim_end().to_owned(),
        library: library.path.clone(),
        library_version: if version == 0 { library.version } else { version },
        host_id: host.unwrap_or_else(machine_id),
        host_name,
        instrumented: library.flavour == Flavour::Instrumented,
        environment: ENVIRONMENT
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), variable(name)?)))
            .collect(),
    }
}

/// UTS host name as the process has it: ours, if it is in our namespace; else what its root says.
fn host_name(pid: u32) -> String {
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/uts")).ok();
    let own = || fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let text = if namespace(&pid.to_string()) == namespace("self") {
        own()
    } else {
        fs::read_to_string(format!("/proc/{pid}/root/etc/hostname")).unwrap_or_else(|_| own())
    };
    text.trim().to_owned()
}

/// `/etc/machine-id`, or the boot id where there is none.
fn machine_id() -> String {
    ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"]
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok())
        .map(|text| text.trim().to_owned())
        .find(|text| !text.is_empty())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_is_counted_from_the_last_parenthesis() {
        let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = |state: &str| format!("77 (a) b) (c) {state} {}", fields.join(" "));
        assert_eq!(parse_stat(&stat("S")), Some(22));
        assert_eq!(
            parse_stat(&stat("Z")),
            None,
            "a zombie reads and writes nothing any more"
        );
        assert_eq!(parse_stat("77 (short) S 1 2"), None);
        assert_eq!(parse_stat(""), None);
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
            match fs::read_to_string(format!("/proc/{}/stat", child.id())) {
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

        let environ = b"A=1\0MYJOB=seven\0MYJOB_ID=8\0EMPTY=\0rubbish\0X=a=b\0";
        for (name, value) in [
            ("MYJOB", Some(&b"seven"[..])),
            ("EMPTY", Some(b"")),
            ("X", Some(b"a=b")),
            ("MYJO", None),
            ("rubbish", None),
        ] {
            assert_eq!(variable(environ, name), value, "{name}");
        }
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
        let of = |name| environment_variable(child.id(), name);
        assert_eq!(of("MYJOB").unwrap().as_deref(), Some("seven"));
        assert_eq!(of("MYJOB_").unwrap(), None);
        assert!(of("LATIN").is_err());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(environment_variable(child.id(), "MYJOB").is_err());
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
