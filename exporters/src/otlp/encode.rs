//! Batches as OTLP protobuf, straight from the model.
//!
//! The collector produces several hundred thousand spans a second, so nothing is copied into intermediate messages: short
//! lengths are computed ahead, long ones patched in afterwards. The field numbers are those of opentelemetry-proto 1.x
//! (`trace/v1/trace.proto`, `metrics/v1/metrics.proto`, `logs/v1/logs.proto`, `common/v1/common.proto`, `resource/v1/resource.proto`). The output
//! equals, byte for byte, what `prost` writes for the same request (`tests/otlp_encode.rs`).

use super::group::{self, HasResource};
use super::wire::{self, NARROW, WIDE};
use crate::model::{Attribute, LogRecord, Metric, MetricData, Resource, Span, SpanEvent, SpanLink, Value};

/// Name of the instrumentation scope.
pub const SCOPE_NAME: &str = "ringsight";
/// Version of the instrumentation scope.
pub const SCOPE_VERSION: &str = env!("CARGO_PKG_VERSION");

/// `Span.SpanKind.SPAN_KIND_INTERNAL`.
pub(crate) const SPAN_KIND_INTERNAL: u64 = 1;
/// `Status.StatusCode.STATUS_CODE_ERROR`.
pub(crate) const STATUS_CODE_ERROR: u64 = 2;
/// `AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE`.
pub(crate) const CUMULATIVE: u64 = 2;

/// Most points in one metric message; a metric with more is written as several, so that requests can be cut between them.
const POINTS_PER_METRIC: usize = 64;

/// Turns batches into requests; keeps its buffers between calls.
#[derive(Default)]
pub struct Encoder {
    out: Vec<u8>,
    carried: Vec<u8>,
}

impl Encoder {
    /// Encodes `spans` as one or more `ExportTraceServiceRequest`s of at most `limit` bytes, and gives each to `sink` with
    /// the number of spans in it.
    ///
    /// Returns how many spans were left out because one alone, with its resource, exceeds `limit`.
    pub fn traces(&mut self, spans: &[Span], limit: usize, sink: impl FnMut(&[u8], usize)) -> usize {
        self.each(spans, limit, sink, encode_span)
    }

    /// Encodes `logs` as one or more `ExportLogsServiceRequest`s of at most `limit` bytes, and gives each to `sink` with the
    /// number of records in it.
    ///
    /// Returns how many records were left out because one alone, with its resource, exceeds `limit`.
    pub fn logs(&mut self, logs: &[LogRecord], limit: usize, sink: impl FnMut(&[u8], usize)) -> usize {
        self.each(logs, limit, sink, encode_log)
    }

    fn each<T: HasResource>(
        &mut self,
        items: &[T],
        limit: usize,
        sink: impl FnMut(&[u8], usize),
        encode: impl Fn(&mut Vec<u8>, &T),
    ) -> usize {
        let mut request = Request::new(self, limit, sink);
        for (resource, items) in group::by_resource(items) {
            request.begin_group(resource);
            for item in items {
                request.item(resource, 1, |out| encode(out, item));
            }
            request.end_group();
        }
        request.finish()
    }

    /// Encodes `metrics` as one or more `ExportMetricsServiceRequest`s of at most `limit` bytes, and gives each to `sink`
    /// with the number of points in it.
    ///
    /// Returns how many points were left out because their message alone exceeds `limit`.
    pub fn metrics(&mut self, metrics: &[Metric], limit: usize, sink: impl FnMut(&[u8], usize)) -> usize {
        let mut request = Request::new(self, limit, sink);
        for (resource, points) in group::by_resource(metrics) {
            request.begin_group(resource);
            for metric in group::by_metric(&points) {
                for points in metric.chunks(POINTS_PER_METRIC) {
                    request.item(resource, points.len(), |out| encode_metric(out, points));
                }
            }
            request.end_group();
        }
        request.finish()
    }
}

/// A request under construction. Those of all signals have the same frame: groups (field 1) of a resource (1) and a
/// scope group (2), itself of a scope (1) and items (2).
struct Request<'e, S> {
    encoder: &'e mut Encoder,
    limit: usize,
    sink: S,
    /// Items in the request so far.
    items: usize,
    /// The group being written.
    group: Option<Group>,
    too_large: usize,
}

struct Group {
    /// Where it begins, to take it back if nothing fits into it.
    start: usize,
    resource: wire::Open,
    scope: wire::Open,
    items: usize,
}

impl<'e, S: FnMut(&[u8], usize)> Request<'e, S> {
    fn new(encoder: &'e mut Encoder, limit: usize, sink: S) -> Self {
        encoder.out.clear();
        Self {
            encoder,
            limit,
            sink,
            items: 0,
            group: None,
            too_large: 0,
        }
    }

