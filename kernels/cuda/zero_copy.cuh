// Zero-copy: bytes are written to where they belong, or read from where they are and reduced, with no memory in between.
//
// Whether all ranks can do so is agreed in buffer_addresses.cuh.
//
// - Earlier contents of the buffers are visible: the line with the address comes from a kernel that began after the work before it in its
//   stream had ended, visible to the whole system. Nothing is read or written at the address before the line is seen.
// - No kernel ends before all other ranks are done with its buffers: `Barrier::wait_for_exit`.
// - Results have the same bits as with LL128: all contributions to an element are combined in the order of ranks.
#pragma once

#include "fold.cuh"
#include "buffer_addresses.cuh"
#include "words.cuh"

namespace ringsight {

DEVICE INLINE Pack* pack_at(u64 address) { return reinterpret_cast<Pack*>(address); }

// Loads 16 bytes, or the `left` bytes that there are.
DEVICE INLINE Pack load_some(u64 address, u64 left, u32 element_bytes) {
  const u8* from = reinterpret_cast<const u8*>(address);
  if (left >= sizeof(Pack) && is_aligned(from, sizeof(Pack))) return load_pack(pack_at(address));
  return Pack{{load_elements(from, left, element_bytes), left > 8 ? load_elements(from + 8, left - 8, element_bytes) : 0}};
}
// Stores them to an address that is aligned to 16.
DEVICE INLINE void store_some(u64 address, u64 left, u32 element_bytes, const Pack& pack) {
  if (left >= sizeof(Pack)) {
    *pack_at(address) = pack;
    return;
  }
  u8* to = reinterpret_cast<u8*>(address);
  store_elements(to, left, element_bytes, pack.words[0]);
  if (left > 8) store_elements(to + 8, left - 8, element_bytes, pack.words[1]);
}

// One warp: loads bytes `at` to `end` of a buffer, at most `PACKS` packs per thread, and passes them to `put(at, left, pack)`. The destination
// must be aligned at `at`. An unaligned source is slower.
template <u32 PACKS, class Put>
DEVICE INLINE void load_slice(u64 from, u64 end, u64 at, u32 element_bytes, Put put) {
  constexpr u32 EACH = warp_threads() * sizeof(Pack), MOST = PACKS * EACH;
  if (at >= end) return;
  const u32 first = warp_thread() * sizeof(Pack);
  const u32 left = end - at < MOST ? static_cast<u32>(end - at) : MOST;
  from += at;
  u32 place = first;
  if (from % sizeof(Pack) == 0) {
    const u32 whole = left / sizeof(Pack) * sizeof(Pack);
    Pack some[PACKS];
    UNROLL
    for (u32 i = 0; i < PACKS; i++) {
      if (first + i * EACH < whole) some[i] = *pack_at(from + first + i * EACH);
    }
    UNROLL
    for (u32 i = 0; i < PACKS; i++) {
      if (first + i * EACH < whole) put(at + first + i * EACH, sizeof(Pack), some[i]);
    }
    // Then one thread takes the rest that is no whole pack.
    place = first == whole % EACH ? whole : left;
  }
  for (; place < left; place += EACH) put(at + place, left - place, load_some(from + place, left - place, element_bytes));
}
// The same, copied to another buffer.
template <u32 PACKS>
DEVICE INLINE void copy_slice(u64 to, u64 from, u64 end, u64 at, u32 element_bytes) {
  load_slice<PACKS>(from, end, at, element_bytes, [=](u64 at, u64 left, const Pack& pack) { store_some(to + at, left, element_bytes, pack); });
}

// A number of things per rank that fit in the registers, if one other rank would have `COUNT`.
template <u32 COUNT, u32 RANKS>
DEVICE constexpr u32 of_all_ranks() { return RANKS <= 2 ? COUNT : RANKS <= 4 ? COUNT / 2 : COUNT / 4; }

// Combines the packs of all ranks. `mine` is the pack of rank `own`.
template <class Words>
DEVICE INLINE Pack fold_packs(const Words& folding, const Pack (&all)[Words::MAX_RANKS], const Pack& mine, u32 own) {
  Pack sum;
  UNROLL
  for (u32 word = 0; word < 2; word++) {
    u64 words[Words::MAX_RANKS];
    UNROLL
    for (u32 rank = 0; rank < Words::MAX_RANKS; rank++) words[rank] = rank == own ? mine.words[word] : all[rank].words[word];
    sum.words[word] = folding.reduce(words);
  }
  return sum;
}

// A rank's part of a zero-copy reduction, as one thread of a warp sees it. `from(rank)`: where that rank's contribution begins. It works in
// place, since one thread of one rank reads and then writes each element of all buffers.
template <u32 PACKS, class Words, class From>
class Reduction {
 public:
  static constexpr u32 MAX_RANKS = Words::MAX_RANKS, EACH = warp_threads() * sizeof(Pack), BYTES = PACKS * EACH;
  // Loaded contributions: those of the other ranks, and this rank's own.
  struct Held {
    Pack all[PACKS][MAX_RANKS];
    Pack mine[PACKS];
  };

