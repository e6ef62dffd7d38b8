// Long broadcasts among more than two ranks. The root sends each other rank one part, and that rank relays it to the rest, one chunk behind. So
// each link carries all bytes once. If the root sent everything, its link would carry all bytes once per rank.
//
// A part is written to its final place and relayed from there. Nothing lies in between, and nothing is overwritten.
#pragma once

#include "chunk_flags.cuh"
#include "zero_copy.cuh"

namespace ringsight {

// One block. `RANKS` is the number of ranks, or 0 for any.
template <u32 RANKS>
class RelayBlock {
 public:
  DEVICE RelayBlock(const Collective& arguments, const BufferAddresses& places, u32 block, u32 blocks)
      : arguments_(arguments), addresses_(places), flags_(arguments, block), block_(block), blocks_(blocks) {}

  // All threads call this. False: give up.
  DEVICE INLINE bool run() {
    const bool moves = Barrier<RANKS>::moves_data(), signals = flags_.is_signaller();
    const u64 stride = static_cast<u64>(blocks_) * arguments_.push_chunk;
    // Equal for all blocks.
    const u32 all = static_cast<u32>((arguments_.longest_part + stride - 1) / stride);
    for (u32 chunk = 0; chunk <= all; chunk++) {
      bool here = true;
      if (me() == arguments_.root) {
        if (moves && chunk < all) send(chunk);
        if (signals && chunk > 0) flags_.signal(chunk);
      } else {
        if (signals && chunk < all) here = flags_.wait(chunk + 1, arguments_.root);
        if (moves && chunk > 0) pass_on(chunk - 1);
      }
      if (block_any(!here)) return false;
      if (signals) flags_.moved(chunk + 1);
    }
    flags_.end(all);
    return true;
  }

 private:
  static constexpr u32 PACKS = 8, BYTES = PACKS * warp_threads() * sizeof(Pack);

  DEVICE INLINE u32 me() const { return arguments_.call.rank; }
  DEVICE INLINE u32 ranks() const { return RANKS != 0 ? RANKS : arguments_.call.ranks; }
  DEVICE INLINE u32 after(u32 hop) const { return me() + hop < ranks() ? me() + hop : me() + hop - ranks(); }
  DEVICE INLINE u32 element_bytes() const { return size_of(arguments_.call.data_type); }

  // Calls `todo` with this warp's offsets of a chunk, relative to each part.
  template <class Do>
  DEVICE INLINE void for_mine(u32 chunk, Do todo) const {
    const u64 start = (static_cast<u64>(chunk) * blocks_ + block_) * arguments_.push_chunk;
    const u32 warps = Barrier<RANKS>::data_threads() / warp_threads();
    for (u32 at = thread_index() / warp_threads() * BYTES; at < arguments_.push_chunk; at += warps * BYTES) todo(start + at);
  }
  // Root: sends each other rank a chunk of its part, and copies it to its own receive buffer.
  DEVICE INLINE void send(u32 chunk) const {
    const bool keeps = arguments_.own != arguments_.result;
    for (u32 hop = 1; hop < ranks(); hop++) {
      const u32 rank = after(hop);
      const u64 to = addresses_.to[rank], kept = arguments_.from[rank] - arguments_.own + arguments_.result;
      for_mine(chunk, [&](u64 at) {
        load_slice<PACKS>(arguments_.from[rank], arguments_.sends[rank], at, element_bytes(), [&](u64 at, u64 left, const Pack& pack) {
          store_some(to + at, left, element_bytes(), pack);
          if (keeps) store_some(kept + at, left, element_bytes(), pack);
        });
      });
    }
  }
  // Other ranks: relays what has arrived of this rank's part to all ranks but the root.
  DEVICE INLINE void pass_on(u32 chunk) const {
    for_mine(chunk, [&](u64 at) {
      load_slice<PACKS>(arguments_.result, arguments_.result_bytes, at, element_bytes(), [&](u64 at, u64 left, const Pack& pack) {
        for (u32 hop = 1; hop < ranks(); hop++) {
          if (after(hop) != arguments_.root) store_some(addresses_.to[after(hop)] + at, left, element_bytes(), pack);
        }
      });
    });
  }

  const Collective& arguments_;
  const BufferAddresses& addresses_;
  const ChunkFlags<RANKS> flags_;
  const u32 block_, blocks_;
};

// Not inlined: inlined code would share registers with everything else.
template <u32 RANKS>
DEVICE NOINLINE bool relay_all(const Collective& arguments, const BufferAddresses& places, u32 block, u32 blocks) {
  return RelayBlock<RANKS>(arguments, places, block, blocks).run();
}

}  // namespace ringsight
