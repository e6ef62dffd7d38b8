//! The thread that delivers.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::client::Client;
use super::config::Retry;
use super::queue::{Queue, Work};
use super::response::Outcome;
use crate::model::Signal;

/// When to stop, once known.
pub(super) type Deadline = Option<Instant>;

/// Delivers until the queue is closed and empty, or until the deadline. What is left then is dropped.
pub(super) async fn run(
    queue: Arc<Queue>,
    clients: [Client; Signal::COUNT],
    retry: Retry,
    closing: watch::Receiver<Deadline>,
) {
    let [traces, metrics, logs] = clients;
    let sender = |signal, client| {
        Sender {
            queue: Arc::clone(&queue),
            client,
            retry,
            closing: closing.clone(),
        }
        .run(signal)
    };
    // Each signal has its own, so that one endpoint's outage does not hold up the others' telemetry.
    let senders = async {
        tokio::join!(
            sender(Signal::Traces, traces),
            sender(Signal::Metrics, metrics),
            sender(Signal::Logs, logs)
        )
    };
    tokio::select! {
        _ = senders => {}
        () = passed(closing.clone()) => {}
    }
    queue.abandon();
}

/// Waits for the deadline; if the exporter is gone without setting one, it is now.
async fn passed(mut closing: watch::Receiver<Deadline>) {
    let deadline = closing
        .wait_for(Option::is_some)
        .await
        .map_or(None, |deadline| *deadline);
    if let Some(deadline) = deadline {
        tokio::time::sleep_until(deadline).await;
    }
}

struct Sender {
    queue: Arc<Queue>,
    client: Client,
    retry: Retry,
    closing: watch::Receiver<Deadline>,
}

impl Sender {
    async fn run(mut self, signal: Signal) {
        while let Some(work) = self.queue.next(signal).await {
            self.deliver(work).await;
        }
    }

    async fn deliver(&mut self, work: Work) {
        let body = self.client.body(work.message.clone());
        let mut failures = 0;
        let mut answered_since = None;
        loop {
            let started = Instant::now();
            let (after, answered, error) = match self.client.send(&body).await {
                Outcome::Accepted { rejected, message } => {
                    if !message.is_empty() || rejected > 0 {
                        self.failed(&format!("{rejected} rejected: {message}"), false);
                    }
                    return work.delivered(rejected);
                }
                Outcome::Refused { reason, error } => {
                    self.failed(&error, false);
                    return work.dropped(reason);
                }
                // No failure of what the server does take.
                Outcome::Unsupported { error } => return work.unsupported(error),
                Outcome::Retry {
                    after,
                    answered,
                    error,
                } => (after, answered, error),
            };
            let pause = after.unwrap_or_else(|| self.retry.pause(failures));
            failures += 1;
            // A request that a living server never takes must not hold up those behind it for ever.
            answered_since = if answered {
                answered_since.or(Some(started))
            } else {
                None
            };
            let given_up =
                answered_since.is_some_and(|since| since.elapsed() + pause > self.retry.give_up_after);
            self.failed(&error, !given_up);
            if given_up {
                return work.dropped("retries_exhausted");
            }
            let may_be_cut = after.is_none() && self.closing.borrow().is_none();
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // One last try at once rather than none before the deadline; a server that named a time gets it.
                _ = self.closing.wait_for(Option::is_some), if may_be_cut => failures = 0,
            }
        }
    }

    fn failed(&self, error: &str, retried: bool) {
        self.queue
            .failed(format!("{}: {error}", self.client.base()), retried);
    }
}

impl Retry {
    /// The pause after `failures` earlier failures: exponential, cut at random by up to a half.
    fn pause(&self, failures: u32) -> Duration {
        let full = self.initial.saturating_mul(1 << failures.min(20)).min(self.max);
        // A fresh `RandomState` is random enough to keep collectors from retrying in step.
        let random = (RandomState::new().hash_one(failures) >> 11) as f64 / (1u64 << 53) as f64;
        full.mul_f64(1.0 - random / 2.0)
    }
}
