//! Whether the network moves anything of a communicator's operations: while it does, no kernel that waits for it is stuck.

use std::sync::atomic::{AtomicU64, Ordering};

/// By communicator. Of two that share a place one that is stuck is taken for slow while the other one moves.
static MOVES: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

fn of(comm: u64) -> &'static AtomicU64 {
    &MOVES[comm as usize % MOVES.len()]
}

/// A progress thread has moved something.
pub(super) fn moved(comm: u64) {
    // Relaxed: who reads it compares it with what it was long before.
    of(comm).fetch_add(1, Ordering::Relaxed);
}

/// A number that changes whenever a progress thread of this process moves something of a communicator.
pub(crate) fn moves(comm: u64) -> u64 {
    of(comm).load(Ordering::Relaxed)
}
