//! A target that keeps the lock of its memory, or never ends an `execve`.
//!
//! The kernel writes the pages of a mapped file back while it unmaps the file, and holds the lock of the process's memory meanwhile. This
//! file is of a FUSE file system, whose server is a child of the target that takes its time. A second thread waits to map something. From
//! then on, whoever else wants the lock waits behind that thread: to read the environment, and to place a probe.

use std::{
    ffi::CString,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    os::{
        fd::AsRawFd as _,
        unix::{net::UnixStream, process::CommandExt as _},
    },
    path::Path,
    process::Command,
    ptr,
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use crate::{Act, NotHere, check, map_library, namespaces, pages};

/// How long the lock is kept.
const HELD: Duration = Duration::from_secs(4);
/// Seconds after which the server ends, whatever happens: nobody could kill a process that waits for it.
const LIFE_S: libc::c_uint = 60;
/// Bytes of the file.
const BYTES: usize = 4096;

/// Keeps its memory lock for [`HELD`] from each line on. A line that is not empty is the path of a library that it maps before.
pub(crate) fn lock(library: &Path) -> Result<Act> {
    map_library(library)?;
    let own = pages::Own::make()?;
    own.communicator("lock");
    let (mut waiter, servers_waiter) = UnixStream::pair()?;
    let (mut held, servers_held) = UnixStream::pair()?;
    let file = mount(servers_waiter, servers_held)?;
    Ok(Box::new(move |line| {
        let _ = &own;
        if !line.is_empty() {
            map_library(Path::new(line))?;
        }
        let mut waits = waiter.try_clone()?;
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            // SAFETY: a system call without arguments.
            let _ = tell.send(unsafe { libc::gettid() });
            waits.read_exact(&mut [0])?;
            map(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1).map(drop)
        });
        waiter.write_all(&told.recv()?.to_ne_bytes())?;
        let memory = dirty(&file)? as usize;
        // SAFETY: a mapping that nobody uses any more.
        thread::spawn(move || unsafe { libc::munmap(memory as *mut libc::c_void, BYTES) });
        // From here on this thread must not need the lock.
        held.read_exact(&mut [0])?;
        Ok("done".to_owned())
    }))
}

/// On a line begins another program. The kernel keeps the old memory, and a lock of the process that `/proc` wants, for [`HELD`].
pub(crate) fn exec(library: &Path) -> Result<Act> {
    map_library(library)?;
    let own = pages::Own::make()?;
    own.communicator("exec");
    let (mut waiter, servers_waiter) = UnixStream::pair()?;
    let (_, servers_held) = UnixStream::pair()?;
    let file = mount(servers_waiter, servers_held)?;
    Ok(Box::new(move |_| {
        let _ = &own;
        // No thread is to wait. The server answers in this program's place.
        waiter.write_all(&0i32.to_ne_bytes())?;
        dirty(&file)?;
        Err(Command::new("sleep").arg("600").exec().into())
    }))
}

/// Maps the file and changes it.
fn dirty(file: &File) -> io::Result<*mut libc::c_void> {
    let memory = map(libc::MAP_SHARED, file.as_raw_fd())?;
    // SAFETY: a byte of a mapping that nobody else knows of.
    unsafe { ptr::write_volatile(memory.cast::<u8>(), 1) };
    Ok(memory)
}

fn map(flags: libc::c_int, file: libc::c_int) -> io::Result<*mut libc::c_void> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let memory = unsafe { libc::mmap(ptr::null_mut(), BYTES, protection, flags, file, 0) };
    if memory == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(memory)
}

/// Mounts a file system that is one file, starts its server, and opens the file.
fn mount(waiter: UnixStream, held: UnixStream) -> Result<File> {
    fs::write("file", "")?;
    namespaces::unshare(libc::CLONE_NEWNS)?;
    let device = File::options()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .map_err(|error| NotHere(format!("no file systems in user space: /dev/fuse: {error}")))?;
    let options = format!("fd={},rootmode=100000,user_id=0,group_id=0", device.as_raw_fd());
    let options = CString::new(options)?;
    // SAFETY: strings that live across the call.
    let done = unsafe {
        libc::mount(
            c"hostile".as_ptr(),
            c"file".as_ptr(),
            c"fuse".as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV,
            options.as_ptr().cast(),
        )
    };
    check(done, "mounting the file")?;
    let parent = std::process::id();
    // SAFETY: there is one thread, so the child may do anything.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()).context("fork"),
        0 => {
            // The kernel ends every wait for this server once it is gone.
            // SAFETY: a system call on integers.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            // SAFETY: the same.
            unsafe { libc::alarm(LIFE_S) };
            let ended = serve(device, parent, waiter, held);
            eprintln!("the file's server: {ended:?}");
            std::process::exit(1)
        }
        _ => {
            drop(device);
            let file = File::options().read(true).write(true).open("file")?;
            // The kernel asks for the size, without which it knows no page of the file.
            file.metadata()?;
            Ok(file)
        }
    }
}

