//! A target's shared pages: found among its descriptors, mapped, the ring leased and drained.
//!
//! The pages are memory of the target. It has promised to write them by atomics and to keep their layout, and may break any promise at
//! any moment. So:
//! - A file is opened only once it is known to be a memory file of the kernel, and mapped only if its size is sealed: to read behind
//!   the end of a file that was cut ends the reader.
//! - The size is the kernel's. Where the tables are is read once, checked once, and kept.
//! - Only the header (lease, positions, counters of readers) and the ring (turns of its slots) are mapped for writing.
//! - What is read is copied word by word, then looked at. Nothing refers to bytes of the pages.
//! - What one poll does is bounded by what it hands on and by time, whatever stands in the ring.
#![expect(
    clippy::disallowed_methods,
    reason = "the one module that maps pages of a target"
)]

use std::{
    ffi::CStr,
    fs::File,
    io,
    os::fd::AsRawFd as _,
    ptr,
    sync::{OnceLock, atomic::Ordering},
};

use ringsight_records::{
    DeviceClock, Kind, Record,
    pages::{DEVICES, Geometry, Header, Holder, MEMFD_NAME, Pages, PagesError, Reader, text},
    ring::{self, Slot},
};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::{
    account::{Base, ByKind},
    error::{AttachError, LeaseHolder, Refusal},
    limits::{CpuBudget, DESCRIPTORS, Limit, POLL_TIME, STRIDE},
    process::{innermost_pid, is_gone, may_read, now_ns},
    procfs::{Descriptors, FileKey, Linked, ProcessDirectory},
    target::process_error,
};

/// What was read from each communicator slot: (id, start of its initialisation).
pub(crate) type Seen = Vec<Option<(u64, u64)>>;

/// Of a lease: before it nobody has read anything.
const FIRST_TERM: u64 = 1;

/// How often the lease is renewed: five signs of life before it would lapse.
const HEARTBEAT_NS: u64 = 1_000_000_000;
/// How long a claimed ring slot may stay unfinished before the watermark goes on without it.
const HELD_UP_NS: u64 = 100_000_000;

/// What the library seals its pages against. Without these seals, the file may be cut while it is read.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// What the pages are mapped for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// To look at them.
    Look,
    /// To lease the ring.
    Lease,
}

/// A mapping of shared pages whose header was checked.
#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    bytes: usize,
    geometry: Geometry,
}

// SAFETY: the mapping is owned, and what is in it is reached through atomics only.
unsafe impl Send for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; views of it borrow `self`.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// What keeps pages from being mapped.
#[derive(Debug)]
enum NotMapped {
    Io(io::Error),
    Pages(PagesError),
}

impl Mapping {
    fn new(file: &File, access: Access) -> Result<Self, NotMapped> {
        let length = rustix::fs::fstat(file)
            .map_err(|error| NotMapped::Io(error.into()))?
            .st_size;
        // A damaged target may make it any size; what is mapped need not be more than twice what this version lays out.
        let bytes = usize::try_from(length)
            .unwrap_or(0)
            .min(2 * Geometry::standard().file_bytes);
        if bytes < size_of::<Header>() {
            return Err(NotMapped::Pages(PagesError::Bounds("header")));
        }
        // SAFETY: a fresh shared mapping of a file that we hold open.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(NotMapped::Io(io::Error::last_os_error()));
        }
        let mut mapping = Self {
            base: base.cast(),
            bytes,
            geometry: Geometry::standard(),
        };
        // SAFETY: `bytes` bytes are mapped, at a page boundary, for as long as `mapping` lives; the file's size is sealed. What
        // changes there is read by atomics.
        let pages = unsafe { Pages::new(mapping.base, bytes) }.map_err(NotMapped::Pages)?;
        mapping.geometry = pages.geometry();
        if access == Access::Lease {
            let (ring, slots) = mapping.geometry.ring;
            mapping.allow_writing(0, size_of::<Header>())?;
            mapping.allow_writing(ring, slots * size_of::<Slot>())?;
        }
        Ok(mapping)
    }

    /// Makes the memory pages of this range writable. A layout that does not begin its tables on page boundaries, as the library's does,
    /// shares the range's first and last page with its neighbours.
    fn allow_writing(&self, offset: usize, bytes: usize) -> Result<(), NotMapped> {
        let page = rustix::param::page_size();
        let start = offset / page * page;
        // SAFETY: a part of the mapping, which nothing but atomics in it refers to.
        let done = unsafe {
            libc::mprotect(
                self.base.add(start).cast(),
                offset - start + bytes,
                libc::PROT_READ | libc::PROT_WRITE,
            )
        };
        if done == 0 {
            Ok(())
        } else {
            Err(NotMapped::Io(io::Error::last_os_error()))
        }
    }

    fn view(&self) -> Pages<'_> {
        // SAFETY: mapped at a page boundary for as long as `self` lives, and the geometry is that of this mapping. A mapping for a
        // look is never written.
        unsafe { Pages::at(self.base, self.geometry) }
    }
}

