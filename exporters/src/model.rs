//! What exporters are given: finished spans, metrics, log records and operation summaries, free of where they came from.
//!
//! Times are Unix nanoseconds (`CLOCK_REALTIME`); the collector has converted them. Keys are static strings, so that a
//! span costs few allocations: the collector makes hundreds of thousands a second.

use std::ops::{Index, IndexMut};
use std::sync::Arc;

/// 128-bit trace id, big-endian as on the wire; never all zero.
pub type TraceId = [u8; 16];
/// 64-bit span id, big-endian as on the wire; never all zero.
pub type SpanId = [u8; 8];

/// An attribute's value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text from a fixed vocabulary.
    Static(&'static str),
    /// Other text, shared between spans.
    Text(Arc<str>),
    /// A number.
    Int(i64),
    /// A number.
    Double(f64),
    /// Yes or no.
    Bool(bool),
}

/// One attribute.
pub type Attribute = (&'static str, Value);

/// Where telemetry comes from: one rank's process on one host. Exporters group by `Arc` identity first, so a collector
/// keeps one `Arc` per resource.
#[derive(Clone, Debug, PartialEq)]
pub struct Resource {
    /// OpenTelemetry resource attributes (`service.name`, `service.instance.id`, `host.id`, `host.name`, `process.pid`, ...).
    pub attributes: Vec<Attribute>,
}

/// A span's kind on the wire: everything here is internal.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Whose it is.
    pub resource: Arc<Resource>,
    /// Trace.
    pub trace_id: TraceId,
    /// Span.
    pub span_id: SpanId,
    /// Parent span in the same trace, `None` for the root.
    pub parent_span_id: Option<SpanId>,
    /// Low-cardinality name.
    pub name: &'static str,
    /// Start, Unix nanoseconds.
    pub start_unix_ns: u64,
    /// End, Unix nanoseconds, not before the start.
    pub end_unix_ns: u64,
    /// Attributes.
    pub attributes: Vec<Attribute>,
    /// Events in it.
    pub events: Vec<SpanEvent>,
    /// Links to other spans.
    pub links: Vec<SpanLink>,
    /// `Some(message)` if it failed.
    pub error: Option<Arc<str>>,
}

/// A moment in a span.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanEvent {
    /// When, Unix nanoseconds.
    pub unix_ns: u64,
    /// What.
    pub name: &'static str,
    /// Attributes.
    pub attributes: Vec<Attribute>,
}

/// A reference to a span that need not have been exported yet, or by this collector.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanLink {
    /// Its trace.
    pub trace_id: TraceId,
    /// Its span.
    pub span_id: SpanId,
    /// Attributes.
    pub attributes: Vec<Attribute>,
}

/// A metric at one moment, cumulative since `start_unix_ns`.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    /// Whose it is.
    pub resource: Arc<Resource>,
    /// Name, e.g. `ccl.operation.duration`.
    pub name: &'static str,
    /// What it tells.
    pub description: &'static str,
    /// UCUM unit, e.g. `s`, `By/s`, `{operation}`.
    pub unit: &'static str,
    /// Attributes of this point.
    pub attributes: Vec<Attribute>,
    /// Since when it accumulates, Unix nanoseconds.
    pub start_unix_ns: u64,
    /// When it was read, Unix nanoseconds.
    pub unix_ns: u64,
    /// The numbers.
    pub data: MetricData,
}

/// A metric's numbers.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricData {
    /// A value that goes up and down.
    Gauge(f64),
    /// A monotonic sum.
    Counter(u64),
    /// A monotonic sum of what is measured and not counted, such as seconds.
    Total(f64),
    /// A sum that goes up and down.
    UpDown(i64),
    /// An exponential histogram (base `2^(2^-scale)`).
    Histogram {
        /// Scale.
        scale: i32,
        /// Number of values.
        count: u64,
        /// Their sum.
        sum: f64,
        /// Least value.
        min: f64,
        /// Greatest value.
        max: f64,
        /// Values that are zero.
        zero_count: u64,
        /// Index of the first bucket.
        offset: i32,
        /// Counts from there on.
        buckets: Vec<u64>,
    },
}

/// How bad it is that something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// It goes on, worse than it should.
    Warn,
    /// It does not go on.
    Error,
}

