//! The ring for events: bounded, many writers in the target process, one reader in the collector.
//!
//! D. Vyukov's bounded MPMC queue. Each slot has a turn: `position` when it is free for the writer that claims that
//! position, `position + 1` when it holds that position's record, `position + slots` when that record was read. Here turns
//! are relative to the zeroed memory of a fresh memfd: a slot's stored turn is `turn - index`, so that all slots start at
//! zero without a pass over the ring.
//!
//! There is one reader at a time, but who it is changes: by a lease that lapses. So a reader may be killed, or stopped for
//! as long as it pleases somebody, between any two of its steps, and another one reads meanwhile. Both of a reader's
//! writes are therefore exchanges of what it saw, and both words only ever grow: the exchange of the *turn* decides who
//! has read a position, once and for all; the *tail* merely says where to look next, and a reader that finds the position
//! there already read moves it on. What a stopped reader does when it goes on fails, or is what its successor would do.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering};

use crate::Record;
#[cfg(not(loom))]
use crate::prefetch::ask_for;

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;

/// Words of a record that a slot keeps.
#[cfg(not(loom))]
const WORDS: usize = size_of::<Record>() / 8;
/// The model looks at every order of every access: two words are enough to show a record that is torn.
#[cfg(loom)]
const WORDS: usize = 2;

/// Write and read positions, on cache lines of their own: writers and the reader sit on different cores.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct RingCursor {
    /// Next position to be claimed by a writer.
    pub head: AtomicU64,
    _line0: [u64; 7],
    /// Next position to be read, or the one before it if its reader got no further; kept in the pages so that a later
    /// reader goes on where the last one ended.
    pub tail: AtomicU64,
    _line1: [u64; 7],
}

/// One slot: the turn, then the record; 72 bytes.
///
/// The record is kept in atomic words, which cost what plain ones do: a reader that was stopped in the middle of its copy
/// may go on when the slot is another record's. It throws such a copy away.
#[repr(C)]
pub struct Slot {
    turn: AtomicU64,
    words: [AtomicU64; WORDS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Slot>() == 72 && size_of::<RingCursor>() == 128);

#[cfg(not(loom))]
fn to_words(record: &Record) -> [u64; WORDS] {
    // SAFETY: `Record` is `repr(C)`, 64 bytes, without padding, and plain data.
    unsafe { core::mem::transmute::<Record, [u64; WORDS]>(*record) }
}

#[cfg(not(loom))]
fn from_words(words: [u64; WORDS]) -> Record {
    // SAFETY: as in `to_words`; every bit pattern is a record.
    unsafe { core::mem::transmute::<[u64; WORDS], Record>(words) }
}

#[cfg(loom)]
fn to_words(record: &Record) -> [u64; WORDS] {
    [record.time_ns, record.value]
}

#[cfg(loom)]
fn from_words([time_ns, value]: [u64; WORDS]) -> Record {
    Record {
        value,
        ..Record::new(crate::Kind::ProxyStep, crate::State::START, time_ns)
    }
}

impl Slot {
    /// Relaxed throughout: the turn orders them.
    fn put(&self, record: &Record) {
        for (slot, word) in self.words.iter().zip(to_words(record)) {
            slot.store(word, Ordering::Relaxed);
        }
    }

    fn copy(&self) -> Record {
        let mut words = [0; WORDS];
        for (word, slot) in words.iter_mut().zip(&self.words) {
            *word = slot.load(Ordering::Relaxed);
        }
        from_words(words)
    }

    /// Reads the record of `position`, which the turn said is there, and frees the slot. `None` if another reader did:
    /// then the copy may be of anything.
    fn take(&self, position: u64, index: u64, slots: u64) -> Option<Record> {
        let record = self.copy();
        // The exchange succeeds only if the turn is still `position + 1`: nobody has freed the slot, so nobody has written
        // it since the writer whose turn we acquired, and the copy is of its record.
        // Release: pairs with the acquire in `push`. The next writer's stores come after it has read this turn, which comes
        // after the loads above; so these loads do not see them.
        self.turn
            .compare_exchange(
                position.wrapping_add(1).wrapping_sub(index),
                position.wrapping_add(slots).wrapping_sub(index),
                Ordering::Release,
                Ordering::Relaxed,
            )
            .ok()?;
        Some(record)
    }
}

impl core::fmt::Debug for Slot {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Slot").finish_non_exhaustive()
    }
}

