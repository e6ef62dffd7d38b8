//! Questions whose answer a target can keep back.
//!
//! The kernel answers some questions about a process only once it has a lock of that process, has brought in a page of its memory, or has
//! heard from the file system of one of its files. All of these can be the process's own doing, and no flag of `open` or `read` ends the
//! wait:
//!
//! | question | lock |
//! |---|---|
//! | `environ`, and `maps` before Linux 6.17 | of its memory |
//! | `stat`, links and namespaces, opening `maps`, `pagemap` or `environ` | of its `execve` |
//! | placing probes in a library, and taking them away | of the memory of every process that maps it, watched or not |
//!
//! So a thread asks them, and whoever wants to know waits as long as it likes. `status`, `statm`, `comm` and `cgroup` are answered at once.

use std::{
    collections::BTreeSet,
    io,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, sync_channel},
    },
    thread,
    time::Duration,
};

use crate::limits::UNANSWERED;

/// A question that a thread asks in this one's place. Its thread stays until it has the answer, or this process ends.
#[derive(Debug)]
pub(crate) struct Question<T> {
    answer: Receiver<T>,
}

impl<T: Send + 'static> Question<T> {
    pub(crate) fn ask(question: impl FnOnce() -> T + Send + 'static) -> io::Result<Self> {
        let (sender, answer) = sync_channel(1);
        thread::Builder::new()
            .name("ringsight-ask".into())
            .spawn(move || {
                // Nobody may want to know any more.
                let _ = sender.send(question());
            })?;
        Ok(Self { answer })
    }

    /// The answer, if it comes within `time`.
    ///
    /// # Errors
    /// If there will be none, because the thread panicked.
    pub(crate) fn answer_within(&self, time: Duration) -> io::Result<Option<T>> {
        match self.answer.recv_timeout(time) {
            Ok(answer) => Ok(Some(answer)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(io::Error::other("the thread that asked about it panicked"))
            }
        }
    }
}

/// The answer to a question, if it comes within `time`. At most [`UNANSWERED`] such questions are open at a time.
pub(crate) fn within<T: Send + 'static>(
    time: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    /// Relaxed throughout: it counts threads, and orders nothing.
    static OPEN: AtomicUsize = AtomicUsize::new(0);

    struct Open;
    impl Drop for Open {
        fn drop(&mut self) {
            OPEN.fetch_sub(1, Ordering::Relaxed);
        }
    }

    let before = OPEN.fetch_add(1, Ordering::Relaxed);
    let open = Open;
    if before >= UNANSWERED {
        return None;
    }
    let counted = move || {
        let _open = open;
        question()
    };
    Question::ask(counted).ok()?.answer_within(time).ok()?
}

/// The answer to a question about process `pid`, if it comes within `time`. One such question about a process is open at a time: a process
/// that keeps answers back costs one thread, and keeps nobody from asking about another process.
pub(crate) fn about<T: Send + 'static>(
    pid: u32,
    time: Duration,
    question: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    static OPEN: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());

    struct Open(u32);
    impl Drop for Open {
        fn drop(&mut self) {
            OPEN.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&self.0);
        }
    }

    if !OPEN.lock().unwrap_or_else(PoisonError::into_inner).insert(pid) {
        return None;
    }
    let open = Open(pid);
    let noted = move || {
        let _open = open;
        question()
    };
    Question::ask(noted).ok()?.answer_within(time).ok()?
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc::channel, time::Instant};

    use super::*;

    #[test]
    fn an_answer_that_does_not_come_is_waited_for_no_longer_than_asked() {
        let (answer, wait) = channel::<u32>();
        let question = Question::ask(move || wait.recv().ok()).unwrap();
        assert_eq!(question.answer_within(Duration::from_millis(1)).unwrap(), None);
        answer.send(7).unwrap();
        let answered = question.answer_within(Duration::from_secs(60));
        assert_eq!(answered.unwrap(), Some(Some(7)));
    }

    #[test]
    fn few_questions_are_open_at_a_time() {
        let long = Duration::from_secs(60);
        let begun = Instant::now();
        assert_eq!(within(long, || 7), Some(7));
        let mut waits = Vec::new();
        for _ in 0..UNANSWERED {
            let (go_on, wait) = channel::<()>();
            waits.push(go_on);
            assert_eq!(
                within(Duration::from_millis(1), move || wait.recv().is_ok()),
                None
            );
        }
        assert_eq!(within(long, || 7), None, "one too many");
        drop(waits);
        while within(long, || 7).is_none() {
            assert!(begun.elapsed() < long);
        }
    }

    #[test]
    fn processes_that_do_not_answer_keep_nobody_from_asking_about_another() {
        let long = Duration::from_secs(60);
        let mut waits = Vec::new();
        // Numbers that no process has.
        let silent = (1 << 30)..(1 << 30) + 4 * UNANSWERED as u32;
        for pid in silent.clone() {
            let (go_on, wait) = channel::<()>();
            waits.push(go_on);
            assert_eq!(
                about(pid, Duration::from_millis(1), move || wait.recv().is_ok()),
                None
            );
        }
        assert_eq!(about(silent.end, long, || 7), Some(7));
        assert_eq!(about(silent.start, long, || 7), None, "one thread a process");
        drop(waits);
        let begun = Instant::now();
        while about(silent.start, long, || 7).is_none() {
            assert!(begun.elapsed() < long);
        }
    }
}
