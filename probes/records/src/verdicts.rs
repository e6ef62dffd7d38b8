//! What the watchdog of a process has said, for readers of its pages who come later.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::{Cause, connection::DEVICE_NAME_BYTES, sequence::SequenceLock, text::text};

/// One verdict on an operation of one rank; 136 bytes. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct GivenVerdict {
    /// Which one of the process it is, from 1.
    pub number: u64,
    /// When it was given.
    pub time_ns: u64,
    /// Communicator of the operation.
    pub comm: u64,
    /// The operation, as in [`crate::Record::seq`].
    pub seq: u64,
    /// When it began to be in progress.
    pub begun_ns: u64,
    /// What keeps the culprit, if [`GivenVerdict::is_held_up`]: the communicator of that operation.
    pub held_comm: u64,
    /// And the operation, as in [`crate::Record::seq`].
    pub held_seq: u64,
    /// And for how long it had been in progress, nanoseconds.
    pub held_for_ns: u64,
    /// Number of the operation in the process.
    pub op: u32,
    /// 0 for an eager operation, n for the n-th replay.
    pub replay: u32,
    /// This rank in the communicator.
    pub rank: u32,
    /// The rank that the others wait for.
    pub culprit: u32,
    /// Other ranks of which the same is true.
    pub others: u32,
    /// Peer of a message, -1 otherwise.
    pub peer: i32,
    /// Replay of what keeps the culprit.
    pub held_replay: u32,
    /// Its sender, if it is a message; [`GivenVerdict::NOBODY`] otherwise.
    pub held_from: u32,
    /// Its receiver, if it is a message.
    pub held_to: u32,
    /// [`Cause`].
    pub cause: u8,
    /// It will not end by itself; otherwise somebody is late.
    pub is_hang: u8,
    /// [`crate::Flags`] of the operation.
    pub flags: u8,
    /// What the culprit is in instead is known.
    pub is_held_up: u8,
    /// [`Cause::StuckNic`]: number of the first queue pair of the culprit's end that carries nothing; 0 otherwise.
    pub queue_pair: u32,
    /// And the port of its device, from 1.
    pub port: u8,
    /// Room for later fields; zero.
    pub reserved: [u8; 3],
    /// And that device's name, zero-padded.
    pub device: [u8; DEVICE_NAME_BYTES],
}

/// An end of a connection that carried nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nic {
    device: [u8; DEVICE_NAME_BYTES],
    /// Port of the device, from 1.
    pub port: u8,
    /// Number of the end's first queue pair.
    pub queue_pair: u32,
}

impl Nic {
    /// Name of the device.
    #[must_use]
    pub fn device(&self) -> &str {
        text(&self.device)
    }
}

impl GivenVerdict {
    /// Stands for a rank where there is none.
    pub const NOBODY: u32 = u32::MAX;

    /// Why; `None` for a cause that this version does not know.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        Cause::from_code(self.cause)
    }

    /// Where the culprit's network carried nothing, if it was that.
    #[must_use]
    pub fn nic(&self) -> Option<Nic> {
        (self.queue_pair != 0).then_some(Nic {
            device: self.device,
            port: self.port,
            queue_pair: self.queue_pair,
        })
    }

    /// Sender and receiver of what keeps the culprit, if it is a message.
    #[must_use]
    pub fn held_pair(&self) -> Option<(u32, u32)> {
        (self.held_from != Self::NOBODY).then_some((self.held_from, self.held_to))
    }
}

const WORDS: usize = size_of::<GivenVerdict>() / 8;
const _: () = assert!(size_of::<GivenVerdict>() == 136 && align_of::<GivenVerdict>() == 8);

/// A slot of the table of verdicts: whether somebody writes it, and a sequence lock over the words of one [`GivenVerdict`].
#[derive(Debug)]
#[repr(C)]
pub struct VerdictSlot {
    /// 1 while it is being written.
    busy: AtomicU64,
    words: SequenceLock<WORDS>,
}

// What loom has instead of atomics is larger.
#[cfg(not(loom))]
const _: () = assert!(size_of::<VerdictSlot>() == 152);

impl VerdictSlot {
    /// Replaces what is in the slot; `false` if another thread is doing so, which has been at it for as many verdicts as the table
    /// holds.
    pub fn write(&self, verdict: &GivenVerdict) -> bool {
        // Acquire: what the writer before wrote happened before.
        if self
            .busy
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            return false;
        }
        // SAFETY: `GivenVerdict` is `repr(C)`, a multiple of 8 bytes, without padding, and plain data.
        let words = unsafe { &*core::ptr::from_ref(verdict).cast::<[u64; WORDS]>() };
        self.words.write(words, || {});
        self.busy.store(0, Ordering::Release);
        true
    }

    /// What is in the slot; `None` if nothing is, or it is being rewritten without end.
    #[must_use]
    pub fn read(&self) -> Option<GivenVerdict> {
        let words = self.words.read(|_| {})?;
        // SAFETY: `GivenVerdict` is plain data of exactly `WORDS` words; every bit pattern is valid.
        Some(unsafe { core::mem::transmute::<[u64; WORDS], GivenVerdict>(words) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_the_last_verdict_that_was_written() {
        // SAFETY: atomics; zero is a value of each.
        let slot: VerdictSlot = unsafe { core::mem::zeroed() };
        assert_eq!(slot.read(), None);
        // SAFETY: plain data; zero is valid for every field.
        let nothing: GivenVerdict = unsafe { core::mem::zeroed() };
        for number in 1..3 {
            let verdict = GivenVerdict {
                number,
                cause: Cause::RankStopped.code(),
                held_from: GivenVerdict::NOBODY,
                ..nothing
            };
            assert!(slot.write(&verdict));
            assert_eq!(slot.read(), Some(verdict));
            assert_eq!(verdict.cause(), Some(Cause::RankStopped));
            assert_eq!((verdict.held_pair(), verdict.nic()), (None, None));
        }
        slot.busy.store(1, Ordering::Relaxed);
        assert!(!slot.write(&nothing), "another thread writes it");
        assert_eq!(slot.read().map(|read| read.number), Some(2));
    }
}
