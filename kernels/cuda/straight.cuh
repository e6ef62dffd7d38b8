// What goes straight between callers' buffers: written where it is to be, or read where it is and reduced, with nothing in between.
//
// Whether it can all ranks' kernels find out: places.cuh.
//
// - What was in the buffers before is there: the line comes from a kernel that began when what was before it in its stream had ended,
//   visible to the whole system. Addresses are what lines say, so nothing is read from there, or written, before the line is seen.
// - Nobody's kernel ends before all others are done with its buffers: `Meeting::leave`.
// - Results are the same, bit by bit, as those in steps: all contributions to an element are combined in the order of ranks.
#pragma once

#include "fold.cuh"
#include "places.cuh"
#include "words.cuh"

namespace ringsight {

DEVICE INLINE Pack* pack_at(u64 address) { return reinterpret_cast<Pack*>(address); }

// 16 bytes, or what there is of them.
DEVICE INLINE Pack load_some(u64 address, u64 left, u32 element_bytes) {
  const u8* from = reinterpret_cast<const u8*>(address);
  if (left >= sizeof(Pack) && is_aligned(from, sizeof(Pack))) return load_pack(pack_at(address));
  return Pack{{load_elements(from, left, element_bytes), left > 8 ? load_elements(from + 8, left - 8, element_bytes) : 0}};
}
// The same, to an address of 16 bytes.
DEVICE INLINE void store_some(u64 address, u64 left, u32 element_bytes, const Pack& pack) {
  if (left >= sizeof(Pack)) {
    *pack_at(address) = pack;
    return;
  }
  u8* to = reinterpret_cast<u8*>(address);
  store_elements(to, left, element_bytes, pack.words[0]);
  if (left > 8) store_elements(to + 8, left - 8, element_bytes, pack.words[1]);
}

// By a warp: loads what there is of a buffer, from `at` up to `end`, as far as `PACKS` of each thread go, and gives it to `put(at, left, pack)`. What it
// is written to begins where packs do, with `at`; what is read does so, too, or it takes longer.
template <u32 PACKS, class Put>
DEVICE INLINE void load_stretch(u64 from, u64 end, u64 at, u32 element_bytes, Put put) {
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
    // Then the thread whose it is takes what is left of a pack.
    place = first == whole % EACH ? whole : left;
  }
  for (; place < left; place += EACH) put(at + place, left - place, load_some(from + place, left - place, element_bytes));
}
// The same, copied to another buffer.
template <u32 PACKS>
DEVICE INLINE void copy_stretch(u64 to, u64 from, u64 end, u64 at, u32 element_bytes) {
  load_stretch<PACKS>(from, end, at, element_bytes, [=](u64 at, u64 left, const Pack& pack) { store_some(to + at, left, element_bytes, pack); });
}

// Of something for each rank, as many as registers allow where one rank would have `COUNT`.
template <u32 COUNT, u32 RANKS>
DEVICE constexpr u32 of_all_ranks() { return RANKS <= 2 ? COUNT : RANKS <= 4 ? COUNT / 2 : COUNT / 4; }

// Of the packs of all ranks, of which `mine` is that of rank `own`.
template <class Words>
DEVICE INLINE Pack fold_packs(const Words& folding, const Pack (&all)[Words::MOST_RANKS], const Pack& mine, u32 own) {
  Pack sum;
  UNROLL
  for (u32 word = 0; word < 2; word++) {
    u64 words[Words::MOST_RANKS];
    UNROLL
    for (u32 rank = 0; rank < Words::MOST_RANKS; rank++) words[rank] = rank == own ? mine.words[word] : all[rank].words[word];
    sum.words[word] = folding.reduce(words);
  }
  return sum;
}

// A rank's part of a reduction that goes straight, as one thread of a warp sees it; `from`: where the contribution of another rank begins. In place as
// well: each element of all buffers is read, and then written, by one thread of one rank.
template <u32 PACKS, class Words, class From>
class Reduction {
 public:
  static constexpr u32 MOST_RANKS = Words::MOST_RANKS, EACH = warp_threads() * sizeof(Pack), BYTES = PACKS * EACH;
  // Contributions that are on their way: those of other ranks, and this one's.
  struct Held {
    Pack all[PACKS][MOST_RANKS];
    Pack mine[PACKS];
  };

  DEVICE Reduction(const Exchange& arguments, const Words& folding, const Places& places, From from)
      : folding_(folding),
        places_(places),
        from_(from),
        own_(arguments.own),
        result_(arguments.root == NONE ? arguments.result : places.to[arguments.root]),
        bytes_(arguments.result_bytes),
        me_(arguments.call.rank),
        passes_(arguments.passes && arguments.root == NONE) {}

  // Whether what begins at `at` has all bytes of a stretch.
  DEVICE INLINE bool is_whole(u64 at) const { return at + BYTES <= bytes_; }

  // By a warp, of a whole stretch.
  DEVICE INLINE void load(Held& held, u64 at) const {
    at += warp_thread() * sizeof(Pack);
    UNROLL
    for (u32 i = 0; i < PACKS; i++) {
      UNROLL
      for (u32 rank = 0; rank < MOST_RANKS; rank++) {
        if (rank < ranks() && rank != me_) held.all[i][rank] = load_pack(pack_at(from_(rank) + at + i * EACH));
      }
    }
    UNROLL
    for (u32 i = 0; i < PACKS; i++) held.mine[i] = *pack_at(own_ + at + i * EACH);
  }
  // Reduces it, and gives the result to all who need it.
  DEVICE INLINE void give(const Held& held, u64 at) const {
    at += warp_thread() * sizeof(Pack);
    UNROLL
    for (u32 i = 0; i < PACKS; i++) {
      const Pack sum = fold_packs(folding_, held.all[i], held.mine[i], me_);
      for (u32 hop = 1; passes_ && hop < ranks(); hop++) *pack_at(places_.to[after(hop)] + at + i * EACH) = sum;
      *pack_at(result_ + at + i * EACH) = sum;
    }
  }
  // What there is of one that is not whole: one by one.
  DEVICE INLINE void end(u64 at) const {
    const u32 element_bytes = folding_.element_bytes();
    for (at += warp_thread() * sizeof(Pack); at < bytes_; at += EACH) {
      const u64 left = bytes_ - at;
      Pack all[MOST_RANKS];
      UNROLL
      for (u32 rank = 0; rank < MOST_RANKS; rank++) {
        if (rank < ranks()) all[rank] = load_some((rank == me_ ? own_ : from_(rank)) + at, left, element_bytes);
      }
      const Pack sum = fold_packs(folding_, all, all[0], ranks());
      store_some(result_ + at, left, element_bytes, sum);
      for (u32 hop = 1; passes_ && hop < ranks(); hop++) store_some(places_.to[after(hop)] + at, left, element_bytes, sum);
    }
  }
  // Any.
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
  const Places& places_;
  const From from_;
  // Of the arguments, which may be read again after every store.
  const u64 own_, result_, bytes_;
  const u32 me_;
  const bool passes_;
};

}  // namespace ringsight
