//! Writing what can be seen: records, shared pages, probe functions.
//!
//! An event is built as a [`Record`] and handed to [`emit`]. It goes to the shared ring while a collector has armed that for its kind. *Sparse* kinds
//! (a handful for an operation) go through an exported [`probe`] function otherwise, and if the ring is full; *dense* kinds go nowhere else, so callers
//! ask [`wants`] before they build one. The library never knows whether probes are attached.

mod numbers;
pub mod probe;
mod shared;
mod tables;

use std::sync::atomic::Ordering;

pub use numbers::{
    ask_for_next, describe, next_captured_op, next_group, next_op, next_plan, release_captured_op, set_times,
    set_waits,
};
pub use ringsight_comm_base::fork::{count_generations as notice_forks, generation as fork_generation};
use ringsight_records::{Kind, Record, pages::Pages, ring};
pub use shared::{LIBRARY_VERSION, VERSION_BANNER, pid, prepare};
pub use tables::TableEntry;
pub(crate) use tables::{ConnectionEntry, ProxyEntry};

/// Whether anything is written. Not if `RINGSIGHT_NO_RECORDS` was in the environment of the build: `cargo xtask bench` compares both.
const RECORDS: bool = !cfg!(ringsight_no_records);

/// `CLOCK_MONOTONIC` in nanoseconds, what `bpf_ktime_get_ns` reads.
#[must_use]
pub fn now_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec to write to; CLOCK_MONOTONIC always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Whether a dense event of this kind is worth building a record for: one relaxed load of the armed mask.
#[inline]
#[must_use]
pub fn wants(kind: Kind) -> bool {
    RECORDS && shared::current().is_some_and(|shared| shared.pages.header().lease.wants(kind))
}

/// Whether a collector reads events of `kind` as of `now_ns` ([`now_ns`]): it wants them, and gave a sign of life of late.
#[must_use]
pub fn is_read(kind: Kind, now_ns: u64) -> bool {
    let is_alive = |shared: &shared::Shared| shared.pages.header().lease.alive(now_ns);
    wants(kind) && shared::current().is_some_and(is_alive)
}

/// By kind number: 1 + the probe function that carries the kind, 0 for dense kinds.
const PROBES: [u8; Kind::LIMIT] = {
    let mut probes = [0; Kind::LIMIT];
    let mut i = 0;
    while i < Kind::ALL.len() {
        if let Some(probe) = Kind::ALL[i].probe() {
            probes[Kind::ALL[i] as usize] = probe as u8 + 1;
        }
        i += 1;
    }
    probes
};

/// Counts the event and hands it to one carrier: the ring if it is armed for the kind and has room, otherwise the probe function if the
/// kind is sparse.
#[inline]
pub fn emit(record: &Record) {
    if !RECORDS {
        return;
    }
    let probe = PROBES[usize::from(record.kind) % Kind::LIMIT];
    if !ring_takes(record, probe != 0) && probe != 0 {
        probe::call(usize::from(probe) - 1, record);
    }
}

/// Counts the event; whether it is in the ring now.
#[inline]
fn ring_takes(record: &Record, sparse: bool) -> bool {
    let Some(shared) = shared::current() else {
        return false;
    };
    let header = shared.pages.header();
    let kind = usize::from(record.kind) % Kind::LIMIT;
    // A sparse event is counted before the mask is looked at, a dense one after: only wanted ones count. A reader arms
    // the ring and then reads the counters, so that what is counted later than that is in the ring. SeqCst makes it so,
    // and costs nothing: a read-modify-write is a full barrier where loads need one.
    if sparse {
        header.emitted[kind].fetch_add(1, Ordering::SeqCst);
    }
    // The mask is all that an unwanted dense event looks at; see `Lease::mask`. The record's own time stands for "now":
    // it is at most a moment old, and reading the clock again would cost as much as the rest. A lease that has lapsed is
    // as good as none.
    if header.lease.mask() & 1 << kind == 0 || !header.lease.alive(record.time_ns) {
        return false;
    }
    if !sparse {
        header.emitted[kind].fetch_add(1, Ordering::Relaxed);
    }
    let taken = ring::push(&header.cursor, shared.pages.ring(), record);
    if !taken {
        header.lost[kind].fetch_add(1, Ordering::Relaxed);
    }
    taken
}

/// This process's shared pages as a collector sees them, if they have been made.
#[must_use]
pub fn pages() -> Option<Pages<'static>> {
    shared::current().map(|shared| shared.pages)
}

/// Events of `kind` emitted since the pages were made: sparse ones always, dense ones while the ring was armed for them.
#[must_use]
pub fn emitted(kind: Kind) -> u64 {
    pages().map_or(0, |pages| {
        pages.header().emitted[kind as usize].load(Ordering::Relaxed)
    })
}

