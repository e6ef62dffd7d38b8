//! Checks between ranks: do they call alike, and are they all there?
//!
//! Every slot carries a hash of what its rank called ([`Call::tag`]). A kernel that takes another's reports it here and
//! waits. The ranks then tell each other by control messages what they called: the one that noticed tells rank 0 (or the
//! first that has not left), which asks all, looks for the first operation that differs and tells all. So every rank fails with the same text, which names
//! the ranks and their calls. The death of a rank and the failure of a connection come here, too, since one of these can
//! be the consequence of another: the first that is certain is what the communicator fails with.

mod calls;
pub(crate) mod message;
mod reporter;
mod verdict;
pub(crate) mod wire;

use std::{
    sync::{
        Arc, Condvar, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Sender},
    },
    thread::{self, JoinHandle},
};

pub(crate) use crate::op::Identity;
pub use crate::op::{Call, api_name};
use calls::Calls;
pub(crate) use calls::Entry;
use message::Message;
use reporter::{Event, Reporter};
use verdict::Finding;

use crate::{
    communicator::lock,
    error::{Error, ResultCode},
    threads,
};

/// Sends a control message to one rank, or to all others; must not block. False if it cannot be sent.
pub(crate) type Post = Box<dyn Fn(Option<u32>, &[u8]) -> bool + Send + Sync>;
/// Makes the communicator fail: keeps the error and releases every wait.
pub(crate) type Fail = Box<dyn Fn(Error) + Send + Sync>;
/// Told who called what, and which ranks are wrong, before the communicator fails by it; with what is to be done when it has, which
/// may block.
pub(crate) type Differ = Box<dyn Fn(&str, &[u32]) -> Box<dyn FnOnce()> + Send + Sync>;

/// The checks of one rank of a communicator.
pub(crate) struct Checks {
    rank: u32,
    ranks: u32,
    calls: Mutex<Calls>,
    post: Post,
    fail: Fail,
    differ: OnceLock<Differ>,
    /// It has been found out that the ranks do not call alike; the thread may not have said so yet.
    found: AtomicBool,
    thread: Mutex<Thread>,
    /// `over` was set.
    ended: Condvar,
}

/// The thread that reports; there is none while there is nothing to report.
#[derive(Default)]
struct Thread {
    events: Option<Sender<Event>>,
    handle: Option<JoinHandle<()>>,
    /// The communicator has failed or ended: nothing matters any more.
    over: bool,
}

