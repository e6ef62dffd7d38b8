//! Batches for the OTLP tests, and the same batches as [`messages`].
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod messages;

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ringsight_exporters::model::{
    Attribute, Batch, LogRecord, Metric, MetricData, Resource, Severity, Span, SpanEvent, SpanLink, Value,
};

/// A resource of one process.
pub(crate) fn resource(instance: &str) -> Arc<Resource> {
    Arc::new(Resource {
        attributes: vec![
            ("service.name", Value::Static("otlp-test")),
            ("service.instance.id", Value::Text(instance.into())),
            ("host.name", Value::Static("node-a")),
            ("process.pid", Value::Int(4242)),
        ],
    })
}

/// A span whose ids are made of `n`, which is not zero.
pub(crate) fn plain_span(resource: &Arc<Resource>, n: u32) -> Span {
    let mut trace_id = [0x11; 16];
    trace_id[12..].copy_from_slice(&n.to_be_bytes());
    let mut span_id = [0x22; 8];
    span_id[4..].copy_from_slice(&n.to_be_bytes());
    Span {
        resource: Arc::clone(resource),
        trace_id,
        span_id,
        parent_span_id: None,
        name: "all_reduce rank",
        start_unix_ns: 1_700_000_000_000_000_000 + u64::from(n),
        end_unix_ns: 1_700_000_000_000_100_000 + u64::from(n),
        attributes: vec![("ccl.operation.sequence", Value::Int(n.into()))],
        events: vec![],
        links: vec![],
        error: None,
    }
}

/// A span as the collector makes them: twelve attributes, of all kinds of values.
pub(crate) fn rank_span(resource: &Arc<Resource>, communicator: &Arc<str>, n: u32) -> Span {
    let mut span = plain_span(resource, n);
    // Ids are hashes, which no compression shortens.
    let [trace, id, parent] =
        [1u64, 2, 3].map(|part| (u64::from(n) << 2 | part).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    span.trace_id[..8].copy_from_slice(&trace.rotate_left(32).to_be_bytes());
    span.trace_id[8..].copy_from_slice(&trace.to_be_bytes());
    span.span_id = id.to_be_bytes();
    span.parent_span_id = Some(parent.to_be_bytes());
    span.end_unix_ns += id >> 44;
    span.attributes = vec![
        ("ccl.system.name", Value::Static("ringsight")),
        ("ccl.operation.name", Value::Static("all_reduce")),
        ("ccl.operation.sequence", Value::Int(n.into())),
        ("ccl.communicator.id", Value::Text(Arc::clone(communicator))),
        ("ccl.communicator.size", Value::Int(8)),
        ("ccl.rank", Value::Int(i64::from(n % 8))),
        ("ccl.message.size", Value::Int(64 << 20)),
        ("ccl.data_type", Value::Static("float32")),
        ("ccl.algorithm", Value::Static("ring")),
        ("ccl.clock.uncertainty", Value::Double(1.5e-6)),
        ("ccl.timing.source", Value::Static("gpu")),
        ("ccl.complete", Value::Bool(true)),
    ];
    span
}

/// A gauge point.
pub(crate) fn gauge(resource: &Arc<Resource>, value: f64) -> Metric {
    Metric {
        resource: Arc::clone(resource),
        name: "ccl.operation.active",
        description: "Operations in flight",
        unit: "{operation}",
        attributes: vec![("ccl.rank", Value::Int(3))],
        start_unix_ns: 1,
        unix_ns: 2,
        data: MetricData::Gauge(value),
    }
}

/// A batch of one metric point.
pub(crate) fn metrics_batch() -> Batch {
    Batch {
        metrics: vec![gauge(&resource("rank 0"), 0.5)],
        ..Batch::default()
    }
}

/// A log record of a span whose ids are made of `n`.
pub(crate) fn log(resource: &Arc<Resource>, n: u32) -> LogRecord {
    let span = plain_span(resource, n);
    LogRecord {
        resource: Arc::clone(resource),
        unix_ns: span.end_unix_ns,
        observed_unix_ns: span.end_unix_ns + 7,
        severity: Severity::Error,
        event_name: "ccl.watchdog.verdict",
        body: "rank 3 is stopped".into(),
        attributes: vec![("ccl.rank", Value::Int(1))],
        span: Some((span.trace_id, span.span_id)),
    }
}

const TEXTS: [&str; 6] = [
    "",
    "a",
    "ring",
    "ccl.operation.name",
    "größer als ASCII ✓",
    "line\n\"quoted\"\\\u{1}",
];

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        select(&TEXTS[..]).prop_map(Value::Static),
        ".{0,300}".prop_map(|text| Value::Text(text.into())),
        any::<i64>().prop_map(Value::Int),
        any::<f64>().prop_map(Value::Double),
        any::<bool>().prop_map(Value::Bool),
    ]
}

