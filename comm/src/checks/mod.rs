//! Checks between ranks: do they call alike, and are they all there?
//!
//! Every slot of data carries a tag of what its rank called ([`Call::tag`]). A kernel that takes a slot with another tag
//! reports that here, and waits. The ranks then tell each other by control messages what they called. Every rank fails
//! with the same text, which names the ranks and their calls.
//!
//! The death of a rank and the failure of a connection come here, too, because one of these can be the consequence of
//! another. The communicator fails with the first reason that is certain ([`diagnosis`]).
//!
//! # Threads
//! | thread | enters by |
//! |---|---|
//! | launching threads | [`Checks::note`], [`Checks::withdraw`] |
//! | the device's thread | [`Checks::mismatch`] |
//! | the bootstrap's service thread | [`Checks::control`], [`Checks::rank_died`] |
//! | the proxy's threads | [`Checks::connection_failed`] |
//! | the watchdog's threads | [`Checks::announce`], [`Checks::has_called`] and other queries |
//! | `rs-checks`, one per communicator and only while something is wrong | runs the [diagnosis](diagnosis) |
//!
//! # Invariants
//! - The thread that hears an event never waits: it hands the event to `rs-checks`.
//! - `rs-checks` fails the communicator once, and ends.

mod calls;
mod diagnosis;
mod finding;
pub(crate) mod message;
pub(crate) mod wire;

