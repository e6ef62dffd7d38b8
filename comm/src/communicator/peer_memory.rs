//! Memory that the kernels of all ranks reach, where all of them can.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    log,
};
use ringsight_kernels::{
    Fifo, PeerMemory,
    cuda::peer_memory::{self, MAX_PEERS, MESSAGE_COUNTS, PeerHeader, PreviousRing, are_messages_received},
};

use crate::{
    bootstrap::Bootstrap,
    buffer_exchange::ImportedBuffers,
    device::{Device, DeviceError, SharedMemory, device},
    topology::Topology,
    transport::RingConnections,
};

/// How long a rank that is done waits for the others to take what it has sent.
const SETTLE: Duration = Duration::from_secs(2);

/// The memory of one rank, and what it has of the others'.
pub(super) struct Memory {
    pub(super) own: Option<Box<dyn Any + Send + Sync>>,
    pub(super) others: Vec<Box<dyn Any + Send + Sync>>,
    /// What callers of other processes have in theirs.
    _mapped: Arc<ImportedBuffers>,
    /// Some of them are of other processes.
    pub(super) foreign: bool,
    ended_well: Arc<AtomicBool>,
    /// Whose addresses it says ([`PeerHeader::rings`]): a kernel that begins when its communicator has been aborted still looks there
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

/// Waits until the others have taken what this rank has sent, of which these bytes of its memory tell: after that they write nothing there any
/// more. False if that does not come, or `failed`.
pub(super) fn settle(
    (base, bytes): (u64, usize),
    is_taken: impl Fn(&[u8]) -> bool,
    failed: impl Fn() -> bool,
) -> bool {
    let Ok(device) = device() else { return false };
    let mut told = vec![0; bytes];
    let deadline = Instant::now() + SETTLE;
    loop {
        if device.read_shared(base, &mut told).is_err() {
            return false;
        }
        let taken = is_taken(&told);
        if taken || failed() || Instant::now() >= deadline {
            return taken;
        }
        thread::sleep(Duration::from_micros(100));
    }
}

/// Whether kernels of other processes write no more to this rank's memory, all of whose operations have come to their end: a send ends
/// before what it has sent is taken. Collectives end on all ranks.
pub(super) fn is_settled(peers: &PeerMemory, failed: impl Fn() -> bool) -> bool {
    if peers.foreign == 0 {
        return true;
    }
    let counts = peer_memory::messages_offset(peers.bases.len()) as u64;
    let of_own = (peers.bases[peers.rank as usize] + counts, MESSAGE_COUNTS);
    settle(
        of_own,
        |counts| are_messages_received(counts, peers.foreign),
        failed,
    )
}

/// Whether the user wants no rank to reach another's memory.
pub(super) fn p2p_disabled() -> bool {
    ringsight_comm_base::env::switch("NCCL_P2P_DISABLE", false)
}

impl Drop for Memory {
    fn drop(&mut self) {
        // After an abort, or when nobody has taken what was sent, kernels of other processes may still write here: such memory is kept until this
        // process ends. Ranks of this process hold it themselves.
        if self.foreign && !self.ended_well.load(Ordering::Relaxed) {
            std::mem::forget(self.own.take());
        }
    }
}

/// Why a rank cannot, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Cannot {
    /// As the user wants it, or as the machine is made.
    Expected(String),
    /// On a machine that is made for it.
    Refused(String),
    /// Not for want of memory: with less of it everything would be many times slower, and the next allocation fails.
    Lacking(String),
}

impl Cannot {
    const ALL: [fn(String) -> Self; 3] = [Self::Expected, Self::Refused, Self::Lacking];

    fn text(&self) -> (usize, &str) {
        match self {
            Self::Expected(text) => (0, text),
            Self::Refused(text) => (1, text),
            Self::Lacking(text) => (2, text),
        }
    }

    fn within(self, what: &str) -> Self {
        let (kind, text) = self.text();
        Self::ALL[kind](format!("{what}: {text}"))
    }
}

impl fmt::Display for Cannot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text().1)
    }
}

impl From<DeviceError> for Cannot {
    fn from(error: DeviceError) -> Self {
        let text = error.to_string();
        match error {
            DeviceError::Resource(_) => Self::Lacking(text),
            DeviceError::InvalidUsage(_) => Self::Expected(text),
            _ => Self::Refused(text),
        }
    }
}

