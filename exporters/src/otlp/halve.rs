//! The two halves of an encoded request.
//!
//! A server that finds a request too large gets its halves. What both need (resource, scope, a metric's name) is repeated in each; the
//! items (spans, log records, metric points) keep their order. The input is the [encoder](super::encode)'s output, possibly several
//! requests in a row, which protobuf takes for one.

use bytes::Bytes;

use super::wire::{self, Fields, WIDE};
use crate::model::Signal;

/// Splits `message`, which holds `items`, into halves with their numbers of items. `None` if there is nothing to split.
pub(super) fn halve(signal: Signal, message: &[u8], items: usize) -> Option<[(Bytes, usize); 2]> {
    let nesting = Nesting(signal);
    let first = items / 2;
    if first == 0 || nesting.count(message, 0)? != items {
        return None;
    }
    let half = |skip, keep| {
        let mut out = Vec::with_capacity(message.len() / 2 + message.len() / 8);
        let mut window = Window { skip, keep };
        nesting.select(message, 0, &mut window, &mut out)?;
        Some((Bytes::from(out), keep))
    };
    Some([half(0, first)?, half(first, items - first)?])
}

/// Items that are wanted: some are left out, the next ones kept.
struct Window {
    skip: usize,
    keep: usize,
}

/// Which fields of a request lead to its items.
#[derive(Clone, Copy)]
struct Nesting(Signal);

impl Nesting {
    /// Messages around an item.
    fn depth(self) -> usize {
        match self.0 {
            // request, resource, scope
            Signal::Traces | Signal::Logs => 2,
            // request, resource, scope, metric, data
            Signal::Metrics => 4,
        }
    }

    /// Whether `field` of a message at `depth` holds items, or is one.
    fn leads_on(self, depth: usize, field: u64) -> bool {
        match depth {
            0 => field == 1,
            1 | 2 => field == 2,
            // `Metric.data`: gauge, sum, histogram, exponential histogram, summary
            3 => matches!(field, 5 | 7 | 9 | 10 | 11),
            _ => field == 1,
        }
    }

    /// Items in `message`; `None` if it cannot be read.
    fn count(self, message: &[u8], depth: usize) -> Option<usize> {
        let mut items = 0;
        for field in Fields::of(message) {
            let field = field?;
            if self.leads_on(depth, field.number) {
                items += if depth == self.depth() {
                    1
                } else {
                    self.count(field.content, depth + 1)?
                };
            }
        }
        Some(items)
    }