use std::{
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

use ringsight_comm_base::{error::Error, sync::lock, threads};

use calls::Calls;
pub(crate) use calls::Entry;
use diagnosis::{Diagnosis, Failure, Peers};
use message::{CallsAnswer, CheckMessage, Finding};

use crate::op::{Call, Identity};

/// Sends a control message to one rank, or to all others; must not block. Returns whether it can be sent.
pub(crate) type Post = Box<dyn Fn(Option<u32>, &[u8]) -> bool + Send + Sync>;
/// Makes the communicator fail: keeps the error and releases every wait.
pub(crate) type Fail = Box<dyn Fn(Error) + Send + Sync>;
/// Called before the communicator fails because the ranks do not call alike: with the text, and the ranks that are wrong.
/// Returns what is to be done after the failure, which may block.
pub(crate) type OnDifference = Box<dyn Fn(&str, &[u32]) -> Box<dyn FnOnce()> + Send + Sync>;

/// Messages that may wait for `rs-checks` for each rank; beyond it they are lost. A rank sends fewer: it notices, asks and answers once, and says
/// what it found.
const WAITING_PER_RANK: usize = 8;

/// Something that goes wrong, or a message about it.
#[derive(Clone, Debug)]
enum CheckEvent {
    /// An operation of this rank met a slot with another tag.
    Mismatch { mine: Option<Entry>, theirs: u32 },
    /// A message from another rank, or from this one.
    Message { from: u32, message: CheckMessage },
    /// The process of a rank is gone.
    RankDied { rank: u32, text: String },
    /// A connection failed.
    ConnectionFailed { text: String },
}

/// The checks of one rank of a communicator.
pub(crate) struct Checks {
    rank: u32,
    ranks: u32,
    calls: Mutex<Calls>,
    post: Post,
    fail: Fail,
    on_difference: OnceLock<OnDifference>,
    /// It is known, here or on another rank, that the ranks do not call alike. The communicator may not have failed yet.
    found_difference: AtomicBool,
    reporter: Mutex<Reporter>,
    /// Messages that wait for the reporter.
    waiting: AtomicUsize,
    /// Notified when the reporter is over.
    over: Condvar,
}

/// The thread that runs the diagnosis; there is none while nothing is wrong.
#[derive(Default)]
struct Reporter {
    events: Option<Sender<CheckEvent>>,
    handle: Option<JoinHandle<()>>,
    /// The communicator has failed or ended: nothing is reported any more.
    is_over: bool,
}

impl Checks {
    /// Of rank `rank` among `ranks`.
    pub(crate) fn new(rank: u32, ranks: u32, post: Post, fail: Fail) -> Arc<Self> {
        Arc::new(Self {
            rank,
            ranks,
            calls: Mutex::default(),
            post,
            fail,
            on_difference: OnceLock::new(),
            found_difference: AtomicBool::new(false),
            reporter: Mutex::default(),
            waiting: AtomicUsize::new(0),
            over: Condvar::new(),
        })
    }

    /// Calls `notify` when the ranks turn out not to call alike. To be called once, before any call is noted.
    pub(crate) fn on_difference(&self, notify: OnDifference) {
        let _ = self.on_difference.set(notify);
    }

    /// Notes calls that are about to run; with the number of a `graph`, calls that may run for as long as it lives.
    pub(crate) fn note(&self, graph: u32, entries: &[Entry]) {
        lock(&self.calls).note(graph, entries);
    }

    /// Calls that were noted could not be launched. They have not happened, and their numbers will be other calls'.
    pub(crate) fn withdraw(&self, graph: u32, entries: &[Entry]) {
        lock(&self.calls).withdraw(graph, entries);
    }

    /// Whether an operation, or a later one of its sequence, has been called. Of captured operations only those of living
    /// graphs are known.
    pub(crate) fn has_called(&self, identity: Identity) -> bool {
        lock(&self.calls).has(identity)
    }

    /// The latest eager calls.
    pub(crate) fn called(&self) -> Vec<Identity> {
        lock(&self.calls).eager().collect()
    }

    /// The call that became operation `op`.
    pub(crate) fn call_of(&self, op: u32) -> Option<Call> {
        lock(&self.calls).find(op).map(|entry| entry.call)
    }

    /// A graph is destroyed.
    pub(crate) fn forget(&self, graph: u32) {
        lock(&self.calls).retire(graph);
    }

    /// On the device, operation `op` of this rank met a slot with tag `theirs`.
    pub(crate) fn mismatch(self: &Arc<Self>, op: u32, theirs: u32) {
        let mine = lock(&self.calls).find(op);
        self.report(CheckEvent::Mismatch { mine, theirs });
    }

    /// A control message has come. Other parts of the library use control messages, too: those are left alone.
    pub(crate) fn control(self: &Arc<Self>, from: u32, bytes: &[u8]) {
        if let Some(message) = CheckMessage::parse(bytes) {
            self.report(CheckEvent::Message { from, message });
        }
    }

    /// Whether it is known, here or on another rank, that the ranks do not call alike: all of them fail soon.
    pub(crate) fn found_difference(&self) -> bool {
        // Acquire: pairs with `report`.
        self.found_difference.load(Ordering::Acquire)
    }

    /// The process of a rank is gone.
    pub(crate) fn rank_died(self: &Arc<Self>, rank: u32, text: &str) {
        self.report(CheckEvent::RankDied {
            rank,
            text: text.to_owned(),
        });
    }

    /// A connection between two proxies failed.
    pub(crate) fn connection_failed(self: &Arc<Self>, text: String) {
        self.report(CheckEvent::ConnectionFailed { text });
    }

    /// The caller found out that the ranks do not call alike: all ranks fail with this text. The caller has reported it.
    pub(crate) fn announce(self: &Arc<Self>, text: String) {
        let message = CheckMessage::Finding(Finding {
            text,
            wrong: Vec::new(),
        });
        self.send(None, &message);
        self.report(CheckEvent::Message {
            from: self.rank,
            message,
        });
    }

    fn most_waiting(&self) -> usize {
        WAITING_PER_RANK.saturating_mul(self.ranks as usize)
    }

    /// Hands an event to the reporter's thread, which is started for the first one.
    fn report(self: &Arc<Self>, event: CheckEvent) {
        if let CheckEvent::Message {
            message: CheckMessage::Finding(_),
            ..
        } = &event
        {
            // Release: one thread brings all messages of a rank. So a thread that reads that a rank gave up because of the
            // finding reads this, too.
            self.found_difference.store(true, Ordering::Release);
        }
        let mut reporter = lock(&self.reporter);
        if reporter.is_over {
            return;
        }
        if let Some(events) = &reporter.events {
            // Relaxed: a count that orders nothing.
            let is_message = matches!(&event, CheckEvent::Message { .. });
            if is_message && self.waiting.fetch_add(1, Ordering::Relaxed) >= self.most_waiting() {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                return;
            }
            // Not taken if the thread is over and about to say so.
            let _ = events.send(event);
            return;
        }
        if matches!(
            &event,
            CheckEvent::Message {
                message: CheckMessage::Calls(_),
                ..
            }
        ) {
            return; // an answer to a question that this rank did not ask
        }
        let (events, queue) = mpsc::channel();
        let (this, first) = (Arc::clone(self), event.clone());
        let started = thread::Builder::new()
            .name("rs-checks".into())
            .stack_size(256 << 10)
            .spawn(move || {
                // Also after a panic: a thread may wait.
                let _over = Over(&this);
                this.run(first, &queue);
            });
        match started {
            Ok(handle) => {
                reporter.events = Some(events);
                reporter.handle = Some(handle);
            }
            Err(error) => {
                // A poor report is better than none.
                drop(reporter);
                let _over = Over(self);
                (self.fail)(
                    event
                        .alone()
                        .within(&format!("no thread to find out more ({error})")),
                );
            }
        }
    }

    /// Runs the diagnosis until it fails the communicator, or until this ends (the sender of `queue` is gone).
    fn run(&self, first: CheckEvent, queue: &Receiver<CheckEvent>) {
        let mut diagnosis = Diagnosis::new(self.rank, self.ranks);
        let mut event = first;
        loop {
            if let Some(failure) = diagnosis.hear(event, self, Instant::now()) {
                return self.fail_with(failure);
            }
            let next = match diagnosis.deadline() {
                Some(deadline) => queue.recv_timeout(deadline.saturating_duration_since(Instant::now())),
                None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            event = match next {
                Ok(event) => {
                    if matches!(&event, CheckEvent::Message { .. }) {
                        self.waiting.fetch_sub(1, Ordering::Relaxed);
                    }
                    event
                }
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(failure) = diagnosis.give_up_waiting(self) {
                        self.fail_with(failure);
                    }
                    return;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
        }
    }

    fn fail_with(&self, failure: Failure) {
        let Failure { error, wrong } = failure;
        // First: operations in progress end with the communicator's failure.
        let notify = self.on_difference.get().filter(|_| !wrong.is_empty());
        let after = notify.map(|notify| notify(&error.text, &wrong));
        (self.fail)(error);
        if let Some(after) = after {
            after();
        }
    }

    /// Waits until an event that was reported has failed the communicator, or the communicator ends: a few seconds at most.
    pub(crate) fn wait(&self) {
        let reporter = lock(&self.reporter);
        drop(
            self.over
                .wait_while(reporter, |reporter| !reporter.is_over)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// The communicator ends: nothing is reported any more.
    pub(crate) fn stop(&self) {
        let mut reporter = lock(&self.reporter);
        reporter.is_over = true;
        self.over.notify_all();
        // Hangs up, which ends the thread.
        reporter.events = None;
        let handle = reporter.handle.take();
        drop(reporter);
        if let Some(handle) = handle {
            threads::join(handle);
        }
    }
}

impl Peers for Checks {
    fn send(&self, to: Option<u32>, message: &CheckMessage) -> bool {
        (self.post)(to, &message.encode())
    }

    fn own_calls(&self, identity: Identity, theirs: u32) -> CallsAnswer {
        lock(&self.calls).answer(identity, theirs)
    }
}

/// The reporter is over when this is dropped.
struct Over<'a>(&'a Checks);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        lock(&self.0.reporter).is_over = true;
        self.0.over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    //! The thread and its hand-over. What is found, and when, is tested by a virtual clock in [`diagnosis`](super::diagnosis).

    use std::time::Duration;

    use ringsight_records::{DataType, Flags, Function, ReduceOp};

    use super::*;
    use crate::{error::ResultCode, op::OpInfo};

    /// No wait takes so long on a machine that runs at all.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// The checks of rank 1 of 2, whose messages nobody hears, and the errors that they fail with.
    fn checks_of_rank_1() -> (Arc<Checks>, Receiver<Error>) {
        let (tell, failed) = mpsc::channel();
        let tell = Mutex::new(tell);
        let fail = move |error| lock(&tell).send(error).unwrap();
        (Checks::new(1, 2, Box::new(|_, _| true), Box::new(fail)), failed)
    }

    fn finding() -> Finding {
        Finding {
            text: "rank 0 waits for rank 1, rank 1 for rank 0".to_owned(),
            wrong: vec![0, 1],
        }
    }

    #[test]
    fn who_is_wrong_is_told_before_the_failure_and_once() {
        let (checks, failed) = checks_of_rank_1();
        let (tell, told) = mpsc::channel();
        let tell = Mutex::new(tell);
        checks.on_difference(Box::new(move |text, wrong| {
            lock(&tell).send((text.to_owned(), wrong.to_vec())).unwrap();
            Box::new(|| ())
        }));
        for _ in 0..2 {
            checks.control(0, &CheckMessage::Finding(finding()).encode());
        }
        let error = failed.recv_timeout(PATIENCE).unwrap();
        assert_eq!(
            (error.code, &error.text),
            (ResultCode::InvalidUsage, &finding().text)
        );
        assert_eq!(told.try_recv().unwrap(), (finding().text, finding().wrong));
        checks.wait();
        checks.rank_died(0, "killed");
        checks.stop();
        assert!(failed.try_recv().is_err() && told.try_recv().is_err());
    }

    /// A rank that heard of a finding gives up, and is late for the ranks that have not failed yet.
    #[test]
    fn a_finding_is_known_before_the_communicator_fails_by_it() {
        let (go_on, held) = mpsc::channel::<()>();
        let (tell, failed) = mpsc::channel();
        let (held, tell) = (Mutex::new(held), Mutex::new(tell));
        let fail = move |error: Error| {
            lock(&held).recv_timeout(PATIENCE).unwrap();
            lock(&tell).send(error).unwrap();
        };
        let checks = Checks::new(1, 2, Box::new(|_, _| true), Box::new(fail));
        assert!(!checks.found_difference());
        checks.control(0, &CheckMessage::Finding(finding()).encode());
        assert!(checks.found_difference());
        go_on.send(()).unwrap();
        assert_eq!(failed.recv_timeout(PATIENCE).unwrap().text, finding().text);
        checks.stop();
    }

    /// The thread is held in the answer to a question, while the rank that asked goes on asking.
    #[test]
    fn questions_that_nobody_takes_are_bounded() {
        let (go_on, held) = mpsc::channel::<()>();
        let (begins, begun) = mpsc::channel();
        let held = Mutex::new((held, begins, 0));
        let post = move |_: Option<u32>, _: &[u8]| {
            let mut held = lock(&held);
            held.2 += 1;
            held.1.send(held.2).unwrap();
            // Only the first one is held.
            held.2 > 1 || held.0.recv_timeout(PATIENCE).is_ok()
        };
        let checks = Checks::new(1, 2, Box::new(post), Box::new(|_| ()));
        let ask = CheckMessage::Ask {
            identity: Identity::Collective { seq: 1 },
            theirs: 1,
        };
        checks.control(0, &ask.encode());
        assert_eq!(begun.recv_timeout(PATIENCE), Ok(1));
        for _ in 0..1000 {
            checks.control(0, &ask.encode());
        }
        assert_eq!(checks.waiting.load(Ordering::Relaxed), checks.most_waiting());
        go_on.send(()).unwrap();
        for number in 2..=1 + checks.most_waiting() {
            assert_eq!(begun.recv_timeout(PATIENCE), Ok(number));
        }
        checks.stop();
        assert!(begun.try_recv().is_err(), "the rest is lost");
    }

    #[test]
    fn the_thread_fails_the_communicator_at_the_deadline() {
        let (checks, failed) = checks_of_rank_1();
        checks.connection_failed("rank 1 to rank 0 broke".into());
        let error = failed.recv_timeout(PATIENCE).unwrap();
        assert_eq!(
            error,
            Error::new(ResultCode::RemoteError, "rank 1 to rank 0 broke")
        );
        checks.stop();
    }

    #[test]
    fn calls_are_answered_as_they_were_noted() {
        let (posts, posted) = mpsc::channel();
        let posts = Mutex::new(posts);
        let post = move |to: Option<u32>, bytes: &[u8]| {
            let message = CheckMessage::parse(bytes).unwrap();
            lock(&posts).send((to, message)).is_ok()
        };
        let checks = Checks::new(1, 2, Box::new(post), Box::new(|_| {}));
        let call = Call {
            function: Function::AllReduce,
            count: 3,
            data_type: DataType::Float32,
            reduce_op: ReduceOp::Sum,
            peer: None,
            place: None,
        };
        let info = OpInfo {
            op: 9,
            comm: 1,
            seq: 4,
            bytes: 0,
            rank: 1,
            peer: -1,
            flags: Flags(0),
        };
        checks.note(0, &[Entry::new(&info, call)]);
        let identity = Identity::Collective { seq: 4 };
        let question = CheckMessage::Ask {
            identity,
            theirs: call.tag(),
        };
        checks.control(0, &question.encode());
        let answer = CallsAnswer {
            calls: vec![(4, call)],
            tagged: Some((identity, call)),
        };
        assert_eq!(
            posted.recv_timeout(PATIENCE).unwrap(),
            (Some(0), CheckMessage::Calls(answer))
        );
        checks.stop();
    }

    #[test]
    fn nothing_is_reported_after_the_end() {
        let (checks, failed) = checks_of_rank_1();
        checks.mismatch(1, 2);
        checks.stop();
        checks.mismatch(1, 2);
        checks.rank_died(0, "killed");
        assert!(failed.try_recv().is_err());
        assert!(lock(&checks.reporter).handle.is_none());
    }
}
