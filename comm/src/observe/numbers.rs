//! Numbers of operations, groups and plans, and the description entries that belong to operations.

use std::sync::atomic::{AtomicU32, Ordering};

use ringsight_comm_base::sync::lock;
use ringsight_records::{
    Description, Waits,
    description::Time,
    pages::{CAPTURED, Pages},
    prefetch::ask_for,
};

use super::{
    RECORDS,
    shared::{self, Shared},
};

/// The next number of a counter that skips 0 and stays below [`CAPTURED`].
fn next(counter: &AtomicU32) -> u32 {
    loop {
        // Relaxed: numbers need to differ, they order nothing.
        let number = counter.fetch_add(1, Ordering::Relaxed) & !CAPTURED;
        if number != 0 {
            return number;
        }
    }
}

/// The pages, if operations are described in them.
fn described() -> Option<&'static Shared> {
    shared::current().filter(|_| RECORDS)
}

/// Of operations that run once.
static NEXT_OP: AtomicU32 = AtomicU32::new(1);

/// Numbers that are tried for an operation before one is described in place of another that is under way.
const TRIES: usize = 64;

/// Number for an operation that runs once: one whose entry is not that of an operation which is under way, unless so many in a row are.
#[must_use]
pub fn next_op() -> u32 {
    let op = next(&NEXT_OP);
    match described() {
        Some(Shared { pages, .. }) if pages.slot(op).is_under_way() => next_whose_slot_is_free(pages),
        _ => op,
    }
}

#[cold]
fn next_whose_slot_is_free(pages: &Pages<'_>) -> u32 {
    let mut tries = (1..TRIES).map(|_| next(&NEXT_OP));
    let free = tries.find(|op| !pages.slot(*op).is_under_way());
    free.unwrap_or_else(|| next(&NEXT_OP))
}

/// Asks for the entry that the next operation will probably have: it was last used thousands of operations ago, by a thread that saw one end.
pub fn ask_for_next() {
    if let Some(Shared { pages, .. }) = described() {
        // Relaxed: a hint.
        ask_for(pages.slot(NEXT_OP.load(Ordering::Relaxed) & !CAPTURED));
    }
}

/// Number for a captured operation, to be given back by [`release_captured_op`] when its graph is gone. If the table is
/// full, the overflow is counted and the number is one of an eager operation, whose entry is soon overwritten.
#[must_use]
pub fn next_captured_op() -> u32 {
    let Some(shared) = shared::current() else {
        return next_op();
    };
    if let Some(op) = lock(&shared.captured).take() {
        return op;
    }
    shared
        .pages
        .header()
        .captured_overflow
        .fetch_add(1, Ordering::Relaxed);
    next_op()
}

/// Gives a captured operation's number back; an eager one's is left alone.
pub fn release_captured_op(op: u32) {
    if op & CAPTURED == 0 {
        return;
    }
    if let Some(shared) = shared::current() {
        lock(&shared.captured).give_back(op);
    }
}

/// Number for a group.
#[must_use]
pub fn next_group() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    next(&NEXT)
}

/// Number for a plan.
#[must_use]
pub fn next_plan() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    next(&NEXT)
}

/// Writes the description entry of operation `description.op`.
#[inline]
pub fn describe(description: &Description) {
    if let Some(Shared { pages, .. }) = described() {
        pages.slot(description.op).write(description);
    }
}

/// Sets times of operation `op`'s entry, unless a later operation has taken its slot.
#[inline]
pub fn set_times<const N: usize>(op: u32, times: [(Time, u64); N]) {
    if let Some(Shared { pages, .. }) = described() {
        pages.slot(op).set_times(op, times);
    }
}

/// Sets what the kernel of an operation waits for.
pub fn set_waits(op: u32, waits: Waits, ns: u64) {
    if let Some(Shared { pages, .. }) = described() {
        pages.slot(op).set_waits(op, waits, ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_skip_zero_and_the_captured_bit() {
        let counter = AtomicU32::new(CAPTURED - 1);
        assert_eq!(next(&counter), CAPTURED - 1);
        assert_eq!(next(&counter), 1);
    }
}
