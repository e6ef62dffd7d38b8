//! The target's shared pages, made as the library makes them.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    mem::offset_of,
    os::{
        fd::{AsRawFd as _, FromRawFd as _},
        unix::fs::MetadataExt as _,
    },
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use ringsight_records::{
    Description, Kind, Record, State,
    pages::{Communicator, Geometry, Header, MEMFD_NAME, Pages, Reader, put_text},
    ring,
};

use crate::{Act, check, map_library};

/// Pages that stay mapped, and their file open, until the process ends.
pub(crate) struct Own {
    /// The mapping.
    base: *mut u8,
    /// By this descriptor the collector finds it.
    file: File,
}

// SAFETY: the mapping lives as long as the process, and what is in it is reached through atomics.
unsafe impl Send for Own {}

impl Own {
    /// Pages as the library makes them: sealed against shrinking and growing.
    pub(crate) fn make() -> Result<Self> {
        let pages = Self::unsealed(libc::MFD_ALLOW_SEALING)?;
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        // SAFETY: a system call on integers.
        let sealed = unsafe { libc::fcntl(pages.file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        check(sealed, "F_ADD_SEALS")?;
        Ok(pages)
    }

    /// The same, made with these flags and without seals.
    fn unsealed(flags: libc::c_uint) -> Result<Self> {
        let geometry = Geometry::standard();
        let name = CString::new(MEMFD_NAME)?;
        // SAFETY: a string that lives across the call.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error()).context("memfd_create");
        }
        // SAFETY: the kernel just returned this descriptor, and nobody else has it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(geometry.file_bytes as u64)?;
        // SAFETY: a fresh shared mapping of a file that is that long.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                geometry.file_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("mapping the pages");
        }
        // SAFETY: zeroed, page-aligned and long enough, and nobody else looks at it before the magic is there.
        let header = unsafe { &mut *base.cast::<Header>() };
        header.initialise(
            &geometry,
            std::process::id(),
            start_time("self")?,
            22809,
            "hostile-host",
        );
        Ok(Self {
            base: base.cast(),
            file,
        })
    }

    /// The pages as the library sees them.
    pub(crate) fn view(&self) -> Pages<'static> {
        // SAFETY: mapped for the life of the process, page-aligned, laid out so, and changed through atomics where the collector is not to be attacked.
        unsafe { Pages::at(self.base, Geometry::standard()) }
    }

    /// A word of the pages, by its number.
    pub(crate) fn word(&self, number: usize) -> &AtomicU64 {
        assert!(number < Geometry::standard().file_bytes / 8);
        // SAFETY: within the mapping, which is page-aligned, lives as long as the process and is changed through atomics.
        unsafe { &*self.base.cast::<AtomicU64>().add(number) }
    }

    /// The words of the header.
    pub(crate) fn header_words(&self) -> Vec<u64> {
        let words = 0..size_of::<Header>() / 8;
        words
            .map(|number| self.word(number).load(Ordering::Relaxed))
            .collect()
    }

    /// Writes what the library never changes of its header again, as it was in `words`.
    pub(crate) fn mend_header(&self, words: &[u64]) {
        let places = offset_of!(Header, connection_offset) / 8..words.len();
        for number in (0..offset_of!(Header, comm_overflow) / 8).chain(places) {
            self.word(number).store(words[number], Ordering::Relaxed);
        }
    }

    /// Adds a communicator of two ranks with this name.
    pub(crate) fn communicator(&self, name: &str) {
        self.change_communicator(|communicator| put_text(&mut communicator.name, name));
    }

    /// Adds a communicator of two ranks as `change` makes it.
    pub(crate) fn change_communicator(&self, change: impl FnOnce(&mut Communicator)) {
        // SAFETY: plain integers; zero is a value of each.
        let mut communicator: Communicator = unsafe { std::mem::zeroed() };
        (communicator.id, communicator.ranks, communicator.init_start_ns) = (7, 2, 1);
        change(&mut communicator);
        let claimed = self
            .view()
            .communicators()
            .iter()
            .any(|slot| slot.claim(&communicator));
        assert!(claimed, "the table is full");
    }
}