impl Severity {
    /// OpenTelemetry's `SeverityNumber`.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Warn => 13,
            Self::Error => 17,
        }
    }

    /// Its short name.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Warn => "WARN",
            Self::Error => "ERROR",
        }
    }
}

/// Something that happened and that somebody should read.
#[derive(Clone, Debug, PartialEq)]
pub struct LogRecord {
    /// Whose it is.
    pub resource: Arc<Resource>,
    /// When it happened, Unix nanoseconds.
    pub unix_ns: u64,
    /// When the collector learned of it, Unix nanoseconds.
    pub observed_unix_ns: u64,
    /// How bad it is.
    pub severity: Severity,
    /// What happened: records of one name have the same attributes.
    pub event_name: &'static str,
    /// The same for people, on one line.
    pub body: Arc<str>,
    /// Attributes.
    pub attributes: Vec<Attribute>,
    /// The span that it belongs to, which need not have been exported yet, or by this collector.
    pub span: Option<(TraceId, SpanId)>,
}

/// One collective or message across the ranks that the collector saw: a row of the table, a row of the page.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// Its trace.
    pub trace_id: TraceId,
    /// `all_reduce`, …; `send_recv` for a message.
    pub name: &'static str,
    /// Communicator id.
    pub communicator: u64,
    /// Communicator name, empty if it has none.
    pub communicator_name: Arc<str>,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Sequence in its communicator or pair.
    pub sequence: u64,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// Message bytes.
    pub bytes: u64,
    /// Data type name.
    pub data_type: &'static str,
    /// Algorithm name.
    pub algorithm: &'static str,
    /// What each rank did, in rank order; only ranks that were seen.
    pub by_rank: Vec<OperationRank>,
    /// The rank that everybody waited for, if one was late beyond the threshold.
    pub culprit: Option<Culprit>,
    /// A rank may have been late, and nobody can say which.
    pub unnamed: Option<Unnamed>,
    /// Until when the ranks waited for one that watchdogs named, Unix nanoseconds; 0: they named none.
    pub waited_until_ns: u64,
    /// `false` if events were lost.
    pub complete: bool,
}

/// One rank's part of an [`Operation`].
#[derive(Clone, Debug, PartialEq)]
pub struct OperationRank {
    /// Rank.
    pub rank: u32,
    /// Host name.
    pub host: Arc<str>,
    /// Process.
    pub pid: u32,
    /// API call entered, Unix nanoseconds.
    pub api_start_ns: u64,
    /// Arrived: began on the device.
    pub device_start_ns: u64,
    /// Finished on the device.
    pub device_end_ns: u64,
    /// These are the device's own times, of every channel that was told of; else some are when the host learnt that it was over.
    pub by_device: bool,
}

/// A late rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Culprit {
    /// Rank.
    pub rank: u32,
    /// Its arrival minus the median arrival of the others, nanoseconds.
    pub lag_ns: u64,
}

/// A rank may have been late beyond the threshold: too few ranks are watched to name it, and the library does not say who arrived
/// last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unnamed {
    /// The longest wait of a watched rank for one that is not, if the records say for whom it waited.
    pub wait: Option<PeerWait>,
}

/// A wait for a peer on another node. The peer may have waited itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerWait {
    /// The rank that waited.
    pub rank: u32,
    /// The rank that it waited for.
    pub peer: u32,
    /// How long, nanoseconds.
    pub wait_ns: u64,
}

/// What the collector hands over at once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Finished spans.
    pub spans: Vec<Span>,
    /// Metrics, if it is time for them.
    pub metrics: Vec<Metric>,
    /// Log records.
    pub logs: Vec<LogRecord>,
    /// Finished operations.
    pub operations: Vec<Operation>,
    /// What is wrong with operations, as far as that has changed.
    pub findings: Vec<Finding>,
    /// Each rank's lags over the window, if it is time for them: all that are known, in place of those before.
    pub stragglers: Vec<Straggler>,
}

