//! A target's shared pages: found among its descriptors, mapped, the ring leased and drained.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::fd::AsRawFd as _,
    path::Path,
};

use ringsight_records::{
    Kind, Record,
    pages::{Geometry, MEMFD_NAME, Pages, text},
    ring,
};

use crate::{
    error::AttachError,
    process::{innermost_pid, is_running_anywhere, now_ns, start_time},
    target::process_error,
    watch::Seen,
};

/// Events by kind.
pub type ByKind = [u64; Kind::LIMIT];

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
    renewed_ns: u64,
    /// Which process we are to the target's ring, to renew and to re-acquire.
    own: (u32, u64),
    /// Communicators that were handed on.
    pub(crate) seen: Seen,
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
            own: (0, 0),
            seen: Vec::new(),
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

    /// Takes the lease, with the ring asking for nothing yet: no other reader can have it, and no writer writes.
    pub(crate) fn lease(&mut self, pid: u32, own: (u32, u64)) -> Result<(), AttachError> {
        let Some(pages) = self.view() else { return Ok(()) };
        let header = pages.header();
        let now = now_ns();
        let lease = header
            .lease
            .acquire(own, now, 0, is_running_anywhere)
            .map_err(|holder| AttachError::Leased {
                pid,
                holder: holder.pid,
                silent_ms: holder.silent_ns / 1_000_000,
            })?;
        self.lease = Some(lease);
        self.renewed_ns = now;
        self.own = own;
        Ok(())
    }

    /// Asks the writers for the kinds in `mask`, and counts events of all kinds from now. A lease that somebody else has
    /// taken meanwhile is left to them; [`Mapped::renew`] finds it out.
    pub(crate) fn arm(&mut self, mask: u64) {
        let (Some(lease), Some(pages)) = (self.lease, self.view()) else {
            return;
        };
        let lease_words = &pages.header().lease;
        // Before the mask: what is emitted because of it counts.
        let counters = counters(&pages);
        if lease_words.renew(lease, now_ns()) {
            // Release: a writer that sees the mask finds the fresh heartbeat.
            lease_words.mask.store(mask, std::sync::atomic::Ordering::Release);
        }
        self.baseline = counters;
        self.lost_reported = counters.1;
    }

    /// Gives a sign of life when one is due; `false` if another reader has taken the ring over.
    pub(crate) fn renew(&mut self, now_ns: u64) -> bool {
        let Some(lease) = self.lease else { return true };
        if now_ns.saturating_sub(self.renewed_ns) < HEARTBEAT_NS {
            return true;
        }
        let renewed = self
            .view()
            .is_some_and(|pages| pages.header().lease.renew(lease, now_ns));
        if renewed {
            self.renewed_ns = now_ns;
        } else {
            self.lease = None;
        }
        renewed
    }

    /// Counts sparse events from the beginning of the pages.
    pub(crate) fn count_from_zero(&mut self) {
        for kind in Kind::ALL.iter().filter(|kind| Kind::SPARSE & kind.bit() != 0) {
            self.baseline.0[*kind as usize] = 0;
            self.baseline.1[*kind as usize] = 0;
        }
    }

    /// Asks the writers for no more events; the lease, and with it the right to read what is there, stays.
    pub(crate) fn disarm(&mut self) {
        if let Some(lease) = self.lease
            && let Some(pages) = self.view()
            && pages.header().lease.renew(lease, now_ns())
        {
            // Relaxed: a writer that learns of it late adds a record at the edge, no more.
            pages
                .header()
                .lease
                .mask
                .store(0, std::sync::atomic::Ordering::Relaxed);
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

    /// Takes at most `limit` records out of the ring, if it is ours; `true` if everything that happened before the call was
    /// delivered. `dead` says that no writer is left: slots that were claimed and never finished are skipped.
    pub(crate) fn drain(
        &mut self,
        limit: usize,
        now_ns: u64,
        dead: bool,
        mut take: impl FnMut(&Pages<'_>, Record),
    ) -> bool {
        if self.lease.is_none() {
            return true;
        }
        let mut held_up = false;
        let mut left = limit;
        if let Some(pages) = self.view() {
            let (cursor, slots) = (&pages.header().cursor, pages.ring());
            while left > 0 {
                if let Some(record) = ring::pop(cursor, slots) {
                    take(&pages, record);
                } else if !ring::is_held_up(cursor) {
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

    /// Events lost in the ring since the last call, by kind.
    pub(crate) fn newly_lost(&mut self) -> Vec<(Kind, u64)> {
        let Some(now) = self.view().map(|pages| counters(&pages).1) else {
            return Vec::new();
        };
        let mut lost = Vec::new();
        for kind in Kind::ALL {
            let index = *kind as usize;
            let count = now[index].wrapping_sub(self.lost_reported[index]);
            if count > 0 {
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

fn counters(pages: &Pages<'_>) -> (ByKind, ByKind) {
    use std::sync::atomic::Ordering::Relaxed;
    let header = pages.header();
    // Relaxed: counters order nothing; exact totals are read when their writers are known to have stopped.
    (
        std::array::from_fn(|kind| header.emitted[kind].load(Relaxed)),
        std::array::from_fn(|kind| header.lost[kind].load(Relaxed)),
    )
}
