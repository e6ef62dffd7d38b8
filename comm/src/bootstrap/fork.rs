//! What a forked child must not keep. Sockets: as long as it has them, the other ranks cannot see that the rank's process
//! has ended (a data loader's workers outlive a killed trainer by seconds). And locks: the thread that held one at the
//! fork does not exist in the child.

use std::{
    os::fd::{AsRawFd, RawFd},
    ptr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicPtr, AtomicU64, Ordering},
    },
};

use crate::{observe, threads::AtLeastOnce};

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
        static HANDLER: AtLeastOnce = AtLeastOnce::new();
        // SAFETY: registers a plain function that only does atomic operations and `close`, all async-signal-safe. What it has done
        // once is not there to be done again.
        HANDLER.call(|| unsafe {
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

/// Something that each process has one of, behind a lock. A forked child begins with a new one, in the lock of which no
/// thread of its parent is; what the parent had is neither used nor dropped there.
pub(crate) struct PerFork<T>(AtomicPtr<(u32, Mutex<T>)>);

impl<T: Default + Send> PerFork<T> {
    /// None yet.
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Locks this process's own.
    pub(crate) fn lock(&'static self) -> MutexGuard<'static, T> {
        observe::notice_forks();
        let fork = observe::fork_generation();
        // Acquire: who sees the pointer sees what it points to.
        let mut seen = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or made from a box below, and then never freed.
            if let Some((of, value)) = unsafe { seen.as_ref() }
                && *of == fork
            {
                return value.lock().unwrap_or_else(PoisonError::into_inner);
            }
            let fresh = Box::into_raw(Box::new((fork, Mutex::default())));
            // Release: as above, for others that acquire it.
            match self
                .0
                .compare_exchange(seen, fresh, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => seen = fresh,
                Err(other) => {
                    // SAFETY: made above and given to nobody.
                    drop(unsafe { Box::from_raw(fresh) });
                    seen = other;
                }
            }
        }
    }
}
