//! Making a communicator: rendezvous, what the ranks agree on, connections.

use std::sync::{Arc, Mutex, atomic::AtomicBool, mpsc};

use ringsight_kernels::fifo::SLOTS;
use ringsight_records::{Kind, State, pages};

use super::{
    Communicator, Config, Planner, Proxied,
    config::{MAX_CHANNELS, number},
    lifecycle::Lifecycle,
};
use crate::{
    bootstrap::{self, Bootstrap, UniqueId},
    device::device,
    error::{Error, Result, ResultCode},
    launch::{Order, reclaim::Plans},
    observe,
    plan::{ReduceOps, Sequences, WORK_FIFO_DEPTH},
    proxy::{Proxy, ProxyConfig},
    topology::{RankInfo, Topology},
    transport::Connector,
};

const DEFAULT_CHANNELS: u32 = 2;
/// `NCCL_BUFFSIZE` by default: slots of 128 KiB stay in a core's cache between its producer and its consumer.
const DEFAULT_BUFFER_BYTES: usize = 1 << 20;

/// A communicator that is to be made.
#[derive(Clone)]
pub struct InitJob {
    /// What its handle stands for.
    pub life: Arc<Lifecycle>,
    /// The 128 bytes that the ranks share.
    pub id: [u8; UniqueId::BYTES],
    /// Ranks.
    pub ranks: u32,
    /// This one.
    pub rank: u32,
    /// Device number.
    pub device: i32,
    /// Choices.
    pub config: Config,
}

/// FNV-1a, 64 bits.
fn hash(parts: &[&[u8]]) -> u64 {
    parts
        .iter()
        .flat_map(|part| part.iter())
        .fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
}

/// The id of a communicator: the same on every rank, never 0.
fn communicator_id(id: &[u8; UniqueId::BYTES], ranks: u32) -> u64 {
    hash(&[id, &ranks.to_le_bytes()]).max(1)
}

/// What the ranks must agree on, as they tell each other.
struct Terms {
    min_channels: u32,
    max_channels: u32,
    slot_bytes: u64,
    work_fifo_depth: u64,
}

impl Terms {
    const BYTES: usize = 24;

    fn mine(config: &Config) -> Result<Self> {
        let buffer: usize = number(&["NCCL_BUFFSIZE"])?.unwrap_or(DEFAULT_BUFFER_BYTES);
        if !(4096..=1 << 30).contains(&buffer) {
            return Err(Error::argument(format!(
                "environment variable NCCL_BUFFSIZE={buffer}: must be between 4096 and 1073741824 bytes"
            )));
        }
        let depth: usize = number(&["RINGSIGHT_WORK_FIFO_DEPTH"])?.unwrap_or(WORK_FIFO_DEPTH);
        Ok(Self {
            min_channels: config.min_channels.unwrap_or(1).clamp(1, MAX_CHANNELS),
            max_channels: config.max_channels.unwrap_or(MAX_CHANNELS).clamp(1, MAX_CHANNELS),
            slot_bytes: (buffer / SLOTS).next_multiple_of(64) as u64,
            work_fifo_depth: depth.clamp(2, 1 << 20) as u64,
        })
    }

    fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.min_channels.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.max_channels.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.slot_bytes.to_le_bytes());
        bytes[16..].copy_from_slice(&self.work_fifo_depth.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (min, rest) = bytes.split_first_chunk()?;
        let (max, rest) = rest.split_first_chunk()?;
        let (slot, rest) = rest.split_first_chunk()?;
        Some(Self {
            min_channels: u32::from_le_bytes(*min),
            max_channels: u32::from_le_bytes(*max),
            slot_bytes: u64::from_le_bytes(*slot),
            work_fifo_depth: u64::from_le_bytes(rest.try_into().ok()?),
        })
    }

    /// (channels, bytes of a slot, depth of the work FIFO) for everybody: the greatest minimum, the least maximum.
    fn agree(all: &[Self]) -> (u32, usize, usize) {
        let min = all.iter().map(|terms| terms.min_channels).max().unwrap_or(1);
        let max = all
            .iter()
            .map(|terms| terms.max_channels)
            .min()
            .unwrap_or(MAX_CHANNELS);
        let slot = all
            .iter()
            .map(|terms| terms.slot_bytes)
            .min()
            .unwrap_or(4096)
            .clamp(64, 1 << 30);
        let depth = all.iter().map(|terms| terms.work_fifo_depth).min().unwrap_or(2);
        (
            DEFAULT_CHANNELS.max(min).min(max).clamp(1, MAX_CHANNELS),
            slot as usize,
            usize::try_from(depth).unwrap_or(WORK_FIFO_DEPTH),
        )
    }
}

