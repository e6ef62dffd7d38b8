//! Every interleaving of small cases: `RUSTFLAGS="--cfg loom" cargo test -p ringsight-records --release model`.

extern crate std;
use std::sync::Arc;

use loom::thread;

use super::*;

const NOW: u64 = 1_000_000_000_000;

/// Held by process 1 since long ago, which is gone.
fn lapsed() -> Arc<Lease> {
    let lease = Lease {
        armed: AtomicU64::new(0),
        term: AtomicU64::new(0),
        pid: AtomicU64::new(0),
        start: AtomicU64::new(0),
        namespace: AtomicU64::new(0),
    };
    let _ = lease.acquire(&reader(1), NOW - LEASE_NS, 1, |_| false).unwrap();
    Arc::new(lease)
}

fn reader(pid: u32) -> Reader {
    Reader::new(pid, pid.into(), 7)
}

fn reach(lease: &Arc<Lease>, pid: u32) -> thread::JoinHandle<Result<u64, Holder>> {
    let lease = Arc::clone(lease);
    thread::spawn(move || lease.acquire(&reader(pid), NOW, 1 << pid, |reader| reader.pid() == 1))
}

/// Two readers see the same lapsed lease: one gets it, the other is refused, and the ring is armed as the first one said.
#[test]
fn model_of_two_readers_that_reach_for_one_lease() {
    loom::model(|| {
        let lease = lapsed();
        let (second, third) = (reach(&lease, 2), reach(&lease, 3));
        let winner = match (second.join().unwrap(), third.join().unwrap()) {
            (Ok(2), Err(refused)) => (2, refused),
            (Err(refused), Ok(2)) => (3, refused),
            other => panic!("{other:?}"),
        };
        let (pid, refused) = winner;
        assert!(
            refused.reader.is_none_or(|holder| holder == reader(pid)),
            "{refused:?}"
        );
        assert_eq!((lease.mask(), lease.reader(2)), (1 << pid, Some(reader(pid))));
    });
}

/// A holder was stopped until its lease had lapsed, and goes on while another reader takes it: whatever it does, the lease is
/// the other one's.
#[test]
fn model_of_a_holder_that_was_stopped_and_its_successor() {
    loom::model(|| {
        let lease = lapsed();
        let stopped = {
            let lease = Arc::clone(&lease);
            thread::spawn(move || {
                let armed = lease.arm(1, 1 << 20);
                lease.release(1);
                armed
            })
        };
        let term = reach(&lease, 2).join().unwrap().expect("a lapsed lease");
        stopped.join().unwrap();
        assert_eq!((term, lease.mask()), (2, 1 << 2));
        assert!(!lease.renew(1, NOW) && lease.renew(2, NOW));
        assert_eq!(lease.reader(2), Some(reader(2)));
    });
}

/// It renews, and so has it still, or is told that it has not.
#[test]
fn model_of_a_renewal_and_a_take_over() {
    loom::model(|| {
        let lease = lapsed();
        let holder = {
            let lease = Arc::clone(&lease);
            thread::spawn(move || lease.renew(1, NOW))
        };
        // Process 1 is not gone, but its lease has lapsed.
        let other = {
            let lease = Arc::clone(&lease);
            thread::spawn(move || lease.acquire(&reader(2), NOW, 1 << 2, |_| false).is_ok())
        };
        let (renewed, taken) = (holder.join().unwrap(), other.join().unwrap());
        assert!(renewed || taken, "nobody has it");
        assert_eq!(lease.renew(1, NOW), !taken);
        assert_eq!(lease.mask(), if taken { 1 << 2 } else { 1 });
    });
}
