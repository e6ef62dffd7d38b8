//! Network activity of communicators: while the network moves something of a communicator, no kernel that waits for it is stuck.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use ringsight_comm_base::sync::lock;

/// How often something of one communicator has moved over a proxy's connections.
#[derive(Default)]
pub(crate) struct Activity(AtomicU64);

impl Activity {
    /// Counts a move, on the progress thread.
    pub(super) fn count_move(&self) {
        // Relaxed: a reader compares it with a much earlier value.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of moves so far.
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The activity of all communicators of one proxy.
#[derive(Default)]
pub(super) struct Activities(Mutex<BTreeMap<u64, Weak<Activity>>>);

impl Activities {
    /// The activity of a communicator. It is kept as long as it is referred to.
    pub(super) fn of(&self, comm: u64) -> Arc<Activity> {
        let mut all = lock(&self.0);
        if let Some(activity) = all.get(&comm).and_then(Weak::upgrade) {
            return activity;
        }
        all.retain(|_, activity| activity.strong_count() > 0);
        let activity: Arc<Activity> = Arc::default();
        all.insert(comm, Arc::downgrade(&activity));
        activity
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_communicator_has_its_own_activity_while_it_is_referred_to() {
        let all = Activities::default();
        let [first, other] = [1, 257].map(|comm| all.of(comm));
        all.of(1).count_move();
        assert_eq!((first.count(), other.count()), (1, 0));
        drop(first);
        assert_eq!(all.of(1).count(), 0);
        assert_eq!(all.0.lock().unwrap().len(), 2);
    }
}
