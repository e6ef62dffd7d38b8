//! Every interleaving of small cases: `RUSTFLAGS="--cfg loom" cargo test -p ringsight-records --release model`.

extern crate std;
use std::{panic, sync::Arc};

use loom::thread;

use super::*;

fn lock() -> Arc<SequenceLock<2>> {
    Arc::new(SequenceLock {
        version: AtomicU64::new(0),
        words: [AtomicU64::new(0), AtomicU64::new(0)],
    })
}

/// A writer replaces two equal words twice beside a reader, which must never see two that differ.
fn words_stay_together(orders: Orders) {
    loom::model(move || {
        let lock = lock();
        let writer = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || {
                lock.write_with(orders, &[1, 1], || ());
                lock.write_with(orders, &[2, 2], || ());
            })
        };
        if let Some([first, second]) = lock.read_with(orders, |_| ()) {
            assert_eq!(first, second, "torn");
            assert_ne!(first, 0, "a copy of what was never written");
        }
        writer.join().unwrap();
        assert_eq!(lock.read_with(orders, |_| ()), Some([2, 2]));
    });
}

#[test]
fn model_of_a_writer_and_a_reader() {
    words_stay_together(Orders::RIGHT);
}

/// A writer was killed half-way: the next one makes the words whole, and until then there is nothing.
#[test]
fn model_of_a_writer_that_was_killed() {
    loom::model(|| {
        let lock = lock();
        lock.version.store(1, Ordering::Relaxed);
        lock.words[0].store(7, Ordering::Relaxed);
        let writer = {
            let lock = Arc::clone(&lock);
            thread::spawn(move || lock.write(&[1, 1], || ()))
        };
        assert!(matches!(lock.read(|_| ()), None | Some([1, 1])));
        writer.join().unwrap();
        assert_eq!(lock.read(|_| ()), Some([1, 1]));
    });
}

/// The model is worth something only if it sees what goes wrong where an order is missing.
#[test]
fn model_catches_each_order_that_is_missing() {
    let weaker = [
        (
            "the writer's fence",
            Orders {
                begun: None,
                ..Orders::RIGHT
            },
        ),
        (
            "the even version",
            Orders {
                done: Ordering::Relaxed,
                ..Orders::RIGHT
            },
        ),
        (
            "the first look",
            Orders {
                first: Ordering::Relaxed,
                ..Orders::RIGHT
            },
        ),
        (
            "the reader's fence",
            Orders {
                read: None,
                ..Orders::RIGHT
            },
        ),
    ];
    for (what, orders) in weaker {
        assert!(
            panic::catch_unwind(|| words_stay_together(orders)).is_err(),
            "not caught: {what}"
        );
    }
}
