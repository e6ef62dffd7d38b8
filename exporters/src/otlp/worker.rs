//! The thread that delivers.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::Instant;

use super::client::Client;
use super::config::Retry;
use super::halve::halve;
use super::queue::{Queue, Request, Work};
use super::response::Outcome;
use super::retry::{Backoff, Fate, Sent, TOO_LARGE_FOR_SERVER};
use crate::model::{Consequence, Signal};

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
            signal,
            queue: Arc::clone(&queue),
            client,
            backoff: Backoff::new(retry),
            closing: closing.clone(),
            hastened: false,
        }
        .run()
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

/// Waits for the deadline, which may be set to an earlier time; if the exporter is gone without setting one, it is now.
async fn passed(mut closing: watch::Receiver<Deadline>) {
    loop {
        let deadline = *closing.borrow_and_update();
        let time = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = time => return,
            changed = closing.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

/// There is no time left to send anything.
struct OutOfTime;

/// Delivers one signal.
struct Sender {
    signal: Signal,
    queue: Arc<Queue>,
    client: Client,
    backoff: Backoff,
    closing: watch::Receiver<Deadline>,
    /// Our own pause was cut by the shutdown. That happens once.
    hastened: bool,
}

impl Sender {
    async fn run(mut self) {
        while self.queue.wait(self.signal).await {
            // Taken after the pause, so that what came meanwhile travels with it.
            if let Err(OutOfTime) = self.pause().await {
                return;
            }
            let ceiling = self.backoff.ceiling(Instant::now().into_std());
            if let Some((work, request)) = self.queue.take(self.signal, ceiling)
                && let Err(OutOfTime) = self.deliver(work, request).await
            {
                return;
            }
        }
    }

    /// Waits until the back-off lets a request through.
    async fn pause(&mut self) -> Result<(), OutOfTime> {
        loop {
            let deadline = *self.closing.borrow();
            if deadline.is_some() && !self.hastened {
                // One last try at once rather than none before the deadline.
                self.backoff.hasten();
                self.hastened = true;
            }
            let Some(ready) = self.backoff.ready_at().map(Instant::from_std) else {
                return Ok(());
            };
            if ready <= Instant::now() {
                return Ok(());
            }
            if deadline.is_some_and(|deadline| deadline <= ready) {
                return Err(OutOfTime);
            }
            tokio::select! {
                () = tokio::time::sleep_until(ready) => return Ok(()),
                closing = self.closing.wait_for(Option::is_some), if deadline.is_none() => {
                    // The exporter is gone.
                    if closing.is_err() {
                        return Err(OutOfTime);
                    }
                }
            }
        }
    }

    /// Sends `request`, if need be in parts, until each part is settled.
    async fn deliver(&mut self, mut work: Work, request: Request) -> Result<(), OutOfTime> {
        // The next one is the last.
        let mut parts = vec![request];
        while let Some(part) = parts.pop() {
            let fits = part.message.len() <= self.backoff.ceiling(Instant::now().into_std());
            if !fits && let Some(halves) = self.halves(&part) {
                parts.extend(halves);
                continue;
            }
            let body = self.client.body(part.message.clone());
            loop {
                self.pause().await?;
                let started = Instant::now().into_std();
                let outcome = self.client.send(&body).await;
                let (now, random) = (Instant::now().into_std(), random());
                let refusal = match outcome {
                    Outcome::Accepted { rejected, message } => {
                        self.backoff.accepted(part.items, rejected, now, random);
                        let notable = rejected > 0 || !message.is_empty();
                        let error = notable.then(|| self.error(&format!("{rejected} rejected: {message}")));
                        work.delivered(part.items, rejected, error);
                        break;
                    }
                    Outcome::Refused(refusal) => refusal,
                };
                let error = self.error(&refusal.error);
                let sent = Sent {
                    bytes: part.message.len(),
                    items: part.items,
                    started,
                };
                match self.backoff.refused(&refusal, sent, now, random) {
                    Fate::Kept => {
                        let ready = self.backoff.ready_at().unwrap_or(now);
                        let wait = ready.saturating_duration_since(now);
                        work.retried(part.items, error, Consequence::Kept(wait));
                    }
                    Fate::Halved => {
                        if let Some(halves) = self.halves(&part) {
                            work.retried(part.items, error, Consequence::Halved);
                            parts.extend(halves);
                        } else {
                            work.dropped(part.items, TOO_LARGE_FOR_SERVER, error);
                        }
                        break;
                    }
                    Fate::Dropped(reason) => {
                        work.dropped(part.items, reason, error);
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// The two halves of `part`, the one to send first last.
    fn halves(&self, part: &Request) -> Option<[Request; 2]> {
        let [first, second] = halve(self.signal, &part.message, part.items)?;
        Some([second, first].map(|(message, items)| Request { message, items }))
    }

    fn error(&self, error: &str) -> String {
        format!("{}: {error}", self.client.base())
    }
}

/// A random number in `0.0..1.0`. A fresh `RandomState` is random enough to keep collectors from retrying in step.
fn random() -> f64 {
    (RandomState::new().hash_one(0) >> 11) as f64 / (1u64 << 53) as f64
}
