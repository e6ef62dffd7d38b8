//! The FIFO of one direction of a connection on one channel: a ring of slots in memory that both ends reach.
//!
//! The ends are two kernels (same node), or a kernel and its proxy, which moves slots over the network. This is NCCL's `ncclConnInfo` (head,
//! tail, step size). As in NCCL's LL128 protocol, each slot has a flag next to its size and short data, so the consumer gets all of them with
//! the one cache line that it polls.
//!
//! A FIFO has two halves: the *consumer half* holds what the consumer polls, and the slots; the *producer half* holds what the producer
//! polls. In host memory both are one block. Between two GPUs each half lies in the memory of the GPU that polls it, so that only posted
//! stores cross the link.
//!
//! States of a slot: free → posted ([`Fifo::post`], by the producer) → free ([`Fifo::release`], by the consumer).
//!
//! Invariants:
//! - One thread produces and one thread consumes at a time.
//! - `tail - head` never exceeds [`SLOTS`].
//! - A flag names the position and the tag of its slot, so a flag of an earlier round is never taken for the current one.

use std::{
    cell::UnsafeCell,
    mem::offset_of,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// Slots of a FIFO (`NCCL_STEPS`).
pub const SLOTS: usize = 8;

/// The longest data that travels in the cache line of a slot's flag, in bytes.
pub const INLINE_BYTES: usize = 48;

/// One slot's flag, size and short data, in one cache line. Only the producer writes it.
#[repr(C, align(64))]
struct Line {
    /// [`flag`] of the posted slot. Position and tag share a word, so a consumer sees both or neither.
    flag: AtomicU64,
    /// Bytes posted. Kernels at both ends know the size and do not write it.
    size: AtomicU32,
    /// 0.
    reserved: u32,
    /// The slot's data, if it fits.
    data: UnsafeCell<[u8; INLINE_BYTES]>,
}

/// A slot's flag. Low half: its position plus one; two slots in use never have the same. High half: the tag of its operation
/// ([`Work::tag`](crate::Work::tag)), never 0.
const fn flag(position: u64, tag: u32) -> u64 {
    (tag as u64) << 32 | low(position + 1)
}

const fn low(word: u64) -> u64 {
    word & 0xffff_ffff
}

/// Aligned to two cache lines, since processors fetch pairs: a consumer that polls one slot must not take the next slot's line from the
/// producer.
#[repr(C, align(128))]
struct Apart<T>(T);

/// The beginning of a FIFO's memory. The slots follow at [`SLOTS_OFFSET`], [`Fifo::slot_bytes`] each. `cuda/layout.cuh` has the twin of this.
///
/// If the halves are apart, this is the consumer half; the producer half is `Counts` alone.
#[repr(C)]
pub struct FifoHeader {
    counts: Counts,
    /// By position modulo [`SLOTS`].
    lines: [Apart<Line>; SLOTS],
    /// Address of the slots; 0: they follow this header. See [`Fifo::set_slots_address`].
    slots: Apart<AtomicU64>,
}

/// The beginning of either half.
#[repr(C)]
struct Counts {
    /// The producer's own, in the producer half.
    producer: Apart<Producer>,
    /// Slots released since the beginning. If the halves are apart, the consumer half has the consumer's own count, and the producer half the
    /// count that the consumer has published.
    head: Apart<AtomicU64>,
}

/// The producer's own state. It lies in the shared memory since the producer may be one object now and another later.
#[repr(C)]
struct Producer {
    /// Slots posted since the beginning.
    tail: AtomicU64,
    /// The last seen value of `head`. Reading `head` again takes its cache line from the consumer. It never exceeds `head`; GPU kernels read
    /// `head` each time and leave this behind.
    head: AtomicU64,
}

// The twins in `cuda/layout.cuh` assert the same.
const _: () = assert!(size_of::<Line>() == 64);
const _: () = assert!(offset_of!(Line, size) == 8);
const _: () = assert!(offset_of!(Line, data) == 16);
const _: () = assert!(size_of::<FifoHeader>() == 256 + SLOTS * 128 + 128);
const _: () = assert!(offset_of!(FifoHeader, slots) == 1280);
const _: () = assert!(offset_of!(FifoHeader, counts) == 0);
const _: () = assert!(offset_of!(Counts, producer) == 0);
const _: () = assert!(offset_of!(Counts, head) == 128);
const _: () = assert!(size_of::<Counts>() == PRODUCER_BYTES);
const _: () = assert!(offset_of!(FifoHeader, lines) == PRODUCER_BYTES);
const _: () = assert!(size_of::<FifoHeader>() <= SLOTS_OFFSET);

/// Offset of the first slot from the start of the memory.
pub const SLOTS_OFFSET: usize = 4096;

/// Bytes of a separate producer half.
pub const PRODUCER_BYTES: usize = 256;

/// Whether the consumer has released all posted slots. `half` holds the bytes of the producer half.
#[must_use]
pub fn is_drained(half: &[u8]) -> bool {
    let word = |at: usize| half.get(at..at + size_of::<u64>());
    word(offset_of!(Counts, producer)) == word(offset_of!(Counts, head))
}

/// Addresses of a FIFO's halves for the kernels at one of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halves {
    /// The consumer half: a [`FifoHeader`], and at [`SLOTS_OFFSET`] the slots.
    pub consumer: u64,
    /// The producer half: [`PRODUCER_BYTES`] bytes, laid out as the beginning of a [`FifoHeader`]. In host memory the same address.
    pub producer: u64,
}

