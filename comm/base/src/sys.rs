//! System calls that the standard library does not have: poll, eventfd, memfd, a connect that does not block.
//!
//! `rustix` makes them, but for [`poll`]: its descriptors are numbers that do not borrow their owners, so that a loop can change its
//! connections while it goes through the result.
//!
//! No descriptor of the library is 0, 1 or 2: a program whose standard output is closed writes to descriptor 1 all the same, and so does the
//! log. Whatever makes a descriptor does it by [`above_standard`], or while it holds [`StandardTaken`].

use std::{
    ffi::CStr,
    fs::File,
    io::{self, Read as _},
    mem::MaybeUninit,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
    path::Path,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, sockopt},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

use crate::sync::AtLeastOnce;

/// Longest sleep of a wait that the abort word has to release: well below the 100 ms that are promised.
pub const ABORT_CHECK: Duration = Duration::from_millis(40);

/// Turns the -1 of a system call into the error behind it.
///
/// # Errors
/// That one.
pub fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// The first number that is no standard descriptor's.
const FIRST: RawFd = libc::STDERR_FILENO + 1;

/// While it lives, the numbers of standard descriptors that are closed are taken by `/dev/null`. What the program writes there meanwhile is lost,
/// as it would have been.
#[derive(Debug)]
pub struct StandardTaken {
    _taken: [Option<OwnedFd>; FIRST as usize],
}

impl StandardTaken {
    /// Takes the numbers that are free. Where `/dev/null` cannot be opened some stay free.
    #[must_use]
    pub fn new() -> Self {
        let mut taken = [const { None }; FIRST as usize];
        for (number, place) in (0..).zip(&mut taken) {
            // SAFETY: asks for a flag of a descriptor, whoever owns it.
            if unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0 {
                continue;
            }
            *place = File::open("/dev/null")
                .map(OwnedFd::from)
                .ok()
                .filter(|opened| opened.as_raw_fd() < FIRST);
        }
        Self { _taken: taken }
    }
}

impl Default for StandardTaken {
    fn default() -> Self {
        Self::new()
    }
}

/// What `make` makes, under another number than those of the standard descriptors.
///
/// # Errors
/// That of `make`, or no other number is free.
pub fn above_standard<T: AsFd + From<OwnedFd>>(make: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let taken = StandardTaken::new();
    let made = make()?;
    drop(taken);
    if made.as_fd().as_raw_fd() >= FIRST {
        return Ok(made);
    }
    // Another thread has closed one meanwhile.
    Ok(rustix::io::fcntl_dupfd_cloexec(&made, FIRST)?.into())
}

/// The text of a small file of the system, such as one below `/proc`.
///
/// # Errors
/// The file cannot be read, or is no text.
pub fn read_text(path: impl AsRef<Path>) -> io::Result<String> {
    let mut text = String::new();
    above_standard(|| File::open(path.as_ref()))?.read_to_string(&mut text)?;
    Ok(text)
}

/// A listener; see [`TcpListener::bind`].
///
/// # Errors
/// What the system refuses.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    above_standard(|| TcpListener::bind(address))
}

/// The next connection of a listener; see [`TcpListener::accept`].
///
/// # Errors
/// What the system says, [`WouldBlock`](io::ErrorKind::WouldBlock) among it.
pub fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    above_standard(|| listener.accept().map(|(stream, _)| stream))
}

/// Runs `write`, for which no signal ends the process when nobody is left who could read: the write fails instead. Sockets have a flag for that,
/// pipes and files have none.
pub fn without_sigpipe<R>(write: impl FnOnce() -> R) -> R {
    let mut pipe = MaybeUninit::<libc::sigset_t>::uninit();
    let (mut before, mut pending) = (pipe, pipe);
    // SAFETY: the sets are filled before they are read, and there is such a signal. The mask is the calling thread's own.
    let (pipe, was_pending) = unsafe {
        libc::sigemptyset(pipe.as_mut_ptr());
        libc::sigaddset(pipe.as_mut_ptr(), libc::SIGPIPE);
        libc::sigemptyset(pending.as_mut_ptr());
        libc::sigpending(pending.as_mut_ptr());
        let pipe = pipe.assume_init();
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const pipe, before.as_mut_ptr());
        (pipe, libc::sigismember(pending.as_ptr(), libc::SIGPIPE) == 1)
    };
    let result = write();
    // SAFETY: the signal is blocked, so that it is taken here and waited for no longer than no time; then the mask is as it was.
    unsafe {
        if !was_pending {
            let now = MaybeUninit::<libc::timespec>::zeroed();
            while libc::sigtimedwait(&raw const pipe, ptr::null_mut(), now.as_ptr()) < 0
                && *libc::__errno_location() == libc::EINTR
            {}
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut());
    }
    result
}