    fn begin_group(&mut self, resource: &Resource) {
        let out = &mut self.encoder.out;
        let start = out.len();
        let group = wire::open(out, 1, WIDE);
        let message = wire::open(out, 1, NARROW);
        encode_attributes(out, 1, &resource.attributes);
        wire::close(out, &message);
        let scope = wire::open(out, 2, WIDE);
        wire::head(
            out,
            1,
            wire::field_len(SCOPE_NAME.len()) + wire::field_len(SCOPE_VERSION.len()),
        );
        wire::bytes_always(out, 1, SCOPE_NAME.as_bytes());
        wire::bytes_always(out, 2, SCOPE_VERSION.as_bytes());
        self.group = Some(Group {
            start,
            resource: group,
            scope,
            items: 0,
        });
    }

    fn end_group(&mut self) {
        let out = &mut self.encoder.out;
        let Some(group) = self.group.take() else { return };
        if group.items == 0 {
            out.truncate(group.start);
        } else {
            wire::close(out, &group.scope);
            wire::close(out, &group.resource);
        }
    }

    fn flush(&mut self) {
        self.end_group();
        if self.items > 0 {
            (self.sink)(&self.encoder.out, self.items);
        }
        self.items = 0;
        self.encoder.out.clear();
    }

    /// Appends what `encode` writes, which counts as `weight` items, beginning a new request if this one would grow too big.
    #[inline]
    fn item(&mut self, resource: &Resource, weight: usize, encode: impl FnOnce(&mut Vec<u8>)) {
        let start = self.encoder.out.len();
        encode(&mut self.encoder.out);
        // Closing the group never adds a byte: its lengths have their widest form reserved.
        if self.encoder.out.len() > self.limit && !self.carry(resource, start) {
            self.too_large += weight;
            return;
        }
        self.items += weight;
        if let Some(group) = &mut self.group {
            group.items += weight;
        }
    }

    /// Moves the item that begins at `start` into a new request; `false` if it is too large even there.
    #[cold]
    fn carry(&mut self, resource: &Resource, start: usize) -> bool {
        self.encoder.carried.clear();
        self.encoder.carried.extend_from_slice(&self.encoder.out[start..]);
        self.encoder.out.truncate(start);
        if self.items > 0 {
            self.flush();
            self.begin_group(resource);
        }
        let fits = self.encoder.out.len() + self.encoder.carried.len() <= self.limit;
        if fits {
            self.encoder.out.extend_from_slice(&self.encoder.carried);
        }
        fits
    }

    fn finish(mut self) -> usize {
        self.flush();
        self.too_large
    }
}

/// Bytes of an `AnyValue` message.
#[inline]
fn value_len(value: &Value) -> usize {
    match value {
        Value::Static(text) => wire::field_len(text.len()),
        Value::Text(text) => wire::field_len(text.len()),
        Value::Int(number) => 1 + wire::varint_len(number.cast_unsigned()),
        Value::Double(_) => 9,
        Value::Bool(_) => 2,
    }
}

/// `repeated KeyValue` in field `field`.
#[inline]
fn encode_attributes(out: &mut Vec<u8>, field: u8, attributes: &[Attribute]) {
    for (key, value) in attributes {
        let value_len = value_len(value);
        let key_len = if key.is_empty() {
            0
        } else {
            wire::field_len(key.len())
        };
        wire::head(out, field, key_len + wire::field_len(value_len));
        wire::bytes(out, 1, key.as_bytes());
        wire::head(out, 2, value_len);
        match value {
            Value::Static(text) => wire::bytes_always(out, 1, text.as_bytes()),
            Value::Text(text) => wire::bytes_always(out, 1, text.as_bytes()),
            Value::Bool(yes) => wire::uint_always(out, 2, u64::from(*yes)),
            Value::Int(number) => wire::uint_always(out, 3, number.cast_unsigned()),
            Value::Double(number) => wire::fixed64_always(out, 4, number.to_bits()),
        }
    }
}

/// `Span`, as an item of its scope.
fn encode_span(out: &mut Vec<u8>, span: &Span) {
    let message = wire::open(out, 2, NARROW);
    wire::bytes_always(out, 1, &span.trace_id);
    wire::bytes_always(out, 2, &span.span_id);
    if let Some(parent) = &span.parent_span_id {
        wire::bytes_always(out, 4, parent);
    }
    wire::bytes(out, 5, span.name.as_bytes());
    wire::uint(out, 6, SPAN_KIND_INTERNAL);
    wire::fixed64(out, 7, span.start_unix_ns);
    wire::fixed64(out, 8, span.end_unix_ns);
    encode_attributes(out, 9, &span.attributes);
    for SpanEvent {
        unix_ns,
        name,
        attributes,
    } in &span.events
    {
        let event = wire::open(out, 11, NARROW);
        wire::fixed64(out, 1, *unix_ns);
        wire::bytes(out, 2, name.as_bytes());
        encode_attributes(out, 3, attributes);
        wire::close(out, &event);
    }
    for SpanLink {
        trace_id,
        span_id,
        attributes,
    } in &span.links
    {
        let link = wire::open(out, 13, NARROW);
        wire::bytes_always(out, 1, trace_id);
        wire::bytes_always(out, 2, span_id);
        encode_attributes(out, 4, attributes);
        wire::close(out, &link);
    }
    if let Some(error) = &span.error {
        let status = wire::open(out, 15, NARROW);
        wire::bytes(out, 2, error.as_bytes());
        wire::uint(out, 3, STATUS_CODE_ERROR);
        wire::close(out, &status);
    }
    wire::close(out, &message);
}

