//! Who the calling thread is, also while its variables are being destroyed: then `std::thread::current` panics, and calls
//! still come, of destructors of static objects and of other threads' variables.

use std::{
    cell::Cell,
    os::unix::thread::JoinHandleExt as _,
    ptr::null_mut,
    sync::atomic::{AtomicPtr, AtomicU64, Ordering},
    thread::JoinHandle,
};

use crate::observe;

/// Whether this is the calling thread.
pub(crate) fn is_current<T>(thread: &JoinHandle<T>) -> bool {
    // SAFETY: no arguments; the handle says that its thread has not been joined, so that its value is no other's.
    unsafe { libc::pthread_equal(thread.as_pthread_t(), libc::pthread_self()) != 0 }
}

/// A number of the calling thread, which no other thread of this process ever has.
pub(crate) fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        /// 0 before it is asked for.
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    if NUMBER.get() == 0 {
        // Relaxed: numbers need to differ, they order nothing.
        NUMBER.set(NEXT.fetch_add(1, Ordering::Relaxed));
    }
    NUMBER.get()
}

/// One value a process, made when it is first asked for and never freed. A forked child makes another one, since a thread that
/// does not exist there may hold the locks of its parent's.
pub(crate) struct PerProcess<T>(AtomicPtr<Of<T>>);

struct Of<T> {
    /// See [`observe::fork_generation`].
    fork: u32,
    value: T,
}

impl<T: Default + Sync + 'static> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    pub(crate) fn get(&self) -> &'static T {
        let fork = observe::fork_generation();
        loop {
            // Acquire: pairs with the exchange below; what it points to is there.
            let pointer = self.0.load(Ordering::Acquire);
            // SAFETY: null, or a value that is never freed.
            if let Some(of) = unsafe { pointer.as_ref() }.filter(|of| of.fork == fork) {
                return &of.value;
            }
            let fresh = Box::into_raw(Box::new(Of {
                fork,
                value: T::default(),
            }));
            // Release: see above. Whoever comes second gives its own back.
            if self
                .0
                .compare_exchange(pointer, fresh, Ordering::Release, Ordering::Relaxed)
                .is_err()
            {
                // SAFETY: made above, and nobody has seen it.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn threads_are_told_apart() {
        let (send, receive) = mpsc::channel::<JoinHandle<(bool, u64)>>();
        let (tell, told) = mpsc::channel();
        let thread = thread::spawn(move || {
            let own: JoinHandle<(bool, u64)> = receive.recv().unwrap();
            tell.send((is_current(&own), number())).unwrap();
            (false, 0)
        });
        assert!(!is_current(&thread));
        send.send(thread).unwrap();
        let (own, theirs) = told.recv().unwrap();
        assert!(own);
        assert_eq!(number(), number());
        assert_ne!(number(), theirs);
    }
}
