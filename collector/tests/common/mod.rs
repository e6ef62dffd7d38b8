//! What the tests of spans share.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part")]

pub mod failover;

use std::collections::BTreeMap;

use ringsight_collector::{Collector, Options, clock::Clock};
use ringsight_exporters::model::{Batch, Span, SpanId, TraceId, Value};
use ringsight_probes::sample::Sample;

pub fn collector() -> Collector {
    collector_with(Options::default())
}

pub fn collector_with(options: Options) -> Collector {
    Collector::new(options, Clock::fixed(1_700_000_000_000_000_000), 0)
}

pub fn collect(samples: Vec<Sample>) -> Batch {
    let mut collector = collector();
    let mut samples = samples;
    collector.ingest(&mut samples);
    collector.take_batch()
}

pub fn attribute<'a>(span: &'a Span, name: &str) -> Option<&'a Value> {
    span.attributes
        .iter()
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value)
}

pub fn named<'a>(spans: &'a [Span], name: &'a str) -> impl Iterator<Item = &'a Span> {
    spans.iter().filter(move |span| span.name == name)
}

/// Every trace has one root; every parent is there and encloses its children; no span id stands twice in a trace.
pub fn check_trees(spans: &[Span]) {
    let mut by_id: BTreeMap<(TraceId, SpanId), &Span> = BTreeMap::new();
    let mut roots: BTreeMap<TraceId, u32> = BTreeMap::new();
    for span in spans {
        assert!(span.start_unix_ns <= span.end_unix_ns, "{span:?}");
        assert!(
            by_id.insert((span.trace_id, span.span_id), span).is_none(),
            "twice: {span:?}"
        );
        *roots.entry(span.trace_id).or_default() += u32::from(span.parent_span_id.is_none());
    }
    assert!(
        roots.values().all(|count| *count == 1),
        "roots by trace: {roots:?}"
    );
    for span in spans {
        let Some(parent) = span.parent_span_id else {
            continue;
        };
        let Some(parent) = by_id.get(&(span.trace_id, parent)) else {
            panic!("orphan: {span:?}")
        };
        assert!(
            parent.start_unix_ns <= span.start_unix_ns && span.end_unix_ns <= parent.end_unix_ns,
            "{} [{}, {}] is not inside {} [{}, {}]",
            span.name,
            span.start_unix_ns,
            span.end_unix_ns,
            parent.name,
            parent.start_unix_ns,
            parent.end_unix_ns
        );
    }
}

/// Spans in an order that does not depend on when they were made.
pub fn sorted(mut spans: Vec<Span>) -> Vec<Span> {
    spans.sort_by_key(|span| (span.trace_id, span.span_id));
    spans
}