fn attributes() -> impl Strategy<Value = Vec<Attribute>> {
    vec((select(&TEXTS[..]), value()), 0..6)
}

fn event() -> impl Strategy<Value = SpanEvent> {
    (any::<u64>(), select(&TEXTS[..]), attributes()).prop_map(|(unix_ns, name, attributes)| SpanEvent {
        unix_ns,
        name,
        attributes,
    })
}

fn link() -> impl Strategy<Value = SpanLink> {
    (any::<[u8; 16]>(), any::<[u8; 8]>(), attributes()).prop_map(|(trace_id, span_id, attributes)| SpanLink {
        trace_id,
        span_id,
        attributes,
    })
}

fn span(resources: Vec<Arc<Resource>>) -> impl Strategy<Value = Span> {
    (
        select(resources),
        (any::<[u8; 16]>(), any::<[u8; 8]>(), any::<Option<[u8; 8]>>()),
        select(&TEXTS[..]),
        any::<(u64, u64)>(),
        (attributes(), vec(event(), 0..3), vec(link(), 0..3)),
        proptest::option::of(select(&TEXTS[..])),
    )
        .prop_map(
            |(resource, ids, name, times, (attributes, events, links), error)| Span {
                resource,
                trace_id: ids.0,
                span_id: ids.1,
                parent_span_id: ids.2,
                name,
                start_unix_ns: times.0,
                end_unix_ns: times.1,
                attributes,
                events,
                links,
                error: error.map(Into::into),
            },
        )
}

fn histogram() -> impl Strategy<Value = MetricData> {
    (
        any::<(i32, u64, u64, i32)>(),
        any::<(f64, f64, f64)>(),
        vec(any::<u64>(), 0..40),
    )
        .prop_map(|((scale, count, zero_count, offset), (sum, min, max), buckets)| {
            MetricData::Histogram {
                scale,
                count,
                sum,
                min,
                max,
                zero_count,
                offset,
                buckets,
            }
        })
}

fn metric(resources: Vec<Arc<Resource>>) -> impl Strategy<Value = Metric> {
    let data = prop_oneof![
        any::<f64>().prop_map(MetricData::Gauge),
        (0..=i64::MAX.cast_unsigned()).prop_map(MetricData::Counter),
        any::<f64>().prop_map(MetricData::Total),
        any::<i64>().prop_map(MetricData::UpDown),
        histogram(),
    ];
    (
        select(resources),
        select(&TEXTS[..]),
        select(&["By", ""][..]),
        attributes(),
        any::<(u64, u64)>(),
        data,
    )
        .prop_map(|(resource, name, unit, attributes, times, data)| Metric {
            resource,
            name,
            description: "what it tells",
            unit,
            attributes,
            start_unix_ns: times.0,
            unix_ns: times.1,
            data,
        })
}

fn log_record(resources: Vec<Arc<Resource>>) -> impl Strategy<Value = LogRecord> {
    (
        select(resources),
        any::<(u64, u64)>(),
        select(&[Severity::Warn, Severity::Error][..]),
        (select(&TEXTS[..]), ".{0,300}"),
        attributes(),
        any::<Option<([u8; 16], [u8; 8])>>(),
    )
        .prop_map(
            |(resource, times, severity, (event_name, body), attributes, span)| LogRecord {
                resource,
                unix_ns: times.0,
                observed_unix_ns: times.1,
                severity,
                event_name,
                body: body.into(),
                attributes,
                span,
            },
        )
}

/// Batches of all shapes, with up to three resources.
pub(crate) fn batch() -> impl Strategy<Value = Batch> {
    vec(
        attributes().prop_map(|attributes| Arc::new(Resource { attributes })),
        1..4,
    )
    .prop_flat_map(|resources| {
        (
            vec(span(resources.clone()), 0..12),
            vec(metric(resources.clone()), 0..12),
            vec(log_record(resources), 0..12),
        )
            .prop_map(|(spans, metrics, logs)| Batch {
                spans,
                metrics,
                logs,
                operations: vec![],
                findings: vec![],
                stragglers: vec![],
            })
    })
}

/// Trace ids of `spans`.
pub(crate) fn ids(spans: &[Span]) -> Vec<Vec<u8>> {
    spans.iter().map(|span| span.trace_id.to_vec()).collect()
}