/// How many slots ahead of the one that is written its successors are asked for.
#[cfg(not(loom))]
const AHEAD: u64 = 3;

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
        // Acquire: pairs with the reader's release in `Slot::take`, so that the reader's copy out of the slot is finished
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
                        // This position is ours alone, and no reader takes the slot's words for a record before the store
                        // below.
                        slot.put(record);
                        // Release: who reads this turn reads the record.
                        slot.turn
                            .store(position.wrapping_add(1).wrapping_sub(index), Ordering::Release);
                        // The reader's core has it from the round before.
                        #[cfg(not(loom))]
                        ask_for(&slots[(position.wrapping_add(AHEAD) & mask) as usize]);
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

/// Takes the oldest record; `None` if there is none or its writer has not finished it yet.
///
/// For one reader at a time; of two, each record goes to one.
#[must_use]
pub fn pop(cursor: &RingCursor, slots: &[Slot]) -> Option<Record> {
    pop_at(cursor, slots, &mut slots.len()).map(|(_, record)| record)
}

/// The same, with the record's position: how many were claimed before it since the ring was made. `passes` is how many positions may be
/// passed that were read already; it is reduced by those that were, and at 0 nothing is taken past such a position. In damaged pages
/// there may be no end of them, before each record.
#[must_use]
pub fn pop_at(cursor: &RingCursor, slots: &[Slot], passes: &mut usize) -> Option<(u64, Record)> {
    let count = slots.len() as u64;
    // Relaxed: an old tail leads to a position that was read, which shows.
    let mut position = cursor.tail.load(Ordering::Relaxed);
    loop {
        let index = position & (count - 1);
        let slot = &slots[index as usize];
        // Acquire: pairs with the writer's release after it wrote the record.
        let turn = slot.turn.load(Ordering::Acquire).wrapping_add(index);
        match turn.wrapping_sub(position.wrapping_add(1)) as i64 {
            0 => {
                if let Some(record) = slot.take(position, index, count) {
                    advance(cursor, position);
                    return Some((position, record));
                }
            }
            behind if behind < 0 => return None,
            // Read, by a reader that was killed or stopped before it moved the tail. Such a position was claimed, and the
            // claim is visible: the writer stored its turn after it, and the reader its own after that. A head that says
            // otherwise means that somebody damaged the pages.
            _ => {
                if cursor.head.load(Ordering::Relaxed).wrapping_sub(position) as i64 <= 0 {
                    return None;
                }
            }
        }
        // Read already, by this reader's predecessor or, meanwhile, by its successor: one position where a reader got no further, more
        // only in damaged pages.
        *passes = passes.checked_sub(1)?;
        position = advance(cursor, position);
    }
}

/// Moves the tail past `position`, which was read, unless somebody has; returns where it is then.
///
/// Relaxed: the turns order what readers and writers do, and an exchange sees the latest tail.
fn advance(cursor: &RingCursor, position: u64) -> u64 {
    let next = position.wrapping_add(1);
    match cursor
        .tail
        .compare_exchange(position, next, Ordering::Relaxed, Ordering::Relaxed)
    {
        Ok(_) => next,
        Err(seen) => seen,
    }
}

/// What a position holds that [`pop`] cannot get past: `true` if a writer claimed it and has not finished. A writer
/// that died between claim and store leaves such a hole; [`skip`] gets past it. Positions further apart than the ring is
/// long are damaged: there is nothing to wait for.
#[must_use]
pub fn is_held_up(cursor: &RingCursor, slots: &[Slot]) -> bool {
    let head = cursor.head.load(Ordering::Relaxed);
    let claimed = head.wrapping_sub(cursor.tail.load(Ordering::Relaxed));
    (1..=slots.len() as u64).contains(&claimed)
}

/// Gives up the position that [`is_held_up`], freeing its slot. Only when its writer is known to be dead: a writer that
/// finishes after this would put its record into a slot that may be another's by then.
pub fn skip(cursor: &RingCursor, slots: &[Slot]) {
    let count = slots.len() as u64;
    let position = cursor.tail.load(Ordering::Relaxed);
    let index = position & (count - 1);
    let turn = &slots[index as usize].turn;
    let seen = turn.load(Ordering::Relaxed);
    match seen.wrapping_add(index).wrapping_sub(position) as i64 {
        // A record after all.
        1 => return,
        unfinished if unfinished <= 0 => {
            // An exchange for a reader's usual reason: by the time it goes on, another one may have done this.
            let free = position.wrapping_add(count).wrapping_sub(index);
            let _ = turn.compare_exchange(seen, free, Ordering::Release, Ordering::Relaxed);
        }
        _ => {}
    }
    advance(cursor, position);
}