impl Own {
    /// Runs an operation: its description, its launch and its completion, in the ring as far as somebody reads it.
    pub(crate) fn operation(&self, op: u32) {
        let (pages, now) = (self.view(), now_ns());
        pages.slot(op).write(&Description {
            comm: 7,
            seq: op.into(),
            op,
            ranks: 2,
            count: 1000,
            bytes: 4000,
            api_start_ns: now,
            api_end_ns: now,
            launch_start_ns: now,
            launch_end_ns: now,
            device_start_ns: now,
            device_end_ns: now + 1,
            root: -1,
            peer: -1,
            channels: 1,
            ..Description::default()
        });
        for (kind, state) in [(Kind::OpLaunched, State::START), (Kind::OpCompleted, State::STOP)] {
            let header = pages.header();
            header.count_emitted(kind);
            let record = Record {
                comm: 7,
                seq: op.into(),
                op,
                value: now,
                ..Record::new(kind, state, now_ns())
            };
            if header.lease.wants(kind) && !ring::push(&header.cursor, pages.ring(), &record) {
                header.lost[kind as usize].fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// `CLOCK_MONOTONIC`, nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec to write to; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// H5: pages that nobody can seal, which shrink to nothing as soon as a reader has leased them.
pub(crate) fn shrink(library: &Path) -> Result<Act> {
    map_library(library)?;
    let pages = Own::unsealed(0)?;
    pages.communicator("shrinks");
    let file = pages.file.try_clone()?;
    thread::spawn(move || {
        while pages.view().header().lease.mask() == 0 {
            thread::yield_now();
        }
        // From here on this thread does not look at them either.
        file.set_len(0)
    });
    Ok(Box::new(|_| Ok("done".to_owned())))
}

/// H12: the host's name in the pages is text at one moment and none at the next.
pub(crate) fn text(library: &Path) -> Result<Act> {
    map_library(library)?;
    let pages = Own::make()?;
    pages.communicator("text");
    thread::spawn(move || {
        let words = ["é".repeat(4), format!("é{}é", "\u{7f}".repeat(4))];
        let [whole, mut broken] = words.map(|text| {
            let mut bytes = [0; 8];
            put_text(&mut bytes, &text);
            u64::from_ne_bytes(bytes)
        });
        // Its first character lacks its second byte.
        broken &= !0xff00;
        broken |= 0x2800;
        loop {
            for word in &pages.view().header().host {
                word.store(whole, Ordering::Relaxed);
            }
            for word in &pages.view().header().host {
                word.store(broken, Ordering::Relaxed);
            }
        }
    });
    Ok(Box::new(|_| Ok("done".to_owned())))
}

/// H15: the lease of the ring names whatever process a line says as the one that reads.
pub(crate) fn lease(library: &Path) -> Result<Act> {
    map_library(library)?;
    let pages = Own::make()?;
    pages.communicator("leased");
    Ok(Box::new(move |pid| {
        let namespace = fs::metadata("/proc/self/ns/pid")?.ino();
        let victim = Reader::new(pid.parse()?, start_time(pid)?, namespace);
        let now = now_ns();
        let taken = pages
            .view()
            .header()
            .lease
            .acquire(&victim, now, Kind::SPARSE, |_| false);
        ensure!(taken.is_ok(), "{taken:?}");
        Ok("done".to_owned())
    }))
}

/// When a process started, clock ticks since boot: field 22 of `stat`.
fn start_time(pid: &str) -> Result<u64> {
    let stat = String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat"))?).into_owned();
    let (_, fields) = stat.rsplit_once(')').context("a name in parentheses")?;
    let field = fields.split_ascii_whitespace().nth(19).context("field 22")?;
    Ok(field.parse()?)
}
