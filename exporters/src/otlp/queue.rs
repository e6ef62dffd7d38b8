//! Requests that wait, and the account of what became of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::model::{ExportStats, Signal, Tally};

/// Shared by the exporter and its worker.
pub(super) struct Queue {
    state: Mutex<Waiting>,
    /// Told when a signal's queue gets something, or when the queue closes.
    wake: [Notify; Signal::COUNT],
    limit: usize,
    request_bytes: usize,
}

#[derive(Default)]
struct Waiting {
    requests: [VecDeque<Request>; Signal::COUNT],
    /// Bytes of the requests waiting and being sent.
    bytes: usize,
    closed: bool,
    stats: ExportStats,
}

struct Request {
    message: Bytes,
    items: usize,
}

impl Waiting {
    fn drop_items(&mut self, signal: Signal, reason: &'static str, items: usize) {
        self.stats[signal].drop_items(reason, items as u64);
    }
}

impl Queue {
    pub(super) fn new(limit: usize, request_bytes: usize) -> Self {
        Self {
            state: Mutex::default(),
            wake: [const { Notify::const_new() }; Signal::COUNT],
            limit,
            request_bytes,
        }
    }

    fn state(&self) -> MutexGuard<'_, Waiting> {
        // Every update is whole at every point where it could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a request, unless the bound is reached: then its items are dropped as `queue_full`.
    pub(super) fn push(&self, signal: Signal, message: &[u8], items: usize) {
        let message = Bytes::copy_from_slice(message);
        let mut state = self.state();
        if state.bytes + message.len() > self.limit {
            state.drop_items(signal, "queue_full", items);
            return;
        }
        state.bytes += message.len();
        state.requests[signal as usize].push_back(Request { message, items });
        drop(state);
        self.wake[signal as usize].notify_one();
    }

    pub(super) fn drop_items(&self, signal: Signal, reason: &'static str, items: usize) {
        self.state().drop_items(signal, reason, items);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Ends [`next`](Self::next) once nothing waits.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.wake.iter().for_each(Notify::notify_one);
    }

    /// Drops what waits as `shutdown`.
    pub(super) fn abandon(&self) {
        let mut state = self.state();
        state.closed = true;
        for signal in Signal::ALL {
            for request in std::mem::take(&mut state.requests[signal as usize]) {
                state.bytes -= request.message.len();
                state.drop_items(signal, "shutdown", request.items);
            }
        }
    }

    /// The next request of `signal`, `None` when closed and empty.
    pub(super) async fn next(self: &Arc<Self>, signal: Signal) -> Option<Work> {
        loop {
            {
                let mut state = self.state();
                if let Some((message, items)) =
                    merge(&mut state.requests[signal as usize], self.request_bytes)
                {
                    return Some(Work {
                        queue: Arc::clone(self),
                        signal,
                        message,
                        items,
                        settled: false,
                    });
                }
                if state.closed {
                    return None;
                }
            }
            // A notification between the check and here is kept for this one waiter.
            self.wake[signal as usize].notified().await;
        }
    }

    pub(super) fn failed(&self, error: String, retried: bool) {
        let stats = &mut self.state().stats;
        stats.retries += u64::from(retried);
        stats.last_error = Some(error);
    }

    pub(super) fn stats(&self) -> ExportStats {
        self.state().stats.clone()
    }
}

/// Takes the first requests that together stay within `limit`. Protobuf messages are merged by concatenation, so small
/// requests that piled up travel as one.
fn merge(waiting: &mut VecDeque<Request>, limit: usize) -> Option<(Bytes, usize)> {
    let Request { message, mut items } = waiting.pop_front()?;
    let fits =
        |len: usize, next: Option<&Request>| next.is_some_and(|next| len + next.message.len() <= limit);
    if !fits(message.len(), waiting.front()) {
        return Some((message, items));
    }
    let mut merged = message.to_vec();
    while fits(merged.len(), waiting.front()) {
        let Some(next) = waiting.pop_front() else { break };
        merged.extend_from_slice(&next.message);
        items += next.items;
    }
    Some((merged.into(), items))
}

/// A request that is being sent. It counts against the bound until it is settled; dropped unsettled, it was cut off by the
/// shutdown.
pub(super) struct Work {
    queue: Arc<Queue>,
    signal: Signal,
    pub(super) message: Bytes,
    items: usize,
    settled: bool,
}

impl Work {
    /// The server took it, but for `rejected` items.
    pub(super) fn delivered(mut self, rejected: u64) {
        let rejected = usize::try_from(rejected).unwrap_or(usize::MAX).min(self.items);
        let mut state = self.queue.state();
        state.stats[self.signal].delivered += (self.items - rejected) as u64;
        state.stats[self.signal].unsupported = None;
        state.drop_items(self.signal, "rejected", rejected);
        drop(state);
        self.settled = true;
    }

    /// It is given up.
    pub(super) fn dropped(mut self, reason: &'static str) {
        self.queue.drop_items(self.signal, reason, self.items);
        self.settled = true;
    }

    /// The server takes nothing of this signal, as it said by `error`. The next one is sent all the same: servers change.
    pub(super) fn unsupported(self, error: String) {
        self.queue.state().stats[self.signal].unsupported = Some(error);
        self.dropped(Tally::UNSUPPORTED);
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.bytes -= self.message.len();
        if !self.settled {
            state.drop_items(self.signal, "shutdown", self.items);
        }
    }
}
