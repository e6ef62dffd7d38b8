//! What can go wrong, and what to do about it.

use std::{fmt, fs, path::PathBuf};

use ringsight_records::pages::PagesError;

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
    /// Somebody else reads this process's ring.
    #[error(
        "process {pid} is being watched by process {holder} (last sign of life {silent_ms} ms ago): stop that one first; if it hangs, its lease lapses after 5 s"
    )]
    Leased {
        /// Process.
        pid: u32,
        /// The reader.
        holder: u32,
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

impl AttachError {
    pub(crate) fn denied(pid: u32, what: &'static str) -> Self {
        let mut remedy = String::from(if is_of_this_user(pid) {
            "it runs as the same user, but with capabilities that this program lacks, or refuses to be dumped: \
             give this program CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
        } else {
            "run as the process's user, or give this program CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
        });
        if what == "map_files" {
            remedy.push_str(" and CAP_CHECKPOINT_RESTORE");
        }
        if let Some(scope) = sysctl("kernel/yama/ptrace_scope").filter(|scope| *scope > 0) {
            remedy.push_str(&format!(
                " (kernel.yama.ptrace_scope is {scope}: 0 would do for processes of the same user)"
            ));
        }
        Self::Denied { pid, what, remedy }
    }
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
        // Capability numbers: linux/capability.h.
        let missing: Vec<&str> = [(39, "CAP_BPF"), (38, "CAP_PERFMON")]
            .into_iter()
            .filter(|(number, _)| !has_capability(*number))
            .map(|(_, name)| name)
            .collect();
        let mut remedy = Vec::new();
        if missing.is_empty() {
            let (major, minor) = crate::site::kernel_version();
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

/// Whether a process runs as the user that this one runs as, by what everybody may read.
fn is_of_this_user(pid: u32) -> bool {
    let effective = |pid: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        uids.split_whitespace().nth(1).map(str::to_owned)
    };
    let own = effective("self");
    own.is_some() && own == effective(&pid.to_string())
}

fn sysctl(name: &str) -> Option<i64> {
    fs::read_to_string(format!("/proc/sys/{name}"))
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// Whether this process has a capability in effect (CAP_SYS_ADMIN, number 21, includes those asked for here).
fn has_capability(number: u32) -> bool {
    let Ok(status) = fs::read_to_string("/proc/self/status") else {
        return false;
    };
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .unwrap_or(0);
    effective & (1 << number | 1 << 21) != 0
}
