//! Files of OTLP JSON lines, read back by `opentelemetry-proto`.

#![allow(clippy::disallowed_methods, reason = "tests play whoever else writes there")]

mod otlp_common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use otlp_common::messages::{logs_request, metrics_request, traces_request};
use otlp_common::{batch, plain_span, resource};
use proptest::prelude::*;
use ringsight_exporters::jsonl::JsonlExporter;
use ringsight_exporters::model::{Batch, Exporter, Metric, MetricData, Signal, Span, Value};

/// JSON has no number for NaN and the infinities; `opentelemetry-proto` does not read the names that proto3 gives them.
fn finite(value: &mut f64) {
    if !value.is_finite() {
        *value = 0.25;
    }
}

fn finite_attributes(attributes: &mut [(&'static str, Value)]) {
    for (_, value) in attributes {
        if let Value::Double(value) = value {
            finite(value);
        }
    }
}

fn finite_span(span: &mut Span) {
    finite_attributes(&mut span.attributes);
    span.events
        .iter_mut()
        .for_each(|event| finite_attributes(&mut event.attributes));
    span.links
        .iter_mut()
        .for_each(|link| finite_attributes(&mut link.attributes));
}

fn finite_metric(metric: &mut Metric) {
    finite_attributes(&mut metric.attributes);
    match &mut metric.data {
        MetricData::Gauge(value) | MetricData::Total(value) => finite(value),
        MetricData::Histogram { sum, min, max, .. } => [sum, min, max].into_iter().for_each(finite),
        MetricData::Counter(_) | MetricData::UpDown(_) => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_batch_is_read_back_as_it_was(mut batch in batch()) {
        batch.spans.iter_mut().for_each(finite_span);
        batch.metrics.iter_mut().for_each(finite_metric);
        batch.logs.iter_mut().for_each(|log| finite_attributes(&mut log.attributes));
        // The resources are shared, so they are made finite by replacing those that are not.
        let finite = |attributes: &[(&str, Value)]| {
            attributes.iter().all(|(_, value)| !matches!(value, Value::Double(number) if !number.is_finite()))
        };
        batch.spans.retain(|span| finite(&span.resource.attributes));
        batch.metrics.retain(|metric| finite(&metric.resource.attributes));
        batch.logs.retain(|log| finite(&log.resource.attributes));

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace.jsonl");
        let mut exporter = JsonlExporter::create(&path).unwrap();
        exporter.export(&batch);
        exporter.shutdown(Duration::ZERO).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let mut lines = text.lines();
        if !batch.spans.is_empty() {
            let read: ExportTraceServiceRequest = serde_json::from_str(lines.next().unwrap()).unwrap();
            let mut expected = traces_request(&batch.spans);
            for span in expected.resource_spans.iter_mut().flat_map(|g| &mut g.scope_spans).flat_map(|s| &mut s.spans) {
                // JSON tells an unset status by an empty one.
                span.status.get_or_insert_default();
            }
            prop_assert_eq!(read, expected);
        }
        if !batch.metrics.is_empty() {
            let read: ExportMetricsServiceRequest = serde_json::from_str(lines.next().unwrap()).unwrap();
            prop_assert_eq!(read, metrics_request(&batch.metrics));
        }
        if !batch.logs.is_empty() {
            let read: ExportLogsServiceRequest = serde_json::from_str(lines.next().unwrap()).unwrap();
            prop_assert_eq!(read, logs_request(&batch.logs));
        }
        prop_assert_eq!(lines.next(), None);
    }
}

fn one_span(n: u32) -> Batch {
    Batch {
        spans: vec![plain_span(&resource("rank 0"), n)],
        ..Batch::default()
    }
}

fn requests(path: &Path) -> Vec<ExportTraceServiceRequest> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn the_mapping_is_otlps() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.jsonl");
    let mut exporter = JsonlExporter::create(&path).unwrap();
    let mut batch = one_span(7);
    batch.spans[0].attributes = vec![
        ("i", Value::Int(-5)),
        ("nan", Value::Double(f64::NAN)),
        ("inf", Value::Double(f64::NEG_INFINITY)),
        ("d", Value::Double(1e300)),
        ("b", Value::Bool(true)),
    ];
    exporter.export(&batch);
    let line: serde_json::Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let span = &line["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
    assert_eq!(span["traceId"], "11111111111111111111111100000007");
    assert_eq!(span["spanId"], "2222222200000007");
    assert_eq!(span["kind"], 1);
    assert_eq!(span["startTimeUnixNano"], "1700000000000000007");
    let values: Vec<_> = span["attributes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| a["value"].clone())
        .collect();
    let expected = serde_json::json!([
        {"intValue": "-5"}, {"doubleValue": "NaN"}, {"doubleValue": "-Infinity"}, {"doubleValue": 1e300}, {"boolValue": true}
    ]);
    assert_eq!(serde_json::Value::Array(values), expected);
}

#[test]
fn a_killed_writers_last_piece_is_cut_off() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.jsonl");
    let mut exporter = JsonlExporter::append(&path).unwrap();
    exporter.export(&one_span(1));
    exporter.export(&one_span(2));
    drop(exporter);
    let whole = fs::read(&path).unwrap();
    for cut in 0..=whole.len() {
        fs::write(&path, &whole[..cut]).unwrap();
        let mut exporter = JsonlExporter::append(&path).unwrap();
        exporter.export(&one_span(3));
        exporter.shutdown(Duration::ZERO).unwrap();
        let kept = whole[..cut].iter().filter(|&&byte| byte == b'\n').count();
        assert_eq!(requests(&path).len(), kept + 1, "cut at {cut}");
    }
    // A last piece longer than one block of the search.
    fs::write(&path, [b"{}\n".to_vec(), vec![b'x'; 20_000]].concat()).unwrap();
    drop(JsonlExporter::append(&path).unwrap());
    assert_eq!(fs::read(&path).unwrap(), b"{}\n");
}

#[test]
fn a_full_device_is_named_and_counted() {
    let mut exporter = JsonlExporter::create("/dev/full").unwrap();
    exporter.export(&one_span(1));
    let error = exporter.stats().last_error.unwrap();
    assert!(
        error.contains("/dev/full") && error.contains("No space left"),
        "{error}"
    );
    let error = exporter.shutdown(Duration::ZERO).unwrap_err();
    assert!(error.contains("1 spans are missing"), "{error}");
    let stats = exporter.stats();
    assert_eq!(
        (
            stats[Signal::Traces].delivered,
            &stats[Signal::Traces].dropped[..]
        ),
        (0, &[("io_error", 1)][..])
    );
}

#[test]
fn a_file_that_cannot_be_created_is_named() {
    let error = JsonlExporter::create("/nonexistent/trace.jsonl").err().unwrap();
    assert!(error.contains("/nonexistent/trace.jsonl"), "{error}");
}
