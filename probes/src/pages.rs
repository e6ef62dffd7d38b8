//! A target's shared pages: found among its descriptors, mapped, the ring leased and drained.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::fd::AsRawFd as _,
    path::Path,
    sync::atomic::Ordering,
};

use ringsight_records::{
    DeviceClock, Kind, Record,
    pages::{DEVICES, Geometry, Holder, MEMFD_NAME, Pages, Reader, text},
    ring,
};

use crate::{
    account::{Base, ByKind},
    error::AttachError,
    process::{innermost_pid, is_gone, now_ns, start_time},
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

/// The pages of one process, mapped, with the lease of its ring.
#[derive(Debug)]
pub(crate) struct Mapped {
    base: *mut u8,
    bytes: usize,
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
    held_up_since: Option<u64>,
    lost_reported: ByKind,
    /// Emitted and lost when the ring was armed.
    baseline: (ByKind, ByKind),
}

// SAFETY: the mapping is owned and reached through `&mut self` or atomics only.
unsafe impl Send for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.release();
        // SAFETY: the mapping made in `map`; views of it borrow `self`.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

impl Mapped {
    /// Finds and maps the pages of `pid`; `None` if it has none (yet).
    pub(crate) fn find(pid: u32) -> Result<Option<Self>, AttachError> {
        let directory = format!("/proc/{pid}/fd");
        let entries = fs::read_dir(&directory).map_err(|error| process_error(pid, "fd", &error))?;
        let name = format!("/memfd:{MEMFD_NAME} (deleted)");
        let mut refused = None;
        for entry in entries.flatten() {
            let path = entry.path();
            if !fs::read_link(&path).is_ok_and(|link| link == Path::new(&name)) {
                continue;
            }
            let file = OpenOptions::new().read(true).write(true).open(&path);
            let mapped = match file.and_then(|file| Self::map(&file)) {
                Ok(mapped) => mapped,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(process_error(pid, "fd", &error)),
            };
            match mapped.check() {
                // A forked child holds its parent's descriptor too: pages name their owner.
                Ok((owner, started)) => {
                    let inner = innermost_pid(pid).unwrap_or(pid);
                    if owner == inner && Some(started) == start_time(pid) {
                        return Ok(Some(mapped));
                    }
                }
                // No magic yet: the library is about to make them.
                Err(ringsight_records::pages::PagesError::Magic(0)) => {}
                Err(source) => refused = Some(AttachError::Pages { pid, source }),
            }
        }
        refused.map_or(Ok(None), Err)
    }

    fn map(file: &File) -> io::Result<Self> {
        // A target that shrinks the file under us would end us with SIGBUS. Where its memfd allows sealing, this rules it out.
        // SAFETY: fcntl on a descriptor that we hold; failure is harmless.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
        let length = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        // A damaged target may claim any size; what is mapped need not be more than twice what this version lays out.
        let bytes = length.min(2 * Geometry::standard().file_bytes);
        if bytes == 0 {
            return Err(io::ErrorKind::NotFound.into());
        }
        // SAFETY: a fresh shared mapping of a file that we hold open.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            base: base.cast(),
            bytes,
            lease: None,
            renewed_ns: 0,
            wanted: 0,
            begins: 0,
            seen: Vec::new(),
            devices: [(None, 0); DEVICES],
            ports: Vec::new(),
            held_up_since: None,
            lost_reported: [0; Kind::LIMIT],
            baseline: ([0; Kind::LIMIT], [0; Kind::LIMIT]),
        })
    }

    fn check(&self) -> Result<(u32, u64), ringsight_records::pages::PagesError> {
        // SAFETY: see `view`.
        let pages = unsafe { Pages::new(self.base, self.bytes) }?;
        Ok((pages.header().pid, pages.header().start_time))
    }

    /// The pages. They were checked when found; should the target have damaged its header since, there is nothing.
    pub(crate) fn view(&self) -> Option<Pages<'_>> {
        // SAFETY: `bytes` bytes are mapped shared, readable and writable, at a page boundary for as long as `self` lives;
        // the library changes them through atomics once the magic is set.
        unsafe { Pages::new(self.base, self.bytes) }.ok()
    }

    /// Library version and host identity.
    pub(crate) fn identity(&self) -> (u32, String) {
        self.view().map_or((0, String::new()), |pages| {
            (
                pages.header().library_version,
                text(&pages.header().host).to_owned(),
            )
        })
    }

    /// Takes the lease and asks the writers for the kinds in `mask`. Returns where the account of events begins.
    pub(crate) fn lease(&mut self, pid: u32, own: &Reader, mask: u64) -> Result<Option<Base>, AttachError> {
        let now = now_ns();
        let Some(pages) = self.view() else { return Ok(None) };
        let header = pages.header();
        let term = header
            .lease
            .acquire(own, now, mask, |reader| is_gone(own, reader))
            .map_err(|holder| AttachError::Leased {
                pid,
                holder: name(&holder, own),
                silent_ms: holder.silent_ns / 1_000_000,
            })?;
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
        if let Some(pages) = self.view() {
            let overwritten = devices(&pages).map(|(_, overwritten)| overwritten);
            for (seen, overwritten) in self.devices.iter_mut().zip(overwritten) {
                seen.1 = overwritten;
            }
        }
        self.lost_reported = lost;
        Ok(Some(Base { emitted, taken }))
    }

    /// Gives a sign of life when one is due, and takes a lease that was lost as soon as nobody has it.
    pub(crate) fn renew(&mut self, own: &Reader, now_ns: u64) -> Hold {
        let silent_ns = now_ns.saturating_sub(self.renewed_ns);
        if self.wanted == 0 || silent_ns < HEARTBEAT_NS {
            return Hold::AsBefore;
        }
        let Some(pages) = self.view() else {
            return Hold::AsBefore;
        };
        let lease = &pages.header().lease;
        let (held, hold) = match self.lease {
            Some(term) if lease.renew(term, now_ns) => (Some(term), Hold::AsBefore),
            Some(_) => {
                let holder = lease
                    .holder(now_ns)
                    .map_or_else(|| "another reader".to_owned(), |holder| name(&holder, own));
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
        self.view()
            .map_or(0, |pages| pages.header().cursor.head.load(Ordering::SeqCst))
    }

    /// Whether everything before this position has been read.
    pub(crate) fn is_read_to(&self, position: u64) -> bool {
        self.view().is_none_or(|pages| {
            let tail = pages.header().cursor.tail.load(Ordering::Relaxed);
            tail.wrapping_sub(position) as i64 >= 0
        })
    }

    /// Tells later readers what this one has accounted for, as long as the ring is its own.
    pub(crate) fn publish(&self, news: &ByKind) {
        if let (Some(_), Some(pages)) = (self.lease, self.view()) {
            // Relaxed: counters order nothing. A reader that was stopped before this line adds to its successor's sum, and
            // what it adds is true.
            for (word, news) in pages
                .header()
                .taken
                .iter()
                .zip(news)
                .filter(|(_, news)| **news > 0)
            {
                word.fetch_add(*news, Ordering::Relaxed);
            }
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
        self.view().map_or(self.baseline.0, |pages| counters(&pages).0)
    }

    /// Asks the writers for no more events; the lease, and with it the right to read what is there, stays.
    pub(crate) fn disarm(&mut self) {
        self.wanted = 0;
        if let Some(lease) = self.lease
            && let Some(pages) = self.view()
        {
            // If it is another reader's by now, it is not ours to disarm.
            let _ = pages.header().lease.arm(lease, 0);
        }
    }

    /// Disarms the ring and gives the lease back.
    pub(crate) fn release(&mut self) {
        if let Some(lease) = self.lease.take()
            && let Some(pages) = self.view()
        {
            pages.header().lease.release(lease);
        }
    }

    /// Takes at most `limit` records out of the ring, if it is ours, of those that are in there now; `true` if these were all
    /// delivered. `dead` says that no writer is left: slots that were claimed and never finished are skipped.
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
        // A reader that was stopped so long that another one has the ring leaves that one its records.
        if let Some(pages) = self.view().filter(|pages| pages.header().lease.is_in(term)) {
            let (cursor, slots) = (&pages.header().cursor, pages.ring());
            while left > 0 {
                // Relaxed: only this reader moves the tail, or one after whom nothing here is its own.
                let tail = cursor.tail.load(Ordering::Relaxed);
                if until.wrapping_sub(tail) as i64 <= 0 {
                    break;
                }
                if let Some((position, record)) = ring::pop_at(cursor, slots) {
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
        if !held_up {
            self.held_up_since = None;
            return left > 0;
        }
        let since = *self.held_up_since.get_or_insert(now_ns);
        now_ns.saturating_sub(since) > HELD_UP_NS
    }

    /// Events of the kinds in `mask` lost in the ring since the last call.
    pub(crate) fn newly_lost(&mut self, mask: u64) -> Vec<(Kind, u64)> {
        let Some(now) = self.view().map(|pages| counters(&pages).1) else {
            return Vec::new();
        };
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
        (
            self.baseline,
            self.view().map_or(self.baseline, |pages| counters(&pages)),
        )
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

/// A reader in words, for messages.
fn name(holder: &Holder, own: &Reader) -> String {
    match &holder.reader {
        Some(reader) if reader.namespace() == own.namespace() => format!("process {}", reader.pid()),
        // Its number means another process here, if any.
        Some(reader) => format!("process {} of another pid namespace", reader.pid()),
        None => "a reader that has just begun".to_owned(),
    }
}

/// What became of the lease.
#[derive(Debug)]
pub(crate) enum Hold {
    /// Nothing.
    AsBefore,
    /// Another reader has taken it.
    Lost {
        /// Who, in words.
        holder: String,
        /// How long ago this reader's last sign of life was by then.
        silent_ns: u64,
    },
    /// It had been lost and is this reader's again.
    Regained,
}
