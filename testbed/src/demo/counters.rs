//! The library's own event counters, which the process itself reads from its shared pages.

use std::{collections::BTreeMap, os::fd::AsRawFd, ptr, sync::atomic::Ordering};

use fs_err as fs;

use ringsight_records::{Kind, pages};

/// The mapped first page.
pub(crate) struct Counters {
    header: *const pages::Header,
}

const PAGE: usize = 4096;

impl Counters {
    /// Finds and maps this process's pages; `None` if its library has none (another NCCL).
    pub(crate) fn open() -> Option<Self> {
        let path = fs::read_dir("/proc/self/fd")
            .ok()?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| {
                fs::read_link(path).is_ok_and(|target| {
                    target
                        .to_string_lossy()
                        .starts_with(&format!("/memfd:{} ", pages::MEMFD_NAME))
                })
            })?;
        let file = fs::File::open(path).ok()?;
        if file.metadata().ok()?.len() < PAGE as u64 {
            return None;
        }
        // SAFETY: a fresh shared read-only mapping of a file that is at least this long.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                PAGE,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if page == libc::MAP_FAILED {
            return None;
        }
        let counters = Self { header: page.cast() };
        // Acquire: pairs with the writer's release store once the header is whole.
        let whole = counters.header().magic.load(Ordering::Acquire) == pages::MAGIC;
        let version = counters.header().version.load(Ordering::Relaxed);
        (whole && version == u32::from(ringsight_records::VERSION)).then_some(counters)
    }

    fn header(&self) -> &pages::Header {
        // SAFETY: the mapping is at least as long as a header (asserted where it is defined), page-aligned, and lives
        // as long as this object; what changes in it are atomics.
        unsafe { &*self.header }
    }

    /// Events by kind since the pages were made.
    pub(crate) fn emitted(&self) -> BTreeMap<String, u64> {
        let count = |kind: &Kind| self.header().emitted[*kind as usize].load(Ordering::Relaxed);
        Kind::ALL
            .iter()
            .map(|kind| (kind.name().to_owned(), count(kind)))
            .filter(|(_, n)| *n > 0)
            .collect()
    }

    /// Events that found the ring full.
    pub(crate) fn lost(&self) -> u64 {
        self.header()
            .lost
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    }
}

impl Drop for Counters {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `open`, used no more.
        unsafe { libc::munmap(self.header.cast_mut().cast(), PAGE) };
    }
}
