//! The shared pages of an observed process: one memfd, named [`MEMFD_NAME`], that the library creates at its first
//! communicator and that a collector finds among `/proc/<pid>/fd` and maps.
//!
//! ```text
//! Header | communicator table | descriptions of eager operations | descriptions of captured operations | ring | connection table |
//! proxy table | verdict table
//! ```
//! A reader takes offsets and counts from the header, after [`Header::geometry`] has checked them against the file's
//! size: the pages belong to the target, and a target may be broken.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{
    Description, DescriptionSlot, Kind, VERSION,
    clock::DeviceSlot,
    connection::ConnectionSlot,
    proxies::ProxySlot,
    ring::{RingCursor, Slot},
    verdicts::{GivenVerdict, VerdictSlot},
};

pub use crate::{
    communicator::{APART_BYTES, CommSlot, Communicator},
    lease::{Holder, LEASE_NS, Lease, Reader},
    text::{put_text, text},
};

/// Name of the memfd: its link in `/proc/<pid>/fd` reads `/memfd:ringsight-pages (deleted)`.
pub const MEMFD_NAME: &str = "ringsight-pages";
/// First word of the header: "ringsigh" in ASCII, little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"ringsigh");

/// Entries of the communicator table.
pub const COMM_ENTRIES: usize = 1024;
/// Entries of the description table of operations that run once: how many may be in flight at once and be described.
pub const DESCRIPTION_ENTRIES: usize = 4096;
/// Entries of that of captured operations, as many as graphs may have at once. Inference engines capture a hundred collectives for each of
/// a hundred sizes. Memory is only taken by what is used: low entries first.
pub const CAPTURED_ENTRIES: usize = 1 << CAPTURED_BITS;
/// Bits of a captured operation's number that name its entry.
pub const CAPTURED_BITS: u32 = 15;
/// Entries of the connection table: ends of connections between nodes that go over RDMA.
pub const CONNECTION_ENTRIES: usize = 1024;
/// Entries of the proxy table: connections between nodes, over whatever they go.
pub const PROXY_ENTRIES: usize = 1024;
/// Entries of the verdict table: the last ones of all communicators of the process.
pub const VERDICT_ENTRIES: usize = 16;
/// Devices of which the pages say how their clocks stand: those with the lowest numbers.
pub const DEVICES: usize = 16;
/// Slots of the ring: a reader that drains each millisecond may be held up for 65 ms at 1 M records/s.
pub const RING_SLOTS: usize = 1 << 16;

/// Entries of captured operations are looked at in pieces as long as these have any that is used: more than are given out before the first
/// of them is described.
const USED_TOGETHER: usize = 1024;

/// Operation numbers with this bit belong to captured operations: `CAPTURED | generation << CAPTURED_BITS | slot`.
pub const CAPTURED: u32 = 1 << 31;

/// A count on a cache line of its own: different threads count different kinds.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Count(AtomicU64);

impl core::ops::Deref for Count {
    type Target = AtomicU64;

    fn deref(&self) -> &AtomicU64 {
        &self.0
    }
}

/// Bytes of [`Header::host`].
pub const HOST_BYTES: usize = 64;