/// The descriptors of a process as far as they have been looked through for its pages.
#[derive(Debug, Default)]
pub(crate) struct Search(Option<Descriptors>);

impl Search {
    /// Whether the last look left descriptors for the next one.
    pub(crate) fn is_under_way(&self) -> bool {
        self.0.is_some()
    }
}

/// The pages of one process, mapped, with the lease of its ring.
#[derive(Debug)]
pub(crate) struct Mapped {
    mapping: Mapping,
    /// Which file it is.
    key: FileKey,
    lease: Option<u64>,
    /// When the lease was last renewed, or reached for in vain.
    renewed_ns: u64,
    /// What to arm the ring with, should the lease be lost and come back; 0 = nothing any more.
    wanted: u64,
    /// Positions of the ring before this one were claimed before it was armed by us.
    pub(crate) begins: u64,
    /// Communicators that were handed on.
    pub(crate) seen: Seen,
    /// By device: its clock, and events overwritten there, as handed on; those of before are nobody's matter.
    pub(crate) devices: [(Option<DeviceClock>, u64); DEVICES],
    /// Network ports that were handed on, by their numbers.
    pub(crate) ports: Vec<u8>,
    /// The last drain left records because of its limits.
    pub(crate) is_cut: bool,
    held_up_since: Option<u64>,
    lost_reported: ByKind,
    /// Emitted and lost when the ring was armed.
    baseline: (ByKind, ByKind),
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.release();
    }
}

/// The device that the kernel keeps all memory files on.
fn memory_device() -> io::Result<u64> {
    static DEVICE: OnceLock<u64> = OnceLock::new();
    if let Some(device) = DEVICE.get() {
        return Ok(*device);
    }
    let file = rustix::fs::memfd_create(c"ringsight-probe", MemfdFlags::CLOEXEC)?;
    let device = rustix::fs::fstat(&file)?.st_dev;
    Ok(*DEVICE.get_or_init(|| device))
}

/// How far what has the pages' name may be trusted.
enum Candidate {
    /// A sealed memory file.
    Sealed,
    /// The library has not yet made it ready.
    NotReady,
    Refused(Refusal),
}

/// Looks at a file before it is mapped.
fn examine(linked: &Linked) -> io::Result<Candidate> {
    if !linked.is_regular || linked.links != 0 || linked.key.device != memory_device()? {
        return Ok(Candidate::Refused(Refusal::NotMemory));
    }
    // Opening a memory file does nothing but open it.
    let file = linked.open()?;
    if rustix::fs::fcntl_get_seals(&file)?.contains(SEALS) {
        return Ok(Candidate::Sealed);
    }
    // The library seals it before it writes the magic.
    let mut magic = [0; 8];
    let is_empty = rustix::io::pread(&file, &mut magic, 0)? < magic.len() || magic == [0; 8];
    Ok(if is_empty {
        Candidate::NotReady
    } else {
        Candidate::Refused(Refusal::Unsealed)
    })
}

