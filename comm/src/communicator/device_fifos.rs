//! FIFOs in GPU memory: allocating and importing the segments of [`crate::transport::arena`].

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use ringsight_comm_base::{error::Result, log};
use ringsight_kernels::fifo::{PRODUCER_BYTES, is_drained};

use super::peer_memory::{self, Memory, p2p_disabled};
use crate::{
    bootstrap::Bootstrap,
    device::{Device, DeviceError, ImportedMemory, device},
    topology::{ProcessDevice, Topology},
    transport::arena::{Arena, Layout},
};

/// Blocks that every GPU runs side by side. Kernels wait for kernels of other ranks, so those of one GPU must fit at once.
const BLOCKS_OF_GPU: u32 = 96;

/// A communicator's FIFOs in GPU memory.
pub(super) struct DeviceFifos {
    pub(super) arena: Arc<Arena>,
    /// All ranks reach all segments, so every FIFO is in GPU memory.
    pub(super) is_whole: bool,
    /// Address of this rank's segment, and the bytes of its producer halves.
    own: (u64, usize),
    /// Bytes of this rank's segment.
    pub(super) bytes: usize,
    /// Ranks of other processes write to it.
    foreign: bool,
    /// Set when no other rank writes to the segment any more.
    ended_well: Arc<AtomicBool>,
}

/// Channels whose FIFOs are in GPU memory, of `wanted` ones: fewer if several ranks of one process use one GPU.
fn channels_of(topology: &Topology, wanted: u32) -> u32 {
    let mut sharing: HashMap<ProcessDevice, u32> = HashMap::new();
    for rank in 0..topology.ranks() {
        *sharing.entry(topology.info(rank).place()).or_default() += 1;
    }
    let most = sharing.values().copied().max().unwrap_or(1);
    // A channel has up to two blocks.
    wanted.min((BLOCKS_OF_GPU / 2 / most).max(1))
}

/// Allocates this rank's segment and imports those of its node; `None` if no other rank is reached. All ranks call it, with the same
/// arguments.
///
/// # Errors
/// Of the bootstrap network.
pub(super) fn connect(
    bootstrap: &Bootstrap,
    topology: &Topology,
    wanted: u32,
    slot_bytes: usize,
) -> Result<Option<DeviceFifos>> {
    let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
    let members = topology.local_ranks().to_vec();
    let layout = Layout::new(channels_of(topology, wanted) as usize, members.len(), slot_bytes);
    let device = &**device()?;
    let own = make(device, layout);
    let answer = own.as_ref().map(|share| share.handle.clone()).unwrap_or_default();
    let handles = bootstrap.all_gather(&answer)?;
    let ended_well = Arc::new(AtomicBool::new(false));
    let mut memory = Memory::new(&ended_well);
    let mut bases = vec![None; ranks as usize];
    let mut own_base = 0;
    if let Ok(own) = own {
        own_base = own.base;
        memory.own = Some(own.memory);
        bases[rank as usize] = Some(own.base);
        for other in members.iter().filter(|member| **member != rank) {
            bases[*other as usize] = reach(device, *other, &handles[*other as usize], &mut memory);
        }
    }
    // A connection needs both directions.
    let mine: Vec<u8> = bases.iter().map(|base| base.is_some().into()).collect();
    let all = bootstrap.all_gather(&mine)?;
    let reaches = |from: u32, to: u32| all[from as usize].get(to as usize) == Some(&1);
    let near = |one: u32, other: u32| reaches(one, other) && reaches(other, one);
    let is_whole = (0..ranks).all(|one| (0..ranks).all(|other| near(one, other)));
    let Some(layout) = layout.filter(|_| members.iter().any(|other| *other != rank && near(rank, *other)))
    else {
        // Nobody writes here.
        ended_well.store(true, Ordering::Relaxed);
        return Ok(None);
    };
    let foreign = memory.foreign;
    let bases = members
        .iter()
        .map(|member| bases[*member as usize].filter(|_| near(rank, *member)))
        .collect();
    let bytes = layout.bytes();
    tracing::info!(
        target: log::INIT,
        "FIFOs are in the memory of GPUs{}: {bytes} bytes of each, {} parts of a message",
        if is_whole { "" } else { " for some ranks" },
        layout.parts(),
    );
    Ok(Some(DeviceFifos {
        arena: Arc::new(Arena::new(
            layout,
            (rank, ranks),
            members,
            bases,
            Arc::new(memory),
        )),
        is_whole,
        own: (own_base, layout.fifos() * PRODUCER_BYTES),
        bytes,
        foreign,
        ended_well,
    }))
}

/// This rank's segment. Logs why there is none.
fn make(device: &dyn Device, layout: Option<Layout>) -> std::result::Result<crate::device::SharedMemory, ()> {
    let why = match layout {
        _ if p2p_disabled() => "NCCL_P2P_DISABLE is set".to_owned(),
        None => "no other rank of this node, or buffers are too long".to_owned(),
        Some(layout) => match device.allocate_shared(layout.bytes()) {
            Ok(Some(share)) => return Ok(share),
            Ok(None) => format!("the {} device shares no memory", device.name()),
            Err(error @ DeviceError::Resource(_)) => {
                tracing::warn!(target: log::INIT, "This rank's FIFOs are in host memory, which is slow: {error}");
                return Err(());
            }
            Err(error) => error.to_string(),
        },
    };
    tracing::info!(target: log::INIT, "This rank's FIFOs are in host memory: {why}");
    Err(())
}

fn reach(device: &dyn Device, rank: u32, handle: &[u8], memory: &mut Memory) -> Option<u64> {
    if handle.is_empty() {
        return None;
    }
    match device.import_shared(handle) {
        Ok(ImportedMemory {
            base,
            is_foreign,
            memory: reached,
            ..
        }) => {
            memory.foreign |= is_foreign;
            memory.others.push(reached);
            Some(base)
        }
        Err(error) => {
            tracing::info!(target: log::INIT, "The memory of rank {rank} is not reached: {error}");
            None
        }
    }
}

impl DeviceFifos {
    /// The communicator fails on all ranks, so nobody writes to the segment.
    pub(super) fn leave_unused(&self) {
        // Relaxed: see `settle`.
        self.ended_well.store(true, Ordering::Relaxed);
    }

    /// Called when all of this rank's operations have ended. Waits until the others have taken what it has sent. After that they write nothing
    /// to the segment any more, and it may be freed.
    pub(super) fn settle(&self, failed: impl Fn() -> bool) {
        // Ranks of this process keep the segment themselves.
        let (base, bytes) = self.own;
        let is_taken = |bytes: &[u8]| bytes.chunks_exact(PRODUCER_BYTES).all(is_drained);
        let settled = !self.foreign || peer_memory::settle((base, bytes), is_taken, failed);
        // Relaxed: read by whoever drops the last reference, which orders it.
        self.ended_well.store(settled, Ordering::Relaxed);
    }
}
