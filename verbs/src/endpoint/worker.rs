//! What is asked of the kernel for a path's queue pairs, beside the thread that polls.

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

/// Does one thing after the other, in the order in which they are asked for, on a thread that ends when there is nothing left. A
/// queue pair's state changes may take as long as a device's firmware does not answer, or a machine has other things to do; the thread
/// that polls serves all connections.
#[derive(Default)]
pub(super) struct Worker {
    jobs: Arc<Mutex<Jobs>>,
    thread: Option<JoinHandle<()>>,
}

fn lock(jobs: &Mutex<Jobs>) -> MutexGuard<'_, Jobs> {
    jobs.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Worker {
    /// Has a thing done. Where no thread can be had it is done at once.
    pub(super) fn ask(&mut self, job: impl FnOnce() + Send + 'static) {
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
            .spawn(move || work(&shared));
        match started {
            Ok(thread) => self.thread = Some(thread),
            Err(_) => work(&self.jobs),
        }
    }
}

fn work(jobs: &Mutex<Jobs>) {
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
    /// What has not begun is not done any more. What has is waited for: when a connection is gone, its queue pairs are.
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
    fn things_are_done_in_order_and_beside_who_asks() {
        let mut worker = Worker::default();
        let (say, said) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        worker.ask(move || may_go.recv().unwrap());
        for number in 0..100 {
            let say = say.clone();
            worker.ask(move || say.send((number, thread::current().id())).unwrap());
        }
        assert!(said.try_recv().is_err(), "the first one is not over");
        go.send(()).unwrap();
        for number in 0..100 {
            let (next, by) = said.recv().unwrap();
            assert_eq!(next, number);
            assert_ne!(by, thread::current().id());
        }
        // With nothing left the thread ends, and another one is begun.
        worker.thread.take().unwrap().join().unwrap();
        worker.ask(move || say.send((100, thread::current().id())).unwrap());
        assert_eq!(said.recv().unwrap().0, 100);
    }

    #[test]
    fn what_has_not_begun_is_dropped_with_it() {
        let mut worker = Worker::default();
        let (begin, begun) = mpsc::channel();
        let (go, may_go) = mpsc::channel::<()>();
        let (say, said) = mpsc::channel();
        worker.ask(move || {
            begin.send(()).unwrap();
            may_go.recv().unwrap();
        });
        let late = say.clone();
        worker.ask(move || late.send("late").unwrap());
        begun.recv().unwrap();
        let jobs = Arc::clone(&worker.jobs);
        thread::scope(|scope| {
            scope.spawn(|| drop(worker));
            while !lock(&jobs).waiting.is_empty() {
                thread::yield_now();
            }
            go.send(()).unwrap();
        });
        drop(say);
        assert!(said.recv().is_err());
    }
}
