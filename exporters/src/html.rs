//! One self-contained HTML page: operations over time with a row per rank, late ranks marked and ranked.
//!
//! The page needs no network and no server. It is written when the exporter is created (empty, so that a directory that
//! cannot be written to is noticed then), rewritten while the recording goes on, and at shutdown; each time beside its
//! place first and then renamed into it, so that a reader never meets half a page and a full disk leaves the last
//! whole one. Sources: `assets/`; what they are given: `page`.

mod page;
mod store;

use std::{
    cmp::Ordering,
    collections::HashMap,
    path::Path,
    time::{Duration, Instant},
};

use ringsight_output::{Destination, Error};

use self::store::Store;
use crate::model::{Batch, ExportStats, Exporter, Finding, MetricData, Straggler, Takes};

/// Operations that a page keeps unless told otherwise.
pub const DEFAULT_OPERATIONS: usize = 50_000;
/// Ranks' parts, over all operations, that a page keeps: 50,000 operations of 16 ranks, 45 MB of memory.
const DEFAULT_PARTS: usize = 800_000;
/// The page is rewritten no more often than this, and takes at most a fiftieth of the time.
const REWRITE: Duration = Duration::from_secs(10);
/// Findings that a page shows.
const MAX_FINDINGS: usize = 1024;
/// Ranks whose lags a page shows.
const MAX_STRAGGLERS: usize = 1024;
/// Counters of events that never reached the collector.
const LOST_METRIC: &str = "ccl.probe.lost";

/// Writes the page.
pub struct HtmlExporter {
    destination: Destination,
    title: String,
    store: Store,
    /// What is wrong with operations, by trace, in the order of the first.
    findings: Vec<Finding>,
    /// Each rank's lags: stragglers first, then those that cost most.
    stragglers: Vec<Straggler>,
    /// Lost events by who counted them.
    lost: HashMap<String, u64>,
    unwritten: u64,
    written_at: Instant,
    took: Duration,
    closed: bool,
    last_error: Option<String>,
}

impl HtmlExporter {
    /// Creates the page at `path` (replacing a file there), with `title` as its heading.
    ///
    /// # Errors
    /// The path names no regular file, or cannot be written; the text names it and the reason.
    pub fn create(path: impl AsRef<Path>, title: impl Into<String>) -> Result<Self, String> {
        Self::with_limit(path, title, DEFAULT_OPERATIONS)
    }

    /// As [`HtmlExporter::create`], keeping the latest `operations` operations instead of [`DEFAULT_OPERATIONS`].
    ///
    /// # Errors
    /// As [`HtmlExporter::create`].
    pub fn with_limit(
        path: impl AsRef<Path>,
        title: impl Into<String>,
        operations: usize,
    ) -> Result<Self, String> {
        let path = path.as_ref();
        let destination = Destination::resolve(path)
            .map_err(|error| format!("cannot write page {}: {error}", path.display()))?;
        Self::at(destination, title.into(), operations)
    }

    /// As [`HtmlExporter::create`], at a destination that was found before.
    ///
    /// # Errors
    /// As [`HtmlExporter::create`].
    pub fn create_at(destination: Destination, title: impl Into<String>) -> Result<Self, String> {
        Self::at(destination, title.into(), DEFAULT_OPERATIONS)
    }

    fn at(destination: Destination, title: String, operations: usize) -> Result<Self, String> {
        let mut exporter = Self {
            destination,
            title,
            store: Store::new(operations, DEFAULT_PARTS),
            findings: Vec::new(),
            stragglers: Vec::new(),
            lost: HashMap::new(),
            unwritten: 0,
            written_at: Instant::now(),
            took: Duration::ZERO,
            closed: false,
            last_error: None,
        };
        exporter.write(false)?;
        Ok(exporter)
    }

    /// Puts the page as it is now in its place.
    fn write(&mut self, last: bool) -> Result<(), String> {
        let started = Instant::now();
        let lost = self.lost.values().sum();
        // A pipe cannot be rewritten.
        let written = if self.destination.is_stream() {
            Err(Error::NotRegular)
        } else {
            self.destination.replace(|file| {
                let wrong = (&self.findings[..], &self.stragglers[..]);
                page::write(file, &self.title, &self.store, wrong, lost, last)
            })
        };
        self.written_at = Instant::now();
        self.took = started.elapsed();
        match written {
            Ok(()) => {
                self.unwritten = 0;
                Ok(())
            }
            Err(error) => {
                let error = format!("cannot write page {}: {error}", self.destination.path().display());
                self.last_error = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Takes a finding; a later one of the same trace replaces it.
    fn find(&mut self, finding: &Finding) {
        let is_it = |known: &Finding| known.trace_id == finding.trace_id;
        match self.findings.iter().position(is_it) {
            Some(at) => self.findings[at].clone_from(finding),
            None if self.findings.len() < MAX_FINDINGS => self.findings.push(finding.clone()),
            None => {}
        }
    }

    fn count_lost(&mut self, batch: &Batch) {
        for metric in batch.metrics.iter().filter(|metric| metric.name == LOST_METRIC) {
            if let MetricData::Counter(count) = metric.data {
                // Counters are cumulative: the latest of each source counts. A source is its attributes.
                self.lost.insert(
                    format!("{:?} {:?}", metric.resource.attributes, metric.attributes),
                    count,
                );
            }
        }
    }
}

impl Exporter for HtmlExporter {
    fn target(&self) -> String {
        format!("page {}", self.destination.path().display())
    }

    fn takes(&self) -> Takes {
        Takes {
            traces: false,
            metrics: false,
            logs: false,
            operations: true,
        }
    }

    fn export(&mut self, batch: &Batch) {
        if self.closed {
            return;
        }
        self.count_lost(batch);
        for operation in &batch.operations {
            self.store.push(operation);
        }
        for finding in &batch.findings {
            self.find(finding);
        }
        if !batch.stragglers.is_empty() {
            self.stragglers.clone_from(&batch.stragglers);
            self.stragglers.sort_by(|a, b| {
                (b.chronic, b.share)
                    .partial_cmp(&(a.chronic, a.share))
                    .unwrap_or(Ordering::Equal)
            });
            self.stragglers.truncate(MAX_STRAGGLERS);
        }
        self.unwritten += batch.operations.len() as u64;
        let changed = self.unwritten > 0 || !batch.findings.is_empty();
        if changed && self.written_at.elapsed() >= REWRITE.max(self.took * 50) {
            // Counted in `stats`; the next time may succeed.
            let _ = self.write(false);
        }
    }

    /// Spans, metrics and log records are not on the page: their figures are zero. What failed is in `last_error`.
    fn stats(&self) -> ExportStats {
        ExportStats {
            last_error: self.last_error.clone(),
            ..ExportStats::default()
        }
    }

    fn shutdown(&mut self, _timeout: Duration) -> Result<(), String> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let unwritten = self.unwritten;
        self.write(true)
            .map_err(|error| format!("{error}; the page there lacks the latest {unwritten} operations"))
    }
}

#[cfg(test)]
mod tests;
