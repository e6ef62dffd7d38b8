//! GPUDirect: slots of connections to other nodes in the memory of the rank's GPU, where RDMA devices read and write them.
//!
//! A rank has one allocation for them, made with its proxy's first communicator: memory that is asked for later might be had only
//! once the kernels that run then have ended. It is cut into places, one for the slots of each end of a connection, as far as there are
//! any; what has none is staged in host memory. All but the slots stays in host memory, where the proxy looks: flags, counts,
//! and what is short enough to travel with a flag.

use std::{
    any::Any,
    collections::{BTreeSet, HashMap},
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use ringsight_kernels::fifo::SLOTS;
use ringsight_verbs::{
    choice::{Distance, distance},
    config::GpuDirect,
    memory::{Access, Memory, Mr},
    port::Net,
    sysfs::Place,
};

use super::verbs::{backup_of, place_of};
use crate::{
    device::{self, Device},
    log,
};

/// The most memory for messages, and for all.
const MESSAGE_BYTES: usize = 96 << 20;
const MOST_BYTES: usize = 2 << 30;
/// Alignment of a place: a region's address and its offset in the dma-buf must be the same within a page.
const PAGE: usize = 4096;

/// What a rank may need places for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) channels: usize,
    /// Ranks on other nodes.
    pub(crate) peers: usize,
    pub(crate) slot_bytes: usize,
}

impl Wanted {
    /// Bytes of a place.
    fn place(self) -> usize {
        (SLOTS * self.slot_bytes).next_multiple_of(PAGE)
    }

    /// How many places; `both`: also for what is sent.
    fn places(self, both: bool) -> usize {
        let ends = if both { 2 } else { 1 };
        let rings = self.channels * ends;
        let messages = (self.peers * self.channels * ends).min(MESSAGE_BYTES / self.place());
        (rings + messages).min(MOST_BYTES / self.place())
    }
}

/// A rank's places.
pub struct Pool {
    base: u64,
    /// Bytes from place to place.
    stride: usize,
    slot_bytes: usize,
    dma_buf: Arc<OwnedFd>,
    device: i32,
    needs_flush: bool,
    /// Also what is sent is there.
    sends: bool,
    state: Mutex<State>,
    /// Given back when dropped.
    _memory: Box<dyn Any + Send + Sync>,
}

#[derive(Default)]
struct State {
    free: Vec<usize>,
    /// By connection of the proxy.
    taken: HashMap<u32, Weak<Slots>>,
    /// Ports that reach the memory, as far as is known.
    ports: BTreeSet<usize>,
    /// It was told that there are no more.
    told: bool,
}

/// The slots of one end of a connection; given back when dropped.
pub(crate) struct Slots {
    pool: Arc<Pool>,
    index: usize,
}

/// How far a GPU is from an RDMA port and the one that stands by for it: what goes over the one must go over the other.
fn farthest(net: &Net, port: usize, gpu: Option<&Place>) -> Distance {
    let far = |port: usize| distance(gpu, net.ports()[port].place.as_ref());
    backup_of(net, port).map_or(far(port), |backup| far(port).max(far(backup)))
}

/// Names of a port, and of the one that stands by for it.
fn names(net: &Net, port: usize) -> String {
    let name = |port: usize| format!("{}:{}", net.ports()[port].device, net.ports()[port].number);
    match backup_of(net, port) {
        None => name(port),
        Some(backup) => format!("{} (backup {})", name(port), name(backup)),
    }
}

