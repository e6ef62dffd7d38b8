//! The calling thread's identity, and threads that serve members.
//!
//! Everything here also works while a thread's variables are being destroyed. `std::thread::current` panics then, and calls still
//! come: from destructors of static objects and of other threads' variables.

use std::{
    cell::Cell,
    io,
    os::unix::thread::JoinHandleExt as _,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

/// Whether this is the calling thread.
#[must_use]
pub fn is_current<T>(thread: &JoinHandle<T>) -> bool {
    // SAFETY: no arguments; the handle says that its thread has not been joined, so that its value is no other's.
    unsafe { libc::pthread_equal(thread.as_pthread_t(), libc::pthread_self()) != 0 }
}

/// Waits for the end of a thread that has been told to end, unless it is the calling one: the last owner of something may be the
/// thread that serves it, which then ends right after. A panic there has been printed, or turned into an error.
pub fn join(thread: JoinHandle<()>) {
    if !is_current(&thread) {
        let _ = thread.join();
    }
}

/// What one thread looks after: it runs from when the first member enters until the last one has left.
pub struct Tended<T: ?Sized> {
    members: Vec<Weak<T>>,
    thread: Option<JoinHandle<()>>,
}

impl<T: ?Sized> Default for Tended<T> {
    fn default() -> Self {
        Self {
            members: Vec::new(),
            thread: None,
        }
    }
}

impl<T: ?Sized> Tended<T> {
    /// Enters a member, and starts the thread unless it runs.
    ///
    /// # Errors
    /// When there can be no thread. The member stays: the next one tries again.
    pub fn enter(
        &mut self,
        member: Weak<T>,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        self.members.push(member);
        if self.thread.is_none() {
            let builder = thread::Builder::new().name(name.into()).stack_size(256 << 10);
            self.thread = Some(builder.spawn(run)?);
        }
        Ok(())
    }

    /// Takes a member off. The thread if that was the last one: it is to be woken, finds that it is no longer
    /// [the one](Self::is_tended_by_this_thread), and ends.
    pub fn leave(&mut self, member: *const T) -> Option<JoinHandle<()>> {
        self.members
            .retain(|other| !std::ptr::addr_eq(other.as_ptr(), member));
        self.members.is_empty().then(|| self.thread.take()).flatten()
    }

    /// The members that are still there.
    #[must_use]
    pub fn members(&self) -> Vec<Arc<T>> {
        self.members.iter().filter_map(Weak::upgrade).collect()
    }

    /// Whether it has no member.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Whether a thread was started for the members.
    #[must_use]
    pub fn has_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// Whether the calling thread goes on looking: another one may have been started since it was told to end.
    #[must_use]
    pub fn is_tended_by_this_thread(&self) -> bool {
        self.thread.as_ref().is_some_and(is_current)
    }
}

/// A number of the calling thread, which no other thread of this process ever has.
#[must_use]
pub fn number() -> u64 {
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
