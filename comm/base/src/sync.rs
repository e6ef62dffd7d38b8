//! Locks that a panic does not poison, and once-only work that a fork cannot lock up.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

/// Locks a mutex even if a thread panicked while it held the lock. A panic is reported as an internal error at the call that it broke, and
/// what these locks guard is consistent between statements.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work that has to be done before its caller goes on, and that does no harm when it is done more than once: threads that come at the same
/// time all do it. A `Once` is held while one thread works, and a child that is forked then would wait for ever for a thread that it does
/// not have.
#[derive(Debug, Default)]
pub struct AtLeastOnce(AtomicBool);

impl AtLeastOnce {
    /// Not done yet.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Calls `make` unless a call of it has returned.
    pub fn call(&self, make: impl FnOnce()) {
        // Acquire, release: a caller that skips `make` sees what `make` did.
        if !self.0.load(Ordering::Acquire) {
            make();
            self.0.store(true, Ordering::Release);
        }
    }
}