/// A zeroed memfd of `bytes` bytes, sealed: no process that has it can shrink it, which would kill the others at their next
/// access. It does not count against the size of `/dev/shm`.
///
/// # Errors
/// `EFBIG` beyond the process's limit of file sizes; otherwise what the system says.
pub fn sealed_memfd(name: &CStr, bytes: usize) -> io::Result<OwnedFd> {
    // Growing a file beyond the limit is a signal (SIGXFSZ) that ends most processes.
    if getrlimit(Resource::Fsize)
        .current
        .is_some_and(|limit| limit < bytes as u64)
    {
        return Err(Errno::FBIG.into());
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = above_standard(|| Ok(rustix::fs::memfd_create(name, flags)?))?;
    rustix::fs::ftruncate(&fd, bytes as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// When a listener of this process last had no descriptor or memory for a connection: [`now_ms`], 0 for never.
static STARVED: AtomicU64 = AtomicU64::new(0);

/// Milliseconds since the first call, from 1.
fn now_ms() -> u64 {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed().as_millis() as u64 + 1
}

/// Whether a call failed because the process or the system has no descriptor or memory left. Remembered, since it is other
/// ranks that suffer for it: they wait for an answer.
#[must_use]
pub fn is_starved(error: &io::Error) -> bool {
    let starved = matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    );
    if starved {
        // Relaxed: only for a message.
        STARVED.store(now_ms(), Ordering::Relaxed);
    }
    starved
}

/// Whether that happened within the last `time`.
#[must_use]
pub fn was_starved(time: Duration) -> bool {
    let last = STARVED.load(Ordering::Relaxed);
    last != 0 && now_ms().saturating_sub(last) <= time.as_millis() as u64
}

/// An eventfd by which other threads end a thread's poll.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// A new one, not signalled.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        above_standard(|| Ok(eventfd(0, flags)?)).map(Self)
    }

    /// Ends the present or the next poll. Cannot fail: a counter at its limit is signalled already.
    pub fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Takes the signal back.
    pub fn drain(&self) {
        // It does not block: without a signal there is nothing to read.
        let _ = rustix::io::read(&self.0, &mut [0; size_of::<u64>()]);
    }
}

impl AsRawFd for Wake {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// One descriptor to poll.
#[must_use]
pub fn interest(fd: &impl AsRawFd, events: libc::c_short) -> libc::pollfd {
    libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    }
}

/// Waits for the descriptors, at most `timeout` (`None`: without limit). An interrupted wait is a wait that ended early.
///
/// # Errors
/// When there are more descriptors than the process may have.
pub fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<usize> {
    let time = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: `fds` is writable for its length, `time` is null or points to a timespec, and there is no signal mask.
    let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, time, ptr::null()) };
    match check(ready) {
        Ok(ready) => Ok(ready as usize),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            for fd in fds {
                fd.revents = 0;
            }
            Ok(0)
        }
        Err(error) => Err(error),
    }
}

/// Whether a polled descriptor has anything to say.
#[must_use]
pub fn is_ready(fd: &libc::pollfd) -> bool {
    fd.revents != 0
}

/// Begins to connect. The socket does not block, and is writable once the outcome is known ([`TcpStream::take_error`]).
///
/// # Errors
/// What the system refuses at once.
pub fn connect_start(address: &SocketAddr) -> io::Result<TcpStream> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = above_standard(|| Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?))?;
    let stream = TcpStream::from(socket);
    match rustix::net::connect(&stream, address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Raises the process's limit of open files to what it may raise it to, as NCCL does: a rank has about
/// 15 descriptors, and ranks may be threads of one process. Done once; what the caller sets later stays.
pub fn raise_descriptor_limit() {
    static RAISED: AtLeastOnce = AtLeastOnce::new();
    RAISED.call(|| {
        let limit = getrlimit(Resource::Nofile);
        if limit.current != limit.maximum {
            // If it is refused, what needs descriptors says so.
            let _ = setrlimit(
                Resource::Nofile,
                Rlimit {
                    current: limit.maximum,
                    ..limit
                },
            );
        }
    });
}

/// Lets as many connections wait at a listener as the system allows (`net.core.somaxconn`); the standard library asks
/// for 128.
///
/// # Errors
/// When it is no listening socket.
pub fn deepen_queue(listener: &impl AsFd) -> io::Result<()> {
    // A second listen only changes the length of the queue.
    Ok(rustix::net::listen(listener, i32::MAX)?)
}

/// Lets the system ask now and then whether the other end is still there: a machine that vanished without a word is
/// noticed after about 11 s.
///
/// # Errors
/// What the system refuses.
pub fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    // Otherwise the system would wait for that long, and not count.
    sockopt::set_tcp_user_timeout(stream, 0)?;
    Ok(())
}

/// The opposite of [`keep_alive`]: the connection lives however long the other end does not answer, and goes on when it does. By default
/// the system gives one up whose bytes have not been taken for a quarter of an hour.
///
/// # Errors
/// What the system refuses.
pub fn bear_silence(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, false)?;
    // Milliseconds: 24 days.
    sockopt::set_tcp_user_timeout(stream, i32::MAX.cast_unsigned())?;
    Ok(())
}

/// Connects, giving up at `deadline` or as soon as `stop` says so (looked at every [`ABORT_CHECK`]); `Ok(None)`: stopped.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`] at the deadline; otherwise what the system says.
pub fn connect(
    address: &SocketAddr,
    deadline: Instant,
    stop: &dyn Fn() -> bool,
) -> io::Result<Option<TcpStream>> {
    let stream = connect_start(address)?;
    loop {
        if stop() {
            return Ok(None);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if poll(
            &mut [interest(&stream, libc::POLLOUT)],
            Some(left.min(ABORT_CHECK)),
        )? > 0
        {
            return stream.take_error()?.map_or(Ok(Some(stream)), Err);
        }
    }
}

/// Eight bytes that nobody can guess.
///
/// # Errors
/// Where the system has no random numbers yet.
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // Requests of up to 256 bytes are not cut short once the pool is initialised.
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    if count == bytes.len() {
        Ok(u64::from_ne_bytes(bytes))
    } else {
        Err(io::Error::other("the system gave too few random bytes"))
    }
}