/// First pages of the shared pages. Every field is an atomic: the process whose pages they are may write any of them at any time,
/// whatever it has promised, so a reader copies a word before it checks it.
#[derive(Debug)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`]; written last, with release order, when everything else stands.
    pub magic: AtomicU64,
    /// [`VERSION`] of the layout.
    pub version: AtomicU32,
    /// Library version as `ncclGetVersion` gives it.
    pub library_version: AtomicU32,
    /// Process that owns the pages, in its own pid namespace.
    pub pid: AtomicU32,
    /// `sizeof(CommEntry)`, so that tables may grow.
    pub comm_bytes: AtomicU32,
    /// Process start time in clock ticks since boot (`/proc/<pid>/stat` field 22).
    pub start_time: AtomicU64,
    /// Offset of the communicator table from the start of the file, bytes; then its entries.
    pub comm_offset: AtomicU32,
    /// Entries of the communicator table.
    pub comm_entries: AtomicU32,
    /// Offset of the table of eager operations' descriptions.
    pub eager_offset: AtomicU32,
    /// Its entries, a power of two; slot = operation number modulo entries.
    pub eager_entries: AtomicU32,
    /// Offset of the table of captured operations' descriptions.
    pub captured_offset: AtomicU32,
    /// Its entries, a power of two; slot = operation number modulo entries.
    pub captured_entries: AtomicU32,
    /// Offset of the ring.
    pub ring_offset: AtomicU32,
    /// Its slots, a power of two.
    pub ring_slots: AtomicU32,
    /// Bytes of the whole file.
    pub file_bytes: AtomicU64,
    /// Host identity as the library sees it, `NCCL_HOSTID` if set, else the host name, in words of its bytes; see [`Header::host`].
    pub host: [AtomicU64; HOST_BYTES / 8],
    /// Communicators that found the table full and are not described.
    pub comm_overflow: AtomicU64,
    /// Captured operations that found the table full and are not described.
    pub captured_overflow: AtomicU64,
    /// Who may read the ring.
    pub lease: Lease,
    /// Positions of the ring, each on cache lines of its own.
    pub cursor: RingCursor,
    /// Events by kind since the pages were made: sparse ones always, dense ones while the ring was armed for them.
    pub emitted: [Count; Kind::LIMIT],
    /// Events by kind that found the ring full.
    pub lost: [AtomicU64; Kind::LIMIT],
    /// Events by kind that readers have accounted for, by any carrier: read, or known to be lost. What `emitted` is ahead
    /// of it when a reader comes, its predecessor never saw.
    pub taken: [AtomicU64; Kind::LIMIT],
    /// By device number.
    pub devices: [DeviceSlot; DEVICES],
    /// Offset of the connection table.
    pub connection_offset: AtomicU32,
    /// Its entries, a power of two; 0 where the library has no such table.
    pub connection_entries: AtomicU32,
    /// Connections that found the table full and are not described.
    pub connection_overflow: AtomicU64,
    /// Offset of the proxy table.
    pub proxy_offset: AtomicU32,
    /// Its entries, a power of two; 0 where the library has no such table.
    pub proxy_entries: AtomicU32,
    /// Connections that found the proxy table full and are not told of.
    pub proxy_overflow: AtomicU64,
    /// Offset of the verdict table.
    pub verdict_offset: AtomicU32,
    /// Its entries, a power of two; 0 where the library has no such table.
    pub verdict_entries: AtomicU32,
    /// Verdicts given since the pages were made.
    pub verdicts: AtomicU64,
}

/// Bytes from the start of the file to the first table that the writer lays out.
const HEADER_BYTES: usize = 8192;
const _: () = assert!(size_of::<Header>() <= HEADER_BYTES);
// What a writer looks at before it writes is on one cache line.
#[cfg(not(loom))]
const _: () = assert!(
    core::mem::offset_of!(Header, lease) / 64 == (core::mem::offset_of!(Header, cursor) - 1) / 64
        && size_of::<Lease>() == 40
);

/// Checked places of the tables in the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Offset and entries of the communicator table.
    pub comms: (usize, usize),
    /// Offset and entries of the eager descriptions.
    pub eager: (usize, usize),
    /// Offset and entries of the captured descriptions.
    pub captured: (usize, usize),
    /// Offset and slots of the ring.
    pub ring: (usize, usize),
    /// Offset and entries of the connection table.
    pub connections: (usize, usize),
    /// Offset and entries of the proxy table.
    pub proxies: (usize, usize),
    /// Offset and entries of the verdict table.
    pub verdicts: (usize, usize),
    /// Bytes of the whole file.
    pub file_bytes: usize,
}

/// Why pages cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagesError {
    /// Not ours, or not ready yet.
    Magic(u64),
    /// Written by a library with another layout.
    Version(u32),
    /// A table lies outside the file or is misaligned; names the table.
    Bounds(&'static str),
}

