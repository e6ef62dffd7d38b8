//! Memory that the kernels of all ranks reach, where all of them can.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ringsight_kernels::{
    Fifo,
    cuda::peers::{self, Area, MAX_PEERS, RingBefore},
    launch::Peers,
};

use super::maps::Mapped;
use crate::{
    bootstrap::Bootstrap,
    device::{Device, Reached, Share, device},
    error::Result,
    log,
    topology::Topology,
    transport::RingConnections,
};

/// The memory of one rank, and what it has of the others'.
pub(super) struct Memory {
    pub(super) own: Option<Box<dyn Any + Send + Sync>>,
    pub(super) others: Vec<Box<dyn Any + Send + Sync>>,
    /// What callers of other processes have in theirs.
    _mapped: Arc<Mapped>,
    /// Some of them are of other processes.
    pub(super) foreign: bool,
    ended_well: Arc<AtomicBool>,
    /// Whose addresses it says ([`Area::rings`]): a kernel that begins when its communicator has been aborted still looks there
    /// before it gives up.
    _rings: Vec<Arc<Fifo>>,
}

impl Memory {
    /// None so far. `ended_well` is to be set when nobody writes there any more.
    pub(super) fn new(ended_well: &Arc<AtomicBool>) -> Self {
        Self {
            own: None,
            others: Vec::new(),
            _mapped: Arc::default(),
            foreign: false,
            ended_well: ended_well.clone(),
            _rings: Vec::new(),
        }
    }
}

/// Whether the user wants no rank to reach another's memory.
pub(super) fn p2p_disabled() -> bool {
    crate::env::text("NCCL_P2P_DISABLE").is_some_and(|value| value != "0")
}

impl Drop for Memory {
    fn drop(&mut self) {
        // After an abort, kernels of other processes may still write here: such memory is kept until this process ends.
        // Ranks of this process hold it themselves, and where operations have come to their end, all has arrived.
        if self.foreign && !self.ended_well.load(Ordering::Relaxed) {
            std::mem::forget(self.own.take());
        }
    }
}

/// Says what every rank could do, and hears it from all; the first who could not is named in the log.
fn agree(bootstrap: &Bootstrap, mine: std::result::Result<&[u8], &str>) -> Result<Option<Vec<Vec<u8>>>> {
    let bytes = match mine {
        Ok(bytes) => [&[1], bytes].concat(),
        Err(why) => [&[0], why.as_bytes()].concat(),
    };
    let all = bootstrap.all_gather(&bytes)?;
    let cannot = all.iter().position(|bytes| bytes.first() != Some(&1));
    if let Some(rank) = cannot {
        let why = String::from_utf8_lossy(all[rank].get(1..).unwrap_or_default());
        let why: String = why.chars().filter(|char| !char.is_control()).take(300).collect();
        tracing::info!(
            target: log::INIT,
            "Ranks do not reach each other's memory: rank {rank}: {why}"
        );
        return Ok(None);
    }
    Ok(Some(all.into_iter().map(|bytes| bytes[1..].to_vec()).collect()))
}

/// Makes the memory and reaches that of the others; `None` if any rank cannot. All ranks call it, and all get the same answer.
/// With it comes where mappings of callers' memory are kept, which lives as long. `ended_well` is to be set when all of this rank's operations have come to their end.
///
/// # Errors
/// Of the bootstrap network.
pub(super) fn connect(
    bootstrap: &Bootstrap,
    topology: &Topology,
    rings: &[Option<RingConnections>],
    ended_well: &Arc<AtomicBool>,
) -> Result<Option<(Arc<Peers>, Arc<Mapped>)>> {
    let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
    if !(2..=MAX_PEERS).contains(&(ranks as usize)) || topology.nodes() != 1 {
        return Ok(None);
    }
    let device = &**device()?;
    let bytes = peers::bytes(ranks as usize);
    let own = make(device, topology, rings, bytes);
    let answer = own.as_ref().map(|share| &*share.handle).map_err(|why| &**why);
    let handles = agree(bootstrap, answer)?;
    let (Ok(own), Some(handles)) = (own, handles) else {
        return Ok(None);
    };
    let mapped = Arc::<Mapped>::default();
    let mut foreign = 0;
    let mut memory = Memory {
        own: Some(own.memory),
        others: Vec::new(),
        _mapped: mapped.clone(),
        foreign: false,
        ended_well: ended_well.clone(),
        _rings: rings
            .iter()
            .flatten()
            .map(|ring| ring.prev.fifo.clone())
            .collect(),
    };
    let mut bases = Vec::new();
    let mut on_device = 1;
    let mut failure = None;
    for (other, handle) in handles.iter().enumerate() {
        if other == rank as usize {
            bases.push(own.base);
            continue;
        }
        match device.reach_share(handle) {
            Ok(Reached {
                base,
                is_foreign,
                is_on_same_device,
                memory: reached,
            }) => {
                bases.push(base);
                on_device += u32::from(is_on_same_device);
                memory.foreign |= is_foreign;
                foreign |= u8::from(is_foreign) << other;
                memory.others.push(reached);
            }
            Err(error) => {
                failure = Some(format!("that of rank {other}: {error}"));
                break;
            }
        }
    }
    let blocks = (own.blocks / on_device).to_le_bytes();
    let answer = failure.as_deref().map_or(Ok(&blocks[..]), Err);
    // Nobody writes before all have reached all; where not all do, nobody does.
    let Some(blocks) = agree(bootstrap, answer)? else {
        ended_well.store(true, Ordering::Relaxed);
        return Ok(None);
    };
    // Rubbish counts as none.
    let blocks = blocks
        .iter()
        .map(|bytes| bytes[..].try_into().map_or(0, u32::from_le_bytes));
    tracing::info!(target: log::INIT, "Ranks reach each other's memory: {bytes} bytes each");
    let peers = Peers {
        rank,
        bases,
        most_blocks: blocks.min().unwrap_or(0).max(1),
        foreign,
        memory: Box::new(memory),
    };
    Ok(Some((Arc::new(peers), mapped)))
}

/// This rank's memory; or why there is none.
fn make(
    device: &dyn Device,
    topology: &Topology,
    rings: &[Option<RingConnections>],
    bytes: usize,
) -> std::result::Result<Share, String> {
    if p2p_disabled() {
        return Err("NCCL_P2P_DISABLE is set".into());
    }
    let share = device
        .share(bytes)
        .map_err(|error| error.to_string())?
        .ok_or_else(|| format!("the {} device shares no memory", device.name()))?;
    let mut area = Area::default();
    for (channel, (before, ring)) in area.rings.iter_mut().zip(rings).enumerate() {
        let (Some(ring), Some(prev)) = (ring, topology.ring(channel as u8).last().copied()) else {
            break;
        };
        *before = RingBefore {
            fifo: ring.prev.fifo.halves().consumer,
            prev,
            reserved: 0,
        };
    }
    device
        .write_share(share.base, area.bytes())
        .map_err(|error| error.to_string())?;
    Ok(share)
}
