//! State that a forked child must not take over from its parent.
//!
//! - Sockets ([`ParentOnly`]): as long as a child has them, the other ranks cannot see that the rank's process has ended. A data loader's
//!   workers outlive a killed trainer by seconds.
//! - Locks ([`PerProcess`]): the thread that held one at the fork does not exist in the child.
//! - Everything else remembers the [`generation`] it was made in, and is refused in another one.

use std::{
    os::fd::{AsRawFd, RawFd},
    ptr::null_mut,
    sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering},
};

use crate::sync::AtLeastOnce;

/// How often this process descends by fork from the one that loaded the library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// How often this process was forked since the library was loaded: a communicator made under another number belongs to
/// the parent, whose threads do not exist here.
#[must_use]
pub fn generation() -> u32 {
    // Relaxed: it changes on a process's first thread only, right after the fork.
    GENERATION.load(Ordering::Relaxed)
}

/// Makes [`generation`] count from now on. To be called before anything is made that a child must not take for its own.
pub fn count_generations() {
    extern "C" fn forked() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }
    static HANDLER: AtLeastOnce = AtLeastOnce::new();
    // Two handlers count a fork twice, which tells it from others all the same.
    // SAFETY: an atomic operation is async-signal-safe.
    HANDLER.call(|| unsafe { at_fork(forked) });
}

/// Has `handler` called in every child right after the fork, on the child's only thread.
///
/// # Safety
/// The handler only does what is async-signal-safe: atomic operations and `close`, among others.
pub unsafe fn at_fork(handler: extern "C" fn()) {
    // SAFETY: a plain function without arguments; the caller answers for what it does.
    unsafe { libc::pthread_atfork(None, None, Some(handler)) };
}

/// Descriptors beyond this many stay open in a forked child.
const MOST: usize = 1 << 16;

/// One bit for each descriptor that [`ParentOnly`] holds. Process-wide as descriptors are; without a lock, since a thread
/// that does not exist in the child might hold it.
static HELD: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

/// Something with a descriptor that is closed in children of this process when they are forked. What is left of it in
/// a child must be neither used nor dropped: communicators refuse both.
#[derive(Debug)]
pub struct ParentOnly<T: AsRawFd>(T);

impl<T: AsRawFd> ParentOnly<T> {
    /// Takes the descriptor over.
    pub fn new(inner: T) -> Self {
        static HANDLER: AtLeastOnce = AtLeastOnce::new();
        // A second handler finds no bit set.
        // SAFETY: atomic operations and `close` are async-signal-safe.
        HANDLER.call(|| unsafe { at_fork(close_held) });
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
extern "C" fn close_held() {
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

/// One value a process, made at its first use and never freed. A forked child makes another one, since a thread that
/// does not exist there may hold the locks of its parent's.
pub struct PerProcess<T>(AtomicPtr<Of<T>>);

struct Of<T> {
    /// See [`generation`].
    generation: u32,
    value: T,
}

impl<T: Default + Sync + 'static> PerProcess<T> {
    /// No value yet.
    #[must_use]
    #[expect(
        clippy::new_without_default,
        reason = "it is for statics, which need a const function"
    )]
    pub const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// This process's value.
    pub fn get(&self) -> &'static T {
        // Before there is a value that a child could take for its own.
        count_generations();
        let generation = generation();
        loop {
            // Acquire: pairs with the exchange below; what it points to is there.
            let pointer = self.0.load(Ordering::Acquire);
            // SAFETY: null, or a value that is never freed.
            if let Some(of) = unsafe { pointer.as_ref() }.filter(|of| of.generation == generation) {
                return &of.value;
            }
            let fresh = Box::into_raw(Box::new(Of {
                generation,
                value: T::default(),
            }));
            // Release: see above. The thread that comes second frees its own.
            if self
                .0
                .compare_exchange(pointer, fresh, Ordering::Release, Ordering::Relaxed)
                .is_err()
            {
                // SAFETY: made above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }
}
