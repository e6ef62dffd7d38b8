//! Spans a second turned into OTLP protobuf, by our encoder and by `prost` from messages that are already built.
#![allow(missing_docs, reason = "criterion's macros generate undocumented items")]

#[path = "../tests/otlp_common/mod.rs"]
mod otlp_common;

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use prost::Message;
use ringsight_exporters::model::Span;
use ringsight_exporters::otlp::encode::Encoder;

fn benches(criterion: &mut Criterion) {
    let resources: Vec<_> = (0..8)
        .map(|rank| otlp_common::resource(&rank.to_string()))
        .collect();
    let communicator: Arc<str> = "8d1f0c2b9a3e4756".into();
    let spans: Vec<Span> = (1..=4_096)
        .map(|n| otlp_common::rank_span(&resources[n as usize % 8], &communicator, n))
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
