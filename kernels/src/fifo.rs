//! One direction of one connection on one channel: a ring of slots in memory that both its ends can reach.
//!
//! The ends are two kernels (same node), or a kernel and its proxy (the proxy moves slots over the network). It is
//! NCCL's `ncclConnInfo` (head, tail, step sizes) in one piece.

use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Slots of a FIFO (`NCCL_STEPS`).
pub const SLOTS: usize = 8;

/// Control words at the start of a FIFO's memory; the slots follow, [`Fifo::slot_bytes`] each, 4096-byte aligned.
#[derive(Debug)]
#[repr(C)]
pub struct FifoHeader {
    /// Slots posted by the producer since the beginning.
    tail: AtomicU64,
    _line0: [u64; 7],
    /// Slots released by the consumer since the beginning.
    head: AtomicU64,
    _line1: [u64; 7],
    /// Bytes posted in each slot.
    sizes: [AtomicU32; SLOTS],
    /// Tag of the operation that each slot belongs to ([`Work::tag`](crate::Work::tag)), in the line of the sizes: a
    /// consumer that has fetched one has the other.
    tags: [AtomicU32; SLOTS],
}

const _: () = assert!(size_of::<FifoHeader>() == 192);
const _: () = assert!(std::mem::offset_of!(FifoHeader, sizes) == 128);
const _: () = assert!(std::mem::offset_of!(FifoHeader, tags) == 160);

/// Offset of the first slot from the start of the memory.
pub const SLOTS_OFFSET: usize = 4096;

/// A FIFO in mapped memory. Both ends hold one; which side they use is theirs to keep to: one producer, one consumer.
pub struct Fifo {
    header: *const FifoHeader,
    slots: *mut u8,
    slot_bytes: usize,
    /// Keeps the memory mapped.
    _memory: Arc<dyn Send + Sync>,
}

// SAFETY: the header is atomics; a slot is touched by the producer between `free` and `post`, by the consumer between
// `posted` and `release`, and these are ordered by tail and head.
unsafe impl Send for Fifo {}
// SAFETY: as above; the one-producer-one-consumer rule is the caller's.
unsafe impl Sync for Fifo {}

impl Fifo {
    /// Bytes of memory for a FIFO with slots of `slot_bytes`.
    #[must_use]
    pub const fn memory_bytes(slot_bytes: usize) -> usize {
        SLOTS_OFFSET + SLOTS * slot_bytes
    }

    /// A FIFO in `memory_bytes(slot_bytes)` bytes at `base`, zeroed when new.
    ///
    /// # Safety
    /// `base` is 64-byte aligned, points to that many readable and writable bytes, and stays mapped while `memory` lives.
    #[must_use]
    pub unsafe fn new(base: *mut u8, slot_bytes: usize, memory: Arc<dyn Send + Sync>) -> Self {
        Self {
            header: base.cast(),
            // SAFETY: within the caller's memory.
            slots: unsafe { base.add(SLOTS_OFFSET) },
            slot_bytes,
            _memory: memory,
        }
    }

    fn header(&self) -> &FifoHeader {
        // SAFETY: the memory is mapped while `_memory` lives, and the header is atomics only.
        unsafe { &*self.header }
    }

