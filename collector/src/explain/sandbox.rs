//! What a process gives up before it runs the code of a library that nobody trusts.
//!
//! Loading a library runs its constructors. The library belongs to the watched process: whoever owns that process wrote the code, and
//! the collector is root. Owner and mode of the file say nothing: in a container of its own, any user has files of user 0.
//!
//! | given up | so the library cannot |
//! |---|---|
//! | every capability, also of the bounding set; `no_new_privs` | get rights |
//! | user, group and groups of root | read, or signal, what is not everybody's |
//! | the mounts, the network, other processes, IPC: own namespaces, an empty root that is read-only | see the host |
//! | descriptors and environment | use what this program had open, or learn from it |
//! | system calls but [`ALLOWED`] (seccomp) | write, connect, start threads or programs, signal |
//! | memory, CPU time, file sizes, processes, core dumps (limits) | use up the host |
//!
//! Namespaces need root. Where they cannot be had, the other rows hold. All else that fails keeps the library from being loaded.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, Write as _},
    os::fd::{AsFd as _, AsRawFd as _, IntoRawFd as _},
    path::PathBuf,
};

use rustix::{
    fs::{MemfdFlags, Mode, OFlags},
    io::Errno,
    mount::{MountFlags, MountPropagationFlags, UnmountFlags},
    process::{DumpableBehavior, Resource, Rlimit, Signal},
    thread::{CapabilitySet, CapabilitySets, Gid, Uid, UnshareFlags},
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

/// The user and group that own nothing. Not those of the watched process: its other processes could signal this one.
const NOBODY: u32 = 65_534;
/// CPU seconds. The parent's limit is real time and shorter, so that its reason is the one that is said; this one holds if the parent is gone.
const CPU_SECONDS: u64 = 8;
/// Bytes of address space beside the library's: what a table is answered with takes a few megabytes.
const ADDRESS_SPACE: u64 = 1 << 30;
/// Bytes of its own that it may have of them, however long the library's file is.
const DATA: u64 = 1 << 30;
/// Bytes of a library: NCCL's with code for every GPU has less than a half of it.
const LIBRARY_BYTES: u64 = 2 << 30;
/// A library is copied in blocks, and blocks of zeros take no memory.
const BLOCK: usize = 1 << 16;

/// What loading a library and asking it needs. Everything else fails with EPERM.
const ALLOWED: [i64; 33] = [
    // Memory.
    libc::SYS_mprotect,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_brk,
    // The library's file.
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    // Locks of this one thread, and its signal handlers.
    libc::SYS_futex,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // What a process may know of itself.
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_uname,
    libc::SYS_getrandom,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_sched_getaffinity,
    // Waiting and ending.
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Why a library is not loaded: a step, and the system's error.
fn failed(step: &'static str) -> impl Fn(io::Error) -> String {
    move |error| format!("it is not loaded, for its process cannot be shut in ({step}: {error})")
}

/// The descriptors that the parent has given this process, which has opened none: the library on standard input, and a socket on standard
/// output. All others are closed, and the standard ones lead nowhere, as standard error does.
///
/// # Errors
/// The system's.
pub(super) fn take_descriptors() -> io::Result<(File, File)> {
    // SAFETY: nothing in this process owns a descriptor but the standard ones.
    if unsafe { libc::close_range(3, libc::c_uint::MAX, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let library = io::stdin().as_fd().try_clone_to_owned()?;
    let socket = io::stdout().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(io::stderr())?;
    rustix::stdio::dup2_stdout(io::stderr())?;
    Ok((library.into(), socket.into()))
}

/// Gives up everything but reading a copy of `library` and writing to `answer`. Returns the path of the copy. Must be called by a
/// process of one thread, after [`take_descriptors`].
///
/// # Errors
/// The process still has something to lose: it must not load the library.
pub(super) fn enter(library: File, answer: &File) -> Result<PathBuf, String> {
    // An own session: no terminal. It fails where this is one already.
    let _ = rustix::process::setsid();
    preload();
    let (path, bytes) = place(&library).map_err(failed("copy"))?;
    drop(library);
    limit(bytes).map_err(failed("limits"))?;
    drop_rights().map_err(failed("rights"))?;
    // After the change of user, which takes both back.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(io::Error::from)
        .map_err(failed("dumps"))?;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(io::Error::from)
        .map_err(failed("death signal"))?;
    filter(answer)
        .map_err(io::Error::other)
        .map_err(failed("system calls"))?;
    Ok(path)
}

/// Loads what the system has and a library of ours may need: later there is no file system.
fn preload() {
    for name in [
        "libm.so.6",
        "libgcc_s.so.1",
        "libpthread.so.0",
        "libdl.so.2",
        "librt.so.1",
    ] {
        // SAFETY: the system's own library, of the paths that this program was loaded from.
        if let Ok(library) = unsafe { libloading::Library::new(name) } {
            std::mem::forget(library);
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "in a file system of its own, where nobody else writes"
)]
/// Copies the library to where only this process has it: an empty root, or memory where there can be none. Returns its path and size.
fn place(library: &File) -> io::Result<(PathBuf, u64)> {
    if let Ok(()) = own_namespaces() {
        let file = rustix::fs::open(
            "/library",
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC,
            Mode::from_raw_mode(0o444),
        )?;
        let bytes = copy(library, File::from(file))?;
        let sealed = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
        rustix::mount::mount_remount("/", sealed, "")?;
        return Ok((PathBuf::from("/library"), bytes));
    }
    let memory = rustix::fs::memfd_create("library", MemfdFlags::CLOEXEC)?;
    let bytes = copy(library, File::from(memory.try_clone()?))?;
    // Read-only from now on: the descriptor to write by is closed.
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let read_only = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    drop(memory);
    // Open for as long as the process lives.
    let path = format!("/proc/self/fd/{}", read_only.into_raw_fd());
    Ok((path.into(), bytes))
}

/// Sees nothing of the host from now on: no mount, no network, no IPC object.
fn own_namespaces() -> io::Result<()> {
    let unshared = UnshareFlags::NEWNS | UnshareFlags::NEWNET | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS;
    // SAFETY: no descriptor table is unshared, so no descriptor of another thread changes under it.
    unsafe { rustix::thread::unshare_unsafe(unshared) }?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    // Any folder will do to lay the new root on; this one is there.
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("ringsight", "/proc", "tmpfs", flags, c"mode=0755")?;
    rustix::process::chdir("/proc")?;
    // A root of the boot's first files cannot be exchanged, but left.
    match rustix::process::pivot_root(".", ".") {
        Ok(()) => rustix::mount::unmount(".", UnmountFlags::DETACH)?,
        Err(_) => rustix::process::chroot(".")?,
    }
    Ok(rustix::process::chdir("/")?)
}

/// Copies a library, without room for what is zero in it. Returns its size.
fn copy(mut from: &File, mut to: File) -> io::Result<u64> {
    let mut block = vec![0; BLOCK];
    let mut bytes = 0;
    from.rewind()?;
    loop {
        let read = match from.read(&mut block) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        bytes += read as u64;
        if bytes > LIBRARY_BYTES {
            return Err(io::Error::other(format!("more than {LIBRARY_BYTES} bytes")));
        }
        if block[..read].iter().all(|byte| *byte == 0) {
            to.seek_relative(read as i64)?;
        } else {
            to.write_all(&block[..read])?;
        }
    }
    to.set_len(bytes)?;
    Ok(bytes)
}

fn limit(library_bytes: u64) -> io::Result<()> {
    for (resource, most) in [
        (Resource::As, ADDRESS_SPACE + 2 * library_bytes),
        (Resource::Data, DATA),
        (Resource::Cpu, CPU_SECONDS),
        (Resource::Fsize, 0),
        (Resource::Nproc, 0),
        (Resource::Core, 0),
        (Resource::Memlock, 0),
        (Resource::Nofile, 64),
    ] {
        // What was less stays less.
        let most = rustix::process::getrlimit(resource)
            .maximum
            .map_or(most, |now| now.min(most));
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        rustix::process::setrlimit(resource, limit)?;
    }
    Ok(())
}

/// Gives up the rights of root, if it is root, and all capabilities.
fn drop_rights() -> io::Result<()> {
    // Fails from the first number that the kernel does not know, and without the right to.
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        if rustix::thread::remove_capability_from_bounding_set(one).is_err() {
            break;
        }
    }
    if rustix::process::geteuid().is_root() {
        match rustix::thread::set_thread_groups(&[]) {
            // In a user namespace that was made by a user, or without the capability.
            Ok(()) | Err(Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
        let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
        let changed = rustix::thread::set_thread_res_gid(group, group, group)
            .and_then(|()| rustix::thread::set_thread_res_uid(user, user, user));
        match changed {
            // A user namespace without that user, or a root without the capability: what is left of root are its files.
            Ok(()) | Err(Errno::INVAL | Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    match rustix::thread::clear_ambient_capability_set() {
        // A kernel that has none.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(error) => return Err(error.into()),
    }
    let none = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    rustix::thread::set_capabilities(None, none)?;
    Ok(rustix::thread::set_no_new_privs(true)?)
}

fn filter(answer: &File) -> Result<(), seccompiler::Error> {
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    let answer = u64::from(answer.as_raw_fd().unsigned_abs());
    let compare =
        |argument, operator, value| SeccompCondition::new(argument, SeccompCmpArgLen::Qword, operator, value);
    // To write only the answer, and to open only what is there, to read it. Shared memory is no data by the kernel's count.
    let not_to_read = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_APPEND;
    let only_reads = SeccompCmpOp::MaskedEq(u64::from(not_to_read.unsigned_abs()));
    let is_private = SeccompCmpOp::MaskedEq(u64::from(libc::MAP_SHARED.unsigned_abs()));
    let rules = [
        (libc::SYS_mmap, compare(3, is_private, 0)?),
        (libc::SYS_write, compare(0, SeccompCmpOp::Eq, answer)?),
        (libc::SYS_openat, compare(2, only_reads, 0)?),
    ];
    let rules = rules
        .into_iter()
        .map(|(number, condition)| Ok((number, vec![SeccompRule::new(vec![condition])?])))
        .chain(ALLOWED.into_iter().map(|number| Ok((number, Vec::new()))))
        .collect::<Result<_, seccompiler::BackendError>>()?;
    let denied = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let filter: BpfProgram =
        SeccompFilter::new(rules, denied, SeccompAction::Allow, architecture)?.try_into()?;
    seccompiler::apply_filter(&filter)
}
