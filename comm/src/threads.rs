//! Who the calling thread is, also while its variables are being destroyed: then `std::thread::current` panics, and calls
//! still come, of destructors of static objects and of other threads' variables.

use std::{
    cell::Cell,
    os::unix::thread::JoinHandleExt as _,
    sync::atomic::{AtomicU64, Ordering},
    thread::JoinHandle,
};

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
