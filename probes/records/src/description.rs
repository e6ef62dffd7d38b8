//! What does not fit into a record stands once per operation in a description entry of the shared pages.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering};

use crate::{Waits, sequence::SequenceLock};

/// Everything about one operation on one rank; 208 bytes. Times are `CLOCK_MONOTONIC` nanoseconds, 0 = not yet.
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
    /// The word of [`Waits`] that its kernel wrote last, and when: what it waits for, while it is in progress.
    pub waits: u64,
    /// `CLOCK_MONOTONIC` nanoseconds, 0 for never.
    pub waits_ns: u64,
    /// Room for later fields; zero.
    pub reserved: [u64; 3],
}

impl Description {
    /// What its kernel waits for, if it has said so just before `now`.
    #[must_use]
    pub const fn waits(&self, now: u64) -> Option<Waits> {
        Waits::said(self.waits, self.waits_ns, self.op, now)
    }
}

const WORDS: usize = size_of::<Description>() / 8;
const _: () = assert!(size_of::<Description>() == 208 && align_of::<Description>() == 8);

/// A slot of the description table: a sequence lock over the words of one [`Description`]; 256 bytes.
///
/// One writer at a time (the thread that owns the operation at that moment: caller, then device); readers in other
/// processes retry.
///
/// The times of [`Time`] come after the rest, without the lock, from threads that may be slow: by the time one stores the
/// end of its operation, the slot may be another operation's. So each of these times has a check word, made of the time
/// and of the operation whose it is. A reader takes no time whose check is not that of the operation it reads of: a late
/// writer may cost another operation a time, which then is not known, but never gives it a wrong one.
#[derive(Debug)]
#[repr(C)]
pub struct DescriptionSlot {
    words: SequenceLock<WORDS>,
    checks: [AtomicU64; TIMES.len()],
}

// What loom has instead of atomics is larger.
#[cfg(not(loom))]
const _: () = assert!(size_of::<DescriptionSlot>() == 256);

/// What stands beside time `ns` of operation `op`. Multiplied by an odd number, no two operations give the same; and those
/// that share a slot differ in the upper bits, where times of the same age do not.
const fn check(op: u32, ns: u64) -> u64 {
    ns ^ (op as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl DescriptionSlot {
    /// Replaces the whole entry.
    #[inline]
    pub fn write(&self, description: &Description) {
        // SAFETY: `Description` is `repr(C)`, a multiple of 8 bytes, without padding, and plain data.
        let words = unsafe { &*core::ptr::from_ref(description).cast::<[u64; WORDS]>() };
        self.words.write(words, || {
            for (slot, time) in self.checks.iter().zip(TIMES) {
                slot.store(check(description.op, words[time.word()]), Ordering::Relaxed);
            }
        });
    }

    /// Sets times (fields of [`Description`] by [`Time`]) if the slot still holds operation `op`. Needs no lock: the
    /// reader sees a time with its check, or neither.
    #[inline]
    pub fn set_times<const N: usize>(&self, op: u32, times: [(Time, u64); N]) {
        if self.op() == op {
            for (time, ns) in times {
                self.store_time(op, time, ns);
            }
        }
    }

    /// Sets what its kernel waits for, if the slot still holds operation `op`. Needs no lock: the word says whose it is, and one that comes
    /// late to another operation's slot is not taken for its own.
    pub fn set_waits(&self, op: u32, waits: Waits, ns: u64) {
        if self.op() == op {
            // Relaxed: a word that is seen with the time of the one before is as good.
            let word = |offset: usize| self.words.word(offset / 8);
            word(core::mem::offset_of!(Description, waits)).store(waits.word(), Ordering::Relaxed);
            word(core::mem::offset_of!(Description, waits_ns)).store(ns, Ordering::Relaxed);
        }
    }

    #[inline]
    fn store_time(&self, op: u32, time: Time, ns: u64) {
        // Relaxed: a reader that must see both has read a record that was written after them.
        self.words.word(time.word()).store(ns, Ordering::Relaxed);
        self.checks[time as usize].store(check(op, ns), Ordering::Relaxed);
    }

    /// The operation number that the slot holds now.
    #[inline]
    #[must_use]
    pub fn op(&self) -> u32 {
        let word = self
            .words
            .word(core::mem::offset_of!(Description, op) / 8)
            .load(Ordering::Acquire);
        // `op` is the first half of its word.
        if cfg!(target_endian = "little") {
            word as u32
        } else {
            (word >> 32) as u32
        }
    }

    /// Whether it holds an operation whose end is not known.
    #[inline]
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        let op = self.op();
        // Relaxed: an end that comes meanwhile may be missed.
        let end = self.words.word(Time::DeviceEnd.word()).load(Ordering::Relaxed);
        let is_its_own = self.checks[Time::DeviceEnd as usize].load(Ordering::Relaxed) == check(op, end);
        op != 0 && (end == 0 || !is_its_own)
    }

    /// The entry of operation `op`; `None` if the slot holds another operation or is being rewritten without end.
    #[must_use]
    pub fn read(&self, op: u32) -> Option<Description> {
        let words = self.words.read(|words| {
            for (slot, time) in self.checks.iter().zip(TIMES) {
                let word = &mut words[time.word()];
                if slot.load(Ordering::Relaxed) != check(op, *word) {
                    *word = 0;
                }
            }
        })?;
        // SAFETY: `Description` is plain data of exactly `WORDS` words; every bit pattern is valid.
        let description = unsafe { core::mem::transmute::<[u64; WORDS], Description>(words) };
        (description.op == op).then_some(description)
    }
}

/// The times that are written after the description itself, each at its place among the check words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Time {
    /// [`Description::api_end_ns`]
    ApiEnd,
    /// [`Description::launch_start_ns`]
    LaunchStart,
    /// [`Description::launch_end_ns`]
    LaunchEnd,
    /// [`Description::device_start_ns`]
    DeviceStart,
    /// [`Description::device_end_ns`]
    DeviceEnd,
}

