//! What a communicator's handle stands for from its first moment on: being made, ready, busy, failed.

use std::{
    sync::{
        Arc, Condvar, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    sync::lock,
    threads,
};
use ringsight_kernels::AbortWord;

use crate::watchdog::FailureControl;

/// Failures that happen behind the caller's back.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    fault: Mutex<Fault>,
    /// There is one.
    any: AtomicBool,
}

#[derive(Debug, Default)]
struct Fault {
    first: Option<Error>,
    silent: bool,
}

impl Faults {
    /// Keeps the first one.
    pub(crate) fn set(&self, error: Error) {
        if let Some(error) = self.keep(error) {
            say(&error);
        }
    }

    /// Keeps the first one, which is then to be said: after everything that follows from it, since words may wait for
    /// whoever reads them.
    fn keep(&self, error: Error) -> Option<Error> {
        let mut fault = lock(&self.fault);
        if fault.silent || fault.first.is_some() {
            return None;
        }
        fault.first = Some(error.clone());
        // Release: pairs with `get`.
        self.any.store(true, Ordering::Release);
        Some(error)
    }

    /// Keeps what a call of the caller's failed with, also when nothing else matters any more.
    fn set_by_call(&self, error: Error) {
        lock(&self.fault).first.get_or_insert(error);
        // Release: pairs with `get`.
        self.any.store(true, Ordering::Release);
    }

    pub(crate) fn get(&self) -> Option<Error> {
        // Acquire: who has seen what was done because of a fault, the abort word set, sees that there is one.
        if !self.any.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.fault).first.clone()
    }

    /// Forgets what went wrong and will go wrong: the communicator was given up, so nothing depends on it.
    pub(crate) fn silence(&self) {
        let mut fault = lock(&self.fault);
        *fault = Fault {
            first: None,
            silent: true,
        };
        // Relaxed: who still sees one finds none.
        self.any.store(false, Ordering::Relaxed);
    }
}

impl FailureControl for Lifecycle {
    fn set_error(&self, error: Error) {
        self.faults.set(error);
    }

    fn fail(&self, error: Error) {
        self.fail(error);
    }
}

fn say(error: &Error) {
    tracing::warn!(target: ringsight_comm_base::log::INIT, "the communicator has failed: {error}");
}

/// What stays with a handle while the communicator behind it comes and goes.
pub struct Lifecycle {
    blocking: bool,
    abort: Arc<AbortWord>,
    faults: Arc<Faults>,
    activity: Mutex<Activity>,
    /// A group has worked on it, and its end has not been seen: written under the lock.
    worked: AtomicBool,
    /// Told before a failure or an abort releases what waits.
    before_failure: OnceLock<BeforeFailure>,
}

/// Done before every wait of a communicator is released; may take a moment.
type BeforeFailure = Box<dyn Fn() + Send + Sync>;

#[derive(Default)]
struct Activity {
    /// The group that works on it, or has.
    work: Option<Arc<Background>>,
    running: bool,
    aborted: bool,
    /// What releases communicators that are being made from this one.
    children: Vec<Weak<AbortWord>>,
}

impl Lifecycle {
    /// Of a communicator whose calls return when they are done (`blocking`), or `ncclInProgress`.
    #[must_use]
    pub fn new(blocking: bool) -> Arc<Self> {
        Arc::new(Self {
            blocking,
            abort: Arc::default(),
            faults: Arc::default(),
            activity: Mutex::default(),
            worked: AtomicBool::new(false),
            before_failure: OnceLock::new(),
        })
    }

    /// Whether its calls return when they are done.
    #[must_use]
    pub fn blocking(&self) -> bool {
        self.blocking
    }

    pub(crate) fn abort_word(&self) -> &Arc<AbortWord> {
        &self.abort
    }

