//! What does not fit into a record stands once per operation in a description entry of the shared pages.

use core::sync::atomic::{AtomicU64, Ordering, fence};

/// Everything about one operation on one rank; 256 bytes. Times are `CLOCK_MONOTONIC` nanoseconds, 0 = not yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Description {
    /// Communicator id.
    pub comm: u64,
    /// Sequence as in [`crate::Record::seq`].
    pub seq: u64,
    /// Elements, as the caller gave them (v5 `count`).
    pub count: u64,
    /// Message bytes by nccl-tests' definition for the function (all ranks' data for gathers and scatters).
    pub bytes: u64,
    /// Send buffer address in the process (v5 `sendBuff`, `buff`).
    pub send_buffer: u64,
    /// Receive buffer address in the process (v5 `recvBuff`).
    pub recv_buffer: u64,
    /// Stream handle that the caller gave (v5 `stream`).
    pub stream: u64,
    /// Channels used, as a bit mask.
    pub channel_mask: u64,
    /// API call entered.
    pub api_start_ns: u64,
    /// API call returned.
    pub api_end_ns: u64,
    /// Device launch call entered.
    pub launch_start_ns: u64,
    /// Device launch call returned.
    pub launch_end_ns: u64,
    /// First channel started on the device.
    pub device_start_ns: u64,
    /// Last channel finished on the device.
    pub device_end_ns: u64,
    /// Operation number (as in [`crate::Record::op`]).
    pub op: u32,
    /// Group number: which [`crate::Kind::GroupApi`] and [`crate::Kind::Group`] events parent it (v5 `parentGroup`).
    pub group: u32,
    /// Plan number: which [`crate::Kind::KernelLaunch`] event launched it.
    pub plan: u32,
    /// Rank in the communicator.
    pub rank: u32,
    /// Size of the communicator.
    pub ranks: u32,
    /// Root of a rooted collective (v5 `root`), -1 otherwise.
    pub root: i32,
    /// Peer of a send or recv (v5 `peer`), -1 otherwise.
    pub peer: i32,
    /// Proxy operations that it takes on this rank.
    pub proxy_ops: u32,
    /// Graph number in this process if captured, else 0.
    pub graph: u32,
    /// Node among the communicator's operations in the graph.
    pub node: u32,
    /// Group depth of the call (v5 `groupDepth`; 1 = implicit).
    pub group_depth: u32,
    /// Thread that made the call.
    pub tid: u32,
    /// [`crate::Function`] code (v5 `func`).
    pub function: u8,
    /// [`crate::DataType`] code (v5 `datatype`).
    pub data_type: u8,
    /// [`crate::ReduceOp`] code.
    pub reduce_op: u8,
    /// [`crate::Algorithm`] code (v5 `algo`).
    pub algorithm: u8,
    /// [`crate::Protocol`] code (v5 `proto`).
    pub protocol: u8,
    /// Channels used (v5 `nChannels`).
    pub channels: u8,
    /// Warps per channel (v5 `nWarps`); 1 on the host device.
    pub warps: u8,
    /// [`crate::Flags`].
    pub flags: u8,
    /// Room for later fields; zero.
    pub reserved: [u64; 9],
}

const WORDS: usize = size_of::<Description>() / 8;
const _: () = assert!(size_of::<Description>() == 240 && align_of::<Description>() == 8);

/// A slot of the description table: a sequence lock over the words of one [`Description`]; 256 bytes.
///
/// One writer at a time (the thread that owns the operation at that moment: caller, then device); readers in other
/// processes retry. `version` is odd while a write is going on.
#[derive(Debug)]
#[repr(C)]
pub struct DescriptionSlot {
    version: AtomicU64,
    words: [AtomicU64; WORDS],
    reserved: u64,
}

const _: () = assert!(size_of::<DescriptionSlot>() == 256);

impl DescriptionSlot {
    /// Replaces the whole entry.
    pub fn write(&self, description: &Description) {
        let version = self.version.load(Ordering::Relaxed) | 1;
        // The odd version must be visible before any word changes: the release fence orders this store before the
        // word stores below for every reader that sees one of them and then issues its acquire fence.
        self.version.store(version, Ordering::Relaxed);
        fence(Ordering::Release);
        // SAFETY: `Description` is `repr(C)`, a multiple of 8 bytes, without padding, and plain data.
        let words = unsafe { &*core::ptr::from_ref(description).cast::<[u64; WORDS]>() };
        for (slot, word) in self.words.iter().zip(words) {
            slot.store(*word, Ordering::Relaxed);
        }
        // Release: whoever reads this even version also reads the words above.
        self.version.store(version.wrapping_add(1), Ordering::Release);
    }

    /// Sets one time (a field of [`Description`] by [`Time`]) if the slot still holds operation `op`. A single-word
    /// store needs no lock: the reader sees either value, and both are true.
    pub fn set_time(&self, op: u32, time: Time, ns: u64) {
        if self.op() == op {
            self.words[time as usize].store(ns, Ordering::Release);
        }
    }

    /// The operation number that the slot holds now.
    #[must_use]
    pub fn op(&self) -> u32 {
        let word = self.words[core::mem::offset_of!(Description, op) / 8].load(Ordering::Acquire);
        // `op` is the first half of its word.
        if cfg!(target_endian = "little") {
            word as u32
        } else {
            (word >> 32) as u32
        }
    }

    /// The entry of operation `op`; `None` if the slot holds another operation or is being rewritten without end.
    #[must_use]
    pub fn read(&self, op: u32) -> Option<Description> {
        for _ in 0..64 {
            // Acquire: the words read below are at least as new as this version.
            let before = self.version.load(Ordering::Acquire);
            if before & 1 == 1 {
                core::hint::spin_loop();
                continue;
            }
            let mut words = [0u64; WORDS];
            for (word, slot) in words.iter_mut().zip(&self.words) {
                *word = slot.load(Ordering::Relaxed);
            }
            // Pairs with the writer's release fence: had a word above come from a later write, the version load below
            // would see at least that write's odd version.
            fence(Ordering::Acquire);
            if self.version.load(Ordering::Relaxed) == before {
                // SAFETY: `Description` is plain data of exactly `WORDS` words; every bit pattern is valid.
                let description = unsafe { core::mem::transmute::<[u64; WORDS], Description>(words) };
                return (description.op == op && before != 0).then_some(description);
            }
        }
        None
    }
}

/// The times that are written after the description itself, as word indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Time {
    /// [`Description::api_end_ns`]
    ApiEnd = core::mem::offset_of!(Description, api_end_ns) / 8,
    /// [`Description::launch_start_ns`]
    LaunchStart = core::mem::offset_of!(Description, launch_start_ns) / 8,
    /// [`Description::launch_end_ns`]
    LaunchEnd = core::mem::offset_of!(Description, launch_end_ns) / 8,
    /// [`Description::device_start_ns`]
    DeviceStart = core::mem::offset_of!(Description, device_start_ns) / 8,
    /// [`Description::device_end_ns`]
    DeviceEnd = core::mem::offset_of!(Description, device_end_ns) / 8,
}
