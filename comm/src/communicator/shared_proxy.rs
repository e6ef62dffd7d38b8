//! Communicators that share a proxy: one that was made with `splitShare` or `shrinkShare`, and its children.
//!
//! They share the proxy's two threads and its sockets for requests. Connections, memory, abort words and bootstraps are
//! each communicator's own, so each may be aborted without harm to the others. The proxy ends with the last of them.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, Ordering},
};

use ringsight_comm_base::{error::Result, sync::lock};
use ringsight_kernels::AbortWord;

use crate::{
    bootstrap::Bootstrap,
    checks::Checks,
    device::Device,
    launch::OutstandingProxyOps,
    proxy::{Connector, Proxy, ProxyConfig, affinity::Cpus},
    topology::Topology,
    transport::{
        gpu_direct::{SlotDemand, SlotPool},
        rdma::{self, NetworkChoice},
    },
};

/// A proxy and the communicators of this rank that use it.
pub(super) struct SharedProxy {
    pub(super) proxy: Arc<Proxy>,
    pub(super) outstanding: Arc<OutstandingProxyOps>,
    /// The proxy's abort word: set when no member is left.
    abort: Arc<AbortWord>,
    members: Arc<Members>,
}

/// Who hears of failures.
#[derive(Default)]
struct Members(Mutex<Vec<Member>>);

struct Member {
    /// As in [`crate::proxy::message::Endpoint::comm`].
    domain: u64,
    id: u64,
    checks: Arc<Checks>,
}

impl Members {
    fn failed(&self, comm: u64, text: &str) {
        for member in &*lock(&self.0) {
            if member.domain == comm || member.id == comm {
                member.checks.connection_failed(text.to_owned());
            }
        }
    }
}

impl SharedProxy {
    /// A proxy of its own for the communicator of `bootstrap`.
    pub(super) fn new(
        bootstrap: &Bootstrap,
        slot_bytes: usize,
        (choice, class): (NetworkChoice, Option<i32>),
    ) -> Result<Arc<Self>> {
        let (outstanding, members) = (
            Arc::new(OutstandingProxyOps::default()),
            Arc::new(Members::default()),
        );
        let abort = Arc::new(AbortWord::default());
        let proxy = Proxy::new(ProxyConfig {
            rank: bootstrap.rank(),
            ranks: bootstrap.ranks(),
            cookie: bootstrap.cookie(),
            listen: bootstrap.local_address(),
            slot_bytes,
            cpus: Cpus::from_environment()?,
            rdma: rdma::from_environment(choice, class)?,
            abort: abort.clone(),
            on_completed: {
                let outstanding = outstanding.clone();
                Arc::new(move |op, replay| outstanding.completed(op, replay))
            },
            on_error: {
                let members = members.clone();
                Arc::new(move |comm, text| members.failed(comm, &text))
            },
        })?;
        Ok(Arc::new(Self {
            proxy: Arc::new(proxy),
            outstanding,
            abort,
            members,
        }))
    }

    /// Tells the proxy which RDMA ports are this rank's among those of its node, and makes slots in the memory of its GPU, number `number`,
    /// which is current, for connections on `channels` channels. The first communicator's choice is that of all.
    pub(super) fn choose_ports(
        &self,
        topology: &Topology,
        (device, number): (&dyn Device, i32),
        channels: u32,
    ) {
        if self.proxy.knows_ports() {
            return;
        }
        if let Some(rdma) = &self.proxy.config().rdma {
            let local = topology.local_ranks();
            let buses: Vec<_> = local
                .iter()
                .map(|rank| topology.info(*rank).bus.as_str())
                .collect();
            let ports = rdma::ports_of(&rdma.net, &buses, topology.local_rank() as usize);
            let demand = SlotDemand {
                channels: channels as usize,
                peers: topology.ranks() as usize - local.len(),
                slot_bytes: self.proxy.config().slot_bytes,
            };
            let bus = topology.info(topology.rank()).bus.as_str();
            let direct = (demand.peers > 0)
                .then(|| SlotPool::new(&rdma.net, &ports, (device, number, bus), demand))
                .flatten();
            self.proxy.use_ports(ports, direct);
        }
    }

    /// Whether connections to other nodes find out by themselves whether their peers answer: over RDMA whose paths are survived they do, and
    /// those that have to go over sockets ask.
    pub(super) fn knows_silence(&self) -> bool {
        let rdma = self.proxy.config().rdma.as_ref();
        rdma.is_some_and(|rdma| rdma.port_health.settings().enabled)
    }

    /// Takes a communicator out; whether others are left, who keep the proxy.
    fn leave(&self, id: u64) -> bool {
        let mut members = lock(&self.members.0);
        let index = members.iter().position(|member| member.id == id);
        let gone = index.map(|index| members.swap_remove(index));
        let others = !members.is_empty();
        drop(members);
        drop(gone); // not under the lock: it may be the last reference
        if !others {
            self.abort.set();
        }
        self.outstanding.forget(id);
        others
    }
}

/// A communicator's use of its proxy; it leaves when this is dropped, if not before.
pub(super) struct Membership {
    pub(super) proxy: Arc<SharedProxy>,
    id: u64,
    left: AtomicBool,
}

impl Membership {
    /// Enters a communicator, whose connections are told from others' by `domain`: 0 or its id.
    pub(super) fn new(proxy: &Arc<SharedProxy>, domain: u64, id: u64, checks: &Arc<Checks>) -> Self {
        let checks = checks.clone();
        lock(&proxy.members.0).push(Member { domain, id, checks });
        Self {
            proxy: proxy.clone(),
            id,
            left: AtomicBool::new(false),
        }
    }

    /// Leaves: the proxy gives up what it still does for this communicator.
    pub(super) fn leave(&self, connector: &Connector) {
        // Relaxed: it only matters that one of the callers does it.
        if !self.left.swap(true, Ordering::Relaxed) && self.proxy.leave(self.id) {
            connector.release();
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if !self.left.swap(true, Ordering::Relaxed) {
            self.proxy.leave(self.id);
        }
    }
}