impl Batch {
    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self {
            spans,
            metrics,
            logs,
            operations,
            findings,
            stragglers,
        } = self;
        spans.is_empty()
            && metrics.is_empty()
            && logs.is_empty()
            && operations.is_empty()
            && findings.is_empty()
            && stragglers.is_empty()
    }

    /// About how many bytes of memory it takes. Shared texts and resources are not counted.
    #[must_use]
    pub fn memory(&self) -> usize {
        let attributes = |attributes: &Vec<Attribute>| size_of_val(attributes.as_slice());
        let spans = self.spans.iter().map(|span| {
            let events = span.events.iter().map(|event| attributes(&event.attributes));
            let links = span.links.iter().map(|link| attributes(&link.attributes));
            attributes(&span.attributes)
                + size_of_val(span.events.as_slice())
                + size_of_val(span.links.as_slice())
                + events.chain(links).sum::<usize>()
        });
        let metrics = self.metrics.iter().map(|metric| {
            let buckets = match &metric.data {
                MetricData::Histogram { buckets, .. } => size_of_val(buckets.as_slice()),
                _ => 0,
            };
            attributes(&metric.attributes) + buckets
        });
        let logs = self
            .logs
            .iter()
            .map(|log| attributes(&log.attributes) + log.body.len());
        let operations = self
            .operations
            .iter()
            .map(|operation| size_of_val(operation.by_rank.as_slice()));
        size_of_val(self.spans.as_slice())
            + size_of_val(self.metrics.as_slice())
            + size_of_val(self.logs.as_slice())
            + size_of_val(self.operations.as_slice())
            + spans.chain(metrics).chain(logs).chain(operations).sum::<usize>()
    }
}

/// One kind of telemetry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Spans.
    Traces,
    /// Metric points.
    Metrics,
    /// Log records.
    Logs,
}

impl Signal {
    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();
    /// Each of them, by number.
    pub const ALL: [Self; 3] = [Self::Traces, Self::Metrics, Self::Logs];

    /// OpenTelemetry's name for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Traces => "traces",
            Self::Metrics => "metrics",
            Self::Logs => "logs",
        }
    }

    /// What there are several of in a request.
    #[must_use]
    pub const fn items(self) -> &'static str {
        match self {
            Self::Traces => "spans",
            Self::Metrics => "metric points",
            Self::Logs => "log records",
        }
    }
}

/// What an exporter did with items that it could not deliver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Consequence {
    /// They are kept, and tried again after this time.
    Kept(std::time::Duration),
    /// They are kept, and tried again with the next batch.
    KeptForNext,
    /// They are sent again in two requests.
    Halved,
    /// They were dropped for this reason.
    Dropped(&'static str),
}

/// A delivery that failed, in whole or in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What went wrong, in words.
    pub error: String,
    /// How many items it is about.
    pub items: u64,
    /// What was done with them.
    pub consequence: Consequence,
}

/// What became of the items of one signal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Delivered: acknowledged by the backend, or written to the file.
    pub delivered: u64,
    /// Dropped, by reason (`queue_full`, `rejected`, `too_large`, `too_large_for_server`, `shutdown`, `io_error`, …).
    pub dropped: Vec<(&'static str, u64)>,
    /// What the backend said last if it does not take this signal at all; such items are dropped as [`Tally::UNSUPPORTED`].
    pub unsupported: Option<String>,
    /// Deliveries that failed, but for those of a signal that the backend does not take. Zero from an exporter that counts none.
    pub failures: u64,
    /// The last of them.
    pub last_failure: Option<Failure>,
}

impl Tally {
    /// Why items are dropped that the backend takes none of.
    pub const UNSUPPORTED: &'static str = "unsupported";
    /// Why items are dropped that there is no room for.
    pub const QUEUE_FULL: &'static str = "queue_full";

    /// Counts dropped items.
    pub fn drop_items(&mut self, reason: &'static str, items: u64) {
        if items == 0 {
            return;
        }
        match self.dropped.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, count)) => *count += items,
            None => self.dropped.push((reason, items)),
        }
    }

    /// Items that were dropped for this reason.
    #[must_use]
    pub fn dropped_as(&self, reason: &str) -> u64 {
        let found = self.dropped.iter().find(|(known, _)| *known == reason);
        found.map_or(0, |(_, count)| *count)
    }

    /// Items that were dropped.
    #[must_use]
    pub fn dropped_total(&self) -> u64 {
        self.dropped.iter().map(|(_, count)| count).sum()
    }
}

