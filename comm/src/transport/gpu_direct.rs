//! GPUDirect: slots of connections to other nodes in the memory of the rank's GPU, where RDMA devices read and write them.
//!
//! A rank has one allocation for them ([`SlotPool`]), made with the first communicator of its proxy: a later allocation might block until
//! running kernels end. The pool is cut into places, one for the slots of each end of a connection. A connection without a place stages
//! its slots in host memory. Only the slots are in GPU memory: flags, counts and inline steps stay in host memory, which the proxy reads.
//!
//! Service threads of the proxy take places; the last owner of a `Slots` gives its place back. One lock guards the pool's state.

use std::{
    any::Any,
    collections::{BTreeSet, HashMap},
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use ringsight_kernels::fifo::SLOTS;
use ringsight_verbs::{
    choice::{Distance, distance},
    config::GpuDirect,
    memory::{Access, Memory, Mr},
    port::Net,
    sysfs::Place,
};

use ringsight_comm_base::{log, sync::lock};

use super::{
    error::ConnectionError,
    rdma::{backup_of, place_of},
};
use crate::device::{self, Device};

/// Maximum memory for messages.
const MESSAGE_BYTES: usize = 96 << 20;
/// Maximum memory of a pool.
const MAX_BYTES: usize = 2 << 30;
/// Alignment of a place: the address of a region and its offset in the dma-buf must be equal modulo a page.
const PAGE: usize = 4096;

/// The connections for which a rank may need places.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotDemand {
    pub(crate) channels: usize,
    /// Ranks on other nodes.
    pub(crate) peers: usize,
    pub(crate) slot_bytes: usize,
}

impl SlotDemand {
    /// Bytes of a place.
    fn place(self) -> usize {
        (SLOTS * self.slot_bytes).next_multiple_of(PAGE)
    }

    /// Number of places; `both`: also for slots that are sent.
    fn places(self, both: bool) -> usize {
        let ends = if both { 2 } else { 1 };
        let rings = self.channels * ends;
        let messages = (self.peers * self.channels * ends).min(MESSAGE_BYTES / self.place());
        (rings + messages).min(MAX_BYTES / self.place())
    }
}

/// The slots of a rank in the memory of its GPU.
pub struct SlotPool {
    base: u64,
    /// Bytes from place to place.
    stride: usize,
    slot_bytes: usize,
    dma_buf: Arc<OwnedFd>,
    device: i32,
    needs_flush: bool,
    /// Sent slots are in the pool, too.
    sends: bool,
    state: Mutex<PoolState>,
    /// Freed when dropped.
    _memory: Box<dyn Any + Send + Sync>,
}

#[derive(Default)]
struct PoolState {
    free: Vec<usize>,
    /// By connection of the proxy: its place.
    taken: HashMap<u32, Weak<Slots>>,
    /// Ports that can access the memory, as far as is known.
    ports: BTreeSet<usize>,
    /// The log has said that no place is left.
    has_logged_exhaustion: bool,
}

/// A place: the slots of one end of a connection. Given back to the pool when dropped.
pub(crate) struct Slots {
    pool: Arc<SlotPool>,
    index: usize,
}

/// The greater distance of a GPU from an RDMA port and from its backup: both must access the same slots.
fn max_distance(net: &Net, port: usize, gpu: Option<&Place>) -> Distance {
    let far = |port: usize| distance(gpu, net.ports()[port].place.as_ref());
    backup_of(net, port).map_or(far(port), |backup| far(port).max(far(backup)))
}

/// Names of a port and its backup.
fn names(net: &Net, port: usize) -> String {
    let name = |port: usize| format!("{}:{}", net.ports()[port].device, net.ports()[port].number);
    match backup_of(net, port) {
        None => name(port),
        Some(backup) => format!("{} (backup {})", name(port), name(backup)),
    }
}

impl SlotPool {
    /// Makes the pool of a rank on `device` number `number`, which is current and at the PCI address `bus`. `None`: the rank's ports or the
    /// environment allow none, so its slots stay in host memory. The log says why, except for a device without memory of its own.
    pub(crate) fn new(
        net: &Net,
        ports: &[usize],
        (device, number, bus): (&dyn Device, i32, &str),
        demand: SlotDemand,
    ) -> Option<Arc<Self>> {
        if bus.is_empty() || ports.is_empty() {
            return None;
        }
        let staged = |why: &str| {
            tracing::info!(target: log::INIT, "GPUDirect : GPU {number} ({bus}) : slots are staged in host memory: {why}");
        };
        let GpuDirect {
            level,
            dma_buf,
            read: sends,
        } = net.config().gpu_direct;
        let Some(level) = level.filter(|_| dma_buf) else {
            staged(if dma_buf {
                "NCCL_NET_GDR_LEVEL=LOC"
            } else {
                "NCCL_DMABUF_ENABLE=0"
            });
            return None;
        };
        let gpu = place_of(bus);
        let mut near = BTreeSet::new();
        for port in ports.iter().copied() {
            let far = max_distance(net, port, gpu.as_ref());
            let is_near = far <= level;
            tracing::info!(
                target: log::INIT,
                "GPUDirect : GPU {number} ({bus}) and {} : {}distance {} {} {} (NCCL_NET_GDR_LEVEL)",
                names(net, port),
                if is_near { "" } else { "slots are staged in host memory, " },
                far.name(),
                if is_near { "<=" } else { ">" },
                level.name(),
            );
            if is_near {
                near.insert(port);
            }
        }
        if near.is_empty() {
            return None;
        }
        let count = demand.places(sends);
        if count == 0 {
            staged("NCCL_BUFFSIZE is too long");
            return None;
        }
        let direct = match device.allocate_rdma(count * demand.place()) {
            Ok(direct) => direct?,
            Err(error) => {
                staged(&error.to_string());
                return None;
            }
        };
        tracing::info!(
            target: log::INIT,
            "GPUDirect : GPU {number} ({bus}) : {count} places of {} bytes for slots, {}, {}",
            demand.place(),
            if sends { "received and sent" } else { "received (NCCL_NET_GDR_READ=0)" },
            if direct.needs_flush { "flushed" } else { "no flush needed" },
        );
        Some(Arc::new(Self {
            base: direct.base,
            stride: demand.place(),
            slot_bytes: demand.slot_bytes,
            dma_buf: Arc::new(direct.dma_buf),
            device: number,
            needs_flush: direct.needs_flush,
            sends,
            state: Mutex::new(PoolState {
                // The first places are given out first.
                free: (0..count).rev().collect(),
                ports: near,
                ..PoolState::default()
            }),
            _memory: direct.memory,
        }))
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        lock(&self.state)
    }