/// A FIFO. Both ends hold one. Callers see to it that one thread produces and one consumes.
pub struct Fifo {
    halves: Halves,
    slot_bytes: usize,
    /// The host may access the memory.
    is_mapped: bool,
    /// The header says where the slots are.
    has_indirect_slots: bool,
    /// Keeps the memory mapped.
    _memory: Arc<dyn Send + Sync>,
}

impl Fifo {
    /// Bytes of memory for a FIFO with slots of `slot_bytes`.
    #[must_use]
    pub const fn memory_bytes(slot_bytes: usize) -> usize {
        SLOTS_OFFSET + SLOTS * slot_bytes
    }

    /// A FIFO in `memory_bytes(slot_bytes)` bytes at `base`, zeroed when new.
    ///
    /// # Safety
    /// `base` is 128-byte aligned, points to that many readable and writable bytes, and stays mapped while `memory` lives.
    #[must_use]
    pub unsafe fn new(base: *mut u8, slot_bytes: usize, memory: Arc<dyn Send + Sync>) -> Self {
        // SAFETY: the producer half is the beginning of the caller's memory.
        unsafe { Self::apart(base, base, slot_bytes, memory) }
    }

    /// A FIFO with separate halves: the consumer half in `memory_bytes(slot_bytes)` bytes, the producer half in [`PRODUCER_BYTES`], both
    /// zeroed when new.
    ///
    /// # Safety
    /// The conditions of [`Fifo::new`], for both halves.
    #[must_use]
    pub unsafe fn apart(
        consumer: *mut u8,
        producer: *mut u8,
        slot_bytes: usize,
        memory: Arc<dyn Send + Sync>,
    ) -> Self {
        let halves = Halves {
            consumer: consumer.expose_provenance() as u64,
            producer: producer.expose_provenance() as u64,
        };
        Self {
            halves,
            slot_bytes,
            is_mapped: true,
            has_indirect_slots: false,
            _memory: memory,
        }
    }

    /// A FIFO in device memory. The host hands it to kernels and may not access it.
    #[must_use]
    pub fn on_device(halves: Halves, slot_bytes: usize, memory: Arc<dyn Send + Sync>) -> Self {
        Self {
            halves,
            slot_bytes,
            is_mapped: false,
            has_indirect_slots: false,
            _memory: memory,
        }
    }

    /// The FIFO of a kernel whose other end is a proxy that chooses where the slots are ([`Fifo::set_slots_address`]). `memory` keeps those
    /// slots mapped.
    #[must_use]
    pub fn with_indirect_slots(self, memory: Arc<dyn Send + Sync>) -> Self {
        Self {
            has_indirect_slots: true,
            _memory: Arc::new((self._memory.clone(), memory)),
            ..self
        }
    }

    /// Whether the header says where the slots are.
    #[must_use]
    pub fn has_indirect_slots(&self) -> bool {
        self.has_indirect_slots
    }

    /// Whether the slots are elsewhere than behind the header.
    #[must_use]
    pub fn are_slots_elsewhere(&self) -> bool {
        self.has_indirect_slots && self.slots_address() != 0
    }

    fn slots_address(&self) -> u64 {
        // Relaxed: see `set_slots_address`.
        self.consumer().slots.0.load(Ordering::Relaxed)
    }

    /// Sets the address of the slots for a FIFO [with indirect slots](Fifo::with_indirect_slots). A producer calls it before it posts the first
    /// slot; a consumer calls it before the producing kernel is launched. The address never changes afterwards.
    pub fn set_slots_address(&self, slots: u64) {
        // Relaxed: the flag of the first slot, or the launch, orders it before its use.
        self.consumer().slots.0.store(slots, Ordering::Relaxed);
    }

    fn consumer(&self) -> &FifoHeader {
        assert!(self.is_mapped, "a FIFO in the memory of a device");
        // SAFETY: the caller of `apart` keeps the memory mapped while `_memory` lives, and the header is atomics and cells.
        unsafe { &*ptr::with_exposed_provenance(self.halves.consumer as usize) }
    }

