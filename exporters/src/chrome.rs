//! Chrome Trace Event JSON, for `ui.perfetto.dev` and `chrome://tracing`.
//!
//! One process per rank, one thread per kind of work in it (`tracks`); spans are complete events (`"X"`), the edge
//! from a send to its recv is a flow, a late rank is an instant. Arguments carry the keys that `PyTorch`'s profiler
//! writes for collectives (`arguments`), so that tools for its traces read these.
//!
//! `ts` counts microseconds since midnight UTC of the day of the first event, with three decimals: a Unix time in
//! nanoseconds does not fit the 53 bits that viewers keep of a number, and files of one day, from several collectors,
//! still share their origin. The format: "Trace Event Format" (Google, 2016).

mod arguments;
mod file;
mod flows;
mod tracks;

use std::{fs::File, io::Write as _, path::Path, time::Duration};

use ringsight_output::{Destination, Error};

use self::{
    arguments::{Arguments, string},
    file::{Medium, TraceFile},
    flows::{End, Ends, Flows},
    tracks::{Place, Track, Tracks},
};
use crate::model::{
    Batch, ExportStats, Exporter, Finding, Metric, MetricData, Operation, Signal, Span, Takes, Value,
};

/// A chunk of the file is written when it has this many bytes, so that a large batch needs no large buffer.
const CHUNK_BYTES: usize = 1 << 20;
const DAY_NS: u64 = 86_400_000_000_000;

/// Writes Chrome Trace Event JSON to a file that can be loaded at any moment, also while it grows.
pub struct ChromeExporter {
    path: String,
    writer: Writer<File>,
}

impl ChromeExporter {
    /// Creates the file `path`, or begins it anew.
    ///
    /// # Errors
    /// The file cannot be created or written, or is a pipe or a device; the text names it and the reason.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, String> {
        let path = path.as_ref();
        let destination = Destination::resolve(path)
            .map_err(|error| format!("cannot create trace file {}: {error}", path.display()))?;
        Self::create_at(&destination)
    }

    /// As [`ChromeExporter::create`], at a destination that was found before.
    ///
    /// # Errors
    /// As [`ChromeExporter::create`].
    pub fn create_at(destination: &Destination) -> Result<Self, String> {
        let path = destination.path().display().to_string();
        let begun = || {
            // Each write overwrites the end of the array, which a pipe does not allow.
            if destination.is_stream() {
                return Err(Error::NotRegular);
            }
            let file = destination.open()?;
            file.set_len(0)?;
            Ok(Writer::new(file)?)
        };
        match begun() {
            Ok(writer) => Ok(Self { path, writer }),
            Err(error) => Err(format!("cannot create trace file {path}: {error}")),
        }
    }
}

impl Exporter for ChromeExporter {
    fn target(&self) -> String {
        format!("Chrome trace {}", self.path)
    }

    fn takes(&self) -> Takes {
        Takes {
            traces: true,
            metrics: true,
            logs: false,
            operations: true,
        }
    }

    fn export(&mut self, batch: &Batch) {
        self.writer.batch(batch);
    }

    fn stats(&self) -> ExportStats {
        self.writer.stats(&self.path)
    }

    fn shutdown(&mut self, _timeout: Duration) -> Result<(), String> {
        let unreported = self.writer.close();
        match (unreported, &self.writer.last_error) {
            (0, _) | (_, None) => Ok(()),
            (events, Some(error)) => Err(format!(
                "trace file {} lacks {events} events: {error}; what it holds can be loaded",
                self.path
            )),
        }
    }
}

/// What has been formatted but not yet written.
#[derive(Default)]
struct Pending {
    events: u64,
    spans: u64,
    metrics: u64,
}

/// Formats events and hands them to the file chunk by chunk.
struct Writer<M> {
    file: TraceFile<M>,
    tracks: Tracks,
    flows: Flows,
    /// Formatted events, each beginning with `,\n`.
    buffer: Vec<u8>,
    pending: Pending,
    /// Midnight before the first event, Unix nanoseconds.
    origin_ns: Option<u64>,
    origin_told: bool,
    closed: bool,
    events_lost: u64,
    stats: ExportStats,
    last_error: Option<std::io::Error>,
}

impl<M: Medium> Writer<M> {
    fn new(medium: M) -> std::io::Result<Self> {
        let head = concat!(
            "{\"name\":\"trace_config\",\"ph\":\"M\",\"pid\":0,\"tid\":0,\"args\":{\"writer\":\"ringsight ",
            env!("CARGO_PKG_VERSION"),
            "\",\"ts\":\"microseconds since midnight UTC\"}}"
        );
        Ok(Self {
            file: TraceFile::create(medium, head)?,
            tracks: Tracks::default(),
            flows: Flows::default(),
            buffer: Vec::new(),
            pending: Pending::default(),
            origin_ns: None,
            origin_told: false,
            closed: false,
            events_lost: 0,
            stats: ExportStats::default(),
            last_error: None,
        })
    }

