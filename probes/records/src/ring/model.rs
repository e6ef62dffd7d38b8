//! Every interleaving of small cases: `RUSTFLAGS="--cfg loom" cargo test -p ringsight-records --release model`.

extern crate std;
use std::{sync::Arc, vec::Vec};

use loom::thread;

use super::*;
use crate::{Kind, State};

struct Ring {
    cursor: RingCursor,
    slots: Vec<Slot>,
}

fn ring(slots: usize) -> Arc<Ring> {
    let cursor = RingCursor {
        head: AtomicU64::new(0),
        _line0: [0; 7],
        tail: AtomicU64::new(0),
        _line1: [0; 7],
    };
    let slot = || Slot {
        turn: AtomicU64::new(0),
        words: core::array::from_fn(|_| AtomicU64::new(0)),
    };
    Arc::new(Ring {
        cursor,
        slots: (0..slots).map(|_| slot()).collect(),
    })
}

fn record(value: u64) -> Record {
    Record {
        value,
        ..Record::new(Kind::ProxyStep, State::START, value)
    }
}

/// Two writers, a ring that holds less than they write, a reader beside them: nothing is torn, nothing comes twice, nothing
/// but what was refused is missing, and each writer's records keep their order.
#[test]
fn model_of_two_writers_and_a_reader() {
    // Of std, not of loom: it lives across the model's runs.
    static EARLY: core::sync::atomic::AtomicUsize = core::sync::atomic::AtomicUsize::new(0);
    loom::model(|| {
        let ring = ring(2);
        let writers: Vec<_> = (0..2u64)
            .map(|writer| {
                let ring = Arc::clone(&ring);
                thread::spawn(move || {
                    // The second writer writes twice, so that the ring goes round.
                    (0..=writer)
                        .filter(|i| push(&ring.cursor, &ring.slots, &record(writer << 8 | i)))
                        .count()
                })
            })
            .collect();
        // The reader is a thread like the writers: the thread that spawns them runs first, and would find nothing.
        let reader = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let taken = (0..2).filter_map(|_| pop(&ring.cursor, &ring.slots));
                taken
                    .inspect(|record| assert_eq!(record.value, record.time_ns))
                    .map(|record| record.value)
                    .collect()
            })
        };
        let pushed: usize = writers.into_iter().map(|writer| writer.join().unwrap()).sum();
        let mut seen: Vec<u64> = reader.join().unwrap();
        while let Some(record) = pop(&ring.cursor, &ring.slots) {
            assert_eq!(record.value, record.time_ns);
            seen.push(record.value);
        }
        // The first two find room whatever the order; the third depends on the reader.
        assert!(seen.len() == pushed && pushed >= 2, "{} of {pushed}", seen.len());
        EARLY.fetch_max(pushed, Ordering::Relaxed);
        assert!(!is_held_up(&ring.cursor, &ring.slots));
        let second: Vec<_> = seen.iter().filter(|value| *value >> 8 == 1).collect();
        assert!(second.is_sorted());
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), pushed, "a record came twice");
    });
    let most = EARLY.load(Ordering::Relaxed);
    assert_eq!(
        most, 3,
        "no run in which the reader made room: the model looks at too little"
    );
}

/// Reads what is there now, in a thread of its own.
fn reader(ring: &Arc<Ring>, times: usize) -> thread::JoinHandle<Vec<u64>> {
    let ring = Arc::clone(ring);
    thread::spawn(move || {
        let taken = (0..times).filter_map(|_| pop(&ring.cursor, &ring.slots));
        taken
            .inspect(|record| assert_eq!(record.value, record.time_ns, "torn"))
            .map(|record| record.value)
            .collect()
    })
}

/// All that was pushed, and no more, came to somebody.
fn all_came_once(ring: &Ring, pushed: &[u64], mut seen: Vec<u64>) {
    seen.extend(core::iter::from_fn(|| pop(&ring.cursor, &ring.slots)).map(|record| record.value));
    seen.sort_unstable();
    assert_eq!(seen, pushed);
    assert!(!is_held_up(&ring.cursor, &ring.slots));
    // And the ring goes on: all of its places are free.
    for value in 90..92 {
        assert!(push(&ring.cursor, &ring.slots, &record(value)));
    }
    assert!(!push(&ring.cursor, &ring.slots, &record(99)));
    let rest: Vec<u64> = core::iter::from_fn(|| pop(&ring.cursor, &ring.slots))
        .map(|record| record.value)
        .collect();
    assert_eq!(rest, [90, 91]);
}

fn writer(ring: &Arc<Ring>, values: core::ops::Range<u64>) -> thread::JoinHandle<Vec<u64>> {
    let ring = Arc::clone(ring);
    thread::spawn(move || {
        values
            .filter(|value| push(&ring.cursor, &ring.slots, &record(*value)))
            .collect()
    })
}

/// A reader is killed after each of its steps that others can see, while a writer goes round the ring and its successor reads.
#[test]
fn model_of_a_reader_that_dies_and_its_successor() {
    loom::model(|| {
        let ring = ring(2);
        assert!(push(&ring.cursor, &ring.slots, &record(0)));
        assert!(push(&ring.cursor, &ring.slots, &record(1)));
        let dies = {
            let ring = Arc::clone(&ring);
            // It frees the slot and gets no further. (Dead before that, it has written nothing; after it, it has read.)
            thread::spawn(move || ring.slots[0].take(0, 0, 2).map(|record| record.value))
        };
        let writer = writer(&ring, 2..3);
        let successor = reader(&ring, 2);
        let mut seen: Vec<u64> = dies.join().unwrap().into_iter().collect();
        let mut pushed = std::vec![0, 1];
        pushed.extend(writer.join().unwrap());
        seen.extend(successor.join().unwrap());
        all_came_once(&ring, &pushed, seen);
    });
}

/// A reader is stopped at any step and goes on beside its successor, while a writer overwrites what it was reading.
#[test]
fn model_of_a_reader_that_was_stopped_and_its_successor() {
    loom::model(|| {
        let ring = ring(2);
        assert!(push(&ring.cursor, &ring.slots, &record(0)));
        assert!(push(&ring.cursor, &ring.slots, &record(1)));
        let stopped = reader(&ring, 1);
        let writer = writer(&ring, 2..3);
        let successor = reader(&ring, 1);
        let mut pushed = std::vec![0, 1];
        pushed.extend(writer.join().unwrap());
        let mut seen = stopped.join().unwrap();
        seen.extend(successor.join().unwrap());
        all_came_once(&ring, &pushed, seen);
    });
}
