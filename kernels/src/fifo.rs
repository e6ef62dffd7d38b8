//! One direction of one connection on one channel: a ring of slots in memory that both its ends can reach.
//!
//! The ends are two kernels (same node), or a kernel and its proxy (the proxy moves slots over the network). It is
//! NCCL's `ncclConnInfo` (head, tail, step sizes), with a flag for each slot beside
//! its size, as in NCCL's LL128 protocol: what a consumer waits for brings the rest along.
//!
//! It has two halves. What the consumer polls, and its data, is in the one; what the producer polls is in the other. In host
//! memory they are one piece. Between two GPUs each half is in the memory of the GPU that polls it, so that nothing that
//! is waited for has to be fetched: all that goes over the link are stores that nobody waits for.

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

/// Bytes that travel in the line of a slot's flag: one line goes from core to core instead of two.
pub const INLINE_BYTES: usize = 48;

/// What the producer tells of a slot: the words that it writes for each slot and nobody else writes, in one cache line.
#[repr(C, align(64))]
struct Line {
    /// What [`flag`] says, once the slot is posted. In one word with the tag: who sees the one sees the other.
    flag: AtomicU64,
    /// Bytes posted. Between two kernels nobody writes it: both know.
    size: AtomicU32,
    /// 0.
    reserved: u32,
    /// The slot's bytes, if they fit.
    data: UnsafeCell<[u8; INLINE_BYTES]>,
}

/// Low half: the slot's position plus one; no two that are in use are alike. High half: the tag of the operation that it
/// belongs to ([`Work::tag`](crate::Work::tag)), never 0.
const fn flag(position: u64, tag: u32) -> u64 {
    (tag as u64) << 32 | low(position + 1)
}

const fn low(word: u64) -> u64 {
    word & 0xffff_ffff
}

/// A line and the one that processors fetch with it, so that who waits for a slot does not take the line of the next one
/// from its producer.
#[repr(C, align(128))]
struct Apart<T>(T);

/// Control words at the start of a FIFO's memory; the slots follow, [`Fifo::slot_bytes`] each, 4096-byte aligned. Kernels of
/// GPUs have a twin of it in `cuda/launch.cuh`.
///
/// Where the halves are apart, this is the consumer's; the producer's is `Counts` alone.
#[repr(C)]
pub struct FifoHeader {
    counts: Counts,
    /// By position modulo [`SLOTS`].
    lines: [Apart<Line>; SLOTS],
    /// Address of the slots, 0 if they are behind this; see [`Fifo::place`].
    place: Apart<AtomicU64>,
}

/// What either half begins with.
#[repr(C)]
struct Counts {
    /// The producer's alone, in its half.
    producer: Apart<Producer>,
    /// Slots released by the consumer since the beginning. Where the halves are apart, the consumer's has its own count, and
    /// the producer's what the consumer has told.
    head: Apart<AtomicU64>,
}

/// What the producer keeps for itself, in the shared memory since it may be one object now and another later.
#[repr(C)]
struct Producer {
    /// Slots posted since the beginning.
    tail: AtomicU64,
    /// What `head` was when last looked at: looking again takes its line from the consumer, who waits for it at the next
    /// release. Never beyond `head`, so that a producer that looks at that each time (a GPU's kernel) may leave it behind.
    head: AtomicU64,
}

// What `cuda/launch.cuh` says of its twins.
const _: () = assert!(size_of::<Line>() == 64);
const _: () = assert!(offset_of!(Line, size) == 8);
const _: () = assert!(offset_of!(Line, data) == 16);
const _: () = assert!(size_of::<FifoHeader>() == 256 + SLOTS * 128 + 128);
const _: () = assert!(offset_of!(FifoHeader, place) == 1280);
const _: () = assert!(offset_of!(FifoHeader, counts) == 0);
const _: () = assert!(offset_of!(Counts, producer) == 0);
const _: () = assert!(offset_of!(Counts, head) == 128);
const _: () = assert!(size_of::<Counts>() == PRODUCER_BYTES);
const _: () = assert!(offset_of!(FifoHeader, lines) == PRODUCER_BYTES);
const _: () = assert!(size_of::<FifoHeader>() <= SLOTS_OFFSET);

