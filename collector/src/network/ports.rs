//! Times in which ports of network devices were down, as the kernel says.

use std::{collections::BTreeMap, sync::Arc};

use ringsight_exporters::model::{SpanId, TraceId};

use super::COUNTED;

/// What was lost while a port was down is noticed by so much later: connections that wait for their peer probe the path after a
/// second, and leave it when nothing answers for another one (the library's defaults). What tells of the port itself comes at once.
pub(super) const NOTICED_NS: u64 = 2_000_000_000;

/// A time in which a port was down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Outage {
    /// Number of the port.
    pub(super) port: u32,
    pub(super) since_ns: u64,
    /// `None`: it still is.
    pub(super) until_ns: Option<u64>,
}

/// One that lasts.
#[derive(Clone, Copy, Debug)]
struct Down {
    since_ns: u64,
    /// What connections failed with because of it: the first such failure's span.
    failover: Option<(TraceId, SpanId)>,
}

/// All of them; names are those of devices.
#[derive(Debug, Default)]
pub(super) struct Ports {
    down: BTreeMap<(Arc<str>, u32), Down>,
    /// The last one of each port that is over.
    over: BTreeMap<(Arc<str>, u32), Outage>,
}

impl Ports {
    /// A port goes down; whether it was up, as far as is known.
    pub(super) fn down(&mut self, device: &Arc<str>, port: u32, since_ns: u64) -> bool {
        let key = (Arc::clone(device), port);
        if self.down.len() >= COUNTED || self.down.contains_key(&key) {
            return false;
        }
        let failover = None;
        self.down.insert(key, Down { since_ns, failover });
        true
    }

    /// It is up again: since when it was down, and what failed with it.
    pub(super) fn up(
        &mut self,
        device: &Arc<str>,
        port: u32,
        until_ns: u64,
    ) -> Option<(u64, Option<(TraceId, SpanId)>)> {
        let key = (Arc::clone(device), port);
        let Down { since_ns, failover } = self.down.remove(&key)?;
        if self.over.len() < COUNTED || self.over.contains_key(&key) {
            let outage = Outage {
                port,
                since_ns,
                until_ns: Some(until_ns),
            };
            self.over.insert(key, outage);
        }
        Some((since_ns, failover))
    }

    pub(super) fn is_down(&self, device: &Arc<str>, port: u32) -> bool {
        self.down.contains_key(&(Arc::clone(device), port))
    }

    /// What a path that broke at a time may have broken with: of its device's ports those that are down, and those that were shortly
    /// before. By the kernel's probes it may be known already that a port is up again, when a process's record of the break comes.
    pub(super) fn about(&self, device: &Arc<str>, broken_ns: u64) -> Vec<Outage> {
        let all = (Arc::clone(device), 0)..=(Arc::clone(device), u32::MAX);
        let is_recent = |outage: &&Outage| {
            let until_ns = outage.until_ns.unwrap_or(u64::MAX);
            until_ns.saturating_add(NOTICED_NS) >= broken_ns
        };
        let lasting = self.down.range(all.clone()).map(|((_, port), down)| Outage {
            port: *port,
            since_ns: down.since_ns,
            until_ns: None,
        });
        self.over
            .range(all)
            .map(|(_, outage)| outage)
            .filter(is_recent)
            .copied()
            .chain(lasting)
            .filter(|outage| outage.since_ns <= broken_ns.saturating_add(NOTICED_NS))
            .collect()
    }

    /// Connections failed with a port that is down.
    pub(super) fn failed_with(&mut self, device: &Arc<str>, port: u32, failover: (TraceId, SpanId)) {
        if let Some(down) = self.down.get_mut(&(Arc::clone(device), port)) {
            down.failover.get_or_insert(failover);
        }
    }

    /// Lets go of all: device, port, since when it is down, what failed with it.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (Arc<str>, u32, u64, Option<(TraceId, SpanId)>)> {
        self.over.clear();
        std::mem::take(&mut self.down)
            .into_iter()
            .map(|((device, port), down)| (device, port, down.since_ns, down.failover))
    }
}
