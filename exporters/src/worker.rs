//! The thread of an exporter that may block: a disk that hangs, a pipe that nobody reads.
//!
//! ```text
//! reader ── export ──> queue (bounded by bytes) ──> thread: the exporter's own `export` and `shutdown`
//! ```
//! The reader never waits for the thread. What does not fit into the queue is dropped and counted. A thread that does not end in time is
//! left behind: what it had not confirmed is counted, and its later results are not.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread,
    time::{Duration, Instant},
};

use crate::model::{Batch, CUT_POLL, ExportStats, Exporter, Signal, Takes};

/// Bytes of batches that wait for a thread: at 1 KB a span, a second of 60,000 spans a second. Exporters share a batch's memory.
pub const QUEUE_BYTES: usize = 64 << 20;

/// An exporter on a thread of its own.
pub struct Worker {
    target: String,
    takes: Takes,
    limit: usize,
    work: Option<Sender<Work>>,
    account: Arc<Mutex<Account>>,
    /// The result of the exporter's shutdown.
    ended: mpsc::Receiver<Result<(), String>>,
}

enum Work {
    Batch(Arc<Batch>),
    Close(Duration),
}

/// What the two threads share.
#[derive(Default)]
struct Account {
    /// As the exporter last said.
    stats: ExportStats,
    /// Given to the thread and not confirmed by it.
    waiting: Items,
    waiting_bytes: usize,
    /// Did not fit.
    unqueued: Items,
    /// Were waiting when the thread was left behind.
    abandoned: Option<Items>,
}

/// Items by signal, and operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Items {
    signals: [u64; Signal::COUNT],
    operations: u64,
}

impl Items {
    fn of(batch: &Batch, takes: Takes) -> Self {
        let count = |is_taken: bool, length: usize| if is_taken { length as u64 } else { 0 };
        Self {
            signals: [
                count(takes.traces, batch.spans.len()),
                count(takes.metrics, batch.metrics.len()),
                count(takes.logs, batch.logs.len()),
            ],
            operations: count(
                takes.operations,
                batch.operations.len() + batch.findings.len() + batch.stragglers.len(),
            ),
        }
    }

    fn add(&mut self, other: Self) {
        for (sum, count) in self.signals.iter_mut().zip(other.signals) {
            *sum += count;
        }
        self.operations += other.operations;
    }

    fn subtract(&mut self, other: Self) {
        for (sum, count) in self.signals.iter_mut().zip(other.signals) {
            *sum -= count;
        }
        self.operations -= other.operations;
    }

    fn is_zero(self) -> bool {
        self == Self::default()
    }
}

impl Worker {
    /// Starts a thread that has `open` make the exporter, and waits for that at most `patience`. Up to `limit` bytes of batches wait for
    /// the thread.
    ///
    /// # Errors
    /// Those of `open`; it took too long; no thread is to be had. The text names `target` where `open` did not.
    pub fn start(
        target: &str,
        limit: usize,
        patience: Duration,
        open: impl FnOnce() -> Result<Box<dyn Exporter>, String> + Send + 'static,
    ) -> Result<Self, String> {
        let (work, to_do) = mpsc::channel();
        let (ended_tell, ended) = mpsc::channel();
        let (opened_tell, opened) = mpsc::channel();
        let account = Arc::<Mutex<Account>>::default();
        let shared = Arc::clone(&account);
        let run = move || {
            let exporter = match open() {
                Ok(exporter) => exporter,
                Err(error) => {
                    // Nobody waits for it any more if it took too long.
                    let _ = opened_tell.send(Err(error));
                    return;
                }
            };
            if opened_tell
                .send(Ok((exporter.target(), exporter.takes())))
                .is_ok()
            {
                // Nobody asks for the result if the worker is dropped without a shutdown.
                let _ = ended_tell.send(deliver(exporter, &to_do, &shared));
            }
        };
        thread::Builder::new()
            .name("ringsight-out".to_owned())
            .spawn(run)
            .map_err(|error| format!("{target}: no thread to write it: {error}"))?;
        let (target, takes) = opened.recv_timeout(patience).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("cannot open {target} within {patience:?}"),
            RecvTimeoutError::Disconnected => format!("{target}: its thread ended"),
        })??;
        Ok(Self {
            target,
            takes,
            limit,
            work: Some(work),
            account,
            ended,
        })
    }

    fn account(&self) -> MutexGuard<'_, Account> {
        lock(&self.account)
    }
}

fn lock(account: &Mutex<Account>) -> MutexGuard<'_, Account> {
    // Every update is whole at every point where it could panic.
    account.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread: gives the exporter what comes, until it is closed or nobody can give it any more. Its file is closed when this returns.