impl Pool {
    /// Makes the places of a rank on `device` number `number`, which is current and at the PCI address `bus`, as the ports that it uses
    /// and the environment allow. `None`: its slots are in host memory; the log says why, but for a device that has no memory of its
    /// own.
    pub(crate) fn new(
        net: &Net,
        ports: &[usize],
        (device, number, bus): (&dyn Device, i32, &str),
        wanted: Wanted,
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
            let far = farthest(net, port, gpu.as_ref());
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
        let count = wanted.places(sends);
        if count == 0 {
            staged("NCCL_BUFFSIZE is too long");
            return None;
        }
        let direct = match device.direct(count * wanted.place()) {
            Ok(direct) => direct?,
            Err(error) => {
                staged(&error.to_string());
                return None;
            }
        };
        tracing::info!(
            target: log::INIT,
            "GPUDirect : GPU {number} ({bus}) : {count} places of {} bytes for slots, {}, {}",
            wanted.place(),
            if sends { "received and sent" } else { "received (NCCL_NET_GDR_READ=0)" },
            if direct.needs_flush { "flushed" } else { "no flush needed" },
        );
        Some(Arc::new(Self {
            base: direct.base,
            stride: wanted.place(),
            slot_bytes: wanted.slot_bytes,
            dma_buf: Arc::new(direct.dma_buf),
            device: number,
            needs_flush: direct.needs_flush,
            sends,
            state: Mutex::new(State {
                // The first ones are given first.
                free: (0..count).rev().collect(),
                ports: near,
                ..State::default()
            }),
            _memory: direct.memory,
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that runs under it leaves it half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for the slots of a proxy's connection over a port; `None`: they stay in host memory.
    pub(crate) fn take(self: &Arc<Self>, connection: u32, port: usize, is_send: bool) -> Option<Arc<Slots>> {
        let mut state = self.state();
        if (is_send && !self.sends) || !state.ports.contains(&port) {
            return None;
        }
        let Some(index) = state.free.pop() else {
            if !std::mem::replace(&mut state.told, true) {
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

    /// What a connection has taken.
    pub(crate) fn of(&self, connection: u32) -> Option<Arc<Slots>> {
        self.state().taken.get(&connection)?.upgrade()
    }

    /// A port does not reach the memory: it is asked no more.
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

    /// Where they are for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.pool.base + self.offset() as u64
    }

    /// They as memory that is registered, for an end over `port`: with the devices of that port and of the one that stands by. `None`:
    /// one of them refuses, as the log says, and they are of no use. The regions are found again while what is returned lives.
    pub(crate) fn register(
        self: &Arc<Self>,
        net: &Net,
        port: usize,
        is_receiver: bool,
    ) -> Option<(Memory, Vec<Arc<Mr>>)> {
        let pool = &self.pool;
        // The peer's port may have had the say of which port it is (`NCCL_CROSS_NIC`).
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
            // What else is wrong with a port is told where a path is made over it.
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

    /// Has what devices have written be there for kernels before they see a flag that is set from here on.
    ///
    /// A device's writes to the GPU, its completion, and the flag take different ways: the first go to the GPU, the others to the
    /// memory of the host, from where the kernel fetches the flag. On PCIe the completion, which is written after the data and may not
    /// overtake them, is seen by the host only when the data are on their way down to the GPU, or there; they are not before the
    /// kernel's reads of its own memory by that alone. Where the driver says that they are
    /// (`CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`), nothing is to be done; else its flush goes to the GPU by the same way,
    /// which it may not overtake them on, and returns when they are there.
    pub(crate) fn flush(&self) -> Result<(), String> {
        if !self.pool.needs_flush {
            return Ok(());
        }
        let Some(device) = device::opened() else {
            return Err("no device flushes its memory".into());
        };
        device
            .flush_direct(self.pool.device)
            .map_err(|error| format!("flushing what RDMA devices wrote to the GPU: {error}"))
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
    fn places_are_bounded() {
        let wanted = |channels, peers, slot_bytes| Wanted {
            channels,
            peers,
            slot_bytes,
        };
        // A ring in each direction and a message's parts.
        assert_eq!(wanted(8, 1, 128 << 10).places(true), 32);
        assert_eq!(wanted(8, 1, 128 << 10).places(false), 16);
        // Of messages with many, what there is room for.
        assert_eq!(wanted(8, 500, 128 << 10).places(true), 16 + 96);
        // Slots that are longer than all that may be taken.
        assert_eq!(wanted(32, 1, 512 << 20).places(true), 0);
        assert_eq!(wanted(2, 1, 320).place(), 4096);
    }
}
