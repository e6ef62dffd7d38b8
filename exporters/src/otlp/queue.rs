//! Requests that wait, and the account of what became of them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::model::{Consequence, ExportStats, Failure, Signal, Tally};

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
    /// Bytes of each signal's requests, waiting and being sent.
    bytes: [usize; Signal::COUNT],
    closed: bool,
    stats: ExportStats,
}

/// An encoded request, or a part of one.
pub(super) struct Request {
    pub(super) message: Bytes,
    pub(super) items: usize,
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

    /// Most bytes of `signal`. Each signal has a share of its own: a server that refuses one for long takes no room from the others.
    fn share(&self, signal: Signal) -> usize {
        match signal {
            Signal::Traces => self.limit / 4 * 3,
            Signal::Metrics | Signal::Logs => self.limit / 8,
        }
    }

    /// Appends a request, unless the bound is reached: then its items are dropped as `queue_full`.
    pub(super) fn push(&self, signal: Signal, message: &[u8], items: usize) {
        let message = Bytes::copy_from_slice(message);
        let mut state = self.state();
        if state.bytes[signal as usize] + message.len() > self.share(signal) {
            state.stats[signal].drop_items(Tally::QUEUE_FULL, items as u64);
            return;
        }
        state.bytes[signal as usize] += message.len();
        state.requests[signal as usize].push_back(Request { message, items });
        drop(state);
        self.wake[signal as usize].notify_one();
    }

    pub(super) fn drop_items(&self, signal: Signal, reason: &'static str, items: usize) {
        self.state().stats[signal].drop_items(reason, items as u64);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// Ends [`wait`](Self::wait) once nothing waits.
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
                state.bytes[signal as usize] -= request.message.len();
                state.stats[signal].drop_items("shutdown", request.items as u64);
            }
        }
    }

    /// Waits until there is something of `signal` to send; `false` when the queue is closed and empty.
    pub(super) async fn wait(&self, signal: Signal) -> bool {
        loop {
            {
                let state = self.state();
                if !state.requests[signal as usize].is_empty() {
                    return true;
                }
                if state.closed {
                    return false;
                }
            }
            // A notification between the check and here is kept for this one waiter.
            self.wake[signal as usize].notified().await;
        }
    }

    /// The next request of `signal`: those that wait, merged as long as they stay within `ceiling` bytes.
    pub(super) fn take(self: &Arc<Self>, signal: Signal, ceiling: usize) -> Option<(Work, Request)> {
        let mut state = self.state();
        let waiting = &mut state.requests[signal as usize];
        let request = merge(waiting, self.request_bytes.min(ceiling))?;
        let work = Work {
            queue: Arc::clone(self),
            signal,
            bytes: request.message.len(),
            unsettled: request.items,
        };
        Some((work, request))
    }

    pub(super) fn stats(&self) -> ExportStats {
        self.state().stats.clone()
    }
}

/// Takes the first requests that together stay within `limit`. Protobuf messages are merged by concatenation, so small
/// requests that piled up travel as one.
fn merge(waiting: &mut VecDeque<Request>, limit: usize) -> Option<Request> {
    let Request { message, mut items } = waiting.pop_front()?;
    let fits =
        |len: usize, next: Option<&Request>| next.is_some_and(|next| len + next.message.len() <= limit);
    if !fits(message.len(), waiting.front()) {
        return Some(Request { message, items });
    }
    let mut merged = message.to_vec();
    while fits(merged.len(), waiting.front()) {
        let Some(next) = waiting.pop_front() else { break };
        merged.extend_from_slice(&next.message);
        items += next.items;
    }
    Some(Request {
        message: merged.into(),
        items,
    })
}

/// The account of a request that is being sent, perhaps in parts. It counts against the bound until it is dropped; items that are not
/// settled by then were cut off by the shutdown.
pub(super) struct Work {
    queue: Arc<Queue>,
    signal: Signal,
    bytes: usize,
    unsettled: usize,
}

impl Work {
    fn settle(&mut self, items: usize) -> MutexGuard<'_, Waiting> {
        self.unsettled = self.unsettled.saturating_sub(items);
        self.queue.state()
    }

    /// The server took `items`, but for `rejected` of them, about which it said `error`.
    pub(super) fn delivered(&mut self, items: usize, rejected: u64, error: Option<String>) {
        let signal = self.signal;
        let mut state = self.settle(items);
        let rejected = rejected.min(items as u64);
        let tally = &mut state.stats[signal];
        tally.delivered += items as u64 - rejected;
        tally.unsupported = None;
        if rejected > 0 {
            let error = error.clone().unwrap_or_default();
            drop_as(tally, rejected, "rejected", error);
        }
        if error.is_some() {
            state.stats.last_error = error;
        }
    }

    /// `items` are kept, or sent again in halves.
    pub(super) fn retried(&mut self, items: usize, error: String, consequence: Consequence) {
        let mut state = self.queue.state();
        state.stats.retries += 1;
        state.stats.last_error = Some(error.clone());
        let tally = &mut state.stats[self.signal];
        tally.failures += 1;
        tally.last_failure = Some(Failure {
            error,
            items: items as u64,
            consequence,
        });
    }

    /// `items` are given up.
    pub(super) fn dropped(&mut self, items: usize, reason: &'static str, error: String) {
        let signal = self.signal;
        let mut state = self.settle(items);
        if reason == Tally::UNSUPPORTED {
            // No failure of what the server does take. The next one is sent all the same: servers change.
            state.stats[signal].drop_items(reason, items as u64);
            state.stats[signal].unsupported = Some(error);
        } else {
            state.stats.last_error = Some(error.clone());
            drop_as(&mut state.stats[signal], items as u64, reason, error);
        }
    }
}

fn drop_as(tally: &mut Tally, items: u64, reason: &'static str, error: String) {
    tally.drop_items(reason, items);
    tally.failures += 1;
    tally.last_failure = Some(Failure {
        error,
        items,
        consequence: Consequence::Dropped(reason),
    });
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut state = self.queue.state();
        state.bytes[self.signal as usize] -= self.bytes;
        state.stats[self.signal].drop_items("shutdown", self.unsettled as u64);
    }
}
