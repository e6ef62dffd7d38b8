//! A thread that runs tasks in order: a stream, a branch of a graph.

use std::{
    cell::Cell,
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::Instant,
};

use ringsight_comm_base::sync::lock;

use super::scheduling::Runs;
use crate::device::{DeviceError, Progress, Result};

/// What a task ends with: the text of a device fault, if there was one.
pub(super) type Outcome = std::result::Result<(), String>;

/// One entry of a worker's queue.
pub(super) type Task = Box<dyn FnOnce() -> Outcome + Send>;

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function that must not call the device.
pub(super) fn callback<R>(function: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_CALLBACK.set(self.0);
        }
    }
    let _restore = Restore(IN_CALLBACK.replace(true));
    function()
}

/// Whether the thread is inside [`callback`].
pub(super) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// Runs a task; a panic becomes a fault, since nobody waits for this thread to unwind.
pub(super) fn contained(task: impl FnOnce() -> Outcome) -> Outcome {
    catch_unwind(AssertUnwindSafe(task)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(format!(
            "work on the device panicked: {}",
            text.unwrap_or_else(|| "(no text)".into())
        ))
    })
}

/// A queue and its thread, which ends once the worker is dropped and its queue is empty.
pub(super) struct Worker(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    /// A task was pushed, or the queue was closed.
    work: Condvar,
    /// A task was completed.
    done: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    submitted: u64,
    completed: u64,
    closed: bool,
    /// The thread waits for tasks. A notification is a system call whether anybody waits or not.
    idle: bool,
    /// Threads that wait for tasks to be completed.
    waiters: u32,
    /// The first fault; it stays.
    fault: Option<String>,
}

impl Worker {
    /// Starts a thread named `name`.
    pub(super) fn spawn(name: &str) -> Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let own = shared.clone();
        thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _runs = Runs::new();
                own.run();
            })
            .map_err(|error| DeviceError::Resource(format!("cannot start thread {name}: {error}")))?;
        Ok(Self(shared))
    }

    /// Appends a task.
    pub(super) fn push(&self, task: Task) {
        let mut queue = lock(&self.0.queue);
        queue.tasks.push_back(task);
        queue.submitted += 1;
        let idle = queue.idle;
        drop(queue);
        if idle {
            self.0.work.notify_one();
        }
    }

    /// Whether everything pushed so far is done.
    pub(super) fn query(&self) -> Result<Progress> {
        let queue = lock(&self.0.queue);
        queue.check()?;
        Ok(if queue.completed == queue.submitted {
            Progress::Done
        } else {
            Progress::Pending
        })
    }

    /// Waits for everything pushed so far.
    pub(super) fn synchronize(&self) -> Result<()> {
        let mut queue = lock(&self.0.queue);
        let until = queue.submitted;
        queue.waiters += 1;
        let mut queue = self
            .0
            .done
            .wait_while(queue, |queue| queue.completed < until)
            .unwrap_or_else(PoisonError::into_inner);
        queue.waiters -= 1;
        queue.check()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        lock(&self.0.queue).closed = true;
        self.0.work.notify_one();
    }
}

impl Queue {
    fn check(&self) -> Result<()> {
        match &self.fault {
            Some(fault) => Err(DeviceError::Fault(fault.clone())),
            None => Ok(()),
        }
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let mut queue = lock(&self.queue);
            queue.idle = true;
            let mut queue = self
                .work
                .wait_while(queue, |queue| queue.tasks.is_empty() && !queue.closed)
                .unwrap_or_else(PoisonError::into_inner);
            queue.idle = false;
            let Some(task) = queue.tasks.pop_front() else {
                return;
            };
            drop(queue);
            // The task's captures are dropped inside, before it counts as done: whoever waits for the stream finds
            // the resources released.
            let outcome = contained(task);
            let mut queue = lock(&self.queue);
            queue.completed += 1;
            if let Err(fault) = outcome {
                queue.fault.get_or_insert(fault);
            }
            let waited_for = queue.waiters > 0;
            drop(queue);
            if waited_for {
                self.done.notify_all();
            }
        }
    }
}

/// A point in the order of a stream: passed once, with the time of passing.
#[derive(Default)]
pub(super) struct Point {
    state: Mutex<PointState>,
    changed: Condvar,
}

#[derive(Default)]
struct PointState {
    passed: Option<Instant>,
    /// Somebody waits, and has to be notified.
    waited_for: bool,
}

impl Point {
    /// Marks it as passed.
    pub(super) fn pass(&self) {
        let mut state = lock(&self.state);
        state.passed = Some(Instant::now());
        let waited_for = state.waited_for;
        drop(state);
        if waited_for {
            self.changed.notify_all();
        }
    }

    /// When it was passed.
    pub(super) fn passed(&self) -> Option<Instant> {
        lock(&self.state).passed
    }

    /// Waits until it is passed.
    pub(super) fn wait(&self) {
        let mut state = lock(&self.state);
        if state.passed.is_none() {
            state.waited_for = true;
            drop(
                self.changed
                    .wait_while(state, |state| state.passed.is_none())
                    .unwrap_or_else(PoisonError::into_inner),
            );
        }
    }
}
