// Long broadcasts among more than two ranks: the root sends each other rank a part, and that passes it on to the rest, a chunk behind. So each link carries all
// bytes once, where the root's alone would carry them once for each other rank.
//
// A part is written where it is to be in the end, and read from there by who passes it on: nothing lies between, and nothing is overwritten.
#pragma once

#include "chunks.cuh"
#include "straight.cuh"

namespace ringsight {

// One block; of any number of ranks, or of `RANKS`.
template <u32 RANKS>
class RelayBlock {
 public:
  DEVICE RelayBlock(const Exchange& arguments, const Places& places, u32 block, u32 blocks)
      : arguments_(arguments), places_(places), chunks_(arguments, block), block_(block), blocks_(blocks) {}

  // By all threads; false if it is to give up.
  DEVICE INLINE bool run() {
    const bool moves = Meeting<RANKS>::moves(), tells = chunks_.tells();
    const u64 stride = static_cast<u64>(blocks_) * arguments_.push;
    // Of all blocks alike.
    const u32 all = static_cast<u32>((arguments_.piece + stride - 1) / stride);
    for (u32 chunk = 0; chunk <= all; chunk++) {
      bool here = true;
      if (me() == arguments_.root) {
        if (moves && chunk < all) send(chunk);
        if (tells && chunk > 0) chunks_.tell(chunk);
      } else {
        if (tells && chunk < all) here = chunks_.have_told(chunk + 1, arguments_.root);
        if (moves && chunk > 0) pass_on(chunk - 1);
      }
      if (block_any(!here)) return false;
      if (tells) chunks_.moved(chunk + 1);
    }
    chunks_.end(all);
    return true;
  }

 private:
  static constexpr u32 PACKS = 8, BYTES = PACKS * warp_threads() * sizeof(Pack);

  DEVICE INLINE u32 me() const { return arguments_.call.rank; }
  DEVICE INLINE u32 ranks() const { return RANKS != 0 ? RANKS : arguments_.call.ranks; }
  DEVICE INLINE u32 after(u32 hop) const { return me() + hop < ranks() ? me() + hop : me() + hop - ranks(); }
  DEVICE INLINE u32 element_bytes() const { return size_of(arguments_.call.data_type); }

  // What this warp has to do of a chunk, by where it begins in each part.
  template <class Do>
  DEVICE INLINE void for_mine(u32 chunk, Do todo) const {
    const u64 start = (static_cast<u64>(chunk) * blocks_ + block_) * arguments_.push;
    const u32 warps = Meeting<RANKS>::movers() / warp_threads();
    for (u32 at = thread_index() / warp_threads() * BYTES; at < arguments_.push; at += warps * BYTES) todo(start + at);
  }
  // By the root: to each other rank a chunk of its part, and to where this one wants it, too.
  DEVICE INLINE void send(u32 chunk) const {
    const bool keeps = arguments_.own != arguments_.result;
    for (u32 hop = 1; hop < ranks(); hop++) {
      const u32 rank = after(hop);
      const u64 to = places_.to[rank], kept = arguments_.from[rank] - arguments_.own + arguments_.result;
      for_mine(chunk, [&](u64 at) {
        load_stretch<PACKS>(arguments_.from[rank], arguments_.sends[rank], at, element_bytes(), [&](u64 at, u64 left, const Pack& pack) {
          store_some(to + at, left, element_bytes(), pack);
          if (keeps) store_some(kept + at, left, element_bytes(), pack);
        });
      });
    }
  }
  // By any other rank: what has come of its part to all but the root.
  DEVICE INLINE void pass_on(u32 chunk) const {
    for_mine(chunk, [&](u64 at) {
      load_stretch<PACKS>(arguments_.result, arguments_.result_bytes, at, element_bytes(), [&](u64 at, u64 left, const Pack& pack) {
        for (u32 hop = 1; hop < ranks(); hop++) {
          if (after(hop) != arguments_.root) store_some(places_.to[after(hop)] + at, left, element_bytes(), pack);
        }
      });
    });
  }

  const Exchange& arguments_;
  const Places& places_;
  const Chunks<RANKS> chunks_;
  const u32 block_, blocks_;
};

// A function of its own: what is inlined shares registers with all else.
template <u32 RANKS>
DEVICE NOINLINE bool relay_all(const Exchange& arguments, const Places& places, u32 block, u32 blocks) {
  return RelayBlock<RANKS>(arguments, places, block, blocks).run();
}

}  // namespace ringsight
