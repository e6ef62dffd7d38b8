//! A library that emits as the communication library does, on command: four probe functions, shared pages, a ring.
//! For tests and benches only.
#![expect(clippy::disallowed_methods, reason = "it makes the pages that tests read")]

use std::{
    ffi::CString,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use ringsight_probes::process::{now_ns, own_start_time};
use ringsight_records::{
    Description, Flags, Kind, Record, State,
    pages::{Communicator, Geometry, Header, MEMFD_NAME, Pages},
    ring,
};

macro_rules! probe_function {
    ($name:ident, $tail:literal) => {
        /// A probe function: nop, 5-byte nop, a tail of its own (no two bodies alike), return.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(_record: *const Record) {
            core::arch::naked_asm!("nop", ".byte 0x0f,0x1f,0x44,0x00,0x00", $tail, "ret")
        }
    };
}

probe_function!(ringsight_probe_launch, "mov eax, 1");
probe_function!(ringsight_probe_proxy, "mov eax, 2");
probe_function!(ringsight_probe_event, "mov eax, 3");
probe_function!(ringsight_probe_lifecycle, "mov eax, 4");

static PAGES: OnceLock<Pages<'static>> = OnceLock::new();
static NEXT_OP: AtomicU32 = AtomicU32::new(1);

/// Makes the shared pages with this layout version. Returns 0, or an errno.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_open(version: u32) -> i32 {
    let geometry = Geometry::standard();
    let Ok(name) = CString::new(MEMFD_NAME) else {
        return libc::EINVAL;
    };
    // SAFETY: plain system calls; the mapping is checked before use and never unmapped.
    unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        if fd < 0 || libc::ftruncate(fd, geometry.file_bytes as libc::off_t) != 0 {
            return std::io::Error::last_os_error().raw_os_error().unwrap_or(-1);
        }
        let fd = OwnedFd::from_raw_fd(fd);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        if libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) != 0 {
            return std::io::Error::last_os_error().raw_os_error().unwrap_or(-1);
        }
        let base = libc::mmap(
            std::ptr::null_mut(),
            geometry.file_bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            0,
        );
        if base == libc::MAP_FAILED {
            return std::io::Error::last_os_error().raw_os_error().unwrap_or(-1);
        }
        let header = &mut *base.cast::<Header>();
        // Its own pid namespace's number, as the library writes it.
        let pid = libc::getpid() as u32;
        header.initialise(&geometry, pid, own_start_time(), 22809, "fixture-host");
        if let Ok(pages) = Pages::new(base.cast(), geometry.file_bytes) {
            let _ = PAGES.set(pages);
        }
        header.version.store(version, Ordering::Relaxed);
        std::mem::forget(fd);
    }
    0
}

fn emit(record: &Record) {
    let Some(kind) = record.kind() else { return };
    let Some(pages) = PAGES.get() else { return };
    let header = pages.header();
    let sparse = kind.probe().is_some();
    if sparse {
        header.count_emitted(kind);
    }
    if header.lease.wants(kind) && header.lease.alive(record.time_ns) {
        if !sparse {
            header.count_emitted(kind);
        }
        if ring::push(&header.cursor, pages.ring(), record) {
            return;
        }
        header.lost[kind as usize].fetch_add(1, Ordering::Relaxed);
    }
    match kind.probe() {
        Some(0) => ringsight_probe_launch(record),
        Some(1) => ringsight_probe_proxy(record),
        Some(2) => ringsight_probe_event(record),
        Some(_) => ringsight_probe_lifecycle(record),
        None => {}
    }
}

/// Creates communicator `id`.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_communicator(id: u64) {
    let Some(pages) = PAGES.get() else { return };
    let now = now_ns();
    // SAFETY: plain integers; zero is a value of each.
    let mut communicator: Communicator = unsafe { std::mem::zeroed() };
    (communicator.id, communicator.ranks, communicator.init_start_ns) = (id, 2, now);
    if let Some(index) = pages
        .communicators()
        .iter()
        .position(|slot| slot.claim(&communicator))
    {
        emit(&Record {
            comm: id,
            value: index as u64,
            ..Record::new(Kind::CommInit, State::START, now)
        });
    }
}

