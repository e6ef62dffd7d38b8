//! Looking at a process without watching it.

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
    limits::{ANSWER_TIME, CpuBudget, DESCRIPTORS_TIME, Limit},
    pages::Mapped,
    procfs::ProcessDirectory,
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
    ask::within(ANSWER_TIME, move || look_at(pid)).unwrap_or(Err(AttachError::Limit {
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

fn communicators(pages: &Pages<'_>) -> Vec<Communicator> {
    pages
        .communicators()
        .iter()
        .filter(|slot| slot.is_live())
        .filter_map(CommSlot::read)
        .collect()
}