const TIMES: [Time; 5] = [
    Time::ApiEnd,
    Time::LaunchStart,
    Time::LaunchEnd,
    Time::DeviceStart,
    Time::DeviceEnd,
];

impl Time {
    /// Its word in the description.
    const fn word(self) -> usize {
        let offset = match self {
            Self::ApiEnd => core::mem::offset_of!(Description, api_end_ns),
            Self::LaunchStart => core::mem::offset_of!(Description, launch_start_ns),
            Self::LaunchEnd => core::mem::offset_of!(Description, launch_end_ns),
            Self::DeviceStart => core::mem::offset_of!(Description, device_start_ns),
            Self::DeviceEnd => core::mem::offset_of!(Description, device_end_ns),
        };
        offset / 8
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_a_kernel_waits_for_is_its_operation_s() {
        // SAFETY: atomics of integers; zero is a value of each.
        let slot: DescriptionSlot = unsafe { core::mem::zeroed() };
        let describe = |op| {
            slot.write(&Description {
                op,
                ..Description::default()
            });
        };
        let waits = Waits {
            op: 1,
            channel: 2,
            phase: crate::Phase::Data,
            peer: Some(3),
            step: 4,
        };
        describe(1);
        slot.set_waits(1, waits, 1000);
        assert_eq!(slot.read(1).unwrap().waits(1001), Some(waits));
        describe(4097);
        slot.set_waits(1, waits, 1002);
        assert_eq!(slot.read(4097).unwrap().waits(1003), None);
    }

    #[test]
    fn a_time_that_comes_late_goes_to_no_other_operation() {
        // SAFETY: atomics of integers; zero is a value of each.
        let slot: DescriptionSlot = unsafe { core::mem::zeroed() };
        let describe = |op, device_end_ns| {
            slot.write(&Description {
                op,
                device_end_ns,
                ..Description::default()
            });
        };
        let end_of = |op| slot.read(op).map(|description| description.device_end_ns);
        describe(1, 0);
        slot.set_times(1, [(Time::DeviceEnd, 1000)]);
        assert_eq!(end_of(1), Some(1000));
        // The slot goes to another operation while a thread is between the question and the store of `set_times`.
        describe(4097, 0);
        slot.store_time(1, Time::DeviceEnd, 1001);
        assert_eq!(end_of(4097), Some(0), "not its own");
        // Or between its two stores, after which the other operation's own time comes.
        slot.words
            .word(Time::DeviceEnd.word())
            .store(1002, Ordering::Relaxed);
        assert_eq!(end_of(4097), Some(0));
        slot.set_times(4097, [(Time::DeviceEnd, 2000)]);
        assert_eq!(end_of(4097), Some(2000));
        slot.checks[Time::DeviceEnd as usize].store(check(1, 1002), Ordering::Relaxed);
        assert_eq!(end_of(4097), Some(0), "unknown rather than doubtful");
        // What the description itself brings is its own.
        describe(8193, 3000);
        assert_eq!(end_of(8193), Some(3000));
    }
}
