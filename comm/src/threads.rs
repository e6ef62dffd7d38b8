//! Who the calling thread is, also while its variables are being destroyed: then `std::thread::current` panics, and calls
//! still come, of destructors of static objects and of other threads' variables.

use std::{
    cell::Cell,
    io,
    os::unix::thread::JoinHandleExt as _,
    ptr::null_mut,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
};

use crate::observe;

/// Whether this is the calling thread.
pub(crate) fn is_current<T>(thread: &JoinHandle<T>) -> bool {
    // SAFETY: no arguments; the handle says that its thread has not been joined, so that its value is no other's.
    unsafe { libc::pthread_equal(thread.as_pthread_t(), libc::pthread_self()) != 0 }
}

/// Waits for the end of a thread that has been told to end, unless it is the calling one: the last owner of something may be the
/// thread that serves it, which then ends right after. A panic there has been printed, or turned into an error.
pub(crate) fn join(thread: JoinHandle<()>) {
    if !is_current(&thread) {
        let _ = thread.join();
    }
}

/// What one thread looks after: it runs from when the first member enters until the last one has left.
pub(crate) struct Tended<T: ?Sized> {
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
    pub(crate) fn enter(
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
    pub(crate) fn leave(&mut self, member: *const T) -> Option<JoinHandle<()>> {
        self.members
            .retain(|other| !std::ptr::addr_eq(other.as_ptr(), member));
        self.members.is_empty().then(|| self.thread.take()).flatten()
    }

    /// The members that are still there.
    pub(crate) fn members(&self) -> Vec<Arc<T>> {
        self.members.iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    pub(crate) fn has_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// Whether the calling thread goes on looking: another one may have been started since it was told to end.
    pub(crate) fn is_tended_by_this_thread(&self) -> bool {
        self.thread.as_ref().is_some_and(is_current)
    }
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
        // Before there is a value that a child could take for its own.
        observe::notice_forks();
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

/// Something that has to be done before whoever asks goes on, and does no harm when it is done more than once: threads that come at the same
/// time all do it. A `Once` would be held while one does, and a child that is forked then would wait for ever for a thread that it has not.
pub(crate) struct AtLeastOnce(AtomicBool);

impl AtLeastOnce {
    pub(crate) const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    pub(crate) fn call(&self, make: impl FnOnce()) {
        // Acquire, release: who finds it done finds what was done.
        if !self.0.load(Ordering::Acquire) {
            make();
            self.0.store(true, Ordering::Release);
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
