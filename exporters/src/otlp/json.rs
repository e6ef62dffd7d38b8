//! Batches as OTLP JSON: proto3's JSON mapping with OTLP's changes (ids in hexadecimal, enums as numbers).

use std::io::Write as _;

use super::encode::{
    CUMULATIVE, SCOPE_NAME, SCOPE_VERSION, SPAN_KIND_INTERNAL, STATUS_CODE_ERROR, counter_value,
};
use super::group;
use crate::model::{Attribute, LogRecord, Metric, MetricData, Resource, Span, Value};

/// Appends `spans` as an `ExportTraceServiceRequest`, on one line.
pub(crate) fn traces(out: &mut Vec<u8>, spans: &[Span]) {
    let names = ["resourceSpans", "scopeSpans", "spans"];
    request(out, names, group::by_resource(spans), write_span);
}

/// Appends `metrics` as an `ExportMetricsServiceRequest`, on one line.
pub(crate) fn metrics(out: &mut Vec<u8>, metrics: &[Metric]) {
    let names = ["resourceMetrics", "scopeMetrics", "metrics"];
    let groups = group::by_resource(metrics)
        .into_iter()
        .map(|(resource, points)| (resource, group::by_metric(&points)));
    request(out, names, groups, |out, points| write_metric(out, &points));
}

/// Appends `logs` as an `ExportLogsServiceRequest`, on one line.
pub(crate) fn logs(out: &mut Vec<u8>, logs: &[LogRecord]) {
    let names = ["resourceLogs", "scopeLogs", "logRecords"];
    request(out, names, group::by_resource(logs), write_log);
}

/// A request: groups of a resource and a scope group, itself of messages, which `write` writes.
fn request<'a, M>(
    out: &mut Vec<u8>,
    [groups, scopes, messages]: [&str; 3],
    by_resource: impl IntoIterator<Item = (&'a Resource, Vec<M>)>,
    write: impl Fn(&mut Vec<u8>, M),
) {
    put_fmt(out, format_args!("{{\"{groups}\":["));
    let mut list = List::default();
    for (resource, group) in by_resource {
        list.next(out);
        frame(out, resource, scopes, messages);
        let mut list = List::default();
        for message in group {
            list.next(out);
            write(out, message);
        }
        put(out, "]}]}");
    }
    put(out, "]}");
}

/// Commas between the members of an array or object.
#[derive(Default)]
struct List {
    begun: bool,
}

impl List {
    fn open(out: &mut Vec<u8>, text: &str) -> Self {
        put(out, text);
        Self::default()
    }

    fn next(&mut self, out: &mut Vec<u8>) {
        if self.begun {
            out.push(b',');
        }
        self.begun = true;
    }
}

fn put(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(text.as_bytes());
}

fn put_fmt(out: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("writing to memory does not fail");
}

/// A JSON string.
fn put_text(out: &mut Vec<u8>, text: &str) {
    crate::json_string(out, text);
}

/// A double; proto3 names the values that JSON has no numbers for.
fn put_double(out: &mut Vec<u8>, value: f64) {
    if value.is_nan() {
        put(out, "\"NaN\"");
    } else if value.is_infinite() {
        put(
            out,
            if value > 0.0 {
                "\"Infinity\""
            } else {
                "\"-Infinity\""
            },
        );
    } else {
        put_fmt(out, format_args!("{value:?}"));
    }
}

/// Bytes as hexadecimal digits.
fn put_hex(out: &mut Vec<u8>, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    out.push(b'"');
    for byte in bytes {
        out.extend_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    }
    out.push(b'"');
}

/// The members of a group up to its items.
fn frame(out: &mut Vec<u8>, resource: &Resource, scopes: &str, items: &str) {
    put(out, "{\"resource\":{");
    write_attributes(out, &resource.attributes);
    let scope = format_args!("{{\"name\":\"{SCOPE_NAME}\",\"version\":\"{SCOPE_VERSION}\"}}").to_string();
    put_fmt(
        out,
        format_args!("}},\"{scopes}\":[{{\"scope\":{scope},\"{items}\":["),
    );
}

fn write_attributes(out: &mut Vec<u8>, attributes: &[Attribute]) {
    let mut list = List::open(out, "\"attributes\":[");
    for (key, value) in attributes {
        list.next(out);
        put(out, "{\"key\":");
        put_text(out, key);
        put(out, ",\"value\":{");
        match value {
            Value::Static(text) => {
                put(out, "\"stringValue\":");
                put_text(out, text);
            }
            Value::Text(text) => {
                put(out, "\"stringValue\":");
                put_text(out, text);
            }
            // 64-bit integers are strings: JSON's readers often have no others than doubles.
            Value::Int(number) => put_fmt(out, format_args!("\"intValue\":\"{number}\"")),
            Value::Double(number) => {
                put(out, "\"doubleValue\":");
                put_double(out, *number);
            }
            Value::Bool(yes) => put_fmt(out, format_args!("\"boolValue\":{yes}")),
        }
        put(out, "}}");
    }
    put(out, "]");
}

