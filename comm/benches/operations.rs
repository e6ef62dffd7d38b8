//! How long an operation takes from its call to the end of its stream, over ranks that are threads of this process.

use std::{
    ffi::c_int,
    sync::Barrier,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput};
use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    communicator::Handle,
    device::runtime,
    error::ResultCode,
};

const RANKS: usize = 2;
const FLOAT: c_int = 7;

fn ok(code: ResultCode) {
    assert_eq!(code, ResultCode::Success);
}

/// Time of `rounds` all-reduces of `bytes` bytes, each waited for, as rank 0 sees it.
fn all_reduce(bytes: usize, rounds: u64) -> Duration {
    let mut id = UniqueIdBytes([0; 128]);
    // SAFETY: a valid place.
    ok(unsafe { abi::ncclGetUniqueId(&raw mut id) });
    let barrier = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..RANKS)
            .map(|rank| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let device = runtime().expect("host device");
                    let mut comm = Handle(0);
                    // SAFETY: a valid place.
                    ok(unsafe { abi::ncclCommInitRank(&raw mut comm, RANKS as c_int, id, rank as c_int) });
                    let stream = device.stream_create().expect("stream");
                    let mut data = vec![0f32; bytes / 4];
                    let at = data.as_mut_ptr().cast();
                    let round = || {
                        // SAFETY: the buffer lives until the stream is synchronized.
                        ok(unsafe { abi::ncclAllReduce(at, at, bytes / 4, FLOAT, 0, comm, stream) });
                        device.stream_synchronize(stream).expect("stream");
                    };
                    round();
                    barrier.wait();
                    let begin = Instant::now();
                    (0..rounds).for_each(|_| round());
                    let taken = begin.elapsed();
                    device.stream_destroy(stream).expect("stream");
                    // SAFETY: a live communicator.
                    ok(unsafe { abi::ncclCommDestroy(comm) });
                    taken
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("rank"))
            .next()
            .expect("rank 0")
    })
}

fn operations(criterion: &mut Criterion) {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("RINGSIGHT_DEVICE", "host") };
    let mut group = criterion.benchmark_group("all_reduce");
    group.sample_size(10);
    for bytes in [8, 64 << 10, 16 << 20] {
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_with_input(BenchmarkId::from_parameter(bytes), &bytes, |bencher, bytes| {
            bencher.iter_custom(|rounds| all_reduce(*bytes, rounds));
        });
    }
    group.finish();
}

mod benches {
    use super::operations;

    criterion::criterion_group!(all, operations);
}

criterion::criterion_main!(benches::all);
