//! OTLP over gRPC and HTTP/protobuf.
//!
//! `export` encodes on the caller's thread and queues; a thread of the exporter's own delivers.

mod client;
mod config;
pub mod encode;
pub(crate) mod group;
pub(crate) mod json;
mod queue;
mod response;
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
use self::config::Signal;
use self::encode::Encoder;
use self::queue::Queue;
use crate::model::{Batch, ExportStats, Exporter};

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
        let clients = [Client::new(&config.traces)?, Client::new(&config.metrics)?];
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
        let [traces, metrics] = Signal::ALL.map(|signal| &config.endpoint(signal).base);
        let target = if traces == metrics {
            format!("OTLP {traces}")
        } else {
            format!("OTLP {traces} (traces), {metrics} (metrics)")
        };
        let encoder = Encoder::default();
        Ok(Self {
            target,
            request_bytes: config.request_bytes,
            encoder,
            queue,
            closing,
            running,
        })
    }
}

impl Exporter for OtlpExporter {
    fn target(&self) -> String {
        self.target.clone()
    }

    fn export(&mut self, batch: &Batch) {
        if self.queue.is_closed() {
            return;
        }
        let queue = &self.queue;
        let push = |signal| move |message: &[u8], items| queue.push(signal, message, items);
        let too_large = self
            .encoder
            .traces(&batch.spans, self.request_bytes, push(Signal::Traces));
        queue.drop_items(Signal::Traces, "too_large", too_large);
        let too_large = self
            .encoder
            .metrics(&batch.metrics, self.request_bytes, push(Signal::Metrics));
        queue.drop_items(Signal::Metrics, "too_large", too_large);
    }

    fn stats(&self) -> ExportStats {
        self.queue.stats()
    }

    fn shutdown(&mut self, timeout: Duration) -> Result<(), String> {
        if self.queue.is_closed() {
            return Ok(());
        }
        self.queue.close();
        let now = Instant::now();
        // A timeout beyond what the clock can tell is as good as a century.
        let century = Duration::from_secs(100 * 365 * 24 * 3600);
        let timeout = timeout.min(century);
        self.closing.send_replace(Some(now + timeout));
        if self.running.recv_timeout(timeout + GRACE) == Err(RecvTimeoutError::Timeout) {
            self.queue.abandon();
            return Err(format!(
                "{}: its thread did not stop within {}",
                self.target,
                seconds(timeout)
            ));
        }
        // Nothing waits any more unless the worker died.
        self.queue.abandon();
        let stats = self.queue.stats();
        let lost = |dropped: &[(&str, u64)]| {
            dropped
                .iter()
                .find(|(reason, _)| *reason == "shutdown")
                .map_or(0, |d| d.1)
        };
        match (lost(&stats.spans_dropped), lost(&stats.metrics_dropped)) {
            (0, 0) => Ok(()),
            (spans, points) => Err(format!(
                "{}: {spans} spans and {points} metric points were not delivered within {} (last error: {})",
                self.target,
                seconds(timeout),
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
