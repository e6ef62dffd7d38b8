//! What can go wrong, and what to do about it.

use std::{fmt, path::PathBuf};

use ringsight_records::pages::PagesError;

use crate::{host, limits::Limit, procfs};

/// Why a process cannot be watched.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AttachError {
    /// There is no such process.
    #[error("process {pid} does not exist (any more); list the running ones with `ps`")]
    Gone {
        /// Process.
        pid: u32,
    },
    /// It is being watched by this session already.
    #[error("process {pid} is being watched already")]
    Twice {
        /// Process.
        pid: u32,
    },
    /// The process belongs to somebody else, or the kernel keeps it from us.
    #[error("no right to look into process {pid} (/proc/{pid}/{what}): {remedy}")]
    Denied {
        /// Process.
        pid: u32,
        /// What could not be read.
        what: &'static str,
        /// The missing capability or the setting that is in the way.
        remedy: String,
    },
    /// Nothing that it maps is a communication library.
    #[error(
        "process {pid} has no communication library: none of the {} files that it maps exports ringsight_probe_* or ncclAllReduce ({}); \
         attach after the library was loaded, and to the process that runs the training, not to its launcher",
        looked_at.len(), Listed(looked_at)
    )]
    NoLibrary {
        /// Process.
        pid: u32,
        /// Files that were looked at.
        looked_at: Vec<String>,
    },
    /// No library was found before a limit was reached.
    #[error(
        "process {pid}: no communication library was found, and not everything was looked at: {limit}; attach again if the machine was busy"
    )]
    Limit {
        /// Process.
        pid: u32,
        /// The limit.
        limit: Limit,
    },
    /// The library has no symbol table.
    #[error("process {pid} uses {}, which has no symbols at all: install one whose dynamic symbols were kept (`strip --strip-unneeded` keeps them)", path.display())]
    Stripped {
        /// Process.
        pid: u32,
        /// The library.
        path: PathBuf,
    },
    /// The library file cannot be read.
    #[error("{}: {problem}", path.display())]
    Library {
        /// The library.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The shared pages are of another version, or damaged.
    #[error("process {pid}: {source}")]
    Pages {
        /// Process.
        pid: u32,
        /// What is wrong.
        source: PagesError,
    },
    /// What has the name of its shared pages is not what its library makes.
    #[error(
        "process {pid}: descriptor {descriptor} has the name of shared pages and is not opened: {problem}"
    )]
    Refused {
        /// Process.
        pid: u32,
        /// The descriptor, in the process.
        descriptor: String,
        /// What is wrong.
        problem: Refusal,
    },
    /// Somebody else reads this process's ring.
    #[error("process {pid} is being watched by {holder} (last sign of life {silent_ms} ms ago): {}", holder.remedy())]
    Leased {
        /// Process.
        pid: u32,
        /// The reader.
        holder: LeaseHolder,
        /// Milliseconds since its last heartbeat.
        silent_ms: u64,
    },
    /// eBPF cannot be used, and without it this process cannot be watched.
    #[error("process {pid}: {unavailable}")]
    Ebpf {
        /// Process.
        pid: u32,
        /// Why, and what to do.
        unavailable: Unavailable,
    },
    /// Attaching failed.
    #[error("cannot attach to {} of process {pid}: {problem}", library.display())]
    Attach {
        /// Process.
        pid: u32,
        /// The library.
        library: PathBuf,
        /// What the kernel said.
        problem: String,
    },
    /// Anything else that a system call may say.
    #[error("process {pid}, {what}: {error}")]
    Io {
        /// Process.
        pid: u32,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        error: String,
    },
}

/// Why a file is not taken for shared pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A device, a pipe, a file with a name, or a file system of somebody's: opening it could do anything.
    #[error("it is no memory file of the kernel")]
    NotMemory,
    /// Its owner could shrink it, which would end whoever reads it.
    #[error("it is not sealed against a change of its size, as the library seals its pages")]
    Unsealed,
}

/// Who holds the lease of a ring. The lease is in memory of the target, so its words are checked before anybody is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseHolder {
    /// A process that has the pages mapped, as the kernel says.
    Process(u32),
    /// The lease is signed in another pid namespace: the number there means another process here, if any.
    OtherNamespace,
    /// The lease has been taken and not been signed yet.
    Unnamed,
    /// The lease is signed by a process that cannot be seen to read the pages: it is hidden from this user, or the target lies.
    Unverified,
}

