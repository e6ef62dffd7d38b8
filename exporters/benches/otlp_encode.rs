//! Spans a second turned into OTLP protobuf, by our encoder and by `prost` from messages that are already built.
#![allow(missing_docs, reason = "criterion's macros generate undocumented items")]

#[path = "../tests/otlp_common/mod.rs"]
mod otlp_common;

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use prost::Message;
use ringsight_exporters::model::{Resource, Span, Value};
use ringsight_exporters::otlp::encode::Encoder;

/// A span as the collector makes them: twelve attributes, of all kinds.
fn span(resource: &Arc<Resource>, communicator: &Arc<str>, n: u32) -> Span {
    let mut span = otlp_common::plain_span(resource, n);
    span.parent_span_id = Some([7; 8]);
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

fn benches(criterion: &mut Criterion) {
    let resources: Vec<_> = (0..8)
        .map(|rank| otlp_common::resource(&rank.to_string()))
        .collect();
    let communicator: Arc<str> = "8d1f0c2b9a3e4756".into();
    let spans: Vec<Span> = (1..=4_096)
        .map(|n| span(&resources[n as usize % 8], &communicator, n))
        .collect();
    let message = otlp_common::messages::traces_request(&spans);

    let mut group = criterion.benchmark_group("otlp_encode");
    group.throughput(Throughput::Elements(spans.len() as u64));
    let mut encoder = Encoder::default();
    group.bench_function("ours", |bencher| {
        bencher.iter(|| {
            encoder.traces(black_box(&spans), 3 << 20, |bytes, _| {
                black_box(bytes.to_vec());
            })
        });
    });
    group.bench_function("prost", |bencher| {
        bencher.iter(|| black_box(&message).encode_to_vec());
    });
    group.bench_function("prost_from_model", |bencher| {
        bencher.iter(|| otlp_common::messages::traces_request(black_box(&spans)).encode_to_vec());
    });
    group.finish();
}

criterion_group!(encode, benches);
criterion_main!(encode);
