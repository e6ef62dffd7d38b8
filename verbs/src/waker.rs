//! The waker: ends a thread's sleep on descriptors.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd as _, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ringsight_comm_base::sys::StandardTaken;

use crate::device::Context;

/// A descriptor that is readable from [`Waker::wake`] until [`Waker::clear`].
pub(crate) struct Waker {
    fd: OwnedFd,
    woken: AtomicBool,
}

impl Waker {
    /// A waker that is clear.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        let _standard = StandardTaken::new();
        // SAFETY: a new descriptor or -1.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            // SAFETY: just made, and nobody else's.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            woken: AtomicBool::new(false),
        })
    }

    /// Ends the present sleep, or the next one.
    pub(crate) fn wake(&self) {
        // AcqRel, as in `clear`: the thread that clears sees everything that happened before a wake that found the flag set.
        if !self.woken.swap(true, Ordering::AcqRel) {
            let one = 1_u64.to_ne_bytes();
            // SAFETY: eight readable bytes. The write can fail only if the counter is full, and then the descriptor is readable.
            unsafe { libc::write(self.fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Clears the waker. Whatever the caller reads afterwards is as new as the last wake, or the waker is set again. Makes no system call if
    /// the waker was clear.
    pub(crate) fn clear(&self) {
        // Relaxed: after a concurrent wake the descriptor stays readable.
        if self.woken.load(Ordering::Relaxed) {
            let mut count = [0; 8];
            // SAFETY: eight writable bytes. Read before the flag changes, so that a later wake finds the descriptor empty.
            let read = unsafe { libc::read(self.fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
            // Nothing read: a thread has set the flag and has not written yet. The flag must stay set, or nothing would ever empty the
            // descriptor and no thread could sleep on it.
            if read > 0 {
                self.woken.swap(false, Ordering::AcqRel);
            }
        }
    }
}

impl AsRawFd for Waker {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Sleeps until the waker wakes or one of the devices has an event, at most for `timeout`. Devices whose descriptor reports an error are
/// added to `gone`. Returns false if `poll` fails.
pub(crate) fn wait(
    waker: &Waker,
    contexts: &[Arc<Context>],
    gone: &mut Vec<Arc<Context>>,
    timeout: Option<Duration>,
) -> bool {
    let fds = std::iter::once(waker.as_raw_fd()).chain(contexts.iter().map(AsRawFd::as_raw_fd));
    let mut polled: Vec<libc::pollfd> = fds
        .map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    // Rounded up, so that the caller does not spin through the last millisecond.
    let milliseconds = timeout.map_or(-1, |timeout| {
        i32::try_from(timeout.as_millis() + 1).unwrap_or(i32::MAX)
    });
    // SAFETY: writable for its length.
    let count = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) };
    if count < 0 {
        return io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
    }
    waker.clear();
    for (context, polled) in contexts.iter().zip(&polled[1..]) {
        if polled.revents != 0 && polled.revents & libc::POLLIN == 0 {
            gone.push(Arc::clone(context));
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicU64, thread};

    use super::*;

    fn is_readable(waker: &Waker, milliseconds: i32) -> bool {
        let mut polled = libc::pollfd {
            fd: waker.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one writable entry.
        unsafe { libc::poll(&raw mut polled, 1, milliseconds) == 1 }
    }

    #[test]
    fn a_waker_is_readable_until_it_is_cleared() {
        let waker = Waker::new().unwrap();
        assert!(!is_readable(&waker, 0));
        waker.wake();
        waker.wake();
        assert!(is_readable(&waker, 0) && is_readable(&waker, 0));
        waker.clear();
        assert!(!is_readable(&waker, 0));
        waker.clear();
        waker.wake();
        assert!(is_readable(&waker, 0));
    }

    #[test]
    fn a_clear_during_a_wake_leaves_the_waker_readable() {
        let waker = Waker::new().unwrap();
        // A wake up to its write, then the write.
        waker.woken.store(true, Ordering::Release);
        waker.clear();
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight readable bytes.
        unsafe { libc::write(waker.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        assert!(is_readable(&waker, 0));
        waker.clear();
        assert!(!is_readable(&waker, 0));
    }

    #[test]
    fn no_wake_is_lost() {
        const WAKES: u64 = 20_000;
        let (waker, version) = (Waker::new().unwrap(), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..WAKES {
                        version.fetch_add(1, Ordering::Release);
                        waker.wake();
                    }
                });
            }
            let mut seen = 0;
            while seen < 2 * WAKES {
                // Nothing else wakes this thread: a lost wake shows as an endless sleep.
                assert!(is_readable(&waker, 60_000), "a wake was lost after {seen}");
                waker.clear();
                seen = version.load(Ordering::Acquire);
            }
        });
    }
}