    fn batch(&mut self, batch: &Batch) {
        if self.closed {
            return;
        }
        for span in &batch.spans {
            self.span(span);
            self.write_if_large();
        }
        for operation in &batch.operations {
            self.culprit(operation);
            self.write_if_large();
        }
        for finding in &batch.findings {
            self.finding(finding);
            self.write_if_large();
        }
        for metric in &batch.metrics {
            self.metric(metric);
            self.write_if_large();
        }
        self.write();
    }

    /// One event: everything up to `ts`; the caller appends the rest and the closing brace.
    fn begin(&mut self, phase: char, place: Place, unix_ns: u64) {
        let origin = *self.origin_ns.get_or_insert(unix_ns - unix_ns % DAY_NS);
        if !std::mem::replace(&mut self.origin_told, true) {
            // As a string: a number of this size would be rounded.
            write!(
                self.buffer,
                ",\n{{\"ph\":\"M\",\"name\":\"trace_origin\",\"pid\":0,\"tid\":0,\"args\":{{\"unix_ns\":\"{origin}\"}}}}"
            )
            .ok();
        }
        self.pending.events += 1;
        write!(
            self.buffer,
            ",\n{{\"ph\":\"{phase}\",\"pid\":{},\"tid\":{},\"ts\":",
            place.pid, place.tid
        )
        .ok();
        microseconds(&mut self.buffer, i128::from(unix_ns) - i128::from(origin));
    }

    fn span(&mut self, span: &Span) {
        let attributes = Arguments::of(&span.attributes);
        let track = Track::of(span, &attributes);
        let place = self.tracks.place(
            &span.resource,
            &track,
            (span.start_unix_ns, span.end_unix_ns),
            &mut self.buffer,
        );
        let duration = span.end_unix_ns.saturating_sub(span.start_unix_ns);

        self.begin('X', place, span.start_unix_ns);
        self.buffer.extend_from_slice(b",\"dur\":");
        microseconds(&mut self.buffer, i128::from(duration));
        self.buffer.extend_from_slice(b",\"cat\":");
        string(&mut self.buffer, track.category());
        self.buffer.extend_from_slice(b",\"name\":");
        string(&mut self.buffer, span.name);
        self.buffer.extend_from_slice(b",\"args\":{");
        attributes.write(&mut self.buffer);
        write!(
            self.buffer,
            "\"trace_id\":\"{:032x}\",\"span_id\":\"{:016x}\"",
            u128::from_be_bytes(span.trace_id),
            u64::from_be_bytes(span.span_id)
        )
        .ok();
        if let Some(error) = &span.error {
            self.buffer.extend_from_slice(b",\"error\":");
            string(&mut self.buffer, error);
        }
        self.buffer.extend_from_slice(b"}}");
        self.pending.spans += 1;

        for event in &span.events {
            self.begin('i', place, event.unix_ns);
            self.buffer
                .extend_from_slice(b",\"s\":\"t\",\"cat\":\"event\",\"name\":");
            string(&mut self.buffer, event.name);
            self.buffer.extend_from_slice(b",\"args\":{");
            Arguments::of(&event.attributes).write_plain(&mut self.buffer);
            self.buffer.extend_from_slice(b"}}");
        }

        // A flow's two ends are tied by their id, here the sender's span id.
        if ["send rank", "proxy send"].contains(&span.name) {
            let end = End {
                place,
                unix_ns: span.start_unix_ns,
            };
            let ends = self.flows.start(span.span_id, end);
            self.flow(span.span_id, ends);
        }
        for link in &span.links {
            let of_send = link.attributes.iter().any(|(key, value)| {
                *key == "ccl.link.type"
                    && match value {
                        Value::Static(text) => *text == "send",
                        Value::Text(text) => &**text == "send",
                        _ => false,
                    }
            });
            if of_send {
                // The last moment inside the span: the data has arrived, and the arrow points forward in time.
                let unix_ns = span.start_unix_ns + duration.saturating_sub(1);
                let ends = self.flows.finish(link.span_id, End { place, unix_ns });
                self.flow(link.span_id, ends);
            }
        }
    }

    /// Writes a flow once both of its ends are known: viewers take an end alone for damage.
    fn flow(&mut self, id: [u8; 8], ends: Option<Ends>) {
        let Some(Ends { start, finish }) = ends else {
            return;
        };
        // `bp: e` binds the end to the enclosing slice instead of the next one.
        for (phase, end, bind) in [('s', start, ""), ('f', finish, ",\"bp\":\"e\"")] {
            self.begin(phase, end.place, end.unix_ns);
            write!(
                self.buffer,
                ",\"cat\":\"message\",\"name\":\"send to recv\",\"id\":\"0x{:x}\"{bind}}}",
                u64::from_be_bytes(id)
            )
            .ok();
        }
    }

