//! The communicators of a process, for readers of its pages.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{text::text, vocabulary::NAME_BYTES};

/// One communicator in the communicator table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Communicator {
    /// Communicator id (v5 `commId`), the same on all its ranks.
    pub id: u64,
    /// Id of the communicator that it was split from, or 0.
    pub parent: u64,
    /// When its initialisation began, `CLOCK_MONOTONIC` nanoseconds.
    pub init_start_ns: u64,
    /// When it was ready.
    pub init_end_ns: u64,
    /// This rank.
    pub rank: u32,
    /// Number of ranks (v5 `nranks`).
    pub ranks: u32,
    /// This rank among those on its node.
    pub local_rank: u32,
    /// Ranks on its node.
    pub local_ranks: u32,
    /// Its node, numbered by first rank.
    pub node: u32,
    /// Number of nodes (v5 `nNodes`).
    pub nodes: u32,
    /// Device number.
    pub device: i32,
    /// Channels.
    pub channels: u32,
    /// Name that the user gave (v5 `commName`), zero-padded UTF-8.
    pub name: [u8; NAME_BYTES],
    /// Bytes of a FIFO slot; 0 if the library does not tell.
    pub slot_bytes: u32,
    /// What its operations may be done with: [`Communicator::ONE_SHOT`], [`Communicator::PEERS`],
    /// [`Communicator::ZERO_CTA`].
    pub abilities: u32,
    /// Why not all ranks' kernels reach each other's memory, without [`Communicator::PEERS`]: zero-padded UTF-8, cut where it does not
    /// fit; empty if the library does not tell.
    pub apart: [u8; APART_BYTES],
}

/// Bytes of [`Communicator::apart`].
pub const APART_BYTES: usize = 112;

const _: () = assert!(size_of::<Communicator>() == 232 && align_of::<Communicator>() == 8);

impl Communicator {
    /// All ranks' devices do an operation in one shot; a bit of [`Communicator::abilities`].
    pub const ONE_SHOT: u32 = 1;
    /// All ranks' kernels reach each other's memory.
    pub const PEERS: u32 = 2;
    /// Copy engines do what they can in windows, however short it is, as where all ranks' `CTAPolicy` is zero.
    pub const ZERO_CTA: u32 = 4;

    /// Its name, cut at the first zero byte; empty if it has none or is not UTF-8.
    #[must_use]
    pub fn name(&self) -> &str {
        text(&self.name)
    }

    /// The text of [`Communicator::apart`].
    #[must_use]
    pub fn apart(&self) -> &str {
        text(&self.apart)
    }
}

const COMM_WORDS: usize = size_of::<Communicator>() / 8;

/// A slot of the communicator table: a sequence lock like [`crate::DescriptionSlot`], with the slot's state.
#[derive(Debug)]
#[repr(C)]
pub struct CommSlot {
    version: AtomicU64,
    /// 0 free, 1 live.
    live: AtomicU32,
    reserved: u32,
    words: [AtomicU64; COMM_WORDS],
    tail: u64,
}

const _: () = assert!(size_of::<CommSlot>() == 256);

impl CommSlot {
    /// Claims a free slot and fills it; `false` if it is taken.
    #[must_use]
    pub fn claim(&self, communicator: &Communicator) -> bool {
        // Acquire: the previous owner's clearing happened before.
        if self
            .live
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            return false;
        }
        let version = self.version.load(Ordering::Relaxed) | 1;
        // Odd version first, then the words, as in `DescriptionSlot::write`.
        self.version.store(version, Ordering::Relaxed);
        core::sync::atomic::fence(Ordering::Release);
        // SAFETY: `Communicator` is `repr(C)`, a multiple of 8 bytes, without padding, and plain data.
        let words = unsafe { &*core::ptr::from_ref(communicator).cast::<[u64; COMM_WORDS]>() };
        for (slot, word) in self.words.iter().zip(words) {
            slot.store(*word, Ordering::Relaxed);
        }
        self.version.store(version.wrapping_add(1), Ordering::Release);
        true
    }

    /// Frees the slot. Its words stay readable until the next claim, for a reader that is a moment behind.
    pub fn free(&self) {
        self.live.store(0, Ordering::Release);
    }

    /// Whether the communicator is live.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.live.load(Ordering::Acquire) == 1
    }

    /// What the slot holds or last held; `None` if it was never used or is being rewritten without end.
    #[must_use]
    pub fn read(&self) -> Option<Communicator> {
        for _ in 0..64 {
            let before = self.version.load(Ordering::Acquire);
            if before & 1 == 1 {
                core::hint::spin_loop();
                continue;
            }
            let mut words = [0u64; COMM_WORDS];
            for (word, slot) in words.iter_mut().zip(&self.words) {
                *word = slot.load(Ordering::Relaxed);
            }
            core::sync::atomic::fence(Ordering::Acquire);
            if self.version.load(Ordering::Relaxed) == before {
                // SAFETY: `Communicator` is plain data of exactly `COMM_WORDS` words; every bit pattern is valid.
                let communicator = unsafe { core::mem::transmute::<[u64; COMM_WORDS], Communicator>(words) };
                return (before != 0).then_some(communicator);
            }
        }
        None
    }
}