  DEVICE Reduction(const Collective& arguments, const Words& folding, const BufferAddresses& places, From from)
      : folding_(folding),
        addresses_(places),
        from_(from),
        own_(arguments.own),
        result_(arguments.root == NONE ? arguments.result : places.to[arguments.root]),
        bytes_(arguments.result_bytes),
        me_(arguments.call.rank),
        forwards_(arguments.forwards && arguments.root == NONE) {}

  // Whether all bytes of a slice that begins at `at` exist.
  DEVICE INLINE bool is_whole(u64 at) const { return at + BYTES <= bytes_; }

  // One warp: loads a whole slice.
  DEVICE INLINE void load(Held& held, u64 at) const {
    at += warp_thread() * sizeof(Pack);
    UNROLL
    for (u32 i = 0; i < PACKS; i++) {
      UNROLL
      for (u32 rank = 0; rank < MAX_RANKS; rank++) {
        if (rank < ranks() && rank != me_) held.all[i][rank] = load_pack(pack_at(from_(rank) + at + i * EACH));
      }
    }
    UNROLL
    for (u32 i = 0; i < PACKS; i++) held.mine[i] = *pack_at(own_ + at + i * EACH);
  }
  // Reduces it, and stores the result for every rank that needs it.
  DEVICE INLINE void give(const Held& held, u64 at) const {
    at += warp_thread() * sizeof(Pack);
    UNROLL
    for (u32 i = 0; i < PACKS; i++) {
      const Pack sum = fold_packs(folding_, held.all[i], held.mine[i], me_);
      for (u32 hop = 1; forwards_ && hop < ranks(); hop++) *pack_at(addresses_.to[after(hop)] + at + i * EACH) = sum;
      *pack_at(result_ + at + i * EACH) = sum;
    }
  }
  // A slice that is not whole: one pack after the other.
  DEVICE INLINE void end(u64 at) const {
    const u32 element_bytes = folding_.element_bytes();
    for (at += warp_thread() * sizeof(Pack); at < bytes_; at += EACH) {
      const u64 left = bytes_ - at;
      Pack all[MAX_RANKS];
      UNROLL
      for (u32 rank = 0; rank < MAX_RANKS; rank++) {
        if (rank < ranks()) all[rank] = load_some((rank == me_ ? own_ : from_(rank)) + at, left, element_bytes);
      }
      const Pack sum = fold_packs(folding_, all, all[0], ranks());
      store_some(result_ + at, left, element_bytes, sum);
      for (u32 hop = 1; forwards_ && hop < ranks(); hop++) store_some(addresses_.to[after(hop)] + at, left, element_bytes, sum);
    }
  }
  // Any slice.
  DEVICE INLINE void run(u64 at) const {
    if (!is_whole(at)) return end(at);
    Held held;
    load(held, at);
    give(held, at);
  }

 private:
  DEVICE INLINE u32 ranks() const { return folding_.ranks(); }
  DEVICE INLINE u32 after(u32 hop) const { return me_ + hop < ranks() ? me_ + hop : me_ + hop - ranks(); }

  const Words& folding_;
  const BufferAddresses& addresses_;
  const From from_;
  // Copies of arguments, which the compiler would otherwise load again after every store.
  const u64 own_, result_, bytes_;
  const u32 me_;
  const bool forwards_;
};

}  // namespace ringsight
