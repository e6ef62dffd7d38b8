//! What the encoder writes is what `prost` writes for the same request, field by field and byte by byte.

mod otlp_common;

use std::sync::Arc;

use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value as Number;
use otlp_common::messages::{logs_request, metrics_request, traces_request};
use otlp_common::{batch, plain_span, resource};
use proptest::prelude::*;
use prost::Message;
use ringsight_exporters::model::{Batch, LogRecord, Metric, MetricData, Span};
use ringsight_exporters::otlp::encode::Encoder;

const UNLIMITED: usize = usize::MAX;

fn encode_traces(spans: &[Span], limit: usize) -> (Vec<(Vec<u8>, usize)>, usize) {
    let mut requests = Vec::new();
    let left_out = Encoder::default().traces(spans, limit, |bytes, n| requests.push((bytes.to_vec(), n)));
    (requests, left_out)
}

fn encode_metrics(metrics: &[Metric], limit: usize) -> (Vec<(Vec<u8>, usize)>, usize) {
    let mut requests = Vec::new();
    let left_out = Encoder::default().metrics(metrics, limit, |bytes, n| requests.push((bytes.to_vec(), n)));
    (requests, left_out)
}

fn encode_logs(logs: &[LogRecord], limit: usize) -> (Vec<(Vec<u8>, usize)>, usize) {
    let mut requests = Vec::new();
    let left_out = Encoder::default().logs(logs, limit, |bytes, n| requests.push((bytes.to_vec(), n)));
    (requests, left_out)
}

/// Trace ids of all spans in `requests`, in order.
fn trace_ids(requests: &[(Vec<u8>, usize)]) -> Vec<Vec<u8>> {
    let mut ids = Vec::new();
    for (bytes, count) in requests {
        let request = ExportTraceServiceRequest::decode(&bytes[..]).unwrap();
        let before = ids.len();
        for scope in request
            .resource_spans
            .into_iter()
            .flat_map(|group| group.scope_spans)
        {
            assert!(!scope.spans.is_empty(), "no empty groups");
            ids.extend(scope.spans.into_iter().map(|span| span.trace_id));
        }
        assert_eq!(ids.len() - before, *count);
    }
    ids
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_batch_is_encoded_as_prost_does(batch in batch()) {
        let (requests, left_out) = encode_traces(&batch.spans, UNLIMITED);
        prop_assert_eq!(left_out, 0);
        prop_assert_eq!(requests.len(), usize::from(!batch.spans.is_empty()));
        for (bytes, count) in requests {
            let expected = traces_request(&batch.spans);
            prop_assert_eq!(count, batch.spans.len());
            prop_assert_eq!(&ExportTraceServiceRequest::decode(&bytes[..]).unwrap(), &expected);
            prop_assert_eq!(bytes, expected.encode_to_vec());
        }
        let (requests, left_out) = encode_metrics(&batch.metrics, UNLIMITED);
        prop_assert_eq!(left_out, 0);
        for (bytes, count) in requests {
            let expected = metrics_request(&batch.metrics);
            prop_assert_eq!(count, batch.metrics.len());
            prop_assert_eq!(&ExportMetricsServiceRequest::decode(&bytes[..]).unwrap(), &expected);
            prop_assert_eq!(bytes, expected.encode_to_vec());
        }
        let (requests, left_out) = encode_logs(&batch.logs, UNLIMITED);
        prop_assert_eq!(left_out, 0);
        prop_assert_eq!(requests.len(), usize::from(!batch.logs.is_empty()));
        for (bytes, count) in requests {
            let expected = logs_request(&batch.logs);
            prop_assert_eq!(count, batch.logs.len());
            prop_assert_eq!(&ExportLogsServiceRequest::decode(&bytes[..]).unwrap(), &expected);
            prop_assert_eq!(bytes, expected.encode_to_vec());
        }
    }

    #[test]
    fn requests_stay_below_the_limit_and_nothing_disappears(batch in batch(), limit in 0usize..2_000) {
        let (requests, left_out) = encode_traces(&batch.spans, limit);
        let sent: usize = requests.iter().map(|(_, count)| count).sum();
        prop_assert!(requests.iter().all(|(bytes, _)| bytes.len() <= limit));
        prop_assert_eq!(sent + left_out, batch.spans.len());
        prop_assert_eq!(trace_ids(&requests).len(), sent);

        let (requests, left_out) = encode_metrics(&batch.metrics, limit);
        let sent: usize = requests.iter().map(|(_, count)| count).sum();
        prop_assert!(requests.iter().all(|(bytes, _)| bytes.len() <= limit));
        prop_assert_eq!(sent + left_out, batch.metrics.len());
        for (bytes, _) in requests {
            ExportMetricsServiceRequest::decode(&bytes[..]).unwrap();
        }

        let (requests, left_out) = encode_logs(&batch.logs, limit);
        let sent: usize = requests.iter().map(|(_, count)| count).sum();
        prop_assert!(requests.iter().all(|(bytes, _)| bytes.len() <= limit));
        prop_assert_eq!(sent + left_out, batch.logs.len());
        for (bytes, count) in requests {
            let request = ExportLogsServiceRequest::decode(&bytes[..]).unwrap();
            let scopes = request.resource_logs.iter().flat_map(|group| &group.scope_logs);
            prop_assert_eq!(scopes.map(|scope| scope.log_records.len()).sum::<usize>(), count);
        }
    }
}

