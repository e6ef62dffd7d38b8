//! Making the shared pages of this process, and letting go of them in a forked child.

use std::{
    io,
    os::fd::IntoRawFd,
    ptr,
    sync::{
        Mutex,
        atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering},
    },
};

pub use ringsight_comm_base::release::LIBRARY_VERSION;
use ringsight_comm_base::{env, fork, process, sync::AtLeastOnce, sys};
use ringsight_records::pages::{CAPTURED, CAPTURED_BITS, Geometry, Header, MEMFD_NAME, Pages};

/// [`LIBRARY_VERSION`] as text, in the words that every release of NCCL has among its constants: tools tell a library file's version
/// by it where no process runs it yet.
pub static VERSION_BANNER: &str = "NCCL version 2.30.7";

/// Free slots of the table of captured operations, with each slot's generation.
#[derive(Debug)]
pub(super) struct CapturedSlots {
    free: Vec<u16>,
    generations: Vec<u32>,
}

impl CapturedSlots {
    fn new(entries: usize) -> Self {
        // Popped from the end: low slots first.
        Self {
            free: (0..entries as u16).rev().collect(),
            generations: vec![0; entries],
        }
    }

    /// A number of a captured operation; `None` if the table is full.
    pub(super) fn take(&mut self) -> Option<u32> {
        let slot = self.free.pop()?;
        let generation = &mut self.generations[usize::from(slot)];
        *generation = generation.wrapping_add(1) & (u32::MAX >> (CAPTURED_BITS + 1));
        Some(CAPTURED | *generation << CAPTURED_BITS | u32::from(slot))
    }

    /// The operation's graph is gone.
    pub(super) fn give_back(&mut self, op: u32) {
        let slot = op & ((1 << CAPTURED_BITS) - 1);
        self.free.push(slot as u16);
    }
}

/// The shared pages of this process with what it alone keeps about them. Never freed: a reader of [`CURRENT`] may hold
/// a reference for as long as it likes.
pub(super) struct Shared {
    pub(super) pages: Pages<'static>,
    pub(super) captured: Mutex<CapturedSlots>,
    fd: i32,
}

/// The pages of this process; null before the first use and in a forked child that has not used them yet.
static CURRENT: AtomicPtr<Shared> = AtomicPtr::new(ptr::null_mut());
/// Serialises creation. An `AtomicI32` spin lock would be wrong in a forked child; so would a `Mutex` that another
/// thread of the parent held at the fork, hence the owner's fork generation in it.
static CREATING: AtomicU32 = AtomicU32::new(0);
/// File descriptor of the current pages, for the fork handler; -1 if there are none.
static FD: AtomicI32 = AtomicI32::new(-1);

/// The pages, if they have been made.
#[inline]
pub(super) fn current() -> Option<&'static Shared> {
    // Acquire: pairs with the release in `make`; on x86-64 and for a pointer dependency it costs a plain load.
    let shared = CURRENT.load(Ordering::Acquire);
    // SAFETY: not null means leaked by `make`, never freed.
    unsafe { shared.as_ref() }
}

/// This process's number, which the pages of it hold: asking the kernel costs as much as the rest of a record.
#[inline]
#[must_use]
pub fn pid() -> u32 {
    current().map_or_else(std::process::id, |shared| {
        shared.pages.header().pid.load(Ordering::Relaxed)
    })
}

/// Makes the pages if there are none yet.
///
/// # Errors
/// What the system refused. The process then works unobserved; a later call tries again.
pub fn prepare() -> io::Result<()> {
    if current().is_some() {
        return Ok(());
    }
    fork::count_generations();
    static HANDLER: AtLeastOnce = AtLeastOnce::new();
    // A second handler finds no pages.
    // SAFETY: atomic operations and `close` are async-signal-safe.
    HANDLER.call(|| unsafe { fork::at_fork(forked) });
    // A lock whose holder is named by fork generation: one that a thread of the parent held at the fork is free here.
    let mine = fork::generation() << 1 | 1;
    loop {
        let seen = CREATING.load(Ordering::Relaxed);
        if seen == mine {
            std::thread::yield_now();
        // Acquire: what the previous maker stored is visible.
        } else if CREATING
            .compare_exchange(seen, mine, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
        {
            break;
        }
    }
    let result = if current().is_some() {
        Ok(())
    } else {
        make().map(|shared| {
            FD.store(shared.fd, Ordering::Relaxed);
            // Release: who sees the pointer sees the pages initialised.
            CURRENT.store(Box::into_raw(Box::new(shared)), Ordering::Release);
        })
    };
    CREATING.store(mine & !1, Ordering::Release);
    result
}

/// Runs in the child of a fork: the pages there are the parent's.
extern "C" fn forked() {
    CURRENT.store(ptr::null_mut(), Ordering::Relaxed);
    let fd = FD.swap(-1, Ordering::Relaxed);
    if fd >= 0 {
        // Else a collector that looks at the child would find the parent's pages among its descriptors.
        // SAFETY: the descriptor is this module's own.
        unsafe { libc::close(fd) };
    }
}

fn make() -> io::Result<Shared> {
    let geometry = Geometry::standard();
    let name = std::ffi::CString::new(MEMFD_NAME)?;
    // Kept open for the life of the process: a collector finds the pages by this descriptor.
    let fd = sys::sealed_memfd(&name, geometry.file_bytes)?.into_raw_fd();
    let fail = |error: io::Error| {
        // SAFETY: `fd` was opened above and is used no further.
        unsafe { libc::close(fd) };
        Err(error)
    };
    // SAFETY: a fresh shared mapping of a file of that size, at an address of the kernel's choice.
    let base = unsafe {
        libc::mmap(
            ptr::null_mut(),
            geometry.file_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return fail(io::Error::last_os_error());
    }
    let host = env::text("NCCL_HOSTID").unwrap_or_else(process::host_name);
    let stat = process::Stat::own().ok_or_else(|| io::Error::other("/proc/self/stat has no start time"))?;
    // SAFETY: page-aligned, zeroed, large enough, and nobody else uses it before the magic is set.
    let header = unsafe { &mut *base.cast::<Header>() };
    header.initialise(
        &geometry,
        std::process::id(),
        stat.start_time,
        LIBRARY_VERSION,
        &host,
    );
    // SAFETY: the mapping is `file_bytes` long, never unmapped, and changed through atomics alone from here on.
    let pages = unsafe { Pages::new(base.cast(), geometry.file_bytes) }.map_err(io::Error::other)?;
    Ok(Shared {
        pages,
        captured: Mutex::new(CapturedSlots::new(geometry.captured.1)),
        fd,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captured_slots_come_back_with_another_generation() {
        let mut slots = CapturedSlots::new(2);
        let (a, b) = (slots.take().unwrap(), slots.take().unwrap());
        assert_eq!(slots.take(), None);
        assert_ne!(a & 0xfff, b & 0xfff);
        slots.give_back(a);
        let c = slots.take().unwrap();
        assert_eq!(a & 0xfff, c & 0xfff);
        assert_ne!(a, c);
        assert_eq!(c & CAPTURED, CAPTURED);
    }
}