impl core::fmt::Display for PagesError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Magic(magic) => write!(f, "not ringsight's shared pages (magic {magic:#018x})"),
            Self::Version(version) => write!(
                f,
                "shared pages have layout version {version}, this collector reads {VERSION}: use the collector of the library's release"
            ),
            Self::Bounds(table) => write!(f, "shared pages are damaged: the {table} lies outside the file"),
        }
    }
}

impl core::error::Error for PagesError {}

impl Geometry {
    /// The geometry that a writer lays out.
    #[must_use]
    pub const fn standard() -> Self {
        let comms = HEADER_BYTES;
        let eager = comms + COMM_ENTRIES * size_of::<CommSlot>();
        let captured = eager + DESCRIPTION_ENTRIES * size_of::<DescriptionSlot>();
        let ring = captured + CAPTURED_ENTRIES * size_of::<DescriptionSlot>();
        let connections = ring + RING_SLOTS * size_of::<Slot>();
        let proxies = connections + CONNECTION_ENTRIES * size_of::<ConnectionSlot>();
        let verdicts = proxies + PROXY_ENTRIES * size_of::<ProxySlot>();
        Self {
            comms: (comms, COMM_ENTRIES),
            eager: (eager, DESCRIPTION_ENTRIES),
            captured: (captured, CAPTURED_ENTRIES),
            ring: (ring, RING_SLOTS),
            connections: (connections, CONNECTION_ENTRIES),
            proxies: (proxies, PROXY_ENTRIES),
            verdicts: (verdicts, VERDICT_ENTRIES),
            file_bytes: (verdicts + VERDICT_ENTRIES * size_of::<VerdictSlot>()).next_multiple_of(4096),
        }
    }
}

impl Header {
    /// Reads and checks where the tables are, for a mapping of `mapped_bytes`.
    ///
    /// # Errors
    /// See [`PagesError`].
    pub fn geometry(&self, mapped_bytes: usize) -> Result<Geometry, PagesError> {
        // Acquire: pairs with the writer's release store of the magic after all else.
        let magic = self.magic.load(Ordering::Acquire);
        if magic != MAGIC {
            return Err(PagesError::Magic(magic));
        }
        // Relaxed, here and below: ordered by the magic.
        let version = self.version.load(Ordering::Relaxed);
        if version != u32::from(VERSION) {
            return Err(PagesError::Version(version));
        }
        let word = |word: &AtomicU32| word.load(Ordering::Relaxed) as usize;
        let table = |name, offset: usize, entries: usize, bytes: usize, limit: usize| {
            let end = entries
                .checked_mul(bytes)
                .and_then(|size| size.checked_add(offset));
            let fits = end.is_some_and(|end| end <= mapped_bytes)
                && offset >= size_of::<Self>()
                && offset.is_multiple_of(64);
            if fits && entries.is_power_of_two() && entries <= limit {
                Ok((offset, entries))
            } else {
                Err(PagesError::Bounds(name))
            }
        };
        let optional = |name, offset, entries, bytes| match word(entries) {
            0 => Ok((0, 0)),
            entries => table(name, word(offset), entries, bytes, 1 << 20),
        };
        if word(&self.comm_bytes) != size_of::<CommSlot>() {
            return Err(PagesError::Bounds("communicator table"));
        }
        let slot = size_of::<DescriptionSlot>();
        Ok(Geometry {
            comms: table(
                "communicator table",
                word(&self.comm_offset),
                word(&self.comm_entries),
                size_of::<CommSlot>(),
                1 << 20,
            )?,
            eager: table(
                "description table",
                word(&self.eager_offset),
                word(&self.eager_entries),
                slot,
                1 << 20,
            )?,
            captured: table(
                "captured description table",
                word(&self.captured_offset),
                word(&self.captured_entries),
                slot,
                1 << 20,
            )?,
            ring: table(
                "ring",
                word(&self.ring_offset),
                word(&self.ring_slots),
                size_of::<Slot>(),
                1 << 24,
            )?,
            connections: optional(
                "connection table",
                &self.connection_offset,
                &self.connection_entries,
                size_of::<ConnectionSlot>(),
            )?,
            proxies: optional(
                "proxy table",
                &self.proxy_offset,
                &self.proxy_entries,
                size_of::<ProxySlot>(),
            )?,
            verdicts: optional(
                "verdict table",
                &self.verdict_offset,
                &self.verdict_entries,
                size_of::<VerdictSlot>(),
            )?,
            file_bytes: mapped_bytes,
        })
    }