impl Mapped {
    /// Finds and maps the pages of a process; `None` if it has none (yet), as far as this look went: it goes through
    /// [`DESCRIPTORS`] descriptors, and `search` remembers where the next one goes on.
    pub(crate) fn find(
        directory: &ProcessDirectory,
        search: &mut Search,
        access: Access,
    ) -> Result<Option<Self>, AttachError> {
        let pid = directory.pid();
        let io = |error: io::Error| process_error(pid, "fd", &error);
        let wanted = format!("/memfd:{MEMFD_NAME} (deleted)");
        let mut descriptors = match search.0.take() {
            Some(descriptors) => descriptors,
            None => directory.descriptors().map_err(io)?,
        };
        let mut names = Vec::new();
        let is_end = descriptors
            .next(DESCRIPTORS, |name| {
                if directory
                    .descriptor_link(name)
                    .is_ok_and(|link| link.as_bytes() == wanted.as_bytes())
                {
                    names.push(name.to_owned());
                }
            })
            .map_err(io)?;
        if !is_end {
            search.0 = Some(descriptors);
        }
        let mut refused = None;
        for name in names {
            match Self::of_descriptor(directory, &name, access) {
                Ok(Some(mapped)) => {
                    search.0 = None;
                    return Ok(Some(mapped));
                }
                Ok(None) => {}
                Err(error) => refused = Some(error),
            }
        }
        refused.map_or(Ok(None), Err)
    }

    /// The same, with a look at every descriptor.
    ///
    /// # Errors
    /// Also [`Limit::Descriptors`], if that takes longer than `budget`.
    pub(crate) fn find_among_all(
        directory: &ProcessDirectory,
        budget: CpuBudget,
    ) -> Result<Option<Self>, AttachError> {
        let mut search = Search::default();
        loop {
            let found = Self::find(directory, &mut search, Access::Look)?;
            if found.is_some() || !search.is_under_way() {
                return Ok(found);
            }
            if budget.is_spent() {
                return Err(AttachError::Limit {
                    pid: directory.pid(),
                    limit: Limit::Descriptors,
                });
            }
        }
    }

    /// The pages that a descriptor is open on; `None` if they are not (yet) the process's own.
    fn of_descriptor(
        directory: &ProcessDirectory,
        name: &CStr,
        access: Access,
    ) -> Result<Option<Self>, AttachError> {
        let pid = directory.pid();
        let open = || -> io::Result<_> {
            let linked = directory.descriptor(name)?;
            Ok((examine(&linked)?, linked))
        };
        let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let linked = match open() {
            Ok((Candidate::Sealed, linked)) => linked,
            Ok((Candidate::NotReady, _)) => return Ok(None),
            Ok((Candidate::Refused(problem), _)) => {
                return Err(AttachError::Refused {
                    pid,
                    descriptor: name.to_string_lossy().into_owned(),
                    problem,
                });
            }
            Err(error) if is_gone(&error) => return Ok(None),
            Err(error) => return Err(process_error(pid, "fd", &error)),
        };
        let file = match access {
            Access::Look => linked.open(),
            Access::Lease => linked.open_writable(),
        };
        let file = file.map_err(|error| process_error(pid, "fd", &error))?;
        let mapping = match Mapping::new(&file, access) {
            Ok(mapping) => mapping,
            // No magic yet: the library is about to make them.
            Err(NotMapped::Pages(PagesError::Magic(0))) => return Ok(None),
            Err(NotMapped::Pages(source)) => return Err(AttachError::Pages { pid, source }),
            Err(NotMapped::Io(error)) => return Err(process_error(pid, "fd", &error)),
        };
        let header = mapping.view().header();
        let (owner, started) = (
            header.pid.load(Ordering::Relaxed),
            header.start_time.load(Ordering::Relaxed),
        );
        // A forked child holds its parent's descriptor too: pages name their owner.
        let inner = innermost_pid(directory).unwrap_or(pid);
        if owner != inner || Some(started) != directory.start_time() {
            return Ok(None);
        }
        Ok(Some(Self::new(mapping, linked.key)))
    }

    /// The pages in a file, whoever they belong to; `None` if they cannot be read. For the fuzzer.
    pub(crate) fn of_file(file: &File) -> Option<Self> {
        let key = FileKey::of(&rustix::fs::fstat(file).ok()?);
        Some(Self::new(Mapping::new(file, Access::Lease).ok()?, key))
    }

