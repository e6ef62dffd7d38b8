//! System calls of this process, counted by the kernel: `perf_event_open` on `raw_syscalls:sys_enter`.

use std::{
    fs::File,
    io::Read as _,
    os::fd::{AsRawFd as _, FromRawFd as _},
};

/// `struct perf_event_attr` as of its first version.
#[repr(C)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup: u32,
    bp_type: u32,
    bp_address: u64,
}

const TRACEPOINT: u32 = 2;
/// Threads that are made later count, too.
const INHERIT: u64 = 1 << 1;
const SET_FILTER: libc::Ioctl = 0x4008_2406;

/// A count; `None` where the kernel has no such event, or does not allow it. The time of day is not counted: on a machine whose clock
/// is sound it takes no call.
pub(crate) struct Calls(Option<File>);

impl Calls {
    /// From here on, of this thread and those that it makes.
    pub(crate) fn of_all() -> Self {
        Self(Self::open(INHERIT))
    }

    /// From here on, of this thread alone.
    pub(crate) fn of_this_thread() -> Self {
        Self(Self::open(0))
    }

    fn open(flags: u64) -> Option<File> {
        let id = std::fs::read_to_string("/sys/kernel/tracing/events/raw_syscalls/sys_enter/id").ok()?;
        let attributes = Attributes {
            kind: TRACEPOINT,
            size: size_of::<Attributes>() as u32,
            config: id.trim().parse().ok()?,
            sample_period: 0,
            sample_type: 0,
            read_format: 0,
            flags,
            wakeup: 0,
            bp_type: 0,
            bp_address: 0,
        };
        // SAFETY: attributes of the size that they name; this thread, on any processor.
        let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attributes, 0, -1, -1, 8_u64) };
        // SAFETY: just opened, if it is one.
        let file = (fd >= 0).then(|| unsafe { File::from_raw_fd(fd as i32) })?;
        let filter = c"id != 228 && id != 96 && id != 201";
        // SAFETY: a string that lives until the call returns.
        let set = unsafe { libc::ioctl(file.as_raw_fd(), SET_FILTER, filter.as_ptr()) };
        (set == 0).then_some(file)
    }

    /// How many so far; 0 if they cannot be counted.
    pub(crate) fn count(&self) -> u64 {
        let mut bytes = [0; 8];
        let read = self.0.as_ref().map(|mut file| file.read(&mut bytes));
        match read {
            Some(Ok(8)) => u64::from_ne_bytes(bytes),
            _ => 0,
        }
    }
}
