//! The few system calls that the standard library has no words for: poll, eventfd, a connect that does not block.

use std::{
    ffi::CStr,
    io,
    net::{SocketAddr, TcpStream},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::threads::AtLeastOnce;

/// Longest sleep of a wait that the abort word has to release: well below the 100 ms that are promised.
pub(crate) const ABORT_CHECK: Duration = Duration::from_millis(40);

/// Turns the -1 of a system call into the error behind it.
pub(crate) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// A zeroed memfd of `bytes` bytes, sealed: no process that has it can shrink it, which would kill the others at their next
/// access. It is no file of `/dev/shm`, so that a small one of these does not matter.
pub(crate) fn sealed_memfd(name: &CStr, bytes: usize) -> io::Result<OwnedFd> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is writable.
    check(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) })?;
    if limit.rlim_cur < bytes as libc::rlim_t {
        // Growing a file beyond the limit is a signal (SIGXFSZ) that ends most processes.
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: a C string; the result is checked.
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), flags) })?;
    // SAFETY: a new descriptor that nobody else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: no pointers.
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) })?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: no pointers.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) })?;
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
pub(crate) fn is_starved(error: &io::Error) -> bool {
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
pub(crate) fn was_starved(time: Duration) -> bool {
    let last = STARVED.load(Ordering::Relaxed);
    last != 0 && now_ms().saturating_sub(last) <= time.as_millis() as u64
}

/// An eventfd by which other threads end a thread's poll.
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    /// A new one, not signalled.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the result is checked.
        let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: a new descriptor that nobody else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Ends the present or the next poll. Cannot fail: a counter at its limit is signalled already.
    pub(crate) fn wake(&self) {
        let one = 1u64;
        // SAFETY: eight readable bytes.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Takes the signal back.
    pub(crate) fn drain(&self) {
        let mut count = 0u64;
        // SAFETY: eight writable bytes; the descriptor does not block.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl AsRawFd for Wake {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// One descriptor to poll.
pub(crate) fn interest(fd: &impl AsRawFd, events: libc::c_short) -> libc::pollfd {
    libc::pollfd {
        fd: fd.as_raw_fd(),
        events,
        revents: 0,
    }
}

/// Waits for the descriptors, at most `timeout` (`None`: without limit). An interrupted wait is a wait that ended early.
pub(crate) fn poll(fds: &mut [libc::pollfd], timeout: Option<Duration>) -> io::Result<usize> {
    let time = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `fds` is writable for its length, `time` is null or points to a timespec, and there is no signal mask.
    let ready = unsafe {
        libc::ppoll(
            fds.as_mut_ptr(),
            fds.len() as libc::nfds_t,
            time,
            std::ptr::null(),
        )
    };
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
pub(crate) fn is_ready(fd: &libc::pollfd) -> bool {
    fd.revents != 0
}

/// Begins to connect; the socket does not block and is writable once the outcome is known ([`TcpStream::take_error`]).
pub(crate) fn connect_start(address: &SocketAddr) -> io::Result<TcpStream> {
    let (storage, length) = sockaddr(address);
    let family = i32::from(storage.ss_family);
    // SAFETY: no pointers; the result is checked.
    let fd = check(unsafe {
        libc::socket(
            family,
            libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        )
    })?;
    // SAFETY: a new descriptor that nobody else owns.
    let stream = unsafe { TcpStream::from_raw_fd(fd) };
    // SAFETY: `storage` holds an address of `length` bytes.
    match check(unsafe { libc::connect(fd, (&raw const storage).cast(), length) }) {
        Ok(_) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Raises the process's limit of open files to what it may raise it to, as NCCL does: a rank has about
/// 15 descriptors, and ranks may be threads of one process. Done once; what the caller sets later stays.
pub(crate) fn raise_descriptor_limit() {
    static RAISED: AtLeastOnce = AtLeastOnce::new();
    RAISED.call(|| {
        let mut limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: a valid place.
        let known = check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) });
        if known.is_ok() && limit.rlim_cur < limit.rlim_max {
            limit.rlim_cur = limit.rlim_max;
            // If it is refused, what needs descriptors says so.
            // SAFETY: a valid limit.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
        }
    });
}

/// Lets as many connections wait at a listener as the system allows (`net.core.somaxconn`); the standard library asks
/// for 128.
pub(crate) fn deepen_queue(listener: &impl AsRawFd) -> io::Result<()> {
    // SAFETY: no pointers. A second listen only changes the length of the queue.
    check(unsafe { libc::listen(listener.as_raw_fd(), libc::c_int::MAX) }).map(drop)
}

/// Lets the system ask now and then whether the other end is still there: a machine that vanished without a word is
/// noticed after about 11 s.
pub(crate) fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 5),
        (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, 2),
        (libc::IPPROTO_TCP, libc::TCP_KEEPCNT, 3),
        // Otherwise the system would wait for that long, and not count.
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 0),
    ];
    set_options(stream, &options)
}

/// The opposite: the connection lives however long the other end does not answer, and goes on when it does. By default the system
/// gives one up whose bytes have not been taken for a quarter of an hour.
pub(crate) fn bear_silence(stream: &TcpStream) -> io::Result<()> {
    let options = [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 0),
        // Milliseconds: 24 days.
        (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, libc::c_int::MAX),
    ];
    set_options(stream, &options)
}

fn set_options(stream: &TcpStream, options: &[(libc::c_int, libc::c_int, libc::c_int)]) -> io::Result<()> {
    for (level, name, value) in options {
        // SAFETY: `value` is readable for its size.
        check(unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                *level,
                *name,
                std::ptr::from_ref(value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        })?;
    }
    Ok(())
}

/// Connects, giving up at `deadline` or as soon as `stop` says so (looked at every [`ABORT_CHECK`]); `Ok(None)`: stopped.
pub(crate) fn connect(
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

fn sockaddr(address: &SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all-zero bytes are a valid `sockaddr_storage` (family AF_UNSPEC).
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from_ne_bytes(v4.ip().octets()),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: `sockaddr_storage` is large and aligned enough for every address.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
            (storage, size_of::<libc::sockaddr_in>() as libc::socklen_t)
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: v6.ip().octets(),
                },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
            (storage, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
        }
    }
}

/// Eight bytes that nobody can guess.
pub(crate) fn random_u64() -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: eight writable bytes. Requests of up to 256 bytes are not cut short once the pool is initialised.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == bytes.len() as isize {
        Ok(u64::from_ne_bytes(bytes))
    } else {
        Err(io::Error::last_os_error())
    }
}
