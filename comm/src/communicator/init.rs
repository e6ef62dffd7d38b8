//! Making a communicator: rendezvous, what the ranks agree on, connections.

use std::sync::{Arc, Mutex, OnceLock, atomic::AtomicBool};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    fork, log, release,
    sync::lock,
};
use ringsight_records::{Kind, State, pages};

use super::{
    Buffers, Communicator, Config, Planner, Registrations, device_fifos,
    lifecycle::Lifecycle,
    losses::{self, Losses},
    negotiation::{NegotiatedParameters, Proposal},
    peer_memory::{self, devices_near},
    reduce_ops::ReduceOps,
    sequence::Sequences,
    shared_proxy::{Membership, SharedProxy},
    windows::Windows,
};
use crate::{
    bootstrap::{self, Bootstrap, UniqueId, fnv1a},
    buffer_exchange::{BufferExchange, Inbox, InboxSender},
    checks::{Checks, Post},
    device::device,
    launch::{LaunchContext, LaunchQueue, Order, Posting, SubmittedPlans},
    observe,
    plan::Capabilities,
    progress::{ArrivalLog, RetireQueue},
    proxy::{Connector, Proxy},
    topology::{RankInfo, Topology},
    transport::{RingConnections, rdma::NetworkChoice},
    watchdog,
};

/// A communicator that is to be made.
#[derive(Clone)]
pub struct InitJob {
    /// What its handle stands for.
    pub life: Arc<Lifecycle>,
    /// The 128 bytes that the ranks share, or several of them, the same in the same order on all ranks.
    pub ids: Vec<[u8; UniqueId::BYTES]>,
    /// Ranks.
    pub ranks: u32,
    /// This one.
    pub rank: u32,
    /// Device number.
    pub device: i32,
    /// Choices.
    pub config: Config,
}

/// The id of a communicator: the same on every rank, never 0. Logs and traces show it, so that nothing secret may go into it.
fn communicator_id(ids: &[[u8; UniqueId::BYTES]], ranks: u32) -> u64 {
    let ids = ids.iter().flat_map(UniqueId::public_part);
    let bytes: Vec<u8> = ids.chain(ranks.to_le_bytes()).collect();
    fnv1a(&bytes).max(1)
}

/// What sends control messages over `bootstrap`.
fn post_over(bootstrap: &Arc<Bootstrap>) -> Post {
    let network = Arc::downgrade(bootstrap);
    Box::new(move |peer, bytes| {
        network.upgrade().is_some_and(|bootstrap| {
            match peer {
                Some(peer) => bootstrap.post_control(peer, bytes),
                None => bootstrap.post_control_to_all(bytes),
            }
            .is_ok()
        })
    })
}

/// Who is told of control messages: the checks, the inbox_sender, and `also`.
fn hear(
    bootstrap: &Bootstrap,
    checks: &Arc<Checks>,
    inbox_sender: InboxSender,
    also: impl Fn(u32, &[u8]) + Send + Sync + 'static,
) {
    let checks = checks.clone();
    bootstrap.on_control(Arc::new(move |from, bytes| {
        checks.control(from, bytes);
        inbox_sender.control(from, bytes);
        also(from, bytes);
    }));
}

/// The checks of a rank whose control messages go over `bootstrap`; what they find ends up in `life`.
fn checks_over(bootstrap: &Arc<Bootstrap>, life: &Arc<Lifecycle>) -> Arc<Checks> {
    let life = Arc::clone(life);
    let checks = Checks::new(
        bootstrap.rank(),
        bootstrap.ranks(),
        post_over(bootstrap),
        Box::new(move |error| life.fail(error)),
    );
    bootstrap.on_control({
        let checks = checks.clone();
        Arc::new(move |from, bytes| checks.control(from, bytes))
    });
    checks
}