/// Runs `count` operations on communicator `comm`: description, launch, `dense` proxy steps, completion.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_operations(comm: u64, count: u64, dense: u64) {
    operations(comm, count, dense, || ());
}

/// As `fixture_operations`, but with `pause_us` after each record: almost always an operation is under way.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_slow_operations(comm: u64, count: u64, dense: u64, pause_us: u64) {
    let pause = std::time::Duration::from_micros(pause_us);
    operations(comm, count, dense, || std::thread::sleep(pause));
}

fn operations(comm: u64, count: u64, dense: u64, after_each: impl Fn()) {
    let Some(pages) = PAGES.get() else { return };
    for _ in 0..count {
        let op = NEXT_OP.fetch_add(1, Ordering::Relaxed);
        let now = now_ns();
        let description = Description {
            comm,
            seq: u64::from(op),
            count: 1000,
            op,
            api_start_ns: now,
            root: -1,
            peer: -1,
            ..Description::default()
        };
        pages.slot(op).write(&description);
        let record = |kind, state| Record {
            comm,
            seq: u64::from(op),
            op,
            ..Record::new(kind, state, now_ns())
        };
        emit(&record(Kind::OpLaunched, State::START));
        after_each();
        for step in 0..dense {
            emit(
                &Record {
                    value: step,
                    ..record(Kind::ProxyStep, State::STEP_SEND_WAIT)
                }
                .with_flags(Flags::SEND),
            );
            after_each();
        }
        emit(&record(Kind::OpCompleted, State::STOP));
    }
}

/// Emits `each_ms` dense records a millisecond for `ms` milliseconds, each millisecond's within an operation of communicator
/// `comm`; returns how many nanoseconds that took.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_stream(comm: u64, each_ms: u64, ms: u64) -> u64 {
    const MS: u64 = 1_000_000;
    /// After a pause that the machine made, no more is caught up than this, or one burst would fill the ring.
    const CATCH_UP: u64 = 10 * MS;
    let begun = now_ns();
    let mut due = begun;
    while now_ns() - begun < ms * MS {
        fixture_operations(comm, 1, each_ms);
        due = (due + MS).max(now_ns().saturating_sub(CATCH_UP));
        let ahead = due.saturating_sub(now_ns());
        std::thread::sleep(std::time::Duration::from_nanos(ahead));
    }
    now_ns() - begun
}

/// Claims `count` ring slots and never finishes them: what a writer that dies in the middle leaves.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_holes(count: u64) {
    if let Some(pages) = PAGES.get() {
        pages.header().cursor.head.fetch_add(count, Ordering::Relaxed);
    }
}

/// Begins the program that called anew, in the same process; returns only if that fails.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_exec() -> i32 {
    use std::os::unix::process::CommandExt as _;
    let mut again = std::process::Command::new("/proc/self/exe");
    again.args(std::env::args_os().skip(1));
    again.exec().raw_os_error().unwrap_or(-1)
}

/// CPU time of the calling thread: what the machine does for others meanwhile does not count.
fn thread_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec to write to; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Calls a probe function `count` times with a fixed record and nothing else; returns the nanoseconds of CPU that took.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_probe(count: u64) -> u64 {
    let record = Record::new(Kind::OpCompleted, State::STOP, now_ns());
    let begun = thread_ns();
    for _ in 0..count {
        ringsight_probe_event(std::hint::black_box(&raw const record));
    }
    thread_ns() - begun
}

/// Calls a probe function with an address that cannot be read.
#[unsafe(no_mangle)]
pub extern "C" fn fixture_fault() {
    ringsight_probe_event(std::hint::black_box(std::ptr::dangling::<Record>()));
}