    /// Where its memory begins: what a device that reaches the same memory is given.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.header.cast_mut().cast()
    }

    /// Bytes of a slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Producer: position of the next slot to fill, if one is free.
    #[must_use]
    pub fn free(&self) -> Option<u64> {
        let tail = self.header().tail.load(Ordering::Relaxed); // ours alone to write
        // Acquire: pairs with `release`; the consumer is done with the slot before we overwrite it.
        let head = self.header().head.load(Ordering::Acquire);
        (tail.wrapping_sub(head) < SLOTS as u64).then_some(tail)
    }

    /// Producer: publishes the slot at the position that [`Fifo::free`] gave, holding `bytes` bytes of the operation
    /// with this tag.
    pub fn post(&self, position: u64, bytes: usize, tag: u32) {
        let slot = position as usize % SLOTS;
        self.header().sizes[slot].store(bytes as u32, Ordering::Relaxed);
        self.header().tags[slot].store(tag, Ordering::Relaxed);
        // Release: the slot's bytes, size and tag are written before the consumer sees the new tail.
        self.header().tail.store(position + 1, Ordering::Release);
    }

    /// Consumer: tag of the slot at a position that [`Fifo::posted`] or [`Fifo::size_at`] said is posted.
    #[must_use]
    pub fn tag_at(&self, position: u64) -> u32 {
        // Relaxed: those have acquired the tail, and the producer writes the tag before the tail.
        self.header().tags[position as usize % SLOTS].load(Ordering::Relaxed)
    }

    /// Consumer: position and size of the oldest posted slot.
    #[must_use]
    pub fn posted(&self) -> Option<(u64, usize)> {
        let head = self.header().head.load(Ordering::Relaxed); // ours alone to write
        self.size_at(head).map(|bytes| (head, bytes))
    }

    /// Consumer: size of the slot at `position` (at or after the oldest), if it is posted.
    #[must_use]
    pub fn size_at(&self, position: u64) -> Option<usize> {
        // Acquire: pairs with `post`; the slot's bytes and size are there.
        let tail = self.header().tail.load(Ordering::Acquire);
        // The size comes from the peer: never trust it beyond the slot.
        (tail.wrapping_sub(position) as i64 > 0).then(|| {
            (self.header().sizes[position as usize % SLOTS].load(Ordering::Relaxed) as usize)
                .min(self.slot_bytes)
        })
    }

    /// Consumer: gives back the oldest slot, at the position that [`Fifo::posted`] gave.
    pub fn release(&self, position: u64) {
        // Release: our reads of the slot are done before the producer sees it free.
        self.header().head.store(position + 1, Ordering::Release);
    }

    /// Slots released so far: what a producer's end has seen consumed.
    #[must_use]
    pub fn released(&self) -> u64 {
        self.header().head.load(Ordering::Acquire)
    }

    /// Address of the slot at a position.
    #[must_use]
    pub fn slot(&self, position: u64) -> *mut u8 {
        // SAFETY: the offset is within the memory that `new` was given.
        unsafe { self.slots.add(position as usize % SLOTS * self.slot_bytes) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A FIFO on the heap.
    pub(crate) fn heap(slot_bytes: usize) -> Arc<Fifo> {
        #[derive(Clone, Copy)]
        #[repr(align(64))]
        struct Line(#[expect(dead_code, reason = "only there to be memory")] [u8; 64]);
        let mut memory = vec![Line([0; 64]); Fifo::memory_bytes(slot_bytes).div_ceil(64)];
        let base = memory.as_mut_ptr().cast();
        // SAFETY: aligned, zeroed and large enough; a vector's elements stay where they are when it is moved.
        Arc::new(unsafe { Fifo::new(base, slot_bytes, Arc::new(memory)) })
    }

    #[test]
    fn slots_are_handed_over_in_order_and_reused() {
        let fifo = heap(100);
        assert!(fifo.posted().is_none());
        for round in 0..3_u64 {
            for slot in 0..SLOTS as u64 {
                let position = fifo.free().unwrap();
                assert_eq!(position, round * SLOTS as u64 + slot);
                // SAFETY: a free slot of 100 bytes.
                unsafe { fifo.slot(position).write_bytes(position as u8, 100) };
                fifo.post(position, slot as usize, position as u32 + 1);
            }
            assert!(fifo.free().is_none(), "full");
            for slot in 0..SLOTS as u64 {
                let (position, bytes) = fifo.posted().unwrap();
                assert_eq!(bytes as u64, slot);
                assert_eq!(u64::from(fifo.tag_at(position)), position + 1);
                // SAFETY: a posted slot of 100 bytes.
                assert_eq!(unsafe { fifo.slot(position).add(99).read() }, position as u8);
                fifo.release(position);
                assert_eq!(fifo.released(), position + 1);
            }
        }
    }

    #[test]
    fn a_size_beyond_the_slot_is_cut() {
        let fifo = heap(100);
        fifo.post(0, 5000, 1);
        assert_eq!(fifo.posted(), Some((0, 100)));
        assert_eq!(fifo.size_at(1), None);
    }
}
