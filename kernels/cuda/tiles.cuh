// The reducing kernel of copy-engine reductions. Each rank owns a part of the result and goes through it tile by tile. Copy engines write the other
// ranks' contributions to a tile into scratch memory, this kernel reduces them, and in an AllReduce copy engines write the result into the other ranks'
// receive buffers. The host queues copies and kernels, and the barrier kernels of copy_engine.cuh between them. This kernel waits for nobody, so
// it may have any number of blocks.
//
// - A tile has arrived when all other ranks' copies are done: a barrier runs in the stream of the kernels, behind this rank's copies of the tile and
//   before the kernel that reduces it.
// - Two slots, taken in turn, are enough. The copies of tile n + 2 go into the slots of tile n. Before them, a barrier runs in the stream of the
//   copies, behind the kernel that has reduced tile n, so tile n is reduced on all ranks. The barrier also lets all ranks begin those copies
//   together, so that no two ranks copy to one rank.
// - Results have the same bits as those of the other kernels: contributions are combined in the order of ranks.
#pragma once

#include "report.cuh"
#include "zero_copy.cuh"

namespace ringsight {

// One block. `from`: the other ranks' contributions to the tile; `own` and `result`: this rank's, of `result_bytes` bytes. The result may overwrite
// one of the contributions.
template <class E, class Op, u32 RANKS>
DEVICE INLINE void reduce_tile(const Collective& arguments, u32 block, u32 blocks) {
  // After a give-up the contributions may not have arrived.
  if (block_any(thread_index() == 0 && Report(arguments.call.head).has_given_up())) return;
  using Words = Folding<E, Op, RANKS, RANKS>;
  constexpr u32 PACKS = of_all_ranks<8, RANKS>();
  const Words folding(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks);
  // Nothing is forwarded.
  const BufferAddresses nowhere{};
  const auto from = [&](u32 rank) { return arguments.from[rank]; };
  const Reduction<PACKS, Words, decltype(from)> reduction(arguments, folding, nowhere, from);
  const u32 warps = threads() / warp_threads(), warp = block * warps + thread_index() / warp_threads();
  const u64 stride = static_cast<u64>(blocks) * warps * reduction.BYTES;
  for (u64 at = static_cast<u64>(warp) * reduction.BYTES; at < arguments.result_bytes; at += stride) reduction.run(at);
}

// The kernels: {name, element, combination, ranks}; src/cuda/tiles.rs chooses. Sum kernels have a factor, see collective.cuh.
#define RINGSIGHT_TILES(X) RINGSIGHT_SUMS(X, ringsight_tile)

}  // namespace ringsight