    fn new(mapping: Mapping, key: FileKey) -> Self {
        Self {
            mapping,
            key,
            lease: None,
            renewed_ns: 0,
            wanted: 0,
            begins: 0,
            seen: Vec::new(),
            devices: [(None, 0); DEVICES],
            ports: Vec::new(),
            is_cut: false,
            held_up_since: None,
            lost_reported: [0; Kind::LIMIT],
            baseline: ([0; Kind::LIMIT], [0; Kind::LIMIT]),
        }
    }

    /// The pages.
    pub(crate) fn view(&self) -> Pages<'_> {
        self.mapping.view()
    }

    /// Library version and host identity.
    pub(crate) fn identity(&self) -> (u32, String) {
        let header = self.view().header();
        (
            header.library_version.load(Ordering::Relaxed),
            text(&header.host()).to_owned(),
        )
    }

    /// Who holds the lease, checked.
    pub(crate) fn holder(&self, holder: &Holder, own: &Reader, directory: &ProcessDirectory) -> LeaseHolder {
        match &holder.reader {
            Some(reader) if reader.namespace() != own.namespace() => LeaseHolder::OtherNamespace,
            Some(reader) if may_read(reader, own, directory.effective_user(), self.key) => {
                LeaseHolder::Process(reader.pid())
            }
            Some(_) => LeaseHolder::Unverified,
            None => LeaseHolder::Unnamed,
        }
    }

    /// Takes the lease and asks the writers for the kinds in `mask`. Returns where the account of events begins.
    ///
    /// # Errors
    /// The reader that holds it.
    pub(crate) fn lease(&mut self, own: &Reader, mask: u64) -> Result<Base, Holder> {
        let now = now_ns();
        let pages = self.mapping.view();
        let header = pages.header();
        let term = header
            .lease
            .acquire(own, now, mask, |reader| is_gone(own, reader))?;
        // After arming, the position before the counters: what is not counted here comes through the ring, and what lies
        // before this position is counted here.
        let begins = header.cursor.head.load(Ordering::SeqCst);
        let (emitted, lost) = counters(&pages);
        // The first term of all: what happened before it was never anybody's to see.
        let taken = if term == FIRST_TERM {
            emitted
        } else {
            taken(&pages)
        };
        // All of it is accounted for from here on: it comes, or is reported as missed.
        for (word, emitted) in header.taken.iter().zip(emitted) {
            word.fetch_max(emitted, Ordering::Relaxed);
        }
        (self.lease, self.renewed_ns, self.wanted, self.begins) = (Some(term), now, mask, begins);
        self.baseline = (emitted, lost);
        let overwritten = devices(&pages).map(|(_, overwritten)| overwritten);
        for (seen, overwritten) in self.devices.iter_mut().zip(overwritten) {
            seen.1 = overwritten;
        }
        self.lost_reported = lost;
        Ok(Base { emitted, taken })
    }

    /// Gives a sign of life when one is due, and takes a lease that was lost as soon as nobody has it.
    pub(crate) fn renew(&mut self, directory: &ProcessDirectory, own: &Reader, now_ns: u64) -> Hold {
        let silent_ns = now_ns.saturating_sub(self.renewed_ns);
        if self.wanted == 0 || silent_ns < HEARTBEAT_NS {
            return Hold::AsBefore;
        }
        let pages = self.mapping.view();
        let lease = &pages.header().lease;
        let (held, hold) = match self.lease {
            Some(term) if lease.renew(term, now_ns) => (Some(term), Hold::AsBefore),
            Some(_) => {
                let holder = lease.holder(now_ns).map_or(LeaseHolder::Unnamed, |holder| {
                    self.holder(&holder, own, directory)
                });
                (None, Hold::Lost { holder, silent_ns })
            }
            None => match lease.acquire(own, now_ns, self.wanted, |reader| is_gone(own, reader)) {
                Ok(term) => (Some(term), Hold::Regained),
                Err(_) => (None, Hold::AsBefore),
            },
        };
        (self.lease, self.renewed_ns) = (held, now_ns);
        self.held_up_since = None;
        hold
    }

    /// Whether the ring is ours to read, as far as we know.
    pub(crate) fn is_held(&self) -> bool {
        self.lease.is_some()
    }

    /// Where the ring is being written now.
    pub(crate) fn head(&self) -> u64 {
        self.view().header().cursor.head.load(Ordering::SeqCst)
    }

    /// Whether everything before this position has been read.
    pub(crate) fn is_read_to(&self, position: u64) -> bool {
        let tail = self.view().header().cursor.tail.load(Ordering::Relaxed);
        tail.wrapping_sub(position) as i64 >= 0
    }

    /// Tells later readers what this one has accounted for, as long as the ring is its own.
    pub(crate) fn publish(&self, news: &ByKind) {
        if self.lease.is_none() {
            return;
        }
        // Relaxed: counters order nothing. A reader that was stopped before this line adds to its successor's sum, and
        // what it adds is true.
        let words = self.view().header().taken.iter().zip(news);
        for (word, news) in words.filter(|(_, news)| **news > 0) {
            word.fetch_add(*news, Ordering::Relaxed);
        }
    }

    /// Counts sparse events from the beginning of the pages, if no reader has had them before: whose probes were there by then has had them
    /// all. Whether it does.
    pub(crate) fn count_from_zero(&mut self, base: &mut Base) -> bool {
        if self.lease != Some(FIRST_TERM) {
            return false;
        }
        for kind in Kind::ALL.iter().filter(|kind| Kind::SPARSE & kind.bit() != 0) {
            let at = *kind as usize;
            (self.baseline.0[at], self.baseline.1[at]) = (0, 0);
            (base.emitted[at], base.taken[at]) = (0, 0);
        }
        true
    }

    /// Events emitted since the pages were made, by kind.
    pub(crate) fn emitted(&self) -> ByKind {
        counters(&self.view()).0
    }

    /// Asks the writers for no more events; the lease, and with it the right to read what is there, stays.
    pub(crate) fn disarm(&mut self) {
        self.wanted = 0;
        if let Some(lease) = self.lease {
            // If it is another reader's by now, it is not ours to disarm.
            let _ = self.view().header().lease.arm(lease, 0);
        }
    }

    /// Disarms the ring and gives the lease back.
    pub(crate) fn release(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.view().header().lease.release(lease);
        }
    }

    /// Takes at most `limit` records out of the ring, if it is ours, of those that are in there now, for [`POLL_TIME`] at most; `true` if
    /// these were all delivered. `dead` says that no writer is left: slots that were claimed and never finished are skipped.
    pub(crate) fn drain(
        &mut self,
        limit: usize,
        now_ns: u64,
        dead: bool,
        mut take: impl FnMut(&Pages<'_>, u64, Record),
    ) -> bool {
        let Some(term) = self.lease else { return true };
        let until = self.head();
        let mut held_up = false;
        let mut left = limit;
        let pages = self.mapping.view();
        // A reader that was stopped so long that another one has the ring leaves that one its records.
        if pages.header().lease.is_in(term) {
            let (cursor, slots) = (&pages.header().cursor, pages.ring());
            let budget = CpuBudget::of(POLL_TIME);
            let mut passes = slots.len();
            while left > 0 {
                if left.is_multiple_of(STRIDE) && budget.is_spent() {
                    left = 0;
                    break;
                }
                // Relaxed: only this reader moves the tail, or one after whom nothing here is its own.
                let tail = cursor.tail.load(Ordering::Relaxed);
                if until.wrapping_sub(tail) as i64 <= 0 {
                    break;
                }
                if let Some((position, record)) = ring::pop_at(cursor, slots, &mut passes) {
                    take(&pages, position, record);
                } else if !ring::is_held_up(cursor, slots) {
                    break;
                } else if dead {
                    ring::skip(cursor, slots);
                } else {
                    held_up = true;
                    break;
                }
                left -= 1;
            }
        }
        self.is_cut = left == 0;
        if !held_up {
            self.held_up_since = None;
            return left > 0;
        }
        let since = *self.held_up_since.get_or_insert(now_ns);
        now_ns.saturating_sub(since) > HELD_UP_NS
    }

    /// Events of the kinds in `mask` lost in the ring since the last call.
    pub(crate) fn newly_lost(&mut self, mask: u64) -> Vec<(Kind, u64)> {
        let now = counters(&self.view()).1;
        let mut lost = Vec::new();
        for kind in Kind::ALL {
            let index = *kind as usize;
            let count = now[index].wrapping_sub(self.lost_reported[index]);
            if count > 0 && mask & kind.bit() != 0 {
                lost.push((*kind, count));
            }
        }
        self.lost_reported = now;
        lost
    }

    /// Emitted and lost events: when the ring was armed, and now.
    pub(crate) fn counters(&self) -> ((ByKind, ByKind), (ByKind, ByKind)) {
        (self.baseline, counters(&self.view()))
    }
}