    pub(crate) fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }

    /// Nothing has been done with it by another thread, or the end of that has been seen: for who is about to ask
    /// [`Lifecycle::check_idle`], which takes a lock.
    pub(super) fn rests(&self) -> bool {
        // Relaxed: a call that is to find out what another thread began comes after that by the caller's own order.
        !self.worked.load(Ordering::Relaxed)
    }

    /// Whether a group still works on it.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        let mut activity = lock(&self.activity);
        if !activity.running
            && let Some(work) = activity.work.take()
        {
            // Who sees the end also sees the thread gone, as far as it is up to us.
            drop(activity);
            work.join(Duration::from_secs(1));
            return false;
        }
        self.worked.store(activity.running, Ordering::Relaxed);
        activity.running
    }

    /// No group works on it.
    ///
    /// # Errors
    /// One does: what NCCL calls an attempt to use a communicator before the previous operation is done.
    pub fn check_idle(&self) -> Result<()> {
        if self.is_busy() {
            return Err(Error::argument(
                "comm is busy with an earlier call: wait until ncclCommGetAsyncError no longer gives ncclInProgress",
            ));
        }
        Ok(())
    }

    /// A group begins to work on it.
    pub(crate) fn begin(&self, work: &Arc<Background>) {
        let mut activity = lock(&self.activity);
        activity.work = Some(work.clone());
        activity.running = true;
        self.worked.store(true, Ordering::Relaxed);
    }

    /// The group is done with it.
    pub(crate) fn finish(&self, result: &Result<()>) {
        if let Err(error) = result {
            self.faults.set_by_call(error.clone());
        }
        lock(&self.activity).running = false;
    }

    /// Something went wrong behind the caller's back: the first such error stays, and every wait is released.
    pub(crate) fn fail(&self, error: Error) {
        // The error first: who is released finds it.
        let fresh = self.faults.keep(error);
        self.tell_of_failure();
        self.abort.set();
        if let Some(error) = fresh {
            say(&error);
        }
    }

    /// Has this done before a failure, or an abort, releases every wait: what is done afterwards is so because of it. Once.
    pub(crate) fn before_failure(&self, tell: BeforeFailure) {
        let _ = self.before_failure.set(tell);
    }

    fn tell_of_failure(&self) {
        if let Some(tell) = self.before_failure.get() {
            tell();
        }
    }

    /// Notes a communicator that is being made from this one, so that it is aborted along with it.
    pub(crate) fn expect_child(&self, abort: &Arc<AbortWord>) {
        let mut activity = lock(&self.activity);
        activity.children.retain(|child| child.strong_count() > 0);
        activity.children.push(Arc::downgrade(abort));
        if activity.aborted {
            abort.set();
        }
    }

    /// That communicator is its own now.
    pub(crate) fn release_child(&self, abort: &Arc<AbortWord>) {
        lock(&self.activity)
            .children
            .retain(|child| !std::ptr::eq(child.as_ptr(), Arc::as_ptr(abort)));
    }

    /// Releases every wait of the communicator and of the group that works on it.
    pub(crate) fn release(&self) {
        self.abort.set();
        let activity = lock(&self.activity);
        if activity.running
            && let Some(work) = &activity.work
        {
            work.abort();
        }
    }

    /// Releases every wait of the communicator, of what is made from it and of the group that works on it.
    pub(crate) fn abort(&self) {
        let fresh = self
            .faults
            .keep(Error::new(ResultCode::InvalidUsage, "comm has been aborted"));
        self.tell_of_failure();
        let mut activity = lock(&self.activity);
        activity.aborted = true;
        for child in activity.children.iter().filter_map(Weak::upgrade) {
            child.set();
        }
        drop(activity);
        self.release();
        if let Some(error) = fresh {
            say(&error);
        }
    }

    /// Waits until no group works on it, at most `limit`.
    pub(crate) fn settle(&self, limit: Duration) {
        let work = lock(&self.activity).work.take();
        if let Some(work) = work {
            work.join(limit);
        }
    }
}

/// A group of non-blocking communicators at work on a thread of its own.
#[derive(Default)]
pub(crate) struct Background {
    /// What releases the waits of its jobs.
    words: Vec<Arc<AbortWord>>,
    done: Mutex<bool>,
    ended: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Background {
    /// Work that these words release.
    pub(crate) fn new(words: Vec<Arc<AbortWord>>) -> Arc<Self> {
        Arc::new(Self {
            words,
            ..Self::default()
        })
    }

    /// Begins it.
    ///
    /// # Errors
    /// No thread could be had.
    pub(crate) fn start(self: &Arc<Self>, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let background = self.clone();
        // Locked until the handle is in, so that who sees the end finds it.
        let mut thread = lock(&self.thread);
        let started = thread::Builder::new().name("rs-group".into()).spawn(move || {
            work();
            *lock(&background.done) = true;
            background.ended.notify_all();
        });
        *thread = Some(started.map_err(|error| {
            let text = format!("no thread to work on a group of non-blocking communicators: {error}");
            Error::new(ResultCode::SystemError, text)
        })?);
        Ok(())
    }

    fn abort(&self) {
        for word in &self.words {
            word.set();
        }
    }

    /// Waits for its end, at most `limit`, and sees its thread off.
    fn join(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut done = lock(&self.done);
        while !*done {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            done = self
                .ended
                .wait_timeout(done, left)
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .0;
        }
        drop(done);
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            threads::join(thread);
        }
    }
}