    /// Fills a zeroed header for `geometry`; `magic` is set last.
    pub fn initialise(
        &mut self,
        geometry: &Geometry,
        pid: u32,
        start_time: u64,
        library_version: u32,
        host: &str,
    ) {
        let put = |place: &mut AtomicU32, value: usize| *place.get_mut() = value as u32;
        put(&mut self.version, VERSION.into());
        put(&mut self.comm_bytes, size_of::<CommSlot>());
        *self.library_version.get_mut() = library_version;
        *self.pid.get_mut() = pid;
        *self.start_time.get_mut() = start_time;
        for (offset, entries, table) in [
            (&mut self.comm_offset, &mut self.comm_entries, geometry.comms),
            (&mut self.eager_offset, &mut self.eager_entries, geometry.eager),
            (
                &mut self.captured_offset,
                &mut self.captured_entries,
                geometry.captured,
            ),
            (&mut self.ring_offset, &mut self.ring_slots, geometry.ring),
            (
                &mut self.connection_offset,
                &mut self.connection_entries,
                geometry.connections,
            ),
            (&mut self.proxy_offset, &mut self.proxy_entries, geometry.proxies),
            (
                &mut self.verdict_offset,
                &mut self.verdict_entries,
                geometry.verdicts,
            ),
        ] {
            put(offset, table.0);
            put(entries, table.1);
        }
        *self.file_bytes.get_mut() = geometry.file_bytes as u64;
        let mut bytes = [0; HOST_BYTES];
        put_text(&mut bytes, host);
        for (place, word) in self.host.iter_mut().zip(bytes.as_chunks().0) {
            *place.get_mut() = u64::from_ne_bytes(*word);
        }
        self.magic.store(MAGIC, Ordering::Release);
    }

    /// A copy of the host identity: zero-padded UTF-8, for [`text`], if the library wrote it.
    #[must_use]
    pub fn host(&self) -> [u8; HOST_BYTES] {
        let mut bytes = [0; HOST_BYTES];
        for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(&self.host) {
            // Relaxed: written before the magic, or by somebody who may write anything.
            *place = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        bytes
    }

    /// What is said of a device: [`DEVICES`] at most are.
    #[must_use]
    pub fn device(&self, number: i32) -> Option<&DeviceSlot> {
        self.devices.get(usize::try_from(number).ok()?)
    }

    /// Counts an event of this kind; before the mask of the lease is looked at if it is sparse, so that what a reader does
    /// not find counted when it has armed the ring comes to it.
    pub fn count_emitted(&self, kind: Kind) {
        self.emitted[kind as usize].fetch_add(1, Ordering::SeqCst);
    }
}

/// A mapping of shared pages, whoever made it. Does not own the mapping.
#[derive(Clone, Copy, Debug)]
pub struct Pages<'a> {
    header: &'a Header,
    geometry: Geometry,
}

impl<'a> Pages<'a> {
    /// Views `bytes` bytes of shared pages at `base`.
    ///
    /// # Errors
    /// See [`PagesError`].
    ///
    /// # Safety
    /// `base` is page-aligned and points to `bytes` readable bytes, shared or not, that stay mapped for `'a` and are only ever
    /// changed through atomics after the magic is set. They are writable where the caller writes.
    pub unsafe fn new(base: *mut u8, bytes: usize) -> Result<Self, PagesError> {
        if bytes < size_of::<Header>() {
            return Err(PagesError::Bounds("header"));
        }
        // SAFETY: the caller's promise; the header's size was checked.
        let header: &'a Header = unsafe { &*base.cast() };
        Ok(Self {
            header,
            geometry: header.geometry(bytes)?,
        })
    }