/// Where a rank runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its process, as its host counts processes.
    pub pid: u32,
    /// Its host's name; empty if it has none.
    pub host: Arc<str>,
}

/// What is wrong with an operation that somebody waits in, as of [`Finding::unix_ns`]. A later one of the same trace replaces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Trace of the operation.
    pub trace_id: TraceId,
    /// Name of the operation, e.g. `all_reduce`; empty if the culprit died between two operations.
    pub operation: &'static str,
    /// Communicator.
    pub communicator: u64,
    /// Its name, empty if it has none.
    pub communicator_name: Arc<str>,
    /// Its ranks.
    pub ranks: u32,
    /// Sequence of the operation in its communicator, or in its pair.
    pub sequence: u64,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// Sender and receiver of a message.
    pub pair: Option<(u32, u32)>,
    /// Why, e.g. `NOT_LAUNCHED`.
    pub cause: &'static str,
    /// It will not end by itself; otherwise the culprit is late.
    pub hang: bool,
    /// The rank that the others wait for.
    pub culprit: u32,
    /// Where it runs, if that is known here.
    pub culprit_place: Option<Place>,
    /// Ranks whose watchdogs said so.
    pub waiting: Vec<u32>,
    /// How long the longest of them has waited, nanoseconds.
    pub waited_ns: u64,
    /// When the first of them said so, Unix nanoseconds.
    pub first_unix_ns: u64,
    /// When this was so, Unix nanoseconds.
    pub unix_ns: u64,
    /// The operation has ended since.
    pub ended: bool,
    /// All of this in one sentence.
    pub text: String,
    /// What to do next.
    pub next_step: String,
}

impl Finding {
    /// `HANG` as long as ranks wait, `ENDED` once the operation has ended. Whether it can end by itself is [`Finding::hang`].
    #[must_use]
    pub fn state(&self) -> &'static str {
        if self.ended { "ENDED" } else { "HANG" }
    }

    /// The operation in words: `all_reduce 750`, `send_recv 3 from rank 1 to rank 2`, `all_reduce 4 of graph 1, replay 9`.
    #[must_use]
    pub fn operation_words(&self) -> String {
        if self.operation.is_empty() {
            return "no operation".to_owned();
        }
        let (graph, node) = (self.sequence >> 32, self.sequence as u32);
        let mut words = match graph {
            0 => format!("{} {}", self.operation, self.sequence),
            graph => format!("{} {node} of graph {graph}", self.operation),
        };
        if self.replay != 0 {
            words += &format!(", replay {}", self.replay);
        }
        if let Some((from, to)) = self.pair {
            words += &format!(" from rank {from} to rank {to}");
        }
        words
    }
}

/// One rank's lags in one communicator over a window of operations.
#[derive(Clone, Debug, PartialEq)]
pub struct Straggler {
    /// Communicator.
    pub communicator: u64,
    /// Its name, empty if it has none or is gone.
    pub communicator_name: Arc<str>,
    /// Rank.
    pub rank: u32,
    /// Where it runs, if it is watched still.
    pub place: Option<Place>,
    /// Ranks that were compared.
    pub ranks: u32,
    /// It is late in so many operations, and loses so much time, that it is called a straggler.
    pub chronic: bool,
    /// Operations of the window.
    pub operations: u64,
    /// Operations in which it was last.
    pub last: u64,
    /// Median of its lags, nanoseconds, to a tenth; 0 if it is negative.
    pub median_ns: u64,
    /// 99th percentile of its lags, nanoseconds.
    pub p99_ns: u64,
    /// What the others lost by it, summed over them, nanoseconds.
    pub lost_ns: u64,
    /// Share of the window's time by which its operations began later.
    pub share: f64,
    /// Length of the window, nanoseconds.
    pub window_ns: u64,
    /// Probability of this if all ranks were alike.
    pub chance: f64,
}

impl Straggler {
    /// The communicator as people know it.
    #[must_use]
    pub fn communicator_words(&self) -> String {
        match &*self.communicator_name {
            "" => format!("{:016x}", self.communicator),
            name => name.to_owned(),
        }
    }

