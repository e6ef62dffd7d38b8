//! The ring for dense events: bounded, many writers in the target process, one reader in the collector.
//!
//! D. Vyukov's bounded MPMC queue, used with one reader. Each slot has a turn: `position` when it is free for the writer
//! that claims that position, `position + 1` when it holds that position's record. Here turns are relative to the
//! zeroed memory of a fresh memfd: a slot's stored turn is `turn - index`, so that all slots start at zero without
//! a pass over the ring.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering};

#[cfg(loom)]
use loom::cell::UnsafeCell;

#[cfg(not(loom))]
use core::cell::UnsafeCell;

use crate::Record;

/// Write and read positions, on cache lines of their own: writers and the reader sit on different cores.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RingCursor {
    /// Next position to be claimed by a writer.
    pub head: AtomicU64,
    _line0: [u64; 7],
    /// Next position to be read; kept in the pages so that a later reader goes on where the last one ended.
    pub tail: AtomicU64,
    _line1: [u64; 7],
}

/// One slot: the turn, then the record; 72 bytes.
#[repr(C)]
pub struct Slot {
    turn: AtomicU64,
    record: UnsafeCell<Record>,
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == 72 && size_of::<RingCursor>() == 128);

// SAFETY: `record` is written only by the writer that claimed the slot's position (head exchange) and read only after
// that writer's release store of `turn`; see `push` and `pop`.
unsafe impl Sync for Slot {}

impl Slot {
    /// # Safety
    /// Nobody else reads or writes the record meanwhile.
    unsafe fn put(&self, record: &Record) {
        #[cfg(not(loom))]
        // SAFETY: the caller's promise.
        unsafe {
            *self.record.get() = *record;
        }
        #[cfg(loom)]
        // SAFETY: the caller's promise, which loom checks.
        self.record.with_mut(|slot| unsafe { *slot = *record });
    }

    /// # Safety
    /// Nobody writes the record meanwhile.
    unsafe fn take(&self) -> Record {
        #[cfg(not(loom))]
        // SAFETY: the caller's promise.
        unsafe {
            *self.record.get()
        }
        #[cfg(loom)]
        // SAFETY: the caller's promise, which loom checks.
        self.record.with(|slot| unsafe { *slot })
    }
}

impl core::fmt::Debug for Slot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

/// Appends a record; `false` if the ring is full (the newest record is the one that is lost: the caller counts it).
///
/// `slots.len()` is a power of two.
#[must_use]
pub fn push(cursor: &RingCursor, slots: &[Slot], record: &Record) -> bool {
    let mask = slots.len() as u64 - 1;
    let mut position = cursor.head.load(Ordering::Relaxed);
    loop {
        let index = position & mask;
        let slot = &slots[index as usize];
        // Acquire: pairs with the reader's release in `pop`, so that the reader's copy out of the slot is finished
        // before this writer overwrites it.
        let turn = slot.turn.load(Ordering::Acquire).wrapping_add(index);
        match turn.wrapping_sub(position) as i64 {
            0 => {
                // Relaxed: the claim orders nothing by itself, `turn` does.
                match cursor.head.compare_exchange_weak(
                    position,
                    position.wrapping_add(1),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => {
                        // SAFETY: this position is ours alone, and the reader does not touch the slot before the
                        // store below.
                        unsafe { slot.put(record) };
                        // Release: who reads this turn reads the record.
                        slot.turn
                            .store(position.wrapping_add(1).wrapping_sub(index), Ordering::Release);
                        return true;
                    }
                    Err(seen) => position = seen,
                }
            }
            // The slot still holds the record of one round ago: full.
            behind if behind < 0 => return false,
            // Another writer took this position: the turn that it stored with release order was read with acquire order
            // above, so its claim of `head` is visible too. A head that stands still all the same means that somebody
            // damaged the pages; the job must not spin on that.
            _ => {
                let head = cursor.head.load(Ordering::Relaxed);
                if head == position {
                    return false;
                }
                position = head;
            }
        }
    }
}

/// Takes the oldest record; `None` if there is none or its writer has not finished it yet. One reader at a time.
#[must_use]
pub fn pop(cursor: &RingCursor, slots: &[Slot]) -> Option<Record> {
    let mask = slots.len() as u64 - 1;
    let position = cursor.tail.load(Ordering::Relaxed);
    let index = position & mask;
    let slot = &slots[index as usize];
    // Acquire: pairs with the writer's release after it wrote the record.
    let turn = slot.turn.load(Ordering::Acquire).wrapping_add(index);
    if turn != position.wrapping_add(1) {
        return None;
    }
    // SAFETY: the turn says that the record is complete, and no writer claims the slot before the store below.
    let record = unsafe { slot.take() };
    // Release: a writer that sees the slot free sees our copy done.
    slot.turn.store(
        position.wrapping_add(slots.len() as u64).wrapping_sub(index),
        Ordering::Release,
    );
    // Relaxed: only this reader, or a successor that acquired the lease after it, reads `tail`.
    cursor.tail.store(position.wrapping_add(1), Ordering::Relaxed);
    Some(record)
}

/// What a position holds that the reader cannot get past: `true` if a writer claimed it and has not finished. A writer
/// that died between claim and store leaves such a hole; [`skip`] gets past it.
#[must_use]
pub fn is_held_up(cursor: &RingCursor) -> bool {
    cursor.head.load(Ordering::Relaxed) != cursor.tail.load(Ordering::Relaxed)
}

/// Gives up the position that [`is_held_up`], freeing its slot. Only when its writer is known to be dead: a writer that
/// finishes after this would put its record into a slot that may be another's by then.
pub fn skip(cursor: &RingCursor, slots: &[Slot]) {
    let position = cursor.tail.load(Ordering::Relaxed);
    let index = position & (slots.len() as u64 - 1);
    slots[index as usize].turn.store(
        position.wrapping_add(slots.len() as u64).wrapping_sub(index),
        Ordering::Release,
    );
    cursor.tail.store(position.wrapping_add(1), Ordering::Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests {
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
                record: UnsafeCell::new(Record::new(Kind::Coll, State::START, 0)),
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
        assert!(is_held_up(&cursor));
        skip(&cursor, &slots);
        assert_eq!(pop(&cursor, &slots).map(|r| r.value), Some(7));
    }
}

/// Every interleaving of a small case: `RUSTFLAGS="--cfg loom" cargo test -p ringsight-records --release model`.
#[cfg(all(test, loom))]
mod model {
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
            record: UnsafeCell::new(Record::new(Kind::Coll, State::START, 0)),
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
            EARLY.fetch_max(pushed, core::sync::atomic::Ordering::Relaxed);
            assert!(!is_held_up(&ring.cursor));
            let second: Vec<_> = seen.iter().filter(|value| *value >> 8 == 1).collect();
            assert!(second.is_sorted());
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen.len(), pushed, "a record came twice");
        });
        let most = EARLY.load(core::sync::atomic::Ordering::Relaxed);
        assert_eq!(
            most, 3,
            "no run in which the reader made room: the model looks at too little"
        );
    }
}