    /// Appends `message` with no more items than `window` keeps. Messages that would be left without items are left out.
    fn select(self, message: &[u8], depth: usize, window: &mut Window, out: &mut Vec<u8>) -> Option<()> {
        for field in Fields::of(message) {
            let field = field?;
            if !self.leads_on(depth, field.number) {
                out.extend_from_slice(field.whole);
                continue;
            }
            let is_item = depth == self.depth();
            let items = if is_item {
                1
            } else {
                self.count(field.content, depth + 1)?
            };
            if window.keep == 0 || items <= window.skip {
                window.skip = window.skip.saturating_sub(items);
            } else if window.skip == 0 && items <= window.keep {
                window.keep -= items;
                out.extend_from_slice(field.whole);
            } else {
                let inner = wire::open(out, u8::try_from(field.number).ok()?, WIDE);
                self.select(field.content, depth + 1, window, out)?;
                wire::close(out, &inner);
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
    use opentelemetry_proto::tonic::metrics::v1::metric::Data;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::model::{Metric, MetricData, Resource, Span, Value};
    use crate::otlp::encode::Encoder;

    fn resources() -> [Arc<Resource>; 3] {
        [0, 1, 2].map(|n| {
            let attributes = vec![("process.pid", Value::Int(n))];
            Arc::new(Resource { attributes })
        })
    }

    fn span(resource: &Arc<Resource>, n: usize) -> Span {
        Span {
            resource: Arc::clone(resource),
            trace_id: [1; 16],
            span_id: (n as u64 + 1).to_be_bytes(),
            parent_span_id: None,
            name: "all_reduce",
            start_unix_ns: 1,
            end_unix_ns: 2,
            attributes: vec![],
            events: vec![],
            links: vec![],
            error: Some("x".repeat(n % 300).into()),
        }
    }

    fn point(resource: &Arc<Resource>, n: usize) -> Metric {
        Metric {
            resource: Arc::clone(resource),
            name: if n.is_multiple_of(3) { "a" } else { "b" },
            description: "what it tells",
            unit: "s",
            attributes: vec![],
            start_unix_ns: 1,
            unix_ns: n as u64 + 1,
            data: if n.is_multiple_of(3) {
                MetricData::Gauge(n as f64)
            } else {
                MetricData::Counter(n as u64)
            },
        }
    }

    /// Each span's id with its process.
    fn spans(message: &[u8]) -> Vec<(String, Vec<u8>)> {
        let request = ExportTraceServiceRequest::decode(message).unwrap();
        let mut spans = Vec::new();
        for group in request.resource_spans {
            let resource = format!("{:?}", group.resource.unwrap());
            for scope in group.scope_spans {
                assert_eq!(scope.scope.unwrap().name, "ringsight");
                spans.extend(
                    scope
                        .spans
                        .into_iter()
                        .map(|span| (resource.clone(), span.span_id)),
                );
            }
        }
        spans
    }

    /// Each point's time with its process and metric.
    fn points(message: &[u8]) -> Vec<(String, u64)> {
        let request = ExportMetricsServiceRequest::decode(message).unwrap();
        let mut points = Vec::new();
        for group in request.resource_metrics {
            let resource = format!("{:?}", group.resource.unwrap());
            for metric in group.scope_metrics.into_iter().flat_map(|scope| scope.metrics) {
                let (kind, data) = match metric.data.unwrap() {
                    Data::Gauge(gauge) => ("gauge", gauge.data_points),
                    Data::Sum(sum) => {
                        assert!(sum.is_monotonic && sum.aggregation_temporality == 2);
                        ("sum", sum.data_points)
                    }
                    other => panic!("{other:?}"),
                };
                let of = format!(
                    "{resource} {} {} {} {kind}",
                    metric.name, metric.description, metric.unit
                );
                points.extend(data.into_iter().map(|point| (of.clone(), point.time_unix_nano)));
            }
        }
        points
    }

    proptest! {
        #[test]
        fn halves_are_the_whole_in_order(owners in prop::collection::vec(0..3usize, 1..120)) {
            let resources = resources();
            let mut encoder = Encoder::default();
            let items = owners.len();
            let (mut traces, mut metrics) = (Vec::new(), Vec::new());
            let batch: Vec<_> = owners.iter().enumerate().map(|(n, owner)| span(&resources[*owner], n)).collect();
            // Requests that are merged have a resource several times.
            for part in batch.chunks(50) {
                encoder.traces(part, 1 << 20, |bytes, _| traces.extend_from_slice(bytes));
            }
            let batch: Vec<_> = owners.iter().enumerate().map(|(n, owner)| point(&resources[*owner], n)).collect();
            encoder.metrics(&batch, 1 << 20, |bytes, _| metrics.extend_from_slice(bytes));

            let Some([(first, n), (second, m)]) = halve(Signal::Traces, &traces, items) else {
                prop_assert_eq!(items, 1);
                return Ok(());
            };
            prop_assert_eq!((n, m), (items / 2, items - items / 2));
            prop_assert_eq!((spans(&first).len(), spans(&second).len()), (n, m));
            prop_assert_eq!([spans(&first), spans(&second)].concat(), spans(&traces));

            let [(first, n), (second, m)] = halve(Signal::Metrics, &metrics, items).unwrap();
            prop_assert_eq!((points(&first).len(), points(&second).len()), (n, m));
            prop_assert_eq!([points(&first), points(&second)].concat(), points(&metrics));
        }

        #[test]
        fn rubbish_is_not_split(bytes in prop::collection::vec(any::<u8>(), 0..64), items in 0..9usize) {
            for signal in Signal::ALL {
                if let Some([(_, first), (_, second)]) = halve(signal, &bytes, items) {
                    prop_assert_eq!(first + second, items);
                }
            }
        }
    }
}