    /// `rank 2 (pid 7553, host b) of dp: last in 997 of 1000 operations, median lag 8.1 ms, p99 9.0 ms; the others lost 24.3 s, 27.0 % of the time`.
    #[must_use]
    pub fn sentence(&self) -> String {
        let place = match &self.place {
            Some(Place { pid, host }) if host.is_empty() => format!(" (pid {pid})"),
            Some(Place { pid, host }) => format!(" (pid {pid}, host {host})"),
            None => String::new(),
        };
        format!(
            "rank {}{place} of {}: last in {} of {} operations, median lag {:.1} ms, p99 {:.1} ms; the others lost {:.1} s, {:.1} % of \
             the time",
            self.rank,
            self.communicator_words(),
            self.last,
            self.operations,
            self.median_ns as f64 / 1e6,
            self.p99_ns as f64 / 1e6,
            self.lost_ns as f64 / 1e9,
            self.share * 100.0
        )
    }
}

/// How an exporter is doing: `stats[Signal::Traces]` is the account of spans.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportStats {
    /// By signal.
    pub tallies: [Tally; Signal::COUNT],
    /// Delivery attempts that were repeated.
    pub retries: u64,
    /// What went wrong last.
    pub last_error: Option<String>,
}

impl ExportStats {
    /// Each signal with its account.
    pub fn by_signal(&self) -> impl Iterator<Item = (Signal, &Tally)> {
        Signal::ALL.into_iter().zip(&self.tallies)
    }

    /// `3 spans and 1 log records`, of what `count` gives for each account; `None` if that is nothing.
    pub fn list(&self, count: impl Fn(&Tally) -> u64) -> Option<String> {
        let some = self.by_signal().map(|(signal, tally)| (count(tally), signal));
        let some: Vec<String> = some
            .filter(|(count, _)| *count > 0)
            .map(|(count, signal)| format!("{count} {}", signal.items()))
            .collect();
        (!some.is_empty()).then(|| some.join(" and "))
    }
}

impl Index<Signal> for ExportStats {
    type Output = Tally;

    fn index(&self, signal: Signal) -> &Tally {
        &self.tallies[signal as usize]
    }
}

impl IndexMut<Signal> for ExportStats {
    fn index_mut(&mut self, signal: Signal) -> &mut Tally {
        &mut self.tallies[signal as usize]
    }
}

/// Which parts of a batch an exporter writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Takes {
    /// Spans.
    pub traces: bool,
    /// Metric points.
    pub metrics: bool,
    /// Log records.
    pub logs: bool,
    /// Operations, and what is wrong with them.
    pub operations: bool,
}

impl Takes {
    /// All signals of OpenTelemetry, and no operations.
    pub const SIGNALS: Self = Self {
        traces: true,
        metrics: true,
        logs: true,
        operations: false,
    };
}

/// A place that telemetry goes to.
pub trait Exporter: Send {
    /// Where, for messages: `OTLP http://localhost:4317`, `file trace.html`.
    fn target(&self) -> String;
    /// Takes a batch. Never blocks for long: what cannot be delivered now is queued within the exporter's bound, what
    /// does not fit is dropped and counted.
    fn export(&mut self, batch: &Batch);
    /// As [`Exporter::export`], of a batch that it may keep: an exporter with a thread of its own copies nothing.
    fn export_shared(&mut self, batch: &Arc<Batch>) {
        self.export(batch);
    }
    /// What it writes of a batch.
    fn takes(&self) -> Takes {
        Takes::SIGNALS
    }
    /// How it is doing.
    fn stats(&self) -> ExportStats;
    /// Delivers what is queued, within `timeout`, and closes. Later calls do nothing.
    ///
    /// # Errors
    /// What could not be delivered or written, in words.
    fn shutdown(&mut self, timeout: std::time::Duration) -> Result<(), String>;
    /// As [`Exporter::shutdown`], but gives up soon after `is_cut` says so, as if `timeout` were over. An exporter that takes no longer
    /// than a file needs does not ask.
    ///
    /// # Errors
    /// As [`Exporter::shutdown`].
    fn shutdown_until(
        &mut self,
        timeout: std::time::Duration,
        is_cut: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), String> {
        let _ = is_cut;
        self.shutdown(timeout)
    }
}

/// How often [`Exporter::shutdown_until`] asks whether it is cut: a person at a terminal sees no delay.
pub(crate) const CUT_POLL: std::time::Duration = std::time::Duration::from_millis(50);
