//! Targets that have, or write, more than the collector keeps: as fast as the ring takes it.

use std::{path::Path, thread, time::Duration};

use anyhow::Result;
use ringsight_records::{
    Kind, Record, State,
    pages::{CAPTURED, Communicator},
    ring,
};

use crate::{
    Act, map_library,
    pages::{Own, now_ns},
};

/// Its communicator, which is none of the target's beside it.
const OWN: u64 = 99;

/// Calls `write` with 0, 1, 2 and so on, and puts the record that it returns into the ring, once a reader wants it and has room.
fn without_end(library: &Path, write: impl Fn(&Own, u32) -> Record + Send + 'static) -> Result<Act> {
    map_library(library)?;
    let pages = Own::make()?;
    pages.change_communicator(|communicator| communicator.id = OWN);
    thread::spawn(move || {
        let view = pages.view();
        let header = view.header();
        for n in 0.. {
            let record = write(&pages, n);
            let takes = || {
                let is_wanted = record.kind().is_some_and(|kind| header.lease.wants(kind));
                is_wanted && ring::push(&header.cursor, view.ring(), &record)
            };
            while !takes() {
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
    Ok(Box::new(|_| Ok("done".to_owned())))
}

fn record(kind: Kind, state: State) -> Record {
    Record {
        comm: OWN,
        ..Record::new(kind, state, now_ns())
    }
}

/// H6: the first operation begins proxy operations without end.
pub(crate) fn proxies(library: &Path) -> Result<Act> {
    without_end(library, |_, n| Record {
        op: 1,
        seq: 1,
        // Now equal ones, now ever new ones.
        peer: if n.is_multiple_of(2) { 1 } else { n.cast_signed() },
        ..record(Kind::ProxyOp, State::START)
    })
}

/// Puts a communicator in place of another one, and returns the record that says so.
fn enter(pages: &Own, n: u32, change: impl FnOnce(&mut Communicator)) -> Record {
    let view = pages.view();
    let slots = view.communicators();
    let number = n as usize % slots.len();
    slots[number].free();
    // SAFETY: plain integers; zero is a value of each.
    let mut communicator: Communicator = unsafe { std::mem::zeroed() };
    communicator.init_start_ns = 1 + u64::from(n);
    change(&mut communicator);
    assert!(slots[number].claim(&communicator), "it was freed just now");
    Record {
        comm: communicator.id,
        rank: communicator.rank,
        value: number as u64,
        ..record(Kind::CommInit, State::STOP)
    }
}

/// H9: ever new communicators, none of which is destroyed.
pub(crate) fn communicators(library: &Path) -> Result<Act> {
    without_end(library, |pages, n| {
        enter(pages, n, |communicator| {
            (communicator.id, communicator.ranks) = (100 + u64::from(n), 8);
        })
    })
}

/// H9: one communicator in which the process has ever more ranks.
pub(crate) fn ranks(library: &Path) -> Result<Act> {
    without_end(library, |pages, n| {
        enter(pages, n, |communicator| {
            (communicator.id, communicator.rank, communicator.ranks) = (100, n, u32::MAX);
        })
    })
}

/// H9: graphs that are destroyed in the far future.
pub(crate) fn graphs(library: &Path) -> Result<Act> {
    without_end(library, |_, n| Record {
        time_ns: u64::MAX,
        op: n,
        ..record(Kind::Graph, State::STOP)
    })
}

/// H10: communicators that have more ranks than there are processors on earth, and an operation of each.
pub(crate) fn many_ranks(library: &Path) -> Result<Act> {
    map_library(library)?;
    let pages = Own::make()?;
    for (id, ranks) in [(100, 100_000_000), (101, u32::MAX), (102, 2)] {
        pages.change_communicator(|communicator| (communicator.id, communicator.ranks) = (id, ranks));
        for op in [id as u32, CAPTURED | id as u32] {
            pages.view().slot(op).write(&ringsight_records::Description {
                comm: id,
                seq: 1,
                op,
                ranks,
                launch_end_ns: now_ns(),
                ..Default::default()
            });
        }
    }
    Ok(Box::new(move |_| {
        let _ = &pages;
        Ok("done".to_owned())
    }))
}
