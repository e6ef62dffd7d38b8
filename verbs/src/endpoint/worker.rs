//! A worker thread for calls that may block, so that the polling thread does not.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
};

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    is_running: bool,
}

/// Runs jobs one after the other, in the order submitted, on a thread that ends when no job is left.
///
/// A state change of a queue pair lasts as long as the device's firmware takes to answer, or longer on a busy machine. The polling thread
/// serves all connections and must not wait for that.
#[derive(Default)]
pub(super) struct Worker {
    jobs: Arc<Mutex<Jobs>>,
    thread: Option<JoinHandle<()>>,
}

fn lock(jobs: &Mutex<Jobs>) -> MutexGuard<'_, Jobs> {
    jobs.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    /// Submits a job. If no thread can be started, the job runs in this call.
    pub(super) fn submit(&mut self, job: impl FnOnce() + Send + 'static) {
        let mut jobs = lock(&self.jobs);
        jobs.waiting.push_back(Box::new(job));
        if jobs.is_running {
            return;
        }
        jobs.is_running = true;
        drop(jobs);
        let shared = Arc::clone(&self.jobs);
        let started = thread::Builder::new()
            .name("ringsight-qp".into())
            .spawn(move || run_jobs(&shared));
        match started {
            Ok(thread) => self.thread = Some(thread),
            Err(_) => run_jobs(&self.jobs),
        }
    }
}

fn run_jobs(jobs: &Mutex<Jobs>) {
    loop {
        let mut waiting = lock(jobs);
        let Some(job) = waiting.waiting.pop_front() else {
            waiting.is_running = false;
            return;
        };
        drop(waiting);
        job();
    }
}

impl Drop for Worker {
    /// Discards jobs that have not begun, and waits for the one that runs: once a connection is gone, so are its queue pairs.
    fn drop(&mut self) {
        let waiting = std::mem::take(&mut lock(&self.jobs).waiting);
        drop(waiting);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn jobs_run_in_order_on_another_thread() {
        let mut worker = Worker::default();
        let (send, received) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        worker.submit(move || may_go.recv().unwrap());
        for number in 0..100 {
            let send = send.clone();
            worker.submit(move || send.send((number, thread::current().id())).unwrap());
        }
        assert!(received.try_recv().is_err(), "the first job is not over");
        go.send(()).unwrap();
        for number in 0..100 {
            let (next, by) = received.recv().unwrap();
            assert_eq!(next, number);
            assert_ne!(by, thread::current().id());
        }
        // Without jobs the thread ends; the next job starts another one.
        worker.thread.take().unwrap().join().unwrap();
        worker.submit(move || send.send((100, thread::current().id())).unwrap());
        assert_eq!(received.recv().unwrap().0, 100);
    }

    #[test]
    fn jobs_that_have_not_begun_are_dropped_with_the_worker() {
        let mut worker = Worker::default();
        let (begin, begun) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let (send, received) = mpsc::channel();
        worker.submit(move || {
            begin.send(()).unwrap();
            may_go.recv().unwrap();
        });
        let late = send.clone();
        worker.submit(move || late.send("late").unwrap());
        begun.recv().unwrap();
        let jobs = Arc::clone(&worker.jobs);
        thread::scope(|scope| {
            scope.spawn(|| drop(worker));
            while !lock(&jobs).waiting.is_empty() {
                thread::yield_now();
            }
            go.send(()).unwrap();
        });
        drop(send);
        assert!(received.recv().is_err());
    }
}
