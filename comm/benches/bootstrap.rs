//! How long a communicator takes to make: from the first rank's `ncclCommInitRank` to the last one's return, over ranks
//! that are threads of this process on the host device.

use std::{
    ffi::{CStr, c_int},
    sync::Barrier,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion};
use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    communicator::Handle,
    error::ResultCode,
};

fn ok(code: ResultCode) {
    // SAFETY: a C string that is valid until this thread's next failing call.
    let text = unsafe { CStr::from_ptr(abi::ncclGetLastError(Handle(0))) };
    assert_eq!(code, ResultCode::Success, "{}", text.to_string_lossy());
}

/// Time of making one communicator of `ranks` ranks; destroying it is not counted.
fn init(ranks: usize) -> Duration {
    let mut id = UniqueIdBytes([0; 128]);
    // SAFETY: a valid place.
    ok(unsafe { abi::ncclGetUniqueId(&raw mut id) });
    let (start, made) = (Barrier::new(ranks + 1), Barrier::new(ranks + 1));
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            let (start, made) = (&start, &made);
            scope.spawn(move || {
                let mut comm = Handle(0);
                start.wait();
                // SAFETY: a valid place.
                ok(unsafe { abi::ncclCommInitRank(&raw mut comm, ranks as c_int, id, rank as c_int) });
                made.wait();
                // SAFETY: a live communicator.
                ok(unsafe { abi::ncclCommDestroy(comm) });
            });
        }
        start.wait();
        let begin = Instant::now();
        made.wait();
        begin.elapsed()
    })
}

fn bootstrap(criterion: &mut Criterion) {
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var("RINGSIGHT_DEVICE", "host") };
    let mut group = criterion.benchmark_group("comm_init");
    group.sample_size(10);
    for ranks in [2, 16, 256] {
        group.bench_with_input(BenchmarkId::new("threads", ranks), &ranks, |bencher, ranks| {
            bencher.iter_custom(|rounds| (0..rounds).map(|_| init(*ranks)).sum());
        });
    }
    group.finish();
}

mod benches {
    use super::bootstrap;

    criterion::criterion_group!(all, bootstrap);
}

criterion::criterion_main!(benches::all);
