//! Sockets that a forked child must not keep: as long as it has them, the other ranks cannot see that the rank's process
//! has ended (a data loader's workers outlive a killed trainer by seconds).

use std::{
    os::fd::{AsRawFd, RawFd},
    sync::{
        Once,
        atomic::{AtomicU64, Ordering},
    },
};

/// Descriptors beyond this many stay open in a forked child.
const MOST: usize = 1 << 16;

/// One bit for each descriptor that [`ParentOnly`] holds. Process-wide as descriptors are; without a lock, since a thread
/// that does not exist in the child might hold it.
static HELD: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

/// Something with a descriptor that is closed in children of this process when they are forked. What is left of it in
/// a child must be neither used nor dropped: communicators refuse both.
#[derive(Debug)]
pub(crate) struct ParentOnly<T: AsRawFd>(T);

impl<T: AsRawFd> ParentOnly<T> {
    pub(crate) fn new(inner: T) -> Self {
        static HANDLER: Once = Once::new();
        // SAFETY: registers a plain function that only does atomic operations and `close`, all async-signal-safe.
        HANDLER.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(forked));
        });
        if let Some((word, bit)) = place(inner.as_raw_fd()) {
            // Relaxed: a fork takes the memory as it is; a bit that it misses costs an open descriptor.
            HELD[word].fetch_or(bit, Ordering::Relaxed);
        }
        Self(inner)
    }
}

impl<T: AsRawFd> std::ops::Deref for ParentOnly<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsRawFd> Drop for ParentOnly<T> {
    fn drop(&mut self) {
        if let Some((word, bit)) = place(self.0.as_raw_fd()) {
            // Before the descriptor is closed and its number somebody else's. Release: the close stays behind it.
            HELD[word].fetch_and(!bit, Ordering::Release);
        }
    }
}

fn place(fd: RawFd) -> Option<(usize, u64)> {
    let fd = usize::try_from(fd).ok().filter(|fd| *fd < MOST)?;
    Some((fd / 64, 1 << (fd % 64)))
}

/// In the child, right after the fork, on its only thread.
extern "C" fn forked() {
    for (word, held) in (0..).zip(&HELD) {
        // Relaxed: there is one thread.
        let mut held = held.swap(0, Ordering::Relaxed);
        while held != 0 {
            // SAFETY: a descriptor of ours, of which this process makes no use.
            unsafe { libc::close(word * 64 + held.trailing_zeros() as RawFd) };
            held &= held - 1;
        }
    }
}