    fn producer(&self) -> &Counts {
        assert!(self.is_mapped, "a FIFO in the memory of a device");
        // SAFETY: as above.
        unsafe { &*ptr::with_exposed_provenance(self.halves.producer as usize) }
    }

    /// The addresses of its halves, for a device that reaches the same memory.
    #[must_use]
    pub fn halves(&self) -> Halves {
        self.halves
    }

    /// Bytes of a slot.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    fn line(&self, position: u64) -> &Line {
        &self.consumer().lines[position as usize % SLOTS].0
    }

    /// Producer: position of the next slot to fill, if one is free.
    #[must_use]
    pub fn free(&self) -> Option<u64> {
        let Producer { tail, head } = &self.producer().producer.0;
        // Relaxed: only this end writes them. What this call does not acquire, an earlier call did.
        let (tail, seen) = (tail.load(Ordering::Relaxed), head.load(Ordering::Relaxed));
        let room = |head: u64| (tail.wrapping_sub(head) < SLOTS as u64).then_some(tail);
        room(seen).or_else(|| {
            // Acquire: pairs with `release`. The consumer is done with the slot before we overwrite it.
            let now = self.producer().head.0.load(Ordering::Acquire);
            head.store(now, Ordering::Relaxed);
            room(now)
        })
    }

    /// Producer: publishes the slot at a position from [`Fifo::free`]. The caller has written `bytes` bytes of the operation with this tag to
    /// [`Fifo::slot`].
    pub fn post(&self, position: u64, bytes: usize, tag: u32) {
        let line = self.line(position);
        line.size.store(bytes as u32, Ordering::Relaxed);
        // Release: the slot's bytes and size are written before the consumer sees the flag.
        line.flag.store(flag(position, tag), Ordering::Release);
        // Relaxed: only the producer reads it.
        self.producer()
            .producer
            .0
            .tail
            .store(position + 1, Ordering::Relaxed);
    }

    /// Consumer: tag of the posted slot at a position from [`Fifo::posted`] or [`Fifo::size_at`].
    #[must_use]
    pub fn tag_at(&self, position: u64) -> u32 {
        // Relaxed: `posted` and `size_at` have acquired the flag.
        (self.line(position).flag.load(Ordering::Relaxed) >> 32) as u32
    }

    /// Consumer: position and size of the oldest posted slot.
    #[must_use]
    pub fn posted(&self) -> Option<(u64, usize)> {
        let head = self.consumer().counts.head.0.load(Ordering::Relaxed); // only this end writes it
        self.size_at(head).map(|bytes| (head, bytes))
    }

    /// Consumer: size of the slot at `position` (the oldest, or one of the [`SLOTS`] from it on), if it is posted.
    #[must_use]
    pub fn size_at(&self, position: u64) -> Option<usize> {
        let line = self.line(position);
        // Acquire: pairs with `post`. The slot's bytes and size are there.
        // The peer chose the size: never trust it beyond the slot.
        (low(line.flag.load(Ordering::Acquire)) == low(position + 1))
            .then(|| (line.size.load(Ordering::Relaxed) as usize).min(self.slot_bytes))
    }

    /// Consumer: releases the oldest slot, at a position from [`Fifo::posted`].
    pub fn release(&self, position: u64) {
        if self.halves.consumer != self.halves.producer {
            // Relaxed: only the consumer reads it.
            self.consumer()
                .counts
                .head
                .0
                .store(position + 1, Ordering::Relaxed);
        }
        // Release: our reads of the slot are done before the producer sees it free.
        self.producer().head.0.store(position + 1, Ordering::Release);
    }

    /// Slots released so far, as the producer sees it.
    #[must_use]
    pub fn released(&self) -> u64 {
        self.producer().head.0.load(Ordering::Acquire)
    }

    /// Address of `bytes` bytes of the slot at a position, at most [`Fifo::slot_bytes`]. Short data lies in the flag's cache line, so both ends
    /// must pass the posted size.
    #[must_use]
    pub fn slot(&self, position: u64, bytes: usize) -> *mut u8 {
        if bytes <= INLINE_BYTES {
            return self.line(position).data.get().cast();
        }
        assert!(self.is_mapped, "a FIFO in the memory of a device");
        let slots = match self.are_slots_elsewhere() {
            true => self.slots_address(),
            false => self.halves.consumer + SLOTS_OFFSET as u64,
        };
        ptr::with_exposed_provenance_mut(slots as usize + position as usize % SLOTS * self.slot_bytes)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A FIFO on the heap.
    pub(crate) fn heap(slot_bytes: usize) -> Arc<Fifo> {
        #[derive(Clone, Copy)]
        #[repr(align(128))]
        struct Lines(#[expect(dead_code, reason = "only there to be memory")] [u8; 128]);
        let mut memory = vec![Lines([0; 128]); Fifo::memory_bytes(slot_bytes).div_ceil(128)];
        let base = memory.as_mut_ptr().cast();
        // SAFETY: aligned, zeroed and large enough; a vector's elements stay where they are when it is moved.
        Arc::new(unsafe { Fifo::new(base, slot_bytes, Arc::new(memory)) })
    }

    /// One whose halves are apart.
    fn apart(slot_bytes: usize) -> Arc<Fifo> {
        let (consumer, producer) = (heap(slot_bytes), heap(slot_bytes));
        let base = |fifo: &Fifo| ptr::with_exposed_provenance_mut(fifo.halves().consumer as usize);
        let bases = (base(&consumer), base(&producer));
        // SAFETY: the memory of two of them, which live as long.
        Arc::new(unsafe { Fifo::apart(bases.0, bases.1, slot_bytes, Arc::new((consumer, producer))) })
    }

    #[test]
    fn slots_are_handed_over_in_order_and_reused() {
        // The longest bytes that travel with the flag, the shortest that do not, and as many as a slot has.
        let lengths = [INLINE_BYTES, INLINE_BYTES + 1, 100];
        for (length, fifo) in lengths
            .iter()
            .flat_map(|length| [(*length, heap(100)), (*length, apart(100))])
        {
            assert!(fifo.posted().is_none());
            for round in 0..3_u64 {
                for slot in 0..SLOTS as u64 {
                    let position = fifo.free().unwrap();
                    assert_eq!(position, round * SLOTS as u64 + slot);
                    let bytes = length - slot as usize % 2;
                    // SAFETY: a free slot, and no more bytes than asked for.
                    unsafe { fifo.slot(position, bytes).write_bytes(position as u8, bytes) };
                    fifo.post(position, bytes, position as u32 + 1);
                }
                assert!(fifo.free().is_none(), "full");
                assert_eq!(fifo.size_at((round + 1) * SLOTS as u64), None, "not yet");
                for slot in 0..SLOTS as u64 {
                    let (position, bytes) = fifo.posted().unwrap();
                    assert_eq!(bytes, length - slot as usize % 2);
                    assert_eq!(u64::from(fifo.tag_at(position)), position + 1);
                    // SAFETY: a posted slot of so many bytes.
                    let bytes = unsafe { std::slice::from_raw_parts(fifo.slot(position, bytes), bytes) };
                    assert!(bytes.iter().all(|byte| *byte == position as u8));
                    fifo.release(position);
                    assert_eq!(fifo.released(), position + 1);
                }
            }
        }
    }

    #[test]
    fn a_full_fifo_has_room_after_each_release() {
        for fifo in [heap(64), apart(64)] {
            (0..SLOTS as u64).for_each(|position| fifo.post(position, 0, 1));
            for position in 0..20 {
                assert_eq!(fifo.free(), None);
                fifo.release(position);
                assert_eq!(fifo.free(), Some(position + SLOTS as u64));
                fifo.post(position + SLOTS as u64, 0, 1);
            }
        }
    }

    #[test]
    fn slots_are_where_they_are_said_to_be() {
        let (fifo, elsewhere) = (heap(100), heap(100));
        let (own, other) = (fifo.halves().consumer, elsewhere.halves().consumer);
        // SAFETY: the same memory, which lives as long.
        let kernel = unsafe { Fifo::new(ptr::with_exposed_provenance_mut(own as usize), 100, fifo.clone()) };
        let kernel = kernel.with_indirect_slots(elsewhere.clone());
        assert!(kernel.has_indirect_slots() && !kernel.are_slots_elsewhere() && !fifo.has_indirect_slots());
        let behind = own as usize + SLOTS_OFFSET;
        assert_eq!(
            kernel.slot(9, 100).addr(),
            behind + 100,
            "nobody has said anything"
        );
        fifo.set_slots_address(other);
        assert!(kernel.are_slots_elsewhere() && !fifo.are_slots_elsewhere());
        assert_eq!(kernel.slot(9, 100).addr(), other as usize + 100);
        assert_eq!(
            kernel.slot(9, INLINE_BYTES),
            fifo.slot(9, INLINE_BYTES),
            "with the flag"
        );
        assert_eq!(fifo.slot(9, 100).addr(), behind + 100, "who does not ask");
    }

    #[test]
    #[should_panic(expected = "in the memory of a device")]
    fn the_host_does_not_look_at_what_is_a_devices() {
        let halves = Halves {
            consumer: 4096,
            producer: 8192,
        };
        let _ = Fifo::on_device(halves, 64, Arc::new(())).free();
    }

    #[test]
    fn a_size_beyond_the_slot_is_cut() {
        let fifo = heap(100);
        fifo.post(0, 5000, 1);
        assert_eq!(fifo.posted(), Some((0, 100)));
        assert_eq!(fifo.size_at(1), None);
    }
}