impl InitJob {
    /// Makes the communicator; returns when all ranks have come.
    ///
    /// # Errors
    /// Bad arguments, a rank that does not come or dies, or the system.
    pub fn run(&self) -> Result<Arc<Communicator>> {
        let init_start_ns = observe::now_ns();
        let device = device()?;
        let unique_id = UniqueId::from_bytes(&self.id)?;
        device.set_current(self.device)?;
        if let Err(error) = observe::prepare() {
            // Being observed is a service, not a condition.
            eprintln!(
                "ringsight: shared pages cannot be made, this process cannot be fully observed: {error}"
            );
        }
        let context = |error: Error| error.within(&format!("rank {} of {}", self.rank, self.ranks));
        let abort = self.life.abort_word().clone();
        let bootstrap = Bootstrap::init(
            &unique_id,
            self.rank,
            self.ranks,
            abort.clone(),
            bootstrap::default_timeout(),
        )
        .map_err(|error| context(error.into()))?;
        let terms: Vec<Terms> = bootstrap
            .all_gather(&Terms::mine(&self.config)?.to_bytes())
            .map_err(|error| context(error.into()))?
            .iter()
            .map(|bytes| {
                Terms::from_bytes(bytes)
                    .ok_or_else(|| Error::new(ResultCode::RemoteError, "a rank's terms cannot be read"))
            })
            .collect::<Result<_>>()?;
        let (channels, slot_bytes, work_fifo_depth) = Terms::agree(&terms);
        let (proxied, faults) = (Arc::new(Proxied::default()), self.life.faults().clone());
        let proxy = Arc::new(
            Proxy::new(ProxyConfig {
                rank: self.rank,
                ranks: self.ranks,
                cookie: bootstrap.cookie(),
                listen: bootstrap.local_ip(),
                slot_bytes,
                abort: abort.clone(),
                on_completed: {
                    let proxied = proxied.clone();
                    Arc::new(move |op, replay| proxied.completed(op, replay))
                },
                on_error: {
                    let faults = faults.clone();
                    Arc::new(move |text| faults.set(Error::new(ResultCode::RemoteError, text)))
                },
            })
            .map_err(|error| context(error.into()))?,
        );
        let info = RankInfo::local(self.rank, self.device, proxy.address(), observe::LIBRARY_VERSION);
        let topology = Arc::new(Topology::exchange(&bootstrap, info).map_err(|error| context(error.into()))?);
        let connector = Connector::new(topology.clone(), proxy.clone(), abort.clone());
        let rings = (0..channels as u8)
            .map(|channel| {
                (self.ranks > 1)
                    .then(|| connector.connect_ring(channel))
                    .transpose()
            })
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(|error| context(error.into()))?;
        // A rank that fails to connect is known to all before anyone believes the communicator ready.
        bootstrap.barrier().map_err(|error| context(error.into()))?;
        let (reclaim, queue) = mpsc::channel();
        let communicator = Communicator {
            id: communicator_id(&self.id, self.ranks),
            rank: self.rank,
            ranks: self.ranks,
            device: self.device,
            topology,
            rings,
            slot_bytes,
            work_fifo_depth,
            connector,
            abort,
            reduce_ops: ReduceOps::default(),
            reclaim,
            life: self.life.clone(),
            proxied,
            faults,
            planner: Mutex::new(Planner {
                sequences: Sequences::default(),
                plans: Plans::new(queue),
                order: Order::default(),
            }),
            proxy,
            bootstrap,
            finalized: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            fork: observe::fork_generation(),
            table: Mutex::new(None),
        };
        communicator.enter(init_start_ns, &self.config.name);
        Ok(Arc::new(communicator))
    }
}

impl Communicator {
    /// Makes it known in the shared pages.
    fn enter(&self, init_start_ns: u64, name: &str) {
        let mut entry = pages::Communicator {
            id: self.id,
            parent: 0,
            init_start_ns,
            init_end_ns: observe::now_ns(),
            rank: self.rank,
            ranks: self.ranks,
            local_rank: self.topology.local_rank(),
            local_ranks: self.topology.local_ranks().len() as u32,
            node: self.topology.node_of(self.rank),
            nodes: self.topology.nodes(),
            device: self.device,
            channels: self.channels() as u32,
            name: [0; ringsight_records::vocabulary::NAME_BYTES],
            reserved: [0; 7],
        };
        pages::put_text(&mut entry.name, name);
        let claimed = observe::TableEntry::claim(&entry);
        // A slot that no table has says that the communicator is not described.
        let slot = claimed.as_ref().map_or(u64::MAX, |entry| entry.slot() as u64);
        *super::lock(&self.table) = claimed;
        observe::emit(&self.lifecycle(Kind::CommInit, State::STOP, slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_agree_whatever_they_ask_for() {
        let terms = |min_channels, max_channels| Terms {
            min_channels,
            max_channels,
            slot_bytes: 4096 * u64::from(min_channels),
            work_fifo_depth: 8,
        };
        assert_eq!(Terms::agree(&[terms(1, 32), terms(1, 32)]).0, 2);
        assert_eq!(Terms::agree(&[terms(4, 8), terms(1, 32)]), (4, 4096, 8));
        assert_eq!(
            Terms::agree(&[terms(4, 8), terms(1, 1)]).0,
            1,
            "the least maximum wins"
        );
        let there_and_back = Terms::from_bytes(&terms(4, 8).to_bytes()).unwrap();
        assert_eq!(
            (there_and_back.min_channels, there_and_back.slot_bytes),
            (4, 4 * 4096)
        );
        assert!(Terms::from_bytes(&[0; 23]).is_none() && Terms::from_bytes(&[0; 25]).is_none());
    }

    #[test]
    fn the_id_depends_on_unique_id_and_size() {
        let (a, b) = ([1; 128], [2; 128]);
        assert_eq!(communicator_id(&a, 4), communicator_id(&a, 4));
        assert_ne!(communicator_id(&a, 4), communicator_id(&b, 4));
        assert_ne!(communicator_id(&a, 4), communicator_id(&a, 5));
    }
}