fn write_span(out: &mut Vec<u8>, span: &Span) {
    put(out, "{\"traceId\":");
    put_hex(out, &span.trace_id);
    put(out, ",\"spanId\":");
    put_hex(out, &span.span_id);
    if let Some(parent) = &span.parent_span_id {
        put(out, ",\"parentSpanId\":");
        put_hex(out, parent);
    }
    put(out, ",\"name\":");
    put_text(out, span.name);
    let (start, end) = (span.start_unix_ns, span.end_unix_ns);
    put_fmt(
        out,
        format_args!(
            ",\"kind\":{SPAN_KIND_INTERNAL},\"startTimeUnixNano\":\"{start}\",\"endTimeUnixNano\":\"{end}\","
        ),
    );
    write_attributes(out, &span.attributes);
    if !span.events.is_empty() {
        let mut list = List::open(out, ",\"events\":[");
        for event in &span.events {
            list.next(out);
            put_fmt(
                out,
                format_args!("{{\"timeUnixNano\":\"{}\",\"name\":", event.unix_ns),
            );
            put_text(out, event.name);
            put(out, ",");
            write_attributes(out, &event.attributes);
            put(out, "}");
        }
        put(out, "]");
    }
    if !span.links.is_empty() {
        let mut list = List::open(out, ",\"links\":[");
        for link in &span.links {
            list.next(out);
            put(out, "{\"traceId\":");
            put_hex(out, &link.trace_id);
            put(out, ",\"spanId\":");
            put_hex(out, &link.span_id);
            put(out, ",");
            write_attributes(out, &link.attributes);
            put(out, "}");
        }
        put(out, "]");
    }
    put(out, ",\"status\":{");
    if let Some(message) = &span.error {
        put(out, "\"message\":");
        put_text(out, message);
        put_fmt(out, format_args!(",\"code\":{STATUS_CODE_ERROR}"));
    }
    put(out, "}}");
}

fn write_log(out: &mut Vec<u8>, log: &LogRecord) {
    let (time, observed, severity) = (log.unix_ns, log.observed_unix_ns, log.severity.number());
    put_fmt(
        out,
        format_args!(
            "{{\"timeUnixNano\":\"{time}\",\"observedTimeUnixNano\":\"{observed}\",\"severityNumber\":{severity},\"severityText\":"
        ),
    );
    put_text(out, log.severity.text());
    put(out, ",\"body\":{\"stringValue\":");
    put_text(out, &log.body);
    put(out, "},");
    write_attributes(out, &log.attributes);
    if let Some((trace_id, span_id)) = &log.span {
        put(out, ",\"traceId\":");
        put_hex(out, trace_id);
        put(out, ",\"spanId\":");
        put_hex(out, span_id);
    }
    put(out, ",\"eventName\":");
    put_text(out, log.event_name);
    put(out, "}");
}

/// One metric; `points` is not empty, and they differ in attributes and numbers only.
fn write_metric(out: &mut Vec<u8>, points: &[&Metric]) {
    let first = points[0];
    put(out, "{\"name\":");
    put_text(out, first.name);
    put(out, ",\"description\":");
    put_text(out, first.description);
    put(out, ",\"unit\":");
    put_text(out, first.unit);
    let kind = match first.data {
        MetricData::Gauge(_) => "gauge",
        MetricData::Counter(_) | MetricData::Total(_) | MetricData::UpDown(_) => "sum",
        MetricData::Histogram { .. } => "exponentialHistogram",
    };
    put_fmt(out, format_args!(",\"{kind}\":{{\"dataPoints\":["));
    let mut list = List::default();
    for point in points {
        list.next(out);
        write_point(out, point);
    }
    put(out, "]");
    if kind != "gauge" {
        put_fmt(out, format_args!(",\"aggregationTemporality\":{CUMULATIVE}"));
    }
    if kind == "sum" {
        let monotonic = matches!(first.data, MetricData::Counter(_) | MetricData::Total(_));
        put_fmt(out, format_args!(",\"isMonotonic\":{monotonic}"));
    }
    put(out, "}}");
}

fn write_point(out: &mut Vec<u8>, point: &Metric) {
    put(out, "{");
    write_attributes(out, &point.attributes);
    let (start, time) = (point.start_unix_ns, point.unix_ns);
    put_fmt(
        out,
        format_args!(",\"startTimeUnixNano\":\"{start}\",\"timeUnixNano\":\"{time}\""),
    );
    let double = |out: &mut Vec<u8>, key: &str, value| {
        put_fmt(out, format_args!(",\"{key}\":"));
        put_double(out, value);
    };
    match &point.data {
        MetricData::Gauge(value) | MetricData::Total(value) => double(out, "asDouble", *value),
        MetricData::Counter(value) => put_fmt(out, format_args!(",\"asInt\":\"{}\"", counter_value(*value))),
        MetricData::UpDown(value) => put_fmt(out, format_args!(",\"asInt\":\"{value}\"")),
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
            put_fmt(
                out,
                format_args!(",\"count\":\"{count}\",\"scale\":{scale},\"zeroCount\":\"{zero_count}\""),
            );
            double(out, "sum", *sum);
            if *count > 0 {
                double(out, "min", *min);
                double(out, "max", *max);
            }
            let mut list = List::default();
            put_fmt(
                out,
                format_args!(",\"positive\":{{\"offset\":{offset},\"bucketCounts\":["),
            );
            for count in buckets {
                list.next(out);
                put_fmt(out, format_args!("\"{count}\""));
            }
            put(out, "]}");
        }
    }
    put(out, "}");
}
