//! Events of the kernel's RDMA stack: what eBPF programs put into their ring buffer, and how they are told what to read.
//!
//! The programs know no structure of the kernel. For each site the loader looks up, in the running kernel's type information,
//! where the wanted fields are, and gives the programs a [`SitePlan`]: a few chains of offsets to follow. So one object serves
//! every kernel, and what changes between kernels is data. Both sides come from one build: the layouts need no version.

/// Most sites: numbers in a [`NetworkRecord`], entries of the plans and of the counters.
pub const SITES: usize = 32;
/// Numbers that a record has room for.
pub const VALUES: usize = 5;
/// Bytes of a device's name that are kept, with the zero that ends it.
pub const NAME: usize = 16;
/// Pointers that a chain may follow.
pub const STEPS: usize = 4;
/// Arguments of a function that a chain may begin at.
pub const ARGUMENTS: usize = 6;
/// Number of the one site that is a tracepoint: refused commands of mlx5 devices.
pub const COMMAND_SITE: u64 = SITES as u64 - 1;
/// [`Chain::size`] of the upper half of an 8-byte argument.
pub const UPPER: u8 = 0x84;
/// [`Chain::source`] of what the function returns.
pub const RESULT: u8 = ARGUMENTS as u8;
/// [`Chain::source`] of a chain that gives 0.
pub const NOTHING: u8 = 0xff;
/// Most calls that may be between their entry and their return at once.
pub const PENDING: u32 = 1024;

/// How to get one number, or one text: `source` is an argument; all but the last of `offsets[..steps]` are added to it and
/// followed as pointers, the last one is added and says where the number is. With no step the argument itself is the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Chain {
    /// Place of the argument, [`RESULT`] or [`NOTHING`].
    pub source: u8,
    /// How many of the offsets there are.
    pub steps: u8,
    /// Bytes of the number: 1, 2 or 4, or [`UPPER`].
    pub size: u8,
    /// Zero.
    pub reserved: u8,
    /// Offsets in bytes. The first may be negative: from a member to the structure that holds it.
    pub offsets: [i32; STEPS],
}

impl Chain {
    /// Gives 0.
    pub const NONE: Self = Self {
        source: NOTHING,
        steps: 0,
        size: 4,
        reserved: 0,
        offsets: [0; STEPS],
    };
}

/// Bits of [`SitePlan::flags`].
pub mod flags {
    /// The site is passed in the context of the process that it concerns: only watched ones are recorded.
    pub const PROCESS: u32 = 1;
}

/// What to record at a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct SitePlan {
    /// [`flags`].
    pub flags: u32,
    /// Where the device's name is.
    pub device: Chain,
    /// The record's numbers.
    pub values: [Chain; VALUES],
}

impl SitePlan {
    /// Records that the site was passed, and nothing else.
    pub const NONE: Self = Self {
        flags: 0,
        device: Chain::NONE,
        values: [Chain::NONE; VALUES],
    };
}

/// One event of the kernel's RDMA stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct NetworkRecord {
    /// When the site was entered, `CLOCK_MONOTONIC` nanoseconds.
    pub time_ns: u64,
    /// In whose context, as [`crate::probed::process_key`] makes it; 0 where the site is passed in nobody's.
    pub process: u64,
    /// From entry to return, nanoseconds, at most 4 s; 0 where only the entry is probed.
    pub duration_ns: u32,
    /// What the function returned, as an `int`; 0 where only the entry is probed. Of a function that returns a pointer the error in
    /// it, else 0.
    pub result: i32,
    /// Number of the site.
    pub site: u16,
    /// Zero.
    pub reserved: u16,
    /// Numbers, by the site's plan.
    pub values: [u32; VALUES],
    /// Begin of the device's name, ended by a zero; empty if it could not be read.
    pub device: [u8; NAME],
}

const _: () = assert!(size_of::<NetworkRecord>() == 64 && align_of::<NetworkRecord>() == 8);
const _: () = assert!(size_of::<Chain>() == 20 && size_of::<SitePlan>() == 4 + 20 * (1 + VALUES));

/// Key of a call that has been entered and has not returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PendingKey {
    /// `tgid << 32 | tid` in the initial pid namespace.
    pub id: u64,
    /// Number of the site.
    pub site: u64,
}

/// What is kept of such a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct PendingSite {
    /// Entry, `CLOCK_MONOTONIC` nanoseconds.
    pub start_ns: u64,
    /// Whose it is, as [`NetworkRecord::process`].
    pub process: u64,
    /// Arguments at entry.
    pub arguments: [u64; ARGUMENTS],
}

/// What happened at the sites of one CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct NetworkTally {
    /// Events recorded, lost ones included, by site.
    pub hits: [u64; SITES],
    /// Events that found the ring buffer full, by site.
    pub lost: [u64; SITES],
}
