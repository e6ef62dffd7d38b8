//! The records of this process, as a collector gets them.

use std::{
    sync::{
        Arc, Mutex,
        mpsc::{RecvTimeoutError, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use ringsight_comm::observe;
use ringsight_records::{Description, Kind, Record, State, pages::Reader, ring};

use super::host;

/// The armed ring of this process.
pub struct Watch {
    lease: u64,
    /// Kinds, a bit each.
    kinds: u64,
    /// Emitted by kind when the watch began.
    before: Vec<u64>,
    /// Keeps the lease alive and reads the ring until told to end.
    reader: (Sender<()>, JoinHandle<()>),
    records: Arc<Mutex<Vec<Record>>>,
}

fn counters() -> Vec<u64> {
    Kind::ALL.iter().map(|kind| observe::emitted(*kind)).collect()
}

impl Watch {
    pub fn begin() -> Self {
        Self::begin_for(Kind::EVERY)
    }

    /// Watches some kinds.
    pub fn begin_for(kinds: u64) -> Self {
        observe::prepare().unwrap();
        let pages = observe::pages().unwrap();
        let header = pages.header();
        // Before the ring is armed: what comes between is read and counted, and dense kinds are counted only from then on.
        let before = counters();
        let lease = header
            .lease
            .acquire(
                &Reader::new(std::process::id(), 1, 0),
                observe::now_ns(),
                kinds,
                |_| false,
            )
            .expect("nobody else watches this process");
        let (end, ended) = channel::<()>();
        let records: Arc<Mutex<Vec<Record>>> = Arc::default();
        let read = records.clone();
        let reader = std::thread::spawn(move || {
            let mut renewed = Instant::now();
            loop {
                let ends = ended.recv_timeout(Duration::from_millis(1));
                let new = std::iter::from_fn(|| ring::pop(&header.cursor, pages.ring()));
                read.lock().unwrap().extend(new);
                if ends != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                if renewed.elapsed() > Duration::from_millis(500) {
                    assert!(header.lease.renew(lease, observe::now_ns()));
                    renewed = Instant::now();
                }
            }
        });
        Self {
            lease,
            kinds,
            before,
            reader: (end, reader),
            records,
        }
    }

    /// What has come so far.
    pub fn so_far(&self) -> Vec<Record> {
        self.records.lock().unwrap().clone()
    }

    /// Takes what has come; checks that it is all that was counted, each record of this version.
    pub fn end(self) -> Vec<Record> {
        drop(self.reader.0);
        self.reader.1.join().expect("the lease was kept");
        let records = std::mem::take(&mut *self.records.lock().unwrap());
        observe::pages().unwrap().header().lease.release(self.lease);
        for ((kind, before), after) in Kind::ALL.iter().zip(self.before).zip(counters()) {
            if self.kinds & kind.bit() == 0 {
                continue;
            }
            assert_eq!(
                of(&records, *kind).count() as u64,
                after - before,
                "{kind} records and their counter"
            );
            assert_eq!(observe::lost(*kind), 0);
        }
        assert!(
            records
                .iter()
                .all(|record| record.version() == ringsight_records::VERSION)
        );
        assert!(
            records.iter().all(|record| record.pid == std::process::id()),
            "originator pid"
        );
        records
    }
}

pub fn of(records: &[Record], kind: Kind) -> impl Iterator<Item = &Record> {
    records.iter().filter(move |record| record.kind() == Some(kind))
}

pub fn count(records: &[Record], kind: Kind, state: State) -> usize {
    of(records, kind).filter(|record| record.state == state).count()
}

pub fn description(op: u32) -> Description {
    observe::pages().unwrap().description(op).expect("described")
}

/// Waits until `count` more graphs than `before` came or went: they go on a thread of the device.
pub fn graphs_settle(before: u64, count: u64) {
    let end = Instant::now() + Duration::from_secs(20);
    while observe::emitted(Kind::Graph) < before + count {
        assert!(Instant::now() < end, "graphs are not given up");
        std::thread::yield_now();
    }
}

/// Tests of the one ring of this process take turns.
pub fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    host();
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