    /// A place for the slots of a proxy's connection over a port. `None`: they stay in host memory.
    pub(crate) fn take(self: &Arc<Self>, connection: u32, port: usize, is_send: bool) -> Option<Arc<Slots>> {
        let mut state = self.state();
        if (is_send && !self.sends) || !state.ports.contains(&port) {
            return None;
        }
        let Some(index) = state.free.pop() else {
            if !std::mem::replace(&mut state.has_logged_exhaustion, true) {
                tracing::info!(
                    target: log::INIT,
                    "GPUDirect : GPU {} : slots of further connections are staged in host memory: all places are taken",
                    self.device
                );
            }
            return None;
        };
        let slots = Arc::new(Slots {
            pool: Arc::clone(self),
            index,
        });
        state.taken.retain(|_, slots| slots.strong_count() > 0);
        state.taken.insert(connection, Arc::downgrade(&slots));
        Some(slots)
    }

    /// The place of a connection.
    pub(crate) fn of(&self, connection: u32) -> Option<Arc<Slots>> {
        self.state().taken.get(&connection)?.upgrade()
    }

    /// Excludes a port that cannot access the memory.
    fn refuse(&self, net: &Net, port: usize, why: &ringsight_verbs::Error) {
        if self.state().ports.remove(&port) {
            tracing::info!(
                target: log::INIT,
                "GPUDirect : GPU {} and {} : slots are staged in host memory: {why}",
                self.device,
                names(net, port)
            );
        }
    }
}

impl Slots {
    fn offset(&self) -> usize {
        self.index * self.pool.stride
    }

    /// Their address for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.pool.base + self.offset() as u64
    }

    /// Registers the slots with the devices of `port` and of its backup. `None`: one of the devices refuses, as the log says, and the slots
    /// cannot be used. While the returned regions live, registering the memory again returns the same regions.
    pub(crate) fn register(
        self: &Arc<Self>,
        net: &Net,
        port: usize,
        is_receiver: bool,
    ) -> Option<(Memory, Vec<Arc<Mr>>)> {
        let pool = &self.pool;
        // The peer's port may have decided which port this is (`NCCL_CROSS_NIC`).
        if !pool.state().ports.contains(&port) {
            return None;
        }
        let dma_buf = (Arc::clone(&pool.dma_buf), self.offset() as u64);
        let memory = Memory::of_device(
            self.address(),
            SLOTS * pool.slot_bytes,
            dma_buf,
            Arc::clone(self) as _,
        );
        let mut regions = Vec::new();
        for index in [Some(port), backup_of(net, port)].into_iter().flatten() {
            // Any other error of the port is reported when a path is made over it.
            let Ok(opened) = net.standby(index) else { continue };
            let access = if is_receiver {
                opened.slots_access()
            } else {
                Access::Local
            };
            match opened.pd().register(&memory, access) {
                Ok(region) => regions.push(region),
                Err(why) => {
                    pool.refuse(net, port, &why);
                    return None;
                }
            }
        }
        Some((memory, regions))
    }

    /// Makes everything that devices have written visible to kernels, before they see a flag that is set after this call.
    ///
    /// The writes of a device go to the GPU. Its completion and the flag go to host memory, from where the kernel reads the flag. On PCIe
    /// the completion cannot overtake the data, so the host sees it only once the data are on their way down to the GPU. That alone does
    /// not order the data before the kernel's reads of its own memory. If the driver guarantees that order
    /// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`), nothing is needed. Otherwise the driver's flush takes the same way to the
    /// GPU, cannot overtake the data, and returns once they have arrived.
    pub(crate) fn flush(&self) -> Result<(), ConnectionError> {
        if !self.pool.needs_flush {
            return Ok(());
        }
        let Some(device) = device::opened() else {
            return Err(ConnectionError::Flush("no device flushes its memory".into()));
        };
        device.flush_rdma_writes(self.pool.device).map_err(|error| {
            ConnectionError::Flush(format!("flushing what RDMA devices wrote to the GPU: {error}"))
        })
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        self.pool.state().free.push(self.index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_places_is_bounded() {
        let demand = |channels, peers, slot_bytes| SlotDemand {
            channels,
            peers,
            slot_bytes,
        };
        // A ring in each direction, and the parts of a message.
        assert_eq!(demand(8, 1, 128 << 10).places(true), 32);
        assert_eq!(demand(8, 1, 128 << 10).places(false), 16);
        // Messages with many peers get the places that there is room for.
        assert_eq!(demand(8, 500, 128 << 10).places(true), 16 + 96);
        // Slots that exceed the maximum.
        assert_eq!(demand(32, 1, 512 << 20).places(true), 0);
        assert_eq!(demand(2, 1, 320).place(), 4096);
    }
}
