//! What being observable costs: the probe function, an event nobody wants, and a record in the armed ring.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use criterion::Criterion;
use ringsight_comm::observe::{self, probe};
use ringsight_records::{
    Kind, Record, State,
    pages::{RING_SLOTS, Reader},
    ring,
};

fn observe(criterion: &mut Criterion) {
    observe::prepare().expect("shared pages");
    let pages = observe::pages().expect("shared pages");
    let record = Record::new(Kind::ProxyStep, State::START, observe::now_ns());
    let mut group = criterion.benchmark_group("observe");

    group.bench_function("probe function, unattached", |bencher| {
        // SAFETY: the function reads nothing.
        bencher.iter(|| unsafe { probe::ringsight_probe_launch(black_box(&raw const record)) });
    });
    group.bench_function("dense event, unarmed", |bencher| {
        bencher.iter(|| observe::emit(black_box(&record)));
    });
    group.bench_function("sparse event, unattached", |bencher| {
        let record = Record {
            kind: Kind::OpLaunched as u8,
            ..record
        };
        bencher.iter(|| observe::emit(black_box(&record)));
    });
    group.bench_function("clock", |bencher| bencher.iter(observe::now_ns));

    let (header, slots) = (pages.header(), pages.ring());
    let lease = header
        .lease
        .acquire(
            &Reader::new(std::process::id(), 0, 0),
            observe::now_ns(),
            Kind::DENSE,
            |_| false,
        )
        .expect("nobody else reads");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // As a collector does: empties the ring, then sleeps a millisecond.
            while !done.load(Ordering::Relaxed) {
                while ring::pop(&header.cursor, slots).is_some() {}
                let _ = header.lease.renew(lease, observe::now_ns());
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        group.bench_function("dense event, armed", |bencher| {
            bencher.iter_custom(|count| {
                let (mut left, mut spent) = (count, Duration::ZERO);
                while left > 0 {
                    // No more at once than fits with the reader asleep: a record that is refused costs less than one that is
                    // written, and is none.
                    let burst = left.min(RING_SLOTS as u64 / 4);
                    let begun = Instant::now();
                    for _ in 0..burst {
                        observe::emit(black_box(&record));
                    }
                    spent += begun.elapsed();
                    left -= burst;
                    // Relaxed: nothing that the positions stand for is read here, and the writer is this thread.
                    let written = header.cursor.head.load(Ordering::Relaxed);
                    while header.cursor.tail.load(Ordering::Relaxed) != written {
                        std::thread::yield_now();
                    }
                }
                spent
            });
        });
        done.store(true, Ordering::Relaxed);
    });
    header.lease.release(lease);
    assert_eq!(
        observe::lost(Kind::ProxyStep),
        0,
        "of {} records some found the ring full: the average is not of what it says",
        observe::emitted(Kind::ProxyStep)
    );
    group.finish();
}

mod benches {
    use super::observe;

    criterion::criterion_group!(all, observe);
}

criterion::criterion_main!(benches::all);