/// `LogRecord`, as an item of its scope.
fn encode_log(out: &mut Vec<u8>, log: &LogRecord) {
    let message = wire::open(out, 2, NARROW);
    wire::fixed64(out, 1, log.unix_ns);
    wire::uint(out, 2, log.severity.number().into());
    wire::bytes(out, 3, log.severity.text().as_bytes());
    wire::head(out, 5, wire::field_len(log.body.len()));
    wire::bytes_always(out, 1, log.body.as_bytes());
    encode_attributes(out, 6, &log.attributes);
    if let Some((trace_id, span_id)) = &log.span {
        wire::bytes_always(out, 9, trace_id);
        wire::bytes_always(out, 10, span_id);
    }
    wire::fixed64(out, 11, log.observed_unix_ns);
    wire::bytes(out, 12, log.event_name.as_bytes());
    wire::close(out, &message);
}

/// `Metric` with its points, as an item of its scope. `points` is not empty, and they differ in attributes and numbers only.
fn encode_metric(out: &mut Vec<u8>, points: &[&Metric]) {
    let first = points[0];
    let message = wire::open(out, 2, WIDE);
    wire::bytes(out, 1, first.name.as_bytes());
    wire::bytes(out, 2, first.description.as_bytes());
    wire::bytes(out, 3, first.unit.as_bytes());
    let (field, cumulative, monotonic) = match first.data {
        MetricData::Gauge(_) => (5, false, false),
        MetricData::Counter(_) | MetricData::Total(_) => (7, true, true),
        MetricData::UpDown(_) => (7, true, false),
        MetricData::Histogram { .. } => (10, true, false),
    };
    let data = wire::open(out, field, WIDE);
    for point in points {
        let message = wire::open(out, 1, NARROW);
        encode_point(out, point);
        wire::close(out, &message);
    }
    if cumulative {
        wire::uint(out, 2, CUMULATIVE);
    }
    if monotonic {
        wire::uint(out, 3, 1);
    }
    wire::close(out, &data);
    wire::close(out, &message);
}

/// The content of a `NumberDataPoint` or an `ExponentialHistogramDataPoint`.
fn encode_point(out: &mut Vec<u8>, point: &Metric) {
    let number = |out: &mut Vec<u8>, field, bits| {
        wire::fixed64(out, 2, point.start_unix_ns);
        wire::fixed64(out, 3, point.unix_ns);
        wire::fixed64_always(out, field, bits);
        encode_attributes(out, 7, &point.attributes);
    };
    match &point.data {
        MetricData::Gauge(value) | MetricData::Total(value) => number(out, 4, value.to_bits()),
        MetricData::Counter(value) => number(out, 6, counter_value(*value).cast_unsigned()),
        MetricData::UpDown(value) => number(out, 6, value.cast_unsigned()),
        MetricData::Histogram {
            scale,
            count,
            sum,
            min,
            max,
            zero_count,
            offset,
            buckets,
        } => {
            encode_attributes(out, 1, &point.attributes);
            wire::fixed64(out, 2, point.start_unix_ns);
            wire::fixed64(out, 3, point.unix_ns);
            wire::fixed64(out, 4, *count);
            wire::fixed64_always(out, 5, sum.to_bits());
            wire::sint32(out, 6, *scale);
            wire::fixed64(out, 7, *zero_count);
            let positive = wire::open(out, 8, NARROW);
            wire::sint32(out, 1, *offset);
            if !buckets.is_empty() {
                wire::head(out, 2, buckets.iter().map(|&count| wire::varint_len(count)).sum());
                for &count in buckets {
                    wire::varint(out, count);
                }
            }
            wire::close(out, &positive);
            // With no values there is no least and no greatest one.
            if *count > 0 {
                wire::fixed64_always(out, 12, min.to_bits());
                wire::fixed64_always(out, 13, max.to_bits());
            }
        }
    }
}

/// A counter as OTLP's signed integer; it saturates.
pub(crate) fn counter_value(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