#[test]
fn oversize_batches_are_cut_in_order() {
    let resources = [resource("rank 0"), resource("rank 1")];
    let spans: Vec<Span> = (1..=1_000u32)
        .map(|n| plain_span(&resources[n as usize / 501], n))
        .collect();
    let (requests, left_out) = encode_traces(&spans, 4_096);
    assert_eq!(left_out, 0);
    assert!(requests.len() > 10, "cut into {} requests", requests.len());
    let expected: Vec<Vec<u8>> = spans.iter().map(|span| span.trace_id.to_vec()).collect();
    assert_eq!(trace_ids(&requests), expected);
}

#[test]
fn only_the_oversize_span_is_left_out() {
    let resource = resource("rank 0");
    let mut spans: Vec<Span> = (1..=3).map(|n| plain_span(&resource, n)).collect();
    spans[1].error = Some("x".repeat(5_000).into());
    let (requests, left_out) = encode_traces(&spans, 4_096);
    assert_eq!(left_out, 1);
    assert_eq!(
        trace_ids(&requests),
        [spans[0].trace_id.to_vec(), spans[2].trace_id.to_vec()]
    );

    spans.swap(0, 1);
    let (requests, left_out) = encode_traces(&spans[..1], 4_096);
    assert_eq!((requests.len(), left_out), (0, 1), "no request without a span");
}

#[test]
fn nothing_to_send_makes_no_request() {
    let Batch {
        spans, metrics, logs, ..
    } = Batch::default();
    assert_eq!(encode_traces(&spans, UNLIMITED), (vec![], 0));
    assert_eq!(encode_metrics(&metrics, UNLIMITED), (vec![], 0));
    assert_eq!(encode_logs(&logs, UNLIMITED), (vec![], 0));
}

#[test]
fn points_of_one_metric_share_a_message_and_counters_saturate() {
    let resource = resource("rank 0");
    let point = |value| Metric {
        resource: Arc::clone(&resource),
        name: "ccl.probe.hits",
        description: "Hits",
        unit: "{hit}",
        attributes: vec![],
        start_unix_ns: 1,
        unix_ns: 2,
        data: MetricData::Counter(value),
    };
    let (requests, _) = encode_metrics(&[point(7), point(u64::MAX)], UNLIMITED);
    let request = ExportMetricsServiceRequest::decode(&requests[0].0[..]).unwrap();
    let metrics = &request.resource_metrics[0].scope_metrics[0].metrics;
    assert_eq!(metrics.len(), 1);
    let Some(Data::Sum(sum)) = &metrics[0].data else {
        panic!("a counter is a sum: {metrics:?}")
    };
    assert!(sum.is_monotonic);
    let values: Vec<_> = sum.data_points.iter().map(|point| point.value).collect();
    assert_eq!(values, [Some(Number::AsInt(7)), Some(Number::AsInt(i64::MAX))]);
}