/// Offset of the first slot from the start of the memory.
pub const SLOTS_OFFSET: usize = 4096;

/// Bytes of the producer's half, where it is apart.
pub const PRODUCER_BYTES: usize = 256;

/// Whether all is released that was posted, by the bytes of the producer's half.
#[must_use]
pub fn is_producer_taken(half: &[u8]) -> bool {
    let word = |at: usize| half.get(at..at + size_of::<u64>());
    word(offset_of!(Counts, producer)) == word(offset_of!(Counts, head))
}

/// Where the halves of a FIFO are for the kernels of one of its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halves {
    /// The consumer's: a [`FifoHeader`], and at [`SLOTS_OFFSET`] the slots.
    pub consumer: u64,
    /// The producer's: [`PRODUCER_BYTES`] bytes, laid out as the beginning of a [`FifoHeader`]. In host memory the same address.
    pub producer: u64,
}

/// A FIFO. Both ends hold one; which side they use is theirs to keep to: one producer, one consumer.
pub struct Fifo {
    halves: Halves,
    slot_bytes: usize,
    /// The host may look at it.
    is_mapped: bool,
    /// Its slots are where [`Fifo::place`] said.
    is_placed: bool,
    /// Keeps the memory there.
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
        // SAFETY: the producer's half is the beginning of the caller's memory.
        unsafe { Self::apart(base, base, slot_bytes, memory) }
    }

    /// A FIFO whose halves are apart: the consumer's in `memory_bytes(slot_bytes)` bytes, the producer's in
    /// [`PRODUCER_BYTES`], zeroed when new.
    ///
    /// # Safety
    /// As of [`Fifo::new`], for both.
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
            is_placed: false,
            _memory: memory,
        }
    }

    /// A FIFO in memory of devices, for kernels: the host gives it on and may not look at it.
    #[must_use]
    pub fn on_device(halves: Halves, slot_bytes: usize, memory: Arc<dyn Send + Sync>) -> Self {
        Self {
            halves,
            slot_bytes,
            is_mapped: false,
            is_placed: false,
            _memory: memory,
        }
    }

    /// The same for a kernel's end of a connection whose other end, which moves slots over the network, says where they are
    /// ([`Fifo::place`]). `memory` keeps the other place.
    #[must_use]
    pub fn placed(self, memory: Arc<dyn Send + Sync>) -> Self {
        Self {
            is_placed: true,
            _memory: Arc::new((self._memory.clone(), memory)),
            ..self
        }
    }

    /// Whether who uses its slots has to look where they are.
    #[must_use]
    pub fn is_placed(&self) -> bool {
        self.is_placed
    }

    /// Whether they have been said to be elsewhere.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.is_placed && self.place_said() != 0
    }

    fn place_said(&self) -> u64 {
        // Relaxed: as said in `place`.
        self.consumer().place.0.load(Ordering::Relaxed)
    }

    /// Says for a kernel's end that asks ([`Fifo::placed`]) that the slots are at this address and not behind the header. A producer says
    /// so before it posts the first slot, a consumer before the kernel is launched that fills that; from then on it stays as it is.
    pub fn place(&self, slots: u64) {
        // Relaxed: the flag of the first slot, or the launch, orders it.
        self.consumer().place.0.store(slots, Ordering::Relaxed);
    }

    fn consumer(&self) -> &FifoHeader {
        assert!(self.is_mapped, "a FIFO in the memory of a device");
        // SAFETY: `apart` was given an address that is mapped while `_memory` lives, and the header is atomics and cells.
        unsafe { &*ptr::with_exposed_provenance(self.halves.consumer as usize) }
    }

    fn producer(&self) -> &Counts {
        assert!(self.is_mapped, "a FIFO in the memory of a device");
        // SAFETY: as above.
        unsafe { &*ptr::with_exposed_provenance(self.halves.producer as usize) }
    }

    /// Where it is: what a device that reaches the same memory is given.
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
        // Relaxed: both are ours alone to write. What we did not acquire ourselves in this call we did in an earlier one.
        let (tail, seen) = (tail.load(Ordering::Relaxed), head.load(Ordering::Relaxed));
        let room = |head: u64| (tail.wrapping_sub(head) < SLOTS as u64).then_some(tail);
        room(seen).or_else(|| {
            // Acquire: pairs with `release`; the consumer is done with the slot before we overwrite it.
            let now = self.producer().head.0.load(Ordering::Acquire);
            head.store(now, Ordering::Relaxed);
            room(now)
        })
    }

    /// Producer: publishes the slot at the position that [`Fifo::free`] gave, holding `bytes` bytes of the operation
    /// with this tag, which were written to [`Fifo::slot`].
    pub fn post(&self, position: u64, bytes: usize, tag: u32) {
        let line = self.line(position);
        line.size.store(bytes as u32, Ordering::Relaxed);
        // Release: the slot's bytes and size are written before the consumer sees the flag.
        line.flag.store(flag(position, tag), Ordering::Release);
        // Relaxed: the producer's own.
        self.producer()
            .producer
            .0
            .tail
            .store(position + 1, Ordering::Relaxed);
    }

    /// Consumer: tag of the slot at a position that [`Fifo::posted`] or [`Fifo::size_at`] said is posted.
    #[must_use]
    pub fn tag_at(&self, position: u64) -> u32 {
        // Relaxed: those have acquired the flag.
        (self.line(position).flag.load(Ordering::Relaxed) >> 32) as u32
    }

    /// Consumer: position and size of the oldest posted slot.
    #[must_use]
    pub fn posted(&self) -> Option<(u64, usize)> {
        let head = self.consumer().counts.head.0.load(Ordering::Relaxed); // ours alone to write
        self.size_at(head).map(|bytes| (head, bytes))
    }

    /// Consumer: size of the slot at `position` (the oldest, or one of the [`SLOTS`] from it on), if it is posted.
    #[must_use]
    pub fn size_at(&self, position: u64) -> Option<usize> {
        let line = self.line(position);
        // Acquire: pairs with `post`; the slot's bytes and size are there.
        // The size comes from the peer: never trust it beyond the slot.
        (low(line.flag.load(Ordering::Acquire)) == low(position + 1))
            .then(|| (line.size.load(Ordering::Relaxed) as usize).min(self.slot_bytes))
    }

    /// Consumer: gives back the oldest slot, at the position that [`Fifo::posted`] gave.
    pub fn release(&self, position: u64) {
        if self.halves.consumer != self.halves.producer {
            // Relaxed: the consumer's own.
            self.consumer()
                .counts
                .head
                .0
                .store(position + 1, Ordering::Relaxed);
        }
        // Release: our reads of the slot are done before the producer sees it free.
        self.producer().head.0.store(position + 1, Ordering::Release);
    }

    /// Slots released so far: what a producer's end has seen consumed.
    #[must_use]
    pub fn released(&self) -> u64 {
        self.producer().head.0.load(Ordering::Acquire)
    }

    /// Where `bytes` bytes of the slot at a position are, at most [`Fifo::slot_bytes`]: both ends must ask with the size
    /// that is posted.
    #[must_use]
    pub fn slot(&self, position: u64, bytes: usize) -> *mut u8 {
        if bytes <= INLINE_BYTES {
            return self.line(position).data.get().cast();
        }
        assert!(self.is_mapped, "a FIFO in the memory of a device");
        let slots = match self.is_away() {
            true => self.place_said(),
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
        let kernel = kernel.placed(elsewhere.clone());
        assert!(kernel.is_placed() && !kernel.is_away() && !fifo.is_placed());
        let behind = own as usize + SLOTS_OFFSET;
        assert_eq!(
            kernel.slot(9, 100).addr(),
            behind + 100,
            "nobody has said anything"
        );
        fifo.place(other);
        assert!(kernel.is_away() && !fifo.is_away());
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
