//! Bytes per second that a reduction produces, of data in the second-level cache, with a plain copy as the yardstick.

#![expect(missing_docs, reason = "criterion_group! makes a public function without one")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringsight_kernels::reduce::Reduction;
use ringsight_records::{DataType, ReduceOp};

/// Bytes of each input.
const BYTES: usize = 64 << 10;

fn reduce(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("reduce");
    group.throughput(Throughput::Bytes(BYTES as u64));
    // 0x33 in every byte is a small number in every type: no infinities, no subnormals.
    let (a, b) = (vec![0x33_u8; BYTES], vec![0x33_u8; BYTES]);
    let mut out = vec![0_u8; BYTES];
    group.bench_function("copy", |bencher| {
        bencher.iter(|| black_box(&mut out).copy_from_slice(black_box(&a)));
    });
    for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max, ReduceOp::PreMulSum] {
        for &data_type in DataType::ALL {
            let Some(reduction) = Reduction::new(op, data_type) else {
                continue;
            };
            let argument = Reduction::argument(op, data_type, 8, 0x3333_3333_3333_3333);
            group.bench_function(BenchmarkId::new(op.name(), data_type), |bencher| {
                bencher.iter(|| {
                    // SAFETY: three separate buffers of `BYTES` bytes.
                    unsafe {
                        (reduction.complete)(
                            black_box(&mut out).as_mut_ptr(),
                            black_box(&a).as_ptr(),
                            black_box(&b).as_ptr(),
                            BYTES / data_type.size(),
                            argument,
                        );
                    }
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, reduce);
criterion_main!(benches);
