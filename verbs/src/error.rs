//! What can go wrong with a device.

use std::{fs, io};

/// A call that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}{hint}")]
pub struct Error {
    what: String,
    source: io::Error,
    hint: String,
}

/// Result of calls about a device.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Of a call that left its reason in `errno`.
    pub(crate) fn last(what: impl Into<String>) -> Self {
        Self::new(what, io::Error::last_os_error())
    }

    /// Of a call that returned its reason.
    pub(crate) fn code(what: impl Into<String>, code: i32) -> Self {
        Self::new(what, io::Error::from_raw_os_error(code))
    }

    pub(crate) fn new(what: impl Into<String>, source: io::Error) -> Self {
        Self {
            what: what.into(),
            source,
            hint: String::new(),
        }
    }

    /// The same, of a call that needs memory to be locked: says so if the limit is what stood in the way.
    pub(crate) fn of_locking(mut self, bytes: usize) -> Self {
        if matches!(
            self.source.raw_os_error(),
            Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM)
        ) && let Some(limit) = locked_limit()
        {
            self.hint = format!(
                " ({bytes} bytes to be locked, of which this process may have {limit}, see ulimit -l: raise the limit, or \
                 set NCCL_IB_DISABLE=1)"
            );
        }
        self
    }

    /// What the system said, as a number.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        self.source.raw_os_error()
    }
}

/// Bytes that this process may lock, if there is a limit for it.
fn locked_limit() -> Option<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is writable.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    (known && limit.rlim_cur != libc::RLIM_INFINITY && !may_lock_all()).then_some(limit.rlim_cur)
}

/// Whether the process has CAP_IPC_LOCK, so that no limit holds for it.
fn may_lock_all() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .is_some_and(|mask| mask >> CAP_IPC_LOCK & 1 == 1)
}