impl InitJob {
    /// Makes the communicator; returns when all ranks have come.
    ///
    /// # Errors
    /// Bad arguments, a rank that does not come or dies, or the system.
    pub fn run(&self) -> Result<Arc<Communicator>> {
        let making = Making {
            life: &self.life,
            parent: 0,
            device: self.device,
            config: &self.config,
            share: None,
            start_ns: observe::now_ns(),
            watchdog: watchdog::Settings::read(&self.config.name)?,
        };
        let mut ids = self
            .ids
            .iter()
            .map(UniqueId::from_bytes)
            .collect::<std::result::Result<Vec<_>, _>>()?;
        if ids.iter().any(|id| id.fixed) {
            // NCCL_COMM_ID names one root, whatever number of ids was asked for.
            ids.truncate(1);
        }
        making.enter_device()?;
        let context = |error: Error| error.within(&format!("rank {} of {}", self.rank, self.ranks));
        let bootstrap = Bootstrap::init_scalable(
            &ids,
            self.rank,
            self.ranks,
            self.life.abort_word().clone(),
            bootstrap::default_timeout()?,
        )
        .map_err(|error| context(losses::with_want(error.into())))?;
        making
            .complete(bootstrap, communicator_id(&self.ids, self.ranks))
            .map_err(context)
    }
}

/// What making a communicator takes, whether it is the first or comes of another one.
pub(super) struct Making<'a> {
    pub(super) life: &'a Arc<Lifecycle>,
    /// Id of the communicator that it comes of, or 0.
    pub(super) parent: u64,
    pub(super) device: i32,
    pub(super) config: &'a Config,
    /// The proxy that it may share, and its ranks as that one counts them.
    pub(super) share: Option<(Arc<SharedProxy>, Arc<[u32]>)>,
    /// When the call began.
    pub(super) start_ns: u64,
    /// Read before the others are met: who cannot read them does not come. `None` if the watchdog is off.
    pub(super) watchdog: Option<watchdog::Settings>,
}