fn deliver(
    mut exporter: Box<dyn Exporter>,
    to_do: &mpsc::Receiver<Work>,
    account: &Mutex<Account>,
) -> Result<(), String> {
    let takes = exporter.takes();
    for work in to_do {
        match work {
            Work::Batch(batch) => {
                exporter.export(&batch);
                let (items, bytes) = (Items::of(&batch, takes), batch.memory());
                let mut account = lock(account);
                account.waiting_bytes -= bytes;
                if account.abandoned.is_none() {
                    account.waiting.subtract(items);
                    account.stats = exporter.stats();
                }
            }
            Work::Close(timeout) => {
                let result = exporter.shutdown(timeout);
                let mut account = lock(account);
                if account.abandoned.is_none() {
                    account.stats = exporter.stats();
                }
                return result;
            }
        }
    }
    Ok(())
}

impl Exporter for Worker {
    fn target(&self) -> String {
        self.target.clone()
    }

    fn takes(&self) -> Takes {
        self.takes
    }

    fn export(&mut self, batch: &Batch) {
        self.export_shared(&Arc::new(batch.clone()));
    }

    fn export_shared(&mut self, batch: &Arc<Batch>) {
        let Some(work) = &self.work else { return };
        let (items, bytes) = (Items::of(batch, self.takes), batch.memory());
        let mut account = self.account();
        // A batch that is larger than the queue is let through if nothing waits.
        if account.waiting_bytes > 0 && account.waiting_bytes + bytes > self.limit {
            account.unqueued.add(items);
            return;
        }
        // It is sent under the lock: the thread must not confirm it before it is counted.
        if work.send(Work::Batch(Arc::clone(batch))).is_ok() {
            account.waiting.add(items);
            account.waiting_bytes += bytes;
        } else {
            // The thread panicked.
            account.unqueued.add(items);
        }
    }

    fn stats(&self) -> ExportStats {
        let account = self.account();
        let mut stats = account.stats.clone();
        let lost = [
            ("queue_full", account.unqueued),
            ("shutdown", account.abandoned.unwrap_or_default()),
        ];
        for (reason, items) in lost {
            for signal in Signal::ALL {
                stats[signal].drop_items(reason, items.signals[signal as usize]);
            }
            if !items.is_zero() && stats.last_error.is_none() {
                stats.last_error = Some(format!("{} takes longer than it is given", self.target));
            }
        }
        stats
    }

    fn shutdown(&mut self, timeout: Duration) -> Result<(), String> {
        self.shutdown_until(timeout, &|| false)
    }

    /// Returns at `timeout` at the latest, whatever the exporter does.
    fn shutdown_until(
        &mut self,
        timeout: Duration,
        is_cut: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), String> {
        let Some(work) = self.work.take() else {
            return Ok(());
        };
        // A thread that panicked takes nothing, and shows as disconnected below.
        let _ = work.send(Work::Close(timeout));
        drop(work);
        let begun = Instant::now();
        let result = loop {
            let left = timeout.saturating_sub(begun.elapsed());
            let result = self.ended.recv_timeout(left.min(CUT_POLL));
            let waits = result == Err(RecvTimeoutError::Timeout);
            if !waits || left.is_zero() || is_cut() {
                break result;
            }
        };
        let mut account = self.account();
        let result = match result {
            Ok(result) => result,
            Err(gone) => {
                let waiting = account.waiting;
                account.abandoned = Some(waiting);
                Err(match gone {
                    RecvTimeoutError::Timeout => format!(
                        "{} did not take what was written to it within {:.1} s; {} are missing from it",
                        self.target,
                        begun.elapsed().as_secs_f64(),
                        waiting.list()
                    ),
                    RecvTimeoutError::Disconnected => {
                        format!(
                            "{}: its thread ended; {} are missing from it",
                            self.target,
                            waiting.list()
                        )
                    }
                })
            }
        };
        // Operations have no account of their own.
        match (result, account.unqueued.operations) {
            (Ok(()), 0) => Ok(()),
            (Ok(()), operations) => Err(format!(
                "{} was too slow: {operations} operations are missing from it",
                self.target
            )),
            (failed, _) => failed,
        }
    }
}

impl Items {
    fn list(self) -> String {
        let signals = Signal::ALL.map(|signal| (self.signals[signal as usize], signal.items()));
        let all = signals.into_iter().chain([(self.operations, "operations")]);
        let some: Vec<String> = all
            .filter(|(count, _)| *count > 0)
            .map(|(count, items)| format!("{count} {items}"))
            .collect();
        if some.is_empty() {
            "the last bytes".to_owned()
        } else {
            some.join(" and ")
        }
    }
}

#[cfg(test)]
mod tests;
