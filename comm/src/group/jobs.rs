//! Calls of a group that are more than operations: making, splitting, finalizing communicators. They run before the
//! group's operations, side by side, since their ranks wait for each other.

use std::{
    collections::BTreeMap,
    iter,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{Builder, ScopedJoinHandle},
};

use ringsight_comm_base::error::{Error, Result, ResultCode};
use ringsight_kernels::AbortWord;
use smallvec::SmallVec;

use crate::{
    communicator::{self, Handle, Lifecycle},
    device::device,
};

/// One call.
pub(crate) struct Job {
    /// The communicator whose state tells of it: the one that is made; of a split, the parent.
    pub life: Arc<Lifecycle>,
    /// The communicator that is made from it.
    pub child: Option<Arc<Lifecycle>>,
    /// Releases its waits when another job of the group fails.
    pub release: Option<Arc<AbortWord>>,
    /// What it makes, if it makes a communicator.
    pub made: Option<Made>,
    /// Does it.
    pub work: Box<dyn FnOnce() -> Result<()> + Send>,
}

/// A communicator in the making, and where the caller finds its handle.
pub(crate) struct Made {
    handle: Handle,
    place: *mut Handle,
}

// SAFETY: nothing ties the place to a thread; that it is valid for writes until the group ends is the caller's promise.
unsafe impl Send for Made {}

impl Made {
    /// Writes the handle to `place`.
    ///
    /// # Safety
    /// `place` is aligned and valid for writes until the group ends.
    #[must_use]
    pub(crate) unsafe fn announce(handle: Handle, place: *mut Handle) -> Self {
        let made = Self { handle, place };
        made.write(handle);
        made
    }

    fn write(&self, handle: Handle) {
        // SAFETY: aligned and valid until the group ends, which is when this is last called; a handle is a number.
        let place = unsafe { AtomicUsize::from_ptr(self.place.cast()) };
        // Release: a thread that waits for the handle to abort it may find all that the caller did before.
        place.store(handle.0, Ordering::Release);
    }

    /// There will be no such communicator.
    pub(super) fn withdraw(self) {
        communicator::withdraw(self.handle);
        self.write(Handle(0));
    }
}

/// What is left of a job once its caller's memory is out of reach.
struct Work {
    life: Arc<Lifecycle>,
    release: Option<Arc<AbortWord>>,
    work: Box<dyn FnOnce() -> Result<()> + Send>,
}

/// The jobs of a group, in call order.
#[derive(Default)]
pub(super) struct Jobs(Vec<Job>);

/// [`Jobs`] that may run on another thread.
pub(super) struct Ready(Vec<Work>);

impl Jobs {
    pub(super) const NONE: Self = Self(Vec::new());

    pub(super) fn push(&mut self, job: Job) {
        self.0.push(job);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Communicators whose state tells of the jobs.
    pub(super) fn lives(&self) -> impl Iterator<Item = &Arc<Lifecycle>> {
        self.0
            .iter()
            .flat_map(|job| iter::once(&job.life).chain(&job.child))
    }

    /// What releases their waits.
    pub(super) fn words(&self) -> Vec<Arc<AbortWord>> {
        self.0.iter().filter_map(|job| job.release.clone()).collect()
    }

    /// The group has failed: nothing is made.
    pub(super) fn withdraw(self) {
        self.0
            .into_iter()
            .filter_map(|job| job.made)
            .for_each(Made::withdraw);
    }

    /// What there is to do, and the communicators to withdraw if that fails.
    pub(super) fn split(self) -> (Ready, Vec<Made>) {
        let (mut works, mut made) = (Vec::new(), Vec::new());
        for job in self.0 {
            let Job {
                life, release, work, ..
            } = job;
            works.push(Work { life, release, work });
            made.extend(job.made);
        }
        (Ready(works), made)
    }

    /// Does them; communicators that could not be made are withdrawn.
    pub(super) fn run(self) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let (ready, made) = self.split();
        let result = ready.run();
        if result.is_err() {
            made.into_iter()
                .filter(|made| !communicator::is_made(made.handle))
                .for_each(Made::withdraw);
        }
        result
    }
}

impl Ready {
    /// Does them; the first error.
    pub(super) fn run(self) -> Result<()> {
        // Those of one communicator in call order, in which all its ranks meet.
        let mut chains: BTreeMap<*const Lifecycle, Vec<Work>> = BTreeMap::new();
        let words: Vec<_> = self.0.iter().filter_map(|work| work.release.clone()).collect();
        for work in self.0 {
            chains.entry(Arc::as_ptr(&work.life)).or_default().push(work);
        }
        let run = |chain: Vec<Work>| {
            let result = chain.into_iter().try_for_each(|work| (work.work)());
            if result.is_err() {
                // Others wait for what failed, or for what now never begins.
                words.iter().for_each(|word| word.set());
            }
            result
        };
        if chains.len() == 1 {
            let before = device().and_then(|device| device.save_context());
            let result = chains.into_values().try_for_each(run);
            if let (Ok(device), Ok(before)) = (device(), before) {
                device.restore(before)?;
            }
            return result;
        }
        let run = &run;
        std::thread::scope(|scope| {
            let threads: Vec<_> = chains
                .into_values()
                .map(|chain| {
                    Builder::new()
                        .name("rs-job".into())
                        .spawn_scoped(scope, move || run(chain))
                })
                .collect();
            let refused = threads.iter().any(std::result::Result::is_err);
            if refused {
                words.iter().for_each(|word| word.set());
            }
            let results: Vec<Result<()>> = threads
                .into_iter()
                .map(|thread| match thread.map(ScopedJoinHandle::join) {
                    Ok(Ok(result)) => result,
                    Ok(Err(_)) => Err(Error::internal("a thread that makes a communicator panicked")),
                    Err(error) => Err(Error::new(
                        ResultCode::SystemError,
                        format!("no thread to make a communicator with: {error}"),
                    )),
                })
                .collect();
            most_telling(results)
        })
    }
}

/// The first error, but what was released because of another failure tells less than that failure.
fn most_telling(results: Vec<Result<()>>) -> Result<()> {
    let mut errors: Vec<Error> = results.into_iter().filter_map(Result::err).collect();
    let index = errors
        .iter()
        .position(|error| error.code != ResultCode::InvalidUsage)
        .unwrap_or(0);
    if errors.is_empty() {
        return Ok(());
    }
    Err(errors.swap_remove(index))
}

/// Does a job: at once outside of a group, at its end inside.
///
/// # Errors
/// Blocking and non-blocking communicators in one group; what the job fails with; `ncclInProgress`.
pub(crate) fn submit(job: Job) -> Result<()> {
    let lone = super::mine(|group| {
        if group.depth == 0 {
            let mut lone = super::Group::default();
            lone.admit(&job.life)?;
            lone.jobs.push(job);
            return Ok(Some(lone));
        }
        let admitted = group.admit(&job.life);
        // Kept in any case, so that the end of the group withdraws what was announced.
        group.jobs.push(job);
        admitted.map(|()| None)
    })?;
    lone.map_or(Ok(()), |mut lone| lone.complete(&mut SmallVec::new()))
}
