// Reductions whose bytes are moved by copy engines: each rank has a part, as in a reduction straight between buffers, and goes through it piece by
// piece. What the others have for a piece is copied into memory beside it, this kernel reduces it from there, and of an all_reduce the result is copied into the
// others' receive buffers. The host queues copies and kernels; those of gates.cuh stand before and behind all of them, and between them wherever one rank has to
// know what others have done: this kernel waits for nobody, so it may have any number of blocks.
//
// - A piece has come when all others' copies of it are done: a meeting in the stream of the kernels, behind this rank's copies of it and before the kernel that
//   reduces it.
// - Two slots are enough, taken in turn. Before the copies of piece p + 2 begin, which go into the slots of piece p, there is a meeting in the stream of the
//   copies, behind the kernel that has reduced piece p: it has been reduced on all ranks. All ranks begin those copies together, too, so that they keep
//   sending to one rank each.
// - Results are those of the other kernels, bit by bit: contributions are combined in the order of ranks.
#pragma once

#include "report.cuh"
#include "straight.cuh"

namespace ringsight {

// One block. Of the arguments, `from` says where the others' contributions to the piece have come, `own` and `result` are this rank's, of
// `result_bytes` bytes. The result may be where one of the contributions is.
template <class E, class Op, u32 RANKS>
DEVICE INLINE void reduce_piece(const Exchange& arguments, u32 block, u32 blocks) {
  // What has not come is not reduced.
  if (block_any(thread_index() == 0 && Report(arguments.call.head).has_given_up())) return;
  using Words = Folding<E, Op, RANKS, RANKS>;
  constexpr u32 PACKS = of_all_ranks<8, RANKS>();
  const Words folding(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks);
  // Nothing is passed on.
  const Places nowhere{};
  const auto from = [&](u32 rank) { return arguments.from[rank]; };
  const Reduction<PACKS, Words, decltype(from)> reduction(arguments, folding, nowhere, from);
  const u32 warps = threads() / warp_threads(), warp = block * warps + thread_index() / warp_threads();
  const u64 stride = static_cast<u64>(blocks) * warps * reduction.BYTES;
  for (u64 at = static_cast<u64>(warp) * reduction.BYTES; at < arguments.result_bytes; at += stride) reduction.run(at);
}

// The kernels: {name, element, combination, ranks}; src/cuda/pieces.rs chooses. Sums have a factor, see exchange.cuh.
#define RINGSIGHT_PIECES(X) RINGSIGHT_SUMS(X, ringsight_piece)

}  // namespace ringsight