impl LeaseHolder {
    fn remedy(self) -> &'static str {
        match self {
            Self::Process(_) => "stop that one first; if it hangs, its lease lapses after 5 s",
            Self::OtherNamespace => {
                "stop the collector that runs in a container with it, if there is one; if the lease does not lapse 5 s later, \
                 the process itself keeps others out"
            }
            Self::Unnamed | Self::Unverified => {
                "its lease lapses 5 s after its last sign of life; if it never does, the process itself keeps others out"
            }
        }
    }
}

impl fmt::Display for LeaseHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) => write!(f, "process {pid}"),
            Self::OtherNamespace => f.write_str("a reader of another pid namespace"),
            Self::Unnamed => f.write_str("a reader that has just begun"),
            Self::Unverified => f.write_str("a reader that cannot be identified"),
        }
    }
}

impl AttachError {
    pub(crate) fn denied(pid: u32, what: &'static str) -> Self {
        let mounts = host::text("/proc/self/mountinfo").unwrap_or_default();
        let remedy = remedy(
            what,
            procfs::is_of_this_user(pid),
            effective_capabilities(),
            hidden(&mounts),
        );
        Self::Denied { pid, what, remedy }
    }
}

/// Capability numbers: linux/capability.h.
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: u32 = 39;
const CAP_CHECKPOINT_RESTORE: u32 = 40;

/// What would let a program with the capabilities `held` read `/proc/<pid>/<what>`. `hidden` is how `/proc` hides processes.
///
/// The kernel asks for `PTRACE_MODE_READ`, which kernel.yama.ptrace_scope has no say in, for the folder's permissions, which
/// are the process's user's alone, and to follow the links of `map_files` for a capability of its own.
fn remedy(what: &str, same_user: bool, held: u64, hidden: Option<&str>) -> String {
    let has = |number: u32| held & 1 << number != 0;
    let mut missing = Vec::new();
    if !has(CAP_SYS_PTRACE) {
        missing.push("CAP_SYS_PTRACE");
    }
    if !same_user && what != "maps" && !has(CAP_DAC_READ_SEARCH) && !has(CAP_DAC_OVERRIDE) {
        missing.push("CAP_DAC_READ_SEARCH");
    }
    if what == "map_files" && !has(CAP_CHECKPOINT_RESTORE) && !has(CAP_SYS_ADMIN) {
        missing.push("CAP_CHECKPOINT_RESTORE");
    }
    let missing = missing.join(" and ");
    let mut remedy = match (missing.is_empty(), same_user) {
        (true, _) => {
            "this program has the capabilities that it takes, so a security module refuses it, or they are \
                      those of a user namespace that the process is not in"
                .to_owned()
        }
        (false, true) => format!(
            "it runs as the same user, but with capabilities that this program lacks, or refuses to be dumped: give this \
             program {missing}"
        ),
        (false, false) => format!("run as the process's user, or give this program {missing}"),
    };
    if let Some(hidden) = hidden.filter(|_| !has(CAP_SYS_PTRACE)) {
        remedy.push_str(&format!(
            " (/proc is mounted with {hidden}: it shows a process to its own user only)"
        ));
    }
    remedy
}

/// The `hidepid` option of the `/proc` in a `mountinfo` text, if it hides anything.
fn hidden(mounts: &str) -> Option<&str> {
    // The last mount on a place is the one that is seen. Options of the file system come last.
    let mount = mounts
        .lines()
        .rfind(|line| line.split(' ').nth(4) == Some("/proc"))?;
    mount
        .rsplit(' ')
        .next()?
        .split(',')
        .find(|option| option.starts_with("hidepid=") && !matches!(*option, "hidepid=0" | "hidepid=off"))
}

/// At most eight names of a list.
struct Listed<'a>(&'a [String]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0[..self.0.len().min(8)].join(", "))?;
        if self.0.len() > 8 {
            write!(f, ", and {} more", self.0.len() - 8)
        } else {
            Ok(())
        }
    }
}

/// Why eBPF cannot be used here: one message that names what is missing. The session goes on with the shared ring alone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("eBPF probes are not available ({problem}): {remedy}")]
pub struct Unavailable {
    /// What failed.
    pub problem: String,
    /// The capability, setting or kernel that would do.
    pub remedy: String,
}

