//! Looking at a process without watching it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use ringsight_records::{
    Description, DeviceClock,
    connection::{Connection, ConnectionSlot},
    pages::{CommSlot, Communicator, Pages},
    proxies::{ProxySlot, ProxyState},
    verdicts::GivenVerdict,
};

use crate::{
    ask,
    error::AttachError,
    host,
    limits::{ANSWER_TIME, CpuBudget, DESCRIPTORS_TIME, Limit},
    pages::Mapped,
    procfs::{ProcessDirectory, status_field},
    target::process_error,
};

/// What the shared pages of a process say at one moment.
#[derive(Clone, Debug, Default)]
pub struct Look {
    /// `ncclGetVersion` number as the library itself tells it; 0 if it has made no pages yet.
    pub library_version: u32,
    /// The host as the process's library names it to the other ranks; empty if it has not said.
    pub host: String,
    /// Live communicators.
    pub communicators: Vec<Communicator>,
    /// Clocks of devices, by their numbers, as far as the process has found them: it does so for a reader that is attached.
    pub clocks: Vec<(i32, DeviceClock)>,
    /// Operations that are described: those on their way, the latest finished ones, captured ones. In no order.
    pub operations: Vec<Description>,
    /// Ends of connections between nodes that go over RDMA and had an operation.
    pub connections: Vec<Connection>,
    /// Proxy operations that are under way.
    pub proxies: Vec<ProxyState>,
    /// The last verdicts of its watchdog, in their order.
    pub verdicts: Vec<GivenVerdict>,
}

/// Reads the pages of `pid`, which may be watched by somebody else meanwhile. A library makes them with its first
/// communicator; before, there is nothing to read.
///
/// # Errors
/// No such process, no right to look, or pages that cannot be read.
pub fn look(pid: u32) -> Result<Look, AttachError> {
    ask::about(pid, ANSWER_TIME, move || look_at(pid)).unwrap_or(Err(AttachError::Limit {
        pid,
        limit: Limit::AnswerTime,
    }))
}

fn look_at(pid: u32) -> Result<Look, AttachError> {
    let directory = ProcessDirectory::open(pid).map_err(|error| process_error(pid, "fd", &error))?;
    let budget = CpuBudget::of(DESCRIPTORS_TIME);
    let Some(mapped) = Mapped::find_among_all(&directory, budget)? else {
        return Ok(Look::default());
    };
    Ok(Look::at(&mapped))
}

impl Look {
    /// What pages say now.
    pub(crate) fn at(mapped: &Mapped) -> Self {
        let pages = mapped.view();
        let (library_version, host) = mapped.identity();
        Self {
            library_version,
            host,
            communicators: communicators(&pages),
            clocks: (0..)
                .zip(&pages.header().devices)
                .filter_map(|(device, slot)| Some((device, slot.read()?)))
                .collect(),
            operations: pages.descriptions().collect(),
            connections: pages
                .connections()
                .iter()
                .filter_map(ConnectionSlot::read)
                .collect(),
            proxies: pages.proxies().iter().filter_map(ProxySlot::read).collect(),
            verdicts: pages.verdicts().collect(),
        }
    }
}

/// Longest time that looking for children may take: it is done for a message.
const CHILDREN_TIME: Duration = Duration::from_millis(500);
/// Children that are named.
const CHILDREN: usize = 1024;

/// Processes below `pid` that have a communicator of a library of ours, by number: the ranks of a launcher. Only the first are
/// found if there are very many processes.
#[must_use]
pub fn ranks_below(pid: u32) -> Vec<u32> {
    let begun = Instant::now();
    let is_over = || begun.elapsed() >= CHILDREN_TIME;
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for child in host::processes().unwrap_or_default() {
        if is_over() {
            break;
        }
        let status = ProcessDirectory::open(child).and_then(|directory| directory.text("status"));
        let parent = status
            .ok()
            .and_then(|status| status_field(&status, "PPid:")?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(child);
        }
    }
    let (mut ranks, mut below) = (BTreeSet::new(), children.remove(&pid).unwrap_or_default());
    while let Some(child) = below.pop()
        && ranks.len() < CHILDREN
        && !is_over()
    {
        below.extend(children.remove(&child).unwrap_or_default());
        if look(child).is_ok_and(|look| !look.communicators.is_empty()) {
            ranks.insert(child);
        }
    }
    ranks.into_iter().collect()
}

fn communicators(pages: &Pages<'_>) -> Vec<Communicator> {
    pages
        .communicators()
        .iter()
        .filter(|slot| slot.is_live())
        .filter_map(CommSlot::read)
        .collect()
}