/// Events of `kind` that found the ring full.
#[must_use]
pub fn lost(kind: Kind) -> u64 {
    pages().map_or(0, |pages| {
        pages.header().lost[kind as usize].load(Ordering::Relaxed)
    })
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard};

    use ringsight_records::{Description, State, description::Time, pages::Reader};

    use super::*;

    /// Tests of the one set of pages that this process has take turns.
    pub(super) fn turn() -> MutexGuard<'static, ()> {
        static TURN: Mutex<()> = Mutex::new(());
        prepare().unwrap();
        TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn arm(mask: u64) -> u64 {
        let lease = &pages().unwrap().header().lease;
        lease
            .acquire(&Reader::new(std::process::id(), 1, 0), now_ns(), mask, |_| true)
            .unwrap()
    }

    #[test]
    fn a_dense_record_reaches_the_armed_ring_and_no_other() {
        let _turn = turn();
        let (header, slots) = (pages().unwrap().header(), pages().unwrap().ring());
        let record = Record {
            value: 77,
            ..Record::new(Kind::NetPlugin, State::START, now_ns())
        };
        let before = emitted(Kind::NetPlugin);
        emit(&record);
        assert_eq!(emitted(Kind::NetPlugin), before, "unarmed events are not counted");
        let lease = arm(Kind::NetPlugin.bit());
        assert!(wants(Kind::NetPlugin) && !wants(Kind::ProxyCtrl));
        emit(&record);
        emit(&Record::new(Kind::ProxyCtrl, State::START, now_ns()));
        assert_eq!(emitted(Kind::NetPlugin), before + 1);
        assert_eq!(ring::pop(&header.cursor, slots), Some(record));
        assert_eq!(ring::pop(&header.cursor, slots), None);
        header.lease.release(lease);
        assert!(!wants(Kind::NetPlugin));
    }

    #[test]
    fn a_lapsed_lease_and_a_full_ring() {
        let _turn = turn();
        let (header, slots) = (pages().unwrap().header(), pages().unwrap().ring());
        let lease = arm(Kind::NetPlugin.bit());
        let late = Record::new(
            Kind::NetPlugin,
            State::START,
            now_ns() + 2 * ringsight_records::pages::LEASE_NS,
        );
        emit(&late);
        assert_eq!(ring::pop(&header.cursor, slots), None, "nobody reads any more");
        let lost_before = lost(Kind::NetPlugin);
        for _ in 0..slots.len() + 3 {
            emit(&Record::new(Kind::NetPlugin, State::START, now_ns()));
        }
        assert_eq!(lost(Kind::NetPlugin), lost_before + 3);
        assert_eq!(
            std::iter::from_fn(|| ring::pop(&header.cursor, slots)).count(),
            slots.len()
        );
        header.lease.release(lease);
    }

    #[test]
    fn a_sparse_record_is_for_the_probes_where_the_ring_does_not_take_it() {
        let _turn = turn();
        let (header, slots) = (pages().unwrap().header(), pages().unwrap().ring());
        let of = |time_ns| Record::new(Kind::Graph, State::START, time_ns);
        let before = emitted(Kind::Graph);
        assert!(!ring_takes(&of(now_ns()), true), "nobody has armed it");
        let lease = arm(Kind::Graph.bit());
        assert!(ring_takes(&of(now_ns()), true));
        let late = now_ns() + 2 * ringsight_records::pages::LEASE_NS;
        assert!(!ring_takes(&of(late), true), "nobody reads it any more");
        for _ in 1..slots.len() {
            emit(&of(now_ns()));
        }
        assert!(!ring_takes(&of(now_ns()), true), "it is full");
        assert_eq!(emitted(Kind::Graph), before + slots.len() as u64 + 3);
        assert_eq!(
            std::iter::from_fn(|| ring::pop(&header.cursor, slots)).count(),
            slots.len()
        );
        header.lease.release(lease);
    }

    #[test]
    fn descriptions_are_found_by_number_until_overwritten() {
        let _turn = turn();
        let op = next_op();
        describe(&Description {
            op,
            count: 5,
            ..Default::default()
        });
        set_times(op, [(Time::DeviceEnd, 9)]);
        let found = pages().unwrap().description(op).unwrap();
        assert_eq!((found.count, found.device_end_ns), (5, 9));
        let later = op + ringsight_records::pages::DESCRIPTION_ENTRIES as u32;
        describe(&Description {
            op: later,
            ..Default::default()
        });
        assert_eq!(pages().unwrap().description(op), None);
        set_times(op, [(Time::DeviceEnd, 11)]);
        assert_eq!(pages().unwrap().description(later).unwrap().device_end_ns, 0);
    }

    #[test]
    fn what_is_under_way_keeps_its_description() {
        let _turn = turn();
        let describe = |op| {
            describe(&Description {
                op,
                ..Default::default()
            });
        };
        let stays = next_op();
        describe(stays);
        for _ in 0..3 * ringsight_records::pages::DESCRIPTION_ENTRIES {
            let op = next_op();
            describe(op);
            set_times(op, [(Time::DeviceEnd, 1)]);
        }
        assert!(pages().unwrap().description(stays).is_some());
        set_times(stays, [(Time::DeviceEnd, 1)]);
    }

    #[test]
    fn the_header_tells_this_process() {
        let _turn = turn();
        let header = pages().unwrap().header();
        let of_header = header.pid.load(Ordering::Relaxed);
        assert_eq!((of_header, pid()), (std::process::id(), std::process::id()));
        assert_eq!(header.library_version.load(Ordering::Relaxed), 23007);
        let (major, minor, patch) = (
            LIBRARY_VERSION / 10_000,
            LIBRARY_VERSION / 100 % 100,
            LIBRARY_VERSION % 100,
        );
        assert_eq!(VERSION_BANNER, format!("NCCL version {major}.{minor}.{patch}"));
        assert!(header.start_time.load(Ordering::Relaxed) > 0);
        assert!(!ringsight_records::pages::text(&header.host()).is_empty());
    }

    #[test]
    fn a_forked_child_has_pages_of_its_own() {
        let _turn = turn();
        let parent = emitted(Kind::Graph);
        // SAFETY: the child calls atomics, memfd, mmap and `_exit` only; it returns into no test harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let inherited = pages().is_some() || pid() != std::process::id();
            emit(&Record::new(Kind::Graph, State::START, 0));
            let made = prepare().is_ok();
            emit(&Record::new(Kind::Graph, State::START, 0));
            let own = pages().is_some() && pid() == std::process::id();
            let code = i32::from(inherited || !made || !own || emitted(Kind::Graph) != 1);
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child saw or wrote the parent's pages");
        assert_eq!(emitted(Kind::Graph), parent);
    }
}
