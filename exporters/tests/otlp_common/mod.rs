//! Batches for the OTLP tests, and the same batches as `opentelemetry-proto` messages, built independently of the encoder.
#![allow(dead_code, reason = "each test file uses a part")]

use std::sync::Arc;

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1 as common;
use opentelemetry_proto::tonic::metrics::v1 as metrics;
use opentelemetry_proto::tonic::resource::v1 as resources;
use opentelemetry_proto::tonic::trace::v1 as trace;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use ringsight_exporters::model::{
    Attribute, Batch, Metric, MetricData, Resource, Span, SpanEvent, SpanLink, Value,
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

/// Batches of all shapes, with up to three resources.
pub(crate) fn batch() -> impl Strategy<Value = Batch> {
    vec(
        attributes().prop_map(|attributes| Arc::new(Resource { attributes })),
        1..4,
    )
    .prop_flat_map(|resources| {
        (vec(span(resources.clone()), 0..12), vec(metric(resources), 0..12)).prop_map(|(spans, metrics)| {
            Batch {
                spans,
                metrics,
                operations: vec![],
            }
        })
    })
}

fn any_value(value: &Value) -> common::AnyValue {
    use common::any_value::Value as V;
    common::AnyValue {
        value: Some(match value {
            Value::Static(text) => V::StringValue((*text).to_owned()),
            Value::Text(text) => V::StringValue(text.as_ref().to_owned()),
            Value::Int(number) => V::IntValue(*number),
            Value::Double(number) => V::DoubleValue(*number),
            Value::Bool(yes) => V::BoolValue(*yes),
        }),
    }
}

fn key_values(attributes: &[Attribute]) -> Vec<common::KeyValue> {
    attributes
        .iter()
        .map(|(key, value)| common::KeyValue {
            key: (*key).to_owned(),
            value: Some(any_value(value)),
            ..common::KeyValue::default()
        })
        .collect()
}

fn scope() -> Option<common::InstrumentationScope> {
    Some(common::InstrumentationScope {
        name: "ringsight".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        ..common::InstrumentationScope::default()
    })
}

fn resource_message(resource: &Resource) -> Option<resources::Resource> {
    Some(resources::Resource {
        attributes: key_values(&resource.attributes),
        ..resources::Resource::default()
    })
}

fn span_message(span: &Span) -> trace::Span {
    trace::Span {
        trace_id: span.trace_id.to_vec(),
        span_id: span.span_id.to_vec(),
        parent_span_id: span.parent_span_id.map(|id| id.to_vec()).unwrap_or_default(),
        name: span.name.into(),
        kind: trace::span::SpanKind::Internal as i32,
        start_time_unix_nano: span.start_unix_ns,
        end_time_unix_nano: span.end_unix_ns,
        attributes: key_values(&span.attributes),
        events: span
            .events
            .iter()
            .map(|event| trace::span::Event {
                time_unix_nano: event.unix_ns,
                name: event.name.into(),
                attributes: key_values(&event.attributes),
                ..trace::span::Event::default()
            })
            .collect(),
        links: span
            .links
            .iter()
            .map(|link| trace::span::Link {
                trace_id: link.trace_id.to_vec(),
                span_id: link.span_id.to_vec(),
                attributes: key_values(&link.attributes),
                ..trace::span::Link::default()
            })
            .collect(),
        status: span.error.as_ref().map(|message| trace::Status {
            message: message.as_ref().into(),
            code: trace::status::StatusCode::Error as i32,
        }),
        ..trace::Span::default()
    }
}

/// `spans` as a request.
pub(crate) fn traces_request(spans: &[Span]) -> ExportTraceServiceRequest {
    let mut groups: Vec<(&Arc<Resource>, trace::ResourceSpans)> = vec![];
    for span in spans {
        if !groups
            .iter()
            .any(|(resource, _)| Arc::ptr_eq(resource, &span.resource))
        {
            groups.push((
                &span.resource,
                trace::ResourceSpans {
                    resource: resource_message(&span.resource),
                    scope_spans: vec![trace::ScopeSpans {
                        scope: scope(),
                        ..trace::ScopeSpans::default()
                    }],
                    ..trace::ResourceSpans::default()
                },
            ));
        }
        let (_, group) = groups
            .iter_mut()
            .find(|(r, _)| Arc::ptr_eq(r, &span.resource))
            .unwrap();
        group.scope_spans[0].spans.push(span_message(span));
    }
    ExportTraceServiceRequest {
        resource_spans: groups.into_iter().map(|(_, group)| group).collect(),
    }
}

fn number(point: &Metric, value: metrics::number_data_point::Value) -> metrics::NumberDataPoint {
    metrics::NumberDataPoint {
        attributes: key_values(&point.attributes),
        start_time_unix_nano: point.start_unix_ns,
        time_unix_nano: point.unix_ns,
        value: Some(value),
        ..metrics::NumberDataPoint::default()
    }
}

fn metric_data(point: &Metric) -> metrics::metric::Data {
    use metrics::metric::Data;
    use metrics::number_data_point::Value as Number;
    let aggregation_temporality = metrics::AggregationTemporality::Cumulative as i32;
    match &point.data {
        MetricData::Gauge(value) => Data::Gauge(metrics::Gauge {
            data_points: vec![number(point, Number::AsDouble(*value))],
        }),
        MetricData::Counter(value) => Data::Sum(metrics::Sum {
            data_points: vec![number(point, Number::AsInt(value.cast_signed()))],
            aggregation_temporality,
            is_monotonic: true,
        }),
        MetricData::Total(value) => Data::Sum(metrics::Sum {
            data_points: vec![number(point, Number::AsDouble(*value))],
            aggregation_temporality,
            is_monotonic: true,
        }),
        MetricData::UpDown(value) => Data::Sum(metrics::Sum {
            data_points: vec![number(point, Number::AsInt(*value))],
            aggregation_temporality,
            is_monotonic: false,
        }),
        MetricData::Histogram {
            scale,
            count,
            sum,
            min,
            max,
            zero_count,
            offset,
            buckets,
        } => Data::ExponentialHistogram(metrics::ExponentialHistogram {
            data_points: vec![metrics::ExponentialHistogramDataPoint {
                attributes: key_values(&point.attributes),
                start_time_unix_nano: point.start_unix_ns,
                time_unix_nano: point.unix_ns,
                count: *count,
                sum: Some(*sum),
                scale: *scale,
                zero_count: *zero_count,
                positive: Some(metrics::exponential_histogram_data_point::Buckets {
                    offset: *offset,
                    bucket_counts: buckets.clone(),
                }),
                min: (*count > 0).then_some(*min),
                max: (*count > 0).then_some(*max),
                ..metrics::ExponentialHistogramDataPoint::default()
            }],
            aggregation_temporality,
        }),
    }
}

/// Adds the points of `more` to `data`; `false` if they are of different kinds.
fn merge(data: &mut metrics::metric::Data, more: &metrics::metric::Data) -> bool {
    use metrics::metric::Data;
    match (data, more) {
        (Data::Gauge(a), Data::Gauge(b)) => a.data_points.extend(b.data_points.iter().cloned()),
        (Data::Sum(a), Data::Sum(b)) if a.is_monotonic == b.is_monotonic => {
            a.data_points.extend(b.data_points.iter().cloned());
        }
        (Data::ExponentialHistogram(a), Data::ExponentialHistogram(b)) => {
            a.data_points.extend(b.data_points.iter().cloned());
        }
        _ => return false,
    }
    true
}

/// `points` as a request.
pub(crate) fn metrics_request(points: &[Metric]) -> ExportMetricsServiceRequest {
    let mut groups: Vec<(&Arc<Resource>, metrics::ResourceMetrics)> = vec![];
    for point in points {
        if !groups
            .iter()
            .any(|(resource, _)| Arc::ptr_eq(resource, &point.resource))
        {
            let scope_metrics = metrics::ScopeMetrics {
                scope: scope(),
                ..metrics::ScopeMetrics::default()
            };
            groups.push((
                &point.resource,
                metrics::ResourceMetrics {
                    resource: resource_message(&point.resource),
                    scope_metrics: vec![scope_metrics],
                    ..metrics::ResourceMetrics::default()
                },
            ));
        }
        let (_, group) = groups
            .iter_mut()
            .find(|(r, _)| Arc::ptr_eq(r, &point.resource))
            .unwrap();
        let list = &mut group.scope_metrics[0].metrics;
        let data = metric_data(point);
        let merged = list.iter_mut().any(|metric| {
            metric.name == point.name
                && metric.unit == point.unit
                && merge(metric.data.as_mut().unwrap(), &data)
        });
        if !merged {
            list.push(metrics::Metric {
                name: point.name.into(),
                description: point.description.into(),
                unit: point.unit.into(),
                data: Some(data),
                ..metrics::Metric::default()
            });
        }
    }
    ExportMetricsServiceRequest {
        resource_metrics: groups.into_iter().map(|(_, group)| group).collect(),
    }
}

/// Trace ids of `spans`.
pub(crate) fn ids(spans: &[Span]) -> Vec<Vec<u8>> {
    spans.iter().map(|span| span.trace_id.to_vec()).collect()
}