/// Devices of the other ranks of this process.
pub(super) fn devices_near(topology: &Topology, peers: &PeerMemory) -> Vec<i32> {
    let others = (0..topology.ranks()).filter(|rank| *rank != peers.rank && !peers.is_foreign(*rank));
    others.map(|rank| topology.info(rank).device).collect()
}

/// What a rank says of itself: 0 and its bytes, or why it cannot.
fn encode(mine: std::result::Result<Vec<u8>, &Cannot>) -> Vec<u8> {
    match mine.map_err(Cannot::text) {
        Ok(bytes) => [&[0], &*bytes].concat(),
        Err((kind, text)) => [&[kind as u8 + 1], text.as_bytes()].concat(),
    }
}

fn parse(bytes: &[u8]) -> std::result::Result<Vec<u8>, Cannot> {
    match bytes {
        [0, bytes @ ..] => Ok(bytes.to_vec()),
        [kind, text @ ..] if usize::from(*kind) <= Cannot::ALL.len() => {
            let text = String::from_utf8_lossy(text);
            let text = text.chars().filter(|char| !char.is_control()).take(300).collect();
            Err(Cannot::ALL[usize::from(*kind) - 1](text))
        }
        _ => Err(Cannot::Refused("an answer that cannot be read".into())),
    }
}

/// Why not all ranks reach each other's memory, the same words on all of them; empty where there is one rank.
pub(super) type Apart = String;
/// What all ranks have where they do.
type Together<T> = std::result::Result<T, Apart>;

/// Says what this rank could do, in the bytes that `told` makes of it, and hears it from all, by rank; or the first who could not, who is named in the log,
/// too. `unused` is called where all ranks fail, and nobody comes to use anything.
///
/// # Errors
/// Of the bootstrap network; on all ranks, if one has not enough memory.
fn agree<T>(
    bootstrap: &Bootstrap,
    mine: std::result::Result<T, Cannot>,
    told: impl FnOnce(&T) -> Vec<u8>,
    unused: impl FnOnce(),
) -> Result<Together<(T, Vec<Vec<u8>>)>> {
    let all = bootstrap.all_gather(&encode(mine.as_ref().map(told)))?;
    let all: Vec<_> = all.iter().map(|bytes| parse(bytes)).collect();
    let cannot = all
        .iter()
        .enumerate()
        .filter_map(|(rank, one)| Some((rank, one.as_ref().err()?)))
        .max_by_key(|(rank, why)| (why.text().0, std::cmp::Reverse(*rank)));
    let (rank, why) = match (mine, cannot) {
        (Ok(mine), None) => return Ok(Ok((mine, all.into_iter().flatten().collect()))),
        (_, Some((rank, why))) => (rank, why.clone()),
        // Not as the others heard it.
        (Err(why), None) => (bootstrap.rank() as usize, why),
    };
    let apart = format!("rank {rank}: {why}");
    match why {
        Cannot::Lacking(text) => {
            unused();
            return Err(Error::new(
                ResultCode::SystemError,
                format!("rank {rank} cannot have the memory that the other ranks' kernels reach: {text}"),
            ));
        }
        Cannot::Refused(_) => tracing::warn!(
            target: log::INIT,
            "Ranks do not reach each other's memory, and go through the host's: {apart}"
        ),
        Cannot::Expected(_) => tracing::info!(
            target: log::INIT,
            "Ranks do not reach each other's memory: {apart}"
        ),
    }
    Ok(Err(apart))
}

