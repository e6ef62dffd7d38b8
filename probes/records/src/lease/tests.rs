extern crate std;

use std::{thread, time::Duration};

use super::*;

fn lease() -> Lease {
    Lease {
        armed: AtomicU64::new(0),
        term: AtomicU64::new(0),
        pid: AtomicU64::new(0),
        start: AtomicU64::new(0),
        namespace: AtomicU64::new(0),
    }
}

const HERE: u64 = 0xf000_0001;
const NOW: u64 = 1_000_000_000_000;
/// A heartbeat counts in these.
const UNIT: u64 = 1 << HEARTBEAT_SHIFT;

fn reader(pid: u32) -> Reader {
    Reader::new(pid, u64::from(pid) * 10, HERE)
}

const NOBODY_IS_GONE: fn(&Reader) -> bool = |_| false;

#[test]
fn a_lease_is_held_by_one_and_lapses() {
    let lease = lease();
    assert_eq!(lease.holder(NOW), None);
    let first = lease
        .acquire(&reader(10), NOW, Kind::DENSE, NOBODY_IS_GONE)
        .unwrap();
    assert!(lease.wants(Kind::ProxyStep) && !lease.wants(Kind::OpLaunched) && lease.alive(NOW));
    let holder = lease
        .acquire(&reader(11), NOW + LEASE_NS - UNIT, 0, NOBODY_IS_GONE)
        .unwrap_err();
    assert_eq!(holder.reader, Some(reader(10)));
    assert!(holder.silent_ns.abs_diff(LEASE_NS - UNIT) < UNIT, "{holder:?}");
    assert_eq!(lease.holder(NOW + LEASE_NS - UNIT), Some(holder));
    assert!(
        lease.wants(Kind::ProxyStep),
        "the refusal left the first one alone"
    );
    // Silent for too long, or certainly gone: the next one has it, and the first one learns of it.
    let second = lease
        .acquire(&reader(11), NOW + LEASE_NS, Kind::EVERY, NOBODY_IS_GONE)
        .unwrap();
    assert!(!lease.renew(first, NOW + LEASE_NS) && lease.renew(second, NOW + LEASE_NS));
    let third = lease
        .acquire(&reader(12), NOW + LEASE_NS, Kind::DENSE, |reader| {
            reader.pid() == 11
        })
        .unwrap();
    lease.release(third);
    assert!(!lease.wants(Kind::ProxyStep) && !lease.alive(NOW + LEASE_NS));
    // The same process again is another holder.
    assert_ne!(
        lease
            .acquire(&reader(12), NOW + LEASE_NS, 0, NOBODY_IS_GONE)
            .unwrap(),
        third
    );
}

#[test]
fn what_a_stopped_holder_does_later_changes_nothing() {
    let lease = lease();
    let first = lease
        .acquire(&reader(10), NOW, Kind::DENSE, NOBODY_IS_GONE)
        .unwrap();
    let later = NOW + LEASE_NS;
    let second = lease
        .acquire(&reader(11), later, Kind::EVERY, NOBODY_IS_GONE)
        .unwrap();
    assert!(!lease.arm(first, 0) && !lease.renew(first, later + 3 * LEASE_NS));
    lease.release(first);
    assert_eq!(lease.mask(), Kind::EVERY);
    assert_eq!(
        lease.holder(later).and_then(|holder| holder.reader),
        Some(reader(11))
    );
    assert!(
        !lease.alive(later + LEASE_NS),
        "its heartbeat is not the first one's"
    );
    assert!(lease.renew(second, later));
}

#[test]
fn a_holder_that_has_not_said_who_it_is_is_not_gone() {
    let lease = lease();
    let _ = lease
        .acquire(&reader(10), NOW, Kind::DENSE, NOBODY_IS_GONE)
        .unwrap();
    // The next one has taken the term and is stopped before it says who it is; the words are those of the one before,
    // which is gone.
    let now = NOW + LEASE_NS;
    lease.term.store(tagged(2, heartbeat(now)), Ordering::Relaxed);
    let holder = lease
        .acquire(&reader(12), now, 0, |reader| reader.pid() == 10)
        .unwrap_err();
    assert_eq!(holder.reader, None);
    // It says so half, and half of the one before's words are still there.
    lease.pid.store(tagged(2, 11), Ordering::Relaxed);
    assert!(lease.acquire(&reader(12), now, 0, |_| true).is_err());
}

#[test]
fn term_numbers_go_round() {
    let lease = lease();
    let last = (1 << (64 - VALUE_BITS)) - 1;
    lease.term.store(tagged(last - 1, 0), Ordering::Relaxed);
    lease.armed.store(tagged(last - 1, 0), Ordering::Relaxed);
    for term in [last, 0, 1] {
        assert_eq!(
            lease.acquire(&reader(1), NOW, Kind::EVERY, NOBODY_IS_GONE),
            Ok(term)
        );
        assert_eq!(lease.mask(), Kind::EVERY);
        assert!(lease.renew(term, NOW));
        lease.release(term);
        assert_eq!(lease.mask(), 0);
    }
}

/// Two readers reach for a lapsed lease at the same moment, many times over: one gets it, however the two are scheduled.
#[test]
fn of_two_readers_at_once_one_gets_the_lease() {
    const ROUNDS: u64 = 100_000;
    let lease = lease();
    let (go, done, other) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let is_gone = |reader: &Reader| !matches!((reader.pid(), reader.start_time()), (100, 1000) | (101, 1010));
    // Spins for a moment, so that the two meet, and then gives way: there may be one core.
    let wait = |word: &AtomicU64, value: u64| {
        for spins in 0u32.. {
            if word.load(Ordering::Acquire) >= value {
                break;
            }
            match spins {
                0..1000 => core::hint::spin_loop(),
                1000..2000 => thread::yield_now(),
                _ => thread::sleep(Duration::from_micros(50)),
            }
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                wait(&go, round);
                let got = lease.acquire(&reader(101), round * 4 * LEASE_NS, 0, is_gone);
                other.store(got.is_ok().into(), Ordering::Relaxed);
                done.store(round, Ordering::Release);
            }
        });
        for round in 1..=ROUNDS {
            go.store(round, Ordering::Release);
            for _ in 0..round % 40 {
                core::hint::spin_loop();
            }
            let mine = lease.acquire(&reader(100), round * 4 * LEASE_NS, 0, is_gone);
            wait(&done, round);
            let both = u64::from(mine.is_ok()) + other.load(Ordering::Relaxed);
            assert_eq!(both, 1, "readers that were given the lease in round {round}");
        }
    });
}
