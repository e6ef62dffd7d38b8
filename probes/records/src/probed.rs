//! What eBPF programs and their loader share besides [`crate::ProbedRecord`]: map keys and values, the event of a stock
//! library's call. Both sides come from one build, so these layouts need no version.

use crate::Kind;

/// Bytes of the eBPF ring buffer.
pub const RING_BYTES: u32 = 16 << 20;
/// Most processes watched at once.
pub const PROCESSES: u32 = 1024;
/// Most pid namespaces that watched processes may live in.
pub const NAMESPACES: u32 = 8;
/// Most calls that may be under way at once in all watched processes.
pub const PENDING_CALLS: u32 = 16384;
/// Integer arguments kept of a call: six in registers, two on the stack (System V x86-64).
pub const ARGUMENTS: usize = 8;
/// Bit of an attach cookie: the function has arguments on the stack.
pub const STACK_ARGUMENTS: u64 = 1 << 63;

/// The attach cookie of a site: library number, place of the site in its list, [`STACK_ARGUMENTS`].
#[must_use]
pub const fn cookie(library: u64, site: u64) -> u64 {
    library << 8 | site
}

/// The library number in a cookie.
#[must_use]
pub const fn library_of(cookie: u64) -> u64 {
    (cookie & !STACK_ARGUMENTS) >> 8
}

/// The site in a cookie.
#[must_use]
pub const fn site_of(cookie: u64) -> usize {
    cookie as usize & 0xff
}

/// Key of a watched process: `namespace` 0 is the initial pid namespace, `n` the n-th entry of the list, from 1.
#[must_use]
pub const fn process_key(namespace: u32, tgid: u32) -> u64 {
    (namespace as u64) << 32 | tgid as u64
}

/// A pid namespace as `stat` of `/proc/<pid>/ns/pid` tells it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct PidNamespace {
    /// Device of the namespace file system, in the kernel's encoding.
    pub device: u64,
    /// Inode; 0 ends the list.
    pub inode: u64,
}

/// What was seen of one process on one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Tally {
    /// Library that the process is watched through: hits of sites of another one are not its own. (Two overlays may name
    /// one file twice; its sites are then probed twice.)
    pub library: u64,
    /// Records by kind that passed a probe function, lost ones included.
    pub hits: [u64; Kind::LIMIT],
    /// Records by kind that found the ring buffer full.
    pub lost: [u64; Kind::LIMIT],
    /// Records that could not be read from the process's memory.
    pub faults: u64,
    /// Calls of a stock library that returned, lost ones included.
    pub calls: u64,
    /// Calls that found the ring buffer full.
    pub calls_lost: u64,
}

impl Tally {
    /// Nothing seen yet of a process that is watched through `library`.
    #[must_use]
    pub const fn new(library: u64) -> Self {
        Self {
            library,
            hits: [0; Kind::LIMIT],
            lost: [0; Kind::LIMIT],
            faults: 0,
            calls: 0,
            calls_lost: 0,
        }
    }
}

/// Key of a call under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct CallKey {
    /// `tgid << 32 | tid` in the initial pid namespace, whichever the process is known in: no two threads have the same.
    pub id: u64,
    /// Which function: calls nest, `ncclGroupEnd` within `ncclAllReduce`.
    pub cookie: u64,
}

/// A call under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PendingCall {
    /// Entry, `CLOCK_MONOTONIC` nanoseconds.
    pub start_ns: u64,
    /// Integer arguments as the registers and the stack held them at entry.
    pub arguments: [u64; ARGUMENTS],
}

/// A finished call, in the ring buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ProbedCall {
    /// Which process, as [`process_key`] makes it.
    pub process: u64,
    /// Attach cookie: which function, see [`STACK_ARGUMENTS`].
    pub cookie: u64,
    /// Entry, `CLOCK_MONOTONIC` nanoseconds.
    pub start_ns: u64,
    /// Return.
    pub end_ns: u64,
    /// Result code.
    pub result: i32,
    /// Thread id, in the pid namespace that the key names.
    pub tid: u32,
    /// Integer arguments at entry.
    pub arguments: [u64; ARGUMENTS],
}

const _: () = assert!(size_of::<ProbedCall>() == 104 && size_of::<Tally>() == 68 * 8);
