extern crate std;
use std::{boxed::Box, thread, vec::Vec};

use super::*;
use crate::{Kind, State};

fn ring(slots: usize) -> (Box<RingCursor>, Vec<Slot>) {
    let cursor = RingCursor {
        head: AtomicU64::new(0),
        _line0: [0; 7],
        tail: AtomicU64::new(0),
        _line1: [0; 7],
    };
    let slots = (0..slots)
        .map(|_| Slot {
            turn: AtomicU64::new(0),
            words: core::array::from_fn(|_| AtomicU64::new(0)),
        })
        .collect();
    (Box::new(cursor), slots)
}

fn record(value: u64) -> Record {
    Record {
        value,
        ..Record::new(Kind::ProxyStep, State::START, value)
    }
}

#[test]
fn keeps_order_and_refuses_when_full() {
    let (cursor, slots) = ring(4);
    for round in 0..10 {
        for i in 0..4 {
            assert!(push(&cursor, &slots, &record(round * 4 + i)));
        }
        assert!(!push(&cursor, &slots, &record(99)));
        for i in 0..4 {
            assert_eq!(pop(&cursor, &slots).map(|r| r.value), Some(round * 4 + i));
        }
        assert_eq!(pop(&cursor, &slots), None);
    }
}

#[test]
fn many_writers_lose_nothing_but_what_is_counted() {
    let (cursor, slots) = ring(64);
    let (cursor, slots) = (&*cursor, &slots[..]);
    const EACH: u64 = 20_000;
    let (received, refused) = thread::scope(|scope| {
        let writers: Vec<_> = (0..3u64)
            .map(|writer| {
                scope.spawn(move || {
                    (0..EACH)
                        .filter(|i| !push(cursor, slots, &record(writer << 32 | i)))
                        .count() as u64
                })
            })
            .collect();
        let reader = scope.spawn(move || {
            let mut last = [None; 3];
            let mut received = 0u64;
            let mut idle = 0;
            while idle < 200_000 {
                let Some(record) = pop(cursor, slots) else {
                    idle += 1;
                    core::hint::spin_loop();
                    continue;
                };
                idle = 0;
                received += 1;
                let (writer, i) = ((record.value >> 32) as usize, record.value & 0xffff_ffff);
                assert!(last[writer] < Some(i), "writer {writer} went back");
                assert_eq!(record.time_ns, record.value, "torn record");
                last[writer] = Some(i);
            }
            received
        });
        let refused: u64 = writers.into_iter().map(|w| w.join().unwrap()).sum();
        (reader.join().unwrap(), refused)
    });
    // The reader may have given up while a writer was descheduled; what is left is still in the ring.
    let rest = core::iter::from_fn(|| pop(cursor, slots)).count() as u64;
    assert_eq!(received + rest + refused, 3 * EACH);
}

#[test]
fn a_dead_writers_hole_can_be_skipped() {
    let (cursor, slots) = ring(4);
    cursor.head.store(1, Ordering::Relaxed); // claimed position 0, then died
    assert!(push(&cursor, &slots, &record(7)));
    assert_eq!(pop(&cursor, &slots), None);
    assert!(is_held_up(&cursor, &slots));
    skip(&cursor, &slots);
    assert_eq!(pop(&cursor, &slots).map(|r| r.value), Some(7));
}

#[test]
fn what_a_reader_left_half_read_does_not_hold_up_its_successor() {
    let (cursor, slots) = ring(4);
    for i in 0..4 {
        assert!(push(&cursor, &slots, &record(i)));
    }
    // A reader that is killed between its two writes.
    assert_eq!(slots[0].take(0, 0, 4).map(|r| r.value), Some(0));
    assert_eq!(pop(&cursor, &slots).map(|r| r.value), Some(1));
    // The same, and a writer goes once around before anybody reads again.
    assert_eq!(slots[2].take(2, 2, 4).map(|r| r.value), Some(2));
    for i in 4..7 {
        assert!(push(&cursor, &slots, &record(i)));
    }
    assert!(!push(&cursor, &slots, &record(99)));
    let rest: Vec<u64> = core::iter::from_fn(|| pop(&cursor, &slots))
        .map(|r| r.value)
        .collect();
    assert_eq!(rest, [3, 4, 5, 6]);
    assert!(!is_held_up(&cursor, &slots));
}

#[test]
fn what_a_stopped_reader_does_later_changes_nothing() {
    let (cursor, slots) = ring(4);
    assert!(push(&cursor, &slots, &record(0)));
    // It has seen the record of position 0 and is stopped; others read and write on.
    for i in 1..10 {
        assert!(push(&cursor, &slots, &record(i)));
        assert_eq!(pop(&cursor, &slots).map(|r| r.value), Some(i - 1));
    }
    assert!(slots[0].take(0, 0, 4).is_none(), "its copy is of another record");
    assert_eq!(advance(&cursor, 0), 9);
    assert_eq!(pop(&cursor, &slots).map(|r| r.value), Some(9));
    assert_eq!(pop(&cursor, &slots), None);
}

#[test]
fn positions_that_cannot_be_hold_nobody_up() {
    let (cursor, slots) = ring(4);
    cursor.head.store(1 << 40, Ordering::Relaxed);
    assert_eq!(pop(&cursor, &slots), None);
    assert!(!is_held_up(&cursor, &slots));
}

#[test]
fn no_more_positions_are_passed_than_a_reader_allows() {
    let (cursor, slots) = ring(8);
    // Damaged pages: each position was read, round after round, but for one.
    for slot in &slots {
        slot.turn.store(1 << 40, Ordering::Relaxed);
    }
    cursor.head.store(1 << 30, Ordering::Relaxed);
    let mut passes = 20;
    assert_eq!(pop_at(&cursor, &slots, &mut passes), None);
    assert_eq!((passes, cursor.tail.load(Ordering::Relaxed)), (0, 20));
    assert_eq!(pop_at(&cursor, &slots, &mut passes), None);
    assert_eq!(cursor.tail.load(Ordering::Relaxed), 20);
    // A record that is there is taken without a pass.
    slots[4].turn.store(21 - 4, Ordering::Relaxed);
    assert_eq!(pop_at(&cursor, &slots, &mut passes).map(|(at, _)| at), Some(20));
}