/// Makes the memory and reaches that of the others, or says why any rank cannot. All ranks call it, and all get the same answer.
/// With the memory comes the place where mappings of callers' memory are kept; it lives as long. The caller sets `ended_well` when nobody writes
/// there any more. Where all ranks fail, this function sets it, and calls `unused`. `most`: the most blocks that a kernel of this rank may have
/// (`maxCTAs`); the least of all ranks' holds.
///
/// # Errors
/// Of the bootstrap network; on all ranks, if one has not enough memory.
pub(super) fn connect(
    bootstrap: &Bootstrap,
    topology: &Topology,
    rings: &[Option<RingConnections>],
    ended_well: &Arc<AtomicBool>,
    unused: impl Fn(),
    most: Option<u32>,
) -> Result<Together<(Arc<PeerMemory>, Arc<ImportedBuffers>)>> {
    let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
    if ranks == 1 {
        return Ok(Err(Apart::new()));
    }
    if topology.nodes() != 1 {
        return Ok(Err(format!("they are on {} nodes", topology.nodes())));
    }
    if ranks as usize > MAX_PEERS {
        return Ok(Err(format!("there are {ranks}, more than {MAX_PEERS}")));
    }
    let device = &**device()?;
    let bytes = peer_memory::bytes(ranks as usize);
    let own = make(device, topology, rings, bytes);
    let leave_unused = || {
        ended_well.store(true, Ordering::Relaxed);
        unused();
    };
    let (own, handles) = match agree(bootstrap, own, |share| share.handle.clone(), leave_unused)? {
        Ok(agreed) => agreed,
        Err(apart) => return Ok(Err(apart)),
    };
    let mapped = Arc::<ImportedBuffers>::default();
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
    let all = reach_all(device, (rank, own.base), &handles, &mut memory);
    let blocks = |all: &All| {
        let blocks = own.blocks / all.on_device;
        let blocks = most.map_or(blocks, |most| most.min(blocks));
        blocks.to_le_bytes().to_vec()
    };
    // Nobody writes before all have reached all; where not all do, nobody does.
    let (all, blocks) = match agree(bootstrap, all, blocks, leave_unused)? {
        Ok(agreed) => agreed,
        Err(apart) => {
            ended_well.store(true, Ordering::Relaxed);
            return Ok(Err(apart));
        }
    };
    // Rubbish counts as none.
    let blocks = blocks
        .iter()
        .map(|bytes| bytes[..].try_into().map_or(0, u32::from_le_bytes));
    tracing::info!(target: log::INIT, "Ranks reach each other's memory: {bytes} bytes each");
    let peers = PeerMemory {
        rank,
        bases: all.bases,
        max_blocks: blocks.min().unwrap_or(0).max(1),
        foreign: all.foreign,
        memory: Box::new(memory),
    };
    Ok(Ok((Arc::new(peers), mapped)))
}

/// What all ranks have shared, as one rank reaches it.
pub(super) struct All {
    /// By rank: where it is for this rank's device.
    pub(super) bases: Vec<u64>,
    /// By bit: ranks of other processes.
    foreign: u8,
    /// Ranks whose memory is on this rank's device.
    on_device: u32,
}

/// Reaches what all others have shared, by `handles`; `memory` keeps it. This rank's own begins at `base`.
pub(super) fn reach_all(
    device: &dyn Device,
    (rank, base): (u32, u64),
    handles: &[Vec<u8>],
    memory: &mut Memory,
) -> std::result::Result<All, Cannot> {
    let mut all = All {
        bases: Vec::new(),
        foreign: 0,
        on_device: 1,
    };
    for (other, handle) in handles.iter().enumerate() {
        if other == rank as usize {
            all.bases.push(base);
            continue;
        }
        let reached = device.import_shared(handle);
        let reached =
            reached.map_err(|error| Cannot::from(error).within(&format!("that of rank {other}")))?;
        all.bases.push(reached.base);
        all.on_device += u32::from(reached.is_on_same_device);
        all.foreign |= u8::from(reached.is_foreign) << other;
        memory.foreign |= reached.is_foreign;
        memory.others.push(reached.memory);
    }
    Ok(all)
}

/// This rank's memory; or why there is none.
fn make(
    device: &dyn Device,
    topology: &Topology,
    rings: &[Option<RingConnections>],
    bytes: usize,
) -> std::result::Result<SharedMemory, Cannot> {
    if p2p_disabled() {
        return Err(Cannot::Expected("NCCL_P2P_DISABLE is set".into()));
    }
    let share = device
        .allocate_shared(bytes)?
        .ok_or_else(|| Cannot::Expected(format!("the {} device shares no memory", device.name())))?;
    let mut header = PeerHeader::default();
    for (channel, (before, ring)) in header.rings.iter_mut().zip(rings).enumerate() {
        let (Some(ring), Some(prev)) = (ring, topology.ring(channel as u8).last().copied()) else {
            break;
        };
        *before = PreviousRing {
            fifo: ring.prev.fifo.halves().consumer,
            prev,
            reserved: 0,
        };
    }
    device.write_shared(share.base, header.bytes())?;
    Ok(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_says_of_itself_is_understood() {
        assert_eq!(parse(&encode(Ok(vec![7, 8]))), Ok(vec![7, 8]));
        for why in Cannot::ALL {
            let why = why("why".into()).within("that of rank 1");
            assert_eq!(parse(&encode(Err(&why))), Err(why));
        }
        for rubbish in [&[][..], &[4, b'x']] {
            assert!(matches!(parse(rubbish), Err(Cannot::Refused(_))));
        }
    }
}
