//! Batches as `opentelemetry-proto` messages, built independently of the encoder.

use std::sync::Arc;

use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1 as common;
use opentelemetry_proto::tonic::logs::v1 as logs;
use opentelemetry_proto::tonic::metrics::v1 as metrics;
use opentelemetry_proto::tonic::resource::v1 as resources;
use opentelemetry_proto::tonic::trace::v1 as trace;
use ringsight_exporters::model::{Attribute, LogRecord, Metric, MetricData, Resource, Severity, Span, Value};

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

/// Items by resource, in the order in which both first appear.
fn by_resource<'a, T>(
    items: &'a [T],
    of: impl Fn(&'a T) -> &'a Arc<Resource>,
) -> Vec<(&'a Resource, Vec<&'a T>)> {
    let mut groups: Vec<(&Resource, Vec<&T>)> = vec![];
    for item in items {
        let resource: &Resource = of(item);
        match groups
            .iter_mut()
            .find(|(known, _)| std::ptr::eq(*known, resource))
        {
            Some((_, group)) => group.push(item),
            None => groups.push((resource, vec![item])),
        }
    }
    groups
}

/// `spans` as a request.
pub(crate) fn traces_request(spans: &[Span]) -> ExportTraceServiceRequest {
    let group = |(resource, spans): (&Resource, Vec<&Span>)| trace::ResourceSpans {
        resource: resource_message(resource),
        scope_spans: vec![trace::ScopeSpans {
            scope: scope(),
            spans: spans.into_iter().map(span_message).collect(),
            ..trace::ScopeSpans::default()
        }],
        ..trace::ResourceSpans::default()
    };
    ExportTraceServiceRequest {
        resource_spans: by_resource(spans, |span| &span.resource)
            .into_iter()
            .map(group)
            .collect(),
    }
}

fn log_message(log: &LogRecord) -> logs::LogRecord {
    let (severity_number, severity_text) = match log.severity {
        Severity::Warn => (logs::SeverityNumber::Warn, "WARN"),
        Severity::Error => (logs::SeverityNumber::Error, "ERROR"),
    };
    let (trace_id, span_id) = log.span.unzip();
    logs::LogRecord {
        time_unix_nano: log.unix_ns,
        observed_time_unix_nano: log.observed_unix_ns,
        severity_number: severity_number as i32,
        severity_text: severity_text.to_owned(),
        body: Some(any_value(&Value::Text(Arc::clone(&log.body)))),
        attributes: key_values(&log.attributes),
        trace_id: trace_id.map(|id| id.to_vec()).unwrap_or_default(),
        span_id: span_id.map(|id| id.to_vec()).unwrap_or_default(),
        event_name: log.event_name.to_owned(),
        ..logs::LogRecord::default()
    }
}

/// `logs` as a request.
pub(crate) fn logs_request(logs: &[LogRecord]) -> ExportLogsServiceRequest {
    let group = |(resource, records): (&Resource, Vec<&LogRecord>)| logs::ResourceLogs {
        resource: resource_message(resource),
        scope_logs: vec![logs::ScopeLogs {
            scope: scope(),
            log_records: records.into_iter().map(log_message).collect(),
            ..logs::ScopeLogs::default()
        }],
        ..logs::ResourceLogs::default()
    };
    ExportLogsServiceRequest {
        resource_logs: by_resource(logs, |log| &log.resource)
            .into_iter()
            .map(group)
            .collect(),
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

/// Points as metrics: those of one name, unit and kind are one.
fn metric_messages(points: Vec<&Metric>) -> Vec<metrics::Metric> {
    let mut list: Vec<metrics::Metric> = vec![];
    for point in points {
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
    list
}

/// `points` as a request.
pub(crate) fn metrics_request(points: &[Metric]) -> ExportMetricsServiceRequest {
    let group = |(resource, points): (&Resource, Vec<&Metric>)| metrics::ResourceMetrics {
        resource: resource_message(resource),
        scope_metrics: vec![metrics::ScopeMetrics {
            scope: scope(),
            metrics: metric_messages(points),
            ..metrics::ScopeMetrics::default()
        }],
        ..metrics::ResourceMetrics::default()
    };
    ExportMetricsServiceRequest {
        resource_metrics: by_resource(points, |point| &point.resource)
            .into_iter()
            .map(group)
            .collect(),
    }
}