/// What the pages say of each device: its clock, and how many events were overwritten there.
pub(crate) fn devices(pages: &Pages<'_>) -> [(Option<DeviceClock>, u64); DEVICES] {
    let slots = pages.header().devices.each_ref();
    slots.map(|slot| (slot.read(), slot.overwritten.load(Ordering::Relaxed)))
}

fn counters(pages: &Pages<'_>) -> (ByKind, ByKind) {
    let header = pages.header();
    // SeqCst: read after arming, as writers look at the mask after counting; see `Lease::acquire`.
    (
        std::array::from_fn(|kind| header.emitted[kind].load(Ordering::SeqCst)),
        std::array::from_fn(|kind| header.lost[kind].load(Ordering::Relaxed)),
    )
}

fn taken(pages: &Pages<'_>) -> ByKind {
    std::array::from_fn(|kind| pages.header().taken[kind].load(Ordering::Relaxed))
}

/// What became of the lease.
#[derive(Debug)]
pub(crate) enum Hold {
    /// Nothing.
    AsBefore,
    /// Another reader has taken it.
    Lost {
        /// Who.
        holder: LeaseHolder,
        /// How long ago this reader's last sign of life was by then.
        silent_ns: u64,
    },
    /// It had been lost and is this reader's again.
    Regained,
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::OwnedFd;

