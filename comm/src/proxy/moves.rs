//! Whether the network moves anything of a communicator's operations: while it does, no kernel that waits for it is stuck.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

/// How often something of a communicator's has moved over a proxy's connections.
#[derive(Default)]
pub(crate) struct Moves(AtomicU64);

impl Moves {
    /// The progress thread has moved something.
    pub(super) fn moved(&self) {
        // Relaxed: who reads it compares it with what it was long before.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that changes whenever it does.
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Those of the communicators of one proxy.
#[derive(Default)]
pub(super) struct MovesOfAll(Mutex<BTreeMap<u64, Weak<Moves>>>);

impl MovesOfAll {
    /// A communicator's, for as long as somebody has them.
    pub(super) fn of(&self, comm: u64) -> Arc<Moves> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(moves) = all.get(&comm).and_then(Weak::upgrade) {
            return moves;
        }
        all.retain(|_, moves| moves.strong_count() > 0);
        let moves: Arc<Moves> = Arc::default();
        all.insert(comm, Arc::downgrade(&moves));
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_communicator_has_its_own_as_long_as_it_is_there() {
        let all = MovesOfAll::default();
        let [first, other] = [1, 257].map(|comm| all.of(comm));
        all.of(1).moved();
        assert_eq!((first.count(), other.count()), (1, 0));
        drop(first);
        assert_eq!(all.of(1).count(), 0);
        assert_eq!(all.0.lock().unwrap().len(), 2);
    }
}
