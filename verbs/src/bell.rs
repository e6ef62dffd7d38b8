//! What wakes a thread that sleeps on descriptors.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd as _, OwnedFd, RawFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use crate::device::Context;

/// A descriptor that is readable from the first ring until somebody takes notice.
pub(crate) struct Bell {
    fd: OwnedFd,
    rung: AtomicBool,
}

impl Bell {
    /// One that has not rung.
    ///
    /// # Errors
    /// For want of descriptors.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: a new descriptor or -1.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            // SAFETY: just made, and nobody else's.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            rung: AtomicBool::new(false),
        })
    }

    /// Wakes who sleeps, and who will.
    pub(crate) fn ring(&self) {
        // AcqRel, as in `hush`: a ring that finds it rung is seen by whoever hushes it, with all that came before the ring.
        if !self.rung.swap(true, Ordering::AcqRel) {
            let one = 1_u64.to_ne_bytes();
            // SAFETY: eight bytes, as the descriptor takes. It is full only if it is readable.
            unsafe { libc::write(self.fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        }
    }

    /// Takes notice: what is looked at from now on is as new as the last ring, or the bell rings again. No system call if it was not
    /// rung.
    pub(crate) fn hush(&self) {
        // Relaxed: if it is rung just now, the descriptor stays readable.
        if self.rung.load(Ordering::Relaxed) {
            let mut count = [0; 8];
            // SAFETY: room for eight bytes. Before the flag, so that a ring after the flag's change finds the descriptor empty.
            let read = unsafe { libc::read(self.fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
            // Who rings has set the flag and not written yet: were the flag taken back now, nothing would empty the descriptor then,
            // and who sleeps on it would not.
            if read > 0 {
                self.rung.swap(false, Ordering::AcqRel);
            }
        }
    }
}

impl AsRawFd for Bell {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Sleeps until the bell rings or one of the devices has an event, at most for `most`; those whose descriptor has come to its end are added to `gone`.
/// Whether it could sleep.
pub(crate) fn wait(
    bell: &Bell,
    contexts: &[Arc<Context>],
    gone: &mut Vec<Arc<Context>>,
    most: Option<Duration>,
) -> bool {
    let fds = std::iter::once(bell.as_raw_fd()).chain(contexts.iter().map(AsRawFd::as_raw_fd));
    let mut polled: Vec<libc::pollfd> = fds
        .map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        })
        .collect();
    // Rounded up, lest it is called again and again in the last millisecond.
    let milliseconds = most.map_or(-1, |most| i32::try_from(most.as_millis() + 1).unwrap_or(i32::MAX));
    // SAFETY: as many as there are.
    let count = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, milliseconds) };
    if count < 0 {
        return io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
    }
    bell.hush();
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

    fn is_readable(bell: &Bell, milliseconds: i32) -> bool {
        let mut polled = libc::pollfd {
            fd: bell.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one of them.
        unsafe { libc::poll(&raw mut polled, 1, milliseconds) == 1 }
    }

    #[test]
    fn it_rings_until_it_is_hushed() {
        let bell = Bell::new().unwrap();
        assert!(!is_readable(&bell, 0));
        bell.ring();
        bell.ring();
        assert!(is_readable(&bell, 0) && is_readable(&bell, 0));
        bell.hush();
        assert!(!is_readable(&bell, 0));
        bell.hush();
        bell.ring();
        assert!(is_readable(&bell, 0));
    }

    #[test]
    fn who_takes_notice_amid_a_ring_takes_notice_again() {
        let bell = Bell::new().unwrap();
        // A ring up to where it writes, and the rest of it.
        bell.rung.store(true, Ordering::Release);
        bell.hush();
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight bytes.
        unsafe { libc::write(bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        assert!(is_readable(&bell, 0));
        bell.hush();
        assert!(!is_readable(&bell, 0));
    }

    #[test]
    fn no_ring_is_lost() {
        const RINGS: u64 = 20_000;
        let (bell, version) = (Bell::new().unwrap(), AtomicU64::new(0));
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..RINGS {
                        version.fetch_add(1, Ordering::Release);
                        bell.ring();
                    }
                });
            }
            let mut seen = 0;
            while seen < 2 * RINGS {
                // Nothing else wakes it: a ring that is lost shows as a sleep without end.
                assert!(is_readable(&bell, 60_000), "a ring was lost after {seen}");
                bell.hush();
                seen = version.load(Ordering::Acquire);
            }
        });
    }
}