    use ringsight_records::State;
    use rustix::process::{Resource, Rlimit};

    use super::*;
    use crate::process::{own_reader, own_start_time};

    /// A file of the pages' name, with a header that names process `owner`.
    fn file(seals: SealFlags, owner: u32) -> File {
        let geometry = Geometry::standard();
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create(MEMFD_NAME, flags).unwrap());
        file.set_len(geometry.file_bytes as u64).unwrap();
        rustix::fs::fcntl_add_seals(&file, seals).unwrap();
        let header = write(&file);
        // SAFETY: a fresh mapping of zeros, large enough, which nobody else looks at before the magic is there.
        let header = unsafe { &mut *header.cast::<Header>() };
        header.initialise(&geometry, owner, own_start_time(), 22809, "host");
        file
    }

    /// The same, of nobody, sealed as the library seals it.
    pub(crate) fn sealed() -> File {
        file(SEALS, 0)
    }

    /// Maps a file as its owner does, until the end of the test.
    fn write(file: &File) -> *mut u8 {
        // SAFETY: a fresh shared mapping of a file that we hold open.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                Geometry::standard().file_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        base.cast()
    }

    /// The pages as their owner sees them.
    pub(crate) fn owners(file: &File) -> Pages<'static> {
        // SAFETY: mapped until the end of the process, and changed by atomics alone.
        unsafe { Pages::new(write(file), Geometry::standard().file_bytes) }.unwrap()
    }

    fn own() -> ProcessDirectory {
        ProcessDirectory::open(std::process::id()).unwrap()
    }

    #[test]
    fn pages_are_found_among_many_descriptors() {
        let most = Rlimit {
            current: Some(2 * DESCRIPTORS as u64),
            ..rustix::process::getrlimit(Resource::Nofile)
        };
        rustix::process::setrlimit(Resource::Nofile, most).unwrap();
        let many: Vec<OwnedFd> = (0..DESCRIPTORS + 1000)
            .map(|_| rustix::io::dup(io::stderr()).unwrap())
            .collect();
        // Behind what one look goes through; other tests' descriptors come and go.
        let place = DESCRIPTORS as i32 + 500;
        let pages = rustix::io::fcntl_dupfd_cloexec(file(SEALS, std::process::id()), place).unwrap();
        let directory = own();
        let budget = CpuBudget::of(std::time::Duration::from_secs(60));
        assert!(Mapped::find_among_all(&directory, budget).unwrap().is_some());
        // A look of a session goes on where the last one ended.
        let mut search = Search::default();
        let first = Mapped::find(&directory, &mut search, Access::Lease).unwrap();
        assert!(first.is_none() && search.is_under_way());
        let second = Mapped::find(&directory, &mut search, Access::Lease).unwrap();
        assert!(second.is_some() && !search.is_under_way());
        drop((many, pages));
    }

    #[test]
    fn only_sealed_memory_files_are_candidates() {
        let examine_file = |file: &File| {
            let name = std::ffi::CString::new(file.as_raw_fd().to_string()).unwrap();
            examine(&own().descriptor(&name).unwrap()).unwrap()
        };
        assert!(matches!(examine_file(&sealed()), Candidate::Sealed));
        for seals in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::empty()] {
            let refused = examine_file(&file(seals, 0));
            assert!(matches!(refused, Candidate::Refused(Refusal::Unsealed)));
        }
        // As the library leaves it for a moment.
        let fresh = rustix::fs::memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC).unwrap();
        assert!(matches!(examine_file(&fresh.into()), Candidate::NotReady));
        let named = File::open("/proc/self/exe").unwrap();
        let unlinked = tempfile::tempfile_in(".").unwrap();
        let device = File::open("/dev/zero").unwrap();
        for file in [named, unlinked, device] {
            assert!(matches!(
                examine_file(&file),
                Candidate::Refused(Refusal::NotMemory)
            ));
        }
    }

    #[test]
    fn what_the_header_says_later_makes_no_difference() {
        let file = sealed();
        let owner = owners(&file);
        let mut mapped = Mapped::of_file(&file).unwrap();
        mapped.lease(&own_reader(), Kind::EVERY).unwrap();
        let record = Record::new(Kind::OpCompleted, State::STOP, 1);
        assert!(ring::push(&owner.header().cursor, owner.ring(), &record));
        // The ring would lie in memory that is not writable, and the rest outside.
        let header = owner.header();
        header
            .ring_offset
            .store(header.comm_offset.load(Ordering::Relaxed), Ordering::Relaxed);
        header.comm_offset.store(u32::MAX - 63, Ordering::Relaxed);
        header.magic.store(0, Ordering::Release);
        let mut seen = 0;
        assert!(mapped.drain(10, 1, false, |_, _, taken| {
            assert_eq!(taken, record);
            seen += 1;
        }));
        assert_eq!((seen, mapped.view().communicators().len()), (1, 1024));
    }

    #[test]
    fn no_more_than_header_and_ring_is_writable() {
        let file = sealed();
        let mapped = Mapped::of_file(&file).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let base = mapped.mapping.base as u64;
        let of_mapping = maps.lines().filter(|line| {
            let start = line.split('-').next().unwrap();
            let start = u64::from_str_radix(start, 16).unwrap();
            (base..base + mapped.mapping.bytes as u64).contains(&start)
        });
        let permissions: Vec<_> = of_mapping.map(|line| line.split(' ').nth(1).unwrap()).collect();
        assert_eq!(permissions, ["rw-s", "r--s", "rw-s", "r--s"]);
    }

    #[test]
    fn a_reader_is_named_if_the_kernel_says_that_it_reads() {
        let (file, own_reader) = (sealed(), own_reader());
        let mapped = Mapped::of_file(&file).unwrap();
        let named = |reader: Reader| {
            let holder = Holder {
                reader: Some(reader),
                silent_ns: 0,
            };
            mapped.holder(&holder, &own_reader, &own())
        };
        let pid = std::process::id();
        assert_eq!(named(own_reader), LeaseHolder::Process(pid));
        let later = Reader::new(pid, own_reader.start_time() + 1, own_reader.namespace());
        assert_eq!(named(later), LeaseHolder::Unverified);
        let elsewhere = Reader::new(pid, own_reader.start_time(), own_reader.namespace() + 1);
        assert_eq!(named(elsewhere), LeaseHolder::OtherNamespace);
        let mut other = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let started = crate::process::start_time(other.id()).unwrap();
        let innocent = Reader::new(other.id(), started, own_reader.namespace());
        assert_eq!(named(innocent), LeaseHolder::Unverified);
        drop(other.stdin.take());
        other.wait().unwrap();
        assert_eq!(named(innocent), LeaseHolder::Unverified);
    }
}
