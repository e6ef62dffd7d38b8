//! Plans and graphs that are over, on their way to the thread that gives back what they hold.

use std::{
    mem,
    sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ringsight_comm_base::sync::lock;

/// What is over.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Retired {
    /// A plan that ran once is finished.
    Plan(u32),
    /// A graph is gone with all its instances.
    Graph(u32),
}

/// What is over and has not been given back yet: from any thread to the one that makes calls on the communicator.
#[derive(Debug, Default)]
pub(crate) struct RetireQueue {
    queue: Mutex<Queue>,
    /// There are some.
    any: AtomicBool,
    came: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    retired: Vec<Retired>,
    /// Threads that wait for one. A notification is a system call whether anybody waits or not.
    waiting: u32,
}

impl RetireQueue {
    /// Puts something in. Called by threads of the device and by destructors of graphs.
    pub(crate) fn put(&self, retired: Retired) {
        let mut queue = lock(&self.queue);
        queue.retired.push(retired);
        // Relaxed: who looks without the lock and sees it takes the lock; who does not looks again at its next call.
        self.any.store(true, Ordering::Relaxed);
        let waiting = queue.waiting > 0;
        drop(queue);
        if waiting {
            self.came.notify_all();
        }
    }

    /// Swaps everything for an empty list, whose memory is used for the next ones.
    pub(crate) fn swap(&self, empty: &mut Vec<Retired>) {
        // Relaxed: see `put`.
        if self.any.load(Ordering::Relaxed) {
            let mut queue = lock(&self.queue);
            mem::swap(&mut queue.retired, empty);
            self.any.store(false, Ordering::Relaxed);
        }
    }

    /// Waits until there is one, at most so long.
    pub(crate) fn wait(&self, limit: Duration) {
        let mut queue = lock(&self.queue);
        queue.waiting += 1;
        let (mut queue, _) = self
            .came
            .wait_timeout_while(queue, limit, |queue| queue.retired.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        queue.waiting -= 1;
    }
}