/// Operations of linux/fuse.h.
mod operation {
    pub(super) const FORGET: u32 = 2;
    pub(super) const GETATTR: u32 = 3;
    pub(super) const OPEN: u32 = 14;
    pub(super) const READ: u32 = 15;
    pub(super) const WRITE: u32 = 16;
    pub(super) const INIT: u32 = 26;
    pub(super) const INTERRUPT: u32 = 36;
    pub(super) const BATCH_FORGET: u32 = 42;
}

/// Answers the kernel's requests: at once, or [`HELD`] later where it writes the page back.
fn serve(mut device: File, parent: u32, mut waiter: UnixStream, mut held: UnixStream) -> Result<()> {
    waiter.set_nonblocking(true)?;
    let mut buffer = vec![0; 1 << 16];
    loop {
        let length = device.read(&mut buffer)?;
        let request = &buffer[..length];
        let word = |at: usize| -> Result<u32> {
            let bytes = request.get(at..at + 4).context("a short request")?;
            Ok(u32::from_ne_bytes(bytes.try_into()?))
        };
        // Length, operation, 8 bytes by which the answer is known.
        let (operation, unique) = (word(4)?, &request[8..16]);
        let (error, body): (i32, Vec<u8>) = match operation {
            operation::FORGET | operation::BATCH_FORGET | operation::INTERRUPT => continue,
            // Version 7.31, the kernel's own read-ahead, no flags; writes of a page at most.
            operation::INIT => (
                0,
                words(&[7, 31, 0, 0, 0, BYTES as u32, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            ),
            operation::GETATTR => (0, attributes()),
            operation::OPEN => (0, words(&[1, 0, 0, 0])),
            operation::READ => (0, vec![0; BYTES]),
            operation::WRITE => {
                let size = word(40 + 16)?;
                let mut tid = [0; 4];
                // Without one, the kernel writes back what was written back before.
                let is_asked = waiter.read_exact(&mut tid).is_ok();
                match i32::from_ne_bytes(tid) {
                    _ if !is_asked => {}
                    0 => println!("done"),
                    tid => {
                        waiter.write_all(&[0])?;
                        wait_until_blocked(parent, tid)?;
                        held.write_all(&[0])?;
                    }
                }
                if is_asked {
                    thread::sleep(HELD);
                }
                (0, words(&[size, 0]))
            }
            _ => (-libc::ENOSYS, Vec::new()),
        };
        let length = (16 + body.len()) as u32;
        let answer = [&length.to_ne_bytes()[..], &error.to_ne_bytes(), unique, &body];
        // Nobody waits any more for some of the answers.
        let _ = device.write(&answer.concat());
    }
}

/// Waits until a thread waits for a lock of the kernel's.
fn wait_until_blocked(pid: u32, tid: i32) -> Result<()> {
    for _ in 0..5000 {
        let stat = fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat"))?;
        let (_, fields) = stat.rsplit_once(") ").context("a name in parentheses")?;
        if fields.starts_with('D') {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(1));
    }
    bail!("thread {tid} does not wait for the memory lock")
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// `struct fuse_attr_out` of the file.
fn attributes() -> Vec<u8> {
    let mut attributes = [0; 26];
    // Words: valid for (4 words), inode (2), size (2), blocks (2), times (9), mode, links, user, group, device, block size, flags.
    attributes[4] = 1;
    attributes[6] = BYTES as u32;
    attributes[8] = 8;
    attributes[19] = libc::S_IFREG | 0o600;
    attributes[20] = 1;
    attributes[24] = BYTES as u32;
    words(&attributes)
}