    /// Views shared pages at `base` whose header was checked before: what it says by now makes no difference.
    ///
    /// # Safety
    /// As for [`Pages::new`], which gave this geometry for the same memory.
    #[must_use]
    pub unsafe fn at(base: *mut u8, geometry: Geometry) -> Self {
        // SAFETY: the caller's promise.
        let header: &'a Header = unsafe { &*base.cast() };
        Self { header, geometry }
    }

    /// Where the tables are.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> &'a Header {
        self.header
    }

    fn table<T>(&self, (offset, entries): (usize, usize)) -> &'a [T] {
        let base = core::ptr::from_ref(self.header).cast::<u8>();
        // SAFETY: `geometry` was checked against the mapping's size in `new`; T is one of the slot types, all atomics.
        unsafe { core::slice::from_raw_parts(base.add(offset).cast(), entries) }
    }

    /// The communicator table.
    #[must_use]
    pub fn communicators(&self) -> &'a [CommSlot] {
        self.table(self.geometry.comms)
    }

    /// The description slot of operation `op`.
    #[inline]
    #[must_use]
    pub fn slot(&self, op: u32) -> &'a DescriptionSlot {
        let table: &[DescriptionSlot] = self.table(if op & CAPTURED == 0 {
            self.geometry.eager
        } else {
            self.geometry.captured
        });
        // SAFETY: tables of descriptions have a power of two of entries, which `new` has checked.
        unsafe { table.get_unchecked(op as usize & (table.len() - 1)) }
    }

    /// The description of operation `op`, unless a later operation has taken its slot.
    #[must_use]
    pub fn description(&self, op: u32) -> Option<Description> {
        self.slot(op).read(op)
    }

    /// What the description tables hold, in no order: operations on their way, finished ones whose slot has not been taken
    /// since, and captured ones.
    pub fn descriptions(&self) -> impl Iterator<Item = Description> {
        let [eager, captured] =
            [self.geometry.eager, self.geometry.captured].map(|place| self.table::<DescriptionSlot>(place));
        // To look at an entry that was never used takes memory for it, in the process whose pages these are.
        let used = captured
            .chunks(USED_TOGETHER)
            .take_while(|slots| slots.iter().any(|slot| slot.op() != 0));
        eager
            .iter()
            .chain(used.flatten())
            .filter_map(|slot| match slot.op() {
                0 => None,
                op => slot.read(op),
            })
    }

    /// The connection table; empty where the library has none.
    #[must_use]
    pub fn connections(&self) -> &'a [ConnectionSlot] {
        self.table(self.geometry.connections)
    }

    /// The proxy table; empty where the library has none.
    #[must_use]
    pub fn proxies(&self) -> &'a [ProxySlot] {
        self.table(self.geometry.proxies)
    }

    /// Keeps a verdict, to which it gives its number, in place of the oldest one.
    pub fn keep_verdict(&self, verdict: &GivenVerdict) {
        let table: &[VerdictSlot] = self.table(self.geometry.verdicts);
        // Relaxed: the number alone is drawn.
        let before = self.header.verdicts.fetch_add(1, Ordering::Relaxed);
        // Wraps where somebody who may write the pages has changed the count.
        let number = before.wrapping_add(1);
        if let Some(slot) = table.get(before as usize & table.len().saturating_sub(1)) {
            // One that is overtaken by a whole round of others is not kept.
            let _ = slot.write(&GivenVerdict { number, ..*verdict });
        }
    }

    /// The last verdicts that were given, in their order; none where the library keeps none.
    pub fn verdicts(&self) -> impl Iterator<Item = GivenVerdict> {
        let table: &[VerdictSlot] = self.table(self.geometry.verdicts);
        let count = self.header.verdicts.load(Ordering::Relaxed) as usize;
        // From the oldest place on.
        let begin = count & table.len().saturating_sub(1);
        let (newer, older) = table.split_at(begin);
        older.iter().chain(newer).filter_map(VerdictSlot::read)
    }

    /// The ring's slots.
    #[must_use]
    pub fn ring(&self) -> &'a [Slot] {
        self.table(self.geometry.ring)
    }
}
