//! OTLP over gRPC and HTTP/protobuf.
//!
//! `export` encodes on the caller's thread and queues; a thread of the exporter's own delivers.

mod client;
mod config;
pub mod encode;
pub(crate) mod group;
mod grpc;
mod halve;
pub(crate) mod json;
mod queue;
mod response;
mod retry;
mod tls;
mod wire;
mod worker;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

pub use config::{Config, ConfigError, Endpoint, Headers, PemFile, Protocol, Retry, Tls};

use self::client::{Client, seconds};
use self::encode::Encoder;
use self::queue::Queue;
use crate::model::{Batch, CUT_POLL, ExportStats, Exporter, Signal};

/// What a shutdown waits for the thread beyond the time given to delivering.
const GRACE: Duration = Duration::from_secs(1);

/// Sends batches to an OTLP server. Operations in a batch are not OTLP's and are left to other exporters.
pub struct OtlpExporter {
    target: String,
    request_bytes: usize,
    encoder: Encoder,
    queue: Arc<Queue>,
    closing: watch::Sender<worker::Deadline>,
    /// Disconnected when the worker ended.
    running: mpsc::Receiver<()>,
}

impl OtlpExporter {
    /// Reads the certificates that `config` names and starts the worker; connects when there is something to send.
    ///
    /// # Errors
    /// A certificate or key that cannot be read or used, or no thread to be had.
    pub fn new(config: &Config) -> Result<Self, ConfigError> {
        let client = |signal| Client::new(config.endpoint(signal));
        let clients = [
            client(Signal::Traces)?,
            client(Signal::Metrics)?,
            client(Signal::Logs)?,
        ];
        let failed = |problem: std::io::Error| ConfigError {
            variable: "OTLP exporter".to_owned(),
            problem: format!("cannot start its thread: {problem}"),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(failed)?;
        let queue = Arc::new(Queue::new(config.queue_bytes, config.request_bytes));
        let (closing, closing_seen) = watch::channel(None);
        let (alive, running) = mpsc::channel();
        let work = worker::run(Arc::clone(&queue), clients, config.retry, closing_seen);
        let thread = thread::Builder::new().name("ringsight-otlp".to_owned());
        let spawned = thread.spawn(move || {
            runtime.block_on(work);
            // A name lookup may still be running and cannot be stopped.
            runtime.shutdown_background();
            drop::<mpsc::Sender<()>>(alive);
        });
        spawned.map_err(failed)?;
        Ok(Self {
            target: target(config),
            request_bytes: config.request_bytes,
            encoder: Encoder::default(),
            queue,
            closing,
            running,
        })
    }
}

/// Where signals go, for messages.
fn target(config: &Config) -> String {
    let base = |signal| config.endpoint(signal).base.as_str();
    let first = base(Signal::Traces);
    if Signal::ALL.into_iter().all(|signal| base(signal) == first) {
        return format!("OTLP {first}");
    }
    let each = Signal::ALL.map(|signal| format!("{} ({})", base(signal), signal.name()));
    format!("OTLP {}", each.join(", "))
}

impl Exporter for OtlpExporter {
    fn target(&self) -> String {
        self.target.clone()
    }

    fn export(&mut self, batch: &Batch) {
        if self.queue.is_closed() {
            return;
        }
        let (queue, limit) = (&self.queue, self.request_bytes);
        for signal in Signal::ALL {
            let push = |message: &[u8], items| queue.push(signal, message, items);
            let too_large = match signal {
                Signal::Traces => self.encoder.traces(&batch.spans, limit, push),
                Signal::Metrics => self.encoder.metrics(&batch.metrics, limit, push),
                Signal::Logs => self.encoder.logs(&batch.logs, limit, push),
            };
            queue.drop_items(signal, "too_large", too_large);
        }
    }

    fn stats(&self) -> ExportStats {
        self.queue.stats()
    }

    fn shutdown(&mut self, timeout: Duration) -> Result<(), String> {
        self.shutdown_until(timeout, &|| false)
    }

    fn shutdown_until(
        &mut self,
        timeout: Duration,
        is_cut: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), String> {
        if self.queue.is_closed() {
            return Ok(());
        }
        self.queue.close();
        let begun = Instant::now();
        // A timeout beyond what the clock can tell is as good as a century.
        let century = Duration::from_secs(100 * 365 * 24 * 3600);
        let mut deadline = begun + timeout.min(century);
        self.closing.send_replace(Some(deadline));
        while self.running.recv_timeout(CUT_POLL) == Err(RecvTimeoutError::Timeout) {
            let now = Instant::now();
            if now > deadline + GRACE {
                self.queue.abandon();
                return Err(format!(
                    "{}: its thread did not stop within {}",
                    self.target,
                    seconds(deadline - begun)
                ));
            }
            if now < deadline && is_cut() {
                deadline = now;
                self.closing.send_replace(Some(deadline));
            }
        }
        // Nothing waits any more unless the worker died.
        self.queue.abandon();
        let stats = self.queue.stats();
        match stats.list(|tally| tally.dropped_as("shutdown")) {
            None => Ok(()),
            Some(lost) => Err(format!(
                "{}: {lost} were not delivered within {} (last error: {})",
                self.target,
                seconds(deadline - begun),
                stats.last_error.as_deref().unwrap_or("none"),
            )),
        }
    }
}

impl Drop for OtlpExporter {
    fn drop(&mut self) {
        // Without a shutdown before, nothing more is delivered; the thread ends by itself.
        self.queue.close();
        self.closing.send_replace(Some(Instant::now()));
    }
}