impl Making<'_> {
    /// Chooses the device for the thread that makes it, and makes the process's shared pages.
    pub(super) fn enter_device(&self) -> Result<()> {
        device()?.set_current(self.device)?;
        if let Err(error) = observe::prepare() {
            // Being observed is a service, not a condition.
            tracing::warn!(
                target: log::INIT,
                "shared pages cannot be made, this process cannot be fully observed: {error}"
            );
        }
        Ok(())
    }

    /// Makes it over a bootstrap of its ranks; returns when all ranks are connected.
    pub(super) fn complete(&self, bootstrap: Bootstrap, id: u64) -> Result<Arc<Communicator>> {
        let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
        if rank == 0 {
            log::version(release::claimed_version());
        }
        let device = self.device;
        tracing::info!(
            target: log::INIT,
            "ncclCommInitRank rank {rank} nranks {ranks} cudaDev {device} commId {id:#x} - Init START"
        );
        let bootstrap = Arc::new(bootstrap);
        let losses = Losses::of(&bootstrap);
        let made = self.connect(&bootstrap, id, &losses);
        made.map_err(|error| losses.reason(error))
    }

    /// Agrees on the proposals and connects.
    fn connect(&self, bootstrap: &Arc<Bootstrap>, id: u64, losses: &Losses) -> Result<Arc<Communicator>> {
        let (rank, ranks, device) = (bootstrap.rank(), bootstrap.ranks(), self.device);
        let abort = self.life.abort_word().clone();
        let checks = checks_over(bootstrap, self.life);
        let proposals: Vec<Proposal> = bootstrap
            .all_gather(&Proposal::mine(self.config, self.share.is_some())?.to_bytes())?
            .iter()
            .map(|bytes| {
                Proposal::from_bytes(bytes)
                    .ok_or_else(|| Error::new(ResultCode::RemoteError, "a rank's proposals cannot be read"))
            })
            .collect::<Result<_>>()?;
        let NegotiatedParameters {
            channels,
            device_fifo_channels,
            slot_bytes,
            work_fifo_depth,
            share,
            one_shot,
            limits,
        } = Proposal::agree(&proposals);
        let faults = self.life.faults().clone();
        let shared = self.share.as_ref().filter(|_| share);
        let (shared, domain, proxy_ranks) = match shared {
            None => {
                let choice =
                    NetworkChoice::parse(self.config.net_name.as_deref()).unwrap_or(NetworkChoice::Any);
                (
                    SharedProxy::new(bootstrap, slot_bytes, (choice, self.config.traffic_class))?,
                    0,
                    (0..ranks).collect(),
                )
            }
            Some((shared, proxy_ranks)) => (shared.clone(), id, proxy_ranks.clone()),
        };
        // That of a shared proxy stands.
        let slot_bytes = shared.proxy.config().slot_bytes;
        let membership = Membership::new(&shared, domain, id, &checks);
        let info = RankInfo::local(
            rank,
            self.device,
            shared.proxy.address(),
            observe::LIBRARY_VERSION,
        )
        .at(crate::device::device()?.bus_id(self.device));
        let topology = Arc::new(Topology::exchange(bootstrap, info)?);
        let device_fifos = device_fifo_channels
            .map(|wanted| device_fifos::connect(bootstrap, &topology, wanted, slot_bytes))
            .transpose()?
            .flatten();
        let arena = device_fifos.as_ref().map(|fifos| fifos.arena.clone());
        // One number for all ranks: what is asked for over GPUs' memory where that is all there is.
        let channels = device_fifos
            .as_ref()
            .filter(|fifos| fifos.is_whole)
            .map_or(channels, |fifos| fifos.arena.channels() as u32);
        shared.choose_ports(&topology, (&**crate::device::device()?, device), channels);
        let patience = bootstrap::default_timeout()?;
        let connector = Connector::new(topology.clone(), shared.proxy.clone(), abort.clone(), patience)
            .over_shared_proxies(domain, proxy_ranks.clone())
            .with_arena(arena);
        topology.log_rings(channels);
        let connected = connect_rings(bootstrap, &connector, channels);
        if connected.is_err() {
            membership.leave(&connector);
        }
        let rings = connected?;
        if shared.knows_silence() {
            // The interface that ranks find each other by may be a port that operations survive.
            bootstrap.bear_silence();
        }
        let peers_ended_well = Arc::new(AtomicBool::new(false));
        // Before the others may be ready.
        let inbox = Inbox::new();
        let inbox_sender = inbox.sender();
        hear(bootstrap, &checks, inbox_sender.clone(), |_, _| {});
        let most = self.config.max_channels;
        let peers = peer_memory::connect(
            bootstrap,
            &topology,
            &rings,
            &peers_ended_well,
            || {
                if let Some(fifos) = &device_fifos {
                    fifos.leave_unused();
                }
            },
            most,
        )
        .inspect_err(|_| membership.leave(&connector))?;
        let (peers, apart) = match peers {
            Ok(peers) => (Some(peers), peer_memory::Apart::new()),
            Err(apart) => (None, apart),
        };
        let exchange = peers
            .as_ref()
            .filter(|(peers, _)| {
                peers.foreign != 0 && (limits.use_copy_engines(ranks) || !limits.never_zero_copy())
            })
            .map(|(peers, mapped)| {
                let near = devices_near(&topology, peers);
                BufferExchange::new(self.device, peers, near, mapped, post_over(bootstrap), inbox)
            })
            .transpose()
            .inspect_err(|_| membership.leave(&connector))?;
        let peers = peers.map(|(peers, _)| peers);
        let arrivals = (topology.nodes() > 1).then(Arc::<ArrivalLog>::default);
        let watch = self.watch(
            id,
            (bootstrap, &shared.proxy),
            &topology,
            (&checks, inbox_sender),
            arrivals.clone(),
        )?;
        losses.hand_over(&checks, watch.as_deref());
        let journal = (topology.nodes() > 1)
            .then(|| crate::device::device()?.new_journal())
            .transpose()
            .inspect_err(|_| membership.leave(&connector))?;
        let posting = Posting::new(id, (&shared.proxy, &shared.outstanding), &abort, journal);
        // For kernels among peers: all others are no better for it.
        let launcher = peers
            .is_some()
            .then(|| crate::device::device()?.new_launcher())
            .transpose()
            .inspect_err(|_| membership.leave(&connector))?
            .flatten();
        let retired: Arc<RetireQueue> = Arc::default();
        let whole_fifos = device_fifos.as_ref().filter(|fifos| fifos.is_whole);
        let capabilities = Capabilities {
            rank,
            ranks,
            topology: topology.clone(),
            channels: rings.len(),
            slot_bytes,
            device_fifo_parts: whole_fifos.map(|fifos| fifos.arena.parts()),
            work_fifo_depth,
            one_shot,
            peer_access: peers.is_some(),
            limits,
        };
        let communicator = Communicator {
            id,
            rank,
            ranks,
            device: self.device,
            config: self.config.clone(),
            topology,
            launch: LaunchContext {
                comm: id,
                device: self.device,
                capabilities,
                rings,
                connector,
                peers,
                buffer_exchange: exchange,
                posting,
                abort,
                retired: retired.clone(),
                checks,
                arrivals,
                watch,
            },
            peers_ended_well,
            device_fifos,
            reduce_ops: ReduceOps::default(),
            life: self.life.clone(),
            membership,
            proxy_ranks,
            faults,
            planner: Mutex::new(Planner {
                sequences: Sequences::default(),
                queue: LaunchQueue {
                    submitted: SubmittedPlans::new(retired),
                    order: Order::default(),
                    launcher,
                },
            }),
            bootstrap: bootstrap.clone(),
            children: Mutex::default(),
            grows: Mutex::default(),
            registrations: Registrations::default(),
            windows: Windows::new(limits.use_copy_engines(ranks)),
            buffers: Buffers::read()?,
            finalized: AtomicBool::new(false),
            given_up: OnceLock::new(),
            ended: AtomicBool::new(false),
            fork: fork::generation(),
            table: Mutex::new(None),
        };
        communicator.enter(self.start_ns, self.parent, &apart);
        tracing::info!(
            target: log::INIT,
            "ncclCommInitRank comm {id:#x} rank {rank} nranks {ranks} cudaDev {device} localRank {} localRanks {} node {} \
             nNodes {} channels {channels} slots of {slot_bytes} bytes parent {:#x} - Init COMPLETE in {:.2} ms",
            communicator.topology.local_rank(),
            communicator.topology.local_ranks().len(),
            communicator.topology.node_of(rank),
            communicator.topology.nodes(),
            self.parent,
            observe::now_ns().saturating_sub(self.start_ns) as f64 / 1e6,
        );
        Ok(Arc::new(communicator))
    }
}