    fn culprit(&mut self, operation: &Operation) {
        let Some(culprit) = &operation.culprit else { return };
        let own = operation.by_rank.iter().find(|part| part.rank == culprit.rank);
        // A rank that is not watched here is marked where the first one of those that waited is done.
        let (part, unix_ns, unseen) = match (own, operation.by_rank.first()) {
            (Some(own), _) => (own, own.device_start_ns, ""),
            (None, Some(first)) => (first, first.device_end_ns, ", not watched here,"),
            (None, None) => return,
        };
        let place = self
            .tracks
            .operations(&part.host, part.pid, part.rank, &mut self.buffer);
        self.begin('i', place, unix_ns);
        write!(
            self.buffer,
            ",\"s\":\"p\",\"cat\":\"late\",\"name\":\"late: rank {}{unseen} by {:.3} ms\",\"args\":{{\"Collective name\":",
            culprit.rank,
            culprit.lag_ns as f64 / 1e6
        )
        .ok();
        string(&mut self.buffer, arguments::collective_name(operation.name));
        write!(
            self.buffer,
            ",\"Rank\":{},\"Seq\":{},\"lag_ns\":{},\"Comms Id\":\"{:016x}\",\"trace_id\":\"{:032x}\"}}}}",
            culprit.rank,
            operation.sequence,
            culprit.lag_ns,
            operation.communicator,
            u128::from_be_bytes(operation.trace_id)
        )
        .ok();
    }

    /// A mark over all tracks: what is wrong is looked for first.
    fn finding(&mut self, finding: &Finding) {
        let place = match &finding.culprit_place {
            Some(at) => self
                .tracks
                .operations(&at.host, at.pid, finding.culprit, &mut self.buffer),
            None => Place { pid: 0, tid: 0 },
        };
        self.begin('i', place, finding.unix_ns);
        self.buffer
            .extend_from_slice(b",\"s\":\"g\",\"cat\":\"verdict\",\"name\":");
        string(
            &mut self.buffer,
            &format!("{}: {}", finding.state(), finding.text),
        );
        self.buffer.extend_from_slice(b",\"args\":{\"cause\":");
        string(&mut self.buffer, finding.cause);
        self.buffer.extend_from_slice(b",\"next\":");
        string(&mut self.buffer, &finding.next_step);
        write!(
            self.buffer,
            ",\"Rank\":{},\"Seq\":{},\"waited_ns\":{},\"Comms Id\":\"{:016x}\",\"trace_id\":\"{:032x}\"}}}}",
            finding.culprit,
            finding.sequence,
            finding.waited_ns,
            finding.communicator,
            u128::from_be_bytes(finding.trace_id)
        )
        .ok();
    }

    /// Values that go up and down are counter tracks; sums and histograms have no picture in this format.
    fn metric(&mut self, metric: &Metric) {
        let value = match metric.data {
            MetricData::Gauge(value) if value.is_finite() => value,
            MetricData::UpDown(value) => value as f64,
            _ => return,
        };
        let pid = self.tracks.process(&metric.resource, &mut self.buffer);
        self.begin('C', Place { pid, tid: 0 }, metric.unix_ns);
        let mut name = metric.name.to_owned();
        for (_, value) in &metric.attributes {
            name.push(' ');
            name.push_str(&arguments::text(value));
        }
        self.buffer.extend_from_slice(b",\"name\":");
        string(&mut self.buffer, &name);
        self.buffer.extend_from_slice(b",\"args\":{");
        string(&mut self.buffer, metric.unit);
        write!(self.buffer, ":{value}}}}}").ok();
        self.pending.metrics += 1;
    }

    fn write_if_large(&mut self) {
        if self.buffer.len() >= CHUNK_BYTES {
            self.write();
        }
    }

    /// Writes what is formatted; on failure it is lost and counted, and the file stays as it was.
    fn write(&mut self) {
        if self.buffer.is_empty() {
            return;
        }
        let pending = std::mem::take(&mut self.pending);
        let items = [
            (Signal::Traces, pending.spans),
            (Signal::Metrics, pending.metrics),
        ];
        match self.file.append(&mut self.buffer) {
            Ok(()) => {
                for (signal, items) in items {
                    self.stats[signal].delivered += items;
                }
            }
            Err(error) => {
                self.events_lost += pending.events;
                for (signal, items) in items {
                    self.stats[signal].drop_items("io_error", items);
                }
                self.last_error = Some(error);
                // Names of processes and threads were in the lost chunk, perhaps: they are written again.
                self.tracks.forget_names();
                self.origin_told = false;
            }
        }
    }

    /// Ends the file; returns how many events it lacks, 0 when asked again.
    fn close(&mut self) -> u64 {
        if std::mem::replace(&mut self.closed, true) {
            return 0;
        }
        self.write();
        self.events_lost
    }

    fn stats(&self, path: &str) -> ExportStats {
        ExportStats {
            last_error: self
                .last_error
                .as_ref()
                .map(|error| format!("cannot write trace file {path}: {error}")),
            ..self.stats.clone()
        }
    }
}

/// Nanoseconds as microseconds with three decimals.
fn microseconds(buffer: &mut Vec<u8>, ns: i128) {
    let sign = if ns < 0 { "-" } else { "" };
    let ns = ns.unsigned_abs();
    write!(buffer, "{sign}{}.{:03}", ns / 1000, ns % 1000).ok();
}

#[cfg(test)]
mod tests;