impl Unavailable {
    /// Explains a failed step by the rights of this process and the kernel's settings.
    pub(crate) fn explain(problem: impl fmt::Display) -> Self {
        let problem = problem.to_string();
        let held = effective_capabilities();
        // CAP_SYS_ADMIN includes both.
        let missing: Vec<&str> = [(CAP_BPF, "CAP_BPF"), (CAP_PERFMON, "CAP_PERFMON")]
            .into_iter()
            .filter(|(number, _)| held & (1 << number | 1 << CAP_SYS_ADMIN) == 0)
            .map(|(_, name)| name)
            .collect();
        let mut remedy = Vec::new();
        if missing.is_empty() {
            let (major, minor) = crate::kernel::version();
            if (major, minor) < (5, 15) {
                remedy.push(format!(
                    "this kernel is {major}.{minor}, probes need 5.15 or newer"
                ));
            } else {
                remedy.push(
                    "the capabilities are there, so a security module, a seccomp filter or kernel lockdown refuses it".into(),
                );
            }
        } else {
            remedy.push(format!(
                "this process lacks {}: run it as root or with these capabilities",
                missing.join(" and ")
            ));
            if let Some(level) = sysctl("kernel/unprivileged_bpf_disabled").filter(|level| *level > 0) {
                remedy.push(format!("kernel.unprivileged_bpf_disabled is {level}"));
            }
            if let Some(level) = sysctl("kernel/perf_event_paranoid").filter(|level| *level > 1) {
                remedy.push(format!("kernel.perf_event_paranoid is {level}"));
            }
        }
        Self {
            problem,
            remedy: remedy.join("; "),
        }
    }
}

fn sysctl(name: &str) -> Option<i64> {
    host::text(&format!("/proc/sys/{name}")).ok()?.trim().parse().ok()
}

/// Capabilities in effect in this process, a bit each.
fn effective_capabilities() -> u64 {
    let status = host::text("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_missing_is_asked_for() {
        let bit = |number: u32| 1u64 << number;
        for (what, same_user, held, expected) in [
            ("fd", false, 0, "CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"),
            ("fd", false, bit(CAP_SYS_PTRACE), "CAP_DAC_READ_SEARCH"),
            ("fd", false, bit(CAP_DAC_READ_SEARCH), "CAP_SYS_PTRACE"),
            ("fd", false, bit(CAP_DAC_OVERRIDE), "CAP_SYS_PTRACE"),
            ("fd", true, 0, "CAP_SYS_PTRACE"),
            ("maps", false, 0, "CAP_SYS_PTRACE"),
            (
                "map_files",
                false,
                bit(CAP_SYS_PTRACE) | bit(CAP_DAC_OVERRIDE),
                "CAP_CHECKPOINT_RESTORE",
            ),
            ("map_files", true, bit(CAP_SYS_ADMIN), "CAP_SYS_PTRACE"),
        ] {
            let text = remedy(what, same_user, held, None);
            assert!(
                text.ends_with(&format!("give this program {expected}")),
                "{what} {same_user} {held:x}: {text}"
            );
            assert_eq!(text.contains("same user"), same_user, "{text}");
        }
        let all = remedy("fd", false, u64::MAX, Some("hidepid=2"));
        assert!(all.contains("security module") && !all.contains("CAP_"), "{all}");
        assert!(
            !all.contains("hidepid"),
            "it hides nothing from this program: {all}"
        );
        assert!(remedy("fd", false, 0, Some("hidepid=2")).contains("mounted with hidepid=2"));
    }

    #[test]
    fn a_proc_that_hides_processes_is_recognised() {
        let mount = |options: &str| {
            format!(
                "1 0 8:1 / / rw - ext4 /dev/sda rw\n22 27 0:21 / /proc rw,nosuid shared:5 - proc proc {options}\n"
            )
        };
        assert_eq!(hidden(&mount("rw")), None);
        assert_eq!(hidden(&mount("rw,hidepid=off")), None);
        assert_eq!(
            hidden(&mount("rw,gid=7,hidepid=invisible")),
            Some("hidepid=invisible")
        );
        assert_eq!(hidden(&(mount("rw,hidepid=2") + &mount("rw"))), None);
        assert_eq!(hidden("rubbish"), None);
    }
}