impl Making<'_> {
    /// Lets the watchdog look at it, unless that is off.
    fn watch(
        &self,
        id: u64,
        (bootstrap, proxy): (&Arc<Bootstrap>, &Proxy),
        topology: &Arc<Topology>,
        (checks, inbox_sender): (&Arc<Checks>, InboxSender),
        arrivals: Option<Arc<ArrivalLog>>,
    ) -> Result<Option<watchdog::RegisteredWatch>> {
        let Some(settings) = self.watchdog else {
            let responder = watchdog::PassiveResponder {
                comm: id,
                stalls: proxy.stalls(),
                topology: topology.clone(),
                checks: checks.clone(),
                arrivals,
                post: post_over(bootstrap),
            };
            hear(bootstrap, checks, inbox_sender, move |from, bytes| {
                responder.on_control_message(from, bytes);
            });
            return Ok(None);
        };
        let device = device()?;
        let tracker = (settings.source == watchdog::ProgressSource::Events)
            .then(|| watchdog::PlanTracker::new(device.clone(), self.device, &settings));
        let watched = watchdog::WatchedCommunicator {
            comm: id,
            name: self.config.name.clone(),
            device: self.device,
            tracker,
            topology: topology.clone(),
            checks: checks.clone(),
            failure: self.life.clone(),
            post: post_over(bootstrap),
            stalls: proxy.stalls(),
            moves: proxy.moves(id),
            arrivals,
        };
        let watch = watchdog::Watch::new(watched, settings);
        let watching = Arc::downgrade(&watch);
        self.life.before_failure(Box::new(move || {
            if let Some(watch) = watching.upgrade() {
                watch.give_up();
            }
        }));
        let watching = Arc::downgrade(&watch);
        checks.on_difference(Box::new(move |text, odd| {
            let report = watching.upgrade().and_then(|watch| watch.calls_differ(text, odd));
            Box::new(move || report.into_iter().for_each(watchdog::Report::log))
        }));
        let watching = Arc::downgrade(&watch);
        hear(bootstrap, checks, inbox_sender, move |from, bytes| {
            if let Some(watch) = watching.upgrade() {
                watch.on_control_message(from, bytes);
            }
        });
        Ok(Some(watchdog::RegisteredWatch::new(watch)))
    }
}