impl Checks {
    pub(crate) fn new(rank: u32, ranks: u32, post: Post, fail: Fail) -> Arc<Self> {
        Arc::new(Self {
            rank,
            ranks,
            calls: Mutex::default(),
            post,
            fail,
            differ: OnceLock::new(),
            found: AtomicBool::new(false),
            thread: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    /// Lets somebody know when the ranks turn out not to call alike; once, before anything is called.
    pub(crate) fn on_difference(&self, tell: Differ) {
        let _ = self.differ.set(tell);
    }

    /// Remembers calls that are about to run, or, with the number of a `graph`, to run as long as that lives.
    pub(crate) fn note(&self, graph: u32, entries: &[Entry]) {
        lock(&self.calls).note(graph, entries);
    }

    /// What was noted could not be launched: it has not been called, and its number will be another call's.
    pub(crate) fn withdraw(&self, graph: u32, entries: &[Entry]) {
        lock(&self.calls).withdraw(graph, entries);
    }

    /// Whether an operation, or a later one of its sequence, has been called; of captured operations only those of graphs
    /// that live.
    pub(crate) fn has_called(&self, identity: Identity) -> bool {
        lock(&self.calls).has(identity)
    }

    /// What has been called lately and not captured.
    pub(crate) fn called(&self) -> Vec<Identity> {
        lock(&self.calls).eager().collect()
    }

    /// The call that became operation `op`.
    pub(crate) fn call_of(&self, op: u32) -> Option<Call> {
        lock(&self.calls).find(op).map(|entry| entry.call)
    }

    /// A graph is gone.
    pub(crate) fn forget(&self, graph: u32) {
        lock(&self.calls).retire(graph);
    }

    /// On the device: operation `op` of this rank met a slot with tag `theirs`.
    pub(crate) fn mismatch(self: &Arc<Self>, op: u32, theirs: u32) {
        let mine = lock(&self.calls).find(op);
        self.tell(Event::Differs { mine, theirs });
    }

    /// A control message has come.
    pub(crate) fn control(self: &Arc<Self>, from: u32, bytes: &[u8]) {
        // Others may use control messages, too.
        if let Some(message) = Message::parse(bytes) {
            self.tell(Event::Message { from, message });
        }
    }

    /// Whether it has been found out, here or elsewhere, that the ranks do not call alike: then they all fail, one after another.
    pub(crate) fn have_found(&self) -> bool {
        // Acquire: pairs with `tell`.
        self.found.load(Ordering::Acquire)
    }

    /// The process of a rank is gone.
    pub(crate) fn lost(self: &Arc<Self>, rank: u32, text: &str) {
        self.tell(Event::Lost {
            rank,
            text: text.to_owned(),
        });
    }

    /// A connection between two proxies has failed.
    pub(crate) fn network(self: &Arc<Self>, text: String) {
        self.tell(Event::Network { text });
    }

    /// It has been found out that the ranks do not call alike: all of them fail with this text. Who says so has said all.
    pub(crate) fn announce(self: &Arc<Self>, text: String) {
        let message = Message::Verdict(Finding {
            text,
            odd: Vec::new(),
        });
        (self.post)(None, &message.encode());
        self.tell(Event::Message {
            from: self.rank,
            message,
        });
    }

    fn tell(self: &Arc<Self>, event: Event) {
        if let Event::Message {
            message: Message::Verdict(_),
            ..
        } = &event
        {
            // Release: the thread that brings what a rank says which gave up because of this brought this before, so whoever reads the one
            // knows of the other.
            self.found.store(true, Ordering::Release);
        }
        let mut thread = lock(&self.thread);
        if thread.over {
            return;
        }
        if let Some(events) = &thread.events {
            // Not taken if the thread is over and about to say so.
            let _ = events.send(event);
            return;
        }
        if matches!(
            &event,
            Event::Message {
                message: Message::Called(_),
                ..
            }
        ) {
            return; // an answer to a question that we did not ask
        }
        let (events, queue) = mpsc::channel();
        let (this, first) = (Arc::clone(self), event.clone());
        let started = thread::Builder::new()
            .name("rs-checks".into())
            .stack_size(256 << 10)
            .spawn(move || {
                // Also after a panic: somebody may wait.
                let _over = Over(&this);
                Reporter::new(&this).run(first, &queue);
            });
        match started {
            Ok(handle) => {
                thread.events = Some(events);
                thread.handle = Some(handle);
            }
            Err(error) => {
                // Better a poor report than none.
                drop(thread);
                let _over = Over(self);
                (self.fail)(
                    event
                        .alone()
                        .within(&format!("no thread to find out more ({error})")),
                );
            }
        }
    }

    /// Waits until what has been told is known to be the communicator's failure, or it ends: a few seconds at most.
    pub(crate) fn wait(&self) {
        let thread = lock(&self.thread);
        drop(
            self.ended
                .wait_while(thread, |thread| !thread.over)
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// The communicator ends: nothing is reported any more.
    pub(crate) fn stop(&self) {
        let mut thread = lock(&self.thread);
        thread.over = true;
        self.ended.notify_all();
        // Hangs up, which ends the thread.
        thread.events = None;
        let handle = thread.handle.take();
        drop(thread);
        if let Some(handle) = handle {
            threads::join(handle);
        }
    }
}

/// Nothing is reported any more once this is dropped.
struct Over<'a>(&'a Checks);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        lock(&self.0.thread).over = true;
        self.0.ended.notify_all();
    }
}

impl Event {
    /// What can be said without the other ranks.
    fn alone(&self) -> Error {
        match self {
            Self::Differs { mine: Some(mine), .. } => Error::usage(format!(
                "{} of this rank met another operation: the ranks do not call the same",
                mine.call
            )),
            Self::Differs { mine: None, .. } | Self::Message { .. } => {
                Error::usage("the ranks do not call the same operations in the same order")
            }
            Self::Lost { rank, text } => {
                Error::new(ResultCode::RemoteError, format!("rank {rank} is gone: {text}"))
            }
            Self::Network { text } => Error::new(ResultCode::RemoteError, text.clone()),
        }
    }
}