/// The rings of all channels; returns when all ranks have theirs.
fn connect_rings(
    bootstrap: &Bootstrap,
    connector: &Connector,
    channels: u32,
) -> Result<Vec<Option<RingConnections>>> {
    let rings = (0..channels as u8)
        .map(|channel| {
            (bootstrap.ranks() > 1)
                .then(|| connector.connect_ring(channel))
                .transpose()
        })
        .collect::<std::result::Result<Vec<_>, _>>()?;
    tracing::info!(target: log::INIT, "Connected all rings");
    // A rank that fails to connect is known to all before anyone believes the communicator ready.
    bootstrap.barrier()?;
    Ok(rings)
}

impl Communicator {
    /// Makes it known in the shared pages. `apart`: why its ranks do not reach each other's memory.
    fn enter(&self, init_start_ns: u64, parent: u64, apart: &str) {
        let mut entry = pages::Communicator {
            id: self.id,
            parent,
            init_start_ns,
            init_end_ns: observe::now_ns(),
            rank: self.rank,
            ranks: self.ranks,
            local_rank: self.topology.local_rank(),
            local_ranks: self.topology.local_ranks().len() as u32,
            node: self.topology.node_of(self.rank),
            nodes: self.topology.nodes(),
            device: self.device,
            channels: self.launch.capabilities.channels as u32,
            name: [0; ringsight_records::vocabulary::NAME_BYTES],
            slot_bytes: self.launch.capabilities.slot_bytes as u32,
            abilities: [
                (self.launch.capabilities.one_shot, pages::Communicator::ONE_SHOT),
                (self.launch.peers.is_some(), pages::Communicator::PEERS),
                (
                    self.launch.capabilities.limits.copy_engine_bytes == 0,
                    pages::Communicator::ZERO_CTA,
                ),
            ]
            .into_iter()
            .filter_map(|(has, ability)| has.then_some(ability))
            .sum(),
            apart: [0; pages::APART_BYTES],
        };
        pages::put_text(&mut entry.name, &self.config.name);
        pages::put_text(&mut entry.apart, apart);
        if let (Some(clock), Some(pages)) =
            (device().ok().and_then(|device| device.clock()), observe::pages())
            && let Some(slot) = pages.header().device(self.device)
        {
            slot.write(&clock);
        }
        let claimed = observe::TableEntry::claim(&entry);
        // A slot that no table has says that the communicator is not described.
        let slot = claimed.as_ref().map_or(u64::MAX, |entry| entry.slot() as u64);
        *lock(&self.table) = claimed;
        observe::emit(&self.lifecycle(Kind::CommInit, State::STOP, slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_depends_on_unique_id_and_size() {
        let (a, b) = ([1; 128], [2; 128]);
        assert_eq!(communicator_id(&[a], 4), communicator_id(&[a], 4));
        assert_ne!(communicator_id(&[a], 4), communicator_id(&[b], 4));
        assert_ne!(communicator_id(&[a], 4), communicator_id(&[a], 5));
        assert_ne!(communicator_id(&[a], 4), communicator_id(&[a, b], 4));
    }
}
